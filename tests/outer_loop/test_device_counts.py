"""A search resumes on another number of devices than it began on, with the same fingerprint."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import on_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import mean_squares, separate_penalties

import bilevel


def searched(kind, steps, folder, devices=1):
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(getattr(AxisType, kind),))
    rng = np.random.default_rng(0)
    rows = [jax.device_put(rng.normal(size=s), NamedSharding(mesh, P("d"))) for s in ((8, 2), (8,))]
    problem = bilevel.Problem(separate_penalties, mean_squares)
    args = problem, bilevel.unrolled(0.1, 3), optax.adam(0.1), jnp.zeros(2), jnp.zeros(2)
    options = {"steps": steps, "checkpoint": folder, "resume": True, "progress": False}
    return np.asarray(bilevel.search(*args, rows, rows, **options).alpha).tolist()


def search_on(devices, *arguments):
    folders = [str(f) for f in pathlib.Path(__file__).parents[:3]]  # from this file to the packages
    program = f"""
import sys
sys.path[:0] = {folders}
import jax
jax.config.update("jax_enable_x64", {jax.config.jax_enable_x64})
from test_device_counts import searched
print(searched(*{arguments}, devices={devices}))
"""
    on_devices(devices, program)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.long)])
def test_a_search_resumes_on_one_two_and_four_devices(kind, tmp_path):
    folder = str(tmp_path / "resumed")
    searched(kind, 1, folder)
    search_on(2, kind, 2, folder)
    search_on(4, kind, 3, folder)
    resumed = searched(kind, 4, folder)
    assert resumed == pytest.approx(searched(kind, 4, tmp_path / "whole"), rel=1e-5)
