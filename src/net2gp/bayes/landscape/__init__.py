"""The loss over the parameters: slices, paths between minima, symmetries and the diversity of modes."""
