"""A module that is built from the graph of a program, node by node."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx, nn

from net2gp.errors import NetworkError
from net2gp.interop.exported.functions import (
    DROPPED,
    FUNCTIONS,
    MADE,
    REWRITTEN,
    SILENT,
    named_arguments,
)
from net2gp.interop.exported.layers import EXPORT, LAYERS, NATIVE, TURNS


@dataclass
class Builder:
    """Copies the graph of a program, node by node, with layers in place of operations on parameters."""

    program: torch.export.ExportedProgram
    root: nn.Module = field(default_factory=nn.Module)
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[fx.Node, Any] = field(default_factory=dict)
    configs: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def build(self) -> fx.GraphModule:
        """Return the module."""
        signature = self.program.graph_signature
        self.homes = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        self.floating = [
            name
            for name in signature.inputs_to_parameters.values()
            if self.program.state_dict[name].is_floating_point()
        ]
        self._place_values(set(signature.inputs_to_parameters.values()))
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node.name not in self.homes:
                self.made[node] = self.graph.placeholder(node.name)
            elif node.op == "call_function":
                self._copy(node)
            elif node.op == "output":
                self.graph.output(self._new(node.args[0][0]))
            elif node.op == "get_attr":
                raise NetworkError(
                    f"the program holds a graph of its own, {node.target}, as with torch.no_grad() or "
                    "torch.cond in the network. Export a network without it."
                )
        module = fx.GraphModule(self.root, self.graph, "Program")
        self.graph.eliminate_dead_code()
        module.recompile()
        return module.eval()

    def _place_values(self, parameters: set[str]) -> None:
        """Put parameters and buffers under their names."""
        values = {**self.program.constants, **self.program.state_dict}
        for name in dict.fromkeys((*self.program.state_dict, *self.homes.values())):
            owner, last = self._owner(name)
            value = values[name]
            if name in parameters:
                keep = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
                owner.register_parameter(last, keep)
            else:
                owner.register_buffer(last, value.detach().clone())

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a parameter, made if it is not there, and the last part of its name."""
        *path, last = name.split(".")
        owner = self.root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner, last

    def _new(self, value: Any) -> Any:
        """An argument, with new nodes in place of old ones."""
        return fx.node.map_arg(value, self._node)

    def _node(self, node: fx.Node) -> Any:
        if node not in self.made:
            self.made[node] = self.graph.get_attr(self.homes[node.name])
        return self.made[node]

    def _copy(self, node: fx.Node) -> None:
        name = str(node.target)
        if name in SILENT:
            return
        given = named_arguments(node)
        if name in LAYERS and (layer := self._layer(name, given)) is not None:
            signal = self._new(given["indices" if "embedding" in name else "input"])
            self.made[node] = self.graph.call_module(layer, (signal,))
        elif name in DROPPED:
            if given["train"]:
                raise NetworkError(
                    f"the program was exported in training mode: it draws {name}. Export it with {EXPORT}."
                )
            self.made[node] = self._new(given["input"])
        elif node.target is operator.getitem and str(node.args[0].target) == NATIVE:  # type: ignore[union-attr]
            self.made[node] = self._new(node.args[0])
        elif name in MADE and self._is_of_parameters(given["dtype"]):
            like = self.graph.get_attr(self.floating[0])
            self.made[node] = self.graph.call_function(MADE[name], (like, *self._new(node.args)))
        elif name in REWRITTEN:
            function, arguments = REWRITTEN[name](given)
            self.made[node] = self.graph.call_function(function, *self._new(arguments))
        else:
            function = FUNCTIONS.get(name) or cast(Callable, node.target)
            arguments = (self._new(node.args), self._new(node.kwargs))
            self.made[node] = self.graph.call_function(function, *arguments)

    def _is_of_parameters(self, dtype: torch.dtype | None) -> bool:
        """Whether a dtype is that of the parameters, which may change when the module is used."""
        kinds = {self.program.state_dict[name].dtype for name in self.floating}
        return bool(kinds) and (dtype in kinds or dtype is None)

    def _layer(self, name: str, given: dict[str, Any]) -> str | None:
        """Put the layer of an operation where its parameters are, and return its name, or None."""
        kinds = ("weight", "bias", "running_mean", "running_var")
        found = {kind: self._home(given[kind]) for kind in kinds if given.get(kind) is not None}
        prefixes = {home.rpartition(".")[0] for home in found.values()}
        ends = {kind: home.rpartition(".")[2] for kind, home in found.items()}
        if len(prefixes) != 1 or any(kind != end for kind, end in ends.items()):
            return None
        (prefix,) = prefixes
        config = (name, *(_plain(v) for k, v in given.items() if k not in ("input", "indices")))
        if not prefix or self.configs.setdefault(prefix, config) != config:
            return None
        holder = self.root.get_submodule(prefix)
        if type(holder) is not nn.Module:
            return prefix  # made by an earlier call
        if holder._modules or set(holder._parameters) - {"weight", "bias"}:
            del self.configs[prefix]
            return None
        layer = LAYERS[name](given)
        if layer is None:
            del self.configs[prefix]
            return None
        layer._parameters.update(holder._parameters)
        layer._buffers.update(holder._buffers)
        owner, last = self._owner(prefix)
        owner._modules[last] = layer
        return prefix

    def _home(self, node: Any) -> str:
        """The name of the parameter or buffer that an argument is, or a name that fits none."""
        if isinstance(node, fx.Node) and str(node.target) in TURNS:
            return ""
        return self.homes.get(node.name, "") if isinstance(node, fx.Node) else ""


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
