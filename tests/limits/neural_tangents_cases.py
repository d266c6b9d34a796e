"""The reference networks of neural-tangents as ordinary PyTorch modules.

A case is nested JSON in neural-tangents' words (channels last, standard deviations); `build` turns it
into a module as a PyTorch user would write it (channels first, variances by module name).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from limits import neural_tangents_modules as modules
from net2gp.limits.modules import layers, pointwise

FOLDER = Path(__file__).parents[1] / "reference_data" / "neural_tangents_kernels"
Layer = dict[str, Any]
Inputs = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A network in JSON, its inputs, and what neural-tangents says its kernels are."""

    name: str
    net: Layer
    input: str
    inputs: dict[str, Tensor]
    kernels: dict[str, Tensor]


@dataclass(frozen=True)
class Built:
    """A module, the variances of its parameters by name, and the inputs it takes."""

    network: nn.Module
    weight_var: dict[str, float]
    bias_var: dict[str, float]
    parameterization: dict[str, str] | str
    inputs1: Inputs
    inputs2: Inputs


@dataclass(frozen=True)
class Shape:
    """What flows between two layers, without the batch."""

    channels: int
    spatial: tuple[int, ...]


def load_cases(name: str) -> dict[str, Case]:
    """The cases of `<name>.json` with the numbers of `<name>.npz`."""
    described = json.loads((FOLDER / f"{name}.json").read_text())["cases"]
    with np.load(FOLDER / f"{name}.npz") as archive:
        arrays = {key: torch.from_numpy(archive[key]) for key in archive.files}

    def part(prefix: str, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: arrays[prefix + name] for name in names if prefix + name in arrays}

    return {
        case["name"]: Case(
            case["name"],
            case["net"],
            case["input"],
            part(f"input/{case['input']}_", ("x1", "x2", "pattern1", "pattern2")),
            part(f"{case['name']}/", ("nngp_11", "nngp_12", "ntk_11", "ntk_12")),
        )
        for case in described
    }


def build(case: Case, scale: int = 1) -> Built:
    """The module of a case; widths that the limit ignores are 4 · scale, those given `width` · scale."""
    builder = Builder(case, scale)
    x1 = case.inputs["x1"]
    shape = Shape(x1.shape[-1], tuple(x1.shape[1:-1]))
    steps, _ = builder.chain(case.net["layers"], shape)
    two = "pattern1" in case.inputs or builder.masked
    network = modules.TwoInputs(steps) if two else nn.Sequential(*steps)
    network = network.double().train('"train"' in json.dumps(case.net))
    names = {id(module): name for name, module in network.named_modules()}
    names |= {id(parameter): name for name, parameter in network.named_parameters()}
    kinds = {names[key]: kind for key, kind in builder.parameterization.items()}
    same = set(kinds.values())
    return Built(
        network,
        {names[key]: value for key, value in builder.weight_var.items()},
        {names[key]: value for key, value in builder.bias_var.items()} | {"*": 0.0},
        same.pop() if len(same) == 1 else kinds,
        builder.inputs("1"),
        builder.inputs("2"),
    )


class Builder:
    """Layer by layer from JSON to modules, noting every module's variances on the way."""

    def __init__(self, case: Case, scale: int) -> None:
        self.case, self.scale = case, scale
        # in standard parameterization the NTK depends on the widths, and theirs are 1 if left out
        self.default_width = 1 if '"standard"' in json.dumps(case.net) else 4
        self.masked = case.input.endswith("masked")
        self.channels_last = case.input == "graph"
        self.weight_var: dict[int, float] = {}
        self.bias_var: dict[int, float] = {}
        self.parameterization: dict[int, str] = {}

    def inputs(self, which: str) -> Inputs:
        x = self.case.inputs[f"x{which}"]
        mask = (x == 100.0).all(-1)
        first = x if self.channels_last else x.movedim(-1, 1)
        if self.masked:
            keep = (~mask).double().unsqueeze(1)
            return first * keep, keep
        pattern = self.case.inputs.get(f"pattern{which}")
        return first.contiguous() if pattern is None else (first.contiguous(), pattern)

    def chain(self, described: list[Layer], shape: Shape) -> tuple[list[nn.Module], Shape]:
        steps: list[nn.Module] = []
        branches: list[nn.Module] = []
        for layer in described:
            kind = layer["type"]
            if kind == "parallel":
                built = [self.chain([branch], shape) for branch in layer["layers"]]
                branches = [
                    one[0][0] if len(one[0]) == 1 else nn.Sequential(*one[0]) for one in built
                ]
                ends = [one[1] for one in built]
                shape = ends[0]
            elif kind.startswith("FanIn"):
                module, shape = self.join(layer, branches, ends)
                steps.append(module)
            elif kind in ("serial", "repeat"):
                for _ in range(layer.get("n", 1)):
                    inner, shape = self.chain(layer["layers"], shape)
                    steps.extend(inner)
            elif kind in ACTIVATIONS:
                steps.append(ACTIVATIONS[kind](layer))
            elif kind != "FanOut":
                module, shape = getattr(self, kind)(layer, shape)
                steps.append(module)
        return steps, shape

    def join(
        self, layer: Layer, branches: list[nn.Module], ends: list[Shape]
    ) -> tuple[nn.Module, Shape]:
        if layer["type"] != "FanInConcat":
            return (modules.Sum if layer["type"] == "FanInSum" else modules.Product)(
                branches
            ), ends[0]
        axis = layer["axis"]
        if axis in (-1, 1 + len(ends[0].spatial)):
            total = sum(end.channels for end in ends)
            return modules.Concatenate(branches, 1), Shape(total, ends[0].spatial)
        spatial = list(ends[0].spatial)
        spatial[axis - 1] = sum(end.spatial[axis - 1] for end in ends)
        return modules.Concatenate(branches, axis + 1), Shape(ends[0].channels, tuple(spatial))

    def note(self, module: nn.Module, layer: Layer) -> nn.Module:
        self.weight_var[id(module)] = layer["W_std"] ** 2
        if layer["b_std"] is not None:
            self.bias_var[id(module)] = layer["b_std"] ** 2
        self.parameterization[id(module)] = layer.get("parameterization", "ntk")
        return module

    def width(self, layer: Layer) -> int:
        return layer.get("width", self.default_width) * self.scale

    def axes(self, shape: Shape) -> tuple[int, ...]:
        first = 1 if self.channels_last else 2
        return tuple(range(first, first + len(shape.spatial)))

    def Dense(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        width, has_bias = self.width(layer), layer["b_std"] is not None
        linear = self.note(nn.Linear(shape.channels, width, bias=has_bias), layer)
        return self.on_channels(linear, shape), Shape(width, shape.spatial)

    def on_channels(self, module: nn.Module, shape: Shape) -> nn.Module:
        if self.channels_last or not shape.spatial:
            return module
        return modules.Permuted(module, (0, *self.axes(shape), 1))

    def Conv(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        window, strides, width = *modules.window_of(layer, "filter_shape"), self.width(layer)
        pads, spatial = modules.padding_of(shape.spatial, window, strides, layer["padding"])
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(window)]
        has_bias = layer["b_std"] is not None
        symmetric = all(low == high for low, high in pads)
        circular = layer["padding"] == "CIRCULAR"
        options: dict[str, Any] = {"stride": strides, "bias": has_bias}
        if symmetric:
            options["padding"] = tuple(low for low, _ in pads)
            options["padding_mode"] = "circular" if circular else "zeros"
        elif set(strides) == {1} and not circular:
            options["padding"] = "same"
        inside = "padding" in options
        conv = self.note(kind(shape.channels, width, window, **options), layer)
        module = conv if inside else nn.Sequential(modules.pad_layer(pads, circular), conv)
        return self.mask(module, layer, shape, window), Shape(width, spatial)

    def mask(
        self, module: nn.Module, layer: Layer, shape: Shape, window: tuple[int, ...]
    ) -> nn.Module:
        """The mask goes along: of a window it takes the middle place."""
        if not self.masked:
            return module
        strides = tuple(layer.get("strides") or (1,) * len(window))
        pads, spatial = modules.padding_of(
            shape.spatial, window, strides, layer.get("padding", "VALID")
        )
        if spatial == shape.spatial:
            return modules.Masked(module, None)
        starts = [(k - 1) // 2 - low for k, (low, _) in zip(window, pads, strict=True)]
        ranges = zip(starts, spatial, strides, strict=True)
        places = [slice(start, start + 1 + (n - 1) * step, step) for start, n, step in ranges]
        return modules.Masked(module, (slice(None), slice(None), *places))

    def ConvLocal(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        window, strides, width = *modules.window_of(layer, "filter_shape"), self.width(layer)
        pads, spatial = modules.padding_of(shape.spatial, window, strides, layer["padding"])
        kind = {1: layers.LocallyConnected1d, 2: layers.LocallyConnected2d}[len(window)]
        symmetric = all(low == high for low, high in pads)
        circular = layer["padding"] == "CIRCULAR"
        size = shape.spatial if symmetric else modules.padded_size(shape.spatial, pads)
        local = kind(
            (shape.channels, *size),
            width,
            window,
            strides,
            tuple(low for low, _ in pads) if symmetric else 0,
            "circular" if circular and symmetric else "zeros",
            layer["b_std"] is not None,
        )
        module = self.note(local, layer)
        module = module if symmetric else nn.Sequential(modules.pad_layer(pads, circular), module)
        return module, Shape(width, spatial)

    def ConvTranspose(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        window, strides, width = *modules.window_of(layer, "filter_shape"), self.width(layer)
        same = layer["padding"] != "VALID"
        has_bias = layer["b_std"] is not None
        circular = layer["padding"] == "CIRCULAR"
        kind = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}[len(window)]
        extra = tuple(max(0, s - k) for k, s in zip(window, strides, strict=True))
        options: dict[str, Any] = {"stride": strides, "output_padding": extra}
        conv = kind(shape.channels, width, window, bias=has_bias and not circular, **options)
        self.note(conv, layer)
        sizes = zip(shape.spatial, window, strides, strict=True)
        full = tuple(n * s + max(k - s, 0) for n, k, s in sizes)
        spatial = (
            tuple(n * s for n, s in zip(shape.spatial, strides, strict=True)) if same else full
        )
        if circular:
            del self.bias_var[id(conv)]
            fold = modules.Fold(
                conv, [modules.fold_matrix(n, m) for n, m in zip(full, spatial, strict=True)], width
            )
            self.weight_var[id(fold.bias)] = layer["b_std"] ** 2
            return fold, Shape(width, spatial)
        low = [
            modules.transposed_crop(k, s) if same else 0
            for k, s in zip(window, strides, strict=True)
        ]
        if spatial == full:
            return conv, Shape(width, spatial)
        crops = tuple(slice(start, start + n) for start, n in zip(low, spatial, strict=True))
        crop = modules.Index((slice(None), slice(None), *crops))
        return nn.Sequential(conv, crop), Shape(width, spatial)

    def AvgPool(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        kinds = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
        return self.pool(layer, shape, kinds, layer.get("normalize_edges", False))

    def SumPool(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        kinds = {1: layers.SumPool1d, 2: layers.SumPool2d, 3: layers.SumPool3d}
        return self.pool(layer, shape, kinds, False)

    def pool(
        self, layer: Layer, shape: Shape, kinds: dict[int, Any], by_count: bool
    ) -> tuple[nn.Module, Shape]:
        window, strides = modules.window_of(layer, "window")
        pads, spatial = modules.padding_of(
            shape.spatial, window, strides, layer.get("padding", "VALID")
        )
        pool = kinds[len(window)]
        circular = layer.get("padding") == "CIRCULAR"
        symmetric = all(low == high for low, high in pads) and not circular
        small = all(2 * low <= k for (low, _), k in zip(pads, window, strict=True))
        if symmetric and small:
            options = {"count_include_pad": False} if by_count else {}
            padding = tuple(low for low, _ in pads)
            module = pool(window, strides, padding if len(window) > 1 else padding[0], **options)
            return self.mask(module, layer, shape, window), Shape(shape.channels, spatial)
        steps = [modules.pad_layer(pads, circular), pool(window, strides)]
        if by_count and not circular:
            ones = steps[1](steps[0](torch.ones(1, 1, *shape.spatial, dtype=torch.float64)))
            steps.append(modules.Times(1 / ones))
        module = self.mask(nn.Sequential(*steps), layer, shape, window)
        return module, Shape(shape.channels, spatial)

    def GlobalAvgPool(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        kind = modules.MaskedMean if self.masked else modules.Mean
        return kind(self.axes(shape)), Shape(shape.channels, ())

    def GlobalSumPool(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        return modules.Total(self.axes(shape)), Shape(shape.channels, ())

    def Flatten(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        return nn.Flatten(), Shape(shape.channels * math.prod(shape.spatial), ())

    def LayerNorm(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        axis = layer.get("axis", -1)
        places = [] if isinstance(axis, int) else [a - 1 for a in axis if a <= len(shape.spatial)]
        sizes = [shape.spatial[place] for place in places]
        channels_first = len(places) == len(shape.spatial) and not self.channels_last
        ends = [shape.channels, *sizes] if channels_first else [*sizes, shape.channels]
        norm = nn.LayerNorm(ends, eps=1e-12, elementwise_affine=False)
        if channels_first or self.channels_last:
            return norm, shape
        others = [2 + place for place in range(len(shape.spatial)) if place not in places]
        return modules.Permuted(norm, (0, *others, *[2 + place for place in places], 1)), shape

    def Dropout(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        return nn.Dropout(1 - layer["rate"]), shape

    def ImageResize(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        wanted = zip(shape.spatial, layer["shape"][1:-1], strict=True)
        size = tuple(n if new == -1 else new for n, new in wanted)
        return modules.Resize(size, layer["method"]), Shape(shape.channels, size)

    def Index(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        index = tuple(i if isinstance(i, int) else slice(*i) for i in layer["index"])
        spatial = tuple(torch.empty(shape.spatial)[index].shape)
        return modules.Index((slice(None), slice(None), *index)), Shape(shape.channels, spatial)

    def DotGeneral(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        if isinstance(layer["rhs"], float):
            return modules.Times(layer["rhs"]), shape
        constant = torch.tensor(layer["rhs"], dtype=torch.float64)
        return modules.Contract(constant), Shape(shape.channels, tuple(constant.shape[1:]))

    def Aggregate(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        if self.channels_last:
            return modules.Aggregate(), shape
        if layer["axis"] == 2:
            return modules.AggregateColumns(), shape
        return modules.AggregatePixels(shape.spatial), shape

    def GlobalSelfAttention(self, layer: Layer, shape: Shape) -> tuple[nn.Module, Shape]:
        width, tied = self.width(layer), layer["linear_scaling"]
        attention = modules.Attention(
            width,
            1 if tied else max(2, self.scale),
            shape.spatial,
            layer["attention_mechanism"].lower(),
        )
        attention.kind = layer.get("pos_emb_type", "none").lower()
        attention.place_values = layer.get("val_pos_emb", False)
        located = shape.channels
        if attention.kind != "none":
            # the cases have one channel here unless they give a width, so one of theirs is as many as ours
            embedding = layer.get("n_chan_pos_emb") or 1
            embedding = shape.channels * (embedding if attention.kind == "concat" else 1)
            located += embedding if attention.kind == "concat" else 0
            attention.position = nn.Parameter(torch.zeros(1, math.prod(shape.spatial), embedding))
            self.weight_var[id(attention.position)] = layer.get("W_pos_emb_std", 1.0) ** 2
        inner = attention.heads * attention.depth
        key, query = layer["W_key_std"], layer["W_query_std"]
        # the product of key and query is what counts, so one tied matrix carries both
        key, query = (math.sqrt(key * query),) * 2 if tied else (key, query)
        sizes = {"key": (located, inner, key, None), "query": (located, inner, query, None)}
        values = located if attention.place_values else shape.channels
        sizes["value"] = (values, inner, layer["W_value_std"], None)
        sizes["out"] = (inner, width, layer["W_out_std"], layer.get("b_std"))
        for name, (fan_in, fan_out, weight, bias) in sizes.items():
            if name != "query" or not tied:
                linear = nn.Linear(fan_in, fan_out, bias=bias is not None)
                attention.add_module(name, self.note(linear, {"W_std": weight, "b_std": bias}))
        attention.takes_side = self.masked
        return attention, Shape(width, shape.spatial)


ACTIVATIONS = {
    "Relu": lambda layer: nn.ReLU(),
    "LeakyRelu": lambda layer: nn.LeakyReLU(layer["alpha"]),
    "Gelu": lambda layer: nn.GELU(),
    "Identity": lambda layer: nn.Identity(),
    "Erf": lambda layer: pointwise.Erf(),
    "Abs": lambda layer: pointwise.Abs(),
    "Sign": lambda layer: pointwise.Sign(),
    "ABRelu": lambda layer: pointwise.ABReLU(layer["a"], layer["b"]),
    "Sin": lambda layer: pointwise.Sin(
        layer.get("a", 1.0), layer.get("b", 1.0), layer.get("c", 0.0)
    ),
    "Cos": lambda layer: pointwise.Cos(
        layer.get("a", 1.0), layer.get("b", 1.0), layer.get("c", 0.0)
    ),
    "Rbf": lambda layer: pointwise.Rbf(layer["gamma"]),
    "Exp": lambda layer: pointwise.Exp(layer["a"], layer["b"]),
    "ExpNormalized": lambda layer: pointwise.ExpNormalized(),
    "Gaussian": lambda layer: pointwise.GaussianBump(layer["a"], -layer["b"]),
    "Gabor": lambda layer: pointwise.Gabor(),
    "Hermite": lambda layer: pointwise.Hermite(layer["degree"]),
    "Monomial": lambda layer: pointwise.Monomial(layer["degree"]),
    "RectifiedMonomial": lambda layer: pointwise.RectifiedMonomial(layer["degree"]),
    "Polynomial": lambda layer: pointwise.Polynomial(layer["coef"]),
    "Sigmoid_like": lambda layer: pointwise.SigmoidLike(),
    "ElementwiseNumerical": lambda layer: {"silu": nn.SiLU, "softplus": nn.Softplus}[layer["fn"]](),
}
