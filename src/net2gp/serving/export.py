"""`export`: a posterior as one file that a server runs without net2gp."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from net2gp._version import __version__
from net2gp.errors import InputError, NotAvailable, check_flag
from net2gp.inputs import check_inputs, describe, map_inputs, num_rows, rows, tensors
from net2gp.limits import LimitKernel
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.conditioning.samples import WeightSamples
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import AroundNetwork
from net2gp.serving.files import FORMATS, write_onnx, write_pt2
from net2gp.serving.programs.answers import Answers, answering
from net2gp.serving.programs.around import EXPORTED, around_network
from net2gp.serving.programs.drawn import drawn_networks
from net2gp.serving.programs.limits import limit_process
from net2gp.serving.programs.moments import Law
from net2gp.serving.programs.tangents import tangent_process
from net2gp.serving.programs.tracing import traced
from net2gp.serving.proof import check_program
from net2gp.types import Inputs

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""The levels of quantiles, unless others are given."""

TRACED_ROWS = 3
"""The number of points that go through the network while its operations are noted."""

COMPARED_ROWS = 8
"""The number of points, and of data, at which sums in float32 are compared with those in float64."""


def export(
    posterior: Posterior[Any],
    path: str | os.PathLike,
    x: Inputs,
    *,
    format: str | None = None,
    draws: int | WeightSamples | None = None,
    novelty: bool = True,
    levels: Sequence[float] = LEVELS,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Write a posterior as a program that needs torch alone (`.pt2`) or onnxruntime alone (`.onnx`).

    The program is the sequence of tensor operations that a prediction takes, with the backward pass of the
    network written out and with roots of all covariances computed beforehand. It takes any number of points
    and returns named tensors with a row for each:

    - with Gaussian noise `mean`, `std` and `quantiles` of the target, (N, C) and (N, C, levels);
    - for classes `probabilities` as `predict` gives them, and `mean` and `std` of the logits, (N, C);
    - `epistemic` and `aleatoric`, the parts of the variance of the target, as `split` has them, (N, C);
    - `novelty`, (N,), where the posterior knows it.

    A Gaussian over weights needs no training data. Three things do, and the facts that are returned say so:
    novelty by the tangent kernel holds what layers do at the training points that it compares with, a tangent
    kernel in function space holds a matrix of weights with a column for each row of the data, and a limit
    kernel holds the training inputs.

    Before anything is written, the program is compared with the posterior at batches of one point and of
    several.

    Args:
        posterior: What `laplace`, `adapt` or `condition` returns.
        path: The file to write, in a folder that exists. It is written beside `path` and then moved there.
        x: Some points of the shape and dtype of later ones.
        format: "pt2" or "onnx"; None reads it from the ending of `path`.
        draws: Serve this many drawn networks, as `predict(x, samples=WeightSamples(draws))` has them, in
            place of the exact law. This works for any network and any law of its weights. Pass
            `WeightSamples(draws, seed)` for other draws.
        novelty: Whether training inputs count. Without them a network's predictions lack what they gain at
            novel points.
        levels: The levels of the quantiles, between 0 and 1.
        classes: The names of the classes, which the file then carries.

    Returns:
        The facts that the file carries: the method and the structure, versions, shapes, and what it holds of
        the training data.

    Raises:
        NotAvailable: If the posterior has no program; the message says which posteriors have one.
        InputError: If an argument is not of the form that is described.

    Cost: tracing takes seconds, or a minute for a deep network with many outputs. A prediction of `LastLayer`
    is a forward pass, of other structures C backward passes, of `draws` that many forward passes, and with a
    limit kernel N entries of the kernel and N² operations.

    >>> import tempfile
    >>> import net2gp as n2g
    >>> from net2gp.serving import load
    >>> x = torch.linspace(-1, 1, 8)[:, None]
    >>> network = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    >>> data = x, network.eval()(x).detach()
    >>> posterior = n2g.laplace(network, data, n2g.Gaussian(0.1), prior_var=1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     facts = export(posterior, f"{folder}/program.pt2", x)
    ...     answers = load(f"{folder}/program.pt2")(x[:2])
    >>> torch.allclose(answers["std"], posterior.predict(x[:2]).stddev, rtol=1e-4)
    True
    >>> facts["carries"]
    'nothing'

    References: Daxberger et al., Laplace redux, NeurIPS 2021; Ansel et al., PyTorch 2, ASPLOS 2024.
    """
    target = _target(path, format)
    samples = WeightSamples(draws) if isinstance(draws, int) else draws
    _check(posterior, x, samples, novelty, levels)
    law = _law(posterior, x, samples, novelty)
    answer = answering(posterior.likelihood, tuple(float(level) for level in levels))
    some = _some(x)
    names = list(x) if isinstance(x, Mapping) else [f"x{i}" for i in range(len(tensors(x)))]
    names = ["x"] if isinstance(x, Tensor) else names
    program = _program(law, answer, some, names)
    given = {"draws": samples, "novelty": novelty, "levels": levels}
    check_program(program, posterior, x, given)
    facts = _facts(posterior, law, x, names, given)
    if classes is not None:
        facts["classes"] = _names(classes, law.num_outputs)
    write = write_pt2 if target[1] == "pt2" else write_onnx
    write(program, target[0], tuple(tensors(some)), names, facts)
    return facts


def _target(path: str | os.PathLike, format: str | None) -> tuple[Path, str]:
    path = Path(path).expanduser()
    chosen = path.suffix[1:] if format is None else format
    if chosen not in FORMATS:
        what = f"{path.name} ends in '{path.suffix}'" if format is None else f"format is {format!r}"
        raise InputError(
            f"{what}, but programs are '.pt2' (for torch) or '.onnx' (for onnxruntime). Pass "
            f"{path.with_suffix('.pt2').name}, or format='pt2'."
        )
    if not path.parent.is_dir():
        raise InputError(
            f"there is no folder {path.parent} to write to. Create it, or pass another path."
        )
    if path.is_dir():
        raise InputError(f"{path} is a folder. Pass a file in it: {path / 'program.pt2'}.")
    return path, chosen


def _check(
    posterior: Posterior[Any],
    x: Inputs,
    samples: WeightSamples | None,
    novelty: bool,
    levels: Sequence[float],
) -> None:
    if not isinstance(posterior, Posterior):
        raise InputError(
            f"export takes a posterior, as n2g.laplace returns it, but got {describe(posterior)}."
        )
    check_inputs(x)
    check_flag(novelty, "novelty")
    if not isinstance(samples, WeightSamples | None):
        raise InputError(
            f"draws must be a number or WeightSamples(32), but is {describe(samples)}. Pass draws=32."
        )
    try:
        between = [0 < float(level) < 1 for level in levels]
    except (TypeError, ValueError):
        between = []
    if not between or not all(between):
        raise InputError(f"levels lie between 0 and 1, but are {levels}. Pass levels=(0.05, 0.95).")
    posterior.mean(rows(x, slice(0, 1)))  # names points of another shape or dtype


def _law(posterior: Posterior[Any], x: Inputs, samples: WeightSamples | None, novelty: bool) -> Law:
    """The law of f that has a program for this kind of posterior."""
    process = posterior.process
    if samples is not None:
        return drawn_networks(posterior, samples)
    if isinstance(process, AroundNetwork):
        known = [some for some in (x, posterior.x) if some is not None]
        few = [rows(some, slice(0, COMPARED_ROWS)) for some in known]
        return around_network(process, few, novelty=novelty)
    if isinstance(process, Conditioned | Whitened):
        if isinstance(process.kernel, TangentKernel):
            return tangent_process(process)
        if isinstance(process, Conditioned) and isinstance(process.kernel, LimitKernel):
            return limit_process(process)
    kind, kernel = type(process).__name__, type(posterior.kernel).__name__
    raise NotAvailable(
        f"a posterior of the kind {kind} with the kernel {kernel} cannot be exported. Programs have laplace "
        f"with {EXPORTED}, adapt, and condition with the kernel of a network or of its infinite-width limit. "
        "Any posterior over the weights of a network has one by draws=32."
    )


def _some(x: Inputs) -> Inputs:
    """A few points, at least two: with one of them a graph would hold for one point alone."""
    few = rows(x, torch.arange(TRACED_ROWS) % num_rows(x))
    return map_inputs(few, lambda value: value.detach().clone())


def _program(law: Law, answer: Any, some: Inputs, names: list[str]) -> fx.GraphModule:
    def function(*values: Tensor) -> Answers:
        if isinstance(some, Tensor):
            x: Inputs = values[0]
        else:
            x = dict(zip(names, values, strict=True)) if isinstance(some, Mapping) else values
        answers: Answers = answer(law.moments(x))
        return answers

    try:
        return traced(function, tensors(some))
    except (NotAvailable, InputError):
        raise
    except Exception as error:
        raise NotAvailable(
            "the operations of this posterior cannot be written as a graph for any number of points: "
            f"{str(error).splitlines()[0]}. {law.advice}"
        ) from error


def _facts(
    posterior: Posterior[Any], law: Law, x: Inputs, names: list[str], given: dict[str, Any]
) -> dict[str, Any]:
    shapes = {
        name: [str(value.dtype).removeprefix("torch."), ["N", *value.shape[1:]]]
        for name, value in zip(names, tensors(x), strict=True)
    }
    known = {**posterior.process.facts(), **posterior.recipe.facts(posterior)}
    return {
        "kind": "net2gp program",
        "format": 1,
        "method": str(
            known.get("method", type(posterior.recipe).__name__.removeprefix("By").lower())
        ),
        "structure": str(known.get("structure", law.structure)),
        "program": law.structure,
        "likelihood": type(posterior.likelihood).__name__,
        "outputs": law.num_outputs,
        "inputs": shapes,
        "carries": law.carries,
        "novelty": bool(given["novelty"]),
        "levels": [float(level) for level in given["levels"]],
        "versions": {"net2gp": __version__, "torch": torch.__version__.partition("+")[0]},
    }


def _names(classes: Sequence[str], num_outputs: int) -> list[str]:
    names = [] if isinstance(classes, str) else [str(name) for name in classes]
    if len(names) != num_outputs:
        raise InputError(
            f"classes must name {num_outputs} classes, one for each output, but has {len(names)} names."
        )
    return names
