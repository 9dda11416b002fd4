"""The activation search space and its network; searches of several seeds and their verdicts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, batch, finite_differences, loop_of_steps

import bilevel
from bilevel import data
from bilevel.spaces.activations import activation_space, sign_labels, unit_inputs
from bilevel.strategies import activation_search as searches
from bilevel.strategies.activation_search import ActivationTask, judge_argmax, set_up, solver


@functools.cache
def digits(classes):
    """Unit inputs and sign labels of 100 training and 100 validation digits."""
    digits = data.load("digits")
    rows = digits.y_train < classes
    x, y = digits.x_train[rows], digits.y_train[rows]
    parts = data.stratified_split(jax.random.key(0), y, (100, 100))
    xs = unit_inputs(*(jnp.asarray(x[r], float) for r in parts))
    return [(a, sign_labels(y[r], classes)) for a, r in zip(xs, parts, strict=True)]


def test_the_network_is_its_formula():
    """Truth: Oymak section 4.2 in numpy for one input and two activations."""
    space = activation_space(["tanh", lambda z: z**2], width=4, output_scale=3.0)
    w = np.arange(8.0).reshape(4, 2) / 8
    x, alpha = np.array([0.6, 0.8]), np.array([0.3, 0.7])
    hidden = 0.3 * np.tanh(w @ x) + 0.7 * (w @ x) ** 2
    signs = np.array([1, -1, 1, -1])
    expected = np.sqrt(3.0 / 4) * signs @ hidden
    assert_close(space.apply(*map(jnp.asarray, (w, alpha, x[None]))), expected[None], f32=1e-5)


def test_output_signs_are_balanced_and_orthogonal():
    space = activation_space(["identity"], width=32, classes=10)
    signs = np.asarray(space.apply(jnp.eye(32), jnp.ones(1), jnp.eye(32))) * np.sqrt(32)
    np.testing.assert_allclose(signs.sum(0), 0, atol=1e-4)
    np.testing.assert_allclose(signs.T @ signs, 32 * np.eye(10), atol=1e-3)


@pytest.mark.long
def test_curvatures_are_the_largest_eigenvalues_of_the_linearised_lower_loss():
    space = activation_space(["relu", "sigmoid"], width=8, classes=3)
    (x, _), _ = digits(3)
    x = x[:20, :12]
    w = space.init(jax.random.key(1), batch(1, 12))
    for alpha, curvature in zip(jnp.eye(2), space.curvatures(w, x), strict=True):
        jacobian = jax.jacobian(lambda w, a=alpha: space.apply(w, a, x))(w).reshape(60, -1)
        largest = np.linalg.eigvalsh(np.asarray(jacobian @ jacobian.T))[-1]
        assert 0.9 * largest < curvature < (1 + 1e-4) * largest


@pytest.mark.long
def test_fifty_steps_nearly_interpolate_for_every_alpha():
    """At most 10 % of the squared loss remains, on the labels' own scale."""
    names = ("relu", "leaky_relu", "sigmoid", "tanh", "swish", "gelu")
    space = activation_space(names, width=512, classes=10)
    train, _ = digits(10)
    w = space.init(jax.random.key(0), train)
    solver = space.solver(space.curvatures(w, train[0]))

    @jax.jit
    def trained(alpha):
        w_alpha, _ = solver.run(space.problem.lower, alpha, w, solver.init(w), train)
        predictions = space.apply(w_alpha, alpha, train[0])
        error = jnp.mean(space.predict(predictions) != space.predict(train[1]))
        return space.problem.lower(w_alpha, alpha, train), error

    for alpha in (*jnp.eye(6), jnp.full(6, 1 / 6)):
        loss, error = trained(alpha)
        assert loss < 0.1 * 0.5 * train[1].size
        assert error == 0


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "outer"), [(2, "hinge"), (2, "logistic"), (10, "squared")])
def test_the_search_hypergradient_is_the_derivative_of_the_whole_training(outer, classes):
    if outer == "hinge" and not jax.config.jax_enable_x64:
        pytest.skip("a difference in float32 needs a step so wide that it straddles the kinks")
    space = activation_space(["sigmoid", "tanh", "swish"], width=16, classes=classes, outer=outer)
    (x, y), (xv, yv) = digits(classes)
    train, valid = (x[:30], y[:30]), (xv[:30], yv[:30])
    w = space.init(jax.random.key(2), (x, y))
    solver = space.solver(space.curvatures(w, train[0]), steps=6)
    fn = jax.jit(bilevel.hypergradient(space.problem, solver, diagnostics=False))
    alpha = jnp.array([0.2, 0.3, 0.5])
    truth = finite_differences(lambda alpha: fn(alpha, w, train, valid).value, alpha)
    f64 = 1e-3 if outer == "hinge" else 1e-6  # a difference may straddle a kink of the hinge
    assert_close(fn(alpha, w, train, valid).grad, truth, f64=f64, f32=3e-2)


def test_unit_inputs_of_rows_at_the_mean_are_nan_when_traced():
    assert np.isnan(jax.jit(unit_inputs)(jnp.ones((2, 3)))).all()
    tenths = jnp.full((7, 3), 0.1, jnp.float32)  # their sum divided by 7 is not 0.1
    assert np.isnan(jax.jit(unit_inputs)(tenths)).all()


def test_unit_inputs_are_centred_on_the_training_rows():
    x, other = np.random.default_rng(0).normal(1.0, 1.0, (2, 10, 2, 3))
    unit, moved = unit_inputs(x, other)
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 1, rtol=1e-5)
    row = (other[4] - x.mean(0)).ravel()
    np.testing.assert_allclose(moved[4], row / np.linalg.norm(row), rtol=1e-4)
    assert unit.shape == (10, 6)


# ----------------------------------------------------------------------------- width = inf

KERNEL_NAMES = ("relu", "tanh")
ALPHA = {"mixture": np.array([0.3, 0.7]), "log_penalty": np.log(0.2)}


def kernel_search(classes, rows):
    space = activation_space(KERNEL_NAMES, width=math.inf, classes=classes)
    (x, y), (xv, yv) = ((x[:rows], y[:rows]) for x, y in digits(classes))
    return space, (space.blocks(x), y), (space.blocks(xv, x), yv)


@pytest.mark.long
def test_the_infinite_network_is_ridge_on_the_gradients_of_a_wide_one():
    """Truth: primal ridge on the tangent features of a finite network, error 1 / sqrt(width)."""
    width, rows = 2**11, 8
    wide = activation_space(KERNEL_NAMES, width=width)
    w = wide.init(jax.random.key(0), batch(1, 64))

    @jax.jit
    def features(alpha, x):
        return jax.jacobian(wide.apply)(w, alpha["mixture"], x).reshape(len(x), -1)

    (x, y), (xv, _) = digits(2)
    solver = bilevel.ridge(features, lambda alpha: jnp.exp(alpha["log_penalty"]))
    primal, _ = solver.run(None, ALPHA, jnp.zeros(w.size), (), (x[:rows], y[:rows]))
    space, train, valid = kernel_search(2, rows)
    dual, _ = space.solver.run(None, ALPHA, train[1], (), train)
    actual = space.apply(dual, ALPHA, valid[0])
    np.testing.assert_allclose(actual, features(ALPHA, xv[:rows]) @ primal, atol=width**-0.5)
    assert np.abs(actual).max() > 0.3


def test_output_scale_scales_the_kernel_of_infinite_width():
    doubled = activation_space(["relu"], width=math.inf, output_scale=2.0).blocks(jnp.eye(3))
    assert_close(doubled, jnp.eye(3)[None, None], f64=1e-12, f32=1e-6)  # 2 x E[step] = 1


def test_the_lower_loss_is_minimal_at_the_closed_form():
    """Truth: its gradient there is zero, by JAX, and its value is -y'(K + lambda)^-1 y / 2."""
    space, train, _ = kernel_search(10, rows=30)
    w, _ = space.solver.run(space.problem.lower, ALPHA, train[1], (), train)
    value, slope = jax.value_and_grad(space.problem.lower)(w, ALPHA, train)
    assert jnp.abs(slope).max() < 1e-4
    assert_close(value, -0.5 * jnp.vdot(train[1], w), f64=1e-10)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_inputs_whose_squares_leave_the_range_have_directions(scale):
    images = np.random.default_rng(0).integers(0, 256, (6, 8)).astype(np.float32)
    truth = unit_inputs(images.astype(np.float64) if scale == 1 else images)
    np.testing.assert_allclose(unit_inputs(np.float32(scale) * images), truth, atol=1e-6)
    np.testing.assert_allclose(unit_inputs(images.astype(np.float16)), truth, atol=1e-6)


def test_a_candidate_that_is_constant_on_the_data_has_no_curvature():
    space = activation_space(["relu", lambda z: jnp.clip(z, 50, 60)], width=8)
    x = unit_inputs(jax.random.normal(jax.random.key(0), (6, 4)))
    curvatures = space.curvatures(space.init(jax.random.key(0), (x, None)), x)
    assert curvatures[0] > 0 and curvatures[1] == 0


@pytest.mark.long
def test_small_wrong_outputs_do_not_win():
    """Their squared loss is below that of large right ones, so they won at the shared weights."""
    space = activation_space(["relu", "sigmoid", "tanh"], width=16, outer="hinge")
    keys = jax.random.split(jax.random.key(0), 2)
    w = 8 * space.init(keys[0], batch(1, 5))[None]
    x = unit_inputs(jax.random.normal(keys[1], (200, 5)))[None]
    alone = [(w, jnp.eye(3)[i][None]) for i in range(3)]
    y = jnp.sign(space.apply(w[0], jnp.eye(3)[0], x[0]))[None]  # ReLU is right, sigmoid small
    task = ActivationTask(space, w, jnp.ones((1, 3)), *[(x, y)] * 3)
    mixture = jnp.array([[0.2, 0.5, 0.3]]), 0.01 * w
    networks = [alone[0], (-0.01 * w, jnp.eye(3)[1][None]), alone[2]]
    verdict = judge_argmax(task, *mixture, networks)
    assert verdict.choice.tolist() == [1] and verdict.discretise.tolist() == [False]
    assert verdict.by["loss"].best.tolist() == verdict.by["error"].best.tolist() == [0]
    squared = [float(((space.apply(v[0], a[0], x[0]) - y[0]) ** 2).mean()) for v, a in networks]
    assert squared[1] < squared[0]
    # A diverged network ranks last.
    broken = [alone[0], (jnp.nan * w, jnp.eye(3)[1][None]), alone[2]]
    verdict = judge_argmax(task, *mixture, broken)
    assert verdict.discretise.tolist() == [False] and verdict.by["loss"].rank.tolist() == [3]
    # Its outputs are wrong for every class.
    one_class = ActivationTask(space, w, jnp.ones((1, 3)), *[(x, -jnp.ones_like(y))] * 3)
    verdict = judge_argmax(one_class, *mixture, broken)
    assert verdict.by["error"].rank.tolist() == [3] and verdict.by["error"].best.tolist() != [1]


@pytest.mark.long
def test_stacked_seeds_equal_separate_trainings():
    keys = list(jax.random.split(jax.random.key(1), 2))
    rows = data.draw_splits("digits", keys, train=30, valid=30, test=30)
    space = activation_space(["relu", "tanh"], width=32, classes=10)
    together = set_up(space, rows, keys, classes=10)
    alpha = jnp.array([[0.7, 0.3], [0.2, 0.8]])
    w = searches.train_weights(together, solver(together, 8), alpha)
    # A given rate is the step size of SGD with Nesterov's momentum, for every seed.
    sgd, lower = optax.sgd(0.05, 0.9, nesterov=True), jax.vmap(space.problem.lower)
    total = jax.jit(lambda *args: lower(*args).sum())
    own = loop_of_steps(total, sgd, together.w0, alpha, together.train, 8)
    given = searches.train_weights(together, solver(together, 8, rate=0.05), alpha)
    np.testing.assert_allclose(given, own, rtol=1e-5, atol=1e-6)
    for seed in range(2):
        alone = set_up(space, rows[seed : seed + 1], keys[seed : seed + 1], classes=10)
        single = searches.train_weights(alone, solver(alone, 8), alpha[seed : seed + 1])
        np.testing.assert_allclose(w[seed], single[0], rtol=1e-6, atol=1e-7)


@pytest.mark.long
def test_the_error_of_the_hypergradient_is_known_to_a_factor():
    keys = [jax.random.split(key) for key in jax.random.split(jax.random.key(1), 3)]
    rows = data.draw_splits("digits", [key for key, _ in keys], train=40, valid=40, test=40)
    space = activation_space(["relu", "tanh"], width=64, classes=10)
    task = set_up(space, rows, [key for _, key in keys], classes=10)
    alpha = jnp.array([[0.5, 0.5], [0.9, 0.1], [0.3, 0.7]])
    # Truth: training until it interpolates, thirty times as long.
    truth = searches.seed_hypergradients(task, solver(task, 360), alpha).grad
    for kind in ("unrolled", "first-order"):
        way, longer = solver(task, 12, kind), solver(task, 48)
        claimed = searches.hypergradient_error(task, way, longer, alpha)
        error = np.linalg.norm(searches.seed_hypergradients(task, way, alpha).grad - truth, axis=-1)
        ratio = claimed.error / error
        assert (ratio > 1 / 3).all() and (ratio < 10).all(), ratio
        np.testing.assert_allclose(claimed.norm, np.linalg.norm(truth, axis=-1), rtol=0.5)
