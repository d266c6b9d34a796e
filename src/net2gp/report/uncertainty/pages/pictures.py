"""Points as a reader sees them: images as small PNG files inside of the page, rows of tables as text."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from net2gp.inputs import rows
from net2gp.posteriors import Posterior
from net2gp.report.uncertainty.facts import Given
from net2gp.report.uncertainty.pages.words import number
from net2gp.types import Inputs

MOST_PIXELS = 96
"""The longest side of a picture; larger ones are thinned out."""

MOST_COLUMNS = 12


@dataclass(frozen=True)
class Pictures:
    """The points that the page shows.

    Args:
        columns: The names of the columns if points are rows of a table, else none.
        held_out: Images, or cells, by index of the held-out point.
        known: Images, or cells, by index of the training point.
    """

    columns: list[str]
    held_out: dict[int, list[str]] = field(repr=False)
    known: dict[int, list[str]] = field(repr=False)

    @classmethod
    def of(cls, posterior: Posterior, given: Given, values: dict[str, Any]) -> Pictures:
        """Draw the points of the cases and of the suspected labels.

        Args:
            posterior: The posterior, whose data the training points are.
            given: The held-out data.
            values: The values of the report.

        Returns:
            The pictures.
        """
        kinds = ("sure_and_wrong", "unsure_and_right")
        lines = [case for kind in kinds for case in values["cases"][kind]]
        known = [pull["index"] for case in lines for pull in case["pulls"]]
        known += [line["index"] for line in values["label_errors"].get("rows", [])]
        there = {} if posterior.x is None else _drawn(posterior.x, known, given)
        columns = [] if given.images else (given.columns or [])[:MOST_COLUMNS]
        return cls(columns, _drawn(given.x, [case["index"] for case in lines], given), there)


def _drawn(x: Inputs, index: Iterable[int], given: Given) -> dict[int, list[str]]:
    wanted = sorted(set(index))
    if not wanted or not isinstance(x, Tensor):
        return {n: [] for n in wanted}
    some = given.shown(rows(x, torch.tensor(wanted, device=x.device)))
    assert isinstance(some, Tensor)
    values = some.detach().cpu().double().numpy()
    if given.images:
        low, high = float(values.min()), float(values.max())
        return {n: [_image(v, low, high)] for n, v in zip(wanted, values, strict=True)}
    if given.columns is None:
        return {n: [] for n in wanted}
    lines = values.reshape(len(values), -1)[:, :MOST_COLUMNS]
    return {n: [number(v, 4) for v in line] for n, line in zip(wanted, lines, strict=True)}


def _image(values: np.ndarray, low: float, high: float) -> str:
    """An image element; pixels are scaled to the range of all pictures of the page."""
    scaled = (255 * (values - low) / ((high - low) or 1.0)).round().clip(0, 255).astype(np.uint8)
    pixels = scaled[None] if scaled.ndim == 2 else scaled
    step = -(-max(pixels.shape[1:]) // MOST_PIXELS)
    data = base64.b64encode(png(pixels[:, ::step, ::step].transpose(1, 2, 0))).decode()
    return f'<img class="tile" alt="" src="data:image/png;base64,{data}">'


def png(pixels: np.ndarray) -> bytes:
    """Write a PNG file.

    Args:
        pixels: Bytes, (H, W, 1) for gray or (H, W, 3) for color.

    Returns:
        The file.

    >>> png(np.zeros((2, 2, 1), np.uint8))[:4]
    b'\\x89PNG'

    Reference: Portable Network Graphics specification, third edition, W3C 2025.
    """
    height, width, channels = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
