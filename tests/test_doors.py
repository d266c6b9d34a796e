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
from net2gp.errors import InputError, Net2GPWarning, NetworkError
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
    "structure", [None, n2g.Full(), n2g.Diagonal(), n2g.LastLayer(), n2g.FunctionSpace()]
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
    wrapped = nn.DataParallel(network)
    with pytest.raises(NetworkError, match=r"wrapped in DataParallel\. Pass what is inside"):
        n2g.laplace(wrapped.eval(), (X, Y), n2g.Gaussian())
