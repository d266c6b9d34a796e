from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from architectures import ARCHITECTURES, Apply, points
from net2gp import memory
from net2gp.errors import InputError, TooLarge
from net2gp.linear import TangentKernel, linearize
from net2gp.linear.forward import factors
from net2gp.linear.forward.factors import (
    Direct,
    Lookup,
    Outer,
    accumulate,
    jacobian,
    mixed,
    picked,
    pulled,
    pushed,
)
from net2gp.types import FeatureKernel, Kernel
from reference.jacobians import brute_force_jacobian, flat

FAMILIES = [
    "mlp",
    "lenet_max_pool",
    "grouped_convolution",
    "embedding_with_padding",
    "batch_norm",
    "time_distributed_linear",
    "vision_transformer",
    "layer_used_twice",
]


def columns(name: str) -> dict[str, Tensor]:
    """The Jacobian (N·C, p) of each parameter."""
    network, x = ARCHITECTURES[name]()
    J = brute_force_jacobian(network, x)
    return {key: value.reshape(value.shape[0] * value.shape[1], -1) for key, value in J.items()}


def test_the_kernels_are_what_the_posteriors_expect() -> None:
    linearized = linearize(nn.Linear(2, 2).eval())
    assert isinstance(linearized.kernel(), FeatureKernel)
    assert isinstance(linearized.trace_kernel(), Kernel)
    assert linearized.kernel().outputs(torch.zeros(1, 2)) == 2
    assert linearized.trace_kernel().outputs(torch.zeros(1, 2)) is None
    assert linearized.kernel().num_features == 6


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attribute", ["CHUNK_BYTES", "TILE_ROWS"])
def test_the_size_of_pieces_and_tiles_changes_nothing(
    monkeypatch, name: str, attribute: str
) -> None:
    network, x = ARCHITECTURES[name]()
    kernel = linearize(network).kernel({"*": 0.5, "*weight": 2.0})
    K, cross, blocks = kernel(x), kernel(x[:4], x[3:]), kernel.blocks(x)
    trace = linearize(network).trace_kernel()(x)
    monkeypatch.setattr(factors, attribute, 3)
    torch.testing.assert_close(kernel(x), K, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kernel(x[:4], x[3:]), cross, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kernel.blocks(x), blocks, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linearize(network).trace_kernel()(x), trace, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cost", [0, 10**9])
def test_both_ways_to_multiply_gradients_agree(monkeypatch, name: str, cost: int) -> None:
    """Inner products of inputs and of output gradients, or products of the gradients themselves."""
    J = torch.cat(list(columns(name).values()), 1)
    network, x = ARCHITECTURES[name]()
    monkeypatch.setattr(factors, "ELEMENTWISE", cost)
    torch.testing.assert_close(linearize(network).kernel()(x), J @ J.T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernel_is_a_sum_over_parameters_times_their_variances(name: str) -> None:
    network, x = ARCHITECTURES[name]()
    linearized, J = linearize(network), columns(name)
    variances = {key: 0.1 + i for i, key in enumerate(J)}
    expected = sum(variances[key] * J[key] @ J[key].T for key in J)
    torch.testing.assert_close(linearized.kernel(variances)(x), expected, rtol=1e-9, atol=1e-12)
    for key in list(J)[:3]:
        alone = linearized.kernel({"*": 0.0, key: 1.0})(x)
        torch.testing.assert_close(alone, J[key] @ J[key].T, rtol=1e-9, atol=1e-12)


def test_of_several_patterns_the_last_counts() -> None:
    linearized = linearize(ARCHITECTURES["mlp"]()[0])
    prior = linearized.kernel({"*": 1.0, "*.bias": 0.5, "4.*": 2.0}).prior_var
    assert {name: float(value) for name, value in prior.items()} == {
        "0.weight": 1.0, "0.bias": 0.5, "2.weight": 1.0, "2.bias": 0.5, "4.weight": 2.0, "4.bias": 2.0,
    }  # fmt: skip


def test_zero_variances_give_a_zero_kernel() -> None:
    network, x = ARCHITECTURES["vision_transformer"]()
    kernel = linearize(network).kernel(0.0)
    assert not kernel(x).any()
    assert not kernel.blocks(x).any()


def test_a_scaled_kernel_is_a_multiple() -> None:
    network, x = ARCHITECTURES["mlp"]()
    kernel = linearize(network).kernel({"*": 1.0, "*.bias": 0.5})
    torch.testing.assert_close(kernel.scaled(3.0)(x), 3.0 * kernel(x))
    trace = linearize(network).trace_kernel()
    torch.testing.assert_close(trace.scaled(torch.tensor(3.0))(x), 3.0 * trace(x))


def test_inputs_are_followed_only_where_autograd_records() -> None:
    """Parameters without structure too: better no gradient in x than that of some parameters alone."""
    network, x = ARCHITECTURES["vision_transformer"]()
    linearized = linearize(network)
    kernel, x = linearized.kernel(), x.requires_grad_()
    made = (linearized.jacobian, kernel.features, kernel, kernel.blocks)
    assert all(function(x).requires_grad for function in made)
    with torch.no_grad():
        assert not any(function(x).requires_grad for function in made)
    assert not any(function(x.detach()).requires_grad for function in made)


def test_one_point_is_enough() -> None:
    for name in FAMILIES:
        network, x = ARCHITECTURES[name]()
        kernel = linearize(network).kernel()
        C = linearize(network)(x).shape[1]
        torch.testing.assert_close(kernel(x[2:3]), kernel(x)[2 * C : 3 * C, 2 * C : 3 * C])
        torch.testing.assert_close(kernel(x[2:3], x), kernel(x)[2 * C : 3 * C])


@pytest.mark.parametrize(("one", "other"), [(5, 2), (2, 5), (1, 3), (9, 1), (3, 4)])
def test_other_lengths_on_the_two_sides_are_allowed(one: int, other: int) -> None:
    def forward(self, x):
        h = self.inner(x.reshape(-1, 8)).tanh().reshape(*x.shape[:2], 4)
        h = self.conv(self.outer(h).sin().mT).mean(2)
        return self.head(h)

    torch.manual_seed(0)
    parts = {
        "inner": nn.Linear(8, 4),
        "outer": nn.Linear(4, 3),
        "conv": nn.Conv1d(3, 4, 3, padding=1),
    }
    network = Apply(forward, **parts, head=nn.Linear(4, 2)).double().eval()
    x, y = points(one, 8), points(other, 8)
    J, H = (flat(brute_force_jacobian(network, z)).flatten(0, 1) for z in (x, y))
    torch.testing.assert_close(linearize(network).kernel()(x, y), J @ H.T)


def finite_difference(function, at: float, step: float = 1e-5) -> Tensor:
    return (function(at + step) - function(at - step)) / (2 * step)


@pytest.mark.parametrize(
    "name", ["mlp", "batch_norm", "vision_transformer", "embedding_with_padding"]
)
@pytest.mark.parametrize(
    "what", ["kernel", "cross", "trace", "blocks", "diag", "matmul", "features"]
)
def test_prior_variances_are_differentiable(name: str, what: str) -> None:
    network, x = ARCHITECTURES[name]()
    linearized = linearize(network)
    C = linearized(x).shape[1]
    generator = torch.Generator().manual_seed(0)
    bias_var = torch.tensor(0.3, dtype=torch.float64)

    def evaluate(weight_var: Tensor) -> Tensor:
        kernel = linearized.kernel({"*": bias_var, "*weight": weight_var})
        v = torch.ones(6 * C, 1, dtype=torch.float64)
        result = {
            "kernel": lambda: kernel(x),
            "cross": lambda: kernel(x[:2], x[2:]),
            "trace": lambda: linearized.trace_kernel({"*": bias_var, "*weight": weight_var})(x),
            "blocks": lambda: kernel.blocks(x),
            "diag": lambda: kernel.diag(x),
            "matmul": lambda: kernel.matmul(x, x, v),
            "features": lambda: kernel.features(x),
        }[what]()
        weights = torch.randn(result.shape, generator=generator.manual_seed(0), dtype=torch.float64)
        return (result * weights).sum()

    weight_var = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    evaluate(weight_var).backward()
    expected = finite_difference(lambda v: evaluate(torch.tensor(v, dtype=torch.float64)), 0.7)
    torch.testing.assert_close(weight_var.grad, expected, rtol=1e-6, atol=1e-8)


def test_a_number_can_be_differentiated_beside_variances_per_entry() -> None:
    network, x = ARCHITECTURES["mlp"]()
    linearized, J = linearize(network), columns("mlp")
    entries = torch.rand(6, 4, dtype=torch.float64)
    variance = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    K = linearized.kernel({"*": variance, "0.weight": entries})(x)
    rest = sum(J[key] @ J[key].T for key in J if key != "0.weight")
    fixed = (J["0.weight"] * entries.flatten()) @ J["0.weight"].T
    torch.testing.assert_close(K.detach(), 0.7 * rest + fixed)
    K.sum().backward()
    torch.testing.assert_close(variance.grad, rest.sum())


def test_the_gradient_of_a_kernel_in_variances_per_entry_is_refused() -> None:
    network, x = ARCHITECTURES["linear"]()
    entries = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    kernel = linearize(network).kernel({"*": 1.0, "weight": entries})
    with pytest.raises(
        InputError, match="'weight' has one value per entry and requires a gradient"
    ):
        kernel(x)
    with torch.no_grad():
        assert kernel(x).shape == (12, 12)


def test_scaling_by_a_variance_is_differentiable() -> None:
    network, x = ARCHITECTURES["mlp"]()
    kernel = linearize(network).kernel({"*": 1.0, "*.bias": 0.5})
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    kernel.scaled(scale)(x).sum().backward()
    torch.testing.assert_close(scale.grad, kernel(x).sum())


@pytest.mark.parametrize(
    ("prior_var", "message"),
    [
        (-1.0, r"must be finite and not negative, but is -1\.0"),
        (float("nan"), "must be finite and not negative, but is nan"),
        ({"*": 1.0, "0.bias": float("inf")}, r"prior_var\['0\.bias'\] must be finite"),
        ({"*": 1.0, "head.*": 1.0}, r"prior_var has 'head\.\*', which matches none of: 0\.weight"),
        (
            {"0.weight": 0.1, "*": 1.0},
            r"prior_var\['0\.weight'\] decides nothing.*Put '0\.weight' behind '\*'",
        ),
        (
            {"*.weight": 1.0},
            r"leaves out 0\.bias, 2\.bias, 4\.bias\. Add a pattern such as '\*': 1\.0",
        ),
        (
            {"*": 1.0, "0.bias": torch.ones(3)},
            r"'0\.bias' must be .* shape \(6,\), but is a tensor of",
        ),
        (
            torch.ones(6, 4),
            r"prior_var for '0\.bias' must be a number or have the parameter's shape",
        ),
    ],
)
def test_prior_variances_that_fit_no_parameter_are_refused(prior_var, message: str) -> None:
    linearized = linearize(ARCHITECTURES["mlp"]()[0])
    for build in (linearized.kernel, linearized.trace_kernel):
        with pytest.raises(InputError, match=message):
            build(prior_var)


@pytest.fixture
def little_memory(monkeypatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device="cpu": 2**20)


@pytest.mark.usefixtures("little_memory")
def test_a_kernel_matrix_that_cannot_fit_is_refused_beforehand() -> None:
    kernel = replace(linearize(nn.Linear(2, 30).double().eval()).kernel(), memory_budget=2**20)
    x = torch.randn(4000, 2, dtype=torch.float64)
    message = (
        r"120000 × 120000 kernel matrix would take 1\d\d\.\d GiB, but 0\.0 GiB are free on cpu\. "
    )
    with pytest.raises(TooLarge, match=message + r"Instead: use kernel\.matmul"):
        kernel(x)
    with pytest.raises(MemoryError, match=r"120000 × 60 kernel matrix"):
        kernel(x, x[:2])
    assert kernel.blocks(x[:2]).shape == (2, 30, 30)


@pytest.mark.usefixtures("little_memory")
def test_a_jacobian_that_cannot_fit_is_refused_beforehand() -> None:
    linearized = linearize(nn.Linear(100, 30).eval())
    x = torch.randn(1000, 100)
    message = r"a Jacobian of 1000 × 30 × 3030 would take 0\.7 GiB, but 0\.0 GiB are free"
    with pytest.raises(
        TooLarge, match=message + r".* Instead: use linearized\.kernel\(\), jvp and vjp"
    ):
        linearized.jacobian(x)
    with pytest.raises(TooLarge, match="Jacobian of 1000"):
        linearized.kernel().features(x)


def test_vectors_of_another_height_are_refused() -> None:
    network, x = ARCHITECTURES["mlp"]()
    kernel: TangentKernel = linearize(network).kernel()
    outputs = r"must have shape \(18, k\), a row for each of the outputs"
    params = r"must have shape \(83, k\), a row for each of the parameters"
    for wrong in (torch.ones(17, 1), torch.ones(18)):
        with pytest.raises(InputError, match=outputs):
            kernel.adjoint(x, wrong)
        with pytest.raises(InputError, match=outputs):
            kernel.matmul(x, x, wrong)
    for wrong in (torch.ones(80, 2), torch.ones(1, 2), torch.ones(83)):
        with pytest.raises(InputError, match=params):
            kernel.apply(x, wrong)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("prior_var", [1.0, {"*": 0.3, "*weight": 2.0}], ids=["one", "several"])
def test_precise_products_keep_a_single_precision_kernel_positive(name: str, prior_var) -> None:
    network, x = ARCHITECTURES[name]()
    expected = linearize(network).kernel(prior_var)
    x = torch.cat([x, x])
    single = x.float() if x.is_floating_point() else x
    kernel = expected.to(dtype=torch.float32).precise()
    K = kernel(single)
    scale = float(K.abs().max())
    assert K.dtype == torch.float64
    torch.testing.assert_close(K, expected(x), rtol=0, atol=2e-5 * scale)
    assert torch.linalg.eigvalsh(K).min() >= -1e-13 * len(K) * scale
    # products and blocks speak of the same kernel, to the digits of float64
    exactly = {"rtol": 0, "atol": 1e-12 * len(K) * scale}
    v = torch.linspace(-1, 1, 2 * len(K), dtype=torch.float64).reshape(-1, 2)
    torch.testing.assert_close(kernel.diag(single), K.diagonal(), **exactly)
    torch.testing.assert_close(kernel.matmul(single, single, v), K @ v, **exactly)
    features = kernel.features(single).flatten(0, 1)
    torch.testing.assert_close(features @ features.T, K, rtol=0, atol=1e-6 * scale)


def test_products_with_factors_are_those_with_their_jacobians():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    ids = torch.randint(-1, 5, (4, 6), generator=generator)
    some = [
        Direct(draw(4, 3, 7)),
        Outer(draw(4, 2, 5, 3), draw(4, 3, 2, 4, 5), torch.tensor(1.0)),
        Outer(draw(4, 2, 5, 3), draw(4, 3, 2, 4, 5), draw(2, 4, 3)),
        Lookup(ids, draw(4, 3, 6, 2), torch.tensor(1.0), 5),
    ]
    v, mix = draw(4, 3), draw(4, 3, 2)
    rows = torch.tensor([0, 3, 5, 7, 7])
    for factor in some:
        J = jacobian(factor)
        w = draw(J.shape[-1])
        torch.testing.assert_close(pushed(factor, w), J @ w)
        torch.testing.assert_close(pulled(factor, v), torch.einsum("bcp,bc->p", J, v))
        combined = mixed(factor, mix)
        torch.testing.assert_close(jacobian(combined), mix.mT @ J)
        chosen = picked(combined, rows // 2, rows)
        torch.testing.assert_close(jacobian(chosen)[:, 0], (mix.mT @ J).flatten(0, 1)[rows])
        cross = torch.zeros(5, 12, dtype=torch.float64)
        accumulate(cross, chosen, factor, 1, 3)
        expected = jacobian(chosen)[:, 0] @ J.flatten(0, 1).mT
        torch.testing.assert_close(cross, expected)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_and_products_from_one_pass_are_those_of_two(name: str, precise: bool) -> None:
    network, x = ARCHITECTURES[name]()
    kernel = linearize(network).kernel(0.7)
    kernel = kernel.precise() if precise else kernel
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(kernel.num_features, 3, generator=generator, dtype=kernel.dtype)
    blocks, products = kernel.blocks_and_products(x, w)
    torch.testing.assert_close(blocks, kernel.blocks(x))
    torch.testing.assert_close(products, kernel.features(x) @ w)
    small = replace(kernel, memory_budget=1)  # a point at a time
    torch.testing.assert_close(small.blocks_and_products(x, w), (blocks, products))
