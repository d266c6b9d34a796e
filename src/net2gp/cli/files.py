"""Files that are written whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from net2gp.errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to, and move the file there if nothing fails.

    If the disk is full, or the block is interrupted, an older file stays as it is and nothing else is left.

    Args:
        path: The file to write.

    Yields:
        The path to write to, with the same suffix.

    Raises:
        InputError: If the file cannot be written.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise InputError(
            f"{path} could not be written: {error.strerror or error}. Free some space, or pass another "
            "--output. Older files are as they were."
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def check_output(path: Path, suffixes: Sequence[str]) -> Path:
    """Raise before a long computation if its result could not be written.

    Args:
        path: The file to write.
        suffixes: The endings that it may have.

    Returns:
        The path without ~.

    Raises:
        InputError: If the ending is another, the folder does not exist or cannot be written, or `path` is a
            folder.
    """
    path = path.expanduser()
    if not path.name:
        raise InputError(f"--output is empty. Pass for example --output result{suffixes[0]}.")
    if path.suffix.lower() not in suffixes:
        raise InputError(
            f"{path} must end in {' or '.join(suffixes)}. Pass for example --output "
            f"{path.with_suffix(suffixes[0]).name}."
        )
    if path.is_dir():
        raise InputError(
            f"{path} is a folder. Pass a file: --output {path / ('result' + suffixes[0])}."
        )
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}. Create it, or pass another --output.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"the folder {path.parent} cannot be written. Pass another --output.")
    return path


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
