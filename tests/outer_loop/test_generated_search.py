"""Searches and geometries of generated inputs against numpy in float64."""

import functools

import generated
import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest
import scipy.special
from generated import assert_at_most, assert_near, dtypes, eps, examples, normal, seeds, wide
from hypothesis import given
from problems import SCALED as PROBLEM

import bilevel

EXPONENTIATED = optax.chain(optax.sgd(0.2), bilevel.exponentiate())
METHODS = {
    "implicit": (bilevel.implicit(bilevel.newton(3)), EXPONENTIATED),
    "unrolled": (bilevel.unrolled(0.3, 3), optax.sgd(0.2)),
}
STEPS = 4


def by_hand(name, alpha, w, x, v):
    """Alphas and outer losses of every step."""
    alphas, values = [], []
    for _ in range(STEPS):
        if name == "implicit":
            w, slope = x * alpha / 1.1, x / 1.1
        else:
            slope = np.zeros_like(w)
            for _ in range(3):
                w, slope = w - 0.3 * (1.1 * w - x * alpha), slope - 0.3 * (1.1 * slope - x)
        values.append(0.5 * np.sum((w - v) ** 2))
        step = -0.2 * slope * (w - v)
        alpha = alpha + step if name == "unrolled" else scipy.special.softmax(np.log(alpha) + step)
        alphas.append(alpha)
    return np.array(alphas), np.array(values)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@examples(2)
@given(seed=seeds, dtype=dtypes, chunk=st.sampled_from([None, 1, 3]))
def test_a_search_takes_the_steps_of_the_formulas(name, seed, dtype, chunk):
    rng = np.random.default_rng(seed)
    scale = 10 ** rng.uniform(-2, 0.5)
    data = [normal(rng, dtype, 3, scale=scale) for _ in range(2)]
    arguments = generated.simplex_point(rng, dtype, 3), normal(rng, dtype, 3), *data
    options = {"steps": STEPS, "chunk": chunk, "progress": False}
    result = bilevel.search(PROBLEM, *METHODS[name], *arguments, **options)
    alphas, values = by_hand(name, *wide(arguments))
    assert not result.stopped
    assert_near(result.history["alpha"], alphas, 3e3 * eps(dtype))
    assert_near(result.history["value"], values, 3e3 * eps(dtype))
    assert_near(result.alpha, alphas[-1], 3e3 * eps(dtype))


def project(points):
    """The closest points of the simplex, by sorting."""
    points = points - points.max(-1, keepdims=True)
    ordered = -np.sort(-points, axis=-1)
    sums = np.cumsum(ordered, axis=-1) - 1
    count = (ordered > sums / np.arange(1, points.shape[-1] + 1)).sum(-1, keepdims=True)
    return np.maximum(points - np.take_along_axis(sums, count - 1, -1) / count, 0)


def exponentiated(alpha, step):
    with np.errstate(divide="ignore"):
        return scipy.special.softmax(np.log(alpha) - step, -1), np.abs(step).max()


def projected(alpha, step):
    return project(alpha - step), min(np.abs(alpha - step).max(), 1e3)


def boxed(alpha, step):
    return np.clip(alpha - step, 0, 1), min(np.abs(alpha - step).max(), 1e3)


def on_logits(alpha, step):
    pulled = alpha * (step - (alpha * step).sum(-1, keepdims=True))
    return scipy.special.softmax(np.log(alpha) - pulled, -1), np.abs(alpha * step).max()


# optimizer, formula, the exponent of the largest gradient, whether alpha may be on the boundary
GEOMETRIES = {
    "exponentiate": (optax.chain(optax.sgd(0.5), bilevel.exponentiate()), exponentiated, 20, True),
    "simplex": (optax.chain(optax.sgd(0.5), bilevel.project()), projected, 20, True),
    "box": (optax.chain(optax.sgd(0.5), bilevel.project("box")), boxed, 20, True),
    "softmax": (bilevel.softmax(optax.sgd(0.5)), on_logits, 8, False),
}


@functools.partial(jax.jit, static_argnums=0)
def updated(name, alpha, gradient):
    optimizer = GEOMETRIES[name][0]
    updates, _ = optimizer.update(gradient, optimizer.init(alpha), alpha)
    return optax.apply_updates(alpha, updates)


@pytest.mark.parametrize("name", GEOMETRIES)
@examples(10)
@given(seed=seeds, dtype=dtypes)
def test_an_update_is_the_formula_up_to_gradients_of_1e20(name, seed, dtype):
    rng = np.random.default_rng(seed)
    _, formula, most, vertex = GEOMETRIES[name]
    alpha = generated.simplex_point(rng, dtype, 3, 4, vertex=vertex)
    gradient = normal(rng, dtype, 3, 4, scale=10 ** rng.uniform(-6, most))
    # Steps are rounded in the dtype of alpha; the error of an exponent is relative in alpha.
    expected, size = formula(wide(alpha), 0.5 * wide(gradient))
    moved = wide(updated(name, alpha, gradient))
    assert_near(moved, expected, 50 * eps(dtype) * (1 + size))
    assert_at_most(-moved, 0.0)
    if name != "box":
        assert_at_most(abs(moved.sum(-1) - 1), 32 * eps(dtype))
