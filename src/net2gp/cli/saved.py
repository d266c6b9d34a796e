"""Posteriors in files, with what a later command needs to know: the network's place, columns and units."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from net2gp.cli.files import digest
from net2gp.cli.options import PredictionOptions
from net2gp.cli.problem import Reading, placed
from net2gp.cli.reading.data import Loaded, read_data
from net2gp.cli.reading.networks import Source, build, is_program
from net2gp.cli.running import say
from net2gp.errors import FileFormatError, InputError
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.saving.save import load, note_of
from net2gp.posteriors.writing import check_value, write


@dataclass(frozen=True)
class Note:
    """What is kept beside a posterior.

    Args:
        reading: How files are read.
        network: Where the network is: see `Source.as_dict`.
        method: The method by name.
        settings: Numbers and names that steered it.
        data: The training data.
        held_out: The share of `data` that was held out with its seed, or a file; empty if there is none.
        dtype: The dtype that was chosen, or nothing.
        command: What was typed.
    """

    reading: Reading
    network: dict[str, str]
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    held_out: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""
    command: str = ""

    def text(self) -> str:
        """The note as JSON."""
        return json.dumps({**vars(self), "reading": self.reading.as_dict()})

    @classmethod
    def read(cls, path: Path) -> Note:
        """Read the note of a file.

        Raises:
            InputError: If the file is of another kind.
            FileFormatError: If there is no such file, or it has none.
        """
        if path.suffix.lower() != ".safetensors":
            raise InputError(
                f"{path} is no posterior. Pass the .safetensors file that net2gp fit wrote: fit NETWORK DATA "
                "comes first."
            )
        text = note_of(path)
        if not text:
            raise FileFormatError(
                f"{path} was saved by Python, without a note on its network and columns. Write it with "
                "net2gp fit, or load it with net2gp.load."
            )
        try:
            found = json.loads(text)
            return cls(**{**found, "reading": Reading.from_dict(found["reading"])})
        except (ValueError, TypeError, KeyError) as error:
            raise FileFormatError(
                f"the note of {path} is of another version ({error}). Fit again."
            ) from None


def save_posterior(posterior: Posterior, path: Path, note: Note) -> None:
    """Write a posterior and its note to one file, or nothing."""
    from safetensors import SafetensorError

    try:
        write(posterior, check_value(posterior), path, note.text())
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} could not be written: {error}. Free some space, or pass another --output. Older files "
            "are as they were."
        ) from None


def open_posterior(path: Path, options: PredictionOptions) -> tuple[Posterior, Note, nn.Module]:
    """Read a posterior with the network that it is of.

    Args:
        path: The file.
        options: Where the network is, if it was moved.

    Returns:
        The posterior, its note, and the network.

    Raises:
        FileFormatError: If the file is corrupted.
        InputError: If the network is not where it was, or is another one.
    """
    path = path.expanduser()
    note = Note.read(path)
    network = placed(build(_source(note, options)), "cpu", note.dtype)
    posterior = load(path, network)
    return posterior.to(options.device) if options.device != "cpu" else posterior, note, network


def _source(note: Note, options: PredictionOptions) -> Source:
    """Where the network is now: where it was told to be, or where it was at fit."""
    if options.network:
        return Source(options.network, options.weights)
    known = note.network["network"]
    file = Path(known.partition(":")[0] if not is_program(known) else known)
    if file.suffix in (".py", ".pt2") and not file.is_file():
        raise InputError(
            f"the network is not where it was at fit, {file}. Pass --network with its new place."
        )
    source = Source(known, options.weights or note.network["weights"])
    if source.weights and not options.weights and not Path(source.weights).is_file():
        # the posterior holds the numbers: the module is needed for its code alone
        source = Source(known)
    elif (
        source.files
        and source.files[0].is_file()
        and digest(source.files[0]) != note.network.get("sha256")
    ):
        say(
            f"{source.files[0]} has changed since fit. Predictions are with the weights of the time of the "
            "fit."
        )
    return source


def read_held_out(note: Note, given: str | None, target: Sequence[str] = ()) -> Loaded:
    """Read held-out data: those of a file, or the share that `fit` held out.

    Args:
        note: What is known of the posterior.
        given: A file, or None for what was held out at fit.
        target: The file of its targets, if it is a .npy.
    """
    wanted = note.reading.wanted(needs_target=True)
    if given:
        return read_data(Path(given), replace(wanted, target=target or wanted.target))
    if not note.held_out:
        raise InputError(
            "no data were held out at fit. Pass --held-out FILE, or fit with --held-out 0.2."
        )
    if "path" in note.held_out:
        return read_data(Path(note.held_out["path"]), wanted)
    target = note.held_out.get("target", wanted.target)
    whole = read_data(Path(note.data), replace(wanted, target=target))
    return whole.divided(note.held_out["share"], note.held_out["seed"])[1]
