"""Fits of deep Gaussian processes: laws of the bound, starts, batches, files and refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp import RBF, Gaussian
from net2gp.deep import Ascent, SparseLayer, fit
from net2gp.deep.inference import ascent as loop
from net2gp.deep.inference.hyperparameters import numbers_of, with_numbers, with_relevances
from net2gp.deep.inference.inducing import divergence
from net2gp.errors import BoundFell, InputError, NotAvailable
from net2gp.kernels import Linear, Periodic

QUICK = Ascent(num_steps=12, num_inducing=6, num_draws=10, num_samples=2, look_every=3)


def toy(count: int = 24, columns: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, columns, generator=generator, dtype=torch.float64)
    y = x[:, :1].sin() + 0.1 * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return x, y


def new_points(columns: int = 1) -> torch.Tensor:
    return torch.linspace(-2, 2, 5 * columns, dtype=torch.float64).reshape(5, columns)


def test_divergences_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    center = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    raw = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    root = raw.tril(-1) + torch.diag_embed(raw.diagonal(dim1=1, dim2=2).exp())
    law = torch.distributions.MultivariateNormal
    zero, one = torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    parts = [
        torch.distributions.kl_divergence(law(center[:, c], scale_tril=root[c]), law(zero, one))
        for c in range(2)
    ]
    torch.testing.assert_close(divergence(center, root), sum(parts))


def test_the_numbers_of_a_kernel_can_be_replaced():
    network = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    kernel = 2.0 * RBF(0.5) * Periodic(3.0) + n2g.nngp(network, bias_var=0.1) + Linear()
    numbers = numbers_of(kernel)
    assert {"kernels.0.kernels.1.period", "kernels.2.weight_var"} <= set(numbers)
    assert any("weight_vars" in place for place in numbers)
    assert not any("kernels.2.bias_var" in place for place in numbers)  # it is zero
    again = with_numbers(kernel, numbers)
    x = new_points()
    torch.testing.assert_close(again(x), kernel(x))
    doubled = with_numbers(kernel, {place: 2 * value for place, value in numbers.items()})
    assert not torch.allclose(doubled(x), kernel(x))
    wide = with_relevances(kernel, 1)
    assert numbers_of(wide)["kernels.0.kernels.0.lengthscale"].shape == (1,)
    torch.testing.assert_close(wide(x), kernel(x))


def test_a_second_layer_that_hardly_moves_gives_the_first_ones_bound():
    x, y = toy()
    fixed = replace(QUICK, tune=False, move_points=False, natural_rate=1.0, starts=("linear",))
    one = fit([RBF(1.0)], (x, y), Gaussian(0.01), ascent=fixed)
    still = SparseLayer(RBF(1.0, 1e-10))
    two = fit([still, RBF(1.0)], (x, y), Gaussian(0.01), ascent=replace(fixed, learning_rate=1e-6))
    torch.testing.assert_close(two.mean(x), one.mean(x), rtol=0, atol=1e-2)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_bound_grows(layers):
    posterior = fit(layers, toy(), Gaussian(), ascent=QUICK)
    assert float(posterior.log_marginal_likelihood()) > float(posterior.recipe.bounds[0])
    assert len(posterior.process.layers) == layers


@dataclass(frozen=True)
class Pair:
    """A layer of another part of the library."""

    kernel: RBF
    width: int


def test_layers_can_have_any_kernels_widths_and_means():
    x, y = toy(columns=3)
    network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    layers = [
        SparseLayer(RBF() + Linear(), width=2),
        Pair(n2g.nngp(network, bias_var=0.1), 4),
        SparseLayer(2.0 * RBF(), mean="zero", num_inducing=6),
    ]
    posterior = fit(layers, (x, y), Gaussian(), ascent=replace(QUICK, num_steps=4))
    assert [layer.width for layer in posterior.process.layers] == [2, 4, 1]
    assert len(posterior.process.last.points) == 6
    assert posterior.mean(new_points(3)).shape == (5, 1)
    first, second, last = posterior.process.layers
    assert last.mean.weight is None
    torch.testing.assert_close(first.mean.weight.mT @ first.mean.weight, torch.eye(2).double())
    assert torch.equal(second.mean.weight, torch.eye(2, 4).double())


def test_relevances_tell_columns_apart():
    x, y = toy(60, columns=2)
    ascent = Ascent(num_steps=30, num_inducing=12, natural_rate=0.5, learning_rate=0.1)
    first, second = fit(1, (x, y), Gaussian(), ascent=ascent).process.last.kernel.lengthscale
    assert float(second) > 2 * float(first)


def test_batches_and_seeds():
    x, y = toy(30)
    batches = replace(QUICK, batch_size=10)
    one, same = (fit(2, (x, y), Gaussian(), ascent=batches) for _ in range(2))
    assert torch.equal(one.mean(x), same.mean(x))
    other = fit(2, (x, y), Gaussian(), ascent=replace(batches, seed=1))
    assert not torch.equal(one.mean(x), other.mean(x))


@pytest.mark.parametrize("labels", [False, True])
def test_float32_data_give_float32_predictions_near_those_of_float64(labels):
    x, y = toy()
    y = (y > 0).double() if labels else y
    likelihood = n2g.Bernoulli() if labels else Gaussian()
    wide = fit(2, (x, y), likelihood, ascent=QUICK)
    narrow = fit(2, (x.float(), y.float()), likelihood, ascent=QUICK)
    assert {narrow.mean(x.float()).dtype, narrow.x.dtype, narrow.y.dtype} == {torch.float32}
    torch.testing.assert_close(narrow.mean(x.float()).double(), wide.mean(x), rtol=0, atol=1e-3)


def test_units_of_inputs_and_targets_do_not_matter():
    x, y = toy()
    one = fit(2, (x, y), Gaussian(), ascent=QUICK)
    other = fit(2, (1e4 * x, 1e3 * y), Gaussian(), ascent=QUICK)
    torch.testing.assert_close(other.mean(1e4 * x) / 1e3, one.mean(x), rtol=0, atol=1e-4)


def test_a_mixture_of_fits_averages_them():
    x, y = toy()
    members = [fit(2, (x, y), Gaussian(), ascent=replace(QUICK, seed=seed)) for seed in (0, 1)]
    mean = torch.stack([member.mean(x) for member in members]).mean(0)
    torch.testing.assert_close(n2g.bayes.mixture(members).mean(x), mean)


def test_the_noise_of_each_point_is_taken_with_its_row():
    x, y = toy()
    noise = torch.full((24, 1), 0.01, dtype=torch.float64)
    ascent = replace(QUICK, batch_size=8)
    one = fit(2, (x, y), Gaussian(noise), ascent=ascent)
    other = fit(2, (x, y), Gaussian(0.01), ascent=ascent)
    torch.testing.assert_close(one.mean(x), other.mean(x))


class Killed(Exception):
    """Stands for a process that ends."""


def test_a_killed_fit_goes_on_to_the_same_result(tmp_path, monkeypatch):
    data, path = toy(), tmp_path / "fit.safetensors"
    whole = fit(2, data, Gaussian(), ascent=QUICK)
    kept = replace(QUICK, checkpoint=path, checkpoint_seconds=0.0)
    taken, step = [], loop.Climb._one

    def one(climb):
        taken.append(climb.step)
        if len(taken) == 9:
            raise Killed
        return step(climb)

    monkeypatch.setattr(loop.Climb, "_one", one)
    with pytest.raises(Killed):
        fit(2, data, Gaussian(), ascent=kept)
    taken.extend([0] * 20)
    resumed = fit(2, data, Gaussian(), ascent=kept)
    assert len(taken) < 9 + 20 + 12
    x = new_points()
    assert torch.equal(resumed.mean(x), whole.mean(x))
    assert torch.equal(resumed.log_marginal_likelihood(), whole.log_marginal_likelihood())
    with pytest.raises(InputError, match="belongs to another problem"):
        fit(2, data, Gaussian(), ascent=replace(kept, learning_rate=0.01))


def test_early_stopping_ends_a_fit_without_progress():
    ascent = Ascent(
        num_steps=200,
        num_inducing=8,
        natural_rate=1.0,
        tune=False,
        move_points=False,
        look_every=2,
        patience=2,
    )
    posterior = fit([RBF()], toy(), Gaussian(0.01), ascent=ascent)
    assert posterior.recipe.num_steps < 20


def test_bad_input_is_named():
    x, y = toy(columns=2)
    constant = x.clone()
    constant[:, 1] = 3.0
    broken = y.clone()
    broken[3] = torch.nan
    rbf = RBF()
    cases = [
        (
            {"ascent": replace(QUICK, num_inducing=25)},
            "25 inducing points, but there are only 24 distinct",
        ),
        ({"data": (constant, y)}, "column 1 of x is constant"),
        ({"data": (x, torch.ones_like(y))}, "column 0 of y is constant"),
        ({"data": (x, broken)}, "NaN"),
        ({"data": (x[:, 0], y)}, "floating tensor of shape"),
        ({"layers": []}, "a number of layers or a list"),
        ({"layers": [rbf, "rbf"]}, "a layer needs a kernel"),
        ({"layers": [SparseLayer(rbf, mean="constant"), rbf]}, "only for the last layer"),
        ({"layers": [rbf, SparseLayer(rbf, width=2)]}, "the likelihood needs 1 outputs"),
        ({"ascent": 3}, "ascent must be deep.Ascent"),
        ({"likelihood": "gaussian"}, "likelihood must be"),
    ]
    for changes, message in cases:
        asked = {"layers": 2, "data": (x, y), "likelihood": Gaussian(), "ascent": QUICK, **changes}
        layers, data, likelihood = (asked.pop(name) for name in ("layers", "data", "likelihood"))
        with pytest.raises(InputError, match=message):
            fit(layers, data, likelihood, **asked)


def test_settings_are_checked():
    for changes, message in [
        ({"num_steps": 0}, "num_steps"),
        ({"natural_rate": 1.5}, "a share of at most 1"),
        ({"starts": ("random",)}, 'a tuple of "shallow" and "linear"'),
        ({"learning_rate": -1.0}, "learning_rate"),
    ]:
        with pytest.raises(InputError, match=message):
            Ascent(**changes)
    with pytest.raises(InputError, match="mean must be"):
        SparseLayer(RBF(), mean="cubic")


def test_a_bound_that_falls_is_an_error(monkeypatch):
    monkeypatch.setattr(loop.Climb, "_one", lambda climb: torch.tensor(-float(climb.step)))
    with pytest.raises(BoundFell, match=r"the bound fell from .* Pass a smaller learning_rate"):
        fit(2, toy(), Gaussian(), ascent=replace(QUICK, look_every=5))


def test_a_bound_that_is_not_a_number_is_an_error(monkeypatch):
    estimate = loop.Stack.estimate

    def broken(stack, *arguments):
        found = estimate(stack, *arguments)
        return found._replace(bound=found.bound * torch.nan) if len(stack.plans) > 1 else found

    monkeypatch.setattr(loop.Stack, "estimate", broken)
    with pytest.raises(InputError, match="the fit diverged: the bound is nan after 0 steps"):
        fit(2, toy(), Gaussian(), ascent=QUICK)


def test_what_it_cannot_do_says_what_to_use():
    posterior = fit(2, toy(), Gaussian(), ascent=replace(QUICK, num_steps=2))
    refusals = [
        (lambda: posterior.update(toy()), "Call deep.fit with all data"),
        (lambda: posterior.sample_functions(2), r"Use posterior\.sample"),
        (lambda: posterior.mean(torch.zeros(2, 3).double()), r"shape \(N, 1\), as in the fit"),
    ]
    for refused, message in refusals:
        with pytest.raises((NotAvailable, InputError), match=message):
            refused()


def test_draws_through_three_layers_are_each_a_composition_of_functions():
    layers = [SparseLayer(RBF(), width=2), SparseLayer(RBF(), width=3), RBF()]
    posterior = fit(layers, toy(), Gaussian(), ascent=replace(QUICK, num_steps=3))
    x, inner = new_points(), posterior.process.inner
    for index, found in enumerate(posterior.process.hidden(x)):
        current = x
        for layer, values, parts in zip(inner.layers, inner.values, inner.open_parts, strict=True):
            outputs = []
            for c, factors in enumerate(layer.factors):
                K = layer.kernel(factors * current, factors * layer.points[c])
                A = K @ layer.whitener[c].mT
                rest = (layer.kernel.diag(current) - A.square().sum(1)).clamp(min=0)
                outputs.append(A @ values[index][:, c] + rest.sqrt() * parts[index][c])
            current = layer.mean(current) + layer.scale * torch.stack(outputs, 1)
        torch.testing.assert_close(found, current, rtol=0, atol=1e-6)
    means, variances = posterior.process.components(x)
    mean, covariance = posterior.process.joint(x)
    torch.testing.assert_close(mean, means.mean(0).flatten())
    total = variances.mean(0) + means.var(0, correction=0)
    torch.testing.assert_close(covariance.diagonal(), total.flatten())


@pytest.mark.parametrize("likelihood", [n2g.likelihoods.StudentT(), n2g.likelihoods.Poisson()])
def test_parts_of_the_variance_add_up_without_gaussian_noise(likelihood):
    """The points that integrate the last layer have mean 0 and variance 1."""
    x, y = toy()
    counts = torch.poisson(y[:, 0].exp(), generator=torch.Generator().manual_seed(0))
    targets = y if isinstance(likelihood, n2g.likelihoods.StudentT) else counts
    posterior = fit(2, (x, targets), likelihood, ascent=QUICK)
    split, law = posterior.split(x), posterior.predict(x)
    total = split.epistemic + split.aleatoric
    torch.testing.assert_close(total, law.variance.reshape(total.shape), rtol=0.02, atol=0)


def test_probabilities_of_classes_are_those_of_draws():
    x, y = toy(40)
    labels = (y[:, 0] > 0).long() + (y[:, 0] > 0.5).long()
    posterior = fit(2, (x, labels), n2g.Categorical(), ascent=replace(QUICK, num_draws=100))
    f = posterior.sample(x, 20_000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    torch.testing.assert_close(posterior.predict(x).probs, f.mean(0), rtol=0, atol=0.01)
    spread = posterior.split(x).epistemic
    torch.testing.assert_close(spread, f.var(0), rtol=0.2, atol=1e-3)


@pytest.mark.parametrize("mean", [1.0, 50.0, 1000.0])
def test_counts_of_any_size_can_be_fitted(mean):
    x, _ = toy(60)
    generator = torch.Generator().manual_seed(1)
    counts = torch.poisson(mean * (0.3 * x[:, 0].sin()).exp(), generator=generator)
    settings = replace(QUICK, num_steps=40, learning_rate=0.05)
    posterior = fit(2, (x, counts), n2g.likelihoods.Poisson(), ascent=settings)
    constant = torch.distributions.Poisson(counts.mean()).log_prob(counts).sum()
    assert float(posterior.log_marginal_likelihood()) > float(constant) - 20


def test_a_checkpoint_of_other_variables_is_refused(tmp_path, monkeypatch):
    settings = replace(QUICK, checkpoint=tmp_path / "fit.safetensors")
    fit(2, toy(columns=2), Gaussian(), ascent=settings)
    tensors = loop.Climb.restore

    def older(climb, prefix, found, numbers):
        kept = {name: value for name, value in found.items() if "log_scale" not in name}
        tensors(climb, prefix, kept, numbers)

    monkeypatch.setattr(loop.Climb, "restore", older)
    with pytest.raises(InputError, match="written by another version"):
        fit(2, toy(columns=2), Gaussian(), ascent=settings)
