"""Posteriors of 10⁵ points and more: variances from drawn functions, and solvers that see blocks of rows."""
