"""Passes with Gaussian weights, over all kinds of networks that the library knows."""

from __future__ import annotations

import pytest
import torch

from architectures import ARCHITECTURES, OUTPUTS
from net2gp.bayes import Model
from net2gp.bayes.variational.bound import Passes
from net2gp.bayes.variational.noisy_pass import Spread
from net2gp.likelihoods import Gaussian


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_a_pass_with_hardly_any_noise_is_the_network_with_its_gradients(name, estimator):
    network, x = ARCHITECTURES[name]()
    model = Model.of(network, Gaussian(1.0), output=OUTPUTS.get(name))
    leaves = {n: v.clone().requires_grad_() for n, v in model.params.items()}
    want = model.outputs(leaves, x)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(0), dtype=want.dtype)
    slopes = torch.autograd.grad((want * weight).sum(), list(leaves.values()), allow_unused=True)

    passes = Passes.of(model, estimator, x)
    means = {n: v.clone().requires_grad_() for n, v in model.params.items()}
    deviations = {n: torch.full_like(v, 1e-9).requires_grad_() for n, v in means.items()}
    generator = torch.Generator().manual_seed(1)
    with passes.running():
        out = passes.outputs(means, Spread(deviations, False), x, generator)
    inputs = [*means.values(), *deviations.values()]
    own = torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    for i, slope in enumerate(slopes):
        if slope is not None and slope.abs().max() > 1e-9:
            torch.testing.assert_close(own[i], slope, rtol=1e-4, atol=1e-4)
            assert own[len(slopes) + i].abs().max() > 0  # no parameter is left without noise
