"""What a posterior learned from which data: dual, parts of the uncertainty, neighbors, influence."""

from net2gp.methods import (
    Dual,
    Relative,
    Split,
    Summed,
    Traced,
    aggregate,
    contributions,
    dual,
    leave_one_out,
    nearest,
    output_blocks,
    removal_effects,
    similarity,
    split,
)
from net2gp.posteriors import rkhs_norm

__all__ = [
    "Dual",
    "Relative",
    "Split",
    "Summed",
    "Traced",
    "aggregate",
    "contributions",
    "dual",
    "leave_one_out",
    "nearest",
    "output_blocks",
    "removal_effects",
    "rkhs_norm",
    "similarity",
    "split",
]
