"""Geometries: every transformation keeps alpha on its set, and does what its formula says."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from optax import chain
from problems import follower

import bilevel
from bilevel import exponentiate, project, tangent
from bilevel.outer_loop import geometry

SIMPLEX = {
    "exponentiated sgd": lambda lr: chain(optax.sgd(lr), exponentiate()),
    "exponentiated adam": lambda lr: chain(tangent(), optax.adam(lr), exponentiate()),
    "projected sgd": lambda lr: chain(optax.sgd(lr), project("simplex")),
    "projected adam": lambda lr: chain(tangent(), optax.adam(lr), project("simplex")),
    "softmax sgd": lambda lr: bilevel.softmax(optax.sgd(lr)),
    "softmax adamw": lambda lr: bilevel.softmax(optax.adamw(lr, weight_decay=1e-3)),
}


def descend(optimizer, alpha, gradients):
    """Take a step for each gradient, which may be a function of alpha."""
    state = optimizer.init(alpha)
    for g in gradients:
        updates, state = optimizer.update(g(alpha) if callable(g) else g, state, alpha)
        alpha = optax.apply_updates(alpha, updates)
    return alpha


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


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMPLEX)
@given(alpha=points, gradients=slopes, lr=st.sampled_from([1e-3, 0.1, 1.0]))
def test_any_gradient_keeps_alpha_on_the_simplex(name, alpha, gradients, lr):
    assert_on_simplex(COMPILED[name](lr, alpha, gradients))


@pytest.mark.parametrize("name", SIMPLEX)
def test_geometries_work_under_jit_and_vmap(name):
    optimizer = SIMPLEX[name](0.1)

    def one_step(alpha, slope):
        return descend(optimizer, alpha, [slope])

    alpha = jnp.array([[0.2, 0.8], [0.5, 0.5], [1.0, 0.0]])
    slope = jnp.array([[1.0, 2.0], [0.0, -1.0], [1.0, 1.0]])
    together = jax.jit(jax.vmap(one_step))(alpha, slope)
    apart = jnp.stack([one_step(a, g) for a, g in zip(alpha, slope, strict=True)])
    np.testing.assert_allclose(together, apart, rtol=1e-5, atol=1e-7)


def test_softmax_is_gradient_descent_on_logits():
    """Truth: autodiff through jax.nn.softmax, with the same optimizer of the logits."""
    cost, inner = jnp.array([1.0, 2.0, -1.0]), optax.adamw(0.1, weight_decay=0.01)

    def loss(alpha):
        return jnp.vdot(alpha, cost) ** 2

    logits = jnp.array([0.0, -0.5, -0.3])  # weight decay depends on the largest, which is 0
    truth = descend(inner, logits, 5 * [jax.grad(lambda z: loss(jax.nn.softmax(z)))])
    alpha = descend(bilevel.softmax(inner), jax.nn.softmax(logits), 5 * [jax.grad(loss)])
    np.testing.assert_allclose(alpha, jax.nn.softmax(truth), rtol=1e-5)


def test_a_callable_projects_the_whole_pytree():
    last = project(lambda tree: optax.projections.projection_l2_ball(tree, 0.5))
    optimizer = chain(optax.sgd(1.0), last)
    moved = descend(optimizer, {"a": jnp.array([0.3, 0.4])}, [{"a": jnp.array([-3.0, -4.0])}])
    np.testing.assert_allclose(moved["a"], [0.3, 0.4], rtol=1e-5)


def test_partition_mixes_simplices_and_boxes():
    optimizer = optax.partition(
        {
            "simplex": chain(optax.sgd(1.0), exponentiate()),
            "logits": bilevel.softmax(optax.sgd(1.0)),
            "box": chain(optax.sgd(1.0), project("box")),
        },
        {"operations": "simplex", "activation": "logits", "skip": "box"},
    )
    alpha = {"operations": [0.5, 0.5], "activation": [0.25, 0.75], "skip": [0.5, 0.1]}
    alpha = {name: jnp.array(point) for name, point in alpha.items()}
    slope = jax.tree.map(lambda a: jnp.array([1.0, -1.0]), alpha)
    moved = jax.jit(lambda: descend(optimizer, alpha, [slope]))()
    assert_on_simplex(moved["operations"])
    assert_on_simplex(moved["activation"])
    np.testing.assert_allclose(moved["skip"], [0.0, 1.0])


def test_each_part_of_alpha_stays_on_its_set():
    sets = {"operations": "simplex", "skip": "box", "rate": "free"}
    simplex = chain(optax.sgd(1.0), exponentiate())
    optimizer = bilevel.strategies.on_sets(sets, simplex=simplex, other=optax.sgd(1.0))
    alpha = {name: jnp.array([0.5, 0.5]) for name in sets}
    moved = descend(optimizer, alpha, [dict.fromkeys(sets, jnp.array([jnp.log(3.0), 0.0]))])
    np.testing.assert_allclose(moved["operations"], [0.25, 0.75], rtol=1e-6)
    np.testing.assert_allclose(moved["skip"], [0.0, 0.5])
    np.testing.assert_allclose(moved["rate"], [0.5 - np.log(3.0), 0.5], rtol=1e-6)


PARTS = {
    "sgd": lambda: optax.sgd(0.3),
    "momentum": lambda: optax.sgd(0.3, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.3),
    "lion": lambda: optax.lion(0.3),
    "clip": lambda: optax.clip(0.05),
    "norm": lambda: optax.clip_by_global_norm(0.1),
    "decay": lambda: optax.add_decayed_weights(0.1),
    "noise": lambda: optax.add_noise(0.01, 0.5, 0),
    "trace": lambda: optax.trace(0.9),
    "scale": lambda: optax.scale(0.5),
    "tangent": tangent,
}
DESCENDING = ("sgd", "momentum", "adam", "lion")
SETS = {
    "exponentiate": exponentiate,
    "project": project,
    "box": lambda: project("box"),
    "ball": lambda: project(lambda a: optax.projections.projection_l2_ball(a, 1.0)),
    "softmax": lambda: bilevel.softmax(optax.sgd(0.3)),
}


def distance(name, alpha):
    """Truth: by the definition of the set, in float64."""
    alpha = np.asarray(alpha, np.float64)
    if name == "ball":
        return np.linalg.norm(alpha) - 1
    return max(-alpha.min(), alpha.max() - 1 if name == "box" else np.abs(alpha.sum(-1) - 1).max())


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, float])
def test_random_chains_stay_on_the_set_or_the_geometry_that_has_to_be_last_is_named(dtype):
    random, dtype = np.random.default_rng(0), jnp.zeros((), dtype).dtype
    refused = 0
    for _ in range(40):
        name = random.choice(list(SETS))
        before = list(random.choice(list(PARTS), random.integers(0, 3)))
        after = list(random.choice(list(PARTS), random.integers(0, 2)))
        optimizer = chain(*(PARTS[p]() for p in before), SETS[name](), *(PARTS[p]() for p in after))
        descends = sum(p in DESCENDING for p in before) + (name == "softmax")
        alpha = jnp.asarray(random.dirichlet(np.ones(5) / 2, 2), dtype)
        alpha = alpha / 2 if name == "ball" else alpha
        wrong = any(geometry.ascends(optimizer, alpha))
        assert wrong == (descends % 2 == 0), before
        state = optimizer.init(alpha)
        for _ in range(0 if wrong else 3):
            slope = jnp.asarray(random.normal(size=alpha.shape), dtype)
            updates, state = optimizer.update(slope, state, alpha)
            alpha = optax.apply_updates(alpha, updates)
            assert alpha.dtype == dtype
            wrong = any(geometry.moved_on(state, alpha))
            if wrong:
                assert after
                break
            # Later transformations can move an entry by two units of roundoff unseen.
            roundings = 4 + 2 * alpha.shape[-1] * len(after)
            assert distance(name, alpha) <= roundings * jnp.finfo(dtype).eps, (before, after)
        assert geometry.geometry_names(state) == ["project" if name in ("box", "ball") else name]
        refused += wrong
    assert 10 < refused < 35


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_uniform_starts_of_half_precision_are_points_of_the_simplex(dtype):
    alpha = {n: jnp.full(n, 1 / n, dtype) for n in (10, 1000)}
    slope = jax.tree.map(lambda a: jax.random.normal(jax.random.key(0), a.shape, dtype), alpha)
    for make in (exponentiate, project):
        optimizer = chain(optax.sgd(0.1), make())
        optimizer.init(alpha)  # would raise
        moved = jax.jit(lambda o=optimizer: descend(o, alpha, [slope] * 3))()
        for leaf in moved.values():
            assert distance("simplex", leaf) <= 4 * jnp.finfo(dtype).eps


def linear_search(optimizer, **options):
    problem = follower(lambda w, alpha, batch: jnp.vdot(batch, alpha) + 0 * w.sum())
    solver = bilevel.implicit(bilevel.solved(lambda alpha, w, batch: alpha), bilevel.scale(1.0))
    cost, alpha = jnp.array([3.0, 1.0, 2.0]), jnp.array([0.2, 0.3, 0.5])
    args = (problem, solver, optimizer, options.pop("alpha", alpha), jnp.zeros(3), cost, cost)
    return bilevel.search(*args, steps=3, **options)


AFTER = {
    "exponentiate": chain(optax.sgd(1.0), exponentiate(), optax.clip(0.1)),
    "project": chain(optax.sgd(1.0), project(), optax.add_decayed_weights(0.1)),
    "softmax": chain(bilevel.softmax(optax.sgd(1.0)), optax.scale(-1.0)),
}
ALONE = exponentiate()  # without an optimizer that descends


@pytest.mark.slow
@pytest.mark.parametrize("name", AFTER)
def test_a_transformation_after_the_geometry_raises_at_the_first_update(name):
    with pytest.raises(ValueError, match=rf"expected {name}\(\) as the last .* step 0\.") as caught:
        linear_search(AFTER[name], progress=False)
    np.testing.assert_array_equal(caught.value.result.alpha, jnp.array([0.2, 0.3, 0.5]))


def test_a_transformation_after_the_geometry_raises_at_its_first_effect():
    late = optax.sgd(optax.piecewise_constant_schedule(1e-3, {2: 1000}))
    optimizer = chain(late, exponentiate(), optax.clip(0.1))
    with pytest.raises(ValueError, match=r"exponentiate\(\) as the last") as caught:
        linear_search(optimizer, progress=False)
    assert caught.value.step == 2 and caught.value.result.history["value"].shape == (2,)


@pytest.mark.long
def test_polyaks_step_to_a_least_value_above_zero_is_known_to_descend():
    projected = chain(optax.polyak_sgd(f_min=0.1), project())
    for optimizer in (projected, bilevel.softmax(optax.polyak_sgd(f_min=0.12))):
        value = linear_search(optimizer, progress=False).history["value"]
        assert value[-1] < value[0]


@pytest.mark.parametrize("optimizer", [AFTER["exponentiate"], ALONE])
def test_under_jit_both_mistakes_stop_at_the_first_step(optimizer):
    state = jax.jit(lambda alpha: linear_search(optimizer, alpha=alpha).state)(jnp.full(3, 1 / 3))
    assert state.step == 0


@pytest.mark.long
def test_descent_refuses_both_and_under_jit_says_nan():
    after = AFTER["exponentiate"]
    for optimizer, words in ((after, "as the last"), (ALONE, "goes against the gradient")):
        problem = bilevel.Problem(lambda w, a, b: (w - 1) ** 2, lambda w, a, b: a[0] * w)
        init, step = bilevel.descent(problem, bilevel.unrolled(0.1, 1), optimizer)

        def both(alpha, init=init, step=step):
            return step(init(alpha, jnp.ones(())), (None, None))[0].alpha

        assert jnp.isnan(jax.jit(both)(jnp.array([0.5, 0.5]))).all()
        with pytest.raises(ValueError, match=words):
            both(jnp.array([0.5, 0.5]))


def test_partitions_and_wrappers_keep_what_is_known_of_the_set():
    parts = {
        "right": chain(optax.sgd(0.1), exponentiate()),
        "wrong": chain(optax.sgd(0.1), project("box"), optax.scale(3.0)),
        "free": optax.sgd(0.1),
    }
    optimizer = optax.MultiSteps(optax.partition(parts, {k: k for k in parts}), 2)
    alpha = {k: jnp.array([0.5, 0.5]) for k in parts}
    state = optimizer.init(alpha)
    for expected in (False, True):  # the first of two steps only accumulates
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, alpha), state, alpha)
        alpha = optax.apply_updates(alpha, updates)
        names, moved = geometry.geometry_names(state), geometry.moved_on(state, alpha)
        assert dict(zip(names, moved, strict=True)) == {"exponentiate": False, "project": expected}


@pytest.mark.long
def test_nan_is_seen_where_alpha_is_zero():
    """Entries outside the support stay 0 for all other updates."""
    optimizer, alpha = exponentiate(), jnp.array([0.0, 1.0])
    update = jax.jit(optimizer.update)
    for number, seen in ((jnp.nan, True), (3.0, False)):
        updates, _ = update(jnp.array([number, 0.0]), optimizer.init(alpha), alpha)
        assert bool(jnp.isnan(updates).any()) == seen
