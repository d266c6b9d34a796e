"""Finite networks, their training, phases and evidence: as torch and net2gp have them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from explorer.browser import until
from explorer.same_network import ACTIVATIONS, TABLES, net_of, same_network
from net2gp.limits import correlation_fixed_point, critical_line, depth_scales, fixed_point, slope

X = torch.tensor([-2.7, -1.9, -0.6, 0.0, 0.5, 1.3, 2.8], dtype=torch.float64)[:, None]
Y = torch.tensor([0.4, 1.1, -0.9, 0.2, 0.6, 1.4, -0.3], dtype=torch.float64)[:, None]
NEW = torch.tensor([-3.0, -1.2, 0.1, 0.47, 2.2, 3.0], dtype=torch.float64)[:, None]
NETS = [
    net_of("gelu", 2),
    net_of("tanh", 3, norm=True, skip=True),
    net_of("relu", 1),
    net_of("sin", 3, skip=True),
]


def numbers(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flat(values: Tensor) -> list[float]:
    return values.flatten().tolist()


def as_torch(net: dict, width: int, weights: list, biases: list) -> nn.Sequential:
    """The module whose weights are those of the page times √(σ_w²/fan-in), and σ_b for the biases."""
    module = same_network(net, width)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer, w, b in zip(layers, weights, biases, strict=True):
            scale = math.sqrt(net["weightVar"] / layer.in_features)
            layer.weight.copy_(scale * numbers(w).reshape(layer.weight.shape))
            layer.bias.copy_(math.sqrt(net["biasVar"]) * numbers(b))
    return module


@pytest.mark.parametrize("net", NETS, ids=lambda net: net["activation"])
def test_outputs_and_gradients_of_finite_networks(tab, net) -> None:
    script = """([net, width, x, y]) => {
        const network = makeNetwork(net, width, makeNormals(5));
        const copy = (parts) => parts.map((p) => Array.from(p));
        const before = { W: copy(network.W), b: copy(network.b) }, pass = forward(network, x);
        const loss = descend(network, x, y, 0.5);
        const outputs = Array.from(pass.outputs);
        return { ...before, outputs, loss, W1: copy(network.W), b1: copy(network.b) };
    }"""
    width = 7
    found = tab.evaluate(script, [net, width, flat(X), flat(Y)])
    module = as_torch(net, width, found["W"], found["b"])
    outputs = module(X)
    torch.testing.assert_close(numbers(found["outputs"]), outputs[:, 0], rtol=1e-8, atol=1e-8)
    loss = (outputs - Y).square().sum() / (2 * len(X))
    assert math.isclose(found["loss"], float(loss.detach()), rel_tol=1e-7)
    loss.backward()
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    for layer, before, after in zip(layers, found["W"], found["W1"], strict=True):
        scale = math.sqrt(net["weightVar"] / layer.in_features)
        step = (numbers(before) - numbers(after)) / 0.5
        torch.testing.assert_close(step, scale * layer.weight.grad.flatten(), rtol=1e-6, atol=1e-8)
    for layer, before, after in zip(layers, found["b"], found["b1"], strict=True):
        step = (numbers(before) - numbers(after)) / 0.5
        right = math.sqrt(net["biasVar"]) * layer.bias.grad
        torch.testing.assert_close(step, right, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions_and_their_slopes(tab, name) -> None:
    u = torch.linspace(-7, 7, 57, dtype=torch.float64)[1:].requires_grad_()
    script = "([name, u]) => u.map((v) => [ACTIVATIONS[name].apply(v), ACTIVATIONS[name].slope(v)])"
    values = u[u.abs() > 1e-9].detach().requires_grad_()
    found = numbers(tab.evaluate(script, [name, values.tolist()]))
    right = ACTIVATIONS[name](values)
    (slopes,) = torch.autograd.grad(right.sum(), values)
    torch.testing.assert_close(
        found, torch.stack([right.detach(), slopes], 1), rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize(
    "net", [NETS[0], NETS[1], net_of("erf", 2)], ids=lambda net: net["activation"]
)
@pytest.mark.parametrize("ridge", [0.0, 0.05])
def test_gradient_flow_over_time(tab, net, ridge) -> None:
    times = [0.0, 0.3, 4.0, 100.0, math.inf]
    script = """([net, x, y, z, times, ridge]) => {
        const one = diagonals(net, Float64Array.from(x)), two = diagonals(net, Float64Array.from(z));
        const gram = gramKernels(net, one), cross = crossKernels(net, two, one);
        const modes = flowModes(gram, ridge);
        return times.map((time) => {
            const law = flowLaw(gram, cross, two.nngp, y, modes, time === null ? Infinity : time);
            return [Array.from(law.mean), Array.from(law.variance)];
        });
    }"""
    asked = [None if time == math.inf else time for time in times]
    found = tab.evaluate(script, [net, flat(X), flat(Y), flat(NEW), asked, ridge])
    variances = {"weight_var": net["weightVar"], "bias_var": net["biasVar"]}
    flow = n2g.gradient_flow(same_network(net), (X, Y), ridge=ridge, **variances)
    bound = 2e-4 if net["activation"] in TABLES else 1e-7
    for time, (mean, variance) in zip(times, found, strict=True):
        law = flow.at(time, NEW)
        torch.testing.assert_close(numbers(mean), law.mean[:, 0], rtol=0, atol=bound * 2)
        right = law.variance[:, 0]
        torch.testing.assert_close(numbers(variance), right, rtol=0, atol=bound * 10)


def test_a_predicted_path_is_the_flow_from_its_start(tab) -> None:
    net = NETS[0]
    script = """([net, x, y, z, time]) => {
        const one = diagonals(net, Float64Array.from(x)), two = diagonals(net, Float64Array.from(z));
        const gram = gramKernels(net, one), cross = crossKernels(net, two, one), modes = flowModes(gram, 0);
        const start = { grid: z.map(Math.cos), data: x.map(Math.cos) };
        return Array.from(predictedPath({ cross, y }, modes, time, start));
    }"""
    found = tab.evaluate(script, [net, flat(X), flat(Y), flat(NEW), 7.0])
    flow = n2g.gradient_flow(
        same_network(net), (X, Y), weight_var=net["weightVar"], bias_var=net["biasVar"]
    )
    right = flow.path(7.0, NEW, start=torch.cos)[:, 0]
    torch.testing.assert_close(numbers(found), right, rtol=0, atol=1e-8)


WEIGHTS, BIASES = [0.5, 1.3, 3.1], [0.0, 0.05, 0.7]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_phases(tab, name) -> None:
    script = """([name, pairs]) => pairs.map(([w, b]) => {
        const { q, chi, c, depth } = phaseAt(name, w, b);
        return [q, chi, c, depth].map((v) => (v === Infinity ? 1e300 : v));
    })"""
    pairs = torch.cartesian_prod(torch.tensor(WEIGHTS), torch.tensor(BIASES)).double()
    found = numbers(tab.evaluate(script, [name, pairs.tolist()]))
    phi, (w, b) = ACTIVATIONS[name], pairs.T
    q = fixed_point(phi, w, b)
    chi, c = slope(phi, q, w), correlation_fixed_point(phi, w, b, q=q)
    depth = depth_scales(phi, w, b).correlation
    bound = 1e-4 if name in TABLES else 1e-6
    # where the depth scale explodes, it amplifies what is rounded
    plain = ((chi - 1).abs() > 0.02) & (q > 0)
    for column, right in enumerate((q, chi, c, depth)):
        here = right.isfinite() & (plain | (column != 3)) & (q.isfinite() | (column == 0))
        torch.testing.assert_close(found[here, column], right[here], rtol=bound, atol=bound)
    assert ((found[:, 0] > 1e200) == q.isinf()).all()


@pytest.mark.parametrize(
    "name", [name for name in ACTIVATIONS if name not in ("relu", "leaky", "abs", "linear")]
)
def test_the_critical_line(tab, name) -> None:
    biases = torch.tensor([0.0, 0.01, 0.05, 0.3, 1.0], dtype=torch.float64)
    found = tab.evaluate(
        "([name, bs]) => bs.map((b) => criticalWeight(name, b) || null)", [name, biases.tolist()]
    )
    bound = 1e-4 if name in TABLES else 1e-6
    for bias, weight in zip(biases, found, strict=True):
        try:
            right = float(critical_line(ACTIVATIONS[name], bias))
        except n2g.errors.InputError:
            assert weight is None
        else:
            assert weight is not None
            assert math.isclose(weight, right, rel_tol=bound)


@pytest.mark.parametrize("name", ["relu", "leaky", "abs", "linear"])
def test_homogeneous_activations_are_critical_without_bias_only(tab, name) -> None:
    with_bias, without = tab.evaluate(
        "(name) => [criticalWeight(name, 0.1) || null, criticalWeight(name, 0)]", name
    )
    assert with_bias is None
    assert math.isclose(without, float(critical_line(ACTIVATIONS[name], 0.0)), rel_tol=1e-9)


def test_the_evidence_chooses_better_variances_which_net2gp_values_alike(open_page) -> None:
    tab = open_page("activation=erf&depth=1&weightVar=1&biasVar=0.1&noise=0.1")
    before = tab.evaluate("explorer.result.evidence")
    tab.locator("#choose").click()
    until(tab, f"explorer.result.evidence > {before} + 1")
    tab.evaluate("() => new Promise((done) => setTimeout(done, 700))")
    state, after = tab.evaluate("[explorer.state, explorer.result.evidence]")
    x, y = torch.tensor(state["points"], dtype=torch.float64).T[:, :, None]
    network = same_network(net_of("erf", 1))

    def build(weight_var: float, bias_var: float, noise_var: float) -> n2g.Posterior:
        kernel = n2g.nngp(network, weight_var=weight_var, bias_var=bias_var)
        return n2g.condition(kernel, (x, y), n2g.Gaussian(noise_var))

    chosen = build(state["weightVar"], state["biasVar"], state["noise"])
    assert math.isclose(float(chosen.log_marginal_likelihood()), after, rel_tol=1e-7)
    for factors in (
        (1.3, 1, 1),
        (0.75, 1, 1),
        (1, 1.3, 1),
        (1, 0.75, 1),
        (1, 1, 1.3),
        (1, 1, 0.75),
    ):
        names = ("weightVar", "biasVar", "noise")
        limits = ((0.05, 6), (1e-3, 2), (1e-4, 1))
        pairs = zip(names, factors, limits, strict=True)
        near = build(*(min(max(state[n] * f, low), high) for n, f, (low, high) in pairs))
        assert float(near.log_marginal_likelihood()) <= after + 1e-3


def test_networks_approach_the_limit_as_one_over_the_root_of_their_width(tab) -> None:
    script = """([net, x, y]) => {
        const job = { net, seed: 2, count: 40, widths: [16, 64, 256], noise: 0.05 };
        return [...widthsJob({ ...job, x: Float64Array.from(x), y })];
    }"""
    rows = tab.evaluate(script, [NETS[0], flat(X), flat(Y)])
    for name in ("kernel", "mean"):
        assert rows[0][name] / 8 < rows[2][name] < rows[0][name] / 2
        assert rows[2][name] < 0.25


def test_wide_networks_are_trained_to_where_the_theory_takes_them(tab) -> None:
    script = """([net, x, y, grid]) => {
        const one = diagonals(net, Float64Array.from(x)), two = diagonals(net, Float64Array.from(grid));
        const gram = gramKernels(net, one), cross = crossKernels(net, two, one), modes = flowModes(gram, 0);
        const rate = learningRate(gram);
        return [16, 256].map((width) => {
            const job = { net, width, seed: 4, count: 3, grid, x, y, rate: rate / 4, last: 100 };
            const shots = [...trainJob(job)].filter(Boolean);
            const starts = shots.filter((s) => s.step === 0), ends = shots.filter((s) => s.step === 100);
            const predicted = starts.map((start) => predictedPath({ cross, y }, modes, 25 * rate, start));
            const gaps = ends.map((s, i) => rootMeanSquare(s.grid, predicted[i]));
            const losses = ends.map((s) => s.loss / shots[3].loss);
            return [gaps.reduce((a, b) => a + b) / gaps.length, Math.max(...losses)];
        });
    }"""
    (narrow, _), (wide, shrunk) = tab.evaluate(script, [NETS[0], flat(X), flat(Y), flat(NEW)])
    assert wide < narrow / 2
    assert wide < 0.2
    assert shrunk < 1


def test_the_page_draws_and_trains_finite_networks(open_page) -> None:
    tab = open_page("width=32&activation=relu")
    until(tab, "explorer.finite.lines(explorer.state, explorer.result).lines.length === 6")
    tab.locator("#mode [data-mode=training]").click()
    until(tab, "explorer.state.mode === 'training' && explorer.finite.progress() >= 200")
    tab.locator("#play").click()
    until(tab, "explorer.state.steps !== 200")
    until(tab, "document.getElementById('story').textContent.includes('really trained')")


def test_a_click_into_the_phase_diagram_chooses_variances(open_page) -> None:
    tab = open_page("activation=tanh")
    tab.locator("#phase").scroll_into_view_if_needed()
    box = tab.locator("#phase").bounding_box()
    tab.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 0.4 * box["height"])
    until(tab, "explorer.state.weightVar !== 2.7 && explorer.state.biasVar !== 1.4")
    tab.locator("#phase").focus()
    before = tab.evaluate("explorer.state.weightVar")
    tab.keyboard.press("ArrowRight")
    until(tab, f"explorer.state.weightVar > {before}")
    tab.locator("#critical").click()
    until(
        tab,
        "Math.abs(phaseAt('tanh', explorer.state.weightVar, explorer.state.biasVar).chi - 1) < 1e-3",
    )
