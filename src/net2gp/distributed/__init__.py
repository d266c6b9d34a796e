"""Work that many processes share, on one machine or on several with a common disk.

A kernel and points go in; out comes a store: the kernel matrix in a folder that any number of processes fill.
"""

from net2gp.distributed.store import KernelStore, StoredKernel, kernel_store

__all__ = ["KernelStore", "StoredKernel", "kernel_store"]
