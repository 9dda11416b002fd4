"""A penalty for each word: thousands of hyperparameters of a sentiment classifier.

    python word_penalties.py

Logistic regression classifies IMDb's reviews. Its sparse features say which of 30,000 words and
word pairs a review contains. Each feature has a penalty exp(alpha_j) w_j^2 / 2, chosen on
validation reviews. The baselines have one penalty for all features, from a grid; naive Bayes
weights r_j (Wang & Manning 2012), which is alpha_j = a - 2 log |r_j|; and three hyperparameters for
all penalties: that line's intercept and slope, and a slope in the word's count.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO
from sklearn.feature_extraction.text import CountVectorizer

import bilevel

FULL = [{}]
GRID = np.linspace(-10, 0, 11)  # log penalties


def logits(v, alpha, x):
    """Return logits of reviews [n, words]. v is w in units of its scale, exp(-alpha / 2)."""
    return x @ (jnp.exp(-0.5 * alpha) * v["words"]) + v["shift"]


def outer(v, alpha, batch):
    """Return the mean logistic loss."""
    x, y = batch
    return jnp.mean(jnp.logaddexp(0.0, -y * logits(v, alpha, x)))


def lower(v, alpha, batch):
    """Return the penalized loss. In units of v all penalties are equal, so solvers are fast."""
    return outer(v, alpha, batch) + 0.5 * jnp.sum(v["words"] ** 2)


def reviews(words, train, valid, test):
    """Load three parts of (presence of words and pairs [n, words], labels -1 or 1)."""
    dataset = bilevel.data.load("imdb", train_size=train + valid, test_size=test)
    texts = dataset.x_train[:train], dataset.x_train[train:], dataset.x_test
    counts = CountVectorizer(binary=True, ngram_range=(1, 2), max_features=words).fit(texts[0])
    x = [BCOO.from_scipy_sparse(counts.transform(t).astype(np.float32)) for t in texts]
    y = dataset.y_train[:train], dataset.y_train[train:], dataset.y_test
    return [(a, 2.0 * jnp.asarray(b) - 1) for a, b in zip(x, y, strict=True)]


def naive_bayes(x, y):
    """Return the log ratio of each word's frequencies, and the log of its count."""
    positive, negative = (1 + (y == s) @ x for s in (1.0, -1.0))
    ratio = jnp.log(positive / negative) - jnp.log((1 + jnp.sum(y > 0)) / (1 + jnp.sum(y < 0)))
    return ratio, jnp.log(positive + negative)


def main(words=30_000, train=20_000, valid=5000, test=25_000, steps=25):
    """Return a row for each way, with its CPU time, and the penalties that were learned."""
    train, valid, test = reviews(words, train, valid, test)
    solver = bilevel.implicit(bilevel.lbfgs(100, tol=1e-3), bilevel.cg(tol=1e-3))
    zero, rows = {"words": jnp.zeros(words), "shift": jnp.zeros(())}, []
    solve = jax.jit(lambda alpha, v, data: solver.run(lower, alpha, v, solver.init(v), data)[0])

    def row(name, alpha, began):
        v = solve(alpha, zero, train)
        entry = {"penalties": name, "validation loss": float(outer(v, alpha, valid))}
        entry |= {"test loss": float(outer(v, alpha, test))}
        entry |= {"test error": float(jnp.mean(logits(v, alpha, test[0]) * test[1] <= 0))}
        rows.append(entry | {"seconds": round(time.process_time() - began, 1)})
        print(rows[-1])
        return alpha

    def of_grid(name, shape):
        began, v, values = time.process_time(), zero, []
        for alpha in GRID:
            v = solve(alpha + shape, v, train)
            values.append(float(outer(v, alpha + shape, valid)))
        return row(f"{name}, from a grid of {len(GRID)}", GRID[np.argmin(values)] + shape, began)

    def learned(name, alpha, of=lambda alpha: alpha):
        began = time.process_time()
        losses = [lambda v, a, batch, loss=loss: loss(v, of(a), batch) for loss in (lower, outer)]
        rule = optax.adam(optax.cosine_decay_schedule(0.3, steps))
        flags = {"steps": steps, "history": ["value"]}
        data = alpha, zero, train, valid
        result = bilevel.search(bilevel.Problem(*losses), solver, rule, *data, **flags)
        return row(f"{name}, learned in {steps} steps", of(result.alpha), began)

    ratio, count = naive_bayes(*train)
    bayes = -2 * jnp.log(jnp.abs(ratio) + 0.01)  # the smallest weights are near 0
    line = jnp.stack([jnp.ones(words), bayes, count - count.mean()], 1)
    one = of_grid("one", jnp.zeros(words))
    of_grid("one, on naive Bayes weights", bayes)
    three = learned("a line of 3", jnp.array([one[0], 0.0, 0.0]), lambda a: line @ a)
    each = learned(f"{words:,}", one)
    return rows, [np.asarray(alpha - one) for alpha in (each, three)]


def picture(drawn, figure):
    """Draw the learned penalties relative to the one penalty from the grid."""
    ax = figure.subplots()
    for moved, label in zip(drawn[0], ("each learned", "a line of 3"), strict=True):
        ax.hist(moved, bins=60, alpha=0.6, label=label)
    ax.set(xlabel="log penalty, minus that of the grid", ylabel="words", yscale="log")
    ax.legend()


if __name__ == "__main__":
    main()
