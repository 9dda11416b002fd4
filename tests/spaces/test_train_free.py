"""Searches without training follow the kernels of their networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel.spaces import Space, on_simplices
from bilevel.spaces.nasbench201 import nasbench201_space
from bilevel.spaces.skips import skip_space
from bilevel.strategies.train_free import eigen_nas, nasi, te_nas


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
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 5)))
    key = jax.random.key(3)
    ranked = eigen_nas(key, space, x, pool=12, keep=3)
    drawn = {space.discretize(space.draw(k)) for k in jax.random.split(key, 12)}
    values = {a: np.linalg.eigvalsh(space.kernel(a, x).ntk)[0] for a in drawn}
    assert len(drawn) < 12  # some came twice
    best = sorted(values, key=lambda a: -values[a])[:3]
    assert list(ranked.architectures) == best
    np.testing.assert_allclose(ranked.eigenvalues, [values[a] for a in best], rtol=2e-4)
    assert len(eigen_nas(key, space, x, pool=12, keep=12).architectures) == len(drawn)


def test_te_nas_prunes_what_is_ill_conditioned_and_has_few_regions():
    directions = jnp.asarray(np.random.default_rng(0).standard_normal((2, 40)))
    space = mixed_space(
        {
            "none": lambda x: 0 * x,
            # One direction for all rows, with one kink: nearly singular.
            "flat": lambda x: 30 * jax.nn.relu(x[:, :1] + 10) + 0 * x,
            "rich": lambda x: jax.nn.relu(x @ directions),
        },
        edges=2,
    )
    x = jnp.asarray(np.random.default_rng(1).standard_normal((6, 2)))
    batch = x, jnp.zeros(6, int)
    crops = jnp.asarray(np.random.default_rng(2).standard_normal((30, 2)))
    architecture = te_nas(jax.random.key(0), space, space, batch, crops, repeats=1)
    assert architecture == ("rich", "rich")


def test_te_nas_goes_by_the_regions_where_the_kernels_are_alike():
    directions = jnp.asarray(np.random.default_rng(0).standard_normal((2, 40)))
    space = mixed_space({"linear": lambda x: x, "kinks": lambda x: -x})
    # ReLUs of weight 0 do not count.
    kinks = {"linear": lambda x: 1 * x, "kinks": lambda x: jax.nn.relu(x @ directions)}
    thin = mixed_space(kinks)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 2)))
    crops = jnp.asarray(np.random.default_rng(2).standard_normal((30, 2)))
    batch = x, jnp.zeros(2, int)
    assert te_nas(jax.random.key(0), space, thin, batch, crops, repeats=1) == ("kinks",)


@pytest.mark.long
@pytest.mark.parametrize(("penalty", "expected"), [(0.0, "steep"), (10.0, "gentle")])
def test_nasi_takes_the_larger_trace_up_to_its_threshold(penalty, expected):
    space = mixed_space({"gentle": lambda x: x, "steep": lambda x: 5 * x}, edges=3)
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((16, 2))), jnp.arange(16) % 2
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
