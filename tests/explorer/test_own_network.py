"""A network of one's own on the page: what Laplace's posterior says on a line or a plane through the data."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from explorer.browser import opened, until
from net2gp.errors import InputError
from net2gp.explorer import own_network, write_explorer


def trained(network: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    loss = nn.MSELoss() if y.is_floating_point() else nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network.eval()


def regression(inputs: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(40, inputs)
    y = torch.sin(x[:, :1]) + 0.1 * torch.randn(40, 1)
    return trained(nn.Sequential(nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, 1)), x, y), x, y


def classes() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    return trained(nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 3)), x, y), x, y


def values_of(path: Path) -> dict:
    found = re.search(
        r'id="own-values">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found
    return json.loads(found.group(1))


def field(own: dict, name: str) -> Tensor:
    (one,) = [one for one in own["fields"] if one["name"] == name]
    return torch.from_numpy(np.frombuffer(base64.b64decode(one["values"]), "<f4").copy())


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found.float(), right.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs", [1, 5])
def test_the_values_of_a_regression_are_those_of_laplace(tmp_path, inputs) -> None:
    network, x, y = regression(inputs)
    own = values_of(write_explorer(tmp_path / "page.html", network, (x, y)))
    if inputs == 1:
        places = torch.linspace(*own["ranges"][0], 161)[:, None]
    else:
        center = x.double().mean(0)
        directions = torch.linalg.svd(x.double() - center, full_matrices=False)[2][:2]
        (a, b), (c, d) = own["ranges"]
        across, up = torch.linspace(a, b, 37).double(), torch.linspace(c, d, 37).double().flip(0)
        places = (
            center + across[None, :, None] * directions[0] + up[:, None, None] * directions[1]
        ).reshape(-1, 5)
        places = places.float()
    posterior = n2g.laplace(network, (x, y), n2g.Gaussian())
    parts = posterior.split(places)
    close(field(own, "mean"), posterior.mean(places)[:, 0])
    close(field(own, "standard deviation"), posterior.predict(places).stddev[:, 0])
    close(field(own, "epistemic part"), parts.epistemic[:, 0].sqrt())
    close(field(own, "aleatoric part"), parts.aleatoric[:, 0].sqrt())
    close(field(own, "novelty"), posterior.novelty(places))
    size = own["kernel"]["size"]
    K = torch.from_numpy(np.frombuffer(base64.b64decode(own["kernel"]["values"]), "<f4").copy())
    kept = x[torch.tensor(own["points"])[:, 0].argsort(stable=True)]
    close(K.reshape(size, size), posterior.kernel(kept))


def test_the_values_of_classes_are_probabilities(tmp_path) -> None:
    network, x, y = (
        classes()
    )  # in float64: shares of novelty are small differences of numbers near one
    network, x = network.double(), x.double()
    own = values_of(write_explorer(tmp_path / "page.html", network, (x, y)))
    across, up = (torch.linspace(*one, 37, dtype=torch.float64) for one in own["ranges"])
    places = torch.stack([across.repeat(37), up.flip(0).repeat_interleave(37)], 1)
    probs = n2g.laplace(network, (x, y), n2g.Categorical()).predict(places).probs
    for c in range(3):
        close(field(own, f"probability of class {c}"), probs[:, c])
    close(field(own, "entropy of the classes"), torch.distributions.Categorical(probs).entropy())
    assert own["targets"] == y.tolist()


def test_a_posterior_brings_its_data_and_its_law(tmp_path) -> None:
    network, x, y = regression(1)
    posterior = n2g.adapt(network, (x, -y), n2g.Gaussian())
    own = values_of(write_explorer(tmp_path / "page.html", posterior))
    places = torch.linspace(*own["ranges"][0], 161)[:, None]
    close(field(own, "mean"), posterior.mean(places)[:, 0])
    close(field(own, "standard deviation"), posterior.predict(places).stddev[:, 0])


def test_a_scaling_gives_the_units_before(tmp_path) -> None:
    network, z, t = regression(1)
    scaling = n2g.data.Scaling(x_mean=[50.0], x_std=[10.0], y_mean=[1000.0], y_std=[200.0])
    page = write_explorer(tmp_path / "a.html", network, (z, t), scaling=scaling, columns=["age"])
    own, plain = values_of(page), values_of(write_explorer(tmp_path / "b.html", network, (z, t)))
    assert own["axes"] == ["age"]
    close(torch.tensor(own["ranges"]), 50 + 10 * torch.tensor(plain["ranges"]))
    close(torch.tensor(own["points"]), 50 + 10 * torch.tensor(plain["points"]))
    close(torch.tensor(own["targets"]), 1000 + 200 * torch.tensor(plain["targets"]))
    close(field(own, "mean"), 1000 + 200 * field(plain, "mean"))
    for name in ("standard deviation", "epistemic part", "aleatoric part"):
        close(field(own, name), 200 * field(plain, name))
    close(field(own, "novelty"), field(plain, "novelty"))


def test_large_networks_keep_their_last_layer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(own_network, "LARGE", 40)
    network, x, y = classes()
    own = values_of(write_explorer(tmp_path / "page.html", network, (x, y)))
    assert "structure LastLayer()" in own["about"]
    last = n2g.laplace(network, (x, y), n2g.Categorical(), structure=n2g.LastLayer())
    across, up = (torch.linspace(*one, 37) for one in own["ranges"])
    places = torch.stack([across.repeat(37), up.flip(0).repeat_interleave(37)], 1)
    close(field(own, "probability of class 0"), last.predict(places).probs[:, 0])
    asked = write_explorer(tmp_path / "page.html", network, (x, y), structure=n2g.Kron())
    assert "structure Kron()" in values_of(asked)["about"]


def test_slow_networks_have_fewer_places_or_none(tmp_path, monkeypatch) -> None:
    network, x, y = regression(2)
    monkeypatch.setattr(own_network, "SECONDS", 1e-9)
    own = values_of(write_explorer(tmp_path / "page.html", network, (x, y)))
    assert own["side"] == 9
    assert len(field(own, "mean")) == 81
    assert "9² instead of 37²" in own["about"]
    monkeypatch.setattr(own_network, "PATIENCE", 1e-9)
    with pytest.raises(InputError, match="--structure last_layer"):
        write_explorer(tmp_path / "page.html", network, (x, y))


def test_what_cannot_be_shown_is_refused(tmp_path) -> None:
    network, x, y = regression(1)
    path = tmp_path / "page.html"
    with pytest.raises(InputError, match=r"but data is missing\. Pass both, or none"):
        write_explorer(path, network)
    with pytest.raises(InputError, match=r"but network is missing\. Pass both, or none"):
        write_explorer(path, data=(x, y))
    with pytest.raises(InputError, match=r"Pass data=\(x, y\) with x as a float tensor"):
        write_explorer(path, network, ((x, x), y))
    assert not path.exists()


@pytest.mark.parametrize("kind", ["line", "plane", "classes"])
def test_the_page_shows_every_field(chromium, tmp_path, kind) -> None:
    network, x, y = {
        "line": lambda: regression(1),
        "plane": lambda: regression(5),
        "classes": classes,
    }[kind]()
    file = write_explorer(tmp_path / "page.html", network, (x, y))
    assert file.stat().st_size < 400_000
    tab = opened(chromium, file)
    names = tab.evaluate("explorer.own.fields.map((field) => field.name)")
    for name in names:
        tab.locator("#own-field").select_option(name)
        until(
            tab,
            f"document.getElementById('own-plot').getAttribute('aria-label').includes('{name}')",
        )
    tab.locator("#own-plot").hover()
    until(tab, "document.getElementById('own-note').textContent.startsWith('At ')")
    tab.locator("#own-plot").focus()
    before = tab.locator("#own-note").text_content()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#own-note").text_content() != before
    said = tab.locator("#own-note").text_content()
    assert all(name in said for name in names)
    assert tab.problems == []
    tab.context.close()
