"""``ntk.bounds``: bounds on the right side of the eigenvalue, constants by brute force."""

import jax.numpy as jnp
import numpy as np

import ntk
from benchmarks.reliability.case import Case, at_most, eps, first, near
from benchmarks.reliability.eigenvalues import matrix
from benchmarks.reliability.kernels import (
    ALL,
    KINKED,
    SMOOTH,
    expectation,
    in_numpy,
    slope_in_numpy,
)
from benchmarks.reliability.registry import generates
from ntk import bounds
from ntk.bounds import constants

_Z = np.linspace(-12, 12, 4801)
_NAMES = [*SMOOTH, *KINKED]


def _name(rng) -> str:
    return str(rng.choice(_NAMES))


@generates("ntk.bounds.diagonal_upper_bound", "ntk.bounds.frobenius_upper_bound")
def upper_bounds(rng, dtype) -> Case:
    K = matrix(rng, dtype)
    values = np.linalg.eigvalsh(np.asarray(K, np.float64))
    rounding = 50 * len(K) * eps(dtype) * abs(values).max()
    call = lambda K: (bounds.diagonal_upper_bound(K), bounds.frobenius_upper_bound(K))
    check = lambda r: first(
        *(at_most("eigenvalue and bound", values[0], float(b.value) + rounding) for b in r)
    )
    return Case(call, {"K": K}, check, {"K": "matrix"}, ("K",), vmapped=False)


@generates("ntk.bounds.eigen_nas_as_printed")
def eigen_nas(rng, dtype) -> Case:
    K, d = matrix(rng, dtype), int(rng.integers(1, 100))
    truth = np.trace(np.asarray(K, np.float64)) / d
    size = float(abs(K).max()) * len(K) / d
    check = lambda r: at_most("value", abs(float(r.value) - truth), 50 * eps(dtype) * size)
    kinds = {"K": "matrix", "d": "positive"}
    return Case(bounds.eigen_nas_as_printed, {"K": K, "d": d}, check, kinds, ("K",), vmapped=False)


@generates("ntk.bounds.constants.hermite_coefficients")
def hermite_coefficients(rng, dtype) -> Case:
    name, variance, terms = _name(rng), float(10 ** rng.uniform(-2, 1)), int(rng.choice([2, 8]))
    weight = np.exp(-(_Z**2) / 2)
    weight /= weight.sum()
    values = in_numpy(name)(np.sqrt(variance) * _Z)
    basis, truth = [np.ones_like(_Z), _Z], []
    for k in range(2, terms):
        basis.append((_Z * basis[-1] - np.sqrt(k - 1) * basis[-2]) / np.sqrt(k))
    truth = [weight @ (values * h) for h in basis[:terms]]
    call = lambda activation, **k: constants.hermite_coefficients(activation, **k)
    kinds = {"activation": "function", "variance": "positive", "terms": "count"}
    arguments = {"activation": ALL[name], "variance": variance, "terms": terms}
    check = lambda r: near(name, r, truth, 1e-4)
    return Case(call, arguments, check, kinds)


@generates("ntk.bounds.constants.betas", "ntk.bounds.table1")
def betas(rng, dtype) -> Case:
    name, variance = _name(rng), float(10 ** rng.uniform(-2, 1))
    s, slope = in_numpy(name), slope_in_numpy(name)
    beta1 = 2 * expectation(s, s, variance, variance, variance) / variance
    beta2 = 2 * expectation(slope, slope, variance, variance, variance)

    def call(activation, variance):
        return constants.betas(activation, variance), bounds.table1(activation, variance)

    def check(r):
        one, all_of_them = r
        return first(
            near("beta1", one.beta1, beta1, 1e-3),
            near("beta2", one.beta2, beta2, 3e-3),
            at_most("beta1 and its supremum", float(one.beta1), float(all_of_them.beta1) + 1e-4),
            at_most("beta2 and its supremum", float(one.beta2), float(all_of_them.beta2) + 1e-4),
            at_most("infimum of beta3", float(all_of_them.beta3), float(one.beta3) + 1e-4),
        )

    kinds = {"activation": "function", "variance": "positive"}
    return Case(call, {"activation": ALL[name], "variance": variance}, check, kinds)


@generates("ntk.bounds.constants.activation_lipschitz")
def lipschitz(rng, dtype) -> Case:
    name = _name(rng)
    truth = abs(slope_in_numpy(name)(np.linspace(-30, 30, 60_001))).max()
    check = lambda r: near(name, r, truth, 1e-4)
    return Case(
        constants.activation_lipschitz, {"activation": ALL[name]}, check, {"activation": "function"}
    )


def _network(rng, dtype):
    names = [_name(rng) for _ in range(int(rng.choice([1, 2])))]
    x = rng.normal(size=(4, 3))
    x = jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), dtype)
    activations = [ALL[n] for n in names]
    return x, activations


@generates("ntk.bounds.hermite_lower_bound", "ntk.bounds.schur_lower_bound")
def lower_bounds(rng, dtype) -> Case:
    x, activations = _network(rng, dtype)
    K = np.asarray(ntk.network_kernel(x, activations=activations).ntk, np.float64)
    truth = np.linalg.eigvalsh(K)
    rounding = 200 * eps(dtype) * truth[-1]

    def call(x, activations):
        options = {"activations": activations}
        return bounds.hermite_lower_bound(x, **options), bounds.schur_lower_bound(x, **options)

    check = lambda r: first(
        *(at_most("bound and eigenvalue", float(b.value), truth[0] + rounding) for b in r)
    )
    kinds = {"x": "array", "activations": "sequence"}
    return Case(call, {"x": x, "activations": activations}, check, kinds, ("x",), vmapped=False)


@generates(
    "ntk.bounds.zhu_theorem1_as_printed",
    "ntk.bounds.zhu_theorem2_as_printed",
    "ntk.bounds.zhu_variance_as_printed",
)
def zhu(rng, dtype) -> Case:
    depth = int(rng.choice([2, 3]))
    activations = [[ntk.relu, ntk.leaky_relu(0.1)][rng.integers(2)] for _ in range(depth)]
    n, d, C = int(rng.integers(1, 100)), int(rng.integers(1, 20)), float(10 ** rng.uniform(-1, 1))
    etas = [a.kink[0] for a in activations]
    eta = max(etas)
    variance = 3 * (1 + eta**2) * (2 + eta**2) ** (depth - 2)
    beta = [1 + e**2 for e in etas]  # all three, for slopes 1 and eta
    mu1 = (1 + etas[0]) / 2
    lower = 2 * mu1**2 * C * n / d * np.prod(beta[1:])

    def call(n, d, activations, C):
        return (
            bounds.zhu_theorem1_as_printed(n, d, activations=activations, C=C),
            bounds.zhu_theorem2_as_printed(n, d, activations=activations, C=C),
            bounds.zhu_variance_as_printed(activations),
        )

    def check(r):
        return first(
            near("theorem 1, lower", r[0].lower.value, lower, 1e-3),
            near("theorem 2, lower", r[1].lower.value, C * n / d * np.prod(beta[1:]), 1e-3),
            near("variance", r[2].value, variance, 1e-5),
        )

    kinds = {"n": "positive", "d": "positive", "activations": "sequence", "C": "positive"}
    return Case(call, {"n": n, "d": d, "activations": activations, "C": C}, check, kinds)


@generates("ntk.bounds.zhu_theorem3")
def zhu_theorem3(rng, dtype) -> Case:
    phi = rng.normal(size=(5, 9))
    K = jnp.asarray((phi @ phi.T).astype(dtype))
    y = jnp.asarray(np.sign(rng.normal(size=5)), dtype)
    depth, delta, C = int(rng.choice([1, 2])), float(rng.uniform(0.01, 0.3)), 1.0
    A, t = np.asarray(K, np.float64), np.asarray(y, np.float64)
    values, n = np.linalg.eigvalsh(A), 5
    growth = np.sqrt(depth + 1) * 4.0**depth
    tail = np.sqrt(np.log(1 / delta) / n)
    truth = growth * np.sqrt(t @ t / values[0] / n) + tail
    aware = growth * np.sqrt(t @ np.linalg.solve(A, t) / n) + tail

    def call(K, y, activations, delta, C):
        options = {"activations": activations, "delta": delta, "C": C}
        plain = bounds.zhu_theorem3(K, y, **options)
        return plain, bounds.zhu_theorem3(K, y, **options, label_aware=True)

    tolerance = 1e3 * eps(dtype) * values[-1] / values[0] + 1e-4
    check = lambda r: near("values", [b.value for b in r], [truth, aware], tolerance)
    kinds = {
        "K": "matrix",
        "y": "rows",
        "activations": "sequence",
        "delta": "fraction",
        "C": "positive",
    }
    arguments = {"K": K, "y": y, "activations": [ntk.relu] * depth, "delta": delta, "C": C}
    return Case(call, arguments, check, kinds, ("K", "y"), vmapped=False)
