"""What a plan says is compared with plain reverse mode; what differs takes a slower way that is right."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from architectures import Apply, parameter
from net2gp.errors import InputError, NetworkError
from net2gp.likelihoods import Gaussian
from net2gp.linear import linearize
from net2gp.linear.forward.layers import RULES, Rule
from net2gp.linear.planning.probe import plan
from net2gp.methods import adapt, laplace
from net2gp.posteriors import Full, FunctionSpace, load, save
from reference.jacobians import brute_force_jacobian, flat


def forces(wrap: bool) -> nn.Module:
    """A network that differentiates its energy in its input: forces, scores, Hamiltonian flows."""

    def forward(self, x):
        with torch.enable_grad() if wrap else torch.autograd.profiler.record_function("plain"):
            x = x.detach().requires_grad_()
            energy = self.energy(x).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    return Apply(forward, energy=energy())


def energy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1, bias=False))


def functional_forces() -> nn.Module:
    def forward(self, x):
        return torch.func.grad(lambda z: self.energy(z).sum())(x)

    return Apply(forward, energy=energy())


def experts() -> nn.Module:
    """Each point through the expert that its gate picks: some experts see no point."""

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        pick, out = weights.argmax(-1), x.new_zeros(len(x), 4)
        for i in range(3):
            own = pick == i
            if own.any():
                out[own] = getattr(self, f"expert{i}")(x[own]) * weights[own, i, None]
        return self.head(torch.tanh(out))

    parts = {f"expert{i}": nn.Linear(3, 4) for i in range(3)}
    return Apply(forward, gate=nn.Linear(3, 3), head=nn.Linear(4, 2), **parts)


def sorted_by_sign() -> nn.Module:
    """A layer that gets its points in another order, which three of them need not show."""

    def forward(self, x):
        order = (x[:, 0] > 0).to(torch.int8).argsort(stable=True)
        return self.head(torch.tanh(self.inner(x[order])[order.argsort()]))

    return Apply(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2))


NETWORKS = {
    "forces": lambda: forces(wrap=True),
    "forces without enable_grad": lambda: forces(wrap=False),
    "forces with torch.func": functional_forces,
    "one slope": lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 3)),
    "slopes": lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 3)),
    "prototypes": lambda: Apply(
        lambda self, x: self.head(torch.cdist(x, self.centers)),
        centers=parameter(5, 3),
        head=nn.Linear(5, 3),
    ),
    "experts": experts,
    "sorted": sorted_by_sign,
    "half under no_grad": lambda: Apply(
        lambda self, x: self.layer(x) + self.layer(x).detach() * self.layer(x),
        layer=nn.Linear(3, 2),
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().double().eval()


def inputs(num_points: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_points, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("num_points", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NETWORKS)
def test_all_products_with_the_jacobian_equal_those_of_brute_force(
    name: str, num_points: int
) -> None:
    network, x = made(name), inputs(num_points)
    linearized = linearize(network)
    kernel = linearized.kernel()
    kernel(inputs(40, seed=1))  # all experts have points here
    J = flat(brute_force_jacobian(network, x))
    rows = J.flatten(0, 1)
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(kernel(x), rows @ rows.mT, **close)
    torch.testing.assert_close(kernel.blocks(x), J @ J.mT, **close)
    torch.testing.assert_close(kernel(x[:1], x), J[0] @ rows.mT, **close)
    torch.testing.assert_close(linearized.jacobian(x), J, **close)
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(rows.shape[1], 3, generator=generator, dtype=torch.float64)
    u = torch.randn(rows.shape[0], 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(kernel.apply(x, v), rows @ v, **close)
    torch.testing.assert_close(kernel.adjoint(x, u), rows.mT @ u, **close)
    torch.testing.assert_close(kernel.matmul(x, x, u), rows @ (rows.mT @ u), **close)
    pushed = linearized.jvp(x, linearized.unflatten(v[:, 0]))
    torch.testing.assert_close(pushed.flatten(), rows @ v[:, 0], **close)
    pulled = linearized.vjp(x, u[:, 0].reshape(J.shape[:2]))
    torch.testing.assert_close(linearized.flatten(pulled), rows.mT @ u[:, 0], **close)


def test_autocast_inside_a_network_is_off_while_it_is_linearized() -> None:
    """The numbers are those of full precision."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(torch.tanh(self.inner(x)))

    torch.manual_seed(0)
    network = Apply(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)).eval()
    plain = nn.Sequential(network.inner, nn.Tanh(), network.head).eval()
    linearized, x = linearize(network), inputs(5).float()
    wanted = flat(brute_force_jacobian(plain, x))
    torch.testing.assert_close(linearized(x), plain(x).detach())
    torch.testing.assert_close(linearized.jacobian(x), wanted)
    rows = wanted.flatten(0, 1)
    torch.testing.assert_close(linearized.kernel()(x), rows @ rows.mT)
    assert network(x).dtype == torch.bfloat16


def test_autocast_around_a_kernel_is_refused_by_name() -> None:
    linearized = linearize(nn.Linear(3, 2).eval())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InputError, match=r"autocast is on, .* outside of torch\.autocast"),
    ):
        linearized.kernel()(inputs(5).float())


def test_a_network_that_returns_half_precision_is_refused_by_name() -> None:
    network = Apply(lambda self, x: self.layer(x).bfloat16(), layer=nn.Linear(3, 2)).eval()
    linearized, x = linearize(network), inputs(5).float()
    for use in (linearized, linearized.kernel(), linearized.jacobian):
        with pytest.raises(NetworkError, match=r"returns torch\.bfloat16, but derivatives need"):
            use(x)


def test_what_a_network_raises_comes_with_what_was_given() -> None:
    def forward(self, x):
        if x.abs().max() > 10:
            raise KeyError("too far out")
        return self.layer(x)

    linearized = linearize(Apply(forward, layer=nn.Linear(3, 2)).double().eval())
    x = inputs(5) * 100
    step = {name: torch.ones_like(value) for name, value in linearized.params.items()}
    u = torch.ones(5, 2, dtype=torch.float64)
    for use in (
        linearized,
        linearized.kernel(),
        linearized.kernel().blocks,
        linearized.jacobian,
        lambda z: linearized.jvp(z, step),
        lambda z: linearized.vjp(z, u),
        lambda z: linearized.kernel().matmul(z, z, u.reshape(10, 1)),
    ):
        with pytest.raises(NetworkError, match=r"raised KeyError for x, a tensor .*too far out"):
            use(x)


@pytest.mark.parametrize("product", ["jvp", "vjp", "taylor", "apply", "adjoint", "matmul"])
@pytest.mark.parametrize(
    "spoil",
    [lambda x: x - x.mean(0), lambda x: F.dropout(x, 0.5), lambda x: x + torch.randn_like(x)],
    ids=["coupled", "dropout", "noise"],
)
def test_products_of_networks_without_one_jacobian_are_refused(product: str, spoil) -> None:
    network = Apply(lambda self, x: self.layer(spoil(x)), layer=nn.Linear(3, 2)).double().eval()
    linearized, x = linearize(network), inputs(5)
    kernel, u = linearized.kernel(), torch.ones(10, 1, dtype=torch.float64)
    step = {name: torch.ones_like(value) for name, value in linearized.params.items()}
    use = {
        "jvp": lambda: linearized.jvp(x, step),
        "vjp": lambda: linearized.vjp(x, u.reshape(5, 2)),
        "taylor": lambda: linearized.taylor(x, step),
        "apply": lambda: kernel.apply(x, linearized.flatten(step)[:, None]),
        "adjoint": lambda: kernel.adjoint(x, u),
        "matmul": lambda: kernel.matmul(x, x, u),
    }[product]
    with pytest.raises(NetworkError, match="gives other outputs for the same points in another ba"):
        use()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_either_kind_changes_nothing(reentrant: bool) -> None:
    def checkpointed(self, x):
        inner = lambda z: torch.tanh(self.inner(z))
        x = x.detach().requires_grad_() if reentrant else x
        return self.head(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=reentrant))

    torch.manual_seed(0)
    network = Apply(checkpointed, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)).double().eval()
    plain = nn.Sequential(network.inner, nn.Tanh(), network.head).eval()
    J = flat(brute_force_jacobian(plain, inputs(5)))
    torch.testing.assert_close(linearize(network).jacobian(inputs(5)), J)


@pytest.mark.parametrize("name", ["experts", "sorted"])
@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_the_points_changes_nothing(name: str, seed: int) -> None:
    network, x = made(name), inputs(12, seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
    K = (J @ J.mT).reshape(12, 2, 12, 2)[order][:, :, order].reshape(24, 24)
    torch.testing.assert_close(linearize(network).kernel()(x[order]), K, rtol=1e-9, atol=1e-10)


def test_a_rule_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason, a structured gradient that plain reverse mode does not confirm is not used."""
    rule = RULES[nn.Linear]

    def wrong(module: nn.Module, a: Tensor, g: Tensor):
        return rule.factors(module, a, g * (1 + 1e-6 * (g.shape[-1] == 5)))

    monkeypatch.setitem(RULES, nn.Linear, Rule(rule.prepare, wrong))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    network, x = network.double().eval(), inputs(6)
    found = plan(linearize(network), x)
    assert found.leftover == ("2.weight", "2.bias")
    J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
    torch.testing.assert_close(linearize(network).kernel()(x), J @ J.mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_not_taken_for_a_mistake(dtype: torch.dtype) -> None:
    """The bias in front of a softmax over places has no gradient but for rounding."""

    def forward(self, x):
        scores = self.score(x).softmax(1)
        return self.head((scores * x).sum(1))

    torch.manual_seed(0)
    network = Apply(forward, score=nn.Linear(3, 1), head=nn.Linear(3, 2)).to(dtype).eval()
    x = torch.randn(50, 7, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    linearized = linearize(network)
    linearized.kernel()(x)
    assert plan(linearized, x).leftover == ()


def test_parameters_that_no_given_point_uses_are_all_named() -> None:
    x = inputs(12)
    network = made("experts")
    with torch.no_grad():
        network.gate.weight.zero_()
        network.gate.bias.copy_(torch.tensor([5.0, 0.0, 0.0]))
    only = (
        r'linearize\(network, only=\["\*", "!expert1\.weight", "!expert1\.bias", '
        r'"!expert2\.weight", "!expert2\.bias"\]\)'
    )
    with pytest.raises(NetworkError, match=rf"4 of the chosen .* Leave them out: {only}"):
        linearize(network).kernel()(x)
    patterns = ["*", "!expert1.*", "!expert2.*"]
    J = brute_force_jacobian(network, x)
    chosen = {n: value for n, value in J.items() if "expert1" not in n and "expert2" not in n}
    rows = flat(chosen).flatten(0, 1)
    K = linearize(network, only=patterns).kernel()(x)
    torch.testing.assert_close(K, rows @ rows.mT, rtol=1e-9, atol=1e-10)


def test_a_point_that_uses_few_parameters_may_be_predicted() -> None:
    """Also with a linearization that has seen no other point."""
    network, x = made("experts"), inputs(1)
    kernel = linearize(network).kernel()
    J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
    kernel.check(x)
    torch.testing.assert_close(kernel.blocks(x)[0], J @ J.mT, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(kernel.features(x)[0], J, rtol=1e-9, atol=1e-10)


def test_what_torch_cannot_differentiate_is_named() -> None:
    class Stubborn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no derivative here")

    network = Apply(
        lambda self, x: self.a(x) + Stubborn.apply(F.linear(x, self.b)),
        a=nn.Linear(3, 2),
        b=parameter(2, 3),
    ).eval()
    with pytest.raises(NetworkError, match="no derivative here"):
        linearize(network.double()).kernel()(inputs(4))


def test_posteriors_of_routed_networks_are_exact_and_survive_a_file_and_a_copy(tmp_path) -> None:
    network, x = made("experts"), inputs(12, seed=1)
    J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
    data = x, network(x).detach()
    S = torch.linalg.inv(J.mT @ J / 0.1 + torch.eye(J.shape[1], dtype=torch.float64))
    for seed in range(3):
        point = inputs(1, seed)
        j = flat(brute_force_jacobian(network, point))[0]
        variance = (j @ S @ j.mT).diagonal()[None]
        for structure in (Full(), FunctionSpace()):
            posterior = laplace(network, data, Gaussian(0.1), prior_var=1.0, structure=structure)
            save(posterior, tmp_path / "posterior")
            loaded = load(tmp_path / "posterior", made("experts"))
            for one in (posterior, loaded):
                torch.testing.assert_close(one.marginal(point).variance, variance)
                assert one.joint(point).covariance_matrix.shape == (2, 2)
        adapted = adapt(network, data, Gaussian(0.1), prior_var=1.0)
        for one in (adapted, copy.deepcopy(adapted)):
            torch.testing.assert_close(one.marginal(point).variance, variance)
            assert one.joint(point).covariance_matrix.shape == (2, 2)


@pytest.mark.parametrize("structure", [Full(), FunctionSpace()], ids=str)
def test_whether_training_points_use_all_parameters_is_asked_of_these_points_alone(
    structure,
) -> None:
    """Points that another posterior of the same module saw change nothing; a prediction is not refused."""
    network, x = made("experts"), inputs(40, seed=1)
    own = x[network.gate(x).argmax(1) == 0]
    settings = {"prior_var": 1.0, "structure": structure}
    message = "4 of the chosen parameters do not reach the output: expert1.weight, expert1.bias"
    with pytest.raises(NetworkError, match=message):
        laplace(network, (own, network(own).detach()), Gaussian(0.1), **settings)
    posterior = laplace(network, (x, network(x).detach()), Gaussian(0.1), **settings)
    with pytest.raises(NetworkError, match=message):
        laplace(network, (own, network(own).detach()), Gaussian(0.1), **settings)
    assert posterior.joint(own[:2]).covariance_matrix.shape == (4, 4)
