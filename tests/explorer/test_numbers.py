"""What the page computes is what net2gp computes."""

from __future__ import annotations

import math

import pytest
import torch

import net2gp as n2g
from explorer.same_network import ACTIVATIONS, TABLES, net_of, same_network
from net2gp.limits import activation_of

X = torch.tensor([-2.7, -1.9, -0.6, 0.0, 0.45, 0.5, 1.3, 2.8], dtype=torch.float64)
Y = torch.tensor([0.4, 1.1, -0.9, 0.2, 0.5, 0.6, 1.4, -0.3], dtype=torch.float64)
NEW = torch.tensor([-3.0, -1.2, 0.1, 0.47, 2.2, 3.0], dtype=torch.float64)
NOISE = 0.02

NETS = [
    *(net_of(name, 2) for name in ACTIVATIONS),
    *(net_of(name, 5, norm=True, skip=True) for name in ("relu", "erf", "gelu", "tanh", "silu")),
    net_of("relu", 8, skip=True),
    net_of("tanh", 1, weightVar=4.0),
    net_of("tanh", 6, weightVar=1.3, biasVar=0.0),
    net_of("sin", 3, norm=True),
]


def named(net: dict) -> str:
    flags = [flag for flag in ("norm", "skip") if net[flag]]
    return "-".join([net["activation"], str(net["depth"]), *flags])


def tolerance(net: dict) -> float:
    """Relative to the largest entry: closed forms to 1e-9, tables in float32 to 1e-4."""
    return 1e-4 if net["activation"] in TABLES else 1e-9


def limit(net: dict) -> n2g.limits.InfiniteWidth:
    variances = {"weight_var": net["weightVar"], "bias_var": net["biasVar"]}
    return n2g.infinite_width(same_network(net), **variances)


def column(x: torch.Tensor) -> torch.Tensor:
    return x[:, None]


def close(found: object, expected: torch.Tensor, tol: float) -> None:
    found = torch.tensor(found, dtype=torch.float64).reshape(expected.shape)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=tol * scale)


@pytest.mark.parametrize("net", NETS, ids=named)
def test_kernels_of_infinite_networks(tab, net) -> None:
    script = """([net, x, z]) => {
        const one = diagonals(net, Float64Array.from(x)), two = diagonals(net, Float64Array.from(z));
        const gram = gramKernels(net, one), cross = crossKernels(net, two, one);
        return [gram.nngp, gram.ntk, cross.nngp, cross.ntk].map((part) => Array.from(part));
    }"""
    found = tab.evaluate(script, [net, X.tolist(), NEW.tolist()])
    both = limit(net)
    expected = [*both(column(X)), *both(column(NEW), column(X))]
    for part, right in zip(found, expected, strict=True):
        close(part, right, tolerance(net))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_expectations_over_the_range_of_variances(tab, name) -> None:
    rho = torch.tensor([-0.99, -0.4, 0.0, 0.7, 0.99, 0.9999], dtype=torch.float64)
    p, ratio = torch.tensor([0.02, 0.5, 3.0, 13.0]).double(), torch.tensor([1.0, 1.3, 3.0]).double()
    cov, one, two = torch.broadcast_tensors(
        rho[:, None, None] * p[:, None] * ratio.sqrt(), p[:, None], p[:, None] * ratio
    )
    triples = torch.stack([cov, one, two], -1).reshape(-1, 3)
    found = tab.evaluate(
        """([name, triples]) => triples.map(([k, p, q]) => {
            const out = [0, 0];
            ACTIVATIONS[name].dual(k, p, q, out);
            return out;
        })""",
        [name, triples.tolist()],
    )
    phi = activation_of(ACTIVATIONS[name])
    value, slope = phi.dual(*triples.T, True)
    norms = [phi.variance(triples[:, i], True) for i in (1, 2)]
    for part, right, sizes in zip((0, 1), (value, slope), zip(*norms, strict=True), strict=True):
        error = torch.tensor(found, dtype=torch.float64)[:, part] - right
        bound = 1e-4 if name in TABLES else 1e-12
        assert float((error.abs() / (sizes[0] * sizes[1]).sqrt()).max()) < bound


@pytest.mark.parametrize("net", [NETS[i] for i in (0, 4, 8, 13, 15)], ids=named)
@pytest.mark.parametrize("kind", ["nngp", "ntk"])
def test_posterior_and_evidence(tab, net, kind) -> None:
    script = """([net, kind, x, y, z, noise]) => {
        const one = diagonals(net, Float64Array.from(x)), two = diagonals(net, Float64Array.from(z));
        const gram = gramKernels(net, one)[kind], cross = crossKernels(net, two, one)[kind];
        const found = regress(gram, cross, two[kind], y, noise);
        const evidences = [found.evidence, logEvidence(gram, y, noise)];
        return [Array.from(found.mean), Array.from(found.variance), ...evidences];
    }"""
    mean, variance, evidence, again = tab.evaluate(
        script, [net, kind, X.tolist(), Y.tolist(), NEW.tolist(), NOISE]
    )
    kernel = getattr(limit(net), kind)
    posterior = n2g.condition(kernel, (column(X), column(Y)), n2g.Gaussian(NOISE))
    law = posterior.marginal(column(NEW))
    # a float32 table shifts the kernel by parts in 1e7, and the noise decides what that does to a mean
    loose = 20 if net["activation"] in TABLES else 1
    close(mean, law.mean[:, 0], loose * tolerance(net))
    prior = float(kernel.diag(column(NEW)).max())
    difference = torch.tensor(variance, dtype=torch.float64) - law.variance[:, 0]
    assert float(difference.abs().max()) < tolerance(net) * prior
    right = float(posterior.log_marginal_likelihood())
    assert math.isclose(evidence, right, rel_tol=loose * tolerance(net))
    assert again == evidence


def test_functions_are_drawn_from_the_posterior(tab) -> None:
    script = """([net, x, y, z, noise, draws]) => {
        const one = diagonals(net, Float64Array.from(x)), two = diagonals(net, Float64Array.from(z));
        const cross = crossKernels(net, two, one).nngp;
        const law = regress(gramKernels(net, one).nngp, cross, two.nngp, y, noise), normal = makeNormals(3);
        const normals = Array.from({ length: draws }, () => Float64Array.from(z, normal));
        const functions = drawFunctions(gramKernels(net, two).nngp, law.whitened, law.mean, normals);
        return functions.map((f) => Array.from(f));
    }"""
    net, draws = net_of("gelu"), 4000
    found = tab.evaluate(script, [net, X.tolist(), Y.tolist(), NEW.tolist(), NOISE, draws])
    functions = torch.tensor(found, dtype=torch.float64)
    data = column(X), column(Y)
    law = n2g.condition(limit(net).nngp, data, n2g.Gaussian(NOISE)).joint(column(NEW))
    scale = law.variance.sqrt()
    assert float(((functions.mean(0) - law.mean) / scale).abs().max()) < 5 / math.sqrt(draws)
    gap = (functions.T.cov() - law.covariance_matrix) / scale[:, None] / scale
    assert float(gap.abs().max()) < 8 / math.sqrt(draws)
