"""The functions that operations of a program are, and the names of their arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from net2gp.interop.exported.layers import TURNS

ENDLESS = 2**62
"""Ends of slices above it mean the end of the axis."""


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operation by name, with the defaults of those that are left out."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    names = [one.name for one in schema.arguments]
    named = {one.name: one.default_value for one in schema.arguments}
    named |= {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if "self" in named:
        named["input"] = named.pop("self")
    if str(node.target) == "aten.addmm.default":
        return _unturned(named)
    return named


def _unturned(named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of b + x Wᵀ as those of a linear layer, if the second factor is a transpose."""
    turned = named["mat2"]
    plain = named["beta"] == 1 == named["alpha"]
    known = plain and isinstance(turned, fx.Node) and str(turned.target) in TURNS
    weight = turned.args[0] if known else None
    return {**named, "input": named["mat1"], "weight": weight, "bias": named["input"]}


DROPPED = ("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")
SILENT = (
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten._assert_async.msg",
    "aten.sym_constrain_range_for_size.default",
)
"""Operations that only check what the example was like."""


def _sliced(given: dict[str, Any]) -> tuple[Callable, tuple]:
    """x[:, …, start:end:step], as the network wrote it."""
    end = given["end"]
    part = slice(
        given["start"], None if isinstance(end, int) and end > ENDLESS else end, given["step"]
    )
    return operator.getitem, ((given["input"], (slice(None),) * given["dim"] + (part,)), {})


def _zeros(like: Tensor, size: Sequence[int]) -> Tensor:
    return torch.zeros(size, dtype=like.dtype, device=like.device)


def _ones(like: Tensor, size: Sequence[int]) -> Tensor:
    return torch.ones(size, dtype=like.dtype, device=like.device)


def _full(like: Tensor, size: Sequence[int], value: float) -> Tensor:
    return torch.full(size, value, dtype=like.dtype, device=like.device)


MADE: dict[str, Callable] = {
    "aten.zeros.default": _zeros,
    "aten.ones.default": _ones,
    "aten.full.default": _full,
}
"""Tensors made of nothing, which follow a parameter in dtype and device in place of the example."""


def _recurrent(function: Callable) -> Callable[[dict[str, Any]], tuple[Callable, tuple]]:
    """A recurrent layer with its states as torch.nn passes them, a pair or one tensor."""

    def rewritten(given: dict[str, Any]) -> tuple[Callable, tuple]:
        states = tuple(given["hx"]) if isinstance(given["hx"], list | tuple) else given["hx"]
        rest = [given[name] for name in ("has_biases", "num_layers", "dropout", "train")]
        last = (given["bidirectional"], given["batch_first"])
        return function, ((given["input"], states, given["params"], *rest, *last), {})

    return rewritten


RECURRENT = tuple(f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
REWRITTEN: dict[str, Callable[[dict[str, Any]], tuple[Callable, tuple]]] = {
    "aten.slice.Tensor": _sliced,
    **{name: _recurrent(getattr(torch, name.split(".")[1])) for name in RECURRENT},
    "aten.embedding.default": lambda given: (
        F.embedding,
        ((given["indices"], given["weight"]), {}),
    ),
}
_SAME = [
    "abs",
    "add",
    "bmm",
    "cat",
    "cos",
    "div",
    "exp",
    "flatten",
    "log",
    "matmul",
    "mean",
    "mm",
    "mul",
    "permute",
    "pow",
    "relu",
    "reshape",
    "sigmoid",
    "sin",
    "softmax",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "sub",
    "sum",
    "tanh",
    "transpose",
    "unsqueeze",
    "conv1d",
    "conv2d",
    "conv3d",
    "t",
]
_OVERLOADS = ["default", "Tensor", "int", "dim", "using_ints", "dim_IntList", "Tensor_Scalar"]
_NEURAL = [
    "gelu",
    "silu",
    "softplus",
    "leaky_relu",
    "max_pool2d",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "linear",
    "layer_norm",
    "scaled_dot_product_attention",
    "pad",
    "hardtanh",
    "mish",
]
FUNCTIONS: dict[str, Callable] = {
    **{f"aten.{name}.{kind}": getattr(torch, name) for name in _SAME for kind in _OVERLOADS},
    **{f"aten.{name}.default": getattr(F, name) for name in _NEURAL},
    "aten.view.default": torch.reshape,
    "aten.constant_pad_nd.default": lambda x, pad, value=0: F.pad(x, pad, value=value),
    "aten.sym_size.int": Tensor.size,
}
"""The functions of torch, which modules call, behind some operations with the same arguments."""
