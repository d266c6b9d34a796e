"""Different priors for different parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from net2gp.bayes.model.prior import WeightPrior, as_prior
from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.tags import savable
from net2gp.types import Params


@savable("bayes.PriorByName")
@dataclass(frozen=True)
class PriorByName:
    """Independent priors for groups of parameters, which name patterns choose.

    Args:
        priors: A prior for each name pattern; of several patterns that match a parameter, the last counts. A
            number is the variance of independent Gaussians, and None is a flat prior.

    Raises:
        InputError: If `priors` is no dict of patterns, or a value is no prior.

    >>> from net2gp.bayes import LaplacePrior
    >>> prior = PriorByName({"*": LaplacePrior(2.0), "*bias": 1.0})
    >>> prior.log_prob({"weight": torch.ones(1), "bias": torch.zeros(1)}).exp()
    tensor(0.0734)
    """

    priors: Mapping[str, WeightPrior | float | None]

    def __post_init__(self) -> None:
        if not isinstance(self.priors, Mapping) or not self.priors:
            raise InputError(
                f"priors must be a dict of priors by name pattern, but is {describe(self.priors)}. Pass for "
                "example PriorByName({'*': 1.0, '*.bias': LaplacePrior(0.1)})."
            )
        for pattern in self.priors:
            if not isinstance(pattern, str):
                raise InputError(
                    f"priors must have name patterns as keys, but has {pattern!r}. Pass for example '*'."
                )
        found = {
            pattern: as_prior(one, f"priors['{pattern}']") for pattern, one in self.priors.items()
        }
        object.__setattr__(self, "priors", found)

    def check(self, params: Params) -> None:
        """Raise unless every parameter has a prior and every pattern chooses a parameter.

        Args:
            params: Parameters by name.

        Raises:
            InputError: If a parameter has no prior, a pattern matches nothing or is overruled by a wider one
                behind it, or a prior does not fit its parameters.
        """
        reach = {p: [n for n in params if fnmatchcase(n, p)] for p in self.priors}
        for pattern, matched in reach.items():
            if not matched:
                raise InputError(
                    f"priors has '{pattern}', which matches none of: {', '.join(params)}."
                )
        for index, (pattern, matched) in enumerate(reach.items()):
            for other in list(reach)[index + 1 :]:
                if set(matched) < set(reach[other]):
                    raise InputError(
                        f"priors['{pattern}'] decides nothing: '{other}' behind it matches the same "
                        f"parameters and more, and the last counts. Put '{pattern}' behind '{other}'."
                    )
        for prior, part in self.parts(params):
            names = [n for p, own in self.priors.items() if own is prior for n in reach[p]]
            _check(prior, part, {name: params[name] for name in names})

    def log_prob(self, params: Params) -> Tensor:
        """The sum of the log densities."""
        return torch.stack([prior.log_prob(part) for prior, part in self.parts(params)]).sum()

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Draws from each prior."""
        drawn: Params = {}
        for prior, part in self.parts(params):
            drawn |= prior.sample(part, num_samples, generator)
        return {name: drawn[name] for name in params}

    def parts(self, params: Params) -> list[tuple[WeightPrior, Params]]:
        """Pair each prior with the parameters that it decides.

        Args:
            params: Parameters by name.

        Returns:
            Pairs of a prior and parameters by name, in the order of the patterns.

        Raises:
            InputError: If a parameter has no prior.
        """
        chosen: dict[str, str] = {}
        for name in params:
            matched = [pattern for pattern in self.priors if fnmatchcase(name, pattern)]
            if not matched:
                raise InputError(
                    f"priors leaves out {name}. Add a pattern such as '*': 1.0 in front."
                )
            chosen[name] = matched[-1]
        return [
            (self._law(pattern), {n: params[n] for n, p in chosen.items() if p == pattern})
            for pattern in self.priors
            if pattern in chosen.values()
        ]

    def _law(self, pattern: str) -> WeightPrior:
        return as_prior(self.priors[pattern])


def _check(prior: WeightPrior, decided: Params, matched: Params) -> None:
    """Raise unless a prior fits the parameters that it decides, or all that its pattern matches.

    Variances by name for a whole network may name parameters that a later pattern takes away.
    """
    try:
        prior.check(decided)
    except InputError:
        if len(matched) == len(decided):
            raise
        try:
            prior.check(matched)
        except InputError:
            prior.check(decided)
