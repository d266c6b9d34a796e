"""The page of the lecture: one section per topic, figures inside, and an exit status that tells the truth."""

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
PAPERS = Path(__file__).parents[2] / "papers"
FOLDERS = [str(PAPERS), str(PAPERS / "lecture")]
OTHERS = ("claims", "studies", "toy", "variational", "wide_posteriors")
MODULES = (*(path.stem for path in (PAPERS / "lecture").glob("*.py")), *OTHERS)


@pytest.fixture(scope="module")
def page():
    kept = {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path[:0] = FOLDERS
    try:
        yield importlib.import_module("page")
    finally:
        for folder in FOLDERS:
            sys.path.remove(folder)
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def topic(page, holds):
    common = sys.modules["common"]

    def small(quick):
        """A line."""
        figure, (ax,) = common.panels(1)
        ax.plot([0, 1], [0, 1])
        claim = common.at_most("a number", 1.0 if holds else 3.0, 2.0)
        return common.Study("small", "A & B", "See `bayes.hmc`.", figure, (claim,), "N < 3")

    return small


@pytest.mark.parametrize("holds", [True, False])
def test_the_page_has_every_topic_and_says_whether_claims_hold(
    page, monkeypatch, tmp_path, capsys, holds
):
    monkeypatch.setattr(page, "TOPICS", [topic(page, holds)])
    assert page.main(["--out", str(tmp_path), "--quick"]) == (0 if holds else 1)
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "lecture_small.png").stat().st_size > 1000
    assert "<h2>A &amp; B</h2>" in html
    assert "<code>bayes.hmc</code>" in html
    assert "<pre>N &lt; 3</pre>" in html
    assert "page.py --only small</code>" in html
    assert f"<td>{'yes' if holds else 'NO'}</td>" in html
    assert "a number: at most 2" in capsys.readouterr().out


def test_topics_have_names_of_their_own_and_an_unknown_one_is_refused(page, capsys):
    names = [one.__name__ for one in page.TOPICS]
    assert len(set(names)) == len(names) >= 9
    with pytest.raises(SystemExit):
        page.main(["--only", "nothing"])
    assert "there is no topic ['nothing']" in capsys.readouterr().err


def test_the_names_of_topics_are_listed_and_a_chosen_one_runs(page, monkeypatch, tmp_path, capsys):
    assert page.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [one.__name__ for one in page.TOPICS]
    other = topic(page, False)
    other.__name__ = "other"
    monkeypatch.setattr(page, "TOPICS", [topic(page, True), other])
    assert page.main(["--out", str(tmp_path), "--only", "small"]) == 0
    assert page.main(["--out", str(tmp_path), "--only", "other"]) == 1
    assert capsys.readouterr().out.count("came out as stated") == 2


def test_topics_without_their_files_are_left_out(page, monkeypatch, tmp_path, capsys):
    common = sys.modules["common"]
    chosen = [topic(page, True)]
    monkeypatch.setenv("NET2GP_DATA", str(tmp_path))
    assert common.with_files(chosen, "mnist.npz") == []
    assert "small: left out, without mnist.npz" in capsys.readouterr().out
    (tmp_path / "mnist.npz").touch()
    assert common.with_files(chosen, "mnist.npz") == chosen
    monkeypatch.delenv("NET2GP_DATA")
    assert common.with_files(chosen, "mnist.npz") == []
    assert "no data folder is set" in capsys.readouterr().out


def test_measures_of_the_topics_are_what_they_say(page):
    ensembles, harder, bayes = (sys.modules[n] for n in ("ensembles", "harder_data", "priors"))
    probs = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]], dtype=torch.float64)
    found = ensembles.averages(probs, torch.tensor([0]), [1, 2])
    assert found[0][0] == pytest.approx(-(math.log(0.9) + math.log(0.1)) / 2)
    assert found[1] == pytest.approx((-math.log(0.5), 0.0))
    labels = torch.tensor([0, 0, 1])
    K = torch.tensor([[9.0, 0.5, 0.1], [0.5, 9.0, 0.3], [0.1, 0.3, 9.0]])
    assert harder.contrast(K, labels) == pytest.approx((0.5, 0.2))
    one = torch.tensor([1.0, 2.0, 3.0])
    assert bayes.correlation(one, one.exp()) == pytest.approx(1.0)
    assert bayes.correlation(one, -one) == pytest.approx(-1.0)
    assert bayes.share_near_zero(torch.tensor([1.0, 0.001, -0.5, -0.009])) == 0.5


def test_bounds_are_judged_on_both_sides(page):
    common = sys.modules["common"]
    assert common.at_least("a", 2.0, 2.0).holds
    assert not common.at_least("a", 1.9, 2.0).holds
    assert common.within("a", 1.0, 0.9, 1.1).holds
    assert not common.within("a", 1.2, 0.9, 1.1).holds
    assert not common.within("a", 0.8, 0.9, 1.1).holds
