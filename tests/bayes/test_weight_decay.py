"""Weight decay is a Gaussian prior, with torch's conventions; AdamW's is not."""

import math

import pytest
import torch
from torch import nn
from torch.func import grad

import net2gp as n2g
from net2gp import bayes
from net2gp.errors import InputError

LIKELIHOOD = n2g.Gaussian(noise_var=0.5)


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :1]) + 0.1 * torch.randn(12, 1, generator=generator, dtype=torch.float64)
    network = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
    return network, x, y


def train(network, optimizer, loss, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in network.named_parameters()}


def squared(network, x, y):
    """The sum of negative log likelihoods under noise of variance ½."""
    return lambda: (network(x) - y).square().sum()


def test_steps_of_sgd_with_momentum_and_decay_are_those_of_torch():
    network, x, y = problem()
    decay, rate, momentum = 0.3, 0.01, 0.9
    prior = bayes.prior_of_weight_decay(decay)
    model = bayes.Model.of(network.eval(), LIKELIHOOD, prior)
    params, speed = model.params, None
    optimizer = torch.optim.SGD(
        network.parameters(), lr=rate, momentum=momentum, weight_decay=decay
    )
    for _ in range(2):
        found = train(network, optimizer, squared(network, x, y), 1)
        slope = grad(model.log_joint)(params, (x, y))
        uphill = {n: -g for n, g in slope.items()}
        speed = uphill if speed is None else {n: momentum * speed[n] + g for n, g in uphill.items()}
        params = {n: v - rate * speed[n] for n, v in params.items()}
        for name in params:
            scale = max(1.0, float(params[name].abs().max()))
            assert (found[name] - params[name]).abs().max() <= 1e-15 * scale


def test_a_thousand_steps_of_sgd_with_decay_climb_the_log_joint():
    """θ ← θ + η ∇log p(y | θ) − λ θ has the prior variance η/λ, and torch's weight_decay is λ/η."""
    network, x, y = problem()
    rate, shrink = 0.01, 0.002
    model = bayes.Model.of(network.eval(), LIKELIHOOD, bayes.NormalPrior(rate / shrink))
    assert bayes.prior_of_weight_decay(shrink / rate).variance == pytest.approx(rate / shrink)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, weight_decay=shrink / rate)
    found = train(network, optimizer, squared(network, x, y), 1000)
    params = model.params
    climb = grad(model.log_joint)
    for _ in range(1000):
        slope = climb(params, (x, y))
        params = {n: v + rate * slope[n] for n, v in params.items()}
    assert max(float((found[n] - params[n]).abs().max()) for n in params) < 1e-12


@pytest.mark.parametrize(
    ("loss", "scale", "options"),
    [
        (lambda f, y: -LIKELIHOOD.log_prob(f, y).sum(), 1.0, {}),
        (lambda f, y: -LIKELIHOOD.log_prob(f, y).mean(), 12.0, {"num_averaged": 12}),
        (nn.MSELoss(reduction="sum"), 1.0, {"noise_var": 0.5}),
        (nn.MSELoss(), 12.0, {"num_averaged": 12, "noise_var": 0.5}),
    ],
)
def test_conversions_hold_for_sums_means_and_squared_errors(loss, scale, options):
    network, x, y = problem()
    prior = bayes.prior_of_weight_decay(0.02, **options)
    assert bayes.weight_decay_of_prior(prior, **options) == pytest.approx(0.02, rel=1e-14)
    model = bayes.Model.of(network.eval(), LIKELIHOOD, prior)
    penalty = sum(value.square().sum() for value in network.parameters())
    total = loss(network(x), y) + 0.5 * 0.02 * penalty
    slopes = torch.autograd.grad(total, list(network.parameters()))
    joint = grad(model.log_joint)(model.params, (x, y))
    for slope, name in zip(slopes, joint, strict=True):
        assert torch.allclose(-scale * slope, joint[name], rtol=1e-11, atol=1e-12)


def settle(kind, x, y, decay, eps):
    """Where an optimizer of a linear model with all data in each step comes to rest, from zero."""
    network = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(network.weight)
    options = {"lr": 0.01, "betas": (0.9, 0.9), "eps": eps, "weight_decay": decay}
    optimizer = kind(network.parameters(), **options)
    for _ in range(800):
        network.weight.grad = ((network.weight @ x.mT - y) @ x).detach()
        optimizer.step()
    return network.weight.detach()


def test_adam_with_coupled_decay_stops_at_the_maximum_a_posteriori_and_adamw_does_not():
    decay, eps = 0.5, 0.1
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    x = x * torch.tensor([1.0, 0.5, 0.3], dtype=torch.float64)
    y = torch.tensor([[1.0, -0.5, 0.8]], dtype=torch.float64) @ x.mT + 0.1
    network = nn.Linear(3, 1, bias=False).double().eval()
    prior = bayes.prior_of_weight_decay(decay)
    model = bayes.Model.of(network, n2g.Gaussian(noise_var=1.0), prior)

    def slopes(weight):
        """The gradients of the log joint and of the log likelihood."""
        params, batch = {"weight": weight}, (x, y.mT)
        parts = (grad(model.log_joint)(params, batch), grad(model.log_likelihood)(params, batch))
        return tuple(part["weight"] for part in parts)

    coupled = settle(torch.optim.Adam, x, y, decay, eps)
    assert slopes(coupled)[0].abs().max() < 1e-9
    decoupled = settle(torch.optim.AdamW, x, y, decay, eps)
    joint, likelihood = slopes(decoupled)
    assert joint.abs().max() > 0.1
    # the variance that would explain the point differs between weights and depends on eps
    implied = decoupled / likelihood
    assert torch.allclose(implied, (1 - decay * decoupled.abs()) / (eps * decay), rtol=1e-7)
    assert implied.max() / implied.min() > 1.2


def test_the_optimizer_itself_says_which_prior_it_has():
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [
        {"params": [network[0].weight, network[1].weight], "weight_decay": 0.1},
        {"params": [network[0].bias, network[1].bias], "weight_decay": 0.0},
    ]
    prior = bayes.prior_of_weight_decay(torch.optim.SGD(groups, lr=0.1), network, num_averaged=5)
    expected = {"0.weight": 2.0, "0.bias": None, "1.weight": 2.0, "1.bias": None}
    for name, variance in expected.items():
        kind = bayes.FlatPrior() if variance is None else bayes.NormalPrior(variance)
        assert prior.priors[name] == kind
    again = bayes.decay_groups(network, prior, num_averaged=5)
    decays = {id(p): g["weight_decay"] for g in again for p in g["params"]}
    assert [decays[id(p)] for p in network.parameters()] == pytest.approx([0.1, 0.0, 0.1, 0.0])
    optimizer = torch.optim.Adam(network.parameters(), weight_decay=0.25)
    found = bayes.prior_of_weight_decay(optimizer, network)
    assert set(found.variance.values()) == {4.0}
    assert set(found.variance) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_what_is_no_weight_decay_is_refused():
    network = nn.Linear(2, 1)
    adamw = torch.optim.AdamW(network.parameters(), weight_decay=0.1)
    with pytest.raises(InputError, match="AdamW decouples its weight decay from the gradient"):
        bayes.prior_of_weight_decay(adamw, network)
    nadam = torch.optim.NAdam(network.parameters(), weight_decay=0.1, decoupled_weight_decay=True)
    with pytest.raises(InputError, match="NAdam decouples its weight decay"):
        bayes.prior_of_weight_decay(nadam, network)
    rprop = torch.optim.ASGD(network.parameters(), weight_decay=0.1)
    with pytest.raises(InputError, match="ASGD may decouple its weight decay"):
        bayes.prior_of_weight_decay(rprop, network)
    sgd = torch.optim.SGD(network.parameters(), lr=0.1)
    with pytest.raises(InputError, match="the parameters of an optimizer have no names"):
        bayes.prior_of_weight_decay(sgd)
    with pytest.raises(InputError, match="the optimizer trains a parameter that the network does"):
        bayes.prior_of_weight_decay(sgd, nn.Linear(2, 1))
    with pytest.raises(InputError, match="weight_decay must be zero or positive"):
        bayes.prior_of_weight_decay(-0.1)
    with pytest.raises(InputError, match="only a Gaussian prior is a weight decay"):
        bayes.weight_decay_of_prior(bayes.LaplacePrior())
    with pytest.raises(InputError, match="the prior has several variances"):
        bayes.weight_decay_of_prior(bayes.NormalPrior({"*": 1.0, "bias": 2.0}))
    with pytest.raises(InputError, match="only Gaussian priors are weight decays, but bias has"):
        bayes.decay_groups(network, bayes.PriorByName({"*": 1.0, "bias": bayes.LaplacePrior()}))
    uneven = bayes.NormalPrior({"*": 1.0, "weight": torch.tensor([[1.0, 2.0]])})
    with pytest.raises(InputError, match="the entries of 'weight' have different variances"):
        bayes.decay_groups(network, uneven)


def test_no_decay_is_a_flat_prior():
    assert bayes.prior_of_weight_decay(0.0) == bayes.FlatPrior()
    assert bayes.weight_decay_of_prior(None) == 0.0
    assert bayes.weight_decay_of_prior(bayes.FlatPrior()) == 0.0


def test_the_maximum_a_posteriori_is_sparser_under_laplace_than_under_a_gaussian():
    """Proximal steps on the log joint of a linear model, of which most columns do not matter."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 10, generator=generator, dtype=torch.float64)
    y = x[:, :2] @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    y = y + 0.5 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    network = nn.Linear(10, 1, bias=False).double().eval()
    likelihood, step = n2g.Gaussian(noise_var=0.25), 1e-3
    found = {}
    for prior in (bayes.LaplacePrior(0.01), bayes.NormalPrior(0.01)):
        weight = torch.zeros(1, 10, dtype=torch.float64)
        for _ in range(1000):
            moved = weight - step * (weight @ x.mT - y.mT) @ x / likelihood.noise_var
            if isinstance(prior, bayes.LaplacePrior):
                weight = moved.sign() * (moved.abs() - step / math.sqrt(0.005)).clamp_min(0)
            else:
                weight = moved / (1 + step / 0.01)
        found[type(prior)] = weight
        # no small step in any coordinate increases the log joint
        model = bayes.Model.of(network, likelihood, prior)
        best = model.log_joint({"weight": weight}, (x, y))
        for change in (*torch.eye(10).double(), *-torch.eye(10).double()):
            assert model.log_joint({"weight": weight + 1e-4 * change}, (x, y)) <= best
    zeros = {kind: int((weight.abs() < 1e-8).sum()) for kind, weight in found.items()}
    assert zeros[bayes.NormalPrior] == 0
    assert zeros[bayes.LaplacePrior] >= 4
    assert (found[bayes.LaplacePrior][0, :2].abs() > 0.3).all()
