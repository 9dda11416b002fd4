"""Methods that train every configuration alone: random search, successive halving and Hyperband.

A race of halving has rungs. The best configurations of the previous rung are trained afresh, with
``eta`` times the resource, and are compared with each other only. The incumbent is the best on the
highest resource so far.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import chex
import jax
import numpy as np

from bilevel.baselines._recorder import Recorder, RunOptions, Trace
from bilevel.internal.checks import integer, real_number

_Rungs = list[tuple[int, int]]  # (configurations, resource)


def random_search(
    key: chex.PRNGKey,
    configs: Sequence[Any],
    problem: Any,
    budget: int,
    *,
    evaluations: int | None = None,
    **run_options: Unpack[RunOptions],
) -> Trace:
    """Train configurations in a random order without replacement; keep the lowest error.

    Bergstra & Bengio (2012). Cost: ``evaluations`` solves at ``budget``.

    Parameters
    ----------
    key, configs, problem, budget
        See :mod:`bilevel.baselines`. Every evaluation has the resource ``budget``.
    evaluations, **run_options
        Number of configurations to train, by default all; see :mod:`bilevel.baselines`.

    Raises
    ------
    ValueError
        If ``evaluations`` is out of range.

    Examples
    --------
    >>> trace = random_search(jax.random.key(0), [5, 2, 9], lambda key, c, resource: c / 10, 100)
    >>> trace.best, trace.calls, float(trace.valid[-1])
    (1, array([1, 2, 3]), 0.2)
    """
    options = {"evaluations": evaluations}
    log = Recorder("random_search", key, configs, problem, budget, options, **run_options)
    n = len(log.configs)
    count = n if evaluations is None else integer("evaluations", evaluations, 1)
    if count > n:
        raise ValueError(f"evaluations: expected 1 to {n}, got {evaluations}.")
    order = np.asarray(jax.random.permutation(log.draws, n))[:count]
    with log.run(count):
        for round, index in enumerate(order):
            log.evaluate(round, index, log.budget)
    return log.trace()


def successive_halving(
    key: chex.PRNGKey,
    configs: Sequence[Any],
    problem: Any,
    budget: int,
    *,
    eta: float = 2.0,
    minimum: int = 1,
    **run_options: Unpack[RunOptions],
) -> Trace:
    """Train all configurations on a small resource, the better ``1/eta`` on ``eta`` times as much.

    Rung ``i`` of ``s + 1``: ``ceil(n eta^-i)`` configurations at ``ceil(budget eta^(i - s))``.
    ``s`` is the smallest that leaves one, or the largest that keeps the first rung at ``minimum``.
    The trace has one row per evaluation; ``round`` is the rung. This is Algorithm 1 of Jamieson &
    Talwalkar (2016), with ``eta`` for 2 and ``ceil`` for ``floor``. Cost: at most
    ``n eta / (eta - 1) + log n`` solves; each rung costs about the same.

    Parameters
    ----------
    key, configs, problem, budget
        See :mod:`bilevel.baselines`. ``budget`` is the resource of the last rung.
    eta, minimum, **run_options
        Growth factor, over 1; least resource; see :mod:`bilevel.baselines`.

    Raises
    ------
    ValueError
        If ``eta`` or ``minimum`` is out of range.

    Examples
    --------
    >>> evaluate = lambda key, c, resource: c + 1 / resource
    >>> trace = successive_halving(jax.random.key(0), [.5, .2, .9, .3], evaluate, 100)
    >>> trace.best, trace.resource
    (1, array([ 25,  25,  25,  25,  50,  50, 100]))
    """
    options = {"eta": eta, "minimum": minimum}
    log = Recorder("successive_halving", key, configs, problem, budget, options, **run_options)
    levels = _levels(log.budget, minimum, eta)
    n = len(log.configs)
    last = min(levels, math.ceil(math.log(n) / math.log(eta) - 1e-9))
    sizes = [_whole(math.ceil, n * float(eta) ** -i) for i in range(last + 1)]
    rungs = list(zip(sizes, resources(log.budget, eta, last + 1), strict=True))
    with log.run(sum(sizes)):
        _race(log, 0, np.arange(n), rungs)
    return log.trace()


def hyperband(
    key: chex.PRNGKey,
    configs: Sequence[Any],
    problem: Any,
    budget: int,
    *,
    eta: float = 3.0,
    minimum: int = 1,
    **run_options: Unpack[RunOptions],
) -> Trace:
    """Run races of successive halving, from many short ones to few full ones.

    Bracket ``s = s_max ... 0``, with ``s_max = floor(log_eta(R / r))``, races
    ``n = ceil((s_max + 1) eta^s / (s + 1))`` configurations from resource ``R eta^-s``. Its rung
    ``i`` has ``floor(n eta^-i)`` of them at ``R eta^(i - s)``, rounded up. The trace has one row
    per evaluation; ``round`` counts the rungs of all brackets.

    This is Algorithm 1 of Li et al. (2018). Each of the ``s_max + 1`` brackets costs about
    ``(s_max + 1) R``. At R = 81, eta = 3 the formula gives brackets of 81, 34, 15, 8 and 5
    configurations, 206 evaluations. Widely copied code rounds ``(s_max + 1) / (s + 1)`` down first:
    81, 27, 9, 6, 5.

    Parameters
    ----------
    key, configs, problem, budget
        See :mod:`bilevel.baselines`. Each bracket draws from ``configs`` without replacement: all,
        if they are fewer than its ``n``. ``budget`` is R, the resource of the last rungs.
    eta, minimum, **run_options
        Growth factor, over 1; r, the least resource; see :mod:`bilevel.baselines`.

    Raises
    ------
    ValueError
        If ``eta`` or ``minimum`` is out of range.

    Examples
    --------
    >>> evaluate = lambda key, c, resource: c + 1 / resource
    >>> trace = hyperband(jax.random.key(0), [.5, .2, .9, .3], evaluate, 9)
    >>> trace.best, trace.resource
    (1, array([1, 1, 1, 1, 3, 9, 3, 3, 3, 3, 9, 9, 9, 9]))
    """
    options = {"eta": eta, "minimum": minimum}
    log = Recorder("hyperband", key, configs, problem, budget, options, **run_options)
    n, s_max = len(log.configs), _levels(log.budget, minimum, eta)
    brackets = [_bracket(n, s, s_max, log.budget, eta) for s in range(s_max, -1, -1)]
    with log.run(sum(size for rungs in brackets for size, _ in rungs)):
        first = 0
        for number, rungs in enumerate(brackets):
            drawn = jax.random.permutation(jax.random.fold_in(log.draws, number), n)
            _race(log, first, np.asarray(drawn), rungs)
            first += len(rungs)
    return log.trace()


def _bracket(n: int, s: int, s_max: int, budget: int, eta: float) -> _Rungs:
    n = min(n, _whole(math.ceil, (s_max + 1) * float(eta) ** s / (s + 1)))
    sizes = [max(1, _whole(math.floor, n * float(eta) ** -i)) for i in range(s + 1)]
    return list(zip(sizes, resources(budget, eta, s + 1), strict=True))


def _race(log: Recorder, first: int, candidates: np.ndarray, rungs: _Rungs) -> None:
    for round, (size, resource) in enumerate(rungs, first):
        candidates = candidates[:size]
        errors = [log.evaluate(round, index, resource) for index in candidates]
        candidates = ranked(candidates, errors)


def _levels(budget: int, minimum: int, eta: float) -> int:
    """Count how often ``budget`` can be divided by ``eta`` without falling under ``minimum``."""
    if not 1 < real_number("eta", eta) < math.inf:
        raise ValueError(f"eta: expected a finite number over 1, got {eta}.")
    if not integer("minimum", minimum, 1) <= budget:
        raise ValueError(f"minimum: expected 1 to {budget}, got {minimum}.")
    return math.floor(math.log(budget / minimum) / math.log(eta) + 1e-9)


def ranked(candidates: np.ndarray, errors: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the candidates by rising error, then rising index, with NaN last."""
    return candidates[np.lexsort((candidates, np.asarray(errors)))]


def resources(budget: int, growth: float, rounds: int) -> list[int]:
    """Return ``ceil(budget * growth^(t - rounds))`` for t = 1 ... rounds, ending in ``budget``."""
    budgets = [
        _whole(math.ceil, budget * float(growth) ** (t - rounds)) for t in range(1, rounds + 1)
    ]
    return [*budgets[:-1], budget] if budgets else []


def _whole(to_integer: Callable[[float], int], x: float) -> int:
    """Round ``x`` by ``math.ceil`` or ``math.floor``, up to rounding errors of ``x``."""
    nearest = round(x)
    return nearest if abs(x - nearest) <= 1e-12 * abs(x) else to_integer(x)
