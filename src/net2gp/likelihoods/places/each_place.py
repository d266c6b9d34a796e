"""A likelihood that holds at every place of a point, whose network has outputs for each of them.

Outputs of a point are (P·C,): C channels of P places, where channel c of place p has index p·C + c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.errors import InputError
from net2gp.likelihoods.laws import Contrasts, Variances, gaussian_law
from net2gp.likelihoods.mixtures import mixture
from net2gp.likelihoods.places.laws import by_place
from net2gp.likelihoods.targets import IGNORED, check_targets, shape_targets
from net2gp.likelihoods.traits import (
    Linked,
    curvature_root,
    has_gaussian_noise,
    has_one_class,
    is_classifier,
    tied_points,
)
from net2gp.memory import check_memory
from net2gp.tags import savable
from net2gp.types import Likelihood


def each_place(likelihood: Likelihood, axis: int | None = None) -> EachPlace:
    """Let a likelihood hold at every place of a point: pixels, tokens, times.

    For a network with outputs (N, C, H, W), (N, T, C) and the like, log p(y | f) is the sum over places of
    the likelihood's own, and labels of -100 do not count. `laplace` finds out by itself that targets belong
    to places where their shape says so; this function says which axis of the outputs has the channels.

    Args:
        likelihood: What holds at a place, such as `Categorical()` or `Gaussian()`.
        axis: The axis of the network's outputs that counts channels (classes, logits), where 0 counts points:
            1 for (N, C, H, W), -1 for (N, T, C). None lets the shape of the targets decide.

    Returns:
        The likelihood of whole points.

    Raises:
        InputError: If the likelihood holds noise for each point, or `axis` counts points.

    >>> from net2gp.likelihoods import Categorical
    >>> dense = each_place(Categorical(), axis=1)
    >>> dense
    EachPlace(Categorical(link=MonteCarlo(num_samples=512, seed=0)), axis=1)
    """
    if isinstance(likelihood, EachPlace):
        return likelihood if axis is None else replace(likelihood, axis=axis)
    if axis == 0 or isinstance(axis, bool) or not isinstance(axis, int | None):
        raise InputError(
            f"axis counts channels of the outputs, 1 for (N, C, H, W) or -1 for (N, T, C), but is {axis!r}; "
            "0 counts points."
        )
    if tied_points(likelihood) is not None:
        raise InputError(
            "the likelihood holds numbers for each point, which cannot be told from places. Pass one number, "
            "or one for each channel: Gaussian(noise_var=0.1)."
        )
    if has_gaussian_noise(likelihood):
        return NoisyPlaces(likelihood, axis)
    return (LinkedPlaces if isinstance(likelihood, Linked) else EachPlace)(likelihood, axis)


@savable("places.EachPlace")
@dataclass(frozen=True, eq=False, repr=False)
class EachPlace:
    """The same likelihood at every place of a point: see `each_place`, which makes one.

    Args:
        likelihood: What holds at a place.
        axis: The axis of the network's outputs with the channels.
        channels: Their number C, once the network is known.
        used: Which places count, (N, P), where labels of some training points are ignored; else None.
    """

    likelihood: Any
    axis: int | None = None
    channels: int | None = None
    used: Tensor | None = field(default=None)

    def __repr__(self) -> str:
        axis = "" if self.axis is None else f", axis={self.axis}"
        return f"EachPlace({self.likelihood}{axis})"

    @property
    def classifier(self) -> bool:
        """Whether targets are labels."""
        return is_classifier(self.likelihood)

    @property
    def one_class(self) -> bool:
        """Whether one class is the label of a place."""
        return has_one_class(self.likelihood)

    @property
    def canonical(self) -> bool | None:
        """Whether the curvature is the negative Hessian, as the likelihood says."""
        found: bool | None = getattr(self.likelihood, "canonical", None)
        return found

    @property
    def tied_points(self) -> int | None:
        """The number of training points, if some of their places are ignored."""
        return None if self.used is None else len(self.used)

    def of_points(self, part: Tensor | slice) -> EachPlace:
        """Select the places of some of the points."""
        return self if self.used is None else replace(self, used=self.used[part])

    def bound(self, y: Tensor) -> EachPlace:
        """The likelihood of these points, which knows where labels are ignored."""
        ignored = None if y.is_floating_point() else y == IGNORED
        if ignored is None or not bool(ignored.any()):
            return replace(self, used=None)
        return replace(self, used=~ignored.reshape(len(y), -1))

    def free(self) -> EachPlace:
        """The likelihood of any points."""
        return self if self.used is None else replace(self, used=None)

    def inside(self, likelihood: Likelihood) -> EachPlace:
        """The same places with another likelihood at them."""
        return replace(each_place(likelihood, self.axis), channels=self.channels, used=self.used)

    def rows(self, f: Tensor) -> Tensor:
        """Outputs with places as rows: (N·P, C) for (N, P·C) or (N, …, C)."""
        assert self.channels is not None
        return f.reshape(-1, self.channels)

    def flat(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Outputs (N·P, C), targets (N·P,) or (N·P, D), and which labels are not ignored, if some are."""
        f = self.rows(f)
        if y.numel() == len(f):
            y = y.reshape(-1)
        elif y.numel() % len(f):
            raise InputError(
                f"y must have targets for each of the {len(f)} places of these points, but has the shape "
                f"{tuple(y.shape)}. Pass the labels of all places."
            )
        else:
            y = y.movedim(-1 if self.axis is None else self.axis, -1).reshape(len(f), -1)
        if y.is_floating_point() or not bool((y == IGNORED).any()):
            return f, y, None
        kept = y != IGNORED
        return f, torch.where(kept, y, 0), kept if kept.dim() == 1 else kept.all(-1)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check the targets of all places that are not ignored.

        Raises:
            InputError: If all are ignored, or the likelihood refuses some.
        """
        check_targets(f, y)
        rows, targets, kept = self.flat(f, y)
        if kept is None:
            self.likelihood.check(rows, targets)
            return
        if not bool(kept.any()):
            raise InputError(
                f"all labels are {IGNORED}, which marks places to ignore, so that nothing is known. Pass "
                f"labels of which some are classes: (y != {IGNORED}).any()."
            )
        self.likelihood.check(rows[kept], targets[kept])

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y_n | f_n), summed over the places that are not ignored: (N,)."""
        rows, targets, kept = self.flat(f, y)
        values = self.likelihood.log_prob(rows, targets)
        if kept is not None:
            values = torch.where(kept, values, 0.0)
        return values.reshape(len(y), -1).sum(1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute ∇_f log p, which is zero where a label is ignored: as `f`."""
        rows, targets, kept = self.flat(f, y)
        values = self.likelihood.residual(rows, targets)
        if kept is not None:
            values = torch.where(kept[:, None], values, 0.0)
        return values.reshape(f.shape)

    def curvature(self, f: Tensor) -> Tensor:
        """Compute one block for each place, zero elsewhere: (N, P·C, P·C), for few places.

        `curvature_times` and `root_times` multiply by it without forming it.
        """
        return self._blocks(self._masked(self.likelihood.curvature(self.rows(f))), len(f))

    def curvature_root(self, f: Tensor) -> Tensor:
        """Compute a root of the curvature, with columns of its own for each place: (N, P·C, P·K)."""
        return self._blocks(self._masked(curvature_root(self.likelihood, self.rows(f))), len(f))

    def curvature_times(self, f: Tensor, v: Tensor) -> Tensor:
        """Multiply by the curvature, place by place.

        Args:
            f: Outputs, (N, P·C).
            v: Columns, (N·P·C, k).

        Returns:
            Λ v, in the shape of `v`.
        """
        blocks = self._masked(self.likelihood.curvature(self.rows(f)))
        return (blocks.to(v) @ v.reshape(*blocks.shape[:2], -1)).reshape(v.shape)

    def root_times(self, f: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
        """Multiply a root of the curvature by numbers that are drawn for it.

        Args:
            f: Outputs, (N, P·C).
            draw: Returns numbers (N, width, S) for a width.

        Returns:
            R z, (N, P·C, S).
        """
        root = self._masked(curvature_root(self.likelihood, self.rows(f)))
        z = draw(len(root) // len(f) * root.shape[2])
        found = root @ z.reshape(len(root), root.shape[2], -1).to(root)
        return found.reshape(len(f), -1, found.shape[-1])

    def class_counts(self, y: Tensor) -> Tensor:
        """Count how often each class is the label of a place: (C,)."""
        assert self.channels is not None
        labels = y.reshape(-1).long()
        return torch.bincount(labels[labels != IGNORED], minlength=self.channels)

    def scores(self, law: Distribution, y: Tensor) -> Tensor:
        """Compute log p(y) of each place that is not ignored, under a prediction.

        Args:
            law: A law whose batch is (N, places).
            y: The targets.

        Returns:
            One number for each place.
        """
        shape = law.batch_shape
        lead = law.mean if law.event_shape else law.mean[..., None]
        columns = lead.shape[-1] if law.event_shape else 1
        if y.numel() == shape.numel() * columns and columns > 1:
            y = y.movedim(-1 if self.axis is None else self.axis, -1)
        kept = None if y.is_floating_point() or not bool((y == IGNORED).any()) else y != IGNORED
        safe = y if kept is None else torch.where(kept, y, 0)
        values = law.log_prob(safe.reshape(shape + law.event_shape).to(lead.dtype))
        return values.reshape(-1) if kept is None else values[kept.reshape(values.shape)]

    def predict(self, f: Any) -> Distribution:
        """Predict at every place.

        Args:
            f: The law of the outputs, with batch (N, places) and event C.

        Returns:
            The law of the targets, whose batch shape begins with (N, places).
        """
        shape, mean = f.mean.shape[:-1], f.mean.reshape(-1, f.mean.shape[-1])
        if isinstance(f, Variances):  # of contrasts too
            kind = Contrasts if isinstance(f, Contrasts) else Variances
            law: Any = kind(mean, f.variance.reshape(mean.shape))
        else:
            covariance = f.covariance_matrix
            law = gaussian_law(mean, covariance.reshape(-1, *covariance.shape[-2:]))
        return by_place(self.likelihood.predict(law), shape)

    def _masked(self, rows: Tensor) -> Tensor:
        """Numbers of places, zero for those that are ignored: (N·P, …)."""
        if self.used is None:
            return rows
        return rows * self.used.reshape(-1, *[1] * (rows.dim() - 1)).to(rows)

    def _blocks(self, rows: Tensor, count: int) -> Tensor:
        """Blocks (N·P, C, K) on the diagonal of matrices (N, P·C, P·K)."""
        places, (height, width) = len(rows) // count, rows.shape[1:]
        check_memory(
            rows.element_size() * len(rows) * places * height * width,
            rows.device,
            f"a matrix for each point of {places} places",
            "structure=LastLayer(), or Kron(MonteCarloFisher())",
        )
        blocks = rows.new_zeros(count, places, height, places, width)
        each = torch.arange(places, device=rows.device)
        blocks[:, each, :, each, :] = rows.reshape(count, places, height, width).transpose(0, 1)
        return blocks.reshape(count, places * height, places * width)


@mixture.register
def _(likelihood: EachPlace, f: Tensor) -> Distribution:
    law = mixture(likelihood.likelihood, f.flatten(1, -2))
    return by_place(law, f.shape[1:-1])


@savable("places.NoisyPlaces")
@dataclass(frozen=True, eq=False, repr=False)
class NoisyPlaces(EachPlace):
    """Gaussian noise at every place, of one variance or of one for each channel."""

    @property
    def noise_var(self) -> float | Tensor | None:
        """The variance of the noise, or None if it is to be learned."""
        found: float | Tensor | None = self.likelihood.noise_var
        return found

    def noise_variance(self, f: Tensor) -> Tensor:
        """Expand the noise variance to the shape of `f`."""
        found: Tensor = self.likelihood.noise_variance(self.rows(f))
        return found.reshape(f.shape)

    def with_noise(self, noise_var: float | Tensor) -> EachPlace:
        """Return the same likelihood with another noise."""
        return replace(self, likelihood=self.likelihood.with_noise(noise_var))

    def columns(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the targets in the order of the outputs: (N, P·C)."""
        rows, targets, _ = self.flat(f, y)
        return shape_targets(rows, targets).reshape(f.shape)


@savable("places.LinkedPlaces")
@dataclass(frozen=True, eq=False, repr=False)
class LinkedPlaces(EachPlace):
    """Labels at every place, with a link that integrates the outputs of a place out."""

    @property
    def link(self) -> Any:
        """The way in which f is integrated out at a place."""
        return self.likelihood.link

    @property
    def matched_link(self) -> Any:
        """The class of link that is chosen, with a matched scale, if the link is open."""
        return self.likelihood.matched_link

    @property
    def open_link(self) -> bool:
        """Whether no link was given, so that one is chosen."""
        return bool(self.likelihood.open_link)

    def with_link(self, link: Any) -> EachPlace:
        """Return the same likelihood with another link."""
        return replace(self, likelihood=self.likelihood.with_link(link))

    def cross_entropy(self, f: Tensor, logits: Tensor) -> Tensor:
        """Compute −E log p(y | logits) for labels drawn at f, averaged over the places that count."""
        f, logits = self.rows(f), self.rows(logits)
        if self.used is not None:
            kept = self.used.reshape(-1)
            f, logits = f[kept], logits[kept]
        found: Tensor = self.likelihood.cross_entropy(f, logits)
        return found
