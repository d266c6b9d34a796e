"""The methods that a command can name, each a function of a problem that returns a posterior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from net2gp.cli.options import MethodOptions, one_of
from net2gp.cli.problem import Problem
from net2gp.cli.running import UsageError, say
from net2gp.errors import InputError, NetworkError
from net2gp.posteriors.posterior import Posterior


@dataclass(frozen=True)
class Settings:
    """What steers a method.

    Args:
        structure: What `laplace` keeps of the curvature, such as "kron" or "low_rank:20".
        prior_var: The prior variance, or None.
        noise_var: The variance of the noise, or None.
        only: Name patterns of the parameters that vary.
        tuning: How `laplace` chooses what is open.
        held_out: Data that were held out.
        seed: The seed of random methods.
    """

    structure: str = ""
    prior_var: float | None = None
    noise_var: float | None = None
    only: list[str] = field(default_factory=list)
    tuning: str = "matched"
    held_out: tuple[Tensor, Tensor] | None = None
    seed: int = 0

    @classmethod
    def of(
        cls, options: MethodOptions, structure: str, held_out: tuple[Tensor, Tensor] | None
    ) -> Settings:
        """Take them from options of the command line."""
        one_of(options.tuning, TUNINGS, "--tuning")
        if options.tuning == "validation" and held_out is None:
            raise UsageError("--tuning validation needs --held-out, a file or a share such as 0.2.")
        return cls(
            structure,
            options.prior_var,
            options.noise_var,
            list(options.only),
            options.tuning,
            held_out,
            options.seed,
        )


def check_used(method: str, options: MethodOptions) -> None:
    """Refuse options that a method would leave unread.

    Args:
        method: One of `METHODS`.
        options: What was given.

    Raises:
        UsageError: If one of them is not the default.
    """
    given = {
        "--tuning": options.tuning != "matched" and method != "laplace",
        "--only": bool(options.only) and method in ("nngp", "ntk", "mc_dropout"),
        "--prior-var": options.prior_var is not None and method == "mc_dropout",
    }
    for name, unread in given.items():
        if unread:
            raise UsageError(f"{name} says nothing to the method {method}. Leave one of them out.")


STRUCTURES = {
    "full": "Full",
    "kron": "Kron",
    "diagonal": "Diagonal",
    "last_layer": "LastLayer",
    "low_rank": "LowRank",
    "subnetwork": "Subnetwork",
    "sampled": "Sampled",
    "function_space": "FunctionSpace",
}
"""Structures of the covariance by name."""

LARGE = 100_000
"""Classifiers with more parameters keep their last layer alone, unless a structure is given."""

TUNINGS = ("matched", "evidence", "validation")


def fit_posterior(method: str, problem: Problem, settings: Settings) -> Posterior:
    """Find a posterior by the name of a method.

    Args:
        method: One of `METHODS`.
        problem: The network and the data.
        settings: What steers it.

    Returns:
        The posterior.
    """
    one_of(method, list(METHODS), "--method")
    if settings.structure and method != "laplace":
        raise UsageError(
            f"--structure is of laplace, but the method is {method}. Leave one of them out."
        )
    torch.manual_seed(settings.seed)
    return METHODS[method](problem, settings)


def structure_of(text: str) -> Any:
    """Return the structure of a name, with its number behind a colon: "low_rank:20"."""
    if not text:
        return None
    from net2gp import structures

    name, _, number = text.partition(":")
    kind = getattr(structures, STRUCTURES[one_of(name, list(STRUCTURES), "--structure")])
    if number and name in ("full", "kron", "diagonal", "last_layer"):
        raise UsageError(
            f"--structure {text}: only low_rank, subnetwork, sampled and function_space have a number."
        )
    if number and not (number.isdecimal() and int(number)):
        raise UsageError(
            f"--structure {text}: the number must be a positive whole number, such as {name}:50."
        )
    if name in ("low_rank", "subnetwork") and not number:
        raise UsageError(f"--structure {name} needs a number, such as {name}:50.")
    return kind(int(number)) if number else kind()


def _laplace(problem: Problem, settings: Settings) -> Posterior:
    from net2gp import LastLayer, laplace, tuning

    chosen: Any = {"matched": None, "evidence": tuning.Evidence()}.get(settings.tuning)
    if settings.tuning == "validation":
        assert settings.held_out is not None
        chosen = tuning.Validation(settings.held_out)
    find = partial(
        laplace,
        problem.network,
        (problem.x, problem.y),
        problem.likelihood(settings.noise_var),
        prior_var=settings.prior_var,
        only=settings.only or None,
        tuning=chosen,
    )
    count = sum(one.numel() for one in problem.network.parameters())
    open_choice = not settings.structure and not settings.only
    if open_choice and problem.reading.task == "classification" and count > LARGE:
        try:
            found = find(structure=LastLayer())
        except NetworkError:
            return find(structure=None)
        say(
            f"structure: last_layer, since the network has {count:,} parameters. Pass --structure to choose."
        )
        return found
    return find(structure=structure_of(settings.structure))


def _adapt(problem: Problem, settings: Settings) -> Posterior:
    from net2gp import adapt, linearize

    network = linearize(problem.network, only=settings.only or None)
    likelihood = problem.likelihood(settings.noise_var)
    return adapt(network, (problem.x, problem.y), likelihood, prior_var=settings.prior_var)


def _adapt_classes(problem: Problem, settings: Settings) -> Posterior:
    from net2gp import adapt_classes, linearize

    if problem.reading.task != "classification":
        raise InputError("--method adapt_classes is for classification. Pass --method adapt.")
    prior_var = 1.0 if settings.prior_var is None else settings.prior_var
    network = linearize(problem.network, only=settings.only or None)
    return adapt_classes(
        network,
        (problem.x, problem.y),
        num_classes=len(problem.reading.classes),
        prior_var=prior_var,
    )


def _limit(tangent: bool) -> Callable[[Problem, Settings], Posterior]:
    """A process with a kernel of infinite width; its scale and noise are found by the evidence."""

    def found(problem: Problem, settings: Settings) -> Posterior:
        from net2gp import adapt_classes, condition, nngp, ntk, tune

        kernel = (ntk if tangent else nngp)(problem.network)
        data = (problem.x, problem.y)
        if problem.reading.task == "classification":
            problem.likelihood(settings.noise_var)  # which refuses a noise
            return adapt_classes(kernel, data, num_classes=len(problem.reading.classes))
        open_numbers: dict[str, Any] = {
            name: start
            for name, start, given in (
                ("variance", 1.0, settings.prior_var),
                ("noise_var", 0.1 * float(problem.y.var()) or 0.1, settings.noise_var),
            )
            if given is None
        }
        fixed = {"variance": settings.prior_var, "noise_var": settings.noise_var}

        def build(**numbers: Any) -> Posterior:
            chosen = {**fixed, **numbers}
            likelihood = type(problem.likelihood(None))(chosen["noise_var"])
            return condition(chosen["variance"] * kernel, data, likelihood)

        return tune(build, **open_numbers) if open_numbers else build()

    return found


def _bayes(name: str, **fixed: Any) -> Callable[[Problem, Settings], Posterior]:
    """A method of `net2gp.bayes`, which trains or samples."""

    def found(problem: Problem, settings: Settings) -> Posterior:
        from net2gp import bayes

        keywords = dict(fixed)
        if name in ("ensemble", "multi_swag"):
            size = max(1, len(problem.x) // 10) if name == "multi_swag" else None
            keywords["training"] = bayes.Training(seed=settings.seed, batch_size=size)
        else:
            keywords["seed"] = settings.seed
        if settings.prior_var is not None and name != "mc_dropout":
            keywords["prior"] = settings.prior_var
        if settings.only and name != "mc_dropout":
            keywords["only"] = settings.only
        likelihood = problem.likelihood(settings.noise_var)
        data = (problem.x, problem.y)
        posterior: Posterior = getattr(bayes, name)(problem.network, data, likelihood, **keywords)
        return posterior

    return found


METHODS: dict[str, Callable[[Problem, Settings], Posterior]] = {
    "laplace": _laplace,
    "adapt": _adapt,
    "adapt_classes": _adapt_classes,
    "nngp": _limit(tangent=False),
    "ntk": _limit(tangent=True),
    "ensemble": _bayes("ensemble"),
    "multi_swag": _bayes("multi_swag"),
    "mean_field": _bayes("mean_field"),
    "mc_dropout": _bayes("mc_dropout"),
    "nuts": _bayes("nuts"),
}
"""The methods by name."""

NEW_CLASSES = ("adapt_classes", "nngp", "ntk")
"""Methods whose classes may be others than the outputs of the network."""
