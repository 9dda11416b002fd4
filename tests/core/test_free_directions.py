"""Free directions of the lower loss: an estimate if the hypergradient does not depend on them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DTYPES, flatten, long_except

import bilevel


def springs(w, alpha, batch):
    """Penalize distances of points, all pairs, that differ from ``batch`` times exp(alpha)."""
    i, j = np.triu_indices(w.shape[0], 1)
    squares = jnp.sum((w[i] - w[j]) ** 2, -1)
    return jnp.mean((squares - jnp.exp(alpha[0]) * batch) ** 2 * jnp.exp(alpha[1] * batch))


def cross_entropy(w, alpha, batch):
    x, y = batch
    logits = x @ w["matrix"] + w["shift"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))


def decayed(w, alpha, batch):
    """Penalize the matrix, and not the shifts, so a common shift is free."""
    return cross_entropy(w, alpha, batch) + jnp.sum(jnp.exp(alpha) * jnp.sum(w["matrix"] ** 2, 1))


def points(rng):
    w = rng.normal(size=(5, 2))
    i, j = np.triu_indices(5, 1)
    distances = np.sum((w[i] - w[j]) ** 2, 1) * rng.uniform(0.8, 1.2, size=10)
    return np.array([0.1, -0.2]), w, distances, None


def classes(rng):
    def rows():
        return rng.normal(size=(40, 3)), rng.integers(4, size=40)

    w = {"matrix": 0.1 * rng.normal(size=(3, 4)), "shift": rng.normal(size=4)}
    return np.full(3, -3.0), w, rows(), rows()


def logits(rng):
    """Return free logits, one for each class: the lower loss uses their differences only."""
    return np.zeros(4), rng.normal(size=4), rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))


def smoothed(w, alpha, batch):
    weights = batch + 0.1 * jax.nn.softmax(alpha)
    return -jnp.vdot(weights, jax.nn.log_softmax(w))


PROBLEMS = {
    "points": (springs, lambda w, alpha, batch: jnp.sum((w - w.mean(0)) ** 2), points),
    "classes": (decayed, cross_entropy, classes),
    "logits": (smoothed, lambda w, a, batch: -jnp.vdot(batch, jax.nn.log_softmax(w)), logits),
}
REFUSED = {
    "shift": (springs, lambda w, alpha, batch: jnp.sum(w[0]), points),
    "shift of classes": (decayed, lambda w, alpha, batch: jnp.sum(w["shift"] ** 2), classes),
    "one logit": (smoothed, lambda w, alpha, batch: w[0], logits),
    "drift": (  # no minimum
        lambda w, alpha, batch: (w[0] - alpha[0]) ** 2 + 1e-3 * w[1],
        lambda w, alpha, batch: w[0] ** 2,
        lambda rng: (np.ones(1), np.ones(2), None, None),
    ),
}
SOLVERS = {
    "exact": bilevel.implicit(),
    "short": bilevel.implicit(bilevel.unrolled(0.1, 5)),
    "unrolled": bilevel.unrolled(0.1, 20),
}


def cast(args, dtype):
    def one(x):
        return jnp.asarray(x, dtype if np.asarray(x).dtype.kind == "f" else None)

    return jax.tree.map(one, args)


@functools.cache
def compiled(name, solver):
    lower, outer, _ = (PROBLEMS | REFUSED)[name]
    return jax.jit(bilevel.hypergradient(bilevel.Problem(lower, outer), SOLVERS[solver]))


@functools.cache
def minimized(lower):
    solver = bilevel.newton(tol=0.0)
    return jax.jit(lambda alpha, w0, train: solver.run(lower, alpha, w0, (), train)[0])


@functools.cache
def truth(name, seed):
    """Return the hypergradient by numpy, with the pseudo-inverse of JAX's Hessian."""
    lower, outer, make = PROBLEMS[name]
    alpha, w0, train, valid = cast(make(np.random.default_rng(seed)), DTYPES[-1])
    w = minimized(lower)(alpha, w0, train)
    flat, unravel = jax.flatten_util.ravel_pytree(w)

    def slope(flat, alpha):
        return jax.flatten_util.ravel_pytree(jax.grad(lower)(unravel(flat), alpha, train))[0]

    def step(flat):
        """Newton's, by the pseudo-inverse."""
        values, vectors = jnp.linalg.eigh(jax.jacfwd(slope)(flat, alpha))
        return flat - vectors[:, -rank:] @ ((vectors.T @ slope(flat, alpha)) / values)[-rank:]

    rank = {"points": 7, "classes": 15, "logits": 3}[name]
    flat = step(step(flat))
    hessian = np.asarray(jax.jacfwd(slope)(flat, alpha), float)
    cross = np.asarray(jax.jacfwd(slope, 1)(flat, alpha), float)
    force = flatten(jax.grad(outer)(unravel(flat), alpha, valid))
    values, vectors = np.linalg.eigh(hessian)
    assert values[-rank] > 1e-3 * values[-1] and abs(values[-rank - 1]) < 1e-5 * values[-1]
    values, vectors = values[-rank:], vectors[:, -rank:]
    return -cross.T @ (vectors @ ((vectors.T @ force) / values))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "solver", "dtype"),
    long_except([("logits", "exact", DTYPES[-1])], [*itertools.product(PROBLEMS, SOLVERS, DTYPES)]),
)
def test_free_directions_that_do_not_matter_leave_an_estimate(name, solver, dtype):
    made, known, high, seeds = PROBLEMS[name][2], 0, 0, 16
    for seed in range(seeds):
        hyper = compiled(name, solver)(*cast(made(np.random.default_rng(seed)), dtype))
        error = np.linalg.norm(flatten(hyper.grad) - truth(name, seed))
        size = np.linalg.norm(truth(name, seed))
        assert error <= 3 * hyper.info.error_estimate + 100 * np.finfo(dtype).eps * size
        assert not hyper.info.converged or error < 0.01 * size
        if hyper.info.reason:
            continue
        known += 1
        high += hyper.info.error_estimate > 10 * error + 1e-5 * size
        assert hyper.info.converged or solver != "exact"
    # Rounding decides for one seed in eight whether Newton settles, and it may give the free
    # direction of four logits a curvature. Which seeds differs between CPUs.
    assert high <= (dtype == np.float32)  # by rounding: 0.03 % of the norm, at most once
    assert known >= seeds * (0.5 if name == "logits" else 0.7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    long_except(
        [*itertools.product(("one logit", "drift"), DTYPES[-1:])],
        [*itertools.product(REFUSED, DTYPES)],
    ),
)
def test_free_directions_that_matter_have_no_estimate(name, dtype):
    made, explained, seeds = REFUSED[name][2], 0, 12
    for seed in range(seeds):
        info = compiled(name, "exact")(*cast(made(np.random.default_rng(seed)), dtype)).info
        assert np.isinf(info.error_estimate) and not info.converged
        explained += "free" in bilevel.explain(info)
    assert explained >= seeds * (0.5 if name == "one logit" else 0.7)  # as above
