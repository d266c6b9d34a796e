"""Folders of pictures as arrays: one folder per class, or pictures alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from net2gp.errors import FileFormatError, InputError
from net2gp.progress import progress

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


def read_images(folder: Path, size: int | None) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """Read the pictures of a folder, in the order of their names.

    Args:
        folder: A folder with one folder of pictures per class, or with pictures.
        size: Height and width to which pictures are resized; None leaves them.

    Returns:
        The pictures (N, channels, height, width) in [0, 1], the names of their classes (N,) or None, and
        their paths.

    Raises:
        InputError: If there are no pictures, or they have several sizes.
        FileFormatError: If a file is no picture.
    """
    groups = {one.name: _files(one) for one in sorted(folder.iterdir()) if one.is_dir()}
    groups = {name: files for name, files in groups.items() if files}
    labels: list[str] = []
    files = _files(folder)
    if groups and not files:
        labels = [name for name, found in groups.items() for _ in found]
        files = [file for found in groups.values() for file in found]
    if not files:
        raise InputError(
            f"{folder} holds no pictures. Put a folder of pictures per class into it ({', '.join(SUFFIXES)})."
        )
    pictures = []
    with progress("pictures", len(files)) as advance:
        for file in files:
            pictures.append(_read(file, size))
            advance()
    return _stacked(files, pictures), np.array(labels) if labels else None, [str(f) for f in files]


def _files(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.suffix.lower() in SUFFIXES)


def _read(path: Path, size: int | None) -> np.ndarray:
    """One picture as (height, width, channels) of bytes."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("reading pictures needs pillow: pip install 'net2gp[images]'.") from None
    try:
        with Image.open(path) as picture:
            gray = picture.mode in ("1", "L", "I;16")
            whole = picture.convert("L" if gray else "RGB")
            if size is not None:
                whole = whole.resize((size, size), Image.Resampling.BILINEAR)
            array = np.asarray(whole)
    except (OSError, ValueError, SyntaxError) as error:  # broken PNG chunks are a SyntaxError
        raise FileFormatError(f"{path} is not a readable picture ({error}).") from None
    return array[:, :, None] if gray else array


def _stacked(files: list[Path], pictures: list[np.ndarray]) -> np.ndarray:
    channels = max(one.shape[2] for one in pictures)
    pictures = [np.repeat(p, channels, 2) if p.shape[2] < channels else p for p in pictures]
    sizes = {one.shape: file for one, file in zip(pictures, files, strict=True)}
    if len(sizes) > 1:
        (one, first), (other, second), *_ = sizes.items()
        raise InputError(
            f"pictures have several sizes, such as {one[0]} × {one[1]} ({first}) and {other[0]} × {other[1]} "
            f"({second}). Pass --image-size {one[0]}."
        )
    return (np.stack(pictures).transpose(0, 3, 1, 2) / np.float32(255)).astype(np.float32)
