"""Test regression, leave-one-out and eigenvalues of kernels known by their products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_gradient, float64_only, long_except, tolerance

import ntk
from ntk.large import preconditioner
from ntk.large.block_cg import SolverState
from ntk.large.eigenvalue_interval import missed_part

rng = np.random.default_rng(0)
N = 150
key = functools.partial(jax.random.key, 0)
fitted = ntk.iterative_regression


def laplace(a, b):
    # Its eigenvalues decay slowly, like those of kernels of ReLU networks.
    return jnp.exp(-jnp.sqrt(jnp.maximum(((a[:, None] - b) ** 2).sum(-1), 1e-30)) / 3)


X, NEW, Y = (rng.normal(size=s) for s in ((N, 4), (10, 4), (N, 3)))


def operator(dtype=float):
    return ntk.KernelOperator(laplace, jnp.asarray(X, dtype), tile=64)


@functools.cache
def factor(rank):
    return ntk.partial_cholesky(operator(), rank, key=key())


def dense():
    return np.asarray(laplace(X, X))


def solution(penalty, y=Y):
    return np.linalg.solve(dense() + penalty * np.eye(N), y)


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 40, 130, N])
def test_a_partial_factor_is_below_the_kernel_and_exact_at_its_pivots(rank):
    factorization, K = factor(rank), dense()
    residual = K - factorization.factor @ factorization.factor.T
    assert np.linalg.eigvalsh(residual)[0] > -1e-12
    np.testing.assert_allclose(factorization.residual_diagonal, np.diag(residual), atol=1e-11)
    np.testing.assert_allclose(residual[:, factorization.pivots], 0, atol=1e-9)
    assert len(set(np.asarray(factorization.pivots).tolist())) == rank


@float64_only  # other numbers draw other pivots
def test_a_partial_factor_is_nearly_the_best_of_half_its_rank():
    assert factor(40).residual_diagonal.sum() < 1.1 * np.linalg.eigvalsh(dense())[: N - 20].sum()


@float64_only  # float32's rounding has a root of 0.01
def test_beyond_the_rank_of_a_kernel_a_factor_is_zero():
    K = ntk.KernelOperator(lambda a, b: a @ b.T, jnp.asarray(X))
    factorization = ntk.partial_cholesky(K, 20, key=key())
    np.testing.assert_allclose(factorization.factor @ factorization.factor.T, X @ X.T, atol=1e-9)
    assert (jnp.abs(factorization.factor).max(0) > 1e-3).sum() == 4


@pytest.mark.long
def test_a_preconditioner_with_more_rows_than_a_block_is_inverted():
    n = 5000
    factor, diagonal = jnp.asarray(rng.normal(size=(n, 3))), jnp.asarray(rng.uniform(1, 2, size=n))
    P = preconditioner.make_preconditioner(factor, diagonal, 1.0)
    v = jnp.asarray(rng.normal(size=(n, 2)))
    product = diagonal[:, None] * v + factor @ (factor.T @ v)
    np.testing.assert_allclose(preconditioner.preconditioner_product(P, v), product, atol=1e-9)
    np.testing.assert_allclose(preconditioner.solve(P, product), v, atol=1e-9)
    unit = jnp.zeros((n, 1)).at[-1].set(1)
    inverse = preconditioner.inverse_diagonal(P)[-1]
    np.testing.assert_allclose(inverse, preconditioner.solve(P, unit)[-1, 0], rtol=1e-9)


def test_samples_of_a_preconditioner_have_its_covariance():
    factor, diagonal = jnp.asarray(rng.normal(size=(50, 3))), jnp.ones(50)
    P = preconditioner.make_preconditioner(factor, diagonal, 1.0)
    draws = preconditioner.sample_with_covariance(P, key(), 4000)
    covariance = jnp.diag(diagonal) + factor @ factor.T
    np.testing.assert_allclose(draws @ draws.T / 4000, covariance, atol=1.2)


@pytest.mark.long
@pytest.mark.parametrize("dtype, tol", [(np.float64, 1e-11), (np.float32, 1e-5)])
@pytest.mark.parametrize("rank", [None, 40])
def test_weights_are_the_solution(rank, dtype, tol):
    partial = rank and ntk.partial_cholesky(operator(dtype=dtype), rank, key=key())
    y = jnp.asarray(Y, dtype)
    fit = fitted(operator(dtype=dtype), y, penalty=0.1, preconditioner=partial, tol=tol)
    truth = solution(0.1)
    assert fit.weights.dtype == dtype
    np.testing.assert_allclose(fit.weights, truth, atol=50 * tol * np.abs(truth).max())
    left = Y - (dense() + 0.1 * np.eye(N)) @ np.asarray(fit.weights, np.float64)
    assert (fit.relative <= tol).all()
    if dtype == np.float64:
        expected, rounding = np.linalg.norm(left, axis=0), 4 * N * np.finfo(float).eps
        np.testing.assert_allclose(fit.residual, expected, rtol=1e-3, atol=rounding)
    cross = operator(dtype=dtype).at(NEW)
    np.testing.assert_allclose(fit.predict(cross), laplace(NEW, X) @ truth, atol=1e3 * tol)


@pytest.mark.parametrize("smallest", [0.0, "known"])
@pytest.mark.parametrize("steps", [3, 15])
def test_predictions_are_off_by_less_than_the_bound(steps, smallest):
    penalty = 0.02
    fit = fitted(operator(), Y, penalty=penalty, tol=1e-12, steps=steps)
    cross = operator().at(NEW)
    off = np.abs(fit.predict(cross) - laplace(NEW, X) @ solution(penalty))
    if smallest == "known":
        smallest = np.linalg.eigvalsh(dense())[0]
    bound = fit.error_bound(cross.diagonal(), smallest=smallest)
    assert (off <= bound).all()
    assert off.max() > bound.max() / 100  # the bound is not empty
    cauchy = np.linalg.norm(laplace(NEW, X), axis=1).max() * fit.residual.max() / penalty
    assert bound.max() < cauchy


@pytest.mark.long
def test_a_factor_saves_steps_and_so_do_several_columns():
    run = functools.partial(fitted, operator(), penalty=0.01, tol=1e-8)
    many = np.random.default_rng(1).normal(size=(N, 10))
    plain, helped = run(Y), run(Y, preconditioner=factor(40))
    assert helped.steps < 0.7 * plain.steps
    assert run(many).steps < 0.7 * run(many[:, 0]).steps


@pytest.mark.long
@pytest.mark.parametrize("size, of_y", [(1e-25, 1), (1e25, 1), (1, 1e-30), (1, 1e30)])
def test_units_do_not_matter_in_float32(size, of_y):
    targets = Y[:40] * (np.arange(40) > 0)[:, None]
    x, y = jnp.asarray(X[:40], np.float32), jnp.asarray(targets, np.float32)
    K = ntk.KernelOperator(lambda a, b: size * laplace(a, b), x, tile=16)
    partial = ntk.partial_cholesky(K, 10, key=key())
    fit = fitted(K, of_y * y, penalty=0.1 * size, preconditioner=partial, tol=1e-5)
    truth = np.linalg.solve(dense()[:40, :40] + 0.1 * np.eye(40), targets)
    np.testing.assert_allclose(fit.weights * size / of_y, truth, atol=1e-4)


@pytest.mark.slow
def test_columns_that_depend_on_each_other_or_are_zero():
    y = np.stack([Y[:, 0], Y[:, 1], -Y[:, 0] - Y[:, 1], 0 * Y[:, 0], 1e-9 * Y[:, 0]], 1)
    y = np.concatenate([y, Y[:, :1] + 1e-5 * Y[:, 2:]], 1)
    fit = fitted(operator(), y, penalty=0.1, tol=1e-9)
    assert (fit.relative <= 1e-9).all()
    np.testing.assert_allclose(fit.weights, solution(0.1, y), atol=1e-7)
    np.testing.assert_allclose(fit.weights[:, 4], 1e-9 * fit.weights[:, 0], atol=1e-16)


@pytest.mark.long
def test_an_interrupted_fit_resumes_to_the_same_bits():
    states = []
    options = {"penalty": 0.1, "preconditioner": factor(40), "tol": 1e-8}
    run = functools.partial(fitted, operator(), Y, **options)
    whole = run(callback=states.append)
    saved = [np.asarray(x) for x in states[3]]
    again = run(start=SolverState(*saved), callback=states.append)
    steps = int(whole.steps)
    assert [int(s.steps) for s in states[:steps]] == list(range(1, steps + 1))
    np.testing.assert_array_equal(whole.weights, again.weights)
    assert whole.steps == again.steps
    np.testing.assert_allclose(run().weights, whole.weights, atol=1e-8)
    assert states[-1].computed and not states[0].computed


@pytest.mark.long
def test_in_jit_and_vmap():
    def weights(K, y, penalty):
        return fitted(K, y, penalty=penalty, tol=1e-10).weights

    penalties = jnp.array([0.1, 1.0])
    weights_by_penalty = jax.jit(jax.vmap(weights, (None, None, 0)))(operator(), Y, penalties)
    for one, penalty in zip(weights_by_penalty, penalties, strict=True):
        np.testing.assert_allclose(one, solution(float(penalty)), atol=1e-8)
    assert np.isnan(jax.jit(weights)(operator(), Y, -1.0)).all()


@pytest.mark.long
def test_derivatives_in_targets_penalty_and_kernel():
    x, u = jnp.asarray(X[:12]), jnp.asarray(rng.normal(size=12))

    def value(at):
        y, penalty, scale = at
        K = ntk.KernelOperator(lambda a, b: scale * laplace(a, b), x, tile=5)
        return u @ fitted(K, y, penalty=penalty, tol=1e-12).weights

    at = jnp.asarray(Y[:12, 0]), jnp.array(0.3), jnp.array(1.5)
    assert_gradient(value, at, f64=1e-8, f32=1e-8)


def test_few_steps_end_with_the_true_residual():
    states = []
    fit = fitted(operator(), Y, penalty=0.1, tol=1e-12, steps=4, callback=states.append)
    left = Y - (dense() + 0.1 * np.eye(N)) @ fit.weights
    assert fit.steps == 4 and [bool(s.computed) for s in states] == [False, False, False, True]
    expected = np.linalg.norm(left, axis=0)
    np.testing.assert_allclose(fit.residual, expected, rtol=tolerance(1e-10, 1e-4))


def test_stalled_iterations_end():
    fit = fitted(operator(dtype=np.float32), Y.astype(np.float32), tol=1e-12)
    assert fit.steps < 400 and (fit.relative > 1e-12).all() and (fit.relative < 1e-3).all()


def left_out(penalty):
    inverse = np.linalg.inv(dense() + penalty * np.eye(N))
    return inverse @ Y / np.diag(inverse)[:, None]


@pytest.mark.long
@pytest.mark.parametrize("rank", [None, 60])
def test_leave_one_out_residuals_are_off_by_their_standard_errors(rank):
    options = {"preconditioner": rank and factor(rank)}
    fit = fitted(operator(), Y, penalty=0.1, tol=1e-10, **options)
    options |= {"key": key(), "probes": 64, "tol": 1e-6}
    estimate = ntk.leave_one_out_estimate(operator(), fit, **options)
    off = (estimate.residuals - left_out(0.1)) / estimate.standard_error
    # The errors of the 150 estimates are correlated.
    assert 0.8 < np.sqrt(np.mean(off[:, 0] ** 2)) < 1.3
    assert estimate.residuals.shape == estimate.standard_error.shape == Y.shape


@pytest.mark.long
def test_a_full_factor_leaves_no_standard_error():
    fit = fitted(operator(), Y, penalty=0.1, tol=1e-10)
    options = {"key": key(), "probes": 4, "preconditioner": factor(N), "tol": 1e-9}
    estimate = ntk.leave_one_out_estimate(operator(), fit, **options)
    assert float(jnp.max(estimate.standard_error)) < 1e-6
    np.testing.assert_allclose(estimate.residuals, left_out(0.1), atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("rank, steps", [(None, 10), (None, 30), (60, 15), (60, 35)])
def test_the_interval_has_the_smallest_eigenvalue(rank, steps, dtype):
    K, truth = operator(dtype=dtype), np.linalg.eigvalsh(dense())[0]
    partial = rank and ntk.partial_cholesky(K, rank, key=key())
    options = {"preconditioner": partial, "steps": steps, "block": 4}
    for seed in range(3):
        bracket = ntk.eigenvalue_interval(K, key=jax.random.key(seed), **options)
        assert 0 <= bracket.lower <= truth <= bracket.upper * (1 + 1e-4 * (dtype == np.float32))
        image = dense() @ np.asarray(bracket.vector, np.float64)
        np.testing.assert_allclose(bracket.vector @ image, bracket.upper, rtol=1e-3)
        if rank and steps > 30:
            assert bracket.lower > truth / 2 and bracket.upper < 1.1 * truth


@pytest.mark.long
def test_a_lower_end_is_not_fooled_by_one_small_eigenvalue_apart():
    values = np.concatenate([[1e-3], np.linspace(1, 2, N - 1)])
    basis, _ = np.linalg.qr(rng.normal(size=(N, N)))
    K = ntk.KernelOperator(lambda a, b: a @ b.T, jnp.asarray(basis * np.sqrt(values)))
    for steps in (2, 5, 20):
        bracket = ntk.eigenvalue_interval(K, key=key(), steps=steps, block=2)
        assert bracket.lower <= 1e-3 * (1 + 1e-9) and bracket.upper >= 1e-3 * (1 - 1e-9)


def test_the_probability_is_that_of_random_starts():
    # On a hard matrix, Lanczos from one start misses the largest eigenvalue by more than `missed`
    # at most as often as the theorem allows.
    n, steps, failure = 60, 6, 0.2
    missed = missed_part(n, steps, 1, failure)
    values = 1 - np.concatenate([[0], np.linspace(missed, 1, n - 1)])
    fails = 0
    for _ in range(200):
        start = rng.normal(size=n)
        basis, _ = np.linalg.qr(np.stack([values**k * start for k in range(steps)], 1))
        fails += np.linalg.eigvalsh(basis.T @ (values[:, None] * basis))[-1] < 1 - missed
    assert fails <= 200 * failure
    assert missed_part(n, steps, 8, failure) < missed < missed_part(n, steps, 1, failure / 100)


WRONG = {
    "-": lambda a, b: -a @ b.T,
    "+-": lambda a, b: a[:, :1] @ b[:, 1:2].T + a[:, 1:2] @ b[:, :1].T,
    "NaN": lambda a, b: jnp.where(a @ b.T > 2, jnp.nan, a @ b.T),
}


@pytest.mark.parametrize("name", long_except(["+-", "NaN"], WRONG))
def test_kernels_that_are_not_positive_semidefinite_raise(name):
    K = ntk.KernelOperator(WRONG[name], X)
    message = "K: expected a positive semidefinite kernel with finite entries"
    with pytest.raises(ValueError, match=message):
        ntk.partial_cholesky(K, N, key=key())
    with pytest.raises(ValueError, match=message):
        ntk.eigenvalue_interval(K, key=key(), steps=9, block=2)
    assert jnp.isnan(jax.jit(lambda: ntk.partial_cholesky(K, N, key=key()).factor)()).any()
