"""Plain .npz files and trained weights, read without pickle from the folder that NET2GP_DATA names."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import torch

from net2gp.errors import FileFormatError, InputError
from net2gp.types import Params


def data_folder() -> Path:
    """Return the folder that the environment variable NET2GP_DATA names.

    Raises:
        InputError: If the variable is not set or names no folder.
    """
    name = os.environ.get("NET2GP_DATA")
    if not name:
        raise InputError(
            "no data folder is set. Set the environment variable NET2GP_DATA to the folder that "
            "holds the .npz files, e.g. export NET2GP_DATA=~/data."
        )
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"NET2GP_DATA names {name}, which is not a folder. "
            "Set it to the folder that holds the .npz files."
        )
    return folder


def arrays(name: str, *keys: str) -> dict[str, np.ndarray]:
    """Read the arrays of a file in the data folder.

    Args:
        name: The name of the file without .npz.
        keys: The names of the arrays to read. Without any, all are read.

    Returns:
        The arrays by name.

    >>> arrays("no_such_data")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    net2gp.errors.InputError: ...
    """
    return read_arrays(data_folder() / f"{name}.npz", keys)


def read_arrays(path: Path, keys: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Read arrays of an .npz file without pickle.

    Args:
        path: The file.
        keys: The names of the arrays to read. Without any, all are read.

    Returns:
        The arrays by name.

    Raises:
        InputError: If there is no such file.
        FileFormatError: If the file cannot be read or lacks an array.
    """
    if not path.is_file():
        raise InputError(
            f"expected the file {path}, but there is none. Put it there, or set NET2GP_DATA to the "
            f"folder that holds it."
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in keys if key not in archive.files]
            if missing:
                raise FileFormatError(
                    f"{path} should hold the arrays {list(keys)}, but holds {archive.files}."
                )
            return {key: archive[key] for key in (keys or archive.files)}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(
            f"{path} is not a readable .npz of plain arrays ({error}). Fetch or write it again."
        ) from error


def state_dict(name: str | Path) -> Params:
    """Read trained weights, without the prefix that `nn.DataParallel` adds to names.

    Args:
        name: The name of a file in the folder nets of the data folder, without .npz, or a Path to an .npz
            file.

    Returns:
        Weights by name, in the dtypes of the file.
    """
    path = name.expanduser() if isinstance(name, Path) else data_folder() / "nets" / f"{name}.npz"
    return {
        key.removeprefix("module."): torch.from_numpy(v) for key, v in read_arrays(path).items()
    }
