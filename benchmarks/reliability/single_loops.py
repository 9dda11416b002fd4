"""Single-loop methods: against their updates in numpy, float64, with all data as one batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from benchmarks.reliability.case import Case, eps, first, near
from benchmarks.reliability.registry import generates
from benchmarks.reliability.searching import PROBLEM

_RATE, _OUTER, _STEPS = 0.3, 0.2, 3


def _slopes(x, w, alpha):
    """Of the lower loss, in w and in alpha."""
    return 1.1 * w - x * alpha, -x * (w - x * alpha)


def _soba(x, t, alpha, w, v, _):
    direction = x * v
    return direction, w - _RATE * _slopes(x, w, alpha)[0], v - _RATE * (1.1 * v - (w - t))


def _amigo(x, t, alpha, w, v, _):
    for _ in range(2):
        w = w - _RATE * _slopes(x, w, alpha)[0]
    for _ in range(2):
        v = v - _RATE * (1.1 * v - (w - t))
    return x * v, w, v


def _f2sa(x, t, alpha, w, y, number):
    penalty = 3.0 * (1 + number) ** (1 / 7)
    (of_y, at_y), (of_w, at_w) = _slopes(x, y, alpha), _slopes(x, w, alpha)
    y_new = y - _RATE / 2 * (of_y + (y - t) / penalty)
    return penalty * (at_y - at_w), w - _RATE * of_w, y_new


def _meha(x, t, alpha, w, theta, number):
    c = (1 + number) ** 0.25
    (of_theta, at_theta), (of_w, at_w) = _slopes(x, theta, alpha), _slopes(x, w, alpha)
    pull = (w - theta) / 10
    w_new = w - _RATE * ((w - t) / c + of_w - pull)
    return c * (at_w - at_theta), w_new, theta - _RATE * (of_theta - pull)


def _bome(x, t, alpha, w, _, number):
    y = w
    for _ in range(2):
        y = y - _RATE * _slopes(x, y, alpha)[0]
    (of_w, at_w), at_y = _slopes(x, w, alpha), _slopes(x, y, alpha)[1]
    gap = at_w - at_y
    share = (w - t) @ of_w / (of_w @ of_w + gap @ gap)
    barrier = max(0.5 - share, 0)
    return barrier * gap, w - _RATE * (w - t + barrier * of_w), y


def _reference(step, arrays):
    """Alpha after each step; the adjoint starts at 0, a second copy of the weights at them."""
    alpha, w, x, t = (np.asarray(arrays[k], np.float64) for k in ("alpha", "w0", "train", "valid"))
    other = w if step in (_f2sa, _meha) else np.zeros_like(w)
    alphas = []
    for number in range(_STEPS):
        direction, w, other = step(x, t, alpha, w, other, number)
        alpha = alpha - _OUTER * direction
        alphas.append(alpha)
    return np.array(alphas)


def _case(rng, dtype, make, step, kinds, **options) -> Case:
    scale = 10 ** rng.uniform(-1, 0.3)
    draw = lambda: jnp.asarray(scale * rng.normal(size=3), dtype)
    arrays = {name: draw() for name in ("alpha", "w0", "train", "valid")}
    alphas = _reference(step, arrays)

    def call(alpha, w0, train, valid, **options):
        args = PROBLEM, make(**options), optax.sgd(_OUTER), alpha, w0, train, valid
        return bilevel.search(*args, steps=_STEPS, progress=False)

    # Sums of terms that may cancel, in rounding of the largest of them.
    size = 1 + np.abs(alphas).max()
    check = lambda r: near("alphas", r.history["alpha"] / size, alphas / size, 1e4 * eps(dtype))
    kinds = {"train": "values", "valid": "values"} | kinds
    return Case(call, arrays | options, check, kinds, fine=("step_size: a function",))


_STEP = {"step_size": "positive"}


@generates("bilevel.soba")
def soba(rng, dtype) -> Case:
    return _case(rng, dtype, bilevel.soba, _soba, _STEP, step_size=_RATE)


@generates("bilevel.ma_soba")
def ma_soba(rng, dtype) -> Case:
    kinds = _STEP | {"average": "positive"}
    return _case(rng, dtype, bilevel.ma_soba, _soba, kinds, step_size=_RATE, average=1.0)


@generates("bilevel.saba")
def saba(rng, dtype) -> Case:
    return _case(rng, dtype, bilevel.saba, _soba, {"step_size": "positive?"}, step_size=_RATE)


@generates("bilevel.spaba")
def spaba(rng, dtype) -> Case:
    kinds = {"step_size": "positive?", "probability": "nonnegative?"}
    probability = float(rng.choice([0.0, 0.5, 1.0]))
    options = {"step_size": _RATE, "probability": probability}
    return _case(rng, dtype, bilevel.spaba, _soba, kinds, **options)


@generates("bilevel.amigo")
def amigo(rng, dtype) -> Case:
    kinds = _STEP | {"inner": "count"}
    return _case(rng, dtype, bilevel.amigo, _amigo, kinds, step_size=_RATE, inner=2)


@generates("bilevel.f2sa")
def f2sa(rng, dtype) -> Case:
    kinds = _STEP | {"penalty": "positive", "growth": "nonnegative", "inner": "count"}
    options = {"step_size": _RATE, "penalty": 3.0, "growth": 1 / 7, "inner": 1}
    return _case(rng, dtype, bilevel.f2sa, _f2sa, kinds, **options)


@generates("bilevel.meha")
def meha(rng, dtype) -> Case:
    kinds = _STEP | {"proximity": "positive", "penalty": "positive"}
    options = {"step_size": _RATE, "proximity": 10.0, "penalty": 1.0}
    return _case(rng, dtype, bilevel.meha, _meha, kinds, **options)


@generates("bilevel.bome")
def bome(rng, dtype) -> Case:
    kinds = _STEP | {"inner": "count", "control": "nonnegative"}
    return _case(rng, dtype, bilevel.bome, _bome, kinds, step_size=_RATE, inner=2, control=0.5)


@generates("bilevel.paced", "bilevel.partition")
def paced(rng, dtype) -> Case:
    """The solution has a closed form; the batches are those of a partition."""
    rows = 6
    arrays = {name: jnp.asarray(rng.normal(size=rows), dtype) for name in ("train", "valid")}
    alpha = jnp.asarray(rng.normal(size=1), dtype)
    problem = bilevel.Problem(
        lambda w, a, batch: 0.5 * jnp.mean((w - a - batch) ** 2),
        lambda w, a, batch: 0.5 * jnp.mean((w - batch) ** 2),
    )

    def call(train, valid, batch_size):
        return bilevel.search(
            *(problem, bilevel.saba(0.5), bilevel.paced(), alpha, alpha, train, valid),
            steps=2000,
            batches=bilevel.partition(batch_size),
            key=jax.random.key(0),
            progress=False,
        )

    means = [np.mean(np.asarray(x, np.float64)) for x in arrays.values()]

    def check(result):
        return first(
            near("alpha", result.alpha, np.full(1, means[1] - means[0]), 1e-2),
            near("weights", result.w, np.full(1, means[1]), 1e-2),
        )

    kinds = {"train": "values", "valid": "values", "batch_size": "count"}
    return Case(call, arrays | {"batch_size": 2}, check, kinds)
