"""Who computes which tile: claims as files that outlive nobody for long.

Nothing depends on claims but time. A tile that two processes compute has the same bytes twice, and each of
them moves a whole file to its place.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from net2gp.distributed.store.tile_folder import Tile

FORMING = 2.0
"""Seconds after which a claim that names no owner, since this died at once, counts as left behind."""


@dataclass(frozen=True)
class Owner:
    """A process, told apart from a later one with the same number.

    Args:
        machine: The host, its start and its space of process numbers.
        pid: The number of the process.
        started: When the process started, in ticks since the start of the machine; "" if unknown.
    """

    machine: str
    pid: int
    started: str

    @staticmethod
    def here() -> Owner:
        """The process that calls it."""
        return Owner(_machine(), os.getpid(), _state(os.getpid())[1])

    @property
    def dead(self) -> bool:
        """Whether the process is known to have ended: one of another machine never is."""
        if self.machine != _machine() or os.name != "posix":
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        state, started = _state(self.pid)
        return state in ("Z", "X") or bool(started and self.started and started != self.started)


@cache
def _machine() -> str:
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):  # containers on one machine count processes each for themselves
        facts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(facts)


def _state(pid: int) -> tuple[str, str]:
    """The state of a process (Z has been killed and not yet been buried) and its start, or nothing."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    words = text.rpartition(")")[2].split()  # the name in brackets may have spaces and brackets
    return words[0], words[19]


@dataclass(eq=False)
class Claims:
    """The claims of this process on the tiles of a folder, at most one at a time.

    A claim is a file that the system creates for one process only. While the process lives, a thread renews
    the file's time. Whoever finds a claim takes it over if its owner is known to be dead, or if it has not
    been renewed for `lease` seconds by the clock of the disk.

    Args:
        folder: Where claims are, made when the first one is.
        lease: Seconds after which a claim that is not renewed may be taken over.
        owner: This process.
        token: Part of the names of its unfinished files, which no other process uses.
    """

    folder: Path
    lease: float
    owner: Owner = field(default_factory=Owner.here)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    _held: list[Path] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Claims:
        threading.Thread(target=self._renew, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def part(self, tile: Tile) -> Path:
        """The unfinished file of this process for a tile."""
        return self._part(tile, self.token)

    def take(self, tile: Tile) -> bool:
        """Claim a tile.

        Args:
            tile: Row and column of the tile.

        Returns:
            Whether it is this process that computes it.
        """
        self.folder.mkdir(exist_ok=True)
        place = self._place(tile)
        if self._create(place):
            return True
        if not self._left_behind(place, tile):
            return False
        with suppress(OSError):
            place.unlink()
        return self._create(place)

    def release(self, tile: Tile) -> None:
        """Give a claim back.

        Args:
            tile: Row and column of the tile.
        """
        self._held.clear()
        self._place(tile).unlink(missing_ok=True)

    def _place(self, tile: Tile) -> Path:
        return self.folder / f"{tile[0]}-{tile[1]}.claim"

    def _part(self, tile: Tile, token: str) -> Path:
        return self.folder / f"{tile[0]}-{tile[1]}.{token}.part"

    def _create(self, place: Path) -> bool:
        try:
            handle = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except (FileExistsError, FileNotFoundError):  # the folder goes when the last tile is there
            return False
        try:
            said = {**vars(self.owner), "lease": self.lease, "token": self.token}
            os.write(handle, json.dumps(said).encode())
        except OSError:
            place.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        self._held[:] = [place]
        return True

    def _left_behind(self, place: Path, tile: Tile) -> bool:
        """Whether nobody works under a claim any more; what its owner did not finish is then removed."""
        try:
            age, text = self._age(place), place.read_text()
        except OSError:  # it was given back in this moment
            return True
        try:
            said = json.loads(text)
            owner = Owner(said["machine"], int(said["pid"]), said["started"])
            lease, token = float(said["lease"]), str(said["token"])
        except (ValueError, KeyError, TypeError):
            return age > FORMING
        if not owner.dead and age <= lease:
            return False
        self._part(tile, token).unlink(missing_ok=True)
        return True

    def _age(self, place: Path) -> float:
        """Seconds since a claim was renewed, both times by the clock of the disk."""
        os.utime(self.folder)
        return self.folder.stat().st_mtime - place.stat().st_mtime

    def _renew(self) -> None:
        while not self._ended.wait(self.lease / 4):
            for place in list(self._held):
                with suppress(OSError):
                    os.utime(place)
