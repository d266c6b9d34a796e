"""Operations that torch batches wrongly: a network with any of them is right in net2gp."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fuzz.calls import CALLS
from fuzz.generator import Case
from fuzz.referee import OK, examine, truth
from fuzz.survey import SIZES, arguments, compare

WRONG = [
    "F.prelu", "F.prelu, one slope", "F.prelu 2d", "torch.cdist p=1.0", "torch.cdist p=2.0",
    "torch.cdist p=2.0 of sets", "torch.cdist p=inf", "linalg.det", "linalg.slogdet", "linalg.solve",
    "linalg.solve of each", "torch.cholesky_inverse", "torch.scatter_reduce prod",
]  # fmt: skip
"""What the survey prints for torch 2.13, and what docs/numerics.md lists."""


class Operation(nn.Module):
    """An operation of the survey with its parameters, point by point."""

    def __init__(self, name: str, n: int) -> None:
        super().__init__()
        self.single, params, _ = arguments(name, n, 1)
        self.own = nn.ParameterList([nn.Parameter(value) for value in params])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.single(tuple(self.own), (point,)) for point in x])


def verdicts(name: str, n: int, count: int) -> list[tuple[str, str]]:
    _, _, (x,) = arguments(name, n, count)
    case = Case(1, Operation(name, n).eval(), x, x[:1].sin(), None, (name,))
    found = examine(case, truth(case))
    return [(f.what, f.detail) for f in found if f.verdict != OK]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(("n", "count"), [(2, 2), (3, 3), (2, 3)])
def test_a_network_with_it_is_right(name: str, n: int, count: int) -> None:
    assert verdicts(name, n, count) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_network_with_any_operation_is_right(name: str) -> None:
    for n, count in SIZES:
        try:
            compare(*arguments(name, n, count))
        except (RuntimeError, ValueError, IndexError):
            continue  # the operation does not take this size, or has no derivative there
        assert verdicts(name, n, count) == []


class Doubling(torch.autograd.Function):
    """A function whose derivative is wrong as soon as it is vectorized."""

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2 * g

    @staticmethod
    def vmap(info, in_dims, x):
        return x * 3, in_dims[0]


def test_the_survey_sees_what_is_batched_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (1, "n"), ("n", "n")
    monkeypatch.setitem(CALLS, "planted", (lambda x, w: Doubling.apply(x @ w).sin(), shapes))
    monkeypatch.setitem(CALLS, "sound", (lambda x, w: (x @ w).sin(), shapes))
    assert compare(*arguments("planted", 2, 3))["vmap(jacrev)"] > 1e-3
    assert max(compare(*arguments("sound", 2, 3)).values()) < 1e-12
