"""Estimators of scikit-learn: its own checks, its own Gaussian process as a reference, and exact weights."""

import copy
import importlib
import os
import pickle
import sys
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.gaussian_process.kernels import Kernel as SklearnKernel
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError, Net2GPWarning
from net2gp.interop.sklearn import (
    LaplaceClassifier,
    LaplaceRegressor,
    LinearizedClassifier,
    LinearizedRegressor,
    NNGPClassifier,
    NNGPRegressor,
    NTKRegressor,
)
from net2gp.interop.sklearn.softmax import softmax_mode
from net2gp.interop.sklearn.weighting import copies

pytestmark = pytest.mark.filterwarnings("ignore::net2gp.errors.Net2GPWarning")

ESTIMATORS = [
    NNGPRegressor(),
    NTKRegressor(),
    NNGPClassifier(),
    LinearizedRegressor(),
    LinearizedClassifier(),
    LaplaceRegressor(),
    LaplaceClassifier(),
]
REGRESSORS = [e for e in ESTIMATORS if hasattr(e, "sample_y")]
CLASSIFIERS = [e for e in ESTIMATORS if not hasattr(e, "sample_y")]
QUICK = {
    "check_sample_weight_equivalence_on_dense_data",
    "check_estimators_pickle",
    "check_estimators_nan_inf",
    "check_fit_idempotent",
    "check_n_features_in_after_fitting",
    "check_estimators_unfitted",
    "check_no_attributes_set_in_init",
}
"""The checks that run by default for all estimators; the slow suite has all of them."""

ELSEWHERE = set() if os.environ.get("SCIPY_ARRAY_API") else {"check_array_api_input"}
"""Checks that scikit-learn skips by itself, unless SCIPY_ARRAY_API=1 is set before scipy is imported."""


def name(estimator):
    return type(estimator).__name__


def checks():
    for estimator in ESTIMATORS:
        for one, check in estimator_checks_generator(estimator):
            title = check.func.__name__
            if title in ELSEWHERE:
                continue
            quick = title in QUICK or isinstance(estimator, NNGPRegressor)
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(one, check, marks=marks, id=f"{name(estimator)}-{title}")


@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_what_scikit_learn_asks_of_an_estimator(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def measured(X):
    noise = np.random.default_rng(1).normal(size=len(X))
    return 3 + 2 * np.sin(X[:, 0]) + X[:, 1] ** 2 + 0.3 * noise


def levels(y):
    return np.array(["few", "some", "many"])[np.digitize(y, [3.0, 5.0])]


def table(count=30):
    X = np.random.default_rng(0).normal(size=(count, 3))
    return X, measured(X)


def labeled(count=30):
    X, y = table(count)
    return X, levels(y)


def perceptron(outputs=1):
    torch.manual_seed(0)
    layers = nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)
    return nn.Sequential(*layers).double()


class ArcCosine(SklearnKernel):
    """ReLU layers as Cho and Saul wrote them down: a K of one layer from that of the layer before."""

    def __init__(self, layers=2, weight_var=2.0, bias_var=0.1):
        self.layers, self.weight_var, self.bias_var = layers, weight_var, bias_var

    def __call__(self, X, Y=None, eval_gradient=False):
        a, b = X, X if Y is None else Y
        both = np.vstack([a, b])
        K = self.weight_var * both @ both.T / X.shape[1] + self.bias_var
        for _ in range(self.layers):
            size = np.sqrt(np.diag(K))
            cosine = np.clip(K / np.outer(size, size), -1, 1)
            angle = np.arccos(cosine)
            moment = np.outer(size, size) * (np.sin(angle) + (np.pi - angle) * cosine)
            K = self.weight_var * moment / (2 * np.pi) + self.bias_var
        return K[: len(a), len(a) :]

    def diag(self, X):
        return np.array([self(x[None])[0, 0] for x in X])

    def is_stationary(self):
        return False


@pytest.mark.parametrize("normalize_y", [False, True])
@pytest.mark.parametrize(
    ("network", "reference", "tol"),
    [
        (n2g.RBF(0.8), ConstantKernel(1.7, "fixed") * RBF(0.8), 1e-10),
        (None, ConstantKernel(1.7, "fixed") * ArcCosine(), 1e-6),  # arccos loses digits near 1
    ],
    ids=["RBF", "arc-cosine"],
)
def test_a_regressor_is_scikit_learns_gaussian_process_with_the_same_kernel(
    network, reference, tol, normalize_y
):
    X, y = table(40)
    fixed = reference + WhiteKernel(0.2)
    theirs = GaussianProcessRegressor(fixed, alpha=0, optimizer=None, normalize_y=normalize_y)
    ours = NNGPRegressor(network, scale=1.7, noise_var=0.2, normalize_y=normalize_y)
    theirs.fit(X[:30], y[:30])
    ours.fit(X[:30], y[:30])
    for flag in ("return_std", "return_cov"):
        for a, b in zip(
            ours.predict(X[30:], **{flag: True}),
            theirs.predict(X[30:], **{flag: True}),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=tol, atol=tol)
    np.testing.assert_allclose(ours.predict(X[30:]), theirs.predict(X[30:]), rtol=tol)
    evidence = theirs.log_marginal_likelihood_value_
    assert ours.log_marginal_likelihood_value_ == pytest.approx(evidence, rel=tol)


@pytest.mark.parametrize("model", [NNGPRegressor, NTKRegressor])
def test_open_hyper_parameters_have_the_largest_evidence_with_the_prior_on_the_noise(model):
    X, y = table(150)
    found = model().fit(X, y)
    noise, scale = found.likelihood_.noise_var, float(found.posterior_.kernel.variance)

    def objective(noise_var, scale):
        fitted = model(noise_var=noise_var, scale=scale).fit(X, y)
        surprise = np.log(noise_var / 0.01) / np.log(100)
        return fitted.log_marginal_likelihood_value_ - surprise**2 / 2

    best = objective(noise, scale)
    for factor in (0.5, 0.95, 1.05, 2.0):
        assert objective(noise * factor, scale) < best
        assert objective(noise, scale * factor) < best
    fixed = model(noise_var=0.05).fit(X, y)
    assert fixed.likelihood_.noise_var == 0.05


@pytest.mark.parametrize("scale", [0.1, 3.0, 200.0])
@pytest.mark.parametrize("weights", [None, np.linspace(0.3, 3.0, 40)])
def test_class_by_class_the_evidence_is_that_of_all_logits_together(scale, weights):
    X, y = labeled(40)
    model = NNGPClassifier(n2g.RBF(), scale=scale).fit(X, y, sample_weight=weights)
    K = scale * n2g.RBF()(torch.from_numpy(X))
    codes = torch.from_numpy((y[:, None] == model.classes_).astype(float))
    w = torch.ones(40, dtype=torch.float64) if weights is None else torch.from_numpy(weights)
    mode = softmax_mode(K, codes, w, torch.zeros_like(codes))
    assert mode.evidence == pytest.approx(model.log_marginal_likelihood_value_, rel=1e-9)
    mean = model.posterior_.mean(torch.from_numpy(X))
    torch.testing.assert_close(K @ mode.alpha, mean, rtol=1e-6, atol=1e-6)


def test_the_evidence_of_a_classifier_is_largest_at_its_scale():
    X, y = labeled(60)
    found = NNGPClassifier().fit(X, y)
    scale = float(found.posterior_.kernel.kernel.variance)
    for factor in (0.7, 1.4):
        other = NNGPClassifier(scale=scale * factor).fit(X, y)
        assert other.log_marginal_likelihood_value_ < found.log_marginal_likelihood_value_


FIXED = [
    NNGPRegressor(scale=1.3, noise_var=0.2),
    NNGPRegressor(scale=1.3, noise_var=0.2, normalize_y=False),
    NTKRegressor(scale=0.4, noise_var=0.1),
    LinearizedRegressor(perceptron(), noise_var=0.2, prior_var=0.7),
    LinearizedRegressor(perceptron(), noise_var=0.2, prior_var=0.7, zero_mean=True),
    LaplaceRegressor(perceptron(), noise_var=0.2, prior_var=0.7),
    LaplaceRegressor(perceptron(), noise_var=0.2, prior_var=0.7, structure=n2g.FunctionSpace()),
    LaplaceRegressor(perceptron(), noise_var=0.2, prior_var=0.7, structure=n2g.Kron()),
    NNGPClassifier(scale=1.3),
    LinearizedClassifier(perceptron(outputs=3), prior_var=0.7),
    LaplaceClassifier(perceptron(outputs=3), prior_var=0.7),
]


def data_for(estimator, count=30):
    return table(count) if hasattr(estimator, "sample_y") else labeled(count)


def answers(model, X):
    if not hasattr(model, "sample_y"):
        return [model.predict_proba(X), model.log_marginal_likelihood_value_]
    return [*model.predict(X, return_cov=True), model.log_marginal_likelihood_value_]


def assert_same(one, other, X, tol=1e-8):
    for a, b in zip(answers(one, X), answers(other, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("estimator", FIXED, ids=name)
def test_weights_count_points_at_fixed_hyper_parameters(estimator):
    X, y = data_for(estimator)
    w = np.arange(len(y)) % 4
    one = clone(estimator).fit(X, y, sample_weight=w)
    assert_same(one, clone(estimator).fit(X.repeat(w, 0), y.repeat(w, 0)), X)
    plain = clone(estimator).fit(X, y)
    assert not np.allclose(answers(plain, X)[0], answers(one, X)[0], atol=1e-4) or not np.allclose(
        answers(plain, X)[1], answers(one, X)[1], atol=1e-4
    )


def without_link(estimator):
    """Laplace for classes matches its link at some points; what is compared are the logits."""
    return isinstance(estimator, LaplaceClassifier)


@pytest.mark.parametrize("estimator", FIXED, ids=name)
def test_two_halves_of_a_point_are_the_point(estimator):
    X, y = data_for(estimator)
    whole = clone(estimator).fit(X, y)
    halves = np.repeat([0.25, 0.75], len(y))
    two = clone(estimator).fit(np.vstack([X, X]), np.hstack([y, y]), sample_weight=halves)
    if without_link(estimator):
        x = torch.from_numpy(X)
        a, b = (one.posterior_.marginal(x).covariance_matrix for one in (two, whole))
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
        return
    assert_same(two, whole, X)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=name)
def test_weights_count_points_for_the_choice_of_hyper_parameters_as_well(estimator):
    # three measurements of each input, since the same number twice is evidence of no noise
    X = np.tile(table(40)[0], (3, 1))
    y = measured(X)
    y = y if hasattr(estimator, "sample_y") else levels(y)
    w = (1 + np.arange(len(y))) % 4
    one = clone(estimator)
    one = one.set_params(random_state=0) if "random_state" in one.get_params() else one
    other = clone(one).fit(X.repeat(w, 0), y.repeat(w, 0))
    assert_same(one.fit(X, y, sample_weight=w), other, X, 1e-6)


@pytest.mark.parametrize("model", [NNGPRegressor, NTKRegressor])
def test_fractions_of_points_choose_the_same_hyper_parameters(model):
    X, y = table()
    two = model().fit(np.vstack([X, X]), np.hstack([y, y]), sample_weight=np.full(60, 0.5))
    assert_same(two, model().fit(X, y), X, 1e-6)


def test_the_same_number_twice_is_evidence_of_less_noise():
    X, y = table(60)
    for model in (NNGPRegressor, LinearizedRegressor):
        once, twice = (model().fit(X, y, sample_weight=np.full(60, w)) for w in (1.0, 2.0))
        assert twice.likelihood_.noise_var < 0.8 * once.likelihood_.noise_var


def test_the_evidence_of_weighted_points_is_the_integral_of_powers():
    """log ∫ Π_n N(y_n | f_n, σ²)^{w_n} N(f | 0, K) df, by the moments of two points on a grid of f."""
    X, y, w, noise = np.array([[0.0], [0.7]]), np.array([0.4, -0.3]), np.array([1.7, 0.6]), 0.5
    model = NNGPRegressor(n2g.RBF(1.0), scale=1.0, noise_var=noise, normalize_y=False)
    model.fit(X, y, sample_weight=w)
    grid = np.linspace(-8, 8, 801)
    f = np.stack(np.meshgrid(grid, grid), -1)
    prior = stats.multivariate_normal(np.zeros(2), RBF(1.0)(X)).logpdf(f)
    powers = (w * stats.norm(y, noise**0.5).logpdf(f)).sum(-1)
    integral = np.log(np.exp(prior + powers).sum() * (grid[1] - grid[0]) ** 2)
    assert model.log_marginal_likelihood_value_ == pytest.approx(integral, abs=1e-8)
    mean = (np.exp(prior + powers)[..., None] * f).sum((0, 1)) / np.exp(prior + powers).sum()
    np.testing.assert_allclose(model.predict(X), mean, atol=1e-8)


def test_copies_add_up():
    w = torch.tensor([0.3, 2.0, 0.3, 0.3, 0.1, 5.0])
    assert copies(w).tolist() == [0, 2, 1, 0, 0, 5]
    assert torch.equal(copies(torch.tensor([4.0, 1.0])), torch.tensor([4, 1]))
    assert copies(torch.full((9,), 0.01)).sum() == 1
    assert copies(torch.full((10,), 1e6)).sum() == 20_000


@pytest.mark.parametrize("estimator", FIXED, ids=name)
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (-np.ones(30), r"negative weights"),
        (np.zeros(30), r"all weights of sample_weight are zero"),
        (np.ones(29), r"sample_weight must have shape \(30,\), .* has \(29,\)"),
    ],
)
def test_weights_that_mean_nothing_are_refused(estimator, weights, message):
    with pytest.raises(InputError, match=message):
        clone(estimator).fit(*data_for(estimator), sample_weight=weights)


@pytest.mark.parametrize("estimator", REGRESSORS, ids=name)
def test_predictions_are_those_of_the_posterior(estimator):
    X, y = table()
    model = clone(estimator).fit(X, y)
    law = model.posterior_.predict(torch.from_numpy(X))
    spread, center = model._spread, model._center
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, law.mean[:, 0].numpy() * spread + center, rtol=1e-9)
    np.testing.assert_allclose(std, law.variance.sqrt()[:, 0].numpy() * spread, rtol=1e-9)
    again, covariance = model.predict(X, return_cov=True)
    np.testing.assert_allclose(again, mean, rtol=1e-9)
    np.testing.assert_allclose(np.diag(covariance), std**2, rtol=1e-9)
    assert np.linalg.eigvalsh(covariance).min() > 0


@pytest.mark.parametrize("noise_var", [None, 0.04])
def test_the_units_of_a_column_say_nothing_about_the_others(noise_var):
    X, y = table()
    units = np.array([1.0, 1000.0]) if noise_var is None else np.array([1000.0, 1000.0])
    noise = (noise_var, noise_var and noise_var * 1e6)
    columns, weights = np.c_[y, np.roll(y, 1)], np.linspace(0.5, 2.0, len(y))
    plain, scaled = (
        LaplaceRegressor(noise_var=variance, random_state=0).fit(X, columns * unit, weights)
        for variance, unit in zip(noise, (1.0, units), strict=True)
    )
    for ours, theirs in zip(*(m.predict(X, return_std=True) for m in (plain, scaled)), strict=True):
        np.testing.assert_allclose(ours, theirs / units, rtol=1e-3, atol=1e-4)
    evidence = scaled.log_marginal_likelihood_value_ + weights.sum() * np.log(units).sum()
    assert plain.log_marginal_likelihood_value_ == pytest.approx(evidence, abs=0.1)


@pytest.mark.parametrize("estimator", REGRESSORS, ids=name)
def test_draws_have_the_mean_and_covariance_of_predictions(estimator):
    X, y = table()
    model = clone(estimator).fit(X, np.column_stack([y, -10 * y + X[:, 2]]))
    mean, covariance = model.predict(X[:4], return_cov=True)
    draws = model.sample_y(X[:4], 40_000)
    assert draws.shape == (4, 2, 40_000)
    assert covariance.shape == (4, 4, 2)
    np.testing.assert_array_equal(draws, model.sample_y(X[:4], 40_000, random_state=0))
    assert not np.array_equal(draws, model.sample_y(X[:4], 40_000, random_state=1))
    for c in range(2):
        scale = np.sqrt(np.diag(covariance[..., c]))
        np.testing.assert_allclose(draws[:, c].mean(-1), mean[:, c], atol=0.03 * scale.max())
        found = np.cov(draws[:, c]) / np.outer(scale, scale)
        np.testing.assert_allclose(found, covariance[..., c] / np.outer(scale, scale), atol=0.04)
    assert clone(estimator).fit(X, y).sample_y(X[:4], 3).shape == (4, 3)


def test_columns_of_targets_are_independent_of_each_other_given_the_hyper_parameters():
    X, y = table()
    both = np.column_stack([y, 5 - X[:, 2] ** 3])
    model = NNGPRegressor(scale=1.0, noise_var=0.1).fit(X, both)
    mean, std = model.predict(X, return_std=True)
    for c in range(2):
        one = NNGPRegressor(scale=1.0, noise_var=0.1).fit(X, both[:, c])
        np.testing.assert_allclose(mean[:, c], one.predict(X), rtol=1e-9)
        np.testing.assert_allclose(std[:, c], one.predict(X, return_std=True)[1], rtol=1e-9)
    assert NNGPRegressor().fit(X, both[:, :1]).predict(X).shape == (30, 1)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=name)
def test_tables_of_pandas_have_names(estimator):
    pandas = pytest.importorskip("pandas")
    X, y = data_for(estimator)
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    one = clone(estimator)
    one = one.set_params(random_state=0) if "random_state" in one.get_params() else one
    model = clone(one).fit(frame, pandas.Series(y))
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    assert model.n_features_in_ == 3
    np.testing.assert_array_equal(model.predict(frame), clone(one).fit(X, y).predict(X))
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["c", "b", "a"]])


@pytest.mark.parametrize("estimator", CLASSIFIERS, ids=name)
def test_labels_of_any_type_come_back(estimator):
    X, y = labeled(45)
    model = clone(estimator).fit(X, y)
    assert model.classes_.tolist() == ["few", "many", "some"]
    probs = model.predict_proba(X)
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-12)
    np.testing.assert_array_equal(model.predict(X), model.classes_[probs.argmax(1)])
    assert model.score(X, y) > 0.7
    two = clone(estimator).fit(X, y == "few")
    assert two.predict(X).dtype == bool
    assert two.predict_proba(X).shape == (45, 2)


def test_a_network_of_one_logit_classifies_two_classes():
    X, y = labeled(60)
    for model in (
        LinearizedClassifier(perceptron(), prior_var=1.0),
        LaplaceClassifier(perceptron(), prior_var=1.0),
    ):
        probs = model.fit(X, y == "few").predict_proba(X)
        assert probs.shape == (60, 2)
        p = model.posterior_.predict(torch.from_numpy(X)).probs[:, 0]
        np.testing.assert_allclose(probs[:, 1], p.numpy(), rtol=1e-12)


def test_outputs_have_the_classes_that_are_given():
    X, y = labeled(60)
    order = ["some", "few", "many", "none"]
    network = perceptron(outputs=4)
    model = LaplaceClassifier(network, prior_var=1.0, classes=order).fit(X, y)
    assert model.classes_.tolist() == order
    best = network(torch.from_numpy(X)).argmax(1).numpy()
    np.testing.assert_array_equal(model.predict(X), np.array(order)[best])
    with pytest.raises(InputError, match=r"has 4 outputs, but there are 3 classes.*classes=\["):
        LaplaceClassifier(network).fit(X, y)
    with pytest.raises(InputError, match="y has labels that classes lacks: many, some"):
        LaplaceClassifier(network, classes=["few", "a", "b", "c"]).fit(X, y)
    with pytest.raises(InputError, match="classes must be different labels"):
        LaplaceClassifier(network, classes=["few", "few", "b", "c"]).fit(X, y)


@pytest.mark.parametrize(
    "model",
    [
        LinearizedRegressor(perceptron().float(), prior_var=1.0, noise_var=0.1),
        LaplaceRegressor(perceptron().float(), prior_var=1.0, noise_var=0.1),
    ],
    ids=name,
)
def test_predictions_have_the_precision_of_the_network(model):
    X, y = table()
    model = clone(model).fit(X.astype(np.float32), y)
    assert model.predict(X).dtype == np.float32
    assert np.isfinite(model.predict(X, return_std=True)[1]).all()


@pytest.mark.parametrize("model", [LinearizedRegressor, LaplaceRegressor])
def test_the_network_of_the_user_stays_as_it_is(model):
    X, y = table()
    network = nn.Sequential(perceptron(), nn.Dropout(0.5)).train()
    before = copy.deepcopy(network.state_dict())
    found = model(network, prior_var=1.0, noise_var=0.1).fit(X, y)
    assert network.training
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key])
    said = found.predict(X)
    with torch.no_grad():
        network[0][0].weight.add_(1.0)
    np.testing.assert_array_equal(found.predict(X), said)


@pytest.mark.parametrize("estimator", [LaplaceRegressor, LinearizedRegressor])
def test_a_network_of_half_precision_predicts_as_it_does_in_full(estimator):
    X, y = table()
    torch.manual_seed(0)
    half = nn.Sequential(nn.Linear(X.shape[1], 5), nn.Tanh(), nn.Linear(5, 1)).half()
    full = copy.deepcopy(half).float()
    found, expected = (
        estimator(network, noise_var=0.1, prior_var=1.0).fit(X, y).predict(X)
        for network in (half, full)
    )
    np.testing.assert_allclose(found, expected, atol=2e-2)


def test_parameters_are_chosen_by_a_linearization():
    X, y = table()
    head = n2g.linearize(perceptron(), only="2.*")
    for model in (LinearizedRegressor(head), LaplaceRegressor(head)):
        assert model.fit(X, y).posterior_.linearized.num_params == 9


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=name)
def test_a_fitted_estimator_survives_pickle_after_predictions(estimator):
    X, y = data_for(estimator)
    model = clone(estimator).fit(X, y)
    said = answers(model, X)
    for a, b in zip(answers(pickle.loads(pickle.dumps(model)), X), said, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("estimator", [NNGPRegressor(), LaplaceRegressor(random_state=0)], ids=name)
def test_posteriors_are_saved_without_pickle(estimator, tmp_path):
    X, y = table()
    model = clone(estimator).fit(X, y)
    model.posterior_.save(tmp_path / "posterior.safetensors")
    network = model.linearized_.network if hasattr(model, "linearized_") else None
    network = network or nn.Sequential(
        nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)
    )
    loaded = n2g.load(tmp_path / "posterior.safetensors", network)
    x = torch.from_numpy(X)
    torch.testing.assert_close(loaded.predict(x).variance, model.posterior_.predict(x).variance)


def test_errors_say_what_to_type():
    X, y = table()
    model = NNGPRegressor().fit(X, y)
    with pytest.raises(InputError, match="return_std or return_cov, not for both"):
        model.predict(X, return_std=True, return_cov=True)
    with pytest.raises(InputError, match=r"weight_var and bias_var are for modules.*nngp\(module"):
        NNGPRegressor(n2g.RBF(), weight_var=1.0).fit(X, y)
    with pytest.raises(
        InputError, match="network must be a torch module, a kernel of net2gp or None"
    ):
        NNGPRegressor("relu").fit(X, y)
    with pytest.raises(InputError, match=r"network must be a torch module, net2gp\.linearize"):
        LaplaceRegressor("relu").fit(X, y)
    with pytest.raises(InputError, match="scale must be positive"):
        NNGPRegressor(scale=-1.0).fit(X, y)
    with pytest.raises(InputError, match="noise_var must be"):
        NNGPRegressor(noise_var=-1.0).fit(X, y)
    with pytest.raises(InputError, match=r"needs at least two classes, but y has 1 class: \['a'\]"):
        NNGPClassifier().fit(X, np.full(30, "a"))
    with pytest.raises(InputError, match="y has 1 class at the points of positive sample_weight"):
        NNGPClassifier().fit(X, y > 3, sample_weight=y > 3)
    with pytest.raises(InputError, match="the kernel is zero at the data"):
        NNGPClassifier(weight_var=1.0, bias_var=0.0).fit(0 * X, y > 3)
    with pytest.raises(InputError, match="alpha must be zero or positive and finite, but -1 was"):
        LaplaceRegressor(alpha=-1.0).fit(X, y)
    with pytest.raises(NotFittedError):
        LaplaceRegressor().predict(X)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "net2gp.interop.sklearn")
    with pytest.raises(ImportError, match=r"pip install 'net2gp\[sklearn\]'"):
        importlib.import_module("net2gp.interop.sklearn")


def test_a_pipeline_is_searched_and_cross_validated():
    X, y = table(60)
    pipeline = make_pipeline(StandardScaler(), NNGPRegressor())
    grid = {"nngpregressor__bias_var": [0.01, 1.0], "nngpregressor__weight_var": [1.0, 2.0]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(X, y)
    assert search.best_score_ > 0.7
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    weights = {"nngpregressor__sample_weight": np.ones(60)}
    predicted = cross_val_predict(pipeline, X, y, cv=3, params=weights)
    assert 1 - np.mean((predicted - y) ** 2) / y.var() > 0.7
    labels = cross_val_predict(
        make_pipeline(StandardScaler(), LaplaceClassifier(random_state=0)), *labeled(60), cv=3
    )
    assert np.mean(labels == labeled(60)[1]) > 0.7


def test_prior_variances_are_searched_for_a_network_of_the_user():
    X, y = labeled(60)
    grid = {"prior_var": [0.1, 1.0], "structure": [n2g.Diagonal(), n2g.Kron()]}
    search = GridSearchCV(
        LaplaceClassifier(perceptron(outputs=3)), grid, cv=2, scoring="neg_log_loss"
    )
    assert np.isfinite(search.fit(X, y).best_score_)


def test_mapie_promises_coverage_around_our_predictions():
    regression = pytest.importorskip("mapie.regression")
    X, y = table(300)
    parts = slice(0, 100), slice(100, 200), slice(200, 300)
    split = regression.SplitConformalRegressor(
        NNGPRegressor().fit(X[parts[0]], y[parts[0]]), confidence_level=0.8, prefit=True
    )
    split.conformalize(X[parts[1]], y[parts[1]])
    _, intervals = split.predict_interval(X[parts[2]])
    inside = (intervals[:, 0, 0] <= y[parts[2]]) & (y[parts[2]] <= intervals[:, 1, 0])
    assert 0.65 < inside.mean() < 0.95
    cross = regression.CrossConformalRegressor(
        LinearizedRegressor(random_state=0), confidence_level=0.8, cv=3
    )
    cross.fit_conformalize(X[:100], y[:100])
    assert cross.predict_interval(X[200:])[1].shape == (100, 2, 1)


@pytest.mark.parametrize("model", [NNGPClassifier(), LaplaceClassifier(random_state=0)], ids=name)
def test_mapie_promises_coverage_of_classes(model):
    classification = pytest.importorskip("mapie.classification")
    X, y = labeled(240)
    split = classification.SplitConformalClassifier(
        clone(model), confidence_level=0.8, prefit=False, random_state=0
    )
    split.fit(X[:80], y[:80]).conformalize(X[80:160], y[80:160])
    _, sets = split.predict_set(X[160:])
    place = np.searchsorted(model.fit(X[:80], y[:80]).classes_, y[160:])
    assert 0.65 < sets[np.arange(80), place, 0].mean() <= 1.0


def skorch_net(kind, module, **settings):
    skorch = pytest.importorskip("skorch")
    torch.manual_seed(0)
    return getattr(skorch, kind)(
        module,
        max_epochs=60,
        lr=0.05,
        optimizer=torch.optim.Adam,
        train_split=None,
        verbose=0,
        **settings,
    )


def test_a_skorch_regression_gets_error_bars():
    X, y = table(80)
    X, y = X.astype(np.float32), y.astype(np.float32)[:, None]
    net = skorch_net("NeuralNetRegressor", perceptron().float()).fit(X, y)
    model = LaplaceRegressor.from_skorch(net, noise_var=0.1).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, net.predict(X), rtol=1e-5, atol=1e-5)
    assert (std > 0.1**0.5).all()
    assert model.noise_var == 0.1


@pytest.mark.parametrize("kind", ["probabilities", "logits"])
def test_a_skorch_classifier_keeps_its_predictions_and_labels(kind):
    X, y = labeled(90)
    X = X.astype(np.float32)
    module, settings = perceptron(outputs=3).float(), {}
    if kind == "probabilities":
        module.append(nn.Softmax(dim=-1))
    else:
        settings = {"criterion": nn.CrossEntropyLoss}
    labels = {"few": 0, "many": 1, "some": 2}
    codes = np.array([labels[one] for one in y])
    net = skorch_net("NeuralNetClassifier", module, **settings).fit(X, codes)
    model = LaplaceClassifier.from_skorch(net, prior_var=1e-9).fit(X, codes)
    np.testing.assert_array_equal(model.classes_, net.classes_)
    np.testing.assert_array_equal(model.predict(X), net.predict(X))
    own = net.module_(torch.from_numpy(X)).detach()
    own = own if kind == "probabilities" else own.softmax(1)
    np.testing.assert_allclose(model.predict_proba(X), own.numpy(), atol=1e-4)


def test_a_net_that_is_not_fitted_is_refused():
    net = skorch_net("NeuralNetRegressor", perceptron())
    with pytest.raises(
        InputError, match=r"from_skorch needs a fitted skorch net.*net\.fit\(X, y\)"
    ):
        LaplaceRegressor.from_skorch(net)


def test_warnings_of_the_library_reach_the_user():
    X, y = table()
    network = perceptron()
    with pytest.warns(Net2GPWarning, match="not at a stationary point"):
        LaplaceRegressor(network, noise_var=0.1, prior_var=1.0).fit(X, y + 50)
