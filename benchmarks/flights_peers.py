"""What else one would try on the flights: sparse processes, a network, trees, neighbors, and the mean."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from flights_data import Flights

Cell = dict[str, Any]
BATCH = 1024


def average(flights: Flights) -> Cell:
    """The mean and the variance of the training delays."""
    ones = torch.ones(len(flights.y_test), dtype=torch.float64, device=flights.y.device)
    y = flights.y.double()
    return flights.scored(float(y.mean()) * ones, float(y.var()) * ones, {"fit": 0.0})


def boosting(flights: Flights) -> Cell:
    """Gradient boosting by scikit-learn; the noise is the mean square error on a tenth that is held back."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    x, y = flights.x.cpu().numpy(), flights.y.reshape(-1).cpu().numpy()
    kept = len(x) // 10
    started = time.perf_counter()
    model = HistGradientBoostingRegressor(max_iter=500, early_stopping=True, random_state=0)
    model.fit(x[kept:], y[kept:])
    noise = float(((model.predict(x[:kept]) - y[:kept]) ** 2).mean())
    fitted = time.perf_counter()
    mean = torch.from_numpy(model.predict(flights.x_test.cpu().numpy())).double()
    seconds = {"fit": fitted - started, "predict": time.perf_counter() - fitted}
    return flights.scored(mean, torch.full_like(mean, noise), seconds)


def network(flights: Flights, epochs: int = 20) -> Cell:
    """Three hidden layers of 512 ReLUs by Adam with one noise, which is learned."""
    torch.manual_seed(0)
    x, y = flights.x, flights.y
    layers: list[nn.Module] = []
    for width in (x.shape[1], 512, 512):
        layers += [nn.Linear(width, 512), nn.ReLU()]
    module = nn.Sequential(*layers, nn.Linear(512, 1)).to(x.device)
    log_noise = torch.zeros((), device=x.device, requires_grad=True)
    optimizer = torch.optim.Adam([*module.parameters(), log_noise], 1e-3)
    steps = epochs * (len(x) // BATCH + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    started = time.perf_counter()
    for _ in range(epochs):
        for index in torch.randperm(len(x), device=x.device).split(BATCH):
            optimizer.zero_grad()
            square = (module(x[index]) - y[index]).square().mean()
            (0.5 * square * (-log_noise).exp() + 0.5 * log_noise).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        mean = module(flights.x_test).reshape(-1).double()
    fitted = time.perf_counter()
    noise = float(log_noise.detach().exp())
    return flights.scored(mean, torch.full_like(mean, noise), {"fit": fitted - started})


def sparse(flights: Flights, epochs: int = 5, inducing: int = 1024) -> Cell:
    """SVGP of gpytorch: an RBF kernel with a length scale per column and natural defaults."""
    import gpytorch

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self, points: Tensor) -> None:
            law = gpytorch.variational.CholeskyVariationalDistribution(len(points))
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, law))
            self.mean_module = gpytorch.means.ConstantMean()
            kernel = gpytorch.kernels.RBFKernel(ard_num_dims=points.shape[1])
            self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    torch.manual_seed(0)
    x, y = flights.x, flights.y.reshape(-1)
    model = Model(x[:inducing].clone()).to(x.device)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(x.device)
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], 0.01)
    started = time.perf_counter()
    model.train()
    likelihood.train()
    for _ in range(epochs):
        for index in torch.randperm(len(x), device=x.device).split(BATCH):
            optimizer.zero_grad()
            (-bound(model(x[index]), y[index])).backward()
            optimizer.step()
    fitted = time.perf_counter()
    model.eval()
    likelihood.eval()
    means, variances = [], []
    with torch.no_grad():
        for part in flights.x_test.split(4096):
            law = likelihood(model(part))
            means.append(law.mean.double())
            variances.append(law.variance.double())
    seconds = {"fit": fitted - started, "predict": time.perf_counter() - fitted}
    return flights.scored(torch.cat(means), torch.cat(variances), seconds)


def neighbors(flights: Flights, tuned: int = 2000, count: int = 128) -> Cell:
    """A process of the nearest flights of each new one, RBF with a length scale per column (GPnn)."""
    started = time.perf_counter()
    some = (flights.x[: 2 * tuned].cpu(), flights.y[: 2 * tuned].cpu())
    fitted = n2g.tuning.fit_kernel(n2g.RBF(), some, num_tuned=tuned, num_points=2 * tuned)
    noise = float(torch.as_tensor(fitted.likelihood.noise_var))
    stretched = fitted.process.kernel
    scale = stretched.lengthscale.to(flights.x)
    variance = float(torch.as_tensor(stretched.kernel.output_var))
    known, new, y = flights.x / scale, flights.x_test / scale, flights.y.reshape(-1).double()
    squares, means, variances = known.square().sum(1), [], []
    tuned_at = time.perf_counter()
    for part in new.split(512):
        near = (squares - 2 * part @ known.T).topk(count, largest=False).indices
        points = torch.cat([part[:, None], known[near]], 1).double()
        K = variance * torch.exp(-0.5 * torch.cdist(points, points).square())
        inner = K[:, 1:, 1:] + noise * torch.eye(count).to(K)
        weights = torch.linalg.solve(inner, K[:, 1:, :1])[..., 0]
        means.append((weights * y[near]).sum(1))
        variances.append(variance + noise - (weights * K[:, 0, 1:]).sum(1))
    seconds = {"tune": tuned_at - started, "fit": 0.0, "predict": time.perf_counter() - tuned_at}
    return flights.scored(torch.cat(means), torch.cat(variances), seconds)


PEERS: dict[str, Callable[[Flights], Cell]] = {
    "SVGP": sparse,
    "network": network,
    "boosting": boosting,
    "neighbors": neighbors,
    "mean": average,
}
