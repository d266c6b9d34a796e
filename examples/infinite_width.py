"""Your nn.Module at infinite width: its kernel, its posterior, and how finite twins approach it.

One learns: `nngp` and `ntk` of a module as it stands; `tune` finds the variances of its weights by the
evidence; `twin` is the same network at any width; the limit reads digits without training.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp import data, plots

torch.set_default_dtype(torch.float64)


def main(out: Path) -> None:
    torch.manual_seed(0)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    curve, grid = data.snelson_like(num_points=40), torch.linspace(-1.5, 7.5, 181)[:, None]
    hidden = [nn.Linear(1, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()]
    network = nn.Sequential(*hidden, nn.Linear(16, 1))

    def build(first, others, bias_var):
        kernel = n2g.nngp(network, weight_var={"0": first, "*": others}, bias_var=bias_var)
        return n2g.condition(kernel, curve.data, n2g.Gaussian(curve.noise_var))

    tuned = n2g.tune(build, first=2.0, others=2.0, bias_var=0.5, max_iterations=25)
    evidences = [float(p.log_marginal_likelihood()) for p in (build(2.0, 2.0, 0.5), tuned)]
    print("log evidence {:.1f} with He's variances, {:.1f} with tuned ones".format(*evidences))
    law = tuned.marginal(grid)
    plots.plot_regression(left, grid, law.mean, law.variance, data=curve.data, label="mean ± 2σ")
    left.plot(grid, curve.truth(grid), ":", color=plots.INK, label="truth")
    left.set(title="posterior of the infinitely wide network", ylim=(-4, 4))

    points, widths = torch.linspace(-1, 1, 8)[:, None], [16, 32, 64, 128, 256, 512]
    Theta, errors = n2g.ntk(network, weight_var=2.0, bias_var=0.1)(points), []
    for width in widths:
        twins = [n2g.limits.twin(network, width, weight_var=2.0, bias_var=0.1) for _ in range(12)]
        found = torch.stack([n2g.linearize(one.eval()).kernel()(points) for one in twins])
        errors.append(float(((found - Theta).norm(dim=(1, 2)) / Theta.norm()).mean()))
    print(f"error of a twin's tangent kernel: {errors[0]:.2f} at width 16, {errors[-1]:.2f} at 512")
    middle.loglog(widths, errors, "o-", color=plots.COLORS[0], label="mean over 12 twins")
    slope = [errors[-1] * (widths[-1] / w) ** 0.5 for w in widths]
    middle.loglog(widths, slope, "--", color=plots.FAINT, label="width$^{-1/2}$")
    middle.set(title="tangent kernel of finite twins", xlabel="width", ylabel="relative error")
    middle.set_xticks(widths, widths)
    middle.set_yticks([0.1, 0.2, 0.4, 0.8], [0.1, 0.2, 0.4, 0.8])
    middle.minorticks_off()

    (x, labels), (x_test, labels_test) = data.digits("train"), data.digits("test")
    conv = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    both, sizes = n2g.infinite_width(conv, weight_var=2.0, bias_var=0.1), [20, 50, 100, 200, 400]
    for name, color in (("nngp", plots.COLORS[0]), ("ntk", plots.COLORS[1])):
        kernel, scores = getattr(both, name), []
        for part in (slice(size) for size in sizes):
            one_hot = nn.functional.one_hot(labels[part], 10) - 0.1
            f = n2g.condition(kernel, (x[part], one_hot), n2g.Gaussian(1e-3)).marginal(x_test)
            scores.append(float((f.mean.argmax(1) == labels_test).double().mean()))
        print(f"{name:4} reads {scores[-1]:.1%} of the digits, given {sizes[-1]}")
        right.plot(range(len(sizes)), scores, "o-", color=color, label=name)
    right.set(title="a convolutional network's limit on digits", xlabel="labels", ylabel="accuracy")
    right.set_xticks(range(len(sizes)), sizes)
    for ax in (left, middle, right):
        ax.legend(frameon=False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "infinite_width.png", dpi=120)
    print("wrote", out / "infinite_width.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
