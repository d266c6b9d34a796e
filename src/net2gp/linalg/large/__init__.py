"""Systems of more rows than a matrix in memory may have: factors of low rank, and steps on blocks of rows."""

from net2gp.linalg.large.random_pivots import FactorPlusIdentity, random_pivots

__all__ = ["FactorPlusIdentity", "random_pivots"]
