"""Results never come from an earlier version of a function that has changed."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal

import bilevel
import ntk
from ntk import scores
from ntk.internal import compile_cache
from ntk.internal.compile_cache import program

W, X, WIDE = normal(0, 3, 3), normal(1, 4, 3), normal(2, 3, 16)
BATCH = X, np.array([0, 1, 0, 1])
POINT = np.ones(2), np.zeros(2), np.full(2, 0.5), np.full(2, 0.5)
OPTIMIZER, UNROLLED = optax.sgd(0.1), bilevel.unrolled(0.05, 3)


def settings(**changed):
    return types.SimpleNamespace(**{"scale": 1.0, "shift": 0.0, "classes": 2} | changed)


CHANGED = {"scale": 3.0, "shift": 1.0, "classes": 3}


class Network:
    def __init__(self, settings):
        self.settings = settings
        # A cache could recognize one function object, and methods, which are equal at every access.
        self.function = lambda w, x: self.apply(w, x)
        self.problem = bilevel.Problem(self.lower, self.outer)

    def apply(self, w, x):
        s = self.settings
        return s.scale * jax.nn.relu(x @ w + s.shift)[:, : s.classes]

    def product(self, v):
        return self.settings.scale * jnp.arange(1.0, 4.0) * v

    def lower(self, w, alpha, batch):
        return jnp.sum((w - alpha * self.settings.scale) ** 2) + 0.1 * jnp.sum(w**4)

    def outer(self, w, alpha, batch):
        return self.settings.scale * jnp.sum((w - batch) ** 2)


def searched(net):
    result = bilevel.search(net.problem, UNROLLED, OPTIMIZER, *POINT, steps=2)
    return result.alpha, result.history["value"]


def gradient(net):
    solver = bilevel.implicit(UNROLLED)
    return bilevel.hypergradient(net.problem, solver, diagnostics=False)(*POINT)[:3]


COMPILED = {
    "empirical_kernel": lambda net: ntk.empirical_kernel(net.function, W, X),
    "empirical_kernel of a method": lambda net: ntk.empirical_kernel(net.apply, W, X),
    "kernel_vector_product": lambda net: ntk.kernel_vector_product(net.apply, W, X)(jnp.ones(4)),
    "search": searched,
    "hypergradient": gradient,
    "min_eigenvalue of a product": lambda net: ntk.min_eigenvalue(net.product, size=3),
    "naswot": lambda net: scores.naswot(None, net.function, WIDE, BATCH),
}


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_a_function_that_changed_gives_what_a_new_one_gives(name):
    net = Network(settings())
    before = COMPILED[name](net)
    vars(net.settings).update(CHANGED)
    after, truth = COMPILED[name](net), COMPILED[name](Network(settings(**CHANGED)))
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(truth), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(jax.tree.leaves(before)[0], jax.tree.leaves(after)[0])


def test_a_kernel_product_keeps_its_network():
    net = Network(settings())
    product = ntk.kernel_vector_product(net.apply, W, X)
    expected = ntk.kernel_vector_product(Network(settings()).apply, W, X)(jnp.ones(4))
    vars(net.settings).update(CHANGED)
    np.testing.assert_array_equal(product(jnp.ones(4)), expected)


def test_equal_programs_are_compiled_once():
    first = {n: ntk.empirical_kernel(lambda w, x, n=n: n * (x @ w), W, X) for n in (5.0, 6.0)}
    before = len(compile_cache._programs)
    for n, expected in first.items():
        kernel = ntk.empirical_kernel(lambda w, x, n=n: n * (x @ w), W, X)
        np.testing.assert_array_equal(kernel, expected)
    assert len(compile_cache._programs) == before


def test_a_hypergradient_outside_of_jit_is_compiled_once():
    first = gradient(Network(settings()))
    before = len(compile_cache._programs)
    again = gradient(Network(settings()))
    assert len(compile_cache._programs) == before > 0
    jax.tree.map(np.testing.assert_array_equal, again, first)


def test_closed_over_arrays_are_not_part_of_a_program():
    def of(c):
        return program(lambda x: x * c, x)

    x = jnp.asarray(X)
    assert of(x).func is of(2 * x).func
    np.testing.assert_array_equal(of(2 * x)(x), 2 * x * x)


def test_python_callbacks_are_told_apart():
    def of(factor):
        shape = jax.ShapeDtypeStruct((), X.dtype)
        return lambda x: jax.pure_callback(lambda x: np.asarray(factor * x), shape, x)

    one = jnp.asarray(X[0, 0])
    assert program(of(2), one)(one) == 2 * one and program(of(3), one)(one) == 3 * one
