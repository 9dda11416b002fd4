"""Losses with Fourier transforms, with reverse-mode rules, and with variables of other types."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, hypergradient
from problems import reverse_once

import bilevel

RNG = np.random.default_rng(0)
BLUR, SIGNAL = RNG.normal(size=5), RNG.normal(size=12)


def deblurred(convolve):
    def lower(w, alpha, batch):
        return 0.5 * jnp.sum((convolve(w) - SIGNAL) ** 2) + 0.5 * jnp.exp(alpha) * jnp.sum(w**2)

    return bilevel.Problem(lower, lambda w, alpha, batch: jnp.sum((w - 0.1) ** 2))


CONVOLUTIONS = {
    "fft": lambda w: jnp.fft.irfft(jnp.fft.rfft(w) * jnp.fft.rfft(BLUR, 12), 12),
    "fftconvolve": lambda w: jax.scipy.signal.fftconvolve(w, jnp.asarray(BLUR), mode="same"),
    "dct": lambda w: jax.scipy.fft.dct(w),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_hessian_of_fourier_transforms_is_decomposed(name):
    convolve, w0 = CONVOLUTIONS[name], jnp.zeros(12)
    matrix = np.asarray(jax.jacobian(convolve)(w0), float)

    def exact(alpha):  # truth: ridge regression on the transform's matrix
        normal = matrix.T @ matrix + jnp.exp(alpha) * jnp.eye(12)
        w = jnp.linalg.solve(normal, matrix.T @ SIGNAL)
        return jnp.sum((w - 0.1) ** 2)

    expected = jax.grad(exact)(0.5)
    fn = bilevel.hypergradient(deblurred(convolve), IMPLICIT["dense"])
    hyper = jax.jit(fn)(jnp.array(0.5), w0, None, None)
    assert_close(hyper.grad, expected, f64=1e-9, f32=1e-3)
    assert hyper.info.converged
    mapped = jax.vmap(fn, (0, 0, None, None))(jnp.full(2, 0.5), jnp.stack([w0, w0]), None, None)
    assert_close(mapped.grad[1], expected, f64=1e-9, f32=1e-3)


@jax.custom_vjp
def exp(x):
    """Compute exp with the natural rule, which calls exp and lacks a forward derivative."""
    return jnp.exp(x)


exp.defvjp(lambda x: (exp(x),) * 2, lambda y, cotangent: (cotangent * y,))


def with_cosh(cosh):
    return bilevel.Problem(
        lambda w, alpha, batch: jnp.sum(cosh(w - alpha) + 0.5 * w**2),
        lambda w, alpha, batch: jnp.sum((w - 2) ** 2),
    )


START = np.array(0.7), np.full(2, 0.3), None, None
IMPLICIT = {
    "newton": bilevel.implicit(),
    "dense": bilevel.implicit(bilevel.newton(), bilevel.dense()),
    "unrolled": bilevel.unrolled(0.1, 3),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["newton", "unrolled"])
def test_a_rule_that_calls_its_function_has_second_derivatives(name):
    hyper, expected = (
        hypergradient(with_cosh(cosh), IMPLICIT[name], *START, diagnostics=True)
        for cosh in (lambda x: (exp(x) + exp(-x)) / 2, jnp.cosh)
    )
    assert_close(hyper.grad, expected.grad, f64=1e-6, f32=1e-4)
    assert bool(hyper.info.converged) == bool(expected.info.converged)


def test_f2sa_needs_no_second_derivatives():
    alpha, expected = (
        bilevel.search(*(with_cosh(cosh), bilevel.f2sa(0.1), optax.sgd(0.1), *START), steps=3).alpha
        for cosh in (reverse_once, jnp.cosh)
    )
    assert_close(alpha, expected, f64=1e-12, f32=1e-5)


def changing(w, alpha, batch):
    """Keep a running mean in half precision, as a layer may compute it."""
    mean = (0.5 * w.variables["mean"]).astype(jnp.float16)
    return 0.5 * jnp.sum((w.params - alpha) ** 2), {"mean": mean, "count": w.variables["count"] + 1}


STATEFUL = {
    "unrolled": bilevel.unrolled(0.1, 3),
    "distilled": bilevel.distilled(0.1, decay=0.5),
    "restarted": bilevel.restarted(bilevel.unrolled(0.1, 3)),
    "implicit": bilevel.implicit(),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_variables_keep_the_types_that_they_began_with(name):
    problem = bilevel.Problem(changing, lambda w, a, b: jnp.sum(w.params**2), stateful=True)
    w0 = bilevel.Stateful(jnp.ones(2), {"mean": jnp.ones(2), "count": jnp.zeros((), int)})
    args = problem, STATEFUL[name], optax.sgd(0.1), jnp.array(0.3), w0, None, None
    variables = bilevel.search(*args, steps=2).w.variables
    assert variables["mean"].dtype == jnp.ones(2).dtype
    calls = {"unrolled": 6, "restarted": 3}.get(name, 2)  # a restarted run begins at the first ones
    np.testing.assert_allclose(variables["mean"], 0.5**calls, rtol=1e-3)
