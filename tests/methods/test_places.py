"""Outputs at every pixel, token or time: posteriors are those of a sum over places, by explicit Jacobians."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import net2gp as n2g
from net2gp.data import Stream
from net2gp.errors import InputError, Net2GPWarning, NotAvailable
from net2gp.likelihoods import StudentT, each_place
from net2gp.linear.forward import places
from net2gp.methods.laplace_approximation import some_rows
from net2gp.structures import LowRank, MonteCarloFisher, Sampled, Subnetwork
from net2gp.tuning import Validation

PRIOR = 0.7
SIZE = (4, 5)
SAMPLED = Sampled(num_samples=8, rank=8, num_points=4, num_probes=2)


class Pixels(nn.Module):
    """A label for each pixel: (N, 3, H, W)."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.last = nn.Conv2d(3, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Resized(Pixels):
    """Logits of a coarse grid, resized: the last layer is not where the outputs are."""

    def forward(self, x: Tensor) -> Tensor:
        coarse = super().forward(nn.functional.avg_pool2d(x, 2))
        return nn.functional.interpolate(coarse, x.shape[2:], mode="bilinear", align_corners=False)


class Tokens(nn.Module):
    """A label for each token: (N, T, 4)."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.mix = nn.GRU(3, 3, batch_first=True)
        self.head = nn.Linear(3, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(x))[0])


def images(count: int = 5, size: tuple[int, int] = SIZE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, *size, generator=generator, dtype=torch.float64)


def texts(count: int = 6, length: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(0, 5, (count, length), generator=torch.Generator().manual_seed(seed))


def made(kind: type[nn.Module], channels: int | None = None) -> nn.Module:
    torch.manual_seed(1)
    return (kind() if channels is None else kind(channels)).double().eval()


def labels(network: nn.Module, x: Tensor, axis: int) -> Tensor:
    """Labels drawn from the network, of which some are to be ignored."""
    f = network(x).detach().movedim(axis, -1)
    generator = torch.Generator().manual_seed(2)
    y = torch.multinomial(f.softmax(-1).flatten(0, -2), 1, generator=generator)
    y = y.reshape(f.shape[:-1])
    y[0, 0] = -100
    y[2, -1, ...] = -100
    return y


def task(kind: type[nn.Module]) -> tuple[nn.Module, Tensor, Tensor, int]:
    network, axis = made(kind), -1 if kind is Tokens else 1
    x = texts() if kind is Tokens else images(size=(4, 4) if kind is Resized else SIZE)
    return network, x, labels(network, x, axis), axis


def jacobian(network: nn.Module, x: Tensor, axis: int, only: str = "") -> Tensor:
    """∂f/∂θ of each channel at each place, by reverse mode: (N·P, C, parameters)."""
    params = {n: p.detach() for n, p in network.named_parameters() if n.startswith(only)}

    def outputs(chosen: dict[str, Tensor]) -> Tensor:
        return functional_call(network, chosen, (x,)).movedim(axis, -1)

    found = jacrev(outputs)(params)
    wide = [value.flatten(outputs(params).dim()) for value in found.values()]
    return torch.cat(wide, -1).flatten(0, -3)


def rows(network: nn.Module, x: Tensor, axis: int) -> Tensor:
    return network(x).detach().movedim(axis, -1).flatten(0, -2)


def brute(
    network: nn.Module, x: Tensor, y: Tensor, axis: int, only: str = "", prior: float = PRIOR
) -> Tensor:
    """(I/prior + Σ Jᵀ(diag p − ppᵀ)J)⁻¹ over all places whose label counts."""
    J, p, kept = jacobian(network, x, axis, only), rows(network, x, axis).softmax(-1), y.flatten()
    Lam = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    Lam = Lam * (kept != -100)[:, None, None]
    H = torch.einsum("ncp,ncd,ndq->pq", J, Lam, J)
    return torch.linalg.inv(torch.eye(len(H), dtype=H.dtype) / prior + H)


def quiet(network, data, likelihood, structure=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        return n2g.laplace(network, data, likelihood, structure=structure, **options)


KINDS = [Pixels, Resized, Tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_all_parameters_have_the_posterior_of_a_sum_over_places(kind):
    network, x, y, axis = task(kind)
    posterior = quiet(network, (x, y), n2g.Categorical(), n2g.Full(), prior_var=PRIOR)
    S, new = brute(network, x, y, axis), x[:2]
    J = jacobian(network, new, axis)
    expected = J @ S @ J.mT
    law = posterior.marginal(new)
    assert torch.allclose(law.mean, network(new).detach().movedim(axis, -1))
    blocks = law.covariance_matrix
    assert torch.allclose(blocks.flatten(0, -3), expected, rtol=1e-8, atol=1e-10)
    variances = posterior.process.diagonal(new)[1]
    assert torch.allclose(variances.flatten(0, -2), expected.diagonal(dim1=1, dim2=2))
    top = rows(network, new, axis).argmax(-1)
    each = torch.arange(len(top))
    contrast = (
        expected.diagonal(dim1=1, dim2=2)
        + expected[each, top, top][:, None]
        - 2 * expected[each, :, top]
    )
    assert torch.allclose(posterior.contrast(new).flatten(0, -2), contrast, atol=1e-10)
    whole = J.flatten(0, 1) @ S @ J.flatten(0, 1).T
    assert torch.allclose(posterior.joint(new).covariance_matrix, whole, atol=1e-9)


@pytest.mark.parametrize(("kind", "head"), [(Pixels, "last"), (Resized, "last"), (Tokens, "head")])
def test_a_last_layer_has_the_posterior_of_a_sum_over_places(kind, head):
    network, x, y, axis = task(kind)
    posterior = quiet(network, (x, y), n2g.Categorical(), prior_var=PRIOR)
    assert isinstance(posterior.structure, n2g.LastLayer)
    S, J = brute(network, x, y, axis, head), jacobian(network, x, axis, head)
    expected = J @ S @ J.mT
    blocks = posterior.marginal(x).covariance_matrix.flatten(0, -3)
    assert torch.allclose(blocks, expected, rtol=1e-8, atol=1e-10)
    whole = J.flatten(0, 1) @ S @ J.flatten(0, 1).T
    assert torch.allclose(posterior.joint(x).covariance_matrix, whole, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_evidence_is_that_of_all_places(kind):
    network, x, y, axis = task(kind)
    posterior = quiet(network, (x, y), n2g.Categorical(), n2g.Full(), prior_var=PRIOR)
    theta = torch.cat([value.detach().flatten() for value in network.parameters()])
    kept = y.flatten() != -100
    loss = nn.functional.cross_entropy(rows(network, x, axis), y.flatten(), reduction="sum")
    log_det = -torch.logdet(brute(network, x, y, axis) / PRIOR)
    expected = -loss - 0.5 * (theta @ theta / PRIOR + log_det)
    assert kept.sum() < y.numel()
    assert torch.allclose(posterior.log_marginal_likelihood(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_diagonal_sums_squares_over_places(kind):
    network, x, y, axis = task(kind)
    posterior = quiet(network, (x, y), n2g.Categorical(), n2g.Diagonal(), prior_var=PRIOR)
    own = torch.linalg.inv(brute(network, x, y, axis)).diagonal().reciprocal()
    draws = posterior.sample_weights(4000, generator=torch.Generator().manual_seed(0))
    found = torch.cat([value.flatten(1).var(0) for value in draws.values()])
    assert torch.allclose(found, own, rtol=6 * (2 / 4000) ** 0.5)
    J = jacobian(network, x[:1], axis)
    variances = posterior.process.diagonal(x[:1])[1].flatten(0, -2)
    assert torch.allclose(variances, (J.square() * own).sum(-1))


@pytest.mark.parametrize("structure", [n2g.Full(), n2g.Kron(), n2g.Diagonal(), n2g.LastLayer()])
def test_places_that_a_network_treats_one_by_one_are_points(structure):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x = torch.randn(6, 5, 3, dtype=torch.float64)
    y = labels(network, x, -1).clamp(min=0)
    at_places = quiet(network, (x, y), n2g.Categorical(), structure, prior_var=PRIOR)
    points = x.flatten(0, 1), y.flatten()
    at_points = quiet(network, points, n2g.Categorical(), structure, prior_var=PRIOR)
    found = at_places.marginal(x).covariance_matrix.flatten(0, 1)
    assert torch.allclose(found, at_points.marginal(points[0]).covariance_matrix, atol=1e-10)
    evidence = at_points.log_marginal_likelihood()
    assert torch.allclose(at_places.log_marginal_likelihood(), evidence)


@pytest.mark.parametrize("kind", KINDS)
def test_with_many_outputs_draws_have_the_same_law(kind, monkeypatch):
    network, x, y, _ = task(kind)
    exact = quiet(network, (x, y), n2g.Categorical(), n2g.Full(), prior_var=PRIOR)
    expected, prior = exact.process.diagonal(x)[1], exact.process.prior_variances(x)
    contrast, joint = exact.contrast(x), exact.joint(x[:1]).covariance_matrix
    monkeypatch.setattr(places, "FEW_OUTPUTS", 0)
    drawn = quiet(
        network, (x, y), n2g.Categorical(), n2g.Full(n2g.structures.ExactFisher()), prior_var=PRIOR
    )
    share = 5 * (2 / drawn.process.num_draws) ** 0.5  # five standard errors of a variance
    assert (drawn.process.prior_variances(x) / prior - 1).abs().max() < share
    if isinstance(drawn.structure.fisher, MonteCarloFisher):  # another estimate beside the draws
        drawn = exact.__class__(
            drawn.process.__class__(exact.process.inner),
            *(exact.likelihood, exact.x, exact.y, exact.evidence, exact.recipe),
        )
    variances = drawn.process.diagonal(x)[1]
    assert (variances / expected - 1).abs().max() < share
    assert not torch.equal(variances, expected)
    # all of them come from the same draws
    blocks = drawn.marginal(x).covariance_matrix
    assert torch.allclose(blocks.diagonal(dim1=-2, dim2=-1), variances)
    top = drawn.mean(x).argmax(-1, keepdim=True)
    diagonal = blocks.diagonal(dim1=-2, dim2=-1)
    own = diagonal.gather(-1, top)
    cross = blocks.gather(-1, top[..., None].expand(*blocks.shape[:-1], 1))[..., 0]
    assert torch.allclose(drawn.contrast(x), diagonal + own - 2 * cross, atol=1e-9)
    assert (drawn.contrast(x) - contrast).abs().max() < share * contrast.max()
    together = drawn.joint(x[:1]).covariance_matrix
    size = joint.diagonal().sqrt()
    assert ((together - joint) / (size * size[:, None])).abs().max() < share


def test_a_monte_carlo_fisher_has_the_curvature_of_places_on_average():
    network, x, y, axis = task(Pixels)
    exact = torch.linalg.inv(brute(network, x, y, axis))
    fisher = MonteCarloFisher(num_samples=400)
    posterior = quiet(network, (x, y), n2g.Categorical(), n2g.Full(fisher), prior_var=PRIOR)
    J = jacobian(network, x, axis).flatten(0, 1)
    found = posterior.joint(x).covariance_matrix
    expected = J @ torch.linalg.inv(exact) @ J.T
    assert torch.linalg.norm(found - expected) < 0.1 * torch.linalg.norm(expected)


def test_ignored_places_say_nothing():
    network, x, y, _ = task(Pixels)
    posterior = quiet(network, (x, y), n2g.Categorical(), n2g.Full(), prior_var=PRIOR)
    changed = x.clone()
    changed = torch.cat([changed, images(1, seed=9)])  # an image of which all labels are ignored
    ignored = torch.cat([y, torch.full((1, *SIZE), -100)])
    again = quiet(network, (changed, ignored), n2g.Categorical(), n2g.Full(), prior_var=PRIOR)
    new = images(2, seed=4)
    assert torch.allclose(
        again.marginal(new).covariance_matrix, posterior.marginal(new).covariance_matrix
    )
    assert torch.allclose(again.log_marginal_likelihood(), posterior.log_marginal_likelihood())


STRUCTURES = [n2g.LastLayer(), n2g.LastLayer(n2g.Kron()), n2g.Kron(), n2g.Diagonal(), SAMPLED]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: repr(s)[:20])
@pytest.mark.parametrize("kind", [Pixels, Tokens])
def test_every_method_speaks_of_places(kind, structure):
    network, x, y, axis = task(kind)
    posterior = quiet(network, (x, y), n2g.Categorical(), structure)
    shape = network(x).movedim(axis, -1).shape
    law = posterior.predict(x)
    assert law.probs.shape == shape
    assert law.log_prob(y.clamp(min=0)).shape == shape[:-1]
    assert law.entropy().shape == shape[:-1]
    assert posterior.mean(x).shape == shape
    assert posterior.marginal(x).covariance_matrix.shape == (*shape, shape[-1])
    novelty = posterior.novelty(x)
    assert novelty.shape == shape[:-1]
    assert novelty.min() >= 0
    assert novelty.max() <= 1
    parts = posterior.split(x)
    assert parts.epistemic.shape == parts.aleatoric.shape == shape
    assert parts.epistemic.min() >= 0
    generator = torch.Generator().manual_seed(0)
    draws = posterior.sample(x, 3, generator=generator)
    assert draws.shape == (3, *shape)
    functions = posterior.sample_functions(3, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(functions(x), draws)
    assert torch.allclose(functions(x[1:3]), draws[:, 1:3])
    assert posterior.sample(x, 2, linear=False).shape == (2, *shape)
    joint = posterior.joint(x[:2]).covariance_matrix
    variances = posterior.process.diagonal(x[:2])[1].flatten()
    assert torch.allclose(joint.diagonal(), variances, rtol=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: repr(s)[:20])
def test_what_was_saved_predicts_the_same(structure, tmp_path):
    network, x, y, _ = task(Pixels)
    posterior = quiet(network, (x, y), n2g.Categorical(), structure)
    posterior.save(tmp_path / "posterior.safetensors")
    again = n2g.load(tmp_path / "posterior.safetensors", network=made(Pixels))
    assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)
    assert torch.equal(again.novelty(x), posterior.novelty(x))


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: repr(s)[:20])
def test_a_stream_gives_the_same_posterior(structure):
    network, x, y, _ = task(Pixels)
    whole = quiet(network, (x, y), n2g.Categorical(), structure)
    pieces = [(x[:2], y[:2]), (x[2:3], y[2:3]), (x[3:], y[3:])]
    streamed = quiet(network, Stream(pieces), n2g.Categorical(), structure)
    assert torch.allclose(streamed.predict(x).probs, whole.predict(x).probs, rtol=1e-8, atol=1e-10)
    assert torch.allclose(streamed.novelty(x), whole.novelty(x), rtol=1e-6, atol=1e-10)


def test_images_of_another_size_are_predicted():
    network, x, y, _ = task(Pixels)
    for structure in (n2g.LastLayer(), n2g.Kron()):
        posterior = quiet(network, (x, y), n2g.Categorical(), structure)
        larger = images(2, (6, 7))
        assert posterior.predict(larger).probs.shape == (2, 6, 7, 3)
        assert posterior.novelty(larger).shape == (2, 6, 7)
        J = posterior.process.linearized.jacobian(larger).reshape(2 * 42, 3, -1)
        if isinstance(structure, n2g.LastLayer):
            found = posterior.marginal(larger).covariance_matrix.flatten(0, 2)
            S = brute(network, x, y, 1, "last", float(posterior.prior_var))
            assert torch.allclose(found, J @ S @ J.mT, atol=1e-8)


def test_classifiers_stay_as_sure_as_the_network_on_average():
    network, x, y, axis = task(Pixels)
    for structure in (n2g.LastLayer(), n2g.Kron()):
        posterior = quiet(network, (x, y), n2g.Categorical(), structure)
        own = torch.distributions.Categorical(logits=rows(network, x, axis)).entropy().mean()
        assert abs(float(posterior.predict(x).entropy().mean() - own)) < 0.05


def test_held_out_places_choose_prior_and_scale():
    network, x, y, _ = task(Pixels)
    held = images(4, seed=7)
    data = (held, labels(network, held, 1))
    for structure in (n2g.LastLayer(), n2g.Kron()):
        posterior = quiet(network, (x, y), n2g.Categorical(), structure, tuning=Validation(data))
        kept = data[1] != -100
        score = posterior.predict(held).log_prob(data[1].clamp(min=0))[kept].mean()
        bare = torch.distributions.Categorical(logits=network(held).movedim(1, -1))
        assert score >= bare.log_prob(data[1].clamp(min=0))[kept].mean() - 0.02


def test_labels_of_some_places_are_refused_on_held_out_data():
    network, x, y, _ = task(Pixels)
    few = images(4, seed=7), y[:4, :1]
    with pytest.raises(n2g.errors.InputError, match=r"for each of the .* places"):
        n2g.laplace(network, (x, y), n2g.Categorical(), tuning=Validation(few))


def test_regression_at_places_is_bayesian_linear_regression():
    network = made(Pixels, 2)
    x = images()
    y = network(x).detach() + 0.1 * images(5, seed=3)
    posterior = quiet(network, (x, y), n2g.Gaussian(0.04), n2g.Full(), prior_var=PRIOR)
    J = jacobian(network, x, 1).flatten(0, 1)
    S = torch.linalg.inv(torch.eye(J.shape[1]) / PRIOR + J.T @ J / 0.04)
    new = images(2, seed=8)
    K = jacobian(network, new, 1)
    found = posterior.marginal(new).covariance_matrix
    assert torch.allclose(found.flatten(0, 2), K @ S @ K.mT, atol=1e-9)
    law = posterior.predict(new)
    assert law.mean.shape == (2, *SIZE, 2)
    assert torch.allclose(law.variance, found.diagonal(dim1=-2, dim2=-1) + 0.04)
    whole = jacobian(network, new, 1).flatten(0, 1)
    joint = posterior.joint(new).covariance_matrix
    assert torch.allclose(joint, whole @ S @ whole.T, atol=1e-8)


@pytest.mark.parametrize("structure", [None, n2g.Kron(), n2g.LastLayer()])
def test_regression_at_places_finds_its_noise(structure):
    network = made(Pixels, 2)
    x = images(40, (6, 6))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(network(x).shape, generator=generator, dtype=torch.float64)
    y = network(x).detach() + 0.3 * noise
    posterior = quiet(network, (x, y), n2g.Gaussian(), structure)
    assert float(posterior.likelihood.noise_var) == pytest.approx(0.09, rel=0.1)


@pytest.mark.parametrize("structure", [n2g.Full(), n2g.Kron(), n2g.Diagonal(), n2g.LastLayer()])
def test_regression_finds_the_prior_and_noise_of_places_as_points(structure, monkeypatch):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(12, 20, 3, dtype=torch.float64)
    y = network(x).detach() + 0.3 * torch.randn(12, 20, 2, dtype=torch.float64)
    points = x.flatten(0, 1), y.flatten(0, 1)
    expected = quiet(network, points, n2g.Gaussian(), structure)
    found = quiet(network, (x, y), n2g.Gaussian(), structure)
    noise = float(expected.likelihood.noise_var)
    assert float(found.likelihood.noise_var) == pytest.approx(noise, rel=1e-3)
    assert found.prior_var == pytest.approx(expected.prior_var, rel=1e-3)
    # of more outputs than can be differentiated some are chosen
    monkeypatch.setattr(some_rows, "FEW_OUTPUTS", 8)
    few = quiet(network, (x, y), n2g.Gaussian(), structure)
    assert float(few.likelihood.noise_var) == pytest.approx(noise, rel=0.2)
    assert few.prior_var == pytest.approx(expected.prior_var, rel=0.5)


def test_other_likelihoods_hold_at_places():
    x = images()
    for likelihood, channels, y in (
        (n2g.HeteroscedasticGaussian(), 2, images(5, seed=3)[:, :1]),
        (n2g.likelihoods.Poisson(), 1, images(5, seed=3)[:, :1].abs().round()),
        (n2g.Bernoulli(), 2, (images(5, seed=3) > 0).long()),
        (StudentT(0.1, 4.0), 1, images(5, seed=3)[:, :1]),
    ):
        network = made(Pixels, channels)
        posterior = quiet(network, (x, y), likelihood, n2g.Kron())
        law = posterior.predict(x)
        assert law.mean.shape[:3] == (5, *SIZE)
        assert bool(law.mean.isfinite().all())
        assert bool(law.variance.gt(0).all())


def test_each_place_says_which_axis_has_the_classes():
    network, x, _, _ = task(Tokens)
    square = texts(
        6, 4
    )  # four tokens, four classes: the shape of labels does not say which is which
    y = labels(network, square, -1)
    with pytest.raises(InputError, match=r"do not say which axis counts channels: 1 or 2"):
        quiet(network, (square, y), n2g.Categorical())
    posterior = quiet(network, (square, y), each_place(n2g.Categorical(), axis=-1), prior_var=PRIOR)
    S, J = brute(network, square, y, -1, "head"), jacobian(network, square, -1, "head")
    found = posterior.marginal(square).covariance_matrix.flatten(0, 1)
    assert torch.allclose(found, J @ S @ J.mT, atol=1e-9)
    assert x.shape != square.shape


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda y: torch.full_like(y, -100), "all labels are -100"),
        (lambda y: nn.functional.one_hot(y.clamp(min=0)).movedim(-1, 1), r"y.argmax\(1\)"),
        (lambda y: nn.functional.one_hot(y.clamp(min=0)), r"y.argmax\(3\)"),
        (lambda y: y[:, None], r"y.squeeze\(1\)"),
        (lambda y: y[..., None], r"y.squeeze\(3\)"),
        (
            lambda y: y[:, :2],
            r"one label for each place has the shape \(N, 4, 5\), but y is \(N, 2, 5\)",
        ),
        (lambda y: y.mT, r"y is \(N, 5, 4\)"),
        (lambda y: y.clamp(min=0) + 7, "labels must be in 0..2"),
    ],
)
def test_targets_of_another_layout_are_named(given, message):
    network, x, y, _ = task(Pixels)
    with pytest.raises(InputError, match=message):
        quiet(network, (x, given(y)), n2g.Categorical())


def test_one_hot_labels_of_tokens_are_named_by_the_axis_of_their_classes():
    network, x, y, _ = task(Tokens)
    hot = nn.functional.one_hot(y.clamp(min=0))
    with pytest.raises(InputError, match=r"y.argmax\(2\).*each_place\(.*axis=1\)"):
        quiet(network, (x, hot), n2g.Categorical())
    assert torch.equal(hot.argmax(2), y.clamp(min=0))


@pytest.mark.parametrize(
    "structure", [n2g.FunctionSpace(), LowRank(rank=3), Subnetwork(5)], ids=lambda s: repr(s)[:12]
)
def test_structures_with_a_row_for_each_place_are_refused(structure):
    network, x, y, _ = task(Pixels)
    with pytest.raises(InputError, match=r"structure=LastLayer\(\), Kron\(\)"):
        quiet(network, (x, y), n2g.Categorical(), structure)


def test_other_wrong_words_are_named():
    network, x, y, _ = task(Pixels)
    with pytest.raises(InputError, match="0 counts points"):
        each_place(n2g.Categorical(), axis=0)
    with pytest.raises(InputError, match="cannot be told from places"):
        each_place(n2g.Gaussian(torch.ones(5, 1)))
    with pytest.raises(InputError, match="axis=5 is no axis"):
        quiet(network, (x, y), each_place(n2g.Categorical(), axis=5))
    flat = nn.Linear(2, 3).double()
    with pytest.raises(InputError, match="each_place is for outputs with places"):
        quiet(flat, (x.flatten(2)[:, :, 0], torch.zeros(5).long()), each_place(n2g.Categorical()))
    posterior = quiet(network, (x, y), n2g.Categorical())
    with pytest.raises(NotAvailable, match="Take one place"):
        posterior.dual()


def test_networks_of_drawn_weights_are_averaged_place_by_place():
    network, x, y, _ = task(Pixels)
    posterior = quiet(network, (x, y), n2g.Categorical(), n2g.Kron())
    law = posterior.predict(x, samples=n2g.links.WeightSamples(6, seed=3))
    generator = torch.Generator().manual_seed(3)
    draws = posterior.sample(x, 6, generator=generator, linear=False)
    assert torch.allclose(law.probs, draws.softmax(-1).mean(0))


def test_sums_and_mixtures_of_posteriors_keep_places():
    network, x, y, _ = task(Pixels)
    one = quiet(network, (x, y), n2g.Categorical(), n2g.Kron(), prior_var=PRIOR)
    other = quiet(network, (x, y), n2g.Categorical(), n2g.LastLayer(), prior_var=PRIOR)
    average = n2g.bayes.average([one, other], likelihood=one.likelihood)
    expected = (one.process.diagonal(x)[1] + other.process.diagonal(x)[1]) / 4
    assert torch.allclose(average.process.diagonal(x)[1], expected)
    assert average.predict(x).probs.shape == (5, *SIZE, 3)
    mixed = n2g.bayes.mixture([one, other]).predict(x)
    assert torch.allclose(mixed.probs, (one.predict(x).probs + other.predict(x).probs) / 2)


def test_what_counts_points_with_one_target_says_so():
    network, x, y, _ = task(Pixels)
    posterior = quiet(network, (x, y), n2g.Categorical())
    for call in (n2g.explain.leave_one_out, lambda p: n2g.explain.removal_effects(p, x)):
        with pytest.raises(NotAvailable, match="influence is of points with one target each"):
            call(posterior)
    with pytest.raises(InputError, match="pixels, tokens or times of one point are not"):
        n2g.conformal.calibrate_sets(posterior, (images(4, seed=7), y[:4]))
    numbers = images(5, seed=3)
    with pytest.raises(NotAvailable, match="has targets for points, not for places"):
        n2g.training.train_by_evidence(made(Pixels, 2), (x, numbers), n2g.Gaussian())
    for call in (
        lambda: n2g.adapt(network, (x, y), n2g.Categorical()),
        lambda: n2g.adapt(made(Pixels, 2), (x, numbers), n2g.Gaussian()),
    ):
        with pytest.raises(InputError, match="pass the data to laplace, which knows targets"):
            call()


def test_fewer_targets_than_channels_are_not_taken_for_places():
    network = made(Pixels, 2)
    x = images()
    with pytest.raises(InputError, match=r"targets at places have the shape \(N, 2, 4, 5\)"):
        quiet(network, (x, images(5, seed=3)[:, :, :2]), n2g.Gaussian(), n2g.Kron())
