"""Small bilevel problems that the tests share, and what is known of them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from bilevel import Problem


class Case(NamedTuple):
    problem: Problem
    alpha: Any
    w0: Any
    train: Any
    valid: Any

    @property
    def args(self):
        return self.alpha, self.w0, self.train, self.valid


def case(lower, outer, *args):
    return Case(Problem(lower, outer), *jax.tree.map(jnp.asarray, args))


def follower(outer):
    """Return the problem in which ``w`` follows ``alpha``."""
    return Problem(lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2), outer)


# ``w`` follows ``x alpha`` with a little decay: w* = x alpha / 1.1.
SCALED = Problem(
    lambda w, alpha, x: 0.5 * jnp.sum((w - x * alpha) ** 2) + 0.05 * jnp.sum(w**2),
    lambda w, alpha, x: 0.5 * jnp.sum((w - x) ** 2),
)


# ------------------------------------------------------------- mixed features, any solver's problem


def mixed(alpha, x):
    """Features linear in the mixture: sum_i mix_i x_i, [n, p]."""
    return jnp.einsum("i,nip->np", alpha["mix"], x)


def decay(alpha):
    return jnp.exp(alpha["log_decay"])


def logits(w, alpha, batch):
    return mixed(alpha, batch[0]) @ w


def half_squares(outputs, batch):
    return 0.5 * jnp.sum((outputs - batch[1]) ** 2)


def logistic_loss(outputs, batch):
    return jnp.sum(jax.nn.softplus(-batch[1] * outputs))


@functools.cache
def logistic(n=12, p=4):
    """Logistic regression on mixed features with weight decay; ``outer`` depends on alpha too."""

    def lower(w, alpha, batch):
        return logistic_loss(logits(w, alpha, batch), batch) + 0.5 * decay(alpha) * jnp.sum(w**2)

    def outer(w, alpha, batch):
        return logistic_loss(logits(w, alpha, batch), batch) / n + 0.1 * alpha["log_decay"] ** 2

    rng = np.random.default_rng(0)

    def sample():
        x = rng.normal(size=(n, 3, p))
        noisy = x.sum((1, 2)) + 2 * rng.normal(size=n)
        return x, np.where(noisy > 0, 1.0, -1.0)

    alpha = {"mix": np.array([0.5, 0.3, 0.2]), "log_decay": np.array(0.2)}
    return case(lower, outer, alpha, np.full(p, 0.1), sample(), sample())


@functools.cache
def least_squares(n=12, p=4):
    """Ridge regression on mixed features: what :func:`bilevel.ridge` solves."""

    def lower(w, alpha, batch):
        x, y = batch
        return 0.5 * jnp.sum((mixed(alpha, x) @ w - y) ** 2) + 0.5 * decay(alpha) * jnp.sum(w**2)

    def outer(w, alpha, batch):
        x, y = batch
        return jnp.mean((mixed(alpha, x) @ w - y) ** 2)

    rng = np.random.default_rng(1)

    def sample():
        return rng.normal(size=(n, 3, p)), rng.normal(size=n)

    alpha = {"mix": np.array([0.5, 0.3, 0.2]), "log_decay": np.array(-0.5)}
    return case(lower, outer, alpha, np.full(p, 0.1), sample(), sample())


def mixed_ridge_in_numpy(case):
    """Value and hypergradient of ``least_squares``: the closed form of the project's notes, 4(a).

    With M = Phi'Phi + lam I, th = M^-1 Phi'y, r = y - Phi th, rV = yV - Psi th, q = M^-1 Psi' rV:
    dF/da_i = -(2/nV)[rV'Psi_i th + q'Phi_i'r - (Phi q)'Phi_i th], dF/dlog lam = (2/nV) lam q'th.
    """
    (x, y), (xv, yv) = jax.tree.map(lambda a: np.asarray(a, np.float64), (case.train, case.valid))
    mix = np.asarray(case.alpha["mix"], np.float64)
    lam = np.exp(float(case.alpha["log_decay"]))
    phi, psi = (np.einsum("i,nip->np", mix, a) for a in (x, xv))
    inverse = np.linalg.inv(phi.T @ phi + lam * np.eye(phi.shape[1]))
    th = inverse @ phi.T @ y
    r, rv = y - phi @ th, yv - psi @ th
    q = inverse @ psi.T @ rv
    terms = [rv @ xv[:, i] @ th + q @ x[:, i].T @ r - phi @ q @ x[:, i] @ th for i in range(3)]
    grad = {"mix": -2 / len(yv) * np.array(terms), "log_decay": 2 / len(yv) * lam * q @ th}
    return np.mean(rv**2), grad


# --------------------------------------------------------------- rules of derivatives


@jax.custom_vjp
def reverse_once(x):
    """Compute cosh with a reverse pass that ends by a test, as in diffrax's default adjoint."""
    return jnp.cosh(x)


def _loop(x, cotangent):
    body = lambda carry: (carry[0] + 1, carry[1] * jnp.sinh(x))  # noqa: E731
    return (jax.lax.while_loop(lambda carry: carry[0] < 1, body, (0, cotangent))[1],)


reverse_once.defvjp(lambda x: (reverse_once(x), x), _loop)


def lasso_loss(w, alpha, batch):
    return mean_squares(w, alpha, batch) + jnp.exp(alpha) * jnp.sum(jnp.abs(w))


# --------------------------------------------------------------- the problems of the calibration


class Calibration(NamedTuple):
    case: Case
    step_size: float  # 1 / L
    truth: np.ndarray  # [dim alpha], the hypergradient, in float64 by numpy


def mean_squares(w, alpha, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2)


def separate_penalties(w, alpha, batch):
    return mean_squares(w, alpha, batch) + 0.5 * jnp.sum(jnp.exp(alpha) * w**2)


@functools.cache
def quadratic(kind, n=400, p=100):
    """Ridge with one penalty per weight: condition number 6 (``iid``) or some 550 (``hard``)."""
    exponent, penalty = {"iid": (0.0, -2.0), "hard": (-0.7, -6.9)}[kind]
    rng = np.random.default_rng(0)
    w = rng.normal(size=p)

    def sample():
        x = rng.normal(size=(n, p)) * np.arange(1, p + 1) ** exponent
        return _round(x, x @ w + 0.5 * rng.normal(size=n))

    (x, y), (xv, yv) = train, valid = sample(), sample()
    alpha = np.full(p, penalty)
    hessian = x.T @ x / n + np.diag(np.exp(alpha))
    w = np.linalg.solve(hessian, x.T @ y / n)
    adjoint = np.linalg.solve(hessian, xv.T @ (xv @ w - yv) / n)
    truth = -np.exp(alpha) * w * adjoint
    small = case(separate_penalties, mean_squares, alpha, np.zeros(p), train, valid)
    return Calibration(small, 1 / np.linalg.norm(hessian, 2), truth)


def _round(*arrays):
    """To what float32 holds exactly, so that both precisions have the same truth."""
    return tuple(a.astype(np.float32).astype(np.float64) for a in arrays)


def digits_outer(w, alpha, batch):
    x, y = batch
    return jnp.mean(jax.nn.softplus(-y * (x @ w)))


# A penalty for each weight.
LOGISTIC = Problem(
    lambda w, a, batch: digits_outer(w, a, batch) + 0.5 * jnp.sum(jnp.exp(a) * w**2), digits_outer
)


def digits_lower(w, alpha, batch):
    weights = jnp.exp(alpha)[jnp.arange(w.size) % 3]
    return digits_outer(w, alpha, batch) + 0.5 * jnp.sum(weights * w**2)


@functools.cache
def digits(n=300):
    """Even against odd digits (scikit-learn's), logistic regression with three penalties."""
    x, label = load_digits(return_X_y=True)
    (x,) = _round((x - x.mean(0)) / 16)
    y = np.where(label % 2 == 0, 1.0, -1.0)
    train, valid = (x[:n], y[:n]), (x[n : 2 * n], y[n : 2 * n])
    alpha = np.array([-6.0, -5.0, -4.0])
    group = np.arange(64) % 3
    decay = np.exp(alpha)[group]

    def parts(w, x, y):
        s = 1 / (1 + np.exp(y * (x @ w)))
        return x.T @ (-y * s) / n, (x * (s * (1 - s))[:, None]).T @ x / n

    w = np.zeros(64)
    for _ in range(50):
        slope, hessian = parts(w, *train)
        w = w - np.linalg.solve(hessian + np.diag(decay), slope + decay * w)
    slope, hessian = parts(w, *train)
    assert np.linalg.norm(slope + decay * w) < 1e-14
    adjoint = np.linalg.solve(hessian + np.diag(decay), parts(w, *valid)[0])
    truth = np.array([-np.sum((decay * w * adjoint)[group == j]) for j in range(3)])
    smoothness = np.linalg.norm(train[0].T @ train[0] / n, 2) / 4 + decay.max()
    small = case(digits_lower, digits_outer, alpha, np.zeros(64), train, valid)
    return Calibration(small, 1 / smoothness, truth)


# ------------------------------------------------------ more weights than rows, little decay


def soft_problem():
    def lower(w, alpha, batch):
        return mean_squares(w, alpha, batch) + 0.5 * jnp.exp(alpha) * jnp.sum(w**2)

    return Problem(lower, mean_squares)


def soft(seed, log10=None, rows=15, weights=40):
    """Numbers that float32 holds, and the hypergradient by the dual closed form in float64.

    ``log10``: of the penalty, drawn from -8 to -2 by default.
    """
    rng = np.random.default_rng(seed)
    x, xv = rng.normal(size=(2, rows, weights)).astype(np.float32).astype(float)
    y, yv = rng.normal(size=(2, rows)).astype(np.float32).astype(float)
    log10 = rng.uniform(-8, -2) if log10 is None else log10
    alpha = float(np.float32(np.log(10) * log10))
    w0 = rng.normal(size=weights).astype(np.float32).astype(float)
    penalty = np.exp(alpha)
    kernel = x @ x.T / rows + penalty * np.eye(rows)
    w = x.T @ np.linalg.solve(kernel, y) / rows
    v = xv.T @ (xv @ w - yv) / rows
    # w' H^-1 v with w in the row space of x: no division by the small penalty.
    truth = -penalty * np.linalg.solve(kernel, x @ v) @ np.linalg.solve(kernel, y) / rows
    return (alpha, w0, (x, y), (xv, yv)), truth


def quadratics(seed, *, condition=1.0, mixed=1.0, n=512, p=10, q=5):
    """Random quadratic losses of both levels; the outer problem's minimizer and curvatures.

    ``condition`` is that of the rows' covariance, ``mixed`` that of the map from alpha to weights.
    """
    rng = np.random.default_rng(seed)

    def rows():
        x = rng.normal(size=(n, p)) * np.logspace(0, -0.5 * np.log10(condition), p)
        return x, rng.normal(size=n)

    mixing = rng.normal(size=(p, q)) / np.sqrt(p) * np.logspace(0, -0.5 * np.log10(mixed), q)
    (x, y), (xv, yv) = rows(), rows()

    def lower(w, alpha, batch):
        residual = batch[0] @ (w - jnp.asarray(mixing, w.dtype) @ alpha) - batch[1]
        return 0.5 * jnp.mean(residual**2) + 0.05 * jnp.sum(w**2)

    def outer(w, alpha, batch):
        return 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2) + 0.05 * jnp.sum(alpha**2)

    # w*(alpha) = slope alpha + offset
    hessian = x.T @ x / n + 0.1 * np.eye(p)
    slope = np.linalg.solve(hessian, x.T @ x @ mixing / n)
    offset = np.linalg.solve(hessian, x.T @ y / n)
    curvature = slope.T @ xv.T @ xv @ slope / n + 0.1 * np.eye(q)
    gradient = slope.T @ xv.T @ (xv @ offset - yv) / n
    data = jax.tree.map(jnp.asarray, ((x, y), (xv, yv)))
    zeros = jnp.zeros(q), jnp.zeros(p)
    solved = -np.linalg.solve(curvature, gradient)
    return Problem(lower, outer), (*zeros, *data), solved, np.linalg.eigvalsh(curvature)
