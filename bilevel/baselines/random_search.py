"""Random search: configurations in random order, each trained in full."""

from collections.abc import Sequence
from typing import Any, Unpack

import chex
import jax
import numpy as np

from bilevel.baselines._recorder import Recorder, RunOptions
from bilevel.baselines.trace import Trace
from bilevel.internal.checks import integer


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

    Parameters
    ----------
    key, configs, problem, budget
        See :mod:`bilevel.baselines`. Every evaluation has the resource ``budget``.
    evaluations : int, optional
        Number of configurations to train. Default: all.
    **run_options
        See :mod:`bilevel.baselines`.

    Raises
    ------
    ValueError
        If ``evaluations`` is out of range.

    Notes
    -----
    Bergstra & Bengio (2012). Cost: ``evaluations`` solves at ``budget``.

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
