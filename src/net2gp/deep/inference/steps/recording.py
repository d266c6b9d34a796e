"""Steps of a fit on a GPU, recorded once as a CUDA graph: a step is then one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from net2gp.deep.inference.stack import Stack, mirrored

WARM = 3
"""The number of plain steps before one is recorded: they make all that is kept between steps."""

Step = Callable[[Tensor, torch.Generator, float], Tensor]
"""A step on rows of the data, with a length of the step of the last layer; it returns the bound before it."""


class Recording:
    """A step that was recorded, with the places that its inputs are copied to.

    Rows, random numbers and the learning rate are read from fixed places, which are filled before each run.
    Each step has a place of its own in pinned memory, so that nothing is overwritten before it was copied;
    the caller waits for the GPU at least once in `depth` steps.

    Args:
        step: The step, all of whose state stays where it is in memory.
        stack: The layers, whose random numbers are replaced.
        rows: The rows of the first run.
        rate: The length of the step of the last layer.
        depth: The number of steps that may be under way.
    """

    def __init__(self, step: Step, stack: Stack, rows: Tensor, rate: float, depth: int) -> None:
        self.rows, self.shapes, self.rate = rows.clone(), list[torch.Size](), rate
        self.numbers: list[Tensor] = []
        self.graph = torch.cuda.CUDAGraph()
        before = stack.numbers
        stack.numbers = self._place
        try:
            with torch.cuda.graph(self.graph):
                self.bound = step(self.rows, torch.Generator(), rate)
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
        self.rows.copy_(rows)
        self.graph.replay()
        return self.bound.clone()


class Recorder:
    """Takes steps of a fit: plain ones on a CPU, and on a GPU recorded ones after the first few.

    Args:
        step: The step.
        stack: The layers.
        depth: The number of steps that may be under way.
    """

    def __init__(self, step: Step, stack: Stack, depth: int) -> None:
        self.step, self.stack, self.depth = step, stack, depth
        self.possible = stack.precision.is_cuda and bool(stack.leaves)
        self.plain_steps = 0
        self.recording: Recording | None = None

    def __call__(
        self, number: int, rows: Tensor, generator: torch.Generator, rate: float
    ) -> Tensor:
        """Take the step with the given number, and return the bound before it."""
        if self.possible and self.plain_steps >= WARM:
            self._record(rows, rate)
        if self.recording is not None:
            return self.recording.run(number, rows, generator)
        self.plain_steps += 1
        return self.step(rows, generator, rate)

    def _record(self, rows: Tensor, rate: float) -> None:
        """Record the step, unless it is recorded for this length or an operation cannot be recorded."""
        if self.recording is not None and self.recording.rate == rate:
            return
        self.recording = None  # its memory is free for the next one
        try:
            self.recording = Recording(self.step, self.stack, rows, rate, self.depth)
        except RuntimeError:  # a value was read, or copied from the host
            torch.cuda.synchronize()
            self.possible = False

    def stop(self) -> None:
        """Take plain steps from now on."""
        self.recording, self.possible = None, False

    def rest(self) -> None:
        """Free the memory of a recording; the next step makes another one."""
        self.recording = None
