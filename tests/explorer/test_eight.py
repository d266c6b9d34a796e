"""Eight posteriors of the same points, and the code that the page writes."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import net2gp as n2g
from explorer.browser import until
from explorer.same_network import net_of
from explorer.test_training import NEW, X, Y, as_torch, flat, numbers, same_network

NET = net_of("tanh", 2)
NOISE = 0.03


def eight(tab, part: str) -> dict[str, dict]:
    script = """([part, net, grid, x, y, noise]) => {
        const job = { net, grid: Float64Array.from(grid), x: Float64Array.from(x), y, noise, seed: 2 };
        const makers = { exactPosteriors, aroundOneNetwork, ensemble, chain };
        return [...makers[part](job)].filter(Boolean).map((law) => ({ ...law, lines: null,
            mean: Array.from(law.mean), variance: Array.from(law.variance) }));
    }"""
    laws = tab.evaluate(script, [part, NET, flat(NEW), flat(X), flat(Y), NOISE])
    return {law["name"]: law for law in laws}


def agree(found: dict, law: torch.distributions.Distribution, bound: float) -> None:
    torch.testing.assert_close(numbers(found["mean"]), law.mean[:, 0], rtol=0, atol=bound)
    torch.testing.assert_close(numbers(found["variance"]), law.variance[:, 0], rtol=0, atol=bound)


def test_processes_of_infinite_networks_and_the_usual_kernel(tab) -> None:
    found, data = eight(tab, "exactPosteriors"), (X, Y)
    variances = {"weight_var": NET["weightVar"], "bias_var": NET["biasVar"]}
    both = n2g.infinite_width(same_network(NET), **variances)
    for name, kernel in (("nngp", both.nngp), ("ntk", both.ntk)):
        agree(found[name], n2g.condition(kernel, data, n2g.Gaussian(NOISE)).marginal(NEW), 3e-4)
    flow = n2g.gradient_flow(same_network(NET), data, ridge=NOISE, **variances)
    agree(found["flow"], flow.at(math.inf, NEW), 3e-4)


def test_the_usual_kernel_is_chosen_by_its_evidence(tab) -> None:
    found = eight(tab, "exactPosteriors")["rbf"]

    def build(variance: float, lengthscale: float) -> n2g.Posterior:
        kernel = n2g.kernels.RBF(lengthscale=lengthscale, output_var=variance)
        return n2g.condition(kernel, (X, Y), n2g.Gaussian(NOISE))

    chosen = build(found["variances"], found["lengthscale"])
    agree(found, chosen.marginal(NEW), 1e-8)
    for factors in ((1.1, 1), (0.9, 1), (1, 1.1), (1, 0.9)):
        other = build(found["variances"] * factors[0], found["lengthscale"] * factors[1])
        assert other.log_marginal_likelihood() < chosen.log_marginal_likelihood() + 1e-4


def test_laplace_and_the_last_layer_around_one_network(tab) -> None:
    script = """([net, x, y, noise]) => {
        const job = { net, x: Float64Array.from(x), y, noise };
        const network = makeNetwork(net, SMALL.network, makeNormals(2 * 31 + 7));
        const before = negativeLogJoint(network, job.x, y, noise, 1)(flatten(network)).value;
        for (const _ of mostLikely(network, job, 1)) continue;
        const { value } = negativeLogJoint(network, job.x, y, noise, 1)(flatten(network));
        const copy = (parts) => parts.map((part) => Array.from(part));
        return { W: copy(network.W), b: copy(network.b), before, value };
    }"""
    trained = tab.evaluate(script, [NET, flat(X), flat(Y), NOISE])
    assert trained["value"] < trained["before"] / 3
    module = as_torch(NET, 24, trained["W"], trained["b"]).eval()
    linear = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)
    }
    prior = {
        f"{name}.weight": NET["weightVar"] / layer.in_features for name, layer in linear.items()
    }
    prior |= {f"{name}.bias": NET["biasVar"] for name in linear}
    found = eight(tab, "aroundOneNetwork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", n2g.errors.NotStationary)
        posterior = n2g.laplace(
            module, (X, Y), n2g.Gaussian(NOISE), structure=n2g.Full(), prior_var=prior
        )
    agree(found["laplace"], posterior.marginal(NEW), 1e-5)
    last = list(linear)[-1]
    own = {name: value for name, value in prior.items() if name.startswith(f"{last}.")}
    readout = n2g.linearize(module, only=f"{last}.*").kernel(prior_var=own)
    agree(found["last"], n2g.condition(readout, (X, Y), n2g.Gaussian(NOISE)).marginal(NEW), 1e-5)


def test_the_ensemble_fits_the_data_and_spreads_elsewhere(tab) -> None:
    script = """([net, x, y]) => {
        const grid = Float64Array.from([...x, -3.5]);
        const job = { net, grid, x: Float64Array.from(x), y, noise: 0.03, seed: 2 };
        const [law] = [...ensemble(job)].filter(Boolean);
        return [Array.from(law.mean), Array.from(law.variance)];
    }"""
    mean, variance = tab.evaluate(script, [NET, flat(X), flat(Y)])
    assert float((numbers(mean[:-1]) - Y[:, 0]).abs().max()) < 0.2
    assert variance[-1] > 5 * sum(variance[:-1]) / len(variance[:-1])


def test_the_chain_draws_from_a_known_law(tab) -> None:
    script = """() => {
        const potential = ([a, b]) => ({ value: (a * a - 1.2 * a * b + b * b) / 1.28,
            gradient: Float64Array.from([(2 * a - 1.2 * b) / 1.28, (2 * b - 1.2 * a) / 1.28]) });
        const kept = [], run = hamiltonian(potential, new Float64Array(2), makeNormals(1),
            { warmup: 300, draws: 6000, leaps: 8 }, (theta) => kept.push(Array.from(theta)));
        let step = run.next();
        while (!step.done) step = run.next();
        return [kept, step.value];
    }"""
    draws, accepted = tab.evaluate(script)
    covariance = numbers(draws).T.cov()
    assert 0.6 < accepted <= 1
    torch.testing.assert_close(covariance, numbers([[1, 0.6], [0.6, 1]]), rtol=0, atol=0.1)


def test_a_chain_without_data_has_the_variance_of_the_prior(tab) -> None:
    script = """([net, places]) => {
        const grid = Float64Array.from(places);
        const job = { net, grid, x: new Float64Array(0), y: [], noise: 0.1, seed: 5 };
        return Array.from([...chain(job)].filter(Boolean)[0].variance);
    }"""
    net = net_of("linear", 1)
    variance = numbers(tab.evaluate(script, [net, [-2.0, 0.0, 2.0]]))
    w, b = net["weightVar"], net["biasVar"]
    right = w * (w * numbers([4.0, 0.0, 4.0]) + b) + b
    torch.testing.assert_close(variance, right, rtol=0.5, atol=0)


def test_all_eight_appear_on_the_page(open_page) -> None:
    tab = open_page("points=-1,0.5;1,-0.5&activation=relu&depth=1")
    tab.locator("#eight").scroll_into_view_if_needed()
    until(tab, "explorer.eight.found.size === 8", seconds=60)
    names = tab.evaluate("[...explorer.eight.found.keys()].sort()")
    assert names == sorted(tab.evaluate("Object.keys(EIGHT)"))


SCREENS = [
    "mode=posterior&activation=tanh&depth=3&skip=1&norm=1&weightVar=1.5&noise=0.02",
    "mode=prior&activation=erf&depth=1&width=16",
    "mode=training&activation=gelu&steps=150&weightVar=2&biasVar=0.3",
    "mode=training&activation=bump&steps=2000&width=32",
    "mode=posterior&activation=silu&points=",
]


@pytest.mark.parametrize("fragment", SCREENS, ids=lambda text: text.split("&depth")[0])
def test_the_python_of_a_screen_computes_what_it_shows(open_page, fragment) -> None:
    tab = open_page(fragment)
    until(tab, "document.getElementById('python').textContent !== ''")
    code, mean, variance, evidence = (
        tab.evaluate("""() => [document.getElementById("python").textContent,
        Array.from(explorer.result.mean), Array.from(explorer.result.variance), explorer.result.evidence]""")
    )
    space: dict = {"__name__": "screen"}
    exec(compile(code, "screen", "exec"), space)
    law = space["law"]
    means = law.mean.flatten().expand(len(mean))
    spread = float(law.stddev.max())
    torch.testing.assert_close(means, numbers(mean), rtol=0, atol=1e-3 * spread + 1e-8)
    stddev = law.stddev.flatten()
    torch.testing.assert_close(stddev, numbers(variance).sqrt(), rtol=0, atol=2e-3 * spread)
    if "evidence" in space:
        assert math.isclose(float(space["evidence"]), evidence, rel_tol=1e-3)


def test_the_button_copies_the_code(open_page) -> None:
    tab = open_page()
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.locator("#copy").click()
    until(tab, "document.getElementById('copy').textContent !== 'Copy as Python'")
    assert tab.evaluate("document.getElementById('copy').textContent") in (
        "Copied",
        "Selected: press Ctrl+C",
    )
