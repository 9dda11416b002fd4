"""Optimizers of the strategies, for weights and for ``alpha`` on its sets."""

from typing import TypeAlias

import jax
import optax

from bilevel.contracts import Pytree
from bilevel.outer_loop.geometry import exponentiate, project, softmax

Rate: TypeAlias = float | optax.Schedule
Optimizer: TypeAlias = optax.GradientTransformation


def logits(rate: Rate) -> Optimizer:
    """Return DARTS's optimizer of ``alpha``: Adam on logits, momentum 0.5, decay 1e-3."""
    return softmax(optax.chain(optax.add_decayed_weights(1e-3), optax.adam(rate, b1=0.5)))


def exponentiated(rate: Rate) -> Optimizer:
    """Return GAEA's optimizer of ``alpha``: exponentiated gradient."""
    return optax.chain(optax.sgd(rate), exponentiate())


def darts_sgd(rate: Rate) -> Optimizer:
    """Return DARTS's optimizer of weights: SGD with momentum 0.9, decay 3e-4, clipping at norm 5.

    Examples
    --------
    >>> optimizer = darts_sgd(optax.cosine_decay_schedule(0.025, 1000))
    """
    return optax.chain(
        optax.clip_by_global_norm(5.0),
        optax.add_decayed_weights(3e-4),
        optax.sgd(rate, momentum=0.9),
    )


def on_sets(sets: Pytree, *, simplex: Optimizer, other: Optimizer) -> Optimizer:
    """Combine optimizers of ``alpha`` so that each leaf stays in its set of ``space.sets``.

    Parameters
    ----------
    sets : pytree of {"simplex", "box", "free"}
    simplex, other : optax.GradientTransformation
        ``simplex`` stays on simplices. ``other`` is any optimizer; leaves in the box are projected
        onto it here.

    Raises
    ------
    ValueError
        If ``sets`` has other words.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> sets = {"activations": "simplex", "skips": "box"}
    >>> optimizer = on_sets(sets, simplex=exponentiated(1.0), other=optax.sgd(1.0))
    >>> alpha = {"activations": jnp.array([[0.5, 0.5]]), "skips": jnp.array([0.5])}
    >>> slope = {"activations": jnp.array([[0.0, jnp.log(3.0)]]), "skips": jnp.array([-3.0])}
    >>> updates, _ = jax.jit(optimizer.update)(slope, optimizer.init(alpha), alpha)
    >>> moved = optax.apply_updates(alpha, updates)
    >>> moved["activations"].round(4), moved["skips"]
    (Array([[0.75, 0.25]], dtype=float...), Array([1.], dtype=float...))
    """
    words = set(jax.tree.leaves(sets))
    if not words <= {"simplex", "box", "free"}:
        raise ValueError(f"sets: expected simplex, box or free, got {sets!r}.")
    if words == {"simplex"}:
        return simplex
    parts = {"simplex": simplex, "box": optax.chain(other, project("box")), "free": other}
    return optax.partition({word: parts[word] for word in sorted(words)}, sets)
