"""Random blocks for points that are vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.calls import CALLS
from fuzz.dice import Dice, Shape, Step, block, weights


@block(1, 1, 1, 2)
def linear(dice: Dice, shape: Shape) -> nn.Module:
    return nn.Linear(shape[-1], dice.size(), bias=dice.chance(0.8))


@block(1)
def perceptron(dice: Dice, shape: Shape) -> nn.Module:
    width = dice.size()
    activation = dice.one(nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.ReLU, nn.Mish)
    return nn.Sequential(nn.Linear(shape[0], width), activation(), nn.Linear(width, dice.size()))


@block(1)
def bilinear(dice: Dice, shape: Shape) -> nn.Module:
    layer = nn.Bilinear(shape[0], shape[0], dice.size(), bias=dice.chance(0.5))
    return Step(lambda self, x: self.layer(x, x.sin()), layer=layer)


@block(1, 2)
def norm_of_features(dice: Dice, shape: Shape) -> nn.Module:
    affine = {"elementwise_affine": True}
    if dice.chance(0.3):
        return nn.RMSNorm(shape[-1])
    return nn.LayerNorm(shape[-1:] if dice.chance(0.7) else shape, bias=dice.chance(0.7), **affine)


@block(1, 2)
def norm_of_channels(dice: Dice, shape: Shape) -> nn.Module:
    if dice.chance(0.5):
        return nn.BatchNorm1d(shape[0], affine=dice.chance(0.8))
    return nn.GroupNorm(dice.divisor(shape[0]), shape[0])


@block(1, 2, 3, 4)
def parametric_relu(dice: Dice, shape: Shape) -> nn.Module:
    return nn.PReLU(dice.one(1, shape[0]), init=0.3)


@block(1, 2, 3)
def parametric_relu_by_function(dice: Dice, shape: Shape) -> nn.Module:
    slope = weights(shape[0])
    return Step(lambda self, x: F.prelu(x - 0.1, self.slope.abs()), slope=slope)


@block(1, 2)
def matrix_of_its_own(dice: Dice, shape: Shape) -> nn.Module:
    return Step(lambda self, x: torch.tanh(x @ self.W), W=weights(shape[-1], dice.size()))


@block(1)
def matrix_used_both_ways(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        return torch.addmm(self.shift, x, self.W).tanh() @ self.W.T

    width = dice.size()
    return Step(forward, W=weights(shape[0], width), shift=weights(width))


@block(1, 2, 3)
def shift_and_scale(dice: Dice, shape: Shape) -> nn.Module:
    shape = shape if dice.chance(0.5) else shape[-1:]
    parts = {"shift": weights(*shape), "scale": weights(*(shape if dice.chance(0.5) else ()))}
    return Step(lambda self, x: torch.tanh(x + self.shift) * self.scale, **parts)


@block(1)
def three_way_tensor(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        return torch.einsum("bi,ijk,bk->bj", x, self.W, x.cos()).tanh()

    return Step(forward, W=weights(shape[0], dice.size(), shape[0]))


@block(1)
def tensor_with_two_outputs(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        return torch.einsum("bi,ijk->bjk", x, self.W).tanh()

    return Step(forward, W=weights(shape[0], dice.size(), dice.size()))


@block(1, 1)
def distances(dice: Dice, shape: Shape) -> nn.Module:
    p = dice.one(2.0, 2.0, 1.0, 3.0)
    mode = dice.one("use_mm_for_euclid_dist_if_necessary", "donot_use_mm_for_euclid_dist")

    def forward(self: Step, x: Tensor) -> Tensor:
        found = torch.cdist(x, self.centers, p=p, compute_mode=mode)
        return found if self.plain else torch.exp(-found * self.rate)

    step = Step(forward, centers=weights(dice.size(), shape[0]), rate=weights().abs())
    step.plain = dice.chance(0.5)
    step.rate = nn.Parameter(step.rate.detach())
    return step


@block(2)
def distances_of_sets(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        return torch.cdist(x, self.centers.expand(len(x), -1, -1))

    return Step(forward, centers=weights(dice.size(), shape[1]))


@block(1)
def distance_to_one(dice: Dice, shape: Shape) -> nn.Module:
    measure = dice.one(F.pairwise_distance, F.cosine_similarity)
    return Step(
        lambda self, x: measure(x, self.center.expand_as(x)).unsqueeze(-1),
        center=weights(*shape),
    )


@block(1)
def radial_basis(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        square = ((x[:, None] - self.centers) ** 2).sum(-1)
        return torch.exp(-square * self.rate.exp())

    number = dice.size()
    return Step(forward, centers=weights(number, shape[0]), rate=weights(number))


@block(1)
def splines(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        basis = torch.exp(-((x[:, None] - self.knots) ** 2))
        return torch.einsum("bgi,gio->bo", basis, self.W)

    grid = dice.size()
    return Step(forward, knots=weights(grid, *shape), W=weights(grid, *shape, dice.size()))


@block(1)
def cell(dice: Dice, shape: Shape) -> nn.Module:
    kind = dice.one(nn.RNNCell, nn.GRUCell, nn.LSTMCell)

    def forward(self: Step, x: Tensor) -> Tensor:
        state = self.cell(x)
        state = self.cell(x.cos(), state)
        return state[0] if isinstance(state, tuple) else state

    return Step(forward, cell=kind(shape[0], dice.size(), bias=dice.chance(0.8)))


@block(1)
def gathered(dice: Dice, shape: Shape) -> nn.Module:
    index = torch.randint(shape[0], (dice.size(),))
    kind = dice.one("gather", "index_select", "take_along_dim", "index", "embedding")

    def forward(self: Step, x: Tensor) -> Tensor:
        h = x * self.scale
        if kind == "gather":
            return h.gather(1, self.index.expand(len(x), -1))
        if kind == "index_select":
            return h.index_select(1, self.index)
        if kind == "take_along_dim":
            return torch.take_along_dim(h, self.index[None], 1)
        if kind == "embedding":
            return F.embedding((x[:, :1] > 0).long(), self.table)[:, 0] * h[:, :1]
        return h[:, self.index]

    return Step(forward, index=index, scale=weights(*shape), table=weights(2, dice.size()))


@block(1, 2)
def scattered(dice: Dice, shape: Shape) -> nn.Module:
    width = dice.size()
    kind = dice.one("scatter_add", "index_add", "scatter", "index_put")
    index = torch.randint(width, shape[-1:])

    def forward(self: Step, x: Tensor) -> Tensor:
        h = torch.tanh(x * self.scale)
        room = h.new_zeros(*h.shape[:-1], width)
        if kind == "scatter_add":
            return room.scatter_add(-1, self.index.expand_as(h), h)
        if kind == "index_add":
            return room.index_add(-1, self.index, h)
        if kind == "scatter":
            return room.scatter(-1, self.index[:1].expand(*h.shape[:-1], 1), h[..., :1])
        room[..., self.index[0]] = h[..., 0]
        return room

    return Step(forward, index=index, scale=weights(*shape[-1:]))


@block(1, 2)
def cumulative(dice: Dice, shape: Shape) -> nn.Module:
    kind = dice.one("cumsum", "cumprod", "logcumsumexp", "cummax", "diff")

    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x)
        if kind == "cummax":
            return h.cummax(-1)[0]
        if kind == "diff":
            return torch.diff(h, dim=-1, prepend=h[..., :1] * 0)
        return getattr(h, kind)(-1)

    return Step(forward, inner=nn.Linear(shape[-1], dice.size()))


@block(1, 2)
def ordered(dice: Dice, shape: Shape) -> nn.Module:
    kind = dice.one("sort", "topk", "median", "max", "kthvalue", "amax", "aminmax", "quantile")

    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x)
        if kind == "sort":
            return h.sort(-1)[0]
        if kind == "topk":
            return h.topk(min(2, h.shape[-1]), -1)[0]
        if kind == "kthvalue":
            return h.kthvalue(1, -1, keepdim=True)[0]
        if kind == "amax":
            return h.amax(-1, keepdim=True)
        if kind == "aminmax":
            return torch.stack(torch.aminmax(h, dim=-1), -1)
        if kind == "quantile":
            return h.quantile(0.3, -1, keepdim=True)
        return getattr(h, kind)(-1, keepdim=True)[0]

    return Step(forward, inner=nn.Linear(shape[-1], dice.size(2)))


@block(1, 2)
def reduced(dice: Dice, shape: Shape) -> nn.Module:
    names = "logsumexp", "prod", "norm", "var", "std", "mean", "sum"
    kind = dice.one(*names)

    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x)
        found = getattr(h, kind)(dim=-1, keepdim=True)
        return torch.cat([found, h.tanh()[..., :1]], -1)

    return Step(forward, inner=nn.Linear(shape[-1], dice.size(2)))


@block(1, 2)
def tempered_softmax(dice: Dice, shape: Shape) -> nn.Module:
    function = dice.one(F.softmax, F.log_softmax, F.softmin)
    inner = nn.Linear(shape[-1], dice.size(2))
    return Step(
        lambda self, x: function(self.inner(x) / self.temperature.exp(), -1),
        inner=inner, temperature=weights(),
    )  # fmt: skip


@block(1)
def gated(dice: Dice, shape: Shape) -> nn.Module:
    inner = nn.Linear(shape[0], 2 * dice.size())
    function = dice.one(F.glu, lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1])
    return Step(lambda self, x: function(self.inner(x)), inner=inner)


@block(1)
def maxout(dice: Dice, shape: Shape) -> nn.Module:
    width, pieces = dice.size(), 2

    def forward(self: Step, x: Tensor) -> Tensor:
        return self.inner(x).unflatten(-1, (width, pieces)).max(-1)[0]

    return Step(forward, inner=nn.Linear(shape[0], width * pieces))


@block(1)
def soft_mixture_of_experts(dice: Dice, shape: Shape) -> nn.Module:
    width, number = dice.size(), dice.size(2)

    def forward(self: Step, x: Tensor) -> Tensor:
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("be,beo->bo", self.gate(x).softmax(-1), outs)

    experts = nn.ModuleList([nn.Linear(shape[0], width) for _ in range(number)])
    return Step(forward, experts=experts, gate=nn.Linear(shape[0], number))


@block(1)
def stacked_experts(dice: Dice, shape: Shape) -> nn.Module:
    width, number = dice.size(), dice.size(2)

    def forward(self: Step, x: Tensor) -> Tensor:
        h = torch.baddbmm(self.shift, x.expand(number, -1, -1), self.W)
        return h.tanh().permute(1, 0, 2).reshape(len(x), -1)

    return Step(forward, W=weights(number, *shape, width), shift=weights(number, 1, width))


@block(1)
def weights_of_each_point(dice: Dice, shape: Shape) -> nn.Module:
    width = dice.size()

    def forward(self: Step, x: Tensor) -> Tensor:
        W = self.inner(x).reshape(len(x), width, *shape)
        return torch.einsum("bij,bj->bi", W, x).tanh()

    return Step(forward, inner=nn.Linear(shape[0], width * shape[0]))


@block(1)
def chosen_weights_of_each_point(dice: Dice, shape: Shape) -> nn.Module:
    width = dice.size()

    def forward(self: Step, x: Tensor) -> Tensor:
        kind = (x[:, 0] > 0).long()
        return torch.bmm(self.W[kind], x[:, :, None])[:, :, 0] + self.shift[kind]

    return Step(forward, W=weights(2, width, *shape), shift=weights(2, width))


@block(1)
def linear_algebra(dice: Dice, shape: Shape) -> nn.Module:
    names = "solve", "inverse", "matrix_exp", "cholesky", "det", "qr", "eigh", "svd", "pinv", "lu"
    kind = dice.one(*names)
    size = shape[0]

    def forward(self: Step, x: Tensor) -> Tensor:
        A = self.A + torch.diag(torch.arange(size, dtype=x.dtype) + 2)
        S = A @ A.mT
        if kind == "solve":
            return torch.linalg.solve(A, x[..., None])[..., 0]
        if kind == "cholesky":
            return torch.cholesky_solve(x[..., None], torch.linalg.cholesky(S))[..., 0]
        if kind == "det":
            return x * torch.linalg.slogdet(S)[1] + torch.linalg.det(A)
        if kind == "qr":
            return x @ torch.linalg.qr(A)[0]
        if kind == "eigh":
            return x * torch.linalg.eigh(S)[0]
        if kind == "svd":
            return x * torch.linalg.svd(A)[1]
        if kind == "lu":
            return torch.linalg.solve_triangular(A.tril(), x[..., None], upper=False)[..., 0]
        function = {"inverse": torch.linalg.inv, "pinv": torch.linalg.pinv}.get(kind)
        return x @ (function(A) if function else torch.matrix_exp(0.2 * A))

    return Step(forward, A=weights(size, size, scale=0.3))


@block(1)
def linear_algebra_of_each_point(dice: Dice, shape: Shape) -> nn.Module:
    kind, size = dice.one("inverse", "cholesky", "det", "eigvalsh", "matrix_exp"), dice.size(2)

    def forward(self: Step, x: Tensor) -> Tensor:
        A = 0.3 * self.inner(x).reshape(-1, size, size)
        S = A @ A.mT + torch.diag(torch.arange(size, dtype=x.dtype) + 1)
        if kind == "inverse":
            return torch.linalg.inv(S).flatten(1)
        if kind == "cholesky":
            return torch.linalg.cholesky(S).flatten(1)
        if kind == "det":
            return torch.linalg.slogdet(S)[1][:, None]
        return torch.linalg.eigvalsh(S) if kind == "eigvalsh" else torch.matrix_exp(A).flatten(1)

    return Step(forward, inner=nn.Linear(shape[0], size * size))


@block(1, 2)
def spectral_filter(dice: Dice, shape: Shape) -> nn.Module:
    size = shape[-1]

    def forward(self: Step, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.W), n=size)

    return Step(forward, W=weights(size // 2 + 1, 2))


@block(1)
def fixed_point(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        z = torch.zeros_like(self.inner(x))
        for _ in range(4):
            z = torch.tanh(0.3 * self.again(z) + self.inner(x))
        return z

    width = dice.size()
    return Step(forward, inner=nn.Linear(shape[0], width), again=nn.Linear(width, width, False))


@block(1, 2, 3)
def branch_of_each_element(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        low, high = torch.exp(self.low * x.clamp(max=0)), torch.sin(self.high * x)
        return torch.where(x > 0.1, high, low) + torch.clamp(x * self.low, -0.5, 0.5)

    return Step(forward, low=weights(shape[-1]), high=weights())


@block(1)
def ensemble_by_vmap(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        outs = torch.func.vmap(lambda W, b: torch.tanh(x @ W + b))(self.W, self.b)
        return outs.mean(0)

    number, width = dice.size(2), dice.size()
    return Step(forward, W=weights(number, *shape, width), b=weights(number, width))


@block(1)
def normalized_weights(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        W = self.layer.weight
        W = (W - W.mean()) / (W.std() + 0.1) if self.standard else F.normalize(W, dim=1)
        return F.linear(x, W, self.layer.bias)

    step = Step(forward, layer=nn.Linear(shape[0], dice.size(2)))
    step.standard = dice.chance(0.5)
    return step


@block(1, 1, 1, 2, 2, 2, 3)
def any_operation(dice: Dice, shape: Shape) -> nn.Module:
    """One of the survey's operations, point by point."""
    size = shape[0]
    fitting = [
        (function, rest)
        for function, (first, *rest) in CALLS.values()
        if tuple(size if s == "n" else s for s in first[1:]) == shape
    ]
    function, rest = dice.one(*fitting)

    def forward(self: Step, x: Tensor) -> Tensor:
        points = [function(point[None] + 0.1 * self.gain, *self.own) for point in x]
        return torch.stack([out.reshape(-1) for out in points])

    own = [weights(*(size if s == "n" else s for s in shape)) for shape in rest]
    return Step(forward, own=nn.ParameterList(own), gain=weights(*shape))


@block(1)
def to_a_sequence(dice: Dice, shape: Shape) -> nn.Module:
    length = dice.size()

    def forward(self: Step, x: Tensor) -> Tensor:
        if self.kind == "expand":
            return torch.tanh(x[:, None].expand(-1, length, -1) * self.scale)
        if self.kind == "outer":
            return x[:, :, None] * self.scale.T[None, : x.shape[1]]
        return (x.repeat(1, length) * self.scale.flatten()).unflatten(1, (length, -1))

    step = Step(forward, scale=weights(length, shape[0]))
    step.kind = dice.one("expand", "outer", "repeat")
    return step
