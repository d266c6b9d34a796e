"""What a message says is true of what was given, and what it tells to type works."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError, TuningAtEdge
from net2gp.limits import UnsupportedLayer


class Around(nn.Module):
    """A network, and what `change` makes of its output."""

    def __init__(self, network: nn.Module, change) -> None:
        super().__init__()
        self.network, self.change = network, change

    def forward(self, x):
        return self.change(self.network(x))


def mlp(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), *middle, nn.ReLU(), nn.Linear(5, 1)).eval()


@pytest.mark.parametrize(
    ("likelihood", "structure", "message"),
    [
        (n2g.Gaussian, None, r"likelihood is the class Gaussian\. Write Gaussian\(\)"),
        (n2g.Gaussian(0.1), n2g.Kron, r"structure is the class Kron\. Write Kron\(\)"),
        (
            n2g.Gaussian(0.1),
            n2g.structures.Subnetwork,
            r"class Subnetwork\. Write Subnetwork\(num_weights\)",
        ),
    ],
)
def test_a_class_without_its_brackets_is_named(likelihood, structure, message: str) -> None:
    x = torch.ones(4, 3)
    with pytest.raises(InputError, match=message):
        n2g.laplace(mlp(), (x, x[:, :1]), likelihood, prior_var=1.0, structure=structure)


def test_condition_names_a_likelihood_without_its_brackets() -> None:
    x = torch.ones(4, 3)
    with pytest.raises(InputError, match=r"likelihood is the class Gaussian\. Write Gaussian\(\)"):
        n2g.condition(n2g.kernels.RBF(), (x, x[:, :1]), n2g.Gaussian)


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
def test_the_noise_of_one_row_ends_at_its_square() -> None:
    network, x = mlp(), torch.ones(1, 3)
    y = 1.5 * network(x).detach()
    with pytest.warns(TuningAtEdge, match="the noise ends at the square of y"):
        n2g.laplace(network, (x, y), n2g.Gaussian())


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (nn.BatchNorm1d(5), "In eval mode it has fixed statistics of one training"),
        (nn.BatchNorm1d(5, track_running_stats=False), "It couples the inputs of a batch"),
    ],
)
def test_what_is_said_of_batch_norm_at_infinite_width_is_true(norm, message: str) -> None:
    with pytest.raises(UnsupportedLayer, match=message):
        n2g.nngp(mlp(norm))(torch.ones(2, 3))


def test_a_transposed_weight_has_a_way_out_that_works() -> None:
    class Product(nn.Linear):
        def forward(self, x):
            return x @ self.weight.T + self.bias

    class Function(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight, self.bias)

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    build = lambda kind: nn.Sequential(kind(3, 5), nn.ReLU(), nn.Linear(5, 1))
    message = r"\.T of a parameter .* write F\.linear\(x, self\.weight, self\.bias\)"
    with pytest.raises(UnsupportedLayer, match=message):
        n2g.nngp(build(Product))(x)
    torch.testing.assert_close(n2g.nngp(build(Function))(x), n2g.nngp(build(nn.Linear))(x))


@pytest.mark.parametrize(
    ("pack", "key"), [(lambda f: {"logits": f}, "logits"), (lambda f: (f, 2 * f), 0)]
)
def test_a_network_that_returns_more_than_a_tensor_has_a_way_out_that_works(pack, key) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    inner = mlp()
    several = Around(inner, pack)
    message = rf"Wrap it in a module whose .* such as self\.network\(x\)\[{key!r}\]"
    with pytest.raises(UnsupportedLayer, match=message):
        n2g.nngp(several)(x)
    wrapped = Around(several, lambda out: out[key])
    torch.testing.assert_close(n2g.nngp(wrapped)(x), n2g.nngp(inner)(x))
