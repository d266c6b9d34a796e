"""A written style erodes without a budget."""

import ast
from pathlib import Path

import pytest

import net2gp

SOURCE = Path(__file__).parent.parent / "src" / "net2gp"
FILES = sorted(SOURCE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})

LARGEST = 12  # files of a folder beside its __init__.py


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(node):
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return node.end_lineno - body[0].lineno + 1 if body else 0


def is_gpu_kernel(node):
    """Whether the parameters are pointers and sizes of a kernel, which cannot be gathered into values."""
    annotations = [ast.unparse(a.annotation) for a in node.args.args if a.annotation]
    return "tl.constexpr" in annotations


def test_there_is_something_to_measure():
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_within_the_budget(path):
    assert path.read_text().count("\n") <= 420, "about 400 lines a file: it is two things now"
    for node in functions(path):
        where = f"{path.name}:{node.lineno} {node.name}"
        assert body_lines(node) <= 45, f"{where}: about 40 lines a function"
        parameters = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        assert len(parameters) <= 8 or is_gpu_kernel(node), f"{where}: at most 8 parameters"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCE)))
def test_folders_hold_a_dozen_files_and_say_what_they_are_for(folder):
    name = folder.relative_to(SOURCE).as_posix()
    doors = (
        net2gp.__all__ if folder == SOURCE else ["__init__"]
    )  # namespaces are the front door itself
    count = len([path for path in folder.glob("*.py") if path.stem not in (*doors, "__init__")])
    assert count <= LARGEST, f"{name} holds {count} files: divide it into sub-packages"
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert docstring, f"{name}: say in __init__.py what goes in and what comes out"
