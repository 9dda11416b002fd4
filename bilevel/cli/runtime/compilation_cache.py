"""Compiled programs, kept for the next command: half of a short one is compilation."""

import os

from bilevel.data.files import user_cache

_LARGEST = 2**30  # bytes of the cache; the programs of one command take some 15 million


def keep() -> None:
    """Let JAX's persistent compilation cache have a folder in the user's cache.

    Not where it has one, by ``JAX_COMPILATION_CACHE_DIR``, nor where none can be made or written:
    JAX would warn of every program.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    cache = user_cache()
    if cache is None:
        return
    folder = cache / "programs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Bounded, the cache locks its folder too: several commands may run at a time.
    jax.config.update("jax_compilation_cache_max_size", _LARGEST)
    # JAX keeps by default what took a second. The commands' programs are many and small.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
