"""A learning-rate schedule and a momentum, learned through every step of training.

    python schedules.py

A small network learns digits in a thousand steps of SGD on minibatches of 50. alpha holds the log
learning rate at ten knots and the momentum's logit. The outer loss is the validation loss after the
last step, always from the same initialization. It is differentiated through all steps, in reverse
and in forward mode. The baseline is the best of an equally large grid of rates, momenta and shapes.
"""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel

WIDTH, KNOTS = 64, 10
FULL = [{"steps": 1000}]


def network(w, x):
    """Apply one hidden layer of tanh to rows [n, 64]; return logits [n, 10]."""
    return jnp.tanh(x @ w["in"] + w["bias"]) @ w["out"]


def loss(w, alpha, batch):
    """Return the cross entropy."""
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(network(w, x), y).mean()


def initial(key):
    """Draw weights of scale 1 / sqrt(fan)."""
    keys = jax.random.split(key)
    out = jax.random.normal(keys[1], (WIDTH, 10)) / WIDTH**0.5
    return {"in": jax.random.normal(keys[0], (64, WIDTH)) / 8, "bias": jnp.zeros(WIDTH), "out": out}


def optimizer_of(steps):
    """Return a function from ``alpha`` to SGD, with rates interpolated between the knots."""

    def optimizer(alpha):
        places = jnp.linspace(0, steps - 1, KNOTS)
        schedule = lambda step: jnp.exp(jnp.interp(step, places, alpha["rates"]))  # noqa: E731
        return optax.sgd(schedule, momentum=jax.nn.sigmoid(alpha["momentum"]))

    return optimizer


def start(rate=0.05, momentum=0.5, shape=1.0):
    """Return an alpha with a constant rate, or with a rate of this shape over the knots."""
    rates = jnp.log(rate * shape * jnp.ones(KNOTS))
    return {"rates": rates, "momentum": jax.scipy.special.logit(jnp.asarray(momentum))}


def main(steps=1000, outer=60, rate=0.1):
    """Learn a schedule and run the grid. Return rows of validation results, and schedules."""
    sizes = {"train": 900, "valid": 400, "test": 497}
    parts = bilevel.data.draw_splits("digits", [jax.random.key(0)], **sizes)[0]
    train, valid, test = ((jnp.asarray(x.reshape(-1, 64) - 0.3), y) for x, y in parts)
    problem, batches = bilevel.Problem(loss, loss), bilevel.minibatches(50)
    solver = bilevel.restarted(bilevel.unrolled(optimizer_of(steps), steps, batches=batches))
    w0, key = initial(jax.random.key(1)), jax.random.key(2)

    def trained(alpha, key):
        w = solver.run(loss, alpha, w0, solver.start(alpha, w0), (key, train))[0]
        wrong = [jnp.mean(network(w, x).argmax(-1) != y) for x, y in (valid, test)]
        return loss(w, None, valid), *wrong

    judge = jax.jit(jax.vmap(trained, (None, 0)))
    judged = jax.random.split(jax.random.key(3), 8)

    def row(name, alpha, gradients):
        value, wrong, test_wrong = (float(jnp.mean(v)) for v in judge(alpha, judged))
        momentum = float(jax.nn.sigmoid(alpha["momentum"]))
        entry = {"schedule": name, "validation loss": value, "validation error": wrong}
        return entry | {"test error": test_wrong, "momentum": momentum, "trainings": gradients}

    alpha, times, grads = start(), {}, {}
    for mode in ("reverse", "forward"):
        fn = jax.jit(bilevel.hypergradient(problem, solver, mode=mode, diagnostics=False))
        fn(alpha, w0, (key, train), valid).grad["rates"].block_until_ready()
        begin = time.process_time()
        grads[mode] = fn(alpha, w0, (key, train), valid).grad["rates"].block_until_ready()
        times[mode] = time.process_time() - begin
    apart = jnp.linalg.norm(grads["reverse"] - grads["forward"]) / jnp.linalg.norm(grads["reverse"])
    of = problem, solver, optax.adam(rate), alpha, w0, train, valid
    learned = bilevel.search(*of, steps=outer, key=key, history=[]).alpha
    rows = [row("constant 0.05", alpha, 1), row("learned", learned, 4 * outer)]
    cosine = 0.5 * (1 + jnp.cos(jnp.linspace(0, np.pi, KNOTS))) + 1e-3
    shapes = {"constant": 1.0, "cosine": cosine}
    momenta, rates = (0.01, 0.5, 0.8, 0.9, 0.95), np.geomspace(0.01, 2, 2 * outer // 5).tolist()
    ways = itertools.product(shapes, rates, momenta)
    grid = {f"{name}, {r:.2g}, {m}": start(r, m, shapes[name]) for name, r, m in ways}
    value = jax.jit(lambda alpha: jnp.nan_to_num(trained(alpha, key)[0], nan=jnp.inf))
    best = min(grid.items(), key=lambda item: float(value(item[1])))
    rows.append(row(f"best of the grid: {best[0]}", best[1], len(grid)))
    print(*rows, sep="\n")
    note = f"forward mode: {times['forward'] / times['reverse']:.2g} times the reverse mode's time"
    print(f"{note}; their hypergradients differ by {float(apart):.1e} of their norm")
    drawn = {"constant": alpha, "learned": learned, "best of the grid": best[1]}
    return rows, (steps, {k: np.exp(np.asarray(a["rates"])) for k, a in drawn.items()})


def picture(drawn, figure):
    """Draw the rates over the steps."""
    ((steps, rates),) = drawn
    ax = figure.subplots()
    for (name, values), mark in zip(rates.items(), "s^o", strict=True):
        ax.semilogy(np.linspace(0, steps, KNOTS), values, marker=mark, label=name)
    ax.set(xlabel="step", ylabel="learning rate")
    ax.legend()


if __name__ == "__main__":
    main()
