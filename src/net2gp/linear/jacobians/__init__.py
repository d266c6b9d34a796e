"""The Jacobian by the structure of its layers, products with it, and the kernels made of it.

A linearized network and points go in. `capture` gives a factor for each parameter, `jacobian` all of J,
`products` and `passes` J w and Jᵀu, and `tangent` and `trace` the kernels J diag(prior_var) Jᵀ, tile by
tile from `pieces`.
"""
