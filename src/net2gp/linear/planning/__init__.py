"""What is known of a network for inputs of one shape, and how it is checked.

A linearized network and points go into `probe`, and a `Plan` comes out: which parameters have structured
gradients, and where their layers keep the points of a batch (`layouts`, `uses`). `plans` is the value in
which the linearization holds plans, `proof` compares gradients with plain reverse mode, and `loops` is the
slow way that is right for any network.
"""
