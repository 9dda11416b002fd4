"""Eigenvalues, certificates and kernel regression of generated matrices against float64 numpy."""

import functools

import generated
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from generated import assert_at_most, assert_near, dtypes, eps, examples, normal, seeds, wide
from helpers import laplace
from hypothesis import given

import ntk

KINDS = ("definite", "singular", "indefinite", "clustered")


def symmetric(seed, dtype, kind, n):
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    values = 10 ** rng.uniform(-rng.uniform(0, 12), 0, n)
    if kind == "singular":
        values[: n // 2] = 0
    elif kind == "indefinite":
        values = rng.normal(size=n)
    elif kind == "clustered":
        values = 1 + 1e-9 * rng.normal(size=n)
    scale = 10 ** rng.uniform(-20 if dtype == np.float64 else -6, 6)
    K = ((q * values) @ q.T * scale).astype(dtype)
    return (K + K.T) / 2


matrices = st.builds(symmetric, seeds, dtypes, st.sampled_from(KINDS), st.sampled_from([1, 8]))


@examples(5)
@given(K=matrices)
def test_eigenvalues_are_numpys_to_rounding(K):
    spectrum, rounding = np.linalg.eigvalsh(wide(K)), 50 * len(K) * eps(K.dtype)
    assert_near(ntk.eigenvalues(jnp.asarray(K)), spectrum, rounding)
    smallest = float(ntk.min_eigenvalue(jnp.asarray(K)))
    assert abs(smallest - spectrum[0]) <= rounding * abs(spectrum).max()
    for bound in (ntk.bounds.diagonal_upper_bound, ntk.bounds.frobenius_upper_bound):
        value = float(bound(jnp.asarray(K)).value)
        assert_at_most(spectrum[0], value, rounding * abs(spectrum).max())


@examples(20)
@given(K=matrices, share=st.sampled_from([0.0, 1e-3]), seed=seeds)
def test_a_certificate_is_below_the_spectrum_of_every_kernel_within_the_error(K, share, seed):
    rng, n = np.random.default_rng(seed), len(K)
    error = share * float(abs(K).max())
    exact = wide(K)
    signs = np.triu(rng.choice([-1, 1], (n, n)))
    moved = exact + error * (signs + np.triu(signs, 1).T)
    smallest = np.linalg.eigvalsh(exact)[0]
    rounding = 4 * n * eps(float) * np.linalg.norm(exact, 2)
    bound = ntk.certified_min_eigenvalue(K, entry_error=error)
    assert_at_most(bound, min(smallest, np.linalg.eigvalsh(moved)[0]), rounding)
    loss = 2e-9 * n * error + 4e-15 * (n + 10) * (np.trace(abs(exact)) + n * abs(exact).max())
    assert_at_most(smallest - n * error - bound, loss)


@pytest.mark.slow
@examples(5)
@given(seed=seeds, dtype=dtypes, h=st.integers(1, 3), n=st.sampled_from([2, 4]))
def test_a_certificate_of_a_simplex_holds_for_300_mixtures(seed, dtype, h, n):
    rng = np.random.default_rng(seed)
    phi = rng.normal(size=(h, n, rng.choice([2, 6]))) * 10 ** rng.uniform(-3, 3)
    if rng.random() < 0.2 and h > 1:
        phi[1] = -phi[0]
    blocks = np.einsum("iap,jbp->ijab", phi, phi).astype(dtype)
    certificate = ntk.certify_simplex(blocks, rtol=1e-3, max_cells=200)
    argmin = wide(certificate.argmin)
    alphas = np.vstack([argmin, np.eye(h), rng.dirichlet(np.ones(h), 300)])
    mixed = np.einsum("mi,ijab,mj->mab", alphas, wide(blocks), alphas)
    spectra = np.linalg.eigvalsh((mixed + mixed.swapaxes(1, 2)) / 2)
    size = abs(spectra).max()
    rounding = 20 * n * eps(float) * size
    assert_at_most(certificate.lower, spectra[:, 0].min(), rounding)
    assert_at_most(spectra[0, 0], certificate.upper, rounding)
    assert_at_most(certificate.lower, certificate.upper)
    assert_near(argmin.sum(), 1.0, 1e-9)
    # No mixture of Gram matrices is indefinite, so a bound of 0 costs nothing.
    assert_at_most(-certificate.lower, 1e-3 * size)


# ----------------------------------------------------------------------------- regression


def positive(rng, dtype, n):
    q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    values = 10 ** rng.uniform(-3, 0, n) * 10 ** rng.uniform(-3, 3)
    K = ((q * values) @ q.T).astype(dtype)
    return jnp.asarray((K + K.T) / 2)


@pytest.mark.slow
@examples(3)
@given(seed=seeds, dtype=dtypes, share=st.sampled_from([0.0, 0.1]), t=st.sampled_from([0, 0.1, 10]))
def test_regression_and_gradient_flow_are_those_of_numpy(seed, dtype, share, t):
    rng = np.random.default_rng(seed)
    K, y, rounding = positive(rng, dtype, 8), normal(rng, dtype, 8, 2), 5e4 * eps(dtype)
    A, targets = wide((K, y))
    values, vectors = np.linalg.eigh(A)
    penalty, t = share * values[-1], t / values[-1]
    regular = A + penalty * np.eye(8)
    weights = np.linalg.solve(regular, targets)
    fit = ntk.kernel_regression(K, y, penalty=penalty)
    assert_near(fit.predict(K), A @ weights, rounding)
    left_out = weights / np.diag(np.linalg.inv(regular))[:, None]
    assert_near(fit.leave_one_out(), left_out, rounding)
    quadratic = np.sum(targets * np.linalg.solve(A, targets))
    assert_near(ntk.excess_risk_term(K, y).quadratic, quadratic, rounding)
    flow = vectors @ (-np.expm1(-t * values)[:, None] * (vectors.T @ targets))
    assert_near(ntk.gradient_flow(K, y, t), flow, rounding)


@pytest.mark.slow
@examples(3)
@given(seed=seeds, dtype=dtypes, t=st.sampled_from([0.0, 0.1, 1.0, 10.0]))
def test_posteriors_and_ensembles_are_the_formulas(seed, dtype, t):
    rng, n = np.random.default_rng(seed), 5
    features = rng.normal(size=(2, n + 2, n + 3)) * 10 ** rng.uniform(-3, 3)
    nngp, tangent = (jnp.asarray(f @ f.T, dtype) for f in features)
    y, rounding = normal(rng, dtype, n, 2), 5e5 * eps(dtype)
    K, cross, prior = wide((nngp[:n, :n], nngp[n:, :n], nngp[n:, n:]))
    T, cross_ntk = wide((tangent[:n, :n], tangent[n:, :n]))
    penalty = 0.1 * float(np.trace(K))
    smoother = np.linalg.solve(K + penalty * np.eye(n), cross.T).T
    options = {"cross": nngp[n:, :n], "prior": nngp[n:, n:], "penalty": penalty}
    posterior = ntk.posterior(nngp[:n, :n], y, **options)
    assert_near(posterior.mean, smoother @ wide(y), rounding)
    assert_near(posterior.covariance, prior - smoother @ cross.T, rounding)

    values, vectors = np.linalg.eigh(T)
    t = t / values.max()
    A = cross_ntk @ (vectors * (-np.expm1(-t * values) / values)) @ vectors.T
    train = ntk.Kernels(nngp[:n, :n], tangent[:n, :n])
    ensemble = ntk.ensemble(train, y, ntk.Kernels(nngp[n:, :n], tangent[n:, :n]), nngp[n:, n:], t=t)
    assert_near(ensemble.mean, A @ wide(y), rounding)
    once = A @ cross.T
    assert_near(ensemble.covariance, prior - once - once.T + A @ K @ A.T, rounding)


# ----------------------------------------------------------------------------- operators


N = 9


def points(seed, dtype):
    rng = np.random.default_rng(seed)
    x = normal(rng, dtype, N, 2, scale=10 ** rng.uniform(-1, 1))
    matrix = np.exp(-np.abs(wide(x)[:, None] - wide(x)).sum(-1))
    return x, matrix, normal(rng, dtype, N, 2, scale=10 ** rng.uniform(-6, 6))


@pytest.mark.slow
@examples(3)
@given(seed=seeds, dtype=dtypes, tile=st.sampled_from([2, 5]))
def test_products_of_operators_are_those_of_their_matrices(seed, dtype, tile):
    x, matrix, v = points(seed, dtype)
    K = ntk.KernelOperator(laplace, x, tile=tile)
    off = np.abs(wide(K @ v) - matrix @ wide(v))
    assert_at_most(off, 1e3 * eps(dtype) * (matrix @ np.abs(wide(v))))
    assert_near(K.diagonal(), np.ones(N), 10 * eps(dtype))
    w = normal(np.random.default_rng(seed), dtype, 2, 3)
    slopes = 1 - np.tanh(wide(x) @ wide(w)) ** 2
    tangent = (wide(x) @ wide(x).T) * (slopes @ slopes.T)
    K = ntk.EmpiricalOperator(lambda w, x: jnp.tanh(x @ w), w, x, batch_size=tile)
    off = np.abs(wide(K @ v) - tangent @ wide(v))
    assert_at_most(off, 1e3 * eps(dtype) * np.abs(tangent).max() * np.abs(wide(v)).sum())


@functools.partial(jax.jit, static_argnames="tol")
def iterative(x, y, penalty, tol):
    K, key = ntk.KernelOperator(laplace, x, tile=4), jax.random.key(0)
    factor = ntk.partial_cholesky(K, 4, key=key)
    fit = ntk.iterative_regression(K, y, penalty=penalty, tol=tol, steps=100)
    return factor, fit, ntk.eigenvalue_interval(K, key=key, steps=2, block=1, failure=1e-3)


@pytest.mark.slow
@examples(2)
@given(seed=seeds, dtype=dtypes, penalty=st.floats(-2, 1).map(lambda t: 10**t))
def test_methods_that_see_products_only_agree_with_the_matrix(seed, dtype, penalty):
    x, matrix, y = points(seed, dtype)
    tol = max(1e-9, 100 * eps(dtype))
    factor, fit, interval = iterative(x, y, penalty, tol)
    residual, rounding = matrix - wide(factor.factor) @ wide(factor.factor).T, 2e3 * eps(dtype)
    assert np.linalg.eigvalsh(residual)[0] > -rounding
    np.testing.assert_allclose(factor.residual_diagonal, np.diag(residual), atol=rounding)
    weights = np.linalg.solve(matrix + penalty * np.eye(N), wide(y))
    off, size = (np.linalg.norm(v, axis=0) for v in (wide(fit.weights) - weights, wide(y)))
    assert_at_most(off, 2 * tol * size / penalty)
    assert_at_most(fit.relative, 2 * tol)
    spectrum = np.linalg.eigvalsh(matrix)
    assert_at_most(interval.lower, spectrum[0], 1e3 * eps(dtype) * spectrum[-1])
    assert_at_most(spectrum[0], interval.upper, 1e3 * eps(dtype) * spectrum[-1])


# ------------------------------------------------------------------------- pairs and polynomials


@examples(5)
@given(K=matrices)
def test_the_smallest_eigenpair_has_the_residual_that_it_states(K):
    pair = ntk.smallest_eigenpair(K)
    matrix, vector = wide(K), wide(pair.vector)
    rounding = 50 * eps(K.dtype) * (np.abs(matrix).max() + np.finfo(K.dtype).tiny)
    assert_near(np.linalg.norm(vector), 1.0, 50 * eps(K.dtype))
    residual = np.linalg.norm(matrix @ vector - float(pair.value) * vector)
    assert_at_most(residual, float(pair.residual), rounding)
    # Weyl: an eigenvalue lies within the residual. None is below the smallest one.
    assert_at_most(abs(float(pair.value) - np.linalg.eigvalsh(matrix)[0]), 0.0, len(K) * rounding)


@examples(5)
@given(seed=seeds, dtype=dtypes, n=st.integers(1, 4), m=st.none() | st.integers(1, 4))
def test_the_matrix_of_a_kernel_function_is_its_values(seed, dtype, n, m):
    rng = np.random.default_rng(seed)
    x1 = normal(rng, dtype, n, 3)
    x2 = None if m is None else normal(rng, dtype, m, 3)
    K = ntk.kernel_matrix(lambda a, b: jnp.exp(-jnp.sum((a[:, None] - b) ** 2, -1)), x1, x2)
    a, b = wide((x1, x1 if x2 is None else x2))
    assert_near(K, np.exp(-((a[:, None] - b) ** 2).sum(-1)), 50 * eps(dtype))


@pytest.mark.slow
@examples(3)
@given(seed=seeds, dtype=dtypes, order=st.integers(0, 3))
def test_a_polynomial_of_the_parameters_is_its_own_expansion(seed, dtype, order):
    rng = np.random.default_rng(seed)
    w0, w, x = (normal(rng, dtype, 3) for _ in range(3))
    expanded = ntk.taylor_expand(lambda w, x: (w * x).sum() ** order, w0, order)(w, x)
    # The terms cancel: their sizes count for the rounding.
    size = (abs(wide(w0 * x)).sum() + abs(wide((w - w0) * x)).sum()) ** order
    assert_at_most(abs(wide(expanded) - wide(w * x).sum() ** order), 30 * eps(dtype) * size)


@pytest.mark.long
@pytest.mark.parametrize("pair", [("relu", "relu"), ("tanh", "erf"), ("sigmoid", "tanh")])
@examples(2)
@given(vx=st.floats(0.1, 3), vy=st.floats(0.1, 3), rho=st.floats(-0.95, 0.95))
def test_a_dual_is_the_expectation_over_normal_pairs(pair, vx, vy, rho):
    """Truth: quadrature; the arc-cosine closed form for the ReLU."""
    functions = {"tanh": np.tanh, "erf": scipy.special.erf, "sigmoid": scipy.special.expit}
    c = rho * np.sqrt(vx * vy)
    value = ntk.dual(*(getattr(ntk, name) for name in pair), vx, vy, c)
    if pair[0] == "relu":
        angle = np.arccos(rho)
        expected = np.sqrt(vx * vy) * (np.sin(angle) + (np.pi - angle) * rho) / (2 * np.pi)
    else:
        expected = generated.expectation(*(functions[name] for name in pair), vx, vy, c)
    np.testing.assert_allclose(value, expected, atol=1e-5)
