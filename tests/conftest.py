"""What every test leaves as it found it."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

# oneDNN's products of bfloat16 for AMX crash in some virtual machines; torch reads this when it starts
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch


@pytest.fixture(autouse=True)
def default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless browser, one for all tests of a process, since playwright cannot start a second one."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser: pip install playwright"
    )
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no Chromium: install the package chromium of the distribution")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
