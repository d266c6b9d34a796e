"""What people write in networks, one idiom at a time: right by row-by-row autograd, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import net2gp as n2g
from fuzz.dice import Step, weights
from fuzz.generator import Case, reproducible, settle
from fuzz.referee import OK, examine, truth
from fuzz.wraps import Cube, LowRank, StraightThrough
from net2gp.errors import Net2GPError
from net2gp.inputs import num_rows, rows
from net2gp.types import Inputs

Build = Callable[[], tuple[nn.Module, Inputs]]
IDIOMS: dict[str, Build] = {}
OUTPUTS = {"a_dictionary_is_returned": lambda out: out["logits"]}
N = 5


def idiom(build: Build) -> Build:
    IDIOMS[build.__name__] = build
    return build


def points(*shape: int) -> Tensor:
    return torch.randn(N, *shape)


def tanh_network(first: nn.Module | None = None, width: int = 4) -> nn.Sequential:
    return nn.Sequential(first or nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def energy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))


@idiom
def forces_of_a_potential():
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    return Step(forward, energy=energy()), points(3)


@idiom
def forces_without_enable_grad():
    def forward(self, x):
        x = x.requires_grad_()
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    return Step(forward, energy=energy()), points(3)


@idiom
def energy_and_forces_side_by_side():
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            e = self.energy(x)
            return torch.cat([e, torch.autograd.grad(e.sum(), x, create_graph=True)[0]], 1)

    return Step(forward, energy=energy()), points(3)


@idiom
def hamiltonian_by_func_grad():
    def forward(self, x):
        gradient = torch.func.grad(lambda z: self.energy(z).sum())(x)
        return gradient.roll(1, -1) * torch.tensor([1.0, -1.0, 1.0])

    return Step(forward, energy=energy()), points(3)


@idiom
def score_by_vmap_of_grad():
    def forward(self, x):
        return torch.func.vmap(torch.func.grad(lambda z: self.energy(z)[0]))(x)

    return Step(forward, energy=energy()), points(3)


@idiom
def residual_of_a_differential_equation():
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.energy(x)
            (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
            return u + ddu[:, :1]

    return Step(forward, energy=energy()), points(3)


@idiom
def velocity_by_func_jvp():
    def forward(self, x):
        return torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))[1]

    return Step(forward, inner=tanh_network()), points(3)


@idiom
def checkpointed_without_reentry():
    def forward(self, x):
        return self.head(checkpoint(lambda z: self.inner(z).tanh(), x, use_reentrant=False))

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def checkpointed_with_reentry():
    def forward(self, x):
        x = x.detach().requires_grad_() if not x.requires_grad else x
        return self.head(checkpoint(self.inner, x, use_reentrant=True).tanh())

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def weight_norm():
    return tanh_network(parametrizations.weight_norm(nn.Linear(3, 4))), points(3)


@idiom
def weight_norm_of_old():
    return tanh_network(nn.utils.weight_norm(nn.Linear(3, 4))), points(3)


@idiom
def spectral_norm():
    return tanh_network(parametrizations.spectral_norm(nn.Linear(3, 4))), points(3)


@idiom
def spectral_norm_of_old():
    return tanh_network(nn.utils.spectral_norm(nn.Linear(3, 4))), points(3)


@idiom
def orthogonal_weights():
    return tanh_network(parametrizations.orthogonal(nn.Linear(3, 4))), points(3)


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.softplus(weight)


@idiom
def monotone_by_a_parametrization():
    network = tanh_network()
    for layer in (network[0], network[2]):
        parametrize.register_parametrization(layer, "weight", Positive())
    return network, points(3)


@idiom
def pruned_weights():
    network = tanh_network()
    prune.random_unstructured(network[0], "weight", amount=0.4)
    return network, points(3)


@idiom
def hook_that_scales_the_output():
    network = tanh_network()
    network[0].register_forward_hook(lambda module, given, out: 3 * out)
    return network, points(3)


@idiom
def hook_that_changes_the_input():
    network = tanh_network()
    network[0].register_forward_pre_hook(lambda module, given: (2 * given[0],))
    return network, points(3)


@idiom
def hook_on_the_gradient_that_only_looks():
    network = tanh_network()
    network[0].register_full_backward_hook(lambda module, given, out: None)
    return network, points(3)


@idiom
def features_taken_from_a_hook():
    def forward(self, x):
        kept = []
        handle = self.inner[0].register_forward_hook(lambda m, given, out: kept.append(out))
        out = self.inner(x)
        handle.remove()
        return out + self.side(kept[0].sin())

    return Step(forward, inner=tanh_network(), side=nn.Linear(4, 2)), points(3)


@idiom
def relu_in_place():
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)), points(3)


@idiom
def arithmetic_in_place():
    def forward(self, x):
        h = self.inner(x)
        h.mul_(2.0)
        h += 1
        return self.head(h.tanh())

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def slice_overwritten():
    def forward(self, x):
        h = self.inner(x)
        h[:, 0] = 0
        return self.head(h.tanh())

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def view_changed_in_place():
    def forward(self, x):
        h = self.inner(x)
        h.view(-1, 2, 2)[:, 0].mul_(self.gain)
        return self.head(h.tanh())

    parts = {"inner": nn.Linear(3, 4), "head": nn.Linear(4, 2), "gain": weights()}
    return Step(forward, **parts), points(3)


@idiom
def output_written_into_a_buffer():
    def forward(self, x):
        out = x.new_zeros(len(x), 3)
        out[:, :2] = self.inner(x)
        out[:, 2] = self.shift
        return out.sin()

    return Step(forward, inner=nn.Linear(3, 2), shift=weights()), points(3)


@idiom
def weight_used_by_a_function_too():
    def forward(self, x):
        return self.head(self.inner(x).tanh() + F.linear(x, self.inner.weight))

    return Step(forward, inner=nn.Linear(3, 3), head=nn.Linear(3, 2)), points(3)


@idiom
def decoder_with_the_transposed_weight():
    def forward(self, x):
        return F.linear(self.inner(x).tanh(), self.inner.weight.T)

    return Step(forward, inner=nn.Linear(3, 4)), points(3)


@idiom
def layer_called_three_times():
    def forward(self, x):
        for _ in range(3):
            x = self.inner(x).tanh()
        return self.head(x)

    return Step(forward, inner=nn.Linear(3, 3), head=nn.Linear(3, 2)), points(3)


@idiom
def scale_under_no_grad():
    def forward(self, x):
        h = self.inner(x)
        with torch.no_grad():
            scale = 1 / self.inner(x).abs().amax(1, keepdim=True)
        return self.head((h * scale).tanh())

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def half_of_the_features_detached():
    def forward(self, x):
        h = self.inner(x)
        return self.head(torch.cat([h[:, :2].detach(), h[:, 2:]], 1).tanh())

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def rounding_straight_through():
    def forward(self, x):
        return self.head(StraightThrough.apply(4 * self.inner(x).tanh()))

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def sign_straight_through_by_detach():
    def forward(self, x):
        h = self.inner(x).tanh()
        return self.head(h + (h.sign() - h).detach())

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def function_of_old_style():
    def forward(self, x):
        return self.head(Cube.apply(self.inner(x)))

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


class Reversal(torch.autograd.Function):
    """The identity, whose gradient changes its sign."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -g


@idiom
def gradient_reversal():
    def forward(self, x):
        return self.head(Reversal.apply(self.inner(x).tanh()))

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def transformer_with_the_sequence_first():
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1)

    def forward(self, x):
        return self.head(self.layer(x.transpose(0, 1)).mean(0))

    return Step(forward, layer=layer, head=nn.Linear(4, 2)), points(3, 4)


@idiom
def transformer_with_a_fast_path():
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))

    return Step(forward, encoder=nn.TransformerEncoder(layer, 2), head=nn.Linear(4, 2)), points(
        3, 4
    )


@idiom
def lstm_of_two_layers_and_directions():
    layer = nn.LSTM(2, 2, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])

    return Step(forward, layer=layer, head=nn.Linear(4, 2)), points(3, 2)


@idiom
def packed_sequences():
    def forward(self, x):
        lengths = 1 + (x[:, 0, 0] > 0).long()
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.layer(packed)[1][-1])

    layer = nn.GRU(2, 3, batch_first=True)
    return Step(forward, layer=layer, head=nn.Linear(3, 2)), points(3, 2)


@idiom
def batch_and_time_in_one_axis():
    def forward(self, x):
        h = self.inner(x.reshape(-1, 3)).tanh()
        return self.head(h.reshape(len(x), 4, -1).mean(1))

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(4, 3)


@idiom
def time_and_batch_in_one_axis():
    def forward(self, x):
        h = self.inner(x.transpose(0, 1).reshape(-1, 3)).tanh()
        return self.head(h.reshape(4, len(x), -1).mean(0))

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(4, 3)


@idiom
def two_views_in_one_batch():
    def forward(self, x):
        one, two = self.inner(torch.cat([x[:, 0], x[:, 1]])).tanh().chunk(2)
        return self.head(torch.cat([one, two, one * two], 1))

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(12, 2)), points(2, 3)


@idiom
def batch_turned_round():
    def forward(self, x):
        return self.head(self.inner(x.flip(0)).tanh().flip(0))

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def points_sorted_inside():
    def forward(self, x):
        order = x[:, 0].argsort()
        return self.head(self.inner(x[order]).tanh()[order.argsort()])

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def batch_in_pieces():
    def forward(self, x):
        return torch.cat([self.inner(part) for part in x.split(2)])

    return Step(forward, inner=tanh_network()), points(3)


@idiom
def loop_over_points():
    def forward(self, x):
        return torch.stack([self.inner(point) for point in x])

    return Step(forward, inner=tanh_network()), points(3)


@idiom
def experts_chosen_by_the_point():
    def forward(self, x):
        p = self.gate(x).softmax(-1)
        choice = p.argmax(-1)
        out = x.new_zeros(len(x), 4)
        for k, expert in enumerate(self.experts):
            mask = choice == k
            if mask.any():
                out[mask] = expert(x[mask]) * p[mask, k : k + 1]
        return self.head(out.tanh())

    experts = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])
    return Step(forward, gate=nn.Linear(3, 2), experts=experts, head=nn.Linear(4, 2)), points(3)


@idiom
def networks_of_chemical_elements():
    def forward(self, kinds, positions):
        distance = torch.cdist(positions, positions + 0.1)
        features = torch.exp(-distance[..., :2])
        total = positions.new_zeros(len(positions), 2)
        for kind, network in enumerate(self.elements.values()):
            point, atom = (kinds == kind).nonzero(as_tuple=True)
            total = total.index_add(0, point, network(features[point, atom]))
        return total

    element = lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    elements = nn.ModuleDict({name: element() for name in "HCO"})
    kinds = torch.tensor([[0, 0, 1], [0, 1, 1], [2, 0, 0], [1, 1, 1], [2, 2, 0]])
    return Step(forward, elements=elements), (kinds, points(3, 3))


@idiom
def depthwise_convolution_of_one_place():
    layers = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)
    return nn.Sequential(*layers), points(8, 1, 1)


@idiom
def grouped_convolution_of_few_places():
    layers = nn.Conv1d(4, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)
    return nn.Sequential(*layers), points(4, 3)


@idiom
def grouped_convolution_over_the_whole_map():
    layers = nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2)
    return nn.Sequential(*layers), points(4, 3, 3)


@idiom
def transposed_convolution_in_groups():
    layers = nn.ConvTranspose2d(4, 2, 2, stride=2, groups=2), nn.Tanh(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(32, 2)), points(4, 2, 2)


@idiom
def bilinear_of_one_input():
    def forward(self, x):
        return self.head(self.pair(x, x).tanh())

    return Step(forward, pair=nn.Bilinear(3, 3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def many_norms():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4),
        nn.BatchNorm2d(4), nn.RMSNorm(3), nn.LayerNorm([4, 3, 3]), nn.PReLU(4), nn.Flatten(),
        nn.Linear(36, 2),
    ), points(2, 3, 3)  # fmt: skip


@idiom
def as_many_outputs_as_points_behind_a_prelu():
    return nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, N)), points(3)


@idiom
def prototypes():
    def forward(self, x):
        return -torch.cdist(self.inner(x), self.centers)

    return Step(forward, inner=nn.Linear(3, 2), centers=weights(3, 2)), points(3)


@idiom
def radial_basis_functions():
    def forward(self, x):
        return self.head(torch.exp(-((x[:, None] - self.centers) ** 2).sum(-1) * self.rate.exp()))

    return Step(forward, centers=weights(4, 3), rate=weights(4), head=nn.Linear(4, 2)), points(3)


@idiom
def bag_of_words():
    bag = nn.EmbeddingBag(6, 3, mode="mean")
    return nn.Sequential(bag, nn.Tanh(), nn.Linear(3, 2)), torch.randint(6, (N, 4))


@idiom
def padded_words():
    def forward(self, ids):
        mask = (ids != 0)[..., None]
        return self.head((self.table(ids) * mask).sum(1) / mask.sum(1).clamp(min=1))

    table = nn.Embedding(6, 3, padding_idx=0)
    return Step(forward, table=table, head=nn.Linear(3, 2)), torch.randint(6, (N, 4))


@idiom
def a_point_of_padding_alone():
    ids = torch.randint(1, 6, (N, 4))
    ids[1] = 0
    table = nn.Embedding(6, 3, padding_idx=0)
    return nn.Sequential(table, nn.Flatten(), nn.Tanh(), nn.Linear(12, 2)), ids


@idiom
def words_predicted_by_their_own_table():
    def forward(self, ids):
        return self.inner(self.table(ids).mean(1)).tanh() @ self.table.weight.T

    parts = {"table": nn.Embedding(5, 3), "inner": nn.Linear(3, 3)}
    return Step(forward, **parts), torch.randint(5, (N, 4))


@idiom
def weights_made_by_a_network():
    def forward(self, x):
        W = self.make(x).reshape(-1, 4, 3)
        return self.head(torch.einsum("bij,bj->bi", W, x).tanh())

    return Step(forward, make=nn.Linear(3, 12), head=nn.Linear(4, 2)), points(3)


@idiom
def filter_of_frequencies():
    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.W, n=6).tanh())

    return Step(forward, W=weights(4), head=nn.Linear(6, 2)), points(6)


@idiom
def equilibrium_of_a_layer():
    def forward(self, x):
        z = x.new_zeros(len(x), 3)
        for _ in range(10):
            z = torch.tanh(0.3 * self.again(z) + self.inner(x))
        return self.head(z)

    again = nn.Linear(3, 3, bias=False)
    return Step(forward, again=again, inner=nn.Linear(3, 3), head=nn.Linear(3, 2)), points(3)


@idiom
def one_number_a_point():
    def forward(self, x):
        return self.inner(x)[:, 0]

    return Step(forward, inner=tanh_network()), points(3)


@idiom
def parameters_in_lists_and_dictionaries():
    def forward(self, x):
        return torch.tanh(x @ self.several[0]) @ self.several[1] * self.named["scale"]

    several = nn.ParameterList([weights(3, 4), weights(4, 2)])
    return Step(forward, several=several, named=nn.ParameterDict({"scale": weights()})), points(3)


@idiom
def low_rank_update():
    return tanh_network(LowRank(3, 4)), points(3)


@idiom
def forward_replaced_on_the_instance():
    network = tanh_network()
    layer = network[0]
    layer.forward = lambda x: 2 * F.linear(x.sin(), layer.weight, layer.bias)
    return network, points(3)


@idiom
def layer_called_with_changed_weights():
    def forward(self, x):
        own = {name: value * self.gain for name, value in self.inner.named_parameters()}
        return self.head(torch.func.functional_call(self.inner, own, (x,)).tanh())

    parts = {"inner": nn.Linear(3, 4), "gain": weights(), "head": nn.Linear(4, 2)}
    return Step(forward, **parts), points(3)


@idiom
def ensemble_by_vmap():
    def forward(self, x):
        member = lambda W, b: torch.tanh(x @ W + b)
        return torch.func.vmap(member)(self.W, self.b).mean(0)

    return Step(forward, W=weights(4, 3, 2), b=weights(4, 2)), points(3)


@idiom
def vmap_over_points():
    def forward(self, x):
        return torch.func.vmap(self.inner)(x)

    return Step(forward, inner=tanh_network()), points(3)


@idiom
def autocast_around_a_layer():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).to(x.dtype)

    return Step(forward, inner=tanh_network()), points(3)


@idiom
def inputs_by_name():
    def forward(self, *, left, right):
        return self.head(self.one(left).tanh() * self.two(right))

    parts = {"one": nn.Linear(3, 4), "two": nn.Linear(2, 4), "head": nn.Linear(4, 2)}
    return Step(forward, **parts), {"left": points(3), "right": points(2)}


@idiom
def a_dictionary_is_returned():
    def forward(self, x):
        return {"logits": self.inner(x), "loss": None}

    return Step(forward, inner=tanh_network()), points(3)


@idiom
def a_counter_in_a_buffer():
    def forward(self, x):
        self.calls.add_(1)
        return self.inner(x)

    return Step(forward, inner=tanh_network(), calls=torch.zeros(())), points(3)


@idiom
def activations_kept_on_the_module():
    def forward(self, x):
        self.last = self.inner(x).tanh()
        return self.head(self.last)

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def dropout_in_eval_mode():
    def forward(self, x):
        return self.head(F.dropout(self.drop(self.inner(x)).tanh(), 0.3, self.training))

    parts = {"inner": nn.Linear(3, 4), "drop": nn.Dropout(0.5), "head": nn.Linear(4, 2)}
    return Step(forward, **parts), points(3)


@idiom
def gated_units():
    def forward(self, x):
        return self.head(F.silu(self.gate(x)) * self.up(x))

    parts = {"gate": nn.Linear(3, 4, False), "up": nn.Linear(3, 4, False), "head": nn.Linear(4, 2)}
    return Step(forward, **parts), points(3)


@idiom
def pixels_shuffled_and_resized():
    return nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.PixelShuffle(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Tanh(),
        nn.Unfold(2, stride=2), nn.Flatten(), nn.Linear(64, 2),
    ), points(2, 2, 2)  # fmt: skip


@idiom
def graph_with_sums_over_neighbors():
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])

    def forward(self, x):
        messages = self.message(torch.cat([x[:, edges[0]], x[:, edges[1]]], -1)).tanh()
        total = messages.new_zeros(len(x), 3, 4).index_add(1, edges[1], messages)
        return self.head(total.sum(1))

    return Step(forward, message=nn.Linear(4, 4), head=nn.Linear(4, 2)), points(3, 2)


@idiom
def largest_features_pooled():
    def forward(self, x):
        h = self.inner(x)
        return self.head(torch.cat([h.topk(2, 1)[0].flatten(1), h.sort(1)[0][:, 0]], 1))

    return Step(forward, inner=nn.Linear(2, 3), head=nn.Linear(9, 2)), points(4, 2)


@idiom
def inverse_of_a_matrix():
    def forward(self, x):
        factor = torch.linalg.cholesky(self.A @ self.A.T + torch.eye(3))
        return x @ torch.cholesky_inverse(factor)

    return Step(forward, A=weights(3, 3)), points(3)


@idiom
def systems_of_each_point():
    def forward(self, x):
        A = self.make(x).reshape(-1, 2, 2)
        return torch.linalg.solve(A @ A.mT + torch.eye(2), self.b)

    return Step(forward, make=nn.Linear(3, 4), b=weights(2)), points(3)


@idiom
def input_shifted_in_place():
    def forward(self, x):
        x -= 0.5
        return self.inner(x)

    return Step(forward, inner=tanh_network()), points(3)


@idiom
def table_made_at_the_first_call():
    def forward(self, x):
        if self.table is None:
            self.table = x.new_ones(4, 3).cumsum(0).cos()
        return self.head((x * self.table + self.inner(x)).tanh().mean(1))

    step = Step(forward, inner=nn.Linear(3, 3), head=nn.Linear(3, 2))
    step.table = None
    return step, points(4, 3)


@idiom
def random_features_from_a_seed_of_their_own():
    def forward(self, x):
        W = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
        return self.head(torch.cos(self.inner(x) @ W))

    return Step(forward, inner=nn.Linear(3, 3), head=nn.Linear(4, 2)), points(3)


@idiom
def words_of_bounded_norm():
    table = nn.Embedding(6, 3, max_norm=0.8)
    layers = table, nn.Flatten(), nn.Tanh(), nn.Linear(12, 2)
    return nn.Sequential(*layers), torch.randint(6, (N, 4))


@idiom
def weights_clipped_on_the_way():
    def forward(self, x):
        self.inner.weight.data.clamp_(-0.3, 0.3)
        return self.head(self.inner(x).tanh())

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def nearest_code_straight_through():
    def forward(self, x):
        h = self.inner(x)
        code = self.codes[torch.cdist(h, self.codes).argmin(1)]
        return self.head(h + (code - h).detach()) + code.sum(1, keepdim=True)

    parts = {"inner": nn.Linear(3, 2), "codes": weights(4, 2), "head": nn.Linear(2, 2)}
    return Step(forward, **parts), points(3)


@idiom
def sparse_neighbors():
    def forward(self, x):
        h = torch.sparse.mm(self.neighbors, x.T).T
        return self.head(self.inner(h).tanh())

    neighbors = (torch.arange(9).reshape(3, 3) % 2).double().to_sparse()
    return Step(forward, neighbors=neighbors, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(
        3
    )


@idiom
def layer_called_by_keyword():
    def forward(self, x):
        return self.head(input=self.inner(input=x).tanh())

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2)), points(3)


@idiom
def convolution_with_the_weight_of_a_layer():
    def forward(self, x):
        h = self.conv(x)
        return self.head((h + F.conv1d(x.flip(2), self.conv.weight, padding=1)).tanh().mean(2))

    return Step(forward, conv=nn.Conv1d(2, 4, 3, padding=1), head=nn.Linear(4, 2)), points(2, 5)


@idiom
def cosine_classifier():
    def forward(self, x):
        h, W = F.normalize(self.inner(x), dim=1), F.normalize(self.head.weight, dim=1)
        return self.scale.exp() * F.linear(h, W)

    parts = {"inner": nn.Linear(3, 4), "head": nn.Linear(4, 2, bias=False), "scale": weights()}
    return Step(forward, **parts), points(3)


@idiom
def rotary_positions():
    angles = torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.1]))

    def rotate(h):
        a, b = h.chunk(2, -1)
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1
        )

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)[:, -1]

    return Step(forward, project=nn.Linear(2, 12)), points(4, 2)


@idiom
def neural_differential_equation():
    def forward(self, x):
        for _ in range(4):
            one = self.field(x)
            x = x + 0.25 * self.field(x + 0.125 * one)
        return x

    return Step(forward, field=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))), points(
        3
    )


@idiom
def invertible_coupling():
    def forward(self, x):
        a, b = x.chunk(2, 1)
        shift, log_scale = self.inner(a).chunk(2, 1)
        return torch.cat([a, b * log_scale.exp() + shift, log_scale.sum(1, keepdim=True)], 1)

    return Step(forward, inner=nn.Linear(2, 4)), points(4)


@idiom
def backbone_in_inference_mode():
    def forward(self, x):
        with torch.inference_mode():
            h = self.fixed(x).tanh()
        return self.head(h.clone())

    step = Step(forward, head=nn.Linear(4, 2))
    object.__setattr__(step, "fixed", nn.Linear(3, 4).double())  # hidden: no parameters of its own
    return step, points(3)


def subject_of(name: str) -> Case:
    with reproducible(sum(map(ord, name))):
        network, x = IDIOMS[name]()
        settle(network)
    z = rows(x, torch.tensor([num_rows(x) - 1, 0]))
    return Case(1, network.double().eval(), x, z, OUTPUTS.get(name), (name,))


QUESTIONS = {
    "value", "kernel(x)", "kernel(x, z)", "jacobian", "jvp", "vjp", "kernel.diag", "kernel.matmul",
    "kernel.adjoint", "laplace Full", "laplace Diagonal", "adapt",
}  # fmt: skip


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_is_right(name: str) -> None:
    case = subject_of(name)
    found = examine(case, truth(case), QUESTIONS.__contains__)
    assert len(found) == len(QUESTIONS)
    assert not [f for f in found if f.verdict != OK], case.describe()


def noisy():
    return Step(lambda self, x: self.inner(x + 0.1 * torch.randn_like(x)), inner=tanh_network())


def coupled():
    return Step(lambda self, x: self.inner(x - x.mean(0)), inner=tanh_network())


def statistics_of_the_batch():
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(4, 2))


def dropout_that_stays_on():
    return Step(lambda self, x: self.inner(F.dropout(x, 0.5)), inner=tanh_network())


def parameter_that_nothing_reads():
    return Step(lambda self, x: self.inner(x), inner=tanh_network(), spare=nn.Linear(2, 2))


def backbone_under_no_grad():
    def forward(self, x):
        with torch.no_grad():
            h = self.inner(x)
        return self.head(h.tanh())

    return Step(forward, inner=nn.Linear(3, 4), head=nn.Linear(4, 2))


REFUSED_IDIOMS = {
    noisy: "other outputs for the same points",
    coupled: "other outputs for the same points",
    statistics_of_the_batch: "other outputs for the same points|more than 1 value per channel",
    dropout_that_stays_on: "other outputs for the same points",
    parameter_that_nothing_reads: "do not reach the output",
    backbone_under_no_grad: "do not reach the output",
}


@pytest.mark.parametrize("build", REFUSED_IDIOMS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("what", ["kernel", "jacobian", "laplace", "adapt"])
def test_idiom_is_refused(build: Callable, what: str) -> None:
    torch.manual_seed(0)
    network, x = build().double().eval(), torch.randn(N, 3, dtype=torch.float64)
    data, noise = (x, torch.zeros(N, 2, dtype=torch.float64)), n2g.Gaussian(0.1)
    ask = {
        "kernel": lambda: n2g.linearize(network).kernel()(x),
        "jacobian": lambda: n2g.linearize(network).jacobian(x),
        "laplace": lambda: n2g.laplace(network, data, noise, prior_var=1.0),
        "adapt": lambda: n2g.adapt(network, data, noise, prior_var=1.0),
    }[what]
    known = "changes by" if what == "laplace" else REFUSED_IDIOMS[build]
    with pytest.raises(Net2GPError, match=f"{REFUSED_IDIOMS[build]}|{known}"):
        ask()
