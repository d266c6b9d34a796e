"""A prior variance for each layer, and the noise, all set by the evidence.

One learns: `tune` maximizes the evidence over whatever keywords the function that builds a posterior
has; `kernel` takes a prior variance for every pattern of parameter names, the last match counting.
The features of this network were trained on the same points, so the evidence switches their layers off:
it is then a Bayesian last layer, with a higher evidence and less doubt in the gap.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp import data, metrics, plots


def main(out: Path) -> None:
    torch.manual_seed(0)
    curve = data.snelson_like(num_points=40)
    network = nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(1000):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(curve.x), curve.y).backward()
        optimizer.step()
    linearized = n2g.linearize(network.eval())

    def shared(prior_var, noise_var):
        return n2g.condition(linearized.kernel(prior_var), curve.data, n2g.Gaussian(noise_var))

    def per_layer(first, last, noise_var):
        kernel = linearized.kernel({"*": first, "4.*": last})
        return n2g.condition(kernel, curve.data, n2g.Gaussian(noise_var))

    posteriors = {
        "one prior variance": n2g.tune(shared, prior_var=1.0, noise_var=0.1),
        "one for the last layer, one for the rest": n2g.tune(
            per_layer, first=1.0, last=1.0, noise_var=0.1
        ),
    }

    x = torch.linspace(0, 6, 301)[:, None]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for ax, (name, posterior) in zip(panels, posteriors.items(), strict=True):
        law = posterior.marginal(x)
        variances = [float(posterior.kernel.prior_var[f"{i}.weight"]) for i in (0, 2, 4)]
        print(f"{name}:\n  log evidence {posterior.log_marginal_likelihood():.2f}", end=", ")
        print(f"RMSE to the truth {metrics.rmse(law.mean, curve.truth(x)):.3f}", end=", ")
        print(f"noise variance {posterior.likelihood.noise_var:.3f} (true: {curve.noise_var})")
        print("  prior variances of the three layers:", ", ".join(f"{v:.2g}" for v in variances))
        plots.plot_regression(
            ax, x, law.mean, law.variance, data=curve.data, truth=curve.truth(x), label="mean ± 2σ"
        )
        ax.set_title(name)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "per_layer_priors.png", dpi=120)
    print("wrote", out / "per_layer_priors.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
