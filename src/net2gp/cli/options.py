"""Options that several commands share, each with its help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from net2gp.cli.running import Common, UsageError

DATA_HELP = (
    "The data: .csv, .tsv, .parquet, .npz with arrays x and y, .npy (with --target y.npy), or a folder with "
    "a folder of pictures per class."
)
NETWORK_HELP = (
    "The network: a program of torch.export (network.pt2), or what builds the module, as "
    "package.module:factory or file.py:factory; the current folder is on the path."
)
POSTERIOR_HELP = "The file that `net2gp fit` wrote."


@dataclass(kw_only=True)
class DataOptions(Common):
    """How data are read."""

    target: Annotated[
        list[str],
        typer.Option(
            help="A column of targets (may be repeated, or several with commas), or the .npy file of targets."
        ),
    ] = field(default_factory=list)
    features: Annotated[
        list[str],
        typer.Option(
            help="A column of features (may be repeated, or several with commas); all others if left out."
        ),
    ] = field(default_factory=list)
    standardize: Annotated[
        str,
        typer.Option(
            help="Which columns of a table the network takes with mean 0 and standard deviation 1: none, "
            "features, target or both. The numbers are those of the data, and kept with the posterior."
        ),
    ] = "none"
    image_size: Annotated[
        int | None, typer.Option(help="Resize pictures of a folder to this height and width.")
    ] = None
    image_mean: Annotated[
        str,
        typer.Option(help="The mean per channel that the network expects, such as 0.49,0.48,0.45."),
    ] = ""
    image_std: Annotated[
        str, typer.Option(help="The standard deviation per channel, likewise.")
    ] = ""

    def channels(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation per channel, or None."""
        if not self.image_mean and not self.image_std:
            return None
        mean, std = numbers(self.image_mean, "--image-mean"), numbers(self.image_std, "--image-std")
        if len(mean) != len(std) or min(std, default=0.0) <= 0:
            raise UsageError(
                "--image-mean and --image-std need a number per channel each, such as 0.5,0.5,0.5."
            )
        return mean, std


@dataclass(kw_only=True)
class NetworkOptions(Common):
    """How a network is built."""

    weights: Annotated[
        str,
        typer.Option(
            help="The weights: .safetensors, .npz, or a state dict that torch.save wrote."
        ),
    ] = ""
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")] = "cpu"
    dtype: Annotated[
        str, typer.Option(help="float32 or float64; that of the network if left out.")
    ] = ""


@dataclass(kw_only=True)
class MethodOptions(Common):
    """How a posterior is found."""

    task: Annotated[
        str, typer.Option(help="regression or classification; guessed if left out.")
    ] = ""
    prior_var: Annotated[
        float | None, typer.Option(help="The prior variance of the parameters; chosen if left out.")
    ] = None
    noise_var: Annotated[
        float | None,
        typer.Option(help="The variance of the noise of a regression; chosen if left out."),
    ] = None
    only: Annotated[
        list[str],
        typer.Option(help="Parameters that vary, by name, such as 'head.*' (may be repeated)."),
    ] = field(default_factory=list)
    tuning: Annotated[
        str,
        typer.Option(
            help="How laplace chooses what is open: matched, evidence, or validation on the --held-out data."
        ),
    ] = "matched"
    held_out: Annotated[
        str,
        typer.Option(
            help="Data that are kept back to score the posterior: a file, or a share such as 0.2."
        ),
    ] = ""
    seed: Annotated[
        int, typer.Option(help="The seed of what is random, such as the held-out share.")
    ] = 0


@dataclass(kw_only=True)
class PredictionOptions(Common):
    """How a posterior is opened and asked."""

    network: Annotated[
        str, typer.Option(help="The network, if it is not where it was at fit; likewise --weights.")
    ] = ""
    weights: Annotated[str, typer.Option(help="The weights, if the factory needs them.")] = ""
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")] = "cpu"
    batch_size: Annotated[
        int, typer.Option(help="How many points are predicted together.", min=1)
    ] = 256


def numbers(text: str, name: str) -> list[float]:
    """The numbers of a list with commas."""
    try:
        return [float(one) for one in text.split(",") if one.strip()]
    except ValueError:
        raise UsageError(
            f"{name} must be numbers with commas between them, but is '{text}'."
        ) from None


def one_of(value: str, known: Sequence[str], name: str) -> str:
    """Return a word if it is known, and refuse it with the words that are."""
    if value not in known:
        raise UsageError(f"{name} has no '{value}'. Known: {', '.join(known)}.")
    return value


def existing(path: str) -> Path:
    """A path without ~."""
    return Path(path).expanduser()
