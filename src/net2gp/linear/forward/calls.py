"""One forward pass of a network, and a record of the calls of its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from net2gp.inputs import map_inputs
from net2gp.linear.forward.evaluation import LOCK, accepts
from net2gp.linear.forward.functional import Functions
from net2gp.linear.forward.layers import Rule, find_rule
from net2gp.linear.forward.modes import in_eval_mode
from net2gp.linear.precision import integers_apart, narrowed
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

Key = tuple[str, ...]
"""A layer, given by its kind and the network's names of its chosen parameters."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of one layer.

    Args:
        module: The layer.
        rule: The rule for its gradients.
        names: The network's name of each parameter, by the layer's own name of it.
        a: The layer's input, prepared as the rule needs it.
        version: The version of `a` at the call; a later one means that it was changed in place.
        shape: The shape of the layer's output.
        edge: The place of the output in the autograd graph; None if it has no gradient.
        part: Whether it is a step of what torch computes in one operation when it is not recorded.
    """

    module: nn.Module
    rule: Rule
    names: dict[str, str]
    a: Tensor
    version: int
    shape: torch.Size
    edge: GradientEdge | None = field(repr=False)
    part: bool = False

    @property
    def key(self) -> Key:
        """Return the key of the layer that was called."""
        return (type(self.module).__name__, *self.names.values())


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let autograd record within this context, even if the caller switched it off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def recordable(x: Inputs, *, follow: bool = False) -> Inputs:
    """Return `x` as constants that autograd can save; tensors made in inference mode are copied.

    With `follow`, tensors that require a gradient keep requiring it.
    """

    def one(value: Tensor) -> Tensor:
        if value.is_inference():
            return value.clone()
        return value if follow else value.detach()

    return map_inputs(x, one)


def fresh_leaves(linearized: Linearized, names: Sequence[str]) -> Params:
    """Return the parameters, with those named `names` as fresh leaves of the autograd graph.

    They have the dtypes in which the network takes them, so that its layers read the leaves themselves.
    """
    with recording():
        return {
            name: value.detach().requires_grad_() if name in names else value
            for name, value in narrowed(linearized.params, linearized.stored).items()
        }


def forward(
    linearized: Linearized,
    leaves: Params,
    x: Inputs,
    given: Inputs | None = None,
    *,
    follow: bool = False,
) -> tuple[list[Call], Tensor]:
    """Return the calls of all layers that have a rule and chosen parameters, and the outputs with a graph.

    With `follow` the graph goes back to `x`, also through the layers' inputs.
    """
    calls: list[Call] = []
    functions = Functions(leaves, partial(_record, calls, follow))
    with LOCK, contextlib.ExitStack() as stack:
        stack.enter_context(in_eval_mode(linearized, x))
        canonical = {id(value): name for name, value in linearized.network.named_parameters()}
        for module in linearized.network.modules():
            rule = find_rule(module)
            names = {
                suffix: canonical[id(value)]
                for suffix, value in module.named_parameters(recurse=False)
                if suffix in ("weight", "bias") and canonical[id(value)] in leaves
            }
            if rule is not None and names:
                # before the network's own hooks, which may replace the output
                hook = _recorder(functions, names)
                handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_pre_hook(functions.rest).remove)
        stack.enter_context(integers_apart(linearized.network))
        stack.enter_context(functions)
        out = run(linearized, leaves, x, given, follow=follow)
    return calls, out


def run(
    linearized: Linearized,
    params: Params,
    x: Inputs,
    given: Inputs | None = None,
    *,
    follow: bool = False,
) -> Tensor:
    """Compute f(x; θ) with a graph of plain autograd; errors describe the inputs `given`, or `x`."""
    with recording(), accepts(x if given is None else given):
        return linearized.evaluate(params, recordable(x, follow=follow))


def _recorder(functions: Functions, names: dict[str, str]) -> Any:
    def hook(module: nn.Module, arguments: tuple, keywords: dict, out: Tensor) -> Tensor:
        functions.resting -= 1
        a = arguments[0] if arguments else keywords["input"]
        return functions.add(module, names, a, out, False)

    return hook


def _record(
    calls: list[Call],
    follow: bool,
    module: nn.Module,
    names: dict[str, str],
    a: Tensor,
    out: Tensor,
    part: bool,
) -> Tensor:
    rule = find_rule(module)
    assert rule is not None
    prepared = rule.prepare(module, a if follow else a.detach())
    if follow and not out.requires_grad:
        # an embedding's output depends on nothing that is differentiated, but its gradient is needed
        out = out + torch.zeros_like(out).requires_grad_()
    # an in-place operation on a view rewrites its history, and the new one lacks this output
    out = out.clone() if out._is_view() else out
    # the edge still points to this output if an in-place operation overwrites the tensor later
    edge = get_gradient_edge(out) if out.requires_grad else None
    version = prepared._version
    calls.append(Call(module, rule, names, prepared, version, out.shape, edge, part))
    return out
