"""The layers that operations of a program are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from net2gp.errors import NetworkError

EXPORT = (
    'torch.export.export(network.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)), with '
    "an x of two points or more"
)
"""What to type for a program that takes any number of points."""

NATIVE = "aten._native_batch_norm_legit_no_training.default"
TURNS = ("aten.permute.default", "aten.t.default", "aten.transpose.int")


def shape_of(node: fx.Node) -> Sequence[int]:
    """The shape that a tensor had when the program was exported."""
    return node.meta["val"].shape


def _linear(given: dict[str, Any]) -> nn.Module | None:
    if given["weight"] is None:
        return None
    outputs, inputs = shape_of(given["weight"])
    return nn.Linear(inputs, outputs, given["bias"] is not None, device="meta")


def _convolution(given: dict[str, Any]) -> nn.Module | None:
    if given.get("transposed"):
        return None
    outputs, inputs, *kernel = shape_of(given["weight"])
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(kernel) - 1]
    options: dict[str, Any] = {
        key: value if isinstance(value, str) else tuple(value) * (len(kernel) // len(value))
        for key, value in given.items()
        if key in ("stride", "padding", "dilation")
    }
    options |= {"groups": given["groups"], "bias": given["bias"] is not None, "device": "meta"}
    return cast(nn.Module, kind(inputs * given["groups"], outputs, tuple(kernel), **options))


def _batch_norm(given: dict[str, Any]) -> nn.Module:
    if given.get("training"):
        raise NetworkError(
            "the program was exported in training mode: its batch norms use the batch. Export it with "
            f"{EXPORT}."
        )
    dims = len(shape_of(given["input"]))
    kind = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(dims, nn.BatchNorm1d)
    affine = given["weight"] is not None
    (channels,) = shape_of(given["running_mean"])
    layer = kind(channels, given["eps"], given["momentum"], affine, device="meta")
    layer.num_batches_tracked = torch.tensor(0)
    return layer


def _layer_norm(given: dict[str, Any]) -> nn.Module:
    shape, bias = list(given["normalized_shape"]), given["bias"] is not None
    return nn.LayerNorm(shape, given["eps"], bias=bias, device="meta")


def _rms_norm(given: dict[str, Any]) -> nn.Module:
    return nn.RMSNorm(list(given["normalized_shape"]), given["eps"], device="meta")


def _group_norm(given: dict[str, Any]) -> nn.Module:
    return nn.GroupNorm(
        given["num_groups"], shape_of(given["input"])[1], given["eps"], device="meta"
    )


def _embedding(given: dict[str, Any]) -> nn.Module:
    padding, (number, width) = given["padding_idx"], shape_of(given["weight"])
    return nn.Embedding(number, width, None if padding < 0 else padding, device="meta")


LAYERS: dict[str, Callable[[dict[str, Any]], nn.Module | None]] = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _linear,
    **{f"aten.conv{n}d.{kind}": _convolution for n in (1, 2, 3) for kind in ("default", "padding")},
    "aten.convolution.default": _convolution,
    "aten.batch_norm.default": _batch_norm,
    NATIVE: _batch_norm,
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.group_norm.default": _group_norm,
    "aten.embedding.default": _embedding,
}
"""Operations that are layers if their weights are parameters."""
