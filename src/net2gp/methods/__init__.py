"""One method per file; each returns a posterior, or for training over time a flow."""

from net2gp.methods.adapt import adapt, adapt_tasks
from net2gp.methods.flow import Flow, gradient_flow, max_learning_rate
from net2gp.methods.flow_modes import NeverLearned, Relative
from net2gp.methods.flow_ode import LossFlow, loss_flow
from net2gp.methods.laplace import laplace
from net2gp.methods.laplace_tuning import Evidence, Matched, Validation

__all__ = [
    "Evidence",
    "Flow",
    "LossFlow",
    "Matched",
    "NeverLearned",
    "Relative",
    "Validation",
    "adapt",
    "adapt_tasks",
    "gradient_flow",
    "laplace",
    "loss_flow",
    "max_learning_rate",
]
