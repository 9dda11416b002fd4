"""Scores do not depend on how a network is written, nor on which sizes are equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from ntk import scores

N = 6  # samples, features, width and classes: all the same
rng = np.random.default_rng(0)
W1, W2, W3 = (rng.normal(size=(N, N)) for _ in range(3))
B1, B2 = (0.3 * rng.normal(size=N) for _ in range(2))
X, Y = rng.normal(size=(N, N)), np.arange(N)

RELUS = {
    "jax.nn.relu": jax.nn.relu,
    "maximum": lambda x: jnp.maximum(x, 0),
    "maximum, 0 first": lambda x: jnp.maximum(0.0, x),
    "lax.max of zeros": lambda x: jax.lax.max(x, jnp.zeros_like(x)),
    "maximum of a row of zeros": lambda x: jnp.maximum(x, jnp.zeros(x.shape[-1])),
    "where >": lambda x: jnp.where(x > 0, x, 0),
    "where >=": lambda x: jnp.where(x >= 0, x, jnp.zeros_like(x)),
    "where <": lambda x: jnp.where(x < 0, 0.0, x),
    "where 0 <": lambda x: jnp.where(jnp.less(0, x), x, 0),
    "a mask": lambda x: x * (x > 0),
    "clip": lambda x: jnp.clip(x, 0),
    "jit": jax.jit(lambda x: jnp.maximum(x, 0)),
    "remat": jax.checkpoint(lambda x: jnp.maximum(x, 0)),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 9, jnp.tanh, lambda x: jnp.maximum(x, 0), x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.maximum(c, 0), None), x, None, length=1)[0],
    "cond, 0 outside": lambda x: in_branch(jax.lax.max, x, jnp.zeros_like(x)),
    "cond, test outside": lambda x: in_branch(lambda x, on: jnp.where(on, x, 0), x, x > 0),
    "scan, 0 outside": lambda x: in_loop(jax.lax.max, x, jnp.zeros_like(x)),
}


def in_branch(function, x, *others):
    return jax.lax.cond(x[0, 0] > 9, lambda x, *_: jnp.tanh(x), function, x, *others)


def in_loop(function, x, other):
    return jax.lax.scan(lambda c, _: (function(c, other), None), x, None, length=1)[0]


def network(relu, normalise=lambda x: x):
    return lambda w, x: relu(normalise(relu(x @ w[0] + B1)) @ w[1] + B2) @ w[2]


def relu_scores(apply):
    both = scores.naswot, scores.regions
    return [float(score(None, apply, (W1, W2, W3), (X, Y))) for score in both]


def patterns(*units):
    """naswot and regions of masks [n, units], by loops."""
    on = np.concatenate([np.asarray(u) > 0 for u in units], axis=1)
    K = np.array([[np.sum(a == b) for b in on] for a in on])
    return [np.linalg.slogdet(K)[1], len({tuple(row) for row in on})]


def hidden():
    first = X @ W1 + B1
    return first, np.maximum(first, 0) @ W2 + B2


@pytest.mark.long
@pytest.mark.parametrize("form", RELUS)
def test_a_relu_is_a_relu_however_it_is_written_and_also_of_a_constant(form):
    relu = RELUS[form]
    assert_close(relu_scores(network(relu)), patterns(*hidden()), f32=1e-4)

    def of_constant(w, x):
        nothing = relu(jnp.zeros_like(x))
        return relu(x @ w[0] + B1 + nothing @ w[2]) @ w[1]

    assert_close(relu_scores(of_constant), patterns(np.zeros((N, N)), X @ W1 + B1), f32=1e-4)


@pytest.mark.parametrize("relu6", [jax.nn.relu6, lambda x: jnp.clip(x, 0, 6)])
def test_relu6_has_two_kinks(relu6):
    actual = relu_scores(lambda w, x: relu6(10 * x @ w[0]) @ w[1])
    assert_close(actual, patterns(10 * X @ W1, 10 * X @ W1 - 6), f32=1e-4)


def guarded(x, positive=lambda v: jnp.maximum(0.0, v)):
    mean = x.mean(1, keepdims=True)
    variance = positive((x**2).mean(1, keepdims=True) - mean * mean)
    return (x - mean) / jnp.sqrt(variance + 1e-3)


def test_what_is_no_relu_does_not_count():
    first = X @ W1 + B1
    second = guarded(np.maximum(first, 0)) @ W2 + B2
    for guard in (
        guarded,
        lambda x: guarded(x, lambda v: in_branch(lambda v: jnp.maximum(v, 0), v)),
        lambda x: guarded(x) + guarded(jnp.zeros_like(x)),
    ):
        assert_close(relu_scores(network(jax.nn.relu, guard)), patterns(first, second), f32=1e-4)


STYLES = {
    "features first": lambda w, x: (
        (w[2].T @ jnp.maximum(w[1].T @ jax.nn.relu(w[0].T @ x.T + B1[:, None]) + B2[:, None], 0)).T
    ),
    "vmapped, matrices first": jax.vmap(
        lambda w, x: w[2].T @ jax.nn.relu(w[1].T @ jax.nn.relu(w[0].T @ x + B1) + B2), (None, 0)
    ),
    "samples in the middle": lambda w, x: jnp.einsum(
        "nck,kj->ncj",
        jax.nn.relu(jnp.einsum("cnj,jk->nck", jax.nn.relu(x[None] @ w[0] + B1), w[1]) + B2),
        w[2],
    )[:, 0],
}


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
def test_samples_are_found_on_whatever_axis_they_are(style):
    assert_close(relu_scores(STYLES[style]), patterns(*hidden()), f32=1e-4)
    fisher, params = scores.fisher, (W1, W2, W3)
    truth = fisher(None, network(jax.nn.relu), params, (X, Y))
    order = np.array([3, 1, 5, 0, 4, 2])
    for batch in ((X, Y), (X[order], Y[order])):
        assert_close(fisher(None, STYLES[style], params, batch), truth)


def haiku_style(p, x):
    x = jnp.maximum(x @ p["linear"]["w"] + p["linear"]["b"], 0)
    return x @ p["linear_1"]["w"] + p["linear_1"]["b"]


def stacked_style(p, x):
    x, _ = jax.lax.scan(lambda x, q: (jnp.maximum(x @ q["w"] + q["b"], 0), None), x, p["linear"])
    return x @ p["linear_1"]["w"] + p["linear_1"]["b"]


def low_rank_style(p, x):
    w = p["linear"]["u"] @ p["linear"]["v"] / np.sqrt(N)
    return jnp.maximum(x @ w + p["linear"]["b"], 0) @ p["linear_1"]["w"] + p["linear_1"]["b"]


NETWORKS = {  # with the parameters of the first layer
    "biases [1, w]": (haiku_style, {"w": W1, "b": B1[None]}),
    "layers [l, ...]": (stacked_style, {"w": np.stack([W1, W3]), "b": np.stack([B1, B2])}),
    "low rank": (low_rank_style, {"u": W1, "v": W3, "b": B1[None]}),
    "one input": (lambda p, x: haiku_style(p, x[:, :1]), {"w": W1[:1], "b": B1[None]}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_what_multiplies_the_data_and_biases_are_not(name):
    apply, first = NETWORKS[name]
    params = {"linear": first, "linear_1": {"w": W2, "b": B2[None]}}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    weights = [np.asarray(leaf) for path, leaf in leaves if path[-1].key != "b"]
    assert_close(scores.l2_norm(None, apply, params, (X, Y)), sum(map(np.linalg.norm, weights)))
