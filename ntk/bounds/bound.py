"""The class `Bound`: a value together with its assumptions."""

import dataclasses
import decimal
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from ntk.expectations.activations import Activation
from ntk.internal.checks import concrete

Mixture = Activation | Mapping[Activation, Any]
"""One activation, or ``{activation: weight}`` for a weighted sum."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "terms", "vacuous"],
    meta_fields=["claim", "assumptions", "unspecified", "probability"],
)
@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound with its assumptions; a pytree, so that functions that return it can be compiled.

    Attributes
    ----------
    claim : str
        "value" in it stands for ``value``.
    value : scalar array
    terms : dict of scalar arrays
        Parts of the value, and numbers to compare it with.
    vacuous : bool array
        Whether the value carries no information: an eigenvalue's lower bound of 0 or less, an error
        of 1 or more, a value that is not finite.
    assumptions : tuple of (str, True, False or None)
        Statements that the claim needs, and whether they hold; None if that is unknown or traced.
    unspecified : tuple of str
        Constants that the theorem leaves open: supplied by the caller, or left out.
    probability : float or str
        Probability of the claim; a formula if constants are open.

    Examples
    --------
    >>> from ntk.bounds import diagonal_upper_bound
    >>> print(diagonal_upper_bound(jnp.diag(jnp.array([1.0, 3.0]))))
    lambda_min(K) <= value = 1
      smallest diagonal entry = 1
      tr K / N = 2
      probability: 1
    """

    claim: str
    value: jax.Array
    terms: dict[str, jax.Array]
    vacuous: jax.Array
    assumptions: tuple[tuple[str, bool | None], ...] = ()
    unspecified: tuple[str, ...] = ()
    probability: float | str = 1.0

    def __str__(self) -> str:
        words = {True: "holds", False: "FAILS", None: "not checked"}
        lines = [f"{self.claim} = {_digits(self.value, upper='<=' in self.claim)}"]
        lines += [f"{name} = {_digits(term)}" for name, term in self.terms.items()]
        lines += [f"assumes {what}: {words[held]}" for what, held in self.assumptions]
        lines += [f"unspecified: {constant}" for constant in self.unspecified]
        chance = self.probability
        lines += [f"probability: {chance if isinstance(chance, str) else _digits(chance)}"]
        if concrete(self.vacuous) and bool(jnp.all(self.vacuous)):
            lines += ["VACUOUS"]
        return "\n  ".join(lines)


class Bracket(NamedTuple):
    """The two sides of one theorem."""

    lower: Bound
    upper: Bound


def lower_bound(
    value: chex.Array, terms: dict[str, Any], noise: Any = 0.0, **details: Any
) -> Bound:
    """Return a lower bound of lambda_min; a value up to ``noise`` is 0 to rounding, so vacuous."""
    return Bound("lambda_min(K) >= value", value, terms, ~(value > noise), **details)


def upper_bound(value: chex.Array, terms: dict[str, Any], **details: Any) -> Bound:
    """Return an upper bound of lambda_min."""
    return Bound("lambda_min(K) <= value", value, terms, ~jnp.isfinite(value), **details)


def holds(condition: Any) -> bool | None:
    """Return the condition if it is known, None if it is traced."""
    return bool(condition) if concrete(condition) else None


def rounded(x: Any, digits: int, upper: bool = False) -> str:
    """Format a lower or ``upper`` bound, rounded so that the printed value is a bound too."""
    rounding = decimal.ROUND_CEILING if upper else decimal.ROUND_FLOOR
    value = decimal.Context(prec=digits, rounding=rounding).create_decimal_from_float(float(x))
    return f"{value:.{digits}g}" if value.is_finite() else f"{x}"


def _digits(x, upper: bool | None = None) -> str:
    """Return six digits: the nearest, or those of a lower or ``upper`` bound."""
    if not concrete(x) or jnp.ndim(x):  # traced, or of a vmap
        return str(x)
    return f"{float(x):.6g}" if upper is None else rounded(x, 6, upper)
