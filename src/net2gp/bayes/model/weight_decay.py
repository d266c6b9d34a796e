"""Weight decay and the Gaussian prior that it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from net2gp.bayes.model.by_name import PriorByName
from net2gp.bayes.model.prior import FlatPrior, NormalPrior, WeightPrior, as_prior
from net2gp.errors import InputError, check_count, check_positive
from net2gp.inputs import describe
from net2gp.linear.forward.kinds import check_kind
from net2gp.linear.parameters import expand_prior
from net2gp.types import Params

COUPLED = (
    *(optim.SGD, optim.Adam, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop),
)
"""Optimizers of torch that add weight_decay · θ to the gradient, unless a decoupled decay is asked for."""


def prior_of_weight_decay(
    weight_decay: float | optim.Optimizer,
    network: nn.Module | None = None,
    *,
    num_averaged: int = 1,
    noise_var: float | None = None,
) -> WeightPrior:
    """Find the prior under which training with weight decay is maximum a posteriori estimation.

    An optimizer of torch adds weight_decay · θ to the gradient of the loss. If −log p(y | θ) = c · loss +
    const, it descends (−log p(y | θ) − log p(θ))/c with θ ~ N(0, 1/(c · weight_decay)). The factor c is

    - 1 for a sum of negative log likelihoods, such as CrossEntropyLoss(reduction="sum");
    - N for their mean over N points, such as CrossEntropyLoss();
    - 1/(2 noise_var) for a sum of squared errors, MSELoss(reduction="sum");
    - N·C/(2 noise_var) for the mean over N points and C outputs, MSELoss().

    Steps that are written as θ ← θ + η ∇log p(y | θ) − λ θ have weight_decay = λ/η, so that the variance is
    η/λ. A decoupled decay, as in AdamW, is no such prior. There the gradient is divided by its own size, and
    the decay is not. With all data in each step, the fixed points minimize the loss alone within the box
    |θ_i| ≤ 1/weight_decay.

    Args:
        weight_decay: The number that the optimizer was given, or the optimizer, whose groups may have
            different ones.
        network: The network that the optimizer trains, for the names of its parameters. It is needed only
            with an optimizer.
        num_averaged: The number of terms that the loss is the mean of; 1 if it is a sum.
        noise_var: The variance of Gaussian noise, if the loss is a squared error without the factor ½; None
            if the loss is a negative log likelihood.

    Returns:
        The prior: Gaussian, or flat where there is no decay.

    Raises:
        InputError: If the optimizer decouples its decay or is not known, or if an argument is not positive.

    >>> prior_of_weight_decay(1e-4, num_averaged=1000)
    NormalPrior(variance=10.0)

    References: Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019; Xie and Li, Implicit
    bias of AdamW, ICML 2024.
    """
    factor = _factor(num_averaged, noise_var)
    if not isinstance(weight_decay, optim.Optimizer):
        check_positive(weight_decay, "weight_decay", zero=True, single=True)
        return NormalPrior(1 / (factor * weight_decay)) if weight_decay else FlatPrior()
    if not isinstance(network, nn.Module):
        raise InputError(
            "the parameters of an optimizer have no names. Pass prior_of_weight_decay(optimizer, network)."
        )
    decays = _decays(weight_decay, network)
    if all(decays.values()):
        return NormalPrior({name: 1 / (factor * decay) for name, decay in decays.items()})
    laws = {name: 1 / (factor * decay) if decay else None for name, decay in decays.items()}
    return PriorByName(laws)


def weight_decay_of_prior(
    prior: WeightPrior | float | None, *, num_averaged: int = 1, noise_var: float | None = None
) -> float:
    """Find the weight decay that makes training maximum a posteriori estimation under a Gaussian prior.

    It is 1/(c · variance), with c as in `prior_of_weight_decay`. Pass it to an optimizer that adds it to the
    gradient, such as SGD or Adam, and not to AdamW. If the parameters have different variances, use
    `decay_groups`.

    Args:
        prior: A Gaussian prior with one variance, this variance, or None for a flat prior.
        num_averaged: The number of terms that the loss is the mean of; 1 if it is a sum.
        noise_var: The variance of Gaussian noise, if the loss is a squared error without the factor ½.

    Returns:
        The weight decay.

    Raises:
        InputError: If the prior is not Gaussian, or has several variances.

    >>> weight_decay_of_prior(10.0, num_averaged=1000)
    0.0001
    """
    factor = _factor(num_averaged, noise_var)
    chosen = as_prior(prior)
    if isinstance(chosen, FlatPrior):
        return 0.0
    if not isinstance(chosen, NormalPrior):
        raise InputError(
            f"only a Gaussian prior is a weight decay, but prior is {describe(prior)}. Maximize the log "
            "joint: Model.of(network, likelihood, prior).log_joint."
        )
    try:
        variance = float(chosen.variance)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            "the prior has several variances, and each has a weight decay of its own. Pass "
            "decay_groups(network, prior) to the optimizer."
        ) from None
    check_positive(variance, "variance")
    return 1 / (factor * variance)


def decay_groups(
    network: nn.Module,
    prior: WeightPrior | float | None,
    *,
    num_averaged: int = 1,
    noise_var: float | None = None,
) -> list[dict[str, Any]]:
    """Divide the parameters of a network into groups by the weight decay of their Gaussian prior.

    Args:
        network: The network.
        prior: Gaussian and flat priors by name, one of them, a variance, or None.
        num_averaged: The number of terms that the loss is the mean of; 1 if it is a sum.
        noise_var: The variance of Gaussian noise, if the loss is a squared error without the factor ½.

    Returns:
        What optimizers of torch take: dicts with "params" and "weight_decay".

    Raises:
        InputError: If a prior is not Gaussian, or entries of one parameter have different variances.

    >>> network = nn.Linear(2, 1)
    >>> groups = decay_groups(network, NormalPrior({"*": 1.0, "bias": 10.0}))
    >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
    [(1, 1.0), (1, 0.1)]
    """
    factor = _factor(num_averaged, noise_var)
    network = check_kind(network)
    named = dict(network.named_parameters())
    chosen = as_prior(prior)
    chosen.check(dict(named))
    groups: dict[float, list[nn.Parameter]] = {}
    for name, variance in _variances(chosen, dict(named)).items():
        decay = 0.0 if variance is None else 1 / (factor * variance)
        groups.setdefault(decay, []).append(named[name])
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]


def _factor(num_averaged: int, noise_var: float | None) -> float:
    """The number c with −log p(y | θ) = c · loss + const."""
    check_count(num_averaged, "num_averaged", example=1000)
    if noise_var is None:
        return float(num_averaged)
    check_positive(noise_var, "noise_var", single=True)
    return num_averaged / (2 * float(noise_var))


def _decays(optimizer: optim.Optimizer, network: nn.Module) -> dict[str, float]:
    """The weight decay of each parameter that an optimizer trains, by name."""
    kind = type(optimizer).__name__
    names = {id(value): name for name, value in network.named_parameters()}
    decays: dict[str, float] = {}
    for group in optimizer.param_groups:
        decay = float(group.get("weight_decay", 0.0))
        decoupled = isinstance(optimizer, optim.AdamW) or group.get("decoupled_weight_decay", False)
        if decay and (decoupled or not isinstance(optimizer, COUPLED)):
            reason = "decouples" if decoupled else "may decouple"
            raise InputError(
                f"{kind} {reason} its weight decay from the gradient, and then it is no prior. Train with "
                "SGD or Adam, or pass the number that is added to the gradient."
            )
        for value in group["params"]:
            if id(value) not in names:
                raise InputError(
                    "the optimizer trains a parameter that the network does not have. Pass the network "
                    "whose parameters() the optimizer was given."
                )
            decays[names[id(value)]] = decay
    return {name: decays[name] for name in names.values() if name in decays}


def _variances(prior: WeightPrior, params: Params) -> dict[str, float | None]:
    """The variance of each parameter, or None where the prior is flat."""
    if isinstance(prior, FlatPrior):
        return dict.fromkeys(params)
    if isinstance(prior, PriorByName):
        found: dict[str, float | None] = {}
        for part, own in prior.parts(params):
            found |= _variances(part, own)
        return {name: found[name] for name in params}
    if not isinstance(prior, NormalPrior):
        raise InputError(
            f"only Gaussian priors are weight decays, but {', '.join(params)} has {describe(prior)}. "
            "Maximize the log joint: Model.of(network, likelihood, prior).log_joint."
        )
    found = {}
    shapes = {n: torch.zeros((), dtype=torch.float64).expand(v.shape) for n, v in params.items()}
    for name, variance in expand_prior(prior.variance, shapes).items():
        if variance.numel() > 1:
            raise InputError(
                f"the entries of '{name}' have different variances, but a parameter has one weight decay. "
                "Give it one variance, or maximize the log joint of a Model."
            )
        found[name] = float(variance)
    return found
