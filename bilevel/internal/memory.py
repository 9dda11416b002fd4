"""Find the memory size of an accelerator, of the system and of its control groups."""

import pathlib

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # bytes, if nothing says how much memory there is


def total_memory() -> int:
    """Return the bytes of memory of the default device, used or not; 8 GiB if unknown."""
    known = _of_accelerator() or min(_of_system("MemTotal"), *_of_groups())
    return known if known < _UNLIMITED else 2**33


def available_memory() -> int:
    """Return the bytes available for arrays: the accelerator's memory, or free memory."""
    return _of_accelerator() or min(_of_system("MemAvailable"), *_of_groups())


def _of_accelerator() -> int | None:
    import jax

    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def _of_system(field: str) -> int:
    for line in _lines(pathlib.Path("/proc/meminfo")):
        name, _, amount = line.partition(":")
        if name == field:
            return int(amount.split()[0]) * 1024
    return _UNLIMITED


def _of_groups() -> list[int]:
    """Return the limits of the process's control groups, of both versions."""
    limits = [_UNLIMITED, _UNLIMITED]
    for line in _lines(pathlib.Path("/proc/self/cgroup")):
        _, controllers, own = line.split(":", 2)
        if controllers in ("", "memory"):
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            for folder in (own.lstrip("/"), ""):
                lines = _lines(_CGROUPS / controllers / folder / file)
                limits += [int(limit) for limit in lines if limit.isdecimal()]
    return limits


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system, or no such group
        return []
