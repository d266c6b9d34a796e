"""Kronecker-factored covariances, one a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.linear.curvatures.kron_blocks import inputs_with_bias
from net2gp.linear.forward.factors import Direct, Factor, Outer, jacobian, scaled
from net2gp.posteriors.weights.rooted import normal, rooted_blocks, rooted_joint, rooted_variances


@dataclass(frozen=True, eq=False)
class KronRoot:
    """One layer's Σ = D (Q_A ⊗ Q_G) diag(spread²) (Q_A ⊗ Q_G)ᵀ D for inputs scaled by D.

    scale: (I,) the prior's standard deviations by input; QA (S, I, I), QG (S, O, O), spread (S, O, I).
    """

    names: tuple[str, ...]
    scale: Tensor
    QA: Tensor
    QG: Tensor
    spread: Tensor

    def rooted(self, found: dict[str, Factor]) -> Outer | Direct:
        """The layer's inputs and gradients in the eigenbasis, times the spread."""
        factor = found[self.names[0]]
        if not isinstance(factor, Outer):
            return self._rooted_gradient(found)
        # in float32 a rotation leaves rounding in directions that the data know well, times a wide prior
        a = inputs_with_bias(factor, len(self.names) == 2).double()
        a = (a * self.scale) @ self.QA
        g = torch.einsum("sop,bcsot->bcspt", self.QG, factor.g.double())
        return Outer(a, g, self.spread)

    def _rooted_gradient(self, found: dict[str, Factor]) -> Direct:
        """The same from the gradient of the weight itself, which is smaller for weights of many places."""
        S, O = self.spread.shape[:2]
        J = jacobian(found[self.names[0]]).double()
        J = J.reshape(*J.shape[:2], S, O, -1)
        if len(self.names) == 2:
            bias = jacobian(found[self.names[1]]).double().reshape(*J.shape[:2], S, O, 1)
            J = torch.cat([J, bias], -1)
        rotated = self.QG.mT @ (J * self.scale) @ self.QA
        return Direct((rotated * self.spread).flatten(2))

    def draw(self, num_samples: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draws of the weight (and bias), each (p, S)."""
        z = normal(self.spread, num_samples, generator)
        values = torch.einsum("sop,spin->soin", self.QG, self.spread[..., None] * z)
        values = torch.einsum("sij,sojn->soin", self.QA, values) * self.scale[:, None]
        if len(self.names) == 1:
            return {self.names[0]: values.flatten(0, 2)}
        weight, bias = values[:, :, :-1], values[:, :, -1]
        return {self.names[0]: weight.flatten(0, 2), self.names[1]: bias.flatten(0, 1)}


@dataclass(frozen=True, eq=False)
class DenseRoot:
    """One parameter's Σ = root rootᵀ."""

    names: tuple[str, ...]
    root: Tensor

    def rooted(self, found: dict[str, Factor]) -> Direct:
        """J root."""
        return Direct(jacobian(found[self.names[0]]).double() @ self.root)

    def draw(self, num_samples: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """root · z."""
        return {self.names[0]: self.root @ normal(self.root[0], num_samples, generator)}


@dataclass(frozen=True, eq=False)
class DiagonalRoot:
    """One parameter's Σ = diag(variance), of the parameter's own shape."""

    names: tuple[str, ...]
    variance: Tensor

    def rooted(self, found: dict[str, Factor]) -> Factor:
        """J diag(variance)^{1/2}."""
        factor = found[self.names[0]]
        like = factor.J if isinstance(factor, Direct) else factor.g
        return scaled(factor, self.variance.to(like))

    def draw(self, num_samples: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """√variance · z."""
        flat = self.variance.reshape(-1)
        return {self.names[0]: flat.sqrt()[:, None] * normal(flat, num_samples, generator)}


@dataclass(frozen=True, eq=False)
class KronCovariance:
    """Σ layer by layer; `order` are the parameters' names as `Linearized.flatten` has them."""

    layers: tuple[KronRoot | DenseRoot | DiagonalRoot, ...]
    order: tuple[str, ...]

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """A factor for each layer."""
        return [layer.rooted(found) for layer in self.layers]

    blocks, variances, joint = rooted_blocks, rooted_variances, rooted_joint

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Layer by layer."""
        found: dict[str, Tensor] = {}
        for layer in self.layers:
            found |= layer.draw(num_samples, generator)
        return torch.cat([found[name] for name in self.order])
