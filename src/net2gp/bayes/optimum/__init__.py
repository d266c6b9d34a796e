"""Networks found by optimization: the most probable one, and ensembles."""
