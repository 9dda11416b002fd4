"""A search resumes on another number of devices than it began on, with the same fingerprint."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import bilevel

devices, kind, steps, folder = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
mesh = jax.make_mesh((devices,), ("d",), axis_types=(getattr(AxisType, kind),))
rng = np.random.default_rng(0)
rows = [jax.device_put(rng.normal(size=s), NamedSharding(mesh, P("d"))) for s in ((8, 2), (8,))]


def outer(w, alpha, batch):
    return jnp.mean((batch[0] @ w - batch[1]) ** 2)


def lower(w, alpha, batch):
    return outer(w, alpha, batch) + jnp.sum(jnp.exp(alpha) * w**2)


result = bilevel.search(
    bilevel.Problem(lower, outer), bilevel.unrolled(0.1, 3), optax.adam(0.1), jnp.zeros(2),
    jnp.zeros(2), rows, rows, steps=steps, checkpoint=folder, resume=True, progress=False,
)
print(*np.asarray(result.alpha).tolist())
"""


def alpha_on(devices, kind, steps, folder):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    arguments = [str(devices), kind, str(steps), str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [float(x) for x in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.long)])
def test_a_search_resumes_on_one_two_and_four_devices(kind, tmp_path):
    for steps, devices in enumerate((1, 2, 4, 1), 1):
        resumed = alpha_on(devices, kind, steps, tmp_path / "resumed")
    assert resumed == pytest.approx(alpha_on(1, kind, 4, tmp_path / "whole"), rel=1e-5)
