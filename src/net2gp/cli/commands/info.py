"""`net2gp info`: versions, devices and extras, or what a file holds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from net2gp._version import __version__
from net2gp.cli.options import POSTERIOR_HELP
from net2gp.cli.running import Common, Result

EXTRAS = {
    "plots": ("matplotlib", "sklearn"),
    "tables": ("pandas", "pyarrow"),
    "images": ("PIL",),
    "sklearn": ("sklearn",),
    "botorch": ("botorch",),
    "onnx": ("onnx", "onnxscript"),
    "serve": ("fastapi", "uvicorn"),
    "lightning": ("lightning",),
    "torchmetrics": ("torchmetrics",),
    "mlflow": ("mlflow",),
    "arviz": ("arviz_base",),
}
"""The packages that each extra installs."""


@dataclass(kw_only=True)
class InfoOptions(Common):
    """The file to look at, if any."""

    posterior: Annotated[Path | None, typer.Argument(help=POSTERIOR_HELP)] = None


def info(options: InfoOptions) -> Result:
    """Show versions, devices, memory and extras, or what a posterior's file holds.

    \b
    Examples:
      net2gp info
      net2gp info posterior.safetensors --json
    """
    values = _machine() if options.posterior is None else _file(options.posterior)
    return Result(values, "\n".join(_lines(values)))


def _machine() -> dict[str, Any]:
    import torch

    from net2gp.memory import available_memory

    devices = ["cpu"] + [
        f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        for index in range(torch.cuda.device_count())
    ]
    return {
        "net2gp": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "gpytorch", "numpy")},
        "devices": devices,
        "threads": torch.get_num_threads(),
        "free memory (GiB)": round(available_memory() / 2**30, 1),
        "extras": {
            name: all(importlib.util.find_spec(one) for one in packages)
            for name, packages in EXTRAS.items()
        },
    }


def _file(path: Path) -> dict[str, Any]:
    from net2gp.cli.saved import Note

    path = path.expanduser()
    note = Note.read(path)
    reading = {k: v for k, v in note.reading.as_dict().items() if v not in ([], (), None, False)}
    scaling = {k: v for k, v in reading.pop("scaling").items() if v is not None}
    return {
        "file": path,
        "bytes": path.stat().st_size,
        "method": note.method,
        **reading,
        **({"scaling": scaling} if scaling else {}),
        "settings": note.settings,
        "network": note.network,
        "data": note.data,
        "held_out": note.held_out,
        "command": note.command,
    }


def _lines(values: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")] if value else []
        elif isinstance(value, list | tuple):
            lines.append(f"{indent}{name}: {', '.join(map(str, value))}")
        elif isinstance(value, bool):
            lines.append(f"{indent}{name}: {'yes' if value else 'no'}")
        elif value != "":
            lines.append(f"{indent}{name}: {value}")
    return lines
