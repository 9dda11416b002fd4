"""The kernel of an infinite network, learned: activations, depth, variances, and the penalty.

    python kernel_learning.py

Ridge regression of digits with the exact tangent kernel of three hidden layers. alpha has a mixture
of ReLU, erf and identity for each (a layer that is all identity is none: that is the depth), the
weights' variances and the penalty. It descends the leave-one-out error (Allen 1974), or the
marginal likelihood, on the training rows alone; the smallest eigenvalue is certified along the
path. Beside it: one, two and three layers of ReLU or erf, with the penalty that a grid finds best
by the leave-one-out error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
import ntk

CANDIDATES, LAYERS = (ntk.relu, ntk.erf, ntk.identity), 3
X64 = True  # small eigenvalues
FULL = [{}]


def kernel(alpha, x1, x2=None):
    """The tangent kernel [n1, n2] at the mixtures and variances of alpha."""
    mixtures = [dict(zip(CANDIDATES, row, strict=True)) for row in alpha["mixtures"]]
    variances = jnp.exp(alpha["log_variances"])
    return ntk.network_kernel(x1, x2, activations=mixtures, variances=variances).ntk


def with_penalty(alpha, x):
    """[n, n], positive definite."""
    return kernel(alpha, x) + jnp.exp(alpha["log_penalty"]) * jnp.eye(len(x))


def solve(_, alpha, w, state, batch):
    """Ridge regression in its dual form: [n, classes]."""
    x, y = batch
    return jax.scipy.linalg.solve(with_penalty(alpha, x), y, assume_a="pos"), state


def lower(w, alpha, batch):
    """What it minimises."""
    x, y = batch
    return jnp.sum(w * (0.5 * with_penalty(alpha, x) @ w - y))


def leave_one_out(w, alpha, batch):
    """The mean squared error at each row by a regression on all others."""
    inverse = jnp.linalg.inv(with_penalty(alpha, batch[0]))
    return jnp.mean((w / jnp.diag(inverse)[:, None]) ** 2)


def evidence(w, alpha, batch):
    """Minus the log marginal likelihood, for each row and class, the scale of y at its best."""
    x, y = batch
    spread = jnp.linalg.slogdet(with_penalty(alpha, x))[1] / len(x)
    return 0.5 * (spread + jnp.log(jnp.sum(y * w) / y.size))


def start(mixtures=None, log_penalty=-2.0):
    """Uniform mixtures; variances of 1 first, and 2 then."""
    uniform = jnp.full((LAYERS, 3), 1 / 3)
    variances = jnp.log(jnp.array([1.0] + [2.0] * LAYERS))
    mixtures = uniform if mixtures is None else jnp.asarray(mixtures)
    return {"mixtures": mixtures, "log_variances": variances, "log_penalty": jnp.array(log_penalty)}


def main(rows=300, steps=80, every=20):
    """A row for each kernel: leave-one-out error, test error, and the certified eigenvalue."""
    sizes = {"train": rows, "valid": 1, "test": 1000}
    (x, y), _, (xt, yt) = bilevel.data.samples("digits", [jax.random.key(0)], **sizes)[0]
    x, xt = (jnp.asarray(a.reshape(len(a), -1) - x.reshape(len(x), -1).mean(0)) for a in (x, xt))
    x, xt = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (x, xt))
    train = x, jnp.asarray(np.eye(10)[y] - 0.1)

    @jax.jit
    def judged(alpha):
        w = solve(None, alpha, None, None, train)[0]
        wrong = (kernel(alpha, xt, x) @ w).argmax(-1) != yt
        return leave_one_out(w, alpha, train), jnp.mean(wrong)

    def row(name, alpha):
        loo, wrong = map(float, judged(alpha))
        bound = ntk.certified_min_eigenvalue(lambda a, b=None: kernel(alpha, a, b), x=x)
        found = {"kernel": name, "leave-one-out error": loo, "test error": wrong}
        return found | {"smallest eigenvalue, at least": bound}

    found, drawn = [], {}
    for i, name in enumerate(("ReLU", "erf")):
        for depth in range(1, LAYERS + 1):
            corners = np.eye(3)[[i] * depth + [2] * (LAYERS - depth)]
            grid = [start(corners, p) for p in np.linspace(-9, 2, 12)]
            best = min(grid, key=lambda alpha: float(judged(alpha)[0]))
            found.append(row(f"{depth} of {name}", best))
    for name, outer in {"leave-one-out": leave_one_out, "evidence": evidence}.items():
        path = bilevel.search(
            bilevel.Problem(lower, outer),
            bilevel.LowerSolver(init=lambda w: (), run=solve, closed_form=True),
            optax.partition(
                {"mixtures": bilevel.softmax(optax.adam(0.1)), "other": optax.adam(0.1)},
                {"mixtures": "mixtures", "log_variances": "other", "log_penalty": "other"},
            ),
            *(start(), jnp.zeros((rows, 10)), train, train),
            steps=steps,
        ).history["alpha"]
        at = [*range(0, steps, every), steps - 1]
        alphas = [jax.tree.map(lambda a: a[i], path) for i in at]  # noqa: B023
        bounds = [row("", alpha)["smallest eigenvalue, at least"] for alpha in alphas]
        drawn[name] = at, bounds, np.asarray(alphas[-1]["mixtures"])
        found.append(row(f"learned by {name}", alphas[-1]))
    print(*found, sep="\n")
    return found, drawn


def picture(drawn, figure):
    """The eigenvalue along the path, and the mixtures found."""
    (paths,) = drawn
    left, *others = figure.subplots(1, 3)
    for (name, (at, bounds, mixtures)), ax in zip(paths.items(), others, strict=True):
        left.semilogy(at, bounds, "o-", label=name)
        ax.imshow(mixtures, cmap="Blues", vmin=0, vmax=1)
        ax.set_xticks(range(3), ["ReLU", "erf", "identity"])
        ax.set_yticks(range(LAYERS), [f"layer {i + 1}" for i in range(LAYERS)])
        ax.set_title(f"mixtures by {name}", fontsize=9)
        ax.grid(visible=False)
    left.set(xlabel="step", ylabel="certified smallest eigenvalue")
    left.legend()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", X64)
    main()
