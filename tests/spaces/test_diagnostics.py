"""Entropy, curvature along simplices and the kernel's diagonal, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from bilevel.discretize import diagnostics


def test_the_curvature_is_the_largest_eigenvalue_on_the_tangent_space():
    # Truth: a quadratic in alpha, its Hessian projected by a matrix and diagonalised by numpy.
    draw = np.random.default_rng(0)
    root = draw.normal(size=(5, 5))
    H = root + root.T
    P = np.eye(5)
    P[:3, :3] -= 1 / 3
    expected = np.linalg.eigvalsh(P @ H @ P)[-1]

    def loss(w, alpha, batch):
        a = jnp.concatenate([alpha["p"], alpha["s"]])
        return 0.5 * a @ jnp.asarray(H) @ a

    alpha = {"p": jnp.ones(3) / 3, "s": jnp.zeros(2)}
    curvature = diagnostics.alpha_curvature(loss, {"p": "simplex", "s": "box"})
    actual = curvature(None, alpha, None)
    assert_close(actual, expected, f64=1e-6)  # Lanczos's tolerance, squared


@pytest.mark.parametrize("size", [1, 4, 40])
def test_the_curvature_of_free_alpha_may_be_negative_or_zero(size):
    # Truth: -6 times the identity. A linear loss has curvature 0, where ARPACK would fail.
    alpha = jnp.linspace(0.5, 1.0, size)
    bent = diagnostics.alpha_curvature(lambda w, a, b: -3 * jnp.sum(a**2), "free")
    assert_close(bent(None, alpha, None), -6.0, f64=1e-6)
    flat = diagnostics.alpha_curvature(lambda w, a, b: jnp.sum(a["x"]), {"x": "free"})
    assert flat(None, {"x": alpha}, None) == 0
    on_simplex = diagnostics.alpha_curvature(lambda w, a, b: -3 * jnp.sum(a**2))
    assert abs(on_simplex(None, alpha / alpha.sum(), None)) < 1e-6  # to rounding, by Lanczos


@pytest.mark.parametrize("size", [3, 40])
def test_a_curvature_that_is_not_finite_is_a_sentence(size):
    root = diagnostics.alpha_curvature(lambda w, a, b: jnp.sum(jnp.sqrt(a)), "free")
    with pytest.raises(ValueError, match="alpha: expected a loss whose second derivatives are fin"):
        root(None, jnp.zeros(size), None)


def test_sets_are_like_alpha_or_one_word_for_it():
    alpha = {"a": jnp.array([[0.5, 0.5]]), "b": {"c": jnp.array([3.0, 1.0])}}
    assert len(diagnostics.simplices("simplex", alpha)) == 2
    assert len(diagnostics.simplices({"a": "box", "b": "simplex"}, alpha)) == 1
    moved = diagnostics.simplex_tangent({"a": "box", "b": "simplex"}, alpha)
    assert moved["b"]["c"].tolist() == [1.0, -1.0] and moved["a"].tolist() == [[0.5, 0.5]]


def test_the_kernels_diagonal_is_the_squared_norm_of_a_rows_gradient():
    w, x = jax.random.normal(jax.random.key(0), (3, 2)), jnp.arange(12.0).reshape(4, 3)

    def apply(w, alpha, x):
        return alpha * jnp.tanh(x @ w)

    slopes = [jax.grad(lambda w, i=i: apply(w, 2.0, x)[i, 0])(w) for i in range(4)]
    expected = np.mean([np.sum(np.asarray(s) ** 2) for s in slopes])
    assert_close(diagnostics.kernel_diagonal(apply, w, 2.0, x), expected, f32=1e-5)
