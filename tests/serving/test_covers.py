"""Covariances of programs are those of the structures, by formulas that are slow and plain."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import Net2GPWarning
from net2gp.linear.forward.factors import Outer, jacobian
from net2gp.posteriors.weights.kron import KronCovariance
from net2gp.posteriors.weights.kron_blocks import KronRoot
from net2gp.posteriors.weights.last_layer import LastLayerFull
from net2gp.serving.programs.around import _cover, _Passes, _precise_enough
from net2gp.serving.programs.covers import head_cover, rooted_cover
from serving.programs import classifier, table


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("C", "D"), [(1, 5), (2, 70), (3, 130)])
def test_blocks_of_a_last_layer_are_quadratic_forms_of_the_features(C, D):
    P = C * D
    L = torch.linalg.cholesky(random(P, P) @ random(P, P).mT + P * torch.eye(P).double())
    covariance = LastLayerFull(L, random(P).abs() + 0.1, C, bias=False)
    sigma = (covariance.root @ covariance.root.mT).reshape(C, D, C, D)
    phi = random(4, D)
    expected = torch.einsum("bi,cidj,bj->bcd", phi, sigma, phi)
    found = head_cover(covariance, torch.float64)(phi)
    assert torch.allclose(found, expected, rtol=1e-10)
    narrow = head_cover(covariance, torch.float32)(phi)
    assert narrow.dtype == torch.float32
    assert torch.allclose(narrow.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("places", [1, 2, 6, 40])
def test_blocks_of_a_layer_are_products_of_its_turned_gradients(places, biased):
    B, C, O, I = 3, 2, 4, 5  # few places, more than inputs, and more than outputs times classes
    width = I + biased
    QA, QG = (torch.linalg.qr(random(1, n, n)).Q for n in (width, O))
    names = ("weight", "bias")[: 1 + biased]
    root = KronRoot(names, random(width).abs(), QA, QG, random(1, O, width).abs())
    one = torch.ones((), dtype=torch.float64)
    found = {"weight": Outer(random(B, 1, places, I), random(B, C, 1, O, places), one)}
    J = jacobian(root.rooted(found))
    cover = rooted_cover(KronCovariance((root,), names), names, torch.float64)
    assert torch.allclose(cover(found), J @ J.mT, rtol=1e-10)


@pytest.mark.parametrize(
    ("features", "precise"), [([2.0, -1.0, 0.5], False), ([1.0, 2.0, 2.0], True)]
)
def test_sums_are_in_float64_where_data_leave_little_of_the_prior(features, precise):
    seen = torch.tensor(
        [1.0, 2.0, 2.0], dtype=torch.float64
    )  # a feature that the data say all about
    H = torch.kron(torch.eye(3).double(), torch.outer(seen, seen))
    L = torch.linalg.cholesky(torch.eye(9).double() + 1e9 * H)
    covariance = LastLayerFull(L, torch.ones(9, dtype=torch.float64), 3, bias=False)
    linearized = n2g.linearize(classifier())
    passes = lambda phi: (None, {}, phi)
    x = torch.tensor([features, [0.5, -0.25, 4.0]])
    chosen = _precise_enough(covariance, linearized, passes, [x])
    wide, narrow = (
        _cover(covariance, linearized, dtype)({}, x).double()
        for dtype in (torch.float64, torch.float32)
    )
    assert torch.equal(chosen({}, x), wide if precise else narrow)
    assert not torch.equal(wide, narrow)


def test_a_network_in_float64_has_sums_in_float64():
    x, y, _ = table()
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        data, noise = (x.double(), y.double()), n2g.Gaussian(0.1)
        posterior = n2g.laplace(network, data, noise, structure=n2g.Kron(), prior_var=1.0)
    process = posterior.process
    passes = _Passes.of(process.linearized, process.covariance, [], x.double(), 1)
    cover = _precise_enough(process.covariance, process.linearized, passes, [x.double()])
    _, found, phi = passes(x.double())
    exact = posterior.marginal(x.double()).variance
    assert torch.allclose(cover(found, phi)[:, 0], exact, rtol=1e-10)
