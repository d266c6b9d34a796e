"""For the docs build: files that lie beside docs/ become pages of the site, and links to them lead there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

COPIED = (
    "benchmarks/results/*.md",
    "benchmarks/results/*.png",
    "papers/README.md",
    "papers/lecture/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
"""Which files outside of docs/ are on the site, at the same place below its root."""

CODE = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the copied files to those of docs/."""
    for pattern in COPIED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Let the links of a page lead to where their targets are on the site."""
    name = page.file.src_uri
    inside = (ROOT / "docs" / name).exists()
    if not inside and not (ROOT / name).exists():
        return markdown  # made by the build, as those of the gallery: its links are right
    folder = posixpath.dirname(f"docs/{name}" if inside else name)

    def moved(match: re.Match[str]) -> str:
        target = place(folder, match[2])
        if target is None:
            return match[0]
        path, hash_mark, anchor = target.partition("#")
        relative = posixpath.relpath(path, posixpath.dirname(name) or ".")
        return f"{match[1]}{relative}{hash_mark}{anchor}{match[3]}"

    pieces = CODE.split(markdown)
    return "".join(p if p.startswith("```") else LINK.sub(moved, p) for p in pieces)


def place(folder: str, target: str) -> str | None:
    """The page of the site that a link from a folder of the repository leads to, or None as it is.

    >>> place("docs/guide", "../../examples/dual.py")
    'examples/dual.md'
    >>> place("docs", "../benchmarks/results"), place("benchmarks/results", "../../docs/guide/large.md#cost")
    ('benchmarks/results/README.md', 'guide/large.md#cost')
    >>> place("docs/guide", "laplace.md"), place("docs", "https://example.org")
    ('guide/laplace.md', None)
    """
    if re.match(r"[a-z]+:|#", target):
        return None
    path, hash_mark, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(folder, path))
    if path == "examples":
        path = "gallery.md"
    elif path.startswith("examples/"):
        path = path.removesuffix(".py") + ".md"
    elif (ROOT / path).is_dir():
        path += "/README.md"
    return path.removeprefix("docs/") + hash_mark + anchor
