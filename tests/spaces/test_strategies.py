"""Strategies and train-free searches follow the formulas of their papers, on any space."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, loop_of_steps, normal

import bilevel
from bilevel import strategies
from bilevel.spaces import Space, on_simplices
from bilevel.spaces.nasbench201 import nasbench201_space
from bilevel.spaces.skips import skip_space
from bilevel.strategies.optimizers import exponentiated, logits
from bilevel.strategies.train_free import eigen_nas, nasi, te_nas

key = functools.partial(jax.random.key, 0)
searched = functools.partial(strategies.run, progress=False)
SPACE = skip_space(["relu", "tanh"], depth=3, width=4, classes=2)
ROWS = [(x, np.arange(12) % 2) for x in np.random.default_rng(0).normal(size=(2, 12, 3))]
RATE = 0.1
SAME = {"weight_optimizer": RATE, "batch_size": 12}
WITH_ALPHA = SAME | {"alpha_optimizer": 0.2}


@functools.cache
def weights():
    return SPACE.init(jax.random.key(1), ROWS[0])


def first_step(strategy, steps=1):
    """The state after steps on all rows instead of batches."""
    whole = strategy._replace(batches=lambda key, data: data)
    return searched(whole, SPACE.start(), weights(), *ROWS, steps=steps, key=key())


on_sets = functools.partial(strategies.on_sets, SPACE.sets)
ADAM = on_sets(simplex=logits(0.2), other=optax.adam(0.2, b1=0.5))
MIRROR = on_sets(simplex=exponentiated(0.2), other=optax.sgd(0.2))


def after(alpha, steps=1):
    """The weights after gradient steps on the training rows."""
    return loop_of_steps(SPACE.problem.lower, optax.sgd(RATE), weights(), alpha, ROWS[0], steps)


def slope_through(steps):
    return jax.grad(lambda alpha: SPACE.problem.outer(after(alpha, steps), alpha, ROWS[1]))


def slope_after(rows):
    """The gradient at the weights after one step, without their response to alpha."""
    return lambda a: jax.grad(SPACE.problem.outer, 1)(after(a), a, rows)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "optimizer", "slope"),
    [
        (strategies.darts(SPACE, **WITH_ALPHA), ADAM, slope_after(ROWS[1])),
        (strategies.darts(SPACE, order=2, **WITH_ALPHA), ADAM, slope_through(1)),
        (strategies.unrolled(SPACE, steps=3, **WITH_ALPHA), ADAM, slope_through(3)),
        (strategies.gaea(SPACE, **WITH_ALPHA), MIRROR, slope_after(ROWS[1])),
        (strategies.gaea(SPACE, on_training_rows=True, **WITH_ALPHA), MIRROR, slope_after(ROWS[0])),
        (strategies.joint(SPACE, **WITH_ALPHA), ADAM, slope_after(ROWS[0])),
    ],
    ids=["darts", "darts, order 2", "unrolled", "gaea", "gaea, training rows", "joint"],
)
def test_a_step_is_the_formulas(strategy, optimizer, slope):
    result, alpha = first_step(strategy), SPACE.start()
    updates, _ = optimizer.update(slope(alpha), optimizer.init(alpha), alpha)
    assert_close(result.alpha, optax.apply_updates(alpha, updates), f64=1e-10, f32=1e-5)
    assert bool((result.alpha["activations"] != 0.5).any())


def test_the_logits_optimizer_is_darts_adam():
    """Truth: Kingma & Ba's Algorithm 1 in numpy on logits, with the reference's constants."""
    rate, decay, b1, b2, eps = 0.3, 1e-3, 0.5, 0.999, 1e-8
    alpha, optimizer = np.array([0.7, 0.2, 0.1]), logits(rate)
    z, m, v = np.log(alpha / alpha.max()), 0.0, 0.0  # the largest logit starts at 0
    state, actual = optimizer.init(jnp.asarray(alpha)), jnp.asarray(alpha)
    # As small as the decay's part, so that it counts.
    for t, slope in enumerate(1e-3 * np.random.default_rng(0).normal(size=(6, 3)), 1):
        updates, state = optimizer.update(jnp.asarray(slope), state, actual)
        actual = optax.apply_updates(actual, updates)
        g = alpha * (slope - alpha @ slope) + decay * z
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        z = z - rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        alpha = np.exp(z) / np.exp(z).sum()
    assert_close(actual, alpha, f64=1e-9, f32=1e-4)


@pytest.mark.long
def test_a_rate_of_gaea_is_that_of_exponentiated_gradient():
    slope = slope_after(ROWS[1])(SPACE.start())["activations"]
    activations = first_step(strategies.gaea(SPACE, **WITH_ALPHA)).alpha["activations"]
    grown = SPACE.start()["activations"] * np.exp(-0.2 * np.asarray(slope))
    assert_close(activations, grown / grown.sum(-1, keepdims=True), f64=1e-10, f32=1e-5)


@pytest.mark.slow
def test_weight_sharing_trains_architectures_drawn_anew_for_every_batch():
    """With the loss <w, alpha>, steps of rate 1 subtract the architectures one by one."""
    steps = 240

    def loss(w, alpha, batch):
        return jnp.vdot(w, alpha["activations"]) + 0 * batch[0].sum()

    space = dataclasses.replace(SPACE, problem=bilevel.Problem(loss, loss))
    plan = strategies.weight_sharing(space, weight_optimizer=1.0, batch_size=12)
    result = searched(plan, SPACE.start(), jnp.zeros((2, 2)), *ROWS, steps=steps, key=key())
    counts = -np.asarray(result.w)
    np.testing.assert_array_equal(counts.sum(-1), [steps, steps])
    # Each of the two layers draws its activation uniformly: 5 standard deviations of a binomial.
    assert (np.abs(counts - steps / 2) < 5 * np.sqrt(steps / 4)).all()


@pytest.mark.long
def test_the_finite_difference_is_near_the_exact_second_order_and_not_equal():
    options = SAME | {"alpha_optimizer": optax.sgd(1.0), "order": 2}
    exact, near = (first_step(strategies.darts(SPACE, radius=r, **options)) for r in (None, 0.01))
    gap = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), exact.alpha, near.alpha)
    size = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), exact.alpha, SPACE.start())
    for g, s in zip(jax.tree.leaves(gap), jax.tree.leaves(size), strict=True):
        assert 0 < g < 0.02 * s


@pytest.mark.long
def test_alpha_stays_on_its_sets_and_shared_weights_alone_leave_it():
    for make in (strategies.darts, strategies.gaea, strategies.joint, strategies.unrolled):
        result = first_step(make(SPACE, alpha_optimizer=5.0, **SAME), steps=4)
        mixtures, skips = result.alpha["activations"], result.alpha["skips"]
        assert_close(mixtures.sum(-1), np.ones(2), f32=1e-5)
        assert bool((mixtures >= 0).all() and (skips >= 0).all() and (skips <= 1).all())
    plan = strategies.weight_sharing(SPACE, **SAME)
    result = searched(plan, SPACE.start(), weights(), *ROWS, steps=4, key=key())
    jax.tree.map(np.testing.assert_array_equal, result.alpha, SPACE.start())
    assert bool((result.w["first"] != weights()["first"]).any()) and plan.draws


@pytest.mark.slow
def test_the_best_drawn_architecture_is_brute_forces():
    options = {"samples": 5, "batch_size": 12}
    best = jax.jit(lambda w, rows: strategies.best_drawn(key(), SPACE, w, rows, **options))
    drawn = [SPACE.draw(k) for k in jax.random.split(key(), 5)]
    loss = jax.jit(SPACE.problem.outer)
    losses = [float(loss(weights(), alpha, ROWS[1])) for alpha in drawn]
    expected = drawn[int(np.argmin(losses))]
    jax.tree.map(np.testing.assert_array_equal, best(weights(), ROWS[1]), expected)


def test_a_drawn_architecture_whose_loss_is_nan_is_not_the_best():
    def outer(w, alpha, batch):
        return jnp.where(alpha["activations"][0, 0] == 1, jnp.nan, alpha["skips"].sum())

    space = dataclasses.replace(SPACE, problem=bilevel.Problem(SPACE.problem.lower, outer))
    best = strategies.best_drawn(key(), space, weights(), ROWS[1], samples=20, batch_size=12)
    assert best["activations"][0].tolist() == [0, 1] and best["skips"].tolist() == [0]


@pytest.mark.long
def test_gaea_on_training_rows_moves_both_on_one_batch_and_joint_does_not():
    """At rates of 0 both losses are one function at one point."""
    still = {"weight_optimizer": 1e-30, "alpha_optimizer": 1e-30, "batch_size": 3}

    def losses(plan):
        result = searched(plan, SPACE.start(), weights(), *ROWS, steps=4, key=key())
        return result.history["lower"], result.history["value"]

    single = strategies.gaea(SPACE, on_training_rows=True, **still)
    assert_close(*losses(single), f32=1e-6)
    below, above = losses(strategies.joint(SPACE, **still))
    assert np.abs(below - above).max() > 1e-3
    rows = jax.tree.map(lambda a: jnp.stack([a, a]), ROWS[0])
    below, above = strategies.stack_strategies(single, 2).batches(key(), rows, rows)
    assert below[0].shape == (2, 3, 3)
    jax.tree.map(np.testing.assert_array_equal, below, above)


@pytest.mark.parametrize(
    "make", [functools.partial(strategies.gaea, on_training_rows=True), strategies.joint]
)
def test_strategies_on_training_rows_take_stateful_problems(make):
    def loss(w, alpha, batch):
        return jnp.sum((w.params - alpha) ** 2) + 0 * batch.sum(), w.variables + 1

    problem = bilevel.Problem(loss, lambda *a: loss(*a)[0], stateful=True)
    plan = make(problem, weight_optimizer=0.1, alpha_optimizer=0.1, batch_size=2)
    start, rows = (jnp.full(2, 0.5), bilevel.Stateful(jnp.ones(2), jnp.zeros(()))), jnp.ones((4, 1))
    assert float(searched(plan, *start, rows, rows, steps=3, key=key()).w.variables) == 3


@pytest.mark.long
def test_stacked_copies_equal_separate_searches():
    copies = 2
    data = [jax.tree.map(lambda a, b: jnp.stack([a, b]), *ROWS) for _ in range(2)]
    w = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), weights())
    alpha = jax.tree.map(lambda a: jnp.stack([a] * copies), SPACE.start())
    plan = strategies.darts(SPACE, order=2, **WITH_ALPHA)
    stacked = strategies.stack_strategies(plan, copies)._replace(batches=lambda key, data: data)
    result = searched(stacked, alpha, w, *data, steps=2, key=key())
    alone = plan._replace(batches=lambda key, data: data)
    for i in range(copies):
        start, *parts = jax.tree.map(lambda a: a[i], (w, *data))  # noqa: B023
        one = searched(alone, SPACE.start(), start, *parts, steps=2, key=key())
        ours = jax.tree.map(lambda a: a[i], result.alpha)  # noqa: B023
        assert_close(ours, one.alpha, f64=1e-10, f32=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("stateful", [False, True])
def test_weight_sharing_takes_losses_with_auxiliary_output(stateful):
    def paired(loss):
        def both(w, alpha, batch):
            value = loss(w.params if stateful else w, alpha, batch)
            return value, w.variables if stateful else value

        return both

    plain = SPACE.problem
    outer = (lambda w, a, b: plain.outer(w.params, a, b)) if stateful else paired(plain.outer)
    problem = bilevel.Problem(paired(plain.lower), outer, has_aux=not stateful, stateful=stateful)
    space, w = dataclasses.replace(SPACE, problem=problem), SPACE.init(key(), ROWS[0])

    def run(space, w):
        plan = strategies.weight_sharing(space, weight_optimizer=RATE, batch_size=4)
        result = searched(plan, SPACE.start(), w, *ROWS, steps=2, key=key())
        rows = {"samples": 3, "batch_size": 12}
        return strategies.best_drawn(key(), space, result.w, ROWS[1], **rows)

    start = bilevel.Stateful(w, jnp.zeros(())) if stateful else w
    jax.tree.map(np.testing.assert_array_equal, run(space, start), run(SPACE, w))


def mixed_space(operations, edges=1, classes=2):
    """``sum over edges and operations of alpha f(x) w``; ``operations``: name -> f(x) [n, k]."""
    names = tuple(operations)

    def init(key, batch):
        widths = [jax.eval_shape(f, batch[0]).shape[1] for f in operations.values()]
        return [[jnp.ones((k, classes)) / k for k in widths] for _ in range(edges)]

    def apply(w, alpha, x):
        features = [f(x) for f in operations.values()]
        terms = [alpha[e, o] * f @ w[e][o] for e in range(edges) for o, f in enumerate(features)]
        return sum(terms)

    def loss(w, alpha, batch):
        return jnp.mean(apply(w, alpha, batch[0]) ** 2)

    return Space(
        names=names,
        sets="simplex",
        **on_simplices(names, (edges,))._asdict(),
        init=init,
        apply=apply,
        problem=bilevel.Problem(loss, loss),
        predict=lambda f: f.argmax(-1),
    )


@pytest.mark.long
def test_eigen_nas_keeps_the_best_conditioned_of_its_pool():
    space = skip_space(["relu", "tanh", "sigmoid"], depth=3, width=4)
    x, key = normal(0, 8, 5), jax.random.key(3)
    ranked = eigen_nas(key, space, x, pool=12, keep=3)
    drawn = {space.discretize(space.draw(k)) for k in jax.random.split(key, 12)}
    values = {a: np.linalg.eigvalsh(space.kernel(a, x).ntk)[0] for a in drawn}
    assert len(drawn) < 12  # some came twice
    best = sorted(values, key=lambda a: -values[a])[:3]
    assert list(ranked.architectures) == best
    np.testing.assert_allclose(ranked.eigenvalues, [values[a] for a in best], rtol=2e-4)
    assert len(eigen_nas(key, space, x, pool=12, keep=12).architectures) == len(drawn)


def test_te_nas_prunes_ill_conditioned_operations_with_few_regions():
    directions, x, crops = normal(0, 2, 40), normal(1, 6, 2), normal(2, 30, 2)
    space = mixed_space(
        {
            "none": lambda x: 0 * x,
            # One direction for all rows, with one kink: nearly singular.
            "flat": lambda x: 30 * jax.nn.relu(x[:, :1] + 10) + 0 * x,
            "rich": lambda x: jax.nn.relu(x @ directions),
        },
        edges=2,
    )
    assert te_nas(key(), space, space, (x, jnp.zeros(6, int)), crops, repeats=1) == ("rich", "rich")


def test_te_nas_uses_regions_if_kernels_are_equal():
    directions, x, crops = normal(0, 2, 40), normal(1, 2, 2), normal(2, 30, 2)
    space = mixed_space({"linear": lambda x: x, "kinks": lambda x: -x})
    # ReLUs of weight 0 do not count.
    kinks = {"linear": lambda x: 1 * x, "kinks": lambda x: jax.nn.relu(x @ directions)}
    batch = x, jnp.zeros(2, int)
    assert te_nas(key(), space, mixed_space(kinks), batch, crops, repeats=1) == ("kinks",)


@pytest.mark.long
@pytest.mark.parametrize(("penalty", "expected"), [(0.0, "steep"), (10.0, "gentle")])
def test_nasi_takes_the_larger_trace_up_to_its_threshold(penalty, expected):
    space = mixed_space({"gentle": lambda x: x, "steep": lambda x: 5 * x}, edges=3)
    rows = normal(0, 16, 2), jnp.arange(16) % 2
    options = {"steps": 8, "batch_size": 8, "penalty": penalty, "threshold": 1e-6}
    assert nasi(jax.random.key(0), space, rows, **options) == (expected,) * 3


@pytest.mark.long
def test_the_searches_run_on_nas_bench_201():
    space = nasbench201_space(["none", "skip_connect", "nor_conv_1x1"], cells=1, channels=2)
    x = jax.random.normal(jax.random.key(0), (4, 4, 4, 1))
    batch = x, jnp.arange(4)
    genotype = te_nas(jax.random.key(1), space, space, batch, x, repeats=1)
    assert set(genotype.operations) <= {"skip_connect", "nor_conv_1x1"}
    genotype = nasi(jax.random.key(1), space, batch, steps=2, batch_size=2)
    assert set(genotype.operations) <= set(space.names)
