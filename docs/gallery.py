"""For the docs build: runs the examples, makes a page of each, and says on the API page which use what."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "gallery"
"""What examples printed and drew, by a hash of their code and of the library."""

PLACE = "<!-- gallery -->"
DOCUMENTED = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """An example, what it printed, and where its figures are."""

    name: str
    code: str
    printed: str
    figures: tuple[Path, ...]

    @property
    def text(self) -> str:
        """The docstring."""
        return ast.get_docstring(ast.parse(self.code)) or ""

    @property
    def title(self) -> str:
        """The first line of the docstring."""
        return self.text.splitlines()[0].rstrip(".")


def on_files(files: Files, config: Any) -> Files:
    """Add a page, the code and the figures of each example."""
    for example in examples():
        made = {
            f"examples/{example.name}.md": page(example),
            f"examples/{example.name}.py": example.code,
            **{f"examples/{path.name}": path.read_bytes() for path in example.figures},
        }
        for name, content in made.items():
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Put the pictures on the page of the gallery, and links to examples on that of the API."""
    if page.file.src_uri == "gallery.md":
        return markdown.replace(PLACE, cards())
    if page.file.src_uri == "api.md":
        return DOCUMENTED.sub(linked, markdown)
    return markdown


@cache
def examples() -> list[Example]:
    """All examples, run if their code or the library changed since they last were."""
    paths = sorted((ROOT / "examples").glob("*.py"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(run, paths))


@cache
def library() -> bytes:
    """A hash of the source of the library."""
    files = sorted((ROOT / "src").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).digest()


def run(path: Path) -> Example:
    """Run an example as a user would, with the data that every checkout has."""
    code = path.read_text(encoding="utf-8")
    folder = KEPT / hashlib.sha256(library() + code.encode()).hexdigest()[:16]
    printed = folder / "printed.txt"
    if not printed.exists():
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "MPLBACKEND": "Agg",
            "OMP_NUM_THREADS": "1",
            "PYTHONIOENCODING": "utf-8",
            "PYTHONPATH": str(ROOT / "src"),
        }
        environment.pop("NET2GP_DATA", None)
        done = subprocess.run(
            [sys.executable, str(path), "--out", "."],
            cwd=folder,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        if done.returncode:
            raise PluginError(f"{path.name} ended with an error:\n{done.stderr}")
        printed.write_text(done.stdout, encoding="utf-8")
    lines = printed.read_text(encoding="utf-8").splitlines()
    drawn = tuple(folder / line.split()[-1] for line in lines if line.startswith("wrote "))
    said = "\n".join(line for line in lines if not line.startswith("wrote "))
    return Example(path.stem, code, said, drawn)


def page(example: Example) -> str:
    """The page of an example: what one learns, the figures, what it prints, the code."""
    pictures = "\n\n".join(f"![{example.title}]({path.name})" for path in example.figures)
    text = example.text.split("\n", 1)[1].strip()
    return (
        f"# {example.title}\n\n{text}\n\n{pictures}\n\n"
        f"It prints:\n\n```text\n{example.printed}\n```\n\n"
        f"## The code\n\n[Download {example.name}.py]({example.name}.py), or run it from a checkout: "
        f"`python examples/{example.name}.py`.\n\n```{{.python}}\n{example.code}```\n"
    )


def cards() -> str:
    """A picture with a title for each example."""
    found = []
    for example in examples():
        picture = f'<img src="examples/{example.figures[0].name}" alt="" loading="lazy">'
        title = f"<span>{escape(example.title)}</span>"
        found.append(f'<a href="examples/{example.name}.html">{picture}{title}</a>')
    return '<div class="gallery">\n' + "\n".join(found) + "\n</div>"


def linked(match: re.Match[str]) -> str:
    """A documented name, followed by the examples that use it."""
    using = users().get(id(resolve(match[1])), [])
    if not using:
        return match[0]
    links = [f"[{example.title.split(':')[0]}](examples/{example.name}.md)" for example in using]
    name = match[1].rsplit(".", 1)[-1]
    return f"{match[0]}\n**Examples that use `{name}`:** {' · '.join(links)}\n"


@cache
def users() -> dict[int, list[Example]]:
    """By the id of a public object, the examples that use it."""
    found = defaultdict(list)
    for example in examples():
        for one in {id(resolve(path)) for path in names(example.code)}:
            found[one].append(example)
    return found


def names(code: str) -> Iterator[str]:
    """The dotted names of net2gp that a program uses.

    >>> sorted(names("import net2gp as n2g\\nfrom net2gp.metrics import nll\\nn2g.links.Probit()"))
    ['net2gp.links', 'net2gp.links.Probit', 'net2gp.metrics.nll']
    """
    tree = ast.parse(code)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    aliases = {name: path for name, path in aliases.items() if path.startswith("net2gp")}
    yield from (path for path in aliases.values() if path != "net2gp")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in aliases:
                yield ".".join([aliases[first], *rest])


def resolve(path: str) -> Any:
    """The object of a dotted name, or None if the last part is an attribute of something else."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except ModuleNotFoundError:
        return None
