"""Hypergradients of unrolled steps in mixed mode: exact whatever rules the loss contains.

Truth: the same steps as a Python loop around ``jax.grad``, differentiated by JAX in reverse mode,
and finite differences in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, finite_differences

import bilevel
import ntk
from bilevel.internal.custom_rules import exact_order
from bilevel.nets import convolution
from bilevel.spaces import darts, nasbench201

STEPS = 4


# ------------------------------------------------------- rules that are not the true derivative


@jax.custom_vjp
def reversed_vjp(x):
    """Gradient reversal: the derivative of the rule itself is not reversed."""
    return x


reversed_vjp.defvjp(lambda x: (x, None), lambda _, slope: (-slope,))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, slope: (jnp.tanh(slope),))


@jax.custom_jvp
def straight_through(x):
    """Rounding with a slope that depends on the other entries: it has no antiderivative."""
    return jnp.round(4 * x) / 4


@straight_through.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return straight_through(x), jnp.cos(jnp.flip(x)) * dx


@jax.custom_jvp
def half(x, scale):
    """A product. Its rule leaves out one factor's derivative."""
    return x * scale


@half.defjvp
def _(primals, tangents):
    return half(*primals), primals[1] * tangents[0]


rounded = jax.custom_jvp(jnp.rint)
rounded.defjvps(lambda dx, rounded, x: jnp.exp(-x) * dx)

RULES = {
    "custom_vjp_reversed": reversed_vjp,
    "custom_vjp_clipped": clipped,
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
W = jnp.array([0.7, -0.4, 0.9])
ALPHA = jnp.array([0.6, 1.1, 0.8])


def losses(rule):
    def lower(w, alpha, batch):
        game = jnp.sum(jnp.tanh(jnp.roll(w, 1) * alpha * rule(w)))
        return game + 0.5 * jnp.sum(alpha * w**2) + jnp.sum(jnp.sin(rule(alpha * w)))

    return lower, lambda w, alpha, batch: jnp.sum(jnp.cosh(w))


def by_hand(lower, outer, optimizer):
    """The outer loss after the steps, by a loop that JAX sees unrolled."""

    def value(alpha):
        w, state = W, optimizer.init(W)
        for _ in range(STEPS):
            updates, state = optimizer.update(jax.grad(lower)(w, alpha, None), state, w)
            w = optax.apply_updates(w, updates)
        return outer(w, alpha, None)

    return value


FAST = "plain", "scan"


@pytest.mark.parametrize(
    ("place", "optimizer"),
    [
        *(
            pytest.param(place, "sgd", marks=() if place in FAST else pytest.mark.slow)
            for place in PLACES
        ),
        ("plain", "adam"),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_false_derivative_rules_give_the_derivative_of_the_steps(name, place, optimizer):
    lower, outer = losses(PLACES[place](RULES[name]))
    # JAX loses rules in loops, in the second derivative. So the truth is computed without loops.
    truth = jax.grad(by_hand(*losses(RULES[name]), OPTIMIZERS[optimizer]))(ALPHA)
    solver = bilevel.unrolled(OPTIMIZERS[optimizer], STEPS)
    fn = bilevel.hypergradient(bilevel.Problem(lower, outer), solver, diagnostics=False)
    assert_close(fn(ALPHA, W, None, None).grad, truth, f64=1e-12, f32=1e-5)


@pytest.mark.parametrize("name", ["custom_vjp_reversed", "custom_vjp_clipped"])
def test_forward_over_reverse_would_be_wrong_here(name):
    """The Jacobian of the gradient is not symmetric: the trap that the orders avoid."""
    lower, _ = losses(RULES[name])
    jacobian = jax.jacobian(jax.grad(lower))(W, ALPHA, None)
    assert jnp.abs(jacobian - jacobian.T).max() > 0.1


@pytest.mark.parametrize("name", [n for n in RULES if "vjp" in n or "half" in n])
@pytest.mark.parametrize("solver", [bilevel.unrolled(0.1, 3), bilevel.implicit()])
def test_an_asymmetric_jacobian_is_the_reason_for_no_estimate(name, solver):
    problem = bilevel.Problem(*losses(RULES[name]))
    info = bilevel.hypergradient(problem, solver)(ALPHA, W, None, None).info
    assert not info.converged and jnp.isinf(info.error_estimate) and jnp.isinf(info.error_bound)
    assert "not symmetric" in bilevel.explain(info)


def test_true_rules_of_a_user_keep_the_estimate():
    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, slope: (3 * x**2 * slope,))
    problem = bilevel.Problem(
        lambda w, alpha, batch: jnp.sum(cube(w) * w + (w - alpha) ** 2),
        lambda w, alpha, batch: jnp.sum(w**2),
    )
    fn = bilevel.hypergradient(problem, bilevel.implicit())
    hyper = fn(ALPHA, W, None, None)
    assert hyper.info.converged and hyper.info.reason == 0
    # 4 w^3 + 2 (w - alpha) = 0
    assert_close(hyper.grad, 2 * hyper.w * 2 / (12 * hyper.w**2 + 2), f64=1e-8, f32=1e-4)


# --------------------------------------------------------------------------- the order by rules


def order(function, *args):
    return exact_order(jax.make_jaxpr(function)(*args))


@pytest.mark.parametrize(
    "function",
    [
        *(jax.nn.relu, jax.nn.relu6, jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp),
        *(jax.nn.gelu, jax.nn.silu, jax.nn.elu, jax.nn.softplus, jnp.sinc, jnp.logaddexp.reduce),
        *(jnp.linalg.norm, jax.scipy.special.logsumexp, lambda x: jax.scipy.special.xlogy(x, x)),
        lambda x: jax.vmap(jax.nn.relu)(x),
        lambda x: jax.lax.map(jax.nn.relu, x),
        lambda x: jax.nn.dot_product_attention(*(x.reshape(1, 4, 1, 1),) * 3),
    ],
)
def test_jax_s_own_rules_are_true(function):
    assert order(function, jnp.ones(4)) == "forward over reverse"


def test_the_rules_of_our_kernels_networks_and_spaces_are_true():
    x, key = jnp.ones((2, 8, 8, 3)), jax.random.key(0)
    space = darts.darts_space(classes=2, cells=2, channels=2)
    w = jax.eval_shape(space.init, key, (x, jnp.zeros(2, int)))
    lower = space.problem.lower
    assert order(lower, w, space.start(), (x, jnp.zeros(2, int))) == "forward over reverse"
    kernel = lambda x: ntk.network_kernel(x, activations=[ntk.tanh, ntk.relu]).ntk  # noqa: E731
    assert order(kernel, jnp.eye(3)) == "forward over reverse"
    assert convolution and nasbench201  # imported: their rules are part of the spaces


@pytest.mark.parametrize("name", RULES)
def test_a_user_s_rule_decides_in_every_place(name):
    wanted = {"custom_vjp": "reverse over reverse", "custom_jvp": "reverse over forward"}
    for wrap in PLACES.values():
        modes = order(wrap(RULES[name]), W)
        assert modes == wanted.get(name[:10], "forward over reverse")


def test_a_rule_that_is_an_object_or_partial_is_a_user_s():
    class Rule:
        def __call__(self, dx, y, x):
            return 2 * dx

    for rule in (Rule(), functools.partial(lambda c, dx, y, x: c * dx, 2.0)):
        function = jax.custom_jvp(jnp.rint)
        function.defjvps(rule)
        assert order(function, 1.0) == "reverse over forward"


# --------------------------------------------------------- all orders, modes, optimizers, states


def network(w, alpha, batch):
    x, y = batch
    hidden = jax.nn.softmax(x @ w["in"]) + jax.nn.gelu(x @ w["in"])
    return jnp.mean((hidden @ w["out"] - y) ** 2) + jnp.exp(alpha) * jnp.sum(w["in"] ** 2)


def setup():
    rng = np.random.default_rng(0)
    batch = jnp.asarray(rng.normal(size=(6, 3))), jnp.asarray(rng.normal(size=6))
    w = {"in": jnp.asarray(rng.normal(size=(3, 4))), "out": jnp.asarray(rng.normal(size=4))}
    return jax.tree.map(lambda x: x.astype(jnp.result_type(float)), (batch, w))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: 0.1, lambda: optax.adam(0.1, eps=0.1)], ids=["sgd", "adam"]
)
def test_derivatives_of_all_orders_and_modes_agree(make):
    batch, w = setup()
    solver = bilevel.unrolled(make(), 3)

    def value(alpha):
        return jnp.sum(solver.run(network, alpha, w, solver.init(w), batch)[0]["out"] ** 3)

    alpha = jnp.array(-0.5)
    slope = jax.grad(value)
    assert_close(slope(alpha), finite_differences(value, alpha), f64=1e-8, f32=5e-2)
    assert_close(slope(alpha), jax.jvp(value, (alpha,), (1.0,))[1], f64=1e-12, f32=1e-5)
    second = jax.grad(slope)(alpha)
    assert_close(second, finite_differences(slope, alpha), f64=1e-8, f32=5e-2)
    assert_close(second, jax.jacfwd(slope)(alpha), f64=1e-11, f32=1e-4)
    along = lambda a: jax.jvp(value, (a,), (1.0,))[1]  # noqa: E731
    assert_close(second, jax.grad(along)(alpha), f64=1e-11, f32=1e-4)
    batched = jax.vmap(slope)(jnp.stack([alpha, alpha + 1]))
    assert_close(batched, jnp.stack([slope(alpha), slope(alpha + 1)]), f64=1e-12, f32=1e-5)


@pytest.mark.slow
def test_the_batch_the_start_and_values_closed_over_are_differentiated():
    batch, w = setup()
    solver = bilevel.unrolled(0.1, 3)

    def value(theta):
        batch, w, alpha = theta
        lower = lambda w, _, batch: network(w, alpha, batch)  # noqa: E731
        return jnp.sum(solver.run(lower, None, w, solver.init(w), batch)[0]["out"] ** 3)

    theta = batch, w, jnp.array(-0.5)
    assert_close(jax.grad(value)(theta), finite_differences(value, theta), f64=1e-8, f32=5e-2)


@pytest.mark.slow
def test_variables_of_all_types_carry_their_derivatives():
    """The gradient of a step depends on a moving average, which depends on the last weights."""

    def lower(w, alpha, batch):
        mean, count = w.variables["mean"], w.variables["count"]
        loss = jnp.sum(jnp.cosh(w.params - alpha)) + jnp.sum(mean * w.params**2)
        mean = 0.5 * mean + 0.5 * jnp.tanh(w.params * alpha)
        return loss, {"mean": mean, "count": count + 1}

    outer = lambda w, alpha, batch: jnp.sum(jnp.sin(w.params))  # noqa: E731
    problem = bilevel.Problem(lower, outer, stateful=True, differentiated=True)
    start = bilevel.Stateful(W, {"mean": 0 * W, "count": jnp.array(0)})
    solver = bilevel.unrolled(optax.adam(0.1), STEPS)
    fn = bilevel.hypergradient(problem, solver, diagnostics=False)
    hyper = fn(ALPHA, start, None, None)
    value = lambda alpha: fn(alpha, start, None, None).value  # noqa: E731
    assert_close(hyper.grad, finite_differences(value, ALPHA), f64=1e-8, f32=5e-2)
    assert hyper.w.variables["count"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_fresh_batches_learned_rates_and_averages_are_differentiated(mode):
    data = jnp.asarray(np.random.default_rng(1).normal(size=(8, 3)), W.dtype)
    solver = bilevel.unrolled(
        lambda alpha: optax.sgd(alpha[0], momentum=alpha[1]),
        STEPS,
        batches=lambda key, data: jax.random.choice(key, data, (3,)),
        average=lambda alpha: jax.nn.softmax(jnp.arange(STEPS) * alpha[2]),
    )
    problem = bilevel.Problem(
        lambda w, alpha, batch: jnp.mean(jnp.cosh(batch - w)),
        lambda w, alpha, batch: jnp.sum(jnp.sin(w)),
    )
    fn = bilevel.hypergradient(problem, solver, mode=mode, diagnostics=False)
    train, alpha = (jax.random.key(3), data), jnp.array([0.1, 0.5, 0.3], W.dtype)
    value = lambda alpha: fn(alpha, W, train, None).value  # noqa: E731
    gradient = fn(alpha, W, train, None).grad
    assert_close(gradient, finite_differences(value, alpha), f64=1e-8, f32=5e-2)


def test_a_step_s_nan_loss_reaches_the_hypergradient():
    """A hinge hides a NaN from the gradient; the weights show it, and all that comes of them."""

    def lower(w, alpha, batch):
        return jnp.sum((w - alpha) ** 2) + jax.lax.stop_gradient(jnp.log(-jnp.sum(w**2)))

    problem = bilevel.Problem(lower, lambda w, alpha, batch: jnp.sum(w**2))
    fn = bilevel.hypergradient(problem, bilevel.unrolled(0.1, 3), diagnostics=False)
    hyper = fn(ALPHA, W, None, None)
    assert jnp.isnan(hyper.value) and jnp.isnan(hyper.grad).all()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["jax_debug_nans", "jax_enable_checks"])
def test_mixed_mode_works_under_jax_s_flags(flag):
    batch, w = setup()
    problem = bilevel.Problem(network, lambda w, alpha, batch: jnp.sum(w["out"] ** 2))
    fn = bilevel.hypergradient(
        problem, bilevel.unrolled(optax.sgd(0.1, momentum=0.9), 3), diagnostics=False
    )
    alpha = jnp.array(0.3, w["out"].dtype)
    plain = fn(alpha, w, batch, batch).grad
    with jax.numpy_dtype_promotion("strict"), jax.checking_leaks():
        assert_close(jax.jit(fn)(alpha, w, batch, batch).grad, plain, f64=1e-12, f32=1e-5)
    jax.config.update(flag, True)
    try:
        assert_close(jax.jit(fn)(alpha, w, batch, batch).grad, plain, f64=1e-12, f32=1e-5)
    finally:
        jax.config.update(flag, False)
