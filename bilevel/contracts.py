"""Define the contracts that the parts of the library share: type aliases and small records.

A bilevel problem is ``min_alpha outer(w*(alpha), alpha, valid)`` with ``w*(alpha)`` a minimizer of
``lower(., alpha, train)``. Weights ``w`` and hyperparameters ``alpha`` are pytrees of floating
arrays. A batch is any pytree of arrays.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

Pytree = Any  # of arrays; `chex.ArrayTree` excludes None, floats and user-defined classes
Loss = Callable[[Pytree, Pytree, Pytree], jax.Array]  # loss(w, alpha, batch) -> scalar
LinearMap = Callable[[Pytree], Pytree]  # hvp(v) -> H v: linear, symmetric, on trees like w


class Inner(NamedTuple):
    """The optimizer of a lower solver. Its state carries over from one outer step to the next."""

    rule: Callable[[Pytree], Any]  # alpha -> optax.GradientTransformation
    steps: int  # updates of one run


class Constraint(NamedTuple):
    """A closed convex set, or a convex non-smooth term, by its proximal operator.

    The operator is piecewise smooth. A code names a piece: the weights at a bound, the signs of the
    weights, whether a ball is active. Codes are pytrees of booleans or small integers. A tie counts
    as active. :mod:`bilevel.constraints` has the sets and terms.
    """

    # blank(w) -> code: any code, with the shapes of all codes of these weights.
    blank: Callable[..., Pytree]
    # identify(w, g, alpha, eta) -> code: the piece of a gradient step w - eta g.
    identify: Callable[..., Pytree]
    # prox(code, z, alpha, eta) -> w: the operator on this piece, differentiable in z and alpha.
    prox: Callable[..., Pytree]
    # step(code, w, g, alpha, eta): prox(code, w - eta g) - w, computed without cancellation.
    step: Callable[..., Pytree]
    # tangent(code, w, alpha, v) -> v: the orthogonal projection on the tangent space of the active
    # manifold; None if unknown.
    tangent: Callable[..., Pytree] | None
    # curvature(code, w, g, alpha, v) -> K v: the manifold's curvature, and the term's along it.
    curvature: Callable[..., Pytree]
    # margins(code, w, g, alpha): the distance of every decision of the code from its change.
    # Positive if the decision is right, infinite if there is none, NaN if a multiplier is
    # undetermined.
    margins: Callable[..., Pytree] | None
    # check(w, alpha) -> bool: whether the parameters are valid; raises if they are known.
    check: Callable[..., jax.Array]
    # smooth(w, alpha) -> scalar: a smooth part of the term, which solvers add to the lower loss.
    smooth: Callable[..., jax.Array] | None = None

    def completed(self, lower: Loss) -> Loss:
        """Return the lower loss with the smooth part of the term."""
        extra = self.smooth
        if extra is None:
            return lower
        return lambda w, alpha, batch: lower(w, alpha, batch) + extra(w, alpha)


class LowerSolver(NamedTuple):
    """A lower solver: a pair of pure functions, differentiable in ``alpha``.

    Attributes
    ----------
    init : ``init(w) -> state``
        The state carries over between outer steps: optimizer momentum, or the last adjoint.
    run : ``run(lower, alpha, w, state, batch) -> (w, state)``
        Solves the lower problem from ``w``.
    closed_form : bool
        Whether ``run`` does not call ``lower``, so that ``info`` solves for an adjoint itself.
    gradients : int, optional
        Approximate number of lower gradients of a hypergradient, which limits the cost of ``info``.
    init_at : ``init_at(alpha, w) -> state``, or None
        Replaces ``init`` if the state depends on ``alpha``.
    batches : ``batches(key, data) -> batch``, or None
        If given, ``run`` draws batches itself, and its ``batch`` argument is a :class:`Keyed`.
    stateful : bool
        Whether ``run`` updates the variables of :class:`Stateful` weights at every step, from a
        lower loss that returns ``(loss, variables)``. Other solvers update them once, at the
        solution.
    reports : bool
        Whether the state has a ``report`` on the adjoint's linear solve (:func:`bilevel.implicit`).
    of_alpha : bool
        Whether the solution depends on ``alpha`` and the batch only, wherever ``run`` starts.
    inner : Inner, or None
        The optimizer of the steps of ``run``, if it has one.
    constraint : Constraint, or None
        The set or non-smooth term of the lower problem, if it has one.
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
    constraint: Constraint | None = None

    def start(self, alpha: Pytree, w: Pytree) -> Pytree:
        """Return the first state."""
        w = w if self.stateful else params_of(w)
        return self.init(w) if self.init_at is None else self.init_at(alpha, w)

    def batch(self, train: Pytree) -> Pytree:
        """Return a batch of ``train``: all of it, or one drawn with its key."""
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
        (:class:`bilevel.stochastic.BatchedData`), here and in ``step``. ``indices`` are the first
        :class:`BatchIndices`. Only the parts of a state in :class:`Tables` may be large.
    step : ``step(problem, alpha, w, state, indices, train, valid)``
        Returns ``(direction, w, state, metrics)``. ``direction``, like ``alpha``, estimates the
        hypergradient; the optimizer moves ``alpha`` by it. ``metrics`` contain ``value`` and
        ``lower``, the two losses on the batch.
    adjoint : ``adjoint(state) -> v`` like ``w``, or None
        The adjoint that the method keeps, if it has one.
    draws : tuple of two int
        Numbers of batches of ``train`` and of ``valid`` per step.
    memory : ``memory(train, valid) -> steps``
        Largest age of the parts of a direction, in steps: ``alpha`` should move little within it.
    restart : ``restart(state, number, train, valid) -> state``
        Prepares an earlier state that a search restores after step ``number``, because alpha
        diverged. Its :class:`Tables` are those of the later state and must not be changed. The data
        have shapes instead of rows here.
    """

    init: Callable[..., Pytree]
    step: Callable[..., tuple[Pytree, Pytree, Pytree, dict[str, jax.Array]]]
    adjoint: Callable[[Pytree], Pytree] | None = None
    draws: tuple[int, int] = (1, 1)
    memory: Callable[..., float] = lambda train, valid: 1
    restart: Callable[..., Pytree] = lambda state, number, train, valid: state


class BatchIndices(NamedTuple):
    """The batches of one step of a :class:`SingleLoop`, and the next ones, to read tables ahead."""

    number: jax.Array  # [], int: steps done before
    train: jax.Array  # [draws of train], int
    valid: jax.Array  # [draws of valid], int
    next_train: jax.Array  # [], int: the next step's first
    next_valid: jax.Array  # [], int
    uniform: jax.Array  # [], drawn uniformly from [0, 1)


class Tables(NamedTuple):
    """Parts of a state that a search never copies or restores, because they are large."""

    content: Pytree


class Stateful(NamedTuple):
    """Weights with variables that training updates without differentiation, e.g. batch statistics.

    This is the ``w`` of a stateful problem. Optimizers, linear solves and hypergradients see
    ``params``; ``variables`` are the last ones that the lower loss returned.
    """

    params: Pytree
    variables: Pytree


def params_of(w: Pytree) -> Pytree:
    """Return the optimized part of ``w``: all except variables."""
    return w.params if isinstance(w, Stateful) else w


class Keyed(NamedTuple):
    """Data to draw batches from, and the key of the draws."""

    key: jax.Array
    data: Pytree


@dataclasses.dataclass(frozen=True)
class Joint:
    """A sampler of both batches at once; :func:`bilevel.jointly` makes it."""

    sample: Callable[[jax.Array, Pytree, Pytree], tuple[Pytree, Pytree]]

    def __call__(self, key: jax.Array, train: Pytree, valid: Pytree) -> tuple[Pytree, Pytree]:
        """Return the batch of the lower loss, and that of the outer loss."""
        pair = self.sample(key, train, valid)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            several = isinstance(pair, tuple | list)
            what = f"{len(pair)} things" if several else f"a {type(pair).__name__}"
            raise ValueError(
                f"sample: expected a function that returns a pair (train, valid), got {what}."
            )
        return pair[0], pair[1]


@dataclasses.dataclass(frozen=True)
class Partition:
    """The data cut into batches once; :func:`bilevel.partition` makes it."""

    batch_size: int

    def __call__(self, key: jax.Array, data: Pytree) -> NoReturn:
        """Raise, because a partition is not a sampler."""
        raise ValueError(
            "batches: expected a sampler such as bilevel.minibatches(batch_size), got a partition, "
            "which is for single-loop methods (bilevel.saba)."
        )


class Point(NamedTuple):
    """The point at which a Hessian is taken, for inverses that work in function space."""

    w: Pytree
    alpha: Pytree
    batch: Pytree


# inverse(hvp, b, x0, point) -> x with H x = b, exactly or approximately. It is linear in b up to
# its tolerance, and may ignore the warm start x0.
Inverse = Callable[[LinearMap, Pytree, Pytree, Point], Pytree]


class Evaluation(NamedTuple):
    """Errors of a configuration with its own trained model; smaller is better."""

    valid: float
    test: float = math.nan


class Shared(NamedTuple):
    """Errors of configurations with shared weights."""

    errors: np.ndarray  # [k], mean validation error over a configuration's own rows; NaN for none
    counts: np.ndarray  # [k], how many rows those are


class Selection(NamedTuple):
    """A choice among configurations, for :mod:`bilevel.baselines`.

    Attributes
    ----------
    evaluate : ``evaluate(key, config, resource)``
        Trains a model for one configuration with a budget ``resource``: a number of features,
        steps or epochs. Returns the validation error, or a tuple of the validation and test errors.
    share : ``share(key, configs, probabilities [k], resource, *, whole=False)``, or None
        Trains one model, each row of the data under a configuration drawn at random. Returns a
        tuple of the configurations' validation errors [k] and numbers of rows [k]. Each error is a
        mean over the validation rows that drew the configuration (NaN without such rows), or with
        ``whole`` over all rows.
    """

    evaluate: Callable[..., Evaluation | float]
    share: Callable[..., Shared] | None = None
