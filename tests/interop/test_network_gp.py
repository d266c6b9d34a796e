"""A network fitted as a surrogate: its hyper-parameters, its transforms, and a loop that finds a maximum."""

import subprocess
import sys

import gpytorch
import numpy as np
import pytest
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from gpytorch.constraints import Positive
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError
from net2gp.interop.botorch import NetworkGP
from net2gp.interop.botorch.network_gp import default_network
from net2gp.interop.gpytorch import NetworkKernel
from net2gp.interop.kernels import Stretched, with_variances
from net2gp.methods.most_probable import LogNormal, most_probable
from net2gp.posteriors.posterior import Posterior

double = torch.float64


def rand(*shape, seed=0):
    return torch.rand(*shape, dtype=double, generator=torch.Generator().manual_seed(seed))


X = rand(14, 3)
Y = (4 * X[:, :1]).sin() + 0.3 * X[:, 1:2]
NEW = rand(50, 3, seed=1)
BOX = torch.tensor([[0.0] * 3, [1.0] * 3], dtype=double)


@pytest.fixture(scope="module")
def fitted():
    return NetworkGP(X, Y, bounds=BOX)


def test_the_fit_predicts_and_finds_the_input_that_does_not_matter(fitted):
    truth = (4 * NEW[:, :1]).sin() + 0.3 * NEW[:, 1:2]
    law = fitted.posterior(NEW)
    assert (law.mean - truth).square().mean() < 0.05 * Y.var()
    scales = fitted.hyperparameters["lengthscale"]
    assert scales.shape == (3,)
    assert scales[0] == scales.min()
    assert scales[2] == scales.max()
    assert set(fitted.hyperparameters) == {"lengthscale", "weight_var", "bias_var", "noise_var"}


def test_hyper_parameters_are_a_maximum_of_evidence_and_prior(fitted):
    again = NetworkGP(X, Y, bounds=BOX, start=fitted.hyperparameters)
    assert again.log_density >= fitted.log_density - 1e-6
    assert again.log_density - fitted.log_density < 0.05
    for name, value in fitted.hyperparameters.items():
        for factor in (0.7, 1.4):
            moved = {**fitted.hyperparameters, name: value * factor}
            assert density(moved) < fitted.log_density, name


def density(values):
    """The log density of hyper-parameters, apart from the search."""
    from net2gp.interop.botorch import network_gp as parts
    from net2gp.methods import kernel_fit

    network = parts.default_network(3)
    kernel = n2g.nngp(network, weight_var=values["weight_var"], bias_var=values["bias_var"])
    y = (Y - Y.mean()) / Y.std()
    kernel = Stretched(kernel, values["lengthscale"])
    posterior = n2g.condition(kernel, (X - 0.5, y), n2g.Gaussian(values["noise_var"]))
    total = posterior.log_marginal_likelihood()
    priors = {
        "lengthscale": kernel_fit.LENGTHSCALE,
        "weight_var": kernel_fit.WEIGHTS,
        "bias_var": kernel_fit.BIASES,
        "noise_var": parts.NOISE,
    }
    for name, prior in priors.items():
        logs = values[name].log() - torch.tensor(prior.median, dtype=double).log()
        total = total - 0.5 * (logs / prior.spread).square().sum()
    return total


def test_scales_and_offsets_of_inputs_and_outcomes_do_not_matter(fitted):
    moved = NetworkGP(10 * X - 3, 1e3 * Y + 50, bounds=10 * BOX - 3)
    law, own = moved.posterior(10 * NEW - 3), fitted.posterior(NEW)
    torch.testing.assert_close(law.mean, 1e3 * own.mean + 50, rtol=1e-4, atol=0.5)
    torch.testing.assert_close(law.variance, 1e6 * own.variance, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(moved.train_inputs[0], 10 * X - 3)


def test_known_noise_is_taken_and_not_learned():
    variances = torch.full_like(Y, 0.04)
    model = NetworkGP(X, Y, train_Yvar=variances, bounds=BOX)
    assert "noise_var" not in model.hyperparameters
    wide, f = model.posterior(NEW, observation_noise=True), model.posterior(NEW)
    torch.testing.assert_close(wide.variance - f.variance, torch.full((50, 1), 0.04, dtype=double))


@pytest.mark.parametrize(
    "kernel",
    [
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)),
        n2g.ntk(nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1))),
        n2g.RBF(),
    ],
    ids=["network", "ntk", "rbf"],
)
def test_networks_and_kernels_of_ones_own(kernel):
    model = NetworkGP(X, Y, kernel)
    truth = (4 * NEW[:, :1]).sin() + 0.3 * NEW[:, 1:2]
    assert (model.posterior(NEW).mean - truth).square().mean() < 0.2 * Y.var()


def test_a_network_of_images_and_two_outcomes():
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
    images = rand(20, 16)
    y = torch.stack([images[:, :8].sum(1), images.std(1)], 1)
    model = NetworkGP(images, y, network, input_shape=(1, 4, 4))
    assert model.num_outputs == 2
    assert model.posterior(images[:6].reshape(3, 2, 16)).mean.shape == (3, 2, 2)
    assert model.hyperparameters["lengthscale"].shape == ()


def convolutions():
    layers = (nn.Conv2d(1, 4, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(4, 1))


LIMITS = {
    "default": (lambda: n2g.nngp(default_network(3)), 3, None),
    "ntk": (lambda: n2g.ntk(nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1))), 3, None),
    "images": (lambda: n2g.nngp(convolutions()), 9, (1, 3, 3)),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_fit_predicts_what_an_exact_process_with_its_kernel_predicts(limit):
    make, d, shape = LIMITS[limit]
    x, more, new = rand(15, d), rand(3, d, seed=2), rand(5, 2, d, seed=1)
    y, y_more = ((4 * points[:, :1]).sin() + points[:, -1:] for points in (x, more))
    box = torch.stack([torch.zeros(d), torch.ones(d)]).double()
    model = NetworkGP(x, y, make(), bounds=box, input_shape=shape)
    values = model.hyperparameters
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=Positive()).double()
    likelihood.noise = values["noise_var"]
    variances = {name: values[name] for name in ("weight_var", "bias_var")}
    kernel = Stretched(with_variances(make(), **variances), values["lengthscale"])
    theirs = SingleTaskGP(
        x,
        y,
        likelihood=likelihood,
        covar_module=NetworkKernel(kernel, input_shape=shape),
        mean_module=gpytorch.means.ZeroMean(),
        input_transform=Normalize(d, bounds=box, center=0.0),
        outcome_transform=Standardize(1),
    ).eval()
    with torch.no_grad():
        pairs = [(model, theirs)]
        theirs.posterior(new)  # fills the caches that it conditions with
        pairs.append(tuple(m.condition_on_observations(more, y_more) for m in pairs[0]))
        for mine, other in pairs:
            own, law = mine.posterior(new), other.posterior(new)
            torch.testing.assert_close(own.mean, law.mean, rtol=0, atol=1e-8)
            covariances = (one.distribution.covariance_matrix for one in (own, law))
            torch.testing.assert_close(*covariances, rtol=0, atol=1e-8)


def test_a_loop_finds_the_maximum_of_a_parabola():
    function = lambda x: -(x - 0.3).square().sum(1, keepdim=True)
    x, model = rand(4, 2), None
    bounds = BOX[:, :2]
    for seed in range(6):
        torch.manual_seed(seed)
        y = function(x)
        start = None if model is None else model.hyperparameters
        model = NetworkGP(x, y, bounds=bounds, start=start)
        acquisition = LogExpectedImprovement(model, best_f=y.max())
        new, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=32)
        x = torch.cat([x, new])
    assert function(x).max() > -1e-3


def test_a_search_with_one_peak_finds_it():
    def builder(v):
        evidence = -((v.log() - 1) ** 2).sum()
        return Posterior(*[None] * 4, evidence, None)

    found, value = most_probable(builder, {"v": LogNormal(1.0, 2.0, 2)})
    # the maximum of −(t − 1)² − t²/8
    torch.testing.assert_close(found["v"].log(), torch.full((2,), 8 / 9, dtype=double))
    assert abs(value + 2 * (1 / 81 + 64 / 81 / 8)) < 1e-6


def test_stretched_kernels_are_kernels_of_divided_points():
    scales = torch.tensor([0.5, 1.0, 4.0], dtype=double, requires_grad=True)
    kernel, inner = Stretched(n2g.RBF(0.8), scales), n2g.RBF(0.8)
    with torch.no_grad():
        for other in (None, NEW):
            moved = None if other is None else other / scales
            torch.testing.assert_close(kernel(X, other), inner(X / scales, moved))
        torch.testing.assert_close(kernel.diag(X), kernel(X).diagonal())
        torch.testing.assert_close(kernel.blocks(X), kernel(X).diagonal()[:, None, None])
        torch.testing.assert_close(kernel.scaled(2.0)(X), 2 * kernel(X))
        torch.testing.assert_close(kernel.precise()(X), kernel(X))
    assert torch.autograd.grad(kernel(X).sum(), scales)[0].abs().min() > 0


def test_variances_are_replaced_and_the_network_is_not_traced_again():
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    kernel = n2g.ntk(network, weight_var=1.5, bias_var=0.2)
    found = with_variances(kernel, bias_var=0.7)
    assert found.limit.graph is kernel.limit.graph
    assert found.limit.plans is kernel.limit.plans
    expected = n2g.ntk(network, weight_var=1.5, bias_var=0.7)(X)
    torch.testing.assert_close(found(X), expected)


def test_what_cannot_be_is_said():
    with pytest.raises(InputError, match=r"Pass y\[:, None\] for one outcome"):
        NetworkGP(X, Y[:, 0])
    with pytest.raises(InputError, match=r"kernel must be a network or a kernel, but is str"):
        NetworkGP(X, Y, "relu")
    with pytest.raises(InputError, match=r"Stretched divides one floating tensor"):
        Stretched(n2g.RBF(), torch.ones(3))((X, X))
    with pytest.raises(InputError, match=r"lengthscale must be positive"):
        Stretched(n2g.RBF(), torch.zeros(3))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X.float(), Y), {}, r"same floating dtype, but have torch\.float32 and torch\.float64"),
        (((9 * X).long(), Y), {}, r"Pass train_X\.double\(\) and train_Y\.double\(\)"),
        ((X[:0], Y[:0]), {}, "needs an observation"),
        ((X, Y[:3]), {}, "one row for each observation"),
        ((X, Y * torch.nan), {}, "train_Y must be finite"),
        ((X, Y), {"train_Yvar": torch.ones(14)}, "train_Yvar must hold a positive variance"),
        ((X, Y), {"train_Yvar": -torch.ones_like(Y)}, "train_Yvar must hold a positive variance"),
        ((X, Y), {"bounds": BOX[:, :2]}, r"bounds must have shape \(2, 3\)"),
        ((X, Y), {"bounds": BOX.flip(0)}, r"bounds must have shape \(2, 3\)"),
        ((X, Y), {"input_shape": (2, 2)}, "has 4 entries, but train_X has 3 columns"),
        ((X, Y, nn.Linear(2, 1)), {}, r"cannot take inputs of shape \(14, 3\)"),
    ],
)
def test_data_that_do_not_fit_are_named(arguments, options, message):
    with pytest.raises(InputError, match=message):
        NetworkGP(*arguments, **options)


def test_points_that_are_none_are_named(fitted):
    assert fitted.posterior(NEW[:0, None]).mean.shape == (0, 1, 1)
    assert fitted.posterior(NEW[:0, None]).rsample(torch.Size([5])).shape == (5, 0, 1, 1)
    assert LogExpectedImprovement(fitted, best_f=0.0)(NEW[:0, None]).shape == (0,)
    for points in (NEW[:0], NEW[0], NEW.long(), NEW.numpy()):
        with pytest.raises(InputError, match=r"X must be a floating tensor of shape \(\*b, q, d\)"):
            fitted.posterior(points)
    with pytest.raises(InputError, match="has 1 outputs"):
        fitted.subset_output([1])


def test_it_is_cited_as_its_posterior_is(fitted):
    assert str(n2g.cite(fitted)) == str(n2g.cite(fitted.fitted))
    assert {"lee2018", "rasmussen2006"} <= {one.key for one in n2g.cite(fitted).references}


def test_the_library_does_not_load_botorch_by_itself():
    code = (
        "import sys, net2gp, net2gp.interop; net2gp.RBF; "
        "print([n for n in sys.modules if n.split('.')[0] == 'botorch'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_arrays_are_told_to_become_tensors():
    x = np.zeros((3, 2))
    with pytest.raises(InputError, match=r"must be tensors.*torch\.as_tensor"):
        NetworkGP(x, x[:, :1])
