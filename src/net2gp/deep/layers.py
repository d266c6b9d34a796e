"""Layers of a deep Gaussian process, as values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from net2gp.errors import InputError, check_count
from net2gp.types import Kernel


@dataclass(frozen=True, eq=False)
class Layer:
    """`width` independent Gaussian processes of one kernel, of the outputs of the layer before.

    Args:
        kernel: The covariance of each output. The kernel of the first layer takes the inputs as they are;
            the kernel of a later layer takes tensors (N, width of the layer before).
        width: The number of outputs. A kernel that couples outputs has its own number, which `width` must
            name.

    Raises:
        InputError: If `kernel` is no kernel, or `width` is not a positive integer.

    >>> from net2gp.kernels import RBF
    >>> Layer(RBF(), width=5).width
    5

    Reference: Damianou & Lawrence, "Deep Gaussian processes", 2013.
    """

    kernel: Kernel
    width: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel):
            raise InputError(
                f"Layer needs a kernel, such as n2g.RBF(...) or n2g.nngp(network), but got a "
                f"{type(self.kernel).__name__}."
            )
        check_count(self.width, "width")


Stack = Sequence[Layer | Kernel]
"""Layers from the inputs to the outputs. A kernel by itself is a layer of one output."""


def as_layers(layers: Stack) -> tuple[Layer, ...]:
    """Make a layer of each kernel, and check that there is one."""
    if isinstance(layers, Layer | Kernel) or not isinstance(layers, Sequence):
        raise InputError(
            f"layers must be a list from the inputs to the outputs, such as [n2g.RBF()] * 2, but is a "
            f"{type(layers).__name__}."
        )
    if not layers:
        raise InputError(
            "layers is empty: at least one layer is needed, such as layers=[n2g.RBF()]."
        )
    return tuple(one if isinstance(one, Layer) else Layer(one) for one in layers)


def draw_blocks(total: int, numbers_per_draw: int, most: int = 2**22) -> Iterator[int]:
    """Split the number of draws such that a block holds at most `most` numbers at once."""
    step = max(1, most // max(1, numbers_per_draw))
    for start in range(0, total, step):
        yield min(step, total - start)
