"""Expectations of functions of one number under Gaussians, by quadrature and by series.

A function goes in that is smooth apart from kinks and jumps (which are searched for if they are not given),
with variances, or with variances and covariances of pairs. E[f(u)] and E[f(u) g(v)] come out in float64,
with derivatives that autograd can use. `expectations` is the entrance: it cuts the functions at their
`kinks` and chooses for each pair between a series of Hermite polynomials, polar quadrature in the plane,
and a rule for pairs of high correlation. Nothing here knows about networks.
"""
