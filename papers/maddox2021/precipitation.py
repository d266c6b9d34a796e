"""Rain from few stations: a network that learned other rain, adapted to a month of which little is known.

    NET2GP_DATA=... python papers/maddox2021/precipitation.py --out figures [--quick]

- Colorado: the source is all Aprils of 1951 to 1980, so that the network learns where it rains and how much
  that changes from year to year; the targets are the Aprils of 1981 to 1990, one in each repetition. Where it
  rains hangs on the mountains, which stay: source and target are alike. Inputs are longitude, latitude and
  elevation.
- United States: the source is the mean month of summer, the target is April 1948, at other stations. Where it
  rains in summer says little of where it does in spring (the correlation is 0.2): source and target are not
  alike. Inputs are longitude and latitude.

Values are square roots of millimeters, whose errors are more nearly normal; maps are in millimeters. Prints
errors and likelihoods of adaptation and of its rivals (maps.py has them) over the number of stations, says
where the Gaussian process of the network is better or worse, judges the claims of precipitation.toml, and
draws curves and maps. Needs precip.npz and us_precip_apr1948.npz; which data the paper has is not known.

Maddox et al. (2021), "Fast adaptation with linearized neural networks".
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from net2gp import data

sys.path.append(str(Path(__file__).parent))
from map_studies import Atlas, Canvas, Study, run_studies
from maps import Points, Transfer

APRIL = 4
OLD, NEW = range(1951, 1981), range(1981, 1991)
MAPPED = 50
"""Stations that maps are drawn from."""


def root(points: Points) -> Points:
    """Places, and the square roots of their rain."""
    x, rain = points
    return x, rain.sqrt()


def squared(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the square of a normal number."""
    return mean.square() + variance, 4 * mean.square() * variance + 2 * variance.square()


def colorado() -> Study:
    """Aprils of many years, and of one."""
    stations = data.colorado_precipitation()
    years = [stations.month(year, APRIL) for year in OLD]
    source = torch.cat([x for x, _ in years]), torch.cat([y for _, y in years])
    targets = [stations.month(year, APRIL) for year in NEW]
    transfer = Transfer("Colorado", "√mm", root(source), [root(target) for target in targets])
    x, rain = targets[0]
    usual = stations.normal(OLD, APRIL)
    atlas = Atlas(
        (Canvas(usual[0]), usual[1]),
        (Canvas(x), rain),
        Canvas(x),
        MAPPED,
        "rain in mm",
        (f"source: mean April of {OLD[0]} to {OLD[-1]}", f"truth: April {NEW[0]}"),
        squared,
    )
    return Study(transfer, atlas)


def united_states() -> Study:
    """The mean month of summer, and April 1948."""
    x, rain = data.us_precipitation()
    places, summer = data.summer_precipitation()
    places, summer = places[:, :2], summer / 3
    inside = distance(places, x) < 0.5
    source = places[inside], summer[inside]
    transfer = Transfer("United States", "√mm", root(source), [root((x, rain))])
    atlas = Atlas(
        (Canvas(source[0]), source[1]),
        (Canvas(x), rain),
        Canvas.of(land(x, 0.4)),
        MAPPED,
        "rain in mm",
        ("source: mean month of summer", "truth: April 1948"),
        squared,
    )
    return Study(transfer, atlas)


def distance(x: Tensor, stations: Tensor) -> Tensor:
    """Of each place to the nearest station, in degrees."""
    return torch.cat([torch.cdist(part, stations).min(1).values for part in x.split(500)])


def land(stations: Tensor, spacing: float) -> data.Grid:
    """A grid with values where a station is near."""
    low, high = stations.min(0).values.tolist(), stations.max(0).values.tolist()
    lon, lat = (torch.arange(a, b, spacing) for a, b in zip(low, high, strict=True))
    cells = torch.stack([c.flatten() for c in torch.meshgrid(lon, lat, indexing="xy")], 1)
    near = distance(cells, stations).reshape(len(lat), len(lon)) < 0.8
    return data.Grid(lon, lat, torch.where(near, 0.0, torch.nan))


STUDIES = {"Colorado": colorado, "United States": united_states}

if __name__ == "__main__":
    raise SystemExit(run_studies(__file__, STUDIES))
