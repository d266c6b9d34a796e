"""What cannot be stored, or is another store, is refused with what to type instead."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import net2gp as n2g
from distributed.store_cases import CASES, Named, contents, points, pooled, three_outputs
from net2gp.distributed import kernel_store
from net2gp.distributed.store import identity
from net2gp.errors import FileFormatError, InputError
from net2gp.kernels import BaseKernel

pytest.importorskip("zarr")


def leaky() -> nn.Module:
    """The same layers with another activation."""
    network = pooled()
    network[1] = nn.LeakyReLU(0.3)
    return network


OTHERS = {
    "variance": (
        n2g.RBF(),
        n2g.RBF(1.0, 1.5),
        r"other values: at the points \[0, 1.*differ by up to",
    ),
    "kernel": (n2g.RBF(), 0.5 * n2g.kernels.Linear(), "its kernel has other values"),
    "rounding": (n2g.RBF(), n2g.RBF(1.0 + 1e-6), "its kernel has other values"),
    "outputs": (
        n2g.linearize(three_outputs()).kernel(),
        n2g.RBF(),
        "its kernel couples 3 outputs and this one no",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_store_of_another_kernel_is_refused(name, tmp_path):
    first, second, message = OTHERS[name]
    kernel_store(tmp_path / "k.zarr", first, points(), tile=3)
    with pytest.raises(InputError, match=rf"store .*k\.zarr is another one: .*{message}"):
        kernel_store(tmp_path / "k.zarr", second, points(), tile=3)


def test_networks_with_the_same_parameters_and_another_activation_are_told_apart(tmp_path):
    x = points(7, 1, 4, 4)
    kernel_store(tmp_path / "k.zarr", n2g.nngp(pooled()), x)
    with pytest.raises(InputError, match="its kernel has other values"):
        kernel_store(tmp_path / "k.zarr", n2g.nngp(leaky()), x)
    with pytest.raises(InputError, match="its kernel has other values"):
        kernel_store(tmp_path / "k.zarr", n2g.ntk(pooled()), x)


def test_kernels_that_differ_beside_the_probes_only_are_told_apart_by_their_fields(tmp_path):
    x = torch.zeros(30, 2, dtype=torch.float64)
    x[7] = 1.0  # not one of the probes, which are alike
    kernel_store(tmp_path / "k.zarr", n2g.RBF(1.0), x)
    with pytest.raises(
        InputError, match="other fields or parameters, although it has the same values"
    ):
        kernel_store(tmp_path / "k.zarr", n2g.RBF(2.0), x)


def test_a_kernel_without_a_name_in_files_is_known_by_its_values(tmp_path):
    kernel, x = CASES["named inputs"]()
    assert kernel_store(tmp_path / "k.zarr", kernel, x).identity["kernel"] is None
    kernel_store(tmp_path / "k.zarr", Named(), x)
    with pytest.raises(InputError, match="other values"):
        kernel_store(tmp_path / "k.zarr", 2.0 * Named(), x)


def test_values_of_another_machine_may_differ_by_rounding(tmp_path, monkeypatch):
    values = identity._values
    kernel_store(tmp_path / "k.zarr", n2g.RBF(), points())
    moved = lambda by: lambda *args: [v * (1 + by) for v in values(*args)]
    monkeypatch.setattr(identity, "_values", moved(1e-13))
    kernel_store(tmp_path / "k.zarr", n2g.RBF(), points())
    monkeypatch.setattr(identity, "_values", moved(1e-7))
    with pytest.raises(InputError, match="other values"):
        kernel_store(tmp_path / "k.zarr", n2g.RBF(), points())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:5], "it is of 7 points and x has 5"),
        (lambda x: x.flip(0), "the numbers in x are others, in another order"),
        (lambda x: x + 1e-12, "the numbers in x are others"),
        (lambda x: x.float(), "or of another dtype"),
    ],
)
def test_the_store_of_other_points_is_refused(change, message, tmp_path):
    kernel_store(tmp_path / "k.zarr", n2g.RBF(), points(), tile=3)
    with pytest.raises(InputError, match=message):
        kernel_store(tmp_path / "k.zarr", n2g.RBF(), change(points()))


def test_names_of_inputs_belong_to_the_points(tmp_path):
    kernel, x = CASES["named inputs"]()
    kernel_store(tmp_path / "k.zarr", kernel, x)
    kernel_store(tmp_path / "k.zarr", kernel, {"b": x["b"], "a": x["a"]})
    with pytest.raises(InputError, match="the numbers in x are others"):
        kernel_store(tmp_path / "k.zarr", kernel, {"a": x["a"], "b": x["b"] + 1})


def test_another_tile_or_dtype_is_refused(tmp_path):
    kernel_store(tmp_path / "k.zarr", n2g.RBF(), points(), tile=3)
    with pytest.raises(InputError, match="its tiles have 3 points and not 2"):
        kernel_store(tmp_path / "k.zarr", n2g.RBF(), points(), tile=2)
    with pytest.raises(InputError, match="its numbers are float64 and not float32"):
        kernel_store(tmp_path / "k.zarr", n2g.RBF(), points(), dtype=torch.float32)


def test_a_folder_that_became_another_store_is_not_filled(tmp_path):
    store = kernel_store(tmp_path / "k.zarr", n2g.RBF(), points(), tile=3)
    shutil.rmtree(tmp_path / "k.zarr")
    with pytest.raises(
        InputError, match=r"there is no store in .* any more\. Call kernel_store again"
    ):
        store.fill()
    kernel_store(tmp_path / "k.zarr", n2g.RBF(2.0), points(), tile=3).fill()
    with pytest.raises(InputError, match="is another one"):
        store.fill()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": 3}, r"path must be a text or a path, but is .*int.*\"kernel\.zarr\""),
        ({"kernel": n2g.RBF}, r"kernel must be a Kernel, but is .*nngp\(network\)"),
        ({"x": [1.0]}, "x must be a tensor"),
        ({"x": torch.full((3, 2), float("nan"))}, "finite"),
        ({"tile": 0}, r"tile must be a positive whole number, but is 0\. Try tile=512"),
        ({"dtype": torch.float16}, r"dtype must be torch\.float32 or torch\.float64, but is torch\.float16"),
        ({"kernel": n2g.RBF(torch.tensor(1.0, requires_grad=True))}, r"requires a gradient.*detach\(\)"),
        ({"x": points().requires_grad_()}, r"requires a gradient.*x\.detach\(\)"),
        ({"x": points() * 1e200, "kernel": n2g.kernels.Linear()}, r"not finite at some of the points \[0, 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused(settings, message, tmp_path):
    given = {"path": tmp_path / "k.zarr", "kernel": n2g.RBF(), "x": points()} | settings
    with pytest.raises(InputError, match=message):
        kernel_store(given.pop("path"), given.pop("kernel"), given.pop("x"), **given)
    assert not (tmp_path / "k.zarr").exists()


@pytest.mark.parametrize("name", ["limit", "lease"])
def test_times_are_positive(name, tmp_path):
    store = kernel_store(tmp_path / "k.zarr", n2g.RBF(), points())
    with pytest.raises(InputError, match=f"{name} must be positive"):
        store.fill(**{name: -1.0})


def test_places_of_something_else_are_refused_and_left_alone(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("mine")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is a file\. Pass the path of a store"):
        kernel_store(file, n2g.RBF(), points())
    with pytest.raises(InputError, match="is a folder of something else"):
        kernel_store(folder, n2g.RBF(), points())
    with pytest.raises(
        InputError, match=r"there is no folder .*Make it first: Path\('.*'\)\.mkdir"
    ):
        kernel_store(tmp_path / "nowhere" / "k.zarr", n2g.RBF(), points())
    assert contents(folder).keys() == {"notes.txt"}
    empty = tmp_path / "empty"
    empty.mkdir()
    assert kernel_store(empty, n2g.RBF(), points()).fill() == 1.0


def test_arrays_of_others_are_refused(tmp_path):
    import zarr

    zarr.create_array(str(tmp_path / "array"), shape=(3, 3), dtype="float64")
    with pytest.raises(InputError, match="is an array of zarr, but not a store of net2gp"):
        kernel_store(tmp_path / "array", n2g.RBF(), points())
    zarr.create_group(str(tmp_path / "group"))
    with pytest.raises(FileFormatError, match=r"zarr\.json does not describe an array of zarr"):
        kernel_store(tmp_path / "group", n2g.RBF(), points())


@pytest.mark.parametrize("change", ["cut", "format"])
def test_metadata_that_cannot_be_read_are_named(change, tmp_path):
    kernel_store(tmp_path / "k.zarr", n2g.RBF(), points())
    file = tmp_path / "k.zarr" / "zarr.json"
    said = json.loads(file.read_text())
    said["attributes"]["net2gp"]["format"] = 2
    file.write_text(json.dumps(said) if change == "format" else file.read_text()[:99])
    message = (
        "has format 2, but this net2gp reads format 1" if change == "format" else "to start again"
    )
    with pytest.raises(FileFormatError, match=message):
        kernel_store(tmp_path / "k.zarr", n2g.RBF(), points())


def test_without_zarr_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(
        ImportError, match=r"a kernel store needs zarr: pip install 'net2gp\[store\]'"
    ):
        kernel_store(tmp_path / "k.zarr", n2g.RBF(), points())


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    kernel, x = n2g.RBF(), points()
    kernel_store(tmp_path / "whole", kernel, x, tile=3).fill()
    store, calls, fsync = kernel_store(tmp_path / "k.zarr", kernel, x, tile=3), [], os.fsync

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 4:  # a file and its folder for each of two tiles
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"tile \(0, 2\) of the store .*No space.*store\.fill\(\)"
    ) as error:
        store.fill()
    assert error.value.errno == errno.ENOSPC
    assert store.progress == 2 / 6
    assert list(store.folder.work.iterdir()) == []
    monkeypatch.setattr(os, "fsync", fsync)
    store.fill()
    assert contents(tmp_path / "k.zarr") == contents(tmp_path / "whole")


def test_a_disk_without_room_for_a_claim_says_so(tmp_path, monkeypatch):
    store = kernel_store(tmp_path / "k.zarr", n2g.RBF(), points(), tile=3)

    def full(handle: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"tile \(0, 0\) .* could not be written \(No space"):
        store.fill()
    monkeypatch.undo()
    assert list(store.folder.work.iterdir()) == []
    assert store.fill() == 1.0


def test_a_disk_that_is_too_small_is_refused_before_work(tmp_path, monkeypatch):
    store = kernel_store(tmp_path / "k.zarr", n2g.RBF(), points(), tile=3)
    small = shutil.disk_usage(tmp_path)._replace(free=400)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: small)
    with pytest.raises(
        OSError, match=r"6 missing tiles .* take .* GiB, but .* dtype=torch\.float32"
    ):
        store.fill()
    assert store.progress == 0


def test_numbers_that_are_too_large_for_float32_are_not_stored(tmp_path):
    x = points(20)
    x[13] *= 1e25  # no probe
    store = kernel_store(tmp_path / "k.zarr", n2g.kernels.Linear(), x, tile=5, dtype=torch.float32)
    with pytest.raises(InputError, match=r"not finite in tile \(2, 2\), at the points \[13\] of x"):
        store.fill()
    kernel_store(tmp_path / "double", n2g.kernels.Linear(), x, tile=5).fill()


@dataclass(frozen=True, eq=False)
class Broken(BaseKernel):
    """A kernel that is infinite beyond a place, and between distant points."""

    where: float = 3.0

    def __call__(self, x, y=None):
        K = n2g.RBF()(x, y)
        far = (x[:, :1] > self.where).expand_as(K)
        return torch.where(far | (far.T if y is None else y[:, 0] > self.where), torch.inf, K)

    def diag(self, x):
        return n2g.RBF().diag(x)


def test_rows_that_are_not_finite_are_named_and_never_written(tmp_path):
    x = points(20)
    x[:, 0] = -1.0
    x[13, 0] = 5.0  # no probe
    store = kernel_store(tmp_path / "k.zarr", Broken(), x, tile=5)
    with pytest.raises(
        InputError, match=r"not finite in tile \(0, 2\), at the points \[13\] of x\. Leave"
    ):
        store.fill()
    assert store.progress == 2 / 10
    assert list(store.folder.work.iterdir()) == []
    x[[6, 7, 9, 10, 12], 0] = 5.0
    store = kernel_store(tmp_path / "more", Broken(), x, tile=20)
    with pytest.raises(InputError, match=r"at the points \[6, 7, 9, 10, 12\] of x and others"):
        store.fill()
