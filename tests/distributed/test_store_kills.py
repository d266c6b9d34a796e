"""A process may be killed at every step, and the next one ends with the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import net2gp as n2g
from distributed.store_cases import contents, points
from net2gp.distributed import kernel_store
from net2gp.distributed.store import tile_folder
from net2gp.distributed.store.tile_folder import TileFolder

pytest.importorskip("zarr")
if not hasattr(os, "fork"):
    pytest.skip("processes are copied by fork", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_half(part: Path, content: bytes) -> None:
    with open(part, "wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        die()


def after(function: Callable) -> Callable:
    """The function, and then death."""
    return lambda *args, **settings: (function(*args, **settings), die())


STEPS = {
    "a claim is made, but names nobody": (os, "write", die),
    "a tile is computed": (TileFolder, "write", die),
    "a tile is half written": (tile_folder, "write_whole", write_half),
    "a tile is written, but not moved": (os, "replace", die),
    "a tile is moved": (os, "replace", after(os.replace)),
    "a claim is no longer needed": (Path, "unlink", die),
    "all tiles are there": (shutil, "rmtree", die),
}

FIRST_STEPS = {
    "the folder is made": (tile_folder, "write_whole", die),
    "metadata are half written": (tile_folder, "write_whole", write_half),
    "metadata are written": (os, "link", die),
    "metadata are in their place": (os, "link", after(os.link)),
}


def killed(step: tuple, at: int, job: Callable[[], object]) -> None:
    """Run a job in a copy of this process, which is killed when it comes to a step for the n-th time."""
    owner, name, instead = step
    pid = os.fork()
    if not pid:
        calls, usual = [], getattr(owner, name)

        def counted(*args: object, **settings: object) -> object:
            calls.append(name)
            return (usual if len(calls) < at else instead)(*args, **settings)

        setattr(owner, name, counted)
        try:
            job()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("step", [name for name in STEPS if name != "all tiles are there"])
def test_the_next_process_finishes_what_one_left_when(step, at, tmp_path):
    kernel, x = n2g.RBF(), points()
    kernel_store(tmp_path / "whole", kernel, x, tile=3).fill()
    store = kernel_store(tmp_path / "k.zarr", kernel, x, tile=3)
    killed(STEPS[step], at, store.fill)
    assert store.progress < 1
    for tile in store.folder.tiles():
        if store.folder.holds(tile):
            store.folder.read(tile)
    assert store.fill() == 1.0
    assert contents(tmp_path / "k.zarr") == contents(tmp_path / "whole")
    assert not store.folder.work.exists()


def test_what_the_last_process_did_not_clear_away_goes_with_the_next(tmp_path):
    store = kernel_store(tmp_path / "k.zarr", n2g.RBF(), points(), tile=3)
    killed(STEPS["all tiles are there"], 1, store.fill)
    assert store.progress == 1.0
    assert store.folder.work.exists()
    store.fill()
    assert not store.folder.work.exists()


@pytest.mark.parametrize("step", FIRST_STEPS)
def test_a_store_can_be_made_again_when_a_process_died_as(step, tmp_path):
    make = lambda name: kernel_store(tmp_path / name, n2g.RBF(), points(), tile=3)
    make("whole").fill()
    killed(FIRST_STEPS[step], 1, lambda: make("k.zarr"))
    make("k.zarr").fill()
    assert contents(tmp_path / "k.zarr") == contents(tmp_path / "whole")


def test_a_disk_without_links_has_stores_as_well(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refused)
    store = kernel_store(tmp_path / "k.zarr", n2g.RBF(), points(), tile=3)
    assert store.fill() == 1.0
    monkeypatch.undo()
    kernel_store(tmp_path / "other", n2g.RBF(), points(), tile=3).fill()
    assert contents(tmp_path / "k.zarr") == contents(tmp_path / "other")


def test_the_program_that_kills_processes_finds_the_same_bytes():
    program = [sys.executable, str(ROOT / "benchmarks" / "kernel_store.py"), "--quick"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run(program, capture_output=True, text=True, env=settings, timeout=500)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "All claims hold." in found.stdout
