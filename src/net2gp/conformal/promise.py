"""What is promised: the members that all conformal answers share."""

from __future__ import annotations

import os
from abc import abstractmethod

import torch
from torch.distributions import Beta

from net2gp.conformal.ranks import Groups, misses, rank
from net2gp.errors import NotAvailable
from net2gp.posteriors import Posterior
from net2gp.posteriors.writing import check_value, write
from net2gp.show import as_html, as_text


class Promise:
    """A posterior with a promise of coverage: the base class, which has what all kinds share."""

    posterior: Posterior
    alpha: float
    groups: Groups

    @property
    def level(self) -> float:
        """The level that was asked for, 1 − alpha."""
        return 1 - self.alpha

    @property
    @abstractmethod
    def coverage(self) -> float:
        """The smallest probability, over groups, with which a new point is covered."""

    def save(self, path: str | os.PathLike) -> None:
        """Write the promise and its posterior to one file, which `net2gp.conformal.load` reads back.

        Args:
            path: The file to write, in a folder that exists.

        Raises:
            InputError: If the folder does not exist, or if the kernel, mean or score cannot be saved.
        """
        write(self, check_value(self.posterior), path)

    def _facts(self) -> dict[str, str]:
        counts = self.groups.counts
        return {
            "level": f"{self.level:.4g}",
            "coverage": f"{self.coverage:.4g}",
            "n": f"{sum(counts)}",
            **({} if self.groups.labels is None else {"groups": f"{len(counts)}"}),
            "score": f"{self.score}",  # type: ignore[attr-defined]
        }

    __repr__, _repr_html_ = as_text, as_html


class SplitPromise(Promise):
    """A promise from calibration points that the posterior has not seen."""

    @property
    def coverage(self) -> float:
        """The probability k/(n + 1) ≥ 1 − alpha, the smallest over groups; exact if no scores are equal."""
        return min(rank(self.alpha, n) / (n + 1) for n in self.groups.counts)

    def coverage_law(self) -> Beta:
        """Return the law of the coverage that belongs to one calibration set.

        The promise is an average over calibration sets. Given one of them, the share of new points that is
        covered is a draw from Beta(k, n + 1 − k) if no scores are equal, and larger otherwise.

        Returns:
            A law with one entry per group, (G,).

        Raises:
            NotAvailable: If a group has too few points, so that everything is covered.
        """
        counts = self.groups.counts
        allowed = torch.tensor([misses(self.alpha, n) for n in counts], dtype=torch.float64)
        if bool((allowed == 0).any()):
            raise NotAvailable(
                "some answers hold everything, since there are too few calibration points, so that their "
                "coverage is 1 and has no law. Add calibration points, or pass a larger alpha."
            )
        return Beta(torch.tensor(counts, dtype=torch.float64) + 1 - allowed, allowed)
