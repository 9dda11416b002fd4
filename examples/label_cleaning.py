"""Which labels are wrong?  A weight for every training row, chosen on a few clean rows.

    python label_cleaning.py

A convolutional network with batch normalisation and dropout learns digits of which 40 % have a
wrong label. Its training loss weighs row i by sigmoid(alpha_i); alpha descends the loss on 200
clean rows, through five steps of the network's own training. Every step has a minibatch, and a key
for its dropout. What comes out is how well alpha tells wrong labels from right ones.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel

STEPS, ROWS, CLEAN, WRONG = 600, 600, 200, 0.4


class Network(nn.Module):
    """Two layers of convolutions and a classifier."""

    @nn.compact
    def __call__(self, x, train: bool):
        """Images [n, 8, 8, 1] -> logits [n, 10]."""
        for channels in (16, 32):
            x = nn.Conv(channels, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


network = Network()
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def lower(w, alpha, batch):
    """The weighted loss of a minibatch, and the running averages after it."""
    (x, y, number), key = batch
    variables = {"params": w.params} | w.variables
    f, new = network.apply(variables, x, True, rngs={"dropout": key}, mutable=["batch_stats"])
    return jnp.mean(jax.nn.sigmoid(alpha[number]) * cross_entropy(f, y)), new


def outer(w, alpha, batch):
    """The loss of clean rows, by the running averages."""
    x, y, _ = batch
    return cross_entropy(network.apply({"params": w.params} | w.variables, x, False), y).mean()


def with_key(key, data):
    """A minibatch, and a key."""
    keys = jax.random.split(key)
    return bilevel.minibatches(64)(keys[0], data), keys[1]


def main(steps: int = STEPS) -> float:
    """Search, and return the area under the curve of telling wrong labels by alpha."""
    sizes = {"train": ROWS, "valid": CLEAN, "test": 1}
    ((x, y), (xv, yv), _), *_ = bilevel.data.samples("digits", [jax.random.key(0)], **sizes)
    draw = np.random.default_rng(0)
    wrong = draw.random(ROWS) < WRONG
    y = np.where(wrong, (y + draw.integers(1, 10, ROWS)) % 10, y)
    images = [jnp.asarray(a, jnp.float32).reshape(-1, 8, 8, 1) for a in (x, xv)]
    train, clean = (images[0], y, jnp.arange(ROWS)), (images[1], yv, jnp.arange(CLEAN))

    made = network.init(jax.random.key(1), images[0], False)
    w = bilevel.Stateful(made.pop("params"), made)
    found = bilevel.search(
        bilevel.Problem(lower, outer, stateful=True),
        bilevel.unrolled(optax.sgd(0.05, momentum=0.9), 5, batches=with_key),
        optax.adam(0.1),
        *(jnp.zeros(ROWS), w, train, clean),
        steps=steps,
        key=jax.random.key(2),
        history=["value"],
    )
    ranks = np.argsort(np.argsort(found.alpha))
    right = ~wrong
    auc = (ranks[right].sum() - right.sum() * (right.sum() - 1) / 2) / (right.sum() * wrong.sum())
    print(f"wrong labels told from right ones: area under the curve {auc:.3f}")
    return float(auc)


if __name__ == "__main__":
    main()
