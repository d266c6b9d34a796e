"""What real code does around a block: hooks, checkpoints, views, other orders of the batch, gradients."""

from __future__ import annotations

import copy
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from fuzz.dice import Dice, Make, Refused, Shape, Step, weights, wrap


def weighted(module: nn.Module) -> list[nn.Module]:
    """The layers within that have a matrix as their weight."""
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    # hooks that renew a weight do not run where the weight is read and its layer is not called
    uncalled = {
        part.layer for part in module.modules() if part.extra_repr() == "normalized_weights"
    }
    found = [
        part for part in module.modules() if type(part) in kinds.__args__ and part not in uncalled
    ]
    if not found:
        raise Refused
    return found


@wrap
def forward_hook(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    inner = make(shape)
    target = dice.one(*inner.modules())
    if dice.chance(0.5):
        target.register_forward_hook(lambda module, given, out: _each(out, lambda o: 1.5 * o))
    else:
        target.register_forward_hook(lambda module, given, out: None)
    return inner


@wrap
def forward_pre_hook(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    inner = make(shape)
    inner.register_forward_pre_hook(lambda module, given: (given[0] * 0.8, *given[1:]))
    return inner


@wrap
def backward_hook(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    inner = make(shape)
    inner.register_full_backward_hook(lambda module, given, out: None)
    return inner


@wrap
def tensor_hook(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()  # torch crashes for a hook on what was changed in place
        if h.requires_grad:
            h.register_hook(lambda g: None)
        return h

    return Step(forward, inner=make(shape))


def _each(out: object, function: object) -> object:
    if isinstance(out, tuple):
        return (function(out[0]), *out[1:])
    return function(out)


@wrap
def weight_norm(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    inner = make(shape)
    old = dice.chance(0.4)
    norm = nn.utils.weight_norm if old else parametrizations.weight_norm
    norm(dice.one(*weighted(inner)))
    return inner


@wrap
def spectral_norm(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    inner = make(shape)
    old = dice.chance(0.3)
    norm = nn.utils.spectral_norm if old else parametrizations.spectral_norm
    norm(dice.one(*weighted(inner)))
    return inner


@wrap
def orthogonal(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    inner = make(shape)
    layers = [layer for layer in weighted(inner) if isinstance(layer, nn.Linear)]
    if not layers:
        raise Refused
    maps = dice.one("matrix_exp", "cayley", "householder")
    parametrizations.orthogonal(dice.one(*layers), orthogonal_map=maps)
    return inner


class Doubled(nn.Module):
    """A parametrization of one's own."""

    def forward(self, value: Tensor) -> Tensor:
        return value.sinh() + 0.1 * value.mean()


@wrap
def parametrization_of_its_own(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    inner = make(shape)
    nn.utils.parametrize.register_parametrization(dice.one(*weighted(inner)), "weight", Doubled())
    return inner


@wrap
def pruned(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    inner = make(shape)
    # a weight that another hook computes is no parameter, and torch cannot prune it
    free = [layer for layer in weighted(inner) if "weight" in layer._parameters]
    if not free:
        raise Refused
    prune.random_unstructured(dice.one(*free), "weight", amount=0.4)
    return inner


@wrap
def checkpointed(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    reentrant = dice.chance(0.4)

    def forward(self: Step, x: Tensor) -> Tensor:
        if reentrant and not x.requires_grad:
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        return checkpoint(self.inner, x, use_reentrant=reentrant)

    return Step(forward, inner=make(shape))


@wrap
def autocast(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=enabled):
            return self.inner(x).to(x.dtype)

    enabled = dice.chance(0.7)
    return Step(forward, inner=make(shape))


@wrap
def in_place(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    kind = dice.one("scale", "slice", "relu", "view", "mask", "chain")

    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x)
        h = h.clone() if copied else h * 1.0
        if kind == "scale":
            h.mul_(2.0)
            h += self.shift
        elif kind == "slice":
            h[:, 0] = h[:, -1].clone() * self.shift
        elif kind == "relu":
            torch.relu_(h)
        elif kind == "view":
            h.view(len(h), -1)[:, :1].mul_(self.shift)
        elif kind == "mask":
            h.masked_fill_(h > 0.5, 0.5)
        else:
            h = h.add_(1.0).tanh_().add_(self.shift)
        return h * self.shift

    copied = dice.chance(0.5)
    return Step(forward, inner=make(shape), shift=weights())


@wrap
def in_place_on_the_output_itself(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    layer = nn.Linear(shape[-1], dice.size())
    kind = dice.one("mul", "add", "slice", "relu", "tanh")

    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.layer(x)
        if kind == "slice":
            h[..., 0] = 0.5
        elif kind == "relu":
            F.relu(h, inplace=True)
        elif kind == "tanh":
            h.tanh_()
        else:
            getattr(h, f"{kind}_")(2.0)
        return h

    return Step(forward, layer=layer)


@wrap
def views(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    kind = dice.one("strided", "narrow", "chunks", "unbind", "transposed", "split")

    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x)
        if kind == "strided":
            h = h.contiguous().as_strided(h.shape, h.contiguous().stride())
        elif kind == "narrow":
            h = h.narrow(1, 0, max(1, h.shape[1] - 1))
        elif kind == "chunks":
            h = torch.cat(h.chunk(2, 1)[::-1], 1)
        elif kind == "unbind":
            h = torch.stack(h.unbind(1)[::-1], 1)
        elif kind == "transposed":
            h = h.transpose(0, 1).contiguous().transpose(0, 1)
        else:
            h = torch.cat([part.sin() for part in h.split(1, 1)], 1)
        return h

    return Step(forward, inner=make(shape))


@wrap
def residual(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x)
        return x + h if h.shape == x.shape else torch.cat([x.flatten(1), h.flatten(1)], 1)

    return Step(forward, inner=make(shape))


@wrap
def called_twice(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x)
        if h.shape == x.shape and again:
            return self.inner(h.tanh())
        return h + self.inner(x.cos()) * 0.5

    again = dice.chance(0.7)
    return Step(forward, inner=make(shape))


@wrap
def called_and_ignored(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        self.inner(x.cos())
        return self.inner(x)

    return Step(forward, inner=make(shape))


@wrap
def detached_parts(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    kind = dice.one("half", "second call", "no_grad", "stop")

    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x)
        if kind == "half":
            return torch.cat([h[:, :1].detach(), h[:, 1:]], 1) if h.shape[1] > 1 else h
        if kind == "no_grad":
            with torch.no_grad():
                scale = self.inner(x).tanh()
            return h * scale
        if kind == "stop":
            return h / (1 + h.detach().abs())
        return h * self.inner(x.cos()).detach()

    return Step(forward, inner=make(shape))


@wrap
def first_under_no_grad(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.tanh(self.features(x))
        return self.inner(x)

    features = nn.Linear(shape[-1], shape[-1])
    for parameter in features.parameters():
        parameter.requires_grad_(dice.chance(0.3))
    return Step(forward, features=features, inner=make(shape))


@wrap
def batch_in_another_order(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    kind = dice.one("flip", "sort", "roll")

    def forward(self: Step, x: Tensor) -> Tensor:
        if kind == "sort":
            order = x.flatten(1)[:, 0].argsort()
            return self.inner(x[order])[order.argsort()]
        if kind == "roll":
            return self.inner(x.roll(1, 0)).roll(-1, 0)
        return self.inner(x.flip(0)).flip(0)

    return Step(forward, inner=make(shape))


@wrap
def batch_in_pieces(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    size = dice.one(1, 1, 2)

    def forward(self: Step, x: Tensor) -> Tensor:
        return torch.cat([self.inner(part) for part in x.split(size)])

    return Step(forward, inner=make(shape))


@wrap
def batch_and_time_flattened(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    if len(shape) < 2:
        raise Refused
    time_first = dice.chance(0.5)

    def forward(self: Step, x: Tensor) -> Tensor:
        B, T = x.shape[:2]
        if time_first:
            h = self.inner(x.transpose(0, 1).flatten(0, 1))
            return h.unflatten(0, (T, B)).transpose(0, 1)
        return self.inner(x.flatten(0, 1)).unflatten(0, (B, T))

    return Step(forward, inner=make(shape[1:]))


@wrap
def two_views_in_one_batch(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    kind = dice.one("cat", "interleave", "repeat", "stack")

    def forward(self: Step, x: Tensor) -> Tensor:
        if kind == "cat":
            one, two = self.inner(torch.cat([x, x.cos()])).chunk(2)
        elif kind == "repeat":
            one, two = self.inner(x.repeat(2, *[1] * len(shape))).chunk(2)
        elif kind == "stack":
            both = torch.stack([x, x.cos()], 1)
            one, two = self.inner(both.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        else:
            one, two = self.inner(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).unbind(1)
        return one * two.sin()

    return Step(forward, inner=make(shape))


@wrap
def routed_points(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    kind = dice.one("mask", "dictionary", "index")

    def forward(self: Step, x: Tensor) -> Tensor:
        side = x.flatten(1)[:, 0] > 0
        out: Tensor | None = None
        for name, expert in self.experts.items():
            mask = side if name == "yes" else ~side
            if not bool(mask.any()):
                continue
            part = expert(x[mask]) if kind != "index" else expert(x[mask.nonzero()[:, 0]])
            out = part.new_zeros(len(x), *part.shape[1:]) if out is None else out
            if kind == "dictionary":
                out = out.index_add(0, mask.nonzero()[:, 0], part)
            else:
                out[mask] = part
        assert out is not None
        return out

    yes = make(shape)
    return Step(forward, experts=nn.ModuleDict({"yes": yes, "no": _twin(yes)}))


def _twin(module: nn.Module) -> nn.Module:
    """A copy with other values."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return other


@wrap
def vmap_over_points(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda point: self.inner(point[None])[0])(x)

    return Step(forward, inner=make(shape))


@wrap
def functional_call_inside(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        own = {name: value * self.gain for name, value in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, own, (x,))

    inner = make(shape)
    if any("checkpointed" in module.extra_repr() for module in inner.modules()):
        raise Refused  # torch would run it again with the weights as they are outside
    return Step(forward, inner=inner, gain=weights())


@wrap
def gradient_by_autograd(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    enabled = dice.chance(0.6)

    def forward(self: Step, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(enabled or torch.is_grad_enabled()):
            x = x.requires_grad_() if x.is_leaf and not x.requires_grad else x
            energy = self.inner(x).flatten(1).sum(1).sin()
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force

    def detached(self: Step, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.inner(x).flatten(1).sum(1).sin()
            return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]

    return Step(dice.one(forward, detached), inner=make(shape))


@wrap
def gradient_by_func(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    kind = dice.one("grad", "jvp", "vmap of grad", "jacrev")

    def forward(self: Step, x: Tensor) -> Tensor:
        energy = lambda z: self.inner(z).flatten(1).sum(1).sin()
        if kind == "grad":
            return torch.func.grad(lambda z: energy(z).sum())(x)
        if kind == "jvp":
            return torch.func.jvp(energy, (x,), (torch.ones_like(x),))[1][:, None]
        single = lambda z: energy(z[None])[0]
        transform = torch.func.grad if kind == "vmap of grad" else torch.func.jacrev
        return torch.func.vmap(transform(single))(x)

    return Step(forward, inner=make(shape))


class Cube(torch.autograd.Function):
    """An old-style function, without a place for torch.func."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return x**2 * g


class StraightThrough(torch.autograd.Function):
    """A new-style function, whose derivative is declared rather than its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


@wrap
def function_of_its_own(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    function = dice.one(Cube, StraightThrough)
    return Step(
        lambda self, x: function.apply(self.inner(x).tanh() * self.gain) * self.gain,
        inner=make(shape), gain=weights(),
    )  # fmt: skip


@wrap
def straight_through_by_detaching(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()
        return (h + (h.sign() - h).detach()) * self.gain

    return Step(forward, inner=make(shape), gain=weights())


class Scaled(nn.Linear):
    """A subclass with another forward."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x) + F.linear(x.sin(), self.weight)


class LowRank(nn.Linear):
    """A linear layer with a low-rank update."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = weights(2, inputs), weights(outputs, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Causal(nn.Conv1d):
    """A convolution that looks back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


class Standardized(nn.Conv2d):
    """A convolution with standardized weights."""

    def forward(self, x: Tensor) -> Tensor:
        W = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, W / (W.std() + 0.1), self.bias)


class Plain(nn.Linear):
    """A subclass that changes nothing."""


@wrap
def subclassed(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    if len(shape) == 3 and dice.chance(0.7):
        return Standardized(shape[0], dice.size(), 2, padding=1)
    if len(shape) == 2 and dice.chance(0.5):
        return Causal(shape[0], shape[0], 2, groups=dice.divisor(shape[0]))
    return dice.one(Scaled, LowRank, Plain)(shape[-1], dice.size())


@wrap
def method_replaced(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    inner = make(shape)
    layer = dice.one(*weighted(inner))
    own = type(layer).forward
    if dice.chance(0.5):
        layer.forward = types.MethodType(lambda self, x: 1.3 * own(self, x.sin()), layer)
    else:
        layer.forward = lambda x: own(layer, x) * layer.weight.mean()
    return inner


@wrap
def tied(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    width = dice.size()
    kind = dice.one("transposed", "same", "functional", "bias", "copy")

    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.one(x).tanh()
        if kind == "transposed":
            return F.linear(h, self.one.weight.T)
        if kind == "functional":
            return h + F.linear(x.cos(), self.one.weight)
        return self.two(h)

    one = nn.Linear(shape[-1], shape[-1] if kind in ("same", "copy") else width)
    two = nn.Linear(one.out_features, one.out_features)
    if kind == "same":
        two.weight = one.weight
    elif kind == "bias":
        two.bias = one.bias
    elif kind == "copy":
        two = one
    parts = {"one": one} if kind in ("transposed", "functional") else {"one": one, "two": two}
    return Step(forward, **parts)


@wrap
def frozen_part(dice: Dice, shape: Shape, make: Make) -> nn.Module:
    inner = make(shape)
    for parameter in inner.parameters():
        parameter.requires_grad_(dice.chance(0.5))
    return nn.Sequential(inner, nn.Identity()) if dice.chance(0.5) else inner
