"""Truncation bias and standard errors of hypergradients of short trainings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, hypergradient, tolerance
from test_inner_training import (
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
    key,
    noisy,
)

import bilevel

CASES = {
    "momentum": (PENALISED, optax.sgd(0.2, momentum=0.5), START, W0, TRAIN, None),
    "batches": (NOISY, 0.1, START, W0, TRAIN, noisy),
    "variables": (NORMALISED, 0.1, START, STATEFUL, TRAIN, None),
    "rate": (PLAIN, lambda a: optax.adam(a["rate"]), {"rate": np.array(0.1)}, W0, TRAIN, None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_all_truncations_at_once_are_those_one_by_one(name):
    problem, optimizer, alpha, w0, train, batches = CASES[name]
    train = (key(), train) if batches else train
    fn = jax.jit(bilevel.truncation(problem, optimizer, 4, batches=batches))
    truncations = fn(alpha, w0, train, VALID)
    # Without a differentiated step all are 0, because the outer loss does not read alpha. There
    # `hypergradient` raises.
    assert all((grads[0] == 0).all() for grads in jax.tree.leaves(truncations.grads))
    for k in range(1, 5):
        solver = bilevel.unrolled(optimizer, 4, backprop=k, batches=batches)
        expected = hypergradient(problem, solver, alpha, w0, train, VALID)
        here, whole = (jax.tree.map(lambda g: g[i], truncations.grads) for i in (k, -1))  # noqa: B023
        scale = optax.tree.norm(whole)
        difference = optax.tree.norm(optax.tree.sub(here, expected.grad))
        assert difference < tolerance(1e-11, 1e-4) * scale
        bias = optax.tree.norm(optax.tree.sub(here, whole)) / scale
        assert_close(truncations.bias[k], bias, f64=1e-10, f32=1e-4)
        assert_close(truncations.value, expected.value, f64=1e-12, f32=1e-5)
    assert truncations.bias[-1] == 0 and truncations.bias[0] > 0.01


@pytest.mark.long
def test_keys_are_split_with_the_rows():
    fn = bilevel.hypergradient(NOISY, bilevel.unrolled(0.1, 3, batches=noisy), diagnostics=False)
    hyper = jax.jit(bilevel.standard_error(fn, 4))(START, W0, (key(), TRAIN), VALID)
    train, valid = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), (TRAIN, VALID))
    parts = jax.jit(jax.vmap(fn, (None, None, 0, 0)))
    grads = np.asarray(parts(START, W0, (jax.random.split(key(), 4), train), valid).grad)
    assert_close(hyper.grad, grads.mean(0), f64=1e-12, f32=1e-5)
    error = grads.std(0, ddof=1) / 2
    assert_close(hyper.error, error, f64=1e-12, f32=1e-4)
    relative = np.linalg.norm(error) / np.linalg.norm(grads.mean(0))
    assert_close(hyper.relative, relative, f64=1e-9, f32=1e-4)


def test_a_rate_is_distilled_too():
    """At decay 1/2, the second step from w to w - r (w - 1) counts 1.5 times."""
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
    """Truth: Lee et al. 2022, Eqs. (8), (13)."""
    decay, scale = 0.7, 1.3
    solver = bilevel.distilled(optax.sgd(0.1, momentum=0.5), decay=decay, scale=scale)
    state = solver.init(W0)
    w, mean, m = W0, W0, jnp.zeros(3)
    derivative = {"reverse": jax.jacrev, "forward": jax.jacfwd}[mode]

    def stepped(alpha, w, m):
        m = 0.5 * m + jax.grad(PENALISED.lower)(w, alpha, TRAIN)
        return w - 0.1 * m, m

    def trained(alpha, w, state):
        w, state = solver.run(PENALISED.lower, alpha, w, state, TRAIN)
        return PENALISED.outer(w, alpha, VALID), (w, state)

    for t in range(1, 6):
        share = (decay - decay**t) / (1 - decay**t)
        mean = share * mean + (1 - share) * w
        new, new_m = stepped(START, w, m)
        away = jax.grad(PENALISED.outer)(new, START, VALID)
        slope = away @ jax.jacrev(stepped)(START, mean, m)[0]
        grad, (w, state) = derivative(trained, has_aux=True)(START, w, state)
        m = new_m
        assert_close(w, new, f64=1e-12, f32=1e-6)
        expected = scale * (1 - decay**t) / (1 - decay) * slope
        assert_close(grad, expected, f64=1e-10, f32=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_every_step_updates_the_variables(mode, differentiated):
    def lower(w, alpha, batch):
        x, y, *_ = batch
        mean = 0.9 * w.variables["mean"] + 0.1 * (jnp.exp(alpha) * x).mean(0) + 0.05 * w.params
        value = 0.5 * jnp.mean(((x - mean) @ w.params - y) ** 2)
        return value, {"mean": mean, "count": w.variables["count"] + 1}

    def outer(w, alpha, batch):
        x, y = batch
        return 0.5 * jnp.mean(((x - w.variables["mean"]) @ w.params - y) ** 2)

    problem = bilevel.Problem(lower, outer, stateful=True, differentiated=differentiated)
    solver = bilevel.unrolled(optax.sgd(0.1, momentum=0.5), 6, batches=noisy)
    given = problem, solver, START, STATEFUL, (key(), TRAIN), VALID
    hyper = hypergradient(*given, mode=mode, diagnostics=True)

    def loss(params, variables, alpha, batch):
        return lower(bilevel.Stateful(params, variables), alpha, batch)

    def by_hand(alpha):
        w, m, variables = W0, jnp.zeros(3), VARIABLES
        for number in range(6):
            batch = noisy(jax.random.fold_in(key(), number), TRAIN)
            g, variables = jax.grad(loss, has_aux=True)(w, variables, alpha, batch)
            if not differentiated:
                variables = jax.lax.stop_gradient(variables)
            m = 0.5 * m + g
            w = w - 0.1 * m
        end = bilevel.Stateful(w, variables)
        return outer(end, alpha, VALID), end

    (value, end), grad = jax.value_and_grad(by_hand, has_aux=True)(START)
    assert_close(hyper.value, value, f64=1e-12, f32=1e-5)
    assert_close(hyper.grad, grad, f64=1e-10, f32=1e-4)
    assert_close(hyper.w.params, end.params, f64=1e-12, f32=1e-5)
    assert_close(hyper.w.variables["mean"], end.variables["mean"], f64=1e-12, f32=1e-5)
    assert hyper.w.variables["count"] == 6
    assert ("pass through variables" in bilevel.explain(hyper.info)) == differentiated


@pytest.mark.long
def test_variables_at_a_solution_are_differentiated_too():
    def lower(w, alpha, batch):
        x, y = batch
        value = 0.5 * jnp.mean((x @ w.params - y) ** 2) + 0.5 * jnp.sum(w.params**2)
        return value, alpha * x.mean(0) * w.params

    def outer(w, alpha, batch):
        return jnp.sum((w.variables - 1.0) ** 2)

    problem = bilevel.Problem(lower, outer, stateful=True, differentiated=True)
    start = START, bilevel.Stateful(W0, jnp.zeros(3)), TRAIN, VALID
    hyper = hypergradient(problem, bilevel.implicit(), *start)
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
    bias = bilevel.truncation(problem, 0.5, 2)(*start, None, one).bias
    assert bias.tolist() == [np.inf, np.inf, 0]
    spread = bilevel.standard_error(bilevel.hypergradient(problem, bilevel.unrolled(0.5, 1)), 2)
    assert spread(*start, None, jnp.array([-1.0, 1.0])).relative == np.inf
    assert spread(*start, None, jnp.zeros(2)).relative == 0


# ---------------------------------- the methods in docs/coming_from/gradhpo_boat.md, written out

CURVATURES = np.array([1.0, 3.0])
STEPS, RATE = 6, 0.55  # the second weight overshoots: the outer loss rises and falls


def below(w, alpha, batch=None):
    return 0.5 * jnp.sum(CURVATURES * (w - alpha["aim"]) ** 2)


def above(w, alpha, batch=None):
    return jnp.sum(jnp.cosh(w - jnp.array([0.2, -0.1])))


AIM_AND_START = {"aim": np.array([0.5, 0.4]), "start": np.array([0.1, -0.6])}


def test_the_trajectory_is_cut_where_the_outer_loss_is_largest():
    """IAPTT-GM (Liu et al. 2021): a learned start, and the worst of all iterates."""

    def lower(w, alpha, batch):
        worst = jnp.maximum(w.variables, above(w.params, alpha, batch["valid"]))
        return below(w.params, alpha, batch["train"]), worst

    def outer(w, alpha, batch):
        return jnp.maximum(w.variables, above(w.params, alpha, batch))

    problem = bilevel.Problem(lower, outer, stateful=True, differentiated=True)
    solver = bilevel.restarted(
        bilevel.unrolled(RATE, STEPS), start=lambda alpha, w: w._replace(params=alpha["start"])
    )
    w0 = bilevel.Stateful(jnp.zeros(2), jnp.array(0.0))  # no loss is under 0
    batch = {"train": None, "valid": None}
    hyper = hypergradient(problem, solver, AIM_AND_START, w0, batch, None)

    def by_hand(alpha):
        iterates = [alpha["start"]]
        for _ in range(STEPS):
            iterates.append(iterates[-1] - RATE * jax.grad(below)(iterates[-1], alpha))
        return jnp.stack([above(w, alpha) for w in iterates])

    values = by_hand(AIM_AND_START)
    worst = int(values.argmax())
    assert 0 < worst < STEPS  # neither the start nor the end
    assert_close(hyper.value, values[worst], f64=1e-12, f32=1e-6)
    grad = jax.grad(lambda alpha: by_hand(alpha)[worst])(AIM_AND_START)
    assert_close(hyper.grad, grad, f64=1e-11, f32=1e-5)
