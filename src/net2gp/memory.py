"""How much memory is free, and a refusal of what would not fit."""

from __future__ import annotations

import os

import torch

from net2gp.errors import TooLarge

__all__ = ["available_memory", "check_memory"]


def available_memory(device: torch.device | str = "cpu") -> int:
    """Estimate how many bytes can still be allocated.

    Args:
        device: The device. For the CPU, the answer respects the memory limit of a container.

    Returns:
        The number of bytes.
    """
    device = torch.device(device)
    if device.type == "cuda":
        # torch's allocator keeps freed memory, which the driver counts as used but torch can hand out.
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + idle
    return min(_system_memory(), _container_memory())


def _system_memory() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**63 - 1


def _container_memory() -> int:
    """Return the bytes left under the memory limits of this process's control groups (versions 1 and 2)."""
    left = 2**63 - 1
    try:
        groups = [line.strip().split(":", 2) for line in _read("/proc/self/cgroup").splitlines()]
    except OSError:
        return left
    for _, controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        root = f"/sys/fs/cgroup/{controllers}".rstrip("/")
        limit, usage = (
            ("max", "current") if not controllers else ("limit_in_bytes", "usage_in_bytes")
        )
        # Inside a container its own group is mounted at the root, while the path is the one on the host.
        for folder in (f"{root}{path}", root):
            try:
                used = int(_read(f"{folder}/memory.{usage}")) - _inactive_files(folder)
                left = min(left, max(0, int(_read(f"{folder}/memory.{limit}")) - used))
            except (OSError, ValueError):
                continue
    return left


def _inactive_files(folder: str) -> int:
    """Return the bytes of cached files that the system frees on demand."""
    entries = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
    return int(entries.get("total_inactive_file", entries.get("inactive_file", 0)))


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def check_memory(num_bytes: float, device: torch.device, what: str, instead: str) -> None:
    """Refuse an allocation that the device cannot hold, before it is tried.

    Args:
        num_bytes: The size of the allocation.
        device: The device.
        what: What would be allocated, for the message.
        instead: What to use instead, for the message.

    Raises:
        TooLarge: If fewer bytes are free.
    """
    free = available_memory(device)
    if num_bytes > free:
        raise TooLarge(
            f"{what} would take {num_bytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free on "
            f"{device}. Instead: {instead}."
        )
