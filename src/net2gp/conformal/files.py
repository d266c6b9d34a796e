"""Promises as files."""

from __future__ import annotations

import os

import torch
from torch import nn

from net2gp.conformal.promise import Promise
from net2gp.errors import FileFormatError
from net2gp.linear import Linearized
from net2gp.linear.linearized import Output
from net2gp.posteriors.saving.save import read


def load(
    path: str | os.PathLike,
    network: nn.Module | Linearized | None = None,
    *,
    output: Output | None = None,
    device: torch.device | str = "cpu",
) -> Promise:
    """Read intervals or sets that their method `save` wrote. Nothing in the file is executed.

    Args:
        path: The file.
        network: A module of the architecture that was saved, or its linearization. Its own weights do not
            matter. None if the posterior has no network.
        output: The function that was given to `linearize(output=...)`, if there was one.
        device: Where the tensors go.

    Returns:
        The promise, whose answers are those of the saved one.

    Raises:
        FileFormatError: If there is no such file, or if it is corrupted or of another kind or version.
        InputError: If the network is missing, or if its parameters or outputs differ from the saved ones.
    """
    found = read(path, network, output=output, device=device)
    if not isinstance(found, Promise):
        raise FileFormatError(f"{path} holds a posterior alone. Read it with net2gp.load.")
    return found
