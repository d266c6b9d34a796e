"""What programs claim before a run, and how it is judged after it."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def claims():
    sys.path.insert(0, str(ROOT / "papers"))
    try:
        yield importlib.import_module("claims")
    finally:
        sys.path.remove(str(ROOT / "papers"))


STEADY = torch.tensor([0.20, 0.21, 0.19])
WILD = torch.tensor([0.2, -0.1, 0.2])


def test_better_asks_for_more_than_chance_and_no_worse_for_no_less(claims):
    for margin, better, no_worse in (
        (STEADY, True, True),
        (WILD, False, True),
        (-WILD, False, True),
        (-STEADY, False, False),
    ):
        assert claims.compared("a", margin, "better").holds == better
        assert claims.compared("a", margin, "no worse").holds == no_worse


def test_a_quick_run_asks_for_the_sign(claims):
    assert claims.compared("a", WILD, "better", quick=True).holds
    assert not claims.compared("a", -WILD, "better", quick=True).holds
    assert not claims.compared("a", -STEADY, "no worse", quick=True).holds


def test_the_limit_is_that_of_students_t(claims):
    """Two degrees of freedom: 4.30 standard errors at 95 %."""
    mean, limit = claims.margin_and_limit(STEADY)
    assert mean == pytest.approx(0.2)
    assert limit == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert claims.verdict(STEADY - mean + 0.99 * limit) == "undecided"
    assert claims.verdict(STEADY - mean + 1.01 * limit) == "better"
    assert claims.verdict(STEADY - mean - 1.01 * limit) == "worse"


def test_an_exception_must_not_hold_but_in_a_quick_run(claims):
    for margin, quick, stated in (
        (STEADY, False, False),
        (STEADY, True, True),
        (-STEADY, False, True),
    ):
        found = claims.compared("a", margin, "better", exception="a reason", quick=quick)
        assert found.as_stated == stated
        assert ("a reason" in found.verdict) == stated


def test_other_words_are_refused(claims):
    with pytest.raises(ValueError, match='a claim says "better" or "no worse", not'):
        claims.compared("a", STEADY, "fine")


def test_the_table_says_what_was_claimed_found_and_whether_it_holds(claims, tmp_path, capsys):
    text = '[claim.rmse]\nx = "better"\ny = "no worse"\n[exception.here.rmse]\ny = "why"\n'
    (tmp_path / "some.toml").write_text(text)
    margins = {("rmse", "x"): STEADY, ("rmse", "y"): -STEADY}
    program = str(tmp_path / "some.py")
    judge = lambda task: claims.judge(
        claims.claims_of(program, task, lambda *key: margins[key], quick=False)
    )
    assert judge("here")
    assert "no, an exception: why" in capsys.readouterr().out
    assert not judge("there")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["claim", "found", "holds?"]
    assert lines[2].startswith("there, rmse, beside x: better")
    assert lines[2].endswith("yes")
    assert lines[3].endswith("NO")
    assert lines[-1] == "1 of 2 came out as stated"


def load(name, monkeypatch):
    path = ROOT / name
    spec = importlib.util.spec_from_file_location(f"program_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_a_default_that_is_less_sure_than_the_network_fails_certainty(claims, monkeypatch):
    program = load("benchmarks/certainty.py", monkeypatch)
    generator = torch.Generator().manual_seed(0)
    noise = lambda: 1e-3 * torch.randn(4, 12, generator=generator)
    bare = torch.tensor([0.2, 0.02, 0.95, 0.7, 0.8, 0.1, 0.6, 0.5, 0.9, 0.9, 0.02, 0.002]) + noise()
    apart = [0.1, 0.1, 0.0, -0.2, -0.2, 0.0, 0.0, 0.0, 0.0]
    good = bare + torch.tensor([-0.02, 0.0, 0.0, *apart]) + noise()
    wide = bare + torch.tensor([0.3, 0.2, 0.0, *apart]) + noise()
    both = {"network": bare, "Kron, evidence": wide, "last layer, evidence": wide}
    for ours, holds in ((good, True), (wide, False), (bare + noise(), False)):
        found = both | {"Kron": ours, "last layer": ours}
        each = {name: values.tolist() for name, values in found.items()}
        judged = list(program.stated("digits", each, quick=False))
        assert len(judged) == 17
        assert all(claim.as_stated for claim in judged) == holds


def test_a_posterior_that_is_no_better_than_the_network_fails_resnet(claims, monkeypatch):
    program = load("papers/maddox2021/resnet.py", monkeypatch)
    generator = torch.Generator().manual_seed(0)
    f = 3 * torch.randn(400, 3, generator=generator).double()
    y = torch.distributions.Categorical(logits=f).sample()

    def row(name, sharper):
        probs = (sharper * f).softmax(-1)
        loss = float(-probs[torch.arange(400), y].log().mean())
        error = float(program.metrics.expected_calibration_error(probs, y))
        return {"method": name, "probs": probs, "NLL": loss, "ECE": error, "accuracy": 0.9}

    rest = [row("network", 3.0), row("temperature", 1.0), row("last layer", 3.0)]
    for sharper, holds in ((1.0, True), (3.0, False)):
        judged = program.stated([*rest, row("all parameters", sharper)], y, quick=False)
        assert len(judged) == 6
        assert all(claim.holds for claim in judged) == holds
