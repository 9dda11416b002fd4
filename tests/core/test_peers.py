"""Lines of docs/peers.md for methods of other libraries, against the methods written out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import assert_close

import bilevel

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
CURVATURES = jnp.array([1.0, 3.0])
STEPS, RATE = 6, 0.55  # the second weight overshoots: the outer loss rises and falls


def below(w, alpha, batch=None):
    return 0.5 * jnp.sum(CURVATURES * (w - alpha["aim"]) ** 2)


def above(w, alpha, batch=None):
    return jnp.sum(jnp.cosh(w - jnp.array([0.2, -0.1])))


ALPHA = {"aim": jnp.array([0.5, 0.4]), "start": jnp.array([0.1, -0.6])}


def iterates(alpha, slope):
    w = alpha["start"]
    for number in range(STEPS):
        yield w
        w = w - RATE * slope(w, alpha, number)
    yield w


def test_the_trajectory_is_cut_where_the_outer_loss_is_largest():
    """IAPTT-GM (Liu et al. 2021): a start that is learned, and the worst of all iterates."""

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
    hyper = bilevel.hypergradient(problem, solver, diagnostics=False)(ALPHA, w0, batch, None)

    def by_hand(alpha):
        slope = lambda w, alpha, _: jax.grad(below)(w, alpha)  # noqa: E731
        return jnp.stack([above(w, alpha) for w in iterates(alpha, slope)])

    values = by_hand(ALPHA)
    worst = int(values.argmax())
    assert 0 < worst < STEPS  # neither the start nor the end
    assert_close(hyper.value, values[worst], f64=1e-12, f32=1e-6)
    grad = jax.grad(lambda alpha: by_hand(alpha)[worst])(ALPHA)
    assert_close(hyper.grad, grad, f64=1e-11, f32=1e-5)


def test_descent_aggregated_with_a_weight_that_decays():
    """BDA (Liu et al. 2020): each step descends mu_t outer + (1 - mu_t) lower, mu_t = mu / t."""
    mu = 0.5

    def mixed(w, alpha, number, batch=None):
        share = mu / (number + 1.0)
        return share * above(w, alpha, batch) + (1 - share) * below(w, alpha, batch)

    problem = bilevel.Problem(
        lambda w, alpha, batch: (mixed(w.params, alpha, w.variables), w.variables + 1),
        lambda w, alpha, batch: above(w.params, alpha, batch),
        stateful=True,
    )
    solver = bilevel.restarted(bilevel.unrolled(optax.sgd(RATE), STEPS))
    start = bilevel.Stateful(ALPHA["start"], jnp.int32(0))
    alpha = {"aim": ALPHA["aim"]}
    result = bilevel.search(
        *(problem, solver, optax.sgd(0.1), alpha, start, None, None), steps=2, progress=False
    )

    def by_hand(aim):
        of = ALPHA | {"aim": aim}
        slope = lambda w, alpha, number: jax.grad(mixed)(w, alpha, number)  # noqa: E731
        return above(list(iterates(of, slope))[-1], of)

    aim = alpha["aim"]
    for _ in range(2):
        aim = aim - 0.1 * jax.grad(by_hand)(aim)
    assert_close(result.alpha["aim"], aim, f64=1e-11, f32=1e-5)
    assert np.abs(aim - ALPHA["aim"]).max() > 1e-3


def wide(w, alpha, batch):
    """Minima on a plane: more weights than equations."""
    return 0.5 * jnp.sum((X[:2] @ w - alpha) ** 2)


def test_a_step_of_the_dynamic_barrier_is_the_papers():
    """BOME (Ye et al. 2022), Algorithm 1, written out: c = 0.1, T = 3, eta = 0.5."""
    problem = bilevel.Problem(wide, lambda w, a, b: 0.5 * jnp.sum((X @ w - 1) ** 2) + jnp.sum(a))
    alpha, w = jnp.array([0.3, -0.2]), jnp.array([0.5, 0.1, -0.4])
    begin = jnp.concatenate([alpha, w])
    result = bilevel.search(
        *(problem, bilevel.bome(0.1, inner=3), optax.sgd(0.1), alpha, w, X[0], X[0]),
        steps=4,
        progress=False,
    )

    def of(loss):
        return lambda both: loss(both[2:], both[:2], None)

    both = begin
    for _ in range(4):
        y = both
        for _ in range(3):
            y = y.at[2:].add(-0.1 * jax.grad(of(wide))(y)[2:])
        q = lambda both, y=y: of(wide)(both) - of(wide)(jnp.append(both[:2], y[2:]))  # noqa: E731
        f, dq = jax.grad(of(problem.outer))(both), jax.grad(q)(both)
        barrier = jnp.maximum(0.5 - f @ dq / (dq @ dq + jnp.finfo(dq.dtype).eps * f @ f), 0)
        both = both - 0.1 * (f + barrier * dq)
    assert_close(result.alpha, both[:2], f64=1e-11, f32=1e-4)
    assert_close(result.w, both[2:], f64=1e-11, f32=1e-4)


def test_the_dynamic_barrier_ends_at_the_best_of_many_minima():
    """All alphas have a plane of minima: the best point of all planes is that of f alone."""
    target = jnp.array([0.4, -0.3, 0.2])
    problem = bilevel.Problem(wide, lambda w, a, b: 0.5 * jnp.sum((w - target) ** 2))
    result = bilevel.search(
        *(problem, bilevel.bome(0.1), optax.sgd(0.1), jnp.zeros(2), jnp.zeros(3), X[0], X[0]),
        steps=1500,
        progress=False,
    )
    assert_close(result.w, target, f64=1e-2, f32=1e-2)
    assert_close(result.alpha, X[:2] @ target, f64=1e-2, f32=1e-2)
