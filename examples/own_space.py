"""A search space of your own: an activation for rows, and one for columns of images.

    bilevel search-own --space own_space:looks --strategy gaea     # in this folder

Each row and each column of the images [n, h, w, c] is a vector. One layer is shared by all rows,
another by all columns. An activation and a classifier of the mean follow. ``alpha`` mixes the two
views and, in each view, the three activations.
"""

import jax
import jax.numpy as jnp

from bilevel.spaces import Space, on_simplices
from bilevel.spaces.targets import cross_entropy_problem, predict_labels

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "identity": lambda z: z}
WIDTH = 32


def looks(classes: int) -> Space:
    """Return the space. The command line passes the number of classes."""
    names = tuple(ACTIVATIONS)
    of_views = on_simplices(names, (2,))  # alpha [2, 3]: a simplex for rows, one for columns

    def init(key, batch):
        _, h, w, c = batch[0].shape
        shapes = {"rows": (w * c, WIDTH), "columns": (h * c, WIDTH), "last": (2 * WIDTH, classes)}
        keys = dict(zip(shapes, jax.random.split(key, 3), strict=True))
        return {k: jax.random.normal(keys[k], s) / s[0] ** 0.5 for k, s in shapes.items()}

    def apply(w, alpha, x):
        views = {"rows": x, "columns": x.swapaxes(1, 2)}
        features = []
        for weights, (name, view) in zip(alpha, views.items(), strict=True):
            z = view.reshape(*view.shape[:2], -1) @ w[name]
            mixed = sum(a * s(z) for a, s in zip(weights, ACTIVATIONS.values(), strict=True))
            features.append(mixed.mean(axis=1))
        return jnp.concatenate(features, axis=-1) @ w["last"]

    return Space(
        names=names,
        sets="simplex",
        **of_views._asdict(),
        init=init,
        apply=apply,
        problem=cross_entropy_problem(apply),
        predict=predict_labels,
    )
