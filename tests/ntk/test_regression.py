"""Kernel regression against numpy, scikit-learn, refits and gradient descent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_gradient
from sklearn.kernel_ridge import KernelRidge

from ntk.regression.kernel_regression import excess_risk_term, gradient_flow, kernel_regression

N = 8
rng = np.random.default_rng(0)
PHI = rng.normal(size=(N + 5, 30)) / np.sqrt(30)  # rows: N training inputs, 5 others
K, CROSS = PHI[:N] @ PHI[:N].T, PHI[N:] @ PHI[:N].T
Y = {"one output": rng.normal(size=N), "three outputs": rng.normal(size=(N, 3))}
F0 = rng.normal(size=30)  # features' weights before training


@pytest.mark.parametrize(("name", "penalty"), [("one output", 0.0), ("three outputs", 0.3)])
def test_regression_and_leave_one_out_are_those_of_scikit_learn(name, penalty):
    y = Y[name]
    fit = jax.jit(kernel_regression)(K, y, penalty=penalty)
    peer = KernelRidge(alpha=max(penalty, 1e-14), kernel="precomputed")
    assert_close(fit.predict(CROSS), peer.fit(K, y).predict(CROSS))
    refits = []
    for i in range(N):
        others = np.delete(np.arange(N), i)
        part = peer.fit(K[np.ix_(others, others)], y[others])
        refits.append(y[i] - part.predict(K[i, others][None])[0])
    assert_close(fit.leave_one_out(), np.array(refits))


def test_the_excess_risk_term_is_the_squared_norm_of_the_interpolant():
    y = Y["three outputs"]
    risk = excess_risk_term(K, y)
    weights = np.linalg.pinv(PHI[:N]) @ y  # truth: the minimum-norm weights that interpolate
    assert_close(risk.quadratic, np.sum(weights**2))
    assert_close(risk.normalized, np.sqrt(np.sum(weights**2) / N))


def test_gradient_flow_is_gradient_descent_in_small_steps():
    y = Y["three outputs"]
    w, step, steps = np.broadcast_to(F0[:, None], (30, 3)).copy(), 1e-3, 2000
    start = PHI @ w
    for _ in range(steps):
        w -= step * PHI[:N].T @ (PHI[:N] @ w - y)
    truth = PHI @ w  # of the features' weights; off by O(step)
    test = gradient_flow(K, y, step * steps, f0=start[:N], cross=CROSS, cross_f0=start[N:])
    assert_close(gradient_flow(K, y, step * steps, f0=start[:N]), truth[:N], f64=2e-3, f32=2e-3)
    assert_close(test, truth[N:], f64=2e-3, f32=2e-3)


def expm_flow(K, r, t):
    """Return ``phi_t(K) r`` from a block of exp([[-t K, t I], [0, 0]])."""
    n = len(K)
    block = jnp.block([[-t * K, t * jnp.eye(n)], [jnp.zeros((n, 2 * n))]])
    return jax.scipy.linalg.expm(block, max_squarings=30)[:n, n:] @ r


@jax.jit
def flow_and_derivatives(kernel, direction, y, t):
    def flow(s, t, y):
        return gradient_flow(kernel + s * direction, y, t, cross=CROSS)

    def truth(s, t, y):
        return CROSS @ expm_flow(kernel + s * direction, y, t)

    at, all_three = (0.0, t, y), (0, 1, 2)
    ours = [flow(*at), *(mode(flow, all_three)(*at) for mode in (jax.jacrev, jax.jacfwd))]
    return ours, truth(*at), jax.jacfwd(truth, all_three)(*at)


@pytest.mark.long
@pytest.mark.parametrize("t", [1e-4, 0.01, 5.0])
@pytest.mark.parametrize("multiple", [False, True])
def test_gradient_flow_and_its_derivatives_are_those_of_the_matrix_exponential(t, multiple):
    q, _ = np.linalg.qr(K)
    kernel = (q * np.repeat([0.4, 2.0], N // 2)) @ q.T if multiple else K
    (value, *modes), *truth = flow_and_derivatives(kernel, K - np.eye(N), Y["one output"], t)
    assert_close(value, truth[0], f64=1e-11)
    for derivatives in modes:
        for a, b in zip(derivatives, truth[1], strict=True):
            assert_close(a, b, f64=1e-9, f32=5e-3)


def test_gradient_flow_starts_at_f0_and_ends_at_regression():
    y = Y["three outputs"]
    path = gradient_flow(K, y, jnp.array([0.0, jnp.inf]), f0=1.0, cross=CROSS, cross_f0=2.0)
    assert_close(path[0], np.full((5, 3), 2.0))
    assert_close(path[1], 2 + CROSS @ np.linalg.solve(K, y - 1))  # truth: numpy

    @jax.jit
    @jax.jacfwd
    def slopes(s):
        kernel = K + s * np.eye(N)
        limit = gradient_flow(kernel, y, jnp.inf, cross=CROSS)
        return limit, kernel_regression(kernel, y).predict(CROSS)

    assert_close(*slopes(0.0), f64=1e-8, f32=1e-2)


def test_directions_without_kernel_do_not_move():
    kernel, y = np.diag([1.0, 0.0]), np.array([3.0, 5.0])
    path = gradient_flow(kernel, y, jnp.array([1e6, jnp.inf]), f0=1.0)
    assert_close(path, [[3.0, 1.0], [3.0, 1.0]])
    slope = jax.jit(jax.jacfwd(lambda t: gradient_flow(kernel, y, t)))(2.0)
    assert_close(slope, [3 * np.exp(-2), 0.0], f32=1e-5)  # truth: the derivative of 3 (1 - e^-t)


def test_regression_is_differentiable_in_the_kernel_and_maps_over_batches():
    y = Y["one output"]

    def total(s):
        kernel = jnp.asarray(K) + jnp.diag(s)
        fit = kernel_regression(kernel, y, penalty=0.1)
        return excess_risk_term(kernel, y).quadratic + fit.leave_one_out() @ fit.weights

    assert_gradient(total, np.linspace(0.3, 0.6, N), f64=1e-8, f32=3e-2)
    batch = np.stack([K, K + np.eye(N)])
    fits = jax.vmap(lambda k: kernel_regression(k, y).weights)(batch)
    assert_close(fits, np.stack([np.linalg.solve(k, y) for k in batch]))


def test_a_traced_kernel_without_a_cholesky_factor_gives_nan():
    indefinite = jnp.diag(jnp.array([1.0, -0.25]))
    y = jnp.ones(2)
    assert np.isnan(jax.jit(kernel_regression)(indefinite, y).weights).all()
    assert_close(kernel_regression(indefinite, y, penalty=1.25).weights, [1 / 2.25, 1.0])


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.long)])
def test_a_flow_is_bounded_where_the_kernel_is_singular_to_rounding(dtype):
    """With a repeated row, one eigenvalue is roundoff."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)  # float32 unless JAX has float64
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 2))
    x, new = (a.astype(dtype) for a in (np.concatenate([x, x[:1]]), rng.normal(size=(3, 2))))
    y = np.sign(x[:, 0] * x[:, 1])

    def kernel(a, b):
        # In float32 a width of 1 would make more directions singular to rounding.
        narrow = 16 if dtype == np.float32 else 1
        return jnp.exp(-narrow * jnp.sum((a[:, None] - jnp.asarray(b)) ** 2, -1))

    t = jnp.append(jnp.logspace(-3, 30, 34), jnp.inf).astype(dtype)
    path = gradient_flow(kernel(x, x), y, t, cross=kernel(new, x))
    at_rows = gradient_flow(kernel(x, x), y, t)
    assert np.abs(path).max() < 1.5 * np.abs(path[-1]).max() and np.abs(at_rows - y).max() < 1.5
    assert_close(path[-2], path[-1])
    # Truth at early times: float64 and expm1.
    values, V = np.linalg.eigh(np.asarray(kernel(x, x), float))
    early = np.asarray(t)[np.asarray(t) < 1e-3 / (len(x) * np.finfo(dtype).eps * values[-1])]
    for s, actual in zip(early, np.asarray(at_rows), strict=False):
        truth = V @ (-np.expm1(-s * np.maximum(values, 0)) * (V.T @ y))
        assert_close(actual, truth, f64=1e-5, f32=1e-3)
