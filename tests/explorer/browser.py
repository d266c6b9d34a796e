"""A tab with the page, and how to wait for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def opened(browser: Any, file: Path, fragment: str = "", **context: Any) -> Any:
    """A tab with the page; `tab.problems` collects what its console says and what it asks of the network."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **context})
    tab = context.new_page()
    tab.set_default_timeout(20_000)
    tab.problems = []
    tab.on("console", lambda message: tab.problems.append(message.text))
    tab.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.on("request", lambda request: note_request(tab, request.url))
    tab.goto(f"{file.as_uri()}#{fragment}")
    until(tab, "explorer.times !== null")
    return tab


def until(tab: Any, condition: str, seconds: float = 20) -> None:
    """Wait for a condition; Playwright's own way evaluates strings in the page, which the page forbids."""
    end = time.monotonic() + seconds
    while not tab.evaluate(condition):
        assert time.monotonic() < end, f"{condition} did not come true within {seconds} s"
        time.sleep(0.02)


def note_request(tab: Any, url: str) -> None:
    if not url.startswith(("file:", "data:", "blob:")):
        tab.problems.append(f"asked for {url}")
