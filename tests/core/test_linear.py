"""Ridge regression on arrays, generated blocks and sparse features."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from helpers import assert_close, long_except, tolerance
from jax.experimental.sparse import BCOO, BCSR
from jax.tree_util import Partial
from problems import mean_squares, separate_penalties

import bilevel
from bilevel import linear
from bilevel.linear import models, ridge_weights
from bilevel.linear.matrices import Blocks, sparse
from bilevel.linear.models import predict
from bilevel.outer_loop.batches import minibatches
from ntk.large.block_cg import solve_block_cg

SHAPES = {"tall": (31, 11), "wide": (11, 31)}
MEMORY = 4 * 31 * 8 * 3  # blocks of a few rows or columns, which divide neither 11 nor 31


def data(shape, outputs=3):
    rng = np.random.default_rng(0)
    phi = rng.normal(size=SHAPES[shape])
    return phi, rng.normal(size=(len(phi), outputs))


def as_blocks(phi):
    n, d = phi.shape
    padded = jnp.pad(jnp.asarray(phi), ((0, n), (0, d)))
    return Blocks((n, d), Partial(_rows, padded), Partial(_columns, padded))


def _rows(padded, start, size):
    return jax.lax.dynamic_slice(padded, (start, 0), (size, padded.shape[1] // 2))


def _columns(padded, start, size):
    return jax.lax.dynamic_slice(padded, (0, start), (padded.shape[0] // 2, size))


FORMS = {
    "array": jnp.asarray,
    "blocks": as_blocks,
    "sparse": lambda phi: sparse(scipy.sparse.csr_array(phi)),
}


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("form", "method"),
    [(f, m) for f in ("array", "blocks") for m in ("primal", "dual", "cg")] + [("sparse", "cg")],
)
@pytest.mark.parametrize("memory", [MEMORY, 3 * MEMORY], ids=["in blocks", "whole"])
def test_ridge_is_the_normal_equations_whatever_the_method_and_form(form, method, shape, memory):
    phi, y = data(shape)
    expected = np.linalg.solve(phi.T @ phi + 0.5 * np.eye(phi.shape[1]), phi.T @ y)
    fit = ridge_weights(FORMS[form](phi), y, 0.5, method=method, memory=memory)
    assert_close(fit.w, expected, f64=1e-10, f32=1e-4)
    assert fit.residual < tolerance(1e-11, 1e-4)


@pytest.fixture
def set_rank(monkeypatch):
    """Return a function that sets the rank of the preconditioner."""

    def set_to(rank):
        monkeypatch.setattr(models, "_RANK", rank)
        models._solve_ridge.clear_cache()

    yield set_to
    models._solve_ridge.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "d", "memory"),
    long_except([(2500, 2100, 2**31)], [(2500, 2100, 2**31), (2100, 2500, 2**24)]),
)
def test_a_preconditioner_reaches_the_solution_in_fewer_steps(n, d, memory, set_rank, monkeypatch):
    rng = np.random.default_rng(0)
    phi = rng.normal(size=(n, 300)) / np.arange(1, 301) @ rng.normal(size=(300, d))
    phi = (phi + 0.01 * rng.normal(size=(n, d))).astype(np.float32)
    y = rng.normal(size=(n, 2)).astype(np.float32)
    exact = np.linalg.solve(phi.T @ phi.astype(float) + np.eye(d), phi.T @ y.astype(float))
    steps = []

    def recorded(*args):
        solution = solve_block_cg(*args)
        jax.debug.callback(lambda k: steps.append(int(k)), solution[-1])
        return solution

    monkeypatch.setattr(models, "solve_block_cg", recorded)
    for rank in (512, 0):
        set_rank(rank)
        fit = ridge_weights(as_blocks(phi), y, 1.0, method="cg", memory=memory)
        assert np.linalg.norm(fit.w - exact) < 1e-3 * np.linalg.norm(exact)
        assert fit.residual < 1e-4
    jax.effects_barrier()
    assert steps[0] < steps[1] / 3


def test_steps_with_a_preconditioner_keep_the_solution_of_least_norm(set_rank):
    set_rank(2)
    phi, y = data("wide")
    phi = phi * np.geomspace(1, 3, phi.shape[1])
    fit = ridge_weights(phi, y, 0.0, method="cg")
    assert_close(fit.w, np.linalg.pinv(phi) @ y, f64=1e-9, f32=1e-3)


def test_residual_is_the_relative_gradient():
    phi, y = data("wide", outputs=2)
    # float32 loses this penalty next to the Gram matrix, and the residual has to show it.
    for method in ("primal", "dual", "cg"):
        fit = ridge_weights(phi, y, 1e-6, method=method)
        w = np.asarray(fit.w, np.float64)
        gradient = phi.T @ (phi @ w - y) + 1e-6 * w
        expected = np.max(np.linalg.norm(gradient, axis=0) / np.linalg.norm(phi.T @ y, axis=0))
        # Their difference is the rounding of the gradient itself.
        np.testing.assert_allclose(fit.residual, expected, rtol=0.1, atol=tolerance(1e-14, 1e-5))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["auto", "cg"])
def test_without_penalty_ridge_is_the_least_squares_solution_of_least_norm(method, shape):
    phi, y = data(shape)
    fit = ridge_weights(phi, y, 0.0, method=method)
    assert_close(fit.w, np.linalg.pinv(phi) @ y, f64=1e-9, f32=1e-3)


def test_auto_takes_cg_where_no_gram_matrix_fits():
    phi, y = data("tall")
    methods = "auto", "cg", "primal"
    auto, cg, primal = (ridge_weights(phi, y, 0.5, method=m, memory=500) for m in methods)
    assert jnp.array_equal(auto.w, cg.w)
    assert not jnp.array_equal(auto.w, primal.w)


def test_vmap_over_penalties_is_one_by_one():
    phi, y = data("tall", outputs=1)
    penalties = jnp.array([0.1, 1.0, 10.0])
    together = jax.vmap(lambda penalty: ridge_weights(phi, y[:, 0], penalty).w)(penalties)
    alone = jnp.stack([ridge_weights(phi, y[:, 0], penalty).w for penalty in penalties])
    assert_close(together, alone, f64=1e-12, f32=1e-5)


def test_sparse_products_are_those_of_scipy():
    rng = np.random.default_rng(0)
    # Rows and columns of very unequal lengths, empty ones too.
    p = 1 / np.arange(1, 301)
    matrix = scipy.sparse.lil_array(rng.random((120, 300)) * (rng.random((120, 300)) < 0.02))
    matrix[5, :] = rng.normal(size=300) * (rng.uniform(size=300) < 0.9)
    matrix[:, 7] = rng.normal(size=(120, 1))
    matrix[3, :] = 0
    matrix = matrix.tocsr() @ scipy.sparse.diags_array(p)
    features = sparse(matrix)
    v, r = rng.normal(size=(300, 2)), rng.normal(size=(120, 2))
    assert_close(features.by_row.product(jnp.asarray(v), 120), matrix @ v, f64=1e-14, f32=1e-6)
    assert_close(features.by_column.product(jnp.asarray(r), 300), matrix.T @ r, f64=1e-14, f32=1e-6)
    assert_close(predict(features, v), matrix @ v, f64=1e-14, f32=1e-6)
    assert_close(predict(sparse(matrix.astype(bool)), v), matrix.astype(bool) @ v)


@pytest.mark.slow
def test_features_of_zeros_have_zero_weights():
    for features in (jnp.zeros((4, 2)), sparse(scipy.sparse.csr_array((4, 2)))):
        assert not ridge_weights(features, jnp.ones(4), 1.0).w.any()


@pytest.mark.parametrize("method", ["dual", "cg"])
def test_blocks_never_hold_the_features(method):
    n, d = 200, 20000

    def entries(i, j):
        return jnp.where((i < n) & (j < d), jnp.cos(i * j * 0.1), 0.0)

    blocks = Blocks(
        (n, d),
        lambda start, size: entries((start + jnp.arange(size))[:, None], jnp.arange(d)),
        lambda start, size: entries(jnp.arange(n)[:, None], start + jnp.arange(size)),
    )
    y = jnp.ones(n)
    solve = jax.jit(lambda y: ridge_weights(blocks, y, 0.5, method=method, memory=2**22))
    compiled = solve.lower(y).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * d * y.dtype.itemsize / 2


def test_blocks_made_by_partial_compile_once():
    phi, y = data("tall")
    solve = functools.partial(ridge_weights, y=y, penalty=0.5, method="primal")
    first, compiled = solve(as_blocks(phi)).w, linear.models._solve_ridge._cache_size()
    assert linear.models._solve_ridge._cache_size() == compiled
    assert not jnp.array_equal(first, solve(as_blocks(2 * phi)).w)


@pytest.mark.parametrize("name", ["features", "y"])
def test_a_traced_nan_is_not_passed_over(name):
    arguments = {"features": jnp.eye(3), "y": jnp.ones(3)}
    arguments[name] = arguments[name].at[0].set(jnp.nan)
    fit = functools.partial(ridge_weights, penalty=1.0, method="cg")
    assert np.isnan(jax.jit(fit)(**arguments).w).all()


def test_targets_whose_squares_vanish_are_fitted():
    y = 1e-25 * jnp.ones(3, jnp.float32)
    fit = ridge_weights(jnp.eye(3, dtype=jnp.float32), y, 1.0, method="cg")
    np.testing.assert_allclose(fit.w, 0.5 * y, rtol=1e-4)


# ----------------------------------------------------------------------------- sparse matrices

RNG = np.random.default_rng(0)
DENSE = np.where(RNG.random((30, 6)) < 0.4, RNG.normal(size=(30, 6)), 0.0)
DENSE[3] = 0
LABELS = np.sign(RNG.normal(size=30))


def with_padding_and_a_sum():
    """Return a BCOO matrix with JAX's padding outside, and an entry in two parts."""
    padded = BCOO.fromdense(jnp.asarray(DENSE), nse=int((DENSE != 0).sum()) + 3)
    data = jnp.concatenate([padded.data.at[0].set(padded.data[0] - 1), jnp.ones(1)])
    return BCOO((data, jnp.concatenate([padded.indices, padded.indices[:1]])), shape=padded.shape)


FORMATS = {
    "BCOO": lambda: BCOO.fromdense(jnp.asarray(DENSE)),
    "BCOO, padded": with_padding_and_a_sum,
    "BCSR": lambda: BCSR.fromdense(jnp.asarray(DENSE)),
    "csr": lambda: scipy.sparse.csr_array(DENSE),
    "coo": lambda: scipy.sparse.coo_matrix(DENSE),
}


@pytest.mark.parametrize("name", FORMATS)
def test_linear_models_take_sparse_features(name):
    matrix, dense = FORMATS[name](), jnp.asarray(DENSE)
    w = ridge_weights(dense, LABELS, 0.1).w
    assert_close(ridge_weights(matrix, LABELS, 0.1).w, w, f32=1e-4)
    assert_close(predict(matrix, w), dense @ w)


DRAWN = minibatches(8)


@pytest.mark.parametrize(
    ("solver", "batches"),
    [
        pytest.param(bilevel.unrolled(0.1, 2, batches=DRAWN), DRAWN, marks=pytest.mark.slow),
        (bilevel.soba(0.1), bilevel.partition(8)),  # 30 rows: a smaller last batch
    ],
    ids=["minibatches inside", "partition"],
)
def test_batches_of_rows_of_bcsr_are_those_of_the_dense_matrix(solver, batches):
    def run(x):
        problem, batch = bilevel.Problem(separate_penalties, mean_squares), (x, LABELS)
        args = problem, solver, optax.sgd(0.1), jnp.zeros(1), jnp.zeros(6), batch, batch
        return bilevel.search(*args, steps=3, batches=batches, key=jax.random.key(0)).alpha

    assert_close(run(FORMATS["BCSR"]()), run(jnp.asarray(DENSE)), f64=1e-7)


@pytest.mark.long
def test_one_entry_a_row_is_not_mistaken_for_an_array_of_rows():
    diagonal = np.diag(np.arange(1.0, 7.0))
    for x in (BCSR.fromdense(diagonal), jnp.asarray(diagonal)):
        rows, labels = minibatches(4)(jax.random.key(1), (x, jnp.arange(6)))
        dense = rows.todense() if hasattr(rows, "todense") else rows
        np.testing.assert_array_equal(dense, diagonal[labels])
