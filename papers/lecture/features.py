"""Feature learning: how training raises the alignment of the tangent kernel, and how width stops it.

    python papers/lecture/features.py --out figures [--quick]

Networks in the NTK parameterization are trained by gradient descent to the same time. The centered alignment
of their tangent kernel with the targets grows for narrow networks, and hardly for wide ones.

Cortes, Mohri & Rostamizadeh (2012), "Algorithms for learning kernels based on centered alignment";
Jacot, Gabriel & Hongler (2018), "Neural tangent kernel"; Atanasov et al. (2022), "Neural networks as kernel
learners".
"""

from __future__ import annotations

import torch
from common import Study, at_least, at_most, panels, run, ticks_at, tidy
from studies import Architecture, Networks, Slope
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes
from net2gp.plots import COLORS, FAINT, INK

INPUTS, POINTS = 4, 40
SHAPE = Architecture(INPUTS, 2, nn.Tanh(), 2.0, 0.1)


def task() -> tuple[Tensor, Tensor]:
    """Targets that depend on one direction of the inputs only."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(POINTS, INPUTS, generator=generator)
    return x, (2 * x[:, 0]).sin()


def alignments(networks: Networks, x: Tensor, y: Tensor) -> Tensor:
    """Of the tangent kernel of each network with the targets: (S,)."""
    found = []
    for index in range(len(networks.weights[0])):
        kernel = n2g.linearize(networks.module(index)).kernel(networks.variances)
        found.append(bayes.kernel_alignment(kernel, (x, y)))
    return torch.stack(found)


def train(width: int, count: int, times: list[int], rate: float) -> Tensor:
    """Alignments at numbers of steps: (T, S)."""
    x, y = task()
    networks = Networks.draw(SHAPE, width, count, torch.Generator().manual_seed(width))
    found, done = [], 0
    for time in times:
        for _ in range(time - done):
            networks.step_(x, y, rate)
        done = time
        found.append(alignments(networks, x, y))
    return torch.stack(found)


def alignment(quick: bool) -> Study:
    """The alignment over training for each width, and its gain over the width."""
    widths = [16, 32, 64, 128, 256] if quick else [16, 32, 64, 128, 256, 512, 1024]
    count = 4 if quick else 8
    times = [0, 25, 50, 100, 200, 400]
    curves = {width: train(width, count, times, 0.2) for width in widths}
    gains = torch.stack([curve[-1] - curve[0] for curve in curves.values()])
    slope = Slope.fit(widths, gains.mean(1, keepdim=True).clamp(min=1e-6))
    figure, axes = panels(2)
    for place, (width, curve) in enumerate(curves.items()):
        color = COLORS[place] if place < len(COLORS) else FAINT
        axes[0].plot(times, (curve - curve[0]).mean(1), ".-", color=color, label=f"width {width}")
    axes[0].set(xlabel="steps of gradient descent", ylabel="gain of alignment with the targets")
    axes[1].plot(widths, gains, ".", color=COLORS[0], alpha=0.5, label=None)
    axes[1].plot(widths, gains.mean(1), "o-", color=COLORS[0], label="mean gain")
    start = float(gains.mean(1)[0])
    logs, middle = gains.mean(1).log().mean(), torch.tensor(widths).log().mean()
    fitted = (logs + slope.value * (torch.tensor(widths).log() - middle)).exp()
    axes[1].plot(widths, fitted, "--", color=INK, label=f"slope {slope.value:.2f}")
    axes[1].set(xlabel="width", ylabel="gain after all steps", xscale="log", yscale="log")
    ticks_at(axes[1], widths)
    for ax in axes:
        tidy(ax)
        ax.legend(frameon=False, labelcolor=INK, fontsize=8)
    return Study(
        "alignment",
        "Infinite width does not learn features",
        f"""The targets depend on one of {INPUTS} inputs. Training turns the tangent kernel of a network
with two hidden layers toward the targets: its centered alignment (`bayes.kernel_alignment`) grows. The
gain falls with the width, with the slope {slope.value:.2f} of its logarithm over the logarithm of the
width, so at infinite width the kernel stays what it was at the start. A Gaussian process with that
kernel learns no features; finite networks do. Means over {count} networks of each width.""",
        figure,
        (
            at_most("slope of log gain over log width", slope.value, -0.4),
            at_least("gain of the narrowest network", start, 0.05),
        ),
    )


TOPICS = [alignment]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
