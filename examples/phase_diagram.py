"""How deep can a network be? Order, chaos, the critical line between them, and where kernels learn.

One learns: `phase_diagram` and `critical_line` say which variances let signals through a deep network;
`depth_scales` say how deep; and the deeper a kernel, the nearer to that line it explains data best.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp import plots
from net2gp.limits import correlation_fixed_point, critical_line, depth_scales, phase_diagram
from net2gp.limits.modules import Erf

torch.set_default_dtype(torch.float64)


def deep(depth: int) -> nn.Module:
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(2, 2), Erf())]
    return nn.Sequential(*hidden, nn.Linear(2, 1))


def main(out: Path) -> None:
    torch.manual_seed(0)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    weight_vars, bias_vars = torch.linspace(0.3, 4.0, 75), torch.linspace(0.005, 0.5, 34)
    grid = phase_diagram(Erf(), weight_vars, bias_vars)
    scales = grid.depth_scales.correlation.clamp(max=100.0).log10()
    image = left.pcolormesh(weight_vars, bias_vars, scales, shading="gouraud")
    figure.colorbar(image, ax=left, label="log₁₀ of the depth scale ξ in layers, up to 2")
    left.plot(critical_line(Erf(), bias_vars), bias_vars, color="black")
    for place, name in ((0.6, "ordered"), (3.0, "chaotic")):
        left.text(place, 0.45, name, color="white")
    left.set(title="how deep signals travel, φ = erf", xlabel="weight_var", ylabel="bias_var")

    pair, depths = torch.tensor([[1.4, 0.0], [1.0, 1.0]]), [*range(1, 10), *range(10, 31, 4)]
    critical = float(critical_line(Erf(), 0.1))
    for weight_var, color in zip((0.7, critical, 2.5), plots.COLORS, strict=False):
        kernels = [n2g.nngp(deep(d), weight_var=weight_var, bias_var=0.1)(pair) for d in depths]
        found = [float(K[0, 1] / (K[0, 0] * K[1, 1]).sqrt()) for K in kernels]
        end = float(correlation_fixed_point(Erf(), weight_var, 0.1))
        scale = float(depth_scales(Erf(), weight_var, 0.1).correlation)
        label = f"weight_var {weight_var:.2f}, ξ = {scale:.1f}"
        print(f"{label}: correlations end at {end:.2f}")
        middle.plot(depths, found, color=color, label=label)
        middle.axhline(end, linestyle=":", color=color)
    middle.set(title="two inputs, layer by layer", xlabel="depth", ylabel="correlation")

    x, steps = torch.randn(60, 2), torch.linspace(1.3, 4.0, 13)
    y = torch.sin(2 * x[:, :1]) * x[:, 1:] + 0.1 * torch.randn(60, 1)
    for depth, color in zip((5, 15, 40), plots.COLORS[3:], strict=False):
        found = torch.zeros(len(steps))
        for i, weight_var in enumerate(steps.tolist()):
            kernel = n2g.nngp(deep(depth), weight_var=weight_var, bias_var=0.1)
            kernel = kernel.scaled(1 / kernel.diag(x).mean())
            found[i] = n2g.condition(kernel, (x, y), n2g.Gaussian(0.01)).log_marginal_likelihood()
        right.plot(steps, found, color=color, label=f"depth {depth}")
        print(f"depth {depth:2}: best evidence at weight_var {float(steps[found.argmax()]):.2f}")
    right.axvline(critical, color=plots.INK, linestyle="--", label="critical")
    right.set(title="log evidence of deep kernels", xlabel="weight_var", ylim=(-200, 0))
    for ax in (middle, right):
        ax.legend(frameon=False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "phase_diagram.png", dpi=120)
    print("wrote", out / "phase_diagram.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
