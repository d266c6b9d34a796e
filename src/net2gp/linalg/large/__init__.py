"""Systems of more rows than a matrix in memory may have: factors of low rank, and steps on blocks of rows."""

from net2gp.linalg.large.random_pivots import FactorPlusIdentity, random_pivots
from net2gp.linalg.large.rounded import RoundedCholesky, refined_cg
from net2gp.linalg.large.sketch_and_project import Blocks, sketch_and_project

__all__ = [
    "Blocks",
    "FactorPlusIdentity",
    "RoundedCholesky",
    "random_pivots",
    "refined_cg",
    "sketch_and_project",
]
