"""Functions that a network has before it sees data, under different priors of its weights.

One learns: `bayes.prior_functions` draws them; `NormalPrior.by_fan_in` is the prior behind `nngp`; functions
under heavier laws jump at single units; a variance that a layer shares makes whole functions small or large;
`CorrelatedPrior` gives smooth filters of a convolution, and `PriorByName` a prior for each layer.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp import bayes, plots

torch.set_default_dtype(torch.float64)


def main(out: Path) -> None:
    network = nn.Sequential(nn.Linear(1, 100), nn.Tanh(), nn.Linear(100, 1)).eval()
    weight_var, bias_var = {"0": 25.0, "2": 1.0}, {"0": 25.0, "2": 0.1}
    normal = bayes.NormalPrior.by_fan_in(network, weight_var, bias_var)
    scales = normal.variance
    heavy = bayes.StudentTPrior({name: v / 3 for name, v in scales.items()}, 3.0)
    small = {name: v / 30 for name, v in scales.items()}
    cauchy = bayes.StudentTPrior({"*": 1e-4, "*.bias": 0.1}, 1.0)
    priors = {
        "Gaussian": normal,
        "Laplace": bayes.LaplacePrior(scales),
        "Student's t, ν = 3": heavy,
        "Cauchy in the last layer": bayes.PriorByName({"*": normal, "2.*": cauchy}),
        "horseshoe": bayes.Horseshoe(small),
        "one variance per layer": bayes.ScaleMixture(bayes.InverseGamma(1.5, 0.5), "layer", scales),
    }
    x = torch.linspace(-3, 3, 301)[:, None]
    width = 2 * n2g.nngp(network, weight_var=weight_var, bias_var=bias_var).diag(x).sqrt()
    figure, panels = plt.subplots(2, 4, figsize=(15, 6.4), layout="constrained")
    print("share of 1000 functions that are beyond 2 standard deviations of the NNGP at x = 1")
    for ax, (name, prior) in zip(panels[:, :3].flat, priors.items(), strict=True):
        generator = torch.Generator().manual_seed(1)
        f = bayes.prior_functions(network, prior, 1000, generator=generator)(x)[:, :, 0]
        beyond = (f[:, 200].abs() > width[200]).double().mean()
        print(f"  {name:25} {beyond:6.1%}")
        ax.fill_between(x[:, 0], -width, width, color=plots.FAINT, alpha=0.35, lw=0)
        for one, color in zip(f[:7], 2 * plots.COLORS, strict=False):
            ax.plot(x[:, 0], one, color=color, lw=1.2)
        ax.set(title=f"{name}: {beyond:.1%} beyond", ylim=(-5, 5), xlabel="x", ylabel="f(x)")
    params = {"weight": torch.zeros(12, 1, 7, 7)}
    laws = {"independent": bayes.NormalPrior(1.0)}
    laws["correlated"] = bayes.CorrelatedPrior.spatial((7, 7), lengthscale=4.0)
    for ax, (name, prior) in zip(panels[:, 3], laws.items(), strict=True):
        filters = prior.sample(params, 1, torch.Generator().manual_seed(0))["weight"]
        framed = nn.functional.pad(filters.reshape(3, 4, 7, 7), (1, 1, 1, 1), value=torch.nan)
        ax.imshow(framed.permute(0, 2, 1, 3).reshape(27, 36), cmap="RdBu", vmin=-3, vmax=3)
        ax.set(title=f"filters with {name} entries", xticks=[], yticks=[])
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "prior_functions.png", dpi=120)
    print("wrote", out / "prior_functions.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
