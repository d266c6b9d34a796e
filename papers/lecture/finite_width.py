"""The posterior of a finite Bayesian network over its width, beside the Gaussian process of infinite
width.

    python papers/lecture/finite_width.py --out figures [--quick]

Hamiltonian Monte Carlo draws the posteriors of networks of one hidden ReLU layer given 20 points, as in
benchmarks/wide_posteriors.py. Stated before the run: the distance of their posterior mean from the
NNGP's, in standard deviations of the prior, falls with the width with a slope of at most −1/2 on
logarithmic axes (the corrections to the prior's kernel are of the order 1/width), it is at most 0.05 at
the largest width, and the standard deviation there is within 0.08. Widths whose chains have not mixed
(R̂ of 1.05 or more) are drawn, but do not count.

Matthews et al. (2018), "Gaussian process behaviour in wide deep neural networks"; Lee et al. (2018),
"Deep neural networks as Gaussian processes".
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from common import Study, Topic, at_least, at_most, panels, run, ticks_at, tidy
from studies import Slope

from net2gp.plots import COLORS, FAINT, INK

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from wide_posteriors import CLOSE, MIXED, Curve, limit, problem, sampled


def finite_width(quick: bool) -> Study:
    """Posteriors over the width."""
    widths = [8, 32, 128] if quick else [4, 8, 16, 32, 64, 128, 256, 512]
    data, points = problem()
    curves: list[Curve] = [sampled(width, data, points, quick) for width in widths]
    lines = [f"{'width':>6}{'mean':>10}{'deviation':>12}{'R-hat':>8}{'divergences':>13}"]
    for c in curves:
        numbers = (
            f"{c.mean_distance:>10.4f}{c.sd_distance:>12.4f}{c.r_hat:>8.3f}{c.divergences:>13}"
        )
        lines.append(f"{c.width:>6}{numbers}")
    mixed = [one for one in curves if one.r_hat < MIXED]
    slope = Slope.fit(
        [c.width for c in mixed], torch.tensor([[c.mean_distance] for c in mixed])
    ).value
    mean, sd, _ = limit(data, points)
    x = points[:, 0]
    figure, axes = panels(3)
    for ax, one in zip(axes, (curves[0], curves[-1]), strict=False):
        ax.fill_between(
            x,
            one.mean - 2 * one.sd,
            one.mean + 2 * one.sd,
            color=COLORS[0],
            alpha=0.25,
            linewidth=0,
        )
        ax.plot(x, one.mean, color=COLORS[0], label="network, mean ± 2 deviations")
        ax.plot(x, mean, color=INK, linewidth=1, label="NNGP, mean ± 2 deviations")
        for sign in (-2, 2):
            ax.plot(x, mean + sign * sd, color=INK, linewidth=1, linestyle="--")
        ax.plot(*data, ".", color=INK)
        ax.set(title=f"width {one.width}", ylim=(-3.3, 2.6), xlabel="x")
        tidy(ax)
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper center")
    axes[2].plot(widths, [c.mean_distance for c in curves], "o-", color=COLORS[0], label="mean")
    axes[2].plot(
        widths, [c.sd_distance for c in curves], "s-", color=COLORS[1], label="standard deviation"
    )
    axes[2].axhline(CLOSE, color=FAINT, linewidth=1, linestyle=":")
    axes[2].set(xscale="log", yscale="log", xlabel="width", title="Distance from the NNGP")
    ticks_at(axes[2], widths)
    axes[2].legend(frameon=False, labelcolor=INK, fontsize=8)
    tidy(axes[2])
    return Study(
        "finite_width",
        "The posterior of a wide network is the posterior of its Gaussian process",
        f"""Networks of finite width with the prior of the NNGP and 20 points, drawn by Hamiltonian
Monte Carlo (`bayes.hmc`). The wider the network, the closer its posterior is to the NNGP's in closed
form (`condition(nngp(network), data)`): the distance of the means, as a root mean square in standard
deviations of the prior, falls with the slope {slope:.2f}.""",
        figure,
        (
            at_least("widths whose chains have mixed", len(mixed), 2),
            at_most("slope of the distance of means over the width", slope, -0.5),
            at_most("distance of means at the largest width", curves[-1].mean_distance, CLOSE),
            at_most("distance of deviations at the largest width", curves[-1].sd_distance, 0.08),
        ),
        "\n".join(lines),
    )


TOPICS: list[Topic] = [finite_width]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
