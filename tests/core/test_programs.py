"""Networks of nnx and equinox as lower problems."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import bilevel

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def bars(rows, wrong, seed):
    """Return images [rows, 6, 6, 1] with one bright half, and labels with some flipped."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, rows)
    bright = np.arange(6) // 3 == y[:, None]
    x = rng.normal(size=(rows, 6, 6, 1)) + 0.7 * bright[:, :, None, None]
    flipped = rng.random(rows) < wrong
    return jnp.asarray(x, jnp.float32), jnp.asarray(np.where(flipped, 1 - y, y)), flipped


@pytest.mark.long
def test_hyper_cleaning_in_nnx(tmp_path):
    """All state except parameters is a variable, also keys of dropout."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
            self.drop = nnx.Dropout(0.2, rngs=rngs)
            self.dense = nnx.Linear(144, 2, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.conv(x)))
            return self.dense(self.drop(x.reshape(len(x), -1)))

    graph, params, variables = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

    def lower(w, alpha, batch):
        x, y, number = batch
        model = nnx.merge(graph, w.params, w.variables)
        model.train()
        loss = jnp.mean(jax.nn.sigmoid(alpha[number]) * cross_entropy(model(x), y))
        return loss, nnx.split(model, nnx.Param, ...)[2]

    def outer(w, alpha, batch):
        x, y = batch
        model = nnx.merge(graph, w.params, w.variables)
        model.eval()
        return cross_entropy(model(x), y).mean()

    x, y, wrong = bars(120, 0.4, seed=0)
    search = functools.partial(
        bilevel.search,
        bilevel.Problem(lower, outer, stateful=True),
        bilevel.unrolled(optax.sgd(0.1, momentum=0.9), 4, batches=bilevel.minibatches(40)),
        optax.adam(0.2),
        *(jnp.zeros(120), bilevel.Stateful(params, variables)),
        *((x, y, jnp.arange(120)), bars(60, 0.0, seed=1)[:2]),
        key=jax.random.key(0),
    )
    result = search(steps=40)
    alpha = np.asarray(result.alpha)
    assert np.mean(alpha[~wrong][:, None] > alpha[wrong]) > 0.75  # the area under the curve
    model = nnx.merge(graph, result.w.params, result.w.variables)
    assert np.abs(model.norm.mean[...]).max() > 0.01
    assert model.drop.rngs.count[...] == 160  # a new mask for every inner step
    search(steps=20, checkpoint=tmp_path / "a")
    again = search(steps=40, checkpoint=tmp_path / "a", resume=True)
    np.testing.assert_array_equal(again.alpha, result.alpha)


@pytest.mark.long
def test_a_learned_regulariser_in_equinox():
    """Both the model and the regulariser are modules, with activations among their leaves."""
    equinox = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"width_size": 8, "depth": 1}
    model = equinox.nn.MLP(3, "scalar", **sizes, activation=jnp.tanh, key=keys[0])
    regulariser = equinox.nn.MLP(1, "scalar", **sizes, activation=jax.nn.softplus, key=keys[1])
    w, static = equinox.partition(model, equinox.is_inexact_array)
    alpha, rest_of_alpha = equinox.partition(regulariser, equinox.is_inexact_array)

    def error(w, batch):
        return jnp.mean((jax.vmap(equinox.combine(w, static))(batch[0]) - batch[1]) ** 2)

    def lower(w, alpha, batch):
        penalty = equinox.combine(alpha, rest_of_alpha)
        weights = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(w)])
        return error(w, batch) + 0.2 * jnp.mean(jax.vmap(penalty)(weights[:, None]))

    x = jax.random.normal(keys[2], (60, 3))
    y = jnp.sin(x[:, 0]) + 0.5 * jax.random.normal(keys[3], (60,))
    # The last bias adds a constant to the lower loss.
    with pytest.warns(UserWarning, match=r"alpha.layers\[1\].bias: .* always 0"):
        result = bilevel.search(
            bilevel.Problem(lower, lambda w, alpha, batch: error(w, batch)),
            bilevel.restarted(bilevel.unrolled(optax.adam(0.05), 20)),
            optax.adam(0.1),
            *(alpha, w, (x[:20], y[:20]), (x[20:], y[20:])),
            steps=30,
        )
    assert result.history["value"][-1] < 0.95 * result.history["value"][0]
    assert np.isfinite(equinox.combine(result.alpha, rest_of_alpha)(jnp.ones(1)))
