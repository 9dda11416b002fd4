"""DARTS, GAEA, joint training, K unrolled steps and weight sharing as strategies."""

import dataclasses

import jax
import optax

from bilevel.contracts import Loss
from bilevel.internal.checks import integer
from bilevel.outer_loop.batches import jointly, minibatches
from bilevel.problem.problem import Problem, split_losses
from bilevel.solvers import one_step
from bilevel.solvers import unrolled as unrolled_solver
from bilevel.spaces.space import Space
from bilevel.strategies.optimizers import Optimizer, Rate, exponentiated, logits, on_sets
from bilevel.strategies.strategy import Strategy

_NEVER_TRAINED = (
    "; its error has no estimate, since the shared weights are never trained to a minimum"
)


def darts(
    space: Space | Problem,
    *,
    weight_optimizer: Optimizer | float,
    alpha_optimizer: Optimizer | Rate,
    batch_size: int,
    order: int = 1,
    radius: float | None = None,
) -> Strategy:
    """Alternate a step of the weights and a step of ``alpha`` on a validation batch: DARTS.

    Parameters
    ----------
    space : Space or Problem
    weight_optimizer : optax.GradientTransformation or float
        A float is the rate of plain SGD. :func:`darts_sgd` is the paper's for convolutional
        networks.
    alpha_optimizer : float, optax.Schedule or optax.GradientTransformation
        A rate or schedule is that of the paper's Adam (:func:`logits` has its other constants).
        :func:`on_sets` helps to write another optimizer.
    batch_size : int
    order : {1, 2}
        2 differentiates through one step of the weights, exactly.
    radius : float, optional
        With order 2: use the paper's finite difference, with ``radius`` (0.01 there) over the norm
        of the validation gradient.

    Raises
    ------
    ValueError
        If ``order`` is not 1 or 2, ``radius`` is set with order 1, or ``batch_size`` is under 1.

    Examples
    --------
    :func:`run` has an example of a search.

    >>> from bilevel.spaces.darts import darts_space
    >>> plan = darts(darts_space(cells=1), weight_optimizer=0.1, alpha_optimizer=0.1, batch_size=32)
    >>> plan.gradients
    2
    """
    if order not in (1, 2):
        raise ValueError(f"order: expected 1 or 2, got {order!r}.")
    if radius is not None and order == 1:
        raise ValueError(f"radius: expected None with order 1, got {radius}.")
    strategy = _first_order(space, weight_optimizer, alpha_optimizer, batch_size)
    if order == 1:
        return strategy
    exactly = "" if radius is None else ", by a finite difference"
    return strategy._replace(
        solver=one_step(weight_optimizer, radius=radius),
        gradients=4,
        error=f"hypergradient through one step of the weights{exactly}{_NEVER_TRAINED}",
    )


def gaea(
    space: Space | Problem,
    *,
    weight_optimizer: Optimizer | float,
    alpha_optimizer: Optimizer | Rate,
    batch_size: int,
    on_training_rows: bool = False,
) -> Strategy:
    """Move ``alpha`` by exponentiated gradient of first order, on validation or training batches.

    Parameters
    ----------
    space, weight_optimizer
        See :func:`darts`.
    alpha_optimizer : float, optax.Schedule or optax.GradientTransformation
        A rate or schedule is that of exponentiated gradient.
    batch_size : int
        Rows of each batch.
    on_training_rows : bool
        Use the paper's single-level version, on the batch of the weights' step.

    Raises
    ------
    ValueError
        If ``batch_size`` is under 1.

    Examples
    --------
    >>> from bilevel.spaces.darts import darts_space
    >>> plan = gaea(darts_space(cells=1), weight_optimizer=0.1, alpha_optimizer=0.1, batch_size=32)
    >>> plan.gradients, plan.on_training_rows
    (2, False)
    """
    strategy = _first_order(
        space, weight_optimizer, alpha_optimizer, batch_size, exponentiated, optax.sgd
    )
    if not on_training_rows:
        return strategy

    def one_for_both(key, train, valid):
        batch = strategy.batches(key, train)
        return batch, batch

    return _on_training_rows(strategy)._replace(batches=jointly(one_for_both))


def joint(
    space: Space | Problem,
    *,
    weight_optimizer: Optimizer | float,
    alpha_optimizer: Optimizer | Rate,
    batch_size: int,
) -> Strategy:
    """Train weights and ``alpha`` together on the training loss: single-level training.

    This is :func:`darts` with training rows instead of validation rows. Weights and ``alpha`` take
    different batches.

    Parameters
    ----------
    space, weight_optimizer, alpha_optimizer, batch_size
        See :func:`darts`.

    Raises
    ------
    ValueError
        If ``batch_size`` is under 1.

    Examples
    --------
    >>> from bilevel.spaces.darts import darts_space
    >>> plan = joint(darts_space(cells=1), weight_optimizer=0.1, alpha_optimizer=0.1, batch_size=32)
    >>> plan.on_training_rows
    True
    """
    return _on_training_rows(_first_order(space, weight_optimizer, alpha_optimizer, batch_size))


def unrolled(
    space: Space | Problem,
    *,
    weight_optimizer: Optimizer | float,
    alpha_optimizer: Optimizer | Rate,
    batch_size: int,
    steps: int = 5,
) -> Strategy:
    """Move ``alpha`` by the gradient through ``steps`` steps of the weights on one training batch.

    Parameters
    ----------
    space, weight_optimizer, alpha_optimizer, batch_size
        See :func:`darts`.
    steps : int
        Steps of the weights between two of ``alpha``. A schedule of the weights counts all of them.

    Raises
    ------
    ValueError
        If ``steps`` or ``batch_size`` is under 1.

    Examples
    --------
    >>> from bilevel.spaces.darts import darts_space
    >>> space = darts_space(cells=1)
    >>> unrolled(space, weight_optimizer=0.1, alpha_optimizer=0.1, batch_size=32).gradients
    16
    """
    steps = integer("steps", steps, 1)
    strategy = _first_order(space, weight_optimizer, alpha_optimizer, batch_size)
    return strategy._replace(
        solver=unrolled_solver(weight_optimizer, steps, backprop=steps),
        gradients=3 * steps + 1,
        error=f"hypergradient through {steps} steps of the weights{_NEVER_TRAINED}",
    )


def weight_sharing(
    space: Space, *, weight_optimizer: Optimizer | float, batch_size: int
) -> Strategy:
    """Train every batch on an architecture drawn for it: random search with weight sharing.

    ``alpha`` stays at its start; :func:`best_drawn` chooses among architectures at the end.

    Parameters
    ----------
    space : Space
    weight_optimizer, batch_size
        See :func:`darts`.

    Raises
    ------
    ValueError
        If ``space`` is a Problem, which cannot draw architectures, or ``batch_size`` is under 1.

    Examples
    --------
    >>> from bilevel.spaces.darts import darts_space
    >>> weight_sharing(darts_space(cells=1), weight_optimizer=0.1, batch_size=32).gradients
    1
    """
    if not isinstance(space, Space):
        got = type(space).__name__
        raise ValueError(f"space: expected a Space, to draw architectures from, got {got}.")
    rows = minibatches(batch_size)

    def with_architecture(key, data):
        keys = jax.random.split(key)
        return space.draw(keys[0]), rows(keys[1], data)

    def at_drawn(loss: Loss) -> Loss:
        return lambda w, _, batch: loss(w, *batch)

    lower, outer = at_drawn(space.problem.lower), at_drawn(space.problem.outer)
    return Strategy(
        dataclasses.replace(space.problem, lower=lower, outer=outer),
        unrolled_solver(weight_optimizer, 1, backprop=0),
        optax.set_to_zero(),
        with_architecture,
        on_training_rows=False,
        gradients=1,
        error="no hypergradient: architectures are drawn",
        draws=True,
    )


def _adam(rate: Rate) -> Optimizer:
    return optax.adam(rate, b1=0.5)


def _first_order(
    space, weight_optimizer, alpha_optimizer, batch_size, simplex=logits, other=_adam
) -> Strategy:
    """Return a first-order strategy; a rate means ``simplex`` and ``other`` on the space's sets."""
    problem, sets = (space.problem, space.sets) if isinstance(space, Space) else (space, "simplex")
    if isinstance(alpha_optimizer, optax.GradientTransformation):
        optimizer = alpha_optimizer
    else:
        optimizer = on_sets(sets, simplex=simplex(alpha_optimizer), other=other(alpha_optimizer))
    return Strategy(
        problem,
        unrolled_solver(weight_optimizer, 1, backprop=0),
        optimizer,
        minibatches(batch_size),
        on_training_rows=False,
        gradients=2,
        error="hypergradient of first order, without the weights' response to α" + _NEVER_TRAINED,
    )


def _on_training_rows(strategy: Strategy) -> Strategy:
    lower, has_aux = split_losses(strategy.problem).lower, strategy.problem.has_aux

    def outer(w, alpha, batch):
        loss, _, aux = lower(w, alpha, batch)  # without the updated variables
        return (loss, aux) if has_aux else loss

    return strategy._replace(
        problem=dataclasses.replace(strategy.problem, outer=outer),
        on_training_rows=True,
        error="no hypergradient: α descends the training loss",
    )
