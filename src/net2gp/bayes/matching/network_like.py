"""From a Gaussian process to a network whose infinitely wide limit is near it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gpytorch
import torch
from torch import Tensor, nn

from net2gp.bayes.matching.architectures import Family, Shape
from net2gp.bayes.matching.fitting import Fit, Objective, Search
from net2gp.bayes.model.model import architecture_of
from net2gp.bayes.model.prior import NormalPrior
from net2gp.errors import InputError, check_count, check_positive, check_seed
from net2gp.inputs import describe, gather
from net2gp.kernels.base import Sum
from net2gp.kernels.periodic import Periodic
from net2gp.kernels.values import is_kernel
from net2gp.limits.kernels import nngp
from net2gp.limits.limit_kernels import LimitKernel
from net2gp.posteriors.recipes.members import Members
from net2gp.progress import progress
from net2gp.show import as_html, as_text, number
from net2gp.types import Data, Kernel

ENOUGH = 1e-4
"""A distance at which no further network is tried."""

SHARPNESS = 1e4
"""A factor of squared distances, so that the search goes on down to distances of about 1e-7."""

NEARLY = 1.05, 1e-4
"""A simpler network wins if its distance is at most this many times, or this much above, the smallest."""

NATS = 0.1
"""A simpler network wins if its log evidence is at most this much below the largest."""


@dataclass(frozen=True)
class Trial:
    """A network that was tried.

    Args:
        shape: Its depth, activation, period and trend.
        distance: ‖K − K_target‖ / ‖K_target‖ at its best variances, or None for data.
        log_evidence: log p(y) at its best variances, or None for a covariance.
    """

    shape: Shape
    distance: float | None
    log_evidence: float | None


@dataclass(frozen=True, eq=False)
class Match:
    """A network whose limit is near a given Gaussian process.

    Args:
        module: The network of finite width, with parameters drawn from `prior`.
        prior: The Gaussian prior of its parameters: variances by name, divided by fan-in.
        kernel: The covariance of f at infinite width.
        shape: Depth, activation, period and trend.
        weight_var: σ_w² by name of layer, as `nngp(module, weight_var=…)` takes it.
        bias_var: σ_b² by name of layer.
        distance: ‖K − K_target‖ / ‖K_target‖ in Frobenius norms over the points, or None for data.
        log_evidence: log p(y) for data, or None for a covariance.
        noise_var: The variance of the noise for data, or None for a covariance.
        trials: All networks that were tried, in order.
    """

    module: nn.Module = field(repr=False)
    prior: NormalPrior
    kernel: LimitKernel
    shape: Shape
    weight_var: dict[str, float]
    bias_var: dict[str, float]
    distance: float | None = None
    log_evidence: float | None = None
    noise_var: float | None = None
    trials: tuple[Trial, ...] = field(default=(), repr=False)

    def _facts(self) -> dict[str, str]:
        facts = {"_shape": str(self.shape), "weight_var": number(self.weight_var)}
        facts["bias_var"] = number(self.bias_var)
        if self.distance is not None:
            facts["distance"] = number(self.distance)
        if self.log_evidence is not None:
            facts |= {
                "log_evidence": number(self.log_evidence),
                "noise_var": number(self.noise_var),
            }
        return facts

    __repr__, _repr_html_ = as_text, as_html

    def sample(
        self, x: Tensor, num_samples: int, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw networks of the module's width from the prior, and return their outputs.

        Args:
            x: N points.
            num_samples: The number of networks S.
            generator: Makes the draws repeatable. None uses torch's global random state.

        Returns:
            The outputs, (S, N, C), whose covariance is near `kernel(x)` if the network is wide.
        """
        check_count(num_samples, "num_samples")
        network = architecture_of(self.module)
        return Members(network, self.prior.sample(network.params, num_samples, generator))(x)


def network_like(
    target: Kernel | gpytorch.kernels.Kernel | Data,
    x: Tensor | None = None,
    *,
    family: Family | None = None,
    noise_var: float | None = None,
    width: int = 512,
    num_outputs: int | None = None,
    max_iterations: int = 100,
    seed: int = 0,
) -> Match:
    """Find a fully connected network whose infinitely wide limit is a given Gaussian process, or near it.

    A network with weights N(0, σ_w²/fan_in) and biases N(0, σ_b²) is a Gaussian process at infinite width.
    Its covariance K is known in closed form or by quadrature, and differentiable in the layers' variances.
    For each shape of the family L-BFGS minimizes ‖K − K_target‖² over these variances, or for data
    −log N(y; 0, K + noise I). The search goes from simple shapes to involved ones, and ends at a distance of
    1e-4. Of the shapes that are nearly as good as the best (5 %, or 0.1 nats of evidence) the first is taken.
    Some covariances are met exactly: a squared exponential by one hidden layer of √2 sin(x + π/4), a periodic
    one by the same behind a circle, and a linear one by a network without hidden layers. Cost: some hundreds
    of N×N kernels per shape, and as many Cholesky factors for data.

    Args:
        target: A kernel, one of gpytorch's, or data (x, y) for which the evidence is maximized.
        x: The points at which covariances are compared, (N, D). None takes 40 points from −2 to 2. For data
            it is left out.
        family: The shapes to choose from. None is `Family()`, with the period of a `Periodic` kernel.
        noise_var: The variance of the noise of data; None finds it. Only for data.
        width: The number of units of each hidden layer of the module.
        num_outputs: The number of outputs; None is 1, or that of the data.
        max_iterations: The most iterations of L-BFGS from each of two starts.
        seed: The seed of the module's parameters.

    Returns:
        The module with this initialization, its prior, the kernel of the limit and the remaining distance.

    Raises:
        InputError: If the target is neither a kernel nor data, x is no matrix, or the target has coupled
            outputs.

    >>> from net2gp.kernels import RBF
    >>> match = network_like(RBF(lengthscale=0.5, output_var=2.0), width=64)
    >>> str(match.shape), bool(match.distance < 1e-4)
    ('1 × rbf', True)

    References: Neal, Bayesian learning for neural networks, 1996; Williams, Computing with infinite networks,
    1997; Pearce et al., Expressive priors in Bayesian neural networks: kernel combinations and periodic
    functions, UAI 2019.
    """
    check_count(width, "width", example=512)
    check_seed(seed)
    if family is not None and not isinstance(family, Family):
        raise InputError(
            f"family must be Family(...) or None, but is {describe(family)}. Pass for example "
            'family=net2gp.bayes.Family(activations=("relu",)).'
        )
    check_count(max_iterations, "max_iterations", example=100)
    check_count(1 if num_outputs is None else num_outputs, "num_outputs", example=1)
    known = _is_covariance(target)
    points, targets = (_points(x), None) if known else _data(target, x)
    work = points.detach().double().cpu()
    if known:
        if noise_var is not None:
            raise InputError("noise_var is for data, but the target is a kernel. Leave it out.")
        wanted = _covariance(target, points).detach().double().cpu()
        objective, variance = _distance(wanted), float(wanted.diagonal().mean())
    else:
        assert targets is not None
        if noise_var is not None:
            check_positive(noise_var, "noise_var", single=True)
        outputs = targets.detach().double().cpu().reshape(len(work), -1)
        objective, variance = _evidence(outputs), float(outputs.square().mean())
        num_outputs = outputs.shape[1] if num_outputs is None else num_outputs
    chosen = _family(target) if family is None else family
    fits = _fits(chosen, work, objective, variance, noise_var, not known, max_iterations)
    best = _choose(fits, known)
    return _match(best, fits, points, known, (width, num_outputs or 1, seed))


def _fits(
    family: Family,
    x: Tensor,
    objective: Objective,
    variance: float,
    noise_var: float | None,
    data: bool,
    max_iterations: int,
) -> list[Fit]:
    shapes, enough = list(family.shapes()), -math.inf if data else SHARPNESS * ENOUGH**2
    found: list[Fit] = []
    with progress("networks", len(shapes)) as advance, torch.inference_mode(False):
        for shape in shapes:
            open_noise = data and noise_var is None
            search = Search.of(shape, x, objective, noise_var, open_noise)
            with torch.enable_grad():
                found.append(search.minimize(max(variance, 1e-12), max_iterations, enough))
            advance()
            if found[-1].loss <= enough:
                break
    return found


def _is_covariance(target: Any) -> bool:
    return is_kernel(target) or isinstance(target, gpytorch.kernels.Kernel)


def _points(x: Tensor | None) -> Tensor:
    if x is None:
        return torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        raise InputError(
            f"network_like compares covariances at x, a floating tensor (N, D), but x is {describe(x)}."
        )
    return x


def _data(target: Any, x: Tensor | None) -> tuple[Tensor, Tensor]:
    if not isinstance(target, Sequence | dict) and not hasattr(target, "__iter__"):
        raise InputError(
            f"network_like takes a kernel, such as RBF(lengthscale=0.5), or data (x, y), but got "
            f"{describe(target)}."
        )
    if x is not None:
        raise InputError("for data, x is part of the target: network_like((x, y)).")
    inputs, outputs = gather(target)
    if not outputs.is_floating_point():
        raise InputError(
            f"the evidence of data is for real targets, but y is {describe(outputs)}. Regress on class "
            "codes, for example one_hot(y).double() − 1/C."
        )
    return _points(inputs), outputs  # type: ignore[arg-type]


def _covariance(target: Any, x: Tensor) -> Tensor:
    if isinstance(target, gpytorch.kernels.Kernel):
        return target(x).to_dense()
    if target.outputs(x) is not None:
        raise InputError(
            "the outputs of this kernel are coupled, but a fully connected network has independent ones. "
            "Pass the kernel of one output."
        )
    return target(x)


def _distance(target: Tensor) -> Objective:
    size = float(target.square().sum())
    if size == 0:
        raise InputError("the target's covariance is zero at all points.")
    return lambda found, _: SHARPNESS * (found - target).square().sum() / size


def _evidence(y: Tensor) -> Objective:
    def loss(found: Tensor, noise: Tensor) -> Tensor:
        eye = torch.eye(len(found), dtype=found.dtype)
        jitter = 1e-10 * found.diagonal().mean().detach()
        factor, failed = torch.linalg.cholesky_ex(found + (noise + jitter) * eye)
        if int(failed):
            return found.sum() * torch.nan
        law = torch.distributions.MultivariateNormal(y.new_zeros(len(y)), scale_tril=factor)
        return -law.log_prob(y.mT).sum()

    return loss


def _family(target: Any) -> Family:
    return Family(period=next(_periods(target), None))


def _periods(kernel: Any) -> Iterator[float]:
    if isinstance(kernel, Periodic):
        yield float(kernel.period)
    for part in kernel.kernels if isinstance(kernel, Sum) else ():
        yield from _periods(part)


def _choose(fits: list[Fit], known: bool) -> Fit:
    smallest = min(fit.loss for fit in fits)
    if not known:
        return next(fit for fit in fits if fit.loss <= smallest + NATS)
    best = (smallest / SHARPNESS) ** 0.5
    limit = max(NEARLY[0] * best, best + NEARLY[1])
    return next(fit for fit in fits if (fit.loss / SHARPNESS) ** 0.5 <= limit)


def _match(best: Fit, fits: list[Fit], x: Tensor, known: bool, form: tuple[int, int, int]) -> Match:
    width, num_outputs, seed = form
    module = best.shape.module(x.shape[1], width, num_outputs).to(x)
    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    own = [(n, m) for n, m in layers if n != "trend"]
    weight_var = dict(zip([n for n, _ in own], best.weight_vars, strict=True))
    bias_var = dict(zip([n for n, _ in own], best.bias_vars, strict=True))
    variances = {f"{n}.bias": bias_var[n] for n, _ in own}
    if best.trend_var is not None:
        weight_var["trend"], bias_var["trend"] = best.trend_var, 0.0
    variances |= {f"{n}.weight": weight_var[n] / m.in_features for n, m in layers}
    prior = NormalPrior(variances)
    params = {n: p.detach() for n, p in module.named_parameters()}
    drawn = prior.sample(params, 1, torch.Generator().manual_seed(seed))
    module.load_state_dict({n: v[0] for n, v in drawn.items()}, strict=False)
    kernel = nngp(copy.deepcopy(module), weight_var=weight_var, bias_var=bias_var)
    trials = tuple(_trial(fit, known) for fit in fits)
    found = _trial(best, known)
    match = Match(module.eval(), prior, kernel, best.shape, weight_var, bias_var, trials=trials)
    return replace(
        match,
        distance=found.distance,
        log_evidence=found.log_evidence,
        noise_var=best.noise_var,
    )


def _trial(fit: Fit, known: bool) -> Trial:
    if known:
        return Trial(fit.shape, (fit.loss / SHARPNESS) ** 0.5, None)
    return Trial(fit.shape, None, -fit.loss)
