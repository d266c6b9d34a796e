"""The forms in which data, networks and settings arrive: taken as they are, or refused with what to type."""

from __future__ import annotations

import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import net2gp as n2g
from net2gp.errors import InputError, Net2GPWarning, NetworkError, NotLogits, NotStationary
from net2gp.inputs import gather

X = torch.linspace(-1, 1, 24).reshape(12, 2)
Y = X.sum(1, keepdim=True).sin()
LABELS = torch.arange(12) % 3


class BatchEncoding(UserDict):
    """What tokenizers return: a mapping that is no dict."""


class Encoder(nn.Module):
    """Named inputs, as a language model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].float()
        return self.head((self.embed(input_ids).tanh() * mask).sum(1) / mask.sum(1))


def encoded() -> dict[str, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(0, 7, (12, 5))
    return {"input_ids": ids, "attention_mask": (torch.arange(5) < 4).long().expand(12, 5)}


def regressor(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype).eval()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).eval()


def fitted(network, data, likelihood, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        return n2g.laplace(network, data, likelihood, **settings)


def test_mappings_of_tensors_are_inputs() -> None:
    torch.manual_seed(0)
    network, x = Encoder().eval(), encoded()
    linearized = n2g.linearize(network)
    other = BatchEncoding(x)
    torch.testing.assert_close(linearized(other), linearized(x))
    torch.testing.assert_close(linearized.kernel()(other), linearized.kernel()(x))
    posterior = fitted(network, (other, LABELS), n2g.Categorical(), prior_var=1.0)
    same = fitted(network, (x, LABELS), n2g.Categorical(), prior_var=1.0)
    torch.testing.assert_close(posterior.predict(other).probs, same.predict(x).probs)


@pytest.mark.parametrize("name", ["labels", "label"])
@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_dicts_with_labels_are_pairs(kind: type, name: str) -> None:
    x = encoded()
    whole = kind({**x, name: LABELS})
    found, y = gather(whole)
    assert list(found) == list(x)
    assert torch.equal(y, LABELS)
    items = [{**{k: v[n] for k, v in x.items()}, name: int(LABELS[n])} for n in range(12)]
    found, y = gather(DataLoader(items, 5))
    assert all(torch.equal(found[k], x[k]) for k in x)
    assert torch.equal(y, LABELS)


def test_dicts_without_labels_are_told_where_targets_go() -> None:
    with pytest.raises(InputError, match=r'A dict must have its targets under "labels"'):
        gather(DataLoader([{"x": 1.0, "y": 2.0}]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [np.float32, np.float64])
@pytest.mark.parametrize("how", [n2g.adapt, fitted])
def test_arrays_take_the_dtype_of_the_network(how, given, dtype) -> None:
    data = (X.numpy().astype(given), Y.numpy().astype(given))
    same = (X.to(dtype), Y.to(dtype))
    found = how(regressor(dtype), data, n2g.Gaussian(0.1), prior_var=1.0)
    expected = how(regressor(dtype), same, n2g.Gaussian(0.1), prior_var=1.0)
    x = X.to(dtype) * 1.5
    torch.testing.assert_close(found.predict(x).mean, expected.predict(x).mean)
    torch.testing.assert_close(found.predict(x).variance, expected.predict(x).variance)


def test_arrays_of_labels_and_read_only_arrays_are_taken() -> None:
    x = X.numpy().copy()
    x.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, y = gather((x, LABELS.numpy().astype(np.int32)))
    assert found.dtype == torch.get_default_dtype()
    assert y.dtype == torch.int32
    posterior = n2g.adapt_classes(classifier(), (x, LABELS.numpy()))
    assert posterior.predict(X).probs.shape == (12, 3)
    with pytest.raises(InputError, match=r"x is an array of <U1, which is no number .* Encode it"):
        gather((np.array(["a", "b"]), np.array([0, 1])))
    with pytest.raises(InputError, match=r"Convert it: x = torch\.as_tensor\(x, dtype=torch"):
        posterior.predict(x)


class Items(Dataset):
    """Numbers and arrays, as a table on disk gives them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, n: int) -> tuple:
        return X[n], int(LABELS[n])


def test_datasets_are_read_in_order() -> None:
    x, y = gather(TensorDataset(X, Y))
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    x, y = gather(Items())
    assert torch.equal(x, X)
    assert torch.equal(y, LABELS)
    with pytest.raises(InputError, match=r"must be a pair .*, but has a tuple of \[a tensor"):
        gather(TensorDataset(X))


class Graph:
    """Something that is no tensor, such as a graph of some library."""

    def __init__(self, nodes: Tensor, y: Tensor) -> None:
        self.nodes, self.y = nodes, y


def graphs() -> list[Graph]:
    torch.manual_seed(0)
    return [Graph(torch.randn(2 + n % 3, 2), Y[n]) for n in range(12)]


@pytest.mark.parametrize(
    "data",
    [
        (graphs(), Y),
        (Graph(X, Y), Y),
        DataLoader(graphs(), 4, collate_fn=lambda some: some[0]),
        DataLoader(graphs(), 4, collate_fn=lambda some: (some, torch.stack([g.y for g in some]))),
        ({"graph": graphs(), "x": X}, Y),
    ],
    ids=["list", "one", "batches", "pairs", "dict"],
)
def test_objects_are_refused_with_the_lines_that_work(data) -> None:
    message = (
        r"(?s)object of type Graph.*class ByNumber\(nn\.Module\):.*torch\.arange\(len\(y\)\), y\)"
    )
    with pytest.raises(InputError, match=message):
        gather(data)


class ByNumber(nn.Module):
    """The module that the message shows."""

    def __init__(self, network: nn.Module, objects: list) -> None:
        super().__init__()
        self.network, self.objects = network, objects

    def forward(self, number: Tensor) -> Tensor:
        return self.network([self.objects[n] for n in number.tolist()])


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 5), nn.Linear(5, 1)

    def forward(self, some: list[Graph]) -> Tensor:
        nodes = torch.cat([graph.nodes for graph in some])
        owner = torch.repeat_interleave(torch.tensor([len(g.nodes) for g in some]))
        h = self.head(self.body(nodes).tanh())
        return torch.zeros(len(some), 1).index_add(0, owner, h)


@pytest.mark.parametrize(
    "structure", [None, n2g.Full(), n2g.Diagonal(), n2g.LastLayer(), n2g.structures.FunctionSpace()]
)
def test_objects_by_their_number(structure) -> None:
    torch.manual_seed(0)
    objects = graphs()
    network = ByNumber(GraphNetwork(), objects).eval()
    x = torch.arange(12)
    linearized = n2g.linearize(network)
    J = torch.stack([linearized.jacobian(x[n : n + 1])[0, 0] for n in range(12)])
    torch.testing.assert_close(linearized.kernel()(x), J @ J.T)
    posterior = fitted(network, (x, Y), n2g.Gaussian(0.1), prior_var=1.0, structure=structure)
    together, alone = posterior.marginal(x).variance, posterior.marginal(x[3:4]).variance
    torch.testing.assert_close(together[3:4], alone)


@pytest.mark.parametrize("call", [n2g.adapt, fitted])
def test_sparse_and_nested_inputs_are_told_what_to_do(call) -> None:
    with pytest.raises(InputError, match=r"x is a sparse tensor\. Pass x = x\.to_dense\(\)\."):
        call(regressor(), (X.to_sparse(), Y), n2g.Gaussian())
    nested = torch.nested.nested_tensor([X[:2], X[:3]])
    message = r"x is a nested tensor, .*x = x\.to_padded_tensor\(0\.0\)"
    with pytest.raises(InputError, match=message):
        call(regressor(), (nested, Y[:2]), n2g.Gaussian())
    with pytest.raises(InputError, match=r"y is a sparse tensor\. Pass y = y\.to_dense\(\)\."):
        call(regressor(), (X, Y.to_sparse()), n2g.Gaussian())


def test_networks_of_other_kinds_are_named() -> None:
    network = regressor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(network, {nn.Linear})
        exported = torch.export.export(network, (X,))
    with pytest.raises(NetworkError, match=r"the network is quantized \(0, 2\).* before quantizat"):
        n2g.linearize(quantized)
    with pytest.raises(NetworkError, match=r"is a program of torch\.export.*Pass the Python mod"):
        n2g.linearize(exported)
    with pytest.raises(
        NetworkError, match=r"was exported by torch\.export.*Pass the Python module"
    ):
        n2g.linearize(exported.module())
    with pytest.raises(NetworkError, match=r"on the meta device, which holds shapes and no values"):
        n2g.linearize(nn.Linear(2, 1, device="meta").eval())


def square_classifier() -> nn.Module:
    """As many features as classes, so that one point looks like a batch of outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


def posteriors():
    torch.manual_seed(0)
    x = torch.randn(12, 3)
    network, data = square_classifier(), (x, LABELS)
    laplace = lambda structure: fitted(
        network, data, n2g.Categorical(), prior_var=1.0, structure=structure
    )
    for structure in (n2g.Full(), n2g.Kron(), n2g.LastLayer(), n2g.structures.FunctionSpace()):
        yield type(structure).__name__, laplace(structure), x
    yield "adapt", n2g.adapt(network, data, n2g.Categorical(), prior_var=1.0), x
    solver = n2g.solvers.WeightCholesky()
    yield "weights", n2g.adapt(network, data, n2g.Categorical(), prior_var=1.0, solver=solver), x
    yield "adapt_classes", n2g.adapt_classes(network, data), x


def test_one_point_without_a_batch_is_told_to_have_one() -> None:
    message = r"x is one point, .* shape \(3,\).* or add the axis: x\[None\]\."
    for _name, posterior, x in posteriors():
        calls = [posterior.predict, posterior.marginal, posterior.joint]
        for call in (*calls, lambda v, p=posterior: p.sample(v, 2)):
            with pytest.raises(InputError, match=message):
                call(x[0])
        assert posterior.predict(x[0][None]).probs.shape == (1, 3)
    linearized = n2g.linearize(classifier())
    with pytest.raises(NetworkError, match=r"first axis of the output must count.* x\[None\]\."):
        linearized(X[0])


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not these")


def test_what_a_network_raises_comes_with_what_it_was_given() -> None:
    linearized = n2g.linearize(Raises().eval())
    kernel = linearized.kernel()
    calls = {
        "call": lambda: linearized(X),
        "jvp": lambda: linearized.jvp(X, linearized.params),
        "vjp": lambda: linearized.vjp(X, Y),
        "jacobian": lambda: linearized.jacobian(X),
        "kernel": lambda: kernel(X),
        "diag": lambda: kernel.diag(X),
        "matmul": lambda: kernel.matmul(X, X, Y),
        "apply": lambda: kernel.apply(X, torch.ones(3, 1)),
        "adjoint": lambda: kernel.adjoint(X, Y),
        "laplace": lambda: n2g.laplace(linearized, (X, Y), n2g.Gaussian()),
        "adapt": lambda: n2g.adapt(linearized, (X, Y), n2g.Gaussian()),
    }
    for call in calls.values():
        with pytest.raises(
            NetworkError, match=r"the network cannot take x, a tensor .*: not these"
        ):
            call()


@pytest.mark.parametrize("value", ["a", [[1.0], [2.0, 3.0]], object()])
def test_a_prior_variance_that_is_no_number_is_refused(value) -> None:
    message = r"prior_var must be a number, a tensor, or a dict of these by parameter name, but"
    with pytest.raises(InputError, match=message):
        n2g.adapt(regressor(), (X, Y), n2g.Gaussian(), prior_var=value)
    with pytest.raises(InputError, match=message):
        n2g.adapt(regressor(), (X, Y), n2g.Gaussian(), prior_var={"*": value})
    with pytest.raises(InputError, match=message):
        n2g.adapt_classes(classifier(), (X, LABELS), prior_var=value)


def test_a_prior_in_which_the_noise_is_lost_is_refused() -> None:
    message = (
        r"prior variance of the outputs is .*e\+20 and the noise 0\.1.* Pass a smaller prior_var"
    )
    for solver in (None, n2g.solvers.Cholesky(), n2g.solvers.WeightCholesky()):
        with pytest.raises(InputError, match=message):
            n2g.adapt(regressor(), (X, Y), n2g.Gaussian(0.1), prior_var=1e20, solver=solver)
    wide = n2g.adapt(regressor(), (X, Y), n2g.Gaussian(0.1), prior_var=1e10)
    assert float(wide.marginal(X).stddev.max()) < 1.0  # noise .1 in 12 points


@pytest.mark.parametrize("call", [n2g.adapt, n2g.laplace])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_whose_squares_overflow_are_refused(call, dtype) -> None:
    large = Y.to(dtype) * (1e20 if dtype == torch.float32 else 1e160)
    message = r"y is as large as .*, whose square torch\.float.. cannot hold.* y = y / y\.std\(\)"
    with pytest.raises(InputError, match=message):
        call(regressor(dtype), (X.to(dtype), large), n2g.Gaussian())


def test_ignored_labels_are_told_to_be_dropped() -> None:
    y = LABELS.clone()
    y[[2, 5]] = -100
    message = (
        r"y has 2 of them\. Drop these points: keep = y != -100, and pass \(x\[keep\], y\[keep\]\)"
    )
    with pytest.raises(InputError, match=message):
        n2g.laplace(classifier(), (X, y), n2g.Categorical())
    with pytest.raises(InputError, match=message):
        n2g.adapt_classes(classifier(), (X, y))
    with pytest.raises(InputError, match=message):
        n2g.laplace(regressor(), (X, y.clamp(max=1)), n2g.Bernoulli())
    keep = y != -100
    posterior = fitted(classifier(), (X[keep], y[keep]), n2g.Categorical(), prior_var=1.0)
    assert posterior.predict(X).probs.shape == (12, 3)


def test_probabilities_in_place_of_logits_are_warned_of() -> None:
    network = nn.Sequential(classifier(), nn.Softmax(1)).eval()
    with pytest.warns(NotLogits, match=r"Categorical\(\) takes logits .* softmax a second time"):
        n2g.adapt(network, (X, LABELS), n2g.Categorical(), prior_var=1.0)
    with pytest.warns(NotLogits, match="look like probabilities"):
        n2g.laplace(network, (X, LABELS), n2g.Categorical(), prior_var=1.0)
    with pytest.warns(NotLogits, match=r"Bernoulli\(\) takes logits .* sigmoid a second time"):
        n2g.Bernoulli().check(torch.linspace(0, 1, 12)[:, None], LABELS % 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logs = nn.Sequential(classifier(), nn.LogSoftmax(1))(X).detach()
        n2g.Categorical().check(logs, LABELS)  # whose softmax are the probabilities themselves
        n2g.Categorical().check(torch.zeros(12, 3), LABELS)
        n2g.Bernoulli().check(torch.linspace(-1, 1, 12)[:, None], LABELS % 2)


@pytest.mark.parametrize(
    ("layer", "named"),
    [(nn.Dropout(0.2), "Dropout"), (nn.BatchNorm1d(4), "BatchNorm1d"), (nn.Dropout(0.0), None)],
)
def test_what_to_do_about_a_network_that_is_not_stationary(layer, named) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), layer, nn.Tanh(), nn.Linear(4, 1)).eval()
    with pytest.warns(NotStationary) as caught:
        n2g.laplace(network, (X, Y + 5), n2g.Gaussian(0.01), prior_var=1.0)
    (text,) = {str(w.message) for w in caught if w.category is NotStationary}
    if named is None:
        assert "Train it further on these data." in text
        return
    assert f"It has {named}: training minimizes another loss" in text
    assert "A few more epochs with network.eval() called before them" in text
    assert "Train it further" not in text


class Frame:
    """A table that can become an array, as those of pandas can."""

    def to_numpy(self) -> np.ndarray:
        return X.numpy()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (Frame(), r"Convert it: x = torch\.tensor\(x\.to_numpy\(\), dtype=torch\.float32\)\."),
        (list(X), r"Pass x = torch\.stack\(x\) if it holds the points, or tuple\(x\) if it holds"),
        (X.tolist(), r"Convert it, e\.g\. x = torch\.as_tensor\(x\)\."),
        (["a text", "another"], r"(?s)object of type str.*class ByNumber\(nn\.Module\)"),
    ],
)
def test_other_inputs_are_told_how_to_become_tensors(x, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gather((x, Y))


def test_a_list_of_items_is_told_to_be_loaded() -> None:
    items = [(X[n], Y[n]) for n in range(12)]
    with pytest.raises(
        InputError, match=r"for a list of items \(x_n, y_n\), DataLoader\(items, bat"
    ):
        gather(items)
    assert torch.equal(gather(DataLoader(items, 5))[0], X)
