"""The result of a search, and its errors, which carry the result and explain the cause."""

import copyreg
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from bilevel.contracts import DescentState, Pytree
from bilevel.hypergradients.error_estimate import Info
from bilevel.outer_loop import geometry
from bilevel.outer_loop.report import SearchReport
from ntk.internal import summary

_MANY = 1024  # entries; for fewer, the exact check of finite values is as fast


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["alpha", "w", "history", "state", "info", "report", "step_scale"],
    meta_fields=["stopped", "history_every"],
)
@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of :func:`search`; a pytree, so that compiled functions can return it."""

    alpha: Pytree
    w: Pytree
    history: dict[str, Any]  # name -> [rows, ...]; "alpha" is a pytree of such arrays
    state: DescentState
    stopped: str  # "" if the search took all steps, else the reason for its end
    report: SearchReport  # counts of faulty steps
    info: Info | None = None  # on a single loop's last direction, with diagnostics
    history_every: int = 1  # steps for each row of the history
    step_scale: jax.Array | float = 1.0  # alpha's steps relative to the optimizer's

    def __repr__(self) -> str:
        columns = ("outer loss", "value"), ("|grad|", "grad_norm")
        rows = [
            ("steps", summary.number(self.state.step, ".0f")),
            *((label, summary.ends(self.history[k])) for label, k in columns if k in self.history),
            ("alpha", summary.arrays(self.alpha)),
            ("w", summary.arrays(self.w)),
            ("history", ", ".join(self.history) or "nothing"),
            ("stopped", self.stopped or "after all steps"),
        ]
        return summary.table("SearchResult", rows)


def _reduce_without_init(error: Exception) -> tuple[Any, ...]:
    """Pickle and copy an error without its constructor, which takes other arguments."""
    return copyreg.__newobj__, (type(error), *error.args), error.__dict__  # type: ignore[attr-defined]


class NonFiniteError(FloatingPointError):
    """A search met a NaN or an infinity: ``step``, ``quantity``, and the ``result`` before."""

    def __init__(self, step: int, quantity: str, result: SearchResult, reason: str = ""):
        super().__init__(
            f"{quantity}: expected finite values, got a NaN or an infinity at outer step {step}; "
            "the state before it is in this exception's `result`." + f" {reason}".rstrip()
        )
        self.step, self.quantity, self.result = step, quantity, result

    __reduce__ = _reduce_without_init


class MisplacedError(ValueError):
    """Something moved alpha after its geometry: at ``step``, with the ``result`` before."""

    def __init__(self, step: int, name: str, result: SearchResult):
        super().__init__(f"{geometry.MISPLACED.format(name)} It was seen at outer step {step}.")
        self.step, self.result = step, result

    __reduce__ = _reduce_without_init


def is_tree_finite(tree: Pytree) -> jax.Array:
    """Return whether all values of the tree are finite."""

    def every(x):
        if x.size < _MANY:
            return jnp.isfinite(x).all()
        # If the sum of squares is finite, all values are. The product is ten times as fast.
        quick = jnp.isfinite(jnp.vdot(x, x))
        return jax.lax.cond(quick, lambda: True, lambda: jnp.isfinite(x).all())

    return jnp.stack([jnp.ones((), bool), *map(every, jax.tree.leaves(tree))]).all()


def explain_nonfinite(state: Any, new: Any, quantity: str, single_loop: bool = False) -> str:
    """Explain the cause from the last good state and the state after it."""
    weights, alphas = _bad_leaves("w", new.w), _bad_leaves("alpha", new.alpha)
    if quantity == "hypergradient" and not weights and single_loop:
        return (
            "weights and losses are finite, alpha's direction or the adjoint behind it is not; a "
            "smaller step_size of the solver may keep it in the numbers' range."
        )
    if quantity == "hypergradient" and not weights:
        records = jax.tree.leaves(state.solver_state, is_leaf=_is_record)
        # Records without entries belong to optax's parts without a state.
        names = sorted({type(x).__name__ for x in records if _is_record(x) and x})
        rules = f" ({', '.join(names)})" if names else ""
        return (
            f"weights and losses are finite, a derivative of the lower solver{rules} or of a loss "
            f"is not, in {alphas or 'alpha'}: "
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


def _bad_leaves(name: str, tree: Pytree) -> str:
    """Return the paths of the first three leaves that are not finite."""
    paths = [
        f"{name}{jax.tree_util.keystr(path)}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(x.dtype, jnp.inexact) and not jnp.isfinite(x).all()
    ]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def _is_record(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")
