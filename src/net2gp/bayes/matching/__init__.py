"""From Gaussian processes to networks whose limit they are."""
