"""Which product of inputs and gradients makes a part of the kernel, and that both products give the same."""

from __future__ import annotations

import pytest
import torch

from net2gp.linear import Outer
from net2gp.linear.forward.factors import accumulate, jacobian, mirror


def outer(num_outputs: int, places: int, width: int, inputs: int, turned: bool = False) -> Outer:
    generator = torch.Generator().manual_seed(places)
    a = torch.randn(4, 1, places, inputs, generator=generator, dtype=torch.float64)
    g = torch.randn(
        4, num_outputs, 1, width, places, generator=generator, dtype=torch.float64
    )  # points, outputs, groups, width, places
    return Outer(a, g, torch.ones((), dtype=torch.float64), turned)


def test_outputs_share_the_products_of_inputs_so_that_few_of_them_make_gradients_cheaper():
    assert not outer(1, 16, 64, 576).by_gram
    assert outer(10, 16, 64, 576).by_gram
    assert not outer(10, 64, 64, 576).by_gram
    assert outer(1, 1, 64, 576).by_gram


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sizes", [(1, 4, 8, 9), (3, 2, 8, 90), (2, 1, 6, 5), (3, 6, 4, 3)])
def test_the_kernel_is_the_product_of_the_gradients(sizes, turned):
    factor = outer(*sizes, turned)
    C = sizes[0]
    J = jacobian(factor).flatten(0, 1)
    by_hand = torch.einsum("bcsot,bsti->bcsoi", factor.g, factor.a)
    by_hand = by_hand.mT if turned else by_hand
    torch.testing.assert_close(J, by_hand.flatten(2).flatten(0, 1))
    K = torch.zeros(4 * C, 4 * C, dtype=torch.float64)
    accumulate(K, factor, factor, C)
    mirror(K, C)
    torch.testing.assert_close(K, J @ J.mT)


@pytest.mark.parametrize("sizes", [(3, 2, 8, 90), (1, 1, 6, 5), (2, 6, 4, 3)])
def test_weights_that_keep_their_entries_in_two_orders_have_the_same_kernel(sizes):
    """The same parameter may be used in one way by some points and in another by others."""
    one, other = outer(*sizes), outer(*sizes, turned=True)
    C = sizes[0]
    K = torch.zeros(4 * C, 4 * C, dtype=torch.float64)
    accumulate(K, one, other, C)
    torch.testing.assert_close(K, jacobian(one).flatten(0, 1) @ jacobian(other).flatten(0, 1).mT)
