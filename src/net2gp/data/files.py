"""Public data sets and trained weights, read from the folder that NET2GP_DATA names.

Everything is a plain .npz, read without pickle. Images are floats in [0, 1] of shape (N, channels,
height, width), labels integers (N,), tables (N, D) with targets (N, 1); floats have torch's default
dtype.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import FileFormatError, InputError
from net2gp.types import Params

Split = Literal["train", "test"]


def data_folder() -> Path:
    """The folder that the environment variable NET2GP_DATA names."""
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
    """The arrays of `name`.npz in the data folder by name; only those of `keys`, if there are any.

    >>> arrays("no_such_data")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    net2gp.errors.InputError: ...
    """
    return _read(data_folder() / f"{name}.npz", keys)


def _read(path: Path, keys: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
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


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise InputError(f"split must be 'train' or 'test', but is {split!r}.")


def _images(x: np.ndarray, y: np.ndarray, full: int = 255) -> tuple[Tensor, Tensor]:
    pixels = torch.from_numpy(x.astype(np.int32))[:, None].to(torch.get_default_dtype()) / full
    return pixels, torch.from_numpy(y.astype(np.int64))


def _split_images(name: str, split: str, full: int = 255) -> tuple[Tensor, Tensor]:
    _check_split(split)
    found = arrays(name, f"x_{split}", f"y_{split}")
    return _images(found[f"x_{split}"], found[f"y_{split}"], full)


def mnist(split: Split = "train") -> tuple[Tensor, Tensor]:
    """MNIST: x (N, 1, 28, 28), y (N,); 60,000 and 10,000 digits. From mnist.npz."""
    return _split_images("mnist", split)


def fashion_mnist(split: Split = "train") -> tuple[Tensor, Tensor]:
    """Fashion-MNIST: x (N, 1, 28, 28), y (N,); 60,000 and 10,000. From fashion_mnist.npz."""
    return _split_images("fashion_mnist", split)


def usps(split: Split = "train") -> tuple[Tensor, Tensor]:
    """USPS digits: x (N, 1, 16, 16), y (N,); 7,291 and 2,007. From usps.npz, in 1/2000ths."""
    return _split_images("usps", split, full=2000)


def kmnist_test() -> tuple[Tensor, Tensor]:
    """The test half of Kuzushiji-MNIST: x (10000, 1, 28, 28), y (N,). From kmnist_test.npz."""
    found = arrays("kmnist_test", "x", "y")
    return _images(found["x"], found["y"])


def notmnist() -> tuple[Tensor, Tensor]:
    """Letters A to J in many fonts: x (10000, 1, 28, 28), y (N,). From notmnist.npz."""
    found = arrays("notmnist", "x", "y")
    return _images(found["x"], found["y"])


def cifar10_bytes(split: Split = "train") -> tuple[Tensor, Tensor]:
    """CIFAR-10 as stored images: x (N, 32, 32, 3) uint8, y (N,); 50,000 and 10,000.

    cifar10.npz holds differences of neighboring pixels, of red and blue against green, modulo 256;
    sums modulo 256 undo them exactly. Cost a second or so for the 10,000 test images.
    """
    _check_split(split)
    found = arrays("cifar10", f"r_{split}", f"y_{split}")
    planes = found[f"r_{split}"]
    np.cumsum(planes, axis=-1, dtype=np.uint8, out=planes)
    np.cumsum(planes, axis=-2, dtype=np.uint8, out=planes)
    planes[0] += planes[1]
    planes[2] += planes[1]
    pixels = np.ascontiguousarray(planes.transpose(1, 2, 3, 0))
    return torch.from_numpy(pixels), torch.from_numpy(found[f"y_{split}"].astype(np.int64))


def cifar10(split: Split = "train") -> tuple[Tensor, Tensor]:
    """CIFAR-10 as a network takes it: x (N, 3, 32, 32) in [0, 1], y (N,). See `cifar10_bytes`."""
    pixels, y = cifar10_bytes(split)
    return pixels.permute(0, 3, 1, 2).contiguous().to(torch.get_default_dtype()).div_(255), y


@dataclass(frozen=True)
class Channels:
    """The mean and standard deviation of each color channel; calling it standardizes images.

    >>> Channels(mean=(0.5,), std=(0.25,))(torch.ones(1, 1, 2, 2)).unique()
    tensor([2.])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """(x − mean) / std, channel by channel, of images (N, channels, height, width)."""
        if x.dim() != 4 or x.shape[1] != len(self.mean):
            raise InputError(
                f"images must have shape (N, {len(self.mean)}, height, width), but have shape "
                f"{tuple(x.shape)}. For bytes (N, height, width, channels) permute the axes first."
            )
        mean, std = (x.new_tensor(value)[:, None, None] for value in (self.mean, self.std))
        return (x - mean) / std


IMAGENET = Channels(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""What `ResNet20` was trained with."""

CIFAR10 = Channels(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
"""What `LeNet5Cifar` was trained with."""


def california_housing() -> tuple[Tensor, Tensor]:
    """Median house values by district: x (20640, 8), y (N, 1) in $100,000. california_housing.npz.

    The columns are MedInc, HouseAge, AveRooms, AveBedrms, Population, AveOccup, Latitude and
    Longitude.

    Reference: Pace & Barry (1997), Sparse spatial autoregressions.
    """
    found = arrays("california_housing", "X", "y")
    dtype = torch.get_default_dtype()
    return torch.from_numpy(found["X"]).to(dtype), torch.from_numpy(found["y"]).to(dtype)[:, None]


@dataclass(frozen=True, eq=False)
class Table:
    """A regression x (N, D), y (N, 1) with fixed splits: test_mask (S, N) marks the test rows."""

    x: Tensor
    y: Tensor
    test_mask: Tensor

    @property
    def num_splits(self) -> int:
        """S, the number of splits."""
        return int(self.test_mask.shape[0])

    def split(self, index: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The pairs (x, y) for training and for testing of split `index`."""
        if not 0 <= index < self.num_splits:
            raise InputError(f"index must be in 0..{self.num_splits - 1}, but is {index}.")
        test = self.test_mask[index]
        return (self.x[~test], self.y[~test]), (self.x[test], self.y[test])


def uci(name: str) -> Table:
    """A regression of the UCI repository with its 20 (or 5) customary splits, from uci/`name`.npz.

    `name` is one of bostonHousing, concrete, energy, naval-propulsion-plant, power-plant,
    protein-tertiary-structure, wine-quality-red, yacht.

    Reference: Hernández-Lobato & Adams (2015), Probabilistic backpropagation.
    """
    folder = data_folder() / "uci"
    if not (folder / f"{name}.npz").is_file() and folder.is_dir():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.npz")))
        raise InputError(f"there is no {name}.npz in {folder}. Known: {known}.")
    found = _read(folder / f"{name}.npz", ("X", "y", "test_mask"))
    dtype = torch.get_default_dtype()
    x, y = torch.from_numpy(found["X"]).to(dtype), torch.from_numpy(found["y"]).to(dtype)
    return Table(x, y[:, None], torch.from_numpy(found["test_mask"]))


def us_precipitation(*, observed: bool = True) -> tuple[Tensor, Tensor]:
    """Rain of April 1948 in the contiguous United States: x (5906, 2) longitude, latitude; y (N, 1) mm.

    With `observed=False` the 6012 stations that did not report, of which the source holds
    interpolated values: not for measuring errors. From us_precip_apr1948.npz in the data folder, or in the
    folder `reference` beside it.

    Reference: Johns, Nychka, Kittel & Daly (2003), Infilling sparse records of spatial fields.
    """
    name = "us_precip_apr1948.npz"
    own, beside = data_folder() / name, data_folder().resolve().parent / "reference" / name
    found = _read(
        own if own.is_file() or not beside.is_file() else beside, ("lonlat", "raw_mm", "observed")
    )
    chosen = found["observed"].astype(bool) == observed
    return _floats(found["lonlat"][chosen]), _floats(found["raw_mm"][chosen])[:, None]


def summer_precipitation() -> tuple[Tensor, Tensor]:
    """Mean summer rain at North American stations: x (4893, 3), y (N, 1) mm. From precip.npz.

    The columns are longitude, latitude and elevation in m, which is NaN where it is not known.
    """
    keys = ("na2_lon", "na2_lat", "na2_elev", "na2_precip")
    lon, lat, elevation, rain = arrays("precip", *keys).values()
    elevation = np.where(elevation > -900, elevation, np.nan)
    return _floats(np.stack([lon, lat, elevation], 1)), _floats(rain / 10)[:, None]


@dataclass(frozen=True, eq=False)
class MonthlyStations:
    """Stations x (S, 3): longitude, latitude, elevation in m; rain (Y, 12, S) in mm, NaN where missing."""

    x: Tensor
    rain: Tensor
    first_year: int

    def month(self, year: int, month: int) -> tuple[Tensor, Tensor]:
        """The stations (N, 3) that reported in a month (1 to 12) of a year, and their rain (N, 1)."""
        found = self._years(range(year, year + 1), month)[0]
        reported = ~found.isnan()
        return self.x[reported], found[reported][:, None]

    def normal(self, years: range, month: int, *, least: int = 10) -> tuple[Tensor, Tensor]:
        """The mean of a month over years, at the stations that reported in at least `least` of them."""
        found = self._years(years, month)
        often = (~found.isnan()).sum(0) >= least
        return self.x[often], found[:, often].nanmean(0)[:, None]

    def _years(self, years: range, month: int) -> Tensor:
        last = self.first_year + len(self.rain) - 1
        if not (years and self.first_year <= min(years) and max(years) <= last):
            raise InputError(f"years must be in {self.first_year}..{last}, but are {years}.")
        if month not in range(1, 13):
            raise InputError(f"month must be in 1..12, but is {month}.")
        return self.rain[[year - self.first_year for year in years], month - 1]


def colorado_precipitation() -> MonthlyStations:
    """Monthly rain at 376 stations in and around Colorado, 1895 to 1997. From precip.npz.

    The source says millimeters, but its mean of 3.55 a month is Colorado's in centimeters, which it
    is taken for.
    """
    found = arrays("precip", "co_lon", "co_lat", "co_elev", "co_years", "co_ppt")
    x = np.stack([found["co_lon"], found["co_lat"], found["co_elev"]], 1)
    return MonthlyStations(
        _floats(x), _floats(found["co_ppt"]) * 10, first_year=int(found["co_years"][0])
    )


@dataclass(frozen=True, eq=False)
class Grid:
    """A map: values (H, W), NaN where there are none, at latitudes (H,) and longitudes (W,)."""

    lon: Tensor
    lat: Tensor
    values: Tensor

    def points(self) -> tuple[Tensor, Tensor]:
        """x (N, 2), longitude and latitude, and y (N, 1) of the cells that have a value."""
        row, column = (~self.values.isnan()).nonzero(as_tuple=True)
        x = torch.stack([self.lon[column], self.lat[row]], 1)
        return x, self.values[row, column][:, None]


def malaria() -> tuple[Grid, Grid]:
    """Incidence of P. falciparum malaria in central Africa in 2017, and how uncertain it is.

    The grids (473, 571) hold the median of the Malaria Atlas Project's model, in cases per person and
    year, and the width of its 95 % interval. From malaria_central_africa.npz.

    Reference: Weiss et al. (2019), Mapping the global prevalence, incidence, and mortality of P. falciparum.
    """
    found = arrays("malaria_central_africa", "lon", "lat", "incidence", "ci_width")
    lon, lat, incidence, width = (_floats(value) for value in found.values())
    return Grid(lon, lat, incidence), Grid(lon, lat, width)


def _floats(values: np.ndarray) -> Tensor:
    """In the default dtype."""
    return torch.from_numpy(values).to(torch.get_default_dtype())


def state_dict(name: str | Path) -> Params:
    """Weights by name from nets/`name`.npz in the data folder, or from a Path to an .npz file.

    Dtypes are those of the file; the prefix that `nn.DataParallel` gives is taken off.
    """
    path = name.expanduser() if isinstance(name, Path) else data_folder() / "nets" / f"{name}.npz"
    return {key.removeprefix("module."): torch.from_numpy(v) for key, v in _read(path).items()}
