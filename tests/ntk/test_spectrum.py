"""Smallest eigenvalues against numpy's full spectrum and planted ones; attacks on certificates."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from helpers import assert_close, finite_differences, float64_only, tolerance, unit_rows

import ntk
from ntk.spectrum import eigenvalues as spectrum
from ntk.spectrum.certificate import certified_min_eigenvalue, certify_simplex
from ntk.spectrum.eigenvalues import eigenvalues, min_eigenvalue, smallest_eigenpair


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
traced = jax.jit(smallest_eigenpair)
of_product = jax.jit(lambda K: smallest_eigenpair(lambda v: K @ v, size=len(K)))


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("how", ["eager", "traced", "as on an accelerator"])
def test_min_eigenvalue_is_the_planted_one(name, how, monkeypatch):
    values = SPECTRA[name]
    K = planted(values)
    if how == "as on an accelerator":
        monkeypatch.setattr(spectrum, "host_matrix", lambda K: None)
    pair = (traced if how == "traced" else smallest_eigenpair)(K)
    error = abs(float(pair.value) - values.min())  # truth: planted
    assert error <= tolerance(1e-14, 1e-6) * np.abs(values).max()
    assert pair.residual <= tolerance(1e-9, 1e-5) * np.abs(values).max()
    np.testing.assert_allclose(np.linalg.norm(pair.vector), 1, rtol=1e-5)


@pytest.mark.parametrize("name", ["separated", "wide", "multiple", "indefinite", "singular"])
def test_a_product_has_the_smallest_eigenvalue_of_its_matrix(name):
    values = SPECTRA[name]
    error = abs(float(of_product(planted(values)).value) - values.min())  # truth: planted
    assert error <= tolerance(1e-12, 1e-5) * np.abs(values).max()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_a_product_and_the_residual_hold_at_any_scale(scale):
    K = jnp.asarray(scale * planted(np.r_[1.0, np.linspace(2, 10, 89)]))
    for pair in (of_product(K), smallest_eigenpair(K)):
        assert_close(pair.value / scale, 1.0, f32=1e-5)
        assert pair.residual / scale <= tolerance(1e-9, 1e-3)


@pytest.mark.parametrize("find", [smallest_eigenpair, traced])
def test_eigenvalues_far_below_rounding_are_found_or_called_zero(find):
    tiny = float(jnp.finfo(jnp.zeros(()).dtype).tiny)
    for least in (1e-25, 4 * tiny, 0.0):
        pair = find(np.diag(np.r_[np.linspace(1, 2, 89), least]))
        assert abs(float(pair.value) - least) <= tolerance(1e-15, 1e-6)
        assert abs(pair.vector[-1]) >= 1 - 1e-6


@pytest.mark.parametrize("n", [6, 80])
def test_the_derivative_is_the_projector_on_the_eigenvector(n):
    K = planted(np.linspace(1, 3, n) ** 2)
    v = np.linalg.eigh(K)[1][:, 0]  # truth: numpy
    assert_close(jax.jit(jax.grad(min_eigenvalue))(K), np.outer(v, v), f64=1e-7, f32=2e-2)


@pytest.mark.long
def test_products_are_differentiable_in_what_they_close_over():
    A, B = planted(np.linspace(1, 9, 70)), planted(np.linspace(-1, 1, 70), seed=1)

    def of_matrix(t):
        return min_eigenvalue(A + t * B)

    truth = finite_differences(lambda t: np.linalg.eigvalsh(A + t * B)[0], np.array(0.3))
    for function in (of_matrix, lambda t: min_eigenvalue(lambda v: A @ v + t * (B @ v), size=70)):
        assert_close(jax.jit(jax.grad(function))(0.3), truth, f64=1e-7, f32=1e-2)
    values = [np.linalg.eigvalsh(A + t * B)[0] for t in (0.1, 0.2)]
    assert_close(jax.vmap(of_matrix)(jnp.array([0.1, 0.2])), values)


def test_zero_and_nan_matrices():
    assert min_eigenvalue(np.zeros((90, 90))) == 0
    assert traced(np.zeros((90, 90))).value == 0
    assert np.isnan(jax.jit(min_eigenvalue)(jnp.full((70, 70), jnp.nan)))


BIG = 2**38  # so that sums of n integers of this size are exact in float64
CROWDED = {  # n integers with a feature of kernels' spectra
    "clustered": lambda rng, n: BIG + rng.integers(0, 2 ** rng.integers(1, 30), n),
    "clustered below": lambda rng, n: np.r_[
        BIG + rng.integers(0, 2**12, n // 2), rng.integers(2 * BIG, 9 * BIG, n - n // 2)
    ],
    "repeated": lambda rng, n: rng.choice(rng.integers(1, BIG, 3), n),
    "rank-deficient": lambda rng, n: rng.integers(1, BIG, n) * (rng.uniform(size=n) < 0.4),
    "graded": lambda rng, n: 2 ** rng.integers(0, 38, n),
    "indefinite": lambda rng, n: rng.integers(-BIG, BIG, n),
    "negative, clustered": lambda rng, n: -BIG + rng.integers(0, 2**12, n),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", CROWDED)
@pytest.mark.parametrize("seed", range(3))
def test_random_spectra_have_the_smallest_eigenvalue_that_was_planted(kind, seed):
    rng, hadamard = np.random.default_rng(seed), scipy.linalg.hadamard(128)
    values = rng.permutation(CROWDED[kind](rng, 128))
    K = ((hadamard * values) @ hadamard.T).astype(float)  # integers, so without any rounding
    values = values * 128.0
    for dtype in {jnp.dtype(jnp.float32), jnp.zeros(()).dtype}:
        eps, norm = float(jnp.finfo(dtype).eps), np.abs(values).max()
        scales, ways = (2.0**-80, 1.0, 2.0**60), (smallest_eigenpair, traced)
        for scale, find in itertools.product(scales, ways):
            pair = find(jnp.asarray(K * scale, dtype))
            error = abs(float(pair.value) / scale - values.min())  # truth: planted
            assert error <= 60 * eps * norm + 1e-11 * abs(values.min())
            assert float(pair.residual) / scale <= max(300 * eps, 3e-11) * norm
    slack = 2e-16 * 128 * np.abs(values).sum()
    assert values.min() - 4 * slack <= certified_min_eigenvalue(K) <= values.min()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["clustered", "clustered below", "negative, clustered"])
def test_crowded_eigenvalues_take_a_bounded_number_of_solves(kind, monkeypatch):
    solves, solver = [], spectrum._cholesky_solver

    def counting(L):
        solve = solver(L)

        def counted(v):
            jax.debug.callback(lambda: solves.append(1))
            return solve(v)

        return counted

    monkeypatch.setattr(spectrum, "_cholesky_solver", counting)
    rng = np.random.default_rng(0)
    K = planted(rng.permutation(CROWDED[kind](rng, 300)) / BIG)
    traced_anew = jax.jit(lambda K: spectrum._smallest_eigenvector.__wrapped__(K))
    jax.block_until_ready(traced_anew(jnp.asarray(K)))
    jax.effects_barrier()
    assert 48 <= len(solves) <= 500


TAKE_A_KERNEL = {
    "min_eigenvalue": min_eigenvalue,
    "smallest_eigenpair": lambda K: smallest_eigenpair(K).value,
    "eigenvalues": eigenvalues,
    "kernel_regression": lambda K: ntk.kernel_regression(K, jnp.ones(len(K))).weights,
    "excess_risk_term": lambda K: ntk.excess_risk_term(K, jnp.ones(len(K))).quadratic,
    "gradient_flow": lambda K: ntk.gradient_flow(K, jnp.ones(len(K)), 1.0),
    "diagonal_upper_bound": lambda K: ntk.bounds.diagonal_upper_bound(K).value,
    "frobenius_upper_bound": lambda K: ntk.bounds.frobenius_upper_bound(K).value,
    "zhu_theorem3": lambda K: (
        ntk.bounds.zhu_theorem3(K, jnp.ones(len(K)), activations=[ntk.relu], C=1.0).value
    ),
    "certified_min_eigenvalue": certified_min_eigenvalue,
    "certify_simplex": lambda K: certify_simplex(K[None, None]).lower,
}
ON_THE_HOST = {"certified_min_eigenvalue", "certify_simplex"}


@pytest.mark.parametrize("name", TAKE_A_KERNEL)
def test_no_number_comes_of_a_matrix_that_is_not_symmetric(name):
    function, rng = TAKE_A_KERNEL[name], np.random.default_rng(0)
    kind = "complex128" if name in ON_THE_HOST else jnp.asarray(1j).dtype
    for n, size in [(3, 1e-3), (5, 1e3)]:
        skew, broken = planted(np.linspace(1, 3, n)), np.eye(n)
        i, j = rng.choice(n, 2, replace=False)
        skew[i, j] += size
        broken[i, j] = np.nan
        shapes = [(n,), (n, n + 1), (0, 0), (1, n, n)]
        for K, message in [
            (skew, r"expected (a )?symmetric .*that differ by"),
            (broken, "expected finite entries, got NaN"),
            *((np.ones(shape), r"expected .*shape") for shape in shapes),
            (np.eye(n) * 1j, f"expected real numbers, got {kind}"),
        ]:
            with pytest.raises(ValueError, match=message):
                function(K)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TAKE_A_KERNEL.keys() - ON_THE_HOST))
def test_traced_it_gives_nan_and_a_derivative_that_is_nan(name):
    function = jax.jit(jax.value_and_grad(lambda K: jnp.sum(TAKE_A_KERNEL[name](K))))
    K = planted(np.linspace(1, 3, 4))
    assert all(np.isfinite(x).all() for x in function(K))
    for wrong in (np.nan, 7.0, np.inf):
        bad = K.copy()
        bad[0, 2] = wrong
        value, slope = function(bad)
        assert np.isnan(value) or (name == "zhu_theorem3" and value == np.inf)
        assert np.isnan(slope).any()


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TAKE_A_KERNEL.keys() - {"diagonal_upper_bound"}))
def test_a_kernel_whose_halves_are_rounded_apart_is_taken_by_its_symmetric_part(name):
    rng, function = np.random.default_rng(1), TAKE_A_KERNEL[name]
    K = planted(np.linspace(1, 3, 6)).astype(jnp.zeros(()).dtype)
    apart = K * (1 + 50 * np.finfo(K.dtype).eps * rng.uniform(-1, 1, K.shape).astype(K.dtype))
    assert (apart != apart.T).any()
    assert_close(function(apart), function(K / 2 + K.T / 2), f64=1e-12, f32=1e-4)


# One kernel, rigorously; in float64 on the host for every setting of JAX.


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_the_certified_bound_is_under_the_smallest_eigenvalue_and_near_it(name, scale):
    values = SPECTRA[name]
    slack = 1e-15 * len(values) * (np.abs(values).sum() + np.abs(values).max())
    bound = certified_min_eigenvalue(planted(values) * scale) / scale
    # The planted matrix has a roundoff of 1e-14 of its norm.
    rounding = 1e-14 * np.abs(values).max()
    assert values.min() - 4 * slack - rounding <= bound <= values.min() + rounding


def test_no_matrix_with_integer_entries_is_certified_above_its_exact_eigenvalue():
    # Truth: a I + b 11' has the eigenvalues a and a + n b.
    for n, a, b in [(2, 1, 1), (3, 5, -1), (50, 3, 7), (300, 2, 1), (7, 0, 4)]:
        K = a * np.eye(n) + b * np.ones((n, n))
        truth = min(a, a + n * b)
        assert truth - 1e-15 * n * (np.trace(K) + 1) * 4 <= certified_min_eigenvalue(K) <= truth


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


def mixtures(phi):
    """Blocks ``Phi_i Phi_j'`` [h, h, n, n] of feature maps [h, n, p]."""
    return np.einsum("iap,jbp->ijab", phi, phi)


def smallest(blocks, alpha):
    return np.linalg.eigvalsh(np.einsum("i,ijab,j->ab", alpha, blocks, alpha))[0]


@pytest.mark.parametrize(("h", "seed"), [(1, 0), (2, 1), (4, 3)])
def test_the_bracket_holds_against_brute_force(h, seed):
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(1, 12, 40))
    blocks = mixtures(shared + 0.7 * rng.normal(size=(h, 12, 40)))
    bracket = certify_simplex(blocks, rtol=1e-2)
    assert bracket.converged and bracket.upper - bracket.lower <= 1e-2 * bracket.upper
    assert bracket.argmin.sum() == 1 and (bracket.argmin >= 0).all()
    # Truth: random points of the simplex, near vertices and edges too.
    alphas = [rng.dirichlet(np.full(h, c)) for c in (0.2, 1, 5) for _ in range(300)]
    least = min(smallest(blocks, a) for a in [*alphas, bracket.argmin])
    assert bracket.lower <= least
    assert smallest(blocks, bracket.argmin) <= bracket.upper + 1e-13
    assert bracket.upper <= least * (1 + 1e-2)


def test_the_minimum_of_two_scalar_kernels_is_the_closed_form():
    # K_a = |a u + (1 - a) v|^2: the squared distance of the origin from a segment, 1 / 2 here.
    bracket = certify_simplex(mixtures(np.array([[[1.0, 0.0]], [[0.0, 1.0]]])), rtol=1e-6)
    assert bracket.converged and bracket.lower <= 0.5 <= bracket.upper
    np.testing.assert_allclose(bracket.argmin, [0.5, 0.5], atol=1e-3)


def test_equal_activations_need_one_cell():
    phi = np.random.default_rng(0).normal(size=(1, 8, 20))
    bracket = certify_simplex(mixtures(np.repeat(phi, 3, axis=0)))
    truth = np.linalg.eigvalsh(phi[0] @ phi[0].T)[0]
    assert bracket.converged and bracket.cells == 1
    assert bracket.lower <= truth * (1 + 1e-13) and truth <= bracket.upper


def test_a_singular_kernel_is_bracketed_around_zero_and_not_called_converged():
    phi = np.random.default_rng(0).normal(size=(2, 8, 20))
    phi[:, 1] = phi[:, 0]  # two equal inputs: every mixture is singular
    bracket = certify_simplex(mixtures(phi), max_cells=200)
    assert not bracket.converged and bracket.lower <= 0 <= bracket.upper < 1e-10


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_are_no_gram_matrices_are_bracketed_all_the_same(seed):
    rng = np.random.default_rng(seed)
    h, n = 3, 6
    B = rng.normal(size=(h * n, h * n)) + np.eye(h * n) * rng.choice([0, 8])
    blocks = (B + B.T).reshape(h, n, h, n).transpose(0, 2, 1, 3)
    for max_cells in (1, 30):
        bracket = certify_simplex(blocks, max_cells=max_cells)
        least = min(smallest(blocks, alpha) for alpha in rng.dirichlet(np.ones(h), size=300))
        assert bracket.lower <= least <= bracket.upper + 20
        assert smallest(blocks, bracket.argmin) <= bracket.upper + 1e-12
        # Truth: x'K_alpha x = z'Bz for a z of squared length between 1 / h and 1.
        floor = np.linalg.eigvalsh(B + B.T)[0]
        assert max_cells > 1 or bracket.lower >= min(floor, floor / h) - 1e-9


def test_orthogonal_feature_maps_are_no_reason_to_refuse():
    # K_01 is the roundoff of 0 and not symmetric.
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(24, 24)))
    blocks = mixtures(np.stack([np.eye(6, 12) @ q[:12], np.eye(6, 12) @ q[12:]]))
    assert np.abs(blocks[0, 1]).max() < 1e-14
    assert certify_simplex(blocks).lower == pytest.approx(0.5, rel=1e-3)


def test_the_entry_error_widens_the_bracket_by_its_norm():
    blocks = mixtures(np.random.default_rng(0).normal(size=(1, 6, 30)))
    truth = np.linalg.eigvalsh(blocks[0, 0])[0]
    bracket = certify_simplex(blocks, entry_error=0.01)
    assert bracket.lower <= truth - 0.06 and truth + 0.06 <= bracket.upper
    assert bracket.lower >= truth - 0.06 * 8


@pytest.mark.long
@float64_only
def test_mixtures_of_activations_have_the_reference_brackets():
    rows = jnp.asarray(unit_rows(0, 50, 10))
    all_three = np.asarray(ntk.mixture_blocks(rows, [ntk.relu, ntk.tanh, ntk.swish]))
    # Truth: brackets by an independent implementation (eigenvalues of all Bernstein coefficients).
    for chosen, lower, upper, cells in [
        ([0, 1], 0.0304496475, 0.0304767032, 21),
        ([0, 2], 0.0072731903, 0.0072731903, 1),
        ([0, 1, 2], 0.0066876259, 0.0066916397, 39),
    ]:
        bracket = certify_simplex(all_three[np.ix_(chosen, chosen)])
        assert bracket.converged and bracket.lower <= upper and lower <= bracket.upper
        assert bracket.cells <= cells


@pytest.mark.long
def test_sizes_a_little_apart_share_a_program():
    ntk.min_eigenvalue(planted(np.linspace(1, 3, 130)))
    before = spectrum._smallest_eigenvector._cache_size()
    for n in (129, 150, 192):
        eigenpair = smallest_eigenpair(planted(np.linspace(0.5, 3, n)))
        np.testing.assert_allclose(eigenpair.value, 0.5, rtol=1e-12)
        assert eigenpair.vector.shape == (n,) and eigenpair.residual < 1e-11
        singular = smallest_eigenpair(planted(np.linspace(-1, 0, n)))  # nothing above what is added
        np.testing.assert_allclose(singular.value, -1, rtol=1e-12)
    assert spectrum._smallest_eigenvector._cache_size() == before


def test_out_of_cells_the_lower_bound_is_raised_to_what_those_left_over_prove():
    """The first bound is near 0 here; bisection of the target finds two thirds of the way."""
    phi = np.random.default_rng(0).normal(size=(3, 10, 30))
    bracket = certify_simplex(mixtures(phi), max_cells=20)
    assert not bracket.converged and bracket.cells <= 21
    assert 0.3 * bracket.upper < bracket.lower <= smallest(mixtures(phi), bracket.argmin)


def of_outputs(n=5, outputs=3, seed=0):
    """A kernel [n, n, o, o] of features, and numpy's matrix of the pairs (input, output)."""
    phi = np.random.default_rng(seed).normal(size=(n, outputs, n * outputs + 4))
    K = np.einsum("iap,jbp->ijab", phi, phi).astype(tolerance(np.float64, np.float32))
    return K, K.swapaxes(1, 2).reshape(n * outputs, n * outputs)


@pytest.mark.parametrize(("n", "outputs"), [pytest.param(3, 3, marks=pytest.mark.long), (33, 2)])
def test_a_kernel_of_several_outputs_has_the_eigenvalues_of_its_matrix(n, outputs):
    K, flat = of_outputs(n, outputs)
    values, vectors = np.linalg.eigh(flat)  # truth: numpy
    size = values[-1]
    for run in (lambda f: f, jax.jit):
        assert_close(run(eigenvalues)(K) / size, values / size, f32=1e-5)
        assert_close(run(min_eigenvalue)(K) / size, values[0] / size, f32=1e-5)
        pair = run(smallest_eigenpair)(K)
        np.testing.assert_allclose(abs(pair.vector @ vectors[:, 0]), 1, rtol=1e-2)
        assert pair.residual <= tolerance(1e-9, 1e-5) * size
        slope = run(jax.grad(min_eigenvalue))(K)
        assert_close(np.einsum("iijj->", slope), 1.0, f32=1e-4)  # |v|^2, of K + t I
    assert min_eigenvalue(ntk.Kernels(K, jnp.asarray(K))) == min_eigenvalue(K)


def test_a_kernel_of_several_outputs_has_the_certificate_and_scores_of_its_matrix():
    K, flat = of_outputs()
    assert certified_min_eigenvalue(K) == certified_min_eigenvalue(flat)
    assert certified_min_eigenvalue(K, 1e-3) == certified_min_eigenvalue(flat, 1e-3)
    error, of_flat = (1e-3 * np.abs(k) for k in (K, flat))
    assert certified_min_eigenvalue(K, error) == certified_min_eigenvalue(flat, of_flat)
    record = ntk.Kernels(K, jnp.asarray(K), jnp.asarray(error))
    assert certified_min_eigenvalue(record) == certified_min_eigenvalue(flat, of_flat)
    assert certified_min_eigenvalue(record, 0.0) == certified_min_eigenvalue(K)
    scores, truth = ntk.scores.of_kernel(K), ntk.scores.of_kernel(flat)
    assert scores.keys() == truth.keys()
    jax.tree.map(np.testing.assert_array_equal, scores, truth)
    for bound in (ntk.bounds.diagonal_upper_bound, ntk.bounds.frobenius_upper_bound):
        assert bound(K).value == bound(flat).value
    printed = [ntk.bounds.eigen_nas_as_printed(k, 7).value for k in (K, flat)]
    assert printed[0] == printed[1]


def test_the_label_energy_of_independent_outputs_is_that_of_one():
    one = of_outputs(outputs=1)[1]
    K = one[:, :, None, None] * np.eye(3, dtype=one.dtype)
    y = np.array([0, 2, 1, 1, 2])
    energy, truth = (ntk.scores.of_kernel(k, y)["label_energy"] for k in (K, one))
    assert_close(energy, truth, f32=1e-4)
