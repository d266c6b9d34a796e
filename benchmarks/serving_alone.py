"""Run a program where net2gp is not: `python serving_alone.py PROGRAM POINTS.npy FOUND.npz`.

It needs numpy, and torch for a `.pt2` file or onnxruntime for an `.onnx` file. The answers for batches of 1,
7 and all points are written to FOUND.npz, and one line of JSON says what was imported and which versions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version

import numpy as np

Answers = dict[str, np.ndarray]
OTHERS = ("net2gp", "gpytorch", "linear_operator", "safetensors")


class Hidden:
    """What is installed beside may not be imported."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.names:
            raise ImportError(f"{name} is hidden")


def by_torch(path: str) -> Callable[[np.ndarray], Answers]:
    import torch

    torch.set_num_threads(1)
    module = torch.export.load(path).module()

    def run(x: np.ndarray) -> Answers:
        with torch.no_grad():
            return {name: value.numpy() for name, value in module(torch.from_numpy(x)).items()}

    return run


def by_onnxruntime(path: str) -> Callable[[np.ndarray], Answers]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    return lambda x: dict(zip(names, session.run(names, {"x": x}), strict=True))


def main() -> None:
    path, points, found = sys.argv[1:]
    onnx = path.endswith(".onnx")
    hidden = (*OTHERS, *(("torch", "onnx") if onnx else ()))
    sys.meta_path.insert(0, Hidden(hidden))
    x = np.load(points)
    run = by_onnxruntime(path) if onnx else by_torch(path)
    answers = {
        f"{count} {name}": value
        for count in (1, 7, len(x))
        for name, value in run(x[:count]).items()
    }
    np.savez(found, **answers)
    runtime = "onnxruntime" if onnx else "torch"
    print(
        json.dumps(
            {
                "runtime": f"{runtime} {version(runtime)}",
                "others": sorted(set(hidden) & set(sys.modules)),
            }
        )
    )


if __name__ == "__main__":
    main()
