"""How to search with shared weights: DARTS, GAEA and others, as values for :func:`bilevel.search`.

Each function takes a :class:`bilevel.spaces.Space` (or a :class:`bilevel.Problem`, all of whose
``alpha`` is on simplices), the optimizer of the weights, that of ``alpha``, and a batch size; it
returns a :class:`Strategy`, which :func:`run` searches by.

======================  =======================  =====================  ======================
strategy                alpha descends on        weights respond by     alpha's simplices
======================  =======================  =====================  ======================
:func:`darts`           validation batches       no step, or one        Adam on logits
:func:`gaea`            validation or training   no step                exponentiated gradient
:func:`unrolled`        validation batches       K steps                Adam on logits
:func:`joint`           training batches         no step                Adam on logits
:func:`weight_sharing`  nothing                  architectures drawn
======================  =======================  =====================  ======================

None of them has an estimate of its hypergradient's error, as the shared weights are never trained
to a minimum: ``Strategy.error`` says so in a sentence. For one that has, use
:func:`bilevel.implicit`.

References
----------
Liu, Simonyan & Yang, DARTS, ICLR 2019; Li, Khodak, Balcan & Talwalkar, Geometry-Aware Gradient
Algorithms for NAS, ICLR 2021; Li & Talwalkar, Random Search and Reproducibility for NAS, UAI 2019.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import optax

from bilevel._search import SearchResult, search
from bilevel.batches import minibatches
from bilevel.checks import whole
from bilevel.geometry import exponentiate, project, softmax
from bilevel.nets.evaluation import in_batches, over_batches
from bilevel.problem import Problem
from bilevel.problem import side_by_side as problems_side_by_side
from bilevel.protocols import Loss, LowerSolver, Pytree
from bilevel.solvers import one_step
from bilevel.solvers import unrolled as unrolled_solver
from bilevel.spaces.space import Space

Rate: TypeAlias = float | optax.Schedule
Optimizer: TypeAlias = optax.GradientTransformation

_NEVER_TRAINED = (
    "; its error has no estimate, since the shared weights are never trained to a minimum"
)


class Strategy(NamedTuple):
    """What :func:`bilevel.search` is called with; :func:`run` does it.

    Attributes
    ----------
    problem : Problem
    solver : LowerSolver
    optimizer : optax.GradientTransformation, of ``alpha``.
    batches : ``batches(key, data) -> batch``
    on_training_rows : bool
        Whether ``alpha`` descends on training rows too: validation rows are then not looked at.
    gradients : int
        Of minibatches that a step takes, a Hessian's product counted as two.
    error : str
        What is known of the hypergradient's error, in a sentence.
    draws : bool
        Whether architectures are drawn: ``alpha`` then stays, and :func:`best_drawn` chooses one.
    """

    problem: Problem
    solver: LowerSolver
    optimizer: Optimizer
    batches: Callable[[jax.Array, Pytree], Pytree]
    on_training_rows: bool
    gradients: int
    error: str
    draws: bool = False


def darts(
    space: Space | Problem,
    *,
    weights: Optimizer | float,
    alpha: Optimizer | Rate,
    batch_size: int,
    order: int = 1,
    radius: float | None = None,
) -> Strategy:
    """DARTS: a step of the weights, then a step of ``alpha`` on a validation batch.

    Parameters
    ----------
    space : Space, or Problem
    weights : optax.GradientTransformation, or a rate of plain SGD
        :func:`darts_sgd` is the paper's for convolutional networks.
    alpha : rate of the paper's Adam, or an optax.GradientTransformation of ``alpha``
        :func:`logits` has its other constants. With one of your own, :func:`on_sets` helps.
    batch_size : int
    order : {1, 2}
        2 differentiates through one step of the weights, exactly.
    radius : float, optional
        With order 2: by the paper's finite difference instead, ``radius`` (0.01 there) over the
        norm of the validation gradient.

    Returns
    -------
    Strategy

    Raises
    ------
    ValueError
        For another order, a radius with order 1, or a ``batch_size`` under 1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from bilevel.spaces.skips import skip_space
    >>> space = skip_space(["relu", "tanh"], depth=3, width=4, classes=2)
    >>> data = jnp.eye(6), jnp.arange(6) % 2
    >>> w = space.init(jax.random.key(0), data)
    >>> plan = darts(space, weights=0.1, alpha=0.1, batch_size=2)
    >>> key = jax.random.key(1)
    >>> found = run(plan, space.start(), w, data, data, steps=3, key=key, progress=False)
    >>> found.history["value"].shape, found.alpha["activations"].shape
    ((3,), (2, 2))
    """
    if order not in (1, 2):
        raise ValueError(f"order: expected 1 or 2, got {order!r}.")
    if radius is not None and order == 1:
        raise ValueError(f"radius: expected None with order 1, got {radius}.")
    strategy = _first_order(space, weights, _adam(space, alpha), batch_size)
    if order == 1:
        return strategy
    exactly = "" if radius is None else ", by a finite difference"
    return strategy._replace(
        solver=one_step(weights, radius=radius),
        gradients=4,
        error=f"hypergradient through one step of the weights{exactly}{_NEVER_TRAINED}",
    )


def gaea(
    space: Space | Problem,
    *,
    weights: Optimizer | float,
    alpha: Optimizer | Rate,
    batch_size: int,
    on_training_rows: bool = False,
) -> Strategy:
    """GAEA: exponentiated gradient of first order, on validation or on training batches.

    Parameters
    ----------
    space, weights
        As in :func:`darts`.
    alpha : rate of exponentiated gradient, or an optax.GradientTransformation of ``alpha``
    batch_size : int
    on_training_rows : bool
        The paper's single-level version, on the batch of the weights' step.

    Returns
    -------
    Strategy

    Raises
    ------
    ValueError
        For a ``batch_size`` under 1.

    Examples
    --------
    >>> from bilevel.spaces.darts import darts_space
    >>> plan = gaea(darts_space(cells=1), weights=darts_sgd(0.025), alpha=0.1, batch_size=32)
    >>> plan.gradients, plan.on_training_rows
    (2, False)
    """
    optimizer = _of_alpha(space, alpha, exponentiated, optax.sgd)
    strategy = _first_order(space, weights, optimizer, batch_size)
    return _on_training_rows(strategy) if on_training_rows else strategy


def joint(
    space: Space | Problem,
    *,
    weights: Optimizer | float,
    alpha: Optimizer | Rate,
    batch_size: int,
) -> Strategy:
    """Single-level training: weights and ``alpha`` descend the training loss together.

    It is :func:`darts` with training rows in the place of validation rows.

    Parameters
    ----------
    space : Space, or Problem
    weights : optax.GradientTransformation, or a rate of plain SGD
    alpha : rate of the paper's Adam, or an optax.GradientTransformation of ``alpha``
    batch_size : int

    Returns
    -------
    Strategy

    Raises
    ------
    ValueError
        For a ``batch_size`` under 1.

    Examples
    --------
    >>> from bilevel.spaces.darts import darts_space
    >>> joint(darts_space(cells=1), weights=0.1, alpha=0.1, batch_size=32).on_training_rows
    True
    """
    return _on_training_rows(_first_order(space, weights, _adam(space, alpha), batch_size))


def unrolled(
    space: Space | Problem,
    *,
    weights: Optimizer | float,
    alpha: Optimizer | Rate,
    batch_size: int,
    steps: int = 5,
) -> Strategy:
    """DARTS through ``steps`` steps of the weights on one training batch.

    Parameters
    ----------
    space, weights, alpha, batch_size
        As in :func:`darts`.
    steps : int
        Of the weights, between two of ``alpha``: a schedule of theirs counts them all.

    Returns
    -------
    Strategy

    Raises
    ------
    ValueError
        For ``steps`` or a ``batch_size`` under 1.

    Examples
    --------
    >>> from bilevel.spaces.darts import darts_space
    >>> unrolled(darts_space(cells=1), weights=0.1, alpha=0.1, batch_size=32).gradients
    16
    """
    steps = whole("steps", steps, 1)
    strategy = _first_order(space, weights, _adam(space, alpha), batch_size)
    return strategy._replace(
        solver=unrolled_solver(weights, steps, backprop=steps),
        gradients=3 * steps + 1,
        error=f"hypergradient through {steps} steps of the weights{_NEVER_TRAINED}",
    )


def weight_sharing(space: Space, *, weights: Optimizer | float, batch_size: int) -> Strategy:
    """Random search with weight sharing: every batch trains an architecture drawn for it.

    ``alpha`` stays where it starts; :func:`best_drawn` chooses among architectures at the end.

    Parameters
    ----------
    space : Space
    weights, batch_size
        As in :func:`darts`.

    Returns
    -------
    Strategy

    Raises
    ------
    ValueError
        For a Problem, which has no architectures to draw, or a ``batch_size`` under 1.

    Examples
    --------
    >>> from bilevel.spaces.darts import darts_space
    >>> weight_sharing(darts_space(cells=1), weights=0.1, batch_size=32).gradients
    1
    """
    if not isinstance(space, Space):
        got = type(space).__name__
        raise ValueError(f"space: expected a Space, to draw architectures from, got {got}.")
    rows = minibatches(batch_size)

    def with_architecture(key, data):
        keys = jax.random.split(key)
        return space.draw(keys[0]), rows(keys[1], data)

    def of(loss: Loss) -> Loss:
        return lambda w, _, batch: loss(w, *batch)

    return Strategy(
        Problem(of(space.problem.lower), of(space.problem.outer)),
        unrolled_solver(weights, 1, backprop=0),
        optax.set_to_zero(),
        with_architecture,
        on_training_rows=False,
        gradients=1,
        error="no hypergradient: architectures are drawn",
        draws=True,
    )


def run(
    strategy: Strategy,
    alpha: Pytree,
    w: Pytree,
    train: Pytree,
    valid: Pytree,
    **options: Any,
) -> SearchResult:
    """:func:`bilevel.search` by a strategy.

    Parameters
    ----------
    strategy : Strategy
    alpha, w, train, valid
        As there: ``space.start()``, ``space.init(key, train)``, and the data.
    **options
        The others of :func:`bilevel.search`: ``steps`` and ``key`` are required.

    Returns
    -------
    SearchResult

    Raises
    ------
    ValueError, NonFiniteError
        As there.

    Examples
    --------
    See :func:`darts`.
    """
    return search(
        strategy.problem,
        strategy.solver,
        strategy.optimizer,
        alpha,
        w,
        train,
        train if strategy.on_training_rows else valid,
        batches=strategy.batches,
        **options,
    )


def side_by_side(strategy: Strategy, copies: int) -> Strategy:
    """The same search ``copies`` times at once: arrays of state and data lead with that axis.

    Losses are sums over the copies, as in :func:`bilevel.side_by_side`.

    Raises
    ------
    ValueError
        If ``copies`` is not a whole number of at least 1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from bilevel.spaces.skips import skip_space
    >>> space = skip_space(["relu", "tanh"], depth=3, width=4, classes=2)
    >>> data = jnp.stack([jnp.eye(6)] * 2), jnp.stack([jnp.arange(6) % 2] * 2)
    >>> plan = side_by_side(darts(space, weights=0.1, alpha=0.1, batch_size=2), 2)
    >>> alpha = jax.tree.map(lambda a: jnp.stack([a] * 2), space.start())
    >>> w = jax.vmap(space.init)(jax.random.split(jax.random.key(0), 2), data)
    >>> found = run(plan, alpha, w, data, data, steps=1, key=jax.random.key(1), progress=False)
    >>> found.alpha["skips"].shape
    (2, 1)
    """
    copies = whole("copies", copies, 1)

    def of_all(key, data):
        return jax.vmap(strategy.batches)(jax.random.split(key, copies), data)

    return strategy._replace(problem=problems_side_by_side(strategy.problem), batches=of_all)


def best_drawn(
    key: chex.PRNGKey, space: Space, w: Pytree, rows: Pytree, *, samples: int, batch_size: int
) -> Pytree:
    """The one of ``samples`` architectures drawn that has the lowest validation loss at ``w``.

    The end of random search with weight sharing. Pure: put it under ``jit`` and ``vmap``.

    Parameters
    ----------
    key : jax.Array
    space : Space
    w : pytree
        Shared weights.
    rows : (inputs [n, ...], labels [n])
        Of the validation set, looked at in batches of ``batch_size``.
    samples, batch_size : int

    Returns
    -------
    alpha : pytree, the corner of that architecture

    Raises
    ------
    ValueError
        For ``samples`` or a ``batch_size`` under 1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from bilevel.spaces.skips import skip_space
    >>> space = skip_space(["relu", "tanh"], depth=3, width=4, classes=2)
    >>> rows = jnp.eye(6), jnp.arange(6) % 2
    >>> w = space.init(jax.random.key(0), rows)
    >>> corner = best_drawn(jax.random.key(1), space, w, rows, samples=4, batch_size=6)
    >>> bool((corner["activations"].max(axis=-1) == 1).all())
    True
    """
    losses, batches = over_batches(space.problem.outer), in_batches([rows], batch_size)
    keys = jax.random.split(key, whole("samples", samples, 1))
    found = jax.lax.map(lambda key: losses(w, space.draw(key), batches)[0], keys)
    return space.draw(keys[found.argmin()])


# ----------------------------------------------------------------------------- optimizers


def logits(rate: Rate) -> Optimizer:
    """DARTS's optimizer of ``alpha`` on simplices: Adam on logits, momentum 0.5, decay 1e-3.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> optimizer = logits(0.1)
    >>> alpha = jnp.array([0.5, 0.5])
    >>> updates, _ = optimizer.update(jnp.array([1.0, 0.0]), optimizer.init(alpha), alpha)
    >>> bool(updates[0] < 0)
    True
    """
    return softmax(optax.chain(optax.add_decayed_weights(1e-3), optax.adam(rate, b1=0.5)))


def exponentiated(rate: Rate) -> Optimizer:
    """GAEA's optimizer of ``alpha`` on simplices: exponentiated gradient.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> optimizer = exponentiated(1.0)
    >>> alpha = jnp.array([0.5, 0.5])
    >>> updates, _ = optimizer.update(jnp.log(jnp.array([1.0, 3.0])), optimizer.init(alpha), alpha)
    >>> updates.round(4)
    Array([ 0.25, -0.25], dtype=float...)
    """
    return optax.chain(optax.sgd(rate), exponentiate())


def darts_sgd(rate: Rate) -> Optimizer:
    """DARTS's optimizer of weights: momentum 0.9, weight decay 3e-4, gradients clipped at norm 5.

    Examples
    --------
    >>> optimizer = darts_sgd(optax.cosine_decay_schedule(0.025, 1000))
    """
    return optax.chain(
        optax.clip_by_global_norm(5.0),
        optax.add_decayed_weights(3e-4),
        optax.sgd(rate, momentum=0.9),
    )


def on_sets(sets: Pytree, *, simplex: Optimizer, other: Optimizer) -> Optimizer:
    """An optimizer of a space's ``alpha``, each leaf kept in the set that ``space.sets`` says.

    Parameters
    ----------
    sets : pytree of {"simplex", "box", "free"}
    simplex : optax.GradientTransformation
        One that stays on simplices.
    other : optax.GradientTransformation
        Any; what is in the box is projected onto it here.

    Raises
    ------
    ValueError
        For other words in ``sets``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> sets = {"activations": "simplex", "skips": "box"}
    >>> optimizer = on_sets(sets, simplex=exponentiated(1.0), other=optax.sgd(1.0))
    >>> alpha = {"activations": jnp.array([[0.5, 0.5]]), "skips": jnp.array([0.5])}
    >>> slope = {"activations": jnp.array([[0.0, jnp.log(3.0)]]), "skips": jnp.array([-3.0])}
    >>> updates, _ = jax.jit(optimizer.update)(slope, optimizer.init(alpha), alpha)
    >>> moved = optax.apply_updates(alpha, updates)
    >>> moved["activations"].round(4), moved["skips"]
    (Array([[0.75, 0.25]], dtype=float...), Array([1.], dtype=float...))
    """
    words = set(jax.tree.leaves(sets))
    if not words <= {"simplex", "box", "free"}:
        raise ValueError(f"sets: expected simplex, box or free, got {sets!r}.")
    if words == {"simplex"}:
        return simplex
    parts = {"simplex": simplex, "box": optax.chain(other, project("box")), "free": other}
    return optax.partition({word: parts[word] for word in sorted(words)}, sets)


def _first_order(
    space: Space | Problem, weights: Optimizer | float, optimizer: Optimizer, batch_size: int
) -> Strategy:
    return Strategy(
        space.problem if isinstance(space, Space) else space,
        unrolled_solver(weights, 1, backprop=0),
        optimizer,
        minibatches(batch_size),
        on_training_rows=False,
        gradients=2,
        error="hypergradient of first order, without the weights' response to α" + _NEVER_TRAINED,
    )


def _adam(space: Space | Problem, alpha: Optimizer | Rate) -> Optimizer:
    return _of_alpha(space, alpha, logits, lambda rate: optax.adam(rate, b1=0.5))


def _of_alpha(
    space: Space | Problem,
    alpha: Optimizer | Rate,
    simplex: Callable[[Rate], Optimizer],
    other: Callable[[Rate], Optimizer],
) -> Optimizer:
    """``alpha``, or where it is a rate, the strategy's own optimizers on the space's sets."""
    if isinstance(alpha, optax.GradientTransformation):
        return alpha
    sets = space.sets if isinstance(space, Space) else "simplex"
    return on_sets(sets, simplex=simplex(alpha), other=other(alpha))


def _on_training_rows(strategy: Strategy) -> Strategy:
    problem = dataclasses.replace(strategy.problem, outer=strategy.problem.lower)
    return strategy._replace(
        problem=problem,
        on_training_rows=True,
        error="no hypergradient: α descends the training loss",
    )
