"""The record of a command for ``--log``; the settings and signals of its process."""

import _thread
import contextlib
import datetime
import importlib.util
import os
import pathlib
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from bilevel.data.files import user_cache

SMALL = "search", "search-skips", "certify", "baseline"
"""Commands without convolutions or large products: tuning takes longer than it saves."""

_SECONDS = 0.05  # wait before Ctrl-C is raised again, so that the code that lost it has ended
_LARGEST = 2**30  # bytes of the cache; the programs of one command take some 15 million


def recorder(path: pathlib.Path, command: str, resume: bool) -> Callable[[dict[str, Any]], None]:
    """Return a function that appends a line of JSON to ``path``, for ``--log``.

    A resumed run skips the steps of its phases that the file has.
    """
    from bilevel.outer_loop.metrics_log import Lines

    lines = Lines("log", path, resume=True)
    known = [line for line in lines.lines if line.get("command") == command] if resume else []
    recorded = {(line.get("phase"), line.get("done")) for line in known if "done" in line}

    def record(shown):
        if (shown["phase"], shown.get("done")) not in recorded:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            lines.append([{"time": now, "command": command, **shown}])

    return record


def versions() -> dict[str, str]:
    """Return the versions of the package, JAX and Python from metadata, without importing JAX."""
    known = dict.fromkeys(("bilevel", "jax", "jaxlib"), "unknown")  # if not installed
    for name in known:
        with contextlib.suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name)
    return known | {"python": platform.python_version()}


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Within the ``with`` block, send a Ctrl-C again that Python reports as lost.

    Python ignores exceptions in finalizers and during garbage collection, when JAX runs code.
    """
    usual = sys.unraisablehook

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            again = threading.Timer(_SECONDS, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            usual(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


def switch_autotuning_off(command: str) -> None:
    """Let XLA choose a GPU's kernels without timing them, if ``command`` is a small one.

    It has an effect only before JAX's first computation. A level in ``XLA_FLAGS`` has priority.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    plugins = "jax_cuda12_plugin", "jax_cuda13_plugin"
    cuda = any(importlib.util.find_spec(plugin) for plugin in plugins)
    if command in SMALL and cuda and "xla_gpu_autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()


def keep_programs() -> None:
    """Keep compiled programs for the next command: half of a short one is compilation.

    A user-defined folder, JAX_COMPILATION_CACHE_DIR, has priority. If the folder in the user's
    cache cannot be written, nothing is cached, because JAX would warn for every program.
    """
    import jax

    cache = user_cache()
    if jax.config.values["jax_compilation_cache_dir"] is not None or cache is None:
        return
    folder = cache / "programs"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # A bounded cache locks its folder, so that several commands can run at a time.
    jax.config.update("jax_compilation_cache_max_size", _LARGEST)
    # By default JAX keeps programs that compile for a second, but the commands' programs are small.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
