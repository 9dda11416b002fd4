"""A NaN or an infinity anywhere never ends in a value or a gradient that look finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import flatten
from problems import decay, least_squares, mixed

import bilevel


def gram(outputs, loss):
    return bilevel.gram(outputs, loss, damping=decay)


def outputs(w, alpha, batch):
    return mixed(alpha, batch[0]) @ w


def half_squares(outputs, batch):
    return 0.5 * jnp.sum((outputs - batch[1]) ** 2)


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
    "newton gram": bilevel.implicit(newton(), gram(outputs, half_squares)),
    "lbfgs cg": bilevel.implicit(bilevel.lbfgs(steps=20), bilevel.cg()),
    "solved cg": bilevel.implicit(bilevel.solved()),
    "solved scale": bilevel.implicit(bilevel.solved(), bilevel.scale(0.1)),
    "ridge": bilevel.ridge(mixed, decay),
}
IGNORES_START = {"ridge"}


def planted(args, where, bad):
    """``args`` with one number spoiled."""
    alpha, w0, (x, y), (xv, yv) = args

    def spoil(a):
        return a.at[(1,) * a.ndim].set(bad)

    return {
        "train x": (alpha, w0, (spoil(x), y), (xv, yv)),
        "train y": (alpha, w0, (x, spoil(y)), (xv, yv)),
        "valid x": (alpha, w0, (x, y), (spoil(xv), yv)),
        "valid y": (alpha, w0, (x, y), (xv, spoil(yv))),
        "mix": (alpha | {"mix": spoil(alpha["mix"])}, w0, (x, y), (xv, yv)),
        "decay": (alpha | {"log_decay": spoil(alpha["log_decay"])}, w0, (x, y), (xv, yv)),
        "w0": (alpha, spoil(w0), (x, y), (xv, yv)),
    }[where]


PLACES = ("train x", "train y", "valid x", "valid y", "mix", "decay", "w0")


def marks(long):
    return pytest.mark.long if long else pytest.mark.slow


FORWARD = ("unrolled adam", "newton cg", "solved scale")  # one of a kind


# tests/repository/test_generated_nan.py covers these inverses too.
LONG = ("newton dense", "newton neumann", "newton nystrom")


@pytest.mark.parametrize(
    ("name", "mode"),
    [pytest.param(s, "reverse", marks=marks(s in LONG)) for s in SOLVERS]
    + [pytest.param(s, "forward", marks=marks(s == "newton cg")) for s in FORWARD],
)
def test_what_is_not_finite_makes_value_and_gradient_so(name, mode):
    small = least_squares(6, 3)
    fn = bilevel.hypergradient(small.problem, SOLVERS[name], mode=mode, diagnostics=False)
    fn = jax.jit(fn)
    assert np.isfinite(flatten(fn(*small.args)[:2])).all()
    for where in PLACES:
        if where == "w0" and name in IGNORES_START:
            continue
        for bad in (jnp.nan, jnp.inf):
            result = fn(*planted(small.args, where, bad))
            assert not np.isfinite(result.value), (where, bad)
            assert not np.isfinite(flatten(result.grad)).any(), (where, bad)


def hinge(w, alpha, batch):
    """A loss that passes no gradient of a NaN on."""
    x, y = batch
    return jnp.mean(jnp.maximum(0, 1 - y * (x @ w))) + 0.5 * jnp.exp(alpha) * jnp.sum(w**2) + alpha


def indifferent(w, alpha, batch):
    """An outer loss that does not look at the second weight."""
    return (w[0] - 1) ** 2 + alpha


@pytest.mark.long
@pytest.mark.parametrize("name", ["unrolled", "one step", "newton cg", "lbfgs cg", "solved scale"])
def test_losses_that_hide_a_nan_do_not_hide_it(name):
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(6, 2))), jnp.asarray(np.sign(rng.normal(size=6)))

    def lower(w, alpha, batch):  # NaN, with finite gradients
        return hinge(w, alpha, batch[:2]) + batch[2]

    fn = bilevel.hypergradient(
        bilevel.Problem(lower, indifferent), SOLVERS[name], diagnostics=False
    )
    fn = jax.jit(fn)
    assert np.isfinite(fn(0.0, jnp.ones(2), (x, y, 0.0), None).value)
    result = fn(0.0, jnp.ones(2), (x, y, jnp.nan), None)
    assert np.isnan(result.value)
    assert np.isnan(result.grad)
