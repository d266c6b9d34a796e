"""Posteriors as models of BoTorch: the laws of its own exact processes, gradients, fantasies and draws."""

import copy

import gpytorch
import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    PosteriorMean,
    qKnowledgeGradient,
    qLogNoisyExpectedImprovement,
    qMaxValueEntropy,
)
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.generation import MaxPosteriorSampling
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.constraints import Positive
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError, NotAvailable
from net2gp.interop.botorch import PosteriorModel
from net2gp.interop.gpytorch import NetworkKernel
from net2gp.interop.kernels import Stretched

double = torch.float64
NOISE = 0.02


def rand(*shape, seed=0):
    return torch.rand(*shape, dtype=double, generator=torch.Generator().manual_seed(seed))


X, NEW = 3 * rand(9, 2) - 1, 3 * rand(4, 3, 2, seed=1) - 1
Y = 5 + 3 * (X.sum(1, keepdim=True) * 2).sin()


def relu(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, outputs)).double()


def limit():
    return n2g.nngp(relu(), weight_var=2.0, bias_var=0.2)


def close(one, other, atol=1e-8):
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def same_law(one, other, atol=1e-8):
    close(one.mean, other.mean, atol)
    close(one.distribution.covariance_matrix, other.distribution.covariance_matrix, atol)


def theirs(y=Y, noise=NOISE, **transforms):
    """BoTorch's exact process with our kernel."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=Positive()).double()
    likelihood.noise = torch.tensor(noise, dtype=double)
    return SingleTaskGP(
        X,
        y,
        likelihood=likelihood,
        covar_module=NetworkKernel(limit()),
        mean_module=gpytorch.means.ZeroMean(),
        **({"outcome_transform": None} | transforms),
    ).eval()


def ours(y=Y, noise=NOISE, kernel=None):
    return PosteriorModel(n2g.condition(kernel or limit(), (X, y), n2g.Gaussian(noise)))


def transformed():
    """The same process behind transforms, ours and theirs."""
    box, scale = Normalize(2), Standardize(1)
    x, (y, _) = box(X).detach(), scale(Y)
    posterior = n2g.condition(limit(), (x, y.detach()), n2g.Gaussian(NOISE))
    mine = PosteriorModel(posterior, input_transform=box, outcome_transform=scale, train_X=X)
    return mine, theirs(input_transform=Normalize(2), outcome_transform=Standardize(1))


def pairs():
    return {"plain": lambda: (ours(), theirs()), "transformed": transformed}


@pytest.mark.parametrize("pair", pairs())
@pytest.mark.parametrize("noise", [False, True, "tensor"])
def test_laws_are_those_of_an_exact_process_with_the_same_kernel(pair, noise):
    mine, other = pairs()[pair]()
    noise = rand(4, 3, 1, seed=3) if noise == "tensor" else noise
    for x in (NEW, NEW[:, :1], NEW[0], NEW[:, None]):
        asked = noise
        if isinstance(noise, torch.Tensor):
            asked = noise[:, : x.shape[-2]] if x.dim() == 3 else noise[0]
        with torch.no_grad():
            found = mine.posterior(x, observation_noise=asked)
            same_law(found, other.posterior(x, observation_noise=asked))
        assert isinstance(found, GPyTorchPosterior)
        assert found.mean.shape == (*x.shape[:-1], 1)


@pytest.mark.parametrize("pair", pairs())
def test_observations_move_the_law_as_they_move_that_of_an_exact_process(pair):
    mine, other = pairs()[pair]()
    x, y = NEW[0], Y[:3] + 1
    with torch.no_grad():
        other.posterior(x)  # fills the caches that it conditions with
        one, two = mine.condition_on_observations(x, y), other.condition_on_observations(x, y)
        same_law(one.posterior(NEW[1:]), two.posterior(NEW[1:]))
        close(one.train_targets, two.train_targets)
        assert one.train_inputs[0].shape == (12, 2)
        assert mine.train_inputs[0].shape == (9, 2)
        refitted = ours(mine.train_targets[:, None]) if pair == "plain" else mine
        same_law(mine.posterior(NEW), refitted.posterior(NEW))


@pytest.mark.parametrize("batch", [(5,), (5, 4)])
def test_batches_of_observations_are_those_of_an_exact_process(batch):
    mine, other = ours(), theirs()
    x = NEW[0] if len(batch) == 1 else NEW
    y = Y.mean() + rand(*batch, 3, 1, seed=2)
    with torch.no_grad():
        other.posterior(x)
        one, two = mine.condition_on_observations(x, y), other.condition_on_observations(x, y)
        assert one.batch_shape == torch.Size(batch) == two.batch_shape
        new = rand(*batch, 2, 2, seed=4)
        same_law(one.posterior(new), two.posterior(new))
        close(one.train_inputs[0], two.train_inputs[0])
        close(one.train_targets, two.train_targets)


def test_batches_with_transforms_and_noise_of_their_own():
    mine, other = transformed()
    y = Y.mean() + rand(5, 3, 1, seed=2)
    with torch.no_grad():
        other.posterior(NEW[0])
        one = mine.condition_on_observations(NEW[0], y)
        two = other.condition_on_observations(NEW[0], y)
        same_law(one.posterior(NEW[1]), two.posterior(NEW[1].expand(5, 3, 2)))
        noise = torch.full_like(y, 0.5)
        wide = mine.condition_on_observations(NEW[0], y, noise=noise)
        grown = mine.condition_on_observations(NEW[0], y[2], noise=noise[2])
        close(wide.posterior(NEW[1]).mean[2], grown.posterior(NEW[1]).mean)
        close(wide.posterior(NEW[1]).variance[2], grown.posterior(NEW[1]).variance)


def test_fantasies_of_fantasies_are_all_observations_at_once():
    model, (x1, x2) = ours(), (NEW[0], NEW[1])
    y1, y2 = Y.mean() + rand(5, 3, 1, seed=2), Y.mean() + rand(6, 5, 3, 1, seed=3)
    found = model.condition_on_observations(x1, y1).condition_on_observations(x2, y2)
    assert found.batch_shape == torch.Size([6, 5])
    law = found.posterior(NEW[2])
    for i, j in ((0, 0), (4, 3)):
        y = torch.cat([Y, y1[j], y2[i, j]])
        x = torch.cat([X, x1, x2])
        direct = n2g.condition(limit(), (x, y), n2g.Gaussian(NOISE)).joint(NEW[2])
        close(law.mean[i, j, :, 0], direct.mean)
        close(law.distribution.covariance_matrix[i, j], direct.covariance_matrix)


def test_fantasies_share_one_factor_and_leave_the_model_as_it_was():
    model = ours()
    before = model.posterior(NEW).mean
    fantasy = model.fantasize(NEW, SobolQMCNormalSampler(torch.Size([8]), seed=0))
    assert fantasy.batch_shape == torch.Size([8, 4])
    assert fantasy.fitted is model.fitted
    close(model.posterior(NEW).mean, before)
    assert fantasy.posterior(NEW[:, :1]).mean.shape == (8, 4, 1, 1)
    # the law of total variance: fantasies from the model's own predictions average to the model
    many = model.fantasize(NEW[0], SobolQMCNormalSampler(torch.Size([4096]), seed=0))
    law, own = many.posterior(NEW[1]), model.posterior(NEW[1])
    close(law.mean.mean(0), own.mean, 1e-2)
    close(law.mean.var(0) + law.variance.mean(0), own.variance, 2e-2)


def finite_differences(function, x, step=1e-5):
    result = torch.zeros_like(x)
    for place in range(x.numel()):
        shift = torch.zeros_like(x).flatten()
        shift[place] = step
        shift = shift.reshape(x.shape)
        with torch.no_grad():
            result.flatten()[place] = (function(x + shift) - function(x - shift)) / (2 * step)
    return result


def tangent():
    return n2g.linearize(relu()).kernel(prior_var=0.7)


def laplace(structure):
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        (network(X) - Y).square().mean().backward()
        optimizer.step()
    return n2g.laplace(network, (X, Y), n2g.Gaussian(0.1), structure=structure, prior_var=1.0)


SOURCES = {
    "nngp": ours,
    "ntk": lambda: ours(kernel=n2g.ntk(relu(), weight_var=2.0, bias_var=0.1)),
    "stretched": lambda: ours(kernel=Stretched(limit(), torch.tensor([0.5, 2.0], dtype=double))),
    "rbf": lambda: ours(kernel=n2g.RBF(0.7)),
    "tangent": lambda: ours(kernel=tangent()),
    "fantasies": lambda: ours().condition_on_observations(NEW[3], Y[:3].expand(2, 3, 1)),
    "transforms": lambda: transformed()[0],
    **{
        name: lambda structure=structure: PosteriorModel(laplace(structure))
        for name, structure in {
            "full": n2g.Full(),
            "kron": n2g.Kron(),
            "diagonal": n2g.Diagonal(),
            "last layer": n2g.LastLayer(),
        }.items()
    },
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("q", [1, 2])
def test_gradients_in_the_points_are_finite_differences(source, q):
    model, x = SOURCES[source](), NEW[:2, :q].clone()
    weights = rand(q, q, seed=5)

    def value(x):
        law = model.posterior(x)
        return law.mean.sin().sum() + (weights * law.distribution.covariance_matrix).sum()

    x.requires_grad_()
    (gradient,) = torch.autograd.grad(value(x), x)
    torch.testing.assert_close(gradient, finite_differences(value, x), rtol=1e-5, atol=1e-6)


def test_gradients_flow_through_fantasies_to_their_points():
    model, sampler = ours(), SobolQMCNormalSampler(torch.Size([3]), seed=0)
    new = NEW[2:3]

    def value(x):
        return model.fantasize(x, sampler).posterior(new).mean.square().sum()

    x = NEW[:2].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(x), x)
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(gradient, finite_differences(value, x), rtol=1e-5, atol=1e-6)


TWO = torch.cat([Y, Y.square() / 9], 1)


def coupled():
    network = relu(outputs=2)
    kernel = n2g.linearize(network).kernel(prior_var=0.7)
    return PosteriorModel(n2g.condition(kernel, (X, TWO), n2g.Gaussian(torch.tensor([0.1, 0.3]))))


def test_independent_outputs_are_those_of_a_process_each():
    both = ours(TWO)
    law = both.posterior(NEW, observation_noise=True)
    assert both.num_outputs == 2
    assert law.mean.shape == (4, 3, 2)
    for c in range(2):
        alone = ours(TWO[:, c : c + 1]).posterior(NEW, observation_noise=True)
        close(law.mean[..., c : c + 1], alone.mean)
        for found in (
            both.posterior(NEW, output_indices=[c], observation_noise=True),
            both.subset_output([c]).posterior(NEW, observation_noise=True),
        ):
            same_law(found, alone)
    close(both.train_targets, TWO.mT)
    close(both.subset_output([1]).train_targets, TWO[:, 1])


def test_coupled_outputs_keep_their_covariance():
    model = coupled()
    law = model.posterior(NEW[0])
    direct = model.fitted.joint(NEW[0])
    close(law.distribution.covariance_matrix, direct.covariance_matrix)
    summed = model.posterior(
        NEW[0], posterior_transform=ScalarizedPosteriorTransform(torch.ones(2, dtype=double))
    )
    blocks = direct.covariance_matrix.reshape(3, 2, 3, 2)
    close(summed.distribution.covariance_matrix, blocks.sum((1, 3)))
    batch = model.condition_on_observations(NEW[1], TWO[:3].expand(2, 3, 2)).posterior(NEW[0])
    grown = model.condition_on_observations(NEW[1], TWO[:3]).posterior(NEW[0])
    close(batch.distribution.covariance_matrix[1], grown.distribution.covariance_matrix)
    close(batch.mean[0], grown.mean)


def test_drawn_functions_have_the_law_of_the_posterior():
    # a network of any width has the covariance of its limit, so that few units suffice here
    sources = ((ours(kernel=tangent()), 150), (ours(), 60), (SOURCES["full"](), 150))
    for model, count in sources:
        x = NEW[0]
        generator = torch.Generator().manual_seed(0)
        draws = [model.draw_function(width=32, generator=generator) for _ in range(count)]
        values = torch.stack([draw(x)[:, 0] for draw in draws])
        law = model.posterior(x)
        std, root = law.variance[:, 0].sqrt(), count**0.5
        assert ((values.mean(0) - law.mean[:, 0]).abs() < 4 / root * std).all()
        ratio = torch.cov(values.T) / (std[:, None] * std)
        expected = law.distribution.covariance_matrix / (std[:, None] * std)
        close(ratio, expected, 5 * 2**0.5 / root)


def test_a_drawn_function_is_one_function_with_gradients_and_transforms():
    model = transformed()[0]
    draw = model.draw_function(generator=torch.Generator().manual_seed(0))
    again = model.draw_function(generator=torch.Generator().manual_seed(0))
    close(draw(NEW), again(NEW))
    close(draw(NEW)[1, 2], draw(NEW[1, 2:])[0])
    law = model.posterior(X)
    assert ((draw(X) - law.mean) / law.variance.sqrt()).abs().max() < 5
    x = NEW[:1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(draw(x).sum(), x)
    close(gradient, finite_differences(lambda x: draw(x).sum(), x), 1e-5)
    value = lambda q: PosteriorMean(draw)(q[None]).item()
    found, best = optimize_acqf(
        PosteriorMean(draw), bounds=BOUNDS, q=1, num_restarts=2, raw_samples=32
    )
    assert best > max(value(q[None]) for q in rand(20, 2, seed=6) * 3 - 1)
    assert found.shape == (1, 2)


BOUNDS = torch.tensor([[-1.0, -1.0], [2.0, 2.0]], dtype=double)


def acquisitions(model):
    yield LogExpectedImprovement(model, best_f=Y.max())
    sampler = SobolQMCNormalSampler(torch.Size([32]), seed=0)
    yield qLogNoisyExpectedImprovement(model, X, sampler=sampler, cache_root=False)
    yield qKnowledgeGradient(model, num_fantasies=3)
    if not hasattr(model, "input_transform"):  # BoTorch's would be given transformed inputs as X
        yield qMaxValueEntropy(model, candidate_set=3 * rand(30, 2, seed=7) - 1)


@pytest.mark.parametrize("pair", pairs())
def test_acquisition_functions_have_the_values_that_an_exact_process_gives(pair):
    values = []
    for model in pairs()[pair]():
        torch.manual_seed(0)
        found = []
        for acquisition in acquisitions(model):
            x = NEW if isinstance(acquisition, qLogNoisyExpectedImprovement) else NEW[:, :1]
            if isinstance(acquisition, qKnowledgeGradient):
                x = torch.cat([NEW, NEW.flip(0)], 1)[:, :4]
            torch.manual_seed(1)
            found.append(acquisition(x).detach())
        values.append(found)
    assert len(values[0]) >= 3
    for mine, other in zip(*values, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_a_knowledge_gradient_is_optimized_and_candidates_are_drawn():
    model = transformed()[0]
    torch.manual_seed(0)
    x, value = optimize_acqf(
        qKnowledgeGradient(model, num_fantasies=3),
        bounds=BOUNDS,
        q=1,
        num_restarts=2,
        raw_samples=16,
        options={"maxiter": 20},
    )
    assert x.shape == (1, 2)
    assert value.isfinite()
    chosen = MaxPosteriorSampling(model)(3 * rand(50, 2) - 1, num_samples=4)
    assert chosen.shape == (4, 2)


def test_posteriors_of_float32_networks_answer_in_the_dtype_of_the_points():
    network, x, y = relu().float(), X.float(), Y.float()
    model = PosteriorModel(n2g.condition(n2g.nngp(network), (x, y), n2g.Gaussian(0.1)))
    found = model.posterior(NEW)
    assert found.mean.dtype == double
    reference = n2g.condition(n2g.nngp(network), (X, Y), n2g.Gaussian(0.1)).joint(NEW, batch=True)
    close(found.mean[..., 0], reference.mean, 1e-3)


def test_images_are_rows_of_pixels():
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
    x = rand(6, 1, 4, 4)
    posterior = n2g.condition(n2g.nngp(network), (x, x.mean((1, 2, 3))), n2g.Gaussian(0.1))
    model = PosteriorModel(posterior)
    assert model.train_inputs[0].shape == (6, 16)
    close(model.posterior(x.flatten(1)).mean[:, 0], posterior.mean(x)[:, 0])
    with pytest.raises(InputError, match=r"X must have 16 columns"):
        model.posterior(x.flatten(1)[:, :9])


def test_a_copy_predicts_the_same():
    model = transformed()[0].condition_on_observations(NEW[0], Y[:3].expand(2, 3, 1))
    close(copy.deepcopy(model).posterior(NEW[1]).mean, model.posterior(NEW[1]).mean)


def test_noise_of_each_point_is_averaged():
    noise = 0.1 + rand(9, 1)
    model = ours(noise=noise)
    wide, f = model.posterior(NEW, observation_noise=True), model.posterior(NEW)
    close(wide.variance - f.variance, noise.mean().expand(4, 3, 1))
    found = model.condition_on_observations(NEW[0], Y[:3])
    assert found.fitted.likelihood.noise_var.shape == (12, 1)


def test_what_cannot_be_is_said():
    labels = (Y > 5).double()
    classifier = PosteriorModel(n2g.condition(n2g.RBF(), (X, labels), n2g.Bernoulli()))
    assert classifier.posterior(NEW).mean.shape == (4, 3, 1)
    with pytest.raises(InputError, match=r"likelihood of this posterior is Bernoulli"):
        classifier.posterior(NEW, observation_noise=True)
    with pytest.raises(NotAvailable, match=r"functions are drawn from posteriors under Gaussian"):
        classifier.draw_function()
    with pytest.raises(NotAvailable, match=r"the kernel is RBF"):
        ours(kernel=n2g.RBF()).draw_function()
    places = nn.Sequential(
        nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 4, 1), nn.ReLU(), nn.Conv1d(4, 1, 1), nn.Flatten()
    )
    coupled_places = PosteriorModel(n2g.condition(n2g.nngp(places), (X, X), n2g.Gaussian(0.1)))
    with pytest.raises(NotAvailable, match=r"functions of coupled outputs"):
        coupled_places.draw_function()
    with pytest.raises(InputError, match=r"Y must end in \(3, 1\)"):
        ours().condition_on_observations(NEW[0], Y[:2])
    with pytest.raises(NotAvailable, match=r"call\s+subset_output afterwards"):
        ours(TWO).subset_output([0]).condition_on_observations(NEW[0], Y[:3])
    fantasy = ours().condition_on_observations(NEW[0], Y[:3].expand(2, 3, 1))
    with pytest.raises(NotAvailable, match=r"before fantasize"):
        fantasy.draw_function()
