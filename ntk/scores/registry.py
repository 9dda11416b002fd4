"""The registry of the built-in scores: their names, and a description of each.

``bilevel rank`` and the documentation read them from here, so no other file lists the scores. This
module does not import JAX, because the command line needs the names first.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ntk import scores

Function = TypeVar("Function", bound=Callable[..., Any])

HOST_SCORES = {"certified_min_eigenvalue": "kernel_scores"}
"""Scores that ``bilevel rank`` computes on the host, and the function that returns the kernel."""


class ScoreDescription(NamedTuple):
    """Description of a built-in score; a decorator that attaches it to the score's function."""

    formula: str  # the text of a table's cell
    gradients: str  # the number of gradients
    batch_norm: str  # how samples interact: "joint", "alone", "removed" or "unused"
    smaller_is_better: bool = False
    together: str | None = None  # function of the module that returns this score among others
    published: str | None = None  # name in the table of published scores

    def __call__(self, function: Function) -> Function:
        """Attach the description to ``function``."""
        vars(function)["description"] = self
        return function


def builtin_score_names() -> tuple[str, ...]:
    """Return the names of the scores in ``ntk.scores``, in alphabetical order."""
    return tuple(sorted(set(scores.__all__) - {"of_kernel"}))


def score_description(score: str | Callable[..., Any]) -> ScoreDescription:
    """Return the description of a score, given as its name in ``ntk.scores`` or as a function."""
    function = getattr(scores, score) if isinstance(score, str) else score
    return vars(function)["description"]


def score_program(name: str) -> Callable[..., Any]:
    """Return the score of that name, or the function of that name that returns several scores."""
    if name in scores.__all__:
        return getattr(scores, name)
    score = next(s for s in builtin_score_names() if score_description(s).together == name)
    return getattr(sys.modules[getattr(scores, score).__module__], name)
