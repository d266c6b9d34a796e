"""The page in Debian's Chromium, loaded once, with every message of its console kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from explorer.browser import opened
from net2gp.explorer import write_explorer


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_explorer(tmp_path_factory.mktemp("explorer") / "explorer.html")


@pytest.fixture(scope="session")
def tab(chromium: Any, file: Path) -> Iterator[Any]:
    """A tab for numbers: tests call the functions of the page and leave its state alone."""
    page = opened(chromium, file)
    yield page
    page.context.close()


@pytest.fixture
def open_page(chromium: Any, file: Path) -> Iterator[Any]:
    """A function that opens the page in a tab of its own; afterwards nothing may be in any console."""
    tabs = []

    def start(fragment: str = "", **context: Any) -> Any:
        tabs.append(opened(chromium, file, fragment, **context))
        return tabs[-1]

    yield start
    problems = [problem for tab in tabs for problem in tab.problems]
    for page in tabs:
        page.context.close()
    assert problems == []
