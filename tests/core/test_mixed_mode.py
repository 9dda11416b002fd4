"""Mixed-mode hypergradients of unrolled steps are exact for any derivative rules in the loss.

Truth: a Python loop around ``jax.grad`` in reverse mode, and finite differences in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_gradient, hypergradient, loop_of_steps
from problems import reverse_once

import bilevel
import ntk
from bilevel.internal.custom_rules import exact_order
from bilevel.spaces import darts

STEPS = 4


def identity(rule):
    """Return the identity with a function of the slope as its derivative."""
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), lambda _, slope: (rule(slope),))
    return function


@jax.custom_jvp
def straight_through(x):
    """Round, with a slope that depends on the other entries, so it is not a gradient."""
    return jnp.round(4 * x) / 4


@straight_through.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return straight_through(x), jnp.cos(jnp.flip(x)) * dx


@jax.custom_jvp
def half(x, scale):
    """Multiply; the rule omits one factor's derivative."""
    return x * scale


@half.defjvp
def _(primals, tangents):
    return half(*primals), primals[1] * tangents[0]


rounded = jax.custom_jvp(jnp.rint)
rounded.defjvps(lambda dx, rounded, x: jnp.exp(-x) * dx)

RULES = {
    "custom_vjp_reversed": identity(jnp.negative),
    "custom_vjp_clipped": identity(jnp.tanh),
    "custom_jvp_straight_through": straight_through,
    "custom_jvp_half": lambda x: half(x, jnp.flip(x)),
    "custom_jvp_of_jax": rounded,
    "stop_gradient": lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x),
    "relu": jax.nn.relu,
}
PLACES = {
    "plain": lambda rule: rule,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda rule: lambda x: jax.lax.scan(lambda c, y: (c, rule(y)), 0.0, x[None])[1][0],
    "cond": lambda rule: lambda x: jax.lax.cond(x[0] < 9, rule, lambda x: 2 * x, x),
    "vmap": lambda rule: lambda x: jax.vmap(rule)(x[None])[0],
}
OPTIMIZERS = {"sgd": optax.sgd(0.2), "adam": optax.adam(0.2)}
W = np.array([0.7, -0.4, 0.9])
ALPHA = np.array([0.6, 1.1, 0.8])


def losses(rule):
    def lower(w, alpha, batch):
        game = jnp.sum(jnp.tanh(jnp.roll(w, 1) * alpha * rule(w)))
        return game + 0.5 * jnp.sum(alpha * w**2) + jnp.sum(jnp.sin(rule(alpha * w)))

    return lower, lambda w, alpha, batch: jnp.sum(jnp.cosh(w))


@pytest.mark.parametrize(
    ("name", "place", "optimizer"),
    [(name, "plain", "sgd") for name in RULES]
    + [("custom_vjp_clipped", place, "sgd") for place in PLACES if place != "plain"]
    + [("custom_vjp_clipped", "plain", "adam")]
    + [
        pytest.param("custom_jvp_straight_through", place, rule, marks=pytest.mark.long)
        for place, rule in [*((place, "sgd") for place in [*PLACES][1:]), ("plain", "adam")]
    ],
)
def test_false_derivative_rules_give_the_derivative_of_the_steps(name, place, optimizer):
    lower, outer = losses(PLACES[place](RULES[name]))
    alone, rule = losses(RULES[name])[0], OPTIMIZERS[optimizer]  # without loops, which lose rules
    end = lambda alpha: loop_of_steps(alone, rule, W, alpha, None, STEPS)  # noqa: E731
    truth = jax.grad(lambda alpha: outer(end(alpha), alpha, None))(ALPHA)
    problem, solver = bilevel.Problem(lower, outer), bilevel.unrolled(rule, STEPS)
    hyper = hypergradient(problem, solver, ALPHA, W, None, None)
    assert_close(hyper.grad, truth, f64=1e-12, f32=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "solver"),
    [("custom_vjp_clipped", bilevel.unrolled(0.1, 3)), ("custom_jvp_half", bilevel.implicit())],
)
def test_an_asymmetric_jacobian_is_the_reason_for_no_estimate(name, solver):
    given = bilevel.Problem(*losses(RULES[name])), solver, ALPHA, W, None, None
    info = hypergradient(*given, diagnostics=True).info
    assert not info.converged and jnp.isinf(info.error_estimate) and jnp.isinf(info.error_bound)
    assert "not symmetric" in bilevel.explain(info)


def order(function, *args):
    return exact_order(jax.make_jaxpr(function)(*args))


@pytest.mark.parametrize(
    "function",
    [
        *(jax.nn.relu6, jax.nn.log_softmax, jax.nn.logsumexp, jax.nn.gelu, jax.nn.silu),
        *(jax.nn.softplus, jnp.sinc, jnp.linalg.norm, lambda x: jax.scipy.special.xlogy(x, x)),
        lambda x: jax.vmap(jax.nn.relu)(x),
        lambda x: jax.lax.map(jax.nn.relu, x),
        lambda x: jax.nn.dot_product_attention(*(x.reshape(1, 4, 1, 1),) * 3),
    ],
)
def test_jax_s_own_rules_are_true(function):
    assert order(function, jnp.ones(4)) == "forward over reverse"


def test_the_rules_of_our_kernels_and_spaces_are_true():
    x, key = jnp.ones((2, 8, 8, 3)), jax.random.key(0)
    space = darts.darts_space(classes=2, cells=2, channels=2)
    w = jax.eval_shape(space.init, key, (x, jnp.zeros(2, int)))
    batch = x, jnp.zeros(2, int)
    assert order(space.problem.lower, w, space.start(), batch) == "forward over reverse"
    kernel = lambda x: ntk.network_kernel(x, activations=[ntk.tanh, ntk.relu]).ntk  # noqa: E731
    assert order(kernel, jnp.eye(3)) == "forward over reverse"


def test_a_rule_that_is_an_object_or_partial_is_a_user_s():
    class Rule:
        def __call__(self, dx, y, x):
            return 2 * dx

    for rule in (Rule(), functools.partial(lambda c, dx, y, x: c * dx, 2.0)):
        function = jax.custom_jvp(jnp.rint)
        function.defjvps(rule)
        assert order(function, 1.0) == "reverse over forward"


@pytest.mark.long
def test_the_batch_the_start_and_values_closed_over_are_differentiated():
    rng, solver = np.random.default_rng(0), bilevel.unrolled(0.1, 3)
    batch = rng.normal(size=(6, 3)), rng.normal(size=6)
    w = {"in": rng.normal(size=(3, 4)), "out": rng.normal(size=4)}
    theta = jax.tree.map(jnp.asarray, (batch, w, np.array(-0.5)))

    def value(theta):
        batch, w, alpha = theta

        def lower(w, _, batch):
            hidden = jax.nn.softmax(batch[0] @ w["in"]) + jax.nn.gelu(batch[0] @ w["in"])
            fit = jnp.mean((hidden @ w["out"] - batch[1]) ** 2)
            return fit + jnp.exp(alpha) * jnp.sum(w["in"] ** 2)

        return jnp.sum(solver.run(lower, None, w, solver.init(w), batch)[0]["out"] ** 3)

    assert_gradient(value, theta, f64=1e-8, f32=5e-2)


@jax.custom_vjp
def exp(x):
    """Compute exp with the natural rule, which calls exp and lacks a forward derivative."""
    return jnp.exp(x)


exp.defvjp(lambda x: (exp(x),) * 2, lambda y, cotangent: (cotangent * y,))


def with_cosh(cosh):
    return bilevel.Problem(
        lambda w, a, b: jnp.sum(cosh(w - a) + 0.5 * w**2), lambda w, a, b: jnp.sum((w - 2) ** 2)
    )


START = np.array(0.7), np.full(2, 0.3), None, None


@pytest.mark.long
@pytest.mark.parametrize("solver", [bilevel.implicit(), bilevel.unrolled(0.1, 3)])
def test_a_rule_that_calls_its_function_has_second_derivatives(solver):
    hyper, expected = (
        hypergradient(with_cosh(cosh), solver, *START, diagnostics=True)
        for cosh in (lambda x: (exp(x) + exp(-x)) / 2, jnp.cosh)
    )
    assert_close(hyper.grad, expected.grad, f64=1e-6, f32=1e-4)
    assert bool(hyper.info.converged) == bool(expected.info.converged)


def test_f2sa_needs_no_second_derivatives():
    alpha, expected = (
        bilevel.search(*(with_cosh(cosh), bilevel.f2sa(0.1), optax.sgd(0.1), *START), steps=3).alpha
        for cosh in (reverse_once, jnp.cosh)
    )
    assert_close(alpha, expected, f64=1e-12, f32=1e-5)
