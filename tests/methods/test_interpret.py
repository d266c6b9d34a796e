"""What a network finds alike, what its training points do, and where its uncertainty comes from."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError, NotAvailable, NotStationary
from net2gp.kernels import IndependentOutputs
from net2gp.likelihoods.laws import gaussian_law
from net2gp.methods.explain.dual import dual
from net2gp.methods.explain.influence import contributions, leave_one_out, removal_effects
from net2gp.methods.explain.interpret import (
    Summed,
    Traced,
    aggregate,
    nearest,
    output_blocks,
    similarity,
)
from net2gp.plots import Picture, plot_class_kernel, plot_class_means, plot_gallery
from net2gp.plots import kernels as plots_kernels
from net2gp.posteriors.conditioning.systems import Sites
from net2gp.posteriors.split import response, split

NEW = torch.tensor([[0.3, -1.0], [2.0, 2.5], [-1.0, 0.1]], dtype=torch.float64)
PRIOR = {"0.*": 0.5, "2.weight": 0.3, "2.bias": 2.0}


def mlp(outputs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


@cache
def points():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    y = torch.stack([x[:, 0].sin(), x[:, 1].cos()], 1)
    return x, y + 0.2 * torch.randn(9, 2, generator=generator, dtype=torch.float64)


def convolution():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)
        return nn.Sequential(*layers).double().eval()


@pytest.fixture(params=["mlp", "convolution"])
def tangent(request):
    """A tangent kernel, two batches of inputs, and the scaled Jacobians there."""
    if request.param == "mlp":
        linearized, (x, y) = n2g.linearize(mlp(3)), (points()[0], NEW)
        kernel = linearized.kernel(PRIOR)
    else:
        linearized = n2g.linearize(convolution())
        images = torch.rand(7, 1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
        x, y = images[:4], images[4:]
        kernel = linearized.kernel(0.7)
    return kernel, x, y, kernel.features(x), kernel.features(y)


def test_blocks_hold_the_products_of_all_pairs_of_outputs(tangent):
    kernel, x, y, Jx, Jy = tangent
    expected = torch.einsum("ncp,mdp->nmcd", Jx, Jy)
    assert torch.allclose(output_blocks(kernel, x, y), expected, atol=1e-10)
    assert torch.allclose(output_blocks(kernel, x), torch.einsum("ncp,mdp->nmcd", Jx, Jx))


@pytest.mark.parametrize("aggregation", [Traced(), Summed()])
def test_aggregates_are_sums_over_products_of_gradients(tangent, aggregation):
    kernel, x, y, Jx, Jy = tangent
    pattern = "ncp,mcp->nm" if aggregation == Traced() else "ncp,mdp->nm"
    assert torch.allclose(
        aggregate(kernel, x, y, aggregation=aggregation), torch.einsum(pattern, Jx, Jy)
    )
    assert torch.allclose(
        aggregate(kernel, x, aggregation=aggregation), torch.einsum(pattern, Jx, Jx)
    )


def test_the_sum_respects_the_chosen_output():
    x = points()[0]
    whole = n2g.linearize(mlp(3), output=lambda out: 2 * out[:, :2])
    expected = torch.einsum("ncp,mdp->nm", *[whole.jacobian(x)] * 2)
    assert torch.allclose(aggregate(whole.kernel(), x, aggregation=Summed()), expected)


@pytest.mark.parametrize("aggregation", [Traced(), Summed()])
def test_other_joint_kernels_are_aggregated_alike(aggregation):
    x = points()[0]
    joint = IndependentOutputs(n2g.RBF(), 3)
    assert torch.allclose(aggregate(joint, x, NEW, aggregation=aggregation), 3 * n2g.RBF()(x, NEW))
    assert torch.allclose(similarity(joint, x, NEW, aggregation=aggregation), n2g.RBF()(x, NEW))
    assert torch.allclose(aggregate(n2g.RBF(), x, NEW, aggregation=aggregation), n2g.RBF()(x, NEW))


@pytest.mark.parametrize("aggregation", [Traced(), Summed()])
def test_a_point_is_most_similar_to_itself(tangent, aggregation):
    kernel, x, y, _, _ = tangent
    found = similarity(kernel, x, aggregation=aggregation)
    assert torch.allclose(found.diagonal(), torch.ones(len(x)).double())
    assert float(found.abs().max()) <= 1.0
    scaled = similarity(kernel.scaled(7.0), x, y, aggregation=aggregation)
    assert torch.allclose(similarity(kernel, x, y, aggregation=aggregation), scaled)
    assert nearest(kernel, x, x, 1, aggregation=aggregation).index[:, 0].tolist() == list(
        range(len(x))
    )


def test_neighbors_are_sorted_by_similarity(tangent):
    kernel, x, y, _, _ = tangent
    found = nearest(kernel, y, x, 3)
    whole = similarity(kernel, y, x)
    assert torch.equal(found.similarity, whole.sort(1, descending=True).values[:, :3])
    assert torch.equal(whole.gather(1, found.index), found.similarity)


def test_a_point_without_a_gradient_is_similar_to_nothing():
    network = nn.Linear(2, 1, bias=False).double().eval()
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert similarity(n2g.linearize(network).kernel(), x).tolist() == [[0.0, 0.0], [0.0, 1.0]]


def regressions():
    """Gaussian posteriors of one law, by each way to solve it."""
    x, y = points()
    linearized = n2g.linearize(mlp(2))
    kernel, noise = linearized.kernel(PRIOR), n2g.Gaussian(torch.tensor([0.1, 0.3]).double())
    ways = {
        "cholesky": lambda a, b: n2g.condition(
            kernel, (a, b), noise, mean=linearized, solver=n2g.solvers.Cholesky()
        ),
        "weights": lambda a, b: n2g.condition(
            kernel, (a, b), noise, mean=linearized, solver=n2g.solvers.WeightCholesky()
        ),
        "conjugate gradients": lambda a, b: n2g.condition(
            kernel,
            (a, b),
            noise,
            mean=linearized,
            solver=n2g.solvers.CG(tol=1e-13, variance=n2g.solvers.Exact()),
        ),
        "independent": lambda a, b: n2g.condition(n2g.RBF(), (a, b), n2g.Gaussian(0.1)),
        "told apart": lambda a, b: n2g.condition(n2g.RBF(), (a, b), noise),
        "dual": lambda a, b: dual(linearized, (a, b), noise, PRIOR).gaussian_process(),
    }
    return x, y, ways


WAYS = list(regressions()[2])


@pytest.mark.parametrize("way", WAYS)
def test_contributions_add_up_to_the_mean(way):
    x, y, ways = regressions()
    posterior = ways[way](x, y)
    parts = contributions(posterior, NEW)
    assert parts.shape == (3, 9, 2)
    assert torch.allclose(parts.sum(1), posterior.centered(NEW), atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_removing_a_point_has_the_effect_of_never_seeing_it(way):
    x, y, ways = regressions()
    posterior = ways[way](x, y)
    effects = removal_effects(posterior, NEW)
    before = posterior.marginal(NEW).mean
    for n in range(len(x)):
        keep = torch.arange(len(x)) != n
        after = ways[way](x[keep], y[keep]).marginal(NEW).mean
        assert torch.allclose(effects[:, n], after - before, atol=1e-8)


@pytest.mark.parametrize("way", WAYS)
def test_leaving_one_out_is_predicting_it_from_the_others(way):
    x, y, ways = regressions()
    found = leave_one_out(ways[way](x, y))
    for n in range(len(x)):
        keep = torch.arange(len(x)) != n
        law = ways[way](x[keep], y[keep]).marginal(x[n : n + 1])
        assert torch.allclose(found.mean[n], law.mean[0], atol=1e-8)
        assert torch.allclose(found.covariance_matrix[n], law.covariance_matrix[0], atol=1e-8)


@pytest.mark.parametrize("way", WAYS)
def test_chosen_points_are_left_out_as_all_are(way):
    x, y, ways = regressions()
    posterior, only = ways[way](x, y), torch.tensor([7, 2])
    effects = removal_effects(posterior, NEW, points=only)
    assert torch.allclose(effects, removal_effects(posterior, NEW)[:, only], atol=1e-10)
    one, other = leave_one_out(posterior, points=only), leave_one_out(posterior)
    assert torch.allclose(one.mean, other.mean[only], atol=1e-10)
    assert torch.allclose(one.covariance_matrix, other.covariance_matrix[only], atol=1e-10)


def test_a_tuned_posterior_leaves_points_out_as_the_same_one_conditioned():
    x, y = points()
    tuned = n2g.adapt(mlp(2), (x, y), n2g.Gaussian(0.1), zero_mean=True)
    same = n2g.condition(tuned.kernel, (x, y), n2g.Gaussian(0.1))
    assert torch.allclose(removal_effects(tuned, NEW), removal_effects(same, NEW), atol=1e-8)


class OnlyTheProtocol:
    """A process of which nothing is known but the protocol."""

    def __init__(self, process):
        for name in ("num_outputs", "check", "mean", "moments", "joint"):
            setattr(self, name, getattr(process, name))


@pytest.mark.parametrize("way", ["cholesky", "weights", "dual"])
def test_any_posterior_that_knows_its_data_can_leave_them_out(way):
    x, y, ways = regressions()
    posterior = ways[way](x, y)
    plain = replace(posterior, process=OnlyTheProtocol(posterior.process))
    assert torch.allclose(removal_effects(plain, NEW), removal_effects(posterior, NEW), atol=1e-8)
    one, other = leave_one_out(plain), leave_one_out(posterior)
    assert torch.allclose(one.mean, other.mean, atol=1e-8)
    assert torch.allclose(one.covariance_matrix, other.covariance_matrix, atol=1e-8)


def test_a_mixture_has_no_closed_form_without_a_point():
    x, y, ways = regressions()
    one = ways["cholesky"](x, y)
    for method in (leave_one_out, lambda posterior: removal_effects(posterior, NEW)):
        with pytest.raises(NotAvailable, match=r"a mixture of networks\. Ask each member"):
            method(n2g.bayes.mixture([one, one]))


def classifications():
    x = points()[0]
    linearized, y = n2g.linearize(mlp(3)), torch.tensor([0, 1, 2, 0, 1, 2, 2, 1, 0])
    kernel, prior = linearized.kernel(PRIOR), {"likelihood": n2g.Categorical(), "mean": linearized}
    return {
        "mode": n2g.condition(kernel, (x, y), **prior, solver=n2g.solvers.Cholesky()),
        "mode in weights": n2g.condition(
            kernel, (x, y), **prior, solver=n2g.solvers.WeightCholesky()
        ),
        "dual": dual(linearized, (x, y), n2g.Categorical(), PRIOR).gaussian_process(),
        "dual in weights": dual(linearized, (x, y), n2g.Categorical(), PRIOR).linear_model(),
    }


@pytest.mark.parametrize("way", ["mode", "mode in weights", "dual", "dual in weights"])
def test_removing_a_label_removes_its_site_from_the_posterior(way):
    posterior = classifications()[way]
    effects, found = removal_effects(posterior, NEW), leave_one_out(posterior)
    Phi, Phi_new = posterior.kernel.features(posterior.x), posterior.kernel.features(NEW)
    mean = posterior.marginal(posterior.x).mean - posterior.centered(posterior.x)

    def solve(keep):
        """w of the sites that are kept, by an explicit inverse."""
        sites = Sites(
            posterior.process.sites.natural[keep], posterior.process.sites.curvature[keep]
        )
        precision = torch.einsum("ncp,ncd,ndq->pq", Phi[keep], sites.curvature, Phi[keep])
        S = torch.linalg.inv(torch.eye(Phi.shape[2]).double() + precision)
        return S @ torch.einsum("ncp,nc->p", Phi[keep], sites.natural), S

    everything = torch.ones(9, dtype=torch.bool)
    w = solve(everything)[0]
    for n in range(9):
        keep = everything.clone()
        keep[n] = False
        left, S = solve(keep)
        assert torch.allclose(effects[:, n], Phi_new @ (left - w), atol=1e-8)
        assert torch.allclose(found.mean[n], mean[n] + Phi[n] @ left, atol=1e-8)
        assert torch.allclose(found.covariance_matrix[n], Phi[n] @ S @ Phi[n].T, atol=1e-8)


@pytest.mark.parametrize("way", ["mode", "mode in weights", "dual", "dual in weights"])
def test_contributions_of_labels_add_up_to_the_mean(way):
    posterior = classifications()[way]
    parts = contributions(posterior, NEW)
    assert torch.allclose(parts.sum(1), posterior.centered(NEW), atol=1e-8)


def test_the_representers_at_the_mode_are_residuals():
    posterior = classifications()["mode"]
    f = posterior.marginal(posterior.x).mean
    residual = n2g.Categorical().residual(f, posterior.y)
    cross = posterior.kernel(NEW, posterior.x).reshape(3, 3, 9, 3)
    expected = torch.einsum("mcnd,nd->mnc", cross, residual)
    assert torch.allclose(contributions(posterior, NEW), expected, atol=1e-7)


def test_what_laplace_returns_can_leave_points_out():
    """In weight and in function space: the classical influence, with the network's own residuals."""
    linearized, x, y = n2g.linearize(mlp(3)), points()[0], torch.arange(9) % 3
    way = lambda structure: n2g.laplace(
        linearized, (x, y), n2g.Categorical(), prior_var=PRIOR, structure=structure
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStationary)
        full, functions = way(n2g.Full()), way(n2g.structures.FunctionSpace())
    J, J_new = linearized.jacobian(x), linearized.jacobian(NEW)
    f = linearized(x)
    Lam, r = n2g.Categorical().curvature(f), n2g.Categorical().residual(f, y)
    prior = linearized.kernel(PRIOR)._roots.square()
    H = torch.einsum("ncp,ncd,ndq->npq", J, Lam, J)
    for n in range(len(x)):
        # one Newton step from θ* without the point
        S = torch.linalg.inv(torch.diag(1 / prior) + H.sum(0) - H[n])
        expected = -(J_new @ (S @ (J[n].T @ r[n])))
        for posterior in (full, functions):
            effects = removal_effects(posterior, NEW, points=torch.tensor([n]))[:, 0]
            assert torch.allclose(effects, expected, atol=1e-8)


def law(likelihood, mean, covariance):
    """A posterior with one Gaussian at every input."""

    class Fixed:
        def marginal(self, x):
            return gaussian_law(mean, covariance)

    fixed = Fixed()
    fixed.likelihood = likelihood
    return fixed


def random_law(outputs, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(5, outputs, generator=generator, dtype=torch.float64)
    root = scale * torch.randn(5, outputs, outputs, generator=generator, dtype=torch.float64)
    return mean, root @ root.mT


def test_both_parts_of_a_regression_are_the_variance_of_its_targets():
    mean, covariance = random_law(2, 1.0)
    posterior = law(n2g.Gaussian(torch.tensor([0.2, 0.5]).double()), mean, covariance)
    parts = split(posterior, NEW)
    assert torch.allclose(
        parts.total, posterior.likelihood.predict(posterior.marginal(NEW)).variance
    )
    assert torch.allclose(parts.epistemic, covariance.diagonal(dim1=1, dim2=2))
    assert torch.allclose(parts.aleatoric, torch.tensor([0.2, 0.5]).double().expand(5, 2))


def test_the_parts_of_a_classification_are_those_of_the_linearized_probabilities():
    mean, covariance = random_law(3, 1.0)
    parts = split(law(n2g.Categorical(), mean, covariance), NEW)
    p = mean.softmax(1)
    slope = torch.func.vmap(torch.func.jacrev(lambda f: f.softmax(0)))(mean)
    expected = (slope @ covariance @ slope.mT).diagonal(dim1=1, dim2=2)
    assert torch.allclose(parts.epistemic, expected)
    assert torch.allclose(parts.aleatoric, p - p.square())


@pytest.mark.parametrize(
    ("likelihood", "outputs", "mean_of_y"),
    [
        (n2g.Categorical(), 4, lambda f: f.softmax(1)),
        (n2g.Bernoulli(), 3, lambda f: f.sigmoid()),
        (n2g.HeteroscedasticGaussian(n2g.links.SoftplusScale()), 4, lambda f: f[:, :2]),
        (n2g.Gaussian(0.3), 2, lambda f: f),
    ],
)
def test_small_uncertainty_splits_the_variance_of_sampled_targets(likelihood, outputs, mean_of_y):
    mean, covariance = random_law(outputs, 0.01)
    parts = split(law(likelihood, mean, covariance), NEW)
    root = torch.linalg.cholesky(covariance)
    z = torch.randn(50_000, 5, outputs, generator=torch.Generator().manual_seed(1)).double()
    f = (mean + torch.einsum("ncd,snd->snc", root, z)).flatten(0, 1)
    epistemic = mean_of_y(f).unflatten(0, (-1, 5)).var(0)
    # the standard error of a variance of S normal samples is √(2/S) of it: four of them, and curvature
    assert torch.allclose(parts.epistemic, epistemic, rtol=4 * (2 / 50_000) ** 0.5 + 0.01)
    given = response(likelihood, f).variance.unflatten(0, (-1, 5)).mean(0)
    assert torch.allclose(parts.aleatoric, given, rtol=0.01)


def test_the_noise_of_heteroscedastic_targets_is_that_of_their_scales():
    likelihood = n2g.HeteroscedasticGaussian(n2g.links.LogVariance())
    mean, covariance = random_law(2, 0.5)
    parts = split(law(likelihood, mean, covariance), NEW)
    assert parts.epistemic.shape == (5, 1)
    assert torch.allclose(parts.epistemic[:, 0], covariance[:, 0, 0])
    assert torch.allclose(parts.aleatoric[:, 0], mean[:, 1].exp())


def test_a_split_of_a_posterior_shrinks_with_data_where_noise_does_not():
    x, y, ways = regressions()
    few, many = (split(ways["cholesky"](x[:k], y[:k]), NEW) for k in (2, 9))
    assert bool((many.epistemic < few.epistemic).all())
    assert torch.equal(many.aleatoric, few.aleatoric)


def test_another_likelihood_gives_the_noise_of_new_points():
    x, y = points()
    noise = torch.full((9, 1), 0.1, dtype=torch.float64)
    posterior = n2g.condition(n2g.RBF(), (x, y), n2g.Gaussian(noise))
    with pytest.raises(InputError, match="noise_var holds the noise of 9 points"):
        split(posterior, NEW)
    parts = split(posterior, NEW, likelihood=n2g.Gaussian(0.7))
    assert torch.equal(parts.aleatoric, torch.full((3, 2), 0.7, dtype=torch.float64))


def test_mistakes_say_what_to_pass():
    x, y, ways = regressions()
    posterior = ways["cholesky"](x, y)
    with pytest.raises(InputError, match=r"aggregation must be Traced\(\), Summed\(\) or None"):
        aggregate(n2g.RBF(), x, aggregation="diag")
    with pytest.raises(InputError, match="between 1 and the 9 candidates, but is 10"):
        nearest(n2g.RBF(), NEW, x, 10)
    with pytest.raises(InputError, match="does not hold the data that it was conditioned on"):
        removal_effects(law(n2g.Gaussian(0.1), *random_law(1, 1.0)), NEW)
    with pytest.raises(InputError, match=r"points must hold indices of the 9 training points"):
        removal_effects(posterior, NEW, points=torch.tensor([9]))
    with pytest.raises(InputError, match=r"contributions come from a kernel.*removal_effects"):
        contributions(replace(posterior, process=OnlyTheProtocol(posterior.process)), NEW)
    with pytest.raises(InputError, match=r"has no likelihood. Pass likelihood=Categorical\(\)"):
        split(law(None, *random_law(1, 1.0)), NEW)
    with pytest.raises(InputError, match=r"no slope of E.* is known for int"):
        response(3, NEW)


@pytest.fixture
def ax():
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def test_a_class_kernel_is_sorted_by_class(ax):
    labels = torch.tensor([2, 0, 2, 1])
    K = torch.arange(16.0).reshape(4, 4) - 5
    assert plot_class_kernel(ax, K, labels, label="k") is ax
    order = [1, 3, 0, 2]
    (image,) = ax.get_images()
    assert np.array_equal(image.get_array(), K[order][:, order].numpy())
    assert image.get_clim() == (-10.0, 10.0)
    for axis in (ax.xaxis, ax.yaxis):
        assert [t.get_text() for t in axis.get_ticklabels()] == ["0", "1", "2"]
        assert axis.get_ticklocs().tolist() == [0.0, 1.0, 2.5]


def test_zero_is_white_even_in_a_kernel_without_negative_values(ax):
    plot_class_kernel(ax, torch.eye(2), torch.tensor([0, 1]))
    (image,) = ax.get_images()
    assert image.get_clim() == (-1.0, 1.0)
    assert min(image.cmap(image.norm(0.0))[:3]) > 0.95


def test_class_means_are_sorted_by_class(ax):
    f = torch.tensor([[3.0, -1.0], [0.0, 2.0]])
    plot_class_means(ax, f, torch.tensor([1, 0]))
    assert np.array_equal(ax.get_images()[0].get_array(), f[[1, 0]].numpy())
    assert [t.get_text() for t in ax.yaxis.get_ticklabels()] == ["0", "1"]


def test_a_gallery_shows_every_picture_with_its_caption():
    figure = pyplot.figure()
    image = torch.rand(1, 5, 5)
    gallery = [[Picture(image, "one", framed=True), Picture(image, "two")], [None, Picture(image)]]
    plot_gallery(figure, gallery, [(1, "nearest")])
    shown = [ax for ax in figure.axes if ax.get_images()]
    assert [ax.get_xlabel() for ax in shown] == ["one", "two", ""]
    assert [[t.get_text() for t in ax.texts] for ax in figure.axes[:2]] == [[], ["nearest"]]
    assert np.array_equal(shown[0].get_images()[0].get_array(), image[0].numpy())
    pyplot.close(figure)


def test_mistakes_in_figures_say_what_to_pass(ax):
    labels = torch.tensor([0, 1])
    with pytest.raises(
        InputError, match=r"K must be \(N, N\) for 2 labels.*aggregate\(kernel, x\)"
    ):
        plot_class_kernel(ax, torch.zeros(4, 4), labels)
    with pytest.raises(InputError, match=r"f must be \(N, C\) for 2 labels"):
        plot_class_means(ax, torch.zeros(3, 2), labels)
    with pytest.raises(InputError, match=r"the gallery is empty"):
        plot_gallery(ax.figure, [])
    with pytest.raises(InputError, match=r"an image must be \(height, width\)"):
        plots_kernels._show(ax, Picture(torch.zeros(3, 4, 4)))
