"""Which infinitely wide network?  Its activations, depth and variances, by the training rows alone.

    python kernel_learning.py

An infinitely wide network with one or two hidden layers is a kernel. alpha weighs its activations
and the skip around the second layer, and holds the variances and the ridge penalty. The lower
problem is ridge regression with that kernel. The outer loss, on the same rows, is the leave-one-out
error, or minus the log marginal likelihood at the best scale (Rasmussen & Williams 2006, Eqs. 5.12
and 5.8). The kernel's smallest eigenvalue is certified on the way. The baseline is the best of a
grid by the same loss.
"""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
import ntk
from bilevel.spaces import kernel_function_space
from ntk import networks as nets

X64 = True  # for the small eigenvalues
ACTIVATIONS = (ntk.relu, ntk.erf, ntk.gelu)
FULL = [{"loss": "leave-one-out"}, {"loss": "marginal likelihood"}]


def network(activations):
    """Return a network with one branch per activation and a second layer that can be skipped."""
    parts = [nets.serial(nets.dense("weights", "biases"), nets.act(s)) for s in activations]
    layer = nets.add(parts, "activations")
    return nets.serial(layer, nets.add([nets.serial(), layer], "second"), nets.dense())


def criterion(loss, W, y):
    """Return the outer loss, given the inverse W of the kernel with its ridge."""
    w = W @ y
    if loss == "leave-one-out":
        return jnp.mean((w / jnp.diagonal(W)[:, None]) ** 2)
    scale = jnp.mean(w * y)  # scale of the kernel that maximizes the likelihood
    return 0.5 * (jnp.log(2 * jnp.pi * jnp.e * scale) - jnp.linalg.slogdet(W)[1] / len(W))


def load(data, train, test):
    """Load rows of norm sqrt(d) with targets, and test rows with labels."""
    dataset = bilevel.data.load(data, train_size=train, test_size=test)
    x, xt = (
        a.reshape(len(a), -1) - dataset.x_train.mean() for a in (dataset.x_train, dataset.x_test)
    )
    x, xt = (jnp.asarray(a / np.sqrt(np.mean(a**2, axis=1, keepdims=True))) for a in (x, xt))
    return x, jnp.asarray(np.eye(10)[dataset.y_train] - 0.1), xt, dataset.y_test


def grid(activations):
    """Return names and parameters of networks with one activation and one depth."""
    kinds = zip([s.name for s in activations], jnp.eye(len(activations)), strict=True)
    for (name, kind), depth, w, b in itertools.product(kinds, (1, 2), (1.0, 2.0), (0.01, 0.1)):
        values = {"activations": kind, "second": jnp.eye(2)[depth - 1], "weights": w, "biases": b}
        yield f"{name}, {depth} layers", values


def named(alpha):
    """Return the network's constants by name, computed from unconstrained parameters."""
    return {k: jax.nn.softmax(v) if v.ndim else jnp.exp(v) for k, v in alpha.items()}


def main(loss, data="mnist", train=200, test=2000, steps=50, activations=ACTIVATIONS):
    """Run the search and the grid. Return a row for each and the history of the search."""
    net, (x, y, xt, labels) = network(activations), load(data, train, test)
    matrix = jax.jit(lambda values, rows: net.kernel(rows, x, alpha=values).ntk)
    ridge, penalties = jnp.eye(train), jnp.geomspace(1e-4, 10, 16)

    def row(network, value, values, penalty, began):
        w = jnp.linalg.solve(matrix(values, x) + penalty * ridge, y)
        wrong = float(jnp.mean(jnp.argmax(matrix(values, xt) @ w, 1) != labels))
        entry = {"outer loss": loss, "network": network, "value": float(value), "test error": wrong}
        return entry | {"seconds": round(time.process_time() - began, 1)}

    began = time.process_time()
    start = jax.tree.map(jnp.log, net.start() | {"weights": 1.5, "biases": 0.05})
    space = kernel_function_space(lambda a, x1, x2: net.kernel(x1, x2, alpha=named(a)), start)
    # Ridge regression on the columns of the identity: the solution W is the inverse.
    problem = bilevel.Problem(space.problem.lower, lambda W, alpha, y: criterion(loss, W, y))
    rule = optax.adam(optax.cosine_decay_schedule(0.2, steps))
    data = space.start(), jnp.zeros_like(ridge), (space.inputs(x), ridge), y
    course = bilevel.search(problem, space.solver, rule, *data, steps=steps).history
    last = jax.tree.map(lambda a: a[-1], course["alpha"])
    values = named(last["kernel"])
    name = " + ".join(map("{:.2f} {}".format, values["activations"], [s.name for s in activations]))
    name += f"; weight of the second layer {values['second'][1]:.2f}"
    table = [row(name, course["value"][-1], values, jnp.exp(last["log_penalty"]), began)]

    @jax.jit
    def best(K):
        losses = jax.lax.map(lambda p: criterion(loss, jnp.linalg.inv(K + p * ridge), y), penalties)
        return losses.min(), penalties[losses.argmin()]

    began = time.process_time()
    judged = [(*best(matrix(v, x)), name, v) for name, v in grid(activations)]
    value, penalty, name, values = min(judged, key=lambda one: float(one[0]))
    table.append(row(f"{name}, of a grid of {16 * len(judged)}", value, values, penalty, began))
    at = np.linspace(0, steps - 1, min(6, steps)).astype(int)
    bounds = space.certificates(jax.tree.map(lambda a: a[at], course["alpha"]), x)
    return table, (loss, np.asarray(course["value"]), float(value), at, bounds)


def picture(drawn, figure):
    """Draw the outer loss of each run, the grid's best loss, and the certified eigenvalues."""
    axes = figure.subplots(len(drawn), 2, squeeze=False)
    for (left, right), (loss, losses, best, at, bounds) in zip(axes, drawn, strict=True):
        left.plot(losses)
        left.axhline(best, color="gray", ls=":")
        left.set(xlabel="step", title=f"{loss}; dotted: the grid's best")
        right.semilogy(at, bounds, "o-")
        right.set(xlabel="step", title="smallest eigenvalue, certified")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", X64)
    print(*main(**FULL[0])[0], sep="\n")
