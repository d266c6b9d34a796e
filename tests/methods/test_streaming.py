"""Data that are read batch by batch: the posteriors are those of the same data in memory."""

import warnings
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import net2gp as n2g
from contributing import example
from methods.laplace_cases import NEW, Poisson, labels
from net2gp import streams
from net2gp.data import Stream
from net2gp.errors import (
    EmptyClass,
    InputError,
    Net2GPWarning,
    NetworkError,
    NotAvailable,
    NotStationary,
    UnequalScales,
)
from net2gp.likelihoods import NegativeBinomial, Ordinal, StudentT
from net2gp.linalg.chance import fixed_choice
from net2gp.structures import EmpiricalFisher, LowRank, MonteCarloFisher, Sampled, Subnetwork
from net2gp.tuning import Evidence, Matched, Validation

COUNT = 90
X = torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
SAMPLED = Sampled(num_samples=6, rank=8, num_points=40, num_probes=2)
STRUCTURES = [
    n2g.Full(),
    n2g.Full(MonteCarloFisher(2)),
    n2g.Diagonal(),
    n2g.Diagonal(EmpiricalFisher()),
    n2g.Kron(),
    n2g.Kron(MonteCarloFisher()),
    LowRank(rank=12),
    n2g.LastLayer(),
    n2g.LastLayer(n2g.Kron()),
    n2g.LastLayer(n2g.Kron(MonteCarloFisher())),
    n2g.LastLayer(n2g.Diagonal()),
    Subnetwork(20),
    SAMPLED,
    n2g.FunctionSpace(num_points=30),
]
LIKELIHOODS = {
    "gaussian": (n2g.Gaussian(0.2), 2),
    "gaussian-by-output": (n2g.Gaussian(torch.tensor([0.2, 0.4], dtype=torch.float64)), 2),
    "heteroscedastic": (n2g.HeteroscedasticGaussian(), 4),
    "categorical": (n2g.Categorical(), 3),
    "bernoulli": (n2g.Bernoulli(), 2),
    "poisson": (n2g.likelihoods.Poisson(), 1),
    "negative-binomial": (NegativeBinomial(2.0), 1),
    "student": (StudentT(4.0, 0.1), 1),
    "ordinal": (Ordinal([-1.0, 0.5]), 1),
    "own": (Poisson(), 2),
}


class Batches:
    """The rows of x and y in batches of these sizes, again in each pass, with some that are empty."""

    def __init__(self, x, y, sizes=(7, 0, 40, 1, 13, 29), named=False):
        self.x, self.y, self.sizes, self.named, self.passes = x, y, sizes, named, 0

    def __iter__(self):
        self.passes += 1
        start = 0
        for size in self.sizes:
            part = slice(start, start + size)
            x, y = self.x[part], self.y[part]
            yield {"input": x, "labels": y} if self.named else (x, y)
            start += size


def mlp(outputs):
    """A network of 59 parameters at most, of two layers."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)
    return nn.Sequential(*layers).double().eval()


def targets(likelihood, outputs, count=COUNT):
    """Targets that fit a likelihood."""
    generator = torch.Generator().manual_seed(3)
    if isinstance(likelihood, n2g.likelihoods.Poisson | NegativeBinomial):
        return torch.randint(0, 4, (count, 1), generator=generator).double()
    if isinstance(likelihood, Ordinal):
        return torch.randint(0, 3, (count,), generator=generator)
    return labels(likelihood, count, outputs)


def quietly(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        return n2g.laplace(*arguments, **options)


def both(network, data, likelihood, **options):
    """The posterior of data in memory and the one of a stream of the same data, in uneven batches."""
    stream = Stream(Batches(*data))
    return quietly(network, data, likelihood, **options), quietly(
        network, stream, likelihood, **options
    )


def assert_same(held, streamed, new=NEW, tol=1e-10):
    """Means, covariances, predictions and evidences agree."""
    if not isinstance(held.structure, n2g.FunctionSpace):  # which keeps the points that it took
        assert streamed.x is None
    one, other = held.marginal(new), streamed.marginal(new)
    torch.testing.assert_close(one.mean, other.mean, rtol=tol, atol=tol)
    torch.testing.assert_close(one.covariance_matrix, other.covariance_matrix, rtol=tol, atol=tol)
    torch.testing.assert_close(held.evidence, streamed.evidence, rtol=tol, atol=tol)
    torch.testing.assert_close(
        held.predict(new).mean, streamed.predict(new).mean, rtol=tol, atol=tol, equal_nan=True
    )
    assert held.structure == streamed.structure or isinstance(held.structure, Sampled)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of a stream end in the middle of batches, and rows of a block of random numbers are divided."""
    monkeypatch.setattr(streams, "PIECE_ROWS", 37)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("name", ["gaussian", "categorical"])
def test_every_structure_of_a_stream_is_that_of_the_data_in_memory(structure, name):
    likelihood, outputs = LIKELIHOODS[name]
    data = X, targets(likelihood, outputs)
    options = {"structure": structure, "prior_var": 0.7, "temperature": 1.3}
    assert_same(*both(mlp(outputs), data, likelihood, **options))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_likelihood_of_a_stream_is_that_of_the_data_in_memory(name):
    likelihood, outputs = LIKELIHOODS[name]
    data = X, targets(likelihood, outputs)
    for structure in (n2g.Kron(), n2g.LastLayer(), n2g.Diagonal()):
        assert_same(*both(mlp(outputs), data, likelihood, structure=structure, prior_var=0.7))


TUNED = [n2g.Full(), n2g.Diagonal(), n2g.Kron(), LowRank(12), n2g.LastLayer(), Subnetwork(20)]
TUNED += [SAMPLED, n2g.FunctionSpace(num_points=30)]


@pytest.mark.parametrize("structure", TUNED, ids=str)
@pytest.mark.parametrize("name", ["gaussian", "categorical"])
def test_what_is_open_is_chosen_in_the_same_way(structure, name):
    likelihood = n2g.Gaussian() if name == "gaussian" else n2g.Categorical()
    outputs = LIKELIHOODS[name][1]
    data = X, targets(likelihood, outputs)
    for tuning in (Matched(num_points=60), Evidence()):
        options = {"structure": structure, "tuning": tuning}
        held, streamed = both(mlp(outputs), data, likelihood, **options)
        assert streamed.prior_var == pytest.approx(held.prior_var, rel=1e-10)
        assert_same(held, streamed)


def test_priors_of_layers_are_chosen_in_the_same_way():
    data = X, targets(n2g.Categorical(), 3)
    options = {"structure": n2g.Kron(), "tuning": Evidence(per_layer=True)}
    held, streamed = both(mlp(3), data, n2g.Categorical(), **options)
    assert streamed.prior_var == pytest.approx(held.prior_var, rel=1e-10)
    assert_same(held, streamed)


@pytest.mark.parametrize("structure", [n2g.Kron(), n2g.LastLayer()], ids=str)
@pytest.mark.parametrize(
    "likelihood", [n2g.Gaussian(), n2g.Categorical()], ids=["noise", "classes"]
)
def test_held_out_data_may_be_a_stream_too(structure, likelihood):
    outputs = 2 if isinstance(likelihood, n2g.Gaussian) else 3
    data, new = (X, targets(likelihood, outputs)), (NEW, targets(likelihood, outputs, len(NEW)))
    grid = (0.01, 0.1, 1.0)
    options = {"structure": structure, "tuning": Validation(new, grid)}
    held = quietly(mlp(outputs), data, likelihood, **options)
    options["tuning"] = Validation(Stream(Batches(*new, (1, 2, 3))), grid)
    streamed = quietly(mlp(outputs), Stream(Batches(*data)), likelihood, **options)
    assert streamed.prior_var == held.prior_var
    assert_same(held, streamed)


@pytest.mark.parametrize(
    "structure", [n2g.Full(), n2g.Kron(), n2g.LastLayer(), LowRank(59)], ids=str
)
def test_the_order_of_the_points_does_not_matter(structure):
    y = targets(n2g.Categorical(), 3)
    held = quietly(mlp(3), (X, y), n2g.Categorical(), structure=structure, prior_var=0.7)
    shuffled = DataLoader(TensorDataset(X, y), 13, shuffle=True)
    found = quietly(mlp(3), Stream(shuffled), n2g.Categorical(), structure=structure, prior_var=0.7)
    one, other = held.marginal(NEW).covariance_matrix, found.marginal(NEW).covariance_matrix
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(held.evidence, found.evidence, rtol=1e-10, atol=1e-10)


class Named(nn.Module):
    """A network of two inputs with names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.one, self.other = nn.Linear(2, 4).double(), nn.Linear(1, 4).double()
        self.head = nn.Linear(4, 3).double()

    def forward(self, left, right):
        return self.head((self.one(left) + self.other(right)).tanh())


@pytest.mark.parametrize(
    "structure", [n2g.Kron(), n2g.LastLayer(), n2g.Diagonal(), SAMPLED], ids=str
)
def test_batches_may_be_dicts_with_labels(structure):
    y = targets(n2g.Categorical(), 3)
    whole = {"left": X[:, :2], "right": X[:, 2:], "labels": y}
    cut = [
        {name: value[part] for name, value in whole.items()} for part in (slice(50), slice(50, 90))
    ]
    cut[1] = dict(reversed(cut[1].items()))  # the order of the entries does not matter
    new = {"left": NEW[:, :2], "right": NEW[:, 2:]}
    network = Named().eval()
    held = quietly(network, whole, n2g.Categorical(), structure=structure, prior_var=0.7)
    for data in (Stream(cut), Stream(whole)):
        streamed = quietly(network, data, n2g.Categorical(), structure=structure, prior_var=0.7)
        assert_same(held, streamed, new)


def test_inputs_may_be_tuples_and_labels_integers_of_several_kinds():
    y = targets(n2g.Categorical(), 3)
    x = X[:, :2], X[:, 2:]
    batches = [
        ((x[0][:30], x[1][:30]), y[:30].to(torch.int32)),
        ((x[0][30:], x[1][30:]), y[30:].to(torch.uint8)),
    ]
    network = Named().eval()
    held = quietly(network, (x, y), n2g.Categorical(), structure=n2g.Kron(), prior_var=0.7)
    streamed = quietly(
        network, Stream(batches), n2g.Categorical(), structure=n2g.Kron(), prior_var=0.7
    )
    assert_same(held, streamed, (NEW[:, :2], NEW[:, 2:]))


def test_arrays_on_disk_are_cut(tmp_path):
    y = targets(n2g.Gaussian(0.2), 2)
    x = np.memmap(tmp_path / "x", dtype=np.float64, mode="w+", shape=tuple(X.shape))
    x[:] = X.numpy()
    options = {"structure": n2g.Kron(), "prior_var": 0.7}
    held = quietly(mlp(2), (X, y), n2g.Gaussian(0.2), **options)
    assert_same(held, quietly(mlp(2), Stream((x, y)), n2g.Gaussian(0.2), **options))


def test_noise_of_each_point_belongs_to_the_points_of_the_stream():
    noise = torch.linspace(0.1, 2.0, COUNT, dtype=torch.float64)[:, None]
    likelihood = n2g.Gaussian(noise)
    data = X, targets(n2g.Gaussian(), 1)
    for structure in (n2g.Kron(MonteCarloFisher()), n2g.LastLayer(), SAMPLED):
        held, streamed = both(mlp(1), data, likelihood, structure=structure, prior_var=0.7)
        one, other = held.marginal(NEW).variance, streamed.marginal(NEW).variance
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    for count in (COUNT - 5, COUNT + 5):
        wrong = n2g.Gaussian(torch.ones(count, 1, dtype=torch.float64))
        with pytest.raises(InputError, match=r"holds numbers for .* points, but the data have"):
            quietly(mlp(1), Stream(Batches(*data)), wrong, structure=n2g.Kron(), prior_var=0.7)


@pytest.mark.parametrize(
    "structure", [n2g.Kron(), n2g.Diagonal(), n2g.LastLayer(), SAMPLED], ids=str
)
def test_no_more_than_a_piece_of_the_points_is_ever_together(structure):
    network, seen = mlp(3), []
    network.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    y = targets(n2g.Categorical(), 3)
    stream, likelihood = Stream(Batches(X, y)), n2g.Categorical(n2g.links.Probit())
    quietly(network, stream, likelihood, structure=structure, prior_var=0.7)
    assert max(seen) <= 40  # the points of a piece, 37, or those of the sketch of Sampled


def test_points_that_were_picked_do_not_depend_on_the_length_of_the_data():
    many = fixed_choice(3 * 10**9, 50)
    assert len(torch.unique(many)) == 50
    assert bool((many.diff() > 0).all())
    assert torch.equal(many, fixed_choice(3 * 10**9, 50))
    assert 10**9 < float(many.double().mean()) < 2 * 10**9


def test_a_small_loader_is_joined_and_a_large_one_is_streamed(monkeypatch):
    y = targets(n2g.Categorical(), 3)
    dataset, options = TensorDataset(X, y), {"structure": n2g.Kron(), "prior_var": 0.7}
    forms = [
        DataLoader(dataset, 11),
        dataset,
        Batches(X, y, (20, 70)),
        DataLoader(Iterable(X, y), 9),
    ]
    for data in forms:
        assert quietly(mlp(3), data, n2g.Categorical(), **options).x is not None
    held = quietly(mlp(3), (X, y), n2g.Categorical(), **options)
    monkeypatch.setattr(streams, "GATHERED_BYTES", 2000)
    for data in forms:
        assert_same(held, quietly(mlp(3), data, n2g.Categorical(), **options))
    assert quietly(mlp(3), (X, y), n2g.Categorical(), **options).x is not None


class Iterable(IterableDataset):
    """A dataset without a length."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        yield from zip(self.x, self.y, strict=True)


class Changing:
    """Another number of rows in each pass."""

    def __init__(self, counts):
        self.counts = list(counts)

    def __iter__(self):
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        yield X[:count], targets(n2g.Categorical(), 3)[:count]


class Relabeled:
    """Labels that become too large after some passes."""

    def __init__(self, passes):
        self.left = passes

    def __iter__(self):
        self.left -= 1
        yield X, targets(n2g.Categorical(), 3) + 5 * (self.left < 0)


class Once:
    """Batches that are gone after one pass, behind an __iter__ that does not start again."""

    def __init__(self):
        self.left = iter([(X[:80], targets(n2g.Categorical(), 3)[:80])])

    def __iter__(self):
        yield from self.left


Y = targets(n2g.Categorical(), 3)
WRONG = {
    "fewer rows in a later pass": (
        Changing([90, 90, 80]),
        r"90 rows in its first pass and 80 in pass 2",
    ),
    "more rows in a later pass": (
        Changing([60, 60, 90]),
        r"and at least 74 in pass 2, but sums over",
    ),
    "exhausted": (
        Changing([90, 90, 0]),
        r"none in pass 2: it is exhausted after one pass. Pass a DataLoader",
    ),
    "exhausted at once": (
        Once(),
        r"gave no batch with rows when it was read again: it is exhausted",
    ),
    "a generator": ((pair for pair in [(X, Y)]), r"can be read only once, since it is an iterator"),
    "nothing": ([], r"data is empty: the loader gave no batch with rows"),
    "an empty dict": ({}, r"data is empty: the loader gave no batch with rows"),
    "two numbers": ([1, 2], r"data must be a pair \(x, y\) or a loader of such pairs"),
    "empty batches": ([(X[:0], Y[:0])], r"data is empty: the loader gave no batch with rows"),
    "a tensor": (X, r"data must be a pair .* but is a tensor"),
    "a class": (DataLoader, r"data is the class DataLoader. Write DataLoader\(dataset\)"),
    "a stream": (Stream([(X, Y)]), r"data must be a pair .* but is an object of type Stream"),
    "no pair": ([X, X, X], r"data must be a pair \(x, y\) or a loader of such pairs"),
    "rows of another shape": (
        [(X, Y), (X[:, :2], Y)],
        r"rows of all batches must have the same shapes",
    ),
    "other entries": (
        [({"input": X}, Y), ({"inputs": X}, Y)],
        r"must have the same entries, but one batch has \['input'\] and another \['inputs'\]",
    ),
    "unequal rows": ([(X, Y), (X[:4], Y[:3])], r"x has 4 rows and y has 3"),
    "no number": ([(X, Y), (X * float("nan"), Y)], r"x must be finite"),
    "a label that is too large": ([(X, Y), (X, Y + 5)], r"labels? .*[0-9]"),
    "a label that is too large in a later pass": (Relabeled(2), r"labels? .*[0-9]"),
    "a label that is too large in the last passes": (Relabeled(4), r"labels? .*[0-9]"),
    "labels that are no integers": ([(X, Y), (X, Y.double())], r"integer class indices"),
    "another dtype": (
        [(X, Y), (X.float(), Y)] * 20,
        r"x is torch.float32, but the network is torch.float64",
    ),
}


@pytest.mark.parametrize("method", ["laplace", "condition"])
def test_noise_of_each_point_needs_one_order_and_one_number_for_each(method):
    noise = torch.linspace(0.1, 1.0, len(X), dtype=X.dtype)[:, None]
    linearized = n2g.linearize(nn.Linear(3, 2).to(X).eval())
    y = linearized(X)

    def found(data, noise_var):
        if method == "condition":
            return n2g.condition(linearized.kernel(), data, n2g.Gaussian(noise_var))
        structure = n2g.structures.Full()
        return n2g.laplace(
            linearized, data, n2g.Gaussian(noise_var), prior_var=1.0, structure=structure
        )

    ordered, mixed = (DataLoader(TensorDataset(X, y), 10, shuffle=b) for b in (False, True))
    streamed, whole = found(Stream(ordered), noise), found((X, y), noise)
    torch.testing.assert_close(streamed.marginal(X).variance, whole.marginal(X).variance)
    with pytest.raises(InputError, match=r"in the order of the data.* shuffle=False"):
        found(Stream(mixed), noise)
    for wrong in (noise[1:], torch.cat([noise, noise])):
        with pytest.raises(InputError, match=r"points, but"):
            found(Stream(ordered), wrong)


def test_new_points_of_a_stream_have_noise_of_their_own():
    y, noise = X[:, :2], torch.linspace(0.1, 1.0, len(X), dtype=X.dtype)[:, None]
    linearized, new = n2g.linearize(nn.Linear(3, 2).to(X).eval()), (X[:3] + 1, X[:3, :2])
    posterior = n2g.condition(linearized.kernel(), Stream((X, y)), n2g.Gaussian(noise))
    with pytest.raises(InputError, match=r"new data are others\. Pass their"):
        posterior.update(new)
    with pytest.raises(InputError, match=r"numbers for 5 points, but the data have 3"):
        posterior.update(new, likelihood=n2g.Gaussian(noise[:5]))
    more = posterior.update(new, likelihood=n2g.Gaussian(noise[:3]))
    joined = torch.cat([X, new[0]]), torch.cat([y, new[1]])
    both = n2g.Gaussian(torch.cat([noise, noise[:3]]))
    expected = n2g.condition(linearized.kernel(), joined, both)
    torch.testing.assert_close(more.marginal(X).variance, expected.marginal(X).variance)


@pytest.mark.parametrize("case", WRONG)
def test_streams_that_cannot_be_summed_over_are_refused(case):
    data, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        quietly(mlp(3), Stream(data), n2g.Categorical(), structure=n2g.Kron(), prior_var=0.7)


def test_what_needs_all_points_together_says_what_to_use():
    stream, y = Stream(Batches(X, Y)), targets(n2g.Gaussian(), 2)
    given = {"prior_var": 0.7}
    with pytest.raises(
        NotAvailable, match=r"FunctionSpace\(\) needs all .*\(num_points=1000.*Kron"
    ):
        quietly(mlp(3), stream, n2g.Categorical(), structure=n2g.FunctionSpace(), **given)
    with pytest.raises(
        NotAvailable, match=r"leave_out=\.\.\.\) needs all points .* Pass Sampled\(leave_out=0\)"
    ):
        quietly(mlp(3), stream, n2g.Categorical(), structure=Sampled(leave_out=0.1), **given)
    stream = Stream(Batches(X, y))
    with pytest.raises(
        NotAvailable, match=r"needs all points together.*is a Stream.*structure=Kron"
    ):
        n2g.adapt(mlp(2), stream, n2g.Gaussian())
    for kernel, likelihood, solver in (
        (n2g.RBF(), n2g.Gaussian(0.1), None),
        (n2g.linearize(mlp(2)).kernel(), n2g.Bernoulli(), None),
        (n2g.linearize(mlp(2)).kernel(), n2g.Gaussian(0.1), n2g.solvers.CG()),
    ):
        with pytest.raises(NotAvailable, match=r"sums over a Stream in weight space only.*laplace"):
            n2g.condition(kernel, stream, likelihood, solver=solver)


def test_a_posterior_without_data_says_so_where_they_are_needed(tmp_path):
    stream = Stream(Batches(X, targets(n2g.Gaussian(), 2)))
    found = quietly(mlp(2), stream, n2g.Gaussian(), structure=n2g.Kron())
    for needing in (found.dual, lambda: found.data, lambda: n2g.explain.leave_one_out(found)):
        with pytest.raises(
            NotAvailable, match=r"does not hold the data .* as after a Stream\. Pass data"
        ):
            needing()
    with pytest.raises(
        NotAvailable, match=r"update is for .* Call laplace again, with a Stream of all"
    ):
        found.update((X, targets(n2g.Gaussian(), 2)))
    found.save(tmp_path / "posterior.safetensors")
    again = n2g.load(tmp_path / "posterior.safetensors", mlp(2))
    assert torch.equal(again.marginal(NEW).variance, found.marginal(NEW).variance)
    assert found.to(dtype=torch.float32).marginal(NEW.float()).variance.dtype == torch.float32
    assert found.novelty(NEW).shape == (len(NEW),)


def test_warnings_of_a_stream_are_those_of_the_data_in_memory():
    y = (targets(n2g.Categorical(), 3) > 0).long()  # no class 2
    said = []
    for data in ((X, y), Stream(Batches(X, y))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            n2g.laplace(mlp(3), data, n2g.Categorical(), structure=n2g.Kron(), prior_var=0.7)
        said.append({one.category: str(one.message).split(" The mean")[0] for one in caught})
    assert said[0] == said[1]
    assert {EmptyClass, NotStationary} <= set(said[1])
    y = torch.stack([X[:, 0], 1000 * X[:, 1]], 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        n2g.laplace(mlp(2), Stream(Batches(X, y)), n2g.Gaussian(), structure=n2g.Kron())
    assert UnequalScales in {one.category for one in caught}


def test_a_parameter_that_late_points_use_counts_and_one_that_none_uses_is_named():
    class Sometimes(nn.Module):
        def __init__(self, least):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.late = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
            self.least = least

        def forward(self, x):
            chosen = x[:, :1] > self.least
            return self.late(x) * chosen if bool(chosen.all()) else self.first(x)

    x = torch.cat([X, X + 100])
    pieces = [(x[start : start + 37], Y[:37]) for start in range(0, 148, 37)]
    with pytest.raises(NetworkError):  # which is what it is in memory as well: points are not alone
        quietly(Sometimes(50.0), Stream(pieces), n2g.Categorical(), structure=n2g.Diagonal())
    with pytest.raises(
        NetworkError, match=r"2 of the chosen parameters do not reach .* late.weight"
    ):
        quietly(Sometimes(5e3), Stream(pieces), n2g.Categorical(), structure=n2g.Diagonal())


def test_bars_say_which_pass_it_is_and_of_how_many(monkeypatch):
    said = []

    @contextmanager
    def progress(description, total=None):
        said.append((description, total))
        yield lambda steps=1, note="": None

    monkeypatch.setattr(streams, "progress", progress)
    quietly(mlp(3), Stream(Batches(X, Y)), n2g.Categorical(), structure=n2g.Kron())
    assert said == [
        ("pass 1 of at most 7: checks", None),
        ("pass 2 of at most 7: curvature", COUNT),
        ("pass 3 of at most 7: some points", COUNT),
        ("pass 4 of at most 7: gradient", COUNT),
        ("pass 5 of at most 7: some points", COUNT),
    ]


def test_structures_of_ones_own_take_streams_or_say_what_they_read(tmp_path):
    options = {"structure": example("structure").Isotropic(), "prior_var": 0.7}
    data = X, targets(n2g.Gaussian(), 2)
    held, streamed = both(mlp(2), data, n2g.Gaussian(0.3), **options)
    assert_same(held, streamed)

    class Reading(n2g.structures.Structure):
        def curvature(self, task):
            return task.x

    with pytest.raises(
        NotAvailable, match=r"task\.x of all points is never in memory. Sum over task.pieces\(\)"
    ):
        quietly(mlp(3), Stream(Batches(X, Y)), n2g.Categorical(), structure=Reading())


def test_a_solve_of_a_stream_continues_whatever_the_order(tmp_path):
    path, y = tmp_path / "draws.safetensors", targets(n2g.Gaussian(), 2)
    structure = replace(SAMPLED, checkpoint=path, num_probes=0)
    options = {"structure": structure, "prior_var": 0.7}
    first = quietly(mlp(2), Stream(Batches(X, y)), n2g.Gaussian(0.2), **options)
    batches = Batches(X.flip(0), y.flip(0))
    again = quietly(mlp(2), Stream(batches), n2g.Gaussian(0.2), **options)
    assert torch.equal(first.covariance.draws, again.covariance.draws)
    with pytest.raises(InputError, match="checkpoint"):
        quietly(mlp(2), Stream(Batches(X, 2 * y)), n2g.Gaussian(0.2), **options)


def by_weights(data, likelihood=None, **options):
    linearized = n2g.linearize(mlp(2))
    kernel = linearized.kernel(0.5)
    return n2g.condition(kernel, data, likelihood or n2g.Gaussian(0.3), mean=linearized, **options)


def test_weight_space_is_summed_over_a_stream_and_updated_by_sums():
    y = targets(n2g.Gaussian(), 2)
    held = by_weights((X, y), solver=n2g.solvers.WeightCholesky())
    part = by_weights(Stream(Batches(X[:50], y[:50], (20, 30))))
    for found in (
        by_weights(Stream(Batches(X, y))),
        part.update((X[50:], y[50:])),
        part.update(Stream(Batches(X[50:], y[50:], (1, 39)))),
    ):
        assert found.x is None
        one, other = held.marginal(NEW), found.marginal(NEW)
        torch.testing.assert_close(one.mean, other.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            one.covariance_matrix, other.covariance_matrix, rtol=1e-10, atol=1e-10
        )
        torch.testing.assert_close(held.evidence, found.evidence, rtol=1e-10, atol=1e-10)
    noise = n2g.Gaussian(0.9)
    louder = part.update((X[50:], y[50:]), likelihood=noise)
    whole = torch.tensor([[0.3, 0.3]] * 50 + [[0.9, 0.9]] * 40, dtype=torch.float64)
    wanted = by_weights((X, y), n2g.Gaussian(whole), solver=n2g.solvers.WeightCholesky())
    torch.testing.assert_close(louder.mean(NEW), wanted.mean(NEW), rtol=1e-10, atol=1e-10)


def test_tasks_and_posteriors_of_optimizers_take_streams():
    network, stream = mlp(3), Stream(Batches(X, Y))
    embed = n2g.tasks.task_embedding
    one, other = (embed(network, data, n2g.Categorical()).vector for data in ((X, Y), stream))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    alike = n2g.tasks.jacobian_similarity(network, mlp(3), stream)
    torch.testing.assert_close(alike, n2g.tasks.jacobian_similarity(network, mlp(3), X))
    variance = torch.rand(59, dtype=torch.float64)
    held, streamed = (
        n2g.training.from_variances(network, variance, data, n2g.Categorical())
        for data in ((X, Y), stream)
    )
    assert streamed.x is None
    assert torch.equal(held.marginal(NEW).variance, streamed.marginal(NEW).variance)


def test_one_point_and_inference_mode_and_float32_work():
    options = {"structure": n2g.Kron(), "prior_var": 0.7}
    with torch.inference_mode():
        batches = [(X.float() + 0, Y + 0), (X[:1].float(), Y[:1])]
        found = quietly(mlp(3).float(), Stream(batches), n2g.Categorical(), **options)
    assert found.predict(NEW.float()).probs.dtype == torch.float32
    one = quietly(mlp(3), Stream([(X[:1], Y[:1])]), n2g.Categorical(), **options)
    assert_same(quietly(mlp(3), (X[:1], Y[:1]), n2g.Categorical(), **options), one)


def test_without_a_structure_a_stream_gets_one_that_needs_no_points_together():
    assert quietly(mlp(3), Stream(Batches(X, Y)), n2g.Categorical()).structure == n2g.Full()
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 3)).double().eval()
    found = quietly(wide, Stream(Batches(X, Y)), n2g.Categorical(), prior_var=0.1)
    assert found.structure == n2g.Kron()
