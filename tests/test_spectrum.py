"""Smallest eigenvalues against numpy's full spectrum and planted ones; certificates by attack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, finite_differences, tolerance

import ntk
from ntk.certificate import certified_min_eigenvalue, certify_simplex
from ntk.spectrum import eigenvalues, min_eigenvalue, smallest_eigenpair

X64 = jax.config.jax_enable_x64


def planted(values, seed=0):
    """A symmetric float64 matrix with these eigenvalues, up to a few roundings."""
    n = len(values)
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))
    K = (q * values) @ q.T
    return (K + K.T) / 2


SPECTRA = {
    "separated": np.linspace(1, 10, 90),
    "crowded below": 1 + np.linspace(0, 1, 90) ** 3,
    "wide": np.geomspace(1e-3, 1, 90),
    "multiple": np.repeat([0.5, 2.0], 45),
    "indefinite": np.linspace(-3, 5, 90),
    "negative": np.linspace(-7, -1, 90),
    "singular": np.repeat([0.0, 1.0], [30, 60]),
    "small": np.linspace(0.1, 1, 5),
    "one entry": np.array([3.0]),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_min_eigenvalue_is_the_planted_one(name):
    values = SPECTRA[name]
    K = planted(values)
    pair = smallest_eigenpair(K)
    error = abs(float(pair.value) - values.min())  # truth: planted
    assert error <= tolerance(1e-14, 1e-6) * np.abs(values).max()
    assert pair.residual <= tolerance(1e-9, 1e-5) * np.abs(values).max()
    np.testing.assert_allclose(np.linalg.norm(pair.vector), 1, rtol=1e-5)


@jax.jit
def of_product(K):
    return smallest_eigenpair(lambda v: K @ v, size=len(K))


@pytest.mark.parametrize("name", ["separated", "wide", "multiple", "indefinite", "singular"])
def test_a_product_has_the_smallest_eigenvalue_of_its_matrix(name):
    values = SPECTRA[name]
    pair = of_product(planted(values))
    error = abs(float(pair.value) - values.min())  # truth: planted
    assert error <= tolerance(1e-12, 1e-5) * np.abs(values).max()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_min_eigenvalue_holds_at_any_scale(scale):
    K = scale * planted(SPECTRA["separated"])
    assert_close(min_eigenvalue(K) / max(scale, 1), min(scale, 1) if scale < 1 else 1.0)


@pytest.mark.parametrize("n", [6, 80])
def test_the_derivative_is_the_projector_on_the_eigenvector(n):
    K = planted(np.linspace(1, 3, n) ** 2)
    v = np.linalg.eigh(K)[1][:, 0]  # truth: numpy
    assert_close(jax.jit(jax.grad(min_eigenvalue))(K), np.outer(v, v), f64=1e-7, f32=2e-2)


def test_products_are_differentiable_in_what_they_close_over():
    A, B = planted(np.linspace(1, 9, 70)), planted(np.linspace(-1, 1, 70), seed=1)

    def of_matrix(t):
        return min_eigenvalue(A + t * B)

    def of_product(t):
        return min_eigenvalue(lambda v: A @ v + t * (B @ v), size=70)

    truth = finite_differences(lambda t: np.linalg.eigvalsh(A + t * B)[0], np.array(0.3))
    for function in (of_matrix, of_product):
        assert_close(jax.jit(jax.grad(function))(0.3), truth, f64=1e-7, f32=1e-2)
    assert_close(
        jax.vmap(of_matrix)(jnp.array([0.1, 0.2])),
        [np.linalg.eigvalsh(A + t * B)[0] for t in (0.1, 0.2)],
    )


def test_second_derivatives_are_refused_rather_than_wrong():
    with pytest.raises(NotImplementedError, match="K: expected first derivatives only"):
        jax.hessian(min_eigenvalue)(jnp.eye(2))


def test_eigenvalues_are_the_full_spectrum_in_ascending_order():
    assert_close(eigenvalues(planted(SPECTRA["indefinite"])), SPECTRA["indefinite"])


def test_a_traced_nan_gives_nan():
    assert np.isnan(jax.jit(min_eigenvalue)(jnp.full((70, 70), jnp.nan)))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: min_eigenvalue(jnp.zeros((2, 3))), r"K: expected a square matrix, got shape"),
        (lambda: min_eigenvalue(jnp.zeros((0, 0))), r"K: expected a square matrix, got shape"),
        (lambda: min_eigenvalue(jnp.full((2, 2), jnp.nan)), "K: expected finite entries"),
        (lambda: min_eigenvalue(jnp.eye(2), size=2), "size: expected None beside a matrix"),
        (lambda: min_eigenvalue(lambda v: v), "size: expected the positive size"),
        (lambda: certified_min_eigenvalue(np.zeros((2, 3))), "K: expected a square matrix"),
        (lambda: certified_min_eigenvalue(np.zeros((0, 0))), "K: expected a square matrix"),
        (lambda: certified_min_eigenvalue([[1, 2], [0, 1]]), "K: expected symmetric"),
        (lambda: certified_min_eigenvalue([[np.inf]]), "K: expected finite entries"),
        (lambda: certified_min_eigenvalue(np.eye(2), -1), "entry_error: expected nonneg"),
        (lambda: certified_min_eigenvalue(np.eye(2), [1, 2]), "entry_error: expected a number"),
        (lambda: certify_simplex(np.eye(2)), r"blocks: expected shape \[h, h, n, n\]"),
        (lambda: certify_simplex(np.zeros((2, 1, 3, 3))), r"blocks: expected shape"),
        (lambda: certify_simplex(np.ones((1, 1, 1, 1)), rtol=0), "rtol: expected"),
        (lambda: certify_simplex(np.ones((1, 1, 1, 1)), max_cells=0), "max_cells: expected"),
    ],
)
def test_bad_input_is_named(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


# One kernel, rigorously. All in float64 on the host, whatever JAX's setting.


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_the_certified_bound_is_under_the_smallest_eigenvalue_and_near_it(name, scale):
    values = SPECTRA[name]
    slack = 1e-15 * len(values) * (np.abs(values).sum() + np.abs(values).max())
    bound = certified_min_eigenvalue(planted(values) * scale) / scale
    # The planted matrix itself is off by a few roundings: 1e-14 of its norm.
    rounding = 1e-14 * np.abs(values).max()
    assert values.min() - 4 * slack - rounding <= bound <= values.min() + rounding


def test_no_matrix_with_integer_entries_is_certified_above_its_exact_eigenvalue():
    # Truth: a I + b 11' has the eigenvalues a and a + n b.
    for n, a, b in [(2, 1, 1), (3, 5, -1), (50, 3, 7), (300, 2, 1), (7, 0, 4)]:
        K = a * np.eye(n) + b * np.ones((n, n))
        truth = min(a, a + n * b)
        bound = certified_min_eigenvalue(K)
        assert truth - 1e-15 * n * (np.trace(K) + 1) * 4 <= bound <= truth


def test_the_bound_covers_every_matrix_within_the_entry_error():
    K = planted(np.linspace(1, 3, 12))
    v = np.linalg.eigh(K)[1][:, 0]
    error = np.abs(np.random.default_rng(2).normal(size=(12, 12)))
    error = 0.01 * (error + error.T)
    for e in (0.01, error):
        worst = K - e * np.sign(np.outer(v, v))  # the matrix within e that lowers v'Kv the most
        bound = certified_min_eigenvalue(K, e)
        assert bound <= np.linalg.eigvalsh(worst)[0]
        assert bound >= 1 - 12 * np.max(e) - 1e-9
    # Attained: 11' has all its entries on the worst eigenvector.
    n, e = 10, 0.05
    attained = certified_min_eigenvalue(np.eye(n), e)
    assert attained == pytest.approx(1 - n * e, rel=1e-8) and attained <= 1 - n * e


def test_float32_and_slightly_asymmetric_kernels_are_taken_by_their_symmetric_part():
    K = planted(np.linspace(1, 3, 20)).astype(np.float32)
    K[0, 1] += np.float32(1e-6)
    part = (K.astype(float) + K.T.astype(float)) / 2
    truth = np.linalg.eigvalsh(part)[0]
    assert truth - 1e-12 < certified_min_eigenvalue(K) < truth + 1e-14


# The simplex.


def mixtures(phi):
    """Blocks ``Phi_i Phi_j'`` [h, h, n, n] of feature maps [h, n, p]."""
    return np.einsum("iap,jbp->ijab", phi, phi)


def smallest(blocks, alpha):
    return np.linalg.eigvalsh(np.einsum("i,ijab,j->ab", alpha, blocks, alpha))[0]


@pytest.mark.parametrize(("h", "seed"), [(1, 0), (2, 0), (2, 1), (3, 2), (4, 3)])
def test_the_bracket_holds_against_brute_force(h, seed):
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(1, 12, 40))
    blocks = mixtures(shared + 0.7 * rng.normal(size=(h, 12, 40)))
    found = certify_simplex(blocks, rtol=1e-2)
    assert found.converged and found.upper - found.lower <= 1e-2 * found.upper
    assert found.argmin.sum() == 1 and (found.argmin >= 0).all()
    # Truth: no point of the simplex is under the bound, corners and edges included.
    alphas = [rng.dirichlet(np.full(h, c)) for c in (0.2, 1, 5) for _ in range(300)]
    least = min(smallest(blocks, a) for a in [*alphas, found.argmin])
    assert found.lower <= least
    assert smallest(blocks, found.argmin) <= found.upper + 1e-13
    assert found.upper <= least * (1 + 1e-2)


def test_the_minimum_of_two_scalar_kernels_is_the_closed_form():
    # K_a = |a u + (1 - a) v|^2: the squared distance of the origin from a segment, 1 / 2 here.
    found = certify_simplex(mixtures(np.array([[[1.0, 0.0]], [[0.0, 1.0]]])), rtol=1e-6)
    assert found.converged and found.lower <= 0.5 <= found.upper
    np.testing.assert_allclose(found.argmin, [0.5, 0.5], atol=1e-3)


def test_equal_activations_need_one_cell():
    phi = np.random.default_rng(0).normal(size=(1, 8, 20))
    found = certify_simplex(mixtures(np.repeat(phi, 3, axis=0)))
    truth = np.linalg.eigvalsh(phi[0] @ phi[0].T)[0]
    assert found.converged and found.cells == 1
    assert found.lower <= truth * (1 + 1e-13) and truth <= found.upper


def test_a_singular_kernel_is_bracketed_around_zero_and_not_called_converged():
    phi = np.random.default_rng(0).normal(size=(2, 8, 20))
    phi[:, 1] = phi[:, 0]  # two equal inputs: every mixture is singular
    found = certify_simplex(mixtures(phi), max_cells=200)
    assert not found.converged and found.lower <= 0 <= found.upper < 1e-10


def test_out_of_cells_the_bracket_is_wider_and_still_right():
    rng = np.random.default_rng(5)
    blocks = mixtures(rng.normal(size=(4, 20, 40)))
    found = certify_simplex(blocks, max_cells=20)
    assert not found.converged and found.cells <= 21
    least = min(smallest(blocks, a) for a in rng.dirichlet(np.ones(4), size=500))
    assert found.lower <= least and smallest(blocks, found.argmin) <= found.upper


def test_the_entry_error_widens_the_bracket_by_its_norm():
    blocks = mixtures(np.random.default_rng(0).normal(size=(1, 6, 30)))
    truth = np.linalg.eigvalsh(blocks[0, 0])[0]
    found = certify_simplex(blocks, entry_error=0.01)
    assert found.lower <= truth - 0.06 and truth + 0.06 <= found.upper
    assert found.lower >= truth - 0.06 * 8


@pytest.mark.skipif(not X64, reason="the reference values are of float64 kernels")
def test_mixtures_of_activations_have_the_reference_brackets():
    x = np.random.default_rng(0).normal(size=(50, 10))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    all_three = np.asarray(ntk.mixture_blocks(jnp.asarray(x), [ntk.relu, ntk.tanh, ntk.swish]))
    # Truth: brackets by an independent implementation (eigenvalues of all Bernstein coefficients).
    # Both contain the minimum; and ours needs no more cells.
    for chosen, lower, upper, cells in [
        ([0, 1], 0.0304496475, 0.0304767032, 21),
        ([0, 2], 0.0072731903, 0.0072731903, 1),
        ([0, 1, 2], 0.0066876259, 0.0066916397, 39),
    ]:
        found = certify_simplex(all_three[np.ix_(chosen, chosen)])
        assert found.converged and found.lower <= upper and lower <= found.upper
        assert found.cells <= cells
