"""What a search for latent variables found, and what can be asked of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.deep.latent.layer import FittedLayer
from net2gp.deep.latent.psi import GaussianRows
from net2gp.deep.latent.search import LatentSearch, climb
from net2gp.deep.latent.tower import Tower
from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import describe
from net2gp.types import Params


@dataclass(frozen=True, eq=False)
class LatentVariables:
    """Latent variables of data, with the layers below and between them.

    Args:
        levels: The law of each level of latent variables, from the top to the data.
        layers: The fitted layers, from the top to the data.
        bound: The bound on log p(y), or on log p(y | inputs).
        bounds: The largest bound so far, after each step with all levels.
        depth_bounds: Without inputs, the bound with one level, with two, and so on up to all levels.
        inputs: The inputs above the first level, or None.
        center: The means of the data per column, (D,).
        search: The settings of the search.
    """

    levels: tuple[GaussianRows, ...]
    layers: tuple[FittedLayer, ...]
    bound: float
    bounds: Tensor = field(repr=False)
    depth_bounds: tuple[float, ...] = field(repr=False)
    inputs: Tensor | None = field(repr=False)
    center: Tensor = field(repr=False)
    search: LatentSearch = field(repr=False)

    @staticmethod
    @torch.no_grad()
    def of(
        tower: Tower,
        center: Tensor,
        bounds: list[float],
        depth_bounds: list[float],
        search: LatentSearch,
    ) -> LatentVariables:
        """Read a fitted tower.

        Args:
            tower: The tower.
            center: The means of the data per column.
            bounds: The bounds of the last climb.
            depth_bounds: The bounds with fewer levels, and with all.
            search: The settings of the search.

        Returns:
            The value.
        """
        layers = [tower.layer(k).fitted(*tower.ends(k)) for k in range(tower.num_layers)]
        return LatentVariables(
            tuple(tower.level(k) for k in range(tower.num_levels)),
            tuple(layers),
            bounds[-1],
            torch.tensor(bounds, dtype=torch.float64),
            tuple(depth_bounds),
            tower.inputs,
            center,
            search,
        )

    @property
    def mean(self) -> Tensor:
        """The latent means of the first level, (N, Q)."""
        return self._first().mean

    @property
    def variance(self) -> Tensor:
        """The latent variances of the first level, (N, Q)."""
        found = self._first().variance
        assert found is not None
        return found

    @property
    def relevances(self) -> tuple[Tensor, ...]:
        """How much each input of each layer matters: the variance of its means over its squared length scale.

        An input that a layer ignores has a relevance near 0. There is one vector per layer, from the top.
        """
        above = [GaussianRows(self.inputs)] if self.inputs is not None else []
        rows = [*above, *self.levels]
        return tuple(
            one.mean.var(0, correction=0) / fitted.layer.lengthscale.square()
            for one, fitted in zip(rows, self.layers, strict=True)
        )

    @property
    def noise_var(self) -> Tensor:
        """The variance of the noise of the data: (1,)."""
        return self.layers[-1].layer.noise_var

    @torch.no_grad()
    def reconstruct(self) -> GaussianRows:
        """The law of noise-free data at the latent variables right above them, mean and variance: (N, D)."""
        if not self.levels:
            assert self.inputs is not None
            return self.predict(self.inputs)
        found = self.layers[-1].moments(self.levels[-1])
        return GaussianRows(found.mean + self.center, found.variance)

    @torch.no_grad()
    def predict(self, top: Tensor, variance: Tensor | None = None) -> GaussianRows:
        """Compute mean and variance of noise-free data for places at the top: inputs, or latent variables.

        The moments after one layer are exact. A further layer takes them as those of Gaussians.

        Args:
            top: Means of inputs or of variables of the first level, (R, Q).
            variance: Their variances, (R, Q), or None for places that are known.

        Returns:
            The moments, (R, D).

        Raises:
            InputError: If the shapes are wrong.
        """
        width = self.layers[0].layer.points.shape[1]
        if not isinstance(top, Tensor) or top.dim() != 2 or top.shape[1] != width:
            raise InputError(f"top must have the shape (R, {width}), but is {describe(top)}.")
        if variance is not None and variance.shape != top.shape:
            raise InputError(
                f"variance must have the shape {tuple(top.shape)} of top, but has {tuple(variance.shape)}."
            )
        rows = GaussianRows(top.double(), None if variance is None else variance.double())
        for k, fitted in enumerate(self.layers):
            rows = fitted.moments(rows)
            if k + 1 < len(self.layers):
                assert rows.variance is not None
                rows = GaussianRows(rows.mean, rows.variance + fitted.layer.noise_var)
        return GaussianRows(rows.mean + self.center, rows.variance)

    def infer(self, y: Tensor, *, num_steps: int = 100) -> tuple[GaussianRows, ...]:
        """Find the latent variables of new data, with the layers as they are.

        For each new row the bound Σ E log p(below | above) plus entropies is climbed in the law of its latent
        variables, from the law of the row whose reconstruction is nearest.

        Args:
            y: R new rows, (R, D). NaN means a value that is not known.
            num_steps: The largest number of steps.

        Returns:
            The law of each level, from the top to the data. Pass the last one's moments to the last layer,
            or the first one's to `predict`, to fill in what is missing.

        Raises:
            NotAvailable: If the first level is below inputs.
            InputError: If the shape is wrong, or a row is all NaN.
        """
        if self.inputs is not None:
            raise NotAvailable(
                "infer finds latent variables without inputs. With inputs, use predict(inputs)."
            )
        D = len(self.center)
        if not isinstance(y, Tensor) or y.dim() != 2 or y.shape[1] != D:
            raise InputError(f"y must have the shape (R, {D}), but is {describe(y)}.")
        present = (~y.isnan()).double()
        if not bool((present.sum(1) > 0).all()):
            raise InputError("a row of y is all NaN, so that nothing is known of it. Drop the row.")
        values = (y.double() - self.center).nan_to_num(0.0)
        near = self._nearest(values, present)
        start: Params = {}
        for k, one in enumerate(self.levels):
            assert one.variance is not None
            start |= {f"mean{k}": one.mean[near], f"log{k}": one.variance[near].log()}
        bound = self._new_bound(values, present)
        with torch.inference_mode(False), torch.enable_grad():
            found = climb(bound, start, num_steps, self.search.tolerance, lambda value: None)
        return tuple(
            GaussianRows(found[f"mean{k}"], found[f"log{k}"].exp()) for k in range(len(self.levels))
        )

    def _nearest(self, values: Tensor, present: Tensor) -> Tensor:
        own = self.reconstruct().mean - self.center
        apart = (values**2) @ torch.ones_like(own).mT + present @ (own**2).mT - 2 * values @ own.mT
        return apart.argmin(1)

    def _new_bound(self, values: Tensor, present: Tensor) -> Callable[[Params], Tensor]:
        def bound(variables: Params) -> Tensor:
            total = values.new_zeros(())
            for k, fitted in enumerate(self.layers):
                s = variables[f"log{k}"].exp()
                total = total + 0.5 * variables[f"log{k}"].sum()
                if k == 0:
                    total = total - 0.5 * (variables["mean0"].square() + s).sum()
                out = fitted.moments(GaussianRows(variables[f"mean{k}"], s))
                assert out.variance is not None
                noise, spread = fitted.layer.noise_var, out.variance
                if k + 1 < len(self.layers):
                    target, there = variables[f"mean{k + 1}"], 1.0
                    spread = spread + variables[f"log{k + 1}"].exp()
                else:
                    target, there = values, present  # type: ignore[assignment]
                each = (2 * math.pi * noise).log() + ((target - out.mean).square() + spread) / noise
                total = total - 0.5 * (there * each).sum()
            return total

        return bound

    def _first(self) -> GaussianRows:
        if not self.levels:
            raise NotAvailable("there are no latent variables: widths was empty. Pass widths=2.")
        return self.levels[0]
