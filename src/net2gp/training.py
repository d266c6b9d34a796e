"""Training of networks: natural gradients, gradient flow, and many networks at once."""

from net2gp.methods import (
    IVON,
    OGGN,
    VOGGN,
    VOGN,
    AdamSettings,
    Schedule,
    Swag,
    Trained,
    converged_evidence,
    gradient_flow,
    iteration_evidence,
    loss_flow,
    max_learning_rate,
    train_by_evidence,
    train_many,
)

__all__ = [
    "IVON",
    "OGGN",
    "VOGGN",
    "VOGN",
    "AdamSettings",
    "Schedule",
    "Swag",
    "Trained",
    "converged_evidence",
    "gradient_flow",
    "iteration_evidence",
    "loss_flow",
    "max_learning_rate",
    "train_by_evidence",
    "train_many",
]
