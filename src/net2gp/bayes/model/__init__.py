"""A Bayesian network: a network, a prior of its parameters and a likelihood."""
