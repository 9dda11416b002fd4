"""The strategy as a value, and the functions that take it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from bilevel.contracts import Joint, LowerSolver, Pytree
from bilevel.internal.checks import integer
from bilevel.nets.evaluation import in_batches, over_batches
from bilevel.outer_loop.search import search
from bilevel.outer_loop.search_result import SearchResult
from bilevel.problem.problem import Problem, split_losses, stack_problems
from bilevel.spaces.space import Space
from bilevel.strategies.optimizers import Optimizer


class Strategy(NamedTuple):
    """The arguments of :func:`bilevel.search` for a search with shared weights; see :func:`run`.

    Attributes
    ----------
    problem, solver, optimizer
        ``optimizer`` is that of ``alpha``.
    batches : ``batches(key, data) -> batch``, or of :func:`bilevel.jointly`
    on_training_rows : bool
        Whether ``alpha`` descends on training rows too. Validation rows are then not used.
    gradients : int
        Number of minibatch gradients per step. A Hessian-vector product counts as two.
    error : str
        A sentence on the hypergradient's error.
    draws : bool
        Whether architectures are drawn: ``alpha`` then stays, and :func:`best_drawn` chooses one.
    """

    problem: Problem
    solver: LowerSolver
    optimizer: Optimizer
    batches: Callable[..., Any]
    on_training_rows: bool
    gradients: int
    error: str
    draws: bool = False


def run(
    strategy: Strategy, alpha: Pytree, w: Pytree, train: Pytree, valid: Pytree, **options: Any
) -> SearchResult:
    """Search by a strategy: call :func:`bilevel.search` with its arguments.

    Parameters
    ----------
    strategy, alpha, w, train, valid
        The strategy, ``space.start()``, ``space.init(key, train)``, and the data.
    **options
        Other options of :func:`bilevel.search`: ``steps`` and ``key`` are required.

    Raises
    ------
    ValueError, NonFiniteError
        If :func:`bilevel.search` raises them.

    Examples
    --------
    >>> from bilevel.spaces import skip_space
    >>> from bilevel.strategies import gaea
    >>> space = skip_space(["relu", "tanh"], depth=3, width=4, classes=2)
    >>> data = jnp.eye(6), jnp.arange(6) % 2
    >>> strategy = gaea(space, weight_optimizer=0.1, alpha_optimizer=0.1, batch_size=2)
    >>> start = space.start(), space.init(jax.random.key(0), data)
    >>> options = {"steps": 2, "key": jax.random.key(1), "progress": False}
    >>> result = run(strategy, *start, data, data, **options)
    >>> result.history["value"].shape
    (2,)
    """
    method = strategy.problem, strategy.solver, strategy.optimizer
    rows = train, train if strategy.on_training_rows else valid
    return search(*method, alpha, w, *rows, batches=strategy.batches, **options)


def stack_strategies(strategy: Strategy, copies: int) -> Strategy:
    """Run the same search ``copies`` times at once; arrays of state and data get a leading axis.

    Losses are sums over the copies. Norms over all weights change, see
    :func:`bilevel.stack_problems`: the clipping in :func:`darts_sgd` acts on all copies together.

    Raises
    ------
    ValueError
        If ``copies`` is not an integer of at least 1.

    Examples
    --------
    >>> from bilevel.strategies import darts
    >>> from bilevel.spaces.activations import activation_space
    >>> space = activation_space(["relu", "tanh"], width=8)
    >>> data = jnp.stack([jnp.eye(4)] * 2), jnp.ones((2, 4))
    >>> one = darts(space, weight_optimizer=0.1, alpha_optimizer=0.1, batch_size=2)
    >>> plan = stack_strategies(one, 2)
    >>> alpha = jnp.stack([space.start()] * 2)
    >>> w = jax.vmap(space.init)(jax.random.split(jax.random.key(0), 2), data)
    >>> result = run(plan, alpha, w, data, data, steps=1, key=jax.random.key(1), progress=False)
    >>> result.alpha.shape
    (2, 2)
    """
    copies = integer("copies", copies, 1)

    def of_all(key, *data):
        return jax.vmap(strategy.batches)(jax.random.split(key, copies), *data)

    batches = Joint(of_all) if isinstance(strategy.batches, Joint) else of_all
    return strategy._replace(problem=stack_problems(strategy.problem), batches=batches)


def best_drawn(
    key: chex.PRNGKey, space: Space, w: Pytree, rows: Pytree, *, samples: int, batch_size: int
) -> Pytree:
    """Return the vertex of the best of ``samples`` drawn architectures, by the loss at ``w``.

    This ends a random search with weight sharing; the loss is that of the validation set. An
    architecture with a NaN loss is chosen only if all have one. Pure: it works under ``jit`` and
    ``vmap``.

    Parameters
    ----------
    key, space, w : jax.Array, Space, pytree
        ``w`` are the shared weights.
    rows : (inputs [n, ...], labels [n])
        The validation set, in batches of ``batch_size``.
    samples, batch_size : int

    Raises
    ------
    ValueError
        If ``samples`` or ``batch_size`` is under 1.

    Examples
    --------
    >>> from bilevel.spaces.activations import activation_space
    >>> space = activation_space(["relu", "tanh"], width=8)
    >>> rows = jnp.eye(4), jnp.array([1.0, -1.0, 1.0, -1.0])
    >>> w = jax.jit(space.init)(jax.random.key(0), rows)
    >>> best_drawn(jax.random.key(1), space, w, rows, samples=4, batch_size=4).max()
    Array(1., dtype=float...)
    """
    outer = split_losses(space.problem).outer
    losses = over_batches(lambda w, alpha, batch: outer(w, alpha, batch)[0])
    batches = in_batches([rows], batch_size)
    keys = jax.random.split(key, integer("samples", samples, 1))
    drawn_losses = jax.lax.map(lambda key: losses(w, space.draw(key), batches)[0], keys)
    return space.draw(keys[jnp.where(jnp.isnan(drawn_losses), jnp.inf, drawn_losses).argmin()])
