"""Curvature of the loss in the parameters, summed over data.

A linearized network, data and a likelihood go in; Σ JᵀΛJ comes out as an operator (`ggn`), or as the
gradients and the diagonal from which `net2gp.posteriors.weights` makes its structures (`curvature`). `head`
and `beside` find the last linear layer.
"""
