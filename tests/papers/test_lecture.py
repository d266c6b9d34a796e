"""The page of the lecture: one section per topic, figures inside, and an exit status that tells the truth."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
FOLDERS = [str(Path(__file__).parents[2] / "papers" / part) for part in ("", "lecture")]
MODULES = (
    "page",
    "common",
    "minima",
    "capacity",
    "features",
    "double_descent",
    "claims",
    "studies",
)


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
        figure, (ax,) = common.panels(1)
        ax.plot([0, 1], [0, 1])
        claim = common.at_most("a number", 1.0 if holds else 3.0, 2.0)
        return common.Study("small", "A & B", "See `bayes.hmc`.", figure, (claim,))

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
    assert f"<td>{'yes' if holds else 'NO'}</td>" in html
    assert "a number: at most 2" in capsys.readouterr().out


def test_topics_have_names_of_their_own_and_an_unknown_one_is_refused(page, capsys):
    names = [one.__name__ for one in page.TOPICS]
    assert len(set(names)) == len(names) >= 9
    with pytest.raises(SystemExit):
        page.main(["--only", "nothing"])
    assert "there is no topic ['nothing']" in capsys.readouterr().err


def test_bounds_are_judged_on_both_sides(page):
    common = sys.modules["common"]
    assert common.at_least("a", 2.0, 2.0).holds
    assert not common.at_least("a", 1.9, 2.0).holds
    assert common.within("a", 1.0, 0.9, 1.1).holds
    assert not common.within("a", 1.2, 0.9, 1.1).holds
    assert not common.within("a", 0.8, 0.9, 1.1).holds
