"""Compiled programs, kept for the next command: half of a short one is compilation."""

import contextlib
import os

from bilevel.data.files import user_cache

_LARGEST = 2**30  # bytes of the cache; the programs of one command take some 15 million


def keep() -> None:
    """Let JAX's persistent compilation cache have a folder in the user's cache.

    The user's own folder, JAX_COMPILATION_CACHE_DIR, stays. If no folder can be made or written,
    nothing is cached, because JAX would warn of every program.
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
    # Bounded, the cache locks its folder too: several commands may run at a time.
    jax.config.update("jax_compilation_cache_max_size", _LARGEST)
    # JAX keeps by default what took a second. The commands' programs are many and small.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
