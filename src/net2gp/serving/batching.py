"""Requests that arrive together are answered by one pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
from torch import Tensor

Batch = dict[str, Tensor]
Request = tuple[Batch, asyncio.Future[Batch]]


class Batcher:
    """Collect the points of concurrent requests, and run them together in a thread.

    The first request does not wait for others: while a pass runs, the requests that arrive meanwhile are
    gathered for the next one. So a single client has no delay, and many share passes. If a pass fails, each
    of its requests gets one of its own, so that only those fail that are to blame.

    Args:
        run: From inputs by name to answers by name, with a row for each point.
        most_points: How many points go through one pass.
    """

    def __init__(self, run: Callable[[Batch], Batch], most_points: int = 256) -> None:
        self.run = run
        self.most_points = most_points
        self.passes = 0
        self._waiting: list[Request] = []
        self._busy: asyncio.Task[None] | None = None

    async def __call__(self, x: Batch) -> Batch:
        """Return the answers for some points.

        Args:
            x: The inputs by name, with a row for each point.
        """
        future: asyncio.Future[Batch] = asyncio.get_running_loop().create_future()
        self._waiting.append((x, future))
        if self._busy is None or self._busy.done():
            self._busy = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            await self._answer(self._take())

    async def _answer(self, taken: list[Request]) -> None:
        try:
            joined = {name: torch.cat([one[name] for one, _ in taken]) for name in taken[0][0]}
            self.passes += 1
            answers = await asyncio.to_thread(self.run, joined)
        except Exception as error:  # whatever the runtime raises belongs to one of these requests
            if len(taken) > 1:
                for request in taken:
                    await self._answer([request])
            elif not taken[0][1].done():
                taken[0][1].set_exception(error)
            return
        start = 0
        for one, future in taken:
            stop = start + len(next(iter(one.values())))
            if not future.done():  # a client that went away does not want it
                future.set_result({name: value[start:stop] for name, value in answers.items()})
            start = stop

    def _take(self) -> list[Request]:
        """The requests that fit into one pass, at least one."""
        taken: list[Request] = []
        points = 0
        while self._waiting:
            size = len(next(iter(self._waiting[0][0].values())))
            if taken and points + size > self.most_points:
                break
            taken.append(self._waiting.pop(0))
            points += size
        return taken
