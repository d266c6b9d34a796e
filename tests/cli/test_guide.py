"""The page on the command line: its blocks run in order, those of the shell as well."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "command_line.md"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_blocks_of_the_page_run_in_order(tmp_path, monkeypatch, run):
    for package in ("matplotlib", "sklearn", "pandas"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    commands = []
    for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            exec(text, namespace)
            continue
        for line in text.strip().split("\n"):
            name, *arguments = shlex.split(line)
            assert name == "net2gp"
            answer = run(*arguments)
            assert answer.code == 0, (line, answer.err)
            commands.append(arguments[0])
            named = [
                arguments[n + 1] for n, one in enumerate(arguments) if one in ("-o", "--figure")
            ]
            assert all((tmp_path / file).is_file() for file in named), line
    assert set(commands) >= {"fit", "predict", "report", "compare", "kernel", "explore", "info"}
