"""What a fit takes its steps with: fused kernels, lengths of steps, starts, ends, and recorded steps."""
