"""Data of every kind of file: inputs as an array, and targets as they are written there."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from net2gp.cli.reading import images, tables
from net2gp.errors import FileFormatError, InputError


@dataclass(frozen=True)
class Wanted:
    """What is to be read.

    Args:
        target: Names of target columns, or the .npy file of targets.
        features: Names of feature columns.
        image_size: Height and width to which pictures are resized.
        needs_target: Whether there must be targets.
    """

    target: Sequence[str] = ()
    features: Sequence[str] = ()
    image_size: int | None = None
    needs_target: bool = False


@dataclass(frozen=True, eq=False)
class Loaded:
    """Data as they are in a file.

    Args:
        path: The file or folder.
        x: The inputs, (N, …).
        y: The targets: numbers (N, C), labels (N,) as integers or text, or None.
        features: Names of the columns of a table.
        targets: Names of its targets.
    """

    path: Path
    x: np.ndarray
    y: np.ndarray | None
    features: Sequence[str] = field(default_factory=tuple)
    targets: Sequence[str] = field(default_factory=tuple)

    @property
    def pixels(self) -> bool:
        """Whether inputs look like pictures whose values are shares of white: in [0, 1]."""
        return self.x.ndim > 2 and float(self.x.min()) >= 0 and float(self.x.max()) <= 1

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, chosen: np.ndarray) -> Loaded:
        """Return some of the points."""
        return replace(self, x=self.x[chosen], y=None if self.y is None else self.y[chosen])

    def divided(self, share: float, seed: int) -> tuple[Loaded, Loaded]:
        """Return a random share of the points, and before it the others, the same for equal seeds."""
        count = round(share * len(self)) if math.isfinite(share) else 0
        if not 0 < count < len(self):
            raise InputError(
                f"--held-out {share} of {len(self)} points are {count}, but there must be some on both "
                "sides. Pass for example --held-out 0.2."
            )
        order = np.random.default_rng(seed).permutation(len(self))
        return self.rows(np.sort(order[count:])), self.rows(np.sort(order[:count]))


def read_data(path: Path, wanted: Wanted) -> Loaded:
    """Read csv, tsv, parquet, npz, npy, or a folder of pictures.

    Args:
        path: The file or folder.
        wanted: Which columns, and whether targets are needed.

    Returns:
        The data.

    Raises:
        InputError: If it is not there, lacks a column or an array, or has numbers that are not finite.
        FileFormatError: If it cannot be read.
    """
    path = path.expanduser()
    if not path.exists():
        raise InputError(
            f"there is no file or folder {path}. Pass data as .csv, .parquet, .npz (arrays x, y), .npy, or "
            "a folder of pictures."
        )
    kind = "folder" if path.is_dir() else path.suffix.lower()
    if kind not in _READERS:
        raise InputError(
            f"{path} ends in {path.suffix or 'nothing'}, but data are read from {', '.join(_READERS)}."
        )
    found = _READERS[kind](path, wanted)
    if wanted.needs_target and found.y is None:
        raise InputError(f"{path} has no targets. {_ADVICE[kind]}")
    for name, values in (("x", found.x), ("y", found.y)):
        if values is not None and not np.ndim(values):
            raise InputError(
                f"{path} holds a single number as {name}. Give it a first axis of points: a single one is "
                f"{name}[None]."
            )
    if found.y is not None and len(found.y) != len(found.x):
        raise InputError(
            f"{path} has {len(found.x)} inputs and {len(found.y)} targets. Give both as many rows."
        )
    if not len(found):
        raise InputError(f"{path} holds no points.")
    for name, values in (("inputs", found.x), ("targets", found.y)):
        if values is not None and values.dtype.kind == "f" and not np.isfinite(values).all():
            bad = ~np.isfinite(values.reshape(len(values), -1)).all(1)
            raise InputError(
                f"the {name} of {path} are NaN or infinite in {int(bad.sum())} rows (first in "
                f"{_place(path, name, int(bad.argmax()))}). Drop these rows."
            )
    return found


def _place(path: Path, name: str, row: int) -> str:
    """Where a point is: a line of a table, or an index of an array."""
    if path.suffix.lower() in tables.SUFFIXES:
        return tables.place(path, row)
    return f"{'x' if name == 'inputs' else 'y'}[{row}]"


def _table(path: Path, wanted: Wanted) -> Loaded:
    table = tables.read_table(path)
    chosen = tables.choose_columns(path, table, wanted.features, wanted.target, wanted.needs_target)
    features, targets = chosen
    y = tables.targets_of(path, table, targets) if targets else None
    return Loaded(path, tables.numbers(path, table, features), y, features, targets)


def _npz(path: Path, wanted: Wanted) -> Loaded:
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = {name.lower(): name for name in archive.files}
            if "x" not in names:
                raise InputError(
                    f"{path} must hold the arrays x and y, but holds {', '.join(archive.files)}."
                )
            return Loaded(
                path,
                _inputs(archive[names["x"]]),
                _targets(archive[names["y"]] if "y" in names else None),
            )
    except InputError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise FileFormatError(f"{path} is not a readable .npz of plain arrays ({error}).") from None


def _npy(path: Path, wanted: Wanted) -> Loaded:
    given = [Path(name).expanduser() for name in wanted.target]
    if not wanted.needs_target:  # new data after a fit to a table, whose targets were columns
        given = [one for one in given if one.suffix == ".npy"]
    if len(given) > 1 or (given and given[0].suffix != ".npy"):
        raise InputError(
            f"the targets of {path} are another file. Pass for example --target y.npy."
        )
    arrays = []
    for one in (path, *given):
        try:
            arrays.append(np.load(one, allow_pickle=False))
        except (ValueError, OSError, EOFError) as error:
            raise FileFormatError(
                f"{one} is not a readable .npy of a plain array ({error})."
            ) from None
    return Loaded(path, _inputs(arrays[0]), _targets(arrays[1] if given else None))


def _folder(path: Path, wanted: Wanted) -> Loaded:
    x, y, _ = images.read_images(path, wanted.image_size)
    return Loaded(path, x, y)


def _inputs(x: np.ndarray) -> np.ndarray:
    """Inputs of a file: bytes of images as numbers in [0, 1], with channels in front of height and width."""
    if x.dtype.kind not in "fiub" or x.ndim == 0:
        raise InputError(
            f"x must hold numbers, one row per point, but has dtype {x.dtype} and shape {x.shape}."
        )
    if x.dtype == np.uint8 and x.ndim >= 3:
        if x.ndim == 3:
            x = x[..., None]
        if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        return (x / np.float32(255)).astype(np.float32)
    return _torchs(x[:, None] if x.ndim == 1 else x)


def _targets(y: np.ndarray | None) -> np.ndarray | None:
    if y is None:
        return None
    if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind != "f":
        y = y[:, 0]
    if y.dtype.kind in "US":
        return y.astype(str)
    if y.dtype.kind not in "fiub":
        raise InputError(f"y must hold numbers or labels, but has dtype {y.dtype}.")
    if y.dtype.kind in "iub":
        return y.astype(np.int64)
    return _torchs(y[:, None] if y.ndim == 1 else y)


def _torchs(values: np.ndarray) -> np.ndarray:
    """Numbers of a kind that torch has: those of extended precision become float64."""
    return values.astype(np.float64) if values.dtype == np.longdouble else values


_READERS = {
    **dict.fromkeys(tables.SUFFIXES, _table),
    ".npz": _npz,
    ".npy": _npy,
    "folder": _folder,
}
_ADVICE = {
    **dict.fromkeys(tables.SUFFIXES, "Pass --target COLUMN."),
    ".npz": "Add an array y.",
    ".npy": "Pass --target y.npy.",
    "folder": "Put the pictures of each class into a folder of its own.",
}
