"""Functions that take a matrix also take neural-tangents' kernels, ours, and any ``k(x1, x2)``."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cast, float64_only, normal

import ntk
from bilevel.spaces.kernels import kernel_function_space
from ntk.kernels.functions import measured
from ntk.spectrum.eigenvalues import smallest_eigenpair

ROWS = normal(0, 12, 5)


def stax_relu(depth=2):
    stax = ntk.neural_tangents().stax
    layers = [layer for _ in range(depth) for layer in (stax.Dense(1, 2**0.5), stax.Relu())]
    return stax.serial(*layers, stax.Dense(1, 2**0.5))[2]


ours = functools.partial(ntk.network_kernel, activations=[ntk.relu, ntk.relu])


def gaussian(x1, x2):
    return jnp.exp(-jnp.sum((x1[:, None] - x2) ** 2, -1) / 4)


FUNCTIONS = {
    "ours": (ours, lambda x: ours(x).ntk),
    "any k(x1, x2)": (gaussian, lambda x: gaussian(x, x)),
    "stax": (stax_relu(), lambda x: stax_relu()(x, None, "ntk")),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_stands_for_its_matrix(name):
    kernel, matrix = FUNCTIONS[name]
    rows, labels = jnp.asarray(ROWS), jnp.arange(12) % 3
    K = matrix(rows)
    assert ntk.min_eigenvalue(kernel, x=rows) == ntk.min_eigenvalue(K)
    assert (ntk.eigenvalues(kernel, x=rows) == ntk.eigenvalues(K)).all()
    pair, same = smallest_eigenpair(kernel, x=rows), smallest_eigenpair(K)
    assert (pair.vector == same.vector).all()
    assert ntk.scores.of_kernel(kernel, labels, x=rows) == ntk.scores.of_kernel(K, labels)
    y = jnp.sin(jnp.arange(12.0))
    fits = [ntk.kernel_regression(a, y, x=b).weights for a, b in ((kernel, rows), (K, None))]
    assert (fits[0] == fits[1]).all()
    assert ntk.excess_risk_term(kernel, y, x=rows) == ntk.excess_risk_term(K, y)
    assert (ntk.gradient_flow(kernel, y, 2.0, x=rows) == ntk.gradient_flow(K, y, 2.0)).all()
    bound = ntk.certified_min_eigenvalue(kernel, x=rows)
    value = float(ntk.min_eigenvalue(K))
    # stax loses half of its digits on the diagonal.
    assert value - (1e-6 if name == "stax" else 1e-12) * float(K.max()) < bound < value
    whole = ntk.certify_simplex([kernel, gaussian], x=rows)
    assert whole.converged and whole.lower <= min(value, ntk.min_eigenvalue(gaussian, x=rows))


@pytest.mark.long
def test_the_matrix_of_two_sets_and_either_field_of_a_record():
    other = ROWS[:3] + 1
    assert ntk.kernel_matrix(ours, ROWS, other).shape == (12, 3)
    for name in ("ntk", "nngp"):
        ours_, stax = (ntk.kernel_matrix(k, ROWS, other, get=name) for k in (ours, stax_relu()))
        # stax has the variance 2 / fan in the first layer, ours the variance 1.
        first = functools.partial(ours, variances=(2, 2, 2))
        scaled = ntk.kernel_matrix(first, ROWS, other, get=name)
        np.testing.assert_allclose(scaled, 5 * stax, rtol=1e-10)
        assert not np.allclose(ours_, stax)


@pytest.mark.long
def test_over_the_simplex_a_list_of_kernels_has_its_least_eigenvalue_at_a_corner():
    """It is concave in the weights. Truth: random points."""
    kernels = [ours, gaussian, lambda a, b: (1 + a @ b.T) ** 4]
    certificate = ntk.certify_simplex(kernels, x=ROWS, rtol=1e-3)
    assert certificate.converged and sorted(certificate.argmin) == [0, 0, 1]
    matrices = np.stack([ntk.kernel_matrix(kernel, ROWS) for kernel in kernels])
    for alpha in np.random.default_rng(0).dirichlet(np.ones(3) / 2, 50):
        assert np.linalg.eigvalsh(np.einsum("i,inm->nm", alpha, matrices))[0] >= certificate.lower


@pytest.mark.long
@pytest.mark.parametrize("rows", ["random", "near-duplicates"])
def test_measured_errors_cover_those_of_formulas_with_arccos(rows):
    """Truth: our kernels, with a far smaller error; stax loses half its digits near duplicates."""
    half, noise = np.random.default_rng(0).normal(size=(2, 8, 5))
    x = ROWS if rows == "random" else np.concatenate([half, half + 1e-7 * noise])
    truth = ntk.network_kernel(x, activations=[ntk.relu] * 2, variances=(2, 2, 2))
    K, error = measured(stax_relu(), x)
    off = np.abs(5 * K - truth.ntk)
    assert (off <= 5 * error + truth.error).all()
    assert off.max() > 1e-9 and error.max() < 1e-5 * K.max()
    assert 5 * ntk.certified_min_eigenvalue(stax_relu(), x=x) <= ntk.min_eigenvalue(truth.ntk)


@float64_only
def test_our_own_error_is_taken_where_there_is_one_and_a_given_one_before_it():
    K, error = measured(ours, ROWS)
    assert (error == ours(ROWS).error).all() and (ours(ROWS).ntk == K).all()
    assert measured(ours, ROWS, 0.25)[1] == 0.25
    errors = 0.0, 1e-3 * np.eye(12)
    exact, lower = (ntk.certified_min_eigenvalue(gaussian, error, x=ROWS) for error in errors)
    np.testing.assert_allclose(exact - lower, 1e-3, rtol=1e-8)


@float64_only
def test_what_is_computed_in_float32_has_errors_of_float32():
    K, error = measured(lambda *rows: gaussian(*cast(rows, jnp.float32)), ROWS)
    off = np.abs(K - np.asarray(gaussian(ROWS, ROWS)))
    assert (off <= error).all() and off.max() > 1e-9


def test_certificates_are_in_float64_whatever_the_users_precision():
    with jax.enable_x64(False):
        low = ntk.certified_min_eigenvalue(gaussian, x=ROWS)
        assert not jax.config.jax_enable_x64
    assert low == ntk.certified_min_eigenvalue(gaussian, x=ROWS)


def test_certifying_gives_no_warning_about_the_precision_that_we_choose(recwarn):
    with jax.enable_x64(True):
        matrix = jnp.diag(jnp.arange(1.0, 6))
    functions = [
        lambda a, b: (a @ matrix) @ (b @ matrix).T,  # a float64 array of JAX's
        jax.jit(lambda a, b: (a @ matrix) @ b.T),
        lambda a, b: a @ np.asarray(matrix) @ b.T,
        lambda a, b: a @ b.T + jnp.zeros((len(a), len(b)), jnp.float64),
    ]
    rows, own = ROWS[:4].astype(np.float64), np.asarray(matrix)
    for function, middle in zip(functions, (own @ own, own, own, np.eye(5)), strict=True):
        smallest = np.linalg.eigvalsh(rows @ middle @ rows.T)[0]  # truth: numpy
        assert smallest - 1e-9 <= ntk.certified_min_eigenvalue(function, x=rows) <= smallest + 1e-12
    assert ntk.certify_simplex(functions, x=rows).lower > 0
    space = kernel_function_space(lambda a, x1, x2: a * functions[0](x1, x2), jnp.ones(()))
    alphas = {"kernel": np.ones(1), "log_penalty": np.zeros(1)}
    assert space.certificates(alphas, rows)[0] == ntk.certified_min_eigenvalue(functions[0], x=rows)
    assert not [str(w.message) for w in recwarn if "dtype" in str(w.message)]


def test_warnings_of_a_kernel_function_itself_are_shown():
    def kernel(a, b):
        warnings.warn("of the kernel", UserWarning, stacklevel=1)
        return a @ b.T

    with pytest.warns(UserWarning, match="of the kernel"):
        ntk.certified_min_eigenvalue(kernel, x=np.eye(2))
