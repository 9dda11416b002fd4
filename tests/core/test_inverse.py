"""Inverse-Hessian-vector products against numpy's dense solves."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, flatten, hypergradient, tolerance
from hypothesis import given
from jax.flatten_util import ravel_pytree

import bilevel
from bilevel.contracts import Point
from bilevel.internal.conjugate_gradients import solve_conjugate_gradients

P = 6
seeds = st.integers(0, 2**32 - 1)


def system(seed, eigenvalues=None):
    """Return a symmetric matrix with given eigenvalues (default 1 to 10), and a right-hand side."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.normal(size=(P, P)))
    eigenvalues = np.linspace(1, 10, P) if eigenvalues is None else np.asarray(eigenvalues)
    matrix = (q * eigenvalues) @ q.T
    return (matrix + matrix.T) / 2, rng.normal(size=P)


def split(v):
    return {"m": v[:4].reshape(2, 2), "t": (v[4], v[5:])}


@functools.cache
def compiled(make, *args):
    inverse = make(*args)

    @jax.jit
    def solve(matrix, b):
        return inverse(lambda v: split(matrix @ ravel_pytree(v)[0]), split(b), None, None)

    return lambda matrix, b: flatten(solve(jnp.asarray(matrix), jnp.asarray(b)))


@pytest.mark.long
@given(seed=seeds, rank=st.integers(1, P - 1))
def test_nystrom_is_exact_up_to_damping_from_the_rank_of_the_hessian_on(seed, rank):
    matrix, b = system(seed, [0] * (P - rank) + list(range(1, rank + 1)))
    x = compiled(bilevel.nystrom, rank, 0.1)(matrix, b)
    # Truth: numpy. The sketch sees the range up to the conditioning of a random matrix.
    assert_close(x, np.linalg.solve(matrix + 0.1 * np.eye(P), b), f64=1e-7, f32=3e-2)


def test_nystrom_takes_another_sketch_from_another_key():
    matrix, b = map(jnp.asarray, system(0))
    inverses = (bilevel.nystrom(2, 0.1, key=jax.random.key(i)) for i in range(2))
    one, two = (inverse(lambda v: matrix @ v, b, None, None) for inverse in inverses)
    assert not np.allclose(one, two)


@given(seed=seeds)
def test_neumann_is_the_truncated_series(seed):
    matrix, b = system(seed)
    x = compiled(bilevel.neumann, 3, 0.05)(matrix, b)
    factor = np.eye(P) - 0.05 * matrix
    assert_close(x, 0.05 * (b + factor @ b + factor @ factor @ b), f64=1e-13, f32=1e-5)
    assert_close(compiled(bilevel.scale, 0.3)(matrix, b), 0.3 * b, f64=1e-15, f32=1e-6)


@given(seed=seeds)
def test_dense_inverts_an_indefinite_hessian(seed):
    matrix, b = system(seed, [-3, -2, -1, 1, 2, 3])
    assert_close(compiled(bilevel.dense)(matrix, b), np.linalg.solve(matrix, b), f32=1e-4)


@jax.jit
def three_steps_of_cg(matrix, b, x0):
    return solve_conjugate_gradients(lambda v: matrix @ v, b, x0, steps=3, threshold=0.0)


@given(seed=seeds)
def test_cg_residual_is_that_of_its_solution(seed):
    matrix, b = system(seed)
    solution = three_steps_of_cg(matrix, b, np.ones(P))
    assert solution.iterations == 3
    residual = np.linalg.norm(b - matrix @ np.asarray(solution.x, float))
    assert_close(solution.residual, residual, f32=1e-3)


@pytest.mark.long
def test_cg_stops_at_negative_curvature_and_the_linear_residual_shows_it():
    curvature = jnp.array([1.0, -1.0])
    problem = bilevel.Problem(
        lambda w, alpha, batch: 0.5 * jnp.sum(curvature * (w - alpha) ** 2),
        lambda w, alpha, batch: w @ jnp.array([1.0, 2.0]),
    )

    def info(inverse):
        solver = bilevel.implicit(bilevel.solved(lambda alpha, w, batch: alpha), inverse)
        start = jnp.ones(2), jnp.zeros(2), None, None
        return hypergradient(problem, solver, *start, diagnostics=True).info

    stopped = info(bilevel.cg())
    assert_close(stopped.linear_residual, 1.0, f64=1e-15, f32=1e-6)  # nothing was solved
    assert not stopped.converged
    assert info(bilevel.dense()).linear_residual <= tolerance(1e-14, 1e-6)


def test_cg_stops_at_its_tolerance_and_after_its_steps():
    matrix, b = system(3)
    left = []
    for tol in (1e-1, 1e-3):
        x = compiled(lambda tol=tol: bilevel.cg(tol=tol))(matrix, b)
        left.append(np.linalg.norm(b - matrix @ x) / np.linalg.norm(b))
        assert left[-1] <= tol
    assert left[0] > 1e-3  # it did not go further than asked
    assert np.all(compiled(bilevel.cg)(matrix, 0 * b) == 0)
    x = compiled(bilevel.cg, 1)(matrix, b)
    # Truth: one step of steepest descent.
    assert_close(x, b * (b @ b) / (b @ matrix @ b), f64=1e-14, f32=1e-5)


def weighted_squares(outputs, batch):
    return 0.5 * jnp.sum(jnp.arange(1, 5) * (outputs.ravel() - batch[1]) ** 2)


def coupled(outputs, batch):
    """Return cross entropy of one softmax over all outputs: its curvature is not diagonal."""
    return jax.nn.logsumexp(outputs) + 0.1 * jnp.sum(outputs**2)


LOSSES = (weighted_squares, coupled)


def linear_outputs(w, alpha, batch):
    return (batch[0] @ (w["m"].ravel() * alpha)).reshape(2, 2)  # outputs may have any shape


def overparameterised(seed, p=8, n=4):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, p)), rng.choice([-1.0, 1.0], n)
    return x, y, rng.normal(size=p), rng.normal(size=p)


@functools.cache
def compiled_gram(loss, damping):
    @jax.jit
    def solve(x, y, w, b):
        point = Point({"m": w.reshape(2, -1)}, 0.9, (x, y))
        solver = bilevel.gram(linear_outputs, loss, damping=damping)
        curvature = jax.hessian(loss)(linear_outputs(*point), (x, y)).reshape(4, 4)
        return solver(None, {"m": b.reshape(2, -1)}, None, point), 0.9 * x.T @ curvature @ x * 0.9

    return solve


@pytest.mark.long
@pytest.mark.parametrize("damping", [0.3, lambda alpha: alpha / 3], ids=["number", "function"])
@pytest.mark.parametrize("loss", LOSSES)
@given(seed=seeds)
def test_gram_solves_the_damped_gauss_newton_system(loss, damping, seed):
    x, y, w, b = overparameterised(seed)
    actual, matrix = compiled_gram(loss, damping)(x, y, w, b)
    assert_close(actual, np.linalg.solve(np.asarray(matrix, float) + 0.3 * np.eye(8), b), f32=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_gram_without_damping_is_the_pseudo_inverse(loss):
    x, y, w, b = overparameterised(0)
    actual, matrix = compiled_gram(loss, 0.0)(x, y, w, b)
    assert_close(actual, np.linalg.pinv(np.asarray(matrix, float), rcond=1e-6) @ b, f32=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e18])
def test_conjugate_gradients_do_not_underflow(scale):
    """Truth: the system is linear, so the solution scales with its right-hand side."""
    matrix = jnp.diag(jnp.arange(1.0, 6))
    b = jnp.asarray([1.0, -2, 3, 0, 5], jnp.float32)
    for threshold in (0.0, 1e-6 * scale):
        solved = solve_conjugate_gradients(
            lambda v: (matrix @ v).astype(v.dtype), b * scale, None, steps=50, threshold=threshold
        )
        np.testing.assert_allclose(solved.x / scale, b / jnp.arange(1, 6), rtol=1e-5)
        assert solved.residual <= 1e-5 * scale


@pytest.mark.parametrize("dtype", [jnp.float32, float])
def test_cg_with_threshold_0_reaches_roundoff(dtype):
    values = jnp.linspace(1, 3, 60, dtype=dtype)
    b = jnp.asarray(np.random.default_rng(0).normal(size=60), dtype)
    solved = solve_conjugate_gradients(lambda v: values * v, b, None, steps=60, threshold=0.0)
    eps = jnp.finfo(b.dtype).eps
    assert jnp.linalg.norm(b - values * solved.x) < 50 * eps * jnp.linalg.norm(b)
    assert solved.residual < 1e-3 * eps * jnp.linalg.norm(b)


RNG = np.random.default_rng(0)
BLUR, SIGNAL = RNG.normal(size=5), RNG.normal(size=12)
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

    def lower(w, alpha, batch):
        return 0.5 * jnp.sum((convolve(w) - SIGNAL) ** 2) + 0.5 * jnp.exp(alpha) * jnp.sum(w**2)

    def exact(alpha):  # truth: ridge regression on the transform's matrix
        normal = matrix.T @ matrix + jnp.exp(alpha) * jnp.eye(12)
        return jnp.sum((jnp.linalg.solve(normal, matrix.T @ SIGNAL) - 0.1) ** 2)

    expected = jax.grad(exact)(0.5)
    problem = bilevel.Problem(lower, lambda w, alpha, batch: jnp.sum((w - 0.1) ** 2))
    fn = bilevel.hypergradient(problem, bilevel.implicit(bilevel.newton(), bilevel.dense()))
    hyper = jax.jit(fn)(jnp.array(0.5), w0, None, None)
    assert_close(hyper.grad, expected, f64=1e-9, f32=1e-3)
    assert hyper.info.converged
    mapped = jax.vmap(fn, (0, 0, None, None))(jnp.full(2, 0.5), jnp.stack([w0, w0]), None, None)
    assert_close(mapped.grad[1], expected, f64=1e-9, f32=1e-3)
