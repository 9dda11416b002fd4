"""Shared by the generated tests: strategies for good inputs, and how results are compared."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from helpers import DTYPES, flatten
from hypothesis import settings

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(DTYPES)


def examples(few):
    """Run ``few`` examples in the test suite, and as many as the profile says in ``make fuzz``."""
    profile = settings.default
    return settings(max_examples=few if profile.derandomize else profile.max_examples)


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


def wide(tree):
    """The same arrays in float64 numpy."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def normal(rng, dtype, *shape, scale=1.0):
    return jnp.asarray(scale * rng.normal(size=shape), dtype)


NODES = np.linspace(-8.5, 8.5, 1360)  # 0 is halfway between two nodes


def expectation(f, g, vx, vy, c):
    """Integrate ``E[f(u) g(u')]`` by the trapezoid rule."""
    sx, sy = np.sqrt(vx), np.sqrt(vy)
    rho = np.clip(c / (sx * sy), -1, 1) if sx * sy > 0 else 0.0
    weight = np.exp(-(NODES**2) / 2)
    weight /= weight.sum()
    u = sx * NODES
    v = sy * (rho * NODES[:, None] + np.sqrt(max(1 - rho**2, 0.0)) * NODES)
    return float((weight * f(u)) @ (g(v) @ weight))


def simplex_point(rng, dtype, *shape, vertex=False):
    """A point inside the simplex; with ``vertex`` also close to a vertex, or with zeros."""
    logits = 10 ** rng.uniform(-1, 1.5 if vertex else 0.5) * rng.normal(size=shape)
    alpha = np.exp(logits - logits.max(-1, keepdims=True))
    if vertex and rng.random() < 0.3:
        alpha[..., 0] = 0
    return jnp.asarray((alpha / alpha.sum(-1, keepdims=True)).astype(dtype))


def assert_near(actual, expected, tolerance):
    """All values agree, relative to the largest one expected; infinities and NaN are the same."""
    actual, expected = flatten(actual), flatten(expected)
    scale = np.max(np.abs(expected), initial=0, where=np.isfinite(expected)) or 1.0
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=tolerance)


def assert_at_most(small, large, slack=0.0):
    small, large = np.asarray(small, np.float64), np.asarray(large, np.float64)
    assert np.all(small <= large + slack), f"{np.max(small)} > {np.min(large)} + {slack}"
