"""Kernel matrices tile by tile, on which a limit spends its time.

A plan, a prior and the data of one or two batches go in; the matrices of both kernels, or their diagonals,
come out. Tiles are sized for the cache. They are computed by the program of the network, by one polynomial
in the angle for all layers if the kernels depend on nothing else, or by a function compiled for a GPU.
"""
