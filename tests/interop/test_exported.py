"""Programs of torch.export as modules: the same function, with layers under their own names."""

from __future__ import annotations

import warnings
import zipfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import net2gp as n2g
from net2gp.errors import FileFormatError, Net2GPWarning, NetworkError
from net2gp.interop.exported import from_program, load_program


class Residual(nn.Module):
    """Convolutions, batch norms and a shortcut as in a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.norm, self.more = nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, padding="same", groups=2)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 3)
        self.norm.running_mean, self.norm.running_var = torch.randn(4), torch.rand(4) + 0.5

    def forward(self, x):
        h = F.relu(self.norm(self.stem(x)))
        h = F.relu(self.more(h)) + F.pad(h[:, :, ::1], (0, 0, 0, 0, 2, 2))
        return self.head(self.drop(h).mean((-2, -1)))


class Text(nn.Module):
    """Tokens, attention and layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8, padding_idx=0), nn.Parameter(torch.randn(5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.block(self.embed(ids) + self.place).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.cell, self.head = kind(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Shared(nn.Module):
    """One layer called twice, and a weight that is used as it is beside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(F.gelu(self.layer(x)))) + F.linear(x, self.head.weight)


class Flat(nn.Module):
    """A view whose shape holds the number of points."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.view(x.shape[0], 4))


def norms():
    return nn.Sequential(
        *(nn.Conv1d(4, 6, 2), nn.GroupNorm(2, 6), nn.SiLU(), nn.Flatten(), nn.Linear(24, 5)),
        *(nn.LayerNorm(5), nn.Tanh(), nn.RMSNorm(5), nn.Linear(5, 3)),
    )


NETWORKS = {
    "residual": (Residual, lambda n: torch.randn(n, 3, 8, 8)),
    "text": (Text, lambda n: torch.randint(0, 11, (n, 5))),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda n: torch.randn(n, 5, 4)),
    "gru": (lambda: Recurrent(nn.GRU), lambda n: torch.randn(n, 5, 4)),
    "shared": (Shared, lambda n: torch.randn(n, 4)),
    "norms": (norms, lambda n: torch.randn(n, 4, 5)),
}


def made(name, count=9):
    torch.manual_seed(0)
    build, draw = NETWORKS[name]
    return build().eval(), draw(count)


def exported(network, x, *, dynamic=True):
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(network, (x[:3],), dynamic_shapes=shapes)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_module_is_the_network_with_its_names(name):
    network, x = made(name)
    module = from_program(exported(network, x))
    torch.testing.assert_close(module(x), network(x))
    own, given = dict(module.named_parameters()), dict(network.named_parameters())
    assert own.keys() == given.keys()
    assert all(torch.equal(own[key], given[key]) for key in own)
    assert module.state_dict().keys() == network.state_dict().keys()
    assert module.get_submodule("head" if hasattr(network, "head") else "8").__class__ is nn.Linear


@pytest.mark.parametrize("structure", [n2g.Kron(), n2g.LastLayer(), n2g.Full()], ids=repr)
@pytest.mark.parametrize("name", ["residual", "text", "lstm"])
def test_posteriors_are_those_of_the_network(name, structure):
    network, x = made(name)
    module, y = from_program(exported(network, x)), torch.arange(len(x)) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        laws = [
            n2g.laplace(
                one, (x, y), n2g.Categorical(), prior_var=0.1, structure=structure
            ).marginal(x)
            for one in (network, module)
        ]
    torch.testing.assert_close(laws[1].mean, laws[0].mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(laws[1].variance, laws[0].variance, rtol=1e-3, atol=1e-6)


def test_limits_of_infinite_width_are_those_of_the_network():
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2)).eval()
    x = torch.randn(5, 2, 2, dtype=torch.float64)
    module = from_program(exported(network, x.float()))
    torch.testing.assert_close(n2g.nngp(module)(x), n2g.nngp(network)(x))
    torch.testing.assert_close(n2g.ntk(module)(x), n2g.ntk(network)(x))


def test_a_posterior_of_the_module_is_read_back_with_either(tmp_path):
    network, x = made("residual")
    module = from_program(exported(network, x))
    data = (x, torch.randn(9, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        posterior = n2g.laplace(
            module, data, n2g.Gaussian(0.1), prior_var=0.1, structure=n2g.Kron()
        )
    posterior.save(tmp_path / "posterior.safetensors")
    for one in (network, module):
        loaded = n2g.load(tmp_path / "posterior.safetensors", one)
        torch.testing.assert_close(loaded.marginal(x).variance, posterior.marginal(x).variance)


def test_decomposed_programs_have_layers_as_well():
    network, x = made("residual")
    program = exported(network, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = from_program(program.run_decompositions())
    torch.testing.assert_close(module(x), network(x))
    kinds = [type(one) for one in (module.stem, module.norm, module.head)]
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.Linear]


@pytest.mark.parametrize("points", [1, 3])
def test_a_fixed_number_of_points_is_taken_where_it_makes_no_difference(points):
    network, x = made("residual")
    module = from_program(exported(network, x[:points], dynamic=False))
    torch.testing.assert_close(module(x), network(x))


@pytest.mark.parametrize("name", ["lstm", "flat"])
def test_a_fixed_number_of_points_is_refused_where_it_matters(name):
    network, x = (Flat().eval(), torch.randn(3, 2, 2)) if name == "flat" else made(name)
    program = exported(network, x, dynamic=False)
    with pytest.raises(NetworkError, match=r"takes batches of 3 only.*torch\.export\.Dim"):
        from_program(program)


def test_programs_that_mix_points_are_refused():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x - x.mean(0, keepdim=True))

    with pytest.raises(NetworkError, match="or mixes their points"):
        from_program(exported(Mixing().eval(), torch.randn(3, 4)))


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(4)])
def test_programs_of_training_mode_are_refused(layer):
    network = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2)).train()
    with pytest.raises(NetworkError, match=r"in training mode: .*network\.eval\(\)"):
        from_program(exported(network, torch.randn(3, 4)))


def test_several_outputs_are_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x), x

    with pytest.raises(NetworkError, match=r"returns 2 tensors.*the logits, alone"):
        from_program(exported(Two().eval(), torch.randn(3, 4)))


def test_files_are_programs_or_refused(tmp_path):
    network, x = made("norms")
    torch.export.save(exported(network, x), tmp_path / "network.pt2")
    torch.testing.assert_close(load_program(tmp_path / "network.pt2")(x), network(x))
    with pytest.raises(FileFormatError, match=r"there is no file .*torch\.export\.save"):
        load_program(tmp_path / "none.pt2")
    (tmp_path / "bytes.pt2").write_bytes(b"not a program")
    with pytest.raises(FileFormatError, match=r"is not a program of torch\.export"):
        load_program(tmp_path / "bytes.pt2")


def test_a_changed_byte_of_the_weights_is_noticed(tmp_path):
    network, x = made("norms")
    torch.export.save(exported(network, x), tmp_path / "network.pt2")
    whole = bytearray((tmp_path / "network.pt2").read_bytes())
    whole[whole.index(next(network.parameters()).detach().numpy().tobytes())] ^= 1
    (tmp_path / "network.pt2").write_bytes(bytes(whole))
    with pytest.raises(FileFormatError, match=r"is not a program of torch\.export .*is damaged"):
        load_program(tmp_path / "network.pt2")


def test_archives_of_another_kind_are_refused_without_a_log(tmp_path, caplog):
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("a.txt", "a text")
    with pytest.raises(FileFormatError, match=r"is not a program of torch\.export"):
        load_program(tmp_path / "other.pt2")
    assert [one for one in caplog.records if one.levelname == "WARNING"] == []
