"""Steps of a fit on a GPU, recorded once as a CUDA graph: a step is then one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from net2gp.deep.inference.stack import Stack, mirrored

Step = Callable[[Tensor], Tensor]
"""A step on rows of the data; it returns the bound before the step."""


class Recording:
    """A step that was recorded, with the places that its inputs are copied to.

    Rows, random numbers and the learning rate are read from fixed places, which are filled before each run.
    Each step has a place of its own in pinned memory, so that nothing is overwritten before it was copied;
    the caller waits for the GPU at least once in `depth` steps.

    Args:
        step: The step, all of whose state stays where it is in memory.
        stack: The layers, whose random numbers are replaced.
        rows: The rows of the first run.
        depth: The number of steps that may be under way.
    """

    def __init__(self, step: Step, stack: Stack, rows: Tensor, depth: int) -> None:
        self.rows, self.shapes = rows.clone(), list[torch.Size]()
        self.numbers: list[Tensor] = []
        self.graph = torch.cuda.CUDAGraph()
        before = stack.numbers
        stack.numbers = self._place
        try:
            with torch.cuda.graph(self.graph):
                self.bound = step(self.rows)
        finally:
            stack.numbers = before
        self.pinned = [
            [torch.empty(shape, dtype=torch.float64, pin_memory=True) for shape in self.shapes]
            for _ in range(depth)
        ]

    def _place(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Remember a shape, and give a place for its numbers."""
        self.shapes.append(shape)
        self.numbers.append(torch.empty(shape, dtype=torch.float64, device=self.rows.device))
        return self.numbers[-1]

    def run(self, number: int, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Run the step with the given number.

        Args:
            number: The number of the step.
            rows: The rows of its batch.
            generator: The source of its random numbers.

        Returns:
            The bound, on the GPU.
        """
        places = self.pinned[number % len(self.pinned)]
        for shape, pinned, place in zip(self.shapes, places, self.numbers, strict=True):
            pinned.copy_(mirrored(shape, generator))
            place.copy_(pinned, non_blocking=True)
        if rows is not self.rows:
            self.rows.copy_(rows)
        self.graph.replay()
        return self.bound.clone()


def record(step: Step, stack: Stack, rows: Tensor, depth: int) -> Recording | None:
    """Record a step, or return None if one of its operations cannot be recorded.

    Args:
        step: The step.
        stack: The layers.
        rows: Rows of a batch, on the GPU.
        depth: The number of steps that may be under way.

    Returns:
        The recording. The step itself has not run.
    """
    try:
        return Recording(step, stack, rows, depth)
    except RuntimeError:  # reads of values, copies from the host
        torch.cuda.synchronize()
        return None
