"""A thread that trains keeps its checkpoints and its autocast while another one evaluates a linearization."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from architectures import Apply
from net2gp.linear import linearize

Result = TypeVar("Result")

WAIT = 60.0


def meanwhile(work: Callable[[], Result]) -> tuple[Tensor, Result]:
    """The outputs of a linearized network, and what `work` gives in this thread while the network runs."""
    entered, done = threading.Event(), threading.Event()

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        entered.set()
        assert done.wait(WAIT)
        return checkpoint(self.layer, x, use_reentrant=False)

    linearized = linearize(Apply(forward, layer=nn.Linear(3, 2)))
    linearized.network.eval()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(linearized, torch.ones(4, 3))
        assert entered.wait(WAIT)
        try:
            found = work()
        finally:
            done.set()
        return result.result(WAIT), found


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_another_thread_recompute(reentrant: bool) -> None:
    def runs_of_a_step() -> int:
        runs = 0

        def square(x: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            return x.square()

        x = torch.ones(3, requires_grad=True)
        checkpoint(square, x, use_reentrant=reentrant).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))
        return runs

    out, runs = meanwhile(runs_of_a_step)
    assert out.shape == (4, 2)
    assert runs == runs_of_a_step() == 2


def test_autocast_of_another_thread_stays_on() -> None:
    def dtype_of_a_product() -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16):
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    out, dtype = meanwhile(dtype_of_a_product)
    assert out.dtype == torch.float32
    assert dtype == dtype_of_a_product() == torch.bfloat16
