"""Posteriors as files."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from net2gp import RBF, Categorical, Full, Gaussian, condition, laplace, linearize, load, nngp, save
from net2gp.errors import FileFormatError, InputError
from net2gp.posteriors.writing import write
from net2gp.solvers import Cholesky, WeightCholesky
from posteriors.ways import WAYS, built, network, points, real_targets, seeded, unseen_points


def small():
    x = points(4)
    return condition(RBF(0.7), (x, real_targets(x, 1)), Gaussian(0.1))


def with_network(**options):
    linearized, x = linearize(network(1), **options), points(4)
    return condition(linearized.kernel(), (x, real_targets(x, 1)), Gaussian(0.1), mean=linearized)


@pytest.mark.parametrize("name", WAYS)
def test_a_loaded_posterior_predicts_the_same_bits(name, tmp_path):
    posterior, x, path = built(name), unseen_points(), tmp_path / "posterior.safetensors"
    save(posterior, path)
    loaded = load(path, WAYS[name].network())
    assert type(loaded) is type(posterior)
    for law in ("marginal", "joint"):
        a, b = getattr(posterior, law)(x), getattr(loaded, law)(x)
        assert torch.equal(a.mean, b.mean)
        assert torch.equal(a.covariance_matrix, b.covariance_matrix)
    y = WAYS[name].targets(x, WAYS[name].num_targets)
    assert torch.equal(posterior.predict(x).log_prob(y), loaded.predict(x).log_prob(y))
    assert torch.equal(posterior.log_marginal_likelihood(), loaded.log_marginal_likelihood())
    one, other = (p.sample(x, 2, generator=seeded(0)) for p in (posterior, loaded))
    assert torch.equal(one, other)
    assert loaded.solver == posterior.solver
    assert loaded.inference == posterior.inference


@pytest.mark.parametrize(
    "name", [name for name in WAYS if "conj" not in name and "var" not in name]
)
def test_a_loaded_posterior_can_be_updated_and_saved_again(name, tmp_path):
    path, again = tmp_path / "one", tmp_path / "two"
    save(built(name), path)
    loaded = load(path, WAYS[name].network())
    save(loaded, again)
    twice = load(again, WAYS[name].network())
    x, y = WAYS[name].data()
    assert torch.equal(loaded.marginal(x).mean, twice.marginal(x).mean)
    one, other = (p.update((x[:1] + 0.1, y[:1])) for p in (built(name), twice))
    torch.testing.assert_close(one.marginal(x).mean, other.marginal(x).mean, rtol=1e-9, atol=1e-9)


def test_the_weights_of_the_given_network_do_not_matter(tmp_path):
    posterior, x = with_network(), unseen_points()
    save(posterior, tmp_path / "file")
    other = network(1, seed=99)
    before = [value.clone() for value in other.parameters()]
    loaded = load(tmp_path / "file", other)
    assert torch.equal(loaded.marginal(x).mean, posterior.marginal(x).mean)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize("kind", ["function space", "weight space", "laplace"])
def test_a_posterior_whose_network_trains_is_saved_as_it_was(kind, tmp_path):
    """Dropout, which would make the network's value random, stays off; modes stay as they are."""
    module, x = nn.Sequential(network(1), nn.Dropout(0.5)).eval(), points(4)
    data, likelihood = (x, module(x).detach()), Gaussian(0.1)
    if kind == "laplace":
        posterior = laplace(module, data, likelihood, prior_var=1.0, structure=Full())
    else:
        solver = Cholesky() if kind == "function space" else WeightCholesky()
        posterior = condition(linearize(module).kernel(), data, likelihood, solver=solver)
    before = posterior.marginal(unseen_points())
    save(posterior, tmp_path / "before")
    module.train()
    with torch.no_grad():
        for value in module.parameters():
            value.add_(1.0)
    save(posterior, tmp_path / "after")
    assert all(part.training for part in module.modules())
    # the checksum is over every tensor and the whole description; their order in the file is open
    assert metadata(tmp_path / "after") == metadata(tmp_path / "before")
    loaded = load(tmp_path / "after", module)
    module.eval()
    after = loaded.marginal(unseen_points())
    assert torch.equal(after.mean, before.mean)
    assert torch.equal(after.covariance_matrix, before.covariance_matrix)


def test_buffers_and_frozen_parameters_are_saved(tmp_path):
    def normalized():
        body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        return body.double()

    trained, x = normalized(), points(4)
    trained(points(50))  # moves the running statistics
    linearized = linearize(trained.eval(), only="3.*")
    posterior = condition(
        linearized.kernel(), (x, real_targets(x, 1)), Gaussian(0.1), mean=linearized
    )
    save(posterior, tmp_path / "file")
    loaded = load(tmp_path / "file", normalized().eval())
    assert torch.equal(loaded.marginal(x).mean, posterior.marginal(x).mean)


def test_a_picked_output_is_given_again(tmp_path):
    pick = lambda out: out[:, :1]
    linearized, x = linearize(network(3), output=pick), points(4)
    posterior = condition(linearized.kernel(), (x, real_targets(x, 1)), Gaussian(0.1))
    save(posterior, tmp_path / "file")
    with pytest.raises(InputError, match="pass the same output= to load"):
        load(tmp_path / "file", network(3))
    loaded = load(tmp_path / "file", network(3), output=pick)
    assert torch.equal(loaded.marginal(x).mean, posterior.marginal(x).mean)


def test_tuple_and_dict_inputs_are_saved(tmp_path):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network(1)

        def forward(self, a, b):
            return self.body(a + b)

    x = points(4)
    for inputs in ((x, x), {"a": x, "b": x}):
        kernel = linearize(Sum().eval()).kernel()
        posterior = condition(kernel, (inputs, real_targets(x, 1)), Gaussian(0.1))
        save(posterior, tmp_path / "file")
        loaded = load(tmp_path / "file", Sum().eval())
        assert torch.equal(loaded.marginal(inputs).mean, posterior.marginal(inputs).mean)


def test_a_float32_posterior_stays_one(tmp_path):
    linearized, x = linearize(network(1, dtype=torch.float32)), points(4).float()
    posterior = condition(linearized.kernel(), (x, real_targets(x, 1)), Gaussian(0.1))
    save(posterior, tmp_path / "file")
    loaded = load(tmp_path / "file", network(1))
    assert loaded.marginal(x).mean.dtype == torch.float32
    assert torch.equal(loaded.marginal(x).mean, posterior.marginal(x).mean)


def test_a_precise_kernel_is_saved(tmp_path):
    x = points(4)
    posterior = condition(RBF(0.7).precise(), (x, real_targets(x, 1)), Gaussian(0.1))
    save(posterior, tmp_path / "file")
    assert load(tmp_path / "file").kernel.product_dtype == torch.float64


def test_gradients_are_not_saved(tmp_path):
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    x = points(4)
    posterior = condition(RBF(scale), (x, real_targets(x, 1)), Gaussian(0.1))
    save(posterior, tmp_path / "file")
    assert not load(tmp_path / "file").log_marginal_likelihood().requires_grad


def test_the_network_must_be_given_and_of_the_same_architecture(tmp_path):
    save(with_network(), tmp_path / "file")
    with pytest.raises(
        InputError, match=r"a network \(Sequential\): pass one, load\(path, network\)"
    ):
        load(tmp_path / "file")
    with pytest.raises(InputError, match=r"another architecture.*'0.bias' has shape \(7,\) here"):
        load(tmp_path / "file", network(1, hidden=7))
    with pytest.raises(InputError, match=r"'0.bias' has shape None here and \(5,\) in the file"):
        load(tmp_path / "file", nn.Linear(2, 1))


def test_a_linearization_may_be_given_for_its_network(tmp_path):
    path, pick = tmp_path / "posterior.safetensors", lambda out: 2 * out
    posterior = with_network(output=pick)
    save(posterior, path)
    x = unseen_points()
    loaded = load(path, linearize(network(1), output=pick))
    assert torch.equal(loaded.marginal(x).mean, posterior.marginal(x).mean)
    with pytest.raises(InputError, match="network must be the module itself, but is a dict"):
        load(path, dict(network(1).named_parameters()))


def test_what_is_no_device_or_dtype_here_is_said(tmp_path):
    path, posterior = tmp_path / "posterior.safetensors", small()
    save(posterior, path)
    with pytest.raises(InputError, match="there is no device 'cud' here"):
        load(path, device="cud")
    with pytest.raises(InputError, match="there is no device 'cud' here"):
        posterior.to("cud")
    with pytest.raises(InputError, match=r"Pass posterior\.to\(dtype=torch\.float64\)"):
        posterior.to(torch.float64)
    with pytest.raises(InputError, match=r"dtype must be torch\.float32 or torch\.float64"):
        posterior.to(dtype=torch.int64)


def test_a_limit_is_not_loaded_into_a_deeper_network(tmp_path):
    path, x = tmp_path / "posterior.safetensors", points(4)
    layers = [nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1)]
    kernel = nngp(nn.Sequential(*layers[:2], layers[-1]).eval())
    save(condition(kernel, (x, real_targets(x, 1)), Gaussian(0.1)), path)
    with pytest.raises(InputError, match="another architecture than the saved one: it has no part"):
        load(path, nn.Sequential(*layers).eval())


def test_what_is_no_posterior_or_no_file_is_not_saved(tmp_path):
    with pytest.raises(
        InputError, match="save takes a posterior of net2gp, but got an object of type str"
    ):
        save("posterior", tmp_path / "posterior.safetensors")
    with pytest.raises(InputError, match="is a folder"):
        save(small(), tmp_path)


def test_code_is_never_saved(tmp_path):
    x = points(4)
    data = (x, real_targets(x, 1))
    for mean in (lambda x: x[:, :1], network(1)):
        posterior = condition(RBF(), data, Gaussian(0.1), mean=mean)
        with pytest.raises(InputError, match=r"cannot be saved .* use mean=linearized or None"):
            save(posterior, tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_nothing_is_pickled(tmp_path, monkeypatch):
    import pickle

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    save(with_network(), tmp_path / "file")
    load(tmp_path / "file", network(1))
    files = (load, write)
    source = "".join(Path(f.__code__.co_filename).read_text() for f in files)
    assert "torch.load" not in source
    assert "torch.save" not in source


def test_a_missing_file_or_folder_is_named(tmp_path):
    with pytest.raises(FileFormatError, match=r"there is no file .*nowhere.*given to save"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileFormatError, match="there is no file"):
        load(tmp_path)
    with pytest.raises(InputError, match=r"there is no folder .*nowhere to save in"):
        save(small(), tmp_path / "nowhere" / "file")


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("a posterior, honestly")
    with pytest.raises(FileFormatError, match="not a whole safetensors file"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(FileFormatError, match="not a whole safetensors file"):
        load(path)
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(FileFormatError, match="not of a net2gp posterior"):
        load(path)


def read_header(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_header(path: Path, header: dict, body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_a_file_of_another_version_is_refused(tmp_path):
    path = tmp_path / "file"
    save(small(), path)
    header, body = read_header(path)
    header["__metadata__"]["format"] = "999"
    write_header(path, header, body)
    with pytest.raises(
        FileFormatError, match=r"has format 999 .* reads formats 1 and 2. Save it again"
    ):
        load(path)


def test_a_class_that_is_not_known_is_refused(tmp_path, monkeypatch):
    """Nothing but the listed classes is ever called, whatever a file with a right checksum says."""
    path = tmp_path / "file"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules["net2gp.posteriors.writing"].NAMES, RBF, "os.system")
        save(small(), path)
    with pytest.raises(
        FileFormatError, match=r"names 'os\.system', which this version does not know"
    ):
        load(path)


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "file"
    save(small(), path)
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(FileFormatError):
            load(path)


def test_a_flipped_byte_is_noticed_wherever_it_is(tmp_path):
    path = tmp_path / "file"
    save(small(), path)
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(FileFormatError):
            load(path)


@pytest.mark.parametrize("where", ["save_file", "replace"])
def test_an_interrupted_save_leaves_the_old_file_whole(where, tmp_path, monkeypatch):
    module = sys.modules["net2gp.posteriors.writing"]
    path = tmp_path / "file"
    save(small(), path)
    content = path.read_bytes()

    def interrupted(tensors, target, **kwargs):
        if where == "save_file":
            Path(target).write_bytes(b"half")
        raise KeyboardInterrupt

    owner = module if where == "save_file" else module.os
    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(with_network(), path)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_saving_replaces_an_older_file(tmp_path):
    path = tmp_path / "file"
    save(small(), path)
    save(replace(small(), evidence=torch.tensor(3.0)), path)
    assert float(load(path).log_marginal_likelihood()) == 3.0


def test_both_spaces_and_labels_are_saved_with_their_types(tmp_path):
    linearized, x = linearize(network(3)), points(6)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    for solver in (Cholesky(), WeightCholesky()):
        posterior = condition(linearized.kernel(), (x, y), Categorical(), solver=solver)
        save(posterior, tmp_path / "file")
        loaded = load(str(tmp_path / "file"), network(3))
        assert torch.equal(loaded.y, y)
        assert loaded.y.dtype == torch.int64
