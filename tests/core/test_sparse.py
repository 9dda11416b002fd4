"""Sparse matrices give the results of dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from helpers import assert_close
from jax.experimental import sparse
from problems import mean_squares, separate_penalties

import bilevel
from bilevel.linear import ridge_weights
from bilevel.linear.models import predict
from bilevel.outer_loop.batches import minibatches

RNG = np.random.default_rng(0)
DENSE = np.where(RNG.random((30, 6)) < 0.4, RNG.normal(size=(30, 6)), 0.0)
DENSE[3] = 0
LABELS = jnp.asarray(np.sign(RNG.normal(size=30)))


def with_padding_and_a_sum():
    """Return a BCOO matrix with JAX's padding outside, and an entry in two parts."""
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
    marks = {name: pytest.mark.slow for name in SLOW} | {"minibatches inside": pytest.mark.long}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


@pytest.mark.parametrize("name", marked(FORMATS))
def test_linear_models_take_sparse_features(name):
    matrix, dense = FORMATS[name](), jnp.asarray(DENSE)
    w = ridge_weights(dense, LABELS, 0.1).w
    assert_close(ridge_weights(matrix, LABELS, 0.1).w, w, f32=1e-4)
    assert_close(predict(matrix, w), dense @ w)


def search(x, solver, **options):
    problem, batch = bilevel.Problem(separate_penalties, mean_squares), (x, LABELS)
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
