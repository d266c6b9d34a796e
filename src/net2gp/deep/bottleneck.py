"""Networks with narrow layers as deep Gaussian processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from net2gp.deep.layers import Layer
from net2gp.errors import InputError, NetworkError, check_count
from net2gp.inputs import check_inputs, describe
from net2gp.kernels import BaseKernel
from net2gp.limits import nngp
from net2gp.types import Inputs, Kernel


@dataclass(frozen=True, eq=False)
class Activated(BaseKernel):
    """k(φ(x), φ(y)): the kernel of what follows an activation. Made by `layers_of`.

    Args:
        kernel: The kernel k of the activations.
        function: φ, a module without parameters, which acts on each number by itself.
    """

    kernel: Kernel
    function: nn.Module

    def check(self, x: Inputs) -> None:
        """Raise unless `x` is a tensor whose activations the kernel takes."""
        check_inputs(x)
        self.kernel.check(self._of(x))

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k(φ(x), φ(y)): (N, M)."""
        return self.kernel(self._of(x), None if y is None or y is x else self._of(y))

    def diag(self, x: Inputs) -> Tensor:
        """k(φ(x_n), φ(x_n)): (N,)."""
        return self.kernel.diag(self._of(x))

    def precise(self) -> Kernel:
        """The same kernel of the same inputs, its results in float64."""
        return replace(self, kernel=self.kernel.precise())

    def _of(self, x: Inputs) -> Tensor:
        if not isinstance(x, Tensor):
            raise InputError(f"an activation acts on a tensor, but x is {describe(x)}.")
        return self.function(x)


def layers_of(
    network: nn.Sequential,
    *,
    narrow: int,
    weight_var: float | Tensor | None = None,
    bias_var: float | Tensor | None = None,
) -> list[Layer]:
    """Return the deep Gaussian process that a network is, if only some of its layers become wide.

    Linear layers of at most `narrow` units keep their width, and all other hidden widths go to infinity. What
    lies between two narrow layers is then a Gaussian process of the values of the first: a network without
    narrow layers is one Gaussian process, a network with one of them is a Gaussian process of a Gaussian
    process. `draw` samples it, and `limits.sample_outputs` samples the finite network beside it.

    Args:
        network: Linear layers and activations in a row.
        narrow: The largest number of units that stays as it is.
        weight_var: The variance of weights times their fan-in, as in `nngp`.
        bias_var: The variance of biases, as in `nngp`.

    Returns:
        The layers, one more than the network has narrow ones. Each width is a number of units before the
        activation; the last one is the number of outputs.

    Raises:
        InputError: If `narrow` is not a positive integer.
        NetworkError: If `network` is no Sequential that ends in a Linear layer, or a narrow layer is followed
            by something other than activations and a Linear layer.

    >>> network = nn.Sequential(
    ...     nn.Linear(2, 512), nn.GELU(), nn.Linear(512, 8), nn.GELU(), nn.Linear(8, 1)
    ... )
    >>> [layer.width for layer in layers_of(network, narrow=8, weight_var=2.0)]
    [8, 1]

    References: Duvenaud, Rippel, Adams & Ghahramani, "Avoiding pathologies in very deep networks", 2014,
    section 2; Agrawal, Papamarkou & Hinkle, "Wide neural networks with bottlenecks are deep Gaussian
    processes", 2020.
    """
    check_count(narrow, "narrow")
    modules = list(_flat(network))
    if not isinstance(network, nn.Sequential) or not isinstance(modules[-1], nn.Linear):
        raise NetworkError(
            "layers_of needs an nn.Sequential of Linear layers and activations that ends in a Linear layer, "
            f"but got a {type(network).__name__}. Put the layers into nn.Sequential(...)."
        )
    found: list[Layer] = []
    start = 0
    for place, module in enumerate(modules):
        last = place == len(modules) - 1
        if not isinstance(module, nn.Linear) or (module.out_features > narrow and not last):
            continue
        function, rest = _split(modules[start : place + 1], inner=bool(found))
        kernel: Kernel = nngp(nn.Sequential(*rest), weight_var=weight_var, bias_var=bias_var)
        found.append(
            Layer(Activated(kernel, function) if len(function) else kernel, module.out_features)
        )
        start = place + 1
    return found


def _flat(network: nn.Module) -> Iterator[nn.Module]:
    if isinstance(network, nn.Sequential):
        for module in network:
            yield from _flat(module)
    else:
        yield network


def _split(modules: Sequence[nn.Module], *, inner: bool) -> tuple[nn.Sequential, list[nn.Module]]:
    """Split what follows a narrow layer into the functions of its values and the layers with weights."""
    if not inner:
        return nn.Sequential(), list(modules)
    count = next(i for i, module in enumerate(modules) if isinstance(module, nn.Linear))
    function = deepcopy(nn.Sequential(*modules[:count])).eval()
    probe = torch.linspace(-3.0, 3.0, 12).reshape(3, 4)
    with torch.no_grad():
        pointwise = not list(function.parameters()) and not list(function.buffers())
        pointwise = pointwise and torch.equal(function(probe)[1, 1:3], function(probe[1, 1:3]))
    if not pointwise:
        names = ", ".join(type(module).__name__ for module in modules[:count])
        raise NetworkError(
            "layers_of needs activations that act on each number by itself and have no parameters after a "
            f"narrow layer, but found {names}. Use nn.ReLU(), nn.GELU(), nn.Tanh() or the like."
        )
    return function, list(modules[count:])
