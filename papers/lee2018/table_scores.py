"""Accuracy, error and calibration of a regression on one-hot targets."""

from __future__ import annotations

import numpy as np
import torch
from regression_images import Digits
from torch import Tensor
from torch.nn.functional import nll_loss

from net2gp import metrics

NODES = 64
"""Of the Gauss–Hermite rule for the law of the largest output."""

PART = 1000
"""Images whose probabilities are computed at once."""


def log_probabilities(mean: Tensor, variance: Tensor) -> Tensor:
    """log P(output c is the largest) for independent outputs N(mean_c, variance): (N, C).

    P_c = ∫ φ(z) Π_{k≠c} Φ(z + (m_c − m_k)/s) dz with s² the variance (N,) of each output, by Gauss–Hermite
    quadrature. This is how a regression, whose answer is the largest output, says how sure it is.
    """
    parts = zip(mean.split(PART), variance.split(PART), strict=True)
    return torch.cat([_log_probabilities(*part) for part in parts])


def _log_probabilities(mean: Tensor, variance: Tensor) -> Tensor:
    nodes, weights = (
        torch.from_numpy(v).to(mean) for v in np.polynomial.hermite_e.hermegauss(NODES)
    )
    gaps = (mean[:, :, None] - mean[:, None, :]) / variance.sqrt()[:, None, None]
    below = torch.special.log_ndtr(gaps[..., None] + nodes)
    others = ~torch.eye(mean.shape[1], dtype=torch.bool, device=mean.device)
    together = (below * others[..., None]).sum(2) + weights.log()
    return together.logsumexp(-1).log_softmax(-1)


def scores(mean: Tensor, variance: Tensor, test: Digits) -> dict[str, float]:
    """Accuracy, mean squared error, NLL and ECE of Gaussian predictions: (N, 10) and (N,)."""
    tiny = torch.finfo(mean.dtype).tiny
    log_probs = log_probabilities(mean, variance.clamp(min=tiny))
    probs = log_probs.exp()
    found = {
        "accuracy": metrics.accuracy(mean, test.labels),
        "mse": (mean - test.y).square().mean(),
        "NLL": nll_loss(log_probs, test.labels),
        "ECE": metrics.expected_calibration_error(probs, test.labels),
    }
    return {name: float(value) for name, value in found.items()}
