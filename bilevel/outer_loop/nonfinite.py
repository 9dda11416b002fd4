"""What a search that stopped being finite can say: which leaves, of which optimizer, and a cure."""

from typing import Any

import jax
import jax.numpy as jnp

from bilevel.contracts import Pytree

_MANY = 1024  # entries; under it the exact check is as fast


def is_tree_finite(tree: Pytree) -> jax.Array:
    """Whether all numbers of it are finite."""

    def every(x):
        if x.size < _MANY:
            return jnp.isfinite(x).all()
        # Where the squares have a finite sum: a product of vectors is ten times as fast.
        quick = jnp.isfinite(jnp.vdot(x, x))
        return jax.lax.cond(quick, lambda: True, lambda: jnp.isfinite(x).all())

    return jnp.stack([jnp.ones((), bool), *map(every, jax.tree.leaves(tree))]).all()


def explain_nonfinite(state: Any, new: Any, quantity: str, single_loop: bool = False) -> str:
    """In words, of the last good state and of the one after it."""
    weights, alphas = bad_leaves("w", new.w), bad_leaves("alpha", new.alpha)
    if quantity == "hypergradient" and not weights and single_loop:
        return (
            "weights and losses are finite, alpha's direction or the adjoint behind it is not; a "
            "smaller step_size of the solver may keep it in the numbers' range."
        )
    if quantity == "hypergradient" and not weights:
        rules = ", ".join(
            sorted({type(x).__name__ for x in _optimizer_records(state.solver_state)})
        )
        of = (
            f"the lower solver ({rules}) or of a loss" if rules else "the lower solver or of a loss"
        )
        return (
            f"weights and losses are finite, a derivative of {of} is not, in {alphas or 'alpha'}: "
            "a root, a logarithm or a division at 0, or slopes too large to be multiplied. If a "
            "jnp.where guards it, replace the argument at that point as well: "
            "jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), 0). Otherwise use a larger eps, "
            "optax.sgd, or fewer differentiated steps (backprop=)."
        )
    if weights:
        return (
            f"{weights} left the numbers' range; a smaller rate below, or clipped gradients, "
            "may keep it there."
        )
    if alphas:
        return f"{alphas} left the numbers' range; a smaller rate above may keep it there."
    return "weights and alpha are finite."


def bad_leaves(name: str, tree: Pytree) -> str:
    """The paths of those leaves that are not finite; the first three of them."""
    paths = [
        f"{name}{jax.tree_util.keystr(path)}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(x.dtype, jnp.inexact) and not jnp.isfinite(x).all()
    ]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def _optimizer_records(state: Pytree) -> list:
    """The states of optax's parts, but for the empty ones."""

    def record(x):
        return isinstance(x, tuple) and hasattr(x, "_fields")

    return [x for x in jax.tree.leaves(state, is_leaf=record) if record(x) and len(x)]
