"""Small architectures that the suites share: ARCHITECTURES maps a name to a function that gives
(network, x), the network in eval mode and both in float64, x with six points.

A new one joins every suite by one decorated function.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from contributing import example
from net2gp.types import Inputs

Build = Callable[[], tuple[nn.Module, Inputs]]

ARCHITECTURES: dict[str, Build] = {}
OUTPUTS: dict[str, Callable] = {}
"""How to pick the tensor from the return value, for networks that return something richer."""

N = 6
"""Points in each x."""


def architecture(build: Callable[[], tuple[nn.Module, Inputs]]) -> Build:
    def seeded() -> tuple[nn.Module, Inputs]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sum(map(ord, build.__name__)))
            network, x = build()
        network = network.double().eval()
        return network, x

    ARCHITECTURES[build.__name__] = seeded
    return seeded


def points(*shape: int) -> Tensor:
    return torch.randn(N, *shape, dtype=torch.float64)


def tokens(length: int, size: int = 7) -> Tensor:
    return torch.randint(size, (N, length))


def with_statistics(network: nn.Module) -> nn.Module:
    """Batch norms with statistics and affine parameters other than the initial ones."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.LayerNorm | nn.GroupNorm):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return network


class Apply(nn.Module):
    """A network from a function of its parts."""

    def __init__(self, function: Callable, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *x: Tensor, **keywords: Tensor) -> Tensor:
        return self.function(self, *x, **keywords)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@architecture
def linear():
    return nn.Linear(3, 2), points(3)


@architecture
def linear_without_bias():
    return nn.Linear(3, 2, bias=False), points(3)


@architecture
def layer_of_contributing():
    heads = nn.Unflatten(1, (2, 3)), example("layer rule").Headwise(2, 3, 4), nn.Flatten()
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *heads, nn.Tanh(), nn.Linear(8, 2)), points(4)


@architecture
def mlp():
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    return nn.Sequential(*layers), points(4)


@architecture
def mlp_without_bias():
    layers = nn.Linear(4, 6, bias=False), nn.GELU(), nn.Linear(6, 1, bias=False)
    return nn.Sequential(*layers), points(4)


@architecture
def mlp_with_wide_input():
    return nn.Sequential(nn.Linear(80, 7), nn.Tanh(), nn.Linear(7, 2)), points(80)


@architecture
def residual_mlp_with_one_dimensional_output():
    def forward(self, x):
        h = self.inner(x)
        h = h + self.block(h)
        return self.head(h)[:, 0]

    parts = {"inner": nn.Linear(3, 5), "block": nn.Sequential(nn.Tanh(), nn.Linear(5, 5))}
    return Apply(forward, **parts, head=nn.Linear(5, 1)), points(3)


def lenet(pool: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), pool, nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), pool,
        nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


@architecture
def lenet_max_pool():
    return lenet(nn.MaxPool2d(2)), points(1, 10, 10)


@architecture
def lenet_avg_pool():
    return lenet(nn.AvgPool2d(2)), points(1, 10, 10)


def pooled(convolution: nn.Module, channels: int, outputs: int = 2) -> nn.Module:
    head = nn.Linear(channels, outputs)
    return Apply(
        lambda self, x: self.head(self.conv(x).tanh().flatten(2).square().mean(2)),
        conv=convolution, head=head,
    )  # fmt: skip


@architecture
def grouped_convolution():
    return pooled(nn.Conv2d(4, 6, 3, groups=2), 6), points(4, 5, 5)


@architecture
def depthwise_convolution():
    layers = nn.Conv2d(3, 6, 3, groups=3, padding=1), nn.Conv2d(6, 4, 1)
    return pooled(nn.Sequential(*layers), 4), points(3, 4, 4)


@architecture
def dilated_strided_convolution():
    convolution = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), dilation=(2, 3), padding=(1, 2))
    return pooled(convolution, 3), points(2, 8, 7)


@architecture
def convolution_over_few_places():
    layers = nn.Conv2d(5, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)
    return nn.Sequential(*layers), points(5, 3, 3)


@architecture
def convolution_1d():
    return pooled(nn.Conv1d(3, 4, 4, stride=2, padding=1), 4), points(3, 9)


@architecture
def convolution_3d():
    return pooled(nn.Conv3d(2, 3, (2, 3, 2), padding=1, groups=1), 3), points(2, 3, 4, 3)


@architecture
def convolution_circular_padding():
    return pooled(nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), 3), points(2, 5, 5)


@architecture
def convolution_reflect_padding():
    return pooled(nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), 3), points(2, 5, 4)


@architecture
def convolution_replicate_padding():
    return pooled(nn.Conv1d(2, 3, 3, padding=2, padding_mode="replicate"), 3), points(2, 5)


@architecture
def convolution_same_padding_even_kernel():
    return pooled(nn.Conv2d(2, 3, (4, 2), padding="same", dilation=(1, 3)), 3), points(2, 5, 6)


@architecture
def convolution_same_padding_circular_even_kernel():
    convolution = nn.Conv2d(2, 3, (2, 4), padding="same", padding_mode="circular")
    return pooled(convolution, 3), points(2, 5, 6)


@architecture
def convolution_without_a_batch():
    def forward(self, x):
        return self.head(x) + self.conv(self.image).mean((1, 2))

    parts = {"conv": nn.Conv2d(2, 3, 2), "image": parameter(2, 4, 4), "head": nn.Linear(3, 3)}
    return Apply(forward, **parts), points(3)


@architecture
def transposed_convolution():
    layers = nn.Conv2d(2, 3, 2), nn.Tanh(), nn.ConvTranspose2d(3, 2, 3, stride=2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(98, 2)), points(2, 4, 4)


@architecture
def transposed_convolution_1d():
    transposed = nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1, dilation=2)
    return pooled(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), transposed), 4), points(2, 5)


@architecture
def grouped_transposed_convolution():
    """Padding of the output beyond a stride leaves room for more windows than there are inputs."""
    transposed = nn.ConvTranspose2d(4, 6, (2, 3), (1, 2), (0, 1), (1, 2), 2, bias=False, dilation=3)
    return pooled(transposed, 6), points(4, 3, 2)


@architecture
def transposed_convolution_3d():
    return pooled(nn.ConvTranspose3d(2, 3, (1, 2, 2), padding=(0, 1, 0)), 3), points(2, 2, 3, 2)


@architecture
def convolutions_called_as_functions():
    def forward(self, x):
        h = F.conv1d(x, self.filters, self.shift, padding="same", groups=2).tanh()
        return F.conv1d(h, weight=self.outer, stride=2, dilation=2).square().mean(2)

    parts = {"filters": parameter(4, 2, 3), "shift": parameter(4), "outer": parameter(2, 4, 2)}
    return Apply(forward, **parts), points(4, 7)


@architecture
def image_output():
    layers = nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 1)
    return nn.Sequential(*layers), points(1, 2, 3)


@architecture
def layer_used_twice():
    def forward(self, x):
        return self.head(self.tied(self.tied(x).tanh()).tanh())

    return Apply(forward, tied=nn.Linear(4, 4), head=nn.Linear(4, 2)), points(4)


@architecture
def two_layers_share_a_weight():
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), nn.Linear(4, 2)), points(4)


@architecture
def two_layers_share_a_bias():
    one, two = nn.Linear(40, 3), nn.Linear(3, 3)
    two.bias = one.bias
    return nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), nn.Linear(3, 2)), points(40)


@architecture
def two_convolutions_share_a_weight():
    one, two = nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 3, stride=2, bias=False)
    two.weight = one.weight
    return pooled(nn.Sequential(one, nn.Tanh(), two), 2), points(2, 7)


@architecture
def convolutions_of_other_groups_share_a_weight():
    one, two = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1, groups=2)
    two.weight = one.weight
    return pooled(nn.Sequential(one, nn.Tanh(), two), 4), points(2, 5)


@architecture
def embedding_tied_with_output():
    def forward(self, ids):
        h = self.embed(ids).mean(1).tanh()
        return self.out(self.inner(h))

    embed, out = nn.Embedding(7, 3), nn.Linear(3, 7)
    out.weight = embed.weight
    return Apply(forward, embed=embed, inner=nn.Linear(3, 3), out=out), tokens(4)


@architecture
def language_model():
    """Logits of the next token at every place, from the table of the embedding as it is and turned."""

    def forward(self, ids):
        h = self.embed(ids)
        h = (h + F.linear(h.mean(1, keepdim=True), self.mix)).tanh()
        logits = F.linear(h, self.embed.weight) + h.cos() @ self.embed.weight.T
        return logits.flatten(1)

    return Apply(forward, embed=nn.Embedding(5, 3), mix=parameter(3, 3)), tokens(3, 5)


@architecture
def table_as_a_parameter():
    def forward(self, ids):
        h = F.embedding(ids, self.table, padding_idx=1).tanh().mean(1)
        return h @ self.table.T

    return Apply(forward, table=parameter(7, 3)), tokens(4)


@architecture
def products_with_matrices():
    """A weight (I, O) as GPT-2 keeps it, the same one turned, and one of three axes."""

    def forward(self, x):
        h = torch.addmm(self.shift, x, self.inner).tanh()
        h = torch.matmul(h[:, None] * x[:, :, None], self.outer).sin().mean(1)
        return F.linear(h @ self.inner.T, self.inner.T) @ self.free

    parts = {"inner": parameter(3, 4), "shift": parameter(4), "outer": parameter(4, 4)}
    return Apply(forward, **parts, free=parameter(4, 2)), points(3)


@architecture
def embedding_with_padding():
    def forward(self, ids):
        return self.head(self.embed(ids).tanh().sum(1))

    embed = nn.Embedding(7, 3, padding_idx=2)
    nn.init.normal_(embed.weight)
    ids = tokens(5)
    ids[0, :] = 2
    return Apply(forward, embed=embed, head=nn.Linear(3, 2)), ids


@architecture
def embedding_of_int32():
    embed = nn.Embedding(7, 3)
    return nn.Sequential(embed, nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)), tokens(3).int()


@architecture
def embedding_of_one_category():
    return nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Linear(3, 2)), tokens(1)[:, 0]


@architecture
def embedding_used_twice_and_sparse():
    def forward(self, ids):
        return self.head(self.embed(ids).sum(1) * self.embed(ids.flip(1)[:, :2]).prod(1))

    embed = nn.Embedding(7, 3, sparse=True)
    return Apply(forward, embed=embed, head=nn.Linear(3, 2)), tokens(4)


@architecture
def embedding_bag():
    return nn.Sequential(nn.EmbeddingBag(7, 3), nn.Tanh(), nn.Linear(3, 2)), tokens(4)


@architecture
def embedding_bag_with_padding():
    bag = nn.EmbeddingBag(7, 3, padding_idx=-1)
    ids = tokens(4)
    ids[0, :], ids[1, :2] = 6, 6
    return nn.Sequential(bag, nn.Tanh(), nn.Linear(3, 2)), ids


@architecture
def embedding_bag_of_maxima():
    layers = nn.EmbeddingBag(7, 3, mode="max", padding_idx=0), nn.Tanh(), nn.Linear(3, 2)
    return nn.Sequential(*layers), tokens(4)


@architecture
def weighted_embedding_bag():
    def forward(self, ids, shares):
        h = self.bag(ids, per_sample_weights=shares)
        return self.head(h + F.embedding_bag(ids, self.table, mode="sum"))

    parts = {"bag": nn.EmbeddingBag(7, 3, mode="sum"), "table": parameter(7, 3)}
    return Apply(forward, **parts, head=nn.Linear(3, 2)), (tokens(4), points(4))


def last_state(recurrent: nn.RNNBase, width: int) -> nn.Module:
    return Apply(
        lambda self, x: self.head(self.recurrent(x)[0][:, -1]),
        recurrent=recurrent, head=nn.Linear(width, 2),
    )  # fmt: skip


@architecture
def lstm():
    return last_state(nn.LSTM(2, 3, batch_first=True), 3), points(3, 2)


@architecture
def lstm_with_projection():
    return last_state(nn.LSTM(2, 4, proj_size=3, batch_first=True), 3), points(3, 2)


@architecture
def bidirectional_gru():
    recurrent = nn.GRU(2, 3, batch_first=True, bidirectional=True)
    return last_state(recurrent, 6), points(3, 2)


@architecture
def deep_elman_network_without_bias():
    recurrent = nn.RNN(2, 3, 2, nonlinearity="relu", bias=False, batch_first=True)
    return last_state(recurrent, 3), points(4, 2)


@architecture
def deep_bidirectional_lstm_with_projection():
    recurrent = nn.LSTM(2, 4, 2, proj_size=3, batch_first=True, bidirectional=True, bias=False)
    return last_state(recurrent, 6), points(3, 2)


@architecture
def recurrent_cells():
    def forward(self, x):
        h, c = self.lstm(x[:, 0])
        h, c = self.lstm(x[:, 1], (h, c))
        h = self.gru(self.elman(h), c)
        return self.head(self.gru(self.elman(h.sin(), h), c))

    parts = {"lstm": nn.LSTMCell(2, 3), "elman": nn.RNNCell(3, 3, nonlinearity="relu")}
    parts["gru"] = nn.GRUCell(3, 3, bias=False)
    return Apply(forward, **parts, head=nn.Linear(3, 2)), points(2, 2)


@architecture
def encoder_and_decoder_with_a_learned_start():
    def forward(self, x):
        start = self.start.expand(-1, len(x), -1).contiguous()
        states, last = self.encoder(x, start)
        return self.head(self.decoder(states.flip(1), last)[0].mean(1))

    parts = {"encoder": nn.GRU(2, 3, batch_first=True), "decoder": nn.GRU(3, 3, batch_first=True)}
    return Apply(forward, start=parameter(1, 1, 3), **parts, head=nn.Linear(3, 2)), points(3, 2)


@architecture
def recurrent_over_packed_lengths():
    def forward(self, x):
        lengths = 1 + (x[:, 0, 0] > 0).long() * 2
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=3)[0]
        return self.head(states.sum(1))

    recurrent = nn.GRU(2, 3, batch_first=True)
    return Apply(forward, recurrent=recurrent, head=nn.Linear(3, 2)), points(3, 2)


@architecture
def lstm_time_first():
    def forward(self, ids):
        states, _ = self.recurrent(self.embed(ids.T))
        return self.head(self.norm(states))[-1]

    parts = {"embed": nn.Embedding(7, 2), "recurrent": nn.LSTM(2, 3), "norm": nn.LayerNorm(3)}
    return with_statistics(Apply(forward, **parts, head=nn.Linear(3, 2))), tokens(4)


def transformer(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        h = self.embed(x)
        h = self.encoder(h if batch_first else h.transpose(0, 1))
        return self.head(h.mean(1 if batch_first else 0))

    return with_statistics(
        Apply(forward, embed=nn.Linear(3, 4), encoder=encoder, head=nn.Linear(4, 2))
    )


@architecture
def transformer_batch_first():
    return transformer(True), points(3, 3)


@architecture
def transformer_time_first():
    return transformer(False), points(3, 3)


@architecture
def transformer_with_mask():
    layer = nn.TransformerEncoderLayer(
        4, 2, 6, batch_first=True, norm_first=True, activation="gelu"
    )
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids, padding):
        h = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        return self.head(h[:, 0])

    network = Apply(forward, embed=nn.Embedding(7, 4), encoder=encoder, head=nn.Linear(4, 2))
    padding = torch.arange(4)[None, :] >= torch.tensor([4, 3, 2, 4, 1, 3])[:, None]
    return with_statistics(network), {"ids": tokens(4), "padding": padding}


@architecture
def attention():
    def forward(self, x):
        return self.head(self.attend(x, x, x, need_weights=False)[0].flatten(1))

    parts = {"attend": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(12, 2)}
    return Apply(forward, **parts), points(3, 4)


@architecture
def attention_to_something_else():
    """Queries, keys and values of three kinds, with rows of one weight, and with weights of their own."""

    def forward(self, x, y):
        h = self.alike(x, y, y, need_weights=False)[0]
        h = h + self.apart(*(v.transpose(0, 1) for v in (x, y, y.cos())))[0].transpose(0, 1)
        return self.head(self.three(h, y, y.sin())[0].flatten(1))

    parts = {
        "alike": nn.MultiheadAttention(4, 2, batch_first=True),
        "apart": nn.MultiheadAttention(4, 1, kdim=4, vdim=4, bias=False, add_bias_kv=True),
        "three": nn.MultiheadAttention(4, 2, batch_first=True, add_zero_attn=True),
    }
    return Apply(forward, **parts, head=nn.Linear(12, 2)), (points(3, 4), points(2, 4))


@architecture
def transformer_decoder():
    layer = nn.TransformerDecoderLayer(4, 2, 6, batch_first=True, norm_first=True)
    decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
        return self.head(self.decoder(x, memory, tgt_mask=mask, tgt_is_causal=True)[:, -1])

    return Apply(forward, decoder=decoder, head=nn.Linear(4, 2)), (points(3, 4), points(2, 4))


@architecture
def vision_transformer():
    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.position
        h = h + self.attend(h, h, h)[0]
        return self.scale * self.head(self.norm(h)[:, 0])

    network = Apply(
        forward, patch=nn.Conv2d(1, 4, 2, stride=2), token=parameter(1, 1, 4),
        position=parameter(1, 5, 4), attend=nn.MultiheadAttention(4, 2, batch_first=True),
        norm=nn.LayerNorm(4), scale=parameter(), head=nn.Linear(4, 3),
    )  # fmt: skip
    return with_statistics(network), points(1, 4, 4)


@architecture
def batch_norm():
    layers = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten()
    network = nn.Sequential(
        *layers, nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)
    )
    return with_statistics(network), points(2, 3, 3)


@architecture
def batch_norm_over_sequences():
    network = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Tanh(), nn.Flatten())
    return with_statistics(nn.Sequential(network, nn.Linear(9, 2))), points(2, 4)


@architecture
def layer_and_group_norm():
    layers = nn.LayerNorm([2, 4]), nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(1)
    network = nn.Sequential(*layers, nn.LayerNorm(12), nn.Linear(12, 2))
    return with_statistics(network), points(2, 4)


@architecture
def rms_norm_and_norms_called_as_functions():
    """A norm with an activation of its own is a subclass that calls the function of its parent."""

    def forward(self, x):
        x = self.inner(x)
        x = F.batch_norm(x, self.mean, self.variance, self.gain, self.shift).tanh()
        return self.head(F.group_norm(self.norm(x), 2, self.scale, eps=1e-3))

    parts = {"inner": nn.Linear(3, 4), "norm": nn.RMSNorm(4), "head": nn.Linear(4, 2)}
    own = {name: parameter(4) for name in ("gain", "shift", "scale")}
    network = Apply(forward, **parts, **own)
    network.register_buffer("mean", torch.randn(4))
    network.register_buffer("variance", torch.rand(4) + 0.5)
    return network, points(3)


@architecture
def instance_and_rms_norm():
    layers = nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.Flatten(), nn.RMSNorm(9)
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(9, 2)), points(2, 4)


@architecture
def in_place_activations():
    layers = nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.ELU(inplace=True)
    return nn.Sequential(*layers, nn.Linear(5, 2)), points(3)


@architecture
def in_place_activations_over_time():
    layers = nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.ELU(inplace=True)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(20, 2)), points(4, 3)


@architecture
def in_place_residual():
    def forward(self, x):
        h = self.inner(x)
        h += x
        h = h.sin()
        h[:, :2] *= 2.0
        return self.head(h)

    return Apply(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 2)), points(4)


@architecture
def time_distributed_linear():
    def forward(self, x):
        h = self.inner(x.reshape(-1, 3)).tanh()
        return self.head(h.reshape(len(x), 4, 5)).sum(1)

    return Apply(forward, inner=nn.Linear(3, 5), head=nn.Linear(5, 2)), points(4, 3)


@architecture
def time_major_linear():
    def forward(self, x):
        h = self.inner(x.transpose(0, 1).reshape(-1, 3)).tanh()
        return self.head(h.reshape(4, len(x), 5).sum(0))

    return Apply(forward, inner=nn.Linear(3, 5), head=nn.Linear(5, 2)), points(4, 3)


@architecture
def time_major_linear_of_which_the_first_step_counts():
    def forward(self, x):
        h = self.inner(x.transpose(0, 1).reshape(-1, 3)).tanh()
        return self.head(h.reshape(4, len(x), 5)[0])

    return Apply(forward, inner=nn.Linear(3, 5), head=nn.Linear(5, 2)), points(4, 3)


@architecture
def both_halves_in_one_batch():
    def forward(self, x, y):
        h = self.inner(torch.cat([x, y])).tanh()
        return self.head(h[: len(x)] * h[len(x) :])

    return Apply(forward, inner=nn.Linear(3, 5), head=nn.Linear(5, 2)), (points(3), points(3))


@architecture
def time_distributed_convolution():
    def forward(self, x):
        h = self.embed(self.norm(self.conv(x.flatten(0, 1)))).flatten(1)
        return self.head(h.reshape(len(x), 3, -1).tanh().flatten(1))

    parts = {"conv": nn.Conv2d(1, 2, 2), "norm": nn.BatchNorm2d(2), "embed": nn.Conv2d(2, 2, 1)}
    network = Apply(forward, **parts, head=nn.Linear(24, 2))
    return with_statistics(network), points(3, 1, 3, 3)


@architecture
def time_distributed_embedding():
    def forward(self, ids):
        h = self.embed(ids.reshape(-1, 2)).prod(1).reshape(len(ids), -1)
        return self.head(h)

    return Apply(forward, embed=nn.Embedding(7, 3), head=nn.Linear(9, 2)), tokens(6)


def positions(length: int) -> nn.Module:
    def forward(self, ids):
        h = self.embed(ids) + self.position(torch.arange(length, device=ids.device))
        return self.head((h + self.mix(self.table)).tanh().flatten(1))

    return Apply(
        forward, embed=nn.Embedding(7, 3), position=nn.Embedding(length, 3),
        table=parameter(length, 2), mix=nn.Linear(2, 3), head=nn.Linear(3 * length, 2),
    )  # fmt: skip


@architecture
def unbatched_positions():
    return positions(4), tokens(4)


@architecture
def unbatched_positions_as_many_as_points():
    return positions(N), tokens(N)


@architecture
def two_unbatched_positions():
    return positions(2), tokens(2)


@architecture
def three_unbatched_positions():
    return positions(3), tokens(3)


@architecture
def weight_norm():
    layer = parametrizations.weight_norm(nn.Linear(4, 3))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 2)), points(4)


@architecture
def spectral_norm():
    layer = parametrizations.spectral_norm(nn.Conv1d(2, 3, 2))
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)), points(2, 4)


@architecture
def pruned():
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    prune.random_unstructured(network[0], "weight", amount=0.4)
    prune.l1_unstructured(network[2], "weight", amount=2)
    return network, points(4)


@architecture
def bilinear():
    def forward(self, x, y):
        return self.head(self.pair(x, y).tanh())

    return Apply(forward, pair=nn.Bilinear(3, 2, 4), head=nn.Linear(4, 2)), (points(3), points(2))


class LowRank(nn.Linear):
    """A linear layer with a low-rank update of its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = parameter(1, inputs), parameter(outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


@architecture
def low_rank_update():
    return nn.Sequential(LowRank(4, 5), nn.Tanh(), nn.Linear(5, 2)), points(4)


@architecture
def forward_replaced_on_the_instance():
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    layer = network[0]
    layer.forward = lambda x: F.linear(x, layer.weight * 2, layer.bias) * layer.bias
    return network, points(4)


@architecture
def forward_hook_scales_the_output():
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    network[0].register_forward_hook(lambda module, arguments, out: out * 3.0)
    network[0].register_forward_pre_hook(lambda module, arguments: arguments[0].sin())
    return network, points(4)


@architecture
def dictionary_inputs():
    def forward(self, *, left, right):
        return self.head(self.one(left) * self.two(right).sigmoid())

    parts = {"one": nn.Linear(3, 4), "two": nn.Linear(2, 4), "head": nn.Linear(4, 2)}
    return Apply(forward, **parts), {"left": points(3), "right": points(2)}


OUTPUTS["dictionary_output"] = lambda out: out["logits"]


@architecture
def dictionary_output():
    def forward(self, x):
        h = self.inner(x).tanh()
        return {"features": h, "logits": self.head(h)}

    return Apply(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@architecture
def weight_used_in_a_layer_and_by_itself():
    def forward(self, x):
        return F.linear(self.layer(x).tanh(), self.layer.weight.T)

    return Apply(forward, layer=nn.Linear(3, 5)), points(3)


@architecture
def weight_used_by_itself_and_in_a_layer_that_is_ignored():
    def forward(self, x):
        self.layer(x)
        return F.linear(x.sin(), self.layer.weight, self.layer.bias)

    return Apply(forward, layer=nn.Linear(3, 2)), points(3)


@architecture
def weight_used_in_a_detached_branch_too():
    def forward(self, x):
        return self.layer(x).sin() * self.layer(x.cos()).detach()

    return Apply(forward, layer=nn.Linear(3, 2)), points(3)


@architecture
def checkpointed():
    def forward(self, x):
        h = checkpoint(self.inner, x, use_reentrant=False)
        return self.head(h)

    inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh())
    return Apply(forward, inner=inner, head=nn.Linear(4, 2)), points(3)


@architecture
def data_dependent_branch():
    def forward(self, x):
        h = self.inner(x).tanh()
        if bool((x[:, 0] > 100).any()):
            h = h * 2
        return self.head(h) * self.scale.exp()

    parts = {"inner": nn.Linear(3, 4), "head": nn.Linear(4, 2), "scale": parameter(2)}
    return Apply(forward, **parts), points(3)


@architecture
def in_place_assignment():
    def forward(self, x):
        h = x.new_zeros(len(x), 5)
        h[:, :2] = self.inner(x)
        h[:, 2:] = self.shift
        return self.head(h.tanh())

    parts = {"inner": nn.Linear(3, 2), "head": nn.Linear(5, 2), "shift": parameter(3)}
    return Apply(forward, **parts), points(3)
