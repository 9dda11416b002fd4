"""Draw the figures of docs/concepts.md and of the README. The library computes all curves.

    python docs/pictures.py [name ...]

writes docs/images/*.png, in a minute. The figures are committed. Run this script to change them.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import bilevel
import ntk
from bilevel.plots.appearance import COLOURS

IMAGES = Path(__file__).parent / "images"
BLUE, ORANGE, GREEN, PINK, BLACK, RED, SKY = COLOURS

# One weight and one hyperparameter: exp(alpha) is a penalty that pulls w towards 0.
TOY = bilevel.Problem(
    lower=lambda w, alpha, _: 0.5 * (w - 2.0) ** 2 + 0.5 * jnp.exp(alpha) * w**2,
    outer=lambda w, alpha, _: (w - 0.9) ** 2 + 0.03 * (alpha + 2.0) ** 2,
)
TOY_ALPHAS = np.array([-1.5, 0.0, 1.5])


@jax.jit
@jax.vmap
def toy(alpha):
    """Return outer loss, solution and hypergradient of the toy problem at every ``alpha``."""
    fn = bilevel.hypergradient(TOY, bilevel.implicit(), diagnostics=False)
    return fn(alpha, jnp.ones_like(alpha), None, None)


def two_levels():
    """Draw the two levels: the weights trained for each alpha, and their outer loss."""
    _, (below, above) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    w, alphas = np.linspace(-0.2, 2.4, 200), np.linspace(-3, 3, 61)
    below.set(xlabel="weight w", ylabel="lower loss", title="below: training, for three α")
    above.set(xlabel="hyperparameter α", title="above: validation of the trained weight")
    above.set_ylabel("outer loss at w*(α)")
    above.plot(alphas, toy(alphas).value, color=BLACK)
    trained = toy(TOY_ALPHAS)
    for i, (alpha, colour, marker) in enumerate(
        zip(TOY_ALPHAS, (BLUE, ORANGE, GREEN), "os^", strict=True)
    ):
        below.plot(w, TOY.lower(w, alpha, None), color=colour, label=f"α = {alpha:g}")
        at = {"color": colour, "marker": marker, "markersize": 8}
        below.plot(trained.w[i], TOY.lower(trained.w[i], alpha, None), **at)
        above.plot(alpha, trained.value[i], **at)
    below.set_ylim(0, 4)
    below.legend()


def hypergradient():
    """Draw the slope of the outer loss along the trained weights, not at a fixed weight."""
    _, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    alphas, w = np.linspace(-3, 3, 121), np.linspace(0, 2.1, 101)
    ax.grid(visible=False)
    heights = TOY.outer(w[:, None], alphas, None)
    ax.contour(alphas, w, heights, levels=np.geomspace(0.02, 3, 12), colors="0.8", linewidths=1)
    ax.plot(alphas, toy(alphas).w, color=BLUE, label="trained weights w*(α)")
    alpha = -1.0
    hyper = jax.tree.map(lambda x: x[0], toy(jnp.array([alpha])))
    response = jax.grad(lambda a: 2 / (1 + jnp.exp(a)))(alpha)
    fixed = jax.grad(TOY.outer, 1)(hyper.w, alpha, None)
    arrow = {"arrowstyle": "-|>", "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
    for slope, d, colour, name in (
        (fixed, 0.0, ORANGE, "w held fixed: slope"),
        (hyper.grad, response, RED, "w responds: hypergradient"),
    ):
        tip = (alpha + 1.2, hyper.w + 1.2 * d)
        ax.annotate("", tip, (alpha, hyper.w), arrowprops=arrow | {"color": colour})
        ax.plot([], [], "-", color=colour, label=f"{name} {slope:+.2f}")
    ax.plot(alpha, hyper.w, "o", color=BLACK)
    ax.set(xlabel="hyperparameter α", ylabel="weight w", title="grey: the outer loss")
    ax.legend(loc="lower left")


def digits(rows=400):
    """Load odd against even digits: (train, valid) of standardized pixels and labels -1 or 1."""
    data = bilevel.data.load("digits")
    x = jnp.asarray(data.x_train.reshape(-1, 64), float) - 0.3
    y = 1.0 - 2.0 * (jnp.asarray(data.y_train) % 2)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


def penalised_least_squares():
    """Return least squares with a penalty for each of 64 pixels: all solvers accept it."""

    def half_mean_square(w, batch):
        return 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2)

    return bilevel.Problem(
        lower=lambda w, alpha, batch: (
            half_mean_square(w, batch) + 0.5 * jnp.sum(jnp.exp(alpha) * w**2)
        ),
        outer=lambda w, alpha, batch: half_mean_square(w, batch),
    )


def solvers():
    """Draw the error of three hypergradients against the number of gradient steps."""
    problem, (train, valid) = penalised_least_squares(), digits()
    alpha, w0 = jnp.full(64, -4.0), jnp.zeros(64)
    # In the variables v = exp(alpha / 2) w, the problem is ridge regression on scaled pixels.
    scaled = bilevel.Problem(
        problem.lower,
        lambda v, alpha, batch: problem.outer(v * jnp.exp(-alpha / 2), alpha, batch),
    )
    ridge = bilevel.ridge(lambda a, x: x * jnp.exp(-a / 2), lambda a: float(len(train[0])))
    exact = bilevel.hypergradient(scaled, ridge)(alpha, w0, train, valid).grad
    default = bilevel.hypergradient(problem, bilevel.implicit())(alpha, w0, train, valid).grad
    size = jnp.linalg.norm(exact)
    counts = np.unique(np.geomspace(1, 2000, 9).astype(int))
    rate = 0.15
    ways = {
        "unrolled(optimizer, T)": lambda T: bilevel.unrolled(rate, T),
        "implicit(T gradient steps, cg())": lambda T: bilevel.implicit(
            bilevel.unrolled(rate, T), bilevel.cg()
        ),
        "implicit(newton(), neumann(T))": lambda T: bilevel.implicit(
            bilevel.newton(), bilevel.neumann(T, rate)
        ),
    }
    _, ax = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for (name, way), colour, marker in zip(ways.items(), (BLUE, ORANGE, GREEN), "os^", strict=True):
        errors = []
        for T in map(int, counts):
            hyper = jax.jit(bilevel.hypergradient(problem, way(T), diagnostics=False))
            errors.append(jnp.linalg.norm(hyper(alpha, w0, train, valid).grad - exact) / size)
        ax.loglog(counts, np.maximum(errors, 1e-16), color=colour, marker=marker, label=name)
    error = jnp.linalg.norm(default - exact) / size
    ax.axhline(error, color=BLACK, linestyle="--", label="implicit(): Newton and CG until solved")
    ax.set(xlabel="gradient steps, or terms of the series: T")
    ax.set_ylabel("error, relative to ridge(...)")
    ax.legend(loc="center left")


def estimates():
    """Draw the hypergradient's own error estimate against its true error."""
    train, valid = digits()

    def error(w, batch):
        return jnp.mean(jnp.logaddexp(0.0, -batch[1] * (batch[0] @ w)))

    problem = bilevel.Problem(
        lower=lambda w, alpha, batch: error(w, batch) + jnp.sum(jnp.exp(alpha) * w**2),
        outer=lambda w, alpha, batch: error(w, batch),
    )
    w0, newton = jnp.zeros(64), bilevel.newton()
    steps = (10, 100, 300, 1000, 3000)
    ways = {
        "unrolled(T)": [bilevel.unrolled(0.3, T) for T in steps],
        "implicit, T gradient steps": [bilevel.implicit(bilevel.unrolled(0.3, T)) for T in steps],
        "implicit, neumann(T)": [bilevel.implicit(newton, bilevel.neumann(T, 0.3)) for T in steps],
        "implicit, nystrom(k)": [
            bilevel.implicit(newton, bilevel.nystrom(k, 0.01)) for k in (8, 16, 32, 48, 64)
        ],
    }
    _, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    everything = []
    true = jax.jit(jax.vmap(bilevel.hypergradient(problem, bilevel.implicit()), (0, *[None] * 3)))
    alphas = -5.0 + jax.random.normal(jax.random.key(0), (4, 64))
    exact = true(alphas, w0, train, valid).grad
    for (name, many), colour, marker in zip(
        ways.items(), (BLUE, ORANGE, GREEN, PINK), "os^D", strict=True
    ):
        points = []
        for solver in many:
            fn = jax.jit(jax.vmap(bilevel.hypergradient(problem, solver), (0, *[None] * 3)))
            got = fn(alphas, w0, train, valid)
            errors = jnp.linalg.norm(got.grad - exact, axis=1)
            points += zip(errors, got.info.error_estimate, strict=True)
        points = np.array(points)
        points = points[points[:, 0] > 1e-13]
        everything.append(points)
        ax.loglog(*points.T, marker, color=colour, label=name, alpha=0.8)
    low, high = np.concatenate(everything).min() / 2, np.concatenate(everything).max() * 2
    span = np.array([low, high])
    ax.plot(span, span, color=BLACK, linewidth=1)
    ax.fill_between(span, span / 3, span * 10, color="0.93", zorder=0)
    ax.set(xlabel="true error of the hypergradient", ylabel="info.error_estimate")
    ax.set_title("grey: within [1/3, 10] of the truth")
    ax.legend(loc="upper left")


def short_trainings():
    """Draw the errors by truncation and by random batches: estimates and true values."""
    problem, (train, valid) = penalised_least_squares(), digits()
    _, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    biases = jax.jit(bilevel.truncation(problem, 0.15, 100))
    for log_penalty, colour, mark in zip(
        (-5.0, -3.0, -1.0), (BLUE, ORANGE, GREEN), "os^", strict=True
    ):
        bias = biases(jnp.full(64, log_penalty), jnp.zeros(64), train, valid).bias[:-1]
        label = f"penalties exp({log_penalty:g})"
        left.semilogy(bias, color=colour, marker=mark, markevery=15, label=label)
    left.set(xlabel="steps differentiated, K of 100", ylabel="relative error of the hypergradient")
    left.set_title("bias of truncation")
    left.legend()
    fn = bilevel.hypergradient(problem, bilevel.unrolled(0.15, 20), diagnostics=False)
    alpha, w0 = jnp.full(64, -3.0), jnp.zeros(64)

    def drawn(key, rows):
        keys = jax.random.split(key)
        return [
            bilevel.minibatches(rows)(k, part) for k, part in zip(keys, (train, valid), strict=True)
        ]

    sizes, keys = (32, 64, 128, 256), jax.random.split(jax.random.key(0), 200)
    truth = []
    for rows in sizes:
        grads = jax.jit(jax.vmap(lambda k: fn(alpha, w0, *drawn(k, rows)).grad))(keys)  # noqa: B023
        truth.append(jnp.linalg.norm(grads.std(0)) / jnp.linalg.norm(grads.mean(0)))
    right.loglog(sizes, truth, color=BLACK, label="200 fresh draws")
    for parts, colour, mark in ((8, BLUE, "o"), (32, ORANGE, "s")):
        spread = bilevel.standard_error(fn, parts)
        spread = jax.jit(jax.vmap(functools.partial(spread, alpha, w0)))
        for rows in sizes:
            measured = spread(*jax.vmap(lambda k: drawn(k, rows))(keys[:12]))  # noqa: B023
            label = f"from {parts} microbatches" if rows == sizes[0] else None
            look = {"color": colour, "alpha": 0.6, "markersize": 4, "label": label}
            right.loglog([rows] * 12, measured.relative, mark, **look)
    right.set_xticks(sizes, sizes)
    right.minorticks_off()
    right.set_yticks((0.3, 0.5, 1.0), ("0.3", "0.5", "1"))
    right.set(xlabel="rows of either batch", ylabel="relative standard error", title="chance")
    right.legend()


def geometry():
    """Draw paths of three geometries to a minimum inside the simplex, and to one at an edge."""
    optimizers = {
        "sgd, exponentiate()": optax.chain(optax.sgd(0.15), bilevel.exponentiate()),
        'tangent(), adam, project("simplex")': optax.chain(
            bilevel.tangent(), optax.adam(0.03, b1=0.5), bilevel.project("simplex")
        ),
        "softmax(adam)": bilevel.softmax(optax.adam(0.1, b1=0.5)),
    }
    _, axes = plt.subplots(1, 2, figsize=(8, 3.9), layout="constrained")
    corners = np.array([[0, 0], [1, 0], [0.5, np.sqrt(3) / 2]])
    targets = {"minimum inside": [0.15, 0.25, 0.6], "minimum on an edge": [-0.2, 0.35, 0.85]}
    for ax, (title, target) in zip(axes, targets.items(), strict=True):
        target = jnp.array(target)
        problem = bilevel.Problem(  # the mixture itself is the weights
            lower=lambda w, alpha, _: 0.5 * jnp.sum((w - alpha) ** 2),
            outer=lambda w, alpha, target: jnp.sum(jnp.array([1.0, 4.0, 1.5]) * (w - target) ** 2),
        )
        ax.fill(*corners.T, facecolor="0.97", edgecolor="0.6")
        start = jnp.array([0.6, 0.3, 0.1])
        for (name, optimizer), colour, marker in zip(
            optimizers.items(), (BLUE, ORANGE, GREEN), "os^", strict=True
        ):
            result = bilevel.search(
                problem,
                bilevel.implicit(),
                optimizer,
                start,
                jnp.zeros(3),
                None,
                target,
                steps=60,
                progress=False,
            )
            path = np.vstack([start, result.history["alpha"]]) @ corners
            ax.plot(*path.T, color=colour, marker=marker, markersize=3, label=name, linewidth=1)
        for corner, name, side in zip(corners, ("relu", "tanh", "swish"), (-1, -1, 1), strict=True):
            ax.annotate(
                name, corner, (0, 10 * side), textcoords="offset points", ha="center", va="center"
            )
        ax.plot(*(start @ corners), "o", color=BLACK, markersize=6)
        ax.text(0.5, -0.15, title, ha="center")
        ax.set_ylim(-0.2, 0.98)
        ax.set_aspect("equal")
        ax.axis("off")
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def certificate():
    """Draw the smallest eigenvalue of the kernel over all mixtures of three activations."""
    names = ("relu", "tanh", "swish")
    data = bilevel.data.load("digits")
    x = bilevel.spaces.unit_inputs(jnp.asarray(data.x_train[:60]))
    blocks, error = ntk.mixture_blocks(x, [getattr(ntk, n) for n in names], error=True)
    bracket = ntk.certify_simplex(blocks, rtol=1e-3, entry_error=error)
    grid = np.array([(i, j, 24 - i - j) for i in range(25) for j in range(25 - i)]) / 24
    values = jax.lax.map(
        lambda a: ntk.eigenvalues(ntk.mixture_kernel(a, blocks))[0], jnp.asarray(grid)
    )
    ax = bilevel.plots.simplex_min_eigenvalue(grid, values, names, bracket.argmin)
    ax.set_title(f"over all mixtures, proved: at least {bracket.lower:.3g}")


def lasso_path():
    """Draw a Lasso's weights and hypergradient by its penalty, with differences of the loss."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x, y = jnp.asarray(x / x.std(0)), jnp.asarray((y - y.mean()) / y.std())
    train, valid = (x[:200], y[:200]), (x[200:], y[200:])

    def loss(w, alpha, batch):
        return 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2)

    solver = bilevel.implicit(bilevel.proximal("l1", jnp.exp))
    fn = bilevel.hypergradient(bilevel.Problem(loss, loss), solver, diagnostics=False)
    alphas = np.linspace(-6, -0.5, 221)
    run = jax.jit(lambda alphas: jax.lax.map(lambda a: fn(a, jnp.zeros(10), train, valid), alphas))
    path, step = run(alphas), 1e-4
    slopes = (run(alphas + step).value - run(alphas - step).value) / (2 * step)
    _, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    left.plot(alphas, path.w, "-", color=BLUE)
    right.plot(alphas, path.grad, color=BLUE, label="hypergradient")
    right.plot(alphas[::5], slopes[::5], ".", color=ORANGE, label="central differences")
    signs = np.sign(np.asarray(path.w))
    for ax in (left, right):
        ax.set_xlabel("log penalty α")
        for i in np.flatnonzero(np.any(signs[1:] != signs[:-1], axis=1)):
            ax.axvline((alphas[i] + alphas[i + 1]) / 2, color="0.8", linewidth=1, zorder=0)
    left.set_ylabel("weights w*(α)")
    right.set_ylabel("slope of the validation loss")
    right.legend()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    IMAGES.mkdir(exist_ok=True)
    pictures = (two_levels, hypergradient, solvers, estimates, short_trainings, geometry)
    pictures = (*pictures, certificate, lasso_path)
    for draw in [p for p in pictures if p.__name__ in sys.argv[1:]] or pictures:
        with bilevel.plots.style():
            draw()
        plt.savefig(IMAGES / f"{draw.__name__}.png", dpi=130, metadata={"Software": None})
        plt.close("all")
        print(draw.__name__, flush=True)
