"""What came in: checked data and names, and what is known about the posterior."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributions

from net2gp._version import __version__
from net2gp.data.scaling import Scaling
from net2gp.errors import InputError, NotAvailable, check_finite
from net2gp.inputs import check_inputs, describe, gather, num_rows, rows, same_inputs, tensors
from net2gp.likelihoods.traits import rows_per_point
from net2gp.posteriors import Posterior
from net2gp.posteriors.conditioning.process import linearizations_of
from net2gp.report.uncertainty.outcomes import Labels, Numbers
from net2gp.show import likelihood_name, number
from net2gp.types import Data, Inputs

FEWEST = 5
"""Held-out points without which there is nothing to report."""


@dataclass(frozen=True, eq=False)
class Given:
    """Checked data and names.

    Args:
        x: The held-out points.
        y: Their targets.
        others: Points of other kinds by name.
        columns: The names of the columns of x, or None.
        names: The names of the classes or outputs.
        images: Whether points are images.
        known_points: How many held-out points are also training points.
        scaling: The means and deviations with which inputs and targets were standardized.
    """

    x: Inputs = field(repr=False)
    y: Tensor = field(repr=False)
    others: dict[str, Inputs] = field(repr=False)
    columns: list[str] | None
    names: list[str]
    images: bool
    known_points: int
    scaling: Scaling

    def shown(self, x: Inputs) -> Inputs:
        """Points in the units that they had before they were standardized."""
        if not isinstance(x, Tensor) or self.scaling.x_mean is None:
            return x
        return self.scaling.inputs_back(x.double())

    def named(self, found: Labels | Numbers) -> Given:
        """Complete the names of classes or outputs, or refuse those that do not fit."""
        labels = isinstance(found, Labels)
        count = found.probs.shape[1] if isinstance(found, Labels) else found.mean.shape[1]
        what = "classes" if labels else "outputs"
        if not self.names:
            first = "" if labels else "y"
            names = [f"{first}{c}" for c in range(count)]
            return replace(self, names=["y"] if names == ["y0"] else names)
        if len(self.names) != count:
            raise InputError(
                f"classes must name the {count} {what} of the posterior, but has {len(self.names)} names: "
                f"{', '.join(self.names[:8])}. Pass {count} names, in the order of the {what}."
            )
        return self


def checked(
    posterior: Posterior,
    held_out: Data,
    others: Mapping[str, Inputs] | None,
    columns: Sequence[str] | None,
    classes: Sequence[str] | None,
    images: bool | None,
    scaling: Scaling | None,
) -> Given:
    """Check everything that can be checked before the first prediction.

    Raises:
        InputError: If data or names do not fit.
        NotAvailable: If the posterior has targets that no report is for.
    """
    like = _example(posterior)
    x, y = gather(held_out, like)
    if len(y) < FEWEST:
        raise InputError(
            f"a report needs at least {FEWEST} held-out points, but got {len(y)}. Hold out more; a hundred "
            "give intervals of about ±5 %."
        )
    known = 0
    if posterior.x is not None:
        if same_inputs(x, posterior.x):
            raise InputError(
                "the held-out data are the data of the posterior, on which every posterior looks good. Pass "
                "data that it has not seen."
            )
        known = _repeated(x, posterior.x)
    scaling = scaling or Scaling()
    _check_scaling(scaling, x, _check_law(posterior, x, y))
    if not isinstance(others, Mapping | None):
        raise InputError(
            f"others must be inputs by name, but is {describe(others)}. Pass others={{'shifted': x}}."
        )
    found = {str(name): _like(name, other, like) for name, other in (others or {}).items()}
    for name, other in found.items():
        _check_shape(name, other, x)
    picture = _is_image(x) if images is None else _checked_images(images, x)
    names = _columns(columns, x, picture), _names(classes)
    return Given(x, y, found, *names, picture, known, scaling)


def _example(posterior: Any) -> Tensor | None:
    """A floating tensor whose dtype and device new inputs take."""
    if not isinstance(posterior, Posterior):
        raise InputError(
            f"expected a posterior, but got {describe(posterior)}. Pass what condition, adapt, laplace or "
            "another method returns."
        )
    if rows_per_point(posterior.likelihood) is not None:
        raise NotAvailable(
            "a report is about points with targets of their own, and the pixels, tokens or times of one "
            "point belong together. Report on one place: laplace(linearize(network, "
            "output=lambda out: out[:, :, 0, 0]), (x, y[:, 0, 0]), likelihood)."
        )
    known = [] if posterior.x is None else tensors(posterior.x)
    networks = (one.example for one in linearizations_of(posterior))
    return next((v for v in (*known, *networks) if v.is_floating_point()), None)


@torch.no_grad()
def _check_law(posterior: Posterior, x: Inputs, y: Tensor) -> int:
    """Predict two points, refuse what does not fit, and return how many numbers a target has."""
    law = posterior.predict(rows(x, slice(0, 2)))
    if isinstance(law, distributions.Bernoulli) and law.probs.shape[-1] != 1:
        raise NotAvailable(
            f"a report is about one label per point, but this posterior predicts {law.probs.shape[-1]} "
            "binary labels per point. Report on one of them: laplace(linearize(network, "
            "output=lambda out: out[:, :1]), (x, y[:, :1]), Bernoulli())."
        )
    if y.is_floating_point():
        check_finite(y, "y")
    f = posterior.mean(rows(x, slice(0, 1)))
    posterior.likelihood.check(f.expand(len(y), *f.shape[1:]), y)
    of_labels = isinstance(law, distributions.Categorical | distributions.Bernoulli)
    return 0 if of_labels else law.mean[0].numel()


def _like(name: object, x: Any, like: Tensor | None) -> Inputs:
    """Other inputs, arrays as tensors."""
    if isinstance(x, np.ndarray):
        x = torch.as_tensor(x)
        if x.is_floating_point() and like is not None:
            x = x.to(like)
    check_inputs(x, f"others[{name!r}]")
    return x


def _check_shape(name: str, other: Inputs, x: Inputs) -> None:
    shapes = [[tuple(t.shape[1:]) for t in tensors(v)] for v in (other, x)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"others[{name!r}] must hold points like the held-out ones, of shape "
            f"{', '.join(map(str, shapes[1]))} after the first axis, but theirs is "
            f"{', '.join(map(str, shapes[0]))}. Resize or reshape them."
        )


def _is_image(x: Inputs) -> bool:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    sizes = tuple(x.shape[1:])
    grid = len(sizes) == 3 and sizes[0] in (1, 3) and min(sizes[1:]) >= 4
    return grid or (len(sizes) == 2 and min(sizes) >= 8)


def _checked_images(images: bool, x: Inputs) -> bool:
    if images and not (
        isinstance(x, Tensor) and (x.dim() == 3 or (x.dim() == 4 and x.shape[1] in (1, 3)))
    ):
        raise InputError(
            "images must have shape (N, H, W), (N, 1, H, W) or (N, 3, H, W), but x is "
            f"{describe(x)}. Pass images=False."
        )
    return bool(images)


def _columns(columns: Sequence[str] | None, x: Inputs, images: bool) -> list[str] | None:
    flat = isinstance(x, Tensor) and x.dim() == 2
    if columns is None:
        return [f"x{d}" for d in range(x.shape[1])] if flat and not images else None  # type: ignore[union-attr]
    if isinstance(columns, str):
        raise InputError(
            f"columns must be a list of names, but is {columns!r}. Pass [{columns!r}]."
        )
    if not flat:
        raise InputError(
            f"columns are for a table x of shape (N, D), but x is {describe(x)}. Leave columns out."
        )
    assert isinstance(x, Tensor)
    if len(columns) != x.shape[1]:
        raise InputError(
            f"columns must name the {x.shape[1]} columns of x, but has {len(columns)} names. Pass one name "
            "per column, in their order."
        )
    return _different([str(name) for name in columns], "columns")


def _names(classes: Sequence[str] | None) -> list[str]:
    if isinstance(classes, str):
        raise InputError(
            f"classes must be a list of names, but is {classes!r}. Pass [{classes!r}, …]."
        )
    return [] if classes is None else _different([str(name) for name in classes], "classes")


def _different(names: list[str], what: str) -> list[str]:
    """The names, of which scores and slices have one each."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{what} must be different names, but {twice[0]!r} is there twice.")
    return names


def _check_scaling(scaling: Scaling, x: Inputs, outputs: int) -> None:
    """Refuse a scaling of other columns, or of other targets."""
    columns = x.shape[1] if isinstance(x, Tensor) and x.dim() > 1 else 0
    pairs = {"x": columns, "y": outputs}
    for name, count in pairs.items():
        for part in ("mean", "std"):
            known = getattr(scaling, f"{name}_{part}")
            if known is not None and len(known) != count:
                what = "columns of x" if name == "x" else "numeric targets"
                raise InputError(
                    f"scaling has {len(known)} numbers as {name}_{part}, but there are {count} {what}. Pass "
                    "data.Scaling.of(x, y) of the data before they were standardized."
                )


def _repeated(x: Inputs, known: Inputs) -> int:
    """The number of points that are among the known ones to the last digit."""
    if not isinstance(x, Tensor) or not isinstance(known, Tensor) or x.shape[1:] != known.shape[1:]:
        return 0
    seen = set(_bytes(known.to(x.dtype)))
    return sum(row in seen for row in _bytes(x))


def _bytes(x: Tensor) -> list[bytes]:
    """The bytes of each point."""
    flat = x.detach().cpu().flatten(1).contiguous().view(torch.uint8)
    return [row.tobytes() for row in flat.numpy()]


def facts(posterior: Posterior, given: Given) -> dict[str, Any]:
    """Collect what is known about the posterior and the data.

    Args:
        posterior: The posterior.
        given: The checked data.

    Returns:
        Texts and numbers by name.
    """
    known = {name.strip("_"): text for name, text in posterior._facts().items()}
    known |= _in_units(posterior, given.scaling) | _network(posterior)
    found: dict[str, Any] = {**known, "held_out": f"{num_rows(given.x):,} points"}
    hashes = {"held-out inputs": _hash(tensors(given.x)), "held-out targets": _hash([given.y])}
    if posterior.x is not None and posterior.y is not None:
        hashes["training inputs"] = _hash(tensors(posterior.x))
        hashes["training targets"] = _hash([posterior.y])
    if hasattr(posterior, "linearized"):
        linearized = posterior.linearized
        values = {**linearized.frozen, **linearized.params}
        hashes["parameters of the network"] = _hash([values[name] for name in sorted(values)])
    found["hashes"] = hashes
    found["versions"] = {
        "net2gp": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    return found


def _network(posterior: Posterior) -> dict[str, str]:
    """The network with all of its parameters, of which a structure may let some vary."""
    if not hasattr(posterior, "linearized"):
        return {}
    network, varying = posterior.linearized.network, posterior.linearized.num_params
    total = sum(one.numel() for one in network.parameters())
    found = {"network": f"{type(network).__name__}, linearized"}
    if total:
        found["P"] = f"{total:,}" + (f", of which {varying:,} vary" if varying < total else "")
    return found


def _in_units(posterior: Posterior, scaling: Scaling) -> dict[str, str]:
    """Noise and evidence about the targets themselves, if these were standardized: y = m + s·z.

    The deviation of the noise is s times that of z, and log p(y) = log p(z) − N Σ log s.
    """
    if scaling.y_std is None:
        return {}
    found = {}
    noise = getattr(posterior.likelihood, "noise_var", None)
    if noise is not None:
        s = torch.as_tensor(scaling.y_std, dtype=torch.float64)
        var = torch.as_tensor(noise).detach().double().cpu()
        if var.numel() in (1, len(s)):
            stds = ", ".join(number(v) for v in (var.reshape(-1).sqrt() * s).tolist())
            found["noise_std"] = stds
        found["likelihood"] = f"{likelihood_name(posterior.likelihood)} of standardized targets"
    if posterior.evidence is not None and posterior.y is not None:
        moved = float(posterior.evidence) - len(posterior.y) * float(np.log(scaling.y_std).sum())
        found["log_evidence"] = number(moved)
    return found


def _hash(values: Sequence[Tensor]) -> str:
    """The first half of the SHA-256 of the numbers' bytes, in order."""
    digest = hashlib.sha256()
    for value in values:
        whole = value.detach().cpu().contiguous()
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
