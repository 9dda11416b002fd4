"""Every entry of a kernel is right or NaN by itself: traced and eager kernels, entry by entry."""

import jax
import numpy as np
import pytest
from helpers import tolerance

import ntk

SMOOTH = (ntk.tanh, ntk.sigmoid, ntk.swish, ntk.gelu)
ACTIVATIONS = (*SMOOTH, ntk.relu, ntk.leaky_relu(0.1))


def random_network(rng):
    """Activations, skips and inputs: norms .1 to 30, near-duplicates, columns among the rows."""
    depth = rng.integers(2, 4)
    layers = [ACTIVATIONS[i] for i in rng.integers(len(ACTIVATIONS), size=depth)]
    x = rng.normal(size=(4, 3))
    x *= (
        np.exp(rng.uniform(np.log(0.1), np.log(30), 4))[:, None]
        / np.linalg.norm(x, axis=1)[:, None]
    )
    x[3] = x[0] * (1 + 10.0 ** -rng.integers(1, 12)) + 10.0 ** -rng.integers(2, 12)
    columns = np.concatenate([x[1:3], rng.normal(size=(2, 3))])
    return layers, rng.normal(size=depth - 1), x, columns


@pytest.mark.parametrize("seed", range(2))
def test_traced_entries_are_the_eager_ones_or_nan(seed):
    """Truth: the eager kernel of the pair alone."""
    layers, skips, x, columns = random_network(np.random.default_rng(seed))

    def kernel(x, columns):
        return ntk.network_kernel(x, columns, activations=layers, skips=skips).ntk

    traced = np.asarray(jax.jit(kernel)(x, columns))
    for i, j in np.ndindex(traced.shape):
        if np.isfinite(traced[i, j]):
            try:
                alone = float(kernel(x[i : i + 1], columns[j : j + 1])[0, 0])
            except FloatingPointError:
                continue
            assert abs(traced[i, j] - alone) < tolerance(1e-7, 1e-2) * (1 + abs(alone))
    assert np.isfinite(traced).sum() >= 8
