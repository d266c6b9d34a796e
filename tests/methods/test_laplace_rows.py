"""Function space from the rows of the data that tell something."""

import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from methods.laplace_cases import NEW, Poisson, X, labels, mlp, quietly
from net2gp.errors import InputError
from net2gp.linalg import psd_root
from net2gp.linear.linearized import expand_prior
from net2gp.methods.laplace_approximation.task import make_task
from net2gp.posteriors.weights import pivoted
from net2gp.posteriors.weights.diagonal import DiagonalCovariance
from net2gp.posteriors.weights.function_space import sampled_trace
from net2gp.posteriors.weights.pivoted import Pivoted, row_system

LIKELIHOODS = [n2g.Categorical(), n2g.Bernoulli(), n2g.Gaussian(0.3), Poisson()]
NOTHING_LOST = n2g.structures.FunctionSpace(tol=1e-12)


def posteriors(network, x, y, likelihood, *structures, prior_var=0.7):
    return [
        quietly(network, (x, y), likelihood, prior_var=prior_var, structure=structure)
        for structure in structures
    ]


def few_rows(monkeypatch):
    """However many pivots there are, all rows are not taken instead."""
    monkeypatch.setattr(pivoted, "SHARE", 1.0)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    "prior_var", [0.7, {"*.weight": 0.4, "*.bias": 1.3}], ids=["one prior", "by layer"]
)
def test_without_a_tolerance_to_speak_of_it_is_the_exact_process(
    likelihood, prior_var, monkeypatch
):
    few_rows(monkeypatch)
    y = labels(likelihood)
    exact, found = posteriors(
        mlp(),
        X,
        y,
        likelihood,
        n2g.structures.FunctionSpace(tol=0.0),
        NOTHING_LOST,
        prior_var=prior_var,
    )
    assert isinstance(found.covariance, Pivoted)
    assert found.structure == NOTHING_LOST
    torch.testing.assert_close(found.log_marginal_likelihood(), exact.log_marginal_likelihood())
    for law in ("marginal", "joint"):
        one, other = (getattr(way, law)(NEW).covariance_matrix for way in (found, exact))
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        found.covariance.variances(found.linearized, NEW),
        exact.marginal(NEW).covariance_matrix.diagonal(dim1=1, dim2=2),
        rtol=1e-6,
        atol=1e-7,
    )


class Words(nn.Module):
    """An embedding, a convolution, a norm, and a parameter without a layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.conv = nn.Conv1d(4, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.top = nn.Linear(6, 3)
        self.slope = nn.Parameter(torch.ones(3))

    def forward(self, ids):
        h = torch.tanh(self.conv(self.words(ids).mT)).mean(-1)
        return self.slope * self.top(self.norm(h))


def test_rows_of_every_kind_of_layer_are_those_of_the_exact_process(monkeypatch):
    few_rows(monkeypatch)
    torch.manual_seed(0)
    network = Words().double().eval()
    ids = torch.randint(0, 9, (25, 7), generator=torch.Generator().manual_seed(3))
    y = labels(n2g.Categorical(), 25)
    exact, found = posteriors(
        network,
        ids[:20],
        y[:20],
        n2g.Categorical(),
        n2g.structures.FunctionSpace(tol=0.0),
        NOTHING_LOST,
    )
    assert isinstance(found.covariance, Pivoted)
    one, other = (way.joint(ids[15:]).covariance_matrix for way in (found, exact))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.log_marginal_likelihood(), exact.log_marginal_likelihood())


@pytest.mark.parametrize("tol", [1e-1, 1e-2, 1e-3])
def test_what_is_left_out_changes_variances_by_little(tol, monkeypatch):
    few_rows(monkeypatch)
    likelihood = n2g.Categorical()
    exact, found = posteriors(
        mlp(),
        X,
        labels(likelihood),
        likelihood,
        n2g.structures.FunctionSpace(),
        n2g.structures.FunctionSpace(tol=tol),
    )
    assert len(found.covariance.T) < X.shape[0] * 2
    gap = found.joint(NEW).covariance_matrix - exact.joint(NEW).covariance_matrix
    variances = exact.marginal(NEW).variance
    assert float((gap.diagonal() / variances.flatten()).abs().max()) < 5 * tol
    evidence = [float(way.log_marginal_likelihood()) for way in (exact, found)]
    assert abs(evidence[0] - evidence[1]) < 90 * tol / 2


def test_draws_have_the_covariance_that_predictions_have(monkeypatch):
    few_rows(monkeypatch)
    likelihood = n2g.Categorical()
    (found,) = posteriors(
        mlp(),
        X,
        labels(likelihood),
        likelihood,
        n2g.structures.FunctionSpace(tol=1e-3),
        prior_var=0.7,
    )
    P, r = found.linearized.num_params, len(found.covariance.T)
    identity = torch.eye(P + r, dtype=torch.float64).split([P, r])
    parts = iter(identity)
    monkeypatch.setattr(pivoted, "normal", lambda like, count, generator: next(parts))
    root = found.covariance.draw(P + r, None)  # a draw is linear in what is random of it
    J = found.linearized.jacobian(NEW).flatten(0, 1)
    torch.testing.assert_close(J @ root @ root.mT @ J.mT, found.joint(NEW).covariance_matrix)


def test_draws_of_a_generator_repeat():
    likelihood = n2g.Categorical()
    (found,) = posteriors(
        mlp(),
        X,
        labels(likelihood),
        likelihood,
        n2g.structures.FunctionSpace(tol=1e-1),
        prior_var=0.7,
    )
    assert isinstance(found.covariance, Pivoted)
    one, other = (
        found.sample(NEW, 4, generator=torch.Generator().manual_seed(0)) for _ in range(2)
    )
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    drawn = found.sample(NEW, 20_000, generator=torch.Generator().manual_seed(1)).var(0)
    torch.testing.assert_close(drawn, found.marginal(NEW).variance, rtol=0.06, atol=0)


def test_tuned_priors_are_those_of_the_exact_process(monkeypatch):
    few_rows(monkeypatch)
    data = (X, labels(n2g.Categorical()))
    for tuning in (n2g.tuning.Evidence(), n2g.tuning.Matched()):
        exact, found = (
            quietly(mlp(), data, n2g.Categorical(), tuning=tuning, structure=structure)
            for structure in (
                n2g.structures.FunctionSpace(),
                n2g.structures.FunctionSpace(tol=1e-9),
            )
        )
        assert isinstance(found.covariance, Pivoted)
        assert found.prior_var == pytest.approx(exact.prior_var, rel=1e-3)
        torch.testing.assert_close(
            found.predict(NEW).probs, exact.predict(NEW).probs, rtol=0, atol=1e-4
        )


def test_temperature_and_points_are_those_of_the_exact_process(monkeypatch):
    few_rows(monkeypatch)
    data = (X, labels(n2g.Categorical()))
    exact, found = (
        quietly(
            mlp(),
            data,
            n2g.Categorical(),
            prior_var=0.7,
            temperature=2.5,
            structure=n2g.structures.FunctionSpace(17, seed=3, tol=tol),
        )
        for tol in (0.0, 1e-12)
    )
    one, other = (way.marginal(NEW).covariance_matrix for way in (found, exact))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_saved_and_moved_it_predicts_the_same(tmp_path):
    (found,) = posteriors(
        mlp(),
        X,
        labels(n2g.Categorical()),
        n2g.Categorical(),
        n2g.structures.FunctionSpace(tol=1e-1),
    )
    assert isinstance(found.covariance, Pivoted)
    n2g.save(found, tmp_path / "posterior.safetensors")
    again = n2g.load(tmp_path / "posterior.safetensors", mlp())
    assert again.structure == n2g.structures.FunctionSpace(tol=1e-1)
    one, other = (way.joint(NEW).covariance_matrix for way in (found, again))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    single = found.to(dtype=torch.float32)
    near = single.marginal(NEW.float()).covariance_matrix
    assert near.dtype == torch.float32
    torch.testing.assert_close(
        near.double(), found.marginal(NEW).covariance_matrix, rtol=1e-4, atol=1e-5
    )


def test_points_in_chunks_are_the_points_together(monkeypatch):
    (found,) = posteriors(
        mlp(),
        X,
        labels(n2g.Categorical()),
        n2g.Categorical(),
        n2g.structures.FunctionSpace(tol=1e-1),
    )
    together = found.marginal(NEW).covariance_matrix
    monkeypatch.setattr(pivoted, "TEST_BYTES", 1)
    torch.testing.assert_close(found.marginal(NEW).covariance_matrix, together)


def test_many_pivots_mean_all_rows_and_the_result_says_so():
    likelihood = n2g.Gaussian(1e-4)
    (found,) = posteriors(mlp(), X, labels(likelihood), likelihood, NOTHING_LOST)
    assert not isinstance(found.covariance, Pivoted)
    assert found.structure == n2g.structures.FunctionSpace(tol=0.0)


def test_rows_that_tell_nothing_leave_the_prior():
    likelihood = n2g.Categorical()
    (found,) = posteriors(
        mlp(),
        X,
        labels(likelihood),
        likelihood,
        n2g.structures.FunctionSpace(tol=0.1),
        prior_var=1e-6,
    )
    assert isinstance(found.covariance, DiagonalCovariance)
    prior = 1e-6 * found.linearized.kernel().blocks(NEW)
    torch.testing.assert_close(found.marginal(NEW).covariance_matrix, prior)
    (exact,) = posteriors(
        mlp(), X, labels(likelihood), likelihood, n2g.structures.FunctionSpace(), prior_var=1e-6
    )
    torch.testing.assert_close(found.log_marginal_likelihood(), exact.log_marginal_likelihood())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_large_classifiers_leave_rows_out_by_default(dtype):
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 3)).to(dtype).eval()
    x = torch.randn(400, 3, generator=generator).to(dtype)
    y = torch.randint(0, 3, (400,), generator=generator)
    with torch.no_grad():
        network[2].weight.mul_(20)  # sure of most points
    many, few = (
        quietly(network, (x[:n], y[:n]), n2g.Categorical(), prior_var=1.0, structure=structure)
        for n, structure in (
            (400, n2g.structures.FunctionSpace()),
            (300, n2g.structures.FunctionSpace()),
        )
    )
    assert many.structure == n2g.structures.FunctionSpace(tol=1e-2)
    assert few.structure == n2g.structures.FunctionSpace()
    exact = quietly(
        network,
        (x, y),
        n2g.Categorical(),
        prior_var=1.0,
        structure=n2g.structures.FunctionSpace(tol=0.0),
    )
    ratio = many.marginal(x[:50]).variance / exact.marginal(x[:50]).variance
    assert float((ratio - 1).abs().max()) < 0.02
    values = torch.randn(400, 3, generator=generator).to(dtype)
    regression = quietly(
        network,
        (x, values),
        n2g.Gaussian(),
        prior_var=1.0,
        structure=n2g.structures.FunctionSpace(),
    )
    assert regression.structure == n2g.structures.FunctionSpace()


def test_points_can_be_left_out_of_it(monkeypatch):
    few_rows(monkeypatch)
    likelihood = n2g.Categorical()
    exact, found = posteriors(
        mlp(),
        X,
        labels(likelihood),
        likelihood,
        n2g.structures.FunctionSpace(),
        n2g.structures.FunctionSpace(tol=1e-6),
    )
    one, other = (n2g.explain.leave_one_out(way) for way in (found, exact))
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tol", [0.3, 1e-2, 1e-4])
def test_no_direction_misses_more_than_the_tolerance(tol, monkeypatch):
    few_rows(monkeypatch)
    monkeypatch.setattr(pivoted, "BLOCK", 7)
    monkeypatch.setattr(pivoted, "PROBES", 40)
    linearized, likelihood = n2g.linearize(mlp()), n2g.Categorical()
    S = psd_root(likelihood.curvature(linearized(X)), symmetric=False)
    kernel = linearized.kernel(0.7)
    system = row_system(kernel, X, S, tol)
    Phi = torch.einsum("nck,ncp->nkp", S, kernel.features(X)).flatten(0, 1)
    A = Phi @ Phi.mT
    torch.testing.assert_close(system.T @ system.T.mT, A[system.index][:, system.index])
    Q = torch.linalg.solve(system.T, Phi[system.index])
    torch.testing.assert_close(Q @ Q.mT, torch.eye(len(Q), dtype=torch.float64))
    kept = torch.zeros_like(Phi)
    kept[system.kept] = Phi[system.kept] @ Q.mT @ Q
    eye = torch.eye(Phi.shape[1], dtype=torch.float64)
    D, M = Phi - kept, eye + kept.mT @ kept
    missed = torch.linalg.eigvalsh(D @ torch.linalg.solve(M, D.mT))[-1]
    assert float(missed) <= tol * (1 + 1e-6)
    assert float(missed) == pytest.approx(
        pivoted._most_missed(pivoted._Rows.of(kernel, X, S), system)
    )
    left = torch.linalg.eigvalsh(A - kept @ kept.mT).sum()
    assert system.missed == pytest.approx(float(left), rel=1e-6, abs=1e-9)
    exact = float(torch.logdet(eye + Phi.mT @ Phi))
    found = 2 * float(system.R.diagonal().log().sum()) + float(system.rest())
    assert found == pytest.approx(exact, abs=float(left))


@pytest.mark.parametrize("logit", [3.0, 8.0, 12.0])
def test_many_rows_that_tell_little_together_tell_much(logit):
    """A tolerance for each row alone would leave all of these out."""
    x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network = nn.Linear(2, 1).double().eval()
    with torch.no_grad():
        network.weight.zero_()
        network.bias.fill_(logit)
    y = torch.ones(4000, 1, dtype=torch.long)
    full, found = posteriors(
        network, x, y, n2g.Bernoulli(), n2g.Full(), n2g.structures.FunctionSpace()
    )
    assert found.structure == n2g.structures.FunctionSpace(tol=1e-2)
    new = torch.cat([x[:20], 5 * x[:20]])
    torch.testing.assert_close(
        found.marginal(new).variance, full.marginal(new).variance, rtol=0.02, atol=0
    )


def test_rows_are_sought_once_for_a_posterior_whose_link_is_matched(monkeypatch):
    calls, seek = [], pivoted.row_system
    counted = lambda *arguments: calls.append(arguments[3]) or seek(*arguments)
    monkeypatch.setattr("net2gp.posteriors.weights.function_space.row_system", counted)
    data = (X, labels(n2g.Categorical()))
    quietly(
        mlp(),
        data,
        n2g.Categorical(),
        prior_var=0.7,
        structure=n2g.structures.FunctionSpace(tol=0.1),
    )
    assert calls == [0.1]


def test_a_prior_that_is_tuned_is_tuned_on_all_rows():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 3)).double().eval()
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with torch.no_grad():
        network[2].weight.mul_(30)
        x *= 0.1
    y = torch.randint(0, 3, (400,), generator=torch.Generator().manual_seed(6))
    exact, found = (
        quietly(network, (x, y), n2g.Categorical(), structure=n2g.structures.FunctionSpace(tol=tol))
        for tol in (0.0, None)
    )
    assert isinstance(found.covariance, Pivoted)
    # the prior that matches the network's certainty follows variances, which are right to the tolerance
    assert found.prior_var == pytest.approx(exact.prior_var, rel=0.02)


@pytest.mark.parametrize("tol", [-1e-3, float("nan"), float("inf"), "small", True, [1e-3]])
def test_a_tolerance_is_a_number_that_is_not_negative(tol):
    with pytest.raises(InputError, match="tol must be"):
        n2g.structures.FunctionSpace(tol=tol)


@pytest.mark.gpu
def test_rows_on_a_gpu_are_those_of_the_cpu():
    likelihood, laws = n2g.Categorical(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for device in ("cpu", "cuda"):
            (found,) = posteriors(
                mlp().to(device),
                X.to(device),
                labels(likelihood).to(device),
                likelihood,
                n2g.structures.FunctionSpace(tol=1e-2),
            )
            assert isinstance(found.covariance, Pivoted)
            laws.append(found.joint(NEW.to(device)).covariance_matrix.cpu())
    torch.testing.assert_close(*laws, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("prior_var", "scale"), [(0.7, 1.0), (30.0, 0.25)])
def test_the_covariance_at_the_data_is_read_from_the_gram_matrix(prior_var, scale):
    likelihood = n2g.Categorical()
    data = (X, labels(likelihood))
    task, structure = make_task(mlp(), data, likelihood, n2g.structures.FunctionSpace())
    curvature, index = structure.curvature(task), torch.tensor([3, 0, 7])
    assert curvature.at_data(prior_var, scale, index) is None  # before a search has read the matrix
    curvature.log_det(expand_prior(prior_var, task.params), scale)
    blocks = curvature.at_data(prior_var, scale, index)
    exact = quietly(
        mlp(), data, likelihood, prior_var=prior_var, structure=n2g.Full(), temperature=1 / scale
    )
    wanted = exact.marginal(X[index]).covariance_matrix
    torch.testing.assert_close(blocks, wanted, rtol=1e-8, atol=1e-10)


def test_the_trace_of_many_outputs_is_that_of_the_curvature():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 60)).double().eval()
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.randint(0, 60, (30,), generator=torch.Generator().manual_seed(2))
    warnings.simplefilter("ignore", n2g.errors.EmptyClass)
    task, _ = make_task(network, (x, y), n2g.Categorical(), n2g.structures.FunctionSpace())
    J = n2g.linearize(network).jacobian(x)
    exact = float(torch.einsum("ncp,ncd,ndp->", J, n2g.Categorical().curvature(task.f), J))
    assert sampled_trace(task) == pytest.approx(exact, rel=0.15)
