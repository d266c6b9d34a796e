"""Predictions of regressions where inputs are novel: wider than the Gaussian over the parameters says."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from methods.laplace_cases import quietly
from net2gp import bayes, metrics
from net2gp.posteriors.recipes import seen

DOUBLE = torch.float64
STRUCTURES = {
    "full": n2g.structures.Full(),
    "function space": n2g.structures.FunctionSpace(),
    "kron": n2g.Kron(),
    "diagonal": n2g.Diagonal(),
    "low rank": n2g.structures.LowRank(10),
    "last layer": n2g.LastLayer(),
    "subnetwork": n2g.structures.Subnetwork(20),
}
GAP = torch.linspace(-0.5, 0.5, 21, dtype=DOUBLE)[:, None]


def problem(outputs: int = 1) -> tuple[Tensor, Tensor]:
    """Rows on both sides of a gap."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 1, generator=generator, dtype=DOUBLE) + 0.7
    x[::2] *= -1
    y = torch.cat([(3 * x + c).cos() for c in range(outputs)], 1)
    return x, y + 0.1 * torch.randn(y.shape, generator=generator, dtype=DOUBLE)


@cache
def trained(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, outputs)).double()
    x, y = problem(outputs)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2, weight_decay=1e-4)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimizer.step()
    return network.eval().requires_grad_(False)


@cache
def posterior_of(name: str, outputs: int = 1) -> n2g.Posterior:
    structure = STRUCTURES[name]
    return quietly(trained(outputs), problem(outputs), n2g.Gaussian(), structure=structure)


def gained(posterior: n2g.Posterior, x: Tensor) -> Tensor:
    """What predictions have beyond the Gaussian over the parameters and the noise: (N, C)."""
    narrow = posterior.marginal(x).variance + posterior.likelihood.noise_var
    return posterior.predict(x).variance - narrow


def shares(x: Tensor, new: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """The open shares of new inputs, and of training inputs that were left out, by regressions."""
    linearized = n2g.linearize(trained(outputs), only="*")
    phi = [linearized.jacobian(points).flatten(1) for points in (x, new)]
    known, asked = (J / J.norm(dim=1, keepdim=True) for J in phi)
    noise = seen.NOISE * torch.eye(known.shape[1], dtype=DOUBLE)

    def left(points: Tensor, given: Tensor) -> Tensor:
        inverse = torch.linalg.inv(given.T @ given + noise)
        return seen.NOISE * (points @ inverse * points).sum(1)

    rest = [torch.arange(len(x)) != n for n in range(len(x))]
    own = [left(known[n : n + 1], known[keep]) for n, keep in enumerate(rest)]
    return left(asked, known), torch.cat(own)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_variance_grows_with_the_square_of_the_open_share(name, outputs):
    posterior, (x, _) = posterior_of(name, outputs), problem(outputs)
    new, own = shares(x, GAP, outputs)
    ordinary = torch.maximum(torch.quantile(own, 0.9), own.square().mean().sqrt())
    size = posterior.marginal(x).variance.mean(0)
    whole = quietly(trained(outputs), (x, problem(outputs)[1]), n2g.Gaussian())
    ratio = 1.0 if name in ("last layer", "subnetwork") else whole.prior_var / posterior.prior_var
    most = ratio * posterior.process.prior_variances(GAP)
    expected = torch.minimum((new / ordinary).square()[:, None] * size, most)
    torch.testing.assert_close(gained(posterior, GAP), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", STRUCTURES)
def test_novel_inputs_gain_more_than_ordinary_ones(name):
    posterior, (x, _) = posterior_of(name), problem()
    size = posterior.marginal(x).variance.mean()
    inside = gained(posterior, x).flatten()
    # inputs that are known are less novel than when they are left out
    assert float(inside.mean()) <= float(size) * (1 + 1e-6)
    assert float(torch.quantile(inside, 0.9)) <= float(size) * (1 + 1e-6)
    assert float(inside.min()) >= 0
    middle = gained(posterior, GAP[10:11])
    assert float(middle) > 10 * float(inside.median())
    assert float(middle) > float(gained(posterior, torch.full_like(x[:1], 0.7)))


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_is_in_a_gap_is_predicted_better(name):
    posterior = posterior_of(name)
    truth = (3 * GAP).cos()
    narrow = posterior.likelihood.predict(posterior.marginal(GAP))
    assert float(metrics.gaussian_nll(posterior.predict(GAP), truth)) <= float(
        metrics.gaussian_nll(narrow, truth)
    )


def test_no_input_gains_more_than_the_prior_variance():
    given = seen.SeenPoints(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1), ordinary=1e-6)
    widening = seen.Widening(given, torch.tensor([1.0, 2.0], dtype=DOUBLE), prior_scale=3.0)
    prior = torch.tensor([[5.0, 7.0]], dtype=DOUBLE)
    assert widening.gained(torch.ones(1), prior).tolist() == [[15.0, 21.0]]
    assert widening.gained(torch.full((1,), 1e-6, dtype=DOUBLE), prior).tolist() == [[1.0, 2.0]]
    assert widening.gained(torch.zeros(1), prior).tolist() == [[0.0, 0.0]]


def test_what_is_given_or_chosen_by_the_evidence_predicts_as_it_is():
    data, known = problem(), n2g.Gaussian(noise_var=0.01)
    for options in (
        {"likelihood": known, "prior_var": 1.0},
        {"likelihood": n2g.Gaussian(), "tuning": n2g.tuning.Evidence()},
    ):
        posterior = quietly(trained(), data, **options)
        torch.testing.assert_close(gained(posterior, GAP), torch.zeros_like(GAP))
    for options in (
        {"likelihood": known},
        {"likelihood": n2g.Gaussian(), "prior_var": {"*": 1.0}},
    ):
        assert float(gained(quietly(trained(), data, **options), GAP).max()) > 0


def test_the_split_has_the_whole_variance_and_samples_that_of_the_parameters():
    posterior = posterior_of("kron", 2)
    parts = posterior.split(GAP)
    torch.testing.assert_close(parts.epistemic + parts.aleatoric, posterior.predict(GAP).variance)
    narrow = posterior.marginal(GAP).variance
    drawn = posterior.sample(GAP, 4000, generator=torch.Generator().manual_seed(0)).var(0)
    torch.testing.assert_close(drawn, narrow, rtol=0.15, atol=1e-6)


def test_another_noise_keeps_what_novel_inputs_gain():
    posterior = posterior_of("kron")
    law = posterior.predict(GAP, likelihood=n2g.Gaussian(noise_var=2.0))
    narrow = posterior.marginal(GAP).variance + 2.0
    torch.testing.assert_close(law.variance - narrow, gained(posterior, GAP))


def test_mixtures_predict_with_the_width_of_their_members():
    members = [posterior_of("kron"), posterior_of("diagonal")]
    law = bayes.mixture(members).predict(GAP)
    each = torch.stack([member.predict(GAP).variance for member in members])
    torch.testing.assert_close(law.variance, each.mean(0))


@pytest.mark.parametrize("name", STRUCTURES)
def test_it_is_saved_moved_and_tempered(name, tmp_path):
    posterior = posterior_of(name)
    posterior.save(tmp_path / "p.safetensors")
    loaded = n2g.load(tmp_path / "p.safetensors", trained())
    assert torch.equal(loaded.predict(GAP).variance, posterior.predict(GAP).variance)
    single = posterior.to(dtype=torch.float32).predict(GAP.float()).variance
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), posterior.predict(GAP).variance, rtol=0.02, atol=0)
    torch.testing.assert_close(gained(posterior.tempered(3.0), GAP), 3 * gained(posterior, GAP))


@pytest.mark.parametrize("name", [name for name in STRUCTURES if name != "function space"])
def test_streamed_data_give_the_same_width(name):
    x, y = problem()
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=13)
    structure = STRUCTURES[name]
    streamed = quietly(trained(), n2g.data.Stream(batches), n2g.Gaussian(), structure=structure)
    held = posterior_of(name).predict(GAP).variance
    torch.testing.assert_close(streamed.predict(GAP).variance, held, rtol=1e-6, atol=0)


def test_gradients_reach_the_inputs():
    posterior = posterior_of("kron")
    x = GAP[::10].clone().requires_grad_()
    torch.autograd.gradcheck(lambda x: posterior.predict(x).variance, x)


def test_large_networks_compare_features_or_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(seen, "MOST_PARAMETERS", 10)
    x, y = problem()
    posterior = quietly(trained(), (x, y), n2g.Gaussian(), structure=n2g.Kron())
    assert isinstance(posterior.process.widening.seen, seen.SeenFeatures)
    assert float(gained(posterior, GAP).min()) > 0
    network = nn.Sequential(trained(), nn.Softplus()).eval()
    posterior = quietly(network, (x, y.exp()), n2g.Gaussian(), structure=n2g.Kron())
    torch.testing.assert_close(gained(posterior, GAP), torch.zeros_like(GAP))


def test_a_few_inputs_far_from_all_others_do_not_widen_the_rest():
    light, heavy = torch.linspace(0, 1, 101), torch.cat([torch.full((99,), 0.01), torch.ones(2)])
    assert seen.edge(light) == pytest.approx(0.9)
    assert seen.edge(heavy) == pytest.approx(float(heavy.square().mean().sqrt()))
    for shares in (light, heavy):
        assert float((shares / seen.edge(shares)).square().mean()) <= 1 + 1e-6
