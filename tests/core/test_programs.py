"""What researchers write, as they would write it: each program is short, and runs without a detour.

Every one ends in a number that it would not reach if a part of it did nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import bilevel

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
KEY = jax.random.key(0)


# ----------------------------------------------------------------------------- meta-learning


@pytest.mark.long
@pytest.mark.parametrize("way", ["MAML", "iMAML"])
def test_meta_learning(way):
    """A start that learns sinusoids in a step (Finn et al. 2017), or stays near (iMAML, 2019)."""
    tasks, rows = 8, 10

    def net(w, x):
        return jnp.tanh(x[:, None] * w["in"] + w["bias"]) @ w["out"]

    def error(w, batch):
        return jnp.mean((net(w, batch[0]) - batch[1]) ** 2)

    def drawn(key, *_):
        """Support and query rows of the same sinusoids."""
        keys = jax.random.split(key, 3)
        x = jax.random.uniform(keys[0], (2, tasks, rows), minval=-5, maxval=5)
        height = jax.random.uniform(keys[1], (tasks, 1), minval=0.5, maxval=2)
        y = height * jnp.sin(x + jax.random.uniform(keys[2], (tasks, 1), maxval=jnp.pi))
        return (x[0], y[0]), (x[1], y[1])

    def copies(alpha, _=None):
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (tasks, *a.shape)), alpha)

    def lower(w, alpha, batch):
        value = jax.vmap(error)(w, batch).sum()
        away = optax.tree.norm(optax.tree.sub(w, copies(alpha)), squared=True)
        return value if way == "MAML" else value + 2.0 * away

    def outer(w, alpha, batch):
        return jax.vmap(error)(w, batch).mean()

    steps = bilevel.unrolled(0.05, 3)
    solver = steps if way == "MAML" else bilevel.implicit(bilevel.newton(3), bilevel.cg(steps=10))
    solver = bilevel.restarted(solver, start=copies)
    keys = jax.random.split(KEY, 3)
    alpha = {
        "in": jax.random.normal(keys[0], (20,)),
        "bias": jax.random.normal(keys[1], (20,)),
        "out": jax.random.normal(keys[2], (20,)) / 20**0.5,
    }
    result = bilevel.search(
        *(bilevel.Problem(lower, outer), solver, optax.adam(0.02), alpha, copies(alpha)),
        *(None, None),
        steps=60,
        batches=bilevel.jointly(drawn),
        key=KEY,
    )
    # By the start alone, adapted in the same steps, new tasks are 1.5 times as wrong.
    new = drawn(jax.random.key(9))
    adapt = bilevel.restarted(steps, start=copies)
    plain = bilevel.Problem(lambda w, a, b: jax.vmap(error)(w, b).sum(), outer)
    of = jax.jit(bilevel.hypergradient(plain, adapt, diagnostics=False))
    before, after = (of(a, copies(a), *new).value for a in (alpha, result.alpha))
    assert after < 0.7 * before


# ----------------------------------------------------------------------------- hyper-cleaning


def bars(rows, wrong, seed):
    """Images [rows, 6, 6, 1] of one bright half or the other; labels, of which some are flipped."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, rows)
    bright = np.arange(6) // 3 == y[:, None]
    x = rng.normal(size=(rows, 6, 6, 1)) + 0.7 * bright[:, :, None, None]
    flipped = rng.random(rows) < wrong
    return jnp.asarray(x, jnp.float32), jnp.asarray(np.where(flipped, 1 - y, y)), flipped


def told_apart(alpha, wrong):
    """The area under the curve of telling wrong labels from right ones by a low weight."""
    alpha = np.asarray(alpha)
    return np.mean(alpha[~wrong][:, None] > alpha[wrong])


def keyed(size):
    """Minibatches that hand a key on."""

    def batches(key, data):
        keys = jax.random.split(key)
        return bilevel.minibatches(size)(keys[0], data), keys[1]

    return batches


@pytest.mark.long
def test_hyper_cleaning_in_linen():
    """Weights of labels; a convolutional network with batch normalisation and dropout."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Conv(4, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.Dropout(0.2, deterministic=not train)(x.reshape(len(x), -1))
            return nn.Dense(2)(x)

    net = Network()

    def lower(w, alpha, batch):
        (x, y, number), key = batch
        variables = {"params": w.params, **w.variables}
        f, new = net.apply(variables, x, True, rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.mean(jax.nn.sigmoid(alpha[number]) * cross_entropy(f, y)), new

    def outer(w, alpha, batch):
        x, y = batch
        return cross_entropy(net.apply({"params": w.params, **w.variables}, x, False), y).mean()

    x, y, wrong = bars(120, 0.4, seed=0)
    clean = bars(60, 0.0, seed=1)[:2]
    made = net.init(KEY, x, False)
    w = bilevel.Stateful(made.pop("params"), made)
    result = bilevel.search(
        bilevel.Problem(lower, outer, stateful=True),
        bilevel.unrolled(optax.sgd(0.1, momentum=0.9), 4, batches=keyed(40)),
        optax.adam(0.2),
        *(jnp.zeros(120), w, (x, y, jnp.arange(120)), clean),
        steps=40,
        key=KEY,
    )
    assert told_apart(result.alpha, wrong) > 0.75
    running = result.w.variables["batch_stats"]["BatchNorm_0"]["mean"]
    assert np.abs(running).max() > 0.01


@pytest.mark.long
def test_hyper_cleaning_in_nnx(tmp_path):
    """The same in nnx: what is no parameter, keys of dropout included, are variables."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
            self.drop = nnx.Dropout(0.2, rngs=rngs)
            self.dense = nnx.Linear(144, 2, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.conv(x)))
            return self.dense(self.drop(x.reshape(len(x), -1)))

    graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

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
        *(jnp.zeros(120), bilevel.Stateful(params, rest)),
        *((x, y, jnp.arange(120)), bars(60, 0.0, seed=1)[:2]),
        key=KEY,
    )
    result = search(steps=40)
    assert told_apart(result.alpha, wrong) > 0.75
    model = nnx.merge(graph, result.w.params, result.w.variables)
    assert np.abs(model.norm.mean[...]).max() > 0.01
    assert model.drop.rngs.count[...] == 160  # a mask of its own for every inner step
    search(steps=20, checkpoint=tmp_path / "a")
    again = search(steps=40, checkpoint=tmp_path / "a", resume=True)
    np.testing.assert_array_equal(again.alpha, result.alpha)


# ----------------------------------------------------------------------------- equinox


@pytest.mark.long
def test_a_learned_regulariser_in_equinox():
    """Both the model and the regulariser are modules, with activations among their leaves."""
    equinox = pytest.importorskip("equinox")
    keys = jax.random.split(KEY, 4)
    sizes = {"width_size": 8, "depth": 1}
    model = equinox.nn.MLP(3, "scalar", **sizes, activation=jnp.tanh, key=keys[0])
    regulariser = equinox.nn.MLP(1, "scalar", **sizes, activation=jax.nn.softplus, key=keys[1])
    w, rest = equinox.partition(model, equinox.is_inexact_array)
    alpha, rest_of_alpha = equinox.partition(regulariser, equinox.is_inexact_array)

    def error(w, batch):
        return jnp.mean((jax.vmap(equinox.combine(w, rest))(batch[0]) - batch[1]) ** 2)

    def lower(w, alpha, batch):
        penalty = equinox.combine(alpha, rest_of_alpha)
        weights = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(w)])
        return error(w, batch) + 0.2 * jnp.mean(jax.vmap(penalty)(weights[:, None]))

    x = jax.random.normal(keys[2], (60, 3))
    y = jnp.sin(x[:, 0]) + 0.5 * jax.random.normal(keys[3], (60,))
    result = bilevel.search(
        bilevel.Problem(lower, lambda w, alpha, batch: error(w, batch)),
        bilevel.restarted(bilevel.unrolled(optax.adam(0.05), 20)),
        optax.adam(0.1),
        *(alpha, w, (x[:20], y[:20]), (x[20:], y[20:])),
        steps=30,
    )
    assert result.history["value"][-1] < 0.95 * result.history["value"][0]
    whole = equinox.combine(result.alpha, rest_of_alpha)
    assert np.isfinite(whole(jnp.ones(1)))
    with pytest.raises(ValueError, match=r"w0.*activation: expected floating arrays.*equinox"):
        bilevel.search(
            bilevel.Problem(lower, lambda w, alpha, batch: error(w, batch)),
            *(bilevel.unrolled(0.1, 1), optax.adam(0.1), alpha, model, None, None),
            steps=1,
        )


# ----------------------------------------------------------------------------- the optimizer


@pytest.mark.long
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_rate_and_momentum(mode):
    """Heavy ball's best rate and momentum on a quadratic: Polyak's, to a tenth."""
    curvatures = jnp.array([1.0, 4.0, 9.0])
    problem = bilevel.Problem(
        lambda w, alpha, batch: 0.5 * jnp.sum(curvatures * w**2),
        lambda w, alpha, batch: jnp.log(jnp.sum(w**2)),
    )

    def optimizer(alpha):
        return optax.sgd(jnp.exp(alpha["rate"]), momentum=jax.nn.sigmoid(alpha["momentum"]))

    fn = bilevel.hypergradient(
        problem, bilevel.unrolled(optimizer, 60), mode=mode, diagnostics=False
    )
    rule, alpha = optax.adam(0.05), {"rate": jnp.log(0.05), "momentum": jnp.array(0.0)}

    def step(carry, _):
        alpha, state = carry
        hyper = fn(alpha, jnp.ones(3), None, None)
        updates, state = rule.update(hyper.grad, state)
        return (optax.apply_updates(alpha, updates), state), (alpha, hyper.value)

    path, values = jax.lax.scan(step, (alpha, rule.init(alpha)), length=200)[1]
    best = values.argmin()
    # At Polyak's 4 / (1 + 3)^2 and (3 - 1)^2 / (3 + 1)^2 the error falls by half at every step.
    assert values[best] < -55 < values[0]
    assert abs(jnp.exp(path["rate"][best]) - 0.25) < 0.05
    assert abs(jax.nn.sigmoid(path["momentum"][best]) - 0.25) < 0.06


# ----------------------------------------------------------------------------- a transformer


@pytest.mark.long
def test_a_transformer_with_metrics():
    """Loss weights of token groups; dropout, minibatches on both levels, metrics out."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, tokens, train):
            x = nn.Embed(12, 8)(tokens) + self.param("place", nn.initializers.normal(), (6, 8))
            attention = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1)
            x = x + attention(nn.LayerNorm()(x), deterministic=not train)
            x = nn.Dropout(0.1, deterministic=not train)(x + nn.Dense(8)(nn.gelu(x)))
            return nn.Dense(2)(x.mean(1))

    net = Block()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 12, (200, 6))
    label = np.asarray((tokens < 4).sum(1) > (tokens > 7).sum(1), int)
    source = rng.integers(0, 4, 200)  # of the four sources of labels, the last one is noise
    noisy = np.where(source == 3, rng.integers(0, 2, 200), label)

    def lower(w, alpha, batch):
        (tokens, y, source), key = batch
        f = net.apply(w, tokens, True, rngs={"dropout": key})
        losses = cross_entropy(f, y)
        return jnp.mean(4 * jax.nn.softmax(alpha)[source] * losses), {"plain": losses.mean()}

    def outer(w, alpha, batch):
        tokens, y = batch
        f = net.apply(w, tokens, False)
        return cross_entropy(f, y).mean(), {"accuracy": jnp.mean(f.argmax(-1) == y)}

    result = bilevel.search(
        bilevel.Problem(lower, outer, has_aux=True),
        bilevel.unrolled(optax.sgd(0.1, momentum=0.9), 4, batches=keyed(50)),
        optax.adam(0.1),
        *(jnp.zeros(4), net.init(KEY, tokens[:1], False)),
        *((tokens[:150], noisy[:150], source[:150]), (tokens[150:], label[150:])),
        steps=40,
        batches=bilevel.minibatches(25),
        key=KEY,
    )
    accuracy = result.history["aux"]["outer"]["accuracy"]
    assert accuracy.shape == (40,) and accuracy[-10:].mean() > 0.75
    assert result.history["aux"]["lower"]["plain"].shape == (40,)
    assert result.alpha.argmin() == 3
