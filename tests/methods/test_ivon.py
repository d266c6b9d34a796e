"""IVON: its steps, what it converges to, and that it is a proper torch optimizer for any loss."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from methods.training import DOUBLE, flat_mean, random, seeded, small_network
from net2gp.errors import InputError, NetworkError
from net2gp.likelihoods import Categorical, Gaussian
from net2gp.linear import linearize
from net2gp.methods.training.ivon import IVON
from net2gp.methods.training.natural_gradient import NewtonState, newton_step


def squared_error(network: nn.Module, optimizer: IVON, x: Tensor, y: Tensor, noise_var: float):
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (network(x) - y).square().mean() / (2 * noise_var)
        loss.backward()
        return loss

    return closure


def test_a_step_is_the_algorithm_of_the_paper():
    network, x, y = small_network(), random(6, 2), random(6, 1, seed=1)
    theta = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    optimizer = IVON(
        network, 60, prior_var=0.5, learning_rate=0.02, decays=(0.8, 0.9), initial_var=0.01, seed=4
    )
    noise, m, g = seeded(4), theta.clone(), torch.zeros_like(theta)
    ess, delta = 60.0, 1 / (60 * 0.5)
    h = torch.full_like(theta, 1 / (60 * 0.01) - delta)
    twin = small_network()
    for t in (1, 2, 3):
        optimizer.step(squared_error(network, optimizer, x, y, 1.0))
        sigma2 = 1 / (ess * (h + delta))
        sizes = [p.numel() for p in twin.parameters()]
        z = [torch.randn(p.shape, generator=noise, dtype=DOUBLE) for p in twin.parameters()]
        w = m + torch.cat([one.reshape(-1) for one in z]) * sigma2.sqrt()
        for p, piece in zip(twin.parameters(), w.split(sizes), strict=True):
            p.data = piece.reshape(p.shape)
        loss = (twin(x) - y).square().mean() / 2
        parts = torch.autograd.grad(loss, list(twin.parameters()))
        ghat = torch.cat([part.reshape(-1) for part in parts])
        hhat = ghat * (w - m) / sigma2
        g = 0.8 * g + 0.2 * ghat
        h = 0.9 * h + 0.1 * hhat + 0.5 * 0.1**2 * (h - hhat).square() / (h + delta)
        m = m - 0.02 * (g / (1 - 0.8**t) + delta * m) / (h + delta)
    torch.testing.assert_close(flat_mean(optimizer), m, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(optimizer.variance, 1 / (ess * (h + delta)), rtol=1e-10, atol=0.0)


def test_the_precision_stays_positive_for_any_estimate_of_the_hessian():
    """h + δ becomes ½(h + δ)(1 + (1 − x)²), at least half of what it was."""
    decay = torch.tensor(0.1, dtype=DOUBLE)
    estimates = torch.linspace(-1e4, 1e4, 2001, dtype=DOUBLE)
    state = NewtonState(*(torch.tensor(v, dtype=DOUBLE) for v in (0.0, 0.5, 0.0, 0.0)))
    for beta in (0.0, 0.5, 0.999):
        moved = newton_step(
            state, decay * 0, estimates, decay, learning_rate=0.1, decays=(0.9, beta)
        )
        assert bool((moved.hessian + decay >= 0.5 * 0.6 * (1 - 1e-9)).all())


def test_on_a_quadratic_it_finds_the_best_diagonal_gaussian():
    """Of a linear model: the exact mean, and variances 1/diag(precision)."""
    x = random(40, 2) + 0.3
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=DOUBLE) + 0.5 * random(40, 1, seed=1)
    precision = x.T @ x / 0.25 + torch.eye(2, dtype=DOUBLE) / 2.0
    mean = torch.linalg.solve(precision, x.T @ y[:, 0] / 0.25)
    network = nn.Linear(2, 1, bias=False).double()
    optimizer = IVON(
        network, 40, prior_var=2.0, learning_rate=0.1, decays=(0.9, 0.98), num_samples=4
    )
    closure = squared_error(network, optimizer, x, y, 0.25)
    means, precisions = [], []
    for step in range(450):
        optimizer.step(closure)
        if step >= 100:
            means.append(flat_mean(optimizer))
            precisions.append(1 / optimizer.variance)
    error = precision.diagonal().rsqrt() / (4 * 350) ** 0.5
    assert bool(((torch.stack(means).mean(0) - mean).abs() < 5 * error).all())
    # one draw knows a Hessian to about twice its size, 1400 draws to about 5 %
    found = torch.stack(precisions).mean(0)
    torch.testing.assert_close(found, precision.diagonal(), rtol=0.15, atol=0.0)


def test_drawing_the_weights_oneself_is_the_same_as_a_closure():
    x, y = random(6, 2), random(6, 1, seed=1)
    one, other = small_network(), small_network()
    first, second = (
        IVON(one, 6, learning_rate=0.05, num_samples=2),
        IVON(other, 6, learning_rate=0.05),
    )
    for _ in range(3):
        first.step(squared_error(one, first, x, y, 1.0))
        for _ in range(2):
            with second.sampled_weights():
                ((other(x) - y).square().mean() / 2).backward()
        second.step()
    assert torch.equal(flat_mean(first), flat_mean(second))
    assert torch.equal(first.variance, second.variance)


def test_within_the_block_weights_are_drawn_and_behind_it_they_are_the_mean():
    network = small_network()
    optimizer = IVON(network, 100, initial_var=0.04)
    mean = flat_mean(optimizer)
    draws = []
    for _ in range(400):
        with optimizer.sampled_weights():
            draws.append(flat_mean(optimizer))
        assert torch.equal(flat_mean(optimizer), mean)
    spread = (torch.stack(draws) - mean) / 0.2
    # 400·21 standard normal numbers
    assert abs(float(spread.mean())) < 4 / (400 * 21) ** 0.5
    assert abs(float(spread.square().mean()) - 1) < 4 * (2 / (400 * 21)) ** 0.5


def test_the_mean_comes_back_after_an_error_and_nothing_is_learned_from_it():
    network = small_network()
    optimizer = IVON(network, 10)
    mean = flat_mean(optimizer)

    def fail() -> Tensor:
        network(random(3, 2)).sum().backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    assert torch.equal(flat_mean(optimizer), mean)
    with pytest.raises(
        InputError, match=r"there is no gradient at drawn weights .* loss.backward\(\)"
    ):
        optimizer.step()


def test_it_trains_networks_with_batch_norm_and_dropout():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)
        network, x = nn.Sequential(*layers).double(), random(80, 2)
        y = (x.prod(1) > 0).long()
        optimizer = IVON(network, 80, prior_var=1.0, learning_rate=0.2, decays=(0.9, 0.999))
        losses = []
        for _ in range(150):
            with optimizer.sampled_weights():
                loss = nn.functional.cross_entropy(network(x), y)
                loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert sum(losses[-20:]) < 0.6 * sum(losses[:20])
    with pytest.raises(NetworkError, match=r"Call network.eval\(\) first"):
        optimizer.posterior((x, y), Categorical())
    network.eval()
    posterior = optimizer.posterior((x, y), Categorical())
    assert float((posterior.predict(x).probs.argmax(1) == y).double().mean()) > 0.85


def test_the_posterior_is_the_gaussian_of_the_optimizer():
    network, x = small_network(2), random(5, 2)
    network[0].bias.requires_grad_(False)
    optimizer = IVON(network, 5, prior_var=1.0)
    network.eval()
    posterior = optimizer.posterior((x, torch.arange(5) % 2), Categorical())
    J = linearize(network, only=["*", "!0.bias"]).jacobian(x)
    blocks = torch.einsum("ncp,p,ndp->ncd", J, optimizer.variance, J)
    torch.testing.assert_close(posterior.marginal(x).covariance_matrix, blocks)
    with pytest.raises(InputError, match="without an evidence"):
        posterior.log_marginal_likelihood()


def test_training_resumes_exactly():
    x, y = random(6, 2), random(6, 1, seed=1)
    network = small_network()
    optimizer = IVON(network, 6, learning_rate=0.05, prior_var={"*": 1.0, "*.bias": 3.0})
    closure = squared_error(network, optimizer, x, y, 1.0)
    for _ in range(3):
        optimizer.step(closure)
    file = io.BytesIO()
    torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for _ in range(3):
        optimizer.step(closure)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = small_network(seed=3)
    again.load_state_dict(saved["network"])
    resumed = IVON(again, 6, learning_rate=0.5, seed=9)
    resumed.load_state_dict(saved["optimizer"])
    for _ in range(3):
        resumed.step(squared_error(again, resumed, x, y, 1.0))
    assert torch.equal(flat_mean(resumed), flat_mean(optimizer))
    assert torch.equal(resumed.variance, optimizer.variance)


def test_schedulers_of_torch_set_the_learning_rate():
    network, x, y = small_network(), random(4, 2), random(4, 1)
    optimizer = IVON(network, 4, learning_rate=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    closure = squared_error(network, optimizer, x, y, 1.0)
    optimizer.step(closure)
    scheduler.step()
    before = flat_mean(optimizer)
    optimizer.step(closure)
    assert torch.equal(flat_mean(optimizer), before)


def test_a_clip_bounds_the_move_of_every_coordinate():
    network, x, y = small_network(), random(4, 2), 1e4 * random(4, 1)
    optimizer = IVON(network, 4, learning_rate=0.1, clip_radius=0.5)
    before = flat_mean(optimizer)
    optimizer.step(squared_error(network, optimizer, x, y, 1.0))
    assert float((flat_mean(optimizer) - before).abs().max()) == pytest.approx(0.05)


def test_steps_are_pure_and_run_many_at_once():
    parts = [random(5, 8, seed=s) for s in range(5)]
    states = NewtonState(parts[0], parts[1].exp(), parts[2], torch.arange(5, dtype=DOUBLE))
    decay = torch.full((8,), 0.1, dtype=DOUBLE)
    before = [value.clone() for value in states]

    def step(state: NewtonState, g: Tensor, h: Tensor) -> NewtonState:
        return newton_step(state, g, h, decay, learning_rate=0.1, decays=(0.5, 0.9), clip=1.0)

    together = vmap(step)(states, parts[3], parts[4])
    for n in range(5):
        alone = step(NewtonState(*(v[n] for v in states)), parts[3][n], parts[4][n])
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[n], b)
    assert all(torch.equal(a, b) for a, b in zip(states, before, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_data": -1}, "num_data must be a positive whole number"),
        ({"prior_var": 0.0}, "prior_var for '0.weight' must be positive"),
        ({"decays": (1.0, 0.9)}, "decays must be two numbers from 0 up to below 1"),
        ({"num_samples": 0}, "num_samples must be a positive whole number"),
        ({"initial_var": 2.0}, "initial_var must be less than the prior's variance, but is 2"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        IVON(small_network(), **({"num_data": 4} | options))


def test_nothing_to_train_unknown_options_groups_and_states_are_refused():
    with pytest.raises(InputError, match="none of the network's parameters requires a gradient"):
        IVON(small_network().requires_grad_(False), 4)
    with pytest.raises(TypeError, match="there is no option 'momentum'"):
        IVON(small_network(), 4, momentum=0.9)
    optimizer = IVON(small_network(), 4)
    with pytest.raises(InputError, match="IVON has one group of parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(InputError, match="the state has no 'generator'"):
        optimizer.load_state_dict(torch.optim.SGD(small_network().parameters()).state_dict())


def test_a_gaussian_loss_gives_a_posterior_that_predicts():
    network, x, y = small_network(), random(6, 2), random(6, 1, seed=1)
    optimizer = IVON(network, 6, learning_rate=0.05)
    optimizer.step(squared_error(network, optimizer, x, y, 0.5))
    network.eval()
    assert bool((optimizer.posterior((x, y), Gaussian(0.5)).predict(x).variance > 0.5).all())
