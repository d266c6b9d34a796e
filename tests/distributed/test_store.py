"""What is read from a store is the matrix of the kernel, whoever filled it and however often it stopped."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import net2gp as n2g
from distributed.store_cases import CASES, contents, points, pooled, slow_matrix, three_outputs
from net2gp.distributed import kernel_store
from net2gp.distributed.store.tile_folder import TileFolder
from net2gp.errors import FileFormatError, InputError
from net2gp.inputs import num_rows, rows
from net2gp.kernels import BaseKernel
from net2gp.solvers import CG, Nystrom, PivotedCholesky
from net2gp.types import Inputs, Kernel

pytest.importorskip("zarr")


@dataclass(frozen=True, eq=False)
class Silent(BaseKernel):
    """A kernel that says what it is, and computes its matrix for no more than three points."""

    kernel: Kernel

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        assert num_rows(x) <= 3
        return self.kernel(x, y)

    def diag(self, x: Inputs) -> Tensor:
        assert num_rows(x) <= 3
        return self.kernel.diag(x)

    def outputs(self, x: Inputs) -> int | None:
        return self.kernel.outputs(x)

    def check(self, x: Inputs) -> None:
        self.kernel.check(x)


EACH = pytest.mark.parametrize("name", CASES)


def filled(path, kernel, x, **settings):
    store = kernel_store(path, kernel, x, **settings)
    assert store.fill() == store.progress == 1.0
    return store


@EACH
@pytest.mark.parametrize("tile", [1, 3, 7, 9])
def test_the_store_holds_the_matrix_of_the_kernel(name, tile, tmp_path):
    kernel, x = CASES[name]()
    stored = filled(tmp_path / "k.zarr", kernel, x, tile=tile).kernel()
    K = slow_matrix(kernel.precise(), x, tile)
    assert torch.equal(stored(x), K)
    assert torch.equal(stored(x, x), K)
    torch.testing.assert_close(K, kernel(x), rtol=1e-12, atol=1e-12)


@EACH
def test_diagonal_blocks_and_products_are_those_of_the_matrix(name, tmp_path):
    kernel, x = CASES[name]()
    stored = filled(tmp_path / "k.zarr", kernel, x, tile=3).kernel()
    K, C = stored(x), kernel.outputs(x) or 1
    assert torch.equal(stored.diag(x), K.diagonal())
    own = K.reshape(7, C, 7, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert torch.equal(stored.blocks(x), own)
    v = points(len(K), 2, seed=5)
    torch.testing.assert_close(stored.matmul(x, x, v), K @ v, rtol=1e-13, atol=1e-13)


@EACH
def test_other_pairs_are_computed(name, tmp_path):
    kernel, x = CASES[name]()
    stored = kernel_store(tmp_path / "k.zarr", kernel, x, tile=3).kernel()  # with no tile at all
    some = rows(x, slice(1, 4))
    assert torch.equal(stored(some, x), kernel(some, x))
    assert torch.equal(stored(x, some), kernel(x, some))
    assert torch.equal(stored.diag(some), kernel.diag(some))
    assert torch.equal(stored.blocks(some), kernel.blocks(some))
    v = points(len(kernel.diag(some)), 1)
    assert torch.equal(stored.matmul(x, some, v), kernel.matmul(x, some, v))


@EACH
def test_columns_and_rows_of_some_points_are_read(name, tmp_path):
    kernel, x = CASES[name]()
    stored = filled(tmp_path / "k.zarr", kernel, x, tile=3).kernel()
    C, some = kernel.outputs(x) or 1, torch.tensor([5, 0, 2, 5])
    taken = (some[:, None] * C + torch.arange(C)).reshape(-1)
    stored = replace(stored, kernel=Silent(kernel))
    K = stored(x)
    assert torch.equal(stored(x, rows(x, some)), K[:, taken])
    assert torch.equal(stored(rows(x, some), x), K[taken])
    turned = K.reshape(len(K), 7, C).flip(1).reshape(K.shape)
    assert torch.equal(stored(x, rows(x, torch.arange(7).flip(0))), turned)


@EACH
@pytest.mark.parametrize("preconditioner", [PivotedCholesky(4), Nystrom(4)])
def test_conjugate_gradients_read_and_compute_nothing(name, preconditioner, tmp_path):
    kernel, x = CASES[name]()
    stored = filled(tmp_path / "k.zarr", kernel, x, tile=3).kernel()
    y, z = points(7, kernel.outputs(x) or 1, seed=3), rows(x, slice(2, 5))
    solver = CG(tol=1e-12, store_gram=False, preconditioner=preconditioner)
    silent = replace(stored, kernel=Silent(kernel))
    found = n2g.condition(silent, (x, y), n2g.Gaussian(0.1), solver=solver).predict(z).mean
    exact = n2g.condition(kernel, (x, y), n2g.Gaussian(0.1)).predict(z).mean
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


@EACH
def test_a_posterior_from_the_store_is_that_of_the_kernel(name, tmp_path):
    kernel, x = CASES[name]()
    stored = filled(tmp_path / "k.zarr", kernel, x, tile=3).kernel()
    y, z = points(7, kernel.outputs(x) or 1, seed=3), rows(x, slice(2, 5))
    exact, read = (n2g.condition(k, (x, y), n2g.Gaussian(0.1)) for k in (kernel, stored))
    for found in (read, n2g.condition(stored, (x, y), n2g.Gaussian(0.1), solver=CG(tol=1e-12))):
        assert torch.allclose(found.predict(z).mean, exact.predict(z).mean, rtol=1e-9, atol=1e-9)
    assert torch.allclose(read.predict(z).variance, exact.predict(z).variance, rtol=1e-9)
    assert torch.allclose(read.evidence, exact.evidence, rtol=1e-9)


def test_a_posterior_is_saved_with_the_kernel_itself(tmp_path):
    network, x = pooled(), points(7, 1, 4, 4)
    stored = filled(tmp_path / "k.zarr", n2g.nngp(network), x, tile=3).kernel()
    posterior = n2g.condition(2.0 * stored, (x, points(7, 1)), n2g.Gaussian(0.1))
    posterior.save(tmp_path / "it")
    (tmp_path / "k.zarr").rename(tmp_path / "elsewhere")
    again, z = n2g.load(tmp_path / "it", network), points(3, 1, 4, 4, seed=4)
    assert torch.equal(again.predict(z).mean, posterior.predict(z).mean)


def test_float32_halves_the_size_and_keeps_the_numbers_of_the_kernel(tmp_path):
    kernel, x = n2g.nngp(pooled().float()), points(7, 1, 4, 4).float()
    single = filled(tmp_path / "single", kernel, x, tile=3, dtype=torch.float32)
    double = filled(tmp_path / "double", kernel, x, tile=3)
    assert torch.equal(single.kernel()(x).double(), slow_matrix(kernel, x, 3))
    assert torch.equal(double.kernel().precise()(x), slow_matrix(kernel.precise(), x, 3))
    assert double.kernel()(x).dtype == torch.float32
    assert torch.equal(double.kernel()(x), double.kernel().precise()(x).float())
    sizes = [(folder.folder.file((0, 0))).stat().st_size for folder in (single, double)]
    assert sizes == [9 * 4 + 4, 9 * 8 + 4]


def test_points_that_require_a_gradient_are_computed(tmp_path):
    kernel, x = n2g.RBF(), points()
    stored = filled(tmp_path / "k.zarr", kernel, x, tile=3).kernel()
    moving = x.clone().requires_grad_()
    found, expected = (torch.autograd.grad(k(moving).sum(), moving)[0] for k in (stored, kernel))
    assert torch.equal(found, expected)
    assert not stored(x).requires_grad


def test_data_that_change_in_place_do_not_change_the_store(tmp_path):
    x = points()
    store = kernel_store(tmp_path / "k.zarr", n2g.RBF(), x, tile=3)
    expected = n2g.RBF()(x)
    old = x.clone()
    x.zero_()
    store.fill()
    torch.testing.assert_close(store.kernel()(old), expected, rtol=1e-14, atol=1e-14)


def test_a_store_that_moves_to_another_dtype_reads_for_points_of_that_dtype(tmp_path):
    kernel, x = CASES["coupled outputs"]()
    store = filled(tmp_path / "k.zarr", kernel, x, tile=3)
    moved = store.kernel().to(dtype=torch.float32)
    assert torch.equal(moved(x.float()), store.kernel()(x).float())


def test_zarr_reads_the_upper_triangle_and_metadata_are_json(tmp_path):
    import zarr

    kernel, x = n2g.RBF(), points()
    store = filled(tmp_path / "k.zarr", kernel, x, tile=3)
    array = zarr.open_array(str(tmp_path / "k.zarr"), mode="r")
    found, K = torch.from_numpy(array[:]), store.kernel()(x)
    assert torch.equal(found.triu(), K.triu())
    assert bool(found[3:6, :3].isnan().all())
    said = json.loads((tmp_path / "k.zarr" / "zarr.json").read_text())["attributes"]["net2gp"]
    assert (said["points"], said["tile"], said["outputs"]) == (7, 3, None)


def test_a_store_is_opened_with_the_tile_and_dtype_that_it_has(tmp_path):
    kernel, x = n2g.RBF(), points()
    filled(tmp_path / "k.zarr", kernel, x, tile=3, dtype=torch.float32)
    again = kernel_store(tmp_path / "k.zarr", kernel, x.clone())
    assert again.folder == TileFolder(tmp_path / "k.zarr", 7, 3, torch.float32)
    assert again.progress == 1.0
    assert "rows=7, tiles=6, dtype=float32, progress=100%" in repr(again)


def test_tiles_have_five_hundred_rows_unless_said_otherwise(tmp_path):
    kernel, x = CASES["coupled outputs"]()
    assert kernel_store(tmp_path / "k.zarr", kernel, x).folder.width == 21
    many = points(1200)
    assert kernel_store(tmp_path / "many", n2g.RBF(), many).folder.width == 512
    assert kernel_store(tmp_path / "coupled", kernel, many).folder.width == 170 * 3


@dataclass(frozen=True, eq=False)
class Slow(BaseKernel):
    """A kernel that takes its time, and stops where it is told to."""

    seconds: float = 0.0
    fails: BaseException | None = None
    last: tuple[float, ...] = ()

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        time.sleep(self.seconds)
        if self.fails is not None and float(x[0, 0]) in self.last and y is not None:
            raise self.fails
        return n2g.RBF()(x, y)

    def diag(self, x: Tensor) -> Tensor:
        return n2g.RBF().diag(x)


def test_a_limit_ends_after_the_tile_in_progress_and_the_rest_comes_later(tmp_path):
    x = points(12)
    whole = filled(tmp_path / "whole", Slow(), x, tile=2)
    store = kernel_store(tmp_path / "k.zarr", Slow(seconds=0.05), x, tile=2)
    shares = [store.fill(limit=0.12)]
    assert 0 < shares[0] < 1
    while store.progress < 1:
        shares.append(store.fill(limit=0.3))
    assert shares == sorted(shares)
    assert contents(tmp_path / "k.zarr") == contents(tmp_path / "whole")
    assert torch.equal(store.kernel()(x), whole.kernel()(x))


@pytest.mark.parametrize("order", [reversed, lambda tiles: sorted(tiles, key=lambda t: (t[1], t))])
def test_the_bytes_do_not_depend_on_the_order_of_the_tiles(order, tmp_path, monkeypatch):
    kernel, x = n2g.nngp(pooled()), points(7, 1, 4, 4)
    filled(tmp_path / "one", kernel, x, tile=2)
    tiles = TileFolder.tiles
    monkeypatch.setattr(TileFolder, "tiles", lambda folder: list(order(tiles(folder))))
    filled(tmp_path / "other", kernel, x, tile=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_control_c_leaves_whole_tiles_and_no_claim(tmp_path):
    x = points(6)
    broken = Slow(fails=KeyboardInterrupt(), last=(float(x[2, 0]),))
    store = kernel_store(tmp_path / "k.zarr", broken, x, tile=2)
    with pytest.raises(KeyboardInterrupt):
        store.fill()
    assert store.progress == 4 / 6
    assert list((tmp_path / "k.zarr" / ".work").iterdir()) == []
    filled(tmp_path / "k.zarr", Slow(), x)
    filled(tmp_path / "whole", Slow(), x, tile=2)
    assert contents(tmp_path / "k.zarr") == contents(tmp_path / "whole")


@pytest.mark.parametrize("position", [0, 17, -5, -1])
def test_a_flipped_bit_is_found_named_and_repaired(position, tmp_path):
    kernel, x = n2g.RBF(), points()
    store = filled(tmp_path / "k.zarr", kernel, x, tile=3)
    before, file = contents(tmp_path / "k.zarr"), store.folder.file((0, 1))
    content = bytearray(file.read_bytes())
    content[position] ^= 4
    file.write_bytes(content)
    with pytest.raises(
        FileFormatError, match=r"tile \(0, 1\) of .*k\.zarr is corrupted.*repair\(\)"
    ):
        store.kernel()(x)
    with pytest.raises(FileFormatError, match=r"tile \(0, 1\).* corrupted"):
        store.kernel().matmul(x, x, points(7, 1))
    assert store.kernel().diag(x).shape == (7,)
    assert store.repair() == [(0, 1)]
    assert contents(tmp_path / "k.zarr") == before
    assert store.repair() == []


def test_a_tile_that_was_cut_off_counts_as_missing(tmp_path):
    kernel, x = n2g.RBF(), points()
    store = filled(tmp_path / "k.zarr", kernel, x, tile=3)
    before, file = contents(tmp_path / "k.zarr"), store.folder.file((1, 2))
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(
        InputError, match=r"1 of 6 tiles of the store .* are missing.*store\.fill\(\)"
    ):
        store.kernel()(x)
    store.fill()
    assert contents(tmp_path / "k.zarr") == before


def test_a_store_that_is_not_full_says_so(tmp_path):
    kernel, x = CASES["coupled outputs"]()
    store = kernel_store(tmp_path / "k.zarr", kernel, x, tile=3)
    stored = store.kernel()
    reads = (stored, stored.diag, stored.blocks, lambda x: stored.matmul(x, x, points(21, 1)))
    for read in reads:
        with pytest.raises(InputError, match=r"6 of 6 tiles of the store .* missing.*store\.fill"):
            read(x)
    store.fill()
    store.folder.file((0, 0)).unlink()
    with pytest.raises(InputError, match="1 of 6 tiles"):
        store.folder.read((0, 0))


def test_a_product_wants_a_row_for_each_column(tmp_path):
    kernel, x = n2g.linearize(three_outputs()).kernel(), points()
    stored = filled(tmp_path / "k.zarr", kernel, x, tile=3).kernel()
    with pytest.raises(InputError, match=r"has 21 columns, so v must have shape \(21, k\)"):
        stored.matmul(x, x, points(7, 1))
