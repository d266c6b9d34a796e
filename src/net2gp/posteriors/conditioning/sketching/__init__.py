"""Solvers that see blocks of rows, or some of the points, at a time."""
