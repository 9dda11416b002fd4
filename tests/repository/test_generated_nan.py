"""A NaN in any traced array of a public function does not come out as finite numbers.

Nothing can raise under ``jit``. Each row is a call and its arrays, of which every entry matters.
"""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from generated import examples
from helpers import laplace, tanh_network
from hypothesis import given
from problems import SCALED as PROBLEM

import bilevel
import ntk
from bilevel import bounds, linear, nets, spaces, spectral
from bilevel.contracts import Point

rng = np.random.default_rng(0)
x, y, v = (rng.normal(size=shape) for shape in ((6, 3), (6,), (3,)))
alpha, K, H = np.array([0.2, 0.3, 0.5]), x @ x.T + np.eye(6), x.T @ x + np.eye(3)
labels, images = np.array([0, 1, 0, 1, 1, 0]), rng.normal(size=(2, 4, 4, 1))
radii = np.array([0.1, 0.5])
params = {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=(4, 2))}


def inverse(make):
    return lambda H, b: make(lambda v: H @ v, b, None, Point(b, None, None)), (H, v)


def updated(optimizer):
    def call(alpha, gradient):
        updates, _ = optimizer.update(gradient, optimizer.init(alpha), alpha)
        return optax.apply_updates(alpha, updates)

    return call, (alpha, v)


def hypergradient(solver):
    def call(alpha, w0, train, valid):
        return bilevel.hypergradient(PROBLEM, solver, diagnostics=False)(alpha, w0, train, valid)

    return call, (v, v, v, v)


def score(name):
    function = getattr(ntk.scores, name)
    return lambda params, x: function(None, tanh_network, params, (x, labels)), (params, x)


CALLS = {
    "cg": inverse(bilevel.cg(20)),
    "dense": inverse(bilevel.dense()),
    "neumann": inverse(bilevel.neumann(3, 0.1)),
    "nystrom": inverse(bilevel.nystrom(3, 0.1)),
    "unrolled": hypergradient(bilevel.unrolled(0.1, 2)),
    "one_step": hypergradient(bilevel.one_step(0.1)),
    "exponentiate": updated(optax.chain(optax.sgd(0.5), bilevel.exponentiate())),
    "project": updated(optax.chain(optax.sgd(0.5), bilevel.project())),
    "softmax": updated(bilevel.softmax(optax.sgd(0.5))),
    "ridge_weights": (lambda features, y: linear.ridge_weights(features, y, 0.1), (x, y)),
    "spectral_alpha": (spectral.spectral_alpha, (x[:, :, None] * v, y)),
    "simplex_start": (spectral.simplex_start, (v,)),
    "ball_covering": (bounds.ball_covering(3, 1.0), (radii,)),
    "simplex_covering": (bounds.simplex_covering(3), (radii,)),
    "finite_covering": (lambda points, radii: bounds.finite_covering(points)(radii), (x, radii)),
    "version_entropy": (bounds.version_entropy, (np.ones((2, 3)),)),
    "effective_dimension": (
        lambda logs: bounds.effective_dimension(logs, jnp.full(3, 0.5), C_bar=2.0),
        (np.ones(3),),
    ),
    "oymak_theorem2": (
        lambda K, y: bounds.oymak_theorem2(K, y, 9, h=1, B=1.0, lambda0=1.0, C=1.0).value,
        (K, y),
    ),
    "spectral_limits": (spectral.spectral_limits, (np.array([2.0]), np.array([0.1]))),
    "condition_six": (bilevel.condition_six, (x, alpha, y)),
    "network_kernel": (lambda x: ntk.network_kernel(x, activations=[ntk.relu]).ntk, (x,)),
    "mixture_kernel": (
        lambda x, alpha: ntk.mixture_kernel(alpha, ntk.mixture_blocks(x, [ntk.relu, ntk.erf])),
        (x, alpha[:2]),
    ),
    "empirical_kernel": (functools.partial(ntk.empirical_kernel, tanh_network), (params, x)),
    "kernel_operator": (lambda x, v: ntk.KernelOperator(laplace, x, tile=4) @ v, (x, y)),
    "eigenvalues": (ntk.eigenvalues, (K,)),
    "min_eigenvalue": (ntk.min_eigenvalue, (K,)),
    "kernel_regression": (lambda K, y: ntk.kernel_regression(K, y, penalty=0.1).predict(K), (K, y)),
    "gradient_flow": (lambda K, y: ntk.gradient_flow(K, y, 0.1), (K, y)),
    "schur_lower_bound": (
        lambda x: ntk.bounds.schur_lower_bound(x, activations=[ntk.relu]).value,
        (x / np.linalg.norm(x, axis=1, keepdims=True),),
    ),
    "unit_inputs": (spaces.unit_inputs, (x,)),
    "unit_images": (lambda images: nets.unit_images(images)[0], (images,)),
    "convolve_images": (nets.convolve_images, (images, np.ones((3, 3, 1, 2)))),
    "max_pooling": (lambda images: nets.max_pooling(images, 3, stride=1, padding=1), (images,)),
}
SCORES = "eigen_nas", "te_nas", "snip", "grasp", "jacov", "log_traces", "zico"
CALLS |= {name: score(name) for name in SCORES}


@functools.cache
def compiled(name):
    return jax.jit(lambda arrays: CALLS[name][0](*arrays))


def is_finite(tree):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@examples(5)
@given(where=st.integers(0, 10**6))
def test_a_planted_nan_is_seen_in_the_result(name, where):
    leaves, structure = jax.tree.flatten(CALLS[name][1])
    assert is_finite(compiled(name)(CALLS[name][1]))
    which = where % len(leaves)
    leaves[which] = leaves[which].copy()
    leaves[which].flat[where % leaves[which].size] = np.nan
    assert not is_finite(compiled(name)(jax.tree.unflatten(structure, leaves)))
