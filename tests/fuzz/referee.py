"""What is right about a random network, by plain autograd row by row, and what net2gp says of it."""

from __future__ import annotations

import contextlib
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import net2gp as n2g
from fuzz.generator import Case, call, draws, reproducible
from net2gp.errors import Net2GPError
from net2gp.inputs import map_inputs, num_rows, rows
from net2gp.types import Inputs

TOLERANCE = 1e-9
PRIOR_VAR, NOISE_VAR = 0.7, 0.1
OK, REFUSED, RAW, WRONG = "ok", "refused", "raw", "wrong"
VERDICTS = OK, REFUSED, RAW, WRONG


class Unfit(Exception):
    """The network is no subject: its own derivative depends on the batch, or is zero or huge."""


@dataclass(frozen=True)
class Truth:
    """Values (N, C) and Jacobians (N·C, P) at x and z, and the parameters of the columns."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    f: Tensor
    J: Tensor
    f_z: Tensor
    J_z: Tensor
    missed: tuple[str, ...]

    def columns(self, names: list[str]) -> Tensor:
        """The columns of the parameters `names`."""
        parts = []
        for name in names:
            start = sum(self.sizes[: self.names.index(name)])
            parts.append(torch.arange(start, start + self.sizes[self.names.index(name)]))
        return torch.cat(parts)


@dataclass(frozen=True)
class Finding:
    """One question to net2gp, the verdict on its answer, and the error or the message."""

    what: str
    verdict: str
    detail: str = ""


def subject(seed: int) -> tuple[Case, Truth]:
    """The first network of this seed that has a derivative to compare with."""
    for case in draws(seed):
        try:
            return case, truth(case)
        except (Unfit, RuntimeError):
            continue  # plain autograd cannot differentiate it either
    raise RuntimeError(f"seed {seed} gives no network.")


@contextlib.contextmanager
def _all_leaves(network: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The network with every parameter open to autograd."""
    values = list(network.parameters())
    before = [value.requires_grad for value in values]
    for value in values:
        value.requires_grad_(True)
    try:
        yield values
    finally:
        for value, required in zip(values, before, strict=True):
            value.requires_grad_(required)


def truth(case: Case) -> Truth:
    names = [name for name, _ in case.network.named_parameters()]
    with _all_leaves(case.network) as values, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f, J, seen = _row_by_row(case, values, case.x)
        f_z, J_z, seen_z = _row_by_row(case, values, case.z)
        _check_batch(case, values, f, J)
        sizes = [value.numel() for value in values]
    reached = [n for n, a, b in zip(names, seen, seen_z, strict=True) if a or b]
    if not reached or not 1e-6 < float(J.abs().max()) < 300 or float(J_z.abs().max()) > 300:
        raise Unfit
    missed = tuple(name for name in names if name not in reached)
    return Truth(tuple(names), tuple(sizes), f, J, f_z, J_z, missed)


class _AsDocumented(TorchFunctionMode):
    """Cosines by the formula in torch's documentation, whose reverse mode misses the clamp at eps."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_cosine if func is F.cosine_similarity else func)(*args, **(kwargs or {}))


def _cosine(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    lengths = [torch.linalg.vector_norm(x, dim=dim) for x in (x1, x2)]
    clamped = [torch.where(length > eps, length, eps) for length in lengths]
    return (x1 * x2).sum(dim) / (clamped[0] * clamped[1])


def _value(case: Case, x: Inputs) -> Tensor:
    with _AsDocumented():
        out = call(case.network, map_inputs(x, lambda value: value.clone()))
    out = out if case.output is None else case.output(out)
    return out.reshape(num_rows(x), -1)


def _row_by_row(
    case: Case, values: list[nn.Parameter], x: Inputs
) -> tuple[Tensor, Tensor, list[bool]]:
    outs, gradients, seen = [], [], [False] * len(values)
    for n in range(num_rows(x)):
        out = _value(case, rows(x, slice(n, n + 1)))[0]
        if not out.requires_grad:
            raise Unfit
        for value in out:
            seen_now, row = _pulled_back(value, values)
            seen = [known or new for known, new in zip(seen, seen_now, strict=True)]
            gradients.append(row)
        outs.append(out.detach())
    return torch.stack(outs), torch.stack(gradients), seen


def _pulled_back(value: Tensor, values: list[nn.Parameter]) -> tuple[list[bool], Tensor]:
    """Which parameters a number depends on, and its gradient, by `backward`.

    `torch.autograd.grad` does not see the parameters inside a reentrant checkpoint.
    """
    for parameter in values:
        parameter.grad = None
    value.backward(retain_graph=True)
    found = [parameter.grad for parameter in values]
    for parameter in values:
        parameter.grad = None
    parts = [
        torch.zeros_like(p) if g is None else g.to_dense()
        for p, g in zip(values, found, strict=True)
    ]
    return [g is not None for g in found], torch.cat([g.detach().reshape(-1) for g in parts])


def _check_batch(case: Case, values: list[nn.Parameter], f: Tensor, J: Tensor) -> None:
    """Raise if the network treats a batch in another way than its points, ties of a maximum for one."""
    out = _value(case, case.x)
    weight = torch.linspace(0.5, 1.5, f.numel(), dtype=f.dtype).cos()
    _, together = _pulled_back(out.flatten() @ weight, values)
    if _error(out.detach(), f) > 1e-10 or _error(together, weight @ J) > 1e-9:
        raise Unfit


def _error(found: Tensor, right: Tensor) -> float:
    """The largest deviation, relative to the largest entry."""
    if found.numel() != right.numel():
        return math.inf
    gap = float((found.detach().reshape(right.shape) - right).abs().max())
    scale = float(right.abs().max())
    if scale == 0:
        return 0.0 if gap < 1e-12 else math.inf
    return math.inf if math.isnan(gap) else gap / scale


Question = tuple[str, Callable[[], Tensor], Callable[[], Tensor]]


def examine(
    case: Case, right: Truth, ask: Callable[[str], bool] = lambda what: True
) -> list[Finding]:
    """The verdict on each question that `ask` admits. Parameters that no point reaches are left out."""
    with reproducible(case.seed):
        only = None
        if right.missed and case.seed % 8:
            only = [name for name in right.names if name not in right.missed]
        try:
            linearized = n2g.linearize(case.network, only=only, output=case.output)
        except Exception as error:
            return [_caught("linearize", error)]
        right = _restricted(right, list(linearized.params))
        questions = *_of_kernels(case, linearized, right), *_of_posteriors(case, linearized, right)
        return [_asked(*question) for question in questions if ask(question[0])]


def _restricted(right: Truth, names: list[str]) -> Truth:
    keep = right.columns(names)
    sizes = tuple(right.sizes[right.names.index(name)] for name in names)
    J, J_z = right.J[:, keep], right.J_z[:, keep]
    return Truth(tuple(names), sizes, right.f, J, right.f_z, J_z, ())


def _asked(what: str, answer: Callable[[], Tensor], right: Callable[[], Tensor]) -> Finding:
    try:
        found = answer()
    except Exception as error:
        return _caught(what, error)
    error_size = _error(found, right())
    if error_size <= TOLERANCE:
        return Finding(what, OK)
    return Finding(what, WRONG, f"relative error {error_size:.2g}")


def _caught(what: str, error: Exception) -> Finding:
    if isinstance(error, Net2GPError):
        return Finding(what, REFUSED, str(error))
    last = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in last if "net2gp" in frame.filename]
    place = f" ({own[-1].filename.split('/')[-1]}:{own[-1].lineno})" if own else ""
    return Finding(what, RAW, f"{type(error).__name__}: {error}{place}")


def _of_kernels(case: Case, linearized: n2g.Linearized, right: Truth) -> Iterator[Question]:
    x, z, J, J_z = case.x, case.z, right.J, right.J_z
    N, C = right.f.shape
    kernel, traced = linearized.kernel(PRIOR_VAR), linearized.trace_kernel(PRIOR_VAR)
    K, K_xz = PRIOR_VAR * J @ J.T, PRIOR_VAR * J @ J_z.T
    blocks = K.reshape(N, C, N, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    mean = lambda M: M.reshape(N, C, -1, C).diagonal(dim1=1, dim2=3).mean(-1)
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    v, u, W, U = normal(J.shape[1]), normal(N, C), normal(len(J_z), 3), normal(J.shape[1], 2)
    root = PRIOR_VAR**0.5
    yield "value", lambda: linearized(x), lambda: right.f
    yield "jacobian", lambda: linearized.jacobian(x), lambda: J
    yield "kernel(x)", lambda: kernel(x), lambda: K
    yield "kernel(x, z)", lambda: kernel(x, z), lambda: K_xz
    yield "kernel.diag", lambda: kernel.diag(x), lambda: K.diagonal()
    yield "kernel.blocks", lambda: kernel.blocks(x), lambda: blocks
    yield "kernel.matmul", lambda: kernel.matmul(x, z, W), lambda: K_xz @ W
    yield "kernel.apply", lambda: kernel.apply(x, U), lambda: root * J @ U
    yield "kernel.adjoint", lambda: kernel.adjoint(z, W), lambda: root * J_z.T @ W
    yield "precise kernel", lambda: kernel.precise()(x, z), lambda: K_xz
    yield "jvp", lambda: linearized.jvp(x, linearized.unflatten(v)), lambda: J @ v
    yield "vjp", lambda: linearized.flatten(linearized.vjp(x, u)), lambda: u.flatten() @ J
    yield "trace_kernel(x)", lambda: traced(x), lambda: mean(K)
    yield "trace_kernel(x, z)", lambda: traced(x, z), lambda: mean(K_xz)


def _of_posteriors(case: Case, linearized: n2g.Linearized, right: Truth) -> Iterator[Question]:
    J, J_z = right.J, right.J_z
    y = right.f + 0.3 * torch.linspace(1, 2, right.f.numel()).sin().reshape(right.f.shape)
    noise = n2g.Gaussian(NOISE_VAR)

    def laplace(structure: object) -> Tensor:
        with _quiet():
            found = n2g.laplace(
                linearized, (case.x, y), noise, prior_var=PRIOR_VAR, structure=structure
            ).marginal(case.z)
        return _moments(found, len(right.f_z))

    def last_layer() -> Tensor:
        with _quiet():
            posterior = n2g.laplace(
                linearized, (case.x, y), noise, prior_var=PRIOR_VAR, structure=n2g.LastLayer()
            )
            names.extend(posterior.linearized.params)
            return _moments(posterior.marginal(case.z), len(right.f_z))

    def adapted() -> Tensor:
        with _quiet():
            found = n2g.adapt(linearized, (case.x, y), noise, prior_var=PRIOR_VAR)
            return _moments(found.marginal(case.z), len(right.f_z))

    names: list[str] = []
    full = lambda: _with_mean(right.f_z, _full_variance(J, J_z))
    yield "laplace Full", lambda: laplace(n2g.Full()), full
    yield (
        "laplace Diagonal",
        lambda: laplace(n2g.Diagonal()),
        lambda: _with_mean(
            right.f_z, J_z.square() @ (1 / (J.square().sum(0) / NOISE_VAR + 1 / PRIOR_VAR))
        ),
    )
    yield "laplace FunctionSpace", lambda: laplace(n2g.structures.FunctionSpace()), full
    if "head.weight" in right.names:
        yield (
            "laplace LastLayer",
            last_layer,
            lambda: _with_mean(
                right.f_z, _full_variance(*(M[:, right.columns(names)] for M in (J, J_z)))
            ),
        )
    yield (
        "adapt",
        adapted,
        lambda: _with_mean(_regression(right, y).reshape(right.f_z.shape), _full_variance(J, J_z)),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _moments(law: object, number: int) -> Tensor:
    return _with_mean(law.mean.reshape(number, -1), law.variance.reshape(-1))


def _with_mean(mean: Tensor, variance: Tensor) -> Tensor:
    """Mean and variance side by side, each relative to its own largest entry."""
    return torch.cat([mean.reshape(-1), variance.reshape(-1)])


def _full_variance(J: Tensor, J_z: Tensor) -> Tensor:
    """diag(J_z (JᵀJ/noise + I/prior)⁻¹ J_zᵀ)."""
    eye = torch.eye(J.shape[1], dtype=J.dtype)
    precision = J.T @ J / NOISE_VAR + eye / PRIOR_VAR
    return (J_z * torch.linalg.solve(precision, J_z.T).T).sum(1)


def _regression(right: Truth, y: Tensor) -> Tensor:
    """The mean of a Gaussian process around the network."""
    K = PRIOR_VAR * right.J @ right.J.T + NOISE_VAR * torch.eye(len(right.J), dtype=y.dtype)
    weight = torch.linalg.solve(K, (y - right.f).flatten())
    return right.f_z.flatten() + PRIOR_VAR * right.J_z @ (right.J.T @ weight)
