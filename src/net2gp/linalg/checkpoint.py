"""The state of a long iteration as a file, from which an interrupted iteration continues."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from net2gp.errors import FileFormatError, InputError

KIND = "net2gp iteration"


def check_path(path: str | os.PathLike | None) -> None:
    """Raise unless this can be the path of a checkpoint, or is None for no checkpoint.

    Args:
        path: What was passed as `checkpoint`.

    Raises:
        InputError: If it is neither a text nor a path.
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise InputError(
            f"checkpoint must be the path of a file or None, but is of type {type(path).__name__}. Pass for "
            'example checkpoint="chain.safetensors".'
        )


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often the state of an iteration is written, and the problem to which it belongs.

    Files are safetensors. They are written beside the old file and then renamed, so a process that is killed
    while writing leaves the previous state. The file stays when the iteration has ended, and a second call
    then answers from it.

    Args:
        path: The file.
        key: Identifies the problem. A file with another key is refused and never continued.
        every_seconds: The least time between two writes.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> checkpoint = Checkpoint(Path(folder.name) / "solve.safetensors", key="toy")
    >>> checkpoint.load("cpu") is None
    True
    >>> checkpoint.write({"x": torch.ones(2)}, {"step": 3})
    >>> tensors, numbers = checkpoint.load("cpu")
    >>> tensors["x"], numbers["step"]
    (tensor([1., 1.]), 3)
    """

    path: str | Path
    key: str = ""
    every_seconds: float = 60.0
    _last: list[float] = field(default_factory=lambda: [time.monotonic()], repr=False)

    @property
    def due(self) -> bool:
        """Whether the last write, or the start, is long enough ago."""
        return time.monotonic() - self._last[0] >= self.every_seconds

    def check_writable(self) -> None:
        """Check before a long iteration that its state can be written.

        Raises:
            InputError: If the path is a folder, or its folder is missing or not writable.
        """
        path = Path(self.path).expanduser()
        if path.is_dir():
            raise InputError(f"the checkpoint {path} is a folder. Pass the path of a file in it.")
        if not path.parent.is_dir():
            raise InputError(
                f"the folder of the checkpoint {path} does not exist. Make it first: "
                f"Path({str(path.parent)!r}).mkdir(parents=True)."
            )
        if not os.access(path.parent, os.W_OK):
            raise InputError(
                f"the folder of the checkpoint {path} is not writable. Pass another path."
            )

    def write(self, tensors: dict[str, Tensor], numbers: dict[str, object]) -> None:
        """Replace the file by a new state.

        Args:
            tensors: Tensors by name.
            numbers: Values that JSON can hold, by name.
        """
        self.check_writable()
        path = Path(self.path).expanduser()
        header = {"kind": KIND, "key": self.key, "numbers": json.dumps(numbers)}
        beside = path.with_name(path.name + ".part")
        save_file(dict(_stored(n, t.detach()) for n, t in tensors.items()), beside, header)
        os.replace(beside, path)
        self._last[0] = time.monotonic()

    def load(
        self, device: torch.device | str
    ) -> tuple[dict[str, Tensor], dict[str, object]] | None:
        """Read the state that was written.

        Args:
            device: Where the tensors go.

        Returns:
            Tensors and numbers by name, or None if there is no file.

        Raises:
            InputError: If the file belongs to another problem.
            FileFormatError: If the file is no checkpoint or cannot be read.
        """
        path = Path(self.path).expanduser()
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                header = file.metadata() or {}
                if header.get("kind") != KIND:
                    raise FileFormatError(f"{path} is not a checkpoint of net2gp.")
                if header.get("key") != self.key:
                    raise InputError(
                        f"the checkpoint {path} belongs to another problem (other data, network, prior or "
                        "options). Delete it to start again, or pass another path."
                    )
                names = list(file.keys())
                tensors = dict(_restored(name, file.get_tensor(name)) for name in names)
                return tensors, json.loads(header["numbers"])
        except (SafetensorError, OSError) as error:
            raise FileFormatError(
                f"the checkpoint {path} cannot be read ({error}). Delete it to start again."
            ) from error


def _stored(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Copy a tensor, since the format refuses shared memory.

    A column-major matrix stays column-major, since the memory layout determines the order of sums.
    """
    if tensor.dim() == 2 and tensor.mT.is_contiguous() and not tensor.is_contiguous():
        return f"{name}.mT", tensor.mT.cpu().clone()
    return name, tensor.cpu().clone(memory_format=torch.contiguous_format)


def _restored(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    # A copy has torch's own memory alignment, on which the order of sums depends too.
    own = tensor.clone()
    return (name.removesuffix(".mT"), own.mT) if name.endswith(".mT") else (name, own)
