"""One method per file; each returns a posterior, or for training over time a flow."""

from net2gp.methods.adapt import adapt, adapt_tasks
from net2gp.methods.explain.dual import Dual, dual
from net2gp.methods.explain.influence import contributions, leave_one_out, removal_effects
from net2gp.methods.explain.interpret import (
    Summed,
    Traced,
    aggregate,
    nearest,
    output_blocks,
    similarity,
)
from net2gp.methods.explain.perturbations import (
    FastGradient,
    Perturbation,
    ProjectedGradient,
    RandomNoise,
    Toward,
)
from net2gp.methods.explain.stability import Stability, change_bound, kernel_distance, stability
from net2gp.methods.few_shot import adapt_classes
from net2gp.methods.flow.convergence import Convergence, convergence
from net2gp.methods.flow.flow import Flow
from net2gp.methods.flow.modes import NeverLearned, Relative
from net2gp.methods.flow.ode import LossFlow, loss_flow
from net2gp.methods.flow.squared_loss import gradient_flow, max_learning_rate
from net2gp.methods.laplace_approximation.laplace import laplace
from net2gp.methods.laplace_approximation.tuning import Evidence, Matched, Validation
from net2gp.methods.selection import Fit, Selection, sweep
from net2gp.methods.training.from_variances import from_variances
from net2gp.methods.training.ivon import IVON
from net2gp.methods.training.natural_gradient import (
    GaussianPrior,
    NaturalState,
    NewtonState,
    converged_evidence,
    iteration_evidence,
    natural_step,
    newton_step,
)
from net2gp.methods.training.online import Schedule, train_by_evidence
from net2gp.methods.training.swag import Swag
from net2gp.methods.training.train_many import AdamSettings, Trained, train_many
from net2gp.methods.training.vogn import OGGN, VOGGN, VOGN
from net2gp.posteriors.split import Split, split

__all__ = [
    "IVON",
    "OGGN",
    "VOGGN",
    "VOGN",
    "AdamSettings",
    "Convergence",
    "Dual",
    "Evidence",
    "FastGradient",
    "Fit",
    "Flow",
    "GaussianPrior",
    "LossFlow",
    "Matched",
    "NaturalState",
    "NeverLearned",
    "NewtonState",
    "Perturbation",
    "ProjectedGradient",
    "RandomNoise",
    "Relative",
    "Schedule",
    "Selection",
    "Split",
    "Stability",
    "Summed",
    "Swag",
    "Toward",
    "Traced",
    "Trained",
    "Validation",
    "adapt",
    "adapt_classes",
    "adapt_tasks",
    "aggregate",
    "change_bound",
    "contributions",
    "converged_evidence",
    "convergence",
    "dual",
    "from_variances",
    "gradient_flow",
    "iteration_evidence",
    "kernel_distance",
    "laplace",
    "leave_one_out",
    "loss_flow",
    "max_learning_rate",
    "natural_step",
    "nearest",
    "newton_step",
    "output_blocks",
    "removal_effects",
    "similarity",
    "split",
    "stability",
    "sweep",
    "train_by_evidence",
    "train_many",
]
