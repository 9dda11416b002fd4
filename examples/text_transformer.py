"""Five sources of labels, some of them noise: a weight for each, of a transformer's loss.

    python text_transformer.py

A small transformer learns from the first 64 known words of an IMDb review whether its author liked
the film. Each label comes from one of five sources, with error rates from 5 to 50 %. alpha weighs
the sources and descends the loss on 500 clean reviews, through four steps of training with dropout.
Both levels use minibatches. Baselines: equal weights, single sources, and clean reviews only.
"""

import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.feature_extraction.text import CountVectorizer

import bilevel


class Transformer(nn.Module):
    """One transformer block, and a classifier of the mean."""

    @nn.compact
    def __call__(self, words, train):
        """Map word indices [n, LENGTH], 0 for padding, to logits [n, 2]."""
        there = words > 0
        x = nn.Embed(WORDS, WIDTH)(words) + nn.Embed(LENGTH, WIDTH)(jnp.arange(words.shape[1]))
        attention = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=not train)
        x = x + attention(nn.LayerNorm()(x), mask=there[:, None, None, :])
        x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        x = nn.Dropout(0.1, deterministic=not train)(nn.LayerNorm()(x)) * there[..., None]
        return nn.Dense(2)(x.sum(1) / (1 + there.sum(1, keepdims=True)))


ERRORS = (0.05, 0.2, 0.35, 0.5, 0.5)  # error rates of the sources
WORDS, LENGTH, WIDTH = 4000, 64, 32
FULL, HELD = [{}], optax.set_to_zero()
net, cross_entropy = Transformer(), optax.softmax_cross_entropy_with_integer_labels


def lower(w, alpha, batch):
    """Return the loss with a weight for each source, and the loss without weights."""
    (words, label, source), key = batch
    losses = cross_entropy(net.apply(w, words, True, rngs={"dropout": key}), label)
    return jnp.mean(len(ERRORS) * jax.nn.softmax(alpha)[source] * losses), {"plain": losses.mean()}


def outer(w, alpha, batch):
    """Return the loss and the error on clean reviews."""
    f = net.apply(w, batch[0], False)
    return cross_entropy(f, batch[1]).mean(), {"error": jnp.mean(f.argmax(-1) != batch[1])}


def reviews(train, valid, test):
    """Load three parts of (word indices [n, LENGTH], labels)."""
    dataset = bilevel.data.load("imdb", train_size=train + valid, test_size=test)
    counts = CountVectorizer(max_features=WORDS - 1).fit(dataset.x_train[:train])
    split, number = counts.build_analyzer(), counts.vocabulary_

    def numbers(text):
        known = [1 + number[word] for word in split(text) if word in number][:LENGTH]
        return np.pad(known, (0, LENGTH - len(known))).astype(np.int32)

    words = np.stack([numbers(text) for text in (*dataset.x_train, *dataset.x_test)])
    y, ends = np.concatenate([dataset.y_train, dataset.y_test]), (train, train + valid)
    return list(zip(np.split(words, ends), np.split(y, ends), strict=True))


def with_key(key, data):
    """Return a minibatch and a key for its dropout."""
    keys = jax.random.split(key)
    return bilevel.minibatches(64)(keys[0], data), keys[1]


def main(train=12_000, valid=500, test=3000, steps=100, inner=4, baselines=True):
    """Return a row for each training, with its CPU time, and the weights over the steps."""
    (words, y), clean, of_test = reviews(train, valid, test)
    draw, problem = np.random.default_rng(0), bilevel.Problem(lower, outer, has_aux=True)
    source = draw.integers(0, len(ERRORS), train)
    noisy = np.where(draw.random(train) < np.asarray(ERRORS)[source], 1 - y, y)
    w, judge, rows = net.init(jax.random.key(0), words[:1], False), jax.jit(outer), []
    flags = {"batches": bilevel.minibatches(64), "steps": steps, "key": jax.random.key(1)}

    def trained(name, alpha, rule=HELD, backprop=0, data=(words, noisy, source)):
        """Train with the same search; by default alpha is fixed and there is no backward pass."""
        began = time.process_time()
        adam = optax.adamw(1e-3, weight_decay=0.1)
        solver = bilevel.unrolled(adam, inner, batches=with_key, backprop=backprop)
        result = bilevel.search(problem, solver, rule, alpha, w, data, clean, **flags)
        row = {"training": name, "seconds": round(time.process_time() - began, 1)}
        (valid, _), (test, more) = (judge(result.w, None, part) for part in (clean, of_test))
        row |= {"validation loss": float(valid), "test loss": float(test)}
        rows.append(row | {"test error": float(more["error"])})
        return result

    equal = jnp.zeros(len(ERRORS))
    result = trained("weights learned on the way", equal, optax.adam(0.05), None)
    if baselines:
        trained("the weights found, from the start", result.alpha)
        trained("equal weights", equal)
        for k, error in enumerate(ERRORS):  # a softmax of 0 and 30 is a vertex
            trained(f"source {k} alone, {error:.0%} wrong", 30.0 * jnp.eye(len(ERRORS))[k])
        trained("the clean reviews alone", equal, data=(*clean, np.zeros(valid, int)))
    return rows, np.asarray(jax.nn.softmax(result.history["alpha"], -1))


def picture(drawn, figure):
    """Draw the weights over the steps."""
    ax = figure.subplots()
    for error, course in zip(ERRORS, drawn[0].T, strict=True):
        ax.plot(course, label=f"{error:.0%} wrong")
    ax.set(xlabel="step", ylabel="weight of the source")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))


if __name__ == "__main__":
    print(*main()[0], sep="\n")
