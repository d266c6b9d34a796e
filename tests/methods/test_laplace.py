"""Laplace's approximation: its structures against each other and against what is obviously right."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from architectures import Apply, parameter
from methods.laplace_cases import (
    NEW,
    STRUCTURES,
    Poisson,
    X,
    labels,
    mlp,
    quietly,
    trained_linear,
)
from net2gp.errors import EmptyClass, InputError, NetworkError, NotStationary
from net2gp.linalg import diagonal_blocks

PRIORS = [0.7, {"*": 1.0, "*.bias": 0.3}]


def convolutional(outputs=3):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.AvgPool2d(2),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, outputs)).double().eval()


LIKELIHOODS = [n2g.Gaussian(0.3), n2g.Categorical(), n2g.Bernoulli(), Poisson()]


def curvature(network, x, likelihood):
    """Σ_n JᵀΛJ from the Jacobian itself."""
    linearized = n2g.linearize(network)
    J, Lam = linearized.jacobian(x), likelihood.curvature(linearized(x))
    return torch.einsum("ncp,ncd,ndq->pq", J, Lam, J), linearized


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("prior_var", PRIORS, ids=["scalar", "by name"])
def test_full_is_the_inverse_of_prior_plus_curvature(likelihood, prior_var):
    network = mlp()
    H, linearized = curvature(network, X, likelihood)
    v = torch.cat(
        [
            torch.full((p.numel(),), 0.7 if prior_var == 0.7 else 0.3 if "bias" in n else 1.0)
            for n, p in network.named_parameters()
        ]
    ).double()
    S = torch.linalg.inv(torch.diag(1 / v) + H)
    J = linearized.jacobian(NEW)
    posterior = quietly(
        network, (X, labels(likelihood)), likelihood, prior_var=prior_var, structure=n2g.Full()
    )
    law = posterior.marginal(NEW)
    torch.testing.assert_close(law.covariance_matrix, torch.einsum("ncp,pq,ndq->ncd", J, S, J))
    torch.testing.assert_close(law.mean, network(NEW).detach())
    theta = linearized.flatten(linearized.params)
    evidence = likelihood.log_prob(linearized(X), labels(likelihood)).sum()
    evidence = evidence - 0.5 * (theta**2 / v).sum()
    evidence = evidence - 0.5 * torch.linalg.slogdet(torch.eye(len(v)) + v[:, None] * H).logabsdet
    torch.testing.assert_close(posterior.log_marginal_likelihood(), evidence)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("prior_var", PRIORS, ids=["scalar", "by name"])
@pytest.mark.parametrize("make", [mlp, convolutional])
def test_function_space_and_all_directions_are_full(likelihood, prior_var, make):
    network = make()
    x = X if make is mlp else torch.randn(30, 2, 4, 4, dtype=torch.float64)
    new = NEW if make is mlp else torch.randn(6, 2, 4, 4, dtype=torch.float64)
    ways = [
        n2g.Full(),
        n2g.structures.FunctionSpace(),
        n2g.structures.LowRank(rank=90),
        n2g.structures.Subnetwork(1000),
    ]
    laws, evidences = [], []
    for structure in ways:
        posterior = quietly(
            network, (x, labels(likelihood)), likelihood, prior_var=prior_var, structure=structure
        )
        laws.append(posterior.joint(new))
        evidences.append(posterior.log_marginal_likelihood())
    for law, evidence in zip(laws[1:], evidences[1:], strict=True):
        torch.testing.assert_close(law.mean, laws[0].mean)
        torch.testing.assert_close(
            law.covariance_matrix, laws[0].covariance_matrix, rtol=1e-8, atol=1e-10
        )
        torch.testing.assert_close(evidence, evidences[0], rtol=1e-9, atol=1e-9)


def test_the_dual_gaussian_process_has_the_same_covariance_and_at_a_mode_the_same_evidence():
    likelihood = n2g.Categorical()
    y = labels(likelihood)
    network = trained_linear(likelihood, y, 0.7)
    posterior = n2g.laplace(network, (X, y), likelihood, prior_var=0.7, structure=n2g.Full())
    for other in (posterior.dual().gaussian_process(), posterior.dual().linear_model()):
        torch.testing.assert_close(other.joint(NEW).mean, posterior.joint(NEW).mean)
        torch.testing.assert_close(
            other.joint(NEW).covariance_matrix, posterior.joint(NEW).covariance_matrix
        )
        torch.testing.assert_close(
            other.log_marginal_likelihood(), posterior.log_marginal_likelihood()
        )


def test_a_linear_model_under_gaussian_noise_is_exact():
    torch.manual_seed(3)
    x, noise, prior = torch.randn(20, 4, dtype=torch.float64), 0.2, 0.8
    y = torch.randn(20, 1, dtype=torch.float64)
    Phi = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1)
    S = torch.linalg.inv(torch.eye(5, dtype=torch.float64) / prior + Phi.T @ Phi / noise)
    mean = S @ Phi.T @ y / noise
    network = nn.Linear(4, 1).double().eval()
    with torch.no_grad():
        network.weight.copy_(mean[:4].T)
        network.bias.copy_(mean[4])
    posterior = n2g.laplace(network, (x, y), n2g.Gaussian(noise), prior_var=prior)
    new = torch.randn(7, 4, dtype=torch.float64)
    features = torch.cat([new, torch.ones(7, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(posterior.joint(new).mean, (features @ mean)[:, 0])
    torch.testing.assert_close(posterior.joint(new).covariance_matrix, features @ S @ features.T)
    K = prior * Phi @ Phi.T + noise * torch.eye(20, dtype=torch.float64)
    law = torch.distributions.MultivariateNormal(torch.zeros(20, dtype=torch.float64), K)
    torch.testing.assert_close(posterior.log_marginal_likelihood(), law.log_prob(y[:, 0]))


@pytest.mark.parametrize("prior_var", [0.7, {"weight": 1.0, "bias": 0.3}])
@pytest.mark.parametrize("structure", [n2g.Kron(), n2g.LastLayer(), n2g.LastLayer(n2g.Kron())])
def test_kron_and_last_layer_are_full_on_one_layer(prior_var, structure):
    network = nn.Linear(3, 2).double().eval()
    data = (X, torch.randn(30, 2, dtype=torch.float64))
    ways = [
        quietly(network, data, n2g.Gaussian(0.3), prior_var=prior_var, structure=one)
        for one in (n2g.Full(), structure)
    ]
    torch.testing.assert_close(*[way.joint(NEW).covariance_matrix for way in ways])
    torch.testing.assert_close(*[way.log_marginal_likelihood() for way in ways])


@pytest.mark.parametrize("make", [mlp, convolutional])
def test_diagonal_is_the_diagonal_of_the_full_precision(make):
    network, likelihood = make(), n2g.Categorical()
    x = X if make is mlp else torch.randn(30, 2, 4, 4, dtype=torch.float64)
    H, linearized = curvature(network, x, likelihood)
    J = linearized.jacobian(x[:5])
    posterior = quietly(
        network, (x, labels(likelihood)), likelihood, prior_var=0.7, structure=n2g.Diagonal()
    )
    expected = torch.einsum("ncp,p,ndp->ncd", J, 1 / (1 / 0.7 + H.diagonal()), J)
    torch.testing.assert_close(posterior.marginal(x[:5]).covariance_matrix, expected)


@pytest.mark.parametrize("side", [4, 9])
def test_kron_of_convolutions_predicts_what_it_draws(side):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4), nn.Tanh()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    x = torch.randn(20, 2, side, side, dtype=torch.float64)
    posterior = quietly(
        network.double().eval(),
        (x, labels(n2g.Categorical(), 20)),
        n2g.Categorical(),
        prior_var=0.7,
        structure=n2g.Kron(),
    )
    draws = posterior.covariance.draw(20_000, torch.Generator().manual_seed(0))
    J = posterior.linearized.jacobian(x[:5])
    blocks = torch.einsum("ncp,ps,qs,ndq->ncd", J, draws, draws, J) / 20_000
    found = posterior.marginal(x[:5]).covariance_matrix
    assert float((blocks - found).abs().max() / found.abs().max()) < 0.05


def test_kron_blocks_are_products_of_input_and_gradient_moments():
    network, likelihood = mlp(), n2g.Categorical()
    H, linearized = curvature(network, X, likelihood)
    posterior = quietly(
        network, (X, labels(likelihood)), likelihood, prior_var=0.7, structure=n2g.Kron()
    )
    draws = posterior.covariance.draw(20_000, torch.Generator().manual_seed(0))
    sampled = draws @ draws.T / 20_000
    J = linearized.jacobian(NEW)
    blocks = torch.einsum("ncp,pq,ndq->ncd", J, sampled, J)
    found = posterior.marginal(NEW).covariance_matrix
    assert float((blocks - found).abs().max() / found.abs().max()) < 0.05
    first = H[:20, :20]  # of the first layer, whose exact block the product approximates
    kron = torch.linalg.inv(sampled[:20, :20]) - torch.eye(20) / 0.7
    assert float((kron - first).norm() / first.norm()) < 0.5


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_marginals_are_blocks_of_the_joint_and_samples_have_its_covariance(structure):
    likelihood = n2g.Categorical()
    posterior = quietly(
        mlp(), (X, labels(likelihood)), likelihood, prior_var=PRIORS[1], structure=structure
    )
    law, joint = posterior.marginal(NEW), posterior.joint(NEW)
    torch.testing.assert_close(diagonal_blocks(joint.covariance_matrix, 3), law.covariance_matrix)
    draws = posterior.sample(NEW, 20_000, generator=torch.Generator().manual_seed(0)).flatten(1)
    spread = draws - joint.mean
    error = spread.T @ spread / 20_000 - joint.covariance_matrix
    assert float(error.abs().max() / joint.covariance_matrix.abs().max()) < 0.05
    variances = posterior.covariance.variances(posterior.linearized, NEW)
    torch.testing.assert_close(variances, law.covariance_matrix.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize(
    "likelihood", [n2g.Gaussian(), n2g.Categorical()], ids=["noise", "classes"]
)
def test_tuning_finds_where_the_evidence_is_flat(structure, likelihood):
    data = (X, labels(likelihood))
    best = quietly(mlp(), data, likelihood, structure=structure, tuning=n2g.tuning.Evidence())
    prior = best.prior_var
    highest = float(best.log_marginal_likelihood())
    for factor in (0.8, 1.25):
        other = quietly(mlp(), data, best.likelihood, prior_var=prior * factor, structure=structure)
        assert float(other.log_marginal_likelihood()) < highest
    if isinstance(likelihood, n2g.Gaussian):
        for factor in (0.8, 1.25):
            noise = n2g.Gaussian(best.likelihood.noise_var * factor)
            other = quietly(mlp(), data, noise, prior_var=prior, structure=structure)
            assert float(other.log_marginal_likelihood()) < highest


@pytest.mark.parametrize("structure", [n2g.Full(), n2g.Kron(), n2g.Diagonal()], ids=str)
def test_a_prior_for_each_layer_explains_more(structure):
    data = (X, labels(n2g.Categorical()))
    one, many = (
        quietly(
            mlp(),
            data,
            n2g.Categorical(),
            structure=structure,
            tuning=n2g.tuning.Evidence(per_layer),
        )
        for per_layer in (False, True)
    )
    assert len(set(many.prior_var.values())) == 3
    assert float(many.log_marginal_likelihood()) > float(one.log_marginal_likelihood())


def test_a_validation_set_chooses_from_the_grid():
    x, y = X, labels(n2g.Categorical())
    held_out = (NEW, labels(n2g.Categorical(), 6))
    grid = (1e-3, 1e-1, 10.0)
    posterior = quietly(
        mlp(),
        (x, y),
        n2g.Categorical(),
        structure=n2g.Kron(),
        tuning=n2g.tuning.Validation(held_out, grid),
    )
    scores = []
    for value in grid:
        kron, given = n2g.Kron(), n2g.tuning.Evidence()
        one = quietly(
            mlp(), (x, y), n2g.Categorical(), structure=kron, prior_var=value, tuning=given
        )
        links = [n2g.links.Contrast(scale) for scale in torch.logspace(-2.5, 4, 300).tolist()]
        laws = [one.predict(NEW, likelihood=n2g.Categorical(link)) for link in links]
        scores.append(max(float(law.log_prob(held_out[1]).mean()) for law in laws))
    assert posterior.prior_var == pytest.approx(grid[scores.index(max(scores))])


def test_temperature_divides_the_curvature():
    data = (X, torch.randn(30, 3, dtype=torch.float64))
    hot = quietly(mlp(), data, n2g.Gaussian(0.3), prior_var=0.7, temperature=4.0)
    noisy = quietly(mlp(), data, n2g.Gaussian(1.2), prior_var=0.7)
    torch.testing.assert_close(
        hot.marginal(NEW).covariance_matrix, noisy.marginal(NEW).covariance_matrix
    )


@pytest.mark.parametrize("structure", [n2g.Full, n2g.Diagonal, n2g.Kron])
def test_the_monte_carlo_fisher_averages_to_the_ggn(structure):
    data = (X, labels(n2g.Categorical()))
    exact = quietly(mlp(), data, n2g.Categorical(), prior_var=0.7, structure=structure())
    many = structure(n2g.structures.MonteCarloFisher(num_samples=2000))
    sampled = quietly(mlp(), data, n2g.Categorical(), prior_var=0.7, structure=many)
    found, right = (p.marginal(NEW).covariance_matrix for p in (sampled, exact))
    assert float((found - right).abs().max() / right.abs().max()) < 0.05


def test_the_empirical_fisher_is_of_outer_products_of_gradients():
    network, likelihood, y = mlp(), n2g.Categorical(), labels(n2g.Categorical())
    linearized = n2g.linearize(network)
    J, r = linearized.jacobian(X), likelihood.residual(linearized(X), y)
    g = torch.einsum("ncp,nc->np", J, r)
    S = torch.linalg.inv(torch.eye(J.shape[2], dtype=torch.float64) / 0.7 + g.T @ g)
    structure = n2g.Full(n2g.structures.EmpiricalFisher())
    posterior = quietly(network, (X, y), likelihood, prior_var=0.7, structure=structure)
    J = linearized.jacobian(NEW)
    torch.testing.assert_close(
        posterior.marginal(NEW).covariance_matrix, torch.einsum("ncp,pq,ndq->ncd", J, S, J)
    )


def test_a_thousand_classes_never_build_the_jacobian():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 400), nn.ReLU(), nn.Linear(400, 1000)).eval()
    x, y = torch.randn(50, 10), torch.arange(50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = n2g.laplace(
            network,
            (x, y),
            n2g.Categorical(n2g.links.Probit()),
            prior_var=1.0,
            structure=n2g.LastLayer(),
        )
    probs = posterior.predict(x[:3]).probs
    assert probs.shape == (3, 1000)
    torch.testing.assert_close(probs.sum(1), torch.ones(3))


def test_subsets_say_less_than_all_points():
    data = (X, labels(n2g.Categorical()))
    few, all_points = (
        quietly(
            mlp(),
            data,
            n2g.Categorical(),
            prior_var=0.7,
            structure=n2g.structures.FunctionSpace(count),
        )
        for count in (5, None)
    )
    assert bool((few.marginal(NEW).variance >= all_points.marginal(NEW).variance - 1e-12).all())


def test_float32_agrees_with_float64():
    data = (X, labels(n2g.Categorical()))
    for structure in STRUCTURES:
        double = quietly(mlp(), data, n2g.Categorical(), prior_var=0.7, structure=structure)
        single = quietly(
            mlp().float(),
            (X.float(), data[1]),
            n2g.Categorical(),
            prior_var=0.7,
            structure=structure,
        )
        law = single.marginal(NEW.float())
        assert law.mean.dtype == torch.float32
        right = double.marginal(NEW).covariance_matrix
        assert float((law.covariance_matrix - right).abs().max() / right.abs().max()) < 1e-4


def test_what_the_default_structure_is():
    assert isinstance(
        quietly(mlp(), (X, labels(n2g.Categorical())), n2g.Categorical(), prior_var=1.0).structure,
        n2g.Full,
    )


def test_networks_far_from_a_stationary_point_are_told_of():
    y = 100 * torch.ones(30, 3, dtype=torch.float64)
    with pytest.warns(
        NotStationary, match="not at a stationary point: the gradient .* norm"
    ) as caught:
        n2g.laplace(mlp(), (X, y), n2g.Gaussian(0.1), prior_var=1.0)
    assert caught[0].filename == __file__


SHIFTED = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]


def learned(outputs: int, y: torch.Tensor) -> nn.Module:
    """A network that has learned targets of `SHIFTED`."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 15), nn.Tanh(), nn.Linear(15, outputs)).double()
    loss = nn.MSELoss() if y.is_floating_point() else nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss(network(SHIFTED), y).backward()
        optimizer.step()
    return network.eval()


def test_targets_in_other_units_are_named_as_the_cause() -> None:
    y = torch.sin(2 * SHIFTED)
    with pytest.warns(NotStationary, match="are scaled as in its training .*--standardize"):
        n2g.laplace(learned(1, y), (SHIFTED, 300 + 40 * y), n2g.Gaussian())


def test_permuted_labels_are_named_as_the_cause() -> None:
    labels = (torch.arange(40) // 10).roll(5)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    pattern = "log loss is .* that of the frequencies of the classes .* beside its own input"
    with pytest.warns(NotStationary, match=pattern):
        n2g.laplace(learned(4, labels), (SHIFTED, labels[order]), n2g.Categorical())


def test_a_network_that_could_learn_more_is_told_so() -> None:
    y = torch.sin(2 * SHIFTED)
    network = learned(1, y)
    with torch.no_grad():
        network[2].bias += 0.2
    with pytest.warns(NotStationary, match="Train it further on these data"):
        n2g.laplace(network, (SHIFTED, y), n2g.Gaussian(0.001))


def test_a_class_without_examples_is_told_of():
    y = labels(n2g.Categorical()).clamp(max=1)
    with pytest.warns(EmptyClass, match="no example of class 2"):
        quietly(mlp(), (X, y), n2g.Categorical(), prior_var=1.0)


BAD = [
    ({"likelihood": n2g.Categorical(), "y": torch.randn(30).double()}, "integer class indices"),
    ({"likelihood": n2g.Categorical(), "y": torch.full((30,), 7)}, "labels must be in 0..2"),
    ({"likelihood": "softmax"}, "likelihood must be e.g. Categorical"),
    ({"structure": "kron"}, r"structure must be Full\(\)"),
    ({"structure": n2g.Kron}, r"structure is the class Kron\. Write Kron\(\)"),
    ({"structure": n2g.LastLayer(), "only": "0.*"}, "leave only out"),
    ({"prior_var": -1.0}, "must be positive and finite, but is -1"),
    ({"temperature": 0.0}, "temperature must be positive"),
    ({"tuning": "marglik", "prior_var": None}, r"tuning must be Matched\(\), Evidence\(\)"),
    (
        {"structure": n2g.Kron(), "prior_var": {"*": 1.0, "0.weight": torch.ones(5, 3)}},
        "one prior variance",
    ),
    ({"x": X[:, :2]}, "cannot take x"),
]


@pytest.mark.parametrize(("changes", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_input_is_refused_with_what_to_change(changes, text):
    settings = {
        "likelihood": n2g.Categorical(),
        "y": labels(n2g.Categorical()),
        "x": X,
        "prior_var": 1.0,
    }
    settings |= changes
    data = (settings.pop("x"), settings.pop("y"))
    with pytest.raises((InputError, NetworkError), match=text):
        quietly(mlp(), data, settings.pop("likelihood"), **settings)


def test_kron_names_the_parameter_that_it_cannot_handle():
    parts = {"table": parameter(2000, 4), "head": nn.Linear(12, 3)}
    network = Apply(lambda self, ids: self.head(self.table[ids].flatten(1)), **parts)
    network, x = network.double().eval(), torch.randint(0, 7, (20, 3))
    with pytest.raises(NetworkError, match=r"no factors for 'table'.*structure=Diagonal"):
        quietly(network, (x, torch.randint(0, 3, (20,))), n2g.Categorical(), structure=n2g.Kron())


def test_a_last_layer_that_is_not_the_output_is_refused():
    network = nn.Sequential(nn.Linear(3, 3), nn.Softmax(1)).double().eval()
    with pytest.raises(
        NetworkError, match="no layer in whose weights the output of Sequential is linear"
    ):
        quietly(
            network, (X, labels(n2g.Categorical())), n2g.Categorical(), structure=n2g.LastLayer()
        )


def test_predictions_by_weight_samples_approach_the_linearized_for_small_variances():
    data = (X, labels(n2g.Categorical()))
    posterior = quietly(mlp(), data, n2g.Categorical(), prior_var=1e-4, structure=n2g.Kron())
    linear = posterior.predict(NEW).probs
    sampled = posterior.predict(NEW, samples=n2g.posteriors.WeightSamples(2000)).probs
    assert float((linear - sampled).abs().max()) < 2e-3


@pytest.mark.parametrize("link", [n2g.links.MonteCarlo(), n2g.links.Probit()], ids=str)
def test_links_agree_where_the_network_is_unsure(link):
    data = (X, labels(n2g.Categorical()))
    probs = quietly(mlp(), data, n2g.Categorical(link), prior_var=0.1).predict(NEW).probs
    exact = quietly(mlp(), data, n2g.Categorical(n2g.links.MonteCarlo(8192)), prior_var=0.1)
    torch.testing.assert_close(probs.sum(1), torch.ones(6, dtype=torch.float64))
    assert float((probs - exact.predict(NEW).probs).abs().max()) < 0.03


def test_the_bridge_returns_the_dirichlet_that_a_gaussian_came_from():
    alpha = torch.tensor([[3.0, 1.5, 7.0, 0.8]], dtype=torch.float64)
    mean = alpha.log() - alpha.log().mean()
    centering = torch.eye(4, dtype=torch.float64) - 1 / 4
    covariance = centering @ torch.diag_embed(1 / alpha) @ centering
    torch.testing.assert_close(n2g.links.LaplaceBridge().concentration(mean, covariance), alpha)


def test_networks_that_predict_their_noise_have_full_in_function_space():
    network, likelihood = mlp(outputs=4), n2g.HeteroscedasticGaussian()
    data = (X, labels(likelihood, outputs=4))
    laws = [
        quietly(network, data, likelihood, prior_var=0.7, structure=one).joint(NEW)
        for one in (n2g.Full(), n2g.structures.FunctionSpace())
    ]
    torch.testing.assert_close(*[law.covariance_matrix for law in laws])


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_saved_and_moved_posteriors_predict_the_same(structure, tmp_path):
    data = (X, labels(n2g.Categorical()))
    posterior = quietly(mlp(), data, n2g.Categorical(), prior_var=0.7, structure=structure)
    n2g.save(posterior, tmp_path / "posterior.safetensors")
    loaded = n2g.load(tmp_path / "posterior.safetensors", mlp())
    assert torch.equal(loaded.predict(NEW).probs, posterior.predict(NEW).probs)
    single = posterior.to(dtype=torch.float32).predict(NEW.float()).probs
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), posterior.predict(NEW).probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("likelihood", [n2g.Gaussian(0.3), n2g.Categorical(), n2g.Bernoulli()])
def test_averages_over_draws_are_laws_of_the_targets(likelihood):
    data = (X, labels(likelihood))
    posterior = quietly(mlp(), data, likelihood, prior_var=1e-4, structure=n2g.Kron())
    sampled = posterior.predict(NEW, samples=n2g.posteriors.WeightSamples(1000))
    y = labels(likelihood, 6)
    linear = posterior.predict(NEW)
    y = y.double() if isinstance(likelihood, n2g.Bernoulli) else y
    torch.testing.assert_close(sampled.log_prob(y), linear.log_prob(y), rtol=0.01, atol=0.01)


def sureness(probs):
    return float(probs.max(-1).values.mean())


@pytest.mark.parametrize(
    "structure", [n2g.Full(), n2g.Kron(), n2g.structures.FunctionSpace()], ids=str
)
def test_matched_predictions_are_as_sure_as_the_network_and_rank_classes_alike(structure):
    network, y = mlp(), labels(n2g.Categorical())
    with torch.no_grad():
        network[-1].weight *= 6  # sure of itself
    posterior = quietly(network, (X, y), n2g.Categorical(), structure=structure)
    assert isinstance(posterior.likelihood.link, n2g.links.Contrast)
    own, plain = network(X).softmax(-1).detach(), posterior.predict(X, likelihood=n2g.Categorical())
    found = posterior.predict(X).probs
    assert abs(sureness(found) - sureness(own)) < 0.03 < sureness(own) - sureness(plain.probs)
    assert torch.equal(found.argmax(-1), own.argmax(-1))


def test_the_matched_prior_expects_the_scaled_parameters():
    network, y = mlp(), labels(n2g.Categorical())
    posterior = quietly(network, (X, y), n2g.Categorical(), structure=n2g.Full())
    H, linearized = curvature(network, X, n2g.Categorical())
    theta = posterior.likelihood.link.scale * linearized.flatten(linearized.params)
    values = posterior.prior_var * torch.linalg.eigvalsh(H)
    determined = float((values / (1 + values)).sum())
    assert posterior.prior_var == pytest.approx(float(theta @ theta) / determined, rel=0.03)


def test_a_link_of_ones_own_and_a_given_prior_are_kept():
    data = (X, labels(n2g.Categorical()))
    probit = quietly(mlp(), data, n2g.Categorical(n2g.links.Probit()))
    assert probit.likelihood.link == n2g.links.Probit()
    given = quietly(mlp(), data, n2g.Categorical(), prior_var=0.7)
    assert given.prior_var == 0.7
    assert isinstance(given.likelihood.link, n2g.links.Contrast)
    evidence = quietly(mlp(), data, n2g.Categorical(), prior_var=0.7, tuning=n2g.tuning.Evidence())
    assert evidence.likelihood == n2g.Categorical()


def test_labels_of_their_own_are_matched_by_a_scaled_probit():
    network, y = mlp(), labels(n2g.Bernoulli())
    with torch.no_grad():
        network[-1].weight *= 6
    posterior = quietly(network, (X, y), n2g.Bernoulli(), structure=n2g.Full())
    assert posterior.likelihood.link.scale > 1
    own, found = network(X).sigmoid().detach(), posterior.predict(X).probs
    assert abs(float((own - 0.5).abs().mean() - (found - 0.5).abs().mean())) < 0.03


def test_contrasts_do_not_see_what_all_logits_share():
    mean, link = torch.tensor([[2.0, 0.5, -1.0]], dtype=torch.float64), n2g.links.Contrast()
    base = torch.eye(3, dtype=torch.float64)[None]
    one, shifted = (
        link.shrink(mean, link.variances(mean, covariance)) for covariance in (base, base + 50.0)
    )
    torch.testing.assert_close(one, shifted)


def test_contrasts_of_a_last_layer_need_no_covariances():
    data = (X, labels(n2g.Categorical()))
    posterior = quietly(
        mlp(), data, n2g.Categorical(), prior_var=0.7, structure=n2g.LastLayer(n2g.Kron())
    )
    law = posterior.marginal(NEW)
    expected = n2g.links.Contrast.variances(law.mean, law.covariance_matrix)
    torch.testing.assert_close(posterior.contrast(NEW), expected)


def test_every_pair_of_structures_is_told_apart():
    data = (X, labels(n2g.Categorical()))
    covariances = [
        quietly(mlp(), data, n2g.Categorical(), prior_var=0.7, structure=one)
        .marginal(NEW)
        .covariance_matrix
        for one in (n2g.Full(), n2g.Diagonal(), n2g.Kron(), n2g.LastLayer())
    ]
    for one, other in itertools.combinations(covariances, 2):
        assert float((one - other).abs().max()) > 1e-3
