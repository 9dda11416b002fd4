"""Switch XLA's autotuning off for commands whose programs are small."""

import importlib.util
import os

SMALL = "search", "search-skips", "certify", "baseline"
"""Commands without convolutions or large products: tuning takes longer than it saves."""


def switch_off(command: str) -> None:
    """Let XLA choose a GPU's kernels without timing them, if ``command`` is a small one.

    It has an effect only before JAX's first computation, and only if JAX's plugin for CUDA is
    installed. An autotuning level in ``XLA_FLAGS`` has priority.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    plugins = "jax_cuda12_plugin", "jax_cuda13_plugin"
    cuda = any(importlib.util.find_spec(plugin) for plugin in plugins)
    if command in SMALL and cuda and "xla_gpu_autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()
