"""Networks as estimators of scikit-learn: error bars in a pipeline, a grid search, and weights of points.

One learns: `NNGPRegressor` and `LaplaceRegressor` in a `Pipeline` beside scikit-learn's own Gaussian process,
`predict(return_std=True)`, `GridSearchCV` over the weight decay of a network, and what `sample_weight` does.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from net2gp import metrics, plots
from net2gp.interop.sklearn import LaplaceRegressor, NNGPRegressor


def main(out: Path) -> None:
    X, y = load_diabetes(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.4, random_state=0)
    perceptron = make_pipeline(StandardScaler(), LaplaceRegressor(random_state=0))
    search = GridSearchCV(perceptron, {"laplaceregressor__alpha": [1.0, 10.0, 100.0]}, cv=5)
    print("grid search:", search.fit(X, y).best_params_)

    smooth = ConstantKernel() * RBF(3.0) + WhiteKernel()
    gp = GaussianProcessRegressor(smooth, normalize_y=True)
    models = {
        "infinite width": make_pipeline(StandardScaler(), NNGPRegressor()),
        "trained perceptron": search.best_estimator_,
        "scikit-learn, RBF": make_pipeline(StandardScaler(), gp),
    }
    print(f"{'':20}{'RMSE':>7}{'NLL':>7}{'90 % interval':>15}")
    for name, model in models.items():
        mean, std = model.fit(X, y).predict(X_test, return_std=True)
        law, target = (torch.tensor(mean), torch.tensor(std**2)), torch.tensor(y_test)
        covered = float(metrics.coverage(*law, target, 0.9))
        scores = f"{metrics.rmse(law[0], target):7.2f}{metrics.gaussian_nll(law, target):7.3f}"
        print(f"{name:20}{scores}{covered:15.1%}")

    # Points count as often as their weights say: here those of high targets five times.
    often = np.where(y > 200, 5.0, 1.0)
    noise = models["infinite width"][-1].likelihood_.noise_var
    for weights, said in ((None, "each patient once"), (often, "the ill five times")):
        model = make_pipeline(StandardScaler(), NNGPRegressor(noise_var=noise))
        model.fit(X, y, nngpregressor__sample_weight=weights)
        print(f"{said}: mean prediction {model.predict(X_test).mean():.1f}")

    mean, std = models["infinite width"].predict(X_test, return_std=True)
    order = np.argsort(mean)
    figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    rank, half = np.arange(len(order)), 1.645 * std[order]
    band = (mean[order] - half, mean[order] + half)
    ax.fill_between(rank, *band, color=plots.COLORS[0], alpha=0.2, label="90 % interval")
    ax.plot(rank, mean[order], color=plots.COLORS[0], label="prediction")
    ax.plot(rank, y_test[order], ".", color=plots.INK, label="measured")
    ax.set(xlabel="held-out patients, by prediction", ylabel="progression of the disease")
    ax.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "sklearn_pipeline.png", dpi=120)
    print("wrote", out / "sklearn_pipeline.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
