"""`Kron()` where parameters have no factors: a matrix each, only their variances, or refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from architectures import Apply, parameter
from net2gp.errors import InputError, Net2GPWarning, NetworkError
from net2gp.linear.curvatures import curvature
from net2gp.linear.curvatures.curvature import Source, diagonal_curvature
from net2gp.linear.forward.factors import Direct, Lookup, jacobian, sum_of_squares
from net2gp.linear.jacobians.capture import capture
from net2gp.linear.linearized import expand_prior
from net2gp.linear.planning.probe import demote
from net2gp.methods.laplace_approximation.task import make_task
from net2gp.posteriors.weights import Task, kron
from net2gp.posteriors.weights.kron_blocks import DiagonalBlock, KronBlock, TableBlock

N = 10


class Embedded(nn.Module):
    """Two embeddings and a gain in front of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(11, 4), nn.Embedding(3, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.word(ids) + self.place(torch.arange(ids.shape[1]).expand(ids.shape))
        return self.head(self.norm(h).tanh().mean(1))


class Indexed(Embedded):
    """The same with tables that are bare parameters, which have no factors."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Parameter(self.word.weight.detach())  # type: ignore[assignment]
        self.place = nn.Parameter(self.place.weight.detach())  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        h = self.word[ids] + self.place[torch.arange(ids.shape[1])]
        return self.head(self.norm(h).tanh().mean(1))


def case(kind: type[nn.Module] = Embedded) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return kind().double().eval(), torch.randint(0, 11, (N, 3)), torch.arange(N) % 2


def fitted(network, data, likelihood=None, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        return n2g.laplace(
            network, data, likelihood or n2g.Categorical(n2g.links.Probit()), **settings
        )


def reference(linearized, posterior, x: Tensor) -> Tensor:
    """Variances by the matrix of all parameters: Kronecker blocks as found, diagonals where asked for."""
    f = linearized(posterior.x).double()
    task = Task(linearized, posterior.x, posterior.y, posterior.likelihood, f)
    blocks = n2g.Kron(rest=n2g.Diagonal()).curvature(task).blocks
    P, order = linearized.num_params, list(linearized.params)
    sizes = {name: value.numel() for name, value in linearized.params.items()}
    start = {name: sum(sizes[n] for n in order[:i]) for i, name in enumerate(order)}
    H = torch.zeros(P, P, dtype=torch.float64)
    for block in blocks:
        index = torch.cat([torch.arange(start[n], start[n] + sizes[n]) for n in block.names])
        if isinstance(block, KronBlock):
            I, O = block.A.shape[-1], block.G.shape[-1]
            full = torch.kron(block.G[0], block.A[0]) / block.places  # index o·I + i
            where = torch.arange(O * I).reshape(O, I)
            order_ = torch.cat([where[:, :-1].reshape(-1), where[:, -1]])  # the bias behind
            part = full[order_][:, order_]
        elif isinstance(block, DiagonalBlock):
            part = torch.diag(block.diagonal)
        elif isinstance(block, TableBlock):
            part = torch.kron(torch.diag(block.counts), block.G) / block.places
        else:
            part = block.H
        H[index[:, None], index] = part
    Sigma = torch.linalg.inv(torch.eye(P).double() / 0.7 + H)
    J = linearized.jacobian(x)
    return torch.einsum("ncp,pq,ndq->ncd", J, Sigma, J)


@pytest.mark.parametrize("kind", [Embedded, Indexed])
@pytest.mark.parametrize("limit", [0, 12, 4096])
def test_it_is_the_inverse_of_the_blocks(limit: int, kind, monkeypatch) -> None:
    monkeypatch.setattr(kron, "DENSE_BLOCK", limit)
    network, x, y = case(kind)
    posterior = fitted(network, (x, y), prior_var=0.7, structure=n2g.Kron(rest=n2g.Diagonal()))
    expected = reference(n2g.linearize(network), posterior, x[:4])
    torch.testing.assert_close(posterior.marginal(x[:4]).covariance_matrix, expected)
    torch.testing.assert_close(
        posterior.joint(x[:1]).covariance_matrix, posterior.marginal(x[:1]).covariance_matrix[0]
    )


@pytest.mark.parametrize("kind", [Embedded, Indexed])
def test_draws_have_the_variances(kind, monkeypatch) -> None:
    monkeypatch.setattr(kron, "DENSE_BLOCK", 12)
    network, x, y = case(kind)
    posterior = fitted(network, (x, y), prior_var=0.7, structure=n2g.Kron(rest=n2g.Diagonal()))
    draws = posterior.sample(x, 4000, generator=torch.Generator().manual_seed(0))
    law = posterior.marginal(x)
    torch.testing.assert_close(draws.var(0), law.variance, rtol=0.15, atol=0.0)


def test_a_diagonal_of_all_is_the_diagonal(monkeypatch) -> None:
    """With nothing but bare parameters the rest is `Diagonal()` itself."""
    monkeypatch.setattr(kron, "DENSE_BLOCK", 0)
    torch.manual_seed(0)
    network = Apply(lambda self, ids: self.table[ids].tanh().flatten(1), table=parameter(11, 2))
    network = network.double().eval()
    x, y = torch.randint(0, 11, (N, 1)), torch.arange(N) % 2
    ours = fitted(network, (x, y), prior_var=0.7, structure=n2g.Kron(rest=n2g.Diagonal()))
    plain = fitted(network, (x, y), prior_var=0.7, structure=n2g.Diagonal())
    torch.testing.assert_close(ours.marginal(x).variance, plain.marginal(x).variance)
    torch.testing.assert_close(ours.evidence, plain.evidence)


def test_small_embeddings_keep_a_matrix() -> None:
    network, x, y = case()
    posterior = fitted(network, (x, y), prior_var=0.7, structure=n2g.Kron())
    expected = reference(n2g.linearize(network), posterior, x)
    torch.testing.assert_close(posterior.marginal(x).covariance_matrix, expected)


def test_all_parameters_without_factors_are_named_at_once(monkeypatch) -> None:
    monkeypatch.setattr(kron, "DENSE_BLOCK", 10)
    network, x, y = case(Indexed)
    message = (
        r"no factors for 'word' \(44 entries\), 'place' \(12 entries\): .*"
        r"Kron\(rest=Diagonal\(\)\).*only=\['\*', '!word', '!place'\]"
    )
    with pytest.raises(NetworkError, match=message):
        fitted(network, (x, y), prior_var=1.0, structure=n2g.Kron())
    advised = ["*", "!word", "!place"]
    posterior = fitted(network, (x, y), prior_var=1.0, structure=n2g.Kron(), only=advised)
    assert posterior.predict(x).probs.shape == (N, 2)


def test_rest_takes_no_other_structure() -> None:
    with pytest.raises(InputError, match=r"rest must be Diagonal\(\) or None, but is an object of"):
        n2g.Kron(rest=n2g.Full())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"rest takes the fisher of Kron\(\) itself"):
        n2g.Kron(rest=n2g.Diagonal(n2g.structures.EmpiricalFisher()))


@pytest.mark.parametrize("kind", [Embedded, Indexed])
def test_it_is_saved(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kron, "DENSE_BLOCK", 12)
    network, x, y = case(kind)
    posterior = fitted(network, (x, y), prior_var=0.7, structure=n2g.Kron(rest=n2g.Diagonal()))
    n2g.save(posterior, tmp_path / "posterior.safetensors")
    again = n2g.load(tmp_path / "posterior.safetensors", kind().double().eval())
    assert again.structure == n2g.Kron(rest=n2g.Diagonal())
    assert torch.equal(again.marginal(x).variance, posterior.marginal(x).variance)


def test_the_sum_of_squares_of_an_embedding_needs_no_jacobian() -> None:
    torch.manual_seed(0)
    ids = torch.randint(-1, 5, (4, 6))
    factor = Lookup(ids, torch.randn(4, 3, 6, 2).double(), torch.tensor(1.5).double(), 5)
    torch.testing.assert_close(sum_of_squares(factor), jacobian(factor).square().sum((0, 1)))


def test_diagonals_of_embeddings_are_those_of_the_jacobian() -> None:
    network, x, y = case()
    linearized = n2g.linearize(network)
    likelihood = n2g.Categorical()
    found = diagonal_curvature(Source(linearized, x, y, likelihood))
    J, L = linearized.jacobian(x), likelihood.curvature(linearized(x))
    torch.testing.assert_close(found, torch.einsum("ncp,ncd,ndp->p", J, L, J))


@pytest.mark.parametrize("structure", [n2g.Kron(), n2g.structures.Subnetwork(20)])
def test_determinants_by_eigenvalues_are_those_by_a_factor(structure) -> None:
    """A search takes eigenvalues once, and one evaluation a Cholesky factor."""
    network, x, y = case()
    task, _ = make_task(network, (x, y), n2g.Categorical(), structure)
    curvature = structure.curvature(task)
    once = curvature.log_det(expand_prior(0.7, task.params), 1.3)
    searched = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    found = curvature.log_det(dict.fromkeys(task.params, searched), 1.3)
    torch.testing.assert_close(found, once)
    (slope,) = torch.autograd.grad(found, searched)
    step = 1e-6
    ends = [curvature.log_det(expand_prior(0.7 + s, task.params), 1.3) for s in (step, -step)]
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-6)


def test_a_layer_that_loses_its_factors_on_the_way_loses_them_for_all_points(monkeypatch) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double().eval()
    x, y = torch.randn(12, 2, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)

    def found(linearized):
        task = Task(linearized, x, y, n2g.Gaussian(1.0), linearized(x))
        return n2g.Kron().curvature(task).blocks

    known = n2g.linearize(network)
    demote(known, ["0.weight"])
    wanted = {block.names: block for block in found(known)}

    calls = []

    def late(linearized, part, layout, seeds, *, compress):
        calls.append(len(part))
        factors = capture(linearized, part, layout, seeds, compress=compress)
        if len(calls) == 2:
            demote(linearized, ["0.weight"])
            factors["0.weight"] = Direct(jacobian(factors["0.weight"]))
        return factors

    monkeypatch.setattr(curvature, "chunk_size", lambda linearized, layout: 5)
    monkeypatch.setattr(curvature, "capture", late)
    blocks = {block.names: block for block in found(n2g.linearize(network))}
    assert calls == [5, 5, 5, 5, 2]
    assert set(blocks) == set(wanted)
    for names, block in blocks.items():
        assert type(block) is type(wanted[names])
        for name in ("A", "G", "H"):
            if hasattr(block, name):
                torch.testing.assert_close(getattr(block, name), getattr(wanted[names], name))
