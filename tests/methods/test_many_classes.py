"""Links of networks with many classes, matched on some of them."""

import math
import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import Net2GPWarning
from net2gp.methods.laplace_approximation import matching


@pytest.mark.parametrize(
    "structure", [n2g.Diagonal(), n2g.Kron(), n2g.structures.LowRank(20)], ids=str
)
@pytest.mark.parametrize("sharpness", [1.0, 8.0])
def test_some_classes_give_the_scale_of_all(structure, sharpness, monkeypatch):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 60)).double().eval()
    with torch.no_grad():
        network[2].weight.mul_(sharpness)
    x = torch.randn(80, 3, generator=torch.Generator().manual_seed(1)).double()
    y = network(x).argmax(1)

    def fitted():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Net2GPWarning)
            return n2g.laplace(
                network, (x, y), n2g.Categorical(), structure=structure, prior_var=1.0
            )

    found = fitted()
    monkeypatch.setattr(matching, "MANY_CLASSES", 1000)
    every = fitted()
    assert found.likelihood.link.scale == pytest.approx(every.likelihood.link.scale, rel=0.1)
    sure = [float(one.predict(x).probs.max(1).values.mean()) for one in (found, every)]
    assert sure[0] == pytest.approx(sure[1], abs=0.03)


@pytest.mark.parametrize("structure", [n2g.Full(), n2g.structures.FunctionSpace()], ids=str)
@pytest.mark.parametrize(("size", "apart"), [(30.0, 0.01), (1e4, 0.2)])
def test_links_of_large_logits_are_alike_in_both_dtypes_and_within_the_search(
    structure, size, apart
):
    """Of logits of ten thousand float64 leaves few digits of a variance without a point's own label."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double().eval()
    with torch.no_grad():
        network[2].weight.mul_(size)
    x = torch.randn(250, 3, generator=torch.Generator().manual_seed(1)).double()
    y, sure = network(x).argmax(1), []
    for dtype in (torch.float32, torch.float64):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Net2GPWarning)
            data = (x.to(dtype), y)
            posterior = n2g.laplace(network.to(dtype), data, n2g.Categorical(), structure=structure)
        assert math.log(posterior.likelihood.link.scale) < matching.LARGEST_LOG_SCALE - 10
        sure.append(float(posterior.predict(x.to(dtype)).probs.max(1).values.mean()))
    assert sure[0] == pytest.approx(sure[1], abs=apart)
    assert min(sure) > 0.75
