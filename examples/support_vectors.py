"""A support vector machine with its penalty C and its kernel widths.

    python support_vectors.py

The lower problem is the dual of the machine, with 0 <= w_i <= C for each training row. The kernel
has one width for all features, or one for each. C moves the upper bound, and the widths move the
kernel in both levels. The bias is regularized: the kernel is exp(-gamma |x - x'|^2) + 1. Rows are
tumours with 30 measurements (scikit-learn); the outer loss is the logistic loss of the decisions on
validation rows. The baseline is scikit-learn's machine on a grid, judged by the same rows.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import bilevel

FULL = [{}]
X64 = True


def load(seed=0, train=150, valid=150):
    """Return three parts of standardized rows [n, 30] and labels -1 or 1."""
    x, y = load_breast_cancer(return_X_y=True)
    rows = np.random.default_rng(seed).permutation(len(y))
    parts = np.split(rows, [train, train + valid])
    x = StandardScaler().fit(x[parts[0]]).transform(x)
    return [(jnp.asarray(x[part]), 2.0 * jnp.asarray(y[part]) - 1) for part in parts]


def kernel(alpha, x1, x2):
    """Return the kernel [n1, n2]; ``alpha["width"]`` is a number, or one for each feature."""
    scale = jnp.exp(0.5 * alpha["width"])
    squared = jnp.sum(((x1[:, None] - x2[None]) * scale) ** 2, -1)
    return jnp.exp(-squared) + 1


def lower(w, alpha, batch):
    """Return the dual's objective; a small ridge makes it strongly convex."""
    x, y = batch
    return 0.5 * (y * w) @ kernel(alpha, x, x) @ (y * w) - jnp.sum(w) + 5e-4 * jnp.sum(w**2)


def decisions(w, alpha, train, x):
    """Return the decision values of the rows ``x``."""
    return kernel(alpha, x, train[0]) @ (train[1] * w)


def outer(w, alpha, batch):
    """Return the logistic loss of the decisions. It depends on alpha through the kernel too."""
    train, (x, y) = batch
    return jnp.mean(jax.nn.softplus(-y * decisions(w, alpha, train, x)))


def main(steps=60, rate=0.3, grid=9):
    """Return a row for each machine, and the learned log widths of the features."""
    train, valid, test = load()
    rows = []

    def row(name, number, vectors, values, began):
        losses = [jnp.mean(jax.nn.softplus(-part[1] * jnp.asarray(d))) for part, d in values]
        wrong = [float(jnp.mean(part[1] * jnp.asarray(d) <= 0)) for part, d in values]
        entry = {"machine": name, "hyperparameters": number, "support vectors": vectors}
        entry |= {"validation loss": float(losses[0]), "test loss": float(losses[1])}
        entry |= {"test error": wrong[1], "seconds": round(time.process_time() - began, 1)}
        rows.append(entry)
        print(rows[-1])

    began, machines = time.process_time(), []
    for c in np.logspace(-1, 3, grid):
        for gamma in np.logspace(-4, 0, grid):
            machine = SVC(C=c, gamma=gamma).fit(*map(np.asarray, train))
            values = [
                (part, machine.decision_function(np.asarray(part[0]))) for part in (valid, test)
            ]
            loss = np.mean(np.logaddexp(0, -np.asarray(valid[1]) * values[0][1]))
            machines.append((loss, len(machine.support_), values))
    _, vectors, values = min(machines, key=lambda m: m[0])
    row(f"scikit-learn, grid of {len(machines)}", 2, vectors, values, began)
    solver = bilevel.implicit(bilevel.projected("box", 0.0, lambda a: jnp.exp(a["C"])))
    problem, widths = bilevel.Problem(lower, outer), None
    for name, shape in (("one width, learned", ()), ("a width for each feature, learned", (30,))):
        began = time.process_time()
        alpha = {"C": jnp.array(0.0), "width": jnp.full(shape, np.log(1 / 30))}
        data = alpha, jnp.zeros(len(train[1])), train, (train, valid)
        flags = {"steps": steps, "progress": False}
        rule = optax.adam(optax.cosine_decay_schedule(rate, steps))
        result = bilevel.search(problem, solver, rule, *data, **flags)
        hyper = jax.jit(bilevel.hypergradient(problem, solver))(result.alpha, result.w, *data[2:])
        print(bilevel.explain(hyper.info))
        values = [
            (part, decisions(hyper.w, result.alpha, train, part[0])) for part in (valid, test)
        ]
        number = sum(leaf.size for leaf in jax.tree.leaves(alpha))
        row(name, number, int(jnp.sum(hyper.w > 0)), values, began)
        widths = np.asarray(result.alpha["width"])
    return rows, widths


def picture(drawn, figure):
    """Draw the learned widths of the features."""
    (widths,) = drawn
    names = load_breast_cancer().feature_names
    ax = figure.subplots()
    order = np.argsort(widths)
    ax.barh([names[i] for i in order], widths[order] - np.log(1 / 30))
    ax.set_xlabel("log gamma of the feature, minus its start")
    ax.tick_params(axis="y", labelsize=6)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", X64)
    main()
