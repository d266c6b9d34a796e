"""`net2gp kernel`: the kernel matrix of a network on data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from net2gp.cli.files import check_output
from net2gp.cli.options import DATA_HELP, NETWORK_HELP, DataOptions, NetworkOptions, one_of
from net2gp.cli.predicting import write_arrays
from net2gp.cli.problem import STANDARDIZED, Reading, example, placed, standardized_columns
from net2gp.cli.reading.data import Loaded, Wanted, read_data
from net2gp.cli.reading.networks import Source, build
from net2gp.cli.running import Result
from net2gp.data.scaling import Scaling

KERNELS = ("nngp", "ntk", "tangent")


@dataclass(kw_only=True)
class KernelOptions(DataOptions, NetworkOptions):
    """A network, data, and which kernel."""

    network: Annotated[str, typer.Argument(help=NETWORK_HELP)]
    data: Annotated[Path, typer.Argument(help=DATA_HELP)]
    kind: Annotated[
        str,
        typer.Option(
            help="nngp or ntk (of the architecture, at infinite width), or tangent (of the network itself, "
            "with its parameters; outputs of a point are neighboring rows)."
        ),
    ] = "nngp"
    weight_var: Annotated[
        float, typer.Option(help="The variance of weights times their fan-in, for nngp and ntk.")
    ] = 1.0
    bias_var: Annotated[float, typer.Option(help="The variance of biases, for nngp and ntk.")] = 0.0
    prior_var: Annotated[
        float, typer.Option(help="The prior variance of the parameters, for tangent.")
    ] = 1.0
    output: Annotated[Path, typer.Option("--output", "-o", help="The .npz file to write.")] = Path(
        "kernel.npz"
    )


def kernel(options: KernelOptions) -> Result:
    """Compute the kernel matrix of a network on data.

    \b
    Examples:
      net2gp kernel model.py:build train.csv --target price --kind ntk -o kernel.npz
      net2gp kernel resnet20.pt2 cifar.npz --kind tangent --prior-var 0.1

    The file holds the array kernel, (N, N), or (N·C, N·C) if C outputs are coupled.
    """
    path = check_output(options.output, [".npz"])
    one_of(options.kind, KERNELS, "--kind")
    one_of(options.standardize, STANDARDIZED, "--standardize")
    wanted = Wanted(options.target, options.features, options.image_size)
    loaded = read_data(options.data, wanted)
    source = Source(options.network, options.weights)
    network = placed(build(source), options.device, options.dtype)
    x = _scaled(options, loaded).inputs(loaded, example(network))
    matrix = _matrix(options, network, x)
    write_arrays(path, {"kernel": matrix})
    values = {
        "output": path,
        "kind": options.kind,
        "shape": matrix.shape,
        "trace": float(np.trace(matrix)),
    }
    rows, columns = matrix.shape
    return Result(
        values, f"{path}: {options.kind}, {rows} × {columns}, trace {values['trace']:.6g}."
    )


def _scaled(options: KernelOptions, loaded: Loaded) -> Reading:
    channels = options.channels()
    if channels is not None:
        return Reading("", scaling=Scaling(*channels))
    if options.standardize in ("features", "both"):
        return Reading("", scaling=standardized_columns(loaded, options.standardize))
    return Reading("")


def _matrix(options: KernelOptions, network: torch.nn.Module, x: torch.Tensor) -> np.ndarray:
    from net2gp import linearize, nngp, ntk

    if options.kind == "tangent":
        found = linearize(network).kernel(prior_var=options.prior_var)
        return found(x).detach().cpu().numpy()
    make = ntk if options.kind == "ntk" else nngp
    limit = make(network, weight_var=options.weight_var, bias_var=options.bias_var)
    return limit(x).detach().cpu().numpy()
