"""A penalty for each word: thousands of hyperparameters of a sentiment classifier.

    python word_penalties.py

Logistic regression of IMDb reviews on the presence of 3,000 words, with a penalty
exp(alpha_j) w_j^2 / 2 for every word, chosen on validation reviews. Beside it: one penalty for all
words, from a grid, and one penalty with naive Bayes weights of the words (Wang & Manning 2012),
both on the same reviews.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.feature_extraction.text import CountVectorizer

import bilevel

FULL = [{}]


def error(w, batch):
    """The mean logistic loss."""
    x, y = batch
    return jnp.mean(jnp.logaddexp(0.0, -y * (x @ w["words"] + w["shift"])))


def lower(w, alpha, batch):
    """The penalised loss."""
    return error(w, batch) + 0.5 * jnp.sum(jnp.exp(alpha) * w["words"] ** 2)


def outer(w, alpha, batch):
    """The loss of validation reviews."""
    return error(w, batch)


def reviews(words, train, valid, test):
    """Three parts of (presence of words [n, words], labels -1 or 1)."""
    found = bilevel.data.load("imdb", train_size=train + valid, test_size=test)
    counts = CountVectorizer(binary=True, max_features=words).fit(found.x_train[:train])
    x, xt = (
        jnp.asarray(counts.transform(t).toarray(), float) for t in (found.x_train, found.x_test)
    )
    y, yt = (2.0 * jnp.asarray(v) - 1 for v in (found.y_train, found.y_test))
    return (x[:train], y[:train]), (x[train:], y[train:]), (xt, yt)


def naive_bayes(x, y):
    """The log ratio of each word's frequencies."""
    positive, negative = ((1 + x[y == s].sum(0)) / (1 + (y == s).sum()) for s in (1, -1))
    return jnp.log(positive / negative)


def main(words=3000, train=5000, valid=5000, test=10_000, steps=40):
    """A row for each way, with its processor time; the penalties learned."""
    train, valid, test = reviews(words, train, valid, test)
    problem = bilevel.Problem(lower, outer)
    solver = bilevel.implicit(bilevel.lbfgs(200), bilevel.cg(tol=1e-3))
    w0 = {"words": jnp.zeros(words), "shift": jnp.zeros(())}
    solve = jax.jit(lambda alpha, w, batch: solver.run(lower, alpha, w, solver.init(w), batch)[0])
    rows = []

    def row(name, alpha, began, scale=1.0):
        scaled = [(x * scale, y) for x, y in (train, valid, test)]
        w = solve(alpha, w0, scaled[0])
        losses = {
            f"{part} loss": float(error(w, b))
            for part, b in zip(("validation", "test"), scaled[1:], strict=True)
        }
        x, y = scaled[2]
        wrong = float(jnp.mean((x @ w["words"] + w["shift"]) * y <= 0))
        seconds = round(time.process_time() - began, 1)
        rows.append({"penalties": name} | losses | {"test error": wrong, "seconds": seconds})
        print(rows[-1])

    grid = jnp.linspace(-10, 0, 11)
    for name, scale in {"one": 1.0, "one, on naive Bayes weights": naive_bayes(*train)}.items():
        began = time.process_time()
        parts = [(x * scale, y) for x, y in (train, valid)]
        values = [float(error(solve(jnp.full(words, p), w0, parts[0]), parts[1])) for p in grid]
        best = jnp.full(words, grid[int(np.argmin(values))])
        row(f"{name}, from a grid of 11", best, began, scale)
        first = best if name == "one" else first  # noqa: F821
    began = time.process_time()
    optimizer = optax.adam(optax.cosine_decay_schedule(0.3, steps))
    found = bilevel.search(
        *(problem, solver, optimizer, first, w0, train, valid), steps=steps, history=["value"]
    )
    row(f"{words:,}, learned in {steps} steps", found.alpha, began)
    return rows, np.asarray(found.alpha - first)


def picture(drawn, figure):
    """How far penalties moved from the one of the grid."""
    (moved,) = drawn
    ax = figure.subplots()
    ax.hist(moved, bins=60)
    ax.set(xlabel="log penalty, minus that of the grid", ylabel="words", yscale="log")


if __name__ == "__main__":
    main()
