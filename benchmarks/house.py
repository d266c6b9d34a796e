"""The shape of the source before and after: names, folders, cycles, classes, type tests, passes, imports.

    python benchmarks/house.py [--before REVISION …] [--after REVISION]

Counts are taken from the text of the revisions, or by `worker_house.py`, which runs in a process of each.
Prints a table, writes it to `results/house.md`, and exits with 1 if the last revision misses a requirement.
What each row counts is said below the table.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revisions import AFTER, BEFORE, REVIEWED, extract, named, surroundings

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "house.md"
HEAVY = ("gpytorch", "matplotlib", "sklearn", "typer")

LIKELIHOODS = frozenset(
    (
        *("Gaussian", "HeteroscedasticGaussian", "Bernoulli", "Categorical", "Poisson"),
        *("NegativeBinomial", "StudentT", "Ordinal", "LawLikelihood"),
    )
)
STRUCTURES = frozenset(
    (
        *("Full", "Diagonal", "Kron", "LowRank", "LastLayer", "Subnetwork", "FunctionSpace"),
        "Sampled",
    )
)
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
ROOM_OF_STRUCTURES = ("posteriors/weights/", "posteriors/structures.py")


@dataclass(frozen=True)
class Row:
    """A line of the table: a quantity in all revisions, and what is asked of the last one."""

    name: str
    values: list[Any]
    bound: float | None = None
    goal: float | None = None
    means: str = ""

    @property
    def missed(self) -> bool:
        return self.bound is not None and not float(self.values[-1]) <= self.bound

    def line(self) -> str:
        asked = "" if self.bound is None else f"at most {self.bound:g}"
        if self.goal is not None:
            asked = f"goal: at most {self.goal:g}"
        return f"| {self.name} | {' | '.join(map(_shown, self.values))} | {asked} |"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def files(source: Path) -> dict[str, str]:
    """The text of each file of the package, by its path in it."""
    package = source / "net2gp"
    return {str(p.relative_to(package)): p.read_text() for p in sorted(package.rglob("*.py"))}


def public_names(texts: dict[str, str]) -> list[str]:
    """`__all__` of the package."""
    for node in ast.parse(texts["__init__.py"]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError("the package has no __all__")


def largest_folder(texts: dict[str, str]) -> int:
    """Files of the largest folder, without `__init__.py` and, at the top, the public namespaces."""
    doors = set(public_names(texts))
    folders: dict[str, int] = {}
    for name in texts:
        path = Path(name)
        door = str(path.parent) == "." and path.stem in doors
        folders[str(path.parent)] = folders.get(str(path.parent), 0) + (
            path.stem != "__init__" and not door
        )
    return max(folders.values())


def code_lines(text: str) -> int:
    """Lines that are neither blank nor of a comment or a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    counted = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            counted -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(counted)


def module_name(path: str) -> str:
    """`net2gp.room.file` of room/file.py."""
    parts = ["net2gp", *Path(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(texts: dict[str, str]) -> dict[str, set[str]]:
    """Which modules of the package each of them imports, also inside functions; not for types alone."""
    modules = {module_name(path) for path in texts}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for path, text in texts.items():
        module = module_name(path)
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        for node in _executed(ast.parse(text)):
            graph[module] |= set(_targets(node, package, modules)) - {module}
    return graph


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from _executed(other)
            continue
        yield node
        yield from _executed(node)


def _targets(node: ast.AST, package: str, modules: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parent = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parent, base] if base else parent)
        for alias in node.names:
            below = f"{base}.{alias.name}"
            if below in modules or base in modules:
                yield below if below in modules else base


def cycles(texts: dict[str, str]) -> list[set[str]]:
    """Sets of modules of one room that import each other in a circle."""
    graph = imports(texts)
    room = lambda module: ".".join(module.split(".")[:2])
    inside = {m: {t for t in targets if room(t) == room(m)} for m, targets in graph.items()}
    reach = {m: _reachable(m, inside) for m in inside}
    found: list[set[str]] = []
    for module in inside:
        circle = {other for other in reach[module] if module in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = list(graph[start])
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            left.extend(graph[module])
    return seen


def type_tests(texts: dict[str, str], names: frozenset[str], room: tuple[str, ...]) -> int:
    """`isinstance(·, C)` and `case C()` for a class among `names`, in files outside its room."""
    count = 0
    for path, text in texts.items():
        if path.startswith(room):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                count += bool(names & _class_names(node.args[1]))
            elif isinstance(node, ast.MatchClass):
                count += bool(names & _class_names(node.cls))
    return count


def _class_names(node: ast.AST) -> set[str]:
    plain = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return plain | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def worker(source: Path, *arguments: str) -> Any:
    """What `worker_house.py` says of a revision."""
    command = [sys.executable, str(HERE / "worker_house.py"), *arguments]
    answer = subprocess.run(
        command, env=surroundings(source), check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(answer.stdout.splitlines()[-1])


def import_seconds(source: Path, rounds: int = 5) -> dict[str, Any]:
    """CPU seconds of `import net2gp` and of a first name from it, best of five, and what is loaded."""
    # bytecode first: users import a package that was imported before
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(source)], check=True)
    answers = [worker(source, "import") for _ in range(rounds)]
    loaded = answers[0]["loaded"]
    return {
        "import": min(answer["cpu_s"] for answer in answers),
        "first use": min(answer["used_s"] for answer in answers),
        "loaded": ", ".join(loaded) or "none",
        "heavy": len(loaded),
    }


def measured(source: Path) -> dict[str, Any]:
    """All figures of one revision."""
    texts = files(source)
    return {
        "names": len(public_names(texts)),
        "folder": largest_folder(texts),
        "cycles": len(cycles(texts)),
        "modules in cycles": sum(map(len, cycles(texts))),
        "lines": sum(text.count("\n") for text in texts.values()),
        "code": sum(map(code_lines, texts.values())),
        "likelihoods": type_tests(texts, LIKELIHOODS, ("likelihoods/",)),
        "structures": type_tests(texts, STRUCTURES, ROOM_OF_STRUCTURES),
        **import_seconds(source),
        **worker(source, "classes"),
        **worker(source, "passes"),
    }


def rows(revisions: list[dict[str, Any]]) -> list[Row]:
    """The table."""

    def row(name: str, key: str, means: str = "", **asked: float) -> Row:
        return Row(name, [found[key] for found in revisions], means=means, **asked)

    return [
        row("public names at the top", "names", "The length of `net2gp.__all__`.", bound=40),
        row(
            "files of the largest folder",
            "folder",
            "Without `__init__.py`, and at the top without the public namespaces.",
            bound=12,
        ),
        row(
            "cycles inside rooms",
            "cycles",
            "Strongly connected sets of modules below one `net2gp.<room>`, with imports inside functions and "
            "without those for type checkers.",
            bound=0,
        ),
        row("modules in these cycles", "modules in cycles"),
        row(
            "posterior classes",
            "posterior classes",
            "Concrete classes of the package that have `marginal`, `joint`, `predict` and `sample`.",
            bound=1,
        ),
        row(
            "kernel classes",
            "kernel classes",
            "Concrete classes that have `diag`, `blocks`, `matmul` and `scaled`, and can be called.",
        ),
        row(
            "plumbing methods written in kernel classes",
            "plumbing",
            "`check`, `blocks`, `matmul`, `precise`, `scaled`, `to` and `joint` in their bodies.",
        ),
        row("lines of `src`", "lines", goal=28_000),
        row(
            "lines of code in it",
            "code",
            "Without blank lines, comments, docstrings and other strings that stand alone.",
        ),
        row(
            "type tests on likelihoods outside `likelihoods`",
            "likelihoods",
            "`isinstance` and `match` with a likelihood of that room.",
            goal=0,
        ),
        row(
            "type tests on structures outside their room",
            "structures",
            "`isinstance` and `match` with an option value that `laplace` takes as `structure`.",
            goal=0,
        ),
        row(
            "network passes of a prediction, `adapt`",
            "adapt passes",
            "Calls of the network for a third prediction, of three new points; of a regression or a "
            "classification, whichever has more.",
            bound=5,
        ),
        row("network passes of a prediction, `laplace`", "laplace passes", bound=4),
        row(
            "CPU seconds of `import net2gp` beside torch",
            "import",
            "In a process that has imported torch; best of five.",
            bound=0.5,
        ),
        row(
            "the same, with `adapt` and `Gaussian` loaded",
            "first use",
            "Names are loaded when they are first used.",
        ),
        row("heavy packages that this loads", "loaded", f"Of {', '.join(HEAVY)}."),
        row("their number", "heavy", bound=0),
        row(
            "public functions without `Args:`",
            "functions without Args",
            "Of those with parameters, in the `__all__` of the package and of its public rooms.",
            bound=0,
        ),
        row(
            "public classes without `Args:`",
            "classes without Args",
            "Of those whose constructor has parameters, errors and protocols left out.",
        ),
    ]


def report(found: list[Row], revisions: list[str]) -> str:
    notes = [f"- {row.name}: {row.means}" for row in found if row.means]
    columns = [*(f"before ({name})" for name in revisions[:-1]), f"after ({revisions[-1]})"]
    head = [f"| | {' | '.join(columns)} | asked |", f"|---|{'--:|' * len(columns)}---|"]
    title = "# The source before and after it was divided into rooms"
    return "\n".join([title, "", *head, *(row.line() for row in found), "", *notes])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", nargs="+", default=[REVIEWED, BEFORE])
    parser.add_argument("--after", default=AFTER)
    options = parser.parse_args()
    revisions = [named(revision) for revision in (*options.before, options.after)]
    with tempfile.TemporaryDirectory() as folder:
        figures = [measured(extract(r, Path(folder) / f"{n}")) for n, r in enumerate(revisions)]
    found = rows(figures)
    text = report(found, revisions)
    print(text)
    RESULT.write_text(text + "\n")
    missed = [row.name for row in found if row.missed]
    for name in missed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
