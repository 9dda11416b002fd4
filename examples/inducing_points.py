"""Ten images instead of thousands: kernel inducing points (Nguyen, Chen & Lee 2021).

    python inducing_points.py

alpha is a small set of images with their targets. The lower problem is ridge regression on them,
with the exact tangent kernel of an infinitely wide network with one hidden layer. The outer loss is
the squared error on batches of the real data. The baselines are the same number of real images,
drawn at random, and 5,000 real images.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
import ntk

RIDGE = 1e-6  # relative to the kernel's mean diagonal entry
X64 = True  # for the small eigenvalues
SIZES = {"each": 1, "steps": 2000}, {"each": 10, "steps": 1000}
FULL = [{"data": data} | size for data in ("mnist", "cifar10") for size in SIZES]


def kernel(x1, x2=None):
    """Return the tangent kernel of one hidden layer of ReLUs, for rows of norm 1: [n1, n2]."""
    return ntk.network_kernel(x1, x2, activations=[ntk.relu]).ntk


def unit(x):
    """Scale rows to norm 1."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def ridge(alpha):
    """Return the kernel of alpha's images plus its small ridge: [m, m]."""
    K = kernel(unit(alpha["images"]))
    return K + RIDGE * jnp.trace(K) / len(K) * jnp.eye(len(K))


def lower(w, alpha, _):
    """Return the objective of ridge regression on the images of alpha, in its dual form."""
    return jnp.sum(w * (0.5 * ridge(alpha) @ w - alpha["targets"]))


def solve(_, alpha, w, state, __):
    """Solve the ridge regression directly."""
    return jax.scipy.linalg.solve(ridge(alpha), alpha["targets"], assume_a="pos"), state


def outputs(w, alpha, x):
    """Predict targets [n, 10] for rows [n, pixels], scaled to norm 1."""
    return kernel(x, unit(alpha["images"])) @ w


def outer(w, alpha, batch):
    """Return the squared error on a batch of real rows."""
    x, y = batch
    return jnp.mean((outputs(w, alpha, x) - y) ** 2)


def targets(labels):
    """Return one-hot labels minus their mean."""
    return jnp.asarray(np.eye(10)[labels] - 0.1)


def error(alpha, x, labels):
    """Return the share of rows that ridge regression on alpha misclassifies, 1,000 at a time."""
    w, _ = solve(None, alpha, None, None, None)
    classify = jax.jit(lambda x: outputs(w, alpha, x).argmax(-1))
    predicted = np.concatenate([classify(x[i : i + 1000]) for i in range(0, len(x), 1000)])
    return float(np.mean(predicted != labels))


def main(data="mnist", each=1, steps=2000, count=20_000, batch=500, whole=5000):
    """Learn ``each`` images per class. Return a row of test errors and the images to draw."""
    dataset = bilevel.data.load(data, train_size=count)
    x, xt = (a.reshape(len(a), -1) for a in (dataset.x_train, dataset.x_test))
    y, yt = dataset.y_train, dataset.y_test
    x, xt = unit(jnp.asarray(x - x.mean(0))), unit(jnp.asarray(xt - x.mean(0)))
    order = np.random.default_rng(0).permutation(len(y))
    chosen = np.concatenate([order[y[order] == c][:each] for c in range(10)])
    start = {"images": x[chosen], "targets": targets(y[chosen])}
    rows = bilevel.minibatches(batch)
    learned = bilevel.search(
        bilevel.Problem(lower, outer),
        bilevel.LowerSolver(init=lambda w: (), run=solve, closed_form=True),
        optax.adam(optax.cosine_decay_schedule(3e-3, steps)),
        *(start, jnp.zeros((len(chosen), 10)), None, (x, targets(y))),
        batches=bilevel.jointly(lambda key, none, data: (none, rows(key, data))),
        steps=steps,
        key=jax.random.key(0),
        history=["value"],
    ).alpha
    real = {"images": x[order[:whole]], "targets": targets(y[order[:whole]])}
    row = {"data": data, "images a class": each, "steps": steps}
    row |= {"random": error(start, xt, yt), "learned": error(learned, xt, yt)}
    row[f"{whole:,} real ones"] = error(real, xt, yt)
    print(row)
    shape = -1, *dataset.x_train.shape[1:]
    return [row], [np.asarray(a["images"]).reshape(shape)[::each] for a in (start, learned)]


def picture(drawn, figure):
    """Draw random images above learned ones, in two rows for each run."""
    axes = figure.subplots(2 * len(drawn), 10)
    images = [ten for pair in drawn for ten in pair]
    for ten, line, label in zip(images, axes, ["random", "learned"] * len(drawn), strict=True):
        for image, ax in zip(ten, line, strict=True):
            low, high = image.min(), image.max()
            ax.imshow(((image - low) / (high - low)).squeeze(), cmap="gray")
            ax.axis("off")
        line[0].set_title(label, loc="left", fontsize=8)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", X64)
    main()
