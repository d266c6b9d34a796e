"""Networks in half precision: sums in float32, errors of the size of rounding, overflows with a name."""

import copy
import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from language_models import batch, language_model
from net2gp.errors import InputError, NetworkError
from net2gp.linear import linearize
from rounding import assert_rounds_to

HALF = [torch.bfloat16, torch.float16]


def mlp(kind: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 2)
    return nn.Sequential(*layers).to(kind).eval()


def convolutions(kind: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return (
        nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 2),
        )
        .to(kind)
        .eval()
    )


def points(kind: torch.dtype, *shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(kind)


def jacobian(network: nn.Module, x, pick=lambda out: out) -> torch.Tensor:
    """One plain backward pass for each output, (N·C, P)."""
    f = pick(network(**x) if isinstance(x, dict) else network(x)).flatten()
    chosen = [p for p in network.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(one, chosen, retain_graph=True) for one in f]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def in_double(x):
    if isinstance(x, dict):
        return x
    return x.double() if x.is_floating_point() else x


CASES = {
    "dense": lambda kind: (mlp(kind), points(kind, 8, 3), lambda out: out),
    "convolutions": lambda kind: (
        convolutions(kind),
        points(kind, 5, 2, 6, 6),
        lambda out: out,
    ),
    "BERT with adapters": lambda kind: (
        language_model().to(kind),
        batch(),
        lambda out: out.logits,
    ),
    "GPT-2 with adapters": lambda kind: (
        language_model(causal=True).to(kind),
        batch(),
        lambda out: out.logits,
    ),
}


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("name", CASES)
def test_kernels_differ_from_brute_force_by_rounding(name, kind):
    network, x, pick = CASES[name](kind)
    exact = copy.deepcopy(network).double()

    passes = lambda: jacobian(exact, in_double(x), pick)
    kernel = linearize(network).kernel()
    K = kernel(x)
    assert K.dtype == torch.float32
    assert_rounds_to((K, kernel.precise()(x)), passes, kind, lambda J: J @ J.T)
    (known,) = kernel.linearized.plans
    assert not known.plan.leftover


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("name", CASES)
def test_laplace_variances_differ_from_brute_force_by_rounding(name, kind):
    network, x, pick = CASES[name](kind)
    exact, prior_var, noise_var = copy.deepcopy(network).double(), 0.1, 0.5
    f = linearize(network)(x)

    def variances(J):
        precision = torch.eye(J.shape[1]).double() / prior_var + J.T @ J / noise_var
        return (J @ torch.linalg.solve(precision, J.T)).diagonal().reshape(f.shape)

    settings = {"prior_var": prior_var, "structure": n2g.Full()}
    posterior = n2g.laplace(network, (x, f), n2g.Gaussian(noise_var), **settings)
    assert torch.equal(posterior.predict(x).mean, f)
    passes = lambda: jacobian(exact, in_double(x), pick)
    assert_rounds_to(posterior.marginal(x).variance, passes, kind, variances)


@pytest.mark.parametrize("kind", HALF)
def test_adapt_differs_from_brute_force_by_rounding(kind):
    network, x = mlp(kind), points(kind, 8, 3)
    exact, y = copy.deepcopy(network).double(), points(torch.float32, 8, 2)

    def passes():
        f = exact(x.double()).flatten()
        return torch.cat([jacobian(exact, x.double()), f[:, None]], 1)

    def mean(found):
        J, f = found[:, :-1], found[:, -1]
        K = J @ J.T
        gain = torch.linalg.solve(K + 0.5 * torch.eye(len(K)).double(), y.double().flatten() - f)
        return (f + K @ gain).reshape(y.shape)

    posterior = n2g.adapt(network, (x, y), n2g.Gaussian(0.5), prior_var=1.0)
    assert posterior.predict(x).mean.dtype == torch.float32
    assert_rounds_to(posterior.predict(x).mean, passes, kind, mean)


@pytest.mark.parametrize("kind", HALF)
def test_products_agree_with_the_jacobian_up_to_rounding(kind):
    network, x = mlp(kind), points(kind, 8, 3)
    linearized, exact = linearize(network), copy.deepcopy(network).double()
    v = {name: torch.randn_like(value) for name, value in linearized.params.items()}
    flat = linearized.flatten(v).double()
    u, passes = points(torch.float32, 8, 2), lambda: jacobian(exact, x.double())
    assert_rounds_to(linearized.jacobian(x).flatten(0, 1), passes, kind)
    assert_rounds_to(linearized.jvp(x, v).flatten(), passes, kind, lambda J: J @ flat)
    pulled = linearized.flatten(linearized.vjp(x, u))
    assert_rounds_to(pulled, passes, kind, lambda J: u.double().flatten() @ J)


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("structure", [n2g.Kron(), n2g.Diagonal(), n2g.LastLayer()])
def test_structures_in_half_precision_are_those_of_float64(kind, structure):
    """On 300 points, whose numbers half precision cannot tell apart."""
    network, x, y = mlp(kind), points(kind, 300, 3), points(torch.float32, 300, 2)
    options = {"prior_var": 1.0, "structure": structure}
    with pytest.warns(n2g.errors.NotStationary):
        found = n2g.laplace(network, (x, y), n2g.Gaussian(0.5), **options)
    exact = copy.deepcopy(network).double()
    with pytest.warns(n2g.errors.NotStationary):
        wanted = n2g.laplace(exact, (x.double(), y.double()), n2g.Gaussian(0.5), **options)
    variance = lambda posterior, x: posterior.marginal(x).variance.double()
    # each variance is a sum of squares of numbers that went through about 20 roundings
    tolerance = 2 * 20 * torch.finfo(kind).eps / 2
    torch.testing.assert_close(
        variance(found, x), variance(wanted, x.double()), rtol=tolerance, atol=0.0
    )


@pytest.mark.parametrize("kind", HALF)
def test_the_network_keeps_its_dtype_and_the_linearization_its_values(kind):
    network = mlp(kind)
    linearized = linearize(network)
    for name, value in network.named_parameters():
        assert value.dtype == kind
        assert linearized.params[name].dtype == torch.float32
        assert torch.equal(linearized.params[name], value.float())
    assert linearized.stored == dict.fromkeys(linearized.params, kind)
    assert torch.equal(linearized(points(kind, 4, 3)), network(points(kind, 4, 3)).float())


def test_a_linearization_moves_between_precisions():
    network, x = mlp(torch.bfloat16), points(torch.bfloat16, 4, 3)
    linearized = linearize(network)
    double = linearized.to(dtype=torch.float64)
    assert double.stored == {}
    torch.testing.assert_close(double(x.double()), network.double()(x.double()))
    back = linearize(mlp()).to(dtype=torch.bfloat16)
    assert torch.equal(back(x), linearized(x))
    assert linearized.to("cpu").stored == linearized.stored


def test_a_posterior_in_half_precision_is_saved_and_loaded(tmp_path):
    network, x = mlp(torch.bfloat16), points(torch.bfloat16, 8, 3)
    posterior = n2g.adapt(network, (x, points(torch.float32, 8, 2)), n2g.Gaussian(0.5))
    n2g.save(posterior, tmp_path / "posterior.safetensors")
    loaded = n2g.load(tmp_path / "posterior.safetensors", mlp(torch.bfloat16))
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    assert torch.equal(loaded.predict(x).variance, posterior.predict(x).variance)


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("structure", [n2g.FunctionSpace(), n2g.Full(), n2g.LastLayer()], ids=str)
def test_classifiers_in_half_precision_are_as_certain_as_in_double(kind, structure):
    def certain(one: torch.dtype) -> n2g.Posterior:
        network, x = mlp(one), points(one, 80, 3)
        labels = mlp()(points(torch.float32, 80, 3)).argmax(1)
        with torch.no_grad():
            network[3].weight.mul_(4.0)  # sure of its labels, so that points know themselves best
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", n2g.errors.NotStationary)
            return n2g.laplace(
                network, (x, labels), n2g.Categorical(), structure=structure, prior_var=100.0
            )

    scales = [certain(one).likelihood.link.scale for one in (kind, torch.float64)]
    assert abs(scales[0] / scales[1] - 1) < 4 * torch.finfo(kind).eps


def test_a_posterior_in_half_precision_has_no_other_precision():
    x, y = points(torch.bfloat16, 8, 3), points(torch.float32, 8, 2)
    posterior = n2g.adapt(mlp(torch.bfloat16), (x, y), n2g.Gaussian(0.5))
    for one in (posterior, n2g.bayes.weighted_sum([posterior, posterior])):
        with pytest.raises(InputError, match=r"torch\.bfloat16.* network\.to\(torch\.float64\)"):
            one.to(dtype=torch.float64)
        assert torch.equal(one.to("cpu").predict(x).variance, one.predict(x).variance)


def test_adapters_in_full_precision_may_stand_beside_a_base_in_half():
    network, x = language_model().bfloat16(), batch()
    for name, parameter in network.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    network.score.requires_grad_(True)  # in bfloat16, as `modules_to_save` has it
    exact = copy.deepcopy(network).double()
    linearized = linearize(network)
    assert set(linearized.stored) == {"score.weight", "score.bias"}

    passes = lambda: jacobian(exact, x, lambda out: out.logits)
    assert_rounds_to(linearized.kernel()(x), passes, torch.bfloat16, lambda J: J @ J.T)


def test_arrays_take_the_dtype_of_the_network_and_targets_that_of_its_results():
    x, y = points(torch.float32, 8, 3).numpy(), points(torch.float32, 8, 2).numpy()
    for method in (n2g.laplace, n2g.adapt):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", n2g.errors.NotStationary)
            posterior = method(mlp(torch.bfloat16), (x, y), n2g.Gaussian(0.5), prior_var=1.0)
        assert posterior.x.dtype == torch.bfloat16
        assert torch.equal(posterior.y, torch.tensor(y))


def test_inputs_of_another_dtype_are_told_which_one_is_needed():
    with pytest.raises(InputError, match=r"x = x\.to\(torch\.bfloat16\)"):
        linearize(mlp(torch.bfloat16)).kernel()(points(torch.float32, 8, 3))
    with pytest.raises(InputError, match=r"x = x\.to\(torch\.float32\)"):
        linearize(mlp()).kernel()(points(torch.bfloat16, 8, 3))


class Huge(nn.Module):
    """A layer whose values, or whose gradients alone, are larger than float16 can hold."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.scales = forward, backward

    def forward(self, x):
        forward, backward = self.scales
        # a weighted sum of x and of its copy without a gradient
        return forward * (backward * x - (backward - 1) * x.detach())


@pytest.mark.parametrize("at", [0, 60])
def test_an_overflow_names_the_layer(at):
    """Also at a point that no probe looks at."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).half()
    x = points(torch.float16, 100, 3) / 100
    x[at] = 3e4
    with torch.no_grad():
        network[0].weight.fill_(0.1)
        network[1].weight.fill_(10.0)
    message = (
        r"the output of layer '1' \(Linear\) has NaN or infinite values in torch\.float16, whose largest "
        r"number is 6\.55e\+04\. Pass network\.float\(\), network\.to\(torch\.bfloat16\)"
    )
    for call in (
        lambda: linearize(network.eval())(x),
        lambda: linearize(network.eval()).kernel()(x),
        lambda: n2g.laplace(network.eval(), (x, torch.zeros(100, 1)), n2g.Gaussian(1.0)),
        lambda: n2g.adapt(network.eval(), (x, torch.zeros(100, 1)), n2g.Gaussian(1.0)),
    ):
        with pytest.raises(NetworkError, match=message):
            call()
    assert torch.isfinite(linearize(network.bfloat16())(x.bfloat16())).all()


def test_an_overflow_between_layers_names_the_next_layer():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.second((self.first(x) * 1e4).square())

    with pytest.raises(NetworkError, match=r"the input of layer 'second' \(Linear\) has NaN"):
        linearize(Network().half().eval())(points(torch.float16, 5, 3))


def test_an_overflow_of_gradients_names_the_layer():
    layers = nn.Linear(3, 4), nn.Linear(4, 4), Huge(1.0, 6e4), Huge(1.0, 6e4), nn.Linear(4, 1)
    network, x = nn.Sequential(*layers).half().eval(), points(torch.float16, 5, 3)
    message = r"the gradient at layer '1' \('1\.(weight|bias)'\) has NaN or infinite values in torch\.float16"
    linearized = linearize(network)
    for call in (
        lambda: linearized.kernel()(x),
        lambda: linearized.jacobian(x),
        lambda: linearized.vjp(x, torch.ones(5, 1)),
        lambda: n2g.laplace(network, (x, torch.zeros(5, 1)), n2g.Gaussian(1.0)),
    ):
        with pytest.raises(NetworkError, match=message):
            call()
    assert torch.isfinite(linearize(network, only="4.*").kernel()(x)).all()


def test_coupled_points_are_noticed_in_half_precision():
    class Coupled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x - x.mean(0))

    with pytest.raises(NetworkError, match="couples the points of a batch"):
        linearize(Coupled().bfloat16().eval()).kernel()(points(torch.bfloat16, 5, 3))


@pytest.mark.parametrize("method", ["map_estimate", "nuts", "mean_field", "sgld"])
def test_methods_that_train_refuse_half_precision(method):
    data = points(torch.bfloat16, 8, 3), points(torch.float32, 8, 2)
    with pytest.raises(NetworkError, match=r"the parameters are torch\.bfloat16: use network\.fl"):
        getattr(n2g.bayes, method)(mlp(torch.bfloat16), data, n2g.Gaussian(0.5))


def test_optimizers_that_need_small_steps_refuse_half_precision():
    settings = {"num_data": 8, "prior_var": 1.0, "learning_rate": 0.1}
    for kind in (n2g.training.VOGN, n2g.training.OGGN):
        with pytest.raises(NetworkError, match=r"the parameters are torch\.bfloat16: use network"):
            kind(mlp(torch.bfloat16), n2g.Gaussian(0.5), **settings)


def test_results_of_a_half_network_have_full_precision():
    network, x = mlp(torch.bfloat16), points(torch.bfloat16, 8, 3)
    y, labels = points(torch.float32, 8, 2), torch.arange(8) % 2
    flow = n2g.gradient_flow(linearize(network), (x, y), learning_rate=1.0)
    assert flow.at(1.0, x).mean.dtype == torch.float32
    posterior = n2g.adapt_classes(network, (x, labels))
    assert posterior.predict(x).probs.dtype == torch.float32
    assert posterior.predict(x[:1]).probs.shape == (1, 2)
    one = n2g.laplace(network, (x[:1], linearize(network)(x[:1])), n2g.Gaussian(0.5), prior_var=1.0)
    assert one.predict(x[:1]).variance.dtype == torch.float32
