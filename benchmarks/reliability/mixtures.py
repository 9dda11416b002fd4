"""Spectral estimators, linear models, stability: against numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.sparse

import bilevel
from benchmarks.reliability.case import Case, at_most, eps, first, near, that
from benchmarks.reliability.registry import generates
from bilevel import linear, spectral
from bilevel.linear import models
from bilevel.linear.matrices import Blocks, sparse
from bilevel.theory.spectral import directions


def _tensor(rng, dtype, n=6, h=3, p=4):
    X = rng.normal(size=(n, h, p)) * 10 ** rng.uniform(-3, 3)
    y = rng.normal(size=(n,) if rng.random() < 0.5 else (n, 2))
    return jnp.asarray(X, dtype), jnp.asarray(y, dtype)


def _grams(X, y):
    X, Y = np.asarray(X, np.float64), np.asarray(y, np.float64).reshape(len(y), -1)
    M = np.einsum("nc,nhp->chp", Y, X)
    return np.einsum("chp,cgp->hg", M, M), np.einsum("nhp,n,ngp->hg", X, (Y**2).sum(1), X)


_TENSOR = {"features": "array", "labels": "rows"}


@generates("bilevel.theory.spectral.directions.spectral_gram", "bilevel.theory.spectral.noise_gram")
def grams(rng, dtype) -> Case:
    X, y = _tensor(rng, dtype)
    kernels = rng.random() < 0.3
    truth = _grams(X, y)
    given = jnp.einsum("nhp,mgp->hgnm", X, X) if kernels else X

    def call(features, labels):
        return directions.spectral_gram(features, labels), spectral.noise_gram(features, labels)

    check = lambda r: first(
        near("gram", r[0], truth[0], 1e3 * eps(dtype)),
        near("noise", r[1], truth[1], 1e3 * eps(dtype)),
    )
    return Case(call, {"features": given, "labels": y}, check, _TENSOR, ("features", "labels"))


@generates("bilevel.spectral_alpha")
def spectral_alpha(rng, dtype) -> Case:
    X, y = _tensor(rng, dtype)
    whiten = bool(rng.random() < 0.5)
    gram, noise = _grams(X, y)
    values, vectors = scipy.linalg.eigh(gram, noise if whiten else None)
    gap = (values[-1] - values[-2]) / values[-1]
    truth = vectors[:, -1] / np.linalg.norm(vectors[:, -1])
    # Whitening takes the root of the rounding off the noise's small directions.
    rounding = 100 * (np.sqrt(eps(dtype)) * np.linalg.cond(noise) if whiten else eps(dtype)) / gap

    def check(r):
        return first(
            that(abs(np.linalg.norm(r) - 1) < 1e-3, "not of unit norm"),
            at_most("away from the top direction", 1 - abs(truth @ np.asarray(r)), rounding),
        )

    call = functools.partial(bilevel.spectral_alpha, whiten=whiten)
    return Case(
        call,
        {"features": X, "labels": y},
        check,
        _TENSOR,
        ("features", "labels"),
        extreme=rounding > 0.1,
    )


@generates("bilevel.theory.spectral.directions.top_direction")
def top_direction(rng, dtype) -> Case:
    a = rng.normal(size=(3, 5)) * 10 ** rng.uniform(-3, 3)
    gram = (a @ a.T).astype(dtype)
    values, vectors = np.linalg.eigh(gram.astype(np.float64))
    gap = (values[-1] - values[-2]) / values[-1]
    check = lambda r: at_most(
        "away from the top", 1 - abs(vectors[:, -1] @ np.asarray(r)), 100 * eps(dtype) / gap
    )
    return Case(
        directions.top_direction, {"gram": jnp.asarray(gram)}, check, {"gram": "matrix"}, ("gram",)
    )


@generates("bilevel.simplex_start")
def simplex_start(rng, dtype) -> Case:
    h = int(rng.choice([1, 4]))
    alpha = jnp.asarray(rng.normal(size=h) * 10 ** rng.uniform(-3, 3), dtype)
    noise = None
    if rng.random() < 0.5:
        a = rng.normal(size=(h, h + 2))
        noise = jnp.asarray(a @ a.T, dtype)
    uniform = float(rng.choice([0.0, 0.1, 1.0]))
    N = np.eye(h) if noise is None else np.asarray(noise, np.float64)
    root = np.linalg.cholesky(N).T
    sides = [
        scipy.optimize.nnls(root, root @ s)[0] for s in (np.asarray(alpha), -np.asarray(alpha))
    ]
    lengths = [s @ N @ s for s in sides]
    best = sides[int(np.argmax(lengths))]
    truth = (1 - uniform) * best / best.sum() + uniform / h
    tie = abs(lengths[0] - lengths[1]) < 1e-3 * max(lengths)

    def check(r):
        return first(
            at_most("below 0", -np.asarray(r), 0.0),
            near("sum", np.sum(np.asarray(r, np.float64)), 1.0, 100 * eps(dtype)),
            "" if tie else near("start", r, truth, max(1e-4, 1e3 * eps(dtype))),
        )

    kinds = {"alpha": "array", "noise": "matrix?", "uniform": "unit"}
    arguments = {"alpha": alpha, "noise": noise, "uniform": uniform}
    kinds = {k: v for k, v in kinds.items() if arguments[k] is not None}
    traced = tuple(k for k in ("alpha", "noise") if arguments[k] is not None)
    return Case(bilevel.simplex_start, arguments, check, kinds, traced)


@generates("bilevel.spectral_estimator")
def spectral_estimator(rng, dtype) -> Case:
    X, y = _tensor(rng, dtype, n=5, p=3 if rng.random() < 0.5 else 12)
    valid, labels = _tensor(rng, dtype, n=6, p=X.shape[2])
    labels = labels if labels.ndim == 1 else labels[:, 0]
    y = y if y.ndim == 1 else y[:, 0]
    gram = _grams(valid, labels)[0]
    values, vectors = np.linalg.eigh(gram)
    gap = (values[-1] - values[-2]) / values[-1]
    alpha = vectors[:, -1]
    phi = np.einsum("h,nhp->np", alpha, np.asarray(X, np.float64))
    truth = phi @ np.linalg.lstsq(phi, np.asarray(y, np.float64), rcond=None)[0]
    rounding = 1e3 * eps(dtype) / gap * np.linalg.cond(phi) ** 2

    def call(features, labels, valid, valid_labels):
        estimator = bilevel.spectral_estimator((features, labels), (valid, valid_labels))
        return estimator.predict(features, features)

    kinds = {"features": "array", "labels": "rows", "valid": "array", "valid_labels": "rows"}
    arguments = {"features": X, "labels": y, "valid": valid, "valid_labels": labels}
    check = lambda r: near("predictions", r, truth, rounding)
    return Case(call, arguments, check, kinds, tuple(arguments), extreme=rounding > 0.05)


@generates("bilevel.spectral_limits")
def spectral_limits(rng, dtype) -> Case:
    P, H = 10 ** rng.uniform(-2, 2, 3), 10 ** rng.uniform(-4, 1, 3)
    rho2 = np.where(P * H < 1, (1 - P * H) / (1 + H), 0)
    with np.errstate(all="ignore"):
        risk = np.where(P > 1, rho2 * (1 - 1 / P) + (1 - rho2) / (1 - 1 / P), (1 - rho2) / (1 - P))
    check = lambda r: first(
        near("rho^2", r.correlation_squared, rho2, 1e-4), near("risk", r.risk, risk, 1e-3)
    )
    kinds = {"p_over_n": "numbers", "h_over_n": "numbers"}
    arguments = {"p_over_n": jnp.asarray(P, dtype), "h_over_n": jnp.asarray(H, dtype)}
    return Case(bilevel.spectral_limits, arguments, check, kinds, ("p_over_n", "h_over_n"))


@generates("bilevel.theory.spectral.spectral_sample")
def spectral_sample(rng, dtype) -> Case:
    n, p, h = (int(rng.choice(v)) for v in ([10, 30], [5, 60], [1, 2]))
    check = lambda r: first(
        that(0 <= float(r.correlation_squared) <= 1 + 1e-5, f"correlation {r.correlation_squared}"),
        that(float(r.risk) >= 0, f"risk {r.risk}"),
    )
    kinds = {"key": "key", "n": "count", "p": "count", "h": "count"}
    arguments = {"key": jax.random.key(int(rng.integers(5))), "n": n, "p": p, "h": h}
    return Case(spectral.spectral_sample, arguments, check, kinds)


# ----------------------------------------------------------------------------- linear models


def _features(rng, dtype):
    n, d = ((12, 3), (4, 10))[rng.integers(2)]
    phi = (rng.normal(size=(n, d)) * 10 ** rng.uniform(-2, 2)).astype(dtype)
    form = str(rng.choice(["array", "sparse", "blocks"], p=[0.6, 0.2, 0.2]))
    made = jnp.asarray(phi)
    if form == "sparse":
        phi[rng.random(phi.shape) < 0.5] = 0
        made = sparse(scipy.sparse.csr_array(phi))
    elif form == "blocks":
        whole = made
        rows = lambda start, size: jax.lax.dynamic_slice_in_dim(
            jnp.pad(whole, ((0, size), (0, 0))), start, size, 0
        )
        columns = lambda start, size: jax.lax.dynamic_slice_in_dim(
            jnp.pad(whole, ((0, 0), (0, size))), start, size, 1
        )
        made = Blocks(phi.shape, rows, columns)
    return phi, made, form


@generates(
    "bilevel.linear.ridge_weights",
    "bilevel.linear.models.predict",
    "bilevel.linear.matrices.sparse",
    "bilevel.linear.matrices.Blocks",
)
def ridge_weights(rng, dtype) -> Case:
    phi, made, form = _features(rng, dtype)
    n, d = phi.shape
    y = rng.normal(size=(n,) if rng.random() < 0.5 else (n, 2)).astype(dtype)
    A, t = phi.astype(np.float64), y.astype(np.float64)
    penalty = float(np.linalg.norm(A, 2) ** 2 * 10 ** rng.uniform(-4, 1))
    method = "auto" if form == "sparse" else str(rng.choice(["auto", "primal", "dual", "cg"]))
    w = np.linalg.solve(A.T @ A + penalty * np.eye(d), A.T @ t)

    def call(features, y, penalty, method):
        fit = linear.ridge_weights(features, y, penalty, method=method)
        return fit, models.predict(features, fit.w)

    tolerance = max(1e-3 if dtype == np.float32 else 1e-7, 0)
    check = lambda r: first(
        near("weights", r[0].w, w, 20 * tolerance * 10),
        near("predictions", r[1], A @ w, tolerance * 20),
    )
    kinds = {
        "features": "array" if form == "array" else "record",
        "y": "rows",
        "penalty": "nonnegative",
        "method": "name",
    }
    arguments = {"features": made, "y": jnp.asarray(y), "penalty": penalty, "method": method}
    traced = ("features", "y") if form == "array" else ()
    return Case(call, arguments, check, kinds, traced, vmapped=False)


@generates("bilevel.linear.models.svm_weights")
def svm_weights(rng, dtype) -> Case:
    phi, made, form = _features(rng, dtype)
    y = np.sign(rng.normal(size=len(phi))).astype(dtype)
    cost = float(10 ** rng.uniform(-2, 1) / np.linalg.norm(phi.astype(np.float64), 2) ** 2)
    A, t = phi.astype(np.float64), y.astype(np.float64)

    def slope(w):
        return w - 2 * cost * A.T @ (t * np.maximum(0, 1 - t * (A @ w)))

    def check(fit):
        off = np.linalg.norm(slope(np.asarray(fit.w, np.float64))) / np.linalg.norm(slope(0 * A[0]))
        return at_most("gradient", off, 10 * float(fit.residual) + 1e3 * eps(dtype))

    kinds = {"features": "array" if form == "array" else "record", "y": "rows", "cost": "positive"}
    arguments = {"features": made, "y": jnp.asarray(y), "cost": cost}
    return Case(
        models.svm_weights,
        arguments,
        check,
        kinds,
        ("features", "y") if form == "array" else (),
        vmapped=False,
    )


# ----------------------------------------------------------------------------- stability


@generates("bilevel.lipschitz")
def lipschitz(rng, dtype) -> Case:
    slope = 10 ** rng.uniform(-3, 3)
    m, k = int(rng.choice([1, 3])), int(rng.choice([1, 2]))
    alphas = jnp.asarray(rng.normal(size=m), dtype)
    deltas = jnp.asarray(10 ** rng.uniform(-2, 0, k), dtype)
    truth = np.full((m, k), slope)
    algorithm = lambda alpha: jnp.stack([0.6, 0.8]).astype(alpha.dtype) * slope * alpha
    kinds = {"algorithm": "function", "alphas": "array", "deltas": "array", "batch_size": "count?"}
    arguments = {"algorithm": algorithm, "alphas": alphas, "deltas": deltas, "batch_size": 2}
    rounding = 1e3 * eps(dtype) * 10 * (1 + abs(np.asarray(alphas)).max())
    check = lambda r: near("constants", r, truth, rounding)
    return Case(bilevel.lipschitz, arguments, check, kinds, ("alphas", "deltas"))
