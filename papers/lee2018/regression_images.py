"""Images as targets of a regression, and networks by their depth: what the programs on this paper share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from net2gp import data


@dataclass(frozen=True, eq=False)
class Digits:
    """Images (N, D) of mean zero and variance one, labels (N,), and targets (N, 10) of mean zero."""

    x: Tensor
    labels: Tensor

    @property
    def y(self) -> Tensor:
        """One-hot labels less their mean: 0.9 for the class, −0.1 for the others."""
        return one_hot(self.labels, 10).double() - 0.1

    @staticmethod
    def of(images: Tensor, labels: Tensor) -> Digits:
        """Standardize each image by itself, so that all have one norm."""
        x = images.flatten(1).double()
        x = x - x.mean(1, keepdim=True)
        return Digits(x / x.square().mean(1, keepdim=True).sqrt(), labels)

    def first(self, count: int) -> Digits:
        """The first count/10 of every class, in the order of the file; all if there are no more."""
        if count >= len(self.labels):
            return self
        chosen = [(self.labels == label).nonzero()[: count // 10, 0] for label in range(10)]
        index = torch.cat(chosen).sort().values
        return Digits(self.x[index], self.labels[index])

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Digits:
        """The same images elsewhere."""
        return Digits(self.x.to(device, dtype), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Problem:
    """Images to learn from, to choose by, and to be judged on."""

    train: Digits
    valid: Digits
    test: Digits


def problem(name: str, device: torch.device) -> Problem:
    """All images of a data set.

    MNIST is split as in the authors' program: the first 10,000 training digits are for choosing, and
    training sets are the first of each class behind them. Of CIFAR-10 the last 5000 images are for choosing.
    """
    (x, y), (x_test, y_test) = READERS[name]("train"), READERS[name]("test")
    own, others = {
        "MNIST": (slice(10_000, None), slice(10_000)),
        "CIFAR": (slice(45_000), slice(45_000, None)),
        "digits": (slice(400, None), slice(400)),
    }[name]
    parts = (x[own], y[own]), (x[others], y[others]), (x_test, y_test)
    return Problem(*(Digits.of(*part).to(device) for part in parts))


READERS = {"MNIST": data.mnist, "CIFAR": data.cifar10, "digits": data.digits}


def multilayer(activation: nn.Module, depth: int, num_inputs: int = 784) -> nn.Sequential:
    """`depth` hidden layers; their width does not count in the limit."""
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(1, 1), activation)]
    return nn.Sequential(nn.Linear(num_inputs, 1), activation, *hidden, nn.Linear(1, 10))
