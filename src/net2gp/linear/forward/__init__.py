"""How a network is run, and what its layers were called with.

A network, its parameters and a batch of points go in; its outputs and one `Call` for each use of a layer
with a rule come out (`calls`, `functional`). `evaluation` and `norms` run it so that every kind of
derivative is right, `kinds` refuses modules that cannot be run with other parameters, and `layers` holds
the rules: from a layer's input and the gradient of its output to a factor of the gradient of its
parameters (`factors`).
"""
