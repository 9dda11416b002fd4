"""The four problems of benchopt/benchmark_bilevel, at its sizes, for ``stochastic.py``.

If :func:`bilevel.data.load` does not offer a data set, we use rows of the same number and shape:
random logistic regression for ijcnn1, projected Fashion-MNIST for covtype. MNIST is the original.
Losses are means over the rows of a batch. Weights and hyperparameters are flat vectors, as the
benchmark's solvers require.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import roc_auc_score

import bilevel


class Race(NamedTuple):
    """A problem, its start, and the score of a point. The first score counts."""

    name: str
    problem: bilevel.Problem
    alpha: jax.Array
    w: jax.Array
    train: Any
    valid: Any
    score: Callable[[jax.Array, jax.Array], dict[str, float]]  # of (alpha, w)
    steps: tuple[float, ...]  # the published grids: step sizes of w,
    ratios: tuple[float, ...]  # and those over alpha's


def simulated(seed: int = 0, n: int = 1024, p: int = 100, condition: float = 10) -> Race:
    """Return quadratics with a rank-one matrix for every row, stored dense."""
    rng = np.random.default_rng(seed)

    def half(dim):
        """Draw rows with a second moment that has a spectrum up to 1."""
        basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
        scaled = basis * np.logspace(-0.5 * np.log10(condition), 0, dim)
        return rng.normal(size=(n, dim)) @ scaled @ basis.T

    def side():
        a, b, x = half(p), half(p), rng.normal(size=(n, p))
        u, v = (np.linalg.qr(rng.normal(size=(p, p)))[0] for _ in range(2))
        matrices = a[:, :, None] * a[:, None], b[:, :, None] * b[:, None]
        cross = 0.1 * (x @ u.T)[:, :, None] * (x @ v.T)[:, None]
        linear = rng.normal(size=(n, p)), rng.normal(size=(n, p))
        return tuple(np.asarray(m, np.float32) for m in (*matrices, cross, *linear))

    def loss(w, alpha, batch):
        a, b, c, d, e = batch
        quadratic = 0.5 * (
            jnp.einsum("nij,j->ni", a, w) @ w + jnp.einsum("nij,j->ni", b, alpha) @ alpha
        )
        cross = jnp.einsum("nij,j->ni", c, w) @ alpha
        return jnp.mean(quadratic + cross + d @ w + e @ alpha)

    train, valid = side(), side()
    mean = [np.mean(x, 0, dtype=np.float64) for x in (*train, *valid)]
    a, _, c, d, _, a_v, b_v, c_v, d_v, e_v = mean

    def score(alpha, w):
        alpha = np.asarray(alpha, np.float64)
        w = np.linalg.solve(a, -d - c.T @ alpha)
        adjoint = np.linalg.solve(a, a_v @ w + c_v.T @ alpha + d_v)
        return {"slope": float(np.sum((b_v @ alpha + c_v @ w + e_v - c @ adjoint) ** 2))}

    start = jnp.full(p, -2.0), jnp.zeros(p)
    problem = bilevel.Problem(loss, loss)
    return Race("simulated", problem, *start, train, valid, score, (0.01, 0.1), (0.1, 1, 10, 100))


def ijcnn1(seed: int = 0, rows: tuple[int, int] = (49_990, 91_701)) -> Race:
    """Return logistic regression with a penalty for each weight: 12 numbers and 10 indicators."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=22)

    def side(n, shrink):
        x = np.hstack([rng.normal(size=(n, 12)) / 3, np.eye(10)[rng.integers(0, 10, n)]])
        y = np.where(rng.random(n) < 1 / (1 + np.exp(-shrink * x @ truth)), 1.0, -1.0)
        return x.astype(np.float32), y.astype(np.float32)

    problem = logistic_problem()
    train, valid = side(rows[0], 1.0), side(rows[1], 0.5)
    w, alpha = rng.normal(size=22), np.log(rng.uniform(size=22))
    start = (jnp.asarray(x, jnp.float32) for x in (alpha, w))
    steps, ratios = 2.0 ** np.arange(-4, 2), 10.0 ** np.arange(-2, 0.5, 0.5)
    scored = ValueAndSlope(problem, train, valid)
    return Race("ijcnn1", problem, *start, train, valid, scored, tuple(steps), tuple(ratios))


def logistic_problem() -> bilevel.Problem:
    """Return logistic regression with a penalty for each weight."""

    def data_loss(w, batch):
        x, y = batch
        return jnp.mean(jax.nn.softplus(-y * (x @ w)))

    return bilevel.Problem(
        lambda w, alpha, batch: data_loss(w, batch) + 0.5 * jnp.sum(jnp.exp(alpha) * w**2),
        lambda w, alpha, batch: data_loss(w, batch),
    )


class ValueAndSlope:
    """The outer loss at the lower solution, and its squared slope, in float64."""

    def __init__(self, problem, train, valid):
        fn = bilevel.hypergradient(problem, bilevel.implicit(), diagnostics=False)
        with jax.enable_x64(True):
            self.compiled = jax.jit(fn)
            self.data = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (train, valid))

    def both(self, alpha, w):
        """Return the value and the slope."""
        with jax.enable_x64(True):
            hyper = self.compiled(*(jnp.asarray(x, jnp.float64) for x in (alpha, w)), *self.data)
            return float(hyper.value), np.array(hyper.grad)

    def __call__(self, alpha, w):
        value, grad = self.both(alpha, w)
        return {"value": value, "slope": float(grad @ grad)}


def _softmax_loss(w, x, y):
    """Return the cross-entropy of every row; ``w`` flat, ``y`` one-hot."""
    outputs = x @ w.reshape(x.shape[1], y.shape[1])
    return jax.nn.logsumexp(outputs, 1) - jnp.sum(y * outputs, 1)


def _mean_loss(w, alpha, batch):
    return jnp.mean(_softmax_loss(w, *batch))


def _error(w, x, y) -> float:
    w = np.asarray(w).reshape(x.shape[1], -1)
    return float(np.mean(np.argmax(x @ w, 1) != np.argmax(y, 1)))


def covtype(seed: int = 0, rows: tuple[int, int] = (371_847, 92_962)) -> Race:
    """Return softmax regression on 54 features and 7 classes, with a penalty for each class."""
    rng = np.random.default_rng(seed)
    dataset = bilevel.data.load("fashion-mnist")
    x = np.concatenate([dataset.x_train, dataset.x_test])
    y = np.concatenate([dataset.y_train, dataset.y_test])
    x = x.reshape(len(x), -1) @ rng.normal(size=(784, 54)) / 28
    x, y = x[y < 7], y[y < 7]
    chosen = rng.integers(0, len(x), sum(rows))
    x = x[chosen] + 0.3 * x.std(0) * rng.normal(size=(sum(rows), 54))
    x = ((x - x[: rows[0]].mean(0)) / x[: rows[0]].std(0)).astype(np.float32)
    y = np.eye(7, dtype=np.float32)[y[chosen]]
    train, valid = (x[: rows[0]], y[: rows[0]]), (x[rows[0] :], y[rows[0] :])

    def lower(w, alpha, batch):
        penalty = jnp.exp(alpha) @ jnp.sum(w.reshape(54, 7) ** 2, 0)
        return _mean_loss(w, alpha, batch) + 0.5 * penalty

    start = jnp.full(7, -2.0), jnp.zeros(54 * 7)
    steps, ratios = 2.0 ** np.arange(-5, 1), (0.01, 0.1, 1.0, 10.0)

    score = lambda alpha, w: {"error": _error(w, *valid)}  # noqa: E731
    problem = bilevel.Problem(lower, _mean_loss)
    return Race("covtype", problem, *start, train, valid, score, tuple(steps), ratios)


def cleaning(
    corruption: float = 0.5, seed: int = 0, rows: tuple[int, int] = (20_000, 5000)
) -> Race:
    """Return softmax regression on MNIST with some labels redrawn and a weight for every label."""
    rng = np.random.default_rng([seed, round(100 * corruption)])
    dataset = bilevel.data.load("mnist")
    x, y, x_test, y_test = dataset[:4]
    order = rng.permutation(len(x))[: sum(rows)]
    x, y = x[order].reshape(sum(rows), -1), y[order].copy()
    centre, width = x[: rows[0]].mean(0), x[: rows[0]].std(0)
    width = np.where(width > 0, width, 1)
    wrong = rng.random(rows[0]) < corruption
    y[: rows[0]][wrong] = rng.integers(0, 10, wrong.sum())

    def scaled(x):
        return ((x - centre) / width).astype(np.float32)

    one_hot = np.eye(10, dtype=np.float32)
    x, y = scaled(x), one_hot[y]
    train = x[: rows[0]], y[: rows[0]], np.arange(rows[0], dtype=np.int32)
    valid = x[rows[0] :], y[rows[0] :]
    test = scaled(x_test.reshape(len(x_test), -1)), one_hot[y_test]

    def lower(w, alpha, batch):
        x, y, index = batch
        weights = jax.nn.sigmoid(alpha[index])
        return jnp.mean(weights * _softmax_loss(w, x, y)) + 0.2 * jnp.sum(w**2)

    def score(alpha, w):
        kept = 1 / (1 + np.exp(-np.asarray(alpha, np.float64)))
        auc = roc_auc_score(wrong, -kept) if np.isfinite(kept).all() else float("nan")
        return {"error": _error(w, *test), "valid": _error(w, *valid), "auc": float(auc)}

    start = jnp.full(rows[0], -2.0), jnp.zeros(7840)
    problem = bilevel.Problem(lower, _mean_loss)
    grids = (1e-3, 1e-2, 0.1, 1.0), (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
    name = f"cleaning {100 * corruption:.0f} %"
    return Race(name, problem, *start, train, valid, score, *grids)


RACES: dict[str, Callable[[int], Race]] = {
    "simulated": simulated,
    "ijcnn1": ijcnn1,
    "covtype": covtype,
    **{f"cleaning{share}": functools.partial(cleaning, share / 100) for share in (50, 70, 90)},
}
