"""Draws of the posterior by linear systems, against the posterior that is formed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import FileFormatError, InputError, NetworkError, NotConverged
from net2gp.linalg import Checkpoint, block_cg

LIKELIHOODS = {
    "gaussian": (n2g.Gaussian(0.3), 2),
    "classes": (n2g.Categorical(n2g.links.Probit()), 3),
    "labels": (n2g.Bernoulli(), 2),
}
EACH = pytest.mark.parametrize("name", LIKELIHOODS)
SMALL: dict[str, int] = {"rank": 2, "num_points": 8}
"""A sketch so small that conjugate gradients have work left on networks of this size."""
MANY = n2g.structures.Sampled(num_samples=3000, tol=1e-9, num_probes=0, **SMALL)
pytestmark = pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")


def network(outputs: int, convolution: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if convolution:
            layers = nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Tanh()
            return nn.Sequential(*layers, nn.Flatten(), nn.Linear(9, outputs)).double().eval()
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double().eval()


def data(name: str, count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    if name == "gaussian":
        return x, torch.randn(count, 2, generator=generator, dtype=torch.float64)
    if name == "classes":
        return x, torch.randint(0, 3, (count,), generator=generator)
    return x, torch.randint(0, 2, (count, 2), generator=generator).double()


def posteriors(name: str, structure: n2g.structures.Sampled, convolution: bool = False):
    likelihood, outputs = LIKELIHOODS[name]
    module = network(outputs, convolution)
    return [
        n2g.laplace(module, data(name), likelihood, prior_var=0.7, structure=one)
        for one in (structure, n2g.Full())
    ]


@EACH
@pytest.mark.parametrize("convolution", [False, True])
def test_covariances_are_those_of_the_whole_precision(name, convolution):
    drawn, exact = posteriors(name, MANY, convolution)
    x = data(name)[0][:5] * 2
    found, expected = (p.joint(x).covariance_matrix for p in (drawn, exact))
    # Wishart: entries of a covariance from S draws have the variance (Σ_ij² + Σ_ii Σ_jj) / S
    spread = (expected.square() + torch.outer(expected.diag(), expected.diag())) / 3000
    assert ((found - expected).abs() < 5 * spread.sqrt()).all()
    torch.testing.assert_close(drawn.marginal(x).mean, exact.marginal(x).mean)


def test_points_that_are_left_out_are_those_of_least_curvature():
    module, (x, y) = network(3), data("classes")
    x = x * torch.linspace(0.1, 60, len(x), dtype=x.dtype)[:, None]  # ever surer
    with torch.no_grad():
        traces = 1 - module(x).softmax(-1).square().sum(-1)
    share = 0.05
    kind = {"num_samples": 4, "tol": 1e-10, "num_probes": 0, **SMALL}
    draws = lambda data, **more: (
        n2g.laplace(
            module,
            data,
            n2g.Categorical(n2g.links.Probit()),
            prior_var=0.7,
            structure=n2g.structures.Sampled(**kind, **more),
        ).covariance.draws
    )
    found = draws((x, y), leave_out=share)
    dropped = next(
        k for k in range(len(x)) if traces.sort().values[: k + 1].sum() > share * traces.sum()
    )
    kept = traces.argsort()[dropped:].sort().values
    assert 0 < dropped < len(x)
    torch.testing.assert_close(found, draws((x[kept], y[kept])))


def test_points_without_any_curvature_cannot_all_be_left_out():
    module = nn.Linear(1, 2).double().eval()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1e4], [-1e4]]))
        module.bias.zero_()
    x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    kind = {"num_samples": 4, "num_probes": 0}
    draws = [
        n2g.laplace(
            module,
            (x, torch.tensor([1, 0])),
            n2g.Categorical(n2g.links.Probit()),
            prior_var=1.0,
            structure=n2g.structures.Sampled(**kind, leave_out=share),
        ).covariance.draws
        for share in (0.0, 0.001)
    ]
    torch.testing.assert_close(*draws)


def test_a_checkpoint_knows_the_noise_of_every_point(tmp_path):
    """The text of a tensor of more than a thousand numbers has only a few of them."""
    x, y = data("gaussian", 1200)
    noise = torch.full((1200, 1), 0.01, dtype=torch.float64)
    other = noise.clone()
    other[100:1100] = 10.0
    path = tmp_path / "draws.safetensors"
    solve = lambda noise: n2g.laplace(
        network(2),
        (x, y),
        n2g.Gaussian(noise),
        prior_var=1.0,
        structure=n2g.structures.Sampled(2, num_probes=0, checkpoint=path, **SMALL),
    )
    solve(noise)
    with pytest.raises(InputError, match="checkpoint"):
        solve(other)


@EACH
def test_a_loose_tolerance_moves_the_draws_no_more_than_it_says(name):
    likelihood, outputs = LIKELIHOODS[name]
    module, structure = (
        network(outputs),
        n2g.structures.Sampled(num_samples=4, tol=1e-12, num_probes=0, **SMALL),
    )
    draws = n2g.laplace(
        module, data(name), likelihood, prior_var=0.7, structure=structure
    ).covariance.draws
    loose = n2g.structures.Sampled(num_samples=4, tol=1e-5, num_probes=0, **SMALL)
    rough = n2g.laplace(
        module, data(name), likelihood, prior_var=0.7, structure=loose
    ).covariance.draws
    assert 0 < (draws - rough).norm() / draws.norm() < 1e-4


@EACH
def test_the_evidence_is_that_of_the_whole_precision(name):
    # a sketch of few points and eigenvalues, so that the quadrature has something left to do
    structure = n2g.structures.Sampled(num_samples=2, num_probes=200, rank=10, num_points=15)
    drawn, exact = posteriors(name, structure)
    gap = abs(drawn.log_marginal_likelihood() - exact.log_marginal_likelihood())
    assert gap < 0.2


def test_prior_noise_and_link_are_chosen_where_they_are_open():
    x, y = data("gaussian")
    found = n2g.laplace(
        network(2), (x, y), n2g.Gaussian(), structure=n2g.structures.Sampled(num_samples=8)
    )
    whole = n2g.laplace(network(2), (x, y), n2g.Gaussian(), structure=n2g.Full())
    assert found.prior_var == pytest.approx(whole.prior_var)
    assert found.likelihood.noise_var == pytest.approx(whole.likelihood.noise_var)
    x, labels = data("classes")
    matched = n2g.laplace(
        network(3), (x, labels), n2g.Categorical(), structure=n2g.structures.Sampled(num_samples=8)
    )
    assert isinstance(matched.likelihood.link, n2g.links.Contrast)
    assert matched.predict(x).probs.shape == (40, 3)


def test_a_larger_sketch_takes_fewer_iterations(monkeypatch):
    counts = []
    for rank in (1, 30):
        with monkeypatch.context() as patch:
            calls = stop_after(patch, 10**6)
            structure = n2g.structures.Sampled(num_samples=2, tol=1e-8, num_probes=0, rank=rank)
            n2g.laplace(
                network(2), data("gaussian"), n2g.Gaussian(0.3), prior_var=0.7, structure=structure
            )
            counts.append(calls[0])
    assert counts[1] < counts[0] / 2


def test_starting_from_an_earlier_posterior_saves_iterations():
    steps = []
    for start in (False, True):
        module, points = network(2), data("gaussian")
        cold = n2g.structures.Sampled(num_samples=3, tol=1e-8, num_probes=0, **SMALL)
        first = n2g.laplace(module, points, n2g.Gaussian(0.3), prior_var=0.7, structure=cold)
        draws = first.covariance.draws if start else None
        with pytest.warns(NotConverged) as caught:
            n2g.laplace(
                module,
                points,
                n2g.Gaussian(0.3),
                prior_var=0.71,
                structure=n2g.structures.Sampled(
                    num_samples=3, tol=1e-8, max_iterations=1, num_probes=0, start=draws, **SMALL
                ),
            )
        message = next(str(w.message) for w in caught if issubclass(w.category, NotConverged))
        steps.append(float(message.split("residual of ")[1].split(",")[0]))
    assert steps[1] < 0.1 * steps[0]


def test_draws_are_new_combinations_of_those_that_are_stored():
    """Σ = WWᵀ/S is the covariance of W z/√S; the stored draws themselves would be the same each time."""
    drawn, _ = posteriors("gaussian", n2g.structures.Sampled(num_samples=5, num_probes=0))
    x, W = data("gaussian")[0][:3], drawn.covariance.draws
    one, other = (
        drawn.linearized.flatten({n: v.movedim(0, -1) for n, v in drawn.sample_weights(4).items()})
        for _ in range(2)
    )
    center = drawn.linearized.flatten(drawn.linearized.params)[:, None]
    for draws in (one - center, other - center):
        inside = W @ torch.linalg.lstsq(W, draws).solution
        torch.testing.assert_close(inside, draws)
    assert not torch.isclose(one, other).any()
    assert not torch.isclose(drawn.sample(x, 5), drawn.sample(x, 5)).any()
    assert drawn.sample(x, 20).shape == (20, 3, 2)
    many = drawn.covariance.draw(20_000, torch.Generator().manual_seed(0))
    sigma = W @ W.mT / 5
    assert float((many @ many.mT / 20_000 - sigma).norm() / sigma.norm()) < 0.05


def test_it_is_saved_and_loaded(tmp_path):
    drawn, _ = posteriors("classes", n2g.structures.Sampled(num_samples=5, num_probes=0))
    n2g.save(drawn, tmp_path / "drawn.safetensors")
    again = n2g.load(tmp_path / "drawn.safetensors", network=network(3))
    x = data("classes")[0]
    assert torch.equal(again.predict(x).probs, drawn.predict(x).probs)
    assert again.structure.num_samples == 5


@pytest.mark.parametrize("structure", [n2g.Full(), n2g.Kron(), n2g.structures.FunctionSpace()])
def test_a_tempered_posterior_is_that_of_its_prior_and_temperature(structure, tmp_path):
    problem = network(2), data("gaussian"), n2g.Gaussian(0.3)
    one = n2g.laplace(*problem, prior_var=0.7, structure=structure).tempered(2.5)
    other = n2g.laplace(*problem, prior_var=1.75, temperature=2.5, structure=structure)
    x = data("gaussian")[0][:6] * 2
    for found, expected in zip(
        (one.joint(x).covariance_matrix, one.marginal(x).covariance_matrix, one.predict(x).variance),
        (other.joint(x).covariance_matrix, other.marginal(x).covariance_matrix, other.predict(x).variance),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, expected)
    assert (one.prior_var, one.temperature) == (other.prior_var, other.temperature)
    n2g.save(one, tmp_path / "tempered.safetensors")
    again = n2g.load(tmp_path / "tempered.safetensors", network=network(2))
    assert torch.equal(again.predict(x).variance, one.predict(x).variance)


class Killed(Exception):
    pass


def stop_after(monkeypatch, count: int) -> list[int]:
    """Raise at the product after so many; the list has how many there were."""
    from net2gp.posteriors.weights import sampled

    original, calls = sampled.Precision.matmul, [0]

    def product(self, v):
        calls[0] += 1
        if calls[0] > count:
            raise Killed
        return original(self, v)

    monkeypatch.setattr(sampled.Precision, "matmul", product)
    return calls


def test_a_killed_solve_goes_on_from_its_checkpoint_to_the_same_numbers(monkeypatch, tmp_path):
    path = tmp_path / "draws.safetensors"
    kind = {"num_samples": 3, "tol": 1e-10, "num_probes": 0, **SMALL}
    kept = n2g.structures.Sampled(**kind, checkpoint=path, every_seconds=0.0)
    problem = network(2), data("gaussian"), n2g.Gaussian(0.3)
    whole = n2g.laplace(*problem, prior_var=0.7, structure=n2g.structures.Sampled(**kind))
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Killed):
            n2g.laplace(*problem, prior_var=0.7, structure=kept)
    with monkeypatch.context() as patch:
        # fewer products than from the start: it does go on
        stop_after(patch, 1000)
        again = n2g.laplace(*problem, prior_var=0.7, structure=kept)
    assert torch.equal(again.covariance.draws, whole.covariance.draws)
    with monkeypatch.context() as patch:
        stop_after(patch, 0)
        finished = n2g.laplace(*problem, prior_var=0.7, structure=kept)
    assert torch.equal(finished.covariance.draws, whole.covariance.draws)
    with pytest.raises(InputError, match=r"another problem.*Delete it to start again"):
        n2g.laplace(*problem, prior_var=0.8, structure=kept)


def test_a_resumed_solve_takes_only_the_products_that_were_left(tmp_path):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(60, 60, generator=generator, dtype=torch.float64)
    A, b = root @ root.mT + torch.eye(60), torch.randn(60, 2, generator=generator)
    count = [0]

    def product(v):
        count[0] += 1
        if count[0] == stop[0]:
            raise Killed
        return A @ v

    stop = [-1]
    whole = block_cg(product, b, tol=1e-10)
    products = count[0]
    checkpoint = Checkpoint(tmp_path / "cg.safetensors", "a", every_seconds=0.0)
    count[0], stop[0] = 0, products - 5
    with pytest.raises(Killed):
        block_cg(product, b, tol=1e-10, checkpoint=checkpoint)
    count[0], stop[0] = 0, -1
    again = block_cg(product, b, tol=1e-10, checkpoint=checkpoint)
    assert count[0] == 6
    assert torch.equal(again.x, whole.x)
    assert again.history == whole.history


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("not a checkpoint")
    with pytest.raises(FileFormatError, match="cannot be read"):
        Checkpoint(path).load("cpu")
    with pytest.raises(InputError, match=r"does not exist\. Make it first"):
        Checkpoint(tmp_path / "no" / "file").write({"x": torch.ones(1)}, {})


def test_options_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="num_samples must be a positive whole number"):
        n2g.structures.Sampled(num_samples=0)
    with pytest.raises(InputError, match="tol must be positive"):
        n2g.structures.Sampled(tol=0.0)
    with pytest.raises(InputError, match=r"tol must be below 1.*Try tol=0\.01"):
        n2g.structures.Sampled(tol=2.0)
    with pytest.raises(InputError, match="seed must be a whole number"):
        n2g.structures.Sampled(seed=1.5)
    with pytest.raises(InputError, match="start must be a tensor"):
        n2g.structures.Sampled(start="a")
    with pytest.raises(InputError, match="checkpoint must be a path"):
        n2g.structures.Sampled(checkpoint=5)
    with pytest.raises(InputError, match="num_probes must be 0, or at least 2"):
        n2g.structures.Sampled(num_probes=1)
    with pytest.raises(InputError, match=r"leave_out is a share below 1.*Try leave_out=0\.001"):
        n2g.structures.Sampled(leave_out=1.0)
    with pytest.raises(InputError, match="leave_out must be"):
        n2g.structures.Sampled(leave_out=-0.1)
    with pytest.raises(InputError, match="with Gaussian noise all points have information"):
        n2g.laplace(
            network(2),
            data("gaussian"),
            n2g.Gaussian(0.3),
            prior_var=1.0,
            structure=n2g.structures.Sampled(leave_out=0.1),
        )
    with pytest.raises(InputError, match="start must be the draws of an earlier posterior"):
        n2g.laplace(
            network(2),
            data("gaussian"),
            n2g.Gaussian(0.3),
            prior_var=1.0,
            structure=n2g.structures.Sampled(start=torch.zeros(3, 32)),
        )


@pytest.mark.parametrize("change", ["activation", "buffer", "frozen"])
def test_a_checkpoint_of_another_network_is_refused(change, tmp_path):
    """Also where the chosen parameters are the same: the outputs are not."""
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)
    module = nn.Sequential(*layers).double().eval()
    structure = n2g.structures.Sampled(
        num_samples=2, num_probes=0, checkpoint=tmp_path / "c.safetensors"
    )

    def solve():
        only = "3.*" if change == "frozen" else None
        return n2g.laplace(
            module,
            data("gaussian"),
            n2g.Gaussian(0.3),
            prior_var=0.7,
            structure=structure,
            only=only,
        )

    solve()
    with torch.no_grad():
        if change == "activation":
            module[2] = nn.ReLU().eval()
        elif change == "buffer":
            module[1].running_var *= 9
        else:
            module[0].weight *= 3
    with pytest.raises(InputError, match="another problem"):
        solve()


class Centered(nn.Module):
    """Its outputs at a point depend on the others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x - x.mean(0))))


@pytest.mark.parametrize("structure", [n2g.structures.Sampled(), n2g.LastLayer(), n2g.Kron()])
def test_networks_that_couple_points_are_refused(structure):
    with pytest.raises(NetworkError, match=r"other points of the batch|points"):
        n2g.laplace(
            Centered().double().eval(), data("gaussian"), n2g.Gaussian(0.3), structure=structure
        )


def test_networks_that_hide_their_parameters_are_refused():
    class Hidden(Centered):
        def forward(self, x):
            with torch.no_grad():
                h = torch.tanh(self.body(x))
            return self.head(h)

    with pytest.raises(NetworkError):
        n2g.laplace(
            Hidden().double().eval(),
            data("gaussian"),
            n2g.Gaussian(0.3),
            prior_var=1.0,
            structure=n2g.structures.Sampled(),
        )


def test_a_low_rank_does_not_make_the_prior_wide():
    problem = network(2), data("gaussian"), n2g.Gaussian(0.3)
    found = [
        n2g.laplace(*problem, structure=s).prior_var
        for s in (n2g.structures.LowRank(2), n2g.Full())
    ]
    assert found[0] <= found[1]


def test_function_space_says_that_a_network_is_not_trained():
    x, y = data("gaussian")
    with pytest.warns(n2g.errors.NotStationary):
        n2g.laplace(
            network(2),
            (x, 100 * y),
            n2g.Gaussian(0.01),
            prior_var=1.0,
            structure=n2g.structures.FunctionSpace(),
        )


def test_a_subnetwork_is_chosen_at_its_temperature():
    kind = {"structure": n2g.structures.Subnetwork(10)}
    problem = network(3), data("classes"), n2g.Categorical(n2g.links.Probit())
    prior = {"*": 0.5, "*.bias": 2.0}
    one = n2g.laplace(*problem, prior_var=prior, temperature=1.5, **kind).tempered(0.3)
    scaled = {name: 0.3 * value for name, value in prior.items()}
    other = n2g.laplace(*problem, prior_var=scaled, temperature=0.45, **kind)
    x = data("classes")[0][:4]
    torch.testing.assert_close(one.marginal(x).variance, other.marginal(x).variance)
