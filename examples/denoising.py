"""Learn a regularizer for images: the classical bilevel problem of imaging.

    python denoising.py

Denoising minimizes 1/2 |u - noisy|^2 + sum_k exp(a_k) sum sqrt((f_k * u)^2 + e^2) over the image u.
If the filters f_k are finite differences, this is total variation. If they are learned, it is a
field of experts (Roth & Black 2005). alpha holds the weights a_k and the filters. The outer loss is
the squared error to the clean image (Kunisch & Pock 2013; Chen, Ranftl & Pock 2014). The baseline
is total variation with one weight, chosen from a grid.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel

NOISE, EDGE = 0.1, 0.02
FULL = [{"steps": 100}]
DIFFERENCES = np.zeros((2, 3, 3))
DIFFERENCES[0, 1, 1:], DIFFERENCES[1, 1:, 1] = (-1, 1), (-1, 1)


def filtered(u, filters):
    """Apply the filters to images [n, h, w], mirrored at the edges; return [n, k, h, w]."""
    size = filters.shape[-1] // 2
    padded = jnp.pad(u, ((0, 0), (size, size), (size, size)), mode="reflect")
    return jax.lax.conv(padded[:, None], filters[:, None], (1, 1), "VALID")


def lower(u, alpha, noisy):
    """Return the objective of denoising. It is strongly convex, so implicit() is exact."""
    kinks = jnp.sqrt(filtered(u, alpha["filters"]) ** 2 + EDGE**2)
    weights = jnp.exp(alpha["weights"])[:, None, None]
    return 0.5 * jnp.sum((u - noisy) ** 2) + jnp.sum(weights * kinks)


def outer(u, alpha, clean):
    """Return the mean squared error."""
    return jnp.mean((u - clean) ** 2)


def decibels(error):
    """Return the peak signal-to-noise ratio."""
    return float(-10 * jnp.log10(error))


def cosines(size=5):
    """Return the discrete cosine filters of norm 1, without the constant filter: [24, 5, 5]."""
    place = np.cos(np.pi * np.outer(np.arange(size), np.arange(size) + 0.5) / size)
    place /= np.linalg.norm(place, axis=1, keepdims=True)
    return np.einsum("ai,bj->abij", place, place).reshape(-1, size, size)[1:]


def photographs(data, train, test, seed=0):
    """Return clean and noisy images for training and for testing."""
    dataset = bilevel.data.load(data, train_size=train, test_size=test)
    parts = (x.reshape(*x.shape[:3], -1).mean(-1) for x in (dataset.x_train, dataset.x_test))
    clean = [jnp.asarray(x, float) for x in parts]
    keys = jax.random.split(jax.random.key(seed))
    return [
        (x, x + NOISE * jax.random.normal(k, x.shape)) for x, k in zip(clean, keys, strict=True)
    ]


def main(steps=100, data="cifar10", train=20, test=60):
    """Compare all regularizers on test images. Return rows of decibels and the images to draw."""
    (clean, noisy), (clean_t, noisy_t) = photographs(data, train, test)
    problem = bilevel.Problem(lower, outer)
    solver = bilevel.implicit(bilevel.newton(), bilevel.cg())
    denoise = jax.jit(lambda alpha, u: solver.run(lower, alpha, u, solver.init(u), u)[0])

    def differences(log_weight):
        return {"filters": jnp.asarray(DIFFERENCES), "weights": jnp.full(2, log_weight)}

    def learned(alpha, rate, filters=True):
        held = optax.masked(optax.set_to_zero(), {"filters": not filters, "weights": False})
        rule = optax.chain(optax.adam(optax.cosine_decay_schedule(rate, steps)), held)
        data = noisy, noisy, clean
        return bilevel.search(problem, solver, rule, alpha, *data, steps=steps, history=[]).alpha

    grid = np.log(np.geomspace(0.01, 0.2, 13))
    errors = [outer(denoise(differences(a), noisy), None, clean) for a in grid]
    experts = {"filters": jnp.asarray(cosines()), "weights": jnp.full(24, jnp.log(0.01))}
    alphas = {
        "total variation, weight from a grid of 13": differences(grid[int(np.argmin(errors))]),
        "24 filters of the cosine transform, weights learned": learned(experts, 0.1, False),
        "24 filters and weights learned": learned(experts, 0.05),
    }
    images = {"clean": clean_t, "noisy": noisy_t}
    images |= {name: denoise(alpha, noisy_t) for name, alpha in alphas.items()}
    trained = {"noisy": noisy} | {name: denoise(alpha, noisy) for name, alpha in alphas.items()}
    rows = []
    for name, u in trained.items():
        rows.append({"regulariser": name, "test, dB": decibels(outer(images[name], None, clean_t))})
        rows[-1]["training, dB"] = decibels(outer(u, None, clean))
        print(rows[-1])
    drawn = {name.split(",")[0]: np.asarray(u[:4]) for name, u in images.items()}
    return rows, (drawn, np.asarray(alphas["24 filters and weights learned"]["filters"]))


def picture(drawn, figure):
    """Draw four test images and the filters."""
    ((images, filters),) = drawn
    axes = figure.subplots(len(images), 10)
    for line, (name, four) in zip(axes, images.items(), strict=True):
        for ax, image in zip(line, four, strict=False):
            ax.imshow(image, cmap="gray", vmin=0, vmax=1)
        line[0].set_title(name, loc="left", fontsize=7)
    for ax, kernel in zip(axes[:, 5:].ravel(), filters, strict=False):
        ax.imshow(kernel, cmap="RdBu_r", vmin=-np.abs(kernel).max(), vmax=np.abs(kernel).max())
    axes[0, 5].set_title("learned filters", loc="left", fontsize=7)
    for ax in axes.ravel():
        ax.axis("off")


if __name__ == "__main__":
    main()
