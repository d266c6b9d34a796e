from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.checkpoint import checkpoint

from architectures import ARCHITECTURES, Apply, points
from net2gp.errors import InputError
from net2gp.linear import Linearized, linearize
from net2gp.linear.linearized import choose
from reference.jacobians import brute_force_jacobian, flat


@pytest.fixture
def smooth() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    layers = nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Sigmoid(), nn.Linear(5, 2)
    return nn.Sequential(*layers).double().eval(), points(3)


def direction(linearized: Linearized) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name, value in linearized.params.items()
    }


def moved(linearized: Linearized, by: float) -> dict[str, Tensor]:
    step = direction(linearized)
    return {name: value + by * step[name] for name, value in linearized.params.items()}


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_the_error_of_a_taylor_polynomial_is_of_the_next_order(smooth, order: int) -> None:
    network, x = smooth
    linearized = linearize(network)
    steps = torch.tensor([0.02, 0.01], dtype=torch.float64)
    errors = []
    for step in steps:
        params = moved(linearized, float(step))
        difference = linearized.evaluate(params, x) - linearized.taylor(x, params, order)
        errors.append(difference.norm())
    slope = torch.log2(errors[0] / errors[1])
    assert abs(float(slope) - (order + 1)) < 0.1


def test_the_linearized_network_is_the_value_plus_the_jacobian_product(smooth) -> None:
    network, x = smooth
    linearized = linearize(network)
    step = direction(linearized)
    expected = linearized(x) + linearized.jvp(x, step)
    torch.testing.assert_close(linearized.taylor(x, moved(linearized, 1.0)), expected)


class Cosine(nn.Module):
    """Cosines of the inputs with a vector that is shorter than eps, and so a linear function of it."""

    def __init__(self, length: float) -> None:
        super().__init__()
        self.center = nn.Parameter(length * torch.tensor([0.3, -0.5, 0.2], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cosine_similarity(x, self.center.expand_as(x), eps=1e-8)[:, None]


class ImportedCosine(Cosine):
    """The same by a name of this file."""

    def forward(self, x: Tensor) -> Tensor:
        return cosine_similarity(x, self.center.expand_as(x), eps=1e-8)[:, None]


class HeldCosine(Cosine):
    """The same by a function that the module holds."""

    def __init__(self, length: float) -> None:
        super().__init__(length)
        self.measure = nn.functional.cosine_similarity

    def forward(self, x: Tensor) -> Tensor:
        return self.measure(x, self.center.expand_as(x), eps=1e-8)[:, None]


class Wrapped(nn.Module):
    """The same as a layer of another module."""

    def __init__(self, length: float) -> None:
        super().__init__()
        self.center, self.layer = Cosine(length).center, nn.CosineSimilarity()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.center.expand_as(x))[:, None]


@pytest.mark.parametrize("kind", [Cosine, ImportedCosine, HeldCosine, Wrapped])
@pytest.mark.parametrize("length", [1e-9, 0.0])
def test_a_cosine_with_a_short_vector_has_the_gradient_of_its_formula(
    length: float, kind: type[nn.Module]
) -> None:
    x, network = points(3), kind(length).eval()
    linearized = linearize(network)
    J = x / x.norm(dim=1, keepdim=True) / 1e-8
    step, u = {"center": torch.tensor([0.7, 0.1, -0.4]).double()}, points(1)[: len(x)]
    torch.testing.assert_close(linearized.jacobian(x).flatten(1), J)
    torch.testing.assert_close(linearized.jvp(x, step)[:, 0], J @ step["center"])
    torch.testing.assert_close(linearized.vjp(x, u)["center"], J.T @ u[:, 0])
    torch.testing.assert_close(linearized.kernel()(x), J @ J.T)
    assert torch.cosine_similarity is nn.functional.cosine_similarity is cosine_similarity


def test_a_network_that_is_linear_in_its_parameters_has_no_error() -> None:
    linearized = linearize(nn.Linear(3, 2).double().eval())
    params, x = moved(linearized, 5.0), points(3)
    torch.testing.assert_close(linearized.taylor(x, params), linearized.evaluate(params, x))


def test_training_further_changes_nothing() -> None:
    network, x = ARCHITECTURES["batch_norm"]()
    linearized = linearize(network)
    kernel = linearized.kernel()
    before = linearized(x), kernel(x), linearized.jacobian(x), kernel.blocks(x)
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    for _ in range(3):
        network(x).square().sum().backward()
        optimizer.step()
    network.eval()
    after = linearized(x), kernel(x), linearized.jacobian(x), kernel.blocks(x)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    assert not torch.allclose(linearize(network).kernel()(x), before[1])


def test_linearizing_leaves_the_network_as_it_was() -> None:
    for name in (
        "embedding_with_padding",
        "batch_norm",
        "pruned",
        "forward_hook_scales_the_output",
    ):
        network, x = ARCHITECTURES[name]()
        state = copy.deepcopy(network.state_dict())
        out = network(x).detach()
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in network.modules()]
        kernel = linearize(network).kernel()
        kernel(x), kernel.matmul(x, x, torch.ones(out.numel(), 2, dtype=out.dtype))
        assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
        assert hooks == [
            (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in network.modules()
        ]
        assert all(p.grad is None and p.requires_grad for p in network.parameters())
        torch.testing.assert_close(network(x).detach(), out, rtol=0, atol=0)


def test_given_parameters_replace_the_networks_own(smooth) -> None:
    network, x = smooth
    other = copy.deepcopy(network)
    with torch.no_grad():
        for value in other.parameters():
            value.add_(torch.randn(value.shape, dtype=value.dtype))
    params = {name: value for name, value in other.named_parameters() if name != "2.bias"}
    with torch.no_grad():
        other[2].bias.copy_(network[2].bias)
    linearized, expected = linearize(network, params), linearize(other)
    torch.testing.assert_close(linearized(x), expected(x))
    torch.testing.assert_close(linearized.kernel()(x), expected.kernel()(x))
    torch.testing.assert_close(linearized.jacobian(x), expected.jacobian(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_differentiated_at_the_linearization(reentrant: bool) -> None:
    """A recomputation in the backward pass would use what the network's parameters are by then."""

    def forward(self, x):
        return self.head(checkpoint(self.inner, x, use_reentrant=reentrant))

    torch.manual_seed(0)
    parts = {"inner": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh())}
    network = Apply(forward, **parts, head=nn.Linear(4, 2)).double().eval()
    x = points(3)
    plain = nn.Sequential(*copy.deepcopy(network.inner), copy.deepcopy(network.head))
    J = flat(brute_force_jacobian(plain, x))
    linearized = linearize(network)
    with torch.no_grad():
        for value in network.parameters():
            value.mul_(3.0)
    expected = J.flatten(0, 1) @ J.flatten(0, 1).T
    u = torch.randn(12, 2, dtype=torch.float64)
    torch.testing.assert_close(linearized.kernel()(x), expected)
    torch.testing.assert_close(linearized.jacobian(x), J)
    torch.testing.assert_close(linearized.kernel().matmul(x, x, u), expected @ u)


class Cube(torch.autograd.Function):
    """x³, written for plain autograd only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


def test_an_operation_written_for_plain_autograd_is_enough() -> None:
    torch.manual_seed(0)
    parts = {
        "inner": nn.Linear(3, 4),
        "head": nn.Linear(4, 2),
        "scale": nn.Parameter(torch.ones(2)),
    }
    network = Apply(lambda self, x: self.head(Cube.apply(self.inner(x))) * self.scale, **parts)
    network, x = network.double().eval(), points(3)
    linearized = linearize(network)
    J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
    kernel, u = linearized.kernel(), torch.randn(12, 3, dtype=torch.float64)
    torch.testing.assert_close(kernel(x), J @ J.T)
    torch.testing.assert_close(kernel.matmul(x, x, u), J @ (J.T @ u))
    step = direction(linearized)
    torch.testing.assert_close(linearized.jvp(x, step).flatten(), J @ linearized.flatten(step))
    # the derivative in the product's own argument survives the detour
    v = u.clone().requires_grad_()
    kernel.matmul(x, x, v).square().sum().backward()
    torch.testing.assert_close(v.grad, 2 * J @ (J.T @ (J @ (J.T @ u))))


@pytest.mark.parametrize("name", ["mlp", "lstm", "vision_transformer"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_the_caller_switched_off_does_not_matter(mode, name: str) -> None:
    network, x = ARCHITECTURES[name]()
    linearized = linearize(network)
    kernel, u = linearized.kernel(), torch.ones(6 * linearized(x).shape[1], 2, dtype=torch.float64)
    expected = kernel(x), kernel.blocks(x), linearized.jacobian(x), kernel.matmul(x, x, u)
    with mode():
        x = x.clone()
        kernel = linearize(network).kernel()
        results = kernel(x), kernel.blocks(x), linearized.jacobian(x), kernel.matmul(x, x, u)
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value)
    torch.testing.assert_close(kernel(x), expected[0])


def test_a_branch_under_no_grad_counts_as_a_constant() -> None:
    def forward(self, x):
        with torch.no_grad():
            factor = self.layer(x).sin()
        return self.layer(x) * factor

    torch.manual_seed(0)
    network, x = Apply(forward, layer=nn.Linear(3, 2)).double().eval(), points(3)
    J = flat(brute_force_jacobian(network, x))
    torch.testing.assert_close(linearize(network).jacobian(x), J)


def test_attention_runs_on_the_same_kernels_before_and_after() -> None:
    network, x = ARCHITECTURES["transformer_batch_first"]()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    flash = torch.backends.cuda.flash_sdp_enabled()
    for enabled in (True, False):
        torch.backends.mha.set_fastpath_enabled(enabled)
        linearize(network)(x)
        assert torch.backends.mha.get_fastpath_enabled() is enabled
    torch.backends.mha.set_fastpath_enabled(fastpath)
    assert torch.backends.cuda.flash_sdp_enabled() == flash


def test_flattening_and_unflattening_are_inverse(smooth) -> None:
    linearized = linearize(smooth[0])
    step = direction(linearized)
    vector = linearized.flatten(step)
    assert vector.shape == (linearized.num_params,)
    again = linearized.unflatten(vector)
    assert all(torch.equal(again[name], step[name]) for name in step)
    columns = {name: torch.stack([value, 2 * value], -1) for name, value in step.items()}
    torch.testing.assert_close(linearized.flatten(columns)[:, 1], 2 * vector)


def test_another_dtype_is_the_same_linearization(smooth) -> None:
    network, x = smooth
    single = linearize(network).to(dtype=torch.float32)
    assert single(x.float()).dtype == torch.float32
    torch.testing.assert_close(
        single(x.float()).double(), linearize(network)(x), rtol=1e-5, atol=1e-5
    )
    assert next(network.parameters()).dtype == torch.float64


def test_patterns_add_up_and_take_away_in_order() -> None:
    names = ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]
    assert choose(names, None) == names
    assert choose(names, "head.*") == ["head.weight", "head.bias"]
    assert choose(names, ["*", "!*.bias", "head.bias"]) == [names[0], names[2], names[3]]
    assert choose(names, ("head.bias", "body.*")) == [names[0], names[1], names[3]]


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("tail.*", r"only='tail\.\*' matches no parameter\. The network has: 0\.weight, 0\.bias"),
        (["*", "!tail"], r"only='!tail' matches no parameter"),
        (["0.*", "!0.*"], r"leaves no parameter\. The network has: 0\.weight"),
        ([], r"only=\[\] leaves no parameter"),
    ],
)
def test_patterns_that_choose_nothing_are_refused(smooth, only, message: str) -> None:
    with pytest.raises(InputError, match=message):
        linearize(smooth[0], only=only)


def test_directions_of_other_names_or_shapes_are_refused(smooth) -> None:
    network, x = smooth
    linearized = linearize(network, only="4.*")
    good = direction(linearized)
    with pytest.raises(InputError, match=r"expected a value for each of \['4.bias', '4.weight'\]"):
        linearized.jvp(x, {"4.bias": good["4.bias"]})
    with pytest.raises(InputError, match=r"expected a value for each of .* but got a tensor"):
        linearized.jvp(x, torch.ones(12))
    with pytest.raises(
        InputError, match=r"'4.bias' must have shape \(2,\), but is a tensor of shape"
    ):
        linearized.jvp(x, {**good, "4.bias": torch.ones(3, dtype=torch.float64)})
    with pytest.raises(
        InputError, match=r"'4.bias' is torch.float32, but the network is torch.float64"
    ):
        linearized.taylor(x, {**good, "4.bias": torch.ones(2)})
    with pytest.raises(InputError, match=r"u must have the shape \(6, 2\) of the output"):
        linearized.vjp(x, torch.ones(6, 3))
    with pytest.raises(InputError, match="order must be 0 or more, but is -1"):
        linearized.taylor(x, good, order=-1)


def test_given_parameters_of_other_names_or_shapes_are_refused(smooth) -> None:
    with pytest.raises(
        InputError, match=r"params has 'head', which the network does not: 0.weight"
    ):
        linearize(smooth[0], {"head": torch.ones(2)})
    with pytest.raises(
        InputError, match=r"params\['0.bias'\] must have shape \(7,\), but is a tensor"
    ):
        linearize(smooth[0], {"0.bias": torch.ones(2)})


@pytest.mark.parametrize("columns", [1, 3])
def test_products_are_finite_where_backward_passes_are(columns):
    """Forward mode through the root of a window of zeros is 0 · ∞, at the points that have one."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.pool = nn.LPPool1d(2, 2)

        def forward(self, x):
            return self.pool(torch.relu(x * self.scale)[:, None])[:, 0]

    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-1.0, -2.0, 3.0, 4.0]], dtype=torch.float64)
    linearized = linearize(Pooled().eval())
    v = torch.randn(4, columns, dtype=torch.float64)
    linearized.jvp(x.abs(), {"scale": v[:, 0]})  # inputs of this shape are known to have slopes
    J = linearized.jacobian(x)
    assert bool(J.isfinite().all())
    torch.testing.assert_close(linearized.jvp(x, {"scale": v[:, 0]}), J @ v[:, 0])
    torch.testing.assert_close(linearized.kernel(1.0).apply(x, v), (J @ v).flatten(0, 1))
