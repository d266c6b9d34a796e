"""Numbers in graphs keep the precision of the tensors beside them."""

from __future__ import annotations

import pytest
import torch

from net2gp.serving.constants import precise_constants
from net2gp.serving.files import write_onnx
from net2gp.serving.programs.tracing import traced


def numbers(x):
    y = torch.where(x > 0.7, x, 0.123) + 0.1
    y = y.clamp(min=1e-300) * 0.3 - torch.pi / x + (0.9 - x)
    y += 1 / 3
    y.mul_(0.77)
    return {"y": torch.add(y, x, alpha=0.06).clamp(max=1e9 / 7)}


def test_onnxruntime_takes_numbers_in_float64(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    x = torch.linspace(0.1, 2, 7, dtype=torch.float64)
    graph = traced(numbers, [x[:3]])
    write_onnx(graph, tmp_path / "a.onnx", (x[:3],), ["x"], {})
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
    assert (found - numbers(x)["y"]).abs().max() < 1e-14


def test_a_graph_with_tensors_for_numbers_computes_the_same():
    x = torch.linspace(0.1, 2, 7, dtype=torch.float64)
    graph = traced(numbers, [x[:3]])
    code = graph.code
    assert torch.equal(precise_constants(graph)(x)["y"], graph(x)["y"])
    assert graph.code == code
    narrow = traced(numbers, [x[:3].float()])
    assert precise_constants(narrow).code == narrow.code
