"""Public tables and maps: inputs (N, D) and targets (N, 1) in torch's default dtype."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from net2gp.data.files import arrays, data_folder, read_arrays
from net2gp.errors import InputError


def california_housing() -> tuple[Tensor, Tensor]:
    """Read median house values of districts from california_housing.npz: x (20640, 8), y (20640, 1) in
    $100,000.

    The columns are MedInc, HouseAge, AveRooms, AveBedrms, Population, AveOccup, Latitude and
    Longitude.

    Reference: Pace & Barry (1997), Sparse spatial autoregressions.
    """
    found = arrays("california_housing", "X", "y")
    dtype = torch.get_default_dtype()
    return torch.from_numpy(found["X"]).to(dtype), torch.from_numpy(found["y"]).to(dtype)[:, None]


@dataclass(frozen=True, eq=False)
class Table:
    """A regression problem with S fixed splits.

    Args:
        x: Inputs, (N, D).
        y: Targets, (N, 1).
        test_mask: Which rows each split tests on, (S, N).
    """

    x: Tensor
    y: Tensor
    test_mask: Tensor

    @property
    def num_splits(self) -> int:
        """The number S of splits."""
        return int(self.test_mask.shape[0])

    def split(self, index: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Divide the rows for training and testing.

        Args:
            index: The number of the split, from 0 to S − 1.

        Returns:
            The pairs (x, y) for training and for testing.

        Raises:
            InputError: If there is no such split.
        """
        if not 0 <= index < self.num_splits:
            raise InputError(f"index must be in 0..{self.num_splits - 1}, but is {index}.")
        test = self.test_mask[index]
        return (self.x[~test], self.y[~test]), (self.x[test], self.y[test])


def uci(name: str) -> Table:
    """Read a regression problem of the UCI repository with its 20 (or 5) customary splits.

    Args:
        name: One of bostonHousing, concrete, energy, naval-propulsion-plant, power-plant,
            protein-tertiary-structure, wine-quality-red and yacht. The file is uci/`name`.npz.

    Returns:
        The table with its splits.

    Raises:
        InputError: If there is no such file.

    Reference: Hernández-Lobato & Adams (2015), Probabilistic backpropagation.
    """
    folder = data_folder() / "uci"
    if not (folder / f"{name}.npz").is_file() and folder.is_dir():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.npz")))
        raise InputError(f"there is no {name}.npz in {folder}. Known: {known}.")
    found = read_arrays(folder / f"{name}.npz", ("X", "y", "test_mask"))
    dtype = torch.get_default_dtype()
    x, y = torch.from_numpy(found["X"]).to(dtype), torch.from_numpy(found["y"]).to(dtype)
    return Table(x, y[:, None], torch.from_numpy(found["test_mask"]))


def us_precipitation(*, observed: bool = True) -> tuple[Tensor, Tensor]:
    """Read the rain of April 1948 in the contiguous United States.

    The file us_precip_apr1948.npz is in the data folder, or in the folder `reference` beside it.

    Args:
        observed: Whether to return the 5906 stations that reported. With False these are the 6012 other
            stations. Their values were interpolated by the source, so errors should not be measured on them.

    Returns:
        x (N, 2), longitude and latitude, and y (N, 1) in mm.

    Reference: Johns, Nychka, Kittel & Daly (2003), Infilling sparse records of spatial fields.
    """
    name = "us_precip_apr1948.npz"
    own, beside = data_folder() / name, data_folder().resolve().parent / "reference" / name
    found = read_arrays(
        own if own.is_file() or not beside.is_file() else beside, ("lonlat", "raw_mm", "observed")
    )
    chosen = found["observed"].astype(bool) == observed
    return _floats(found["lonlat"][chosen]), _floats(found["raw_mm"][chosen])[:, None]


def summer_precipitation() -> tuple[Tensor, Tensor]:
    """Read the mean summer rain at North American stations from precip.npz: x (4893, 3), y (4893, 1) in mm.

    The columns are longitude, latitude and elevation in m, which is NaN where it is not known.
    """
    keys = ("na2_lon", "na2_lat", "na2_elev", "na2_precip")
    lon, lat, elevation, rain = arrays("precip", *keys).values()
    elevation = np.where(elevation > -900, elevation, np.nan)
    return _floats(np.stack([lon, lat, elevation], 1)), _floats(rain / 10)[:, None]


@dataclass(frozen=True, eq=False)
class MonthlyStations:
    """Monthly rain at S stations over Y years.

    Args:
        x: Longitude, latitude and elevation in m of each station, (S, 3).
        rain: Rain in mm, (Y, 12, S), NaN where it is missing.
        first_year: The first of the Y years.
    """

    x: Tensor
    rain: Tensor
    first_year: int

    def month(self, year: int, month: int) -> tuple[Tensor, Tensor]:
        """Select the stations that reported in a month.

        Args:
            year: The year.
            month: The month, from 1 to 12.

        Returns:
            The stations (N, 3) and their rain (N, 1).
        """
        found = self._years(range(year, year + 1), month)[0]
        reported = ~found.isnan()
        return self.x[reported], found[reported][:, None]

    def normal(self, years: range, month: int, *, least: int = 10) -> tuple[Tensor, Tensor]:
        """Average the rain of a month over years.

        Args:
            years: The years.
            month: The month, from 1 to 12.
            least: The least number of years in which a station must have reported.

        Returns:
            The stations (N, 3) and their mean rain (N, 1).
        """
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
    """Read the monthly rain at 376 stations in and around Colorado from 1895 to 1997, from precip.npz.

    The source says millimeters. Its mean of 3.55 per month agrees with the rain of Colorado in centimeters,
    so the numbers are read as centimeters.
    """
    found = arrays("precip", "co_lon", "co_lat", "co_elev", "co_years", "co_ppt")
    x = np.stack([found["co_lon"], found["co_lat"], found["co_elev"]], 1)
    return MonthlyStations(
        _floats(x), _floats(found["co_ppt"]) * 10, first_year=int(found["co_years"][0])
    )


@dataclass(frozen=True, eq=False)
class Grid:
    """A map.

    Args:
        lon: Longitudes, (W,).
        lat: Latitudes, (H,).
        values: Values, (H, W), NaN where there are none.
    """

    lon: Tensor
    lat: Tensor
    values: Tensor

    def points(self) -> tuple[Tensor, Tensor]:
        """Return x (N, 2), longitude and latitude, and y (N, 1) of the cells that have a value."""
        row, column = (~self.values.isnan()).nonzero(as_tuple=True)
        x = torch.stack([self.lon[column], self.lat[row]], 1)
        return x, self.values[row, column][:, None]


def malaria() -> tuple[Grid, Grid]:
    """Read the incidence of P. falciparum malaria in central Africa in 2017, and its uncertainty.

    The grids (473, 571) hold the median of the Malaria Atlas Project's model, in cases per person and
    year, and the width of its 95 % interval. The file is malaria_central_africa.npz.

    Reference: Weiss et al. (2019), Mapping the global prevalence, incidence, and mortality of P. falciparum.
    """
    found = arrays("malaria_central_africa", "lon", "lat", "incidence", "ci_width")
    lon, lat, incidence, width = (_floats(value) for value in found.values())
    return Grid(lon, lat, incidence), Grid(lon, lat, width)


def _floats(values: np.ndarray) -> Tensor:
    """Convert an array to a tensor of the default dtype."""
    return torch.from_numpy(values).to(torch.get_default_dtype())
