"""Reproductions run again: what programs write, what is read of it, and the page of all of them."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from dataclasses import replace
from html import unescape

import pytest

from net2gp.errors import InputError
from net2gp.report import papers as papers_module
from net2gp.report.atlas import atlas, atlas_page, recorded_atlas
from net2gp.report.papers import list_papers, papers_folder, run_paper
from net2gp.report.records import keep_record, read_records
from net2gp.report.reproductions import PaperResult
from reproductions import PAPERS, write


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "clone" / "papers")


@pytest.fixture
def findings():
    sys.path.insert(0, str(PAPERS))
    try:
        module = importlib.import_module("findings")
        before = vars(module.RECORDER).copy()
        hook = sys.excepthook
        yield module
        vars(module.RECORDER).update(before)
        sys.excepthook = hook
    finally:
        sys.path.remove(str(PAPERS))


def test_the_index_names_every_program_of_the_repository_and_says_where_numbers_are_from():
    entries = list_papers()
    assert all(entry.program.is_file() and entry.title and entry.source for entry in entries)
    programs = {entry.program for entry in entries}
    pages = {entry.program.parent for entry in entries if entry.program.name == "page.py"}
    for path in PAPERS.glob("*/*.py"):
        text = path.read_text(encoding="utf-8")
        own = 'if __name__ == "__main__"' in text and path.parent not in pages
        if own:
            assert path in programs, path


def test_every_program_reads_its_options_through_the_recorder():
    for entry in list_papers():
        text = entry.program.read_text(encoding="utf-8")
        assert "parse_args(" not in text, entry.name
        assert "findings.parse(" in text or "PAGE.main(" in text or "run_studies(" in text, (
            entry.name
        )


def test_rows_come_back_as_they_were_written_and_the_recorder_knows_their_bounds(folder):
    result = run_paper("wrong", folder=folder)
    rows = {row.name: row for row in result.rows}
    assert [row.verdict for row in result.rows] == [
        "NO", "yes", "not judged", "yes", "excepted", "NO"
    ]  # fmt: skip
    assert rows["a number"].difference == pytest.approx(0.5)
    assert rows["a number"].cells() == ("2", "2.5", "+0.5", "0.1", "NO")
    assert rows["a bound"].cells()[0] == "≤ 1"
    assert rows["no number"].ours == "nan"
    assert rows["no number"].difference is None
    assert (result.agrees, result.outcome) == (
        False, "3 of 5 as expected, of which 1 excepted"
    )  # fmt: skip
    text = str(result)
    assert "half a unit too much" in text
    assert "no, an exception: known" in text


def test_a_quick_run_passes_quick_and_a_full_run_does_not(folder):
    quick, full = (run_paper("good", quick=flag, folder=folder) for flag in (True, False))
    assert (quick.rows[0].ours, full.rows[0].ours) == (3, 100)
    assert quick.command == "python papers/good.py --quick"
    assert full.command == "python papers/good.py"
    assert quick.agrees
    assert quick.rows[0].topic == "sums"
    assert quick.left_out == ("the rest, which takes days",)
    assert "Not computed: the rest, which takes days" in str(quick)


def test_a_program_that_stops_is_a_result_with_its_reason(folder, tmp_path):
    crashed = run_paper("crash", folder=folder, out=tmp_path / "out")
    assert not crashed.agrees
    assert crashed.outcome == "stopped, after 1 of 1 as expected: OSError: no such digits"
    assert "Traceback" in (tmp_path / "out" / "crash.log").read_text(encoding="utf-8")
    silent = run_paper("silent", folder=folder)
    assert silent.outcome == "failed: exit status 9: killed"


def test_an_unknown_name_or_folder_says_what_there_is(folder, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"no reproduction 'bad'\. There are: good, wrong, crash"):
        run_paper("bad", folder=folder)
    with pytest.raises(InputError, match=r"no papers\.toml in it\. Pass the folder `papers`"):
        list_papers(tmp_path)
    monkeypatch.setattr(
        papers_module.net2gp, "__file__", str(tmp_path / "site" / "n" / "__init__.py")
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="not of the installed package"):
        papers_folder()
    monkeypatch.chdir(folder)
    assert papers_folder() == folder


def shown(page: str) -> list[str]:
    return [unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page)]


def test_the_atlas_has_every_number_that_was_found_and_says_what_did_not_run(folder, tmp_path):
    target = tmp_path / "atlas.html"
    results = atlas(target, names=["good", "wrong"], folder=folder)
    page = target.read_text(encoding="utf-8")
    cells = shown(page)
    for result in results:
        for row in result.rows:
            assert all(cell in cells for cell in row.cells())
        assert result.date in cells
        assert f"<code>{result.command}</code>, revision {result.revision}" in page
    assert cells.count("not run") == 2
    assert "2 of 4 reproductions ran; 2 did not." in page
    assert "Numbers and claims: 4 of 6 as expected, of which 1 excepted." in page
    assert "A quick run: Three of them." in page
    assert "Not computed: the rest, which takes days." in page
    assert "On good &amp; &lt;b&gt;" in page
    assert "counts as better by its mean alone" in page
    assert "note" in cells
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", page)
    assert "<script" not in page


def test_an_interrupted_atlas_keeps_what_has_run(folder, tmp_path, monkeypatch):
    module = importlib.import_module("net2gp.report.atlas")

    def stopping(name, **options):
        if name == "wrong":
            raise KeyboardInterrupt
        return run_paper(name, **options)

    monkeypatch.setattr(module, "run_paper", stopping)
    with pytest.raises(KeyboardInterrupt):
        atlas(tmp_path / "atlas.html", folder=folder)
    assert "1 of 4 reproductions ran" in (tmp_path / "atlas.html").read_text(encoding="utf-8")
    assert list(tmp_path.glob("*.part")) == []


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(folder, tmp_path):
    with pytest.raises(InputError, match="cannot write"):
        atlas(tmp_path / "none" / "atlas.html", folder=folder)


def test_a_full_disk_leaves_nothing_of_a_page(folder, tmp_path, monkeypatch):
    def full(path, text, encoding):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(InputError, match="cannot write"):
        recorded_atlas(tmp_path / "atlas.html", folder=folder)
    assert list(tmp_path.glob("atlas*")) == []


def test_without_results_the_page_quotes_no_number(folder):
    page = atlas_page(list_papers(folder), [])
    assert "0 of 4 reproductions ran; 4 did not." in page
    assert page.count("<section>") == 1


def test_a_record_comes_back_as_it_was_and_a_later_run_of_the_same_command_takes_its_place(folder):
    first, full = (run_paper("good", quick=quick, folder=folder) for quick in (True, False))
    more = run_paper("good", options=("--count", "5"), folder=folder)
    for result in (full, more, first):
        path = keep_record(result, folder)
    assert read_records(folder) == (first, more, full)
    again = run_paper("good", folder=folder)
    keep_record(again, folder)
    assert read_records(folder) == (again, more, full)
    assert more.kind == "quick, --count 5"
    assert more.rows[0].ours == 5
    assert path == folder / "results" / "good.json"
    assert [one.name for one in path.parent.iterdir()] == ["good.json"]


def test_what_a_program_printed_is_kept_without_where_files_lie(folder):
    body = "print(options.out, __file__, sys.prefix, 'error \\u2264 1')\n"
    (folder / "good.py").write_text(
        (folder / "good.py").read_text(encoding="utf-8") + body, encoding="utf-8"
    )
    printed = run_paper("good", folder=folder).printed
    assert str(folder.parent) not in printed
    assert sys.prefix not in printed
    last = printed.splitlines()[-1]
    assert (last.split()[0], last[-9:]) == ("figures", "error ≤ 1")


def test_programs_that_did_not_end_are_not_recorded_and_wrong_ones_are(folder):
    for name in ("crash", "silent"):
        with pytest.raises(InputError, match=f"{name} did not end .* nothing is recorded"):
            keep_record(run_paper(name, folder=folder), folder)
    keep_record(run_paper("wrong", folder=folder), folder)
    (wrong,) = read_records(folder)
    assert not wrong.agrees
    assert "NO" in shown(atlas_page(list_papers(folder), [wrong]))


def test_a_program_that_was_killed_after_its_last_row_has_not_ended(folder):
    text = (folder / "good.py").read_text(encoding="utf-8") + "import os; os._exit(9)\n"
    (folder / "good.py").write_text(text, encoding="utf-8")
    result = run_paper("good", folder=folder)
    assert not result.ended
    assert result.outcome == "exit status 9, after 1 of 1 as expected"


def test_records_of_unknown_reproductions_are_refused(folder):
    keep_record(run_paper("good", folder=folder), folder)
    (folder / "results" / "good.json").rename(folder / "results" / "gone.json")
    with pytest.raises(InputError, match=r"records of gone, which papers\.toml does not name"):
        read_records(folder)


def test_parts_of_a_reproduction_are_one_line_of_the_summary(folder):
    result = run_paper("good", quick=False, folder=folder)
    parts = [replace(result, options=("--only", one), seconds=2.0) for one in ("a", "b")]
    cells = shown(atlas_page(list_papers(folder), parts))
    at = cells.index("full, in parts")
    assert cells[at + 1] == "2 of 2 as expected"
    assert cells[at + 3] == "4"


def test_options_that_are_given_win_over_those_of_a_quick_run(findings):
    def parsed(*arguments):
        parser = argparse.ArgumentParser()
        parser.add_argument("--count", type=int, default=100)
        parser.add_argument("--size", type=int, default=7)
        return findings.parse(parser, list(arguments), quick={"count": 3})

    assert parsed().count == 100
    assert (parsed("--quick").count, parsed("--quick").size) == (3, 7)
    assert parsed("--quick", "--count", "5").count == 5


def test_tables_and_claims_write_what_they_print(findings, tmp_path, capsys):
    studies, claims = (importlib.import_module(name) for name in ("studies", "claims"))
    findings.parse(argparse.ArgumentParser(), ["--json", str(tmp_path / "found.json")])
    rows = [studies.Row("a", 1.0, 1.05, 0.1, "±  0.01"), studies.Row("b", 1, 3, 0, at_most=True)]
    assert not studies.print_table(rows)
    excused = claims.Claim("c", "-1", False, "known")
    assert claims.judge([claims.at_most("d", 1, 2), excused])
    written = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["rows"]
    assert [row["holds"] for row in written] == [True, False, True, True]
    assert [row["bound"] for row in written] == ["within", "at most", "claim", "exception"]
    assert (written[0]["ours"], written[0]["note"]) == (1.05, "± 0.01")
    assert "known" in written[3]["note"]
    assert "found" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reproduction_of_the_repository_runs_again():
    result = run_paper("schoenholz2017")
    assert isinstance(result, PaperResult)
    assert result.agrees
    assert len(result.rows) == 18
