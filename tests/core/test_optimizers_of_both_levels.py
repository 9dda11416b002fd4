"""Combine optax's partitions, masks and clipping on both levels, and bfloat16 in between."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import cast, hypergradient

import bilevel

RNG = np.random.default_rng(0)
X, XV = RNG.normal(size=(2, 10, 3))
Y, YV = RNG.normal(size=(2, 10))
TRAIN, VALID = (X, Y), (XV, YV)
W0 = {"slope": np.array([0.3, -0.2, 0.1]), "shift": np.array(0.2)}
ALPHA = {"penalty": np.array([-1.0, 0.0, 0.5]), "scale": np.array(0.3)}


def loss(w, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w["slope"] + w["shift"] - y) ** 2)


def lower(w, alpha, batch):
    penalty = jnp.sum(jnp.exp(alpha["penalty"]) * w["slope"] ** 2)
    return jnp.exp(alpha["scale"]) * loss(w, batch) + 0.5 * penalty


PROBLEM = bilevel.Problem(lower, lambda w, alpha, batch: loss(w, batch))


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    [
        bilevel.unrolled(optax.adam(0.05), 20),
        bilevel.one_step(0.1),
        bilevel.implicit(bilevel.unrolled(0.2, 60), bilevel.cg(steps=6)),
    ],
    ids=["unrolled", "one_step", "implicit"],
)
def test_bfloat16_below_and_float32_masters(way):
    """Weights, alpha and hypergradient stay float32, and are right up to bfloat16's rounding."""

    half = functools.partial(cast, dtype=jnp.bfloat16)
    mixed = bilevel.Problem(
        lambda w, alpha, batch: lower(half(w), half(alpha), half(batch)).astype(jnp.float32),
        lambda w, alpha, batch: loss(half(w), half(batch)).astype(jnp.float32),
    )
    single = cast((ALPHA, W0, TRAIN, VALID), jnp.float32)
    hyper, exact = (hypergradient(problem, way, *single) for problem in (mixed, PROBLEM))
    for x in jax.tree.leaves((hyper.grad, hyper.w, hyper.value)):
        assert x.dtype == jnp.float32
    away = optax.tree.norm(optax.tree.sub(hyper.grad, exact.grad)) / optax.tree.norm(exact.grad)
    assert 0 < away < 0.05


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
