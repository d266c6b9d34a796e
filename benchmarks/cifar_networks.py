"""The network of `fidelity_cifar.py`, and several copies of it whose gradients are taken together.

The network is the ResNet-20 of Izmailov et al. (2021, "What are Bayesian neural network posteriors really
like?"): filter response normalization with a learned threshold (Singh & Krishnan, 2020), swish, convolutions
with biases and "same" padding, 1×1 convolutions in shortcuts, no augmentation. The parameters of K copies are
rows of one matrix, so that optimizers and samplers are a few operations on (K, P) numbers. On a GPU the
normalizations with what follows them are compiled into one kernel each, and the gradients of all copies are
one CUDA graph with a stream for each copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

NUM_CLASSES = 10
WARM_UP = 3
"""Runs before a CUDA graph is recorded: libraries choose their algorithms in these."""


def response(x: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor) -> Tensor:
    """max(γ x / √(mean of x² over the image + ε) + β, τ), for each channel, in float32."""
    wide = x.float()
    scale = gamma * torch.rsqrt(wide.square().mean((2, 3), keepdim=True) + 1e-6)
    return torch.maximum(wide * scale + beta, tau).to(x.dtype)


def activated(x: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor) -> Tensor:
    """The response through a swish."""
    return F.silu(response(x, gamma, beta, tau))


def joined(x: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor, shortcut: Tensor) -> Tensor:
    """The response and a shortcut through a swish."""
    return F.silu(response(x, gamma, beta, tau) + shortcut)


class Convolution(nn.Module):
    """A convolution with "same" padding as TensorFlow has it, and the normalization behind it."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int) -> None:
        super().__init__()
        padding = size // 2 if stride == 1 else 0
        self.conv = nn.Conv2d(inputs, outputs, size, stride, padding=padding)
        nn.init.kaiming_normal_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]
        self.gamma = nn.Parameter(torch.ones(outputs, 1, 1))
        self.beta = nn.Parameter(torch.zeros(outputs, 1, 1))
        self.tau = nn.Parameter(torch.zeros(outputs, 1, 1))
        self.pad = size == 3 and stride == 2

    def forward(self, x: Tensor, then: Callable[..., Tensor], *more: Tensor) -> Tensor:
        out = self.conv(F.pad(x, (0, 1, 0, 1)) if self.pad else x)
        return then(out, self.gamma, self.beta, self.tau, *more)


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.first = Convolution(inputs, outputs, 3, stride)
        self.second = Convolution(outputs, outputs, 3, 1)
        self.shortcut = Convolution(inputs, outputs, 1, stride) if stride > 1 else None
        self.dropout = dropout

    def forward(self, x: Tensor, functions: Functions) -> Tensor:
        hidden = self.first(x, functions.activated)
        if self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        shortcut = x if self.shortcut is None else self.shortcut(x, functions.response)
        return self.second(hidden, functions.joined, shortcut)


class Functions(NamedTuple):
    """What follows convolutions, plain or compiled."""

    response: Callable[..., Tensor] = response
    activated: Callable[..., Tensor] = activated
    joined: Callable[..., Tensor] = joined

    @staticmethod
    def compiled() -> Functions:
        """The same in one kernel each."""
        return Functions(*(torch.compile(function, dynamic=False) for function in Functions()))


class ResNet20(nn.Module):
    """Three stages of three blocks with 16, 32 and 64 channels; dropout, if any, is always active."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        width = 16
        for stage in range(3):
            for i in range(3):
                stride = 2 if stage and not i else 1
                outputs = 16 * 2**stage
                blocks.append(Block(width, outputs, stride, dropout))
                width = outputs
        self.start = Convolution(3, 16, 3, 1)
        self.blocks = nn.ModuleList(blocks)
        self.functions = Functions()
        self.head = nn.Linear(width, NUM_CLASSES)
        nn.init.kaiming_normal_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        """What the last layer sees: (N, 64)."""
        x = self.start(x, self.functions.activated)
        for block in self.blocks:
            x = block(x, self.functions)
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Copies:
    """K networks of one architecture: `values` (K, P), and `gradients` (K, P) of the mean cross-entropy.

    Args:
        count: K.
        images: Standardized images of the training data on the device of the networks, (N, 3, 32, 32).
        labels: Their classes, (N,).
        batch: Points of a batch, for each copy its own.
        dropout: The rate of dropout.
        fast: Whether to compile the network and to record CUDA graphs, on a GPU.
    """

    def __init__(
        self,
        count: int,
        images: Tensor,
        labels: Tensor,
        batch: int,
        *,
        dropout: float = 0.0,
        fast: bool = True,
    ) -> None:
        self.device, self.images, self.labels = images.device, images, labels
        self.network = ResNet20(dropout).to(self.device, memory_format=torch.channels_last)
        self.shapes = {n: p.shape for n, p in self.network.named_parameters()}
        size = sum(shape.numel() for shape in self.shapes.values())
        self.values = torch.zeros(count, size, device=self.device)
        self.gradients = torch.zeros_like(self.values)
        self.losses = torch.zeros(count, device=self.device)
        self.chosen = torch.zeros(count, batch, dtype=torch.long, device=self.device)
        self._values = [self.split(row) for row in self.values]
        self._gradients = [list(self.split(row).values()) for row in self.gradients]
        self._graph: torch.cuda.CUDAGraph | None = None
        self.how = "plain"
        if fast and self.device.type == "cuda":
            self._speed_up()

    def __len__(self) -> int:
        return len(self.values)

    @property
    def batch(self) -> int:
        """Points of a batch."""
        return self.chosen.shape[1]

    def start(self, seeds: Sequence[int]) -> None:
        """Draw initial weights, a seed for each copy."""
        for row, seed in zip(self._values, seeds, strict=True):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                fresh = dict(ResNet20().named_parameters())
            for name, value in row.items():
                value.copy_(fresh[name].detach())

    def gradient(self, chosen: Tensor) -> Tensor:
        """The gradients for batches with the numbers `chosen` (K, batch)."""
        self.chosen.copy_(chosen)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._all()
        return self.gradients

    def module(self, index: int) -> ResNet20:
        """One of the copies as a module of its own, in float32."""
        module = ResNet20().to(self.device)
        module.load_state_dict({n: v.clone() for n, v in self._values[index].items()})
        return module.eval()

    @torch.no_grad()
    def probs(self, index: int, images: Tensor, size: int = 2000) -> Tensor:
        """Class probabilities of one copy: (N, 10) in float32."""
        params = {n: v.clone() for n, v in self._values[index].items()}
        parts = [self._outputs(params, part).float().softmax(-1) for part in images.split(size)]
        return torch.cat(parts)

    def split(self, row: Tensor) -> dict[str, Tensor]:
        """Views of the parameters by name in a row of `values`."""
        parts = row.split([shape.numel() for shape in self.shapes.values()])
        return {n: p.view(s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}

    def _outputs(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
            return functional_call(self.network, params, (x,))

    def _one(self, index: int) -> None:
        rows = self.chosen[index]
        x = self.images[rows].contiguous(memory_format=torch.channels_last)
        leaves = {n: v.detach().requires_grad_() for n, v in self._values[index].items()}
        loss = F.cross_entropy(self._outputs(leaves, x).float(), self.labels[rows])
        found = torch.autograd.grad(loss, list(leaves.values()))
        torch._foreach_copy_(self._gradients[index], list(found))
        self.losses[index].copy_(loss.detach())

    def _all(self) -> None:
        for index in range(len(self)):
            self._one(index)

    def _speed_up(self) -> None:
        """Compile and record; what fails here is left out with a warning, since it only saves time."""
        torch.set_float32_matmul_precision("high")
        settings = torch._inductor.config.triton
        if hasattr(
            settings, "mix_order_reduction"
        ):  # it fails for sums over images and over batches
            settings.mix_order_reduction = False
        try:
            self.network.functions = Functions.compiled()
            self._warm_up()
            self.how = "compiled"
        except Exception as error:
            warnings.warn(f"not compiled: {error}", stacklevel=2)
            self.network.functions = Functions()
        try:
            self._warm_up()
            graph = torch.cuda.CUDAGraph()
            streams = [torch.cuda.Stream() for _ in range(len(self))]
            with torch.cuda.graph(graph):
                main = torch.cuda.current_stream()
                for index, stream in enumerate(streams):
                    stream.wait_stream(main)
                    with torch.cuda.stream(stream):
                        self._one(index)
                for stream in streams:
                    main.wait_stream(stream)
            self._graph, self._streams = graph, streams
            self.how += ", CUDA graph"
        except Exception as error:
            warnings.warn(f"no CUDA graph: {error}", stacklevel=2)
            torch.cuda.synchronize()

    def _warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._all()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
