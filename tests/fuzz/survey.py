"""Which operations does torch batch wrongly? `python tests/fuzz/survey.py`

Each operation of `calls.CALLS` is differentiated in its parameters by plain autograd, one point and one
output at a time, and by torch's vectorized ways: `vmap(jacrev)` over points, `jacrev` and `jacfwd` of a
whole batch (a vmap over outputs or parameters), and `jvp` by itself. All sizes are 2 or 3, the numbers of
points and of outputs (by a fixed matrix behind the operation) too. Central differences confirm the plain
gradient. With `--op-db` the operations and samples of torch's own test suite follow, where it can be
imported (it needs the package expecttest). Prints what differs; what raises an error is left out.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev, jvp, vmap

from fuzz.calls import CALLS

TOLERANCE = 1e-9
SIZES = (2, 2), (2, 3), (3, 3), (3, 2)
"""The common size of all axes and outputs, and the number of points."""

Params = tuple[Tensor, ...]
Single = Callable[[Params, Params], Tensor]
"""From parameters and one point (a batch of one) to all outputs, flat."""


def arguments(name: str, n: int, points: int) -> tuple[Single, Params, Params]:
    """The operation as a function of parameters and a point, parameters, and points, all sizes `n`."""
    function, shapes = CALLS[name]
    generator = torch.Generator().manual_seed(7 * n)
    sizes = [[n if size == "n" else size for size in shape] for shape in shapes]
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    x = normal(points, *sizes[0][1:])
    params = tuple(normal(*shape) for shape in sizes[1:])
    gain = normal(*sizes[0][1:])  # so that the gradient in the first argument counts too

    def single(params: Params, point: Params) -> Tensor:
        *own, gain = params
        out = function(point[0][None] + 0.1 * gain, *own).reshape(-1)
        places = torch.arange(n * out.numel(), dtype=out.dtype)
        return places.reshape(n, -1).cos() @ out

    return single, (*params, gain), (x,)


def plain(single: Single, params: Params, points: Params) -> Tensor:
    """(N, C, P) by one autograd.grad for each point and output."""
    blocks = []
    for n in range(len(points[0])):
        leaves = tuple(p.detach().clone().requires_grad_() for p in params)
        out = single(leaves, tuple(x[n] for x in points))
        if not out.requires_grad:
            raise RuntimeError("no gradient")
        rows = [
            torch.autograd.grad(
                value, leaves, retain_graph=True, materialize_grads=True, allow_unused=True
            )
            for value in out
        ]
        blocks.append(torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows]))
    return torch.stack(blocks)


def ways(single: Single, params: Params, points: Params) -> Iterator[tuple[str, Callable]]:
    """Torch's vectorized Jacobians: a name, and a function that gives (N, C, P)."""
    N = len(points[0])
    flat = lambda parts, lead: torch.cat([part.reshape(*lead, -1) for part in parts], -1)

    def together(params: Params) -> Tensor:
        return torch.stack([single(params, tuple(x[n] for x in points)) for n in range(N)])

    def by_points(transform: Callable) -> Callable[[], Tensor]:
        def jacobian() -> Tensor:
            parts = vmap(transform(single), in_dims=(None, 0))(params, points)
            return flat(parts, parts[0].shape[:2])

        return jacobian

    def by_batch(transform: Callable) -> Callable[[], Tensor]:
        def jacobian() -> Tensor:
            parts = transform(together)(params)
            return flat(parts, parts[0].shape[:2])

        return jacobian

    def by_jvp() -> Tensor:
        units = torch.eye(sum(sizes := [p.numel() for p in params]), dtype=params[0].dtype)
        tangents = [
            tuple(t.reshape(p.shape) for t, p in zip(unit.split(sizes), params, strict=True))
            for unit in units
        ]
        return torch.stack([jvp(together, (params,), (t,))[1] for t in tangents], -1)

    yield "vmap(jacrev)", by_points(jacrev)
    yield "vmap(jacfwd)", by_points(jacfwd)
    yield "jacrev", by_batch(jacrev)
    yield "jacfwd", by_batch(jacfwd)
    yield "jvp", by_jvp


def differences(single: Single, params: Params, points: Params, step: float = 1e-6) -> Tensor:
    """(N, C, P) by central differences."""
    sizes = [p.numel() for p in params]
    center = torch.cat([p.reshape(-1) for p in params])

    def at(vector: Tensor) -> Tensor:
        pieces = vector.split(sizes)
        own = tuple(t.reshape(p.shape) for t, p in zip(pieces, params, strict=True))
        count = len(points[0])
        return torch.stack([single(own, tuple(x[n] for x in points)) for n in range(count)])

    units = step * torch.eye(len(center), dtype=center.dtype)
    return torch.stack([(at(center + e) - at(center - e)) / (2 * step) for e in units], -1)


def compare(single: Single, params: Params, points: Params) -> dict[str, float | None]:
    """The relative error of each way; None where torch raises an error."""
    right = plain(single, params, points)
    scale = float(right.abs().max()) or 1.0
    gap = (differences(single, params, points) - right).abs()
    if not float(torch.where(right.isnan(), 0.0, gap).max()) < 1e-4 * scale:
        raise ValueError("plain autograd is not the derivative here")
    found: dict[str, float | None] = {}
    for name, jacobian in ways(single, params, points):
        try:
            given = jacobian()
        except Exception:
            found[name] = None
            continue
        same = given.shape == right.shape
        gap = (given - right).abs() / scale if same else torch.tensor(torch.inf)
        found[name] = float(torch.where(right.isnan(), 0.0, gap).max()) if same else torch.inf
    return found


def survey(names: list[str] | None = None) -> dict[str, dict[str, list[str]]]:
    """For each operation that some way gets wrong: the ways, and the sizes with the errors."""
    wrong: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names or CALLS:
        for n, count in SIZES:
            try:
                found = compare(*arguments(name, n, count))
            except (RuntimeError, ValueError, IndexError):
                continue  # an operation that does not take this size, or has no gradient
            for way, error in found.items():
                if error is not None and not error < TOLERANCE:
                    wrong[name][way].append(f"n={n}, {count} points: {error:.2g}")
    return wrong


def survey_op_db(limit: int = 12) -> dict[str, dict[str, list[str]]]:
    """The same for the operations and samples of torch's own test suite."""
    from torch.testing._internal.common_methods_invocations import op_db

    wrong: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for op in op_db:
        if not op.supports_autograd or torch.float64 not in op.dtypes:
            continue
        title = ".".join(filter(None, [op.name, op.variant_test_name]))
        try:
            samples = [s for _, s in zip(range(limit), op.sample_inputs("cpu", torch.float64))]  # noqa: B905
        except Exception:
            continue
        for number, sample in enumerate(samples):
            for way, where in _of_sample(op, sample).items():
                wrong[title][way].append(f"sample {number}, {where}")
        print(f"\r{title:60s}", end="", file=sys.stderr, flush=True)
    return wrong


def _of_sample(op: object, sample: object) -> dict[str, str]:
    given = [sample.input, *sample.args]
    places = [i for i, v in enumerate(given) if isinstance(v, Tensor) and v.dtype == torch.float64]
    if 0 not in places or sum(given[i].numel() for i in places) > 60:
        return {}

    def single(params: Params, point: Params) -> Tensor:
        values = list(given)
        for i, value in zip(places, params, strict=True):
            values[i] = value
        values[0] = params[0] * (1 + point[0])
        out = op.op(*values, **sample.kwargs)
        outs = [out] if isinstance(out, Tensor) else [o for o in out if isinstance(o, Tensor)]
        return torch.cat([o.reshape(-1) for o in outs if o.is_floating_point()])

    params = tuple(given[i].detach().clone() for i in places)
    wrong: dict[str, str] = {}
    try:
        out = single(params, (torch.zeros(()),))
        if out.numel() > 30 or not torch.equal(out, single(params, (torch.zeros(()),))):
            return {}
        for count in sorted({2, 3, out.numel(), *params[0].shape[:1]} - {0, 1}):
            points = (0.02 * torch.arange(count, dtype=torch.float64),)
            for way, error in compare(single, params, points).items():
                if error is not None and not error < 1e-8:
                    wrong.setdefault(way, f"{count} points: {error:.2g}")
    except Exception:
        return wrong
    return wrong


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--op-db", action="store_true")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    arguments = given.parse_args()
    print(f"torch {torch.__version__}, {len(CALLS)} calls")
    parts = [survey(), *([survey_op_db()] if arguments.op_db else [])]
    for wrong in parts:
        print(f"\n{len(wrong)} operations come out wrong in some way:")
        for name, by_way in wrong.items():
            for way, sizes in by_way.items():
                print(f"{name:36s}{way:14s}{len(sizes):3d} cases, e.g. {sizes[-1]}")


if __name__ == "__main__":
    main()
