"""MAPIE's intervals and sets around posteriors of net2gp, in the environment of MAPIE.

    python worker_mapie.py arrays.npz result.npz

`arrays.npz` has alpha and, for a regression, its data "x" and "y", the "lengthscale" and "noise_var" of the
posterior, the rows of each split ("known", "held_out", "new": (S, ...)), and in how many splits the
jackknife+ fits the model once per row ("num_jackknife"). For classes it has probabilities ("probs held_out",
"probs new": (S, N, K)) and labels ("labels held_out").
`result.npz` gets the ends of intervals ("split absolute": (S, N, 2), …) or members of sets
("LAC": (S, N, K), …), and the CPU seconds of each method ("s split absolute", …).
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore, RAPSConformityScore, StdConformityScore
from mapie.regression import CrossConformalRegressor, SplitConformalRegressor
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import KFold, LeaveOneOut

import net2gp as n2g

Arrays = dict[str, np.ndarray]


class Posterior(RegressorMixin, BaseEstimator):
    """A Gaussian process of net2gp as a model of scikit-learn."""

    def __init__(self, lengthscale: float = 1.0, noise_var: float = 1.0) -> None:
        self.lengthscale, self.noise_var = lengthscale, noise_var

    def fit(self, x: np.ndarray, y: np.ndarray) -> Posterior:
        known = (torch.from_numpy(x), torch.from_numpy(y))
        kernel, likelihood = n2g.RBF(lengthscale=self.lengthscale), n2g.Gaussian(self.noise_var)
        self.posterior_ = n2g.condition(kernel, known, likelihood)
        return self

    def predict(self, x: np.ndarray, return_std: bool = False) -> np.ndarray | tuple:
        if not return_std:
            return self.posterior_.mean(torch.from_numpy(x))[:, 0].numpy()
        law = self.posterior_.predict(torch.from_numpy(x))
        return law.mean[:, 0].numpy(), law.stddev[:, 0].numpy()


class Known(ClassifierMixin, BaseEstimator):
    """A classifier whose inputs are its probabilities."""

    def __init__(self, num_classes: int = 2) -> None:
        self.num_classes = num_classes
        self.classes_ = np.arange(num_classes)

    def fit(self, x: np.ndarray, y: np.ndarray) -> Known:
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        return x

    def predict(self, x: np.ndarray) -> np.ndarray:
        return x.argmax(1)


def intervals(a: Arrays) -> dict[str, tuple[int, Callable[[int], np.ndarray]]]:
    """How many splits each method takes part in, and its intervals for one of them."""
    level = 1 - float(a["alpha"])
    model = Posterior(float(a["lengthscale"]), float(a["noise_var"]))
    count = len(a["known"])

    def split(score: object) -> Callable[[int], np.ndarray]:
        def run(s: int) -> np.ndarray:
            known, held_out, new = (a[part][s] for part in ("known", "held_out", "new"))
            found = SplitConformalRegressor(model, level, score, prefit=False)
            found.fit(a["x"][known], a["y"][known]).conformalize(a["x"][held_out], a["y"][held_out])
            return found.predict_interval(a["x"][new])[1][..., 0]

        return run

    def cross(score: object, cv: object) -> Callable[[int], np.ndarray]:
        def run(s: int) -> np.ndarray:
            rows = np.concatenate([a["known"][s], a["held_out"][s]])
            found = CrossConformalRegressor(model, level, score, "plus", cv)
            found.fit_conformalize(a["x"][rows], a["y"][rows])
            return found.predict_interval(a["x"][a["new"][s]])[1][..., 0]

        return run

    standardized, few = StdConformityScore(), int(a["num_jackknife"])
    return {
        "split absolute": (count, split("absolute")),
        "split standardized": (count, split(standardized)),
        "CV+ standardized": (count, cross(standardized, KFold(10))),
        "jackknife+ absolute": (few, cross("absolute", LeaveOneOut())),
        "jackknife+ standardized": (few, cross(standardized, LeaveOneOut())),
    }


def sets(a: Arrays) -> dict[str, tuple[int, Callable[[int], np.ndarray]]]:
    """How many splits each method takes part in, and its sets for one of them."""
    level, count = 1 - float(a["alpha"]), len(a["labels held_out"])
    state = np.random.RandomState(0)

    def split(score: Callable[[], object], **options: object) -> Callable[[int], np.ndarray]:
        def run(s: int) -> np.ndarray:
            probs = a["probs held_out"][s]
            found = SplitConformalClassifier(
                Known(probs.shape[1]), level, score(), random_state=state
            )
            found.conformalize(probs, a["labels held_out"][s])
            options_now = {"conformity_score_params": options} if options else {}
            return found.predict_set(a["probs new"][s], **options_now)[1][..., 0]

        return run

    return {
        "LAC": (count, split(lambda: "lac")),
        "APS": (count, split(APSConformityScore, include_last_label=True)),
        "APS, randomized": (count, split(APSConformityScore, include_last_label="randomized")),
        "RAPS, randomized": (count, split(RAPSConformityScore, include_last_label="randomized")),
    }


def results(a: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    methods = intervals(a) if "x" in a else sets(a)
    for name, (count, run) in methods.items():
        start = time.process_time()
        yield name, np.stack([run(s) for s in range(count)])
        yield f"s {name}", np.array((time.process_time() - start) / count)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with np.load(sys.argv[1]) as file:
        arrays = dict(file)
    np.savez(sys.argv[2], **dict(results(arrays)))


if __name__ == "__main__":
    main()
