"""Is there memory for what is asked for? Estimates from below, so that nothing is refused in vain.

A job that cannot fit is otherwise killed by the system, without a word, after minutes or hours.
"""

import pathlib
from typing import Any

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # bytes: where nothing says how much memory there is


def check(flags: Any, needs: dict[tuple[str, ...], int]) -> None:
    """Raise for the largest of ``needs``, bytes by names of flags, if there is not as much."""
    if not needs:
        return
    names = max(needs, key=lambda name: needs[name])
    need, free = needs[names], available()
    if need > free:
        values = ", ".join(str(getattr(flags, name)) for name in names)
        raise ValueError(
            f"{', '.join(names)}: expected sizes that fit in the {free / 1e9:,.1f} GB of memory "
            f"available, got {values}, which take at least {need / 1e9:,.1f} GB."
        )


def available() -> int:
    """Bytes that arrays can have: the accelerator's, or what the system and its groups leave."""
    import jax

    device = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if device and "bytes_limit" in device:
        return int(device["bytes_limit"])
    return min(_of_system(), *_of_groups())


def _of_system() -> int:
    for line in _lines(pathlib.Path("/proc/meminfo")):
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return _UNLIMITED


def _of_groups() -> list[int]:
    """Limits of the process's control groups, of either version."""
    limits = [_UNLIMITED, _UNLIMITED]
    for line in _lines(pathlib.Path("/proc/self/cgroup")):
        _, controllers, own = line.split(":", 2)
        if controllers in ("", "memory"):
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            for folder in (own.lstrip("/"), ""):
                found = _lines(_CGROUPS / controllers / folder / file)
                limits += [int(limit) for limit in found if limit.isdecimal()]
    return limits


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system, or no such group
        return []
