"""Gaussian processes from the beginning: one number, two numbers, a function; prior, posterior, evidence.

One learns: a Gaussian process is a Gaussian over all function values at once with covariance k(x, x');
`condition` gives the posterior of a kernel and data, and `tune` finds the kernel's length scale.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import net2gp as n2g
from net2gp import plots

torch.set_default_dtype(torch.float64)
SKY = plots.COLORS[5]


def main(out: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(12, 7), layout="constrained")
    one, two, many, before, after, evidence = axes.flat
    draw = torch.Generator().manual_seed(0)
    x = torch.linspace(-3, 3, 61)[:, None]
    K = n2g.RBF()(x)
    root = torch.linalg.cholesky(K + 1e-9 * torch.eye(61))  # K alone is singular to rounding
    f = root @ torch.randn(61, 5000, generator=draw)
    print(f"largest |sample covariance − K| of 5000 draws: {(f.cov() - K).abs().max():.3f}")

    one.hist(f[30], 50, density=True, color=SKY)
    one.plot(x, torch.exp(-(x**2) / 2) / (2 * torch.pi) ** 0.5, color=plots.INK, label="N(0, 1)")
    one.set(title="one number: f(0) ~ N(0, k(0, 0))", xlabel="f(0)", ylabel="density")
    two.plot(f[30, :500], f[37, :500], ".", color=SKY, markersize=3)
    angle = torch.linspace(0, 2 * torch.pi, 100)
    circle = 2 * torch.stack([angle.cos(), angle.sin()])
    two.plot(
        *(torch.linalg.cholesky(K[30:38:7, 30:38:7]) @ circle), color=plots.INK, label="2σ of K"
    )
    two.set(title="two numbers: f(0) and f(0.7)", xlabel="f(0)", ylabel="f(0.7)", ylim=(-3.6, 3.6))
    many.plot(x, f.cov()[30], color=SKY, linewidth=4, label="5000 draws")
    many.plot(x, K[30], color=plots.INK, label="k(0, x)")
    many.set(title="a function: f(0) with every f(x)", xlabel="x", ylabel="covariance")

    inputs = torch.tensor([[-2.6], [-2.0], [-1.2], [-0.9], [0.1], [0.6], [1.9], [2.4]])
    data = inputs, torch.sin(2 * inputs) + 0.1 * torch.randn(8, 1, generator=draw)
    build = lambda lengthscale: n2g.condition(n2g.RBF(lengthscale), data, n2g.Gaussian(0.01))
    law, curves = build(1.0).marginal(x), build(1.0).sample(x, 5, generator=draw)[..., 0].T
    plots.plot_regression(before, x, torch.zeros(61), K.diagonal(), label="mean ± 2σ")
    plots.plot_regression(after, x, law.mean, law.variance, data=data, label="mean ± 2σ")
    for ax, lines, name in ((before, f[:, :5], "prior"), (after, curves, "posterior")):
        ax.plot(x, lines, color=plots.COLORS[0], linewidth=0.7)
        ax.set(title=f"{name}, and five draws", ylim=(-3.5, 3.5))

    # the evidence is flat at very short length scales: a start too far off may end there
    tuned = n2g.tune(build, lengthscale=0.5)
    best, height = tuned.kernel.lengthscale, float(tuned.log_marginal_likelihood())
    print(f"tune: length scale {best:.3f}, log evidence {height:.3f}")
    scales = torch.logspace(-1, 0.3, 80).tolist()
    values = [build(scale).log_marginal_likelihood() for scale in scales]
    evidence.semilogx(scales, values, color=plots.COLORS[0])
    evidence.plot(best, height, "o", color=plots.COLORS[1], label=f"tune: {best:.2f}")
    limits = (height - 10, height + 2)
    evidence.set(title="log marginal likelihood", xlabel="length scale", ylabel="nats", ylim=limits)
    for ax in (one, two, many, evidence):
        ax.legend(frameon=False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "gaussian_processes.png", dpi=120)
    print("wrote", out / "gaussian_processes.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
