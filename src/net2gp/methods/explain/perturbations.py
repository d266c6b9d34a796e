"""Ways to move inputs by a given distance: at random, toward other points, and against the prediction."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError, check_count, check_seed
from net2gp.inputs import describe
from net2gp.linalg.chance import normal_like

Objective = Callable[[Tensor], Tensor]
"""From points (N, …) to a number (N,) for each that an adversary raises."""

FIRST_SHARE = 1e-2
"""How far from a point, as a share of the distance, the first slope is taken."""


@dataclass(frozen=True)
class Perturbation(ABC):
    """A way to move every point by a distance.

    Args:
        norm: How distances are measured: 2.0 for the Euclidean length of all entries of a point, `math.inf`
            for the largest entry.

    Raises:
        InputError: If the norm is another one.
    """

    norm: float = 2.0

    def __post_init__(self) -> None:
        if self.norm not in (2.0, math.inf):
            raise InputError(f"norm must be 2.0 or math.inf, but is {self.norm!r}.")

    @abstractmethod
    def __call__(self, x: Tensor, distance: float, objective: Objective) -> Tensor:
        """Move points.

        Args:
            x: N points.
            distance: How far.
            objective: What an adversary raises.

        Returns:
            N points that are `distance` away, or not as far.
        """

    def direction(self, v: Tensor) -> Tensor:
        """Return the points of the unit sphere of the norm along which vectors have the largest product.

        Args:
            v: N vectors, such as gradients.

        Returns:
            v/‖v‖ for the Euclidean norm, the signs of v for the largest entry; zero for a vector of zeros.
        """
        return v.sign() if self.norm == math.inf else v / self.length(v).clamp(min=1e-30)

    def length(self, v: Tensor) -> Tensor:
        """Return the norm of vectors.

        Args:
            v: N vectors.

        Returns:
            Their norms, (N, 1, …).
        """
        flat = v.flatten(1)
        found = flat.abs().amax(1) if self.norm == math.inf else flat.norm(dim=1)
        return found.reshape(-1, *[1] * (v.dim() - 1))


@dataclass(frozen=True)
class RandomNoise(Perturbation):
    """In a random direction: a Gaussian vector of the given length, or ± the distance in every entry.

    Args:
        norm: How distances are measured: 2.0 or `math.inf`.
        seed: The seed of the directions, which are the same for all distances.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)

    def __call__(self, x: Tensor, distance: float, objective: Objective) -> Tensor:
        """Move points at random.

        Args:
            x: N points.
            distance: How far.
            objective: Not used.

        Returns:
            N points.
        """
        generator = torch.Generator(x.device).manual_seed(self.seed)
        return x + distance * self.direction(normal_like(x, generator))


@dataclass(frozen=True, eq=False)
class Toward(Perturbation):
    """Toward other points, and not beyond them: images that are shifted, or another point of the data.

    Args:
        norm: How distances are measured: 2.0 or `math.inf`.
        points: Where each point goes, in the shape of the points.
    """

    points: Tensor | None = None

    def __call__(self, x: Tensor, distance: float, objective: Objective) -> Tensor:
        """Move points along straight lines.

        Args:
            x: N points.
            distance: How far.
            objective: Not used.

        Returns:
            N points.

        Raises:
            InputError: If `points` has another shape than `x`.
        """
        if not isinstance(self.points, Tensor) or self.points.shape != x.shape:
            raise InputError(
                f"Toward needs a point for each of x, which is {describe(x)}, but points is "
                f"{describe(self.points)}. Pass for example Toward(points=x.roll(1, -1))."
            )
        way = self.points.to(x) - x
        return x + way * (distance / self.length(way).clamp(min=1e-30)).clamp(max=1.0)


@dataclass(frozen=True)
class ProjectedGradient(Perturbation):
    """Against the prediction: steps along the gradient, each followed by a return into the ball around x.

    One step of the whole distance is the fast gradient method.

    Args:
        norm: How distances are measured: 2.0 or `math.inf`.
        num_steps: The number of steps, each of 2.5 / num_steps of the distance, or of all of it for one step.
        seed: The seed of the small random move to where the first slope is taken.

    Reference: Madry et al., Towards deep learning models resistant to adversarial attacks, ICLR 2018.
    """

    num_steps: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.num_steps, "num_steps")
        check_seed(self.seed)

    def __call__(self, x: Tensor, distance: float, objective: Objective) -> Tensor:
        """Move points to where the objective is large, and keep the best of all steps for each of them.

        Args:
            x: N points.
            distance: How far at most.
            objective: What is raised.

        Returns:
            N points.
        """
        if distance == 0:
            return x
        step = distance * min(1.0, 2.5 / self.num_steps)
        # At x itself the change of the mean has no slope.
        beside = RandomNoise(self.norm, self.seed)(x, FIRST_SHARE * distance, objective)
        best, at, value = x, x, torch.full_like(x.flatten(1)[:, 0], -math.inf)
        for index in range(self.num_steps):
            slope = _gradient(objective, at if index else beside)
            moved = at + step * self.direction(slope) - x
            if self.norm == math.inf:
                moved = moved.clamp(-distance, distance)
            else:
                moved = moved * (distance / self.length(moved).clamp(min=1e-30)).clamp(max=1.0)
            at = x + moved
            with torch.no_grad():
                found = objective(at).to(value)
            better = (found > value).reshape(-1, *[1] * (x.dim() - 1))
            best, value = torch.where(better, at, best), torch.maximum(found, value)
        return best


@dataclass(frozen=True)
class FastGradient(Perturbation):
    """Against the prediction: one step along the gradient, which is cheap and easily seen through.

    Args:
        norm: How distances are measured: 2.0, or `math.inf` for the method of the reference.

    Reference: Goodfellow et al., Explaining and harnessing adversarial examples, ICLR 2015.
    """

    def __call__(self, x: Tensor, distance: float, objective: Objective) -> Tensor:
        """Move points by one step.

        Args:
            x: N points.
            distance: How far.
            objective: What is raised.

        Returns:
            N points.
        """
        return ProjectedGradient(self.norm, num_steps=1)(x, distance, objective)


def _gradient(objective: Objective, at: Tensor) -> Tensor:
    with torch.enable_grad():
        point = at.detach().requires_grad_()
        return torch.autograd.grad(objective(point).sum(), point)[0]
