"""Sparse matrices: the result of the dense one, or at once a message that names a format."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from helpers import assert_close
from jax.experimental import sparse

import bilevel
import ntk
from bilevel.linear import ridge_weights
from bilevel.linear.models import predict, svm_weights
from bilevel.outer_loop.batches import minibatches

RNG = np.random.default_rng(0)
DENSE = np.where(RNG.random((30, 6)) < 0.4, RNG.normal(size=(30, 6)), 0.0)
DENSE[3] = 0
LABELS = jnp.asarray(np.sign(RNG.normal(size=30)))


def with_padding_and_a_sum():
    """A BCOO matrix with places outside, as JAX pads, and an entry in two parts."""
    padded = sparse.BCOO.fromdense(jnp.asarray(DENSE), nse=int((DENSE != 0).sum()) + 3)
    first = padded.indices[:1]
    data = jnp.concatenate([padded.data.at[0].set(padded.data[0] - 1), jnp.ones(1)])
    return sparse.BCOO((data, jnp.concatenate([padded.indices, first])), shape=padded.shape)


FORMATS = {
    "BCOO": lambda: sparse.BCOO.fromdense(jnp.asarray(DENSE)),
    "BCOO, padded": with_padding_and_a_sum,
    "BCSR": lambda: sparse.BCSR.fromdense(jnp.asarray(DENSE)),
    "csr": lambda: scipy.sparse.csr_array(DENSE),
    "coo": lambda: scipy.sparse.coo_matrix(DENSE),
}


SLOW = "BCOO", "minibatches"


def marked(names):
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


@pytest.mark.parametrize("name", marked(FORMATS))
def test_linear_models_take_sparse_features(name):
    matrix, dense = FORMATS[name](), jnp.asarray(DENSE)
    w = ridge_weights(dense, LABELS, 0.1).w
    assert_close(ridge_weights(matrix, LABELS, 0.1).w, w, f32=1e-4)
    assert_close(svm_weights(matrix, LABELS, 0.1).w, svm_weights(dense, LABELS, 0.1).w, f32=1e-4)
    assert_close(predict(matrix, w), dense @ w)


def lower(w, alpha, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2) + 0.5 * jnp.exp(alpha[0]) * jnp.sum(w**2)


def outer(w, alpha, batch):
    x, y = batch
    return jnp.mean((x @ w - y) ** 2)


def search(x, solver, **options):
    problem, batch = bilevel.Problem(lower, outer), (x, LABELS)
    args = optax.sgd(0.1), jnp.zeros(1), jnp.zeros(6), batch, batch
    return bilevel.search(problem, solver, *args, steps=3, progress=False, **options).alpha


DRAWN = {
    "minibatches": lambda: (bilevel.unrolled(0.1, 2), bilevel.minibatches(8)),
    "minibatches inside": lambda: (
        bilevel.unrolled(0.1, 2, batches=bilevel.minibatches(8)),
        bilevel.minibatches(8),
    ),
    "partition": lambda: (bilevel.soba(0.1), bilevel.partition(8)),  # 30 rows: a smaller last batch
}


@pytest.mark.parametrize("name", marked(DRAWN))
def test_batches_of_rows_of_bcsr_are_those_of_the_dense_matrix(name):
    def run(x):
        solver, batches = DRAWN[name]()
        return search(x, solver, batches=batches, key=jax.random.key(0))

    assert_close(run(FORMATS["BCSR"]()), run(jnp.asarray(DENSE)), f64=1e-7)


@pytest.mark.slow
def test_one_entry_a_row_is_not_mistaken_for_an_array_of_rows():
    diagonal = np.diag(np.arange(1.0, 7.0))
    for x in (sparse.BCSR.fromdense(diagonal), jnp.asarray(diagonal)):
        rows, labels = minibatches(4)(jax.random.key(1), (x, jnp.arange(6)))
        dense = rows.todense() if hasattr(rows, "todense") else rows
        np.testing.assert_array_equal(dense, diagonal[labels])


def in_batches(x, batches):
    solver = bilevel.unrolled(0.1, 2)
    return search(x, solver, batches=batches, key=jax.random.key(0))


REFUSED = {
    "ridge": (
        lambda: search(FORMATS["BCOO"](), bilevel.ridge(lambda alpha, x: x, lambda alpha: 1.0)),
        r"features: expected a dense array, got a BCOO; its todense\(\)",
    ),
    "a kernel": (
        lambda: ntk.kernel_regression(sparse.BCOO.fromdense(jnp.eye(3)), jnp.ones(3)),
        "expected a dense array, got a BCOO",
    ),
    "minibatches": (
        lambda: in_batches(FORMATS["BCOO"](), bilevel.minibatches(8)),
        "expected dense arrays or BCSR matrices",
    ),
    "SciPy's": (
        lambda: search(FORMATS["csr"](), bilevel.unrolled(0.1, 2)),
        "train: expected arrays, got a csr_array; .*BCSR.from_scipy_sparse",
    ),
    "traced": (
        lambda: jax.jit(lambda x: ridge_weights(x, LABELS, 0.1))(FORMATS["BCOO"]()),
        "features: expected .*known entries, got a traced one",
    ),
    "three axes": (
        lambda: ridge_weights(sparse.BCOO.fromdense(jnp.ones((30, 2, 2))), LABELS, 0.1),
        r"features: expected a sparse matrix \[n, d\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_uses_are_refused_at_once(name):
    call, message = REFUSED[name]
    began = time.process_time()
    with pytest.raises(ValueError, match=message):
        call()
    assert time.process_time() - began < 1
