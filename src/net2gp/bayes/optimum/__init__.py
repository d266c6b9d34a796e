"""From a network and data to trained networks: one optimum, ensembles of them, and multi-SWAG."""
