from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from net2gp.errors import InputError
from net2gp.inputs import (
    check_inputs,
    chunks,
    describe,
    gather,
    join,
    map_inputs,
    num_rows,
    rows,
    tensors,
)

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10.0)[:, None]
KINDS = [X, (X, Y), {"left": X, "right": Y}]


class Pairs(torch.utils.data.Dataset):
    """Points with two inputs each."""

    def __init__(self, as_dict: bool) -> None:
        self.as_dict = as_dict

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, n: int):
        x = {"left": X[n], "right": Y[n]} if self.as_dict else (X[n], Y[n])
        return x, Y[n]


def same(left, right) -> bool:
    if type(left) is not type(right) or (isinstance(left, dict) and list(left) != list(right)):
        return False
    pairs = zip(tensors(left), tensors(right), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("x", KINDS, ids=["tensor", "tuple", "dict"])
def test_joining_the_chunks_gives_the_whole(x) -> None:
    assert num_rows(x) == 10
    for size in (1, 3, 10, 99):
        parts = list(chunks(x, size))
        assert [num_rows(part) for part in parts] == [min(size, 10 - i) for i in range(0, 10, size)]
        assert same(join(parts), x)


@pytest.mark.parametrize("x", KINDS, ids=["tensor", "tuple", "dict"])
def test_rows_and_maps_act_on_every_tensor(x) -> None:
    assert same(rows(x, slice(2, 4)), rows(x, torch.tensor([2, 3])))
    assert same(map_inputs(x, lambda value: value[2:4]), rows(x, slice(2, 4)))


@pytest.mark.parametrize("x", KINDS, ids=["tensor", "tuple", "dict"])
def test_gathering_a_pair_gives_the_pair(x) -> None:
    check_inputs(x)
    for data in ((x, Y), [x, Y]):
        gathered, y = gather(data)
        assert same(gathered, x)
        assert torch.equal(y, Y)


@pytest.mark.parametrize("batch_size", [1, 4, 10])
def test_gathering_a_loader_gives_its_dataset(batch_size: int) -> None:
    x, y = gather(DataLoader(TensorDataset(X, Y), batch_size))
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


@pytest.mark.parametrize("as_dict", [False, True])
def test_loaders_of_several_inputs_keep_their_structure(as_dict: bool) -> None:
    """The default collate function makes lists of tuples; they are tuples again here."""
    x, y = gather(DataLoader(Pairs(as_dict), 4))
    assert same(x, {"left": X, "right": Y} if as_dict else (X, Y))
    assert torch.equal(y, Y)


def test_any_iterable_that_can_be_read_again_is_a_loader() -> None:
    class Loader:
        def __iter__(self):
            return iter([(X[:4], Y[:4]), [X[4:], Y[4:]]])

    assert torch.equal(gather(Loader())[0], X)


def test_a_loader_that_shuffles_is_refused() -> None:
    torch.manual_seed(0)
    message = r"other batches on a second pass: it shuffles, or augments .* with shuffle=False"
    for batch_size in (3, 10):
        loader = DataLoader(TensorDataset(X, Y), batch_size, shuffle=True)
        with pytest.raises(InputError, match=message):
            gather(loader)


def test_a_loader_that_augments_is_refused() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, n):
            return X[n] + torch.rand(()), Y[n]

    with pytest.raises(InputError, match="it shuffles, or augments at random"):
        gather(DataLoader(Noisy(X, Y), 4))


def test_an_iterator_is_refused_since_it_can_be_read_only_once() -> None:
    message = r"can be read only once, since it is an iterator \(an object of type generator\)\. Pass the D"
    with pytest.raises(InputError, match=message):
        gather((X[i : i + 2], Y[i : i + 2]) for i in range(0, 10, 2))
    for iterator in (
        zip([X], [Y], strict=True),
        iter([(X, Y)]),
        iter(DataLoader(TensorDataset(X, Y))),
    ):
        with pytest.raises(InputError, match="data can be read only once"):
            gather(iterator)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataLoader(TensorDataset(X), 4),
            r"must be a pair \(x, y\) or .*, but has a tuple of \[a tensor",
        ),
        (
            DataLoader(TensorDataset(X, Y, Y), 4),
            r"must be a pair \(x, y\) or a loader of such pairs",
        ),
        (DataLoader([{"x": 1.0, "y": 2.0}]), r"of such pairs, but has a dict of \{x: a tensor"),
        (
            X,
            r"must be a pair \(x, y\), a Dataset or a DataLoader, but is a tensor of shape \(10, 2\)",
        ),
        ((X,), r"must be a pair \(x, y\)"),
        ((X, Y, Y), r"must be a pair \(x, y\)"),
        (3, r"must be a pair \(x, y\), a Dataset or a DataLoader, but is an object of type int"),
        (None, r"must be a pair \(x, y\), a Dataset or a DataLoader, but is None"),
        (DataLoader([]), r"data is empty: the loader gave no batch"),
        ((X[:0], Y[:0]), r"x is empty: at least one point is needed"),
        ((X, Y[:9]), r"x has 10 rows and y has 9: they must have equally many"),
        ((X, torch.tensor(1.0)), r"x has 10 rows and y has 0"),
        (((X, Y[:9]), Y), r"the tensors in x must have equally many rows, but have \[10, 9\]"),
        (
            ({"a": X, "b": Y[:4]}, Y),
            r"the tensors in x must have equally many rows, but have \[10, 4\]",
        ),
        (
            (X, [1.0] * 10),
            r"y must be a tensor, but is a list of .*, …\]\. Use torch\.as_tensor\(y\)",
        ),
        (([X, X], Y), r"x must be a tensor, or a tuple or dict of tensors, but is a list"),
        (((X, None), Y), r"x must be .*, but is a tuple of \[a tensor .*, None\]"),
        ((X, Y / 0), r"y must be finite, but 10 of 10 values are NaN or infinite"),
        (
            (X.log(), Y),
            r"x must be finite, but 1 of 20 values is NaN or infinite \(first in row 0\)",
        ),
    ],
)
def test_data_that_are_no_pairs_are_refused(data, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gather(data)


class Batches:
    """A loader of these batches."""

    def __init__(self, batches: list) -> None:
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_batches_of_different_shapes_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"same shapes, but one batch has \(\(2,\), \(1,\)\) and another \(\(1,\), \(1,\)\). Pad",
    ):
        gather(Batches([(X, Y), (X[:, :1], Y)]))


def test_entries_of_batches_are_joined_by_their_names() -> None:
    first, later = {"a": X[:4], "b": Y[:4]}, {"b": Y[4:], "a": X[4:]}
    x, y = gather(Batches([(first, Y[:4]), (later, Y[4:])]))
    assert same(x, {"a": X, "b": Y})
    assert torch.equal(y, Y)
    missing = [(first, Y[:4]), ({"a": X[4:]}, Y[4:])]
    with pytest.raises(
        InputError, match=r"has \(\{'a': .*'b': .*\).* and another \(\{'a': \(2,\)\},"
    ):
        gather(Batches(missing))


def test_descriptions_are_short_and_nested() -> None:
    assert describe(X) == "a tensor of shape (10, 2) and torch.float32"
    assert describe((X, 3)) == f"a tuple of [{describe(X)}, an object of type int]"
    assert describe({"ids": X}) == f"a dict of {{ids: {describe(X)}}}"
