"""Malaria from few places: a network that learned one map of incidence, adapted to another.

    NET2GP_DATA=... python papers/maddox2021/malaria.py --out figures [--quick]

The paper goes from 2012 to 2016 with data that are not public. What stands in for them is one map of central
Africa in 2017, the median incidence of the Malaria Atlas Project's model and the width of its 95 % interval:

- Upper map: the source is the median, the target the median and half the width of the interval, which stands
  in for a later and worse year: the same land, a like but not proportional map (the correlation is 0.96).
- East: the source is the western half, the target the eastern half of the same map: other land, where the
  network itself knows nothing, and only what it learned of how incidence varies could help.

The source is 2000 places at random. Prints errors and likelihoods of adaptation and of its rivals (maps.py
has them) over the number of places, says where the Gaussian process of the network is better or worse,
judges the claims of malaria.toml, and draws curves and maps. Needs malaria_central_africa.npz.

Maddox et al. (2021), "Fast adaptation with linearized neural networks".
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from net2gp import data

sys.path.append(str(Path(__file__).parent))
from map_studies import Atlas, Canvas, Study, run_studies
from maps import Points, Transfer

UNIT = "cases per person and year"
SOURCE = 2000
MAPPED = 50
"""Places that maps are drawn from."""


def drawn(points: Points, count: int, seed: int = 0) -> Points:
    """Some of the points, at random."""
    x, y = points
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]
    return x[chosen], y[chosen]


def study(name: str, source: data.Grid, target: data.Grid, titles: tuple[str, str]) -> Study:
    """From one map to another; errors are at places of the whole target."""
    transfer = Transfer(
        name, UNIT, drawn(source.points(), SOURCE), [drawn(target.points(), 20_000, 1)]
    )
    (one, other), step = (Canvas.of(grid, 4) for grid in (source, target)), 4
    values = [grid.values[::step, ::step] for grid in (source, target)]
    known = [value[~value.isnan()] for value in values]
    atlas = Atlas(
        (one, known[0]), (other, known[1]), other, MAPPED, UNIT.replace(" and ", "\nand "), titles
    )
    return Study(transfer, atlas)


def upper() -> Study:
    """The median, and the upper end of its interval."""
    median, width = data.malaria()
    high = data.Grid(median.lon, median.lat, median.values + width.values / 2)
    return study("Upper map", median, high, ("source: median", "truth: median + half the interval"))


def east() -> Study:
    """The western and the eastern half."""
    median, _ = data.malaria()
    western = median.lon < median.points()[0][:, 0].median()
    west, other = (
        data.Grid(median.lon, median.lat, median.values.where(side, torch.nan))
        for side in (western, ~western)
    )
    return study("East", west, other, ("source: western half", "truth: eastern half"))


STUDIES = {"Upper map": upper, "East": east}

if __name__ == "__main__":
    raise SystemExit(run_studies(__file__, STUDIES))
