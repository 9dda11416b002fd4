"""Kernels known by their products: operators, regression, eigenvalues, all against numpy."""

import jax
import jax.numpy as jnp
import numpy as np

import ntk
from benchmarks.reliability.case import Case, at_most, eps, first, near, that
from benchmarks.reliability.registry import generates


def laplace(a, b):
    return jnp.exp(-jnp.abs(a[:, None] - b).sum(-1))


def _given(rng, dtype):
    """Inputs, their matrix in float64, and vectors."""
    n = int(rng.choice([1, 3, 9]))
    x = jnp.asarray(rng.normal(size=(n, 2)) * 10 ** rng.uniform(-1, 1), dtype)
    wide = np.asarray(x, np.float64)
    matrix = np.exp(-np.abs(wide[:, None] - wide).sum(-1))
    return x, matrix, jnp.asarray(rng.normal(size=(n, 2)) * 10 ** rng.uniform(-6, 6), dtype)


def _key(rng):
    return jax.random.key(int(rng.integers(2**31)))


@generates("ntk.KernelOperator")
def kernel_operator(rng, dtype) -> Case:
    x, matrix, v = _given(rng, dtype)

    def call(kernel, x, v, get, tile):
        K = ntk.KernelOperator(kernel, x, get=get, tile=tile)
        return K @ v, K.diagonal()

    def check(outputs):
        product, diagonal = outputs
        size = np.abs(matrix) @ np.abs(np.asarray(v, np.float64))
        off = np.abs(product - matrix @ np.asarray(v, np.float64))
        return first(
            at_most("product", off, 1e3 * eps(dtype) * size),
            near("diagonal", diagonal, np.ones(len(x)), 10 * eps(dtype)),
        )

    arguments = {"kernel": laplace, "x": x, "v": v, "get": "ntk", "tile": int(rng.integers(1, 5))}
    kinds = {"kernel": "function", "x": "values", "v": "rows", "get": "name", "tile": "count"}
    return Case(call, arguments, check, kinds, ("x", "v"))


@generates("ntk.EmpiricalOperator")
def empirical_operator(rng, dtype) -> Case:
    x, _, v = _given(rng, dtype)
    params = jnp.asarray(rng.normal(size=(2, 3)), dtype)
    slopes = 1 - np.tanh(np.asarray(x, np.float64) @ np.asarray(params, np.float64)) ** 2
    gram = np.asarray(x, np.float64) @ np.asarray(x, np.float64).T
    matrix = gram * (slopes @ slopes.T)

    def call(params, x, v, batch_size):
        return ntk.EmpiricalOperator(_tanh, params, x, batch_size=batch_size) @ v

    def check(product):
        size = np.abs(matrix).max() * np.abs(np.asarray(v, np.float64)).sum()
        off = np.abs(product - matrix @ np.asarray(v, np.float64))
        return at_most("product", off, 1e3 * eps(dtype) * size)

    arguments = {"params": params, "x": x, "v": v, "batch_size": int(rng.integers(1, 5))}
    kinds = {"params": "values", "x": "values", "v": "rows", "batch_size": "count?"}
    return Case(call, arguments, check, kinds, ("params", "x", "v"))


def _tanh(w, x):
    return jnp.tanh(x @ w)


@generates("ntk.partial_cholesky")
def partial_cholesky(rng, dtype) -> Case:
    x, matrix, _ = _given(rng, dtype)
    n = len(x)

    def call(x, rank, key):
        return ntk.partial_cholesky(ntk.KernelOperator(laplace, x, tile=4), rank, key=key)

    def check(factorization):
        residual = (
            matrix
            - np.asarray(factorization.factor, np.float64) @ np.asarray(factorization.factor).T
        )
        rounding = 2e3 * eps(dtype)
        return first(
            that(np.linalg.eigvalsh(residual)[0] > -rounding, "a factor above the kernel"),
            near(
                "rest",
                np.asarray(factorization.residual_diagonal) + 1,
                np.diag(residual) + 1,
                rounding,
            ),
        )

    arguments = {"x": x, "rank": int(rng.integers(1, n + 1)), "key": _key(rng)}
    kinds = {"x": "values", "rank": "count", "key": "key"}
    return Case(call, arguments, check, kinds, ("x",), vmapped=False)


@generates("ntk.iterative_regression")
def iterative_regression(rng, dtype) -> Case:
    x, matrix, y = _given(rng, dtype)
    penalty = float(10 ** rng.uniform(-2, 1))
    truth = np.linalg.solve(matrix + penalty * np.eye(len(x)), np.asarray(y, np.float64))
    tol = max(1e-9, 100 * eps(dtype))

    def call(x, y, penalty, tol, steps):
        K = ntk.KernelOperator(laplace, x, tile=4)
        return ntk.iterative_regression(K, y, penalty=penalty, tol=tol, steps=steps)

    def check(fit):
        off = np.linalg.norm(fit.weights - truth, axis=0)
        size = np.linalg.norm(np.asarray(y, np.float64), axis=0)
        return first(
            at_most("weights", off, 2 * tol * size / penalty),
            at_most("relative residual", fit.relative, 2 * tol),
        )

    arguments = {"x": x, "y": y, "penalty": penalty, "tol": tol, "steps": 100}
    kinds = {"x": "values", "y": "rows", "penalty": "nonnegative", "tol": "positive"}
    kinds |= {"steps": "count"}
    return Case(call, arguments, check, kinds, ("x", "y", "penalty"))


@generates("ntk.leave_one_out_estimate")
def leave_one_out_estimate(rng, dtype) -> Case:
    x, matrix, y = _given(rng, dtype)
    penalty, n = float(10 ** rng.uniform(-1, 1)), len(x)
    inverse = np.linalg.inv(matrix + penalty * np.eye(n))
    truth = inverse @ np.asarray(y, np.float64) / np.diag(inverse)[:, None]
    tol = max(1e-8, 100 * eps(dtype))

    def call(x, y, probes, tol, key):
        # Of full rank: the signs have nothing left to say.
        K = ntk.KernelOperator(laplace, x, tile=4)
        partial = ntk.partial_cholesky(K, n, key=jax.random.key(0))
        fit = ntk.iterative_regression(K, y, penalty=penalty, tol=tol, preconditioner=partial)
        return ntk.leave_one_out_estimate(
            K, fit, key=key, probes=probes, tol=tol, preconditioner=partial
        )

    def check(estimate):
        return near("residuals", estimate.residuals, truth, 1e3 * tol)

    arguments = {"x": x, "y": y, "probes": 3, "tol": tol, "key": _key(rng)}
    kinds = {"x": "values", "y": "rows", "probes": "count", "tol": "positive", "key": "key"}
    return Case(call, arguments, check, kinds, ("x", "y"), vmapped=False)


@generates("ntk.eigenvalue_interval")
def eigenvalue_interval(rng, dtype) -> Case:
    x, *_ = _given(rng, dtype)
    x = jnp.concatenate([x, x + 1])
    wide = np.asarray(x, np.float64)
    truth = np.linalg.eigvalsh(np.exp(-np.abs(wide[:, None] - wide).sum(-1)))
    rounding = 1e3 * eps(dtype) * truth[-1]

    def call(x, steps, block, failure, key):
        return ntk.eigenvalue_interval(
            ntk.KernelOperator(laplace, x, tile=4),
            key=key,
            steps=steps,
            block=block,
            failure=failure,
        )

    def check(interval):
        return first(
            at_most("lower", interval.lower, truth[0] + rounding),
            at_most("smallest", truth[0], interval.upper + rounding),
        )

    arguments = {"x": x, "steps": 2, "block": 1, "failure": 1e-3, "key": _key(rng)}
    kinds = {"x": "values", "steps": "count", "block": "count", "failure": "fraction"}
    kinds["key"] = "key"
    return Case(
        call, arguments, check, kinds, ("x",), vmapped=False, answer=lambda interval: interval.upper
    )
