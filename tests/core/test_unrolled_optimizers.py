"""Unroll every optimizer: correct derivatives at zero gradients, and unchanged values."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, flatten, float64_only, hypergradient, loop_of_steps
from problems import case

import bilevel

EPS = 1e-2  # large, so that a difference quotient much finer than it can be formed
STEPS = 6  # RAdam changes its formula at the fifth

# If alpha moves a gradient of 0, these have a slope there, 1 / eps for Adam.
SMOOTH = {
    "adabelief": optax.adabelief(0.05, eps=EPS),
    "adadelta": optax.adadelta(0.05, eps=EPS),
    "adafactor": optax.adafactor(0.05, eps=EPS, multiply_by_parameter_scale=False),
    "adagrad": optax.adagrad(0.05, eps=EPS),
    "adagrad from 0": optax.adagrad(0.05, initial_accumulator_value=0.0, eps=EPS),
    "adam": optax.adam(0.05, eps=EPS),
    "adamax": optax.adamax(0.05, eps=EPS),
    "adopt": optax.contrib.adopt(0.05, eps=EPS),
    "amsgrad": optax.amsgrad(0.05, eps=EPS),
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05, eps=EPS)),
    "momentum": optax.sgd(0.05, momentum=0.9, nesterov=True),
    "nadam": optax.nadam(0.05, eps=EPS),
    "novograd": optax.novograd(0.05, eps=EPS),
    "radam": optax.radam(0.05, b2=0.9, eps=EPS, threshold=4.5),
    "rmsprop": optax.rmsprop(0.05, eps=EPS),
    "rmsprop, eps outside": optax.rmsprop(0.05, eps=EPS, eps_in_sqrt=False, bias_correction=True),
    "rmsprop, centered": optax.rmsprop(0.05, eps=EPS, centered=True, momentum=0.9),
    "sm3": optax.sm3(0.05),
    "yogi": optax.yogi(0.05, eps=EPS),
}
# These jump there. Their slope is 0 if alpha does not move the gradient.
JUMPING = {
    "lamb": optax.lamb(0.05, eps=EPS),
    "lion": optax.lion(0.05),
    "sign_sgd": optax.sign_sgd(0.05),
}


def lower(w, alpha, batch):
    x, y, moved = batch
    features = jnp.exp(alpha["mix"]) * x
    data = 0.5 * jnp.mean((features @ w["seen"] - y) ** 2)
    return data + alpha["slope"] @ (moved * w["new"])


def outer(w, alpha, batch):
    return jnp.sum(jnp.cos(w["seen"]) * jnp.arange(1.0, 6)) + jnp.sum(jnp.sin(w["new"]))


def dead_and_alive(seed, moved):
    """Two columns of ``x`` are 0; ``w["new"]``, if moved, has a gradient of 0 with a slope."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, 5))
    x[:, rng.permutation(5)[:2]] = 0
    w0 = {"seen": rng.normal(size=5), "new": rng.normal(size=2)}
    alpha = {"mix": rng.normal(size=5), "slope": np.zeros(2)}
    return case(lower, outer, alpha, w0, (x, rng.normal(size=8), np.full(2, moved)), ())


def quotient(value, alpha, *rest):
    """Return central differences with steps far below EPS, in float64."""
    leaves, structure = jax.tree.flatten(alpha)

    def at(k, i, h):
        moved = [np.array(x) for x in leaves]
        moved[k].flat[i] += h
        return float(value(jax.tree.unflatten(structure, moved), *rest))

    h, places = 1e-7, [(k, i) for k, x in enumerate(leaves) for i in range(x.size)]
    return [(at(*place, h) - at(*place, -h)) / (2 * h) for place in places]


@pytest.mark.long
@pytest.mark.parametrize("name", ["adagrad from 0", "lamb", "radam"])
def test_the_weights_are_the_optimizers_own_to_the_last_bit_or_two(name):
    optimizer, small = (SMOOTH | JUMPING)[name], dead_and_alive(0, 1.0)
    solver = bilevel.unrolled(optimizer, STEPS)

    @jax.jit
    def run(alpha, w, train):
        return solver.run(lower, alpha, w, solver.init(w), train)[0]

    @jax.jit
    def loop(alpha, w, train):
        return loop_of_steps(lower, optimizer, w, alpha, train, STEPS)

    weights, plain = run(*small.args[:3]), loop(*small.args[:3])  # truth: without this package
    assert np.isfinite(flatten(plain)).all()
    assert_close(weights, plain, f64=5e-16, f32=3e-7)
    assert_close(hypergradient(small.problem, solver, *small.args).w, plain, f64=1e-14, f32=1e-6)


@pytest.mark.long
def test_second_derivatives_are_right_where_gradients_are_0():
    small = dead_and_alive(1, 0.0)
    solver, mix = bilevel.unrolled(SMOOTH["adam"], STEPS), small.alpha["mix"]
    fn = bilevel.hypergradient(small.problem, solver, diagnostics=False)
    grad = jax.jit(lambda mix: fn(small.alpha | {"mix": mix}, *small.args[1:]).grad["mix"])
    expected = helpers.finite_differences(grad, mix)
    assert_close(jax.jit(jax.jacobian(grad))(mix), expected, f64=1e-8, f32=3e-2)


@pytest.mark.long
@float64_only
@pytest.mark.parametrize("name", [*SMOOTH, *JUMPING])
def test_hypergradient_is_the_difference_quotient_where_gradients_are_0(name):
    solver = bilevel.unrolled((SMOOTH | JUMPING)[name], STEPS)
    fn = jax.jit(bilevel.hypergradient(bilevel.Problem(lower, outer), solver, diagnostics=False))
    for seed in range(3):
        small = dead_and_alive(seed, 1.0 if name in SMOOTH else 0.0)
        if name in ("lion", "sign_sgd"):  # steps of one size: 0 wherever there is a derivative
            with pytest.raises(ValueError, match=r"a sign, or .*would be 0"):
                fn(*small.args)
            return
        result = fn(*small.args)
        expected = quotient(lambda *args: fn(*args).value, *small.args)
        assert np.isfinite(expected).all()
        rounding = 1e-8 / max(np.max(np.abs(expected)), 1e-6)  # of the differences
        assert_close(result.grad, expected, f64=3e-5 + rounding)


SIGNED = {  # one step from zero weights; truth by hand: at w = 0 the branch for "not positive"
    "a subgradient of |w|": (lambda a, g, p: -0.1 * (g + a * jnp.where(p > 0, 1.0, -1.0)), 0.1),
    "a rate or none": (lambda a, g, p: 1.0 - a * jnp.where(p > 0, 1.0, 0.0), 0.0),
    "by the gradient's sign": (lambda a, g, p: a * jnp.where(g + 1.0 > 0, 1.0, -2.0), -2.0),
}


@pytest.mark.parametrize("name", SIGNED)
def test_a_step_may_branch_on_the_sign_of_a_weight_or_a_gradient(name):
    step, expected = SIGNED[name]

    def make(alpha):
        return optax.GradientTransformation(
            lambda w: optax.EmptyState(), lambda g, s, w=None: (step(alpha, g, w), s)
        )

    problem = bilevel.Problem(lambda w, a, b: -jnp.sum(w), lambda w, a, b: jnp.sum(w))
    start = jnp.array(0.3), jnp.zeros(1), None, None
    assert_close(hypergradient(problem, bilevel.unrolled(make, 1), *start).grad, expected, f32=1e-6)


@pytest.mark.parametrize("at", [0, 2])
def test_a_learned_schedule_may_branch_on_the_count_of_steps(at):
    """``where(n - at > 0, ...)``, at n = at too, where a guard of Adagrad's would be opened."""

    def make(alpha):
        after = lambda n: alpha[0] * (1 - (n - at) / 4.0)  # noqa: E731
        return optax.sgd(lambda n: jnp.where((n - at) / 4.0 > 0, after(n), alpha[1]))

    problem = bilevel.Problem(lambda w, a, b: jnp.sum((w - 1) ** 2) / 2, lambda w, a, b: w.sum())
    alpha = jnp.array([0.3, 0.1])
    hyper = hypergradient(problem, bilevel.unrolled(make, 5), alpha, jnp.zeros(1), None, None)
    # Truth: w_5 - 1 is minus the product of 1 - rate over the steps.
    rates = lambda a: [a[1] if n <= at else a[0] * (1 - (n - at) / 4) for n in range(5)]  # noqa: E731
    expected = jax.grad(lambda a: 1 - jnp.prod(1 - jnp.stack(rates(a))))(alpha)
    assert_close(hyper.grad, expected, f64=1e-14, f32=1e-6)


@pytest.mark.long
def test_an_error_names_the_leaf_the_optimizer_and_a_remedy():
    """Adafactor's slope is 1e15 at a gradient of 0; Prodigy's first step there is 0 / 0."""

    def flat(w, alpha, batch):
        return 0.5 * jnp.sum((w["seen"] - 1.0 - (alpha["a"] - jnp.float32(0.1))) ** 2)

    problem = bilevel.Problem(flat, lambda w, alpha, batch: jnp.sum(w["seen"] ** 2))
    single = {"a": jnp.float32(0.1)}, {"seen": jnp.ones(2, jnp.float32)}, None, None
    for rule, message in {
        optax.adafactor(0.1): r"hypergradient: .*FactoredState.* in alpha\['a'\]: .*larger eps",
        optax.contrib.prodigy(0.1): r"lower loss: .*w\['seen'\] left the numbers' range; a smaller",
    }.items():
        args = problem, bilevel.unrolled(rule, 3), optax.sgd(0.1), *single
        with pytest.raises(bilevel.NonFiniteError, match=message):
            bilevel.search(*args, steps=1)
