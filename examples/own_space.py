"""A search space of your own: an activation for rows, and one for columns of images.

    bilevel search-own --space own_space:looks --strategy gaea     # in this folder

Images [n, h, w, c] become one vector for each row and one for each column; a layer that all rows
(columns) share, an activation, and a classifier of the mean. ``alpha`` mixes the two views and, in
each, the three activations.
"""

import jax
import jax.numpy as jnp

from bilevel.spaces import Space, on_simplices
from bilevel.spaces.targets import cross_entropy_problem, predict_labels

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "identity": lambda z: z}
WIDTH = 32


def looks(classes: int) -> Space:
    """The space; the command line calls it with the number of classes."""
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
