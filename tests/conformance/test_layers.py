"""Laws that the linearization of every architecture obeys. A new one joins in architectures.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from architectures import ARCHITECTURES, OUTPUTS
from net2gp.inputs import map_inputs, num_rows, rows
from net2gp.linear import Linearized, TangentKernel, linearize
from net2gp.types import Inputs, Params
from reference.jacobians import brute_force_jacobian, call, flat

WITHOUT_FORWARD_MODE = {"embedding_bag"}
"""What torch can neither push forward through nor differentiate twice."""


@dataclass(frozen=True)
class Case:
    name: str
    network: nn.Module
    x: Inputs
    linearized: Linearized
    J: Tensor

    @property
    def num_outputs(self) -> int:
        return self.J.shape[1]

    def gram(self, prior: Tensor | float = 1.0) -> Tensor:
        J = self.J.flatten(0, 1)
        return (J * prior) @ J.T

    def skip_without_forward_mode(self) -> None:
        if self.name in WITHOUT_FORWARD_MODE:
            pytest.skip("torch has no forward mode for this network")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request) -> Case:
    network, x = ARCHITECTURES[request.param]()
    output = OUTPUTS.get(request.param)
    J = flat(brute_force_jacobian(network, x, output or (lambda out: out)))
    return Case(request.param, network, x, linearize(network, output=output), J)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mixed_prior(linearized: Linearized) -> Params:
    """Numbers for some parameters, a value per entry for others, zeros here and there."""
    prior: dict[str, Tensor | float] = {"*": 0.7}
    for i, (name, value) in enumerate(linearized.params.items()):
        entries = random(*value.shape, 3).square().sum(-1)
        entries.view(-1)[0] = 0.0
        prior[name] = [entries, 0.3, torch.tensor(2.0), 0.0 if i else 1.3][i % 4]
    return linearized.kernel(prior).prior_var


def flat_prior(kernel: TangentKernel) -> Tensor:
    params = kernel.linearized.params
    return torch.cat([kernel.prior_var[n].expand(p.shape).flatten() for n, p in params.items()])


def test_the_value_is_the_networks_own(case: Case) -> None:
    out = call(case.network, case.x)
    out = case.linearized.output(out) if case.linearized.output else out
    expected = out.detach().reshape(num_rows(case.x), -1)
    assert_close(case.linearized(case.x), expected, 1e-12)


def test_the_jacobian_is_one_gradient_per_point_and_output(case: Case) -> None:
    assert_close(case.linearized.jacobian(case.x), case.J, 1e-10)


def test_the_kernel_is_the_jacobian_times_its_transpose(case: Case) -> None:
    K = case.linearized.kernel()(case.x)
    assert_close(K, case.gram())
    assert_close(K, K.T.clone(), 1e-14)
    eigenvalues = torch.linalg.eigvalsh(K)
    assert eigenvalues.min() >= -1e-12 * eigenvalues.max()


def test_the_cross_kernel_is_a_block_of_the_kernel(case: Case) -> None:
    C = case.num_outputs
    x, y = rows(case.x, slice(0, 4)), rows(case.x, slice(3, 6))
    assert_close(case.linearized.kernel()(x, y), case.gram()[: 4 * C, 3 * C :])


def test_blocks_and_diagonal_are_those_of_the_kernel(case: Case) -> None:
    kernel = case.linearized.kernel()
    assert_close(kernel.blocks(case.x), case.J @ case.J.mT)
    assert_close(kernel.diag(case.x), case.gram().diagonal())


def test_the_trace_kernel_averages_over_outputs(case: Case) -> None:
    trace = torch.einsum("ncp,mcp->nm", case.J, case.J) / case.num_outputs
    kernel = case.linearized.trace_kernel()
    x, y = rows(case.x, slice(0, 4)), rows(case.x, slice(3, 6))
    assert_close(kernel(case.x), trace)
    assert_close(kernel(x, y), trace[:4, 3:])
    assert_close(kernel.diag(case.x), trace.diagonal())
    assert_close(kernel.matmul(x, y, random(3, 2)), trace[:4, 3:] @ random(3, 2), 1e-10)


def test_products_agree_with_the_jacobian(case: Case) -> None:
    case.skip_without_forward_mode()
    kernel, J = case.linearized.kernel(), case.J.flatten(0, 1)
    C = case.num_outputs
    x, y = rows(case.x, slice(0, 4)), rows(case.x, slice(3, 6))
    w, u = random(J.shape[1], 3), random(3 * C, 3)
    assert_close(kernel.apply(x, w), J[: 4 * C] @ w, 1e-10)
    assert_close(kernel.adjoint(y, u), J[3 * C :].T @ u, 1e-10)
    assert_close(kernel.matmul(x, y, u), J[: 4 * C] @ (J[3 * C :].T @ u), 1e-10)


def test_the_backward_product_is_the_adjoint_of_the_forward_product(case: Case) -> None:
    case.skip_without_forward_mode()
    v = {name: random(*value.shape, 1)[..., 0] for name, value in case.linearized.params.items()}
    u = random(*case.J.shape[:2])
    pushed, pulled = case.linearized.jvp(case.x, v), case.linearized.vjp(case.x, u)
    assert_close((pushed * u).sum(), sum((v[name] * pulled[name]).sum() for name in v), 1e-10)
    assert_close(pushed, case.J @ case.linearized.flatten(v), 1e-10)
    assert_close(case.linearized.flatten(pulled), torch.einsum("ncp,nc->p", case.J, u), 1e-10)


def test_a_small_memory_budget_changes_nothing(case: Case) -> None:
    C = case.num_outputs
    x, y = rows(case.x, slice(0, 3)), rows(case.x, slice(3, 5))
    kernel = replace(case.linearized.kernel(), memory_budget=1)
    gram = case.gram()
    assert_close(kernel(x), gram[: 3 * C, : 3 * C])
    assert_close(kernel(x, y), gram[: 3 * C, 3 * C : 5 * C])
    assert_close(kernel.blocks(x), case.J[:3] @ case.J[:3].mT)
    if case.name not in WITHOUT_FORWARD_MODE:
        u = random(2 * C, 2)
        assert_close(kernel.matmul(x, y, u), gram[: 3 * C, 3 * C : 5 * C] @ u, 1e-10)


def test_every_parameter_has_its_own_prior_variance(case: Case) -> None:
    kernel = replace(case.linearized.kernel(), prior_var=mixed_prior(case.linearized))
    prior = flat_prior(kernel)
    expected, C = case.gram(prior), case.num_outputs
    weighted = case.J * prior.sqrt()
    assert_close(kernel(case.x), expected)
    assert_close(kernel.features(case.x), weighted, 1e-10)
    assert_close(kernel.blocks(case.x), weighted @ weighted.mT)
    trace = torch.einsum("ncp,mcp->nm", weighted, weighted) / C
    assert_close(type(case.linearized.trace_kernel())(kernel)(case.x), trace)
    if case.name not in WITHOUT_FORWARD_MODE:
        u = random(6 * C, 2)
        assert_close(kernel.matmul(case.x, case.x, u), expected @ u, 1e-10)


def test_points_in_another_order_permute_the_kernel(case: Case) -> None:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    index = (order[:, None] * case.num_outputs + torch.arange(case.num_outputs)).flatten()
    K = case.linearized.kernel()(rows(case.x, order))
    assert_close(K, case.gram()[index][:, index])


def test_single_precision_comes_close(case: Case) -> None:
    kernel = case.linearized.kernel().to(dtype=torch.float32)
    x = map_inputs(case.x, lambda v: v.float() if v.is_floating_point() else v)
    K = kernel(rows(x, slice(0, 4)))
    assert K.dtype == torch.float32
    C = case.num_outputs
    assert_close(K.double(), case.gram()[: 4 * C, : 4 * C], 2e-5)
