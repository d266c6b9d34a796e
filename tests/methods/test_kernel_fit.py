"""Kernels fitted to data, and networks beside their infinitely wide limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes
from net2gp.errors import InputError, NotAvailable
from net2gp.methods import kernel_fit
from net2gp.tuning import fit_kernel

DOUBLE = torch.float64


def table(count: int = 60, columns: int = 3) -> tuple[Tensor, Tensor]:
    """Targets that depend on the first column alone, with a tenth of noise."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, columns, generator=generator, dtype=DOUBLE)
    noise = torch.randn(count, 1, generator=generator, dtype=DOUBLE)
    return x, (2 * x[:, :1]).sin() + 0.1 * noise


def wide(columns: int = 3, outputs: int = 1) -> nn.Sequential:
    layers = nn.Linear(columns, 8), nn.ReLU(), nn.Linear(8, outputs)
    return nn.Sequential(*layers).double()


KERNELS = {
    "ntk": lambda: n2g.ntk(wide()),
    "a network": wide,
    "RBF": n2g.RBF,
}


@pytest.mark.parametrize("name", KERNELS)
def test_units_of_inputs_and_targets_do_not_matter(name):
    x, y = table(40)
    new = table(80)[0][60:]
    plain = fit_kernel(KERNELS[name](), (x, y)).predict(new)
    scales = torch.tensor([1.0, 50.0, 0.01], dtype=DOUBLE)
    offset = torch.tensor([2000.0, -3.0, 0.0], dtype=DOUBLE)
    other = fit_kernel(KERNELS[name](), (scales * x + offset, 1000 - 30 * y)).predict(
        scales * new + offset
    )
    torch.testing.assert_close(other.mean, 1000 - 30 * plain.mean, rtol=1e-3, atol=0.03)
    torch.testing.assert_close(other.variance, 900 * plain.variance, rtol=1e-2, atol=0.0)


def test_the_noise_and_the_column_that_matters_are_found():
    posterior = fit_kernel(n2g.RBF(), table(150))
    assert 0.005 < float(posterior.likelihood.noise_var) < 0.02
    lengths = posterior.process.kernel.lengthscale
    assert float(lengths[1:].min()) > 5 * float(lengths[0])


def test_the_hyper_parameters_are_most_probable():
    """No small change of a length scale or the noise has a larger evidence and prior together."""
    x, y = table(40)
    posterior = fit_kernel(n2g.RBF(), (x, y))
    kernel, mean, variance = posterior.process.kernel, y.mean(0), float(y.var(correction=0))
    units = x.std(0, correction=0)
    start = torch.cat(
        [
            (kernel.lengthscale / units).log(),
            (kernel.kernel.output_var / variance * torch.ones(1, dtype=DOUBLE)).log(),
            (torch.as_tensor(posterior.likelihood.noise_var) / variance).log().reshape(1),
        ]
    )
    priors = [kernel_fit.LENGTHSCALE] * 3 + [kernel_fit.WEIGHTS, kernel_fit.NOISE]

    def density(logs: Tensor) -> float:
        values = logs.exp()
        prior = n2g.RBF(values[:3] * units, variance * values[3])
        one = n2g.condition(prior, (x, y - mean), n2g.Gaussian(variance * float(values[4])))
        expected = torch.tensor([p.median for p in priors], dtype=DOUBLE).log()
        spreads = torch.tensor([p.spread for p in priors], dtype=DOUBLE)
        return float(
            one.log_marginal_likelihood() - 0.5 * ((logs - expected) / spreads).square().sum()
        )

    best = density(start)
    for number in range(5):
        for step in (-0.1, 0.1):
            moved = start.clone()
            moved[number] += step
            assert density(moved) < best


def test_more_points_than_asked_for_are_left_out():
    posterior = fit_kernel(n2g.RBF(), table(), num_tuned=20, num_points=30)
    assert len(posterior.x) == 30


def test_equal_points_with_other_targets_are_noise_even_if_they_are_rare():
    x, y = table(200)
    y = (2 * x[:, :1]).sin()  # no noise but at the repeated points
    again = x[:20], y[:20] + 0.3 * torch.randn(20, 1, generator=torch.Generator().manual_seed(5))
    both = torch.cat([x, again[0]]), torch.cat([y, again[1]])
    posterior = fit_kernel(n2g.RBF(), both, num_tuned=30)
    assert 0.002 < float(posterior.likelihood.noise_var) < 0.02  # 20 of 220 rows have .09
    exact = fit_kernel(n2g.RBF(), (x, y), num_tuned=30)
    assert float(exact.likelihood.noise_var) < 0.01 * float(posterior.likelihood.noise_var)


def test_targets_of_noise_alone_are_noise():
    x, _ = table(120)
    y = torch.randn(120, 1, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    posterior = fit_kernel(n2g.RBF(), (x, y), num_tuned=15)
    assert 0.5 < float(posterior.likelihood.noise_var) < 1.3


def test_the_center_moves_the_inputs():
    x, _ = table(6)
    lengths, center = torch.tensor([1.0, 2.0, 4.0]).double(), x.mean(0)
    expected = n2g.RBF()((x - center) / lengths)
    assert torch.equal(n2g.interop.kernels.Stretched(n2g.RBF(), lengths, center)(x), expected)


def test_a_constant_column_targets_without_an_axis_and_float32():
    x, y = table()
    x[:, 2] = 4.0
    plain = fit_kernel(n2g.ntk(wide()), (x, y)).predict(x[:5])
    flat = fit_kernel(n2g.ntk(wide()), (x, y[:, 0])).predict(x[:5])
    assert torch.equal(flat.mean, plain.mean)
    found = fit_kernel(n2g.ntk(wide().float()), (x.float(), y.float())).predict(x[:5].float())
    assert found.mean.dtype == torch.float32
    torch.testing.assert_close(found.mean.double(), plain.mean, rtol=1e-3, atol=1e-3)


def test_points_of_another_number_of_columns_are_refused():
    posterior = fit_kernel(n2g.RBF(), table())
    with pytest.raises(InputError, match="3 length scales"):
        posterior.predict(torch.zeros(2, 2, dtype=DOUBLE))


def test_targets_of_unlike_scales_are_warned_of():
    x, y = table()
    with pytest.warns(n2g.errors.UnequalScales):
        fit_kernel(n2g.RBF(), (x, torch.cat([y, 1000 * y], 1)))


def test_predictions_in_float32_after_to():
    x, y = table(30)
    posterior = fit_kernel(n2g.ntk(wide()), (x, y)).to(dtype=torch.float32)
    assert posterior.predict(x[:3].float()).mean.dtype == torch.float32


def test_two_targets_have_their_own_means():
    x, y = table()
    both = torch.cat([y + 5, y - 5], 1)
    posterior = fit_kernel(n2g.nngp(wide()), (x, both))
    far = posterior.predict(x[:4]).mean
    torch.testing.assert_close(far[:, 0], far[:, 1] + 10, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "change", "said"),
    [
        ("no kernel", lambda x, y: (x, y), "kernel must be"),
        (n2g.ntk(wide(5)), lambda x, y: (x, y), "cannot take inputs"),
        (n2g.RBF(), lambda x, y: ({"x": x}, y), "one floating tensor"),
        (n2g.RBF(), lambda x, y: (x, y[:, 0].long()), "real targets"),
        (n2g.RBF(), lambda x, y: (x[:1], y[:1]), "at least two points"),
        (n2g.RBF(), lambda x, y: (x, y.index_fill(0, torch.tensor(3), torch.nan)), "finite"),
    ],
)
def test_bad_input_is_named(kernel, change, said):
    with pytest.raises(InputError, match=said):
        fit_kernel(kernel, change(*table()))


def test_each_explanation_has_a_third_of_the_density():
    x, y = table()
    own = n2g.condition(n2g.RBF(), (x, y), n2g.Gaussian(0.01))
    posterior = bayes.with_limits(own)
    new, targets = table(70)
    parts = [m.predict(new).log_prob(targets) for m in posterior.process.members]
    assert len(parts) == 3
    expected = torch.stack(parts).logsumexp(0) - torch.tensor(3.0).log()
    torch.testing.assert_close(posterior.predict(new).log_prob(targets), expected)
    assert posterior.process.members[0] is own


def test_limits_are_of_the_network_that_is_given():
    x, y = table()
    own = n2g.condition(n2g.RBF(), (x, y), n2g.Gaussian(0.01))
    members = bayes.with_limits(own, wide()).process.members
    for member, limit in zip(members[1:], (n2g.nngp, n2g.ntk), strict=True):
        expected = fit_kernel(limit(wide()), (x, y)).predict(x[:5])
        torch.testing.assert_close(member.predict(x[:5]).mean, expected.mean)


def test_a_network_and_limits_of_another_one_are_saved_one_by_one(tmp_path):
    x, y = table(30)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    around = n2g.condition(n2g.linearize(network).kernel(), (x, y), n2g.Gaussian(0.01))
    wide_ones = bayes.with_limits(around, wide())
    with pytest.raises(InputError, match="Save its members"):
        n2g.save(wide_ones, tmp_path / "all.safetensors")
    for number, member in enumerate(wide_ones.process.members):
        path = tmp_path / f"{number}.safetensors"
        n2g.save(member, path)
        again = n2g.load(path, wide() if number else network)
        assert torch.equal(again.predict(x).mean, member.predict(x).mean)


def test_limits_of_classes_and_of_posteriors_without_data_are_refused():
    x, y = table()
    labels = n2g.condition(n2g.RBF(), (x, (y[:, 0] > 0).long()), n2g.Categorical())
    with pytest.raises(InputError, match="for regression"):
        bayes.with_limits(labels)
    with pytest.raises(InputError, match="takes a posterior"):
        bayes.with_limits(wide())
    stream = n2g.data.Stream([(x, y)])
    network = nn.Linear(3, 1).double()
    summed = n2g.condition(n2g.linearize(network).kernel(), stream, n2g.Gaussian(0.01))
    with pytest.raises(NotAvailable):
        bayes.with_limits(summed)
