"""Finite networks with the law of a limit, and kernels as averages over them.

A module and a prior go into `twin`, and a wider, freshly drawn module of the same architecture comes
out; `channels` finds the numbers of channels that may grow. Batches go into `monte_carlo_kernel`, and
kernels with standard errors come out: averages over `draws` of the parameters.
"""
