"""What makes the steps of a fit fast: kernels between points and rows, and quadratic forms."""
