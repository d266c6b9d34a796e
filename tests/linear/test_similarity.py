"""Networks compared by the diagonals of their Gram and Fisher matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import net2gp.linear.curvatures.curvature
from net2gp.errors import InputError, NetworkError
from net2gp.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from net2gp.linear import (
    PerFilter,
    PerLayer,
    TaskEmbedding,
    jacobian_similarity,
    linearize,
    similarity_matrix,
    task_distance,
    task_embedding,
)
from reference.jacobians import brute_force_jacobian, flat


def mlp(seed: int = 0, outputs: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


def convolutional(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 3, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    return nn.Sequential(*layers).double().eval()


def images(count: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)


def points(count: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64)


def explicit(network: nn.Module, x: Tensor) -> Tensor:
    """Σ_nc J_ncp² from the Jacobian itself."""
    return flat(brute_force_jacobian(network, x)).square().sum((0, 1))


@pytest.mark.parametrize(("make", "x"), [(mlp, points()), (convolutional, images())])
def test_jacobian_similarity_is_the_cosine_of_the_explicit_diagonals(make, x) -> None:
    one, other = make(0), make(1)
    a, b = explicit(one, x), explicit(other, x)
    expected = (a @ b) / (a.norm() * b.norm())
    torch.testing.assert_close(jacobian_similarity(one, other, x), expected, rtol=1e-12, atol=0)
    assert 0.1 < float(expected) < 0.99


@pytest.mark.parametrize(
    "likelihood",
    [
        Gaussian(torch.tensor([0.3, 2.0]).double()),
        Bernoulli(),
        Categorical(),
        HeteroscedasticGaussian(),
    ],
    ids=lambda likelihood: type(likelihood).__name__,
)
def test_the_embedding_is_the_diagonal_of_the_explicit_fisher_information(likelihood) -> None:
    network, x = mlp(), points()
    J, Lam = flat(brute_force_jacobian(network, x)), likelihood.curvature(network(x).detach())
    expected = torch.einsum("ncp,ncd,ndp->p", J, Lam, J) / len(x)
    found = task_embedding(network, x, likelihood)
    torch.testing.assert_close(found.vector, expected, rtol=1e-10, atol=1e-14)
    assert found.parts["0.weight"].shape == (4, 3)


def test_a_network_is_similar_to_itself_and_order_does_not_matter() -> None:
    one, other, x = convolutional(0), convolutional(1), images()
    assert float(jacobian_similarity(one, one, x)) == pytest.approx(1.0, abs=1e-14)
    assert float(task_distance(*[task_embedding(one, x, Categorical())] * 2)) < 1e-14
    assert torch.equal(jacobian_similarity(one, other, x), jacobian_similarity(other, one, x))
    there = jacobian_similarity(one, other, x, 2 * x)
    back = jacobian_similarity(other, one, 2 * x, x)
    torch.testing.assert_close(there, back, rtol=1e-14, atol=0)


def test_scaling_and_permuting_outputs_changes_nothing() -> None:
    one, other, x = mlp(0), mlp(1), points()
    expected = jacobian_similarity(one, other, x)
    scaled = linearize(other, output=lambda out: 3e6 * out)
    torch.testing.assert_close(jacobian_similarity(one, scaled, x), expected, rtol=1e-12, atol=0)
    swapped = linearize(other, output=lambda out: -out.flip(1))
    torch.testing.assert_close(jacobian_similarity(one, swapped, x), expected, rtol=1e-12, atol=0)


def test_gradients_too_small_to_square_are_compared_all_the_same() -> None:
    one, other, x = mlp(0), mlp(1), points()
    expected = jacobian_similarity(one, other, x)
    tiny = linearize(other, output=lambda out: 1e-110 * out)
    torch.testing.assert_close(jacobian_similarity(one, tiny, x), expected, rtol=1e-10, atol=0)


def test_repeating_or_reordering_the_data_changes_nothing() -> None:
    network, x = convolutional(), images()
    expected = task_embedding(network, x, Categorical()).vector
    for other in (torch.cat([x, x, x]), x.flip(0)):
        found = task_embedding(network, other, Categorical()).vector
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_chunks_of_one_point_give_the_same(monkeypatch) -> None:
    network, x = convolutional(), images()
    expected = task_embedding(network, x, Categorical()).vector
    monkeypatch.setattr(net2gp.linear.curvatures.curvature, "CHUNK_BYTES", 1)
    found = task_embedding(network, x, Categorical()).vector
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_inputs_pairs_and_loaders_are_the_same_data() -> None:
    network, x = mlp(), points()
    expected = task_embedding(network, x, Gaussian(1.0)).vector
    labels = torch.zeros(len(x), dtype=torch.long)
    loader = DataLoader(TensorDataset(x, labels), batch_size=3)
    for data in ((x, labels), loader):
        assert torch.equal(task_embedding(network, data, Gaussian(1.0)).vector, expected)


def test_filters_and_layers_are_means_of_the_parameters() -> None:
    network, x = convolutional(), images()
    whole = task_embedding(network, x, Categorical()).parts
    rows = task_embedding(network, x, Categorical(), per=PerFilter())
    torch.testing.assert_close(rows.parts["0.weight"], whole["0.weight"].mean((1, 2, 3)))
    torch.testing.assert_close(rows.parts["4.bias"], whole["4.bias"])
    assert rows.vector.shape == (3 + 3 + 3 + 3,)
    layers = task_embedding(network, x, Categorical(), per=PerLayer())
    assert list(layers.parts) == ["0", "4"]
    both = torch.cat([whole["4.weight"].reshape(-1), whole["4.bias"]])
    torch.testing.assert_close(layers.parts["4"], both.mean())
    assert layers.vector.shape == (2,)
    later = task_embedding(network, x, Categorical()).pooled(PerLayer())
    assert torch.equal(later.vector, layers.vector)
    with pytest.raises(InputError, match=r"this embedding is PerLayer\(\) already"):
        later.pooled(PerFilter())


def test_only_compares_what_networks_share() -> None:
    x = points()
    two, five = mlp(0), mlp(0, outputs=5)
    with pytest.raises(NetworkError, match=r"'2.weight' gives \(2, 4\) in one and \(5, 4\) in"):
        jacobian_similarity(two, five, x)
    shared = jacobian_similarity(two, five, x, only="0.*")
    a, b = (task_embedding(n, x, Gaussian(1.0), only="0.*").vector for n in (two, five))
    torch.testing.assert_close(shared, (a @ b) / (a.norm() * b.norm()))


def test_parameters_are_matched_by_name_not_by_order() -> None:
    values = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    turned = {"b": torch.tensor([3.0]), "a": torch.tensor([1.0, 2.0])}
    assert float(task_distance(TaskEmbedding(values), TaskEmbedding(turned))) < 1e-15


def test_the_balanced_distance_is_its_definition() -> None:
    x = points()
    a, b = (task_embedding(mlp(seed), x, Categorical()) for seed in (0, 1))
    one, other = a.vector / (a.vector + b.vector), b.vector / (a.vector + b.vector)
    expected = 1 - (one @ other) / (one.norm() * other.norm())
    torch.testing.assert_close(task_distance(a, b, balanced=True), expected)
    assert torch.equal(task_distance(a, b, balanced=True), task_distance(b, a, balanced=True))
    assert float(task_distance(a, a, balanced=True)) < 1e-15


def test_the_matrix_holds_all_pairs() -> None:
    x = points()
    found = [task_embedding(mlp(seed), x, Categorical()) for seed in range(3)]
    matrix = similarity_matrix(found)
    assert torch.equal(matrix.diagonal(), torch.ones(3, dtype=torch.float64))
    assert torch.equal(matrix, matrix.mT)
    for i in range(3):
        for j in range(3):
            expected = 1 - task_distance(found[i], found[j])
            torch.testing.assert_close(matrix[i, j], expected, rtol=1e-12, atol=1e-15)


def test_float32_networks_are_summed_in_float64() -> None:
    one, other, x = mlp(0), mlp(1), points()
    expected = jacobian_similarity(one, other, x)
    found = jacobian_similarity(one.float(), other.float(), x.float())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_network_without_rules_for_its_layers_is_compared_too() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[1.0, -2.0, 0.5]]).double())
            self.scale = nn.Parameter(torch.tensor(1.5).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * (x * self.weight).sin().sum(1, keepdim=True)

    network, x = Scaled().eval(), points()
    found = task_embedding(network, x, Gaussian(1.0))
    torch.testing.assert_close(len(x) * found.vector, explicit(network, x), rtol=1e-12, atol=0)
    rows = task_embedding(network, x, Gaussian(1.0), per=PerFilter())
    assert rows.vector.shape == (2,)


def test_it_works_in_inference_mode() -> None:
    network, x = mlp(), points()
    expected = task_embedding(network, x, Categorical()).vector
    with torch.inference_mode():
        assert torch.equal(task_embedding(network, x, Categorical()).vector, expected)


def test_mistakes_say_what_to_pass() -> None:
    network, x = mlp(), points()
    deeper = nn.Sequential(*network, nn.Linear(2, 2).double()).eval()
    with pytest.raises(NetworkError, match=r"only one of them has '3.weight', '3.bias'.*only="):
        jacobian_similarity(network, deeper, x)
    with pytest.raises(InputError, match=r"likelihood must be e.g. Categorical\(\)"):
        task_embedding(network, x, Categorical)
    with pytest.raises(
        InputError, match=r"PerParameter\(\), PerFilter\(\).*but is an object of type str"
    ):
        task_embedding(network, x, Categorical(), per="filter")
    with pytest.raises(InputError, match="pass only= to linearize"):
        task_embedding(linearize(network), x, Categorical(), only="0.*")
    one = task_embedding(network, x, Categorical())
    other = task_embedding(network, x, Categorical(), per=PerFilter())
    with pytest.raises(InputError, match=r"PerParameter\(\) and another PerFilter\(\)"):
        task_distance(one, other)
    with pytest.raises(InputError, match="x is empty"):
        task_embedding(network, x[:0], Categorical())
    with pytest.raises(InputError, match=r"x is torch.float32, but the network is torch.float64"):
        jacobian_similarity(network, network, x.float())
    with pytest.raises(InputError, match="nothing to compare"):
        similarity_matrix([])
    with pytest.raises(InputError, match="pass what task_embedding returns: this is a tensor"):
        similarity_matrix([one, x])
    with pytest.raises(InputError, match="has no noise variance yet"):
        task_embedding(network, x, Gaussian())
    silent = task_embedding(mlp(outputs=1), x, Categorical())
    with pytest.raises(NetworkError, match=r"an embedding is zero.*Pass Bernoulli\(\)"):
        task_distance(silent, silent)


@pytest.mark.gpu
def test_a_gpu_finds_the_same() -> None:
    one, other, x = convolutional(0), convolutional(1), images()
    expected = jacobian_similarity(one, other, x)
    found = jacobian_similarity(one.cuda(), other.cuda(), x.cuda())
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-10, atol=0)
