"""Deep kernel learning, and the check that a kernel can tell points apart."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.deep import KernelTraining, NetworkKernel, SaturatedKernel, learn_kernel, saturation
from net2gp.errors import InputError
from net2gp.kernels import Linear

SHORT = KernelTraining(num_steps=8, learning_rate=0.05)


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64)[:, None]
    return x, (4 * x).sin() + 0.1 * torch.randn(24, 1, generator=generator, dtype=torch.float64)


def network(activation: nn.Module, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 6), activation, nn.Linear(6, 3)).double().eval()


def test_the_kernel_is_the_kernel_of_standardized_features(data):
    x, _ = data
    module = network(nn.ReLU())
    features = module(x).detach()
    phi = (features - features.mean(0)) / features.var(0, correction=0).mean().sqrt()
    kernel = NetworkKernel.of(module, n2g.RBF(0.7, 2.0), x)
    torch.testing.assert_close(kernel(x, x[:5]), n2g.RBF(0.7, 2.0)(phi, phi[:5]))
    torch.testing.assert_close(kernel.diag(x), torch.full((24,), 2.0, dtype=torch.float64))


def test_without_steps_it_is_the_process_on_features(data):
    x, y = data
    module = network(nn.ReLU())
    found = learn_kernel(
        module,
        data,
        n2g.Gaussian(0.01),
        kernel=n2g.RBF(0.7),
        training=KernelTraining(num_steps=0),
    )
    kernel = NetworkKernel.of(module, n2g.RBF(0.7), x)
    plain = n2g.condition(kernel, (x, y - y.mean()), n2g.Gaussian(0.01))
    torch.testing.assert_close(found.mean(x), plain.mean(x) + y.mean())
    torch.testing.assert_close(
        found.log_marginal_likelihood(), plain.log_marginal_likelihood(), rtol=1e-9, atol=1e-9
    )


def test_gradients_of_the_evidence_are_differences(data):
    from net2gp.deep.kernel_learning import _Learning

    x, _ = data
    start = NetworkKernel.of(network(nn.Tanh()), n2g.RBF(0.7), x)
    learning = _Learning(start, data, n2g.Gaussian(), SHORT)
    rows = torch.arange(len(x))
    learning.loss(rows).backward()
    cases = [
        (learning.params["0.weight"], (2, 0)),
        (learning.numbers["lengthscale"], ()),
        (learning.log_noise, ()),
    ]
    for leaf, place in cases:
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                leaf[place] += sign * 1e-5
                values.append(float(learning.loss(rows)))
                leaf[place] -= sign * 1e-5
        assert float(leaf.grad[place]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4)


def test_training_raises_the_evidence_and_leaves_the_network_alone(data):
    module = network(nn.ReLU())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturatedKernel)
        noise = n2g.Gaussian(0.01)
        start = learn_kernel(module, data, noise, training=KernelTraining(num_steps=0))
        found = learn_kernel(module, data, noise, training=SHORT)
    assert found.log_marginal_likelihood() > start.log_marginal_likelihood() + 1
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_frozen_network_keeps_its_parameters(data):
    module = network(nn.ReLU())
    training = KernelTraining(num_steps=5, train_network=False)
    found = learn_kernel(module, data, n2g.Gaussian(), training=training)
    for name, value in found.process.kernel.features.network.params.items():
        torch.testing.assert_close(value, module.get_parameter(name).detach(), rtol=0, atol=0)
    assert float(found.process.kernel.kernel.lengthscale) != pytest.approx(3**0.5, rel=1e-6)


def test_labels_are_learned_as_well(data):
    x, y = data
    found = learn_kernel(
        network(nn.ReLU()),
        (x, (y[:, 0] > 0).long()),
        n2g.Categorical(),
        training=KernelTraining(num_steps=3),
    )
    assert found.predict(x).probs.shape == (24, 2)


def test_the_posterior_is_saved_and_loaded(data, tmp_path):
    x, _ = data
    module = network(nn.ReLU())
    found = learn_kernel(module, data, n2g.Gaussian(), training=KernelTraining(num_steps=2))
    found.save(tmp_path / "learned.safetensors")
    again = n2g.load(tmp_path / "learned.safetensors", network=network(nn.ReLU(), seed=1))
    torch.testing.assert_close(again.marginal(x).variance, found.marginal(x).variance)


def test_a_network_that_gives_one_feature_is_refused(data):
    module = network(nn.ReLU())
    nn.init.zeros_(module[2].weight)
    with pytest.raises(InputError, match="features of the network are the same for all points"):
        learn_kernel(module, data, n2g.Gaussian())


def test_similarities_have_their_definition():
    x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    found = saturation(Linear() + n2g.RBF(2.0), x)

    def k(a: float, b: float) -> float:
        return a * b + torch.tensor(-((a - b) ** 2) / 8).exp().item()

    def s(a: float, b: float) -> float:
        return 2 * k(a, b) / (k(a, a) + k(b, b))

    pairs = sorted([s(0, 1), s(0, 3), s(1, 3)])
    assert found.between == pytest.approx(pairs[1])
    nearest = sorted(max(s(a, b) for b in (0, 1, 3) if b != a) for a in (0, 1, 3))
    assert found.nearest == pytest.approx(nearest[1])
    center, radius = 4 / 3, 5 / 3
    beyond = sorted(
        s(center + 3 * sign * radius, center + 6 * sign * radius) for sign in (-1, -1, 1)
    )
    assert found.beyond == pytest.approx(beyond[1])
    mistaken = sorted(
        max(s(center + 3 * sign * radius, b) for b in (0, 1, 3)) for sign in (-1, -1, 1)
    )
    assert found.mistaken == pytest.approx(mistaken[1])


def test_healthy_kernels_have_no_faults(data):
    x, _ = data
    assert saturation(n2g.RBF(0.5), x).faults == ()
    assert saturation(Linear(), x).faults == ()


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (n2g.RBF(100.0), "constant on the data"),
        (n2g.RBF(1e-3), "every point is independent"),
    ],
)
def test_degenerate_length_scales_are_named(data, kernel, said):
    with pytest.warns(SaturatedKernel, match=said):
        saturation(kernel, data[0]).warn()


def test_bounded_features_are_named(data):
    x, _ = data
    module = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Tanh()).double()
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[3.0], [4.0], [5.0]]))
    # On the data the features differ; six units away all of them are at ±1, as at the ends of the data.
    kernel = NetworkKernel.of(module, n2g.RBF(0.5), x)
    assert saturation(kernel, x).between < 0.9
    with pytest.warns(SaturatedKernel, match="points far away are taken for points of the data"):
        learn_kernel(module, data, n2g.Gaussian(), training=KernelTraining(num_steps=0))
    # With a shorter length scale the ends of the data differ from ±1, but nothing beyond them does.
    near = 0.6 * x
    with pytest.warns(SaturatedKernel, match="constant off the data"):
        saturation(NetworkKernel.of(module, n2g.RBF(0.1), near), near).warn()


def test_wrong_inputs_are_named(data):
    with pytest.raises(InputError, match="two different rows"):
        saturation(n2g.RBF(), torch.zeros(3, 1))
    with pytest.raises(InputError, match="one floating tensor of shape"):
        saturation(n2g.RBF(), torch.zeros(3))
    with pytest.raises(InputError, match="weight_decay must not be negative"):
        KernelTraining(weight_decay=-1.0)
    with pytest.raises(InputError, match=r"training must be deep\.KernelTraining"):
        learn_kernel(network(nn.ReLU()), data, n2g.Gaussian(), training=3)  # type: ignore[arg-type]
