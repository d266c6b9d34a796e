"""Variances at 10⁵ points and more, from drawn functions, and systems whose factor is rounded."""
