"""Everything public of net2gp, and what its docstrings leave out.

`public()` walks what users can name: the functions and classes of every public namespace, the constructors
of the classes and their public methods. `gaps(item)` lists what the docstring of one of them lacks.
The rules, in Google style:

- `Args:` names every parameter of a function, a method and a constructor, and nothing else. The fields of a
  dataclass are the parameters of its constructor, and its class docstring documents them.
- `Returns:` (or `Yields:`) is there if something with parameters returns a value. Without parameters the
  summary says what comes out.
- `Raises:` names each error that the function itself raises. For a constructor this includes
  `__post_init__`. Errors of functions that it calls may be listed too.
- A method may rely on a documented protocol or base class if that has a method with the same name and the
  same parameters.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import net2gp
from net2gp import errors

ROOMS = (
    *(
        "structures",
        "solvers",
        "links",
        "tuning",
        "training",
        "explain",
        "tasks",
        "limits",
        "deep",
        "bayes",
        "conformal",
        "interop.sklearn",
    ),
    *(
        "metrics",
        "plots",
        "data",
        "likelihoods",
        "linear",
        "kernels",
        "posteriors",
        "methods",
        "types",
    ),
)
SECTIONS = ("Args", "Returns", "Yields", "Raises")


@dataclass(frozen=True)
class Public:
    """A public function, method, property or class (for its constructor).

    `name` is the room and the qualified name, so that files may move inside a room without a change here.
    """

    name: str
    kind: str
    value: Any
    owner: type | None = None


def public() -> dict[str, Public]:
    """Everything public by its name, sorted."""
    found: dict[str, Public] = {}
    for item in _items():
        assert found.setdefault(item.name, item).value is item.value, f"{item.name} is two things"
    return dict(sorted(found.items()))


def gaps(item: Public, *, inherit: bool = True) -> list[str]:
    """What the docstring of `item` lacks; with `inherit`, protocols and base classes may document it."""
    documented = sections(_doc(item))
    if not _doc(item):
        return ["has no docstring"]
    names, found = parameters(item), documented.get("Args", {})
    inherited = inherit and item.kind == "method" and _is_inherited(item)
    missing = [] if inherited else [f"Args lacks {n}" for n in names if n not in found]
    missing += [f"Args names {n}, which is no parameter" for n in found if n not in names]
    gives = names and not inherited and item.kind != "class" and _returns_something(item)
    if gives and not {"Returns", "Yields"} & documented.keys():
        missing.append("Returns is missing")
    listed = documented.get("Raises", {})
    missing += [f"Raises lacks {n}" for n in sorted(raised(item)) if n not in listed]
    unknown = [n for n in listed if not hasattr(errors, n) and not hasattr(builtins, n)]
    return missing + [f"Raises names {n}, which is no error" for n in unknown]


def without_args() -> list[str]:
    """The public functions, methods and constructors whose parameters no `Args:` section explains."""
    return [
        n for n, item in public().items() if any(g.startswith("Args lacks") for g in gaps(item))
    ]


def sections(doc: str) -> dict[str, dict[str, str]]:
    """The sections of a docstring: for Args and Raises by entry, else with all text below ''."""
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for line in doc.splitlines():
        header = re.fullmatch(r"(\w+):", line)
        if header and header[1] in SECTIONS:
            current = found.setdefault(header[1], {})
        elif line.strip() and not line.startswith("    "):
            current = None
        elif current is not None and line.strip():
            entry = re.match(r"    (\*{0,2}\w+)(?: \(.*?\))?: *(\S.*)?$", line)
            by_name = current is found.get("Args") or current is found.get("Raises")
            current[entry[1].lstrip("*") if by_name and entry else ""] = line.strip()
    for name in ("Args", "Raises"):
        found.get(name, {}).pop("", None)
    return found


def parameters(item: Public) -> list[str]:
    """The names that `Args:` must explain."""
    if item.kind == "property":
        return []
    if item.kind != "class":
        return _names(item.value, bound=item.owner is not None)
    if dataclasses.is_dataclass(item.value):
        return [f.name for f in dataclasses.fields(item.value) if f.init and f.name[0] != "_"]
    if issubclass(item.value, tuple):
        return list(getattr(item.value, "_fields", ()))
    made = _ours(item.value, "__init__")
    return [] if made is None else _names(made, bound=True)


def raised(item: Public) -> set[str]:
    """The errors that the code of `item` raises itself, by the names of their classes."""
    if item.kind != "class":
        return _raised_by(item.value)
    own = [name for name in ("__init__", "__post_init__") if name in vars(item.value)]
    made = [function for name in own if (function := _ours(item.value, name))]
    return set().union(*(_raised_by(function) for function in made))


def _items() -> Iterator[Public]:
    for value in _exported():
        if inspect.isclass(value):
            yield from _members(value)
        elif inspect.isfunction(inspect.unwrap(value)):
            yield Public(_name(value), "function", value)


def _exported() -> Iterator[Any]:
    modules = [importlib.import_module(f"net2gp.{room}") for room in ROOMS]
    for module in (net2gp, *modules):
        names = getattr(module, "__all__", None) or _defined(module)
        for name in names:
            value = getattr(module, name)
            if not inspect.ismodule(value) and getattr(value, "__module__", "").startswith(
                "net2gp"
            ):
                yield value


def _defined(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
    ]


def _members(kind: type) -> Iterator[Public]:
    if issubclass(kind, BaseException):
        return
    yield Public(_name(kind), "class", kind)
    for base in kind.__mro__:
        if not base.__module__.startswith("net2gp"):
            continue
        for name, value in vars(base).items():
            function = _function(value)
            if function is not None and (name == "__call__" or not name.startswith("_")):
                is_property = isinstance(value, property | functools.cached_property)
                where = f"{_name(base)}.{name}"
                yield Public(where, "property" if is_property else "method", function, base)


def _function(value: Any) -> Callable[..., Any] | None:
    """The function behind a method or a property, or None if `value` is something else."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return value if inspect.isfunction(inspect.unwrap(value)) else None


def _name(value: Any) -> str:
    return f"{value.__module__.split('.')[1]}.{value.__qualname__}"


def _doc(item: Public) -> str:
    text = item.value.__doc__ or ""
    if item.kind == "class" and (made := _ours(item.value, "__init__")) is not None:
        text += "\n\n" + inspect.cleandoc(made.__doc__ or "")
    generated = dataclasses.is_dataclass(item.value) and text.startswith(f"{item.value.__name__}(")
    return "" if generated else inspect.cleandoc(text)


def _ours(kind: type, name: str) -> Callable[..., Any] | None:
    """The method `name` of a class as net2gp wrote it, or None if it comes from elsewhere."""
    method = getattr(kind, name)
    home = getattr(method, "__module__", None) or ""
    return method if home.startswith("net2gp") else None


def _names(function: Callable[..., Any], *, bound: bool) -> list[str]:
    names = list(inspect.signature(function).parameters)
    is_static = not names or names[0] not in ("self", "cls")
    return [n for n in names[0 if is_static or not bound else 1 :] if n[0] != "_"]


def _is_inherited(item: Public) -> bool:
    """Whether a protocol or a base class documents the same method with the same parameters."""
    name = item.name.rsplit(".", 1)[1]
    for other in (*_bases(item.owner), *_protocols(item.owner)):
        function = _function(vars(other).get(name))
        if function is None or function is item.value:
            continue
        model = Public(f"{_name(other)}.{name}", "method", function, other)
        if parameters(model) == parameters(item) and not gaps(model, inherit=False):
            return True
    return False


def _bases(owner: type | None) -> list[type]:
    return [base for base in owner.__mro__[1:] if base.__module__.startswith("net2gp")]


def _protocols(owner: type | None) -> Iterator[type]:
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("net2gp") else ():
            if inspect.isclass(value) and getattr(value, "_is_protocol", False):
                own = [n for n in vars(value) if n[0] != "_" or n == "__call__"]
                fields = getattr(owner, "__dataclass_fields__", {})
                is_ours = value.__module__ == name and value is not owner
                if is_ours and own and all(hasattr(owner, n) or n in fields for n in own):
                    yield value


def _returns_something(item: Public) -> bool:
    annotation = inspect.signature(item.value).return_annotation
    return str(annotation) not in ("None", "NoReturn") and annotation is not None


def _raised_by(function: Callable[..., Any]) -> set[str]:
    function = inspect.unwrap(function)
    if function.__code__.co_filename == "<string>":  # a constructor that `dataclass` wrote
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return set(_raises(tree.body[0].body))


def _raises(body: list[ast.AST]) -> Iterator[str]:
    """The classes of errors that `body` raises; functions defined inside it raise on their own account."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            error = ast.unparse(node.exc.func).rsplit(".", 1)[-1]
            if hasattr(errors, error) or hasattr(builtins, error):
                yield error
        yield from _raises(list(ast.iter_child_nodes(node)))
