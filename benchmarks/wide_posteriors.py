"""The posterior of a finite Bayesian network becomes that of its infinite-width limit as it widens.

    python benchmarks/wide_posteriors.py [--quick] [--out FOLDER]

Networks with one hidden ReLU layer of growing width have the prior N(0, 2/fan-in) of weights and N(0, 0.1) of
biases, and 20 noisy points of a sine. Hamiltonian Monte Carlo draws their posteriors. Distances are root mean
squares over 41 points, inside and outside of the data, in units of the prior's standard deviation: of the
posterior mean and of the posterior standard deviation from those of the NNGP, in closed form.

Claims: at width 512 the mean is within 0.05 and the standard deviation within 0.08. At widths up to 8 with an
R̂ below 1.05 (chains of two or four units can stay in different modes) the mean is further away than 0.05 and
at least three times as far as at width 512. The exit status says whether the claims hold. Writes a figure,
`wide_posteriors.png`.

Reference: Matthews et al., Gaussian process behaviour in wide deep neural networks, ICLR 2018. Lee et al.,
Deep neural networks as Gaussian processes, ICLR 2018.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes

WEIGHT_VAR, BIAS_VAR, NOISE_VAR = 2.0, 0.1, 0.05
NARROW, WIDE, CLOSE, MIXED = 8, 512, 0.05, 1.05


@dataclass(frozen=True, eq=False)
class Curve:
    """Mean and standard deviation of f at the points of the figure, and how far they are from the limit."""

    width: int
    mean: Tensor
    sd: Tensor
    mean_distance: float
    sd_distance: float
    r_hat: float
    divergences: int


def network_of(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, 1)).double()


def problem() -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(20, 1, dtype=torch.float64, generator=generator) - 2
    noise = torch.randn(20, 1, dtype=torch.float64, generator=generator)
    y = (2 * x).sin() + NOISE_VAR**0.5 * noise
    return (x, y), torch.linspace(-3, 3, 41, dtype=torch.float64)[:, None]


def limit(data: tuple[Tensor, Tensor], points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and standard deviation of the NNGP posterior, and the prior's standard deviation."""
    kernel = n2g.nngp(network_of(WIDE), weight_var=WEIGHT_VAR, bias_var=BIAS_VAR)
    law = n2g.condition(kernel, data, n2g.Gaussian(noise_var=NOISE_VAR)).marginal(points)
    prior = kernel(points).diagonal().sqrt()
    return law.mean[:, 0], law.variance[:, 0].sqrt(), prior


def sampled(width: int, data: tuple[Tensor, Tensor], points: Tensor, quick: bool) -> Curve:
    network = network_of(width)
    prior = bayes.NormalPrior(bayes.fan_in_variances(network, WEIGHT_VAR, BIAS_VAR))
    options = {
        "num_chains": 16,
        "num_draws": 150 if quick else 600,
        "warmup": 150 if quick else 500,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", n2g.errors.Divergences)
        warnings.simplefilter("ignore", n2g.errors.NotMixed)
        posterior = bayes.hmc(
            network, data, n2g.Gaussian(noise_var=NOISE_VAR), prior=prior, **options
        )
        found = bayes.diagnose(posterior, points)
    law = posterior.marginal(points)
    mean, sd = law.mean[:, 0], law.variance[:, 0].sqrt()
    gp_mean, gp_sd, scale = limit(data, points)
    far = [
        float(((a - b) / scale).square().mean().sqrt()) for a, b in ((mean, gp_mean), (sd, gp_sd))
    ]
    count = int(found.divergences.sum())
    return Curve(width, mean, sd, far[0], far[1], found.worst_r_hat, count)


def draw(curves: list[Curve], data: tuple[Tensor, Tensor], points: Tensor, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    mean, sd, _ = limit(data, points)
    x = points[:, 0]
    shown = [curves[0], curves[1], curves[-1]]
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
    for axis, curve in zip(axes, shown, strict=False):
        low, high = curve.mean - 2 * curve.sd, curve.mean + 2 * curve.sd
        axis.fill_between(x, low, high, color="tab:blue", alpha=0.25, label="network, mean ± 2 sd")
        axis.plot(x, curve.mean, color="tab:blue")
        axis.plot(x, mean, color="black", lw=1, label="NNGP, mean ± 2 sd")
        for sign in (-2, 2):
            axis.plot(x, mean + sign * sd, color="black", lw=1, ls="--")
        axis.plot(data[0], data[1], "k.", ms=5)
        axis.set(title=f"width {curve.width}", ylim=(-3.3, 2.3), xlabel="x")
    axes[0].legend(loc="upper left", fontsize=8)
    axes[0].set_ylabel("f(x)")
    widths = [curve.width for curve in curves]
    axes[3].loglog(widths, [c.mean_distance for c in curves], "o-", label="mean")
    axes[3].loglog(widths, [c.sd_distance for c in curves], "s-", label="standard deviation")
    axes[3].axhline(CLOSE, color="gray", lw=1, ls=":")
    axes[3].set(xlabel="width", title="distance from the NNGP / prior sd")
    axes[3].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three widths and fewer draws")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    args = parser.parse_args()
    data, points = problem()
    curves = []
    print("| width | mean distance | sd distance | worst R̂ | divergences |\n|---|---|---|---|---|")
    for width in (2, NARROW, WIDE) if args.quick else (2, 4, NARROW, 32, 128, WIDE):
        curve = sampled(width, data, points, args.quick)
        curves.append(curve)
        print(
            f"| {width} | {curve.mean_distance:.4f} | {curve.sd_distance:.4f} | {curve.r_hat:.3f} "
            f"| {curve.divergences} |",
            flush=True,
        )
    draw(curves, data, points, args.out / "wide_posteriors.png")
    mixed = [curve for curve in curves if curve.r_hat < MIXED]
    wide, narrow = curves[-1], [c.mean_distance for c in mixed if c.width <= NARROW]
    claims = {
        "the wide mean is close": wide.mean_distance < CLOSE,
        "the wide standard deviation is close": wide.sd_distance < 0.08,
        "narrow means are not": bool(narrow) and min(narrow) > max(CLOSE, 3 * wide.mean_distance),
    }
    print(claims)
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
