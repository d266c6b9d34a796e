"""Gaussian processes of uncertain inputs: expectations of kernels go in, fitted latent variables come out."""
