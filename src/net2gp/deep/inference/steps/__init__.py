"""What makes the steps of a fit fast: fused kernels, quadratic forms, and recorded steps on a GPU."""
