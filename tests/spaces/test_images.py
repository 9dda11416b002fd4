"""Images are normalised by their own means; errors over data sets; trainings that resume."""

import functools
import os
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bilevel.nets.evaluation import error_rates, in_batches, over_batches
from bilevel.nets.images import unit_images
from bilevel.nets.training import from_scratch, run_epochs
from bilevel.runs import checkpoint
from bilevel.spaces.darts import darts_network
from bilevel.spaces.darts.genotype import DARTS_V2


def test_many_float32_pixels_have_mean_0_and_variance_1():
    """Truth: float64. A running float32 sum of 200,000 values near 1000 has errors above 1."""
    x = np.random.default_rng(0).normal(1000, 1, (200, 32, 32, 2)).astype(np.float32)
    (unit,) = unit_images(x)
    expected = (x - x.mean((0, 1, 2), dtype=float)) / x.std((0, 1, 2), dtype=float)
    np.testing.assert_allclose(unit, expected, atol=1e-3)


def test_bytes_are_images_too():
    x = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    for pixels in (None, 2):
        ours, ones = (unit_images(a, pixels=pixels)[0] for a in (x, x.astype(float)))
        np.testing.assert_allclose(ours, ones, rtol=1e-5, atol=1e-6)


def test_a_traced_channel_of_one_value_is_nan_whatever_its_rounding():
    x = np.random.default_rng(0).normal(size=(5, 6, 6, 2)).astype(np.float32)
    x[..., 1] = 0.1
    for pixels in (None, 3):
        (traced,) = jax.jit(lambda x, pixels=pixels: unit_images(x, pixels=pixels))(x)
        assert np.isfinite(traced[..., 0]).all() and np.isnan(traced[..., 1]).all()


def test_both_sides_are_made_smaller_by_one_factor_or_the_images_refused():
    x = np.random.default_rng(0).normal(size=(5, 8, 12, 1))
    assert unit_images(x, pixels=6)[0].shape == (5, 4, 6, 1)
    assert unit_images(x, pixels=4)[0].shape == (5, 2, 3, 1)
    assert unit_images(x[:, :7])[0].shape == (5, 7, 12, 1)


@pytest.mark.slow
def test_sigterm_saves_a_training_after_the_current_epoch_and_fewer_epochs_then_raise(tmp_path):
    network = darts_network(DARTS_V2, cells=1, channels=2, auxiliary=False)
    program = from_scratch(network, optax.sgd(0.1), batch_size=2)
    data = jnp.ones((4, 4, 4, 1)), jnp.array([0, 1, 0, 1])
    key, options = jax.random.key(0), {"options": lambda epoch: (0.0,)}
    run = functools.partial(run_epochs, program, key, data, epochs=4, **options)
    received = []
    note = functools.partial(checkpoint.latest, tmp_path / "a")
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(note()))
    try:
        with pytest.raises(KeyboardInterrupt, match="terminated after epoch 1"):
            run(checkpoint=tmp_path / "a", callback=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [1]
    resumed, whole = run(checkpoint=tmp_path / "a"), run(checkpoint=tmp_path / "b")
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    with pytest.raises(ValueError, match="epochs: expected at least the 4 that the checkpoint"):
        run(epochs=3, checkpoint=tmp_path / "b")


@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_images_whose_squares_leave_the_range_have_variance_one(scale):
    x = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 2)).astype(np.float32)
    truth = unit_images(x)[0]
    np.testing.assert_allclose(unit_images(np.float32(scale) * x)[0], truth, atol=1e-5)
    np.testing.assert_allclose(unit_images((4 * x).astype(np.float16))[0], truth, atol=1e-5)


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
        expected.append(np.dot([2 * x[s : s + size].mean() + 1 for s in starts], new) / len(x))
    np.testing.assert_allclose(means, expected, rtol=1e-5)
    if rows == (5, 7, 4):
        assert [np.count_nonzero(row) for row in np.asarray(batches.weights)] == [2, 2, 1]


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_every_row_counts_once_in_an_error_rate(size):
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 2)), rng.integers(0, 2, n)) for n in (11, 20, 7)]
    sign = types.SimpleNamespace(
        apply=lambda w, other, x: x @ w + other, predict=lambda f: (f > 0).astype(int)
    )
    w = jnp.asarray(rng.normal(size=2))
    expected = [np.mean((x @ np.asarray(w) + 0.1 > 0) != y) for x, y in parts]
    np.testing.assert_allclose(error_rates(sign)(w, 0.1, parts, size), expected, rtol=1e-6)
    # A network that diverged predicts nothing: it is not right about the class that NaN looks like.
    np.testing.assert_array_equal(error_rates(sign)(jnp.nan * w, 0.1, parts, size), 1)


def test_infinite_values_of_one_part_do_not_change_another():
    parts = [(np.ones((3, 1)), np.arange(3)), (np.full((3, 1), np.inf), np.arange(3))]
    means = over_batches(lambda w, alpha, batch: (w * batch[0]).mean())
    np.testing.assert_array_equal(means(2.0, None, in_batches(parts, 2)), [2, np.inf])
