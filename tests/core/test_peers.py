"""Compare methods in docs/coming_from/gradhpo_boat.md with loops written out."""

import jax
import jax.numpy as jnp
from helpers import assert_close

import bilevel

CURVATURES = jnp.array([1.0, 3.0])
STEPS, RATE = 6, 0.55  # the second weight overshoots: the outer loss rises and falls


def below(w, alpha, batch=None):
    return 0.5 * jnp.sum(CURVATURES * (w - alpha["aim"]) ** 2)


def above(w, alpha, batch=None):
    return jnp.sum(jnp.cosh(w - jnp.array([0.2, -0.1])))


ALPHA = {"aim": jnp.array([0.5, 0.4]), "start": jnp.array([0.1, -0.6])}


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
    hyper = bilevel.hypergradient(problem, solver, diagnostics=False)(ALPHA, w0, batch, None)

    def by_hand(alpha):
        iterates = [alpha["start"]]
        for _ in range(STEPS):
            iterates.append(iterates[-1] - RATE * jax.grad(below)(iterates[-1], alpha))
        return jnp.stack([above(w, alpha) for w in iterates])

    values = by_hand(ALPHA)
    worst = int(values.argmax())
    assert 0 < worst < STEPS  # neither the start nor the end
    assert_close(hyper.value, values[worst], f64=1e-12, f32=1e-6)
    grad = jax.grad(lambda alpha: by_hand(alpha)[worst])(ALPHA)
    assert_close(hyper.grad, grad, f64=1e-11, f32=1e-5)
