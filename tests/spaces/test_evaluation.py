"""Means and errors over whole data sets, batch by batch."""

import jax.numpy as jnp
import numpy as np
import pytest

from bilevel.nets.evaluation import error_rates, in_batches, over_batches


@pytest.mark.parametrize("rows", [(5, 7, 4), (20, 9, 30)])
def test_means_over_batches_are_means_over_rows(rows):
    parts = [(np.random.default_rng(n).normal(size=(n, 2)), np.arange(n)) for n in rows]
    batches = in_batches(parts, 8)
    means = over_batches(lambda w, alpha, batch: (batch[0] * w).mean() + alpha)(2.0, 1.0, batches)
    # The last batch of a part holds some rows of the one before it, when 8 does not divide it.
    expected = []
    for x, _ in parts:
        size = min(8, *rows)
        starts = [min(s, len(x) - size) for s in range(0, len(x), size)]
        new = np.diff([-size, *starts])
        of_batches = [2 * x[s : s + size].mean() + 1 for s in starts]
        expected.append(np.dot(of_batches, new) / len(x))
    np.testing.assert_allclose(means, expected, rtol=1e-5)
    if rows == (5, 7, 4):
        sizes = [np.count_nonzero(row) for row in np.asarray(batches.weights)]
        assert sizes == [2, 2, 1]


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_every_row_counts_once_in_an_error_rate(size):
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 2)), rng.integers(0, 2, n)) for n in (11, 20, 7)]

    class Sign:
        def apply(self, w, other, x):
            return x @ w + other

        def predict(self, f):
            return (f > 0).astype(int)

    w = jnp.asarray(rng.normal(size=2))
    rates = error_rates(Sign())(w, 0.1, parts, size)
    expected = [np.mean((x @ np.asarray(w) + 0.1 > 0) != y) for x, y in parts]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    # A network that diverged predicts nothing: it is not right about the class that NaN looks like.
    np.testing.assert_array_equal(error_rates(Sign())(jnp.nan * w, 0.1, parts, size), 1)


def test_infinite_values_of_one_part_do_not_change_another():
    parts = [(np.ones((3, 1)), np.arange(3)), (np.full((3, 1), np.inf), np.arange(3))]
    means = over_batches(lambda w, alpha, batch: (w * batch[0]).mean())
    np.testing.assert_array_equal(means(2.0, None, in_batches(parts, 2)), [2, np.inf])
