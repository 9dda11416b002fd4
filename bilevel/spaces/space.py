"""The search space: one record of pure functions, with the same meaning in every space.

    result = bilevel.search(
        space.problem, solver, optimizer, space.start(), space.init(key, train), train, valid,
        steps=100,
    )
    architecture = space.discretize(result.alpha)

Strategies, diagnostics and ``bilevel search-own --space MODULE:FUNCTION`` take any such record.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import Pytree
from bilevel.internal.checks import numpy_array, prng_key
from bilevel.problem.problem import Problem

Kind = TypeVar("Kind", bound="Space")


@dataclasses.dataclass(frozen=True)
class Space:
    """A search space.

    Attributes
    ----------
    names : tuple of str [h]
        The candidates, in the order of the last axis of every simplex in ``alpha``.
    sets : pytree of {"simplex", "box", "free"}
        The set of each leaf of ``alpha``: simplices (its last axis), between 0 and 1, or anywhere.
        Like ``alpha``, or one word for all of it.
    start : ``start() -> alpha``
        Start of a search: uniform on simplices. In JAX's default precision.
    init : ``init(key, batch) -> w``
        Initial weights, for batches of these shapes.
    apply : ``apply(w, alpha, x) -> outputs``
        The network of a mixture; at a vertex, the network of one architecture.
    problem : Problem
        For batches ``(x, y)``: the lower loss of ``w``, the outer loss of ``alpha``.
    predict : ``predict(outputs) -> labels``
    draw : ``draw(key) -> alpha``
        The vertex of an architecture drawn uniformly.
    discretize : ``discretize(alpha) -> architecture``
        The final architecture of a search, to be printed, compared, or built and trained.
    one_hot : ``one_hot(architecture) -> alpha``
        The vertex of the architecture.

    Examples
    --------
    A choice between two halves of the inputs:

    >>> import bilevel
    >>> def apply(w, alpha, x):
    ...     return alpha[0] * x[:, :2] @ w[:2] + alpha[1] * x[:, 2:] @ w[2:]
    >>> def loss(w, alpha, batch):
    ...     return jnp.mean((apply(w, alpha, batch[0]) - batch[1]) ** 2)
    >>> space = Space(
    ...     names=("left", "right"),
    ...     sets="simplex",
    ...     **on_simplices(["left", "right"])._asdict(),
    ...     init=lambda key, batch: jnp.zeros(batch[0].shape[1]),
    ...     apply=apply,
    ...     problem=bilevel.Problem(loss, loss),
    ...     predict=lambda f: (f > 0).astype(int),
    ... )
    >>> space.discretize(jnp.array([0.3, 0.7]))
    'right'
    """

    names: tuple[str, ...]
    sets: Pytree = dataclasses.field(hash=False)
    start: Callable[[], Pytree]
    init: Callable[[jax.Array, Pytree], Pytree]
    apply: Callable[[Pytree, Pytree, Any], jax.Array]
    problem: Problem
    predict: Callable[[jax.Array], jax.Array]
    draw: Callable[[jax.Array], Pytree]
    discretize: Callable[[Pytree], Any]
    one_hot: Callable[[Any], Pytree]


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return names with numbered repetitions: ("sin", "sin") becomes ("sin", "sin 2")."""
    seen = [list(names[: i + 1]).count(name) for i, name in enumerate(names)]
    return tuple(f"{name} {k}" if k > 1 else name for name, k in zip(names, seen, strict=True))


def name_of(function: Callable) -> str:
    """Return a name for a candidate function that the user did not name."""
    named = getattr(function, "name", None) or getattr(function, "__name__", None)
    return named or type(function).__name__


def finite_weights(name: str, alpha: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return ``alpha`` on the host if it has this shape and finite entries."""
    alpha = numpy_array(name, np.asarray(alpha))
    if alpha.shape != shape or not np.isfinite(alpha).all():
        raise ValueError(f"{name}: expected {shape} finite weights, got {alpha.shape}.")
    return alpha


def extended(space: Space, kind: type[Kind], **fields: Any) -> Kind:
    """Return the space as a ``kind`` of space, with these fields added or replaced."""
    return kind(**vars(space) | fields)


class Simplices(NamedTuple):
    """Four fields of a :class:`Space`; see :func:`on_simplices`."""

    start: Callable[[], jax.Array]
    draw: Callable[[jax.Array], jax.Array]
    discretize: Callable[[Any], Any]
    one_hot: Callable[[Any], jax.Array]


def on_simplices(names: Sequence[str], shape: tuple[int, ...] = ()) -> Simplices:
    """Make ``start, draw, discretize, one_hot`` of a space with choices among ``names``.

    There is one choice for ``shape`` (), and an architecture is a name. For ``shape`` (n,), there
    are n of them, and it is a tuple of names.

    Raises
    ------
    ValueError
        If ``names`` are empty or repeated. ``discretize`` raises it for weights of another shape or
        not finite, ``one_hot`` for other names or another number of them.

    Examples
    --------
    >>> start, draw, discretize, one_hot = on_simplices(["relu", "tanh"], (3,))
    >>> start().shape, discretize(one_hot(("relu", "tanh", "tanh")))
    ((3, 2), ('relu', 'tanh', 'tanh'))
    """
    names = tuple(names)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"names: expected at least one, each once, got {list(names)}.")
    places = math.prod(shape)

    def start():
        # A weak type would make a search compile once more.
        return jnp.full((*shape, len(names)), 1 / len(names), jnp.result_type(float))

    def draw(key):
        prng_key("key", key)
        drawn = jax.random.randint(key, shape, 0, len(names), jnp.int32)
        return jax.nn.one_hot(drawn, len(names), dtype=jnp.result_type(float))

    def discretize(alpha):
        alpha = finite_weights("alpha", alpha, (*shape, len(names)))
        chosen = tuple(names[i] for i in alpha.argmax(-1).ravel())
        return chosen if shape else chosen[0]

    def one_hot(architecture):
        chosen = tuple(architecture) if shape else (architecture,)
        if len(chosen) != places or not set(chosen) <= set(names):
            raise ValueError(
                f"architecture: expected {places or 1} of {', '.join(names)}, got {architecture!r}."
            )
        index = jnp.array([names.index(name) for name in chosen]).reshape(shape)
        return jax.nn.one_hot(index, len(names), dtype=jnp.result_type(float))

    return Simplices(start, draw, discretize, one_hot)
