"""Lipschitz constants of algorithms, against linear maps, closed forms and exact derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, tolerance

import bilevel
from bilevel.theory.stability import lipschitz

DELTAS = np.array([0.5, 0.03])


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_a_linear_algorithm_has_the_length_of_its_image_of_the_direction_at_every_delta():
    rng = np.random.default_rng(0)
    # A(alpha) = (P alpha, Q alpha) moves by exactly delta (P u, Q u).
    p, q = rng.normal(size=(4, 3)), rng.normal(size=(2, 3))
    alphas, directions = rng.normal(size=(2, 5, 3))
    algorithm = jax.jit(lambda alpha: {"p": p @ alpha, "q": q @ alpha})
    quotients = lipschitz(algorithm, alphas, DELTAS, directions=directions)
    expected = np.linalg.norm(unit(directions) @ np.concatenate([p, q]).T, axis=1)
    assert quotients.shape == (5, 2)
    assert_close(quotients, np.stack([expected, expected], 1), f64=1e-12, f32=1e-4)


def test_directions_are_of_unit_length_over_all_leaves_and_may_be_one_for_all_alphas():
    rng = np.random.default_rng(0)
    alphas = {"mix": rng.normal(size=(3, 2)), "log_penalty": rng.normal(size=3)}
    # u = (1, 2, -2) / 3 in (mix, log_penalty), and A weighs its coordinates by 1, 2, 4.
    algorithm = lambda a: (a["mix"] * jnp.array([1.0, 2.0]), 4 * a["log_penalty"])  # noqa: E731
    directions = {"mix": np.array([1, 2]), "log_penalty": -2.0}
    quotients = lipschitz(algorithm, alphas, [0.1], directions=directions)
    assert_close(quotients, np.full((3, 1), np.sqrt(1 + 16 + 64) / 3), f64=1e-12, f32=1e-5)


def test_each_alpha_is_run_once_and_steps_towards_a_vertex_stay_on_the_simplex():
    seen = []

    def recorded(alpha):
        jax.debug.callback(lambda a: seen.append(np.asarray(a)), alpha)
        return alpha

    alphas = np.array([[0.2, 0.3, 0.5], [0.6, 0.1, 0.3]])
    deltas = np.array([0.1, 0.2, 0.4])
    vertex = np.array([1.0, 0.0, 0.0])
    lipschitz(recorded, alphas, deltas, directions=vertex - alphas)
    jax.effects_barrier()
    steps = np.concatenate([[0], deltas])[:, None]
    expected = np.concatenate([a + steps * unit(vertex - a) for a in alphas])
    assert len(seen) == 2 * (1 + 3)
    in_order, expected = (np.array(sorted(map(tuple, points))) for points in (seen, expected))
    assert_close(in_order, expected, f32=1e-6)
    np.testing.assert_allclose(np.sum(seen, axis=1), 1, rtol=0, atol=tolerance(1e-14, 1e-6))
    assert np.min(seen) >= 0


def test_ridge_on_mixed_features_approaches_the_length_of_its_derivative():
    rng = np.random.default_rng(0)
    # theta = M^-1 Phi'y, M = Phi'Phi + lam I, moves along u at M^-1 (Psi'(y - Phi theta) -
    # Phi'Psi theta) with Psi = sum_i u_i Phi_i.
    n, p, lam = 12, 3, 0.7
    maps, y = rng.normal(size=(3, n, p)), rng.normal(size=n)
    alpha, u = np.array([0.5, 0.3, 0.2]), unit(np.array([1.0, -2.0, 1.0]))
    phi, psi = np.tensordot(alpha, maps, 1), np.tensordot(u, maps, 1)
    inverse = np.linalg.inv(phi.T @ phi + lam * np.eye(p))
    theta = inverse @ phi.T @ y
    slope = np.linalg.norm(inverse @ (psi.T @ (y - phi @ theta) - phi.T @ psi @ theta))

    solver = bilevel.ridge(lambda a, x: jnp.tensordot(a, x, 1), lambda a: lam)

    def algorithm(alpha):
        w = jnp.zeros(p)
        return solver.run(None, alpha, w, solver.init(w), (jnp.asarray(maps), jnp.asarray(y)))[0]

    deltas = np.array([0.3, tolerance(1e-5, 3e-3)])
    far, near = lipschitz(algorithm, alpha[None], deltas, directions=u)[0]
    assert abs(near - slope) < tolerance(1e-4, 1e-2) * slope < abs(far - slope)


def test_assumption_1_is_the_sup_norm_of_predictions_and_several_norms_come_at_once():
    # f_alpha(x) = alpha^2 x has slope (2 alpha + delta) x.
    x = jnp.array([-3.0, 1.0, 2.0])
    alphas, deltas = np.array([0.0, 0.5]), np.array([0.1, 0.2, 0.4])

    def norms(difference):
        return jnp.stack([jnp.linalg.norm(difference), jnp.max(jnp.abs(difference))])

    quotients = lipschitz(lambda a: a**2 * x, alphas, deltas, norm=norms)
    slopes = 2 * alphas[:, None] + deltas
    assert_close(quotients, np.stack([np.sqrt(14) * slopes, 3 * slopes], -1), f32=1e-5)


@pytest.mark.long
def test_batches_jit_and_vmap_leave_the_result_as_it_is_and_grad_goes_through():
    def algorithm(alpha):
        return jnp.sin(alpha * jnp.arange(4.0))

    alphas = jnp.array([0.1, 0.4, 0.9])
    whole = lipschitz(algorithm, alphas, DELTAS)
    assert_close(lipschitz(algorithm, alphas, DELTAS, batch_size=2), whole, f64=1e-12, f32=1e-5)
    compiled = jax.jit(lambda a, d, u: lipschitz(algorithm, a, d, directions=u))
    assert_close(compiled(alphas, DELTAS, jnp.ones(3)), whole, f64=1e-12, f32=1e-5)
    one = jax.vmap(lambda a: lipschitz(algorithm, a[None], DELTAS)[0])
    assert_close(one(alphas), whole, f64=1e-12, f32=1e-5)
    # A(alpha) = alpha^2: distance 2 alpha + delta, of slope 2 in alpha.
    slope = jax.jit(jax.grad(lambda a: lipschitz(lambda a: a**2, a, np.array([0.5]))[0, 0]))
    assert_close(slope(jnp.array([0.3])), np.array([2.0]), f64=1e-12, f32=1e-4)


def test_the_precision_of_alphas_is_kept_and_the_floor_of_rounding_adds_in_quadrature():
    rng = np.random.default_rng(0)
    # Weights near 100 that move by delta v, about as far as the roundoff at this delta.
    w, v = np.float32(100 + rng.random(4000)), np.float32(rng.normal(size=4000))
    truth, delta = np.linalg.norm(v.astype(float)), 2.0**-17
    tiny = float(64 * np.finfo(np.float32).eps)

    def algorithm(alpha):
        assert alpha.dtype == jnp.float32
        return w + alpha * v

    alphas = jnp.array([0.25, 0.6], jnp.float32)
    floor = lipschitz(algorithm, alphas, [tiny]) * tiny / jnp.array([delta, 0.1])
    quotients = lipschitz(algorithm, alphas, [delta, 0.1])
    assert (quotients[:, 0] > 1.05 * truth).all()
    np.testing.assert_allclose(quotients, np.hypot(truth, floor), rtol=0.4)
    np.testing.assert_allclose(quotients[:, 1], truth, rtol=1e-6)


def test_differences_of_bytes_do_not_wrap():
    algorithm = jax.jit(lambda alpha: (200 - 100 * (alpha > 0.5)).astype(jnp.uint8)[None])
    quotients = lipschitz(algorithm, jnp.array([0.45]), jnp.array([0.1]))
    np.testing.assert_allclose(quotients, [[1000]], rtol=1e-5)
