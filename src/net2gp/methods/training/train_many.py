"""Train many small networks at once to their most probable parameters, for example for a sweep."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import vmap

from net2gp.calling import functional_call
from net2gp.errors import InputError, NetworkError, check_count, check_finite, check_positive
from net2gp.inputs import describe, gather, ordinary_tensors
from net2gp.likelihoods.traits import has_gaussian_noise, tied_points
from net2gp.linear import linearize
from net2gp.linear.forward.evaluation import differentiable
from net2gp.linear.forward.modes import check_layers, in_eval_mode
from net2gp.progress import progress
from net2gp.types import Likelihood, Params

Pair = tuple[Tensor, Tensor]
_Problem = tuple[nn.Module, Any, Likelihood, Tensor, Tensor]


@dataclass(frozen=True)
class AdamSettings:
    """Settings of Adam, with a learning rate that falls when the objective stops falling.

    The schedule matches torch.optim.lr_scheduler.ReduceLROnPlateau for positive objectives; for negative ones
    that scheduler mistakes a plateau for progress.

    Args:
        learning_rate: The first learning rate.
        num_steps: The number of steps.
        factor: Multiplies the learning rate at a plateau; 1 keeps it constant.
        patience: The number of steps without progress after which the objective is on a plateau.
        threshold: The progress that counts, as a share of the size of the best objective so far.
        decays: The decays of the averages of gradients and of their squares.

    Raises:
        InputError: If a setting is out of range.

    Reference: Kingma & Ba, Adam: a method for stochastic optimization, ICLR 2015.
    """

    learning_rate: float = 0.01
    num_steps: int = 1000
    factor: float = 1.0
    patience: int = 10
    threshold: float = 1e-4
    decays: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        check_positive(self.learning_rate, "learning_rate")
        check_count(self.num_steps, "num_steps")
        check_count(self.patience, "patience", zero=True)
        if not 0 < self.factor <= 1 or not self.threshold >= 0:
            raise InputError(
                f"factor must be in (0, 1] and threshold at least 0, but they are {self.factor} and "
                f"{self.threshold}. Pass for example AdamSettings(factor=0.8)."
            )


@dataclass(frozen=True, eq=False)
class Trained:
    """S trained networks of one architecture. Indexing gives one of them as a new module in eval mode.

    Args:
        network: A network of the architecture.
        params: The trained parameters by name, with a leading axis S.
        objective: The value of the objective at the end: (S,).
        gradient: The norm of its gradient there, which is zero at a stationary point: (S,).
    """

    network: nn.Module = field(repr=False)
    params: Params = field(repr=False)
    objective: Tensor = field(repr=False)
    gradient: Tensor = field(repr=False)

    def __len__(self) -> int:
        return len(self.objective)

    def __getitem__(self, index: int) -> nn.Module:
        if not isinstance(index, int):
            raise InputError(
                f"a trained network is chosen by its number, but got {describe(index)}. For some of them "
                "pass list(trained)[:3]."
            )
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} networks, but number {index} was asked for.")
        network = copy.deepcopy(self.network)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(self.params[name][index])
        return network

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[index] for index in range(len(self)))


@ordinary_tensors()
def train_many(
    networks: Sequence[nn.Module],
    data: Pair | Sequence[Pair],
    likelihood: Likelihood | Sequence[Likelihood],
    *,
    prior_var: float | Sequence[float] | Tensor = 1.0,
    offset: float | Sequence[float] | Tensor = 0.0,
    optimizer: AdamSettings | None = None,
    at_once: int | None = None,
    finish: int = 0,
) -> Trained:
    """Train S small networks of one architecture at once to their most probable parameters.

    Each network minimizes −Σ_n log p(y_n | f(x_n; θ)) + ‖θ‖² / (2 prior_var) + offset over all its data in
    every step, from its present parameters. Networks do not influence each other, nothing is random, and the
    dtype is kept, so the results equal S single trainings. All parameters are trained, whatever their
    `requires_grad`. Buffers, such as the statistics of batch norm, do not change and must be equal for all.

    Cost: a step is one batched forward and backward pass. For small networks this is tens of times faster
    than training one after the other.

    Args:
        networks: The S networks.
        data: (x, y) for all networks, or a list with one pair of the same shapes per network.
        likelihood: One likelihood for all networks, or a list with one per network.
        prior_var: The prior variance, one number or one per network.
        offset: A constant in the objective, one number or one per network. It does not change the minimizer.
            It only affects when `AdamSettings.threshold`, which is relative to the objective, detects a
            plateau: including the prior's normalizer P log(2π prior_var)/2 makes wide networks stop earlier.
        optimizer: The settings of Adam. None is `AdamSettings()`.
        at_once: How many networks share a step; best such that their activations stay in cache. None is all.
        finish: The most iterations of L-BFGS that follow, network by network, to reach the stationary point
            itself (in float64). 0 is none.

    Returns:
        The trained networks.

    Raises:
        InputError: If an argument has neither one entry nor S entries, or if data sets differ in shape.
        NetworkError: If the networks differ in architecture or buffers.

    >>> from net2gp.likelihoods import Gaussian
    >>> _ = torch.manual_seed(0)
    >>> x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
    >>> build = lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double().eval()
    >>> optimizer = AdamSettings(learning_rate=0.1, num_steps=300)
    >>> trained = train_many([build() for _ in range(3)], (x, x.sin()), Gaussian(0.01), optimizer=optimizer)
    >>> len(trained), bool((trained[2](x) - x.sin()).abs().max() < 0.2)
    (3, True)
    """
    networks = _check_networks(networks)
    S = len(networks)
    pairs_inside = isinstance(data, tuple) and any(isinstance(one, tuple) for one in data[:1])
    several = isinstance(data, list) or pairs_inside
    pairs = [gather(pair) for pair in _each(data, S, "data", not several)]
    _check_pairs(pairs)
    single = not isinstance(likelihood, Sequence)
    likelihoods = _each(likelihood, S, "likelihood", single)
    variances = _numbers(prior_var, S, "prior_var")
    check_positive(variances, "prior_var")
    offsets = _numbers(offset, S, "offset")
    if not offsets.isfinite().all():
        raise InputError("offset must be finite. Leave it out, or pass a number for each network.")
    optimizer = AdamSettings() if optimizer is None else optimizer
    if not isinstance(optimizer, AdamSettings):
        raise InputError(
            f"optimizer must be AdamSettings(...) or None, but is {describe(optimizer)}. Pass "
            "net2gp.training.AdamSettings(learning_rate=0.01)."
        )
    size = S if at_once is None else at_once
    check_count(size, "at_once")
    check_count(finish, "finish", zero=True)
    with _in_eval_mode(networks, pairs):
        _check_outputs(networks, pairs, likelihoods)
        problems = list(zip(networks, pairs, likelihoods, variances, offsets, strict=True))
        theta, value, slope = _train(problems, optimizer, size, finish)
        network = copy.deepcopy(networks[0])
    return Trained(network, _stacked(network, theta), value, slope)


def _train(
    problems: list[_Problem], optimizer: AdamSettings, size: int, finish: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters (S, P), objective (S,) and norm of the gradient (S,), `size` networks at once."""
    S, parts = len(problems), []
    with progress("networks", optimizer.num_steps * math.ceil(S / size)) as advance:
        for start in range(0, S, size):
            objective = _Objective(problems[start : start + size])
            parts.append(_descend(objective, optimizer, advance))
    if finish:
        starts = [row for theta, _, _ in parts for row in theta]
        pairs = zip(problems, starts, strict=True)
        parts = [_finish(_Objective([problem]), theta, finish) for problem, theta in pairs]
    theta, value, slope = (torch.cat(column) for column in zip(*parts, strict=True))
    return theta, value, slope


@contextlib.contextmanager
def _in_eval_mode(networks: list[nn.Module], pairs: list[Any]) -> Iterator[None]:
    """Within it all networks are in eval mode; raise if training mode makes a difference to one."""
    with contextlib.ExitStack() as stack:
        for network, (x, _) in zip(networks, pairs, strict=True):
            if any(module.training for module in network.modules()):
                stack.enter_context(in_eval_mode(linearize(network), x))
        yield


class _Objective:
    """The negative log posterior of S networks at once, as a function of their parameters (S, P)."""

    def __init__(self, problems: Sequence[_Problem]) -> None:
        networks, pairs, likelihoods, variances, offsets = map(list, zip(*problems, strict=True))
        self.network = networks[0]
        self.start = torch.stack([nn.utils.parameters_to_vector(n.parameters()) for n in networks])
        self.start = self.start.detach()
        self.precision = torch.stack(variances).to(self.start).reciprocal()[:, None]
        self.offset = torch.stack(offsets).to(self.start)
        self.x, self.y = (torch.stack(column) for column in zip(*pairs, strict=True))
        self.likelihoods, self.joined = likelihoods, _joined(likelihoods, self.y)

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The values (S,) and gradients (S, P); networks share nothing, so one backward pass is enough."""
        theta = theta.detach().requires_grad_()
        f = self.outputs(theta)
        log_prob, residual = self.likelihood(f.detach())
        (gradient,) = torch.autograd.grad(f, theta, -residual)
        theta = theta.detach()
        value = 0.5 * (self.precision * theta * theta).sum(1) - log_prob + self.offset
        return value, gradient.addcmul_(theta, self.precision.expand_as(theta))

    def outputs(self, theta: Tensor) -> Tensor:
        """f(x): (S, N, C)."""
        call = lambda params, x: functional_call(self.network, params, (x,))
        return vmap(call)(_stacked(self.network, theta), self.x).flatten(2)

    def likelihood(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_n log p(y_n | f_n), (S,), and its gradient in f, (S, N, C)."""
        if self.joined is not None:
            flat, y = f.flatten(0, 1), self.y.flatten(0, 1)
            log_prob, residual = self.joined.log_prob(flat, y), self.joined.residual(flat, y)
            return log_prob.reshape(f.shape[:2]).sum(1), residual.reshape(f.shape)
        each = list(zip(self.likelihoods, f, self.y, strict=True))
        log_probs = torch.stack([one.log_prob(g, y).sum() for one, g, y in each])
        return log_probs, torch.stack([one.residual(g, y) for one, g, y in each])


def _descend(
    objective: _Objective, optimizer: AdamSettings, advance: Callable[..., None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters (S, P), objective (S,) and norm of the gradient (S,) after all steps."""
    theta = objective.start.clone()
    first, second = torch.zeros_like(theta), torch.zeros_like(theta)
    rate = theta.new_full((len(theta), 1), optimizer.learning_rate)
    best = theta.new_full((len(theta),), math.inf)
    waited = torch.zeros(len(theta), dtype=torch.long, device=theta.device)
    b1, b2 = optimizer.decays
    with differentiable(objective.network), torch.enable_grad():
        for step in range(1, optimizer.num_steps + 1):
            value, gradient = objective(theta)
            if step == 1:
                check_finite(value, "the objective of the networks at their start")
            first.lerp_(gradient, 1 - b1)
            second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            scale = second.sqrt().div_((1 - b2**step) ** 0.5).add_(1e-8)
            theta.sub_(rate / (1 - b1**step) * first / scale)
            # inf − inf is NaN, so the first step, at which the best is infinite, counts by itself
            better = best.isinf() | (value < best - optimizer.threshold * best.abs())
            best = torch.where(better, value, best)
            waited = torch.where(better, 0, waited + 1)
            late = waited > optimizer.patience
            rate = torch.where(late[:, None], rate * optimizer.factor, rate)
            waited = torch.where(late, 0, waited)
            advance()
        value, gradient = objective(theta)
    return theta, value, gradient.norm(dim=1)


def _finish(
    objective: _Objective, theta: Tensor, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The stationary point near the parameters (P,) of one network, as `_descend` gives it."""

    def at(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(torch.as_tensor(point).to(theta)[None])
        return float(value), gradient[0].double().cpu().numpy()

    options = {"maxiter": max_iterations, "maxfun": 2 * max_iterations, "ftol": 0.0, "gtol": 1e-9}
    with differentiable(objective.network), torch.enable_grad():
        start = theta.double().cpu().numpy()
        found = minimize(at, start, jac=True, method="L-BFGS-B", options={**options, "maxcor": 30})
        end = torch.as_tensor(found.x).to(theta)[None]
        value, gradient = objective(end)
    return end, value, gradient.norm(dim=1)


def _stacked(network: nn.Module, theta: Tensor) -> Params:
    """The rows of (S, P) as parameters with a leading axis S."""
    shapes = {name: p.shape for name, p in network.named_parameters()}
    pieces = theta.split([shape.numel() for shape in shapes.values()], 1)
    return {n: p.reshape(-1, *s) for (n, s), p in zip(shapes.items(), pieces, strict=True)}


def _joined(likelihoods: list[Likelihood], y: Tensor) -> Likelihood | None:
    """One likelihood for the points of all networks together, or None if they cannot be joined."""
    if all(one is likelihoods[0] for one in likelihoods):
        first = likelihoods[0]
        if tied_points(first) is None:
            return first
    noisy = [one for one in likelihoods if has_gaussian_noise(one)]
    if len(noisy) < len(likelihoods):
        return None
    like = y.reshape(*y.shape[:2], -1)
    noises = [one.noise_variance(f) for one, f in zip(noisy, like, strict=True)]
    return noisy[0].with_noise(torch.cat(noises))


def _each(value: Any, count: int, name: str, shared: bool) -> Any:
    """One value per network: `value` repeated if it is shared, else as it is if the number fits."""
    if shared:
        return [value] * count
    if not isinstance(value, Sequence) or len(value) != count:
        found = len(value) if isinstance(value, Sequence) else describe(value)
        raise InputError(
            f"{name} must be one for all {count} networks, or a list of one for each, but got {found}."
        )
    return value


def _numbers(value: float | Sequence[float] | Tensor, count: int, name: str) -> Tensor:
    """(count,) in float64: one number repeated, or one number per network."""
    try:
        found = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is not None and found.dim() == 0:
        return found.expand(count)
    if found is None or found.shape != (count,):
        raise InputError(
            f"{name} must be a number for all {count} networks, or a list of one for each, but is "
            f"{describe(value)}."
        )
    return found


def _check_networks(networks: Sequence[nn.Module]) -> list[nn.Module]:
    """A list of modules with parameters of the same names, shapes and dtype."""
    if isinstance(networks, nn.Module):
        raise InputError("train_many trains a list of networks: pass [network].")
    networks = list(networks)
    if not networks:
        raise InputError("train_many needs networks: pass [build() for _ in range(10)].")
    kinds = [[(name, p.shape, p.dtype) for name, p in n.named_parameters()] for n in networks]
    if not kinds[0]:
        raise NetworkError("the networks have no parameters to train. Pass others.")
    for index, (network, kind) in enumerate(zip(networks, kinds, strict=True)):
        check_layers(network)
        if kind != kinds[0]:
            shapes, first = ({n: (*s, d) for n, s, d in one} for one in (kind, kinds[0]))
            raise NetworkError(
                f"the networks must have one architecture, but the parameters of network {index} are "
                f"{shapes} and the first network has {first}. Train the others apart."
            )
    return networks


@torch.no_grad()
def _check_outputs(
    networks: list[nn.Module], pairs: list[Any], likelihoods: Sequence[Likelihood]
) -> None:
    """Check that targets match the likelihood and that all networks compute the same function of parameters.

    The first network's code runs for all of them, so another activation or other statistics would be ignored.
    """
    first, seen = networks[0], set()
    check = linearize(first).check
    for index, (network, (x, y), one) in enumerate(zip(networks, pairs, likelihoods, strict=True)):
        if isinstance(one, type) or not isinstance(one, Likelihood):
            raise InputError(f"likelihood must be e.g. Gaussian(0.1), but is {describe(one)}.")
        check(x)
        own = network(x[:3])
        params: Params = dict(network.named_parameters())
        if not torch.allclose(functional_call(first, params, (x[:3],)), own, equal_nan=True):
            raise NetworkError(
                f"the networks must have one architecture, but network {index} computes something else than "
                "the first does with its parameters: another activation, or buffers such as the statistics "
                "of batch norm. Train the others apart."
            )
        if (id(y), id(one)) not in seen:
            seen.add((id(y), id(one)))
            one.check(own.new_zeros(len(x), *own.shape[1:]).flatten(1), y)


def _check_pairs(pairs: list[Any]) -> None:
    shapes = {str([describe(x), describe(y)]) for x, y in pairs}
    if len(shapes) > 1 or not isinstance(pairs[0][0], Tensor):
        raise InputError(
            "the data sets must be pairs of tensors of one shape, so that they can be stacked, but are "
            f"{', '.join(sorted(shapes))}. Train networks with data of another shape apart."
        )
