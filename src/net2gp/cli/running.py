"""How a command runs: options as one value, a result for people or as JSON, errors in one line."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

ERROR, USAGE, FAILED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes: a named error, wrong usage, a report whose conditions failed, Ctrl-C."""


@dataclass(kw_only=True)
class Common:
    """The options of every command."""

    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False


@dataclass(frozen=True)
class Result:
    """What a command found.

    Args:
        values: What `--json` prints.
        text: What is printed otherwise.
        code: The exit code.
    """

    values: Mapping[str, Any]
    text: str
    code: int = 0


Options = TypeVar("Options", bound=Common)


def command(
    app: typer.Typer,
) -> Callable[[Callable[[Options], Result]], Callable[[Options], Result]]:
    """Add a function of one dataclass of options as a command, named after it.

    The fields of the dataclass become arguments and options, with the same names.

    Args:
        app: The application.

    Returns:
        A decorator, which leaves the function as it is.
    """

    def register(function: Callable[[Options], Result]) -> Callable[[Options], Result]:
        hints = get_type_hints(function)
        kind = hints[next(iter(inspect.signature(function).parameters))]

        def run(**given: Any) -> None:
            options = kind(**given)
            with _errors_in_one_line(options.json) as caught:
                result = function(options)
                _show(result, options.json, caught)
            raise typer.Exit(result.code)

        run.__name__, run.__doc__ = function.__name__, _joined(inspect.getdoc(function) or "")
        run.__signature__ = inspect.Signature(_parameters(kind))  # type: ignore[attr-defined]
        app.command(function.__name__)(run)
        return function

    return register


def _joined(text: str) -> str:
    """Paragraphs without line breaks, which terminals make, except for those that begin with \\b."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(p if p.startswith("\b") else " ".join(p.split()) for p in paragraphs)


def _parameters(kind: type) -> list[inspect.Parameter]:
    """The fields as parameters, those of the command itself before those that commands share."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for one in sorted(fields(kind), key=lambda one: one.name not in kind.__annotations__):
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        if one.default_factory is not MISSING:
            default = one.default_factory()
        found.append(
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=hints[one.name],
            )
        )
    return found


def say(message: str) -> None:
    """Print a sentence for people, beside the result."""
    print(f"net2gp: {message}", file=sys.stderr)


class UsageError(Exception):
    """Options do not go together, or name nothing known."""


@contextmanager
def _errors_in_one_line(quiet: bool) -> Iterator[list[str]]:
    """Turn errors on purpose, and what the system refuses, into one line and an exit code."""
    from safetensors import SafetensorError

    from net2gp.errors import Net2GPError

    caught: list[str] = []
    try:
        with _warnings_in_one_line(caught):
            yield caught
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except UsageError as error:
        say(_sentence(error))
        raise typer.Exit(USAGE) from None
    except KeyboardInterrupt:
        say("interrupted. No file was left half-written.")
        raise typer.Exit(INTERRUPTED) from None
    except (Net2GPError, ImportError, OSError, MemoryError, SafetensorError) as error:
        say(_sentence(error))
        raise typer.Exit(ERROR) from None
    except Exception as error:
        if os.environ.get("NET2GP_TRACEBACK"):
            raise
        say(
            f"{type(error).__name__}: {_sentence(error)} (not an error that net2gp foresaw; set "
            "NET2GP_TRACEBACK=1 to see where it comes from)"
        )
        raise typer.Exit(ERROR) from None


def _sentence(error: BaseException) -> str:
    """The text of an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}."
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _warnings_in_one_line(caught: list[str]) -> Iterator[None]:
    """Print warnings of net2gp, each once, as they come; keep those of libraries for themselves."""
    from net2gp.errors import Net2GPWarning

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if issubclass(category, Net2GPWarning) and text not in caught:
            caught.append(text)
            say(f"warning: {text}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", Net2GPWarning)
        warnings.showwarning = show
        yield


def _show(result: Result, as_json: bool, caught: Sequence[str]) -> None:
    """Print a result now, so that a disk that is full is noticed while errors are still caught."""
    if as_json:
        values = {**result.values, "warnings": list(caught)}
        print(json.dumps(plain(values), ensure_ascii=False), flush=True)
    elif result.text:
        print(result.text, flush=True)


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers that are not finite become null.

    Args:
        value: Mappings, sequences, numbers, tensors, arrays, paths and texts.

    >>> plain({"a": (1, float("nan")), "b": None})
    {'a': [1, None], 'b': None}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
