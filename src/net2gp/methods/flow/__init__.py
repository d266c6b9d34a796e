"""The law of a network over the time of its training."""
