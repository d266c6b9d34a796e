"""One method per file; each returns a posterior, or for training over time a flow."""

from net2gp.methods.adapt import adapt, adapt_tasks
from net2gp.methods.flow import Flow, gradient_flow, max_learning_rate
from net2gp.methods.flow_modes import NeverLearned, Relative
from net2gp.methods.flow_ode import LossFlow, loss_flow

__all__ = [
    "Flow",
    "LossFlow",
    "NeverLearned",
    "Relative",
    "adapt",
    "adapt_tasks",
    "gradient_flow",
    "loss_flow",
    "max_learning_rate",
]
