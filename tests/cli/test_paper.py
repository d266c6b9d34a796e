"""The command `net2gp paper`: what it prints, keeps and refuses, and what is left when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.conftest import heard
from net2gp.report.records import read_records
from reproductions import PROGRAM, write


@pytest.fixture
def papers(tmp_path):
    return write(tmp_path / "clone" / "papers")


def add(papers: Path, name: str, body: str) -> None:
    """Put a program with this body into a folder of reproductions."""
    here = str(Path(__file__).resolve().parents[2] / "papers")
    (papers / f"{name}.py").write_text(PROGRAM.format(papers=here, body=body), encoding="utf-8")
    with (papers / "papers.toml").open("a", encoding="utf-8") as index:
        index.write(f'[{name}]\nprogram = "{name}.py"\ntitle = "On {name}"\n')
        index.write('source = "A book."\nquick = "Nothing."\nfull = "one second."\n')


def test_a_table_is_printed_and_the_exit_code_says_whether_all_is_as_expected(papers, run):
    good = run("paper", "good", "--papers", papers)
    assert good.code == 0
    assert "1 of 1 as expected" in good.out
    wrong = run("paper", "wrong", "--papers", papers, "--json")
    assert wrong.code == 1
    (found,) = json.loads(wrong.out)["papers"]
    assert found["rows"][0]["difference"] == 0.5
    assert found["agrees"] is False


def test_quick_is_the_default_and_options_behind_two_dashes_are_the_programs_own(papers, run):
    def count(*arguments):
        (found,) = json.loads(run("paper", "good", "--papers", papers, "--json", *arguments).out)[
            "papers"
        ]
        return found["rows"][0]["ours"], found["command"]

    assert count() == count("--quick") == (3, "python papers/good.py --quick")
    assert count("--full") == (100, "python papers/good.py")
    assert count("--full", "--", "--count", "7") == (7, "python papers/good.py --count 7")


def test_all_of_them_make_a_page_and_one_that_stops_does_not_stop_the_others(papers, run, tmp_path):
    page = tmp_path / "page.html"
    every = run("paper", "--all", "--papers", papers, "--out", page, "--record")
    assert every.code == 1
    assert "crash (quick): stopped, after 1 of 1" in every.out
    assert "silent (quick): failed: exit status 9" in every.out
    assert "4 of 4 reproductions ran" in page.read_text(encoding="utf-8")
    assert [one.paper.name for one in read_records(papers)] == ["good", "wrong"]
    again = run("paper", "--all", "--recorded", "--papers", papers, "--out", page)
    assert again.code == 1
    assert "2 of 4 reproductions ran; 2 did not." in page.read_text(encoding="utf-8")


def test_a_result_is_recorded_and_one_that_stopped_is_not(papers, run):
    answer = run("paper", "good", "--papers", papers, "--record")
    assert answer.code == 0
    assert "recorded in" in answer.err
    stopped = run("paper", "crash", "--papers", papers, "--record")
    assert stopped.code == 1
    assert "OSError: no such digits" in stopped.out
    assert [one.paper.name for one in read_records(papers)] == ["good"]


def test_without_a_name_they_are_listed(papers, run):
    listed = run("paper", "--papers", papers)
    assert listed.code == 0
    assert "good    On good" in listed.out
    found = json.loads(run("paper", "--papers", papers, "--json").out)["papers"]
    assert [one["name"] for one in found] == ["good", "wrong", "crash", "silent"]


def test_bad_usage_is_refused_in_a_sentence(papers, run, tmp_path):
    at = "--papers", papers
    run("paper", "nothing", *at).refused("there is no reproduction 'nothing'. There are: good")
    run("paper", "good", "--all", *at).refused("pass a name or --all", code=2)
    run("paper", "good", "--recorded", *at).refused("--all --recorded", code=2)
    run("paper", "--all", "--recorded", "--record", *at).refused("--all --recorded", code=2)
    run("paper", "--record", *at).refused("say which reproduction", code=2)
    run("paper", "good", "--papers", tmp_path).refused("no papers.toml in it")
    (tmp_path / "file").write_text("")
    run("paper", "good", "--out", tmp_path / "file", *at).refused("cannot make the folder")
    run("paper", "--all", "--out", tmp_path / "none" / "a.html", *at).refused("cannot write")


def test_an_option_that_the_program_does_not_know_is_its_failure(papers, run):
    answer = run("paper", "good", "--papers", papers, "--", "--nonsense")
    assert answer.code == 1
    assert "unrecognized arguments: --nonsense" in answer.out


def test_without_its_data_a_reproduction_says_what_to_set(papers, run, monkeypatch):
    monkeypatch.delenv("NET2GP_DATA", raising=False)
    add(papers, "digits", "from net2gp import data\ndata.mnist('train')\n")
    answer = run("paper", "digits", "--papers", papers)
    assert answer.code == 1
    assert "failed: InputError: no data folder is set. Set the environment variable" in answer.out
    assert "Traceback" not in answer.out + answer.err


def ended(process: int, seconds: float = 5.0) -> bool:
    """Whether a process is gone, or soon is; a killed one stays until init has noticed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_ends_the_program_too_and_records_nothing(papers):
    body = "import os, time\nopen({!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    note = papers / "pid"
    add(papers, "slow", body.format(str(note)))
    command = [sys.executable, "-m", "net2gp", "paper", "slow", "--papers", str(papers), "--record"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heard,
    )
    for _ in range(600):
        if note.is_file() and note.read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err
    assert ended(int(note.read_text()))
    assert not (papers / "results").exists()
