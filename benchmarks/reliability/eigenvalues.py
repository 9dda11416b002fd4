"""Smallest eigenvalues, their certificates, and regression with a kernel: against numpy."""

import jax.numpy as jnp
import numpy as np

import ntk
from benchmarks.reliability.case import Case, at_most, eps, first, near, that
from benchmarks.reliability.registry import generates
from ntk.spectrum.eigenvalues import smallest_eigenpair


def matrix(rng, dtype, sizes=(1, 3, 8, 70)) -> jnp.ndarray:
    """Symmetric: definite, singular, indefinite, clustered, of any scale."""
    n = int(
        rng.choice(sizes, p=np.array([4, 7, 7, 2])[: len(sizes)] / sum([4, 7, 7, 2][: len(sizes)]))
    )
    q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    kind = rng.integers(5)
    values = 10 ** rng.uniform(-rng.uniform(0, 12), 0, n)
    if kind == 1:
        values[: n // 2] = 0
    elif kind == 2:
        values = rng.normal(size=n)
    elif kind == 3:
        values = 1 + 1e-9 * rng.normal(size=n)
    K = ((q * values) @ q.T * 10 ** rng.uniform(-20 if dtype == np.float64 else -6, 6)).astype(
        dtype
    )
    return jnp.asarray((K + K.T) / 2)


@generates("ntk.min_eigenvalue", "ntk.spectrum.eigenvalues.smallest_eigenpair", "ntk.eigenvalues")
def min_eigenvalue(rng, dtype) -> Case:
    K = matrix(rng, dtype)
    truth = np.linalg.eigvalsh(np.asarray(K, np.float64))
    size, n = abs(truth).max(), len(K)
    rounding = 50 * n * eps(dtype) * size

    def call(K):
        return ntk.min_eigenvalue(K), smallest_eigenpair(K), ntk.eigenvalues(K)

    def check(r):
        value, pair, values = r
        residual = np.asarray(K, np.float64) @ pair.vector - float(pair.value) * np.asarray(
            pair.vector
        )
        return first(
            that(abs(float(value) - truth[0]) <= rounding, f"expected {truth[0]:.8g}, got {value}"),
            at_most("residual", np.linalg.norm(residual), float(pair.residual) + rounding),
            near("eigenvalues", values, truth, 50 * n * eps(dtype)),
        )

    return Case(call, {"K": K}, check, {"K": "matrix"}, ("K",))


@generates("ntk.min_eigenvalue of a product")
def min_eigenvalue_of_a_product(rng, dtype) -> Case:
    K = matrix(rng, dtype, sizes=(1, 3, 8))
    truth = np.linalg.eigvalsh(np.asarray(K, np.float64))

    def call(K, size):
        return smallest_eigenpair(lambda v: K @ v, size=size)

    def check(pair):
        slack = float(pair.residual) + 200 * len(K) * eps(dtype) * abs(truth).max()
        off = abs(float(pair.value) - truth).min()
        return that(off <= slack, f"no eigenvalue within {slack:.1e} of {float(pair.value):.8g}")

    kinds = {"K": "values", "size": "count"}
    arguments = {"K": K, "size": len(K)}
    return Case(call, arguments, check, kinds, ("K",), vmapped=False)


@generates("ntk.certified_min_eigenvalue")
def certified_min_eigenvalue(rng, dtype) -> Case:
    K = np.asarray(matrix(rng, dtype))
    n = len(K)
    error = float(rng.choice([0.0, 1e-3]) * abs(K).max())
    truth = np.linalg.eigvalsh(K.astype(np.float64))
    rounding = 4 * n * eps(np.float64) * abs(truth).max()
    # The worst of the kernels that near, or one of them: a bound of all is one of it.
    moved = K.astype(np.float64) + error * np.where(rng.random((n, n)) < 0.5, 1, -1)
    worst = min(truth[0] - n * error * 0, np.linalg.eigvalsh((moved + moved.T) / 2)[0])

    def check(bound):
        return first(
            at_most("bound and eigenvalue", bound, min(worst, truth[0]) + rounding),
            at_most(
                "how far below",
                truth[0] - n * error - bound,
                2e-9 * n * error + 4e-15 * (n + 10) * (np.trace(abs(K)) + n * abs(K).max()),
            ),
        )

    kinds = {"K": "matrix", "entry_error": "nonnegative"}
    arguments, fine = {"K": K, "entry_error": error}, ("entry_error: none",)
    return Case(ntk.certified_min_eigenvalue, arguments, check, kinds, fine=fine)


@generates("ntk.certify_simplex")
def certify_simplex(rng, dtype) -> Case:
    h, n, p = int(rng.choice([1, 2, 3])), int(rng.choice([2, 4])), int(rng.choice([2, 6]))
    phi = rng.normal(size=(h, n, p)) * 10 ** rng.uniform(-3, 3)
    if rng.random() < 0.2 and h > 1:
        phi[1] = -phi[0]
    blocks = np.einsum("iap,jbp->ijab", phi, phi).astype(dtype)
    alphas = np.vstack([np.eye(h), rng.dirichlet(np.ones(h), 200)])
    kernels = np.einsum("mi,ijab,mj->mab", alphas, blocks.astype(np.float64), alphas)
    values = np.linalg.eigvalsh((kernels + kernels.swapaxes(1, 2)) / 2)
    size = abs(values).max()
    rounding = 20 * n * eps(np.float64) * size

    def check(certificate):
        a = np.asarray(certificate.argmin)
        at = np.linalg.eigvalsh(np.einsum("i,ijab,j->ab", a, blocks.astype(np.float64), a))[0]
        return first(
            at_most("lower end and brute force", certificate.lower, values[:, 0].min() + rounding),
            at_most("value at argmin", at, certificate.upper + rounding),
            at_most("ends", certificate.lower, certificate.upper),
            near("sum of argmin", a.sum(), 1.0, 1e-9),
            # Blocks of Gram matrices: no mixture is indefinite, so 0 is a bound that costs nothing.
            at_most("a width that 0 would give", -certificate.lower, 1e-3 * size),
        )

    kinds = {
        "blocks": "array",
        "rtol": "fraction",
        "entry_error": "nonnegative",
        "max_cells": "count",
    }
    arguments = {"blocks": blocks, "rtol": 1e-3, "entry_error": 0.0, "max_cells": 200}
    return Case(ntk.certify_simplex, arguments, check, kinds)


# ----------------------------------------------------------------------------- with a kernel


def _regression(rng, dtype):
    n = int(rng.choice([1, 3, 8]))
    q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    values = 10 ** rng.uniform(-3, 0, n) * 10 ** rng.uniform(-3, 3)
    K = ((q * values) @ q.T).astype(dtype)
    y = rng.normal(size=(n,) if rng.random() < 0.5 else (n, 2)).astype(dtype)
    return jnp.asarray((K + K.T) / 2), jnp.asarray(y), 1e3 * 50 * eps(dtype)


@generates("ntk.kernel_regression", "ntk.excess_risk_term")
def kernel_regression(rng, dtype) -> Case:
    K, y, rounding = _regression(rng, dtype)
    penalty = float(rng.choice([0.0, 0.1]))
    A, t = np.asarray(K, np.float64), np.asarray(y, np.float64)
    regular = A + penalty * np.eye(len(A))
    w = np.linalg.solve(regular, t)
    left_out = w / np.diag(np.linalg.inv(regular)).reshape(-1, *[1] * (t.ndim - 1))
    quadratic = float(np.sum(t * np.linalg.solve(A, t)))

    def call(K, y, penalty):
        fit = ntk.kernel_regression(K, y, penalty=penalty)
        return fit.predict(K), fit.leave_one_out(), ntk.excess_risk_term(K, y)

    def check(r):
        return first(
            near("predictions", r[0], A @ w, rounding),
            near("leave one out", r[1], left_out, rounding),
            near("y'K^-1 y", r[2].quadratic, quadratic, rounding),
        )

    kinds = {"K": "matrix", "y": "rows", "penalty": "nonnegative"}
    return Case(call, {"K": K, "y": y, "penalty": penalty}, check, kinds, ("K", "y"))


@generates("ntk.gradient_flow")
def gradient_flow(rng, dtype) -> Case:
    K, y, rounding = _regression(rng, dtype)
    size = float(np.linalg.norm(np.asarray(K), 2))
    t = float(rng.choice([0.0, 0.1, 1.0, 10.0, np.inf])) / size
    values, vectors = np.linalg.eigh(np.asarray(K, np.float64))
    decay = np.exp(-t * values) if np.isfinite(t) else np.zeros(len(values))
    truth = vectors @ ((1 - decay).reshape(-1, *[1] * (y.ndim - 1)) * (vectors.T @ np.asarray(y)))
    check = lambda r: near("predictions", r, truth, rounding)
    kinds = {"K": "matrix", "y": "rows", "t": "nonnegative"}
    call = lambda K, y, t: ntk.gradient_flow(K, y, t)
    return Case(call, {"K": K, "y": y, "t": t}, check, kinds, ("K", "y"))


def _with_others(rng, dtype):
    """NNGP and NTK of n training inputs and 2 others, as they would be together; targets."""
    n = int(rng.choice([1, 3, 8]))
    weights = rng.normal(size=(2, n + 2, n + 3)) * 10 ** rng.uniform(-3, 3)
    kernels = [jnp.asarray((w @ w.T).astype(dtype)) for w in weights]
    y = rng.normal(size=(n,) if rng.random() < 0.5 else (n, 2)).astype(dtype)
    parts = [(K[:n, :n], K[n:, :n], K[n:, n:]) for K in kernels]
    return parts, jnp.asarray(y), 1e4 * 50 * eps(dtype)


@generates("ntk.posterior")
def posterior(rng, dtype) -> Case:
    ((K, cross, prior), _), y, rounding = _with_others(rng, dtype)
    penalty = float(rng.choice([0.1, 1.0])) * float(np.trace(K))
    wide = [np.asarray(a, np.float64) for a in (K, cross, prior)]
    smoother = np.linalg.solve(wide[0] + penalty * np.eye(len(K)), wide[1].T).T
    truth = smoother @ np.asarray(y), wide[2] - smoother @ wide[1].T

    def check(r):
        return first(
            near("mean", r.mean, truth[0], rounding),
            near("covariance", r.covariance, truth[1], rounding),
        )

    arguments = {"K": K, "y": y, "cross": cross, "prior": prior, "penalty": penalty}
    kinds = {"K": "matrix", "y": "rows", "prior": "matrix", "penalty": "nonnegative"}
    return Case(ntk.posterior, arguments, check, kinds, ("K", "y", "cross", "prior"))


@generates("ntk.ensemble")
def ensemble(rng, dtype) -> Case:
    ((K, cross, prior), (T, cross_ntk, _)), y, rounding = _with_others(rng, dtype)
    values, vectors = np.linalg.eigh(np.asarray(T, np.float64))
    t = float(rng.choice([0.0, 0.1, 1.0, 10.0])) / values.max()
    phi = np.where(values > 0, -np.expm1(-t * values) / values, t)
    A = np.asarray(cross_ntk, np.float64) @ (vectors * phi) @ vectors.T
    wide = [np.asarray(a, np.float64) for a in (K, cross, prior)]
    once = A @ wide[1].T
    truth = A @ np.asarray(y), wide[2] - once - once.T + A @ wide[0] @ A.T

    def call(train_nngp, train_ntk, y, prior, t):
        train, others = ntk.Kernels(train_nngp, train_ntk), ntk.Kernels(cross, cross_ntk)
        return ntk.ensemble(train, y, others, prior, t=t)

    def check(r):
        return first(
            near("mean", r.mean, truth[0], rounding),
            near("covariance", r.covariance, truth[1], rounding),
        )

    arguments = {"train_nngp": K, "train_ntk": T, "y": y, "prior": prior, "t": t}
    kinds = {"train_nngp": "matrix", "train_ntk": "matrix", "y": "rows", "prior": "matrix"}
    return Case(call, arguments, check, kinds | {"t": "nonnegative"}, ("train_ntk", "y", "prior"))
