"""Kernels as functions of their inputs: their matrices, mixtures, scores, and searches of them."""

import jax.numpy as jnp
import numpy as np

import ntk
from benchmarks.reliability.case import Case, eps, first, near
from benchmarks.reliability.kernels import inputs
from benchmarks.reliability.registry import generates
from bilevel.spaces import kernel_function_space, kernel_mixture_space
from ntk import scores


def cubic(x1, x2):
    return (1 + x1 @ x2.T) ** 3


def linear(x1, x2):
    return x1 @ x2.T


def _wide(x):
    x = np.asarray(x, np.float64)
    return (1 + x @ x.T) ** 3, x @ x.T


@generates("ntk.kernel_matrix")
def kernel_matrix(rng, dtype) -> Case:
    x = inputs(rng, dtype)
    truth = _wide(x)[0]

    def check(K):
        return near("matrix", K, truth, 1e3 * eps(dtype))

    arguments = {"kernel": cubic, "x1": x, "get": "ntk"}
    kinds = {"kernel": "function", "x1": "array", "get": "name"}
    return Case(ntk.kernel_matrix, arguments, check, kinds, ("x1",))


@generates("ntk.scores.of_kernel")
def of_kernel(rng, dtype) -> Case:
    x = inputs(rng, dtype)
    y = jnp.asarray(rng.integers(2, size=len(x)))
    values = np.linalg.eigvalsh(_wide(x)[0])

    def call(K, y, x):
        return scores.of_kernel(K, y, x=x)

    def check(by_score):
        # The smallest one is known to a rounding of the largest, here and there.
        least, truth = (float(v) + values[-1] for v in (by_score["min_eigenvalue"], values[0]))
        rounding = 1e3 * eps(dtype)
        return first(
            near("eigen_nas", by_score["eigen_nas"], values.mean(), rounding),
            near("min_eigenvalue and the largest", least, truth, rounding),
        )

    kinds = {"K": "function", "y": "labels", "x": "array"}
    return Case(call, {"K": cubic, "y": y, "x": x}, check, kinds, ("x",))


def _ridge(space, alpha, x, y):
    train = space.inputs(x), y
    w, _ = space.solver.run(space.problem.lower, alpha, jnp.zeros_like(y), (), train)
    return w, space.problem.outer(w, alpha, train)


@generates("bilevel.spaces.kernel_function_space")
def function_space(rng, dtype) -> Case:
    x, scale = inputs(rng, dtype), jnp.asarray(rng.uniform(0.5, 2), dtype)
    y = jnp.asarray(np.sign(rng.normal(size=len(x))), dtype)
    K = float(scale) * _wide(x)[0]

    def call(kernel, scale, x, y):
        space = kernel_function_space(kernel, 1.0)
        return _ridge(space, space.start() | {"kernel": scale}, x, y)

    def check(outputs):
        w = np.asarray(outputs[0], np.float64)
        rounding = 1e4 * eps(dtype) * (np.abs(K).max() * np.abs(w).max() * len(w) + 1)
        return near("coefficients", K @ w + 0.1 * w, y, rounding)

    arguments = {"kernel": lambda a, x1, x2: a * cubic(x1, x2), "scale": scale, "x": x, "y": y}
    kinds = {"kernel": "function", "scale": "values", "x": "array", "y": "values"}
    return Case(call, arguments, check, kinds, ("scale", "x", "y"), vmapped=False)


@generates("bilevel.spaces.kernel_mixture_space")
def mixture_space(rng, dtype) -> Case:
    x, alpha = inputs(rng, dtype), jnp.asarray(rng.dirichlet(np.ones(2)), dtype)
    y = jnp.asarray(np.sign(rng.normal(size=len(x))), dtype)
    K = sum(float(a) * K for a, K in zip(alpha, _wide(x), strict=True))

    def call(alpha, x, y):
        space = kernel_mixture_space({"cubic": cubic, "linear": linear})
        return _ridge(space, space.start() | {"mixture": alpha}, x, y)

    def check(outputs):
        w = np.asarray(outputs[0], np.float64)
        rounding = 1e4 * eps(dtype) * (np.abs(K).max() * np.abs(w).max() * len(w) + 1)
        return near("coefficients", K @ w + 0.1 * w, y, rounding)

    kinds = {"alpha": "values", "x": "array", "y": "values"}
    return Case(
        call, {"alpha": alpha, "x": x, "y": y}, check, kinds, ("alpha", "x", "y"), vmapped=False
    )
