"""Every internal link of the built site leads to a file, and every anchor to an element of it.

    python docs/check_links.py site

Prints the links that lead nowhere; the exit status is 1 if there are any. Links to other sites are
not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

REFERENCES = {"a": "href", "link": "href", "img": "src", "script": "src"}


class Page(HTMLParser):
    """The links of a page, and the names that a link can end with."""

    def __init__(self, path: Path) -> None:
        """Read a page."""
        super().__init__()
        self.links: list[str] = []
        self.anchors = {"", "top"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element refers to and what it is called."""
        found = dict(attrs)
        self.anchors |= {found[key] or "" for key in ("id", "name") if key in found}
        if link := found.get(REFERENCES.get(tag, "")):
            self.links.append(link)


def broken(site: Path) -> list[str]:
    """What is wrong with the links of a site: one sentence for each that leads nowhere."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            name = path.relative_to(site.resolve()).as_posix()
            if not target.exists():
                found.append(f"{name}: {link} leads to no file")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {link} leads to no element of its page")
    return found


if __name__ == "__main__":
    wrong = broken(Path(sys.argv[1] if len(sys.argv) > 1 else "site"))
    print("\n".join(wrong) or "all internal links lead somewhere")
    sys.exit(bool(wrong))
