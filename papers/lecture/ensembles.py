"""Deep ensembles: better than one network, the same in one pass or in a loop, and when they are
Bayesian.

    python papers/lecture/ensembles.py --out figures [--quick]

Stated before the run:

- the average of networks from independent starts has a better NLL on test digits than a single network,
  on average over members, and the more members the better: log p is concave, so that the NLL of an
  average of probabilities is at most the average NLL;
- members that are trained in one vectorized pass are those of a loop, and their predictions are those
  of the average of the single networks;
- members disagree more on digits that the ensemble gets wrong than on others;
- members of linearized networks that are anchored at draws of the prior and have noise on their targets
  are draws from the posterior of the Gaussian process with the tangent kernel: the covariance of S
  members tends to the covariance of that posterior, with an error that falls as S^−1/2, and members
  without anchors and noise do not have it.

Lakshminarayanan, Pritzel and Blundell (2017), "Simple and scalable predictive uncertainty estimation
using deep ensembles"; Pearce et al. (2020), "Uncertainty in neural networks: approximately Bayesian
ensembling"; He, Lakshminarayanan and Teh (2020), "Bayesian deep ensembles via the neural tangent
kernel".
"""

from __future__ import annotations

import time

import torch
from common import Claim, Study, Topic, at_least, at_most, digits, mlp, panels, run, tidy, within
from studies import Slope
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes, metrics
from net2gp.plots import COLORS, FAINT, INK

WIDTH = 64
NOISE_VAR, PRIOR_VAR = 0.05, 1.0


def averages(probs: Tensor, y: Tensor, sizes: list[int]) -> list[tuple[float, float]]:
    """Mean NLL of ensembles of each size, over disjoint groups of members (S, N, C), and its spread."""
    found = []
    for size in sizes:
        groups = probs[: len(probs) // size * size].unflatten(0, (-1, size)).mean(1)
        losses = torch.stack([-group[range(len(y)), y].log().mean() for group in groups])
        found.append((float(losses.mean()), float(losses.std(correction=0))))
    return found


def networks_of(posterior: n2g.Posterior, x: Tensor) -> Tensor:
    """The probabilities of each member: (S, N, C)."""
    with torch.no_grad():
        return posterior.process.values(x).double().softmax(-1)


def ensemble_nll(quick: bool) -> Study:
    """The NLL over the number of members, and where members disagree."""
    members, steps = (12, 150) if quick else (24, 300)
    train, (x, y) = digits("train", 300), digits("test")
    training = bayes.Training(num_steps=steps, batch_size=64)
    options = {"prior": None, "training": training}
    start = time.perf_counter()
    posterior = bayes.ensemble(
        mlp(64, WIDTH, WIDTH, 10), train, n2g.Categorical(), num_members=members, **options
    )
    together = time.perf_counter() - start
    start = time.perf_counter()
    few = bayes.ensemble(
        mlp(64, WIDTH, WIDTH, 10),
        train,
        n2g.Categorical(),
        num_members=3,
        vectorize=False,
        **options,
    )
    alone = (time.perf_counter() - start) / 3 * members
    probs = networks_of(posterior, x)
    loop = float((networks_of(few, x) - probs[:3]).abs().max())
    with torch.no_grad():
        predicted = posterior.predict(x).probs.double()
    average = float((predicted - probs.mean(0)).abs().max())
    sizes = [1, 2, 3, 4, 6, members]
    curve = averages(probs, y, sizes)
    right = predicted.argmax(1) == y
    labels = probs.argmax(-1)
    disagreement = (labels[:, None] != labels[None]).double().sum((0, 1)) / (
        members * (members - 1)
    )
    unsure = [float(disagreement[mask].mean()) for mask in (right, ~right)]
    figure, axes = panels(2)
    values, spread = zip(*curve, strict=True)
    axes[0].errorbar(sizes, values, spread, color=COLORS[0], marker="o", ms=4)
    axes[0].set(
        xscale="log",
        xlabel="members",
        ylabel="NLL of test digits",
        title="Average of probabilities",
    )
    axes[0].set_xticks(sizes, [str(size) for size in sizes])
    axes[0].minorticks_off()
    axes[1].bar(["answer right", "answer wrong"], unsure, color=[COLORS[2], COLORS[1]], width=0.5)
    axes[1].set(ylabel="share of pairs that disagree", title="Disagreement of members")
    for ax in axes:
        tidy(ax)
    singles = torch.stack([-p[range(len(y)), y].log().mean() for p in probs])
    scores = [float(metrics.nll(posterior.predict(x), y)), float(singles.mean())]
    return Study(
        "ensemble_nll",
        "Deep ensembles",
        f"""{members} networks of two layers of {WIDTH} units, trained on 300 digits from independent
starts without a prior (`bayes.ensemble`). The NLL of their average is {scores[0]:.3f}, of a single
network {scores[1]:.3f} (bars: standard deviation over disjoint groups). In vectorized passes the
{members} trainings took {together:.1f} s; one after the other they would have taken {alone:.1f} s.""",
        figure,
        (
            at_most(
                "NLL of all members beside the mean NLL of single ones", scores[0] / scores[1], 1.0
            ),
            at_most(
                "NLL of all members beside the median single one",
                scores[0] / float(singles.median()),
                1.0,
            ),
            at_most("NLL of 3 members less of 1, means", values[2] - values[0], 0.0),
            at_most("NLL of all members less of 3, means", values[-1] - values[2], 0.0),
            at_most("vectorized members beside a loop, probabilities", loop, 1e-4),
            at_most("prediction beside the average of the networks", average, 1e-6),
            at_least("disagreement, wrong beside right answers", unsure[1] / unsure[0], 2),
        ),
    )


def anchored(features: Tensor, y: Tensor, members: int, randomized: bool) -> n2g.Posterior:
    """Linear models of tangent features, each trained to its end."""
    training = bayes.Training(num_steps=800, learning_rate=0.05, batch_size=None)
    model = nn.Linear(features.shape[1], 1, bias=False).double()
    return bayes.ensemble(
        model,
        (features, y),
        n2g.Gaussian(NOISE_VAR),
        num_members=members,
        prior=PRIOR_VAR,
        training=training,
        randomized=randomized,
    )


def randomized_priors(quick: bool) -> Study:
    """Ensembles of a linearized network beside the Gaussian process of its tangent kernel."""
    members = 1000 if quick else 4000
    generator = torch.Generator().manual_seed(0)
    network = mlp(1, 20, 1, activation=nn.Tanh).double().eval()
    linearized = n2g.linearize(network)
    x = 3 * torch.rand(8, 1, generator=generator, dtype=torch.float64) - 1.5
    y = (2 * x).sin() + NOISE_VAR**0.5 * torch.randn(8, 1, generator=generator, dtype=torch.float64)
    at = torch.linspace(-3, 3, 41, dtype=torch.float64)[:, None]
    process = n2g.condition(linearized.kernel(PRIOR_VAR), (x, y), n2g.Gaussian(NOISE_VAR))
    law = process.joint(at)
    J, new = (linearized.jacobian(points)[:, 0] for points in (x, at))
    drawn = anchored(J, y, members, True).process.values(new)[:, :, 0].detach()
    plain = anchored(J, y, 50, False).process.values(new)[:, :, 0].detach()
    K = law.covariance_matrix
    error = lambda f: float((torch.cov(f.T) - K).norm() / K.norm())
    sizes = [size for size in (25, 50, 100, 250, 500, 1000, 4000) if size <= members]
    errors = [
        torch.tensor([error(part) for part in drawn.split(size) if len(part) == size]).mean()
        for size in sizes
    ]
    slope = Slope.fit(sizes, torch.stack(errors)[:, None]).value
    # E ‖Σ̂ − K‖² = (‖K‖² + (tr K)²)/(S − 1) for S Gaussian draws
    expected = float(((K.square().sum() + K.trace() ** 2) / (members - 1)) ** 0.5 / K.norm())
    apart = (drawn.mean(0) - law.mean).abs() / (K.diagonal() / members).sqrt()
    figure, axes = panels(3)
    mean, sd = law.mean, K.diagonal().sqrt()
    for ax, f, name in (
        (axes[0], drawn, "anchored, noisy targets"),
        (axes[1], plain, "from independent starts alone"),
    ):
        ax.fill_between(at[:, 0], mean - 2 * sd, mean + 2 * sd, color=FAINT, alpha=0.4, linewidth=0)
        ax.plot(at[:, 0], f[:20].T, color=COLORS[0], linewidth=0.7)
        ax.plot(at[:, 0], f.mean(0) + 2 * f.std(0), "--", color=COLORS[1], linewidth=1.2)
        ax.plot(at[:, 0], f.mean(0) - 2 * f.std(0), "--", color=COLORS[1], linewidth=1.2)
        ax.plot(x, y, "o", color=INK, ms=4)
        ax.set(xlabel="x", title=name, ylim=(-5, 5))
    axes[2].plot(sizes, errors, "o-", color=COLORS[0], label="found")
    axes[2].plot(
        sizes,
        [expected * (members / s) ** 0.5 for s in sizes],
        "--",
        color=INK,
        label="of exact draws",
    )
    axes[2].set(
        xscale="log", yscale="log", xlabel="members", title="Relative error of the covariance"
    )
    axes[2].legend(frameon=False, labelcolor=INK, fontsize=8)
    for ax in axes:
        tidy(ax)
    made: tuple[Claim, ...] = (
        within(
            "error of the covariance of all members beside exact draws",
            error(drawn) / expected,
            0.3,
            2.0,
        ),
        within("slope of the error over the number of members", slope, -0.65, -0.35),
        at_most("errors of the mean, worst of 41 points", float(apart.max()), 4.5),
        at_least("error of the covariance without anchors and noise", error(plain), 0.5),
    )
    return Study(
        "randomized_priors",
        "When ensembles are approximate Bayes",
        """The network is linearized at its start. Grey: ±2 standard deviations of the Gaussian process
with its tangent kernel, given eight points. Left: members that are anchored at draws of the prior and
see noisy targets (`bayes.ensemble(..., randomized=True)`) are draws from that posterior (dashed: their
own ±2 deviations). Middle: with weight decay alone a linear model has one optimum, which all members
find, so that they say nothing of the uncertainty.""",
        figure,
        made,
    )


TOPICS: list[Topic] = [ensemble_nll, randomized_priors]

if __name__ == "__main__":
    raise SystemExit(run(TOPICS, __doc__))
