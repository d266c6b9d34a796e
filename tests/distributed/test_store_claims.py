"""Claims hold tiles for the living, and for nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import net2gp as n2g
from distributed.store_cases import contents, points
from net2gp.distributed import kernel_store
from net2gp.distributed.store import claims as module
from net2gp.distributed.store.claims import Claims, Owner

pytest.importorskip("zarr")

TILE = (0, 1)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "work"


def left_behind(folder: Path, owner: Owner, lease: float = 60.0, age: float = 0.0) -> Claims:
    """The claim of another process, renewed some seconds ago, with a tile that is half written."""
    theirs = Claims(folder, lease, owner)
    assert theirs.take(TILE)
    theirs.part(TILE).write_bytes(b"half")
    when = time.time() - age
    os.utime(folder / "0-1.claim", (when, when))
    return theirs


def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_one_of_many_gets_a_tile(folder):
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.append(Claims(folder, 60.0).take(TILE)))
        for _ in range(16)
    ]
    folder.mkdir()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False] * 15 + [True]


def test_a_tile_that_was_given_back_can_be_claimed(folder):
    first, second = Claims(folder, 60.0), Claims(folder, 60.0)
    assert first.take(TILE)
    assert not second.take(TILE)
    assert second.take((3, 4))
    first.release(TILE)
    assert second.take(TILE)


def test_a_claim_names_its_process_in_json(folder):
    Claims(folder, 7.0).take(TILE)
    said = json.loads((folder / "0-1.claim").read_text())
    assert said["pid"] == os.getpid()
    assert said["lease"] == 7.0
    assert Owner(said["machine"], said["pid"], said["started"]) == Owner.here()


def test_the_dead_of_this_machine_lose_their_claim_at_once(folder):
    here = Owner.here()
    theirs = left_behind(folder, Owner(here.machine, ended(), ""))
    assert Claims(folder, 60.0).take(TILE)
    assert not theirs.part(TILE).exists()


def test_a_process_that_was_killed_and_not_yet_waited_for_is_dead():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    owner = Owner(Owner.here().machine, process.pid, module._state(process.pid)[1])
    assert not owner.dead
    process.kill()
    end = time.monotonic() + 10
    while not owner.dead and time.monotonic() < end:
        time.sleep(0.01)
    assert owner.dead
    process.wait()
    assert owner.dead


def test_a_later_process_with_the_same_number_is_another_one():
    here = Owner.here()
    assert not here.dead
    if here.started:
        assert Owner(here.machine, here.pid, "1").dead


@pytest.mark.parametrize("owner", ["here", "elsewhere"])
def test_the_living_keep_their_claim_for_the_lease_they_named(owner, folder):
    here = Owner.here()
    other = here if owner == "here" else Owner("another machine", ended(), "5")
    theirs = left_behind(folder, other, lease=30.0, age=20.0)
    assert not Claims(folder, 1.0).take(TILE)
    assert theirs.part(TILE).exists()
    os.utime(folder / "0-1.claim", (time.time() - 40.0,) * 2)
    assert Claims(folder, 1.0).take(TILE)
    assert not theirs.part(TILE).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"machine": "a"}', '{"pid": "x"}'])
def test_a_claim_without_an_owner_is_soon_left_behind(text, folder):
    folder.mkdir()
    place = folder / "0-1.claim"
    place.write_text(text)
    assert not Claims(folder, 60.0).take(TILE)
    os.utime(place, (time.time() - module.FORMING - 1,) * 2)
    assert Claims(folder, 60.0).take(TILE)


def test_work_that_takes_longer_than_the_lease_keeps_its_claim(folder):
    with Claims(folder, 0.4) as working:
        assert working.take(TILE)
        other = Claims(folder, 0.4)
        for _ in range(10):
            time.sleep(0.1)
            assert not other.take(TILE)
    time.sleep(0.8)
    assert other.take(TILE)


def test_what_a_killed_process_left_is_finished_and_cleared_away(tmp_path):
    kernel, x = n2g.RBF(), points()
    whole = kernel_store(tmp_path / "whole", kernel, x, tile=3)
    whole.fill()
    store = kernel_store(tmp_path / "k.zarr", kernel, x, tile=3)
    dead = Owner(Owner.here().machine, ended(), "")
    left_behind(store.folder.work, dead)
    assert store.fill() == 1.0
    assert contents(tmp_path / "k.zarr") == contents(tmp_path / "whole")
    assert not store.folder.work.exists()


def test_fill_waits_for_the_tile_of_another_machine_until_its_lease_is_over(tmp_path):
    store = kernel_store(tmp_path / "k.zarr", n2g.RBF(), points(), tile=3)
    left_behind(store.folder.work, Owner("another machine", 1, ""), lease=1.0)
    assert store.fill(limit=0.3) == 5 / 6
    start = time.monotonic()
    assert store.fill() == 1.0
    assert time.monotonic() - start < 10


def test_threads_fill_one_store_together(tmp_path):
    kernel, x = n2g.RBF(), points(20)
    store = kernel_store(tmp_path / "k.zarr", kernel, x, tile=2)
    threads = [threading.Thread(target=store.fill) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.progress == 1.0
    torch.testing.assert_close(store.kernel()(x), kernel(x), rtol=1e-13, atol=1e-13)
