"""Kernels of this library inside of GPyTorch's models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, cast

import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel as GPyTorchKernel
from torch import Tensor, nn

from net2gp.errors import InputError, NotAvailable, check_positive
from net2gp.inputs import describe
from net2gp.kernels.values import is_kernel
from net2gp.limits import LimitKernel
from net2gp.limits.other_variances import with_variances
from net2gp.types import Kernel

__all__ = ["NetworkKernel"]

Builder = Callable[..., Kernel]
"""A function from hyper-parameters, by keyword, to a kernel."""


class NetworkKernel(GPyTorchKernel):
    """A kernel of this library as a `gpytorch.kernels.Kernel`, whose variances GPyTorch learns.

    Every keyword beyond those below is a positive hyper-parameter, with the value that it starts from. It
    becomes a parameter `raw_…` under the constraint `Positive()`, and the attribute of its name reads and
    sets the value itself. The rows of k(x, y) are points, or (point, output) with the outputs of one point
    beside each other, if the kernel couples C outputs. Cost: the kernel's own, once for each batch.

    Args:
        kernel: A kernel, or a function from the hyper-parameters to one, as `tune` takes it. The limit of a
            network has the hyper-parameters `weight_var` and `bias_var`, all kernels have `output_var`.
        input_shape: The shape of one point, if the kernel does not take rows of numbers. Rows are reshaped.
        batch_shape: The batch shape of the hyper-parameters.
        **initial: Hyper-parameters by name: numbers, or tensors without a batch.

    Raises:
        InputError: If a hyper-parameter is not positive, is not known to the kernel, or has a name that
            GPyTorch's kernels use themselves.

    >>> import net2gp as n2g
    >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> kernel = NetworkKernel(n2g.nngp(network), weight_var=2.0, bias_var=0.1)
    >>> [name for name, _ in kernel.named_parameters()]
    ['raw_weight_var', 'raw_bias_var']
    >>> kernel(torch.eye(2)).to_dense().shape, round(kernel.weight_var.item(), 3)
    (torch.Size([2, 2]), 2.0)

    Reference: Gardner et al., GPyTorch: blackbox matrix-matrix Gaussian process inference, 2018.
    """

    has_lengthscale = False

    def __init__(
        self,
        kernel: Kernel | Builder,
        *,
        input_shape: tuple[int, ...] | None = None,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008
        **initial: float | Tensor,
    ) -> None:
        super().__init__(batch_shape=batch_shape)
        object.__setattr__(self, "_names", ())
        self.input_shape = input_shape
        self.builder = cast(
            Builder, _builder(cast(Kernel, kernel), initial) if is_kernel(kernel) else kernel
        )
        for name, value in initial.items():
            if hasattr(GPyTorchKernel, name):
                raise InputError(
                    f"'{name}' is an attribute of all kernels of GPyTorch. Call the hyper-parameter "
                    "something else: NetworkKernel(lambda width: RBF(width), width=1.0)."
                )
            check_positive(value, name)
            start = torch.as_tensor(value, dtype=torch.float64).detach()
            raw = nn.Parameter(torch.zeros(batch_shape + start.shape))
            self.register_parameter(f"raw_{name}", raw)
            self.register_constraint(f"raw_{name}", Positive())
            object.__setattr__(self, "_names", (*self._names, name))
            setattr(self, name, start)

    def __getattr__(self, name: str) -> Any:
        """Look up a hyper-parameter by its name."""
        if name in vars(self).get("_names", ()):
            constraint = getattr(self, f"raw_{name}_constraint")
            return constraint.transform(getattr(self, f"raw_{name}"))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a hyper-parameter by its name."""
        if name not in vars(self).get("_names", ()):
            super().__setattr__(name, value)
            return
        raw = getattr(self, f"raw_{name}")
        constraint = getattr(self, f"raw_{name}_constraint")
        value = torch.as_tensor(value).to(raw).expand_as(raw)
        self.initialize(**{f"raw_{name}": constraint.inverse_transform(value)})

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor:
        """Compute k(x1, x2), (*b, N, M), or its diagonal, (*b, N); a point has C rows if outputs are coupled.

        Args:
            x1: Points: (*b, N, d).
            x2: Points: (*b, M, d).
            diag: Whether only k(x1_n, x2_n) is wanted.
            last_dim_is_batch: Refused, since a network needs all columns of a point.
            **params: Ignored.

        Returns:
            The matrix, or its diagonal.

        Raises:
            NotAvailable: If `last_dim_is_batch` is given.
        """
        if last_dim_is_batch:
            raise NotAvailable(
                "last_dim_is_batch gives each column a kernel of its own, but a network needs all columns of "
                "a point. Add kernels with active_dims instead: NetworkKernel(…) + NetworkKernel(…)."
            )
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], self.batch_shape)
        alone = x1 is x2 or (torch.equal(x1, x2) and not (x1.requires_grad or x2.requires_grad))
        first = self._points(x1, batch)
        second = first if alone else self._points(x2, batch)
        found = []
        for place in itertools.product(*map(range, batch)):
            kernel = self.kernel_at(place, batch)
            x, y = first[place], second[place]
            if diag and alone:
                found.append(kernel.diag(x))
            else:
                matrix = kernel(x) if alone else kernel(x, y)
                found.append(matrix.diagonal() if diag else matrix)
        return torch.stack(found).reshape(*batch, *found[0].shape)

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """Count the rows of each point: C if the kernel couples C outputs, otherwise 1."""
        batch = torch.broadcast_shapes(x1.shape[:-2], self.batch_shape)
        place = (0,) * len(batch)
        point = self._points(x1[..., :1, :], batch)[place]
        return self.kernel_at(place, batch).outputs(point) or 1

    def kernel_at(self, place: tuple[int, ...] = (), batch: torch.Size | None = None) -> Kernel:
        """Return the kernel for the hyper-parameters as they are now.

        Args:
            place: The index of a batch.
            batch: The shape that this is an index of. None takes the batch shape of the hyper-parameters.

        Returns:
            A kernel whose hyper-parameters require gradients.
        """
        batch = self.batch_shape if batch is None else batch
        values = {}
        for name in self._names:
            value = getattr(self, name)
            own = value.shape[len(self.batch_shape) :]
            values[name] = value.expand(torch.Size(batch) + own)[place]
        return self.builder(**values)

    def _points(self, x: Tensor, batch: torch.Size) -> Tensor:
        shape = x.shape[-1:] if self.input_shape is None else torch.Size(self.input_shape)
        if x.shape[-1] != prod(shape):
            raise InputError(
                f"x must have {prod(shape)} columns, which are read as points of shape {tuple(shape)}, but "
                f"is {describe(x)}."
            )
        return x.expand(*batch, *x.shape[-2:]).reshape(*batch, x.shape[-2], *shape)


def _builder(kernel: Kernel, initial: Mapping[str, object]) -> Builder:
    """The function from variances to kernels that belongs to a kernel."""
    own = {"weight_var", "bias_var"} if isinstance(kernel, LimitKernel) else set()
    unknown = set(initial) - own - {"output_var"}
    if unknown:
        raise InputError(
            f"{type(kernel).__name__} has the hyper-parameters {', '.join(sorted(own | {'output_var'}))}, "
            f"not {', '.join(sorted(unknown))}. Pass a function for others: "
            f"NetworkKernel(lambda {min(unknown)}: …)."
        )

    def build(output_var: Tensor | None = None, **variances: Tensor) -> Kernel:
        found = kernel
        if variances:
            assert isinstance(kernel, LimitKernel)
            found = with_variances(kernel, **variances)
        return found if output_var is None else found.scaled(output_var)

    return build
