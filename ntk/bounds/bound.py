"""What a bound is: a value together with what it rests on, and what the modules here share."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from ntk.expectations.activations import Activation
from ntk.internal.checks import concrete
from ntk.kernels.symmetric import symmetric_matrix

Mixture = Activation | Mapping[Activation, Any]
"""One activation, or ``{activation: weight}`` for a weighted sum."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "terms", "vacuous"],
    meta_fields=["claim", "assumptions", "unspecified", "probability"],
)
@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound with what it rests on; a pytree, so that functions returning one can be compiled.

    Attributes
    ----------
    claim : str
        What is claimed; "value" in it stands for ``value``.
    value : scalar array
    terms : dict of scalar arrays
        What the value is made of, and what it may be compared with.
    vacuous : bool array
        The value says nothing: an eigenvalue's lower bound of 0 or less, an error of 1 or more, a
        value that is not finite.
    assumptions : tuple of (str, True, False or None)
        Statements that the claim needs, and whether they hold; None where that was not checked
        (it cannot be, or the values are traced).
    unspecified : tuple of str
        Constants that the theorem leaves open: supplied by the caller, or left out.
    probability : float or str
        With which the claim holds; a formula where constants are open.

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
        lines = [f"{self.claim} = {_digits(self.value)}"]
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
    """A lower bound of lambda_min; ``noise`` is what rounding can make of 0."""
    return Bound("lambda_min(K) >= value", value, terms, ~(value > noise), **details)


def upper_bound(value: chex.Array, terms: dict[str, Any], **details: Any) -> Bound:
    """An upper bound of lambda_min."""
    return Bound("lambda_min(K) <= value", value, terms, ~jnp.isfinite(value), **details)


def holds(condition: Any) -> bool | None:
    """The condition where it is known, None where it is traced."""
    return bool(condition) if concrete(condition) else None


def _digits(x) -> str:
    if not concrete(x):
        return str(x)
    return f"{float(x):.6g}" if jnp.ndim(x) == 0 else f"{x}"  # of a vmap


def check_kernel(K: Any, *, stack: bool = False) -> jax.Array:
    """Return ``K`` as a finite symmetric matrix of floats; a traced one that is not becomes NaN."""
    return symmetric_matrix(K, stack=stack)
