"""Random blocks for points that are sequences, or maps with one axis of places, and for tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fuzz.dice import VOCABULARY, Dice, Shape, Step, block, of_tokens, weights


@block(2, 2)
def recurrent(dice: Dice, shape: Shape) -> nn.Module:
    kind = dice.one(nn.RNN, nn.GRU, nn.LSTM)
    options = {"proj_size": 2} if kind is nn.LSTM and dice.chance(0.2) else {}
    layer = kind(
        shape[1], max(dice.size(), 3) if options else dice.size(), dice.one(1, 1, 2),
        bias=dice.chance(0.8), bidirectional=dice.chance(0.3), **options,
    )  # fmt: skip
    layer.batch_first = dice.chance(0.6)
    last = dice.chance(0.5)

    def forward(self: Step, x: Tensor) -> Tensor:
        if self.layer.batch_first:
            h = self.layer(x)[0]
        else:
            h = self.layer(x.transpose(0, 1))[0].transpose(0, 1)
        return h[:, -1] if last else h

    return Step(forward, layer=layer)


@block(2)
def recurrent_with_a_learned_start(dice: Dice, shape: Shape) -> nn.Module:
    width = dice.size()

    def forward(self: Step, x: Tensor) -> Tensor:
        start = self.start.expand(-1, len(x), -1).contiguous()
        return self.layer(x, start)[1][-1]

    return Step(
        forward, layer=nn.GRU(shape[1], width, batch_first=True), start=weights(1, 1, width)
    )


@block(2)
def recurrent_over_packed_lengths(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] > 0).long() * (shape[0] - 1)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(
            self.layer(packed)[0], batch_first=True, total_length=shape[0]
        )[0].sum(1)  # fmt: skip

    return Step(forward, layer=nn.GRU(shape[1], dice.size(), batch_first=True))


@block(2)
def scan_by_hand(dice: Dice, shape: Shape) -> nn.Module:
    width = dice.size()

    def forward(self: Step, x: Tensor) -> Tensor:
        h, states = x.new_zeros(len(x), width), []
        for t in range(x.shape[1]):
            h = self.decay.sigmoid() * h + self.inner(x[:, t])
            states.append(h)
        return torch.stack(states, 1)

    return Step(forward, inner=nn.Linear(shape[1], width), decay=weights(width))


@block(2, 2)
def attention(dice: Dice, shape: Shape) -> nn.Module:
    options = {"add_bias_kv": True} if dice.chance(0.2) else {}
    options |= {"add_zero_attn": True} if dice.chance(0.2) else {}
    options |= {"kdim": shape[1], "vdim": shape[1]} if dice.chance(0.2) and not options else {}
    first, weighted = dice.chance(0.6), dice.chance(0.5)
    layer = nn.MultiheadAttention(
        shape[1], dice.divisor(shape[1]), bias=dice.chance(0.7), batch_first=first, **options
    )

    def forward(self: Step, x: Tensor) -> Tensor:
        x = x if first else x.transpose(0, 1)
        mask = torch.ones(shape[0], shape[0], dtype=torch.bool).triu(1) if causal else None
        h = self.layer(x, x, x, need_weights=weighted, attn_mask=mask)[0]
        return h if first else h.transpose(0, 1)

    causal = dice.chance(0.3) and "add_zero_attn" not in options
    return Step(forward, layer=layer)


@block(2)
def attention_to_something_else(dice: Dice, shape: Shape) -> nn.Module:
    alike, projected = dice.chance(0.5), dice.chance(0.5)
    options = {"kdim": 2 * shape[1]} if projected else {}
    layer = nn.MultiheadAttention(shape[1], dice.divisor(shape[1]), batch_first=True, **options)

    def forward(self: Step, x: Tensor) -> Tensor:
        keys = x.cos().flip(1)
        values = keys if alike else keys.sin()
        keys = torch.cat([keys, x], 2) if projected else keys
        return self.layer(x, keys, values, need_weights=False)[0]

    return Step(forward, layer=layer)


@block(2, 2)
def transformer_layer(dice: Dice, shape: Shape) -> nn.Module:
    first, kind = dice.chance(0.6), dice.one("encoder", "encoder", "decoder")
    layer_type = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    layer = layer_type(
        shape[1], dice.divisor(shape[1]), dice.size(), dropout=0.1, batch_first=first,
        activation=dice.one("relu", "gelu"), norm_first=dice.chance(0.5),
    )  # fmt: skip

    def forward(self: Step, x: Tensor) -> Tensor:
        x = x if first else x.transpose(0, 1)
        h = self.layer(x) if kind == "encoder" else self.layer(x, x.cos())
        return h if first else h.transpose(0, 1)

    return Step(forward, layer=layer)


@block(2)
def attention_by_hand(dice: Dice, shape: Shape) -> nn.Module:
    fused = dice.chance(0.4)

    def forward(self: Step, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        if fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        scores = torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1) > 0, -torch.inf)
        return scores.softmax(-1) @ v

    step = Step(forward, project=nn.Linear(shape[1], 3 * dice.size(), bias=dice.chance(0.5)))
    step.causal = dice.chance(0.3)
    return step


@block(2)
def heads_folded_into_the_batch(dice: Dice, shape: Shape) -> nn.Module:
    heads, width = dice.size(2), dice.size()

    def forward(self: Step, x: Tensor) -> Tensor:
        B, L = x.shape[:2]
        h = self.project(x).reshape(B, L, heads, width).transpose(1, 2).reshape(B * heads, L, width)
        h = torch.bmm(torch.bmm(h, h.mT).softmax(-1), h)
        return h.reshape(B, heads, L, width).transpose(1, 2).reshape(B, L, heads * width)

    return Step(forward, project=nn.Linear(shape[1], heads * width))


@block(2)
def learned_queries(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        queries = self.queries.expand(len(x), -1, -1)
        return F.scaled_dot_product_attention(queries, self.keys(x), x)

    return Step(forward, queries=weights(dice.size(), shape[1]), keys=nn.Linear(shape[1], shape[1]))


@block(2)
def class_token_and_positions(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return torch.tanh(self.layer(h)).mean(1)

    return Step(
        forward, token=weights(1, 1, shape[1]), position=weights(1, shape[0] + 1, shape[1]),
        layer=nn.Linear(shape[1], dice.size()),
    )  # fmt: skip


@block(2)
def positions_from_a_table(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return x + self.mix(self.table(places if bare else places.expand(len(x), -1)))

    bare = dice.chance(0.6)
    width = dice.size()
    return Step(forward, table=nn.Embedding(shape[0], width), mix=nn.Linear(width, shape[1]))


@block(2, 2, 2)
def convolution(dice: Dice, shape: Shape) -> nn.Module:
    groups = dice.divisor(shape[0])
    kernel = dice.one(1, 2, 3)
    mode = dice.one("zeros", "zeros", "reflect", "replicate", "circular")
    padding = dice.one(0, 1, "same")
    return nn.Conv1d(
        shape[0], groups * dice.one(1, 1, 2), kernel, stride=1 if padding == "same" else dice.one(1, 2),
        padding=padding, dilation=dice.one(1, 1, 2), groups=groups, bias=dice.chance(0.6),
        padding_mode=mode,
    )  # fmt: skip


@block(2)
def transposed_convolution(dice: Dice, shape: Shape) -> nn.Module:
    groups, stride = dice.divisor(shape[0]), dice.one(1, 2)
    return nn.ConvTranspose1d(
        shape[0], groups * dice.one(1, 2), dice.one(2, 3), stride=stride, groups=groups,
        padding=dice.one(0, 1), output_padding=stride - 1, bias=dice.chance(0.6),
    )  # fmt: skip


@block(2)
def convolution_by_function(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        return F.conv1d(x, self.W, padding=1) + F.conv1d(x, self.W.flip(-1), padding=1).tanh()

    return Step(forward, W=weights(dice.size(), shape[0], 3))


@block(2)
def own_kernel_for_each_point(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        B, C, L = x.shape
        W = self.make(x.mean(-1)).reshape(B * C, 1, 3)
        return F.conv1d(x.reshape(1, B * C, L), W, padding=1, groups=B * C).reshape(B, C, L)

    return Step(forward, make=nn.Linear(shape[0], shape[0] * 3))


@block(2)
def instance_norm(dice: Dice, shape: Shape) -> nn.Module:
    tracked = dice.chance(0.3)
    return nn.InstanceNorm1d(shape[0], affine=dice.chance(0.8), track_running_stats=tracked)


@block(2)
def pooled(dice: Dice, shape: Shape) -> nn.Module:
    layer = dice.one(
        nn.MaxPool1d(2, padding=1), nn.AvgPool1d(2, padding=1), nn.AdaptiveAvgPool1d(2),
        nn.AdaptiveMaxPool1d(2), nn.LPPool1d(2, 2), nn.Upsample(scale_factor=2, mode="linear"),
        nn.Upsample(scale_factor=2), nn.ConstantPad1d(1, 0.5), nn.ReflectionPad1d(1),
    )  # fmt: skip
    return Step(lambda self, x: self.layer(x * self.scale), layer=layer, scale=weights(shape[1]))


@block(2)
def mixing_of_places(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h = x + self.places(x.transpose(1, 2)).transpose(1, 2)
        return self.channels(h.tanh())

    parts = {"places": nn.Linear(shape[0], shape[0]), "channels": nn.Linear(shape[1], dice.size())}
    return Step(forward, **parts)


@block(2)
def set_of_elements(dice: Dice, shape: Shape) -> nn.Module:
    width = dice.size()
    pool = dice.one("sum", "mean", "amax", "logsumexp")

    def forward(self: Step, x: Tensor) -> Tensor:
        return self.outer(getattr(self.inner(x).tanh(), pool)(1))

    return Step(forward, inner=nn.Linear(shape[1], width), outer=nn.Linear(width, dice.size()))


@block(2)
def products_of_places(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.inner(x)
        return torch.bmm(h, h.transpose(1, 2)) if full else torch.einsum("bti,btj->bij", h, h)

    full = dice.chance(0.5)
    return Step(forward, inner=nn.Linear(shape[1], dice.size()))


@block(2)
def moved_places(dice: Dice, shape: Shape) -> nn.Module:
    move = dice.one(
        lambda h: h.roll(1, 1), lambda h: h.flip(1), lambda h: h.transpose(1, 2),
        lambda h: h.unfold(1, 2, 1).flatten(2), lambda h: h.repeat_interleave(2, 1),
        lambda h: torch.rot90(h, 1, (1, 2)), lambda h: h.cumsum(1), lambda h: h.tril(),
    )  # fmt: skip
    return Step(lambda self, x: move(self.inner(x).tanh()), inner=nn.Linear(shape[1], dice.size()))


@block(2)
def places_written_one_by_one(dice: Dice, shape: Shape) -> nn.Module:
    width = dice.size()

    def forward(self: Step, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), x.shape[1], width)
        for t in range(x.shape[1]):
            out[:, t] = self.inner(x[:, t]) + (out[:, t - 1].clone() if t else 0)
        return out

    return Step(forward, inner=nn.Linear(shape[1], width))


@block(2)
def message_passing(dice: Dice, shape: Shape) -> nn.Module:
    adjacency = (torch.rand(shape[0], shape[0]) < 0.6).double()

    def forward(self: Step, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x) + self.adjacency @ self.others(x))

    width = dice.size()
    layers = {"own": nn.Linear(shape[1], width), "others": nn.Linear(shape[1], width, False)}
    return Step(forward, adjacency=adjacency, **layers)


@of_tokens
def embedding(dice: Dice, shape: Shape) -> nn.Module:
    padding = dice.one(None, None, 0)
    layer = nn.Embedding(VOCABULARY, dice.size(), padding_idx=padding, sparse=dice.chance(0.1))
    nn.init.normal_(layer.weight)
    return layer


@of_tokens
def embedding_called_twice(dice: Dice, shape: Shape) -> nn.Module:
    return Step(
        lambda self, ids: self.table(ids) * self.table(ids.flip(1)).tanh(),
        table=nn.Embedding(VOCABULARY, dice.size()),
    )


@of_tokens
def embedding_bag(dice: Dice, shape: Shape) -> nn.Module:
    mode = dice.one("sum", "mean", "max")
    padding = dice.one(None, 0)
    return nn.EmbeddingBag(VOCABULARY, dice.size(), mode=mode, padding_idx=padding)


@of_tokens
def weighted_embedding_bag(dice: Dice, shape: Shape) -> nn.Module:
    return Step(
        lambda self, ids: self.bag(
            ids, per_sample_weights=self.scale.expand(ids.shape).contiguous()
        ),
        bag=nn.EmbeddingBag(VOCABULARY, dice.size(), mode="sum"),
        scale=weights(shape[0]),
    )


@of_tokens
def one_hot(dice: Dice, shape: Shape) -> nn.Module:
    return Step(
        lambda self, ids: F.one_hot(ids, VOCABULARY).to(self.W) @ self.W,
        W=weights(VOCABULARY, dice.size()),
    )


@of_tokens
def rows_of_a_parameter(dice: Dice, shape: Shape) -> nn.Module:
    pick = dice.one(lambda W, ids: W[ids], lambda W, ids: F.embedding(ids, W))
    return Step(lambda self, ids: pick(self.W, ids), W=weights(VOCABULARY, dice.size()))


@of_tokens
def tied_language_model(dice: Dice, shape: Shape) -> nn.Module:
    width = dice.size()
    return Step(
        lambda self, ids: self.inner(self.table(ids).mean(1)).tanh() @ self.table.weight.T,
        table=nn.Embedding(VOCABULARY, width), inner=nn.Linear(width, width),
    )  # fmt: skip
