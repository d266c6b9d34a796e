"""What makes the steps of a fit fast: fused kernels and quadratic forms, and recorded steps on a GPU."""
