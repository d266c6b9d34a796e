"""Random networks: what net2gp answers is right, or it refuses by name."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from fuzz.generator import draws, registered, title
from fuzz.referee import OK, REFUSED, subject
from fuzz.run import judge, summary

QUICK = 240
BATCH = 20


def assert_no_faults(seeds: range, share: float) -> None:
    results = [judge(seed, share) for seed in seeds]
    faults = [result.report() for result in results if result.faults()]
    assert not faults, "\n\n".join(faults)
    answered = [f for result in results for f in result.findings]
    refused = sum(f.verdict == REFUSED for f in answered)
    # refusals that are false would hide here
    assert refused <= 0.1 * len(answered), summary(results)


@pytest.mark.parametrize("start", range(0, QUICK, BATCH))
def test_random_networks_are_right_or_refused(start: int) -> None:
    assert_no_faults(range(start, start + BATCH), share=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 12_000, 100))
def test_many_random_networks_are_right_or_refused(start: int) -> None:
    assert_no_faults(range(start, start + 100), share=1.0)


def test_a_seed_gives_the_same_network_again() -> None:
    for seed in range(5):
        (one, right), (two, again) = subject(seed), subject(seed)
        assert repr(one.network) == repr(two.network)
        torch.testing.assert_close(right.J, again.J, rtol=0, atol=0)


def test_every_block_and_wrap_is_drawn() -> None:
    drawn: set[str] = set()
    names = {title(build) for build in registered()}
    for seed in range(2000):
        drawn.update(next(draws(seed)).ingredients)
        if names <= drawn:
            break
    assert names <= drawn


def test_the_referee_finds_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from net2gp.linear.jacobians.tangent import TangentKernel

    right = TangentKernel.diag
    monkeypatch.setattr(TangentKernel, "diag", lambda self, x: right(self, x) * (1 + 1e-7))
    found = {f.what: f.verdict for f in judge(1).findings}
    assert found["kernel.diag"] == "wrong"
    assert found["kernel(x)"] == OK


@pytest.mark.parametrize("seed", range(8))
def test_kronecker_factors_of_random_perceptrons(seed: int) -> None:
    """H of a layer is A ⊗ G / N with A = Σ aaᵀ (a 1 behind a for the bias) and G = Σ ggᵀ/noise."""
    torch.manual_seed(seed)
    sizes = torch.randint(1, 4, (4,)).tolist()
    layers = [nn.Linear(i, o, bias=seed % 2 == 0) for i, o in itertools.pairwise(sizes)]
    network = nn.Sequential(*itertools.chain(*((layer, nn.Tanh()) for layer in layers))).double()
    x, z = (torch.randn(n, sizes[0], dtype=torch.float64) for n in (sizes[-1], 4))
    y = torch.zeros(len(x), sizes[-1], dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = n2g.laplace(
            network.eval(), (x, y), n2g.Gaussian(0.1), prior_var=0.7, structure=n2g.Kron()
        )
    expected = sum(kron_variance(network, index, x, z) for index in range(0, len(network), 2))
    torch.testing.assert_close(posterior.marginal(z).variance, expected, rtol=1e-9, atol=1e-12)


def kron_variance(network: nn.Sequential, index: int, x: Tensor, z: Tensor) -> Tensor:
    """(M, C): what the layer `index` adds to the variance at z, from dense matrices."""
    a, g = inputs_and_gradients(network, index, x)
    b, h = inputs_and_gradients(network, index, z)
    A, G = a.T @ a, torch.einsum("nco,ncp->op", g, g) / 0.1
    precision = torch.kron(A, G) / len(x) + torch.eye(len(A) * len(G), dtype=x.dtype) / 0.7
    J = torch.einsum("mi,mco->mcio", b, h).flatten(2)
    return torch.einsum("mcp,pq,mcq->mc", J, torch.linalg.inv(precision), J)


def inputs_and_gradients(network: nn.Sequential, index: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's inputs (N, I), and the gradients (N, C, O) of all outputs at its own."""
    a = network[:index](x).detach()
    h = network[index](a).detach().requires_grad_()
    out = network[index + 1 :](h)
    g = [torch.autograd.grad(out[:, c].sum(), h, retain_graph=True)[0] for c in range(out.shape[1])]
    ones = torch.ones_like(a[:, :1])
    return torch.cat([a, ones], 1) if network[index].bias is not None else a, torch.stack(g, 1)
