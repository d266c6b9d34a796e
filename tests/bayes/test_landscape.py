"""Slices, curves, symmetries, diversity, double descent and alignment, against slow references."""

from __future__ import annotations

import itertools
from copy import deepcopy

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp import bayes
from net2gp.errors import InputError, NetworkError

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(2, (7,), generator=torch.Generator().manual_seed(2))
IMAGES = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
NOISE = n2g.Gaussian(noise_var=1.0)


def mlp(activation=nn.ReLU, seed=0, sizes=(3, 6, 5, 2)):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = []
        for one, other in itertools.pairwise(sizes):
            layers += [nn.Linear(one, other), activation()]
        return nn.Sequential(*layers[:-1]).double().eval()


def cnn(activation=nn.ReLU, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (
            nn.Sequential(
                *(nn.Conv2d(1, 6, 3), activation(), nn.AvgPool2d(2)),
                nn.Sequential(nn.Conv2d(6, 5, 2, bias=False), activation()),
                *(nn.Flatten(), nn.Dropout(), nn.Linear(20, 7), activation(), nn.Linear(7, 3)),
            )
            .double()
            .eval()
        )


def loss(network, x=X, y=Y):
    with torch.no_grad():
        return nn.functional.cross_entropy(network(x), y)


def moved(network, direction, step):
    copy = deepcopy(network)
    with torch.no_grad():
        for name, value in copy.named_parameters():
            value += step * direction[name]
    return copy


def orders_of(network, generator):
    sizes = {n: m.weight.shape[0] for n, m in network.named_modules() if hasattr(m, "weight")}
    last = list(sizes)[-1]
    return {n: torch.randperm(s, generator=generator) for n, s in sizes.items() if n != last}


def test_a_slice_has_the_losses_of_networks_that_were_moved():
    network = mlp()
    found = bayes.loss_slice(network, (X, Y), n2g.Categorical(), reach=0.7, num_points=5)
    one, other = found.directions
    for i, j in itertools.product(range(5), repeat=2):
        there = moved(moved(network, one, found.coordinates[i]), other, found.coordinates[j])
        assert found.losses[i, j] == pytest.approx(float(loss(there)), rel=1e-12)


def test_filters_of_directions_are_as_long_as_those_of_the_network():
    network = cnn()
    (direction,) = bayes.loss_slice(
        network, (IMAGES, torch.arange(5) % 3), n2g.Categorical(), directions=1, num_points=1
    ).directions
    for name, value in network.named_parameters():
        if value.dim() == 1:
            assert not direction[name].any()
        else:
            torch.testing.assert_close(
                direction[name].flatten(1).norm(dim=1), value.detach().flatten(1).norm(dim=1)
            )


def test_a_slice_does_not_change_with_the_scale_of_layers():
    network = mlp()
    scaled = bayes.scale_units(network, {"0": torch.full((6,), 4.0), "2": torch.full((5,), 0.25)})
    one, other = (
        bayes.loss_slice(n, (X, Y), n2g.Categorical(), num_points=3) for n in (network, scaled)
    )
    torch.testing.assert_close(one.losses, other.losses, rtol=1e-12, atol=0)


def test_a_slice_along_given_directions_and_with_a_prior():
    network, target = mlp(), mlp(seed=1)
    goal = {n: v.detach() for n, v in target.named_parameters()}
    way = {n: goal[n] - v.detach() for n, v in network.named_parameters()}
    found = bayes.loss_slice(
        network, (X, Y), n2g.Categorical(), directions=[way], num_points=3, prior=0.5
    )
    prior = bayes.NormalPrior(0.5).log_prob(goal)
    assert found.losses[-1] == pytest.approx(float(loss(target) - prior / 7), rel=1e-12)


@pytest.mark.parametrize("given", [0, 3, True, [], {"0.weight": torch.zeros(6, 3)}])
def test_a_slice_has_one_or_two_directions(given):
    with pytest.raises(InputError, match="directions must be 1, 2, or a list of one or two dicts"):
        bayes.loss_slice(mlp(), (X, Y), n2g.Categorical(), directions=given)


def test_a_direction_must_fit_the_parameters():
    with pytest.raises(InputError, match=r"a direction has a value for each of \['0.bias'"):
        bayes.loss_slice(mlp(), (X, Y), n2g.Categorical(), directions=[{"a": X}])
    wrong = {n: v.detach().flatten()[:1] for n, v in mlp().named_parameters()}
    with pytest.raises(InputError, match=r"'0\.weight' of a direction must have shape"):
        bayes.loss_slice(mlp(), (X, Y), n2g.Categorical(), directions=[wrong])


def test_the_straight_line_is_the_average_of_its_ends():
    one, other = mlp(), mlp(seed=1)
    line = bayes.straight_line(one, other)
    half = {
        n: (a + b).detach() / 2
        for (n, a), b in zip(one.named_parameters(), other.parameters(), strict=True)
    }
    for name, value in line.params(0.5).items():
        torch.testing.assert_close(value, half[name])
    losses = line.losses((X, Y), n2g.Categorical(), num_places=3)
    middle = torch.func.functional_call(one, half, (X,))
    assert losses[1] == pytest.approx(float(nn.functional.cross_entropy(middle, Y)), rel=1e-12)
    assert losses[0] == pytest.approx(float(loss(one)), rel=1e-12)
    assert losses[2] == pytest.approx(float(loss(line.network(1.0))), rel=1e-12)


@pytest.mark.parametrize("polyline", [False, True])
def test_curves_keep_their_ends_and_lower_the_loss_between_them(polyline):
    one, other = mlp(nn.Tanh), mlp(nn.Tanh, seed=1)
    curve = bayes.curve_between(
        *(one, other, (X, Y), n2g.Categorical()),
        bends=2,
        polyline=polyline,
        training=bayes.CurveTraining(steps=60, learning_rate=0.05, batch_size=5),
    )
    line = bayes.straight_line(one, other)
    for t, network in ((0.0, one), (1.0, other)):
        for name, value in network.named_parameters():
            assert torch.equal(curve.params(t)[name], value.detach())
    bent, straight = (c.losses((X, Y), n2g.Categorical(), num_places=9) for c in (curve, line))
    assert bent[1:-1].mean() < 0.7 * straight[1:-1].mean()


def test_curves_are_bernstein_sums_and_straight_pieces():
    values = torch.tensor([[0.0], [3.0], [1.0], [5.0]], dtype=torch.float64)
    network = n2g.linearize(nn.Linear(1, 1, bias=False).double())
    points = {"weight": values[:, None]}
    bezier, pieces = bayes.Curve(network, points), bayes.Curve(network, points, polyline=True)
    for t in (0.0, 0.1, 0.5, 0.9, 1.0):
        inner = list(values)  # de Casteljau
        while len(inner) > 1:
            inner = [(1 - t) * a + t * b for a, b in itertools.pairwise(inner)]
        assert float(bezier.params(t)["weight"]) == pytest.approx(float(inner[0]), abs=1e-14)
    assert float(pieces.params(0.5)["weight"]) == pytest.approx(2.0)
    assert float(pieces.params(1 / 6)["weight"]) == pytest.approx(1.5)
    with pytest.raises(InputError, match=r"t must be from 0 to 1, but is 1\.5"):
        bezier.params(1.5)


def test_the_same_seed_gives_the_same_curve_and_global_chance_is_left_alone():
    state = torch.get_rng_state()
    training = bayes.CurveTraining(steps=3, batch_size=2, seed=5)
    made = [
        bayes.curve_between(mlp(), mlp(seed=1), (X, Y), n2g.Categorical(), training=training)
        for _ in range(2)
    ]
    assert torch.equal(made[0].points["0.weight"], made[1].points["0.weight"])
    assert torch.equal(state, torch.get_rng_state())


def test_networks_that_differ_in_more_than_parameters_are_not_joined():
    with pytest.raises(NetworkError, match=r"unlike architectures: '0\.bias' has shape"):
        bayes.straight_line(mlp(), mlp(sizes=(3, 4, 2)))
    one, other = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval() for _ in range(2))
    other[1].running_mean.fill_(1.0)
    with pytest.raises(NetworkError, match=r"differ in '1\.running_mean', which does not move"):
        bayes.straight_line(one, other)


class Own(nn.Module):
    def __init__(self, act=torch.tanh, power=1):
        super().__init__()
        self.layer, self.act, self.power, self.calls = nn.Linear(3, 2).double(), act, power, 0

    def forward(self, x):
        self.calls += 1
        return self.act(self.layer(x)) ** self.power


@pytest.mark.parametrize(
    ("acts", "message"),
    [
        (
            (nn.LeakyReLU(0.1), nn.LeakyReLU(0.3)),
            r"negative_slope of '1' \(LeakyReLU\) is 0\.1 in one",
        ),
        ((nn.Softplus(1.0), nn.Softplus(2.0)), r"beta of '1' \(Softplus\)"),
        ((nn.GELU(), nn.GELU("tanh")), r"approximate of '1' \(GELU\)"),
        ((nn.Tanh(), nn.ReLU()), "one has Tanh where the other has ReLU, at '1'"),
    ],
)
def test_settings_of_activations_are_part_of_an_architecture(acts, message):
    one, other = (nn.Sequential(nn.Linear(3, 4), act, nn.Linear(4, 2)).double() for act in acts)
    data = X, Y
    for use in (
        lambda: bayes.straight_line(one, other),
        lambda: bayes.curve_between(one, other, data, n2g.Categorical()),
        lambda: bayes.match_weights(one, other),
    ):
        with pytest.raises(NetworkError, match=message):
            use()


def test_functions_inside_modules_are_part_of_an_architecture():
    one = Own()
    one(X)  # which counts a call, and changes nothing
    bayes.straight_line(one, Own())
    with pytest.raises(NetworkError, match="act of the network"):
        bayes.straight_line(one, Own(torch.relu))
    with pytest.raises(NetworkError, match="the code of one computes something else"):
        bayes.curve_between(one, Own(power=2), (X, Y), n2g.Categorical())


def test_the_barrier_is_above_the_line_between_the_ends():
    losses = torch.tensor([1.0, 2.0, 0.0, 4.0, 3.0])
    assert float(bayes.barrier(losses)) == pytest.approx(4.0 - 2.5)
    assert float(bayes.barrier(torch.tensor([1.0, 0.0, 2.0]))) == 0.0
    with pytest.raises(InputError, match="two or more numbers along a curve"):
        bayes.barrier(torch.ones(1))


@pytest.mark.parametrize(("network", "x"), [(mlp(), X), (mlp(nn.GELU), X), (cnn(), IMAGES)])
def test_permuted_units_leave_the_function(network, x):
    generator = torch.Generator().manual_seed(0)
    twin = bayes.permute_units(network, orders_of(network, generator))
    with torch.no_grad():
        assert (twin(x) - network(x)).abs().max() <= 1e-12
    assert not torch.equal(twin[0].weight, network[0].weight)


@pytest.mark.parametrize(
    ("network", "x", "kind"),
    [
        (mlp(), X, "scale"),
        (mlp(nn.LeakyReLU), X, "scale"),
        (cnn(), IMAGES, "scale"),
        (mlp(nn.Tanh), X, "sign"),
        (mlp(nn.Softsign), X, "sign"),
        (cnn(nn.Tanh), IMAGES, "sign"),
        (mlp(nn.Identity), X, "both"),
    ],
)
def test_scaled_units_leave_the_function(network, x, kind):
    generator = torch.Generator().manual_seed(0)
    factors = {}
    for name, order in orders_of(network, generator).items():
        sign = torch.randint(2, order.shape, generator=generator).double() * 2 - 1
        size = torch.rand(order.shape, generator=generator).double() * 3 + 0.2
        factors[name] = {"sign": sign, "scale": size, "both": sign * size}[kind]
    twin = bayes.scale_units(network, factors)
    with torch.no_grad():
        assert (twin(x) - network(x)).abs().max() <= 1e-12
    assert not torch.equal(twin[0].weight, network[0].weight)


@pytest.mark.parametrize(
    ("activation", "factor"),
    [(nn.ReLU, -1.0), (nn.Tanh, 2.0), (nn.Tanh, -2.0), (nn.ReLU6, 2.0), (nn.GELU, -1.0)],
)
def test_activations_without_the_symmetry_are_named(activation, factor):
    with pytest.raises(NetworkError, match=rf"'1' \({activation.__name__}\) does not follow"):
        bayes.scale_units(mlp(activation), {"0": torch.full((6,), factor)})


def test_max_pooling_follows_positive_factors_only():
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(2, 1, 3)
    ).double()
    with pytest.raises(NetworkError, match=r"'2' \(MaxPool2d\) does not follow"):
        bayes.scale_units(network, {"0": torch.tensor([1.0, -1.0])})


def test_matching_undoes_a_permutation_and_never_moves_away():
    for network in (mlp(), cnn()):
        orders = orders_of(network, torch.Generator().manual_seed(4))
        twin = bayes.permute_units(network, orders)
        found = bayes.match_weights(network, twin)
        assert found.keys() == orders.keys()
        assert all(torch.equal(found[name], order) for name, order in orders.items())
        other = mlp(seed=9) if network[0].weight.dim() == 2 else cnn(seed=9)
        matched = bayes.permute_units(other, bayes.match_weights(other, network))
        assert distance(matched, network) <= distance(other, network)


def distance(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return sum(float((a - b).detach().square().sum()) for a, b in pairs)


def test_matching_one_layer_finds_the_nearest_of_all_orders():
    network, other = mlp(sizes=(3, 5, 2)), mlp(sizes=(3, 5, 2), seed=1)
    found = distance(bayes.permute_units(other, bayes.match_weights(other, network)), network)
    every = [
        distance(bayes.permute_units(other, {"0": torch.tensor(order)}), network)
        for order in itertools.permutations(range(5))
    ]
    assert found == pytest.approx(min(every), rel=1e-12)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(x)


SHARED = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Skip(), "but the network is a Skip"),
        (nn.Sequential(nn.Linear(3, 4), Skip(), nn.Linear(4, 1)), r"'1' \(Skip\) stands between"),
        (
            nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)),
            r"'1' \(LayerNorm\) stands between",
        ),
        (nn.Sequential(SHARED, nn.ReLU(), SHARED), "stands in the network twice"),
        (
            nn.Sequential(nn.Conv1d(2, 4, 1), nn.ReLU(), nn.Conv1d(4, 4, 1, groups=2)),
            "'2' is a convolution in 2 groups",
        ),
        (
            nn.Sequential(nn.Conv1d(2, 4, 1), nn.ReLU(), nn.Linear(4, 1)),
            "which inputs belong to which unit is not known",
        ),
        (nn.Sequential(nn.ReLU()), "so it has no units"),
        (
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Skip()),
            r"'2' \(Skip\) has parameters of its own",
        ),
    ],
)
def test_networks_whose_units_cannot_move_are_refused_by_name(network, message):
    with pytest.raises(NetworkError, match=message):
        bayes.match_weights(network, network)


def test_orders_and_factors_must_fit_the_layers():
    with pytest.raises(InputError, match=r"orders has '4', which is not a hidden layer"):
        bayes.permute_units(mlp(), {"4": torch.arange(2)})
    with pytest.raises(InputError, match="must be a permutation of the 6 units"):
        bayes.permute_units(mlp(), {"0": torch.zeros(6, dtype=torch.int64)})
    with pytest.raises(InputError, match="must be 6 numbers other than 0"):
        bayes.scale_units(mlp(), {"0": torch.zeros(6)})
    with pytest.raises(NetworkError, match="the networks are of unlike architectures"):
        bayes.match_weights(mlp(), mlp(sizes=(3, 4, 2)))


def test_diversity_of_networks_has_the_distances_of_their_predictions():
    networks = [mlp(seed=s) for s in range(4)]
    found = bayes.diversity(networks, X, likelihood=n2g.Categorical())
    with torch.no_grad():
        laws = [n(X).softmax(-1) for n in networks]
    flat = [torch.cat([p.detach().flatten() for p in n.parameters()]) for n in networks]
    for i, j in itertools.product(range(4), repeat=2):
        assert found.distances[i, j] == pytest.approx(
            float((laws[i] - laws[j]).square().mean().sqrt()), abs=1e-14
        )
        assert found.cosines[i, j] == pytest.approx(
            float(flat[i] @ flat[j] / flat[i].norm() / flat[j].norm()), rel=1e-12
        )
        unlike = (laws[i].argmax(1) != laws[j].argmax(1)).double().mean()
        assert float(found.disagreement[i, j]) == float(unlike)


def test_the_map_of_functions_is_their_principal_components():
    networks = [mlp(seed=s, sizes=(3, 4, 1)) for s in range(6)]
    found = bayes.diversity(networks, X)
    with torch.no_grad():
        outputs = torch.stack([n(X).flatten() for n in networks]) / 7**0.5
    u, s, _ = torch.linalg.svd(outputs - outputs.mean(0), full_matrices=False)
    torch.testing.assert_close(found.places.abs(), (u[:, :2] * s[:2]).abs(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.explained, (s.square() / s.square().sum())[:2])
    assert found.disagreement is None


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
def test_diversity_of_a_mixture_is_that_of_the_networks_at_its_centers():
    networks = [mlp(seed=s) for s in range(3)]
    posterior = bayes.mixture(
        [n2g.laplace(n, (X, Y), n2g.Categorical(), structure=n2g.Diagonal()) for n in networks]
    )
    one = bayes.diversity(posterior, X, likelihood=n2g.Categorical())
    other = bayes.diversity(networks, X, likelihood=n2g.Categorical())
    torch.testing.assert_close(one.distances, other.distances)
    torch.testing.assert_close(one.cosines, other.cosines)


def test_diversity_of_draws_and_of_a_mixture_of_draws():
    from net2gp.posteriors.recipes.drawn import drawn_posterior
    from net2gp.posteriors.recipes.members import Members

    networks = [mlp(seed=s) for s in range(4)]
    values = {
        n: torch.stack([dict(net.named_parameters())[n].detach() for net in networks])
        for n, _ in networks[0].named_parameters()
    }
    members = Members(n2g.linearize(networks[0]), values)
    drawn = drawn_posterior(members, n2g.Categorical(), (X, Y))
    want = bayes.diversity(networks, X, likelihood=n2g.Categorical())
    torch.testing.assert_close(bayes.diversity(drawn, X).distances, want.distances)
    twice = bayes.diversity(bayes.mixture([drawn, drawn]), X)
    torch.testing.assert_close(twice.distances[:4, 4:], want.distances)
    torch.testing.assert_close(twice.cosines[:4, 4:], want.cosines)


def test_diversity_needs_networks():
    with pytest.raises(InputError, match="compares two or more networks, but there are 1"):
        bayes.diversity([mlp()], X)
    process = n2g.condition(n2g.RBF(), (X, X[:, :1]), NOISE)
    with pytest.raises(InputError, match="compares networks, but this posterior has none"):
        bayes.diversity(process, X)
    with pytest.raises(InputError, match="the networks are of unlike architectures"):
        bayes.diversity([mlp(), mlp(sizes=(3, 4, 2))], X)


def test_double_descent_is_least_squares_with_the_pseudoinverse():
    generator = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (8, 5))
    y, y_new = x.sum(1), new.sum(1)
    found = bayes.double_descent((x, y), (new, y_new), [3, 8, 40], num_draws=2, seed=7)
    for draw in range(2):
        layer = torch.randn(
            40, 4, generator=torch.Generator().manual_seed(7 + draw), dtype=torch.float64
        )
        for place, width in enumerate((3, 8, 40)):
            inner, outer = (
                torch.cat([v, torch.ones(len(v), 1)], 1) @ layer[:width].mT for v in (x, new)
            )
            inner, outer = inner.relu() / width**0.5, outer.relu() / width**0.5
            w = torch.linalg.pinv(inner) @ y
            assert found.test[draw, place] == pytest.approx(
                float((outer @ w - y_new).square().mean()), rel=1e-6
            )
            assert found.norms[draw, place] == pytest.approx(float(w.norm()), rel=1e-6)
            assert found.train[draw, place] == pytest.approx(
                float((inner @ w - y).square().mean()), abs=1e-12, rel=1e-6
            )


def test_a_ridge_is_the_mean_of_a_gaussian_process_with_the_feature_kernel():
    x, new = X, X + 0.3
    y = X.sin().sum(1, keepdim=True)
    found = bayes.double_descent((x, y), (new, y), [11], ridge=0.5, seed=2)
    layer = torch.randn(11, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one, other = (
        (torch.cat([v, torch.ones(len(v), 1)], 1) @ layer.mT).relu() / 11**0.5 for v in (x, new)
    )
    gram = one @ one.mT + 0.5 * torch.eye(7, dtype=torch.float64)
    mean = other @ one.mT @ torch.linalg.solve(gram, y)
    assert found.test[0, 0] == pytest.approx(float((mean - y).square().mean()), rel=1e-10)


def test_double_descent_has_its_peak_where_features_are_as_many_as_points():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(230, 5, generator=generator, dtype=torch.float64)
    y = x[:, 0] + 0.5 * torch.randn(230, generator=generator, dtype=torch.float64)
    widths = [3, 10, 20, 30, 40, 100, 600]
    found = bayes.double_descent((x[:30], y[:30]), (x[30:], y[30:]), widths, num_draws=10)
    curve = found.test.mean(0)
    assert widths[int(curve.argmax())] == 30
    assert curve[-1] < 0.1 * curve.max()


def test_double_descent_refuses_classes_and_images():
    with pytest.raises(InputError, match="data must be inputs of shape"):
        bayes.double_descent((X, Y), (X, Y), [3])
    with pytest.raises(InputError, match="and test has 2 and 1"):
        bayes.double_descent((X, X[:, :1]), (X[:, :2], X[:, :1]), [3])


def test_alignment_is_the_cosine_of_centered_matrices():
    network = mlp(sizes=(3, 6, 2))
    jacobian = n2g.linearize(network).jacobian(X)
    matrix = torch.einsum("ncp,mcp->nm", jacobian, jacobian) / 2
    center = torch.eye(7, dtype=torch.float64) - 1 / 7
    codes = nn.functional.one_hot(Y).double()
    for y, wanted in ((Y, codes @ codes.mT), (X[:, :2], X[:, :2] @ X[:, :2].mT)):
        k, t = center @ matrix @ center, center @ wanted @ center
        want = float((k * t).sum() / k.norm() / t.norm())
        linearized = n2g.linearize(network)
        for kernel in (network, linearized, linearized.kernel(), linearized.trace_kernel()):
            assert float(bayes.kernel_alignment(kernel, (X, y))) == pytest.approx(want, rel=1e-10)


def test_alignment_is_one_for_the_kernel_of_the_targets_and_needs_targets_that_differ():
    line = nn.Linear(1, 1, bias=False).double()
    x = X[:, :1]
    assert float(bayes.kernel_alignment(line, (x, 3 * x[:, 0] + 1))) == pytest.approx(1, abs=1e-12)
    with pytest.raises(InputError, match="there is nothing to align"):
        bayes.kernel_alignment(line, (x, torch.ones(7, dtype=torch.float64)))
    with pytest.raises(InputError, match="kernel must be a kernel, a network"):
        bayes.kernel_alignment("rbf", (x, x))


def test_diversity_takes_what_ensembles_and_single_networks_give():
    training = bayes.Training(num_steps=3)
    found = bayes.ensemble(mlp(), (X, Y), n2g.Categorical(), num_members=3, training=training)
    one = bayes.diversity(found, X)
    assert one.distances.shape == one.cosines.shape == one.disagreement.shape == (3, 3)
    assert float(one.distances[0, 1]) > 0
    alone = bayes.map_estimate(mlp(), (X, Y), n2g.Categorical(), training=training)
    pair = bayes.diversity(bayes.mixture([alone, found]), X)
    torch.testing.assert_close(pair.distances[1:, 1:], one.distances)


def test_a_line_between_networks_of_unlike_activations_is_refused():
    one, other = (
        nn.Sequential(nn.Linear(1, 4), act(), nn.Linear(4, 1)) for act in (nn.Tanh, nn.ReLU)
    )
    with pytest.raises(NetworkError, match="one has Tanh where the other has ReLU"):
        bayes.straight_line(one.eval(), other.eval())


def test_networks_of_several_labels_disagree_where_any_label_differs():
    one, other = (nn.Linear(1, 2, bias=False) for _ in range(2))
    with torch.no_grad():
        one.weight.copy_(torch.tensor([[2.0], [1.0]]))  # both labels are 1 at x = 1
        other.weight.copy_(torch.tensor([[2.0], [-1.0]]))  # the first label alone is 1
    found = bayes.diversity([one, other], torch.ones(3, 1), likelihood=n2g.likelihoods.Bernoulli())
    assert found.disagreement is not None
    assert found.disagreement.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_networks_of_dropout_differ_as_functions_and_share_their_parameters():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
    x = torch.linspace(-1, 1, 5)[:, None]
    found = bayes.diversity(bayes.mc_dropout(network, (x, x), n2g.Gaussian(0.1), num_samples=4), x)
    torch.testing.assert_close(found.cosines, torch.ones(4, 4, dtype=torch.float64))
    assert (found.distances + torch.eye(4) > 0).all()
