"""Geometries: every transformation keeps alpha on its set, and does what its formula says."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import bilevel
from bilevel.geometry import project_simplex

SIMPLEX = {
    "exponentiated sgd": lambda lr: optax.chain(optax.sgd(lr), bilevel.exponentiate()),
    "exponentiated adam": lambda lr: optax.chain(
        bilevel.tangent(), optax.adam(lr), bilevel.exponentiate()
    ),
    "projected sgd": lambda lr: optax.chain(optax.sgd(lr), bilevel.project("simplex")),
    "projected adam": lambda lr: optax.chain(
        bilevel.tangent(), optax.adam(lr), bilevel.project("simplex")
    ),
    "softmax sgd": lambda lr: bilevel.softmax(optax.sgd(lr)),
    "softmax adamw": lambda lr: bilevel.softmax(optax.adamw(lr, weight_decay=1e-3)),
}
every_geometry = pytest.mark.parametrize("make", SIMPLEX.values(), ids=SIMPLEX.keys())


def descend(optimizer, alpha, gradients):
    state = optimizer.init(alpha)
    for g in gradients:
        updates, state = optimizer.update(g, state, alpha)
        alpha = optax.apply_updates(alpha, updates)
    return alpha


def descend_often(optimizer, alpha, gradient, times):
    def step(carry, _):
        alpha, state = carry
        updates, state = optimizer.update(gradient, state, alpha)
        return (optax.apply_updates(alpha, updates), state), None

    return jax.lax.scan(step, (alpha, optimizer.init(alpha)), length=times)[0][0]


def assert_on_simplex(alpha):
    alpha = np.asarray(alpha)
    assert np.isfinite(alpha).all() and (alpha >= 0).all()
    # One rounding per entry: the division by the sum, and the update's addition.
    slack = 2 * alpha.shape[-1] * np.finfo(alpha.dtype).eps
    np.testing.assert_allclose(alpha.sum(-1), 1, rtol=0, atol=slack)


points = hnp.arrays(np.float32, 4, elements=st.floats(0, 1, width=32)).map(
    lambda x: x / x.sum() if x.sum() > 1e-3 else np.eye(4, dtype=np.float32)[0]
)
steep = st.one_of(
    st.sampled_from([0.0, 1e30, -1e30, 1e-30, 3e38, -3e38, 1.0, -1.0]), st.floats(-10, 10, width=32)
)
slopes = hnp.arrays(np.float32, (3, 4), elements=steep)


COMPILED = {
    name: jax.jit(lambda lr, alpha, gradients, make=make: descend(make(lr), alpha, gradients))
    for name, make in SIMPLEX.items()
}


@pytest.mark.parametrize("name", SIMPLEX)
@given(alpha=points, gradients=slopes, lr=st.sampled_from([1e-3, 0.1, 1.0]))
def test_any_gradient_keeps_alpha_on_the_simplex(name, alpha, gradients, lr):
    assert_on_simplex(COMPILED[name](lr, alpha, gradients))


@every_geometry
@pytest.mark.parametrize("dtype", [jnp.float32, float])
def test_descent_finds_the_best_vertex_of_a_linear_loss(make, dtype):
    cost = jnp.array([3.0, 1.0, 2.0], dtype)
    alpha = jax.jit(lambda: descend_often(make(0.1), jnp.full(3, 1 / 3, dtype), cost, 300))()
    assert alpha.dtype == cost.dtype
    assert jnp.argmax(alpha) == 1
    assert alpha[1] > 0.9


@every_geometry
def test_the_last_axis_of_every_leaf_is_a_simplex_of_its_own(make):
    key = jax.random.key(0)
    alpha = {"edges": jnp.full((2, 3, 4), 0.25), "layer": jnp.array([0.5, 0.5])}
    slope = jax.tree.map(lambda a: jax.random.normal(key, a.shape), alpha)
    moved = descend(make(0.5), alpha, [slope])
    jax.tree.map(assert_on_simplex, moved)
    alone = descend(make(0.5), alpha["edges"][1, 2], [slope["edges"][1, 2]])
    np.testing.assert_allclose(moved["edges"][1, 2], alone, rtol=1e-5)


@every_geometry
def test_geometries_work_under_jit_and_vmap(make):
    optimizer = make(0.1)

    def one_step(alpha, slope):
        return descend(optimizer, alpha, [slope])

    alpha = jnp.array([[0.2, 0.8], [0.5, 0.5], [1.0, 0.0]])
    slope = jnp.array([[1.0, 2.0], [0.0, -1.0], [1.0, 1.0]])
    together = jax.jit(jax.vmap(one_step))(alpha, slope)
    apart = jnp.stack([one_step(a, g) for a, g in zip(alpha, slope, strict=True)])
    np.testing.assert_allclose(together, apart, rtol=1e-5, atol=1e-7)


def test_exponentiate_is_the_multiplicative_formula():
    alpha, slope = jnp.array([0.2, 0.3, 0.5]), jnp.array([1.0, -2.0, 0.5])
    moved = descend(optax.chain(optax.sgd(0.7), bilevel.exponentiate()), alpha, [slope])
    weights = np.asarray(alpha) * np.exp(-0.7 * np.asarray(slope))  # truth: the formula in numpy
    np.testing.assert_allclose(moved, weights / weights.sum(), rtol=1e-5)


def test_exponentiate_leaves_a_zero_at_zero_and_moves_the_rest():
    optimizer = optax.chain(optax.sgd(1.0), bilevel.exponentiate())
    moved = descend(optimizer, jnp.array([0.0, 0.5, 0.5]), [jnp.array([-1e30, 0.0, 1.0])])
    assert moved[0] == 0
    np.testing.assert_allclose(moved[1] / moved[2], np.e, rtol=1e-5)


@given(point=hnp.arrays(np.float64, 5, elements=st.floats(-3, 3)))
def test_project_simplex_is_the_nearest_point(point):
    """Truth: the optimality conditions, p = max(x - theta, 0) with sum 1, theta by bisection."""
    low, high = point.min() - 1, point.max()
    for _ in range(100):
        theta = (low + high) / 2
        low, high = (theta, high) if np.maximum(point - theta, 0).sum() > 1 else (low, theta)
    projected = project_simplex(jnp.asarray(point))
    atol = 20 * np.finfo(projected.dtype).eps
    np.testing.assert_allclose(projected, np.maximum(point - theta, 0), atol=atol)


def test_softmax_is_gradient_descent_on_logits():
    """Truth: autodiff through jax.nn.softmax of the same optimizer's logits."""
    logits = jnp.array([0.3, -0.2, 0.0])
    cost = jnp.array([1.0, 2.0, -1.0])
    inner = optax.adamw(0.1, weight_decay=0.01)
    shifted = logits - logits.max()  # the state's normalisation: weight decay sees it
    state, z = inner.init(shifted), shifted
    for _ in range(5):
        slope = jax.grad(lambda z: jnp.vdot(jax.nn.softmax(z), cost) ** 2)(z)
        updates, state = inner.update(slope, state, z)
        z = optax.apply_updates(z, updates)
    optimizer, alpha = bilevel.softmax(inner), jax.nn.softmax(logits)
    opt_state = optimizer.init(alpha)
    for _ in range(5):
        slope = jax.grad(lambda a: jnp.vdot(a, cost) ** 2)(alpha)
        updates, opt_state = optimizer.update(slope, opt_state, alpha)
        alpha = optax.apply_updates(alpha, updates)
    np.testing.assert_allclose(alpha, jax.nn.softmax(z), rtol=1e-5)


def test_box_projection_clips_to_the_unit_box():
    optimizer = optax.chain(optax.sgd(1.0), bilevel.project("box"))
    moved = descend(optimizer, jnp.array([0.2, 0.5, 0.9]), [jnp.array([1e30, 0.1, -0.5])])
    np.testing.assert_allclose(moved, [0.0, 0.4, 1.0], rtol=1e-6)


def test_a_callable_projects_the_whole_pytree():
    def half_sphere(tree):
        return optax.projections.projection_l2_ball(tree, 0.5)

    optimizer = optax.chain(optax.sgd(1.0), bilevel.project(half_sphere))
    moved = descend(optimizer, {"a": jnp.array([0.3, 0.4])}, [{"a": jnp.array([-3.0, -4.0])}])
    np.testing.assert_allclose(moved["a"], [0.3, 0.4], rtol=1e-5)


def test_partition_mixes_simplices_and_boxes():
    optimizer = optax.partition(
        {
            "simplex": optax.chain(optax.sgd(1.0), bilevel.exponentiate()),
            "logits": bilevel.softmax(optax.sgd(1.0)),
            "box": optax.chain(optax.sgd(1.0), bilevel.project("box")),
        },
        {"operations": "simplex", "activation": "logits", "skip": "box"},
    )
    alpha = {
        "operations": jnp.array([0.5, 0.5]),
        "activation": jnp.array([0.25, 0.75]),
        "skip": jnp.array([0.5, 0.1]),
    }
    slope = jax.tree.map(lambda a: jnp.array([1.0, -1.0]), alpha)
    moved = jax.jit(lambda: descend(optimizer, alpha, [slope]))()
    assert_on_simplex(moved["operations"])
    assert_on_simplex(moved["activation"])
    np.testing.assert_allclose(moved["skip"], [0.0, 1.0])


def test_adam_without_tangent_takes_a_common_component_for_progress():
    """Why ``tangent`` exists: every entry of the update is the same, and alpha stays put."""
    cost, alpha = jnp.array([3.0, 1.0, 2.0]), jnp.full(3, 1 / 3)
    stuck = optax.chain(optax.adam(0.1), bilevel.project("simplex"))
    np.testing.assert_allclose(descend(stuck, alpha, [cost] * 50), alpha, atol=1e-4)


def test_tangent_takes_the_common_component_off():
    updates, _ = bilevel.tangent().update(jnp.array([[1.0, 2.0, 6.0]]), optax.EmptyState())
    np.testing.assert_allclose(updates, [[-2.0, -1.0, 3.0]])


@pytest.mark.parametrize(
    ("make", "alpha", "message"),
    [
        (bilevel.exponentiate, [0.5, 0.6], "alpha: expected points of the simplex"),
        (bilevel.exponentiate, [1.5, -0.5], "smallest entry of -0.5"),
        (bilevel.exponentiate, [float("nan"), 1.0], "alpha: expected points of the simplex"),
        (bilevel.exponentiate, 1.0, "got a scalar"),
        (bilevel.project, [0.2, 0.2], "sums off by up to 0.6"),
        (lambda: bilevel.softmax(optax.sgd(1.0)), [2.0, 0.0], "alpha: expected points"),
        (lambda: bilevel.project("box"), [0.5, 1.1], r"box \[0, 1\]"),
    ],
)
def test_a_point_off_its_set_is_refused_at_the_start(make, alpha, message):
    with pytest.raises(ValueError, match=message):
        make().init(jnp.array(alpha))


def test_an_unknown_set_is_refused():
    with pytest.raises(ValueError, match="onto: expected"):
        bilevel.project("ball")


def test_update_without_alpha_is_refused():
    with pytest.raises(ValueError, match="params: expected alpha"):
        bilevel.exponentiate().update(jnp.ones(2), optax.EmptyState())
