"""The result of a search, and the errors that carry one."""

import copyreg
import dataclasses
import functools
from typing import Any

import jax

from bilevel.contracts import DescentState, Pytree
from bilevel.hypergradients.error_estimate import Info
from bilevel.outer_loop import geometry
from bilevel.outer_loop.report import SearchReport


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["alpha", "w", "history", "state", "info", "report", "step_scale"],
    meta_fields=["stopped", "history_every"],
)
@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of :func:`search`; a pytree, so that functions returning it can be compiled."""

    alpha: Pytree
    w: Pytree
    history: dict[str, Any]  # name -> [rows, ...]; "alpha" as a pytree of those
    state: DescentState
    stopped: str  # "" when all steps were done and nobody interrupted them, else what ended it
    report: SearchReport  # what went wrong in the steps, in numbers
    info: Info | None = None  # of a single loop's last direction, with diagnostics
    history_every: int = 1  # steps that a row of the history stands for
    step_scale: jax.Array | float = 1.0  # alpha's last steps, by the optimizer's: less if shortened


class NonFiniteError(FloatingPointError):
    """A search met a NaN or an infinity: ``step``, ``quantity``, and ``result`` up to then."""

    def __init__(self, step: int, quantity: str, result: SearchResult, reason: str = ""):
        super().__init__(
            f"{quantity}: expected finite values, got a NaN or an infinity at outer step {step}; "
            "the state before it is in this exception's `result`." + f" {reason}".rstrip()
        )
        self.step, self.quantity, self.result = step, quantity, result

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_init(self)


class MisplacedError(ValueError):
    """Something moved alpha on after its geometry: at ``step``, with the ``result`` up to then."""

    def __init__(self, step: int, name: str, result: SearchResult):
        super().__init__(f"{geometry.MISPLACED.format(name)} It was seen at outer step {step}.")
        self.step, self.result = step, result

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_init(self)


def _without_init(error: Exception) -> tuple:
    """Pickle and copy an error without its constructor, whose arguments are not its ``args``."""
    return copyreg.__newobj__, (type(error), *error.args), error.__dict__  # type: ignore[attr-defined]
