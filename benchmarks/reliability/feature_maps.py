"""Spaces of feature maps: kernels that features converge to, counts of words by hand."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from benchmarks.reliability.case import Case, eps, first, near, that
from benchmarks.reliability.registry import generates
from benchmarks.reliability.simplices import point
from bilevel.spaces import features
from bilevel.spaces.features import text
from bilevel.spaces.features.fourier import KERNELS, from_projection


@generates("bilevel.spaces.features.feature_space")
def feature_space(rng, dtype) -> Case:
    x = jnp.asarray(rng.normal(size=(6, 2)), dtype)
    y = jnp.asarray(rng.normal(size=6), dtype)
    mixture = point(rng, dtype, (2,), corner=False)

    def call(maps, outer, x, y, mixture):
        space = features.feature_space(maps, outer=outer)
        blocks = space.blocks(x)
        alpha, w = space.start(), space.init(jax.random.key(0), (blocks, y))
        alpha = alpha | {"mixture": mixture}
        w, _ = space.solver.run(space.problem.lower, alpha, w, space.solver.init(w), (blocks, y))
        return space.apply(w, alpha, blocks)

    X, a = np.asarray(x, np.float64), np.asarray(mixture, np.float64)
    phi = a[0] * np.cos(X) + a[1] * np.sin(X)
    w = np.linalg.solve(phi.T @ phi + 0.1 * np.eye(2), phi.T @ np.asarray(y, np.float64))
    check = lambda f: near("predictions", f, phi @ w, 1e4 * eps(dtype))
    kinds = {"maps": "sequence", "outer": "name", "x": "values", "y": "values", "mixture": "values"}
    arguments = {"maps": [jnp.cos, jnp.sin], "outer": "squared", "x": x, "y": y, "mixture": mixture}
    return Case(call, arguments, check, kinds, ("x", "y", "mixture"))


def _kernel(name, x, y, gamma):
    d = x[:, None] - y
    size = {
        "gaussian": (d**2).sum(-1),
        "laplace": abs(d).sum(-1),
        "laplace_isotropic": np.sqrt((d**2).sum(-1)),
    }[name]
    return np.exp(-gamma * size)


@generates(
    "bilevel.spaces.features.fourier_features",
    "bilevel.spaces.features.fourier_config",
    "bilevel.spaces.features.fourier.from_projection",
)
def fourier_features(rng, dtype) -> Case:
    x = jnp.asarray(rng.normal(size=(3, 2)), dtype)
    kernel, gamma = str(rng.choice(KERNELS)), float(10 ** rng.uniform(-1, 0.5))

    def call(x, preprocess, kernel, gamma, dimension, start):
        config = features.fourier_config(preprocess, kernel, gamma)
        maps = features.fourier_features(jax.random.key(0), x)
        phi = maps.apply(config, x, dimension, start)
        if isinstance(phi, jax.core.Tracer):
            return phi
        parts = maps.project(config, x, dimension, start), maps.phases(dimension, start, phi.dtype)
        np.testing.assert_allclose(from_projection(config, *parts), phi, atol=1e-3)
        str(config)
        return phi

    X = np.asarray(x, np.float64)
    truth = _kernel(kernel, X, X, gamma)
    check = lambda phi: that(
        np.abs(np.asarray(phi, np.float64) @ np.asarray(phi, np.float64).T / 4000 - truth).max()
        < 0.12,
        f"{kernel}: features do not converge to their kernel",
    )
    kinds = {
        "x": "array",
        "preprocess": "name",
        "kernel": "name",
        "gamma": "positive",
        "dimension": "count",
        "start": "whole",
    }
    arguments = {
        "x": x,
        "preprocess": "none",
        "kernel": kernel,
        "gamma": gamma,
        "dimension": 4000,
        "start": 0,
    }
    return Case(call, arguments, check, kinds, ("x",))


@generates("bilevel.spaces.features.sample_fourier", "bilevel.spaces.features.sample_text")
def samples(rng, dtype) -> Case:
    count = int(rng.integers(0, 6))

    def call(key, count, gammas):
        fourier = features.sample_fourier(key, count, gammas=gammas)
        return [float(c.gamma) for c in fourier], len(features.sample_text(key, count))

    check = lambda r: first(
        that(len(r[0]) == r[1] == count, f"{len(r[0])} and {r[1]}"),
        that(all(0.999e-3 <= g <= 10.01 for g in r[0]), f"bandwidths {r[0]}"),
    )
    kinds = {"key": "key", "count": "whole", "gammas": "sequence"}
    return Case(
        call, {"key": jax.random.key(1), "count": count, "gammas": (1e-3, 10.0)}, check, kinds
    )


_WORDS = ["alpha", "beta", "gamma", "delta"]


@generates(
    "bilevel.spaces.features.text.hashed_counts",
    "bilevel.spaces.features.text.fold",
    "bilevel.spaces.features.text_config",
)
def hashed_counts(rng, dtype) -> Case:
    texts = [" ".join(rng.choice(_WORDS, int(rng.integers(0, 6)))) for _ in range(3)]

    def call(texts, order, dimension, smoothing, tokenizer):
        config = features.text_config(order=order, smoothing=smoothing, tokenizer=tokenizer)
        counts = text.hashed_counts(texts, config)
        return counts, text.fold(counts, dimension)

    def check(r):
        expected = [sorted(collections.Counter(t.split()).values()) for t in texts]
        counts = [sorted(row.data.tolist()) for row in (r[0][[i]] for i in range(3))]
        return first(
            that(counts == expected, f"counts {counts} of {expected}"),
            near("sums", r[1].sum(1), [len(t.split()) for t in texts], 1e-6),
        )

    kinds = {
        "texts": "sequence",
        "order": "name",
        "dimension": "count",
        "smoothing": "positive",
        "tokenizer": "name",
    }
    arguments = {
        "texts": texts,
        "order": 1,
        "dimension": 64,
        "smoothing": 1.0,
        "tokenizer": "simple",
    }
    return Case(call, arguments, check, kinds, fine=("order: a number",))


@generates("bilevel.spaces.features.text.weigh", "bilevel.spaces.features.text.statistics")
def weigh(rng, dtype) -> Case:
    counts = rng.integers(0, 4, (5, 3)).astype(float)
    labels, a = np.array([0, 1, 0, 1, 1]), float(10 ** rng.uniform(-2, 1))

    def call(counts, labels, weights):
        bags = scipy.sparse.csr_array(counts)
        config = features.text_config(weights=weights, smoothing=a)
        return text.weigh(bags, config, text.statistics(bags, labels)).toarray()

    P, Q = counts[labels == 1].sum(0), counts[labels == 0].sum(0)
    weights = np.log2(((P + a) / (P + a).sum()) / ((Q + a) / (Q + a).sum()))
    check = lambda r: near("features", r, counts * weights, 1e-6)
    kinds = {"counts": "values", "labels": "labels", "weights": "name"}
    arguments = {"counts": counts, "labels": labels, "weights": "nb"}
    fine = ("labels: negative", "labels: fractions")  # any two values
    return Case(call, arguments, check, kinds, fine=fine)


@generates("bilevel.spaces.features.fourier_selection")
def fourier_selection(rng, dtype) -> Case:
    x = np.vstack([rng.normal(size=(6, 2)) + 3, rng.normal(size=(6, 2)) - 3]).astype(dtype)
    labels = np.repeat([0, 1], 6)

    def call(key, x, labels, dimension, penalty):
        part = (x, labels)
        problem = features.fourier_selection(
            key, part, part, part, dimension=dimension, penalty=penalty
        )
        config = features.fourier_config(gamma=0.1)
        return problem.evaluate(jax.random.key(1), config, dimension)

    check = lambda r: near("errors of two clouds", [r.valid, r.test], [0.0, 0.0], 0)
    kinds = {"key": "key", "x": "values", "dimension": "count", "penalty": "nonnegative"}
    arguments = {
        "key": jax.random.key(0),
        "x": x,
        "labels": labels,
        "dimension": 64,
        "penalty": 0.5,
    }
    return Case(call, arguments, check, kinds)


@generates("bilevel.spaces.features.text_selection")
def text_selection(rng, dtype) -> Case:
    texts = np.array(["good fine", "bad poor"] * 4, dtype=object)
    labels = np.array([1, 0] * 4)

    def call(texts, labels, cost):
        part = (texts, labels)
        problem = features.text_selection(part, part, part, cost=cost)
        config = features.text_config(weights="nb")
        return problem.evaluate(jax.random.key(1), config, 64)

    check = lambda r: near("errors", [r.valid, r.test], [0.0, 0.0], 0)
    return Case(call, {"texts": texts, "labels": labels, "cost": 1.0}, check, {"cost": "positive"})
