"""How a network is run, and what its layers are called with.

A network, its parameters and a batch of points go in; its outputs and one `Call` per use of a layer with a
rule come out (`calls`, `functional`). `evaluation` and `norms` run the network so that every kind of
derivative is right, and `kinds` refuses modules that cannot be run with other parameters. `layers` holds the
rules, which turn a layer's input and the gradient of its output into a factor of the gradient of its
parameters (`factors`).
"""
