"""What truncation leaves out of a hypergradient, and what chance adds to it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, tolerance
from test_inner_training import (
    KEY,
    NOISY,
    NORMALISED,
    PENALISED,
    PLAIN,
    START,
    STATEFUL,
    TRAIN,
    VALID,
    VARIABLES,
    W0,
    X,
    Y,
    noisy,
)

import bilevel


def of_rate(alpha):
    return optax.adam(alpha["rate"])


CASES = {
    "momentum": (PENALISED, optax.sgd(0.2, momentum=0.5), START, W0, TRAIN, None),
    "batches": (NOISY, 0.1, START, W0, (KEY, TRAIN), noisy),
    "variables": (NORMALISED, 0.1, START, STATEFUL, TRAIN, None),
    "rate": (PLAIN, of_rate, {"rate": jnp.array(0.1)}, W0, TRAIN, None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_all_truncations_at_once_are_those_one_by_one(name):
    problem, optimizer, alpha, w0, train, batches = CASES[name]
    fn = jax.jit(bilevel.truncation(problem, optimizer, 4, batches=batches))
    truncations = fn(alpha, w0, train, VALID)
    for k in range(5):
        solver = bilevel.unrolled(optimizer, 4, backprop=k, batches=batches)
        one = jax.jit(bilevel.hypergradient(problem, solver, diagnostics=False))
        expected = one(alpha, w0, train, VALID)
        here, whole = (jax.tree.map(lambda g: g[i], truncations.grads) for i in (k, -1))  # noqa: B023
        scale = optax.tree.norm(whole)
        difference = optax.tree.norm(optax.tree.sub(here, expected.grad))
        assert difference < tolerance(1e-11, 1e-4) * scale
        bias = optax.tree.norm(optax.tree.sub(here, whole)) / scale
        assert_close(truncations.bias[k], bias, f64=1e-10, f32=1e-4)
        assert_close(truncations.value, expected.value, f64=1e-12, f32=1e-5)
    assert truncations.bias[-1] == 0 and truncations.bias[0] > 0.01


def mean_value(w, alpha, batch):
    return jnp.mean(batch) * w


LINEAR = bilevel.Problem(lambda w, alpha, batch: 0.5 * (w - alpha) ** 2, mean_value)


def test_the_standard_error_is_that_of_the_mean():
    """Where the hypergradient is the mean of the rows: Student's, by numpy."""
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(24, 2)))
    problem = bilevel.Problem(
        lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2),
        lambda w, alpha, batch: jnp.vdot(batch.mean(0), w),
    )
    fn = bilevel.hypergradient(problem, bilevel.implicit(), diagnostics=False)
    spread = jax.jit(bilevel.standard_error(fn, 24))
    hyper = spread(jnp.zeros(2), jnp.zeros(2), jnp.zeros((24, 1)), rows)
    assert_close(hyper.grad, rows.mean(0), f64=1e-9, f32=1e-5)
    expected = np.std(rows, axis=0, ddof=1) / 24**0.5
    assert_close(hyper.error, expected, f64=1e-9, f32=1e-4)
    ratio = np.linalg.norm(expected) / np.linalg.norm(rows.mean(0))
    assert_close(hyper.relative, ratio, f64=1e-9, f32=1e-4)


@pytest.mark.long
def test_the_standard_error_covers_the_truth_at_its_rate():
    """Batches of 64 rows in 16 parts: the true hypergradient is within two errors, 95 in 100."""
    solver = bilevel.unrolled(0.2, 5)
    fn = bilevel.hypergradient(PENALISED, solver, diagnostics=False)
    spread = bilevel.standard_error(fn, 16)

    def sample(key, rows):
        keys = jax.random.split(key)
        x = jax.random.normal(keys[0], (rows, 3))
        return x, x @ jnp.array([1.0, -1.0, 0.5]) + 0.5 * jax.random.normal(keys[1], (rows,))

    @jax.jit
    @jax.vmap
    def away(key):
        keys = jax.random.split(key)
        hyper = spread(START, W0, sample(keys[0], 512), sample(keys[1], 512))
        return hyper.grad, hyper.error

    grads, errors = away(jax.random.split(KEY, 200))
    # The mean has the bias of batches of 32 rows: its expectation is the mean over the runs.
    inside = np.abs(grads - grads.mean(0)) < 2 * errors
    assert 0.88 < inside.mean() < 0.99


@pytest.mark.long
def test_keys_are_split_with_the_rows():
    fn = bilevel.hypergradient(NOISY, bilevel.unrolled(0.1, 3, batches=noisy), diagnostics=False)
    hyper = jax.jit(bilevel.standard_error(fn, 4))(START, W0, (KEY, TRAIN), VALID)
    keys, fn = jax.random.split(KEY, 4), jax.jit(fn)

    def part(i):
        train = jax.tree.map(lambda x: x[3 * i : 3 * i + 3], TRAIN)
        valid = jax.tree.map(lambda x: x[2 * i : 2 * i + 2], VALID)
        return fn(START, W0, (keys[i], train), valid).grad

    each = np.stack([part(i) for i in range(4)])
    assert_close(hyper.grad, each.mean(0), f64=1e-12, f32=1e-5)
    assert_close(hyper.error, each.std(0, ddof=1) / 2, f64=1e-12, f32=1e-4)


def test_mistakes_are_one_sentence():
    fn = bilevel.hypergradient(PENALISED, bilevel.unrolled(0.1, 1))
    with pytest.raises(ValueError, match="parts: expected at least 2, got 1"):
        bilevel.standard_error(fn, 1)
    with pytest.raises(ValueError, match="parts: expected a divisor of the rows of train, got 5"):
        bilevel.standard_error(fn, 5)(START, W0, TRAIN, VALID)
    with pytest.raises(ValueError, match="fn: expected a function"):
        bilevel.standard_error(PENALISED, 2)
    with pytest.raises(ValueError, match="steps: expected at least 1"):
        bilevel.truncation(PENALISED, 0.1, 0)
    with pytest.raises(ValueError, match=r"problem: expected a bilevel\.Problem"):
        bilevel.truncation(fn, 0.1, 2)


# ----------------------------------------------------------------------------- HyperDistill


def test_no_decay_is_one_step():
    args = START, W0, TRAIN, VALID
    of = [bilevel.distilled(0.1, decay=0.0), bilevel.one_step(0.1)]
    hyper, expected = (
        jax.jit(bilevel.hypergradient(PENALISED, solver, diagnostics=False))(*args) for solver in of
    )
    assert_close(hyper.grad, expected.grad, f64=1e-12, f32=1e-5)
    assert_close(hyper.w, expected.w, f64=1e-12, f32=1e-6)


def test_a_rate_is_distilled_too():
    """The second of two steps from w to w - r (w - 1), at decay 1/2: 1.5 times a step's slope."""
    solver = bilevel.distilled(lambda alpha: optax.sgd(alpha), decay=0.5)
    to_one = bilevel.Problem(lambda w, a, b: 0.5 * (w - 1) ** 2, lambda w, a, b: w)
    init, step = bilevel.descent(to_one, solver, optax.sgd(0.0))
    state = init(jnp.array(0.5), jnp.array(0.0))
    for _ in range(2):
        state, metrics = step(state, (None, None))
    mean = (0.5 * 0.0 + 0.5) / 1.5  # of the weights before each step, 0 and 1/2
    assert_close(metrics["grad_norm"], 1.5 * (1 - mean), f64=1e-12, f32=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_the_past_is_distilled_as_the_paper_says(mode):
    """Lee et al. 2022, Eqs. (8), (13): the scale theta (1 - g^t) / (1 - g), and the mean w*."""
    decay, scale = 0.7, 1.3
    solver = bilevel.distilled(optax.sgd(0.1, momentum=0.5), decay=decay, scale=scale)
    state = solver.init(W0)
    w, mean, m = W0, W0, jnp.zeros(3)
    for t in range(1, 6):

        def stepped(alpha, w, m=m):
            m = 0.5 * m + jax.grad(PENALISED.lower)(w, alpha, TRAIN)
            return w - 0.1 * m, m

        share = (decay - decay**t) / (1 - decay**t)
        mean = share * mean + (1 - share) * w
        new, m = stepped(START, w)
        away = jax.grad(PENALISED.outer)(new, START, VALID)
        slope = jax.grad(lambda a: away @ stepped(a, mean)[0])(START)  # noqa: B023
        expected = scale * (1 - decay**t) / (1 - decay) * slope

        def value(alpha, w=w, state=state):
            trained, state = solver.run(PENALISED.lower, alpha, w, state, TRAIN)
            return PENALISED.outer(trained, alpha, VALID), (trained, state)

        if mode == "reverse":
            (_, (w, state)), grad = jax.value_and_grad(value, has_aux=True)(START)
        else:
            grad = jax.jacfwd(lambda a: value(a)[0])(START)
            w, state = value(START)[1]
        assert_close(w, new, f64=1e-12, f32=1e-6)
        assert_close(grad, expected, f64=1e-10, f32=1e-4)


def test_a_decay_outside_is_refused():
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match="decay: expected at least 0 and under 1, got"):
            bilevel.distilled(0.1, decay=decay)


@pytest.mark.long
def test_greedy_is_one_step_accumulated():
    """gradhpo's greedy method at decay 1: the sum of one-step slopes, alpha moved after T."""
    optimizer = optax.MultiSteps(optax.sgd(0.3), 5)
    result = bilevel.search(
        *(PENALISED, bilevel.unrolled(0.1, 1), optimizer, START, W0, TRAIN, VALID),
        steps=5,
        progress=False,
    )
    w, total = W0, jnp.zeros(3)
    for _ in range(5):
        step = lambda a, w=w: w - 0.1 * jax.grad(PENALISED.lower)(w, a, TRAIN)  # noqa: E731
        total += jax.grad(lambda a: PENALISED.outer(step(a), a, VALID))(START)  # noqa: B023
        w = step(START)
    assert_close(result.alpha, START - 0.3 * total / 5, f64=1e-7, f32=1e-5)
    assert_close(result.w, w, f64=1e-12, f32=1e-6)


# ----------------------------------------------------------------------------- variables


@pytest.mark.long
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_derivatives_pass_through_variables_on_request(mode):
    """Truth: the loop written out and differentiated, running means included."""

    def lower(w, alpha, batch):
        x, y = batch
        mean = 0.9 * w.variables["mean"] + 0.1 * (jnp.exp(alpha) * x).mean(0) + 0.05 * w.params
        value = 0.5 * jnp.mean(((x - mean) @ w.params - y) ** 2)
        return value, {"mean": mean, "count": w.variables["count"] + 1}

    def outer(w, alpha, batch):
        x, y = batch
        return 0.5 * jnp.mean(((x - w.variables["mean"]) @ w.params - y) ** 2)

    problem = bilevel.Problem(lower, outer, stateful=True, differentiated=True)
    fn = jax.jit(bilevel.hypergradient(problem, bilevel.unrolled(0.1, 6), mode=mode))
    hyper = fn(START, STATEFUL, TRAIN, VALID)

    def by_hand(alpha):
        w, variables = W0, VARIABLES
        for _ in range(6):
            here = bilevel.Stateful(w, variables)
            g, variables = jax.grad(
                lambda p, here=here: lower(here._replace(params=p), alpha, TRAIN), has_aux=True
            )(w)
            w = w - 0.1 * g
        return outer(bilevel.Stateful(w, variables), alpha, VALID)

    assert_close(hyper.grad, jax.grad(by_hand)(START), f64=1e-10, f32=1e-4)
    assert "pass through variables" in bilevel.explain(hyper.info)
    plain = bilevel.Problem(lower, outer, stateful=True)
    held = bilevel.hypergradient(plain, bilevel.unrolled(0.1, 6), diagnostics=False)
    assert np.abs(held(START, STATEFUL, TRAIN, VALID).grad - hyper.grad).max() > 1e-3
    with pytest.raises(ValueError, match="differentiated: expected stateful=True beside it"):
        bilevel.Problem(lower, outer, differentiated=True)


@pytest.mark.long
def test_variables_at_a_solution_are_differentiated_too():
    """The statistics that implicit() updates once: of all rows, weighed by alpha."""

    def lower(w, alpha, batch):
        x, y = batch
        value = 0.5 * jnp.mean((x @ w.params - y) ** 2) + 0.5 * jnp.sum(w.params**2)
        return value, alpha * x.mean(0) * w.params

    problem = bilevel.Problem(
        lower,
        lambda w, alpha, batch: jnp.sum((w.variables - 1.0) ** 2),
        stateful=True,
        differentiated=True,
    )
    fn = jax.jit(bilevel.hypergradient(problem, bilevel.implicit()))
    hyper = fn(START, bilevel.Stateful(W0, jnp.zeros(3)), TRAIN, VALID)
    w = jnp.linalg.solve(X.T @ X / len(Y) + jnp.eye(3), X.T @ Y / len(Y))
    expected = jax.grad(lambda a: jnp.sum((a * X.mean(0) * w - 1.0) ** 2))(START)
    assert_close(hyper.grad, expected, f64=1e-8, f32=1e-4)


@pytest.mark.long
def test_errors_of_a_hypergradient_that_is_nothing_are_infinite():
    problem = bilevel.Problem(
        lower=lambda w, alpha, batch: 0.5 * (w - alpha) ** 2,
        outer=lambda w, alpha, batch: jnp.mean(batch) * (w - 0.75 * alpha),
    )
    start, one = (jnp.zeros(()), jnp.zeros(())), jnp.ones(2)
    # Two steps half the way: 1/4 + 1/2 - 3/4.
    assert bilevel.truncation(problem, 0.5, 2)(*start, None, one).bias.tolist() == [
        *2 * [np.inf],
        0,
    ]
    spread = bilevel.standard_error(bilevel.hypergradient(problem, bilevel.unrolled(0.5, 1)), 2)
    assert spread(*start, None, jnp.array([-1.0, 1.0])).relative == np.inf
    assert spread(*start, None, jnp.zeros(2)).relative == 0
