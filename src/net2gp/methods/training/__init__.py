"""Gaussians over parameters that are found during training, and many networks trained at once."""
