"""Check single-loop methods on random quadratics against their updates in numpy; one batch."""

import numpy as np
import optax
import pytest
from generated import dtypes, eps, examples, normal, seeds, wide
from hypothesis import given
from problems import SCALED as PROBLEM

import bilevel

RATE, OUTER, STEPS = 0.3, 0.2, 3


def slopes(x, w, alpha):  # of the lower loss in w and in alpha; the outer gradient is w - t
    return 1.1 * w - x * alpha, -x * (w - x * alpha)


def soba(x, t, alpha, w, v, step):
    return x * v, w - RATE * slopes(x, w, alpha)[0], v - RATE * (1.1 * v - (w - t))


def amigo(x, t, alpha, w, v, step):
    for _ in range(2):
        w = w - RATE * slopes(x, w, alpha)[0]
    for _ in range(2):
        v = v - RATE * (1.1 * v - (w - t))
    return x * v, w, v


def f2sa(x, t, alpha, w, y, step):
    penalty = 3.0 * (1 + step) ** (1 / 7)
    (of_y, at_y), (of_w, at_w) = slopes(x, y, alpha), slopes(x, w, alpha)
    y_next = y - RATE / 2 * (of_y + (y - t) / penalty)
    return penalty * (at_y - at_w), w - RATE * of_w, y_next


def meha(x, t, alpha, w, theta, step):
    c = (1 + step) ** 0.25
    (of_theta, at_theta), (of_w, at_w) = slopes(x, theta, alpha), slopes(x, w, alpha)
    pull = (w - theta) / 10
    w_next = w - RATE * ((w - t) / c + of_w - pull)
    return c * (at_w - at_theta), w_next, theta - RATE * (of_theta - pull)


def bome(x, t, alpha, w, _, step):
    y = w
    for _ in range(2):
        y = y - RATE * slopes(x, y, alpha)[0]
    (of_w, at_w), at_y = slopes(x, w, alpha), slopes(x, y, alpha)[1]
    gap = at_w - at_y
    share = (w - t) @ of_w / (of_w @ of_w + gap @ gap)
    barrier = max(0.5 - share, 0)
    return barrier * gap, w - RATE * (w - t + barrier * of_w), y


# method, its formula, whether its second variable starts at the weights
METHODS = {
    "soba": (bilevel.soba(RATE), soba, False),
    "ma_soba": (bilevel.ma_soba(RATE, average=1.0), soba, False),
    "saba": (bilevel.saba(RATE), soba, False),
    "spaba": (bilevel.spaba(RATE, probability=0.5), soba, False),
    "amigo": (bilevel.amigo(RATE, inner=2), amigo, False),
    "f2sa": (bilevel.f2sa(RATE, penalty=3.0, growth=1 / 7, inner=1), f2sa, True),
    "meha": (bilevel.meha(RATE, proximity=10.0, penalty=1.0), meha, True),
    "bome": (bilevel.bome(RATE, inner=2, control=0.5), bome, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@examples(2)
@given(seed=seeds, dtype=dtypes)
def test_a_single_loop_takes_the_steps_of_its_formula(name, seed, dtype):
    rng = np.random.default_rng(seed)
    scale = 10 ** rng.uniform(-1, 0.3)
    arguments = [normal(rng, dtype, 3, scale=scale) for _ in range(4)]
    method, formula, copies = METHODS[name]
    methods, options = (method, optax.sgd(OUTER)), {"steps": STEPS, "progress": False}
    result = bilevel.search(PROBLEM, *methods, *arguments, **options)
    alpha, w, x, t = wide(arguments)
    other, alphas = w if copies else np.zeros_like(w), []
    for step in range(STEPS):
        direction, w, other = formula(x, t, alpha, w, other, step)
        alpha = alpha - OUTER * direction
        alphas.append(alpha)
    # Terms may cancel, so the largest sets the rounding error.
    size, actual = 1 + np.abs(alphas).max(), wide(result.history["alpha"])
    np.testing.assert_allclose(actual / size, np.array(alphas) / size, atol=1e4 * eps(dtype))
