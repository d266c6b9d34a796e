"""Variational inference: Gaussians over weights, and dropout."""
