"""Papers, examples, benchmarks and pages use the public names of the library, as its users do."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import net2gp
from contributing import sources
from test_docs import PAGES, blocks

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("papers", "examples", "benchmarks")
PROGRAMS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PROGRAMS}
TEXTS |= {f"CONTRIBUTING.md, {part}": "\n".join(texts) for part, texts in sources().items()}
TEXTS |= {
    str(page.relative_to(ROOT)): "\n".join(text for _, text in blocks(page)) for page in PAGES
}

ROOMS = (
    "citations",
    "conformal",
    "distributed",
    "explorer",
    "kernels",
    "linalg",
    "linear",
    "memory",
    "plots",
    "report",
    "serving",
    "tasks",
    "types",
)
"""Namespaces that are reached from net2gp without being names of its front door."""

DOORS = (
    "interop.botorch",
    "interop.exported",
    "interop.gpytorch",
    "interop.kernels",
    "interop.lightning",
    "interop.mlflow",
    "interop.shards",
    "interop.sklearn",
    "interop.torchmetrics",
)
"""Namespaces that are imported by their whole name, most of which need another library."""

INNER = {"limits": ("modules",), "serving": ("server",)}
"""Namespaces within namespaces."""


def public() -> dict[str, set[str]]:
    """The public modules, each with the names that it offers."""
    top = {name for name in net2gp.__all__ if isinstance(getattr(net2gp, name), ModuleType)}
    found = {"net2gp": {*net2gp.__all__, *ROOMS}}
    for name in (*sorted(top), *ROOMS, *DOORS):
        module = importlib.import_module(f"net2gp.{name}")
        found[module.__name__] = {*getattr(module, "__all__", ()), *INNER.get(name, ())}
        for inner in INNER.get(name, ()):
            below = importlib.import_module(f"net2gp.{name}.{inner}")
            found[below.__name__] = set(below.__all__)
    return found


PUBLIC = public()


def chain(node: ast.expr) -> list[str]:
    """The names of `a.b.c`, or nothing for an attribute of something else."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = chain(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if before and isinstance(node, ast.Attribute) else []


def private(text: str) -> Iterator[str]:
    """What a program takes from net2gp that is not public."""
    aliases: dict[str, str] = {}
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "net2gp":
                    aliases[alias.asname or "net2gp"] = "net2gp"
                    if alias.name not in PUBLIC:
                        yield f"import {alias.name}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "net2gp":
            for alias in node.names:
                if alias.name not in PUBLIC.get(str(node.module), ()):
                    yield f"from {node.module} import {alias.name}"
                inner = f"{node.module}.{alias.name}"
                if inner in PUBLIC:
                    aliases[alias.asname or alias.name] = inner
    for node in nodes:
        names = chain(node) if isinstance(node, ast.Attribute) else []
        module = aliases.get(names[0], "") if names else ""
        for name in names[1:]:
            if module in PUBLIC and name not in PUBLIC[module] and not name.startswith("__"):
                yield f"{module}.{name}"
            module = f"{module}.{name}"


@pytest.mark.parametrize("program", TEXTS)
def test_a_program_uses_public_names_only(program):
    assert sorted(set(private(TEXTS[program]))) == []


@pytest.mark.parametrize(
    "text",
    [
        "from net2gp.methods.explain.dual import dual",
        "from net2gp.training import batch_sums",
        "from net2gp import VOGN",
        "import net2gp.posteriors.condition",
        "import net2gp as n2g\nn2g.posteriors.condition",
        "import net2gp as n2g\nn2g.training.per_example.batch_sums",
        "from net2gp import limits\nlimits.graph.trace",
    ],
)
def test_what_is_not_public_is_found(text):
    assert list(private(text))


def test_public_names_are_there():
    for module, names in PUBLIC.items():
        assert [n for n in names if not hasattr(importlib.import_module(module), n)] == []
