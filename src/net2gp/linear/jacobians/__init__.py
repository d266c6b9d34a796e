"""The Jacobian by the structure of its layers, products with it, and the kernels made from it.

A linearized network and points go in. `capture` computes a factor per parameter, `jacobian` all of J,
`products` and `passes` compute J w and Jᵀu, and `tangent`, `trace` and `kept` compute the kernels
J diag(prior_var) Jᵀ, tile by tile from `pieces`.
"""
