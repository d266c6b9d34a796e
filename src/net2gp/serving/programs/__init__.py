"""Computations of a posterior as graphs of tensor operations: in goes a posterior, out a graph module."""
