"""Gaussians over a network's parameters and the structures of their covariance."""
