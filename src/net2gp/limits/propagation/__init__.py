"""Parts of `phase` and `finite_width`, for wide fully connected networks.

`layer_maps` says what one layer does to a variance, `unit_moments` what one hidden unit does to higher
moments, `hidden_layers` reads the layers of a network, and `roots` finds fixed points.
"""
