"""Laplace's approximation of a trained network: a Gaussian over its parameters, which is a GP."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from net2gp.errors import NotStationary, check_positive, warn
from net2gp.inputs import num_rows, rows
from net2gp.likelihoods.traits import has_open_link, of_points
from net2gp.linear import Linearized
from net2gp.linear.curvatures.head import gradient_of
from net2gp.linear.curvatures.kept_features import keeping_features, kept
from net2gp.linear.forward.evaluation import pullback
from net2gp.linear.forward.places import channels_of
from net2gp.linear.linearized import Patterns, PriorVar, example_of
from net2gp.methods.laplace_approximation.choosing import checked, tuned
from net2gp.methods.laplace_approximation.held_out import HeldOut, with_weight
from net2gp.methods.laplace_approximation.matching import with_novelty
from net2gp.methods.laplace_approximation.search import Search, Tuned
from net2gp.methods.laplace_approximation.task import make_task, owned
from net2gp.methods.laplace_approximation.tuning import Evidence, Tuning, Validation
from net2gp.methods.laplace_approximation.widening import widens, with_widening
from net2gp.posteriors.conditioning.checks import check_prior_var, remedy
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.weights import Structure
from net2gp.posteriors.weights.tasks.streamed import POINTS
from net2gp.posteriors.weights.tasks.sums import Sums
from net2gp.streams import held_or_streamed
from net2gp.types import Data, Observed


def laplace(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Observed,
    *,
    prior_var: PriorVar | None = None,
    structure: Structure | None = None,
    only: Patterns | None = None,
    tuning: Tuning | None = None,
    temperature: float = 1.0,
) -> Posterior[Observed]:
    """The Gaussian posterior of a trained network's parameters around where they are, on its training data.

    θ ~ N(θ*, Σ) with Σ⁻¹ = diag(1/prior_var) + Σ_n J_nᵀ Λ_n J_n / temperature, for the prior
    N(0, prior_var) and the likelihood's curvature Λ: the network's outputs stay what they are, and get the
    covariance J Σ Jᵀ. Where the network is not at a stationary point, `NotStationary` is warned of, and the
    mean of the linear model is another: `posterior.dual()` has it.

    `prior_var` and the noise of `Gaussian()` are chosen where they are left open. The default, `Matched()`,
    is for regression the evidence of the linear model at its own mode, with predictions on the training data
    that are no surer than the network is right there; `predict` is wider than `marginal` where inputs are
    novel. For classes it also chooses the link, so that predictions are at most as sure as the network, and
    less so away from the data: there their variance grows, and `posterior.novelty(x)`, how little has been
    seen there, adds to it. `Evidence()` is
    the Laplace approximation of the marginal likelihood,
    log p(y | θ*) − ½ Σ θ*²/prior_var − ½ log|I + V^{1/2} H V^{1/2}|, and `Validation(data)` takes data that
    were held out. `marginal` does not depend on the link; `Categorical(Probit())` or any other link of your
    own is kept.

    Args:
        network: The trained network, or its linearization, which may choose parameters and outputs.
        data: Its training data, a pair (x, y) or a `DataLoader`. One of more than 1 GiB, or a
            `data.Stream(loader)`, is read batch by batch in several passes, and the posterior does not keep
            it; only `FunctionSpace()` needs all points together.
        likelihood: How targets follow the outputs, such as `Gaussian()` or `Categorical()`.
        prior_var: The prior variance of the parameters: a number, or a dict of numbers or tensors by name
            pattern. None leaves it open.
        structure: What of Σ⁻¹ is kept: `Full()`, `Diagonal()`, `Kron()`, `LowRank(rank)`, `LastLayer()`,
            `Subnetwork(num_weights)`, `Sampled()`, a `Structure` of your own, or `FunctionSpace()`, which has
            all of it (large classifiers: all but some per cent) without ever forming it. None takes the
            first of `Full()`, `FunctionSpace()` and `Kron()` that is small, for classes and more than 100,000
            parameters `LastLayer()` before `Kron()`; the `structure` of the result says which.
        only: Which parameters vary, by name patterns as in `linearize`; None means those with
            `requires_grad`, or all if none has it.
        tuning: How what is open is chosen: `Matched()`, `Evidence()` or `Validation(data)`. None means
            `Matched()`.
        temperature: What the curvature of the data is divided by.

    Returns:
        The posterior, with the evidence, and with the prior, noise, link and structure that were chosen.

    Raises:
        InputError: An argument is of another kind or out of its range, the targets do not fit the likelihood,
            or `tuning` is given beside a `prior_var` that leaves it nothing to choose.
        NetworkError: The network cannot be linearized, couples its points, or has no part that the structure
            needs.
        TooLarge: The structure needs more memory than there is; the text names smaller ones.

    >>> from net2gp.likelihoods import Gaussian
    >>> _ = torch.manual_seed(0)
    >>> network = nn.Linear(1, 1).double().eval()
    >>> x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    >>> y = network(x).detach()
    >>> posterior = laplace(network, (x, y), Gaussian(noise_var=0.1), prior_var=1.0)
    >>> posterior.marginal(torch.zeros(1, 1, dtype=torch.float64)).variance  # 1/(1 + 5/0.1)
    tensor([[0.0196]], dtype=torch.float64)

    References: MacKay, A practical Bayesian framework for backpropagation networks, 1992; Daxberger et
    al., Laplace redux, NeurIPS 2021; Khan et al., Approximate inference turns deep networks into Gaussian
    processes, NeurIPS 2019.
    """
    check_positive(temperature, "temperature")
    if prior_var is not None:
        check_prior_var(prior_var)
    with torch.inference_mode(False):
        own = owned(held_or_streamed(data, example_of(network)))
        with keeping_features(own[0] if isinstance(own, tuple) else None):
            task, chosen = make_task(
                network,
                own,
                likelihood,
                structure,
                only=only,
                prior_var=prior_var,
                temperature=temperature,
            )
            tuning = checked(task, tuning)
            search = Search(task, chosen.curvature(task), chosen, tuning)
            found = search.solve(tuned(search))
            check_stationary(search, found, gradient_at(search, found))
            posterior = search.posterior(found)
            if has_open_link(task.likelihood) and not isinstance(tuning, Evidence):
                posterior = with_novelty(posterior, task)
                if isinstance(tuning, Validation):
                    posterior = with_weight(posterior, HeldOut(task, tuning.data))
            if widens(search):
                posterior = with_widening(search, found, posterior)
            return cast("Posterior[Observed]", posterior)


def gradient_at(search: Search, found: Tuned) -> Tensor:
    """Σ_n J_nᵀ r_n: (P,). Of a last layer from its features, if they are kept."""
    task = search.task
    # a subset of the points may have taken the likelihood with it
    likelihood = found.likelihood if task.open_noise else task.likelihood
    linearized = task.linearized
    gradient = torch.zeros(linearized.num_params, dtype=torch.float64, device=task.device)
    for piece in task.pieces("gradient"):
        first = 0 if piece.among is None else piece.among[0]
        count = num_rows(piece.x)
        size = -(-count // -(-count // POINTS))  # pieces of the same size
        for start in range(0, count, size):
            part = slice(start, start + size)
            x, y = rows(piece.x, part), piece.y[part]
            residual = of_points(likelihood, slice(first + start, first + start + len(y))).residual
            if (known := kept(linearized, x)) is not None:
                phi, f = known
                gradient += gradient_of(linearized, phi, residual(f.double(), y))
                continue
            # plain autograd has less overhead than torch.func
            out, pull = pullback(partial(linearized.evaluate, x=x), linearized.params, twice=True)
            u = residual(out.detach().double(), y)
            gradient += linearized.flatten(pull(u.to(out.dtype))).double()
    return gradient


def check_stationary(search: Search, found: Tuned, gradient: Tensor) -> None:
    """Warn if the gradient is larger than labels drawn from the network itself would make it.

    At a stationary point Σ_n J_nᵀ r_n = θ*/prior_var for the prior of the training, whatever it was: what
    no multiple of θ* explains is compared with the size E‖Jᵀr‖² = tr H of a random gradient.
    """
    task, solved, curvature = search.task, found.solved, search.curvature
    assert solved is not None
    trace = curvature.trace() if solved.trace is None else solved.trace
    trace *= found.scale * task.temperature
    linearized = task.linearized
    theta = linearized.flatten(task.params).double()
    free = curvature.task.free
    if free is not None:  # the trace is of the chosen weights alone
        gradient, theta = gradient[free], theta[free]
    share = (gradient @ theta) / (theta @ theta).clamp(min=1e-300)
    rest = float((gradient - share.clamp(min=0) * theta).norm())
    if rest > trace**0.5:
        warn(
            f"the network is not at a stationary point: the gradient of its log-likelihood has norm "
            f"{float(gradient.norm()):.3g}, of which {rest:.3g} is not explained by weight decay, where "
            f"{trace**0.5:.3g} would be by chance. {_advice(search)}",
            NotStationary,
        )


def _advice(search: Search) -> str:
    """What to do where the network is not at a stationary point: other data, or more training."""
    task = search.task
    strange = unlearned(task.sums)
    first = ""
    if strange:
        first = (
            f"{strange}: it has not learned these data as they are here. Check that its weights are loaded "
            "(net2gp fit: --weights), that inputs and targets are scaled as in its training (--standardize, "
            "--image-mean), and that each target stands beside its own input. If all of this is so: "
        )
    dual = task.kept is not None and channels_of(task.linearized) is None
    linear = "; that of the linear model is posterior.dual().condition()" if dual else ""
    return f"{first}{remedy(task.linearized.network)} The mean stays the network's{linear}."


def unlearned(sums: Sums) -> str:
    """Say in which score a constant predicts the training data as well as the network; nothing if in none.

    Under Gaussian noise the constant is the mean of the targets, for classes their frequencies p, whose log
    loss is −Σ_c p_c log p_c. Cost: none, since the sums over the data are known.

    >>> from net2gp.likelihoods import Gaussian
    >>> y = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    >>> unlearned(Sums.of(Gaussian(1.0), y + 5, y))
    'On these data its root mean squared error is 5, and that of the mean of the targets 1'
    >>> unlearned(Sums.of(Gaussian(1.0), y + 0.1, y))
    ''
    """
    if sums.squares is not None and sums.targets is not None:
        own, constant = float(sums.squares), float(sums.targets.squares.sum())
        if 0 < constant <= own:
            own, constant = ((one / sums.num_rows) ** 0.5 for one in (own, constant))
            return (
                f"On these data its root mean squared error is {own:.3g}, and that of the mean of the "
                f"targets {constant:.3g}"
            )
    if sums.classes is not None:
        p = sums.classes.double() / sums.classes.sum()
        own, constant = -float(sums.log_prob) / sums.count, -float(torch.xlogy(p, p).sum())
        if 0 < constant <= own:
            return (
                f"On these data its log loss is {own:.3g}, and that of the frequencies of the classes "
                f"{constant:.3g}"
            )
    return ""
