"""What is known of a network for inputs of one shape, and how it is proved.

A linearized network and points go into `probe`, and a `Plan` comes out: which parameters have gradients
with a structure, and where their layers keep the points of a batch (`layouts`, `uses`). `plans` is the
value in which the linearization holds it, `proof` compares gradients with plain reverse mode, and
`loops` is the slow way that is right for any network.
"""
