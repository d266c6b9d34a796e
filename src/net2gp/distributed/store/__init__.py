"""A kernel matrix on disk, tile by tile.

A kernel and points go in, and tiles are computed by whoever calls `fill`; out comes a kernel that reads them.
"""

from net2gp.distributed.store.stored_kernel import StoredKernel
from net2gp.distributed.store.stores import KernelStore, kernel_store

__all__ = ["KernelStore", "StoredKernel", "kernel_store"]
