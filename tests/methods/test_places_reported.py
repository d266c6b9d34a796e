"""Faults that turned up where networks with outputs at places were used."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import net2gp as n2g
from net2gp.errors import NotAvailable, NotStationary
from net2gp.methods.laplace_approximation import matching
from net2gp.posteriors.recipes.places import around_places
from net2gp.posteriors.weights import last_layer

pytestmark = pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")


@pytest.fixture(scope="module")
def pixels():
    """A network with three classes for each of 64 pixels, and its data, in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 1))
    return network.double().eval(), x, y


@pytest.mark.parametrize("structure", [n2g.structures.Full(), n2g.Kron(), n2g.Diagonal()], ids=repr)
def test_a_last_layer_takes_few_places_at_a_time(pixels, structure, monkeypatch):
    network, x, y = pixels
    options = {"structure": n2g.LastLayer(structure), "prior_var": 1.0}
    posterior = n2g.laplace(network, (x, y), n2g.Categorical(), **options)
    together = posterior.process.diagonal(x)[1]
    rows = []
    seen = last_layer.features

    def counted(linearized, part):
        phi = seen(linearized, part)
        rows.append(len(phi))
        return phi

    monkeypatch.setattr(last_layer, "features", counted)
    # room for the 64 places of two points at the most, whatever a row needs
    width = {"Full": 21, "Kron": 3 + 7, "Diagonal": 3 + 7}[type(structure).__name__]
    monkeypatch.setattr(last_layer, "CHUNK_NUMBERS", 2 * 64 * width)
    apart = posterior.process.diagonal(x)[1]
    torch.testing.assert_close(apart, together)
    assert sum(rows) == 12 * 64
    assert max(rows) <= 2 * 64
    monkeypatch.setattr(last_layer, "CHUNK_NUMBERS", 10 * width)  # a part of one point
    torch.testing.assert_close(posterior.process.diagonal(x)[1], together)


@pytest.mark.filterwarnings("default::net2gp.errors.NotStationary")
def test_a_warning_does_not_advise_the_dual_view_which_places_do_not_have(pixels):
    network, x, y = pixels
    with pytest.warns(NotStationary, match=r"The mean stays the network's\.$"):
        n2g.laplace(network, (x, y), n2g.Categorical(), structure=n2g.LastLayer(), prior_var=1.0)


def test_a_link_is_matched_by_few_draws_which_are_enough(pixels, monkeypatch):
    network, x, y = pixels
    widths = []
    products = around_places.column_products

    def counted(linearized, x, columns, size):
        widths.append(columns.shape[1])
        return products(linearized, x, columns, size)

    def scale():
        options = {"structure": n2g.Kron(), "temperature": 100.0}
        found = n2g.laplace(network, (x, y), n2g.Categorical(), prior_var=1.0, **options)
        return found.likelihood.link.scale

    monkeypatch.setattr(around_places, "column_products", counted)
    few = scale()
    assert max(widths) == 16
    monkeypatch.setattr(matching, "LINK_DRAWS", 2000)
    many = scale()
    assert many > 1.5, "at a scale of one there is nothing to match"
    assert few == pytest.approx(many, rel=0.05)


def test_a_last_layer_has_contrasts_at_places_without_whole_blocks(pixels):
    network, x, y = pixels
    options = {"structure": n2g.LastLayer(n2g.structures.Full()), "prior_var": 1e6}
    posterior = n2g.laplace(network, (x, y), n2g.Categorical(), **options)
    blocks = posterior.marginal(x).covariance_matrix
    own = blocks.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(posterior.process.diagonal(x)[1], own, rtol=1e-8, atol=0)
    top = posterior.mean(x).argmax(-1, keepdim=True)
    best = own.gather(-1, top)
    both = blocks.gather(-1, top[..., None].expand(*own.shape, 1))[..., 0]
    contrast = posterior.contrast(x)
    torch.testing.assert_close(contrast, own + best - 2 * both, rtol=1e-5, atol=1e-8)
    assert float(contrast.gather(-1, top).abs().max()) == 0


def test_some_points_of_a_stream_know_where_labels_are_ignored(pixels):
    network, x, y = pixels
    y = y.clone()
    y[:, :, :3] = -100
    known = n2g.laplace(network, (x, y), n2g.Categorical(), structure=n2g.LastLayer())
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    stream = n2g.data.Stream(loader)
    streamed = n2g.laplace(network, stream, n2g.Categorical(), structure=n2g.LastLayer())
    assert streamed.likelihood.link.scale == pytest.approx(known.likelihood.link.scale, rel=1e-10)
    torch.testing.assert_close(streamed.predict(x).probs, known.predict(x).probs)


def test_ordinary_places_do_not_count_as_novel(pixels):
    network, x, y = pixels
    posterior = n2g.laplace(network, (x, y), n2g.Categorical(), structure=n2g.LastLayer())
    generator = torch.Generator().manual_seed(7)
    fresh = torch.randn(200, 1, 8, 8, generator=generator, dtype=torch.float64)
    novel = float((posterior.process.excess(fresh) > 0).double().mean())
    assert 0 < novel < 0.005


def test_networks_with_drawn_weights_are_averaged_at_each_place(pixels):
    network, x, y = pixels
    options = {"structure": n2g.LastLayer(), "prior_var": 1.0}
    posterior = n2g.laplace(network, (x, y), n2g.Categorical(), **options)
    generator = torch.Generator().manual_seed(3)
    draws = posterior.sample(x, 7, generator=generator, linear=False)
    law = posterior.predict(x, samples=n2g.links.WeightSamples(7, seed=3))
    torch.testing.assert_close(law.probs, draws.softmax(-1).mean(0))
    numbers = n2g.laplace(network, (x, network(x).detach()), n2g.Gaussian(0.1), **options)
    drawn = numbers.predict(x, samples=n2g.links.WeightSamples(7))
    assert drawn.mean.shape == (12, 8, 8, 3)
    assert bool((drawn.variance >= 0.1 - 1e-9).all())


def test_what_places_do_not_have_says_what_to_type(pixels):
    network, x, y = pixels
    options = {"structure": n2g.LastLayer(), "prior_var": 1.0}
    posterior = n2g.laplace(network, (x, y), n2g.Categorical(), **options)
    with pytest.raises(NotAvailable, match="Take one place: laplace"):
        n2g.explain.leave_one_out(posterior)
    with pytest.raises(NotAvailable, match=r"not for places of them, but y is \(12, 8, 8\)"):
        n2g.training.train_by_evidence(network, (x, y), n2g.Categorical())
