"""Deep processes of gpytorch, as its examples build them, and of GPflux, as its tutorial builds them.

gpytorch is a dependency of net2gp, so that both run in one process on the same data. Layers have squared
exponential kernels with one length scale per input, Cholesky factors of the covariance of whitened inducing
values, a linear mean in inner layers and a constant one in the last. Inducing points of the first layer start
where ours do, and those of later layers at normal draws. Numbers are float32, the default of gpytorch, unless
another dtype is asked for.

GPflux needs TensorFlow, and runs in an environment of its own (`worker_gpflux.py`).
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import DeepApproximateMLL, DeepPredictiveLogLikelihood, VariationalELBO
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from gpytorch.models.deep_gps.dspp import DSPP, DSPPLayer
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor, nn

from peers import PEERS, ensure
from run import HERE, environment

PREDICTION_DRAWS = 100


@dataclass(frozen=True)
class Run:
    """What a fit by gpytorch shares with ours."""

    num_layers: int
    num_steps: int
    num_inducing: int
    batch_size: int | None
    learning_rate: float
    num_samples: int
    width: int
    sigma_points: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0


def variational_parts(points: Tensor, num_inputs: int, outputs: int | None) -> tuple:
    """The kernel of a layer, its inducing points, and the law of their values."""
    shape = torch.Size([]) if outputs is None else torch.Size([outputs])
    count = len(points)
    points = points if outputs is None else points.expand(outputs, count, num_inputs).clone()
    law = CholeskyVariationalDistribution(count, batch_shape=shape)
    base = gpytorch.kernels.RBFKernel(batch_shape=shape, ard_num_dims=num_inputs)
    kernel = gpytorch.kernels.ScaleKernel(base, batch_shape=shape)
    return kernel, points, law


def layer_class(parent: type) -> type:
    """A layer of a deep Gaussian process, or of a deep sigma point process."""

    class Layer(parent):  # type: ignore[misc,valid-type]
        def __init__(self, points: Tensor, num_inputs: int, outputs: int | None, **more: int):
            kernel, points, law = variational_parts(points, num_inputs, outputs)
            strategy = VariationalStrategy(self, points, law, learn_inducing_locations=True)
            super().__init__(strategy, num_inputs, outputs, **more)
            self.mean_module: nn.Module = (
                gpytorch.means.ConstantMean()
                if outputs is None
                else gpytorch.means.LinearMean(num_inputs)
            )
            self.covar_module = kernel

        def forward(self, x: Tensor) -> MultivariateNormal:
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return Layer


PlainLayer, SigmaLayer = layer_class(DeepGPLayer), layer_class(DSPPLayer)


def centers(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Centers of ten rounds of k-means, from which our inducing points start as well."""
    rows = x.unique(dim=0)
    found = rows[torch.randperm(len(rows), generator=generator)[:count]]
    for _ in range(10):
        owner = torch.cdist(rows, found).argmin(1)
        one_hot = nn.functional.one_hot(owner, len(found)).to(rows)
        sizes = one_hot.sum(0)[:, None]
        found = torch.where(sizes > 0, one_hot.mT @ rows / sizes.clamp(min=1), found)
    return found


def _layers(x: Tensor, run: Run) -> nn.ModuleList:
    generator = torch.Generator().manual_seed(run.seed)
    found, columns = [], x.shape[1]
    for index in range(run.num_layers):
        last = index == run.num_layers - 1
        count = min(run.num_inducing, len(x))
        points = torch.randn(count, columns, generator=generator)
        if index == 0:
            points = centers(x[:2000].double().cpu(), count, generator)
        outputs = None if last else run.width
        made: type = SigmaLayer if run.sigma_points else PlainLayer
        more = {"num_quad_sites": run.num_samples} if run.sigma_points else {}
        found.append(made(points.to(torch.get_default_dtype()), columns, outputs, **more))
        columns = run.width
    return nn.ModuleList(found)


class Composition(DeepGP):
    """A deep Gaussian process."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.layers, self.likelihood = layers, GaussianLikelihood()

    def forward(self, x: Tensor) -> MultivariateNormal:
        for layer in self.layers:
            x = layer(x)
        return x


class SigmaComposition(DSPP):
    """A deep sigma point process."""

    def __init__(self, layers: nn.ModuleList, num_sites: int):
        super().__init__(num_sites)
        self.layers, self.likelihood = layers, GaussianLikelihood()

    forward = Composition.forward


class Fit:
    """A fit that goes on step by step.

    Args:
        x: Inputs, (N, D).
        y: Targets, (N,).
        run: Settings.
    """

    def __init__(self, x: Tensor, y: Tensor, run: Run):
        before = torch.get_default_dtype()
        torch.set_default_dtype(run.dtype)
        torch.manual_seed(run.seed)
        try:
            layers = _layers(x, run)
            if run.sigma_points:
                self.model: DeepGP = SigmaComposition(layers, run.num_samples)
            else:
                self.model = Composition(layers)
        finally:
            torch.set_default_dtype(before)
        self.model.to(x.device)
        self.x, self.y, self.run = x.to(run.dtype), y.to(run.dtype), run
        likelihood = self.model.likelihood
        if run.sigma_points:
            self.objective: nn.Module = DeepPredictiveLogLikelihood(likelihood, self.model, len(x))
        else:
            bound = VariationalELBO(likelihood, self.model, len(x))
            self.objective = DeepApproximateMLL(bound)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=run.learning_rate)
        self.batches, self.done = self._batches(), 0
        self.model.train()

    def _batches(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.run.seed)
        count, size = len(self.x), self.run.batch_size
        while True:
            if size is None or size >= count:
                yield torch.arange(count, device=self.x.device)
                continue
            order = torch.randperm(count, generator=generator).to(self.x.device)
            yield from order[: count // size * size].split(size)

    def step(self) -> float:
        """One step of Adam, with the rate that ours has at that step."""
        falling = 0.5 * (1 + math.cos(math.pi * self.done / self.run.num_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.learning_rate * falling
        rows = next(self.batches)
        with gpytorch.settings.num_likelihood_samples(self.run.num_samples):
            self.optimizer.zero_grad()
            loss = -self.objective(self.model(self.x[rows]), self.y[rows])
            loss.backward()
            self.optimizer.step()
        self.done += 1
        return float(loss)

    def climb(self) -> Fit:
        """All steps."""
        while self.done < self.run.num_steps:
            self.step()
        return self

    @torch.no_grad()
    def predict(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log weights (S,), means and variances (S, N) of a mixture of Gaussians with noise."""
        self.model.eval()
        draws = self.run.num_samples if self.run.sigma_points else PREDICTION_DRAWS
        parts = []
        with gpytorch.settings.num_likelihood_samples(draws):
            for part in x.to(self.x).split(1000):
                law = self.model.likelihood(self.model(part))
                parts.append((law.mean, law.variance))
        means, variances = (torch.cat(values, -1).double() for values in zip(*parts, strict=True))
        means, variances = (v if v.dim() > 1 else v[None] for v in (means, variances))
        weights = torch.full((len(means),), -math.log(len(means)), dtype=torch.float64).to(means)
        if self.run.sigma_points:
            weights = self.model.quad_weights.double()
        return weights, means, variances

    @torch.no_grad()
    def hidden(self, x: Tensor) -> Tensor:
        """The mean of what enters the last layer, (N, C)."""
        self.model.eval()
        found = x.to(self.x)
        with gpytorch.settings.num_likelihood_samples(PREDICTION_DRAWS):
            for layer in self.model.layers[:-1]:
                found = layer(found)
        return found.mean.reshape(-1, len(x), self.run.width).mean(0)


def log_density(prediction: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
    """The log density of targets under a mixture of Gaussians: (N,)."""
    weights, means, variances = prediction
    logs = torch.distributions.Normal(means, variances.sqrt()).log_prob(y.to(means))
    return (weights[:, None] + logs).logsumexp(0)


def mean_of(prediction: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The mean of a mixture of Gaussians: (N,)."""
    weights, means, _ = prediction
    return (weights.exp()[:, None] * means).sum(0)


@dataclass(frozen=True)
class FluxFit:
    """Mixtures as `Fit.predict` has them, the mean of what enters the last layer, and CPU seconds."""

    test: tuple[Tensor, Tensor, Tensor]
    grid: tuple[Tensor, Tensor, Tensor]
    hidden: Tensor
    seconds: float


def gpflux_fit(data: tuple[Tensor, Tensor], x_test: Tensor, grid: Tensor, run: Run) -> FluxFit:
    """A deep process of GPflux, of which `run` sets layers, steps, inducing points, rate and seed."""
    python = ensure(PEERS["gpflux"])
    arrays = {"x": data[0], "y": data[1], "x_test": x_test, "grid": grid}
    names = ("num_layers", "num_inducing", "num_steps", "learning_rate", "seed")
    settings = {name: getattr(run, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "arrays.npz", Path(folder) / "result.npz"
        np.savez(source, **{name: value.numpy() for name, value in arrays.items()}, **settings)
        command = [str(python), str(HERE / "worker_gpflux.py"), str(source), str(target)]
        env = environment() | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"GPflux failed: {(done.stderr.splitlines() or ['no message'])[-1]}")
        with np.load(target) as stored:
            found = {key: torch.from_numpy(np.asarray(stored[key])) for key in stored.files}
    count = len(found["means test"])
    weights = torch.full((count,), -math.log(count), dtype=torch.float64)
    test, shown = (
        (weights, found[f"means {name}"], found[f"variances {name}"]) for name in ("test", "grid")
    )
    return FluxFit(test, shown, found["hidden"], float(found["cpu_s"]))
