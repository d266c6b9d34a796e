"""A posterior as a model that BoTorch's acquisition functions take."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior as BotorchPosterior
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor

from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import describe, num_rows
from net2gp.interop.botorch.draws import DrawnFunction, drawn_function
from net2gp.interop.botorch.fantasies import Fantasies
from net2gp.likelihoods import Gaussian
from net2gp.likelihoods.laws import gaussian_law
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.predicting import is_gaussian


class PosteriorModel(Model, FantasizeMixin):
    """Any Gaussian posterior of this library as a BoTorch model.

    `posterior(X)` is the exact joint law of q points in each batch, as a `GPyTorchPosterior` that can be
    differentiated in X. So analytic and Monte Carlo acquisition functions, knowledge gradients (by
    `fantasize`) and drawn functions (by `draw_function`) work as they do with BoTorch's own processes. The
    points X have shape (*b, q, d); they are reshaped to what the posterior takes, so that a network of images
    sees images. A posterior in float32 gets float32, and its laws come back in the dtype of X.

    Costs: what `Posterior.joint` costs for b·q points. Fantasies share the factorization of the data: each
    adds the law of its own few points.

    Args:
        fitted: The posterior, of the transformed inputs and outcomes if there are transforms.
        input_transform: BoTorch's transform of X, such as `Normalize`, with its numbers known.
        outcome_transform: BoTorch's transform of Y, such as `Standardize`, with its numbers known.
        train_X: The inputs before the transform: (N, d). None takes those of the posterior, which is right if
            there is no transform.
        input_shape: The shape of one point. None takes that of the posterior's data.

    Raises:
        InputError: If the posterior is not Gaussian, or keeps no data and no shape is given.

    >>> import torch
    >>> import net2gp as n2g
    >>> x = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    >>> posterior = n2g.condition(n2g.RBF(0.3), (x, x.sin()), n2g.Gaussian(1e-4))
    >>> model = PosteriorModel(posterior)
    >>> model.posterior(torch.rand(7, 2, 1, dtype=torch.float64)).mean.shape  # 7 batches of 2 points
    torch.Size([7, 2, 1])

    Reference: Balandat et al., BoTorch: a framework for efficient Monte-Carlo Bayesian optimization, 2020.
    """

    def __init__(
        self,
        fitted: Posterior,
        *,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
        train_X: Tensor | None = None,
        input_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        if not is_gaussian(fitted.process):
            raise InputError(
                "this posterior is a mixture or an ensemble, so f(x) is not Gaussian. Pass its networks to "
                "botorch.models.ensemble.EnsembleModel, or condition a kernel, PosteriorModel(condition(…))."
            )
        self.fitted = fitted
        self.fantasies: Fantasies | None = None
        self.outputs: tuple[int, ...] | None = None
        self.input_shape = _shape_of(fitted) if input_shape is None else tuple(input_shape)
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        if train_X is None and isinstance(fitted.x, Tensor):
            train_X = fitted.x.flatten(1)
        self._train_X = train_X
        self.likelihood = None  # FantasizeMixin asks whether it is one of fixed noise
        self.eval()

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return self.fitted.num_outputs if self.outputs is None else len(self.outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of the fantasies, and () without them."""
        return torch.Size() if self.fantasies is None else self.fantasies.batch_shape

    @property
    def train_inputs(self) -> tuple[Tensor]:
        """The inputs of the data, before transforms: one tensor (*batch_shape, N, d)."""
        if self._train_X is None:
            raise NotAvailable("the posterior keeps no data. Pass train_X to PosteriorModel.")
        return (self._train_X,)

    @property
    def train_targets(self) -> Tensor:
        """The targets after the transform: (*batch_shape, N), or (*batch_shape, C, N) for C > 1 outputs."""
        x, y = self.fitted.data
        if y.numel() != num_rows(x) * self.fitted.num_outputs:
            raise NotAvailable(
                "the targets are labels, not values of the outputs. Use model.fitted.y."
            )
        y = y.reshape(-1, self.fitted.num_outputs)
        if self.fantasies is not None:
            new, batch = self.fantasies.y, self.batch_shape
            y = torch.cat(
                [y.to(new).expand(*batch, *y.shape), new.expand(*batch, *new.shape[-2:])], -2
            )
        y = y if self.outputs is None else y[..., list(self.outputs)]
        return y[..., 0] if y.shape[-1] == 1 else y.mT

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> BotorchPosterior:
        """Return the joint law of f, or of observations, at the q points of each batch.

        Args:
            X: Points: (*b, q, d).
            output_indices: The outputs that are wanted. None takes all.
            observation_noise: True adds the noise of the likelihood, a tensor its own variances, which
                broadcast to (*b, q, C) and are in the space of the transformed outcomes.
            posterior_transform: Applied to the law in the end.

        Returns:
            A `GPyTorchPosterior`, unless a transform makes another one of it.

        Raises:
            NotAvailable: If X requires a gradient and the posterior has none.
            InputError: If noise is asked for where the likelihood is not Gaussian.
        """
        self.eval()
        check_points(X)
        points = self.transform_inputs(X)
        mean, covariance = self._law(points)
        if observation_noise is not False:
            noise = self._noise_of(observation_noise).to(mean)
            batch = torch.broadcast_shapes(mean.shape[:-1], noise.shape[:-2])
            noise = noise.expand(*batch, X.shape[-2], self.fitted.num_outputs)
            covariance = covariance + torch.diag_embed(noise.flatten(-2))
            mean = mean.expand(*batch, -1)
        law: Any = GPyTorchPosterior(
            self._distribution(mean, covariance, X.shape[-2], output_indices)
        )
        if hasattr(self, "outcome_transform"):
            transform = self.outcome_transform
            chosen = self._chosen(output_indices)
            if chosen is not None:
                transform = transform.subset_output(idcs=chosen)
            law = transform.untransform_posterior(law, X=X)
        return law if posterior_transform is None else posterior_transform(posterior=law, X=X)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> PosteriorModel:
        """Return the model given further observations as well; hyper-parameters stay what they are.

        Observations without batches become data of the posterior, whose factor grows by their rows. Batches,
        and observations with gradients, are kept beside it: see `Fantasies`.

        Args:
            X: Points: (*b, n', d).
            Y: Observations: (*b', n', C), where b' broadcasts with b.
            noise: The variances of their noise, in the space of the transformed outcomes. None takes that of
                the likelihood.
            **kwargs: Ignored.

        Returns:
            A new model; this one does not change.

        Raises:
            NotAvailable: If the model is a subset of the outputs.
        """
        if self.outputs is not None:
            raise NotAvailable(
                "a subset of the outputs cannot be conditioned. Condition the whole model, and call "
                "subset_output afterwards."
            )
        if Y.shape[-2:] != (X.shape[-2], self.num_outputs):
            raise InputError(
                f"Y must end in ({X.shape[-2]}, {self.num_outputs}), points and outputs, but is "
                f"{describe(Y)}."
            )
        self.eval()
        points = self.transform_inputs(X)
        if hasattr(self, "outcome_transform"):
            Y, _ = self.outcome_transform(Y, None, X=X)
        result = copy.copy(self)
        result._modules, result._buffers = dict(self._modules), dict(self._buffers)
        variances = self._noise_of(True if noise is None else noise).to(Y)
        if self._can_grow(points, Y):
            result.fitted = self._grown(points, Y, variances)
        elif self.fantasies is None:
            result.fantasies = Fantasies(points, Y, variances)
        else:
            result.fantasies = self.fantasies.joined(points, Y, variances)
        if self._train_X is not None:
            result._train_X = _appended(self._train_X, X, result.batch_shape)
        return result

    def subset_output(self, idcs: list[int]) -> PosteriorModel:
        """Return the model of some of the outputs.

        Args:
            idcs: Their indices.

        Returns:
            A model that shares the posterior.
        """
        result = copy.copy(self)
        result._modules = dict(self._modules)
        own = range(self.fitted.num_outputs) if self.outputs is None else self.outputs
        if not idcs or not all(-len(own) <= index < len(own) for index in idcs):
            raise InputError(
                f"the model has {len(own)} outputs, with indices from 0, but the indices are {list(idcs)}."
            )
        result.outputs = tuple(own[index] for index in idcs)
        return result

    def draw_function(
        self, *, width: int = 1024, generator: torch.Generator | None = None
    ) -> DrawnFunction:
        """Draw one function from the posterior, as a deterministic model for Thompson sampling.

        Kernels with features (tangent kernels of networks) give exact draws. The limit of a network takes a
        finite network of the given width, freshly drawn, corrected at the data by Matheron's rule; its law is
        off by O(1/width).

        Args:
            width: The width of the finite network.
            generator: Makes the draw repeatable. None uses torch's global random state.

        Returns:
            The function, which can be evaluated anywhere and differentiated.

        Raises:
            NotAvailable: If there are fantasies, or the kernel is neither of the two kinds.
        """
        if self.fantasies is not None:
            raise NotAvailable(
                "draw functions from the model before fantasize, not from its fantasies."
            )
        return DrawnFunction(self, drawn_function(self.fitted, width, generator))

    def shaped(self, points: Tensor) -> Tensor:
        """Give points (*b, d) the shape and the dtype that the posterior takes."""
        if points.shape[-1] != prod(self.input_shape):
            raise InputError(
                f"X must have {prod(self.input_shape)} columns, which are read as points of shape "
                f"{self.input_shape}, but is {describe(points)}."
            )
        kept = self.fitted.x
        dtype = kept.dtype if isinstance(kept, Tensor) else points.dtype
        return points.to(dtype).reshape(points.shape[:-1] + self.input_shape)

    def _set_transformed_inputs(self) -> None:
        """Do nothing: the posterior was found with transformed inputs, and train_inputs stay as they are."""

    def _revert_to_original_inputs(self) -> None:
        """Do nothing."""

    def _law(self, points: Tensor) -> tuple[Tensor, Tensor]:
        law = self._joint if self.fantasies is None else self._given_fantasies
        mean, covariance = law(points)
        wanted = torch.is_grad_enabled() and points.requires_grad
        if wanted and not (mean.requires_grad and covariance.requires_grad):
            raise NotAvailable(
                "this posterior has no gradient in X. Evaluate the acquisition function on candidates: "
                "botorch.optim.optimize_acqf_discrete(acquisition, q, choices)."
            )
        return mean, covariance

    def _given_fantasies(self, points: Tensor) -> tuple[Tensor, Tensor]:
        assert self.fantasies is not None
        return self.fantasies.condition(self._joint, points)

    def _joint(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Means (*b, q·C) and covariances (*b, q·C, q·C) of the posterior itself."""
        batch, q = points.shape[:-2], points.shape[-2]
        x = self.shaped(points)
        if not batch.numel():  # no batch: nothing to ask the posterior
            size = q * self.fitted.num_outputs
            return points.new_zeros(*batch, size), points.new_zeros(*batch, size, size)
        if q == 1:  # a point by itself needs no covariance with others
            law = self.fitted.marginal(x.reshape(-1, *self.input_shape))
        else:
            law = self.fitted.joint(x.reshape(-1, q, *self.input_shape), batch=True)
        mean, covariance = law.mean.to(points), law.covariance_matrix.to(points)
        return mean.reshape(*batch, -1), covariance.reshape(*batch, *covariance.shape[-2:])

    def _chosen(self, indices: list[int] | None) -> list[int] | None:
        if indices is None:
            return None if self.outputs is None else list(self.outputs)
        own = range(self.fitted.num_outputs) if self.outputs is None else self.outputs
        return [own[index] for index in indices]

    def _distribution(
        self, mean: Tensor, covariance: Tensor, q: int, indices: list[int] | None
    ) -> Any:
        C, chosen = self.fitted.num_outputs, self._chosen(indices)
        if chosen is not None:
            rows = torch.arange(q * C, device=mean.device).reshape(q, C)[:, chosen].flatten()
            mean, covariance = mean[..., rows], covariance[..., rows[:, None], rows]
            C = len(chosen)
        if C == 1:
            return gaussian_law(mean, covariance)
        return MultitaskMultivariateNormal(mean.reshape(*mean.shape[:-1], q, C), covariance)

    def _noise_of(self, asked: bool | Tensor) -> Tensor:
        """Variances that broadcast to (*b, q, C)."""
        if isinstance(asked, Tensor):
            return asked
        noise = _noise_of_data(self.fitted)
        if noise is None:
            raise InputError(
                "observations have Gaussian noise here, but the likelihood of this posterior is "
                f"{type(self.fitted.likelihood).__name__}. Leave observation_noise out, or pass the "
                "variances as a tensor."
            )
        return noise

    def _can_grow(self, points: Tensor, Y: Tensor) -> bool:
        plain = points.dim() == 2 and Y.dim() == 2 and self.fantasies is None
        traced = points.requires_grad or Y.requires_grad
        exact = isinstance(self.fitted.process, Conditioned | Whitened)
        return plain and not traced and exact and has_gaussian_noise(self.fitted.likelihood)

    def _grown(self, points: Tensor, Y: Tensor, noise: Tensor) -> Posterior:
        x, (_, y) = self.shaped(points), self.fitted.data
        likelihood = Gaussian(noise.expand_as(Y).to(torch.float64))
        return self.fitted.update((x, Y.to(y).reshape(-1, *y.shape[1:])), likelihood=likelihood)


def check_points(X: Any) -> None:
    """Refuse what is no points (*b, q, d), or has none in a batch."""
    if not isinstance(X, Tensor) or not X.is_floating_point() or X.dim() < 2 or not X.shape[-2]:
        raise InputError(
            "X must be a floating tensor of shape (*b, q, d), with q points in each batch and q at least 1, "
            f"but is {describe(X)}. Pass x[:, None] for N points each by itself, and X.double() for integers."
        )


def _appended(old: Tensor, new: Tensor, batch: torch.Size) -> Tensor:
    """(*batch, N, d) and (*b, n', d) as one tensor of points."""
    parts = [part.expand(*batch, *part.shape[-2:]) for part in (old.to(new), new)]
    return torch.cat(parts, -2)


def _shape_of(fitted: Posterior) -> tuple[int, ...]:
    if not isinstance(fitted.x, Tensor):
        raise InputError(
            "the posterior has no tensor of training points, so the shape of a point is not known. Pass it: "
            "PosteriorModel(posterior, input_shape=(d,))."
        )
    return tuple(fitted.x.shape[1:])


def _noise_of_data(fitted: Posterior) -> Tensor | None:
    """The noise variance of each output, averaged over the data: (1, C), or None without Gaussian noise."""
    if not has_gaussian_noise(fitted.likelihood):
        return None
    points = getattr(fitted.likelihood, "tied_points", None) or 1
    zeros = torch.zeros(points, fitted.num_outputs, dtype=torch.float64)
    return fitted.likelihood.noise_variance(zeros).detach().mean(0, keepdim=True)
