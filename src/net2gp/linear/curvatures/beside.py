"""Which parameters reach the output without passing a head: other heads, skips, experts, gates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from net2gp.errors import NetworkError
from net2gp.inputs import chunks
from net2gp.linear.forward.calls import fresh_leaves, run
from net2gp.linear.forward.evaluation import LOCK
from net2gp.types import Inputs

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

POINTS_PER_LOOK = 64
"""The number of points per pass that looks for parameters."""


def check_alone(linearized: Linearized, name: str, x: Inputs) -> None:
    """Raise if chosen parameters reach the output at `x` on a way that avoids the inputs of the layer `name`.

    A posterior over that layer alone would have no uncertainty about their effect.
    """
    beside = _beside(linearized, name, x)
    if not beside:
        return
    layers = list(dict.fromkeys(key.rpartition(".")[0] or key for key in beside))
    shown = ", ".join(f"'{layer}'" for layer in layers[:4])
    more = f", … ({len(layers)} in all)" if len(layers) > 4 else ""
    if len(layers) > 4:
        way = "structure=Kron() for all parameters"
    else:
        parameters = dict(linearized.network.named_parameters())
        names = [layer if layer in parameters else f"{layer}.*" for layer in layers]
        way = f"only={[f'{name}.*', *names]} and structure=Full() or Kron() for all of these"
    raise NetworkError(
        f"LastLayer() found '{name}', but {shown}{more} reach the output beside it, and a posterior over "
        f"'{name}' alone would be sure of them. Pass {way}, or only={[f'{name}.*']} and structure=Full() "
        f"to take '{name}' alone."
    )


def check_columns(name: str, change: Tensor) -> None:
    """Raise if a step of the parameters of the layer `name` does not change some output at any point."""
    fixed = (change == 0).all(0).nonzero().flatten().tolist()
    if not fixed:
        return
    some = ", ".join(str(index) for index in fixed[:5]) + (", …" if len(fixed) > 5 else "")
    raise NetworkError(
        f"LastLayer() found '{name}', on which {len(fixed)} of the {change.shape[1]} outputs do not depend "
        f"(index {some}). Pick the outputs that do with linearize(network, output=lambda out: ...), or pass "
        f"only={[f'{name}.*']} and structure=Full(), which is sure of the others."
    )


def _beside(linearized: Linearized, name: str, x: Inputs) -> list[str]:
    """Return the chosen parameters that reach the output through neither layer `name` nor another layer."""
    prefix = f"{name}." if name else ""
    own = {f"{prefix}weight", f"{prefix}bias"}
    others = [key for key in linearized.params if key not in own]
    if not others:
        return []
    leaves, reached = fresh_leaves(linearized, others), set[str]()
    with LOCK, _cut_apart(linearized.network, name):
        for part in chunks(x, POINTS_PER_LOOK):
            out = run(linearized, leaves, part)
            if not out.requires_grad:
                continue
            values = [leaves[key] for key in others]
            found = torch.autograd.grad(out, values, torch.ones_like(out), allow_unused=True)
            pairs = zip(others, found, strict=True)
            reached.update(key for key, value in pairs if value is not None)
    return [key for key in others if key in reached]


@contextlib.contextmanager
def _cut_apart(network: nn.Module, name: str) -> Iterator[None]:
    """Within this context no gradient passes the layer `name`, or goes through another layer to its inputs.

    So only the last layer on each way to the output gets a gradient: other heads, but not their common body.
    """

    def cut(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
        return out.detach().requires_grad_().clone()  # later operations may change it in place

    def detach(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(one.detach() if isinstance(one, Tensor) else one for one in given)

    with contextlib.ExitStack() as stack:
        head = network.get_submodule(name)
        stack.callback(head.register_forward_hook(cut).remove)
        for module in network.modules():
            layer = any(True for _ in module.parameters(recurse=False))
            if layer and module is not head and not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_pre_hook(detach).remove)
        yield
