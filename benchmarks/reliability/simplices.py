"""Geometries of alpha and discrete choices: on the set, the right point, nothing swallowed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats

import bilevel
from benchmarks.reliability.case import Case, at_most, eps, first, near, that
from benchmarks.reliability.registry import generates
from bilevel.discretize import factors

_SHAPES = ((2,), (5,), (3, 4))


def point(rng, dtype, shape=None, corner: bool = True) -> jnp.ndarray:
    """A point of the simplex: inside, near a corner, or with zeros."""
    shape = shape or _SHAPES[rng.integers(len(_SHAPES))]
    sharp = 10 ** rng.uniform(-1, 1.5 if corner else 0.5)
    logits = sharp * rng.normal(size=shape)
    alpha = np.exp(logits - logits.max(-1, keepdims=True))
    if corner and rng.random() < 0.3:
        alpha[..., 0] = 0
    alpha = alpha.astype(dtype)
    return jnp.asarray(alpha / alpha.sum(-1, keepdims=True))


def _slope(rng, dtype, shape, most: float = 20):
    return jnp.asarray(rng.normal(size=shape) * 10 ** rng.uniform(-6, most), dtype)


def _on_the_simplex(alpha, dtype) -> str:
    alpha = np.asarray(alpha, np.float64)
    return first(
        at_most("an entry below 0", -alpha, 0.0),
        at_most("sums off by", abs(alpha.sum(-1) - 1), 8 * eps(dtype) * alpha.shape[-1]),
    )


def _update(optimizer, alpha, gradient):
    updates, _ = optimizer.update(gradient, optimizer.init(alpha), alpha)
    return optax.apply_updates(alpha, updates)


_GEOMETRY = {"alpha": "simplex", "gradient": "values"}
_LIMITS = ("gradient: inf",)  # alpha then goes to the corner, or away from it: a right answer


@generates("bilevel.exponentiate")
def exponentiate(rng, dtype) -> Case:
    alpha = point(rng, dtype)
    gradient = _slope(rng, dtype, alpha.shape)
    optimizer = optax.chain(optax.sgd(0.5), bilevel.exponentiate())
    a, g = np.asarray(alpha, np.float64), np.asarray(gradient, np.float64)
    with np.errstate(divide="ignore"):
        logs = np.log(a) - 0.5 * g
    truth = np.exp(logs - logs.max(-1, keepdims=True))
    truth /= truth.sum(-1, keepdims=True)
    size = 0.5 * abs(g).max()  # exponents are rounded: their error is relative in alpha
    check = lambda r: first(
        _on_the_simplex(r, dtype), near("alpha", r, truth, 20 * eps(dtype) * (1 + size))
    )
    call = functools.partial(_update, optimizer)
    return Case(
        call,
        {"alpha": alpha, "gradient": gradient},
        check,
        _GEOMETRY,
        ("alpha", "gradient"),
        fine=_LIMITS,
    )


@generates("bilevel.project")
def project(rng, dtype) -> Case:
    onto = str(rng.choice(["simplex", "box"]))
    alpha = point(rng, dtype)
    gradient = _slope(rng, dtype, alpha.shape)
    a, g = np.asarray(alpha, np.float64), np.asarray(gradient, np.float64)
    moved = np.asarray(a - 0.5 * g, dtype).astype(np.float64)
    truth = np.clip(moved, 0, 1) if onto == "box" else _projected(moved)

    def call(alpha, gradient, onto):
        return _update(optax.chain(optax.sgd(0.5), bilevel.project(onto)), alpha, gradient)

    check = lambda r: first(
        "" if onto == "box" else _on_the_simplex(r, dtype),
        near("alpha", r, truth, 20 * eps(dtype) * (1 + min(abs(moved).max(), 1e3))),
    )
    kinds = _GEOMETRY | {"onto": "name"}
    fine = (*_LIMITS, "onto: a function")
    fine += ("alpha: off the simplex", "alpha: one axis more") if onto == "box" else ()
    arguments = {"alpha": alpha, "gradient": gradient, "onto": onto}
    return Case(call, arguments, check, kinds, ("alpha", "gradient"), fine=fine)


def _projected(points: np.ndarray) -> np.ndarray:
    """By sorting, in float64."""
    points = points - points.max(-1, keepdims=True)
    ordered = -np.sort(-points, axis=-1)
    sums = np.cumsum(ordered, axis=-1) - 1
    k = np.arange(1, points.shape[-1] + 1)
    count = (ordered > sums / k).sum(-1, keepdims=True)
    return np.maximum(points - np.take_along_axis(sums, count - 1, -1) / count, 0)


@generates("bilevel.softmax")
def softmax(rng, dtype) -> Case:
    alpha = point(rng, dtype, corner=False)
    gradient = _slope(rng, dtype, alpha.shape, most=8)
    a, g = np.asarray(alpha, np.float64), np.asarray(gradient, np.float64)
    pulled = a * (g - (a * g).sum(-1, keepdims=True))
    truth = scipy.special.softmax(np.log(a) - 0.5 * pulled, -1)
    size = 0.5 * abs(a * g).max()
    check = lambda r: first(
        _on_the_simplex(r, dtype), near("alpha", r, truth, 50 * eps(dtype) * (1 + size))
    )
    call = functools.partial(_update, bilevel.softmax(optax.sgd(0.5)))
    return Case(
        call,
        {"alpha": alpha, "gradient": gradient},
        check,
        _GEOMETRY,
        ("alpha", "gradient"),
        fine=_LIMITS,
    )


@generates("bilevel.softmax options")
def softmax_options(rng, dtype) -> Case:
    alpha = jnp.asarray([0.25, 0.75], dtype)
    call = lambda optimizer: _update(bilevel.softmax(optimizer), alpha, alpha)
    return Case(
        call,
        {"optimizer": optax.sgd(0.1)},
        lambda r: _on_the_simplex(r, dtype),
        {"optimizer": "function"},
    )


@generates("bilevel.tangent")
def tangent(rng, dtype) -> Case:
    gradient = _slope(rng, dtype, _SHAPES[rng.integers(len(_SHAPES))])
    g = np.asarray(gradient, np.float64)
    call = lambda gradient: bilevel.tangent().update(gradient, optax.EmptyState())[0]
    check = lambda r: near("gradient", r, g - g.mean(-1, keepdims=True), 10 * eps(dtype))
    return Case(
        call, {"gradient": gradient}, check, {"gradient": "values"}, ("gradient",), fine=_LIMITS
    )


# ----------------------------------------------------------------------------- discrete choices


@generates("bilevel.argmax")
def argmax(rng, dtype) -> Case:
    alpha = point(rng, dtype)
    check = lambda r: near("index", r, np.asarray(alpha).argmax(-1), 0)
    fine = ("alpha: inf", "alpha: none")  # infinity is the largest; None is a tree without leaves
    return Case(bilevel.argmax, {"alpha": alpha}, check, {"alpha": "numbers"}, (), fine=fine)


@generates("bilevel.top_k", "bilevel.rank_by_alpha")
def top_k(rng, dtype) -> Case:
    alpha = point(rng, dtype)
    h = alpha.shape[-1]
    k = int(rng.integers(1, h + 1))
    order = np.argsort(-np.asarray(alpha), axis=-1, kind="stable")
    call = lambda alpha, k: (bilevel.top_k(alpha, k), bilevel.rank_by_alpha(alpha))
    check = lambda r: first(near("top", r[0], order[..., :k], 0), near("order", r[1], order, 0))
    fine = ("alpha: inf", "alpha: none")
    kinds = {"alpha": "numbers", "k": "count"}
    return Case(call, {"alpha": alpha, "k": k}, check, kinds, fine=fine)


@generates("bilevel.discretize.factors.factor_simplex")
def factor_simplex(rng, dtype) -> Case:
    alpha = point(rng, dtype, corner=False)
    h = alpha.shape[-1]
    i = int(rng.integers(h))
    vertex = np.eye(h)[i]

    def check(gamma):
        a, gamma = np.asarray(alpha, np.float64), np.asarray(gamma, np.float64)
        again = a[..., i, None] * vertex + (1 - a[..., i, None]) * gamma
        return first(
            near("alpha", again, a, 20 * eps(dtype)),
            near("gamma_i", gamma[..., i] * 1.0, np.zeros(a.shape[:-1]), 0),
        )

    kinds = {"alpha": "simplex", "i": "whole"}
    fine = ("alpha: one axis more",)
    return Case(
        factors.factor_simplex, {"alpha": alpha, "i": i}, check, kinds, ("alpha",), fine=fine
    )


@generates("bilevel.condition_six")
def condition_six(rng, dtype) -> Case:
    n, h = 40, int(rng.choice([2, 4]))
    outputs = jnp.asarray(rng.normal(size=(n, h)) * 10 ** rng.uniform(-3, 3), dtype)
    alpha = point(rng, dtype, (h,), corner=False)
    targets = jnp.asarray(np.asarray(outputs) @ np.asarray(alpha) + rng.normal(size=n), dtype)
    f, a, y = (np.asarray(x, np.float64) for x in (outputs, alpha, targets))
    L = 0.5 * ((f - y[:, None]) ** 2).mean(0)
    gammas = (1 - np.eye(h)) * a / (1 - a)[:, None]
    D = 0.5 * ((f - f @ gammas.T) ** 2).mean(0)
    slack = ((f @ a - y)[:, None] * (f - (f @ a)[:, None])).mean(0)

    def check(verdict):
        best = int(verdict.argmax)
        tolerance = 200 * eps(dtype) * (1 + 1 / (1 - a).min())
        return first(
            near("L", verdict.L, L, tolerance),
            near("D", verdict.D, D, tolerance),
            that(best == a.argmax(), f"argmax {best} of {a}"),
            at_most(
                "stationarity",
                max(-slack.min(), 0) - float(verdict.stationarity),
                0,
                1e3 * tolerance * abs(slack).max(),
            ),
            that(verdict.trust < 1 or L[best] <= L.min() * (1 + 1e-6), f"trust, and L is {L}"),
        )

    kinds = {"outputs": "rows", "alpha": "simplex", "targets": "rows?", "confidence": "fraction"}
    arguments = {"outputs": outputs, "alpha": alpha, "targets": targets, "confidence": 0.95}
    return Case(bilevel.condition_six, arguments, check, kinds, ("outputs", "alpha", "targets"))


@generates("bilevel.rank_agreement")
def rank_agreement(rng, dtype) -> Case:
    m = int(rng.choice([5, 12]))
    a, b = (jnp.asarray(np.round(rng.normal(size=m), 1), dtype) for _ in range(2))
    call = functools.partial(bilevel.rank_agreement, resamples=20)
    tau, rho = scipy.stats.kendalltau(a, b)[0], scipy.stats.spearmanr(a, b)[0]

    def check(r):
        return first(
            near("tau", r.kendall, tau, 30 * eps(dtype)),
            near("rho", r.spearman, rho, 30 * eps(dtype)),
            at_most("interval", r.kendall_interval[0], tau, 1e-5),
            at_most("interval", tau, r.kendall_interval[1], 1e-5),
        )

    kinds = {"key": "key", "a": "rows", "b": "rows", "confidence": "fraction"}
    arguments = {"key": jax.random.key(0), "a": a, "b": b, "confidence": 0.9}
    fine = ("a: inf", "b: inf")  # a score of infinity has its rank
    return Case(call, arguments, check, kinds, ("a", "b"), fine=fine)


@generates("bilevel.rank_by_shared_weights")
def rank_by_shared_weights(rng, dtype) -> Case:
    n, m = 6, int(rng.choice([2, 4]))
    y = jnp.asarray(rng.normal(size=n), dtype)
    choices = jnp.asarray(rng.normal(size=m), dtype)
    rows = 0.5 * (np.asarray(y, np.float64)[None] - np.asarray(choices, np.float64)[:, None]) ** 2

    def call(choices, y, confidence):
        return bilevel.rank_by_shared_weights(
            lambda c: 0.5 * (y - c) ** 2, choices, confidence=confidence
        )

    def check(r):
        error = rows.std(1, ddof=1) / np.sqrt(n)
        return first(
            near("losses", r.losses, rows.mean(1), 50 * eps(dtype)),
            near("errors", r.standard_error, error, 500 * eps(dtype)),
            that(np.all(np.diff(np.asarray(r.losses)[np.asarray(r.order)]) >= 0), "not in order"),
        )

    kinds = {"choices": "values", "y": "values", "confidence": "fraction"}
    arguments = {"choices": choices, "y": y, "confidence": 0.95}
    return Case(call, arguments, check, kinds, ("choices", "y"))
