"""Lasso and elastic net with a penalty for each feature.

    python sparse_regression.py

Ten measurements of diabetes patients, their squares and products are 64 features of a disease
progression. An l1 penalty exp(alpha_j) |w_j| for each feature is learned on validation rows, and a
ridge too in the elastic net. The baselines have one penalty for all features from a grid. Each
hypergradient is that of the exact solution: weights at 0 stay there, and the others move.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_diabetes
from sklearn.linear_model import lasso_path
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

import bilevel

FULL = [{}]
X64 = True


def load(seed=0, train=150, valid=150):
    """Return three parts of standardized rows [n, 64] and targets [n]."""
    x, y = load_diabetes(return_X_y=True)
    x = PolynomialFeatures(2, include_bias=False).fit_transform(StandardScaler().fit_transform(x))
    x = np.delete(x, 20, axis=1)  # the square of sex, which has two values: a copy of sex
    rows = np.random.default_rng(seed).permutation(len(y))
    parts = np.split(rows, [train, train + valid])
    x = StandardScaler().fit(x[parts[0]]).transform(x)
    y = (y - y[parts[0]].mean()) / y[parts[0]].std()
    return [(jnp.asarray(x[part]), jnp.asarray(y[part])) for part in parts]


def outer(w, alpha, batch):
    """Return half the mean squared error."""
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2)


def lower(w, alpha, batch):
    """Return the smooth part. The l1 term, and the elastic net's ridge, are in the solver."""
    return outer(w, alpha, batch)


def solvers():
    """Return a solver for each penalty; alpha has the log penalties and the log ridge."""
    l1 = bilevel.proximal("l1", lambda alpha: jnp.exp(alpha["l1"]))
    net = bilevel.proximal(
        "elastic_net", lambda alpha: jnp.exp(alpha["l1"]), lambda alpha: jnp.exp(alpha["ridge"])
    )
    return {"Lasso": bilevel.implicit(l1), "elastic net": bilevel.implicit(net)}


def main(steps=100, grid=50, rate=0.05):
    """Return a row for each penalty, and the weights of the grid's and of the learned Lasso."""
    train, valid, test = load()
    zero, rows, weights = jnp.zeros(train[0].shape[1]), [], {}

    def row(name, w, number, began):
        entry = {
            "penalty": name,
            "hyperparameters": number,
            "weights that are not 0": int(jnp.sum(w != 0)),
        }
        entry |= {"validation error": float(2 * outer(w, None, valid))}
        entry |= {"test error": float(2 * outer(w, None, test))}
        rows.append(entry | {"seconds": round(time.process_time() - began, 1)})
        weights[name] = np.asarray(w)
        print(rows[-1])

    began = time.process_time()
    penalties, path, _ = lasso_path(
        *map(np.asarray, train), alphas=grid, eps=1e-3, max_iter=100_000
    )
    values = [float(outer(w, None, valid)) for w in path.T]
    best = int(np.argmin(values))
    row(f"Lasso, one of a grid of {grid}", jnp.asarray(path.T[best]), 1, began)
    start = {"l1": jnp.full(len(zero), np.log(penalties[best])), "ridge": jnp.array(-4.0)}
    for name, solver in solvers().items():
        alpha = start if name == "elastic net" else {"l1": start["l1"]}
        began = time.process_time()
        problem = bilevel.Problem(lower, outer)
        rule = optax.adam(optax.cosine_decay_schedule(rate, steps))
        flags = {"steps": steps, "progress": False}
        result = bilevel.search(problem, solver, rule, alpha, zero, train, valid, **flags)
        final = jax.jit(bilevel.hypergradient(problem, solver))
        hyper = final(result.alpha, result.w, train, valid)
        print(bilevel.explain(hyper.info))
        number = sum(leaf.size for leaf in jax.tree.leaves(alpha))
        row(f"{name}, each learned", hyper.w, number, began)
    return rows, weights


def picture(drawn, figure):
    """Draw the weights of the Lasso from the grid and of the learned penalties."""
    (weights,) = drawn
    ax = figure.subplots()
    order = np.argsort(-np.abs(next(iter(weights.values()))))
    for (name, w), marker in zip(weights.items(), "o^s", strict=True):
        ax.plot(np.abs(w[order]), marker, label=name, markersize=4)
    ax.set(xlabel="feature, sorted by the grid's weight", ylabel="absolute weight")
    ax.legend()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", X64)
    main()
