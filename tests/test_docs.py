"""README and docs: every Python block runs, every relative link leads somewhere."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import net2gp

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ROOT / "docs" / "guide" / "command_line.md"
"""Its Python works on files that its commands wrote: tests/cli/test_guide.py runs both."""

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


NAMESPACES = ("structures", "links", "solvers", "tuning", "training", "explain", "tasks")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the number of the line it starts after."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(1)), m.group(1)) for m in BLOCK.finditer(text)]


def links(page: Path) -> list[str]:
    """The targets of a page's links to other files, without those of code blocks."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = [a or b for a, b in LINK.findall(text)]
    return [t for t in targets if not re.match(r"[a-z]+:|#", t)]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p) and p != COMMANDS], ids=name)
def test_the_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict = {"__name__": "__main__"}
    for line, source in blocks(page):
        # empty lines in front, so that a traceback names the line of the page
        exec(compile("\n" * line + source, str(page), "exec"), namespace)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/results/README.md"], ids=name
)
def test_relative_links_lead_to_files(page):
    missing = [t for t in links(page) if not (page.parent / t.split("#")[0]).exists()]
    assert not missing, f"{name(page)} links to {missing}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.is_relative_to(ROOT / "docs")], ids=name)
def test_every_page_of_the_docs_is_in_the_menu(page):
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f" {page.relative_to(ROOT / 'docs').as_posix()}\n" in menu


def test_the_api_page_documents_everything_public():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    paths = [path.rsplit(".", 1) for path in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)]
    documented = {id(getattr(import_module(module), last, None)) for module, last in paths}
    rooms = [getattr(net2gp, name) for name in NAMESPACES]
    public = {f"net2gp.{n}": getattr(net2gp, n) for n in net2gp.__all__ if not n.startswith("_")}
    public |= {f"{room.__name__}.{n}": getattr(room, n) for room in rooms for n in room.__all__}
    objects = {name: one for name, one in public.items() if not isinstance(one, ModuleType)}
    assert [name for name, one in objects.items() if id(one) not in documented] == []
    assert len(net2gp.__all__) <= 40


def test_the_design_names_every_file_and_the_order_of_imports():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text[text.index("## 3.") : text.index("## 4.")]
    words, flat = set(re.findall(r"\w+", section)), " ".join(section.split())
    files = {path.stem for path in (ROOT / "src" / "net2gp").rglob("*.py")}
    assert files - words - {"__init__", "_version"} == set()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    orders = [" → ".join(names).replace("net2gp.", "") for names in layers]
    assert len(orders) >= 5
    assert [order for order in orders if order not in flat] == []


def test_importing_loads_nothing_that_is_not_used():
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "import net2gp\n"
        "others = {'torch', 'gpytorch', 'matplotlib', 'sklearn', 'typer'}\n"
        "print([n for n in sys.modules if n.split('.')[0] in others])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_a_name_that_lives_one_level_down_is_pointed_to():
    with pytest.raises(AttributeError, match=r"net2gp has no 'VOGN'\. Use net2gp\.training\.VOGN"):
        _ = net2gp.VOGN
    assert set(net2gp.__all__) == set(dir(net2gp))


def messages() -> list[str]:
    """All strings of the source, with … for what an f-string fills in."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [p.value if isinstance(p, ast.Constant) else "…" for p in parts]
            if any(isinstance(p, ast.Constant) for p in parts):
                found.append("".join(map(str, texts)))
    return found


def test_the_guide_to_errors_quotes_messages_that_exist():
    text = (ROOT / "docs" / "guide" / "errors.md").read_text(encoding="utf-8")
    tables = text[text.index("## The network") : text.index("## Size and precision")]
    quotes = re.findall(r"^\| (?!message|---)(.*?) \|", tables, re.MULTILINE)
    known = messages()
    assert len(quotes) > 20
    assert [quote for quote in quotes if not any(quote in message for message in known)] == []
