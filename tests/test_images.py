"""Images are normalised by their own means, however many there are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bilevel.nets.images import unit_images
from bilevel.nets.training import from_scratch, run_epochs
from bilevel.spaces.darts import DARTS_V2, darts_network


def test_many_float32_pixels_have_mean_0_and_variance_1():
    """Truth: float64. Added one after another, 200,000 of 1000 are off by more than they vary."""
    x = np.random.default_rng(0).normal(1000, 1, (200, 32, 32, 2)).astype(np.float32)
    (unit,) = unit_images(x)
    expected = (x - x.mean((0, 1, 2), dtype=float)) / x.std((0, 1, 2), dtype=float)
    np.testing.assert_allclose(unit, expected, atol=1e-3)


def test_bytes_are_images_too():
    x = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    for pixels in (None, 2):
        ours, ones = (unit_images(a, pixels=pixels)[0] for a in (x, x.astype(float)))
        np.testing.assert_allclose(ours, ones, rtol=1e-5, atol=1e-6)


def test_a_channel_that_does_not_vary_is_refused():
    x = np.random.default_rng(0).normal(size=(5, 4, 4, 2))
    x[..., 1] = 1
    with pytest.raises(ValueError, match="x: expected channels that vary"):
        unit_images(x)


def test_fewer_epochs_than_a_checkpoint_holds_are_refused(tmp_path):
    network = darts_network(DARTS_V2, cells=1, channels=2, auxiliary=False)
    program = from_scratch(network, optax.sgd(0.1), batch_size=2)
    data = jnp.ones((2, 4, 4, 1)), jnp.zeros(2, int)
    options = {"checkpoint": tmp_path, "options": lambda epoch: (0.0,)}
    run_epochs(program, jax.random.key(0), data, epochs=2, **options)
    with pytest.raises(ValueError, match="epochs: expected at least the 2 that the checkpoint"):
        run_epochs(program, jax.random.key(0), data, epochs=1, **options)
