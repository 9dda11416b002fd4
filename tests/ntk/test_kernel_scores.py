"""Scores of the tangent kernel, against the kernel of an explicit Jacobian in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from ntk import empirical_kernel, scores
from ntk.scores.kernel_based import kernel_scores
from ntk.scores.registry import builtin_score_names, score_description

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "first": {"kernel": jax.random.normal(KEYS[0], (5, 7)), "bias": jnp.zeros(7)},
    "second": {"kernel": jax.random.normal(KEYS[1], (7, 3))},
}
X = jax.random.normal(KEYS[2], (6, 5))
Y = jnp.array([0, 1, 2, 2, 1, 0])
NAMES = tuple(
    name for name in builtin_score_names() if score_description(name).together == "kernel_scores"
)


def apply(p, x):
    hidden = jnp.tanh(x @ p["first"]["kernel"] + p["first"]["bias"])
    return hidden @ p["second"]["kernel"]


def by_hand():
    """Every score in numpy, from the gradients of all samples."""
    gradients = [jax.grad(lambda p, x=x: apply(p, x[None]).sum())(PARAMS) for x in X]
    leaves = [[np.ravel(leaf) for leaf in jax.tree.leaves(g)] for g in gradients]
    rows = np.stack([np.concatenate(sample) for sample in leaves]).astype(float)
    K, n = rows @ rows.T, len(X)
    values = np.linalg.eigvalsh(K)
    cosines = K / np.sqrt(np.outer(np.diag(K), np.diag(K)))
    targets = np.eye(3)[np.asarray(Y)]
    targets = targets - targets.mean(0)
    p = values / values.sum()
    # Leaves in JAX's order: bias, kernel, kernel.
    traces = [np.mean([sample[i] @ sample[i] for sample in leaves]) for i in (1, 2)]
    return {
        "eigen_nas": np.trace(K) / n,
        "min_eigenvalue": values[0],
        "cosine_min_eigenvalue": np.linalg.eigvalsh(cosines)[0],
        "condition_number": values[-1] / values[0],
        "spectral_entropy": -np.sum(p * np.log(p)),
        "label_energy": -np.trace(targets.T @ np.linalg.solve(K, targets)),
        "log_traces": np.sum(np.log(traces)),
    }


def test_all_at_once_are_those_one_by_one():
    by_score = jax.jit(functools.partial(kernel_scores, None, apply))(PARAMS, (X, Y))
    assert set(by_score) == {"kernel", *NAMES}
    expected = by_hand()
    for name in NAMES:
        assert_close(by_score[name], expected[name], f64=1e-8)
    for name in ("eigen_nas", "min_eigenvalue", "label_energy"):
        one = jax.jit(functools.partial(getattr(scores, name), None, apply))(PARAMS, (X, Y))
        assert_close(one, expected[name], f64=1e-8)
    assert_close(by_score["kernel"], empirical_kernel(apply, PARAMS, X))


@pytest.mark.long
@pytest.mark.parametrize("dead", ["network", "equal samples"])
def test_a_singular_kernel_has_defined_scores_and_none_that_ranks_first(dead):
    params = jax.tree.map(jnp.zeros_like, PARAMS) if dead == "network" else PARAMS
    x = jnp.zeros_like(X) if dead == "network" else jnp.ones_like(X)
    by_score = kernel_scores(None, apply, params, (x, Y))
    assert not any(np.isnan(np.asarray(value)).any() for value in by_score.values())
    # A zero eigenvalue is rounded relative to the kernel's trace.
    least = 1e-6 * float(jnp.trace(by_score["kernel"]))
    assert by_score["min_eigenvalue"] <= least and by_score["cosine_min_eigenvalue"] <= 1e-6
    assert by_score["condition_number"] == np.inf and by_score["label_energy"] == -np.inf
    assert by_score["spectral_entropy"] <= 1e-4


def test_a_traced_indefinite_kernel_gives_nan():
    K = jnp.array([[1.0, 3.0], [3.0, 1.0]])
    assert jnp.isnan(jax.jit(scores.of_kernel)(K)["min_eigenvalue"])
