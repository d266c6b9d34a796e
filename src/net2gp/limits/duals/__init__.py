"""What an activation does to covariances: E[φ(u)φ(v)] and E[φ'(u)φ'(v)] for Gaussians u and v.

An activation module, or the call of a torch function that equals one, goes into `activation_of`; an
`Activation` comes out, whose methods map tensors of covariances and variances to tensors of
expectations. Smooth functions and powers with elementary expectations have closed forms, piecewise
linear functions have Owen's function, and every other function has quadrature, with interpolation tables
where there are many pairs.
"""
