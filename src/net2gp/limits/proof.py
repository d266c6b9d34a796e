"""A translation compared with the network itself, on a few points and one finite draw of its weights.

A limit is a claim about expressions. Here the expressions are computed literally, with the network's own
numbers of channels and random weights, and each must equal what the network computes at the same place. This
finds every rule that mistakes an operation for another one, whatever the reason: channels in another order,
a tensor that was changed in place, points that are mixed. Then the gradients of the output are compared, and
the outputs of other batches of the same points.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.errors import InputError, NetworkError
from net2gp.inputs import ordinary_tensors
from net2gp.limits.duals.activations import UnsupportedLayer
from net2gp.limits.finite_draw import Draw
from net2gp.limits.graph.function_registry import name_of
from net2gp.limits.graph.trace import parameter_of
from net2gp.limits.graph.translate import Signal, Translation
from net2gp.limits.rules import functional_layers
from net2gp.limits.signals.layout import arranged

POINTS = 3
NORMS = (*functional_layers.NORMS, nn.modules.batchnorm._BatchNorm)
NOISE = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")


def check(
    translation: Translation, inputs: tuple[Tensor, ...], unchecked: tuple[type, ...]
) -> None:
    """Raise unless every signal of `translation` is what the network computes, for one draw of its weights.

    Layers of the classes `unchecked` are not compared. The cost is a few passes over three points with the
    network's own widths, and one backward pass.
    """
    points = few(inputs)
    found = [t for t in translation.found.values() if isinstance(t, Tensor)]
    dtypes = [t.dtype for t in found if t.is_floating_point()]
    module = drawn(translation.graph, dtypes[-1] if dtypes else torch.float64)
    module = module.to(points[0].device)
    runner = _Runner(module, translation, unchecked)
    # cuDNN's recurrent layers have no gradients in eval mode
    plain = torch.backends.cudnn.flags(enabled=False)
    with ordinary_tensors(), torch.enable_grad(), torch.random.fork_rng(devices=[]), plain:
        try:
            runner.run(*points)
        except (NetworkError, InputError):
            raise
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UnsupportedLayer(
                "the network does not run in float64 with gradients, which its tangent kernel needs: "
                f"{reason}."
            ) from error
        output = runner.outputs
        if output is None:
            return
        # gradients lose more digits than values do, and casts to a coarser dtype in the network lose more yet
        tolerance = max(1e-6, runner.coarse)
        _check_gradients(module, *output, tolerance)
        _check_batches(module, points, output[0].detach(), tolerance)


def few(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return three points in float64: the first inputs, and points derived from them if there are fewer."""
    result = []
    for x in inputs:
        x = x[:POINTS].detach()
        x = x.double() if x.is_floating_point() else x
        while len(x) < POINTS:
            last = x[-1:]
            other = last * 0.7 if x.is_floating_point() else last.roll(1, -1)
            x = torch.cat([x, other if last.dim() > 1 or x.is_floating_point() else last])
        result.append(x)
    return tuple(result)


def drawn(graph: fx.GraphModule, dtype: torch.dtype) -> fx.GraphModule:
    """Return a copy in float64 with random weights; gains of norms are one, as in the limit.

    A norm without an eps takes the eps of `dtype`, in which the network computes.
    """
    module = copy.deepcopy(graph).double()
    generator = torch.Generator().manual_seed(0)
    held = set()
    for layer in module.modules():
        if isinstance(layer, nn.PReLU):
            held |= {id(value) for value in layer.parameters()}
        if isinstance(layer, nn.RMSNorm) and layer.eps is None:
            layer.eps = float(torch.finfo(dtype).eps)
        if isinstance(layer, NORMS):
            for name, value in layer.named_parameters(recurse=False):
                nn.init.constant_(value, float(name == "weight"))
                held.add(id(value))
    with torch.no_grad():
        for value in module.parameters():
            value.requires_grad_(id(value) not in held and value.is_floating_point())
            if id(value) not in held and value.is_floating_point():
                fan_in = max(1, value.numel() // max(1, value.shape[0])) if value.dim() > 1 else 1
                normal = torch.randn(value.shape, generator=generator, dtype=value.dtype)
                # this variance keeps the order of magnitude of signals at any depth
                value.copy_(normal.to(value.device) * (1.5 / fan_in) ** 0.5)
        for layer in module.modules():
            weight = parameter_of(layer, "weight")
            if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
                assert weight is not None
                weight[layer.padding_idx] = 0
    return module.eval()


class _Quiet(fx.Interpreter):
    """An interpreter whose dropout keeps everything."""

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if name_of(target) in NOISE:
            value = args[0] if args else kwargs["input"]
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            return value.clone() if training else value
        if name_of(target) == "scaled_dot_product_attention":
            kwargs = {**kwargs, "dropout_p": 0.0}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) > 4:
                del kwargs["dropout_p"]
        return super().call_function(target, args, kwargs)


class _Runner(_Quiet):
    """An interpreter that compares each signal of the network with its translation right away.

    A value that is changed in place later must be compared before that happens.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        translation: Translation,
        unchecked: tuple[type, ...],
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors keep their own words
        self.translation, self.unchecked = translation, unchecked
        self.draw = Draw(module, {})
        self.outputs: tuple[Tensor, Tensor] | None = None
        last = next(n for n in module.graph.nodes if n.op == "output").args[0]
        last = last[0] if isinstance(last, tuple | list) else last
        self.last = last.name if isinstance(last, fx.Node) else ""
        self.coarse = 1e-9
        self.sources: dict[str, list[str]] = {}
        for name, (source, _) in translation.extract.items():
            self.sources.setdefault(source, []).append(name)

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation of the network, and compare the result with its translation."""
        if n.op == "output":
            return super().run_node(n)
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.is_floating_point():
            self.coarse = max(self.coarse, 100 * torch.finfo(result.dtype).eps)
        for name in self.sources.get(n.name, ()):
            extracted = self.translation.extract[name][1](result.detach())
            self.draw.data[name] = extracted if "tokens" in name else extracted.double()
        self._compare(n, self.translation.values.get(n.name), result)
        return result

    def _compare(self, n: fx.Node, value: Any, result: Any) -> None:
        if isinstance(value, tuple | list) and isinstance(result, tuple | list | Tensor):
            for one, other in zip(value, result, strict=False):
                self._compare(n, one, other)
        if not isinstance(value, Signal) or not isinstance(result, Tensor):
            return
        if n.op == "call_module" and isinstance(
            self.module.get_submodule(str(n.target)), self.unchecked
        ):
            self.draw.believe(value, result)
            return
        try:
            parts = [self.draw.value(e) for _, e in value.blocks]
            ours = arranged(torch.cat(parts, -1), value.layout)
        except (RuntimeError, IndexError, ValueError, TypeError, KeyError, AssertionError) as error:
            raise differs(n, f"It cannot be computed so: {str(error).splitlines()[0]}. ") from error
        if ours.shape != result.shape:
            raise differs(
                n, f"It has shape {tuple(ours.shape)} in place of {tuple(result.shape)}. "
            )
        if not close(ours, result, self.coarse):
            raise differs(n, "")
        if n.name == self.last:
            self.outputs = (result, ours)


def close(one: Tensor, other: Tensor, tolerance: float, least: float = 0.0) -> bool:
    """Whether two tensors agree to this fraction of their largest number, or to `least`."""
    one, other = one.detach().double(), other.detach().double()
    finite = other[other.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    atol = max(tolerance * scale, least)
    return torch.allclose(one, other, rtol=tolerance, atol=atol, equal_nan=True)


def differs(node: fx.Node, why: str) -> UnsupportedLayer:
    """Return the error for an operation whose rule does not do what the network does."""
    name = node.target if node.op == "call_module" else node.name
    return UnsupportedLayer(
        f"no infinite-width rule for what the network does at '{name}': with random weights it computes "
        f"something else than its translation. {why}A tensor that was changed in place through a view, "
        "channels in another order, or a layer with another forward than its class are possible causes; "
        "write the operation out, or use monte_carlo_kernel(network)."
    )


def _check_gradients(module: nn.Module, theirs: Tensor, ours: Tensor, tolerance: float) -> None:
    """Raise unless both outputs have the same gradients; they differ if something is detached."""
    parameters = [value for value in module.parameters() if value.requires_grad]
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(theirs.shape, generator=generator, dtype=torch.float64).to(theirs.device)
    found: list[Mapping[int, Tensor]] = []
    for output in (theirs, ours):
        if not output.requires_grad:
            found.append({})
            continue
        try:
            gradients = torch.autograd.grad(
                (output * weights).sum(), parameters, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if "is not implemented" in str(error):  # a step, whose rule knows the gradient
                return
            raise UnsupportedLayer(
                "no infinite-width rule for a network without gradients, which its tangent kernel needs: "
                f"{str(error).splitlines()[0]}."
            ) from error
        found.append({n: g for n, g in enumerate(gradients) if g is not None})
    largest = max((float(g.abs().max()) for g in found[0].values()), default=1.0)
    for number, value in enumerate(parameters):
        one, other = (gradients.get(number, torch.zeros_like(value)) for gradients in found)
        # gradients that cancel exactly, such as of the biases of keys, are rounding errors of others
        if not close(one, other, tolerance, 1e-11 * largest):
            raise UnsupportedLayer(
                "no infinite-width rule for a network whose gradients differ from the gradients of its "
                "operations: something in forward is detached, or has a gradient of its own. Use "
                "monte_carlo_kernel(network)."
            )


def _check_batches(
    module: fx.GraphModule, points: tuple[Tensor, ...], output: Tensor, tolerance: float
) -> None:
    """Raise if the output at a point depends on the other points of the batch, or on their number."""
    order = [2, 1]
    try:
        with torch.no_grad():
            again = _Quiet(module).run(*(x[order] for x in points))
    except Exception as error:
        raise UnsupportedLayer(
            "the network takes three points but not two: a number of points is written into forward. "
            "Use x.shape[0] there."
        ) from error
    again = again[0] if isinstance(again, tuple | list) else again
    if again.shape != output[order].shape or not close(again, output[order], tolerance):
        raise UnsupportedLayer(
            "no infinite-width rule for a network whose output at a point depends on the other points of the "
            "batch, or on their number: there is no kernel of two points. Leave out operations along the "
            "batch axis and factors such as x.shape[0]."
        )
