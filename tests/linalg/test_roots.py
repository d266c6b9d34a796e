"""Roots of batches of covariances, singular ones among them."""

from __future__ import annotations

import pytest
import torch

from net2gp.errors import InputError, NotPositiveDefinite
from net2gp.linalg.roots import covariance_roots


def covariances(rank: int) -> torch.Tensor:
    shape = (4, 7, rank)
    factor = torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return factor @ factor.mT


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_a_root_times_its_transpose_is_the_covariance(rank):
    K = covariances(rank)
    root = covariance_roots(K)
    torch.testing.assert_close(root @ root.mT, K, rtol=0, atol=1e-13 * float(K.amax()))


def test_regular_and_singular_matrices_share_a_batch():
    K = torch.cat([covariances(2), covariances(7), torch.zeros(1, 7, 7, dtype=torch.float64)])
    root = covariance_roots(K)
    torch.testing.assert_close(root @ root.mT, K, rtol=0, atol=1e-13 * float(K.amax()))
    torch.testing.assert_close(root[4:8], torch.linalg.cholesky(K[4:8]))


def test_equal_rows_stay_equal_and_nothing_is_added():
    """A jitter of 1e-10 would set them apart by 1e-5."""
    K = 1e-40 * torch.ones(1, 3, 3, dtype=torch.float64)
    root = covariance_roots(K)
    assert torch.equal(root[0, 0], root[0, 1])
    torch.testing.assert_close(root @ root.mT, K, rtol=1e-14, atol=0)


def test_what_is_no_covariance_is_refused():
    with pytest.raises(InputError, match="the law must be finite"):
        covariance_roots(torch.full((1, 2, 2), torch.nan), what="the law")
    with pytest.raises(NotPositiveDefinite, match="a conditional variance is -3"):
        covariance_roots(torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]))
