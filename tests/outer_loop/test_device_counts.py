"""A search resumes on another number of devices than it began on, with the same fingerprint."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bilevel


def outer(w, alpha, batch):
    return jnp.mean((batch[0] @ w - batch[1]) ** 2)


def lower(w, alpha, batch):
    return outer(w, alpha, batch) + jnp.sum(jnp.exp(alpha) * w**2)


def searched(kind, steps, folder, devices=1):
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(getattr(AxisType, kind),))
    rng = np.random.default_rng(0)
    rows = [jax.device_put(rng.normal(size=s), NamedSharding(mesh, P("d"))) for s in ((8, 2), (8,))]
    start = jnp.zeros(2), jnp.zeros(2), rows, rows
    result = bilevel.search(
        *(bilevel.Problem(lower, outer), bilevel.unrolled(0.1, 3), optax.adam(0.1), *start),
        **{"steps": steps, "checkpoint": folder, "resume": True, "progress": False},
    )
    return np.asarray(result.alpha).tolist()


def search_on(devices, *arguments):
    """Run the search in a process with more devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    folders = pathlib.Path(__file__).parents[:3]  # this file, its helpers, the packages
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "JAX_ENABLE_X64": str(int(jax.config.jax_enable_x64)),
    }
    call = f"searched(*{arguments!r}, devices={devices})"
    program = f"from test_device_counts import searched; print({call})"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.long)])
def test_a_search_resumes_on_one_two_and_four_devices(kind, tmp_path):
    folder = str(tmp_path / "resumed")
    searched(kind, 1, folder)
    search_on(2, kind, 2, folder)
    search_on(4, kind, 3, folder)
    resumed = searched(kind, 4, folder)
    assert resumed == pytest.approx(searched(kind, 4, tmp_path / "whole"), rel=1e-5)
