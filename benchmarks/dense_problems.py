"""Networks with outputs at every place, and what they learn: shapes in images, Python's documentation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

IGNORED = -100
"""The label of a pixel that nobody labelled, as in torch's `cross_entropy`."""

CLASSES = ("ground", "stripes", "checks", "dots")
UNSEEN = "rings"
"""The texture that no training image has."""


@dataclass(frozen=True, eq=False)
class Scenes:
    """Images (N, 1, S, S), a label for each pixel (N, S, S), and where the unseen texture is, (N, S, S)."""

    x: Tensor
    y: Tensor
    unseen: Tensor


def scenes(count: int, seed: int, *, size: int = 128, strange: bool = False) -> Scenes:
    """Images of overlapping discs and boxes that differ in texture alone, seen through noise.

    Each shape has a direction, a wavelength and a contrast of its own; with little contrast it can hardly be
    told from the ground. A person who labels is unsure at borders: there, a label comes from a pixel nearby.
    Three patches of an image are not labelled.

    Args:
        count: How many images.
        seed: Which ones.
        size: Pixels in a row.
        strange: Whether each image has a disc of `UNSEEN` in its middle, without labels.
    """
    generator = torch.Generator().manual_seed(seed)
    made = [_scene(generator, size, strange) for _ in range(count)]
    x, y, unseen = (torch.stack(parts) for parts in zip(*made, strict=True))
    return Scenes(x[:, None], y, unseen)


def _scene(generator: torch.Generator, size: int, strange: bool) -> tuple[Tensor, Tensor, Tensor]:
    axis = torch.arange(size, dtype=torch.float32)
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    image, labels = torch.zeros(size, size), torch.zeros(size, size, dtype=torch.long)
    for number in range(6):
        u = torch.rand(8, generator=generator)
        i, j, radius = u[0] * size, u[1] * size, (0.09 + 0.12 * u[2]) * size
        kind = 1 + int(torch.randint(3, (), generator=generator))
        far = torch.maximum if number % 2 else torch.hypot
        inside = far((down - i).abs(), (right - j).abs()) < radius
        texture = _texture(kind, down - i, right - j, u[3:])
        image = torch.where(inside, (0.3 + 0.7 * u[7]) * texture, image)
        labels[inside] = kind
    unseen = torch.hypot(down - size / 2, right - size / 2) < 0.2 * size
    unseen &= strange
    rings = torch.sin(torch.hypot(down - size / 2, right - size / 2) * 2.2)
    image = torch.where(unseen, rings, image)
    steps = torch.randint(-2, 3, (2, size, size), generator=generator)
    near = tuple(
        (at.long() + step).clamp(0, size - 1) for at, step in zip((down, right), steps, strict=True)
    )
    labels = labels[near]
    for _ in range(3):
        i, j = (torch.rand(2, generator=generator) * size * 0.85).long().tolist()
        labels[i : i + size // 6, j : j + size // 6] = IGNORED
    labels[unseen] = IGNORED
    return image + 0.4 * torch.randn(size, size, generator=generator), labels, unseen


def _texture(kind: int, down: Tensor, right: Tensor, u: Tensor) -> Tensor:
    """Values between −1 and 1, turned by an angle."""
    angle, wave = torch.pi * u[0], 5.0 + 4.0 * u[1]
    along = 2 * torch.pi / wave * (right * angle.cos() + down * angle.sin())
    across = 2 * torch.pi / wave * (down * angle.cos() - right * angle.sin())
    if kind == 1:
        return along.sin().sign()
    checks = along.sin().sign() * across.sin().sign()
    return checks if kind == 2 else torch.where((along.cos() + across.cos()) > 0.9, 1.0, -0.3)


class UNet(nn.Module):
    """Two steps down and up again, with connections across, and a convolution of one pixel behind them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            _twice(1, width),
            _twice(width, 2 * width),
            _twice(2 * width, 4 * width),
        )
        self.fourth, self.fifth = _twice(6 * width, 2 * width), _twice(3 * width, width)
        self.head = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C, H, W) of images (N, 1, H, W)."""
        pool = nn.functional.max_pool2d
        high = self.first(x)
        middle = self.second(pool(high, 2))
        low = self.third(pool(middle, 2))
        middle = self.fourth(torch.cat([middle, interpolate(low, scale_factor=2.0)], 1))
        return self.head(self.fifth(torch.cat([high, interpolate(middle, scale_factor=2.0)], 1)))


def _twice(before: int, behind: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(before, behind, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(behind, behind, 3, padding=1), nn.ReLU()),
    )


@dataclass(frozen=True, eq=False)
class Texts:
    """Characters (N, T) as numbers, and the character behind each of them, −100 behind the end."""

    x: Tensor
    y: Tensor


def documentation() -> list[str]:
    """The paragraphs of the language reference that Python's `help` shows, in lower case (PSF licence)."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).lower()
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return [part for part in dict.fromkeys(paragraphs) if len(part) > 30]


def vocabulary(paragraphs: list[str]) -> str:
    """The 50 most frequent characters; number 0 stands for all others."""
    return "".join(letter for letter, _ in Counter("".join(paragraphs)).most_common(50))


def texts(counts: tuple[int, ...], seed: int, *, length: int = 64) -> list[Texts]:
    """Pieces of paragraphs, at random: so many for each of several sets, none in two of them."""
    paragraphs = documentation()
    known = vocabulary(paragraphs)
    pieces = [
        part[start : start + length + 1]
        for part in paragraphs
        for start in range(0, len(part) - 20, length + 1)
    ]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))
    found = []
    for chosen in order[: sum(counts)].split(counts):
        numbers = torch.full((len(chosen), length + 1), IGNORED)
        for row, number in zip(numbers, chosen.tolist(), strict=True):
            letters = [known.find(letter) + 1 for letter in pieces[number]]
            row[: len(letters)] = torch.tensor(letters)
        found.append(Texts(numbers[:, :-1].clamp(min=0), numbers[:, 1:].clone()))
    return found


class Reader(nn.Module):
    """A causal transformer over characters: two layers, and logits (N, T, V) for the next one."""

    def __init__(self, letters: int = 51, width: int = 48, length: int = 64) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(2)
        ]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, T, V) of characters (N, T)."""
        count = x.shape[1]
        h = self.letters(x) + self.places(torch.arange(count, device=x.device).expand_as(x))
        mask = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            h = layer(h, src_mask=mask)
        return self.head(h)
