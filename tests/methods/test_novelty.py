"""What `laplace` of labels notes of its training inputs, and what its predictions make of it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.errors import InputError, Net2GPWarning, TuningAtEdge
from net2gp.methods.laplace_approximation.held_out import (
    LARGEST_VARIANCE,
    WEIGHTS,
    HeldOut,
    with_weight,
)
from net2gp.methods.laplace_approximation.task import make_task
from net2gp.posteriors.recipes import seen


def data(count: int = 60) -> tuple[Tensor, Tensor]:
    """Two clusters of points, and their labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    x = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return x + 4.0 * labels[:, None], labels


def classifier(outputs: int = 2) -> nn.Sequential:
    """A network that is sure of both clusters."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs)).double()
    x, y = data()
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    for _ in range(100):
        optimizer.zero_grad()
        logits = network(x)
        if outputs == 1:
            loss = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], y.double())
        else:
            loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
    return network.eval()


FAR = torch.tensor([[-9.0, 9.0], [9.0, -9.0]], dtype=torch.float64)
STRUCTURES = {"kron": n2g.Kron(), "last layer": n2g.LastLayer(), "full": n2g.structures.Full()}


def posterior_of(structure: object) -> n2g.Posterior:
    return n2g.laplace(classifier(), data(), n2g.Categorical(), structure=structure)


def quiet(network, given, likelihood, structure) -> n2g.Posterior:
    """The posterior of a network that was not trained; those of numpy are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        warnings.simplefilter("error", RuntimeWarning)
        return n2g.laplace(network.eval(), given, likelihood, structure=structure)


def test_gradients_that_are_held_give_the_kernel_averaged_over_outputs():
    kernel, x = n2g.linearize(classifier(3)).trace_kernel(), data()[0]
    cross, own = kernel.keep(x)(FAR)
    torch.testing.assert_close(cross, kernel(x, FAR))
    torch.testing.assert_close(own, kernel(FAR).diagonal()[:, None, None])


def test_features_of_the_last_layer_leave_the_share_of_a_linear_model(monkeypatch):
    monkeypatch.setattr(seen, "MOST_PARAMETERS", 10)
    posterior, x = posterior_of(n2g.LastLayer()), data()[0]
    known, new = (posterior.linearized.jacobian(points)[:, 0, :] for points in (x, FAR))
    known, new = (J[:, J.abs().sum(0) > 0] for J in (known, new))  # the rows of the first output
    noise = seen.NOISE * known.square().sum(1).mean()
    H = known.T @ known + noise * torch.eye(known.shape[1], dtype=known.dtype)
    left = noise * (new @ torch.linalg.solve(H, new.T)).diagonal()
    torch.testing.assert_close(posterior.novelty(FAR), left / new.square().sum(1))


def test_the_ordinary_share_is_the_quantile_of_refits_without_each_point(monkeypatch):
    x, y = data(30)
    for structure in (n2g.Kron(), n2g.LastLayer()):
        if isinstance(structure, n2g.LastLayer):
            monkeypatch.setattr(seen, "MOST_PARAMETERS", 10)
        posterior = n2g.laplace(classifier(), (x, y), n2g.Categorical(), structure=structure)
        linearized, own = posterior.linearized, []
        J = linearized.jacobian(x)
        if isinstance(structure, n2g.LastLayer):
            phi = J[:, 0, J[:, 0].abs().sum(0) > 0]
            noise = seen.NOISE * phi.square().sum(1).mean()
        else:
            phi = J.flatten(1) / J.flatten(1).norm(dim=1, keepdim=True)
            noise = torch.tensor(seen.NOISE, dtype=torch.float64)
        for left_out in range(len(x)):
            others = phi[torch.arange(len(x)) != left_out]
            H = others.T @ others + noise * torch.eye(phi.shape[1], dtype=phi.dtype)
            one = phi[left_out]
            own.append(noise * (one @ torch.linalg.solve(H, one)) / one.square().sum())
        expected = float(torch.quantile(torch.stack(own), seen.ORDINARY))
        assert posterior.process.seen.ordinary == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", STRUCTURES)
def test_predictions_lose_their_certainty_where_nothing_was_seen(name):
    posterior = posterior_of(STRUCTURES[name])
    near, far = (posterior.predict(x).probs.amax(1) for x in (data()[0], FAR))
    assert float(near.median()) > 0.9
    alone = classifier()(FAR).detach().softmax(1).amax(1)
    assert bool((far < alone).all())
    assert float(posterior.novelty(FAR).min()) > posterior.process.seen.ordinary


@pytest.mark.parametrize("name", STRUCTURES)
def test_ordinary_points_are_predicted_as_without_novelty(name):
    posterior, (x, _) = posterior_of(STRUCTURES[name]), data()
    ordinary = x[posterior.novelty(x) <= posterior.process.seen.ordinary]
    assert len(ordinary) > 50
    link = replace(posterior.likelihood.link, novelty_var=0.0)
    plain = posterior.predict(ordinary, likelihood=n2g.Categorical(link))
    torch.testing.assert_close(posterior.predict(ordinary).probs, plain.probs)


def test_one_logit_gains_the_same_variance_as_its_split_shows():
    posterior = n2g.laplace(classifier(1), data(), n2g.Bernoulli(), structure=n2g.Kron())
    link = posterior.likelihood.link
    excess = posterior.novelty(FAR) / posterior.process.seen.ordinary - 1
    assert bool((excess > 0).all())
    law = posterior.marginal(FAR)
    expected = link.shrink(law.mean, law.variance + link.novelty_var * excess[:, None]).sigmoid()
    torch.testing.assert_close(posterior.predict(FAR).mean, expected)
    parts = posterior.split(FAR).epistemic
    p = law.mean.sigmoid()
    slope = p * (1 - p)
    variance = law.variance + link.novelty_var * excess[:, None]
    torch.testing.assert_close(parts, slope.square() * variance)


def test_a_link_of_ones_own_sees_no_novelty():
    posterior = posterior_of(n2g.Kron())
    own = n2g.Categorical(n2g.links.Probit())
    law = posterior.marginal(FAR)
    expected = own.link.shrink(law.mean, law.variance).softmax(1)
    torch.testing.assert_close(posterior.predict(FAR, likelihood=own).probs, expected)


def test_what_was_seen_is_saved_moved_and_tempered(tmp_path):
    for structure in (n2g.Kron(), n2g.LastLayer()):
        posterior = posterior_of(structure)
        posterior.save(tmp_path / "p.safetensors")
        loaded = n2g.load(tmp_path / "p.safetensors", classifier())
        assert torch.equal(loaded.novelty(FAR), posterior.novelty(FAR))
        assert torch.equal(loaded.predict(FAR).probs, posterior.predict(FAR).probs)
        single = posterior.to(dtype=torch.float32).novelty(FAR.float())
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), posterior.novelty(FAR), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(posterior.tempered(3.0).novelty(FAR), posterior.novelty(FAR))


def test_the_last_layer_of_a_small_network_has_the_novelty_of_the_whole_network():
    last, whole = posterior_of(n2g.LastLayer()), posterior_of(n2g.structures.Full())
    torch.testing.assert_close(last.novelty(FAR), whole.novelty(FAR))
    assert last.process.seen.ordinary == pytest.approx(whole.process.seen.ordinary)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", STRUCTURES)
def test_no_prediction_is_surer_than_the_network(name, outputs):
    network, (x, y) = classifier(outputs), data()
    likelihood = n2g.Bernoulli() if outputs == 1 else n2g.Categorical()
    posterior = n2g.laplace(network, (x, y), likelihood, structure=STRUCTURES[name])
    assert posterior.likelihood.link.cautious
    points = torch.cat([x, FAR, 3 * torch.randn(200, 2, dtype=torch.float64)])
    alone, found = network(points).detach(), posterior.predict(points).logits
    if outputs == 1:
        assert bool((found.abs() <= alone.abs() * (1 + 1e-9)).all())
        return
    assert torch.equal(found.argmax(1), alone.argmax(1))
    most, allowed = found.softmax(1).amax(1), alone.softmax(1).amax(1)
    assert bool((most <= allowed + 1e-9).all())
    # some are as sure: the scale of the link alone would have made these surer
    bold = replace(posterior.likelihood.link, cautious=False)
    surer = (
        posterior.predict(points, likelihood=n2g.Categorical(bold)).probs.amax(1) > allowed + 1e-6
    )
    assert bool(surer.any())
    torch.testing.assert_close(most[surer].amax(), allowed[surer].amax())


def test_held_out_labels_may_make_predictions_surer_than_the_network():
    x, y = data()
    weak = classifier()
    for value in weak[2].parameters():  # classes stay what they are, and are as good as unknown
        value.data *= 0.1
    held_out = y.clone()
    held_out[0] = 1 - y[0]  # without a miss labels do not say how sure to be
    tuning = n2g.tuning.Validation((x, held_out))
    with pytest.warns(n2g.errors.NotStationary):
        posterior = n2g.laplace(
            weak, (x, y), n2g.Categorical(), structure=n2g.structures.Full(), tuning=tuning
        )
    alone = weak(x).detach().softmax(1).amax(1)
    assert float(posterior.predict(x).probs.amax(1).mean()) > float(alone.mean())


def test_large_networks_compare_features_of_their_last_layer(monkeypatch):
    monkeypatch.setattr(seen, "MOST_PARAMETERS", 10)
    posterior = posterior_of(n2g.Kron())
    torch.testing.assert_close(posterior.novelty(FAR), posterior_of(n2g.LastLayer()).novelty(FAR))
    assert isinstance(posterior.process.seen, seen.SeenFeatures)


def test_large_networks_without_a_last_layer_keep_what_the_variance_says(monkeypatch):
    monkeypatch.setattr(seen, "MOST_PARAMETERS", 1)
    x, y = data()
    network = nn.Sequential(classifier(), nn.Softplus()).eval()
    posterior = n2g.laplace(network, (x, y), n2g.Categorical(), structure=n2g.Kron())
    assert posterior.process.seen is None
    variances = posterior.marginal(FAR).variance.sum(1)
    torch.testing.assert_close(
        posterior.novelty(FAR), variances / posterior.process.prior_variances(FAR).sum(1)
    )


def test_a_variance_of_novel_points_is_not_negative():
    with pytest.raises(n2g.errors.InputError, match="novelty_var must be"):
        n2g.links.Contrast(novelty_var=-1.0)


def test_gradients_reach_novel_points():
    posterior = posterior_of(n2g.Kron())
    x = FAR.clone().requires_grad_()
    torch.autograd.gradcheck(posterior.novelty, x)
    torch.autograd.gradcheck(lambda x: posterior.predict(x).logits, x)


def held_out(count: int = 40) -> tuple[Tensor, Tensor]:
    """Other points of the same clusters, whose labels are less certain than the network thinks."""
    generator = torch.Generator().manual_seed(1)
    x, y = data(count)
    noisy = torch.rand(count, generator=generator) < 0.2
    return x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype), torch.where(
        noisy, 1 - y, y
    )


@pytest.mark.parametrize("name", STRUCTURES)
def test_held_out_labels_are_predicted_no_worse_than_by_a_temperature(name):
    x, y = held_out()
    tuning = n2g.tuning.Validation((x, y))
    posterior = n2g.laplace(
        classifier(), data(), n2g.Categorical(), structure=STRUCTURES[name], tuning=tuning
    )
    logits = classifier()(x).detach()
    losses = [
        nn.functional.cross_entropy(scale * logits, y) for scale in torch.logspace(-3, 1, 400)
    ]
    found = nn.functional.cross_entropy(posterior.predict(x).logits, y, reduction="none")
    error = found.std() / len(y) ** 0.5  # what caution may cost
    assert float(found.mean()) <= float(torch.stack(losses).min()) + float(error)
    plain = replace(
        posterior, likelihood=n2g.Categorical(n2g.links.Contrast(posterior.likelihood.link.scale))
    )
    assert float(posterior.predict(FAR).probs.amax()) < float(plain.predict(FAR).probs.amax())


@pytest.mark.parametrize("structure", [*STRUCTURES.values(), n2g.FunctionSpace(num_points=55)])
@pytest.mark.parametrize("outputs", [2, 1])
def test_held_out_labels_that_are_all_right_leave_the_link_to_the_training_data(structure, outputs):
    network = classifier(outputs)
    likelihood = n2g.Categorical() if outputs == 2 else n2g.Bernoulli()
    known = data() if outputs == 2 else (data()[0], data()[1][:, None].double())
    x = held_out()[0]
    right = network(x).argmax(1) if outputs == 2 else (network(x) > 0).double()
    expected = n2g.laplace(network, known, likelihood, structure=structure, prior_var=1.0)
    for given in ((x, right), n2g.data.Stream((x, right))):
        tuning = n2g.tuning.Validation(given, grid=(1.0,))
        with pytest.warns(TuningAtEdge, match=r"all held-out labels are .* Hold out more data"):
            found = n2g.laplace(network, known, likelihood, structure=structure, tuning=tuning)
        for name in ("scale", "novelty_var"):
            one, other = (getattr(p.likelihood.link, name) for p in (found, expected))
            assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("grid", [(), 1.0, "1", (0.0, 1.0), (-1.0,), (float("nan"),), ("a",)])
def test_a_grid_holds_prior_variances(grid):
    with pytest.raises(InputError, match=r"grid must be"):
        n2g.tuning.Validation(held_out(), grid)


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_held_out_labels_choose_the_largest_share_that_costs_nothing_beside_a_temperature(right):
    far = 6 * torch.randn(20, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    told = classifier()(far).argmax(1)
    x, y = torch.cat([held_out()[0], far]), torch.cat([held_out()[1], told if right else 1 - told])
    one = n2g.laplace(classifier(), data(), n2g.Categorical(), structure=n2g.Kron())
    whole = one.likelihood.link.novelty_var / one.likelihood.link.scale**2
    task, _ = make_task(classifier(), data(), n2g.Categorical())
    found = with_weight(one, HeldOut(task, (x, y)))
    chosen = found.likelihood.link
    mean, variances = one.process.contrast(x)
    excess = one.process.excess(x)[:, None]
    top = max(0.0, float((LARGEST_VARIANCE / variances.mean()).log10()))
    scales = torch.logspace(-1, 2, 400, dtype=torch.float64)[:, None, None, None]
    spreads = torch.logspace(0, top, 40, dtype=torch.float64)[:, None, None]
    distance = mean - mean.max(1, keepdim=True).values

    def loss(scale: Tensor, spread: Tensor, weight: float) -> Tensor:
        v = spread * variances + 2 * weight * whole * scale**2 * excess
        logits = scale * distance / (1 + torch.pi / 8 * v).sqrt()
        told = y[:, None].expand(*logits.shape[:-1], 1)
        return -logits.log_softmax(-1).gather(-1, told)[..., 0].mean(-1)

    alone = float(loss(scales, torch.zeros(1, 1), 0.0).min())
    best = {weight: float(loss(scales, spreads, weight).min()) for weight in WEIGHTS}
    # the grid is a little coarser than the search
    allowed = [weight for weight, least in best.items() if least <= max(alone, best[0.0]) + 1e-4]
    weight = chosen.novelty_var * chosen.spread / (whole * chosen.scale**2)
    assert weight == pytest.approx(allowed[0])
    law = found.predict(x).log_prob(y).mean()
    assert -float(law) <= best[allowed[0]] + 1e-6


def test_a_stream_of_batches_is_seen_as_its_points_together():
    x, y = data()
    pairs = [(x[start : start + 7], y[start : start + 7]) for start in range(0, len(x), 7)]
    for structure in (n2g.Kron(), n2g.LastLayer()):
        for tuning in (None, n2g.tuning.Validation(held_out())):
            options = {"structure": structure, "tuning": tuning}
            whole = n2g.laplace(classifier(), (x, y), n2g.Categorical(), **options)
            parts = n2g.laplace(classifier(), n2g.data.Stream(pairs), n2g.Categorical(), **options)
            assert parts.x is None
            torch.testing.assert_close(parts.novelty(FAR), whole.novelty(FAR), rtol=1e-9, atol=0)
            torch.testing.assert_close(parts.predict(FAR).probs, whole.predict(FAR).probs)


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_points_whose_squares_overflow_have_no_prediction_and_no_novelty(structure):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.LeakyReLU(), nn.Linear(4, 2)).double()
    y = network(data()[0]).argmax(1)
    wide = quiet(network, (data()[0], y), n2g.Categorical(), structure)
    posterior = wide.to(dtype=torch.float32)
    x = torch.tensor([[1.0, 0.0], [1e25, 0.0]])
    for call in (posterior.predict, posterior.novelty, posterior.split):
        with pytest.raises(InputError, match=r"at 1 of 2 points \(first in row 1\): x, or outputs"):
            call(x)
    assert wide.predict(x.double()).probs.isfinite().all()
    assert wide.novelty(x.double()).isfinite().all()


def test_a_regression_is_not_called_familiar_where_its_variance_overflows():
    x, network = data()[0].float(), nn.Linear(2, 1)
    y = network(x).detach()
    posterior = quiet(network, (x, y), n2g.Gaussian(0.1), n2g.Kron())
    for call in (posterior.predict, posterior.novelty, posterior.split):
        with pytest.raises(InputError, match=r"or use posterior.to\(dtype=torch.float64\)"):
            call(1e30 * x[:2])


def test_a_network_of_zeros_has_a_posterior_without_warnings_of_numpy():
    network = classifier()
    for value in network.parameters():
        nn.init.zeros_(value)
    posterior = quiet(network, data(), n2g.Categorical(), n2g.Kron())
    torch.testing.assert_close(posterior.predict(FAR).probs, torch.full((2, 2), 0.5).double())
