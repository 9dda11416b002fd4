"""The contracts that the parts of the library share: type aliases and two small records.

A bilevel problem is ``min_alpha outer(w*(alpha), alpha, valid)`` with ``w*(alpha)`` a minimiser of
``lower(., alpha, train)``. Parameters ``w`` and hyperparameters ``alpha`` are pytrees of floating
arrays; a batch is any pytree of arrays.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

Pytree = Any
"""A pytree of arrays. `chex.ArrayTree` has neither None nor floats nor classes of a user's own."""

Loss = Callable[[Pytree, Pytree, Pytree], jax.Array]
"""``loss(w, alpha, batch) -> scalar``."""

LinearMap = Callable[[Pytree], Pytree]
"""``hvp(v) -> H v``: linear, symmetric, on pytrees shaped like ``w``."""


class Inner(NamedTuple):
    """The optimizer of a lower solver, whose state carries over from one outer step to the next."""

    rule: Callable[[Pytree], Any]  # alpha -> optax.GradientTransformation
    steps: int  # updates of one run


class LowerSolver(NamedTuple):
    """A lower solver: a pair of pure functions, differentiable in ``alpha``.

    Attributes
    ----------
    init : ``init(w) -> state``.
        What the solver carries from one outer step to the next: optimizer momentum, the last
        adjoint as the warm start of the next linear solve.
    run : ``run(lower, alpha, w, state, batch) -> (w, state)``.
        Solves the lower problem from ``w``.
    closed_form : bool
        True where ``run`` does not call ``lower``: its adjoint then cannot be read off a tilted
        lower loss, and is solved for independently when the hypergradient is checked.
    gradients : int, optional
        About how many lower gradients a hypergradient by this solver takes, where that is known:
        what is spent on its error follows.
    init_at : ``init_at(alpha, w) -> state``, or None
        In the place of ``init`` where the state depends on ``alpha``.
    batches : ``batches(key, data) -> batch``, or None
        Where ``run`` draws batches itself: the one that it is given is a :class:`Keyed`.
    stateful : bool
        Whether ``run``, given :class:`Stateful` weights and a lower loss that returns
        ``(loss, variables)``, updates the variables at its steps. Others are run at fixed ones,
        which then are updated once, at the solution.
    reports : bool
        Whether the state has a field ``report`` on the adjoint's linear solve
        (:func:`bilevel.implicit`).
    of_alpha : bool
        Whether the solution is a function of ``alpha`` and the batch alone, wherever ``run``
        starts.
    inner : Inner, or None
        The optimizer that ``run`` takes its steps by, if it has one.
    """

    init: Callable[[Pytree], Pytree]
    run: Callable[[Loss, Pytree, Pytree, Pytree, Pytree], tuple[Pytree, Pytree]]
    closed_form: bool = False
    gradients: int | None = None
    init_at: Callable[[Pytree, Pytree], Pytree] | None = None
    batches: Callable[[jax.Array, Pytree], Pytree] | None = None
    stateful: bool = False
    reports: bool = False
    of_alpha: bool = False
    inner: Inner | None = None

    def start(self, alpha: Pytree, w: Pytree) -> Pytree:
        """The first state."""
        w = w if self.stateful else params_of(w)
        return self.init(w) if self.init_at is None else self.init_at(alpha, w)

    def batch(self, train: Pytree) -> Pytree:
        """A batch of what ``run`` is given: all of it, or one drawn by its key."""
        return train if self.batches is None else self.batches(*train)


class DescentState(NamedTuple):
    """State of :func:`bilevel.descent`, and of a search."""

    alpha: Pytree
    w: Pytree
    solver_state: Pytree  # the lower solver's: momentum, warm starts
    optimizer_state: Pytree  # of the optimizer of alpha
    step: jax.Array  # [], int: outer steps done


class SingleLoop(NamedTuple):
    """A method that moves ``w`` and ``alpha`` together, by batches: pure functions.

    Attributes
    ----------
    init : ``init(problem, alpha, w, indices, train, valid) -> state``
        ``train`` and ``valid`` are the data in batches
        (:class:`bilevel.stochastic.BatchedData`), here and in ``step``, ``indices`` the first
        :class:`BatchIndices`. Of a state only what is in :class:`Tables` may be large.
    step : ``step(problem, alpha, w, state, indices, train, valid)``
        Returns ``(direction, w, state, metrics)``. ``direction``, like ``alpha``, estimates the
        hypergradient; the optimizer moves ``alpha`` by it. ``metrics`` hold ``value`` and
        ``lower``, the two losses on the batch.
    adjoint : ``adjoint(state) -> v`` like ``w``, or None
        The adjoint that the method keeps; None for methods that have none.
    draws : tuple of two int
        How many batches of ``train`` and of ``valid`` a step takes.
    memory : ``memory(train, valid) -> steps``
        How old parts of a direction may be: in so many steps ``alpha`` should not move much.
    restart : ``restart(state, number, train, valid) -> state``
        Prepares a state that a search puts back to an earlier one after step ``number``, because
        alpha diverged. Its :class:`Tables` are those of the later state, and not to be touched.
    """

    init: Callable[..., Pytree]
    step: Callable[..., tuple[Pytree, Pytree, Pytree, dict[str, jax.Array]]]
    adjoint: Callable[[Pytree], Pytree] | None = None
    draws: tuple[int, int] = (1, 1)
    memory: Callable[..., float] = lambda train, valid: 1
    restart: Callable[..., Pytree] = lambda state, number, train, valid: state


class BatchIndices(NamedTuple):
    """Which batches a step of a :class:`SingleLoop` takes; the next ones, to read tables ahead."""

    number: jax.Array  # [], int: steps done before
    train: jax.Array  # [draws of train], int
    valid: jax.Array  # [draws of valid], int
    next_train: jax.Array  # [], int: the next step's first
    next_valid: jax.Array  # [], int
    uniform: jax.Array  # [], drawn uniformly from [0, 1)


class Tables(NamedTuple):
    """Those parts of a method's state that a search never copies: too large, or not worth it.

    After a step that is not finite the other parts are put back to what they were; these are not.
    """

    content: Pytree


class Stateful(NamedTuple):
    """Weights with variables that training updates and nobody differentiates: batch statistics.

    Where a problem is stateful, this is its ``w``: optimizers, linear solves and hypergradients see
    ``params``; ``variables`` are what the lower loss last returned.
    """

    params: Pytree
    variables: Pytree


def params_of(w: Pytree) -> Pytree:
    """What is optimized: all of ``w`` but variables."""
    return w.params if isinstance(w, Stateful) else w


class Keyed(NamedTuple):
    """Data to draw batches from, and the key to draw them by."""

    key: jax.Array
    data: Pytree


@dataclasses.dataclass(frozen=True)
class Joint:
    """A sampler of both batches at once; :func:`bilevel.jointly` makes it."""

    sample: Callable[[jax.Array, Pytree, Pytree], tuple[Pytree, Pytree]]

    def __call__(self, key: jax.Array, train: Pytree, valid: Pytree) -> tuple[Pytree, Pytree]:
        """The batch of the lower loss, and that of the outer loss."""
        pair = self.sample(key, train, valid)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            several = isinstance(pair, tuple | list)
            what = f"{len(pair)} things" if several else f"a {type(pair).__name__}"
            raise ValueError(
                f"sample: expected a function that returns a pair (train, valid), got {what}."
            )
        train, valid = pair
        return train, valid


@dataclasses.dataclass(frozen=True)
class Partition:
    """The data cut into batches once; :func:`bilevel.partition` makes it."""

    batch_size: int

    def __call__(self, key: jax.Array, data: Pytree) -> NoReturn:
        """Refuse to be a sampler."""
        raise ValueError(
            "batches: expected a sampler such as bilevel.minibatches(batch_size), got a partition, "
            "which is for single-loop methods (bilevel.saba)."
        )


class Point(NamedTuple):
    """Where a Hessian is taken: an inverse that works in function space needs to know."""

    w: Pytree
    alpha: Pytree
    batch: Pytree


Inverse = Callable[[LinearMap, Pytree, Pytree, Point], Pytree]
"""``inverse(hvp, b, x0, point) -> x`` with ``H x = b`` or an approximation of it, linear in ``b``
up to its tolerance; ``x0`` is a warm start that an inverse is free to ignore."""


class Evaluation(NamedTuple):
    """How good a configuration is, by a model of its own; errors, smaller is better."""

    valid: float
    test: float = math.nan


class Shared(NamedTuple):
    """How good configurations look through shared weights."""

    errors: np.ndarray  # [k], mean validation error over a configuration's own rows; NaN for none
    counts: np.ndarray  # [k], how many rows those are


class Selection(NamedTuple):
    """A choice among configurations, as :mod:`bilevel.baselines` sees it.

    Attributes
    ----------
    evaluate : ``evaluate(key, config, resource)``
        Trains a model for one configuration; ``resource`` is what it may spend: a number of
        features, steps or epochs. Returns the validation error, or a tuple of the validation and
        the test error.
    share : ``share(key, configs, probabilities [k], resource, *, whole=False)``, or None
        Trains one model, each row of the data under a configuration drawn at random. Returns a
        tuple of the configurations' validation errors [k] and the numbers of rows [k] that these
        are means over. Errors are over the validation rows that a configuration drew, NaN where it
        drew none; with ``whole`` over all rows.
    """

    evaluate: Callable[..., Evaluation | float]
    share: Callable[..., Shared] | None = None
