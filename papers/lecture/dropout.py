"""Dropout: masks of units, predictions that keep the masks, and the bound that they maximize.

    python papers/lecture/dropout.py --out figures [--quick]

With a keep probability 1 − p and masks z ~ Bernoulli(1 − p), stated before the run:

- E[z ∘ h] = (1 − p) h, so that outputs are multiplied by 1 − p at test time, or divided by it in
  training;
- masking the inputs of W x + b drops columns of W, and masking its outputs drops rows of W and entries
  of b;
- predictions that keep the masks spread more away from the data than at the data;
- dropout's law of a weight, q = (1 − p) N(m, σ²) + p N(0, σ²), has a divergence from the prior without
  a closed form; for p = 0.3, m = 1.2, σ = 0.5 and N(0, 1) it is 0.454667439 by quadrature, and draws
  agree;
- the bound E_q log p(y | θ) − KL(q ‖ p) of a linear model is below its log evidence at every p.

Srivastava et al. (2014), "Dropout"; Gal and Ghahramani (2016), "Dropout as a Bayesian approximation".
"""

from __future__ import annotations

import torch
from common import Study, Topic, at_least, at_most, panels, run, tidy
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes
from net2gp.plots import COLORS, FAINT, INK

DROP = 0.3
EXACT = 0.454667439
"""KL((1 − p) N(1.2, 0.25) + p N(0, 0.25) ‖ N(0, 1)) with p = 0.3."""


def double(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masks(quick: bool) -> Study:
    """Means over masks, and the same masks as dropped columns and rows of weights."""
    count = 20_000 if quick else 200_000
    network = (
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(DROP), nn.Linear(8, 8)).double().eval()
    )
    x = double(1, 3, seed=0)
    drawn = bayes.draw_masks(n2g.linearize(network), x, count).values["dropout 0"].double()
    hidden = network[1](network[0](x)).detach()[0]
    shown = drawn * hidden
    mean, error = shown.mean(0), shown.std(0) / count**0.5
    apart = (mean - (1 - DROP) * hidden).abs() / error.clamp(min=1e-12)
    layer, z = network[3].requires_grad_(False), drawn[0]
    inside = bayes.drop_units(layer, inputs=z)
    outside = bayes.drop_units(layer, outputs=z)
    h = double(5, 8, seed=1)
    columns = float((inside(h) - layer(z * h)).detach().abs().max())
    rows = float((outside(h) - z * layer(h)).detach().abs().max())
    figure, axes = panels(3)
    axes[0].imshow(drawn[:8], cmap="Greys", vmin=0, vmax=1)
    axes[0].set(xlabel="hidden unit", ylabel="draw", title="Masks (white: dropped)")
    axes[1].bar(range(8), (1 - DROP) * hidden, color=FAINT, label=r"$(1-p)\,h$")
    axes[1].errorbar(
        range(8), mean, 4 * error, fmt="o", color=COLORS[0], ms=4, label="mean of masked units"
    )
    axes[1].set(xlabel="hidden unit", title=f"Means over {count:,} masks")
    axes[1].legend(frameon=False, labelcolor=INK, fontsize=8)
    tidy(axes[1])
    axes[2].imshow(inside.weight.detach(), cmap="RdBu", vmin=-0.4, vmax=0.4)
    axes[2].set(xlabel="input of the layer", ylabel="output", title="Masked inputs drop columns")
    return Study(
        "masks",
        "Dropout masks",
        f"""Each unit is kept with probability {1 - DROP:g} (`bayes.draw_masks`). A mask of the inputs
of a layer does what zeros in the columns of its weight do, and a mask of its outputs what zeros in its
rows and biases do (`bayes.drop_units`).""",
        figure,
        (
            at_most(
                "errors of the mean of masked units from (1 − p) h, worst unit",
                float(apart.max()),
                4,
            ),
            at_most("masked inputs less dropped columns", columns, 1e-14),
            at_most("masked outputs less dropped rows", rows, 1e-14),
            at_most(
                "columns that are not dropped as the mask says",
                float(((inside.weight == 0).all(0) != (z == 0)).sum()),
                0,
            ),
        ),
    )


def toy(seed: int) -> tuple[Tensor, Tensor]:
    """Points of a sine in two clusters, in [−2, −0.5] and [0.5, 2]."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.5 + 1.5 * torch.rand(60, 1, generator=generator)
    x[:30] *= -1
    return x, (2 * x).sin() + 0.1 * torch.randn(60, 1, generator=generator)


def fitted(seed: int, steps: int) -> n2g.Posterior:
    """A network trained with dropout, with its masks kept."""
    points = toy(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [
            nn.Linear(1, 100),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(100, 100),
            nn.ReLU(),
            nn.Dropout(0.1),
        ]
        network = nn.Sequential(*layers, nn.Linear(100, 1)).train()
    training = bayes.Training(num_steps=steps, learning_rate=5e-3, batch_size=None, seed=seed)
    noise = n2g.Gaussian(noise_var=0.01)
    trained = bayes.map_estimate(network, points, noise, prior=10.0, training=training)
    return bayes.mc_dropout(bayes.module_of(trained), points, noise, num_samples=200, seed=seed)


def mc_dropout(quick: bool) -> Study:
    """Mean and spread of a network with dropout, at the data and away from them."""
    seeds, steps = (3 if quick else 10), (1000 if quick else 3000)
    at = torch.linspace(-5, 5, 201)[:, None]
    away = at[:, 0].abs() > 3.5
    inside = (at[:, 0].abs() > 0.6) & (at[:, 0].abs() < 1.9)
    posteriors = [fitted(seed, steps) for seed in range(seeds)]
    spreads = torch.stack([p.marginal(at).variance[:, 0].sqrt() for p in posteriors])
    figure, axes = panels(2)
    posterior, (x, y) = posteriors[0], toy(0)
    mean, spread = posterior.marginal(at).mean[:, 0], spreads[0]
    axes[0].fill_between(
        at[:, 0], mean - 2 * spread, mean + 2 * spread, color=COLORS[0], alpha=0.25, linewidth=0
    )
    for one in posterior.sample_functions(5)(at)[:, :, 0]:
        axes[0].plot(at[:, 0], one, color=COLORS[0], linewidth=0.7, alpha=0.7)
    axes[0].plot(at[:, 0], mean, color=COLORS[0], label="mean ± 2 standard deviations, five masks")
    axes[0].plot(x, y, ".", color=INK, label="data")
    axes[0].set(xlabel="x", ylabel="f(x)", title="Predictions with masks")
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper center")
    axes[1].plot(at[:, 0], spreads.T, color=COLORS[1], linewidth=0.8, alpha=0.6)
    axes[1].plot(at[:, 0], spreads.mean(0), color=COLORS[1])
    for low, high in ((-2, -0.5), (0.5, 2)):
        axes[1].axvspan(low, high, color=FAINT, alpha=0.3, linewidth=0)
    axes[1].set(xlabel="x", title=f"Standard deviation, {seeds} data sets", ylim=(0, None))
    for ax in axes:
        tidy(ax)
    ratios = spreads[:, away].mean(1) / spreads[:, inside].mean(1)
    slope = spreads[:, at[:, 0].abs() > 4.8].mean(1) / spreads[
        :, (at[:, 0].abs() - 3).abs() < 0.2
    ].mean(1)
    gap = spreads[:, at[:, 0].abs() < 0.2].mean(1) / spreads[:, inside].mean(1)
    return Study(
        "mc_dropout",
        "Monte Carlo dropout",
        f"""A network of two hidden layers trained with dropout, and 200 draws of its masks
(`bayes.mc_dropout`). Its spread grows away from the data, here by {float(ratios.mean()):.1f} times
beyond |x| = 3.5, since ReLU functions go on as straight lines whose slopes depend on the mask. In the
gap between the clusters, where functions are pinned at both sides, it is {float(gap.mean()):.1f} times
the spread at the data.""",
        figure,
        (
            at_least(
                "spread away from the data beside spread at the data, smallest of all sets",
                float(ratios.min()),
                1.5,
            ),
            at_least(
                "spread at |x| = 5 beside |x| = 3, smallest of all sets", float(slope.min()), 1.2
            ),
        ),
    )


def dropout_bound(quick: bool) -> Study:
    """The divergence by quadrature and by draws, and the bound below the evidence."""
    one = bayes.DropoutMixture(torch.tensor([1.2], dtype=torch.float64), variance=0.25, drop=DROP)
    exact = float(one.divergence(1.0))
    counts = [100, 1000, 10_000, 100_000]
    drawn = [
        one.drawn_divergence(1.0, num_samples=n, generator=torch.Generator().manual_seed(n))
        for n in counts
    ]
    x = double(20, 5, seed=0)
    y = x @ double(5, 1, seed=1) + 0.5 * double(20, 1, seed=2)
    linear = nn.Linear(5, 1, bias=False).double().eval()
    model = bayes.Model.of(linear, n2g.Gaussian(0.25), 1.0)
    evidence = float(
        n2g.condition(
            n2g.linearize(linear).kernel(1.0), (x, y), n2g.Gaussian(0.25)
        ).log_marginal_likelihood()
    )
    precision = x.T @ x / 0.25 + torch.eye(5, dtype=torch.float64)
    best = torch.linalg.solve(precision, x.T @ y / 0.25).T
    drops = [0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5]
    bounds = []
    for drop in drops:
        q = bayes.DropoutMixture(best, float(1 / precision.diagonal().mean()), drop, axis=1)
        generator = torch.Generator().manual_seed(0)
        found = bayes.dropout_elbo(
            {"weight": q}, model, (x, y), num_samples=2000, generator=generator
        )
        bounds.append((float(found.value), float(found.error)))
    figure, axes = panels(2)
    axes[0].axhline(exact, color=INK, linewidth=1, label="quadrature")
    values, errors = ([float(d.value) for d in drawn], [2 * float(d.error) for d in drawn])
    axes[0].errorbar(
        counts, values, errors, fmt="o", color=COLORS[0], ms=4, label="draws, ± 2 errors"
    )
    axes[0].set(xscale="log", xlabel="draws", title="Divergence of dropout's law from the prior")
    axes[1].axhline(evidence, color=INK, linewidth=1, label="log evidence")
    axes[1].plot(drops, [v for v, _ in bounds], "o-", color=COLORS[1], label="bound")
    axes[1].set(xlabel="drop probability p", title="The bound of a linear model")
    for ax in axes:
        tidy(ax)
        ax.legend(frameon=False, labelcolor=INK, fontsize=8)
    worst = max(abs(v - exact) / (e / 2) for v, e in zip(values, errors, strict=True))
    tightest = max(value + 4 * error for value, error in bounds)
    return Study(
        "dropout_bound",
        "Dropout as variational inference",
        f"""Training with dropout maximizes a bound on the evidence with the law q = (1 − p) N(m, σ²) +
p N(0, σ²) of each weight (`bayes.DropoutMixture`, `bayes.dropout_elbo`). The bound of a linear model of
five weights is {evidence - bounds[0][0]:.1f} below its log evidence without dropout, and lower the more
is dropped: here every weight matters.""",
        figure,
        (
            at_most("divergence by quadrature less 0.454667439", abs(exact - EXACT), 1e-8),
            at_most("errors of the divergence by draws, worst of four", worst, 4),
            at_most("largest bound + 4 errors, less the evidence", tightest - evidence, 0),
        ),
    )


TOPICS: list[Topic] = [masks, mc_dropout, dropout_bound]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
