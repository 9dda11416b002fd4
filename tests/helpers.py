"""Shared by the tests: tolerances by precision, derivatives by finite differences, a full disk."""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from problems import follower

import bilevel

ROOT = Path(__file__).parents[1]
_GIVEN = Path(os.environ.get("BILEVEL_DATA") or "nowhere") / "nasbench201"
needs_scores = pytest.mark.skipif(
    not any(_GIVEN.glob("nasbench201_published_scores.csv*")),
    reason="BILEVEL_DATA holds no published scores",
)
float64_only = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="the claim is float64's")
DTYPES = [np.float32, np.float64] if jax.config.jax_enable_x64 else [np.float32]


def long_except(usual, values):
    """Return parameters, or tuples of them, with the mark ``long`` on all but the usual ones."""
    parameters = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [() if value in usual else pytest.mark.long for value in values]
    return [pytest.param(*p, marks=m) for p, m in zip(parameters, marks, strict=True)]


def arrays_in(path):
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def flatten(tree):
    """All entries as one float64 numpy vector, in the order of ``ravel_pytree``."""
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])


def tolerance(f64=1e-9, f32=1e-3):
    """The tolerance for the precision that the tests run in."""
    return f64 if jax.config.jax_enable_x64 else f32


def assert_close(actual, expected, *, f64=1e-9, f32=1e-3):
    """Equal pytrees, up to the precision's tolerance relative to the largest entry expected."""
    actual, expected = flatten(actual), flatten(expected)
    assert actual.shape == expected.shape
    scale = np.max(np.abs(expected), initial=1e-30)
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=tolerance(f64, f32))


def normal(seed, *shape):
    """Draw a standard normal NumPy array in the tests' precision."""
    return np.random.default_rng(seed).normal(size=shape).astype(DTYPES[-1])


def drawn(shapes, seed=1):
    """Draw values of the same shapes, none near zero."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(rng.uniform(0.1, 0.9, leaf.shape) * rng.choice([-1, 1], leaf.shape))

    return jax.tree.map(draw, shapes)


def finite_differences(function, x, h=None):
    """Jacobian of ``function``, both it and the pytree ``x`` flattened, without axes of length 1.

    Central and of fourth order: in float64 good to 1e-11, where ``function`` is good to rounding.
    A function in numpy takes the step ``h`` of float64.
    """
    h = tolerance(3e-4, 3e-2) if h is None else h
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, x))

    def at(leaf, i, t):
        moved = leaves[leaf].copy()
        moved.flat[i] += t * h
        shifted = [moved if k == leaf else x for k, x in enumerate(leaves)]
        return flatten(function(jax.tree.unflatten(structure, shifted)))

    columns = [
        (8 * (at(k, i, 1) - at(k, i, -1)) - (at(k, i, 2) - at(k, i, -2))) / (12 * h)
        for k, x in enumerate(leaves)
        for i in range(x.size)
    ]
    return np.squeeze(np.stack(columns, -1))


def assert_gradient(function, x, *, f64, f32=1e-3):
    """Check that JAX's gradient of a scalar function is that of finite differences."""
    function = jax.jit(function)
    assert_close(jax.grad(function)(x), finite_differences(function, x), f64=f64, f32=f32)


@functools.partial(jax.jit, static_argnums=0)
def jacobian_of_batch(apply, params, x):
    """Return the Jacobian [n, outputs, p] of a network whose outputs may be a pytree."""

    def outputs(params):
        leaves = jax.tree.leaves(apply(params, x))
        return jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], 1)

    leaves = jax.tree.leaves(jax.jacrev(outputs)(params))
    return jnp.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], -1)


def tangent_kernel(apply, params, x1, x2=None):
    """Return ``J J'`` [n1, n2, outputs, outputs] by Jacobians of the batch, without the package."""
    j1 = np.asarray(jacobian_of_batch(apply, params, x1))
    j2 = j1 if x2 is None else np.asarray(jacobian_of_batch(apply, params, x2))
    return np.einsum("aip,bjp->abij", j1, j2)


def unit_rows(seed, n, d):
    x = np.random.default_rng(seed).standard_normal((n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def tanh_network(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def laplace(a, b, scale=1.0):
    return jnp.exp(-scale * jnp.abs(a[:, None] - b).sum(-1))


def hypergradient(problem, solver, *args, diagnostics=False, **options):
    """Compile a hypergradient and return its result at ``args``."""
    fn = bilevel.hypergradient(problem, solver, diagnostics=diagnostics, **options)
    return jax.jit(fn)(*args)


def assert_resumes(args, folder, *, steps=4, **options):
    """Check that a resumed search ends like the whole one; return the whole."""
    whole = bilevel.search(*args, steps=steps, **options)
    bilevel.search(*args, steps=steps // 2, checkpoint=folder / "a", **options)
    resumed = bilevel.search(*args, steps=steps, checkpoint=folder / "a", resume=True, **options)
    for part in ("alpha", "w", "history"):
        jax.tree.map(np.testing.assert_array_equal, getattr(resumed, part), getattr(whole, part))
    return whole


def lower_hessian(lower, w, alpha, batch):
    """``d^2 lower / dw^2`` as a [p, p] array, by JAX's dense second derivative."""

    @jax.jit
    def hessian(w):
        flat, unravel = ravel_pytree(w)
        return jax.hessian(lambda v: lower(unravel(v), alpha, batch))(flat)

    return hessian(w)


def loop_of_steps(lower, optimizer, w, alpha, batch, steps):
    """The weights after steps of an optax optimizer, in a Python loop that JAX differentiates."""
    state = optimizer.init(w)
    for _ in range(steps):
        updates, state = optimizer.update(jax.grad(lower)(w, alpha, batch), state, w)
        w = optax.apply_updates(w, updates)
    return w


def cast(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def batch(*shape):
    """Inputs of a ``shape``, of which a space's ``init`` looks at no more, and labels."""
    return jnp.zeros(shape), jnp.zeros(shape[:1], int)


def documented_keys():
    """Of ``result.json``, by the table in the documentation."""
    text = (ROOT / "docs/commands.md").read_text()
    table = text[text.index("| key of `result.json`") :].split("\n\n")[0]
    return {key for line in table.splitlines() for key in re.findall("`(.*?)`", line.split("|")[1])}


def result_of(folder):
    """Return the ``result.json`` of a run, which has documented keys only."""
    result = json.loads(Path(folder, "result.json").read_text())
    assert set(result) <= documented_keys()
    return result


def run(*command, **options):
    """Run a command and return its output; ``python`` is this interpreter."""
    command = [sys.executable if word == "python" else str(word) for word in command]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def on_devices(count, program):
    """Return the last line that a program prints when JAX takes the CPU for several devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    printed = run("python", "-c", program, env=os.environ | {"XLA_FLAGS": flags})
    return json.loads(printed.splitlines()[-1])


@contextlib.contextmanager
def no_room(limit):
    """Files over ``limit`` bytes cannot be written; JAX keeps no programs, and does not warn."""
    import resource  # not on Windows

    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    seconds = "jax_persistent_cache_min_compile_time_secs"
    kept = getattr(jax.config, seconds)
    jax.config.update(seconds, float("inf"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        jax.config.update(seconds, kept)


def trial(rate):
    """Count the steps of a search, which diverges at large rates, in a process of its own."""
    problem = follower(lambda w, alpha, batch: jnp.sum((w - batch) ** 2))
    solver, data = bilevel.unrolled(optax.sgd(rate), 20), (jnp.zeros(2), jnp.ones(2))
    points = jnp.ones(2), jnp.zeros(2)
    result = bilevel.search(problem, solver, optax.sgd(0.1), *points, *data, steps=3)
    return len(result.history["value"])
