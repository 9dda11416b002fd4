"""Keep compiled programs for the next command: half of a short one is compilation."""

import contextlib
import os

from bilevel.data.files import user_cache

_LARGEST = 2**30  # bytes of the cache; the programs of one command take some 15 million


def keep() -> None:
    """Set JAX's persistent compilation cache to a folder in the user's cache.

    A user-defined folder, JAX_COMPILATION_CACHE_DIR, has priority. If the folder cannot be written,
    nothing is cached, because JAX would warn for every program.
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
