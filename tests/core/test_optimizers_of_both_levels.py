"""optax's combinations below and above: partitions, masks, clipping, and bfloat16 in between."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, loop_of_steps

import bilevel

RNG = np.random.default_rng(0)
X, XV = RNG.normal(size=(2, 10, 3))
Y, YV = RNG.normal(size=(2, 10))
TRAIN, VALID = (X, Y), (XV, YV)
W0 = {"slope": jnp.array([0.3, -0.2, 0.1]), "shift": jnp.array(0.2)}
ALPHA = {"penalty": jnp.array([-1.0, 0.0, 0.5]), "scale": jnp.array(0.3)}


def loss(w, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w["slope"] + w["shift"] - y) ** 2)


def lower(w, alpha, batch):
    penalty = jnp.sum(jnp.exp(alpha["penalty"]) * w["slope"] ** 2)
    return jnp.exp(alpha["scale"]) * loss(w, batch) + 0.5 * penalty


PROBLEM = bilevel.Problem(lower, lambda w, alpha, batch: loss(w, batch))


def by_name(first):
    return optax.partition(
        {"heavy": optax.sgd(0.1, momentum=0.5), "plain": optax.sgd(0.1)},
        lambda tree: {k: "heavy" if k == first else "plain" for k in tree},
    )


def masked_decay(first):
    mask = lambda tree: {k: k == first for k in tree}  # noqa: E731
    return optax.chain(optax.masked(optax.add_decayed_weights(0.5), mask), optax.sgd(0.1))


def frozen(first):
    mask = lambda tree: {k: k == first for k in tree}  # noqa: E731
    return optax.chain(optax.sgd(0.1), optax.masked(optax.set_to_zero(), mask))


def clipped(first):
    return optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(0.1))


@pytest.mark.long
@pytest.mark.parametrize("make", [by_name, masked_decay, frozen, clipped])
def test_combinations_on_both_levels_are_those_of_optax_in_a_loop(make):
    below, above = make("slope"), make("penalty")
    solver = bilevel.restarted(bilevel.unrolled(below, 4))
    args = PROBLEM, solver, above, ALPHA, W0, TRAIN, VALID
    result = bilevel.search(*args, steps=3, progress=False)

    def trained(alpha, *_):
        return loss(loop_of_steps(lower, below, W0, alpha, TRAIN, 4), VALID)

    alpha = loop_of_steps(trained, above, ALPHA, None, None, 3)
    assert_close(result.alpha, alpha, f64=1e-10, f32=1e-4)
    assert optax.tree.norm(optax.tree.sub(result.alpha, ALPHA)) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("solver", ["unrolled", "one_step", "implicit"])
def test_bfloat16_below_and_float32_masters(solver):
    """Compute in bfloat16: weights, alpha and hypergradient stay float32, right to roundings."""

    def half(tree):
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)

    mixed = bilevel.Problem(
        lambda w, alpha, batch: lower(half(w), half(alpha), half(batch)).astype(jnp.float32),
        lambda w, alpha, batch: loss(half(w), half(batch)).astype(jnp.float32),
    )
    way = {
        "unrolled": bilevel.unrolled(optax.adam(0.05), 20),
        "one_step": bilevel.one_step(0.1),
        "implicit": bilevel.implicit(bilevel.unrolled(0.2, 60), bilevel.cg(steps=6)),
    }[solver]
    single = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (ALPHA, W0, TRAIN, VALID))
    hyper, exact = (
        jax.jit(bilevel.hypergradient(problem, way, diagnostics=False))(*single)
        for problem in (mixed, PROBLEM)
    )
    for x in jax.tree.leaves((hyper.grad, hyper.w, hyper.value)):
        assert x.dtype == jnp.float32
    away = optax.tree.norm(optax.tree.sub(hyper.grad, exact.grad)) / optax.tree.norm(exact.grad)
    assert 0 < away < 0.05


@pytest.mark.long
@pytest.mark.parametrize("level", ["optimizer", "gradient"])
@pytest.mark.parametrize(
    "rule",
    [
        optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(0.1)),
        optax.chain(optax.clip_by_block_rms(0.5), optax.adagrad(0.1)),
        optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(0.1)),
        optax.contrib.dog(1.0),
    ],
    ids=["normalised", "clipped rmsprop", "rms-clipped adagrad", "adaptive clip", "dog"],
)
def test_no_nan_where_all_gradients_are_zero(rule, level):
    """At a stationary start every norm is 0, and so it is for a leaf that no loss has."""

    def flat(w, alpha, batch):
        value = 0.5 * jnp.sum((w["seen"] - batch) ** 2) * jnp.exp(alpha["b"])
        return value + (alpha["a"] @ w["seen"] if level == "gradient" else 0.0)

    problem = bilevel.Problem(flat, lambda w, alpha, batch: jnp.sum(w["seen"]) + alpha["b"])
    w0 = {"seen": jnp.ones(2), "unused": jnp.zeros(3)}
    alpha = {"a": jnp.zeros(2), "b": jnp.array(0.0)}
    for mode in ("reverse", "forward"):
        solver = bilevel.unrolled(rule, 3)
        fn = bilevel.hypergradient(problem, solver, mode=mode, diagnostics=False)
        hyper = jax.jit(fn)(alpha, w0, jnp.ones(2), None)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((hyper.grad, hyper.w)))


def test_an_error_names_the_leaf_the_optimizer_and_a_remedy():
    """Adafactor's slope is 1e15 at a gradient of 0; Prodigy's first step there is 0 / 0."""

    def flat(w, alpha, batch):
        return 0.5 * jnp.sum((w["seen"] - 1.0 - (alpha["a"] - jnp.float32(0.1))) ** 2)

    problem = bilevel.Problem(flat, lambda w, alpha, batch: jnp.sum(w["seen"] ** 2))
    single = {"a": jnp.float32(0.1)}, {"seen": jnp.ones(2, jnp.float32)}, None, None
    for rule, said in {
        optax.adafactor(0.1): r"hypergradient: .*FactoredState.* in alpha\['a'\]: .*larger eps",
        optax.contrib.prodigy(0.1): r"lower loss: .*w\['seen'\] left the numbers' range; a smaller",
    }.items():
        with pytest.raises(bilevel.NonFiniteError, match=said):
            args = problem, bilevel.unrolled(rule, 3), optax.sgd(0.1), *single
            bilevel.search(*args, steps=1, progress=False)
