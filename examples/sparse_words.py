"""A sparse sentiment classifier: an l1 penalty for each of 30,000 words and word pairs.

    python sparse_words.py

l1-regularized logistic regression on IMDb's reviews, next to ``word_penalties.py``, which has
quadratic penalties. Most weights are exactly 0. One penalty is chosen on a grid, or learned; three
hyperparameters give each word its penalty: intercept, slope in its naive Bayes weight (Wang &
Manning 2012), slope in its count.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from word_penalties import naive_bayes, reviews

import bilevel

FULL = [{}]
GRID = np.linspace(-11, -6, 6)  # log penalties


def logits(w, x):
    """Return logits of reviews [n, words]."""
    return x @ w["words"] + w["shift"]


def loss(w, alpha, batch):
    """Return the mean logistic loss: the smooth part of the lower loss, and the outer loss."""
    x, y = batch
    return jnp.mean(jnp.logaddexp(0.0, -y * logits(w, x)))


def main(words=30_000, train=20_000, valid=5000, test=25_000, steps=15, grid=6):
    """Return a row for each way, with its CPU time, and the penalties of the words."""
    train, valid, test = reviews(words, train, valid, test)
    ratio, count = naive_bayes(*train)
    bayes = -jnp.log(jnp.abs(ratio) + 0.01)
    line = jnp.stack([jnp.ones(words), bayes - bayes.mean(), count - count.mean()], 1)
    zero, rows = {"words": jnp.zeros(words), "shift": jnp.zeros(())}, []
    term = {"words": ("l1", lambda alpha: jnp.exp(line @ alpha)), "shift": None}
    forward = bilevel.proximal(term, tol=1e-5)
    solver = bilevel.implicit(forward, bilevel.cg(tol=1e-3))
    run = jax.jit(lambda alpha, w, state, data: forward.run(loss, alpha, w, state, data))

    def row(name, w, began):
        entry = {"penalties": name, "words used": int(jnp.sum(w["words"] != 0))}
        entry |= {"validation loss": float(loss(w, None, valid))}
        entry |= {"test loss": float(loss(w, None, test))}
        entry |= {"test error": float(jnp.mean(logits(w, test[0]) * test[1] <= 0))}
        rows.append(entry | {"seconds": round(time.process_time() - began, 1)})
        print(rows[-1], flush=True)

    def at(size):
        return jnp.array([size, 0.0, 0.0])

    began, w, state, solved = time.process_time(), zero, forward.init(zero), []
    for size in GRID[::-1][:grid]:  # from strong to weak: each start is near its solution
        w, state = run(at(size), w, state, train)
        solved.append((float(loss(w, None, valid)), size, w))
    _, best, w = min(solved, key=lambda entry: entry[0])
    row(f"one, from a grid of {grid}", w, began)
    began = time.process_time()
    rule = optax.adam(optax.cosine_decay_schedule(0.2, steps))
    flags = {"steps": steps, "history": ["value"], "progress": False, "diagnostics": False}
    data = at(best), w, train, valid
    result = bilevel.search(bilevel.Problem(loss, loss), solver, rule, *data, **flags)
    w = run(result.alpha, result.w, forward.init(zero), train)[0]
    row(f"a line of 3, learned in {steps} steps", w, began)
    return rows, [np.asarray(line @ result.alpha), np.asarray(w["words"])]


def picture(drawn, figure):
    """Draw the learned penalties of words with a weight, and of all words."""
    penalties, w = drawn[0]
    ax = figure.subplots()
    ax.hist(penalties, bins=60, alpha=0.6, label="all words")
    ax.hist(penalties[w != 0], bins=60, alpha=0.6, label="words used")
    ax.set(xlabel="log penalty", ylabel="words", yscale="log")
    ax.legend()


if __name__ == "__main__":
    main()
