"""CONTRIBUTING.md: each example is one complete short file, and is held to the laws of what it adds to.

The examples are entries of the registries that the other suites run over: CASES of likelihoods, WAYS and
METHODS of posteriors, KERNELS, CLOSED activations, ARCHITECTURES. Here are the page and the limit rule.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import net2gp as n2g
from contributing import example, sources

SHORT = ("likelihood", "kernel", "structure", "activation")
"""What must fit into one new file of 25 lines."""

ALL = (*SHORT, "limit rule", "layer rule", "method")


def limit_network(width: int) -> nn.Sequential:
    Equalized = example("limit rule").Equalized
    layers = Equalized(3, width), nn.ReLU(), Equalized(width, width), nn.ReLU(), Equalized(width, 1)
    return nn.Sequential(*layers).double()


LIMITS = {"of contributing": limit_network}
"""Networks with layers that have a limit rule, by their width."""


def points(count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64)


def test_the_page_shows_everything_that_can_be_added():
    assert set(sources()) == {*ALL, "paper"}


@pytest.mark.parametrize("section", ALL)
def test_a_section_has_one_complete_example(section):
    assert len(sources()[section]) == 1
    assert example(section).__name__ == "contributing_" + section.replace(" ", "_")


@pytest.mark.parametrize("section", SHORT)
def test_an_example_has_at_most_25_lines(section):
    (source,) = sources()[section]
    assert len(source.splitlines()) <= 25


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("tangent", [False, True], ids=["nngp", "ntk"])
def test_a_limit_rule_is_what_wide_networks_do(name, tangent):
    torch.manual_seed(0)
    network, x = LIMITS[name](128), points()
    limit = n2g.ntk(network)(x) if tangent else n2g.nngp(network)(x)
    estimate = n2g.limits.monte_carlo_kernel(network, 200, tangent=tangent).estimate(x)
    # means over draws differ from the limit by O(1/width), beside the error of the average
    error = 4 * estimate.standard_error + 2 * limit.abs().max() / 128
    assert bool(((estimate.mean - limit).abs() < error).all())
    assert float(error.max() / limit.abs().max()) < (0.1 if tangent else 0.4)
