"""Finite networks with the law of a limit, and kernels as averages over them.

A module and a prior go into `twin`, and a wider, freshly drawn module of the same architecture comes
out, once `channels` has found the numbers that may grow. Batches go into `monte_carlo_kernel`, and
kernels with their standard errors come out, which average outputs and gradients over `draws` of the
parameters.
"""
