"""Steps of a fit on a GPU, recorded once as a CUDA graph: a step is then one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from net2gp.deep.inference.stack import Numbers, Stack, mirrored

WARM = 3
"""The number of plain steps before one is recorded: they make all that is kept between steps."""

Step = Callable[[Tensor, torch.Generator, float | Tensor], Tensor]
"""A step on rows of the data, with a length of the step of the last layer; it returns the bound before it."""


class Recording:
    """A step that was recorded, with the places that its inputs are copied to.

    Rows, random numbers and rates are read from fixed places, which are filled before each run. These are
    made before the recording: a place that is made within it may lie where an earlier operation of the same
    step writes. Each step has a place of its own in pinned memory, so that nothing is overwritten before it
    was copied; the caller waits for the GPU at least once in `depth` steps.

    Args:
        step: The step, all of whose state stays where it is in memory.
        stack: The layers, whose random numbers are replaced.
        rows: The rows of the first run.
        shapes: The shapes of the random numbers of a step, in the order in which they are drawn.
        depth: The number of steps that may be under way.
    """

    def __init__(
        self, step: Step, stack: Stack, rows: Tensor, shapes: list[torch.Size], depth: int
    ) -> None:
        self.rows, self.shapes = rows.clone(), shapes
        self.rate = torch.zeros((), dtype=torch.float64, device=rows.device)
        self.numbers = [torch.empty(s, dtype=torch.float64, device=rows.device) for s in shapes]
        self.graph, places = torch.cuda.CUDAGraph(), iter(self.numbers)
        with drawing(stack, lambda shape, generator: next(places)), torch.cuda.graph(self.graph):
            self.bound = step(self.rows, torch.Generator(), self.rate)
        self.pinned = [
            [torch.empty(shape, dtype=torch.float64, pin_memory=True) for shape in self.shapes]
            for _ in range(depth)
        ]

    def run(self, number: int, rows: Tensor, generator: torch.Generator, rate: float) -> Tensor:
        """Run the step with the given number.

        Args:
            number: The number of the step.
            rows: The rows of its batch.
            generator: The source of its random numbers.
            rate: The length of the step of the last layer.

        Returns:
            The bound, on the GPU.
        """
        places = self.pinned[number % len(self.pinned)]
        for shape, pinned, place in zip(self.shapes, places, self.numbers, strict=True):
            pinned.copy_(mirrored(shape, generator))
            place.copy_(pinned, non_blocking=True)
        self.rows.copy_(rows)
        self.rate.fill_(rate)
        self.graph.replay()
        return self.bound.clone()


@contextmanager
def drawing(stack: Stack, numbers: Numbers) -> Iterator[None]:
    """Let layers take their random numbers from elsewhere."""
    before, stack.numbers = stack.numbers, numbers
    try:
        yield
    finally:
        stack.numbers = before


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
        self.plain_steps, self.shapes = 0, list[torch.Size]()
        self.recording: Recording | None = None

    def __call__(
        self, number: int, rows: Tensor, generator: torch.Generator, rate: float
    ) -> Tensor:
        """Take the step with the given number, and return the bound before it."""
        if self.possible and self.plain_steps >= WARM:
            self._record(rows)
        if self.recording is not None:
            return self.recording.run(number, rows, generator, rate)
        self.plain_steps, self.shapes = self.plain_steps + 1, []
        with drawing(self.stack, self._drawn):
            return self.step(rows, generator, rate)

    def _drawn(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Draw numbers, and remember their shape."""
        self.shapes.append(shape)
        return mirrored(shape, generator)

    def _record(self, rows: Tensor) -> None:
        """Record the step, unless it is recorded already or one of its operations cannot be."""
        if self.recording is not None:
            return
        try:
            self.recording = Recording(self.step, self.stack, rows, self.shapes, self.depth)
        except RuntimeError:  # a value was read, or copied from the host
            torch.cuda.synchronize()
            self.possible = False

    def stop(self) -> None:
        """Take plain steps from now on."""
        self.recording, self.possible = None, False

    def rest(self) -> None:
        """Free the memory of a recording; the next step makes another one."""
        self.recording = None
