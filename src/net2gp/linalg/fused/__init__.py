"""Products with kernel matrices whose entries are arithmetic on an inner product and numbers of rows."""

from net2gp.linalg.fused.scalar_graph import ScalarGraph, recorded
from net2gp.linalg.fused.triton_program import Settings, available, matrix, multiply

__all__ = ["ScalarGraph", "Settings", "available", "matrix", "multiply", "recorded"]
