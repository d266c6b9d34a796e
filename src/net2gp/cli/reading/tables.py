"""Tables of csv and parquet files as arrays."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from net2gp.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".csv", ".tsv", ".parquet")
TARGETS = ("y", "target", "label", "class")
"""Names of the column that is the target if none is named."""


def read_table(path: Path) -> pandas.DataFrame:
    """Read a csv, tsv or parquet file.

    Args:
        path: The file.

    Returns:
        The table.

    Raises:
        FileFormatError: If it is empty or not such a file.
    """
    try:
        import pandas as pd
    except ImportError:
        raise ImportError(
            f"reading {path.name} needs pandas: pip install 'net2gp[tables]'. Files .npz are read without it."
        ) from None
    try:
        if path.suffix.lower() == ".parquet":
            table = pd.read_parquet(path)
        else:
            _check_head(path)
            table = pd.read_csv(path, sep=_separator(path))
    except ImportError:
        raise ImportError("reading parquet needs pyarrow: pip install 'net2gp[tables]'.") from None
    except FileFormatError:
        raise
    except (
        ValueError,
        OSError,
        UnicodeError,
        csv.Error,
    ) as error:  # parsers of pandas raise ValueError
        reason = " ".join(str(error).split())
        raise FileFormatError(
            f"{path} is not a readable {path.suffix[1:]} file ({reason})."
        ) from None
    _check_different(path, [str(name) for name in table.columns])
    if not len(table):
        raise FileFormatError(f"{path} has no rows.")
    table.columns = [str(name) for name in table.columns]
    return table


def _separator(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a file that are not empty, each with the line on which it begins, counted from 1."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader, start = csv.reader(file, delimiter=_separator(path)), 1
        for row in reader:
            if row:
                yield start, row
            start = reader.line_num + 1


def _check_head(path: Path) -> None:
    """Refuse what pandas would read in a way of its own: repeated names, and rows longer than the head."""
    start = list(itertools.islice(_lines(path), 2))
    if not start:
        return  # pandas says that it is empty
    head, (line, first) = start[0][1], start[-1]
    _check_different(path, head)
    if len(first) > len(head):
        raise FileFormatError(
            f"line {line} of {path} has {len(first)} values, but its head names {len(head)} columns. Give "
            "each column a name, in the first line."
        )


def _check_different(path: Path, names: Sequence[str]) -> None:
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise FileFormatError(
            f"{path} has several columns '{twice[0]}'. Give each column a name of its own."
        )


def place(path: Path, row: int) -> str:
    """Where a row of a table is, as an editor counts lines: from 1, with the head and empty lines.

    Args:
        path: The file.
        row: The number of the row, from 0.

    Returns:
        Such as "line 2" for the row 0 below the head, and "row 1" of a file without lines.
    """
    if path.suffix.lower() == ".parquet":
        return f"row {row + 1}"
    line, _ = next(itertools.islice(_lines(path), row + 1, None))
    return f"line {line}"


def choose_columns(
    path: Path,
    table: pandas.DataFrame,
    features: Sequence[str],
    target: Sequence[str],
    needed: bool,
) -> tuple[list[str], list[str]]:
    """Return the names of the columns of features and targets.

    Args:
        path: The file, for messages.
        table: The table.
        features: The names that were given; if there are none, all columns but the targets.
        target: The names that were given; if there are none, the only one of `TARGETS` that is there.
        needed: Whether there must be a target.

    Raises:
        InputError: If a column is not there, or no target is named.
    """
    names = list(table.columns)
    features, target = _divided(features, names), _divided(target, names)
    missing = [name for name in (*features, *target) if name not in names]
    if missing and (needed or set(missing) & set(features)):
        raise InputError(
            f"{path} has no column {_shown(missing)}. It has: {_shown(names)}.{_hint(names)}"
        )
    targets = [name for name in target if name in names]
    if not target:
        targets = [name for name in names if name.lower() in TARGETS]
        if needed and len(targets) != 1:
            raise InputError(
                f"which column of {path} is the target? Pass --target COLUMN. It has: {_shown(names)}."
            )
    both = [name for name in features if name in targets]
    if both:
        raise InputError(
            f"column {_shown(both)} of {path} is the target and a feature as well, which it would predict "
            "from itself. Leave it out of --features, or pass another --target."
        )
    chosen = list(features) or [name for name in names if name not in targets]
    if not chosen:
        raise InputError(f"{path} has no column beside the target {_shown(targets)}.")
    return chosen, targets


def _divided(given: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that were given, each alone or several with commas between them."""
    parts = [[one] if one in names else one.split(",") for one in given]
    return [name if name in names else name.strip() for part in parts for name in part]


def _hint(names: Sequence[str]) -> str:
    """What to do if all names stand in one column."""
    if len(names) == 1 and ";" in names[0]:
        return " Its values are separated by ';': write it with commas, or as .tsv or .parquet."
    return ""


def numbers(path: Path, table: pandas.DataFrame, names: Sequence[str]) -> np.ndarray:
    """Return columns of numbers as (N, D) in float64.

    Raises:
        InputError: If a column has text or missing values.
    """
    import pandas as pd

    for name in names:
        column = table[name]
        if not pd.api.types.is_numeric_dtype(column):
            row = _first_text(column)
            raise InputError(
                f"column '{name}' of {path} holds {column.iloc[row]!r} in {place(path, row)}, which is not a "
                "number. Leave it out with --features, or encode it as numbers."
            )
        _check_whole(path, column)
    return table[list(names)].to_numpy(dtype=np.float64)


def _first_text(column: pandas.Series) -> int:
    """The row of the first entry that is not a number."""
    import pandas as pd

    text = pd.to_numeric(column.astype(object), errors="coerce").isna() & column.notna()
    return int(text.to_numpy().argmax())


def targets_of(path: Path, table: pandas.DataFrame, names: Sequence[str]) -> np.ndarray:
    """Return targets: (N, C) of numbers, or (N,) of labels if there is one column of text or integers."""
    import pandas as pd

    if len(names) == 1:
        column = table[names[0]]
        _check_whole(path, column)
        if pd.api.types.is_bool_dtype(column) or not pd.api.types.is_numeric_dtype(column):
            return column.astype(str).to_numpy(dtype=str)
        if pd.api.types.is_integer_dtype(column):
            return column.to_numpy(dtype=np.int64)
    return numbers(path, table, names)


def _check_whole(path: Path, column: pandas.Series) -> None:
    missing = np.flatnonzero(column.isna())
    if len(missing):
        raise InputError(
            f"column '{column.name}' of {path} has {len(missing)} missing values (first in "
            f"{place(path, int(missing[0]))}). Fill them in, or drop these rows."
        )


def _shown(names: Sequence[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > 12 else ""
    return ", ".join(f"'{name}'" for name in names[:12]) + more
