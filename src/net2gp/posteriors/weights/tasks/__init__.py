"""What a structure takes the curvature of: a network with data in memory, or with a stream of them."""
