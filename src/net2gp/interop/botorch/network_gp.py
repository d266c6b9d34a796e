"""A network at infinite width as a surrogate that is fitted in one line."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Standardize
from torch import Tensor, nn

from net2gp.errors import InputError, check_finite
from net2gp.inputs import describe
from net2gp.interop.botorch.model import PosteriorModel
from net2gp.likelihoods import Gaussian
from net2gp.limits.modules.pointwise import Rbf
from net2gp.methods.kernel_fit import family_of
from net2gp.methods.most_probable import LogNormal, most_probable
from net2gp.posteriors.condition import condition
from net2gp.posteriors.posterior import Posterior
from net2gp.types import Kernel

POINTS_PER_INPUT = 2
"""How many points there must be for each input before it has a length scale of its own."""

NOISE = LogNormal(1e-3, 1.5, lower=1e-6)
"""The prior of the noise variance of standardized outcomes."""


class NetworkGP(PosteriorModel):
    """A network at infinite width, fitted to data: a surrogate for Bayesian optimization.

    Inputs are scaled to a cube of side 1 around zero, and outcomes are standardized. The hyper-parameters θ
    maximize log p(y | θ) + log p(log θ): the variances of weights and biases (or the scale of a kernel that
    has none), the noise, and length scales, all log-normal under the prior. Each input has a length scale of
    its own if there are two points for each input; with fewer, all inputs share one, as too little is known
    of them (and so do the entries of images). Cost: N³/3 and a kernel matrix for each of about 30
    evaluations.

    By default the network is Linear → sines → Linear → GELU → Linear. A layer of sines with random phases
    makes the prior the same everywhere (stationary), and the second layer lets it combine what the first one
    finds. A network of your own is a prior that knows more: convolutions for images, for instance.

    Args:
        train_X: The inputs: (N, d).
        train_Y: The outcomes: (N, C). The outputs share the hyper-parameters.
        kernel: A network, of which the covariance at infinite width is taken, `nngp(network)`,
            `ntk(network)`, or any other kernel. None takes the network above.
        train_Yvar: The variance of the noise of each outcome, (N, C). None learns one variance.
        bounds: The box of the inputs, (2, d), which becomes the unit cube. None takes the box of the data.
        input_shape: The shape of one point, if the network does not take rows of d numbers.
        start: Hyper-parameters of an earlier fit, `model.hyperparameters`, from which the search starts.

    Raises:
        InputError: If X and Y are not two-dimensional with as many rows and the same dtype, another argument
            does not fit them, or a kernel is none.

    >>> import torch
    >>> from botorch.acquisition import LogExpectedImprovement
    >>> x = torch.rand(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> y = -(x - 0.4).square().sum(1, keepdim=True)
    >>> model = NetworkGP(x, y)
    >>> LogExpectedImprovement(model, best_f=y.max())(x[:, None]).shape
    torch.Size([8])

    References: Neal, Bayesian Learning for Neural Networks, 1996 (networks as priors); Hvarfner, Hellsten
    and Nardi, Vanilla Bayesian optimization performs great in high dimensions, 2024 (length scales that
    grow with √d, as they do here since a layer divides by its fan-in).
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        kernel: Kernel | nn.Module | None = None,
        *,
        train_Yvar: Tensor | None = None,
        bounds: Tensor | None = None,
        input_shape: tuple[int, ...] | None = None,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        _check(train_X, train_Y)
        d = train_X.shape[1]
        _check_options(train_X, train_Y, train_Yvar, bounds, input_shape)
        box = Normalize(d, bounds=bounds, center=0.0)
        standardize = Standardize(train_Y.shape[1])
        y, variances = standardize(train_Y, train_Yvar)
        shape = (d,) if input_shape is None else tuple(input_shape)
        points = box(train_X).detach().reshape(-1, *shape)
        known = len(shape) == 1 and len(train_X) >= POINTS_PER_INPUT * d
        network = default_network(d) if kernel is None else kernel
        family = family_of(network, d if known else None)
        priors = dict(family.priors)
        if variances is None:
            priors["noise_var"] = NOISE

        def build(noise_var: Tensor | None = None, **values: Tensor) -> Posterior:
            noise = variances if noise_var is None else noise_var
            return condition(family.kernel(**values), (points, y.detach()), Gaussian(noise))

        found, density = most_probable(build, priors, start=start)
        super().__init__(
            build(**found),
            input_transform=box,
            outcome_transform=standardize,
            train_X=train_X,
            input_shape=shape,
        )
        self.hyperparameters, self.log_density = found, density


def default_network(d: int) -> nn.Module:
    """Return Linear → sines → Linear → GELU → Linear for d inputs."""
    return nn.Sequential(nn.Linear(d, 64), Rbf(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def _check(x: Tensor, y: Tensor) -> None:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise InputError(
            f"train_X and train_Y must be tensors, but are {describe(x)} and {describe(y)}. Pass for example "
            "torch.as_tensor(x, dtype=torch.float64)."
        )
    if x.dim() != 2 or y.dim() != 2 or len(x) != len(y):
        raise InputError(
            "train_X must have shape (N, d) and train_Y (N, C), one row for each observation, but they are "
            f"{describe(x)} and {describe(y)}. Pass y[:, None] for one outcome."
        )
    if x.dtype != y.dtype or not x.is_floating_point():
        raise InputError(
            f"train_X and train_Y must have the same floating dtype, but have {x.dtype} and {y.dtype}. Pass "
            "train_X.double() and train_Y.double()."
        )
    if 0 in (*x.shape, *y.shape):
        raise InputError(
            "NetworkGP needs an observation, with an input and an outcome, but got "
            f"{describe(x)} and {describe(y)}. Begin with a few points of a space-filling design, such as "
            "botorch.utils.sampling.draw_sobol_samples."
        )
    for name, values in (("train_X", x), ("train_Y", y)):
        check_finite(values, name)


def _check_options(
    x: Tensor,
    y: Tensor,
    variances: Tensor | None,
    bounds: Tensor | None,
    shape: tuple[int, ...] | None,
) -> None:
    d = x.shape[1]
    if variances is not None and (
        variances.shape != y.shape or variances.dtype != y.dtype or not bool((variances > 0).all())
    ):
        raise InputError(
            "train_Yvar must hold a positive variance for each outcome, with shape and dtype of train_Y, "
            f"{describe(y)}, but is {describe(variances)}. Pass torch.full_like(train_Y, 0.01), or leave it "
            "out."
        )
    if bounds is not None and (bounds.shape != (2, d) or not bool((bounds[0] < bounds[1]).all())):
        raise InputError(
            f"bounds must have shape (2, {d}), the least values above the largest ones, but are "
            f"{describe(bounds)}. Pass for example torch.tensor([[0.0] * {d}, [1.0] * {d}])."
        )
    if shape is not None and prod(shape) != d:
        raise InputError(
            f"input_shape {tuple(shape)} has {prod(shape)} entries, but train_X has {d} columns. Pass a "
            "shape with as many entries."
        )
