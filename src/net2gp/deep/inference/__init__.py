"""Inference in deep Gaussian processes: layers and data go in, the house's posterior comes out."""
