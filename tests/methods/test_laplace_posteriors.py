"""Posteriors of `laplace`: at a temperature, in function space, beside training, with bad arguments."""

import pytest
import torch
from torch import nn

import net2gp as n2g
from methods.laplace_cases import NEW, STRUCTURES, X, labels, mlp, quietly, trained_linear
from net2gp.errors import InputError, NotAvailable
from net2gp.explain import contributions, leave_one_out, removal_effects
from net2gp.methods import aggregate, nearest, output_blocks, similarity
from net2gp.methods.laplace_approximation.matching import match_link
from net2gp.methods.training.online import Schedule, train_by_evidence

LIKELIHOODS = [n2g.Gaussian(0.3), n2g.Categorical(), n2g.Bernoulli()]
EXACT = [n2g.Full(), n2g.structures.FunctionSpace()]


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("structure", EXACT, ids=str)
def test_the_dual_at_a_temperature_is_the_posterior_at_that_temperature(likelihood, structure):
    y = labels(likelihood)
    network = trained_linear(likelihood, y, 0.7)
    hot = n2g.laplace(
        network, (X, y), likelihood, prior_var=0.7, structure=structure, temperature=4.0
    )
    law = hot.joint(NEW)
    for other in (hot.dual().gaussian_process(), hot.dual().linear_model()):
        torch.testing.assert_close(other.joint(NEW).mean, law.mean)
        torch.testing.assert_close(other.joint(NEW).covariance_matrix, law.covariance_matrix)
        torch.testing.assert_close(other.log_marginal_likelihood(), hot.log_marginal_likelihood())


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("way", ["gaussian_process", "linear_model"])
def test_more_data_update_a_dual_at_its_temperature(likelihood, way, tmp_path):
    """Away from a stationary point too; and so does a dual that was saved, or moved."""
    network, y = mlp(), labels(likelihood)
    few, all_of_them = (
        quietly(network, (X[:n], y[:n]), likelihood, prior_var=0.7, temperature=4.0).dual()
        for n in (20, 30)
    )
    posterior, whole = getattr(few, way)(), getattr(all_of_them, way)()
    n2g.save(posterior, tmp_path / "dual.safetensors")
    loaded = n2g.load(tmp_path / "dual.safetensors", network)
    for one in (posterior, loaded, posterior.to("cpu")):
        grown = one.update((X[20:], y[20:]))
        assert type(grown) is type(whole)
        torch.testing.assert_close(grown.joint(NEW).mean, whole.joint(NEW).mean)
        torch.testing.assert_close(
            grown.joint(NEW).covariance_matrix, whole.joint(NEW).covariance_matrix
        )
        torch.testing.assert_close(grown.log_marginal_likelihood(), whole.log_marginal_likelihood())


@pytest.mark.parametrize("way", ["gaussian_process", "linear_model"])
def test_new_points_of_a_tempered_dual_may_have_their_own_noise(way):
    y = labels(n2g.Gaussian(0.3))
    hot = quietly(mlp(), (X[:20], y[:20]), n2g.Gaussian(0.3), prior_var=0.7, temperature=4.0)
    grown = getattr(hot.dual(), way)().update((X[20:], y[20:]), likelihood=n2g.Gaussian(0.05))
    noise = torch.tensor([0.3] * 20 + [0.05] * 10, dtype=torch.float64)[:, None]
    whole = quietly(mlp(), (X, y), n2g.Gaussian(noise), prior_var=0.7, temperature=4.0)
    expected = getattr(whole.dual(), way)()
    torch.testing.assert_close(grown.joint(NEW).mean, expected.joint(NEW).mean)
    torch.testing.assert_close(
        grown.joint(NEW).covariance_matrix, expected.joint(NEW).covariance_matrix
    )


def test_the_noise_of_a_dual_grows_with_the_temperature():
    for likelihood in LIKELIHOODS:
        data = (X, labels(likelihood))
        cold, hot = (
            quietly(mlp(), data, likelihood, prior_var=0.7, temperature=t).dual()
            for t in (1.0, 4.0)
        )
        torch.testing.assert_close(hot.noise, 4 * cold.noise)
        torch.testing.assert_close(hot.curvature, cold.curvature / 4)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("structure", EXACT, ids=str)
def test_points_are_left_out_with_the_curvature_that_the_temperature_left_them(
    temperature, structure
):
    likelihood = n2g.Categorical()
    y, network = labels(likelihood), mlp()
    posterior = quietly(
        network, (X, y), likelihood, prior_var=0.7, structure=structure, temperature=temperature
    )
    linearized = n2g.linearize(network)
    J, J_new, f = linearized.jacobian(X), linearized.jacobian(NEW), linearized(X)
    H = torch.einsum("ncp,ncd,ndq->npq", J, likelihood.curvature(f) / temperature, J)
    law, effects = leave_one_out(posterior), removal_effects(posterior, NEW)
    r = likelihood.residual(f, y)
    for n in (0, 7):
        S = torch.linalg.inv(torch.eye(len(H[0])).double() / 0.7 + H.sum(0) - H[n])
        torch.testing.assert_close(law.covariance_matrix[n], J[n] @ S @ J[n].T)
        torch.testing.assert_close(law.mean[n], f[n] - J[n] @ S @ J[n].T @ r[n])
        torch.testing.assert_close(effects[:, n], -(J_new @ (S @ (J[n].T @ r[n]))))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_weights_are_drawn_from_the_covariance_of_the_functions(structure):
    likelihood = n2g.Categorical()
    posterior = quietly(
        mlp(),
        (X, labels(likelihood)),
        likelihood,
        prior_var={"*.bias": 0.3, "*.weight": 1.0},
        structure=structure,
    )
    linearized = posterior.linearized
    generator = torch.Generator().manual_seed(0)
    draws = posterior.sample_weights(20_000, generator=generator)
    moved = torch.cat([draws[n].flatten(1) - p.flatten() for n, p in linearized.params.items()], 1)
    f = torch.einsum("ncp,sp->snc", linearized.jacobian(NEW), moved).flatten(1)
    joint = posterior.joint(NEW).covariance_matrix
    assert float((f.T @ f / 20_000 - joint).abs().max() / joint.abs().max()) < 0.05


@pytest.mark.parametrize(
    "structure", [n2g.Full(), n2g.structures.FunctionSpace(), n2g.structures.FunctionSpace(20)]
)
def test_networks_of_drawn_weights_are_averaged_in_every_space(structure):
    likelihood = n2g.Categorical()
    data = (X, labels(likelihood))
    posterior = quietly(mlp(), data, likelihood, prior_var=1e-4, structure=structure)
    sampled = posterior.predict(NEW, samples=n2g.posteriors.WeightSamples(2000)).probs
    assert float((posterior.predict(NEW).probs - sampled).abs().max()) < 2e-3


@pytest.mark.parametrize("structure", EXACT, ids=str)
def test_networks_leave_their_linearization_with_the_square_of_the_deviation(structure):
    def gap(prior_var):
        data = (X, labels(n2g.Categorical()))
        posterior = quietly(
            mlp(), data, n2g.Categorical(), prior_var=prior_var, structure=structure
        )
        linear, bent = (
            posterior.sample(NEW, 5, generator=torch.Generator().manual_seed(0), linear=flag)
            for flag in (True, False)
        )
        return float((linear - bent).abs().max())

    assert gap(1e-4) / gap(1e-6) == pytest.approx(100, rel=0.1)


def test_function_space_has_the_network_as_its_mean_and_no_representers():
    network, likelihood = mlp(), n2g.Categorical()
    posterior = quietly(
        network,
        (X, labels(likelihood)),
        likelihood,
        prior_var=0.7,
        structure=n2g.structures.FunctionSpace(),
    )
    assert torch.equal(posterior.marginal(NEW).mean, network(NEW).detach())
    with pytest.raises(
        NotAvailable, match=r"update is for a Gaussian process.*dual\(\).condition\(\)"
    ):
        posterior.update((X, labels(likelihood)))
    with pytest.raises(InputError, match=r"contributions come from a kernel.*gaussian_process"):
        contributions(posterior, NEW)
    process = posterior.dual().gaussian_process()
    parts = contributions(process, NEW).sum(1)
    torch.testing.assert_close(parts, process.centered(NEW))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_training_the_network_further_changes_no_posterior(structure):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)]
    network, likelihood = nn.Sequential(*layers).double().eval(), n2g.Categorical()
    posterior = quietly(
        network, (X, labels(likelihood)), likelihood, prior_var=0.7, structure=structure
    )

    def everything():
        seeds = lambda: torch.Generator().manual_seed(0)
        return [
            posterior.marginal(NEW).covariance_matrix,
            posterior.joint(NEW).mean,
            posterior.predict(NEW).probs,
            posterior.predict(NEW, samples=n2g.posteriors.WeightSamples(5)).probs,
            posterior.sample(NEW, 3, generator=seeds()),
            posterior.contrast(NEW),
            posterior.dual().natural,
            torch.tensor(posterior.num_outputs),
        ]

    before = everything()
    network.train()
    network[1].eval()
    with torch.no_grad():
        network(X)
        for p in network.parameters():
            p.add_(1.0)
    for one, other in zip(before, everything(), strict=True):
        assert torch.equal(one, other)
    assert network.training
    assert not network[1].training


def test_points_can_be_left_out_of_a_posterior_whose_network_trains():
    likelihood = n2g.Categorical()
    for structure in EXACT:
        network = mlp()
        posterior = quietly(
            network, (X, labels(likelihood)), likelihood, prior_var=0.7, structure=structure
        )
        before = removal_effects(posterior, NEW)
        network.train()
        assert torch.equal(removal_effects(posterior, NEW), before)


@pytest.mark.parametrize(
    ("tuning", "likelihood", "text"),
    [
        (
            n2g.tuning.Validation((X, labels(n2g.Categorical()))),
            n2g.Categorical(),
            "Validation chooses",
        ),
        (
            n2g.tuning.Evidence(per_layer=True),
            n2g.Categorical(),
            "Evidence chooses prior variances",
        ),
        (n2g.tuning.Evidence(), n2g.Categorical(n2g.links.Probit()), "neither noise nor link open"),
        (n2g.tuning.Evidence(), n2g.Gaussian(0.3), "neither noise nor link open"),
        ("marglik", n2g.Categorical(), r"tuning must be Matched\(\), Evidence\(\)"),
    ],
)
@pytest.mark.parametrize("structure", [n2g.Kron(), n2g.structures.FunctionSpace()], ids=str)
def test_tuning_that_a_given_prior_leaves_nothing_to_is_refused(
    tuning, likelihood, text, structure
):
    data = (X, labels(likelihood))
    with pytest.raises(InputError, match=text):
        quietly(mlp(), data, likelihood, prior_var=0.7, structure=structure, tuning=tuning)


def test_tuning_beside_a_given_prior_finds_the_noise():
    data = (X, labels(n2g.Gaussian()))
    found = quietly(mlp(), data, n2g.Gaussian(), prior_var=0.7, tuning=n2g.tuning.Evidence())
    assert found.likelihood.noise_var > 0


BAD_STRUCTURES = [
    (
        lambda: n2g.Kron("ggn"),
        r"Kron takes a Fisher matrix, ExactFisher\(\).*got 'ggn'.*Kron\(ExactFisher\(\)\)",
    ),
    (lambda: n2g.Full(n2g.structures.ExactFisher), r"Full takes a Fisher matrix"),
    (lambda: n2g.LastLayer("full"), r"LastLayer takes .* got 'full'.*LastLayer\(Kron\(\)\)"),
    (lambda: n2g.LastLayer(n2g.structures.LowRank()), "LastLayer takes the structure"),
    (lambda: n2g.structures.LowRank("10"), "rank must be a positive whole number, but is '10'"),
    (
        lambda: n2g.structures.Subnetwork(2.5),
        "num_weights must be a positive whole number, but is 2.5",
    ),
    (
        lambda: n2g.structures.FunctionSpace("all"),
        "num_points must be a positive whole number, but is 'all'",
    ),
    (
        lambda: n2g.posteriors.WeightSamples(0),
        "num_samples must be a positive whole number, but is 0",
    ),
    (lambda: Schedule(num_epochs=0), "num_epochs must be a positive whole number, but is 0. Try"),
    (lambda: Schedule(batch_size=1.5), "batch_size must be a positive whole number"),
    (lambda: Schedule(burn_in=-1), "burn_in must be a whole number of epochs"),
]


@pytest.mark.parametrize(("make", "text"), BAD_STRUCTURES, ids=[text for _, text in BAD_STRUCTURES])
def test_values_that_steer_are_checked_when_they_are_made(make, text):
    with pytest.raises(InputError, match=text):
        make()


@pytest.mark.parametrize(
    ("prior_var", "text"),
    [
        ("1", "prior_var must be a number, a tensor, or a dict .* is an object of type str"),
        ({"*": 1.0, "0.bias": None}, r"prior_var\['0.bias'\] is None"),
        (0, "prior_var must be positive and finite, but is 0. .* with only="),
        ({"*": 1.0, "0.bias": 0.0}, r"prior_var\['0.bias'\] must be positive"),
        (float("nan"), "prior_var must be positive and finite, but is nan"),
    ],
)
@pytest.mark.parametrize("structure", [n2g.Full(), n2g.structures.FunctionSpace()], ids=str)
def test_priors_that_leave_no_evidence_are_refused(prior_var, text, structure):
    data = (X, labels(n2g.Categorical()))
    with pytest.raises(InputError, match=text):
        quietly(mlp(), data, n2g.Categorical(), prior_var=prior_var, structure=structure)


def test_the_dual_refuses_a_prior_that_is_no_number():
    with pytest.raises(InputError, match="prior_var must be a number"):
        n2g.explain.dual(mlp(), (X, labels(n2g.Categorical())), n2g.Categorical(), prior_var="1")


def test_a_schedule_or_a_way_to_predict_of_another_kind_is_refused():
    data = (X, labels(n2g.Gaussian()))
    with pytest.raises(InputError, match=r"schedule must be Schedule\(num_epochs=100\).* is 5"):
        train_by_evidence(mlp(), data, n2g.Gaussian(), schedule=5)
    with pytest.raises(InputError, match=r"structure must be Kron\(\), Full\(\)"):
        train_by_evidence(mlp(), data, n2g.Gaussian(), structure=n2g.structures.LowRank(3))
    for structure in EXACT:
        posterior = quietly(mlp(), data, n2g.Gaussian(0.3), prior_var=0.7, structure=structure)
        with pytest.raises(InputError, match=r"samples must be WeightSamples\(100\) or None"):
            posterior.predict(NEW, samples="mc")


def test_kernels_that_are_posteriors_or_networks_are_refused_with_the_kernel_to_pass():
    posterior = quietly(mlp(), (X, labels(n2g.Gaussian())), n2g.Gaussian(0.3), prior_var=0.7)
    for compare in (nearest, similarity, aggregate, output_blocks):
        with pytest.raises(InputError, match=r"kernel must be .*Pass posterior.kernel"):
            compare(posterior, NEW, X)
        with pytest.raises(InputError, match=r"Pass linearize\(network\).kernel\(\)"):
            compare(mlp(), NEW, X)
    kernel = posterior.kernel
    assert nearest(kernel, NEW, X).index.shape == (6, 5)
    with pytest.raises(InputError, match="candidates must be a tensor"):
        nearest(kernel, NEW, X.tolist())
    with pytest.raises(InputError, match="num_neighbors must be a positive whole number"):
        nearest(kernel, NEW, X, 2.0)
    with pytest.raises(InputError, match="between 1 and the 30 candidates, but is 31"):
        nearest(kernel, NEW, X, 31)


def test_logits_of_several_places_are_refused():
    torch.manual_seed(0)
    network = nn.Conv2d(1, 2, 3, padding=1).double().eval()
    x, y = torch.randn(8, 1, 4, 4, dtype=torch.float64), torch.arange(8) % 2
    ways = (
        lambda one: quietly(one, (x, y), n2g.Categorical(), prior_var=1.0, structure=n2g.Full()),
        lambda one: n2g.explain.dual(one, (x, y), n2g.Categorical(), 1.0),
    )
    for way in ways:
        with pytest.raises(InputError, match=r"one label a point.*\(N, 2, 4, 4\).*flatten\(1\)"):
            way(network)
        way(n2g.linearize(network, output=lambda out: out[:, :, 0, 0]))
        way(nn.Sequential(network, nn.AvgPool2d(4)).eval())  # (N, 2, 1, 1) has one axis


@pytest.mark.parametrize("structure", EXACT, ids=str)
@pytest.mark.parametrize("count", [2, 10])
def test_with_few_points_predictions_are_not_surer_than_the_network_where_it_was_trained(
    structure, count
):
    torch.manual_seed(0)
    y = torch.arange(count) % 2
    x = torch.randn(count, 2, dtype=torch.float64) + 2 * nn.functional.one_hot(y, 2)
    network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    posterior = quietly(network.eval(), (x, y), n2g.Categorical(), structure=structure)
    own, found = network(x).detach().softmax(-1), posterior.predict(x).probs
    doubt = lambda probs: float((1 - probs.max(-1).values).mean())
    assert doubt(found) > 0.7 * doubt(own)


def test_the_link_of_a_hot_posterior_is_matched_at_its_temperature():
    likelihood = n2g.Categorical()
    x = torch.randn(80, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    data = (x, labels(likelihood, 80))
    full, part = (
        quietly(mlp(), data, likelihood, prior_var=0.7, structure=one, temperature=0.25)
        for one in EXACT
    )
    assert full.temperature == part.temperature == 0.25
    assert full.likelihood.link.scale == pytest.approx(part.likelihood.link.scale, rel=1e-3)
    assert match_link(part, x).likelihood.link.scale == part.likelihood.link.scale
