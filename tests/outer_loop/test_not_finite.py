"""A NaN or an infinity anywhere never ends in a value or a gradient that look finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import flatten
from problems import decay, half_squares, least_squares, logits, mixed

import bilevel

GRAM = bilevel.gram(logits, half_squares, damping=decay)
newton = bilevel.newton
SOLVERS = {
    "unrolled": bilevel.unrolled(0.05, 3),
    "unrolled, last step": bilevel.unrolled(0.05, 3, backprop=1),
    "unrolled adam": bilevel.unrolled(optax.adam(0.05), 3),
    "one step": bilevel.one_step(0.05),
    "newton cg": bilevel.implicit(),
    "newton dense": bilevel.implicit(newton(), bilevel.dense()),
    "newton neumann": bilevel.implicit(newton(), bilevel.neumann(5, 0.01)),
    "newton nystrom": bilevel.implicit(newton(), bilevel.nystrom(2, 0.1)),
    "newton gram": bilevel.implicit(newton(), GRAM),
    "lbfgs cg": bilevel.implicit(bilevel.lbfgs(steps=20), bilevel.cg()),
    "solved cg": bilevel.implicit(bilevel.solved()),
    "solved scale": bilevel.implicit(bilevel.solved(), bilevel.scale(0.1)),
    "ridge": bilevel.ridge(mixed, decay),
}


def planted(args, place, bad):
    """``args`` with one number of leaf ``place`` spoiled."""
    leaves, structure = jax.tree.flatten(args)
    leaf = leaves[place]
    leaves[place] = leaf.at[(1,) * leaf.ndim].set(bad)
    return jax.tree.unflatten(structure, leaves)


FORWARD = ("unrolled adam", "newton cg", "solved scale")  # one of a kind
CASES = [(name, "reverse") for name in SOLVERS] + [(name, "forward") for name in FORWARD]
LONG = [  # tests/repository/test_generated_nan.py covers these inverses too
    *((name, "reverse") for name in ("newton dense", "newton neumann", "newton nystrom")),
    ("newton cg", "forward"),
]


@pytest.mark.parametrize(
    ("name", "mode"),
    [pytest.param(*c, marks=pytest.mark.long if c in LONG else pytest.mark.slow) for c in CASES],
)
def test_what_is_not_finite_makes_value_and_gradient_so(name, mode):
    small = least_squares(6, 3)
    fn = bilevel.hypergradient(small.problem, SOLVERS[name], mode=mode, diagnostics=False)
    fn = jax.jit(fn)
    assert np.isfinite(flatten(fn(*small.args)[:2])).all()
    # Two leaves of alpha, the start, and two arrays of each side.
    for place in (0, 1, 3, 4, 5, 6) if name == "ridge" else range(7):  # ridge ignores the start
        for bad in (jnp.nan, jnp.inf):
            result = fn(*planted(small.args, place, bad))
            assert not np.isfinite(result.value), (place, bad)
            assert not np.isfinite(flatten(result.grad)).any(), (place, bad)


def hinge(w, alpha, batch):
    """A loss that passes no gradient of a NaN on."""
    x, y = batch
    return jnp.mean(jnp.maximum(0, 1 - y * (x @ w))) + 0.5 * jnp.exp(alpha) * jnp.sum(w**2) + alpha


@pytest.mark.long
@pytest.mark.parametrize("name", ["unrolled", "one step", "newton cg", "lbfgs cg", "solved scale"])
def test_losses_that_hide_a_nan_do_not_hide_it(name):
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(6, 2))), jnp.asarray(np.sign(rng.normal(size=6)))

    def lower(w, alpha, batch):  # NaN, with finite gradients
        return hinge(w, alpha, batch[:2]) + batch[2]

    # The outer loss does not look at the second weight.
    problem = bilevel.Problem(lower, lambda w, alpha, batch: (w[0] - 1) ** 2 + alpha)
    fn = jax.jit(bilevel.hypergradient(problem, SOLVERS[name], diagnostics=False))
    assert np.isfinite(fn(0.0, jnp.ones(2), (x, y, 0.0), None).value)
    result = fn(0.0, jnp.ones(2), (x, y, jnp.nan), None)
    assert np.isnan(result.value) and np.isnan(result.grad)
