"""Every solver's hypergradient: common properties, modes, states and memory."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, cast, finite_differences, hypergradient, long_except, tolerance
from jax.flatten_util import ravel_pytree
from problems import decay, least_squares, logistic, logistic_loss, logits, mean_squares, mixed

import bilevel
from bilevel.hypergradients.hypergradient import stateful_hypergradient
from bilevel.internal import memory

STEP_SIZE = 0.1


def dense_newton(alpha, w, batch):
    """Solve by ten Newton steps with the whole Hessian, as a user's solver for ``solved``."""
    flat, unravel = ravel_pytree(w)

    def loss(v):
        return logistic().problem.lower(unravel(v), alpha, batch)

    def step(_, v):
        return v - jnp.linalg.solve(jax.hessian(loss)(v), jax.grad(loss)(v))

    return unravel(jax.lax.fori_loop(0, 10, step, flat))


def solvers(at=lambda alpha: alpha):
    """Return solvers by name. Functions of alpha that they call read ``at(alpha)``."""
    tol = tolerance(1e-12, 1e-7)  # finite differences of the value amplify errors
    newton, lbfgs, cg = bilevel.newton(tol=tol), bilevel.lbfgs(tol=tol), bilevel.cg()
    descent = bilevel.unrolled(STEP_SIZE, 600)

    def penalty(alpha):
        return decay(at(alpha))

    gram = bilevel.gram(lambda w, a, b: logits(w, at(a), b), logistic_loss, damping=penalty)
    solved = bilevel.solved(lambda alpha, w, batch: dense_newton(at(alpha), w, batch))
    return {
        "gradient descent": bilevel.unrolled(STEP_SIZE, 20),
        "momentum": bilevel.unrolled(optax.sgd(0.05, momentum=0.9), 10),
        "adam": bilevel.unrolled(optax.adam(0.1, eps_root=0.1), 10),
        "in blocks": bilevel.unrolled(STEP_SIZE, 150),
        "implicit newton cg": bilevel.implicit(newton, cg),
        "implicit newton dense": bilevel.implicit(newton, bilevel.dense()),
        "implicit newton gram": bilevel.implicit(newton, gram),
        "implicit lbfgs cg": bilevel.implicit(lbfgs, cg),
        "implicit unrolled dense": bilevel.implicit(descent, bilevel.dense()),
        "implicit solved cg": bilevel.implicit(solved, cg),
        "ridge": bilevel.ridge(lambda alpha, x: mixed(at(alpha), x), penalty),
    }


SOLVERS = solvers()
# Tests with long compilations omit solvers that share code with others.
SHARED = ("momentum", "implicit lbfgs cg", "implicit unrolled dense", "implicit solved cg")
DISTINCT = [name for name in SOLVERS if name not in SHARED]
ONCE = ("implicit newton dense", "implicit newton gram", "in blocks")  # one inverse in CI
TYPICAL = ("gradient descent", "implicit newton cg", "ridge")


def case_of(name):
    return least_squares() if name == "ridge" else logistic()


def hypergradient_of(name, mode="reverse"):
    return bilevel.hypergradient(case_of(name).problem, SOLVERS[name], mode=mode, diagnostics=False)


@functools.cache
def compiled(name, mode="reverse"):
    """Return the compiled hypergradient, which raises when other values trace it again."""
    fn = hypergradient_of(name, mode)
    fn.__name__ = f"{name}, {mode}"  # chex identifies functions by their names
    return jax.jit(chex.assert_max_traces(fn, n=1))


@pytest.mark.parametrize("name", SOLVERS)
def test_hypergradient_matches_finite_differences_of_its_own_value(name):
    case, fn = case_of(name), compiled(name)
    expected = finite_differences(lambda alpha: fn(alpha, *case.args[1:]).value, case.alpha)
    assert_close(fn(*case.args).grad, expected, f64=1e-8)


@pytest.mark.parametrize("backprop", [1, 5])
def test_truncated_hypergradient_is_that_of_the_last_steps_alone(backprop):
    case = logistic()

    def run(steps, w0, backprop=None):
        solver = bilevel.unrolled(STEP_SIZE, steps, backprop=backprop)
        fn = bilevel.hypergradient(case.problem, solver, diagnostics=False)
        return fn(case.alpha, w0, case.train, case.valid)

    @jax.jit
    def gradients(w0):
        return run(20, w0, backprop).grad, run(backprop, run(20 - backprop, w0).w).grad

    assert_close(*gradients(case.w0), f64=1e-12, f32=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(set(DISTINCT) - set(ONCE), DISTINCT))
def test_forward_mode_equals_reverse_mode(name):
    case = case_of(name)
    forward, reverse = (compiled(name, mode)(*case.args) for mode in ("forward", "reverse"))
    # Truth: the same derivative the other way; what CG leaves is 1e-10.
    assert_close(forward.grad, reverse.grad, f32=1e-4)
    assert_close((forward.value, forward.w), (reverse.value, reverse.w), f64=1e-14, f32=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", DISTINCT)
def test_vmap_over_alpha_equals_a_loop(name):
    case, rng = case_of(name), np.random.default_rng(5)
    alphas = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=(3, *x.shape)), case.alpha)
    mapped = jax.jit(jax.vmap(hypergradient_of(name), (0, None, None, None)))
    mapped = mapped(alphas, *case.args[1:])
    for i in range(3):
        one = compiled(name)(jax.tree.map(lambda x, i=i: x[i], alphas), *case.args[1:])
        batched = jax.tree.map(lambda x, i=i: x[i], mapped)
        # Truth: one at a time. Batched matrix products are summed in another order.
        assert_close((batched.value, batched.grad), (one.value, one.grad), f64=1e-10, f32=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TYPICAL, "implicit solved cg", "implicit newton gram"])
def test_hyperparameters_closed_over_have_the_same_hypergradient(name):
    case = case_of(name)

    def closed(alpha):
        def bind(loss):
            return lambda w, _, batch: loss(w, alpha, batch)

        problem = bilevel.Problem(bind(case.problem.lower), bind(case.problem.outer))
        solver = solvers(lambda _: alpha)[name]
        return bilevel.hypergradient(problem, solver, diagnostics=False)((), *case.args[1:]).value

    grad = jax.jit(jax.grad(closed))(case.alpha)
    assert_close(grad, compiled(name)(*case.args).grad, f64=1e-8, f32=1e-4)


IN_FLOAT32 = ("implicit newton cg", "ridge", "adam", "implicit newton gram", "implicit lbfgs cg")


@pytest.mark.slow
@helpers.float64_only
@pytest.mark.parametrize("name", long_except(IN_FLOAT32[:3], IN_FLOAT32))
def test_float32_gives_the_same_hypergradient_in_float32(name):
    case = case_of(name)
    result = hypergradient(case.problem, SOLVERS[name], *cast(case.args, jnp.float32))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(result))
    assert_close(result.grad, compiled(name)(*case.args).grad, f64=1e-4)  # truth: float64


@pytest.mark.slow
@pytest.mark.parametrize(("outer", "forward"), [(jax.grad, "newton"), (jax.jacfwd, "lbfgs")])
def test_second_derivatives_inside_loops_are_those_outside(forward, outer):
    """Truth: w^3 + w = alpha has w' = 1 / (3 w^2 + 1), and w'' = -6 w w'^3."""
    problem = bilevel.Problem(lambda w, a, b: w**4 / 4 + w**2 / 2 - a * w, lambda w, a, b: w**2)
    solver = bilevel.implicit(getattr(bilevel, forward)())
    solve = bilevel.hypergradient(problem, solver, diagnostics=False)

    def looped(alpha):
        return jax.lax.map(lambda a: solve(a, jnp.zeros(()), None, None).value, alpha[None])[0]

    w, slope = 0.7, 1 / (3 * 0.7**2 + 1)
    actual = jax.jit(outer(jax.grad(looped)))(jnp.asarray(w**3 + w))
    assert_close(actual, 2 * slope**2 - 12 * w**2 * slope**3, f64=1e-9, f32=1e-4)


def test_implicit_hypergradient_has_reverse_derivatives_of_every_order():
    """Truth: w^3 + w = alpha has w' = 1 / (3 w^2 + 1) = s, w'' = -6 w s^3, and so on."""
    problem = bilevel.Problem(lambda w, a, b: w**4 / 4 + w**2 / 2 - a * w, lambda w, a, b: w**2)
    solve = bilevel.hypergradient(problem, bilevel.implicit(), diagnostics=False)

    def hypergrad(alpha):
        return solve(alpha, jnp.zeros(()), None, None).grad

    w, s = 0.7, 1 / (3 * 0.7**2 + 1)
    second, third = -6 * w * s**3, -6 * s**4 + 108 * w**2 * s**5
    alpha = jnp.asarray(w**3 + w)
    once, twice = jax.jit(jax.value_and_grad(jax.grad(hypergrad)))(alpha)
    assert_close(once, 2 * s**2 + 2 * w * second, f64=1e-9, f32=1e-4)
    assert_close(twice, 6 * s * second + 2 * w * third, f64=1e-9, f32=1e-3)


def test_implicit_hypergradient_with_a_constant_hessian_has_reverse_derivatives():
    """Truth: w = sin(alpha), so the outer loss is sin(alpha)^3."""
    problem = bilevel.Problem(lambda w, a, b: 0.5 * (w - jnp.sin(a)) ** 2, lambda w, a, b: w**3)
    solve = bilevel.hypergradient(problem, bilevel.implicit(), diagnostics=False)
    second = jax.grad(lambda alpha: solve(alpha, jnp.zeros(()), None, None).grad)
    once, twice = jax.jit(jax.value_and_grad(second))(jnp.asarray(0.7))
    sine, cosine = np.sin(0.7), np.cos(0.7)
    assert_close(once, 6 * sine * cosine**2 - 3 * sine**3, f64=1e-9, f32=1e-4)
    assert_close(twice, 6 * cosine**3 - 21 * sine**2 * cosine, f64=1e-9, f32=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "outer", "inner"),
    [
        ("gradient descent", jax.jacfwd, jax.jacrev),
        ("gradient descent", jax.jacrev, jax.grad),
        ("ridge", jax.jacfwd, jax.jacrev),
        ("implicit newton cg", jax.jacfwd, jax.jacrev),
        ("implicit newton cg", jax.jacrev, jax.grad),
        ("implicit newton cg", jax.jacfwd, jax.jacfwd),
    ],
)
def test_hessian_of_the_value_function_matches_finite_differences(name, outer, inner):
    case, fn = case_of(name), hypergradient_of(name)
    flat, unravel = ravel_pytree(case.alpha)
    matrix = jax.jit(outer(inner(lambda a: fn(unravel(a), *case.args[1:]).value)))(flat)
    grad = compiled(name)
    expected = finite_differences(lambda alpha: grad(alpha, *case.args[1:]).grad, case.alpha)
    assert_close(matrix, expected, f64=1e-7, f32=5e-3)


def value_at(solver):
    case = logistic()
    fn = bilevel.hypergradient(case.problem, solver, diagnostics=False)
    return lambda w0: fn(case.alpha, w0, case.train, case.valid).value


@pytest.mark.parametrize("name", ["implicit newton cg", "implicit unrolled dense", "truncated"])
def test_value_that_forgets_its_start_has_derivative_zero_in_it(name):
    solver = bilevel.unrolled(STEP_SIZE, 6, backprop=5) if name == "truncated" else SOLVERS[name]
    assert not jax.jit(jax.grad(value_at(solver)))(logistic().w0).any()


def test_unrolled_value_has_the_exact_derivative_in_the_starting_point():
    helpers.assert_gradient(value_at(bilevel.unrolled(STEP_SIZE, 6)), logistic().w0, f64=1e-9)


def compiled_step(solver, case):
    return jax.jit(stateful_hypergradient(case.problem, solver, diagnostics=False))


def test_implicit_state_carries_the_adjoint():
    case, solver = logistic(12, 9), bilevel.implicit()
    step = compiled_step(solver, case)
    result, state = step(case.alpha, case.w0, solver.init(case.w0), *case.args[2:])
    force = jax.jit(jax.grad(case.problem.outer))(result.w, case.alpha, case.valid)
    hessian = helpers.lower_hessian(case.problem.lower, result.w, case.alpha, case.train)
    assert_close(state.adjoint, np.linalg.solve(np.asarray(hessian), np.asarray(force)))


def test_optimizer_state_continues_from_one_hypergradient_to_the_next():
    case = logistic()
    five, ten = (bilevel.unrolled(optax.sgd(0.05, momentum=0.9), n) for n in (5, 10))
    step = compiled_step(five, case)
    first, state = step(case.alpha, case.w0, five.init(case.w0), *case.args[2:])
    second, _ = step(case.alpha, first.w, state, *case.args[2:])
    expected, _ = compiled_step(ten, case)(case.alpha, case.w0, ten.init(case.w0), *case.args[2:])
    assert_close(second.w, expected.w, f64=1e-14, f32=1e-6)


WEIGHTS = 1000
COPY = 4 * WEIGHTS  # bytes of one float32 copy of w


@functools.cache
def temporary_bytes(kind, steps, mode="reverse"):
    """Return the temporary memory of a compiled hypergradient: 1000 weights, 50 samples."""

    def lower(w, alpha, batch):
        return mean_squares(w, alpha, batch) + 0.5 * jnp.sum(jnp.exp(alpha[0]) * w**2)

    problem, solver = bilevel.Problem(lower, mean_squares), bilevel.unrolled(1e-3, steps)
    solver = bilevel.implicit(solver) if kind == "implicit" else solver
    fn = bilevel.hypergradient(problem, solver, mode=mode, diagnostics=False)
    batch = np.zeros((50, WEIGHTS), np.float32), np.zeros(50, np.float32)
    args = np.zeros(3, np.float32), np.zeros(WEIGHTS, np.float32), batch, batch
    compiled = jax.jit(lambda *args: fn(*args).grad).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_reverse_mode_keeps_one_copy_of_the_weights_for_each_step():
    two, few, many = (temporary_bytes("unrolled", t) for t in (2, 100, 10_000))
    for steps, used in ((100, few), (10_000, many)):
        assert used < (steps - 1) * COPY + two


def test_reverse_mode_memory_grows_with_the_root_of_the_steps_if_memory_is_short(monkeypatch):
    monkeypatch.setattr(memory, "total_memory", lambda: 0)
    numbers = 2, 100, 1000, 10_000
    two, few, more, most = (temporary_bytes.__wrapped__("unrolled", t) for t in numbers)
    # The starts of sqrt(T) blocks, the steps of one block, and the memory of one step.
    for steps, used in ((100, few), (1000, more), (10_000, most)):
        assert used < (2 * steps**0.5 - 1) * COPY + two
    assert most < 10**0.5 * more


@pytest.mark.parametrize(("kind", "mode"), [("unrolled", "forward"), ("implicit", "reverse")])
def test_memory_of_forward_mode_and_of_implicit_does_not_depend_on_the_steps(kind, mode):
    few, many = (temporary_bytes(kind, steps, mode) for steps in (10, 10_000))
    assert many <= 1.01 * few
    assert kind == "unrolled" or many < 20 * COPY
