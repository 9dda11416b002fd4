"""Training on rows of the host: its steps, its checkpoints, its normalisation, its rivals."""

import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bilevel.nets import fit, fitting, inputs, normalized, unit_images
from bilevel.nets.training import TrainableNetwork
from bilevel.runs import checkpoint
from bilevel.spaces import unit_inputs
from bilevel.spaces.darts.genotype import draw_corner, genotype
from bilevel.spaces.darts.supernet import weight_count
from bilevel.spaces.trained import Blueprint, random_of_same_size, single_operations, weight_excess


def linear():
    """A linear classifier with a quadratic loss, and the number of batches as its averages."""

    def loss(w, averages, batch, key):
        x, labels = batch
        noise = jax.random.normal(key, w.shape, w.dtype)
        value = jnp.mean((x @ w - labels[:, None]) ** 2) + 1e-3 * jnp.vdot(noise, w)
        return value, averages + 1

    return TrainableNetwork(
        init=lambda key, shape: (jax.random.normal(key, (*shape, 2)), jnp.zeros(())),
        apply=lambda w, averages, x: x @ w,
        loss=loss,
        predict=lambda outputs: outputs.argmax(-1),
    )


def rows(n=23, d=3):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, d)).astype(np.float32), rng.integers(0, 2, n)


def test_the_steps_are_those_of_a_loop():
    network, (x, y), key, seen = linear(), rows(), jax.random.key(3), []
    options = {"optimizer": optax.sgd(0.05), "epochs": 2, "batch_size": 5}
    options["callback"] = lambda *args: seen.append(args)
    fitted = fit(key, network, (x, y), test=(x, y), **options)
    init_key, order_key, loss_key = jax.random.split(key, 3)
    (w, averages), losses = network.init(init_key, (3,)), []
    for i in range(8):
        if i % 4 == 0:
            order = np.asarray(jax.random.permutation(jax.random.fold_in(order_key, i // 4), 23))
        batch = order[5 * (i % 4) : 5 * (i % 4) + 5]

        def loss(w, batch=batch, i=i):
            step_key = jax.random.fold_in(loss_key, i)
            return network.loss(w, averages, (x[batch], y[batch]), step_key)[0]

        losses.append(loss(w))
        w = w - 0.05 * jax.grad(loss)(w)
    np.testing.assert_allclose(fitted.w, w, rtol=1e-5, atol=1e-6)
    assert fitted.averages == 8
    np.testing.assert_allclose(fitted.losses, np.mean(np.reshape(losses, (2, 4)), 1), rtol=1e-5)
    assert seen == [(i + 1, pytest.approx(loss)) for i, loss in enumerate(fitted.losses)]
    assert fitted.errors[-1] == np.mean(np.asarray((x @ w).argmax(-1)) != y)


@pytest.mark.parametrize("stop", [4, 6])
def test_a_stopped_training_goes_on_to_the_same_bits(stop, tmp_path, monkeypatch):
    data, step, done = rows(), fitting._step, []

    def fitted(**options):
        options = {"optimizer": 0.05, "epochs": 2, "batch_size": 5, "test": data} | options
        return fit(jax.random.key(0), linear(), data, **options)

    def step_and_signal(*args):
        done.append(args)
        if len(done) == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*args)

    monkeypatch.setattr(fitting, "_step", step_and_signal)
    with pytest.raises(KeyboardInterrupt, match=f"interrupted in epoch {(stop + 3) // 4}"):
        fitted(checkpoint=tmp_path)
    assert checkpoint.latest(tmp_path) == stop
    for other in ({"epochs": 3}, {"batch_size": 4}, {"optimizer": 0.1}) if stop == 4 else ():
        with pytest.raises(ValueError, match=r"checkpoint: expected one of this very run"):
            fitted(checkpoint=tmp_path, **other)
    assert len(done) == stop
    resumed = fitted(checkpoint=tmp_path)
    assert len(done) == 8
    for a, b in zip(resumed, fitted(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_stay_on_the_host(tmp_path):
    x, y = rows()
    x = (100 + 20 * x).astype(np.uint8)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    network = inputs.with_scale(linear(), inputs.row_scale(mapped))
    run = functools.partial(fit, jax.random.key(0), network, optimizer=0.1, epochs=2, batch_size=5)
    a, b = (run((rows, y), test=(rows, y)) for rows in (mapped, x.astype(float)))
    np.testing.assert_allclose(a.w, b.w, rtol=1e-5)
    np.testing.assert_array_equal(a.errors, b.errors)


def test_the_scales_are_those_of_the_functions_of_arrays():
    x = np.random.default_rng(0).normal(3, 2, size=(1500, 8, 8, 3)).astype(np.float32)
    new = x[:5] + 1
    identity = TrainableNetwork(None, lambda w, averages, x: x, None, None)
    for pixels in (None, 4):
        network = normalized(identity, x, pixels=pixels)
        expected = unit_images(x, new, pixels=pixels)[1]
        np.testing.assert_allclose(network.apply(None, None, new), expected, atol=1e-5)
    scaled = inputs.row_scale(x[..., 0])(new[..., 0])
    np.testing.assert_allclose(scaled, unit_inputs(x[..., 0], new[..., 0])[1], atol=1e-5)


def test_weights_of_darts_networks_differ_as_counted():
    sizes = {"classes": 3, "cells": 3, "channels": 4}
    keys = jax.random.split(jax.random.key(0))
    first, second = (Blueprint("darts", str(genotype(draw_corner(key))), sizes) for key in keys)

    def counted(blueprint):
        init = blueprint.network().init
        return weight_count(jax.eval_shape(lambda key: init(key, (8, 8, 1)), jax.random.key(0))[0])

    assert counted(first) - counted(second) == weight_excess(first) - weight_excess(second)


def test_a_rival_is_the_nearest_of_the_draws_and_not_the_network_itself():
    names = ("none", "skip_connect", "nor_conv_3x3")
    edges = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|none~0|none~1|skip_connect~2|"
    found = Blueprint("nasbench201", edges, {"classes": 10, "cells": 1, "channels": 4})
    rival = random_of_same_size(jax.random.key(0), found, names, 60, None)
    # A third of the draws has as many convolutions.
    assert weight_excess(rival) == weight_excess(found) and rival.architecture != edges
    assert set(single_operations(found, names)) == {"skip_connect", "nor_conv_3x3"}
    relu = Blueprint("activations", "relu", {"activations": ["relu"]}, [[1.0]])
    assert random_of_same_size(jax.random.key(0), relu, ("relu",), 5, None) is None
