"""The report: numbers are those of the posterior, words follow from the numbers, the page is complete."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import conformal, data, metrics
from net2gp.errors import InputError, Net2GPWarning, NotAvailable
from net2gp.report import UncertaintyReport, uncertainty_report
from net2gp.report.uncertainty import outcomes
from net2gp.report.uncertainty.abstaining import abstaining
from net2gp.report.uncertainty.calibration import cooled, folds
from net2gp.report.uncertainty.outcomes import Labels, answers
from net2gp.report.uncertainty.pages.words import verdict

KNOWN, HELD_OUT = slice(0, 90), slice(90, 240)
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Structure(HTMLParser):
    """Tags that are open or closed wrongly, and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.wrong, self.attributes, self.tags = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID and tag not in ("path", "rect", "circle", "line", "polyline", "polygon"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def points(n: int = 240, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(0)).to(dtype)


def numbers(x: Tensor, outputs: int = 1) -> Tensor:
    noise = torch.randn(len(x), outputs, generator=torch.Generator().manual_seed(1)).to(x)
    return (1.5 * x[:, :outputs]).sin() + 0.3 * noise


def classes(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long() + (x[:, 1] > 0.8).long()


def trained(outputs: int, x: Tensor, y: Tensor, loss, steps: int = 100) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, outputs)).to(x)
    optimizer = torch.optim.Adam(network.parameters(), 2e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network.eval()


def laplace(outputs: int, y: Tensor, likelihood, loss, data=None, **settings) -> n2g.Posterior:
    x = points()[KNOWN]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        network = trained(outputs, x, y[KNOWN], loss)
        return n2g.laplace(network, (x, y[KNOWN]) if data is None else data, likelihood, **settings)


def classifier(num_classes: int = 3, **settings) -> n2g.Posterior:
    y = classes(points())
    return laplace(num_classes, y, n2g.Categorical(), nn.functional.cross_entropy, **settings)


def regressor(outputs: int = 1, **settings) -> n2g.Posterior:
    y = numbers(points(), outputs)
    return laplace(outputs, y, n2g.Gaussian(), nn.functional.mse_loss, **settings)


def held_out(y: Tensor) -> tuple[Tensor, Tensor]:
    return points()[HELD_OUT], y[HELD_OUT]


@pytest.fixture(scope="module")
def of_classes() -> UncertaintyReport:
    others = {"far": 4 * points()[:60], "noise <b>": torch.rand(40, 3)}
    names = ["no & no", "some", "all"]
    data = held_out(classes(points()))
    return uncertainty_report(
        classifier(),
        data,
        others=others,
        columns=["a", "b", "c<"],
        classes=names,
        command="type <this>",
    )


@pytest.fixture(scope="module")
def of_numbers() -> UncertaintyReport:
    return uncertainty_report(
        regressor(2), held_out(numbers(points(), 2)), classes=["height", "weight"]
    )


def check(report: UncertaintyReport) -> None:
    """What holds for every report."""
    text = json.dumps(report.values, allow_nan=False)
    assert json.loads(text) == report.values
    structure = Structure(report.html)
    assert (structure.open, structure.wrong) == ([], [])
    for tag, name, value in structure.attributes:
        if name in ("src", "href"):
            assert value.startswith(("data:", "#")), (tag, value[:40])
    assert "url(" not in report.html
    assert "@import" not in report.html
    assert len(report.html.encode()) < 3e6
    ids = [value for _, name, value in structure.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [
        value[1:] for _, name, value in structure.attributes if name == "href" and value[0] == "#"
    ]
    assert links
    assert set(links) <= set(ids)
    roles = sum(name == "role" and value == "img" for _, name, value in structure.attributes)
    named = [v for _, name, v in structure.attributes if name == "aria-label" and len(v) > 30]
    assert len(named) >= roles >= 2
    for score in report.values["scores"].values():
        assert set(score) == {"value", "low", "high", "n"}
        assert score["n"] > 0
        if score["low"] is not None:
            assert score["low"] <= score["value"] <= score["high"]
    assert report.values["verdict"]
    assert report.values["limits"]


def test_the_scores_of_classes_are_those_of_the_prediction(of_classes):
    check(of_classes)
    x, y = held_out(classes(points()))
    law = classifier().predict(x)
    scores = of_classes.values["scores"]
    probs = law.probs.double()
    expected = {
        "accuracy": metrics.accuracy(probs, y),
        "nll": -law.log_prob(y).mean(),
        "brier": metrics.brier(probs, y),
        "ece": metrics.expected_calibration_error(probs, y),
        "confidence": probs.max(-1).values.mean(),
    }
    for name, value in expected.items():
        assert scores[name]["value"] == pytest.approx(float(value), abs=1e-5), name
        assert scores[name]["n"] == len(y)
    far = torch.distributions.Categorical(classifier().predict(4 * points()[:60]).probs).entropy()
    area = metrics.auroc(law.entropy(), far)
    assert scores["auroc_far"]["value"] == pytest.approx(float(area), abs=1e-4)
    assert {"fpr95_far", "novelty_auroc_far", "novelty_fpr95_noise <b>"} <= set(scores)


def test_the_bare_network_and_its_temperature_stand_beside_the_posterior(of_classes):
    x, y = held_out(classes(points()))
    logits = classifier().mean(x).double()
    compared = of_classes.values["compared"]
    loss = nn.functional.cross_entropy(logits, y)
    assert compared["mean alone"]["nll"]["value"] == pytest.approx(float(loss), abs=1e-5)
    place = folds(len(y))
    probs, chosen = cooled(logits.numpy(), y.numpy())
    for fold in range(5):
        rest = torch.from_numpy(place != fold)
        tried = np.geomspace(chosen[fold] / 1.1, chosen[fold] * 1.1, 3)
        losses = [float(nn.functional.cross_entropy(logits[rest] / t, y[rest])) for t in tried]
        assert losses[1] <= min(losses), "the best temperature of the other folds"
        own = (logits / chosen[fold]).softmax(-1)[~rest]
        np.testing.assert_allclose(probs[~rest.numpy()], own.numpy())
    assert compared["mean with a temperature"]["chosen"] == pytest.approx(chosen)


def test_the_scores_of_numbers_are_those_of_the_prediction(of_numbers):
    check(of_numbers)
    x, y = held_out(numbers(points(), 2))
    law = regressor(2).predict(x)
    scores, own = of_numbers.values["scores"], of_numbers.values["compared"]["posterior"]
    mean, variance = law.mean, law.variance
    assert scores["coverage90"]["value"] == pytest.approx(
        float(metrics.coverage(mean, variance, y, 0.9)), abs=1e-6
    )
    assert scores["rmse"]["value"] == pytest.approx(float(metrics.rmse(mean, y)), abs=1e-5)
    assert scores["nll"]["value"] == pytest.approx(float(-law.log_prob(y).mean()), abs=1e-4)
    width = 2 * 1.6448536 * variance.sqrt().mean()
    assert scores["width90"]["value"] == pytest.approx(float(width), rel=1e-5)
    one = metrics.coverage(mean[:, 1], variance[:, 1], y[:, 1], 0.9)
    assert scores["coverage90_weight"]["value"] == pytest.approx(float(one), abs=1e-6)
    assert len(own["outputs"]) == 2
    assert sum(own["histograms"][0]) == len(y)


def test_refusing_gives_the_risk_of_the_kept(of_classes):
    x, y = held_out(classes(points()))
    probs = classifier().predict(x).probs
    wrong = (probs.argmax(-1) != y).double()
    curve = metrics.risk_coverage(1 - probs.max(-1).values.double(), wrong)
    for percent, error, _, kept in of_classes.values["refusing"]["curve"]:
        assert kept == max(1, round(len(y) * (1 - percent / 100)))
        assert error == pytest.approx(float(curve.risk[kept - 1]), abs=1e-9)
    whole = of_classes.values["refusing"]["rows"]["0"]
    assert whole["value"] == pytest.approx(float(wrong.mean()))


def test_equally_certain_points_are_refused_in_no_order():
    y = np.repeat([0, 1], 50)  # the wrong ones come last in the data
    probs = np.tile([0.9, 0.1], (100, 1))
    found = Labels(torch.zeros(100, 1), None, np.ones((100, 1)), probs, np.full(100, 0.1), None, y)
    curve = abstaining(found)["curve"]
    assert {round(error, 9) for _, error, _, _ in curve} == {0.5}
    assert not abstaining(found)["gain"]["low"] > 0


def test_a_guarantee_is_the_one_of_conformal(of_numbers):
    x, y = held_out(numbers(points(), 2))
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(y)))
    fit, test = order[: len(y) // 2], order[len(y) // 2 :]
    promise = conformal.calibrate_intervals(regressor(2), (x[fit], y[fit]), alpha=0.1)
    found = promise.intervals(x[test])
    for d, one in enumerate(of_numbers.values["guarantee"]["outputs"]):
        assert one["width"]["value"] == pytest.approx(float(found.width[:, d].mean()), rel=1e-4)
        inside = found.contains(y[test])[:, d].double().mean()
        assert one["coverage"]["value"] == pytest.approx(float(inside), abs=1e-6)


def test_pulls_are_terms_of_the_sum_that_the_mean_is():
    x, y = points(dtype=torch.float64), numbers(points(dtype=torch.float64))
    posterior = n2g.condition(n2g.RBF(), (x[KNOWN], y[KNOWN]), n2g.Gaussian(0.09))
    found = uncertainty_report(posterior, (x[HELD_OUT], y[HELD_OUT]))
    case = found.values["cases"]["sure_and_wrong"][0]
    terms = n2g.explain.contributions(posterior, x[HELD_OUT][case["index"], None])[0, :, 0]
    top = terms.abs().topk(3).indices.tolist()
    assert [pull["index"] for pull in case["pulls"]] == top
    assert case["pulls"][0]["pull"] == pytest.approx(float(terms[top[0]]))
    share = float(terms[top[0]] / terms.abs().sum())
    assert case["pulls"][0]["share"] == pytest.approx(share)
    around = uncertainty_report(regressor(), held_out(numbers(points())))
    case = around.values["cases"]["sure_and_wrong"][0]
    model = regressor()
    one = points()[HELD_OUT][case["index"], None]
    data = points()[KNOWN], numbers(points())[KNOWN]
    residual = model.likelihood.residual(model.mean(data[0]), data[1])
    terms = (model.kernel(one, data[0]) * residual[:, 0])[0]
    assert case["pulls"][0]["pull"] == pytest.approx(
        float(terms[case["pulls"][0]["index"]]), rel=1e-3
    )
    assert case["pulls"][0]["index"] == int(terms.abs().argmax())


def test_a_label_that_was_switched_is_suspected():
    x = points(dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    wrong = int(x[KNOWN][:, 0].argmax())
    y[wrong] = 0
    posterior = n2g.condition(2.0 * n2g.RBF(), (x[KNOWN], y[KNOWN]), n2g.Bernoulli())
    found = uncertainty_report(posterior, (x[HELD_OUT], y[HELD_OUT])).values["label_errors"]
    law = n2g.explain.leave_one_out(posterior, points=torch.tensor([wrong]))
    p = float(posterior.likelihood.predict(law).probs)
    suspects = {row["index"]: row["p"] for row in found["rows"]}
    assert (wrong in suspects) == (1 - p < 0.01)
    z = numbers(x)
    z[wrong] += 6
    posterior = n2g.condition(n2g.RBF(), (x[KNOWN], z[KNOWN]), n2g.Gaussian(0.09))
    found = uncertainty_report(posterior, (x[HELD_OUT], z[HELD_OUT])).values["label_errors"]
    assert found["rows"][0]["index"] == wrong
    assert found["suspected"] == len(found["rows"])


KINDS = {
    "one class missing": lambda: (classifier(4), held_out(classes(points()))),
    "binary": lambda: (
        laplace(
            *(1, (points()[:, :1] > 0).float(), n2g.Bernoulli()),
            nn.functional.binary_cross_entropy_with_logits,
        ),
        held_out((points()[:, :1] > 0).float()),
    ),
    "heteroscedastic": lambda: (
        laplace(
            *(2, numbers(points()), n2g.likelihoods.HeteroscedasticGaussian()),
            lambda f, y: ((f[:, :1] - y) ** 2).mean(),
        ),
        held_out(numbers(points())),
    ),
    "counts": lambda: (
        laplace(
            *(1, (points()[:, :1] ** 2).round(), n2g.likelihoods.Poisson()),
            lambda f, y: (f.exp() - y * f).mean(),
        ),
        held_out((points()[:, :1] ** 2).round()),
    ),
    "process": lambda: (
        n2g.condition(n2g.RBF(), (points()[KNOWN], numbers(points())[KNOWN]), n2g.Gaussian(0.1)),
        held_out(numbers(points())[:, 0]),
    ),
    "constant target": lambda: (
        n2g.condition(n2g.RBF(), (points()[KNOWN], torch.full((90, 1), 3.0)), n2g.Gaussian(0.1)),
        held_out(torch.full((240, 1), 3.0)),
    ),
    "without training data": lambda: (
        classifier(
            data=n2g.data.Stream(
                torch.utils.data.DataLoader(
                    list(zip(points()[KNOWN], classes(points())[KNOWN], strict=True)), 30
                )
            ),
            structure=n2g.structures.Kron(),
        ),
        held_out(classes(points())),
    ),
    "ensemble": lambda: (
        n2g.bayes.ensemble(
            nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)),
            (points()[KNOWN], classes(points())[KNOWN]),
            n2g.Categorical(),
            num_members=2,
        ),
        held_out(classes(points())),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_posterior_has_a_report(kind):
    posterior, data = KINDS[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", Net2GPWarning)
        report = uncertainty_report(posterior, data, others={"far": 5 * points()[:30]})
    check(report)
    said = " ".join(line["says"] for line in report.values["verdict"])
    if kind == "one class missing":
        assert "class 3, of which there is no held-out example" in said
    if kind == "constant target":
        assert "All held-out targets are equal" in said
    if kind == "without training data":
        assert "does not hold the data" in report.values["cases"]["without_pulls"]
        assert "does not hold the data" in report.values["label_errors"]["reason"]
    if kind == "counts":
        assert report.values["drawn"]
        assert any("999 draws" in words for words in report.values["limits"])


@pytest.mark.parametrize("n", [5, 20])
def test_few_points_are_called_few(n):
    x, y = held_out(numbers(points()))
    report = uncertainty_report(regressor(), (x[:n], y[:n]))
    check(report)
    assert f"only {n} held-out points, which is few" in report.values["verdict"][0]["says"]


def test_points_are_predicted_in_batches_and_the_batch_does_not_matter(monkeypatch):
    posterior, (x, y) = classifier(), held_out(classes(points()))
    whole = answers(posterior, x, y, lambda steps=1, note="": None)
    sizes = []
    monkeypatch.setattr(outcomes, "BATCH", 40)
    parts = answers(posterior, x, y, lambda steps=1, note="": sizes.append(steps))
    assert sizes == [40, 40, 40, 30]
    np.testing.assert_allclose(parts.probs, whole.probs, atol=1e-6)
    np.testing.assert_allclose(parts.novelty, whole.novelty, atol=1e-5)


def test_images_are_pictures_and_other_inputs_are_not():
    torch.manual_seed(0)
    x, y = torch.rand(120, 8, 8), torch.arange(120) % 3
    x[y == 1, :4] += 1
    x[y == 2, 4:] += 1
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        posterior = n2g.laplace(network, (x[:60], y[:60]), n2g.Categorical(), prior_var=1.0)
    report = uncertainty_report(posterior, (x[60:], y[60:]))
    check(report)
    assert 'class="tile"' in report.html
    plain = uncertainty_report(posterior, (x[60:], y[60:]), images=False)
    assert 'class="tile"' not in plain.html


def test_without_scikit_learn_the_page_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.tree", None)
    report = uncertainty_report(regressor(), held_out(numbers(points())))
    check(report)
    assert "pip install 'net2gp[plots]'" in report.html
    assert {row["kind"] for row in report.values["slices"]["rows"]} == {"column"}


class Named(nn.Module):
    """A network with named inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(torch.cat([a, b], 1))


def test_inputs_may_be_named_and_then_have_no_columns():
    x, y = points(), (points()[:, 0] > 0).long()
    inputs = {"a": x[:, :1], "b": x[:, 1:]}
    known, rest = ({k: v[part] for k, v in inputs.items()} for part in (KNOWN, HELD_OUT))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        posterior = n2g.laplace(Named().eval(), (known, y[KNOWN]), n2g.Categorical(), prior_var=1.0)
    report = uncertainty_report(posterior, (rest, y[HELD_OUT]), others={"same": rest})
    check(report)
    assert report.values["scores"]["auroc_same"]["value"] == pytest.approx(0.5)
    assert "column" not in {row["kind"] for row in report.values["slices"]["rows"]}
    with pytest.raises(InputError, match=r"columns are for a table x of shape \(N, D\)"):
        uncertainty_report(posterior, (rest, y[HELD_OUT]), columns=["a", "b", "c"])


def test_of_many_classes_the_page_shows_the_worst():
    torch.manual_seed(0)
    x, y = torch.randn(200, 3), torch.arange(200) % 40
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        network = nn.Linear(3, 60).eval()
        posterior = n2g.laplace(network, (x[:80], y[:80]), n2g.Categorical(), prior_var=1.0)
    report = uncertainty_report(posterior, (x[80:], y[80:]))
    check(report)
    assert len(report.values["slices"]["classes"]) == 60
    assert "The other 35 classes" in report.html
    said = " ".join(line["says"] for line in report.values["verdict"])
    assert "classes 40, 41, 42 and 17 more, of which there is no held-out example" in said


def test_fingerprints_change_with_the_data_and_nothing_else(of_numbers):
    first = of_numbers.values["facts"]["hashes"]
    x, y = held_out(numbers(points(), 2))
    y = y.clone()
    y[5] += 1e-3
    second = uncertainty_report(regressor(2), (x, y)).values["facts"]["hashes"]
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {"held-out targets"}
    assert {"training inputs", "parameters of the network"} <= set(first)


def test_a_report_is_the_same_every_time_and_leaves_randomness_alone(of_numbers):
    state = torch.get_rng_state()
    again = uncertainty_report(
        regressor(2), held_out(numbers(points(), 2)), classes=["height", "weight"]
    )
    torch.manual_seed(0)  # as `regressor` does
    differing = {"seconds"}
    for name, value in of_numbers.values.items():
        if name not in differing:
            assert again.values[name] == value, name
    torch.set_rng_state(state)


def test_text_from_outside_is_escaped(of_classes):
    assert "type &lt;this&gt;" in of_classes.html
    assert "noise &lt;b&gt;" in of_classes.html
    assert "noise <b>" not in of_classes.html
    assert "no &amp; no" in of_classes.html


def changed(report: UncertaintyReport, path: str, value) -> str:
    """The verdict after one of the values was changed."""
    values = copy.deepcopy(report.values)
    place = values
    *way, last = path.split("/")
    for step in way:
        place = place[step]
    place[last] = value
    return " ".join(f"{line['tone']}: {line['says']}" for line in verdict(values))


def one(value: float, low: float, high: float, n: int = 150) -> dict:
    return {"value": value, "low": low, "high": high, "n": n}


def test_the_verdict_follows_from_the_values(of_numbers, of_classes):
    said = changed(of_numbers, "scores/coverage90", one(0.912, 0.889, 0.931, 900))
    assert (
        "good: On data like the held-out set, 90 % intervals contain 91.2\u00a0% (88.9–93.1, n"
        in said
    )
    said = changed(of_numbers, "scores/coverage90", one(0.8, 0.76, 0.84))
    assert "They are too narrow." in said
    said = changed(of_numbers, "scores/coverage90", one(0.97, 0.95, 0.99))
    assert "wider than they need to be" in said
    rows = {
        **of_classes.values["refusing"]["rows"],
        "0": one(0.1, 0.06, 0.15),
        "10": one(0.05, 0.02, 0.1),
    }
    values = {"refusing/rows": rows, "refusing/removed": one(0.55, 0.3, 0.8, 15)}
    report = UncertaintyReport("", copy.deepcopy(of_classes.values))
    report.values["refusing"]["removed"] = values["refusing/removed"]
    said = changed(report, "refusing/rows", rows)
    assert "good: Refusing the 10 % least certain halves the error" in said
    report.values["refusing"]["removed"] = one(0.2, 0.05, 0.4, 15)
    assert "Refusing points at random may do as well" in changed(report, "refusing/rows", rows)
    row = {
        "name": "age > 70",
        "kind": "tree",
        "said": 0.9,
        "is": one(0.6, 0.5, 0.7, 80),
        "p": 1e-6,
        "p_holm": 1e-5,
        "found": True,
        "too_sure": True,
    }
    said = changed(of_classes, "slices/rows", [row])
    assert "warn: Do not trust it where age > 70 (90.0\u00a0% sure, right in 60.0\u00a0%" in said
    row["found"] = False
    assert "age > 70" not in changed(of_classes, "slices/rows", [row])
    said = changed(of_classes, "scores/accuracy", one(0.7, 0.6, 0.75))
    assert "warn: On data" in said
    assert "surer than it should be" in said
    said = changed(of_classes, "known_points", 12)
    assert said.startswith("warn: 12 of the held-out points are also training points")


def test_points_of_the_training_data_are_counted():
    x, y = held_out(numbers(points()))
    x[:7] = points()[KNOWN][:7]
    report = uncertainty_report(regressor(), (x, y))
    assert report.values["known_points"] == 7


def test_limits_are_kept_or_named(of_classes):
    accuracy = of_classes.values["scores"]["accuracy"]["value"]
    loss = of_classes.values["scores"]["nll"]["value"]
    assert of_classes.failures({"accuracy": accuracy, "nll": loss, "auroc_far": 0.0}) == []
    assert len(of_classes.failures({"accuracy": accuracy + 0.01, "nll": loss - 0.01})) == 2
    (only,) = of_classes.failures({"fpr95_far": -0.1})
    assert only.startswith("fpr95_far is")
    assert "above the limit -0.1" in only
    with pytest.raises(
        InputError, match=r"no score 'acuracy'\. Did you mean accuracy\? Known: accuracy, "
    ):
        of_classes.failures({"acuracy": 0.9})
    with pytest.raises(InputError, match=r"the limit of nll must be a number"):
        of_classes.failures({"nll": "low"})


def test_the_page_and_the_numbers_are_saved_side_by_side(of_classes, tmp_path, monkeypatch):
    for name in ("report", "report.html", "report.json"):
        page, twin = of_classes.save(tmp_path / name)
        assert (page, twin) == (tmp_path / "report.html", tmp_path / "report.json")
    assert page.read_text(encoding="utf-8") == of_classes.html
    assert json.loads(twin.read_text(encoding="utf-8")) == of_classes.values
    page, _ = of_classes.save(tmp_path / "run.v1")
    assert page.name == "run.v1.html"
    with pytest.raises(InputError, match=r"the folder .*missing does not exist"):
        of_classes.save(tmp_path / "missing" / "report")

    def full(path, text, encoding):
        raise OSError(28, "No space left on device")

    before = page.read_bytes()
    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(InputError, match=r"cannot write .*No space left"):
        of_classes.save(tmp_path / "run.v1")
    assert page.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_predictions_that_overflow_are_refused():
    network = nn.Linear(2, 1)
    x = torch.randn(30, 2)
    posterior = n2g.laplace(network, (x, network(x).detach()), n2g.Gaussian(0.1), prior_var=1.0)
    x = torch.randn(20, 2)
    x[4] = 1e30
    with pytest.raises(InputError, match=r"at 1 of 20 points \(first in row 4\)"):
        uncertainty_report(posterior, (x, torch.zeros(20, 1)))


def test_bad_input_is_refused_with_what_to_type():
    posterior, (x, y) = classifier(), held_out(classes(points()))
    late = torch.cat([y[:-1], torch.tensor([3])])
    cases = [
        (
            (posterior, (points()[KNOWN], classes(points())[KNOWN])),
            {},
            r"are the data of the posterior",
        ),
        ((posterior, (x[:3], y[:3])), {}, r"at least 5 held-out points, but got 3"),
        ((posterior, (x, late)), {}, r"labels must be in 0..2 .* but y holds 3"),
        (
            (posterior, (x, y)),
            {"columns": ["a"]},
            r"columns must name the 3 columns of x, but has 1",
        ),
        ((posterior, (x, y)), {"columns": "abc"}, r"columns must be a list"),
        ((posterior, (x, y)), {"columns": ["a", "b", "a"]}, r"columns .* 'a' is there twice"),
        ((posterior, (x, y)), {"classes": ["a", "b", "b"]}, r"classes .* 'b' is there twice"),
        ((posterior, (x, y)), {"others": [x]}, r"others must be inputs by name, but is .*list"),
        ((posterior, (x, y)), {"classes": ["a", "b"]}, r"classes must name the 3 classes"),
        ((posterior, (x, y)), {"images": True}, r"images must have shape .* Pass images=False"),
        (
            (posterior, (x, y)),
            {"others": {"far": x[:, :2]}},
            r"others\['far'\] must hold points like",
        ),
        ((posterior, (x, y)), {"others": {"far": x[:0]}}, r"others\['far'\] is empty"),
        (("posterior", (x, y)), {}, r"expected a posterior, but got"),
    ]
    for arguments, settings, message in cases:
        with pytest.raises(InputError, match=message):
            uncertainty_report(*arguments, **settings)
    bad = numbers(points())[HELD_OUT].clone()
    bad[3] = float("nan")
    with pytest.raises(InputError, match=r"must be finite"):
        uncertainty_report(regressor(), (x, bad))
    two = (points()[:, :2] > 0).float()
    posterior = laplace(2, two, n2g.Bernoulli(), nn.functional.binary_cross_entropy_with_logits)
    with pytest.raises(NotAvailable, match=r"predicts 2 binary labels per point\. Report on one"):
        uncertainty_report(posterior, held_out(two))


def standardized(outputs: int) -> tuple[n2g.Posterior, data.Scaling, Tensor, Tensor]:
    """A posterior of standardized numbers, their scaling, and the numbers before."""
    x = 100 + 20 * points(dtype=torch.float64)
    y = 1000 * numbers(points(dtype=torch.float64), outputs) - 300
    scaling = data.Scaling.of(x[KNOWN].numpy(), y[KNOWN].numpy())
    z = torch.from_numpy(scaling.inputs(x.numpy()))
    targets = torch.from_numpy(scaling.targets(y.numpy()))
    posterior = n2g.condition(n2g.RBF(), (z[KNOWN], targets[KNOWN]), n2g.Gaussian(0.05))
    return posterior, scaling, x, y


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_report_with_a_scaling_is_that_of_the_rescaled_law(outputs) -> None:
    posterior, scaling, x, y = standardized(outputs)
    z = torch.from_numpy(scaling.inputs(x.numpy()))
    held_out = (z[HELD_OUT], torch.from_numpy(scaling.targets(y.numpy()))[HELD_OUT])
    plain = uncertainty_report(posterior, held_out).values
    own = uncertainty_report(posterior, held_out, scaling=scaling).values
    s = np.array(scaling.y_std)
    law = posterior.predict(z[HELD_OUT])
    mean = scaling.back(law.mean)
    scores = own["scores"]
    right = (mean - y[HELD_OUT]).square().mean().sqrt()
    assert scores["rmse"]["value"] == pytest.approx(float(right), rel=1e-9)
    shift = float(np.log(s).sum())
    assert scores["nll"]["value"] == pytest.approx(plain["scores"]["nll"]["value"] + shift)
    assert scores["coverage90"] == plain["scores"]["coverage90"]
    width = 2 * 1.6448536 * (law.variance.sqrt() * torch.from_numpy(s)).mean()
    assert scores["width90"]["value"] == pytest.approx(float(width), rel=1e-6)
    for case in own["cases"]["sure_and_wrong"]:
        n, d = case["index"], case["output"]
        assert case["is"] == pytest.approx(float(y[HELD_OUT][n, d]), rel=1e-9)
        assert case["said"] == pytest.approx(float(mean[n, d]), rel=1e-9)
        for pull in case["pulls"]:
            assert pull["y"] == pytest.approx(y[pull["index"]].squeeze().tolist(), rel=1e-9)
    evidence = float(posterior.log_marginal_likelihood()) - 90 * shift
    assert float(own["facts"]["log_evidence"].replace("−", "-")) == pytest.approx(
        evidence, rel=1e-3
    )


def test_slices_and_rows_are_in_the_units_of_the_columns() -> None:
    posterior, scaling, x, y = standardized(1)
    z = torch.from_numpy(scaling.inputs(x.numpy()))
    held_out = (z[HELD_OUT], torch.from_numpy(scaling.targets(y.numpy()))[HELD_OUT])
    made = uncertainty_report(posterior, held_out, columns=["a", "b", "c"], scaling=scaling)
    names = [row["name"] for row in made.values["slices"]["rows"] if row["kind"] == "column"]
    edges = [float(word) for name in names for word in name.split() if word[0].isdigit()]
    assert edges
    assert min(edges) > 50  # columns have mean 100 and deviation 20
    case = made.values["cases"]["sure_and_wrong"][0]["index"]
    assert all(f"<td>{v:.4g}</td>" in made.html for v in x[HELD_OUT][case].tolist())


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (data.Scaling(y_mean=[0.0, 0.0], y_std=[1.0, 1.0]), "2 numbers as y_mean, but there are 1"),
        (data.Scaling(x_mean=[0.0], x_std=[1.0]), "1 numbers as x_mean, but there are 3 columns"),
    ],
)
def test_a_scaling_of_other_data_is_refused(scaling, message) -> None:
    posterior, _, x, y = standardized(1)
    with pytest.raises(InputError, match=message):
        uncertainty_report(posterior, (x[HELD_OUT], y[HELD_OUT]), scaling=scaling)
