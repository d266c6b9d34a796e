"""The examples of CONTRIBUTING.md as modules: each Python block is one file, named by its section."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"
SECTION = re.compile(r"^## Add an? ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@cache
def sources() -> dict[str, list[str]]:
    """The Python blocks of each section that says how to add something."""
    text = PAGE.read_text(encoding="utf-8")
    return {name.strip(): BLOCK.findall(body) for name, body in SECTION.findall(text)}


@cache
def example(section: str) -> ModuleType:
    """The one block of a section, run as the file that it is, once a session."""
    (source,) = sources()[section]
    # dataclasses and annotations look their module up by name
    module = ModuleType("contributing_" + section.replace(" ", "_"))
    sys.modules[module.__name__] = module
    # empty lines in front, so that a traceback names the line of the page
    line = PAGE.read_text(encoding="utf-8").split(source)[0].count("\n")
    exec(compile("\n" * line + source, str(PAGE), "exec"), vars(module))
    return module
