"""With more weights than rows and hardly any penalty, the default solver itself is accurate."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import soft, soft_problem

import bilevel
from bilevel.internal.conjugate_gradients import solve_conjugate_gradients


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_default_solver_is_right_to_rounding_whatever_the_penalty(dtype):
    fn = jax.jit(bilevel.hypergradient(soft_problem(), bilevel.implicit(), diagnostics=False))
    for seed, log10 in itertools.product(range(4), (-2, -4, -5, -6, -7, -8)):
        arguments, truth = soft(seed, log10)
        arguments = jax.tree.map(lambda a: jnp.asarray(a, dtype), arguments)
        actual = float(fn(*arguments).grad)
        # The weights' rounding, in directions of an outer gradient of size 1.
        allowed = 100 * float(np.finfo(dtype).eps)
        np.testing.assert_allclose(actual, truth, rtol=1e-3, atol=allowed)


def test_a_tiny_curvature_is_trusted_unless_it_is_rounding():
    x = np.random.default_rng(1).normal(size=(5, 12)).astype(np.float32)
    free = np.linalg.svd(x)[2][-1].astype(np.float32)
    b = jnp.asarray(x[0] / 4 + free)

    def solve(penalty):
        def hvp(v):
            return x.T @ (x @ v) + penalty * v

        return solve_conjugate_gradients(hvp, b, None, steps=100, threshold=jnp.float32(1e-6)).x

    exact = np.linalg.solve(x.T.astype(float) @ x + 1e-8 * np.eye(12), np.asarray(b, float))
    off = np.linalg.norm(np.asarray(solve(np.float32(1e-8)), float) - exact)
    assert off < 0.01 * np.linalg.norm(exact)
    assert float(jnp.linalg.norm(solve(np.float32(0)))) < 10  # 1e7 and more along rounding


def test_a_singular_system_out_of_its_range_has_a_bounded_answer():
    solve = jax.jit(
        lambda x, b: solve_conjugate_gradients(
            lambda v: x.T @ (x @ v), b, None, steps=100, threshold=jnp.float32(1e-6)
        )
    )
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x, b = rng.normal(size=(5, 12)), rng.normal(size=12)
        solution = solve(x.astype(np.float32), b.astype(np.float32))
        left = b - x.T @ (x @ np.asarray(solution.x, float))
        assert np.linalg.norm(left) <= 1.001 * np.linalg.norm(b)
        np.testing.assert_allclose(float(solution.residual), np.linalg.norm(left), rtol=0.01)
