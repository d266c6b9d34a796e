"""Curvature of the loss in the parameters, summed over data.

A linearized network, data and a likelihood go in; Σ JᵀΛJ comes out as an operator (`ggn`), or whole, as
a diagonal, in Kronecker factors, of low rank or of some parameters (`curvature`, `kron_blocks`). `head`
and `beside` find the last linear layer, whose curvature `last_layer` takes from its inputs alone.
"""
