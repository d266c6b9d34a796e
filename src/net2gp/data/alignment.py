"""Images of another source brought to the place and size that a network knows, without labels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from net2gp.errors import InputError, check_finite
from net2gp.inputs import describe


@dataclass(frozen=True, eq=False)
class Alignment:
    """An affine map of pixel positions. A call moves and scales images by it, with bilinear interpolation.

    A pixel of the result that spans several of the images is an average over as many places.

    Args:
        matrix: Where a pixel of the result is taken from, (2, 3), for positions (x, y, 1) from −1 to 1.
        size: Height and width of the result.
    """

    matrix: Tensor = field(repr=False)
    size: tuple[int, int]

    def __call__(self, x: Tensor) -> Tensor:
        """Align images.

        Args:
            x: Images, (N, channels, height, width) of any height and width.

        Returns:
            The images at their new place, (N, channels, *size). What comes from outside of an image is zero.
        """
        _check(x, "x")
        theta = self.matrix.to(x).expand(len(x), 2, 3)
        height, width = self.size
        spans = (self.matrix[1, 1] * x.shape[2] / height, self.matrix[0, 0] * x.shape[3] / width)
        down, right = (max(1, int(float(span) + 1e-6)) for span in spans)
        size = [len(x), x.shape[1], height * down, width * right]
        moved = grid_sample(x, affine_grid(theta, size, align_corners=False), align_corners=False)
        return avg_pool2d(moved, (down, right))


def align_images(images: Tensor, reference: Tensor) -> Alignment:
    """Find the shift and scale under which images are where those of a reference are, in closed form.

    Positions, weighted by brightness and averaged over all images, have a mean and a variance along each
    axis. The result maps images such that both are those of the reference. It needs no labels and some
    hundred images of each source, and undoes other margins, sizes and resolutions, not other colors or
    styles. The background should be zero. Cost: one pass over the images.

    Args:
        images: Images of the new source, (N, channels, height, width), zero or positive.
        reference: Images that a network was trained on, (M, channels, height, width).

    Returns:
        The map, to be called with images of the new source.

    Raises:
        InputError: If images have another number of axes, are negative, or all zero.

    >>> reference = torch.zeros(1, 1, 8, 8)
    >>> reference[..., 2:4, 2:4] = 1.0
    >>> moved = reference.roll((3, 1), (2, 3))
    >>> torch.allclose(align_images(moved, reference)(moved), reference, atol=1e-5)
    True

    Reference: Simard et al., Best practices for convolutional neural networks applied to visual document
    analysis, ICDAR 2003, for maps of positions; moments as in Hu, Visual pattern recognition by moment
    invariants, 1962.
    """
    (center, spread), (middle, width) = _moments(images, "images"), _moments(reference, "reference")
    scale = spread / width
    matrix = torch.cat([torch.diag(scale), (center - scale * middle)[:, None]], 1)
    return Alignment(matrix, (reference.shape[2], reference.shape[3]))


def _moments(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation of the positions (x, y) of bright pixels, in float64."""
    _check(x, name)
    picture = x.double().mean((0, 1))
    check_finite(picture, name)
    if not bool((x >= 0).all()) or not float(picture.sum()) > 0:
        raise InputError(
            f"{name} must be zero or positive and somewhere bright, with a dark background, since brightness "
            f"weights positions. Pass them before they are standardized, and inverted if needed: 1 - {name}."
        )
    means, spreads = [], []
    for axis in (0, 1):  # sums over rows leave the columns, which are x
        weights = picture.sum(axis) / picture.sum()
        places = (2 * torch.arange(len(weights)).to(weights) + 1) / len(weights) - 1
        mean = weights @ places
        variance = weights @ (places - mean).square()
        # A single bright line has the width of a pixel.
        means.append(mean)
        spreads.append((variance + 1 / (3 * len(weights) ** 2)).sqrt())
    return torch.stack(means), torch.stack(spreads)


def _check(x: Tensor, name: str) -> None:
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point() or not x.numel():
        raise InputError(
            f"{name} must be images (N, channels, height, width) as floats, but is {describe(x)}. "
            f"Pass for example {name}[:, None].float() / 255 for bytes (N, height, width)."
        )
