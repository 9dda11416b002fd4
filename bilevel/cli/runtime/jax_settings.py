"""Settings of JAX before a command computes anything: autotuning, and the compilation cache."""

import contextlib
import importlib.util
import os

from bilevel.data.files import user_cache

SMALL = "search", "search-skips", "certify", "baseline"
"""Commands without convolutions or large products: tuning takes longer than it saves."""

_LARGEST = 2**30  # bytes of the cache; the programs of one command take some 15 million


def switch_autotuning_off(command: str) -> None:
    """Let XLA choose a GPU's kernels without timing them, if ``command`` is a small one.

    It has an effect only before JAX's first computation, and only if JAX's plugin for CUDA is
    installed. An autotuning level in ``XLA_FLAGS`` has priority.
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
