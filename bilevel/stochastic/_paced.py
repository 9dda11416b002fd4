"""An optimizer of alpha that waits for the weights, and for the adjoint when it falls behind."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.checks import at_least, gradient_transformation

_LOST, _FOLLOWED = 0.3, 0.1  # residuals above which alpha slows down, below which it speeds up
_AVERAGED = 8  # parts of an epoch: how long residuals are averaged, and between two changes of pace


class PacedState(NamedTuple):
    """State of :func:`paced`."""

    optimizer: optax.OptState
    pace: jax.Array  # [], at most 1
    residual: jax.Array  # [], averaged
    number: jax.Array  # [], int: updates seen


def paced(
    optimizer: optax.GradientTransformation | None = None, warmup: float = 2.0
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of ``alpha`` for :func:`bilevel.saba` and :func:`bilevel.spaba`, by epochs.

    ``alpha`` waits for ``warmup`` epochs, while weights and adjoint come near their solutions. Then
    an epoch of steps is one of the optimizer's: rates do not depend on the number of batches. And
    where the adjoint falls behind, by its residual, the pace is halved until it has caught up.

    Parameters
    ----------
    optimizer : optax.GradientTransformation, optional
        By default ``optax.adam(0.3)``: hyperparameters that are logarithms or of the order of 1.
    warmup : float
        Epochs of train or of valid, whichever has more batches.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Geometries come after it: ``optax.chain(paced(), bilevel.exponentiate())``.

    Raises
    ------
    ValueError
        For what is no optimizer, and a negative ``warmup``; when called, by what is no single loop.

    Notes
    -----
    A heuristic: no theorem covers it. The residual is |D_v| / |df/dw|, of variance-reduced
    directions: above 0.3 the pace is halved, eight times an epoch, under 0.1 it grows by a quarter,
    up to 1. SOBA's directions never have a small one.

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.mean((w - alpha - batch) ** 2),
    ...     outer=lambda w, alpha, batch: 0.5 * jnp.mean((w - batch) ** 2),
    ... )
    >>> x = jnp.linspace(-1.0, 1.0, 10)
    >>> options = {"steps": 300, "batches": bilevel.partition(4), "key": jax.random.key(0)}
    >>> args = paced(), jnp.zeros(1), jnp.zeros(1), x, 2 + x
    >>> bilevel.search(problem, bilevel.saba(), *args, **options).alpha.round(1)
    Array([2.], dtype=float...)
    """
    inner = gradient_transformation(
        "optimizer", optax.adam(0.3) if optimizer is None else optimizer
    )
    at_least("warmup", warmup, 0)

    def init(alpha):
        one = jnp.ones((), jnp.result_type(*jax.tree.leaves(alpha)))
        return PacedState(inner.init(alpha), one, one, jnp.zeros((), int))

    def update(updates, state, params=None, *, residual=None, epoch=None, **told):
        if residual is None or epoch is None:
            raise ValueError(
                "optimizer: expected bilevel.paced with bilevel.saba() or bilevel.spaba(), got it "
                "with a solver that reports no residual of its adjoint."
            )
        weight = min(1.0, _AVERAGED / epoch)
        average = state.residual + weight * (residual - state.residual)
        average = average.astype(state.residual.dtype)
        due = state.number % max(1, epoch // _AVERAGED) == 0
        changed = jnp.where(average > _LOST, state.pace / 2, state.pace)
        changed = jnp.where(average < _FOLLOWED, jnp.minimum(1, 1.25 * state.pace), changed)
        pace = jnp.where(due, changed, state.pace)
        going = state.number >= warmup * epoch
        found, after = inner.update(updates, state.optimizer, params, **told)
        scale = jnp.where(going, pace / epoch, 0)
        found = jax.tree.map(lambda u: jnp.where(going, scale * u, 0).astype(u.dtype), found)
        after = jax.tree.map(lambda a, b: jnp.where(going, a, b), after, state.optimizer)
        pace = jnp.where(going, pace, 1).astype(pace.dtype)
        return found, PacedState(after, pace, average, state.number + 1)

    return optax.GradientTransformationExtraArgs(init, update)
