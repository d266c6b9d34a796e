"""Doors from other libraries: scikit-learn, BoTorch, GPyTorch and more, each in a module of its own."""
