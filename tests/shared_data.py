"""Where the tests find data sets and reference numbers, which the repository does not hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).resolve().parents[2] / "shared"


def shared_data() -> Path:
    """The folder that NET2GP_DATA names, else ../shared/data beside the repository, else a skip."""
    named = os.environ.get("NET2GP_DATA")
    folder = Path(named).expanduser() if named else _BESIDE / "data"
    if not folder.is_dir():
        pytest.skip("needs the data sets: set NET2GP_DATA to the folder that holds them")
    return folder


def shared_reference() -> Path:
    """The folder `reference` beside the data folder, else a skip."""
    folder = shared_data().parent / "reference"
    if not folder.is_dir():
        pytest.skip("needs the reference numbers: put the folder 'reference' beside NET2GP_DATA")
    return folder
