"""Products of limits and kernels with vectors, without the matrix; and kernels as arithmetic on pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.kernels import Matern
from net2gp.limits.limit_kernels import LimitKernel
from net2gp.limits.tiles import batch, compiled_tiles, matrices, products
from net2gp.linalg.fused import ScalarGraph, recorded
from net2gp.linalg.fused.scalar_graph import Value, operation
from net2gp.linalg.fused.triton_program import widths
from net2gp.linalg.fused.triton_source import CODE, source


def perceptron(*functions: nn.Module, inputs: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = []
    for function in functions:
        layers += [nn.Linear(inputs if not layers else 8, 8), function]
    return nn.Sequential(*layers, nn.Linear(8, 1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + torch.relu(self.inner(torch.relu(h))))


NETWORKS = {
    "relu": lambda: perceptron(nn.ReLU(), nn.ReLU(), nn.ReLU()),
    "leaky": lambda: perceptron(nn.LeakyReLU(0.2), nn.LeakyReLU(0.1)),
    "gelu": lambda: perceptron(nn.GELU(), nn.GELU()),
    "norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)),
    "residual": Residual,
}
TILED = {
    "tanh": lambda: perceptron(nn.Tanh(), nn.Tanh()),
}


def limit(name: str) -> n2g.limits.kernels.InfiniteWidth:
    return n2g.infinite_width((NETWORKS | TILED)[name](), weight_var=1.7, bias_var=0.2)


def points(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator, dtype=torch.float64).to(dtype)


def kernels_of(name: str) -> list[LimitKernel]:
    found = limit(name)
    return [found.nngp, found.ntk.scaled(0.5)]


def evaluated(graph: ScalarGraph, inner: Tensor, numbers: Any) -> Tensor:
    """The matrix of a graph by tensor operations, one line after the other."""
    found: dict[int, Any] = {}
    for index, value in zip(graph.row_values, numbers[0], strict=True):
        found[index] = value.reshape(-1, 1)
    for index, value in zip(graph.column_values, numbers[1], strict=True):
        found[index] = value.reshape(1, -1)
    found |= dict(zip(graph.shared_values, numbers[2], strict=True))
    at = lambda value: found[value.index] if isinstance(value, Value) else value
    for index, one in graph.pair_operations():
        if one.name == "inner":
            found[index] = inner
            continue
        keywords = {name: at(value) for name, value in one.keywords}
        found[index] = operation(one.name)(*(at(value) for value in one.arguments), **keywords)
    return found[graph.result]


@pytest.mark.parametrize("tangent", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_kernel_is_arithmetic_on_pairs(name: str, tangent: bool) -> None:
    found, x, y = limit(name), points(9), points(11, seed=1)
    left, right = found.tiles(x, tangent), found.tiles(y, tangent)
    graph = products.scalar_graph(left)
    assert graph is not None
    _, _, first, second, weights, biases = compiled_tiles.flat(left, right)
    numbers = graph.numbers(first, second, [*weights, *biases])
    expected = (found.ntk if tangent else found.nngp)(x, y)
    torch.testing.assert_close(evaluated(graph, x @ y.T, numbers), expected, rtol=1e-11, atol=1e-11)


def test_other_variances_need_no_other_arithmetic() -> None:
    one, other = (n2g.nngp(NETWORKS["relu"](), weight_var=w, bias_var=0.1) for w in (1.0, 2.0))
    graphs = [products.scalar_graph(k.limit.tiles(points(3), False)) for k in (one, other)]
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_operation_of_a_pair_can_be_written(name: str) -> None:
    graph = products.scalar_graph(limit(name).tiles(points(3), True))
    assert graph is not None
    names = {one.name.partition(".")[0] for _, one in graph.pair_operations()}
    assert names - {"inner", "pow"} <= set(CODE)
    compile(source(graph, widths(5)), "program", "exec")


def test_tables_and_positions_are_left_to_tiles() -> None:
    assert products.scalar_graph(limit("tanh").tiles(points(3), False)) is None
    images = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 1))
    found = n2g.infinite_width(images)
    assert products.scalar_graph(found.tiles(torch.randn(2, 1, 6, 6), False)) is None


def test_what_looks_at_more_than_pairs_is_not_arithmetic() -> None:
    function = lambda x, y, left, right, shared: (x @ y.T) / (x @ y.T).max()
    assert recorded(function, 3, (0, 0, 0), torch.float64) is None
    function = lambda x, y, left, right, shared: torch.cdist(x, y)
    assert recorded(function, 3, (0, 0, 0), torch.float64) is None


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 40, 64, 65, 100, 127, 128])
def test_blocks_hold_all_columns_and_little_more(count: int) -> None:
    blocks = widths(count)
    assert count <= sum(blocks) <= max(32, 1.5 * count)
    assert all(one >= 16 and one & (one - 1) == 0 for one in blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*NETWORKS, *TILED])
def test_a_product_is_the_matrix_times_the_vectors(name, dtype, monkeypatch) -> None:
    monkeypatch.setattr(batch, "TILE_BYTES", 2**12)  # many small tiles
    x, y = points(70, dtype=dtype), points(41, seed=1, dtype=dtype)
    v = torch.randn(70, 3, generator=torch.Generator().manual_seed(2), dtype=dtype)
    tol = 1e-12 if dtype == torch.float64 else 2e-6
    for kernel in kernels_of(name):
        for a, matrix in ((x, kernel.precise()(x)), (y, kernel.precise()(y, x))):
            found = kernel.matmul(a, x, v)
            assert found.dtype == dtype
            error = (found.double() - matrix @ v.double()).norm() / (matrix @ v.double()).norm()
            assert float(error) < tol


def test_products_of_coupled_outputs_are_the_matrix_times_the_vectors() -> None:
    network = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 2, 3, padding=1))
    kernel = n2g.nngp(network, weight_var=1.5, bias_var=0.1)
    x = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = torch.randn(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(kernel.matmul(x, x, v), kernel(x) @ v)
    torch.testing.assert_close(kernel.matmul(x[:2], x, v), kernel(x[:2], x) @ v)


@pytest.mark.parametrize("sizes", [(10, 10), (10, 7), (3, 10), (1, 1)])
def test_overlapping_tiles_count_once(sizes: tuple[int, int]) -> None:
    tall, wide = sizes
    for pairs in (1, 4, 9, 12, 30, 200):
        counts = torch.zeros(tall, wide)
        cells = list(matrices._large_cells(tall, wide, pairs))
        for (i, j), (top, first) in zip(cells, products._fresh(cells), strict=True):
            counts[i, j][top:, first:] += 1
        assert bool((counts == 1).all())


def test_products_can_be_differentiated() -> None:
    kernel, x = limit("relu").nngp, points(5)
    v = torch.ones(5, 1, dtype=torch.float64, requires_grad=True)
    kernel.matmul(x, x, v).sum().backward()
    torch.testing.assert_close(v.grad, kernel(x).sum(0)[:, None])
    wanted = points(5).requires_grad_()
    assert kernel.matmul(wanted, wanted, torch.ones(5, 1, dtype=torch.float64)).requires_grad


def test_a_product_with_vectors_of_another_height_is_refused() -> None:
    with pytest.raises(n2g.errors.InputError, match="multiplies v of shape"):
        limit("relu").nngp.matmul(points(4), points(4), torch.ones(5, 1))


@pytest.mark.parametrize(("smoothness", "nu"), [(0.5, 0.5), (1.5, 1.5), (2.5, 2.5)])
def test_matern_is_the_kernel_of_gpytorch(smoothness: float, nu: float) -> None:
    import gpytorch

    peer = gpytorch.kernels.MaternKernel(nu=nu).double()
    peer.lengthscale = 0.7
    x = points(20)
    torch.testing.assert_close(Matern(smoothness, 0.7)(x), peer(x).to_dense().detach())


def test_another_smoothness_is_refused() -> None:
    with pytest.raises(n2g.errors.InputError, match=r"0\.5, 1\.5 or 2\.5, but is 2\.0"):
        Matern(2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 20, 65, 150])
@pytest.mark.parametrize("name", [*NETWORKS, "rbf", "matern"])
def test_programs_of_a_gpu_are_the_matrix_times_the_vectors(name: str, columns: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    others = {"rbf": [n2g.RBF(1.3, 2.0)], "matern": [Matern(s, 1.1, 0.5) for s in (0.5, 1.5, 2.5)]}
    x, y = (points(n, seed=n, dtype=torch.float32).cuda() for n in (777, 1303))
    v = torch.randn(777, columns, generator=torch.Generator().manual_seed(2)).cuda()
    for kernel in others.get(name) or kernels_of(name):
        for a in (x, y):
            matrix = kernel.precise()(a, None if a is x else x)
            found = kernel.matmul(a, x, v).double()
            error = (found - matrix @ v.double()).norm() / (matrix @ v.double()).norm()
            assert float(error) < 3e-6
