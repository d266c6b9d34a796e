"""Networks as people have them: frozen parts, wrappers, named outputs, masks, integers."""

import copy
import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

import net2gp as n2g
from language_models import ClassifierOutput, Integers, LanguageModel, batch, language_model
from net2gp.errors import NetworkError
from net2gp.linear import linearize


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)
    return nn.Sequential(*layers).double().eval()


def points(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=torch.float64)


def brute_force(network, x, names) -> torch.Tensor:
    """J Jᵀ over the parameters `names`, by one plain backward pass for each output."""
    network = copy.deepcopy(network).requires_grad_(True)
    f = (network(**x) if isinstance(x, dict) else network(x)).logits.flatten()
    chosen = [value for name, value in network.named_parameters() if name in names]
    rows = [torch.autograd.grad(one, chosen, retain_graph=True) for one in f]
    J = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    return J @ J.T


def test_frozen_parameters_are_left_out() -> None:
    network = mlp()
    network[0].requires_grad_(False)
    linearized, x = linearize(network), points(6, 3)
    assert list(linearized.params) == ["2.weight", "2.bias"]
    torch.testing.assert_close(linearized.kernel()(x), linearize(network, only="2.*").kernel()(x))
    posterior = n2g.laplace(network, (x, network(x).detach()), n2g.Gaussian(0.1), prior_var=1.0)
    assert list(posterior.linearized.params) == ["2.weight", "2.bias"]
    posterior = n2g.adapt(network, (x, points(6, 2)), n2g.Gaussian(0.1), prior_var=1.0)
    assert list(posterior.kernel.linearized.params) == ["2.weight", "2.bias"]


def test_only_decides_against_requires_grad() -> None:
    network = mlp()
    network[0].requires_grad_(False)
    assert linearize(network, only="*").num_params == 50
    assert list(linearize(network, only="0.weight").params) == ["0.weight"]


def test_all_parameters_vary_if_all_are_frozen() -> None:
    network, x = mlp(), points(6, 3)
    expected = linearize(network).kernel()(x)
    network.requires_grad_(False)
    assert linearize(network).num_params == 50
    assert torch.equal(linearize(network).kernel()(x), expected)
    assert not any(value.requires_grad for value in network.parameters())


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
def test_last_layer_takes_its_noise_from_what_is_not_frozen() -> None:
    network, x = mlp(), points(30, 3)
    network[0].requires_grad_(False)
    y = network(x).detach() + 0.3 * points(30, 2)
    structure = n2g.LastLayer()
    posterior = n2g.laplace(network, (x, y), n2g.Gaussian(), structure=structure)
    h = network[:2](x).detach()
    head = n2g.laplace(network[2], (h, y), n2g.Gaussian(), structure=structure)
    assert posterior.likelihood.noise_var == pytest.approx(head.likelihood.noise_var)
    torch.testing.assert_close(posterior.predict(x).variance, head.predict(h).variance)


def test_a_frozen_base_is_not_copied_and_gets_no_gradient() -> None:
    network, x = language_model(), batch()
    linearized = linearize(network)
    assert all("lora" in name for name in linearized.params)
    for name, value in network.named_parameters():
        if "lora" in name:
            assert linearized.params[name].data_ptr() != value.data_ptr()
        else:
            assert linearized.frozen[name].data_ptr() == value.data_ptr()
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda value: saved.append(tuple(value.shape)) or value, lambda value: value
    )
    table = tuple(network.words.weight.shape)
    with hooks:
        linearized.kernel()(x)
    assert saved
    assert table not in saved
    assert all(value.grad is None for value in network.parameters())


def test_training_the_network_further_leaves_the_linearization_as_it_is() -> None:
    network, x = mlp(), points(6, 3)
    network[0].requires_grad_(False)
    linearized = linearize(network)
    before = linearized(x)
    optimizer = torch.optim.SGD([v for v in network.parameters() if v.requires_grad], lr=0.1)
    network(x).square().sum().backward()
    optimizer.step()
    assert torch.equal(linearized(x), before)
    assert not torch.equal(network(x), before)


@pytest.mark.parametrize("causal", [False, True])
def test_adapters_of_a_language_model_agree_with_brute_force(causal) -> None:
    network, x = language_model(causal=causal).double(), batch()
    names = [name for name, _ in network.named_parameters() if "lora" in name]
    linearized = linearize(network, only="*lora_*")
    assert list(linearized.params) == names
    kernel = linearized.kernel()
    torch.testing.assert_close(kernel(x), brute_force(network, x, names))
    (known,) = linearized.plans
    assert set(known.plan.structured) == set(names)


def test_all_parameters_of_a_language_model_agree_with_brute_force() -> None:
    torch.manual_seed(0)
    network, x = LanguageModel(causal=True).double().eval(), batch()
    names = [name for name, _ in network.named_parameters()]
    torch.testing.assert_close(linearize(network).kernel()(x), brute_force(network, x, names))


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
def test_padding_changes_nothing() -> None:
    network, x = language_model(causal=True).double(), batch(length=7)
    longer = {name: nn.functional.pad(value, (0, 4)) for name, value in x.items()}
    kernel = linearize(network).kernel()
    torch.testing.assert_close(kernel(longer), kernel(x))
    torch.testing.assert_close(kernel(x, longer), kernel(x))
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    settings = {"prior_var": 0.1, "structure": n2g.Kron()}
    short = n2g.laplace(network, (x, y), n2g.Categorical(), **settings)
    long = n2g.laplace(network, (longer, y), n2g.Categorical(), **settings)
    torch.testing.assert_close(long.predict(longer).probs, short.predict(x).probs)
    torch.testing.assert_close(short.predict(longer).probs, short.predict(x).probs)


def test_sequences_of_different_lengths_join_by_padding() -> None:
    network, x = language_model().double(), batch()
    alone = [linearize(network).kernel()(one(x, n)) for n in range(6)]
    together = linearize(network).kernel().blocks(x)
    torch.testing.assert_close(together, torch.stack(alone))


def one(x: dict, n: int) -> dict:
    length = int(x["attention_mask"][n].sum())
    return {name: value[n : n + 1, :length] for name, value in x.items()}


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_adapters_beside_integers_agree_with_the_base_they_stand_for(kind) -> None:
    network, x = language_model(change=Integers).to(kind), batch()
    linearized = linearize(network)
    codes = network.blocks[0].query.base_layer.codes
    assert linearized.frozen["blocks.0.query.base_layer.codes"].data_ptr() == codes.data_ptr()
    dense = copy.deepcopy(network).double()
    for block in dense.blocks:
        for layer in (block.query, block.value):
            base = layer.base_layer
            layer.base_layer = nn.Linear(8, 8).double().requires_grad_(False)
            layer.base_layer.weight.copy_(base.codes * base.scale)
            layer.base_layer.bias.copy_(base.bias)
    tolerance = {} if kind == torch.float64 else {"rtol": 0.1, "atol": 0.1}
    expected = linearize(dense).kernel()(x)
    torch.testing.assert_close(linearized.kernel()(x).double(), expected, **tolerance)


def quantized(x: torch.Tensor) -> nn.Module:
    """Two layers with weights and activations in integers, on scales that were found before."""
    kinds = torch.ao.quantization
    body = nn.Sequential(kinds.QuantStub(), mlp().float()[0], nn.ReLU(), kinds.DeQuantStub()).eval()
    body.qconfig = kinds.get_default_qconfig("fbgemm")
    prepared = kinds.prepare(body)
    prepared(x)
    return kinds.convert(prepared)


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:Please use quant_min")
def test_quantized_layers_of_torch_may_stand_before_what_varies_only() -> None:
    x = points(6, 3).float()
    body, head = quantized(x), nn.Linear(8, 2)
    kernel = linearize(nn.Sequential(body, nn.Tanh(), head).eval()).kernel()
    h = body(x).tanh()
    torch.testing.assert_close(kernel(x), torch.kron(h @ h.T + 1, torch.eye(2)))
    before = nn.Sequential(nn.Linear(3, 3), body, head).eval()
    message = (
        r"chosen parameters act through '1\.0', a quantized layer of torch, which passes no deriv"
    )
    with pytest.raises(NetworkError, match=message):
        linearize(before).kernel()(x)
    assert linearize(before, only="2.*").kernel()(x).shape == (12, 12)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_dynamic_quantization_of_torch_couples_points() -> None:
    """Its activations have one scale for the whole batch."""
    body = torch.ao.quantization.quantize_dynamic(mlp().float(), {nn.Linear}, torch.qint8)
    network = nn.Sequential(body, nn.Tanh(), nn.Linear(2, 2)).eval()
    with pytest.raises(NetworkError, match="couples the points of a batch"):
        linearize(network).kernel()(points(6, 3).float())


def wrapped() -> dict[str, nn.Module]:
    network = mlp()
    return {
        "compiled": torch.compile(network),
        "DataParallel": nn.DataParallel(network),
        "both": torch.compile(nn.DataParallel(network)),
        "compiled inside": nn.Sequential(torch.compile(network[:2]), network[2]),
    }


@pytest.mark.parametrize("name", ["compiled", "DataParallel", "both", "compiled inside"])
def test_wrapped_networks_are_taken_as_what_is_inside(name, tmp_path) -> None:
    network, x = wrapped()[name].eval(), points(6, 3)
    linearized, expected = linearize(network), linearize(mlp())
    torch.testing.assert_close(linearized.kernel()(x), expected.kernel()(x))
    torch.testing.assert_close(linearized(x), expected(x))
    (known,) = linearized.plans
    assert not known.plan.leftover
    if name == "compiled inside":
        return
    assert list(linearized.params) == list(expected.params)
    y = mlp()(x).detach()
    posterior = n2g.laplace(network, (x, y), n2g.Gaussian(0.1), prior_var=1.0)
    n2g.save(posterior, tmp_path / "posterior.safetensors")
    for loaded in (network, mlp()):
        again = n2g.load(tmp_path / "posterior.safetensors", loaded)
        assert torch.equal(again.predict(x).variance, posterior.predict(x).variance)


def test_a_network_that_compiles_its_calls_runs_as_it_was_written() -> None:
    network, x = mlp(), points(6, 3)
    expected = linearize(network).kernel()(x)
    network.compile(backend=refuse)
    torch.testing.assert_close(linearize(network).kernel()(x), expected)
    network[0].compile(backend=refuse)
    torch.testing.assert_close(linearize(network).kernel()(x), expected)


def refuse(graph, inputs):
    raise AssertionError("the network was compiled")


def test_a_distributed_network_is_taken_as_what_is_inside(tmp_path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        network, x = nn.parallel.DistributedDataParallel(mlp()), points(6, 3)
        assert list(linearize(network).params) == list(linearize(mlp()).params)
        torch.testing.assert_close(linearize(network).kernel()(x), linearize(mlp()).kernel()(x))
    finally:
        torch.distributed.destroy_process_group()


class Module(nn.Module):
    """A module of Lightning's kind: `forward` predicts, and everything else needs a trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self._trainer = mlp(), None

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, index):
        raise AssertionError("the step of the training was taken")

    def log(self, *values):
        raise AssertionError("something was logged")

    @property
    def trainer(self):
        raise RuntimeError("Module is not attached to a `Trainer`.")


def test_a_lightning_module_is_a_network() -> None:
    module, x = Module().eval(), points(6, 3)
    torch.testing.assert_close(linearize(module).kernel()(x), linearize(mlp()).kernel()(x))
    y = module(x).detach()
    posterior = n2g.laplace(module, (x, y), n2g.Gaussian(0.1), prior_var=1.0)
    assert torch.equal(posterior.predict(x).mean, y)
    assert module._trainer is None
    torch.testing.assert_close(linearize(module.train()).kernel()(x), posterior.kernel(x))


def test_channels_last_is_a_layout_of_the_same_numbers() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 6, 3)
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
    network, x = network.double().eval(), points(5, 3, 6, 6)
    expected = linearize(network).kernel()(x)
    last = copy.deepcopy(network).to(memory_format=torch.channels_last)
    linearized, turned = linearize(last), x.to(memory_format=torch.channels_last)
    assert linearized.params["0.weight"].is_contiguous(memory_format=torch.channels_last)
    for one_network, one_x in ((last, turned), (last, x), (network, turned)):
        torch.testing.assert_close(linearize(one_network).kernel()(one_x), expected)
    v = torch.randn_like(linearized.flatten(linearized.params))
    J = linearized.jacobian(turned)
    torch.testing.assert_close(linearized.jvp(turned, linearized.unflatten(v)), J @ v)
    y = network(x).detach()
    for structure in (n2g.Kron(), n2g.Diagonal(), n2g.LastLayer()):
        options = {"prior_var": 1.0, "structure": structure}
        ours = n2g.laplace(last, (turned, y), n2g.Gaussian(0.1), **options)
        plain = n2g.laplace(network, (x, y), n2g.Gaussian(0.1), **options)
        torch.testing.assert_close(ours.predict(turned).variance, plain.predict(x).variance)


Named = namedtuple("Named", ["hidden", "logits"])


class Answers(nn.Module):
    """Returns its outputs as `pack` has them."""

    def __init__(self, pack) -> None:
        super().__init__()
        self.network, self.pack = mlp(), pack

    def forward(self, x):
        return self.pack(self.network(x))


@pytest.mark.parametrize(
    "pack",
    [
        lambda f: ClassifierOutput(logits=f, hidden_states=2 * f),
        lambda f: OrderedDict(loss=f.sum(), logits=f, hidden_states=(f, f)),
        lambda f: Named(2 * f, f),
        lambda f: {"scores": f, "cache": None},
        lambda f: (f,),
    ],
)
def test_logits_or_the_only_tensor_are_the_output(pack) -> None:
    x = points(6, 3)
    linearized, expected = linearize(Answers(pack).eval()), linearize(mlp())
    assert torch.equal(linearized(x), expected(x))
    torch.testing.assert_close(linearized.kernel()(x), expected.kernel()(x))
    data = x, points(6, 2)
    options = {"prior": 1.0, "training": n2g.bayes.Training(num_steps=3)}
    found = n2g.bayes.map_estimate(Answers(pack), data, n2g.Gaussian(0.1), **options)
    plain = n2g.bayes.map_estimate(mlp(), data, n2g.Gaussian(0.1), **options)
    torch.testing.assert_close(found.mean(x), plain.mean(x))


@dataclasses.dataclass
class Encoded:
    last_hidden_state: torch.Tensor
    pooler_output: torch.Tensor


@pytest.mark.parametrize(
    ("pack", "typed"),
    [
        (
            lambda f: Encoded(f, 2 * f),
            "lambda out: out.last_hidden_state), or another of out.pooler_output.",
        ),
        (lambda f: {"a": f, "b": f}, 'lambda out: out["a"]), or another of out["b"].'),
        (lambda f: (f, f, f), "lambda out: out[0]), or another of out[1], out[2]."),
    ],
)
def test_ambiguous_outputs_are_told_what_to_type(pack, typed) -> None:
    with pytest.raises(NetworkError, match="where one tensor is needed") as error:
        linearize(Answers(pack).eval())(points(6, 3))
    assert f"Pick it with linearize(network, output={typed}" in str(error.value)
