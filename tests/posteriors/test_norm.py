"""The norm that a kernel gives to functions."""

from __future__ import annotations

import pytest
import torch

from net2gp import RBF, Gaussian, condition, linearize
from net2gp.errors import InputError
from net2gp.explain import rkhs_norm
from posteriors.ways import network, points, real_targets


def test_it_is_the_norm_of_the_smallest_weights_through_the_data():
    x = points(6)
    linearized = linearize(network(1, hidden=20))
    y = real_targets(x, 1)
    jacobian = linearized.jacobian(x)[:, 0]
    smallest = torch.linalg.lstsq(jacobian, y, driver="gelsd").solution
    found = rkhs_norm(linearized.kernel(), (x, y))
    torch.testing.assert_close(found, smallest.square().sum(), rtol=1e-7, atol=0)


def test_it_is_what_the_evidence_charges_for_the_fit():
    x, kernel = points(8), RBF(0.8, 1.5)
    y = real_targets(x, 2)
    K = kernel(x)
    evidence = condition(kernel, (x, y), Gaussian(1e-8)).log_marginal_likelihood()
    noisy = K + 1e-8 * torch.eye(8, dtype=K.dtype)
    free = -torch.logdet(noisy) - 8 * torch.log(torch.tensor(2 * torch.pi))
    torch.testing.assert_close(-2 * (evidence - free), rkhs_norm(kernel, (x, y)), rtol=1e-4, atol=0)


def test_noise_and_fewer_points_lower_it():
    x, kernel = points(8), RBF(0.8)
    y = real_targets(x, 1)
    norms = [float(rkhs_norm(kernel, (x, y), noise_var=v)) for v in (0.0, 0.1, 1.0)]
    assert norms == sorted(norms, reverse=True)
    assert float(rkhs_norm(kernel, (x[:5], y[:5]))) < norms[0]


def test_it_needs_one_row_of_targets_a_point():
    with pytest.raises(InputError, match=r"real targets of shape \(N, C\) for the 4 points"):
        rkhs_norm(RBF(), (points(4), torch.zeros(4, 2, 2)))
