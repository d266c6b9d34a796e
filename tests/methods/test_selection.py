"""Laws of sweeps and of networks trained at once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import net2gp as n2g
from net2gp.errors import InputError, NetworkError
from net2gp.methods.explain.dual import dual
from net2gp.methods.selection import EVIDENCE, Fit, Selection, sweep
from net2gp.methods.training.train_many import AdamSettings, train_many
from net2gp.plots import plot_selection


def build(width=5, seed=0, outputs=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs)).double().eval()


def enlarged(network, factor):
    with torch.no_grad():
        for value in network.parameters():
            value *= factor
    return network


def points(seed, count=12):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)).double()
    return x, (x[:, :1] * x[:, 1:]).sin()


def reference_training(network, data, likelihood, prior_var, optimizer, offset=0.0):
    """The same by torch's own optimizer, schedule and autograd."""
    steps = torch.optim.Adam(network.parameters(), optimizer.learning_rate)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        steps, factor=optimizer.factor, patience=optimizer.patience, eps=0.0
    )
    for _ in range(optimizer.num_steps):
        steps.zero_grad()
        loss = -likelihood.log_prob(network(data[0]), data[1]).sum()
        loss = loss + sum(p.square().sum() for p in network.parameters()) / (2 * prior_var)
        loss = loss + offset
        loss.backward()
        steps.step()
        schedule.step(loss.item())
    return network


OPTIMIZER = AdamSettings(learning_rate=0.1, num_steps=150, factor=0.5, patience=3)


def test_training_at_once_is_torch_adam_with_its_schedule_one_after_the_other():
    data, noises = [points(seed) for seed in range(3)], [0.3, 0.5, 2.0]
    networks, likelihoods = [build(seed=s) for s in range(3)], [n2g.Gaussian(v) for v in noises]
    variances = [0.3, 1.0, 3.7]
    trained = train_many(networks, data, likelihoods, prior_var=variances, optimizer=OPTIMIZER)
    for index, found in enumerate(trained):
        expected = reference_training(
            build(seed=index), data[index], likelihoods[index], variances[index], OPTIMIZER
        )
        for one, other in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_an_offset_moves_where_the_rate_falls_as_in_torch():
    data, likelihood, offsets = points(0), n2g.Gaussian(0.3), [0.0, 500.0]
    trained = train_many([build()] * 2, data, likelihood, offset=offsets, optimizer=OPTIMIZER)
    for found, offset in zip(trained, offsets, strict=True):
        expected = reference_training(build(), data, likelihood, 1.0, OPTIMIZER, offset)
        for one, other in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert (trained[0](data[0]) - trained[1](data[0])).abs().max() > 1e-3
    gap = trained.objective[1] - trained.objective[0]
    assert gap > offsets[1], "with the offset the rate falls sooner"
    with pytest.raises(InputError, match="offset must be finite"):
        train_many([build()], data, likelihood, offset=float("nan"))


@pytest.mark.parametrize(
    "likelihood", [n2g.Categorical(), n2g.Bernoulli()], ids=["softmax", "sign"]
)
def test_classifiers_are_trained_as_torch_trains_them(likelihood):
    outputs = 3 if isinstance(likelihood, n2g.Categorical) else 1
    x, y = points(0)
    labels = (y[:, 0] > 0).long()
    target = labels if outputs == 3 else labels.double()
    trained = train_many(
        [build(outputs=outputs), build(outputs=outputs, seed=1)],
        (x, target),
        [likelihood, type(likelihood)()],
        optimizer=OPTIMIZER,
    )
    expected = reference_training(build(outputs=outputs), (x, target), likelihood, 1.0, OPTIMIZER)
    torch.testing.assert_close(trained[0](x), expected(x), rtol=1e-8, atol=1e-8)


@given(st.integers(1, 5), st.integers(0, 50))
@settings(max_examples=8, deadline=None)
def test_a_network_does_not_see_the_others(at_once, seed):
    networks, data = [build(seed=s) for s in range(seed, seed + 4)], points(seed)
    optimizer = AdamSettings(learning_rate=0.05, num_steps=20, factor=0.5, patience=2)
    options = {"prior_var": [0.1, 1.0, 2.0, 3.0], "optimizer": optimizer}
    together = train_many(networks, data, n2g.Gaussian(0.1), **options)
    apart = train_many(networks, data, n2g.Gaussian(0.1), at_once=at_once, **options)
    for name, value in together.params.items():
        torch.testing.assert_close(apart.params[name], value, rtol=1e-10, atol=1e-12)


def test_training_leaves_the_networks_as_they_were_and_keeps_the_dtype():
    network = build().float()
    before = [p.clone() for p in network.parameters()]
    x, y = (t.float() for t in points(0))
    trained = train_many([network], (x, y), n2g.Gaussian(0.1), optimizer=OPTIMIZER)
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True))
    assert trained[0](x).dtype == torch.float32
    assert not torch.equal(trained[0](x), network(x))


def test_objective_is_the_negative_log_posterior_and_gradient_its_slope():
    data, prior_var = points(0), 0.7
    trained = train_many(
        [build()], data, n2g.Gaussian(0.2), prior_var=prior_var, optimizer=OPTIMIZER
    )
    network = trained[0]
    loss = -n2g.Gaussian(0.2).log_prob(network(data[0]), data[1]).sum()
    loss = loss + sum(p.square().sum() for p in network.parameters()) / (2 * prior_var)
    torch.testing.assert_close(trained.objective[0], loss.detach())
    slopes = torch.autograd.grad(loss, list(network.parameters()))
    norm = torch.cat([g.flatten() for g in slopes]).norm()
    torch.testing.assert_close(trained.gradient[0], norm)


def test_finishing_ends_at_a_stationary_point_of_lower_objective():
    options = {"prior_var": 1.0, "optimizer": OPTIMIZER}
    rough = train_many([build()], points(0), n2g.Gaussian(0.1), **options)
    fine = train_many([build()], points(0), n2g.Gaussian(0.1), finish=2000, **options)
    assert fine.objective <= rough.objective
    assert fine.gradient < 1e-6 < rough.gradient


def test_at_a_stationary_point_the_linear_model_has_the_network_as_its_mean():
    x, y = points(0)
    likelihood = n2g.Gaussian(0.1)
    network = train_many([build()], (x, y), likelihood, optimizer=OPTIMIZER, finish=3000)[0]
    found = dual(network, (x, y), likelihood, 1.0).condition().marginal(x).mean
    torch.testing.assert_close(found, network(x).detach(), rtol=0, atol=1e-6)


def test_training_says_what_is_wrong_with_its_arguments():
    data, likelihood = points(0), n2g.Gaussian(0.1)
    with pytest.raises(InputError, match=r"train_many needs networks: pass \[build\(\)"):
        train_many([], data, likelihood)
    with pytest.raises(NetworkError, match="one architecture, but the parameters of network 1 are"):
        train_many([build(5), build(6)], data, likelihood)
    for wrong in ([1.0], None, "ab", torch.ones(2, 1), {"0.*": 1.0, "2.*": 2.0}):
        with pytest.raises(InputError, match="prior_var must be a number for all 2 networks, or a"):
            train_many([build(), build()], data, likelihood, prior_var=wrong)
    with pytest.raises(InputError, match="prior_var must be positive and finite, but 0 was given"):
        train_many([build()], data, likelihood, prior_var=0.0)
    with pytest.raises(InputError, match="must be pairs of tensors of one shape"):
        train_many([build(), build()], [points(0, 5), points(0, 6)], likelihood)
    with pytest.raises(NetworkError, match=r"Call network\.eval\(\) first"):
        train_many([nn.Sequential(build(), nn.Dropout()).train()], data, likelihood)
    with pytest.raises(InputError, match=r"factor must be in \(0, 1\].*, but they are 2"):
        AdamSettings(num_steps=10, factor=2.0)
    with pytest.raises(InputError, match="patience must be zero or a positive whole number"):
        AdamSettings(patience=-1)
    with pytest.raises(InputError, match="optimizer must be AdamSettings"):
        train_many([build()], data, likelihood, optimizer=torch.optim.Adam(build().parameters()))
    with pytest.raises(InputError, match=r"a list of networks: pass \[network\]"):
        train_many(build(), data, likelihood)
    with pytest.raises(InputError, match=r"likelihood must be e\.g\. Gaussian"):
        train_many([build()], data, n2g.Gaussian)
    with pytest.raises(InputError, match=r"x is torch\.float32, but the network is torch\.float64"):
        train_many([build()], (data[0].float(), data[1]), likelihood)
    with pytest.raises(InputError, match=r"whose square torch\.float64 cannot hold"):
        train_many([build()], (data[0], 1e200 * data[1]), likelihood)
    with pytest.raises(InputError, match="objective of the networks at their start must be finite"):
        train_many([enlarged(build(), 1e160)], data, likelihood)
    with pytest.raises(InputError, match=r"list\(trained\)\[:3\]"):
        train_many([build()], data, likelihood, optimizer=AdamSettings(num_steps=1))[:2]
    with pytest.raises(IndexError, match="there are 1 networks, but number 3 was asked for"):
        train_many([build()], data, likelihood, optimizer=AdamSettings(num_steps=1))[3]


def test_the_first_network_must_compute_what_the_others_do():
    data, likelihood = points(0), n2g.Gaussian(0.1)
    other = nn.Sequential(*[nn.ReLU() if isinstance(m, nn.Tanh) else m for m in build()]).eval()
    with pytest.raises(NetworkError, match="network 1 computes something else than the first"):
        train_many([build(), other], data, likelihood)
    normed = [nn.Sequential(build(), nn.BatchNorm1d(1).double()).eval() for _ in range(2)]
    normed[1][1].running_mean += 1
    with pytest.raises(NetworkError, match="statistics of batch norm"):
        train_many(normed, data, likelihood)
    normed[0][1].running_mean += 1
    both = train_many(normed, data, likelihood, optimizer=OPTIMIZER)
    assert torch.equal(both[1][1].running_mean, normed[1][1].running_mean)


@pytest.mark.parametrize(
    ("outputs", "labels", "likelihood", "match"),
    [
        (3, torch.full((12,), 0.5).double(), n2g.Categorical(), "integer class indices"),
        (3, torch.full((12,), 3), n2g.Categorical(), r"labels must be in 0\.\.2"),
        (1, torch.zeros(12).long(), n2g.Categorical(), "two outputs or more"),
        (1, torch.full((12, 1), 5.0).double(), n2g.Bernoulli(), "labels must be 0 or 1"),
        (1, torch.zeros(12, 2).double(), n2g.Gaussian(0.1), r"y must have shape \(12, 1\)"),
    ],
)
def test_targets_must_suit_their_likelihood(outputs, labels, likelihood, match):
    with pytest.raises(InputError, match=match):
        train_many([build(outputs=outputs)], (points(0)[0], labels), likelihood)


def test_data_are_one_set_for_all_or_one_for_each_in_any_form():
    pair, likelihood = points(0), n2g.Gaussian(0.1)
    loader = DataLoader(TensorDataset(*pair), batch_size=5)
    expected = train_many([build()] * 2, pair, likelihood, optimizer=OPTIMIZER).objective
    for data in (loader, [pair, pair], (pair, pair), [loader, pair]):
        found = train_many([build()] * 2, data, likelihood, optimizer=OPTIMIZER).objective
        assert torch.equal(found, expected)
    for wrong in (None, (), [pair] * 3):
        with pytest.raises(InputError, match="data must be"):
            train_many([build()] * 2, wrong, likelihood)


def test_training_needs_no_gradients_switched_on():
    with torch.no_grad():
        found = train_many([build()], points(0), n2g.Gaussian(0.1), optimizer=OPTIMIZER, finish=5)
    expected = train_many([build()], points(0), n2g.Gaussian(0.1), optimizer=OPTIMIZER, finish=5)
    assert torch.equal(found.objective, expected.objective)


def regression(lengthscale, y):
    x = torch.linspace(0, 6, 20, dtype=torch.float64)[:, None]
    posterior = n2g.condition(n2g.RBF(lengthscale), (x, y), n2g.Gaussian(0.01))
    gap = posterior.marginal(x + 0.1).mean - (x + 0.1).sin()
    return Fit(posterior, {"test loss": gap.square().mean()})


def test_sweep_holds_the_scores_of_single_fits():
    x = torch.linspace(0, 6, 20, dtype=torch.float64)[:, None]
    targets = [x.sin(), x.sin() + 0.1 * (7 * x).cos()]
    table = sweep(regression, [0.1, 1.0, 10.0], targets, name="lengthscale")
    assert table.evidence.shape == (3, 2)
    for row, value in enumerate(table.values):
        for column, y in enumerate(targets):
            one = regression(value, y).scores
            assert float(table.evidence[row, column]) == one[EVIDENCE]
            assert float(table.losses["test loss"][row, column]) == one["test loss"]
    assert table.best() == 1.0


def test_values_may_be_anything():
    kernels = {"smooth": n2g.RBF(1.0), "rough": n2g.RBF(0.01)}
    x = torch.linspace(0, 6, 20, dtype=torch.float64)[:, None]
    fit = lambda name, y: Fit(n2g.condition(kernels[name], (x, y), n2g.Gaussian(0.01)))
    table = sweep(fit, list(kernels), [x.sin()], name="kernel")
    assert table.best() == "smooth"
    assert [label.get_text() for label in plot_selection(None, table).get_xticklabels()] == [
        "smooth",
        "rough",
    ]


def table_of(evidence, loss, values=(1.0, 10.0, 1000.0)):
    scores = {EVIDENCE: torch.tensor(evidence).double(), "test loss": torch.tensor(loss).double()}
    return Selection("δ", values, scores)


EVIDENCES = [[-3.0, -5.0], [-1.0, -2.0], [-4.0, -4.0]]
LOSSES = [[3.0, 1.0], [4.0, 2.0], [0.5, 0.7]]


def test_best_is_the_largest_evidence_and_the_smallest_loss():
    table = table_of(EVIDENCES, LOSSES)
    assert (table.best(), table.best("test loss")) == (10.0, 1000.0)
    assert table.mean().tolist() == [-4.0, -1.5, -4.0]
    torch.testing.assert_close(table.standard_error(), torch.tensor([1.0, 0.5, 0.0]).double())


def test_standard_error_of_one_data_set_is_unknown():
    table = table_of([[-3.0], [-1.0], [-2.0]], [[1.0], [2.0], [3.0]])
    assert table.standard_error().isnan().all()
    assert table.best() == 10.0


def test_what_failed_is_never_best():
    table = table_of([[-3.0, -5.0], [math.nan, -2.0], [-4.0, math.inf]], LOSSES)
    assert table.best() == 1.0
    with pytest.raises(
        InputError, match="no δ has a finite log marginal likelihood on all data sets"
    ):
        table_of([[math.nan, 1.0]] * 3, LOSSES).best()


def test_printed_table_marks_the_optima():
    lines = str(table_of(EVIDENCES, LOSSES)).splitlines()
    assert len(lines) == 4
    assert [line.count("*") for line in lines] == [0, 0, 1, 1]
    assert "-1.5000 ± 0.500 *" in lines[2]


def test_sweep_says_what_is_wrong_with_its_arguments():
    with pytest.raises(InputError, match="sweep needs values and data sets, but got 0 and 1"):
        sweep(regression, [], [0])
    with pytest.raises(InputError, match=r"fit must return Fit\(posterior, losses\), but returned"):
        sweep(lambda value, data: 1.0, [1.0], [0])
    turns = iter([Fit(0.0, {"a": 1.0}), Fit(0.0, {"b": 1.0})])
    with pytest.raises(InputError, match="must give the same losses every time"):
        sweep(lambda value, data: next(turns), [1.0, 2.0], [0])
    with pytest.raises(
        InputError, match=r"there is no score 'loss'\. Known: log marginal likelihood"
    ):
        table_of(EVIDENCES, LOSSES).best("loss")
    with pytest.raises(InputError, match="must have 'log marginal likelihood' and be"):
        Selection("δ", (1.0,), {"loss": torch.zeros(1, 2)})


def test_figure_has_two_axes_a_band_for_each_curve_and_stars_at_the_optima():
    ax = plot_selection(None, table_of(EVIDENCES, LOSSES))
    assert ax.get_xscale() == "log"
    stars = [
        tuple(float(v[0]) for v in line.get_data())
        for one in (ax, ax.right_ax)
        for line in one.get_lines()
        if line.get_marker() == "*"
    ]
    assert stars == [(10.0, 1.5), (1000.0, pytest.approx(0.6))]
    assert len(ax.collections) == len(ax.right_ax.collections) == 1
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "−log marginal likelihood",
        "test loss",
    ]


def test_figure_draws_the_losses_that_are_named():
    ax = plot_selection(None, table_of(EVIDENCES, LOSSES), losses=[])
    assert not hasattr(ax, "right_ax")
    with pytest.raises(InputError, match=r"there is no loss 'val' to draw\. Known: test loss"):
        plot_selection(None, table_of(EVIDENCES, LOSSES), losses=["val"])
