"""The server answers what its program says, names what is wrong, and takes corrections back."""

from __future__ import annotations

import asyncio
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import net2gp as n2g
from net2gp import serving
from net2gp.errors import InputError
from net2gp.serving.batching import Batcher
from net2gp.serving.live import Live
from serving.programs import fitted, table

testclient = pytest.importorskip("fastapi.testclient")

from net2gp.serving.server import NPZ, Limits, create_app  # noqa: E402


def in_a_loop(work):
    """The result in an event loop of its own, also where a browser runs one in this thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "a.pt2"
    serving.export(fitted("numbers LastLayer()"), path, table()[0], novelty=False)
    return serving.load(path)


@pytest.fixture(scope="module")
def client(program):
    app = create_app(program, Limits(points=8, megabytes=1))
    with testclient.TestClient(app, raise_server_exceptions=False) as found:
        yield found


def test_it_is_healthy_and_says_what_it_serves(client, program):
    answer = client.get("/health").json()
    assert answer["status"] == "ok"
    assert answer["serves"]["structure"] == program.facts["structure"]


def test_unknown_places_and_methods_have_the_form_of_other_errors(client):
    for answer, status in ((client.get("/none"), 404), (client.get("/predict"), 405)):
        assert answer.status_code == status
        assert set(answer.json()) == {"error"}
        assert "POST /predict" in answer.json()["error"]
    assert answer.headers["allow"] == "POST"


def test_json_and_npz_give_the_answers_of_the_program(client, program):
    x = table()[0][:5]
    expected = program(x)
    found = client.post("/predict", json={"x": x.tolist()}).json()
    body = io.BytesIO()
    np.savez(body, x=x.numpy())
    answer = client.post("/predict", content=body.getvalue(), headers={"content-type": NPZ})
    with np.load(io.BytesIO(answer.content)) as arrays:
        assert set(arrays.files) == set(found) == set(expected)
        for name, value in expected.items():
            assert torch.allclose(torch.tensor(found[name]), value)
            assert torch.equal(torch.from_numpy(arrays[name]), value)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "no JSON"),
        (b"[1]", 400, "must be an object"),
        (b'{"y": [[1, 2, 3, 4]]}', 400, "must have x, but has y"),
        (b'{"x": [[1, 2, 3]]}', 400, r"shape (N, 4), but has (1, 3)"),
        (b'{"x": [[1, 2, 3, 4], [1]]}', 400, "rows of one length"),
        (b'{"x": [["a", 2, 3, 4]]}', 400, "array of numbers"),
        (b'{"x": [[NaN, 2, 3, 4]]}', 400, "finite"),
        (b'{"x": [[1e39, 2, 3, 4]]}', 400, "finite"),
        (b'{"x": [[%s, 2, 3, 4]]}' % (b"9" * 4000), 400, "array of numbers"),
        (b'{"x": %s}' % (b"[" * 100_000), 400, "no JSON"),
        (b'{"x": null}', 400, "array of numbers"),
        (b'{"x": []}', 400, "shape (N, 4)"),
        (b'{"x": %s}' % str([[0] * 4] * 9).encode(), 413, "at most 8 points"),
        (b" " * (2**20 + 1), 413, "at most 1 MB"),
    ],
)
def test_bad_requests_have_plain_messages(client, body, status, message):
    answer = client.post("/predict", content=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]
    assert "Traceback" not in answer.text


def test_pickles_and_large_archives_are_refused(client):
    for arrays, status in (
        ({"x": np.array([object()])}, 400),
        ({"x": np.zeros((2**18, 4), np.float32)}, 413),
    ):
        body = io.BytesIO()
        np.savez_compressed(body, **arrays)
        headers = {"content-type": NPZ}
        assert (
            client.post("/predict", content=body.getvalue(), headers=headers).status_code == status
        )
    assert client.post("/predict", content=b"no", headers={"content-type": NPZ}).status_code == 400


@pytest.mark.parametrize("kind", ["complex64", "datetime64[s]", "S1", [("a", "f4")]])
def test_arrays_of_other_things_than_numbers_are_refused(client, kind):
    body = io.BytesIO()
    np.savez(body, x=np.zeros((2, 4), kind))
    answer = client.post("/predict", content=body.getvalue(), headers={"content-type": NPZ})
    assert answer.status_code == 400
    assert "array of numbers" in answer.json()["error"]


def test_a_prediction_that_overflows_is_refused_in_both_forms(program):
    app = create_app(serving.Program(program.facts, lambda x: {"mean": 1e30 * x["x"]}))
    body = io.BytesIO()
    np.savez(body, x=np.full((1, 4), 1e20, np.float32))
    with testclient.TestClient(app) as client:
        for sent, kind in ((b'{"x": [[1e20, 0, 0, 0]]}', "text/json"), (body.getvalue(), NPZ)):
            answer = client.post("/predict", content=sent, headers={"content-type": kind})
            assert answer.status_code == 400
            assert "not finite" in answer.json()["error"]


def test_whole_numbers_are_taken_as_they_are_or_refused(program):
    facts = {**program.facts, "inputs": {"x": ["int32", ["N"]]}}
    app = create_app(serving.Program(facts, lambda x: {"mean": x["x"]}))
    with testclient.TestClient(app) as client:
        assert client.post("/predict", json={"x": [7]}).json() == {"mean": [7]}
        for value, message in ((0.5, "whole"), (True, "whole"), (2**40, "int32"), (2**63, "int32")):
            answer = client.post("/predict", json={"x": [value]})
            assert answer.status_code == 400
            assert message in answer.json()["error"]


def test_a_program_is_not_corrected(client):
    answer = client.post("/correct", json={"x": [[0] * 4], "y": [[1]]})
    assert answer.status_code == 409
    assert "Serve a posterior" in answer.json()["error"]
    assert client.delete("/correct/0").status_code == 409


def test_a_failure_inside_has_no_traceback(program):
    def broken(x):
        raise ZeroDivisionError("secret")

    app = create_app(serving.Program(program.facts, broken))
    with testclient.TestClient(app, raise_server_exceptions=False) as client:
        answer = client.post("/predict", json={"x": [[0.0] * 4]})
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_corrections_move_predictions_and_are_taken_back():
    x, y, _ = table()
    posterior = n2g.condition(n2g.RBF(), (x[:20], y[:20]), n2g.Gaussian(0.01))
    with testclient.TestClient(create_app(posterior)) as client:
        ask = lambda: client.post("/predict", json={"x": x[20:22].tolist()}).json()
        before = ask()
        numbers = [
            client.post("/correct", json={"x": x[i : i + 1].tolist(), "y": [[float(i)]]}).json()["correction"]
            for i in (20, 21)
        ]  # fmt: skip
        assert abs(ask()["mean"][1][0] - 21) < 1
        assert client.get("/health").json()["corrections"] == numbers
        assert client.delete(f"/correct/{numbers[0]}").json() == {"undone": numbers[0]}
        one = n2g.condition(
            n2g.RBF(),
            (torch.cat([x[:20], x[21:22]]), torch.cat([y[:20], torch.tensor([[21.0]])])),
            n2g.Gaussian(0.01),
        )
        assert np.allclose(ask()["mean"], one.mean(x[20:22]), atol=1e-4)
        client.delete(f"/correct/{numbers[1]}")
        assert ask() == before
        for number in (numbers[1], "9" * 5000, "\u0663", "-1"):
            assert client.delete(f"/correct/{number}").status_code == 404
        for body, message in (
            ({"x": [[0] * 4]}, "x and y"),
            ({"x": [[0] * 3], "y": [[1]]}, "shape (N, 4)"),
            ({"x": [[0] * 4], "y": [[1], [2]]}, "1 rows"),
            ({"x": [[0] * 4], "y": [["a"]]}, "array of numbers"),
        ):
            answer = client.post("/correct", json=body)
            assert answer.status_code == 400
            assert message in answer.json()["error"]
        assert ask() == before


def slowed(monkeypatch, started, go_on):
    """Let corrections wait for `go_on`, and note how many run at a time."""
    running, most = [], []

    def correct(self, x, y):
        running.append(1)
        most.append(len(running))
        started.set()
        assert go_on.wait(20)
        number = original(self, x, y)
        running.pop()
        return number

    original = Live.correct
    monkeypatch.setattr(Live, "correct", correct)
    return most


def test_the_server_answers_while_it_corrects_one_at_a_time(monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    most = slowed(monkeypatch, started, go_on)
    x, y, _ = table()
    posterior = n2g.condition(n2g.RBF(), (x[:20], y[:20]), n2g.Gaussian(0.01))
    body = {"x": x[20:21].tolist(), "y": [[20.0]]}
    app = create_app(posterior, Limits(corrections=2))
    with testclient.TestClient(app) as client, ThreadPoolExecutor(3) as pool:
        ask = lambda: client.post("/predict", json={"x": body["x"]}).json()
        before = ask()
        asked = [pool.submit(client.post, "/correct", json=body) for _ in range(3)]
        try:
            assert started.wait(20)
            assert client.get("/health").json()["corrections"] == []
            assert ask() == before
        finally:
            go_on.set()
        answers = [one.result() for one in asked]
        assert sorted(one.status_code for one in answers) == [200, 200, 409]
        assert max(most) == 1
        numbers = [one.json()["correction"] for one in answers if one.status_code == 200]
        assert sorted(numbers) == client.get("/health").json()["corrections"] == [0, 1]
        assert ask() != before


def test_a_posterior_around_a_network_refuses_corrections():
    with testclient.TestClient(create_app(fitted("numbers Diagonal()"))) as client:
        answer = client.post("/correct", json={"x": [[0] * 4], "y": [[1]]})
    assert answer.status_code == 409
    assert "dual" in answer.json()["error"]


def test_requests_that_wait_share_passes():
    sizes = []

    def run(x):
        sizes.append(len(x["x"]))
        return {"y": 2 * x["x"]}

    async def ask():
        batcher = Batcher(run, most_points=4)
        values = [torch.full((size, 1), float(size)) for size in (1, 2, 3, 1, 6)]
        return values, await asyncio.gather(*(batcher({"x": value}) for value in values))

    values, answers = in_a_loop(ask())
    assert all(torch.equal(a["y"], 2 * v) for a, v in zip(answers, values, strict=True))
    assert sizes == [3, 4, 6]


def test_a_request_that_fails_leaves_those_beside_it_alone():
    def run(x):
        if (x["x"] < 0).any():
            raise IndexError("no such token")
        return {"y": 2 * x["x"]}

    async def ask():
        batcher = Batcher(run, most_points=8)
        values = [torch.full((1, 1), value) for value in (1.0, 2.0, -1.0, 3.0)]
        asked = (batcher({"x": value}) for value in values)
        return await asyncio.gather(*asked, return_exceptions=True)

    one, two, wrong, three = in_a_loop(ask())
    assert [float(found["y"]) for found in (one, two, three)] == [2, 4, 6]
    assert isinstance(wrong, IndexError)


def test_what_cannot_be_served_is_named():
    with pytest.raises(InputError, match="create_app serves"):
        create_app("a.pt2")
    with pytest.raises(InputError, match="points"):
        Limits(points=0)
