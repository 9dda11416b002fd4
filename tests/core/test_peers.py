"""Lines of docs/peers.md for methods of other libraries, against the methods written out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import assert_close

import bilevel

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
