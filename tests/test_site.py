"""The site: links between its pages, what its tables quote, and the pages that its build makes."""

import os
import re
import subprocess
import sys
from functools import cache
from html import escape
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from net2gp.report import Table, list_papers, read_records

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PROGRAM = re.compile(r"papers/\w+/\w+\.py")
NUMBER = re.compile(r"(?<![\w.\-–−])[-−]?\d*\.?\d+(?![\w.]*\d)")


def program(path: str) -> ModuleType:
    """A file outside of the packages as a module."""
    name = Path(path).stem
    spec = spec_from_file_location(f"site_{name}", ROOT / path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_link_checker_finds_missing_files_and_missing_anchors(tmp_path):
    (tmp_path / "guide").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="guide/a.html#here">x</a><a href="guide/">y</a><a href="#top">z</a>'
        '<a href="https://example.org/none">w</a><img src="no.png">'
    )
    (tmp_path / "guide" / "index.html").write_text('<a href="../index.html">x</a>')
    (tmp_path / "guide" / "a.html").write_text(
        '<h2 id="here">x</h2><a href="b.html">y</a><a href="../index.html#gone">z</a>'
    )
    assert program("docs/check_links.py").broken(tmp_path) == [
        "guide/a.html: b.html leads to no file",
        "guide/a.html: ../index.html#gone leads to no element of its page",
        "index.html: no.png leads to no file",
    ]


def test_links_out_of_the_docs_lead_to_pages_of_the_site():
    pytest.importorskip("mkdocs")
    place = program("docs/outside.py").place
    assert place("docs/guide", "../../examples/dual.py") == "examples/dual.md"
    assert place("docs", "../examples") == "gallery.md"
    assert place("docs", "../benchmarks/results") == "benchmarks/results/README.md"
    assert place("benchmarks/results", "../../docs/guide/large.md#x") == "guide/large.md#x"
    assert place("docs/guide", "laplace.md#top") == "guide/laplace.md#top"
    assert place("docs", "https://example.org/a.md") is None
    assert place("docs", "#here") is None


def test_the_gallery_knows_which_names_an_example_uses():
    pytest.importorskip("mkdocs")
    gallery = program("docs/gallery.py")
    code = (
        "import net2gp as n2g\nimport torch\nfrom net2gp.metrics import nll as score\n"
        "torch.zeros(1)\nposterior = n2g.laplace(a, b, n2g.Gaussian())\nn2g.links.Probit()\n"
    )
    assert set(gallery.names(code)) == {
        "net2gp.metrics.nll",
        "net2gp.laplace",
        "net2gp.Gaussian",
        "net2gp.links",
        "net2gp.links.Probit",
    }
    import net2gp

    assert gallery.resolve("net2gp.laplace") is net2gp.laplace
    assert gallery.resolve("net2gp.nothing.at.all") is None


def tables_with_sources(text: str) -> list[tuple[str, str]]:
    """The sections of a page that quote result files: their tables, and the text of these files."""
    found = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        files = set(re.findall(r"benchmarks/results/(\w+)\.md", section))
        table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
        if files and table:
            source = "\n".join((RESULTS / f"{name}.md").read_text("utf-8") for name in files)
            found.append((table, source))
    return found


def values(text: str) -> list[tuple[float, int]]:
    """Each number with a decimal point, and how many places it has behind it."""
    pieces = NUMBER.findall(text.replace("−", "-"))
    return [(float(p), len(p.split(".")[1])) for p in pieces if "." in p]


def test_the_numbers_of_the_chooser_are_those_of_the_benchmarks():
    sections = tables_with_sources((ROOT / "docs" / "choose.md").read_text("utf-8"))
    assert len(sections) >= 3
    quoted = 0
    for table, source in sections:
        measured = values(source)
        without_links = re.sub(r"\]\([^)]*\)", "]", table)
        for value, places in values(without_links):
            near = 0.5 * 10.0**-places + 1e-9
            assert any(abs(value - m) <= near for m, p in measured if p >= places), value
            quoted += 1
    assert quoted > 100


def test_a_number_that_no_benchmark_has_would_be_noticed():
    [(table, source)] = tables_with_sources("## A\n| 0.123 | [s](benchmarks/results/uci.md) |\n")
    assert not any(abs(0.123 - m) <= 5e-4 for m, p in values(source) if p >= 3)
    assert values(table) == [(0.123, 3)]


def test_the_page_of_benchmarks_leads_to_every_result():
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    missing = [p.name for p in RESULTS.glob("*.md") if f"benchmarks/results/{p.name}" not in text]
    assert missing == []


def test_every_reproduction_has_a_recorded_run():
    assert {run.paper.name for run in read_records()} == {paper.name for paper in list_papers()}


@cache
def recorded_numbers(programs: frozenset[str]) -> list[tuple[float, int]]:
    """All numbers with a decimal point that the recorded runs of these programs found or printed."""
    runs = [
        run for run in read_records() if run.paper.program.relative_to(ROOT).as_posix() in programs
    ]
    found = "\n".join(run.printed for run in runs)
    return values(found) + [
        (row.ours, 9) for run in runs for row in run.rows if isinstance(row.ours, float)
    ]


def test_the_atlas_has_every_number_of_every_record_and_where_it_is_from():
    hook = program("docs/atlas.py")
    text = hook.sections(list_papers(), read_records())
    for run in read_records():
        assert f"`{run.command}`, revision {run.revision}, {run.date} UTC" in text
        assert run.paper.source in text
        for row in run.rows:
            assert all(f"<td>{escape(cell)}</td>" in text for cell in (row.title, *row.cells()[:2]))
    for paper in list_papers():
        assert f"\n## {paper.name}\n" in text
        assert f"](atlas.md#{paper.name})" in hook.summary(list_papers(), [], "atlas.md")
    assert text.count("<table>") == len(read_records())


def test_no_character_of_a_name_is_markup_in_the_atlas():
    table = Table(("", "ours"), (("a < b | *c*", "1"),))
    html = program("docs/atlas.py").html(table)
    assert "<td>a &lt; b | *c*</td>" in html
    assert "\n\n" not in html


def page_of(program: str) -> str:
    """The program of a reproduction that runs this one: that of a folder with a page runs all of them."""
    page = Path(program).parent / "page.py"
    named = {paper.program.relative_to(ROOT).as_posix() for paper in list_papers()}
    return program if program in named else page.as_posix()


def quoted(text: str) -> list[tuple[set[str], str]]:
    """Where a page names programs of reproductions: they, and the text from there to the next heading."""
    found = []
    for section in re.split(r"^##+ ", text, flags=re.MULTILINE):
        plain = re.sub(r"^```.*?^```", "", section, flags=re.MULTILINE | re.DOTALL)
        paragraphs = plain.split("\n\n")
        named = [PROGRAM.findall(paragraph) for paragraph in paragraphs]
        if any(named):
            first = next(at for at, names in enumerate(named) if names)
            programs = {page_of(name) for names in named for name in names}
            found.append((programs, "\n\n".join(paragraphs[first:])))
    return found


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.stem)
def test_what_a_page_quotes_of_a_reproduction_is_in_a_record(page):
    for programs, text in quoted(page.read_text("utf-8")):
        measured = recorded_numbers(frozenset(programs))
        for value, places in values(re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)):
            near = 0.5 * 10.0**-places + 1e-9
            assert any(abs(abs(value) - abs(m)) <= near for m, p in measured if p >= places), value


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_cell_of_the_comparison_with_other_libraries_has_its_source(page):
    text = (ROOT / page).read_text("utf-8")
    start = text.index("| | net2gp | neural-tangents |")
    rows = text[start:].split("\n\n")[0].splitlines()[2:]
    cells = [cell for row in rows for cell in row.strip("|").split(" | ")[1:]]
    assert len(cells) >= 16
    assert [cell for cell in cells if not re.search(r"\]\(.+\)", cell)] == []


def test_the_menu_leads_to_pages():
    import yaml

    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    menu = yaml.safe_load(text)["nav"]

    def pages(entries):
        for entry in entries:
            for target in entry.values():
                yield from pages(target) if isinstance(target, list) else [target]

    found = list(pages(menu))
    assert len(found) == len(set(found)) > 60
    copied = {"CONTRIBUTING.md", "CHANGELOG.md"}
    missing = [p for p in found if p not in copied and not (ROOT / "docs" / p).exists()]
    assert missing == []


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_without_broken_links(tmp_path):
    pytest.importorskip("mkdocs")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    build = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, *build], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert program("docs/check_links.py").broken(tmp_path / "site") == []
    api = (tmp_path / "site" / "api.html").read_text("utf-8")
    assert re.search(r"Examples that use <code>laplace</code>:</strong> <a", api)
    assert len(list((tmp_path / "site" / "examples").glob("*.png"))) >= 22
    atlas = (tmp_path / "site" / "atlas.html").read_text("utf-8")
    assert atlas.count("What the program printed") == len(read_records())
