"""Weight sharing: one solve scores all configurations, and the better half stays.

Round t: every row x of the training and validation sets gets a random configuration c_x. The
weights w_t are fitted to the training rows so featurized, and all configurations share them.
Configuration c scores the mean validation error over its cell, ``V_c = {x in V : c_x = c}``.

C -> ``configs``, d -> ``budget``, s_c, |V_c| -> the errors and counts of ``share``, R -> the number
of rounds. The paper's algorithm fails in three ways, so this one deviates:

- An empty cell scores 0/0, which makes the median NaN and keeps no configuration. Here
  configurations are ordered by error, then index, with NaN and empty cells last.
- Ties with the median, common in 0-1 error, keep more than half. Here ``ceil(n / 2)`` are kept.
- log2 |C| need not be an integer. Here ``ceil(log2 |C|)`` rounds leave exactly one.
"""

import math
from collections.abc import Sequence
from typing import Any, Unpack

import chex
import numpy as np

from bilevel.baselines._recorder import Recorder, RunOptions
from bilevel.baselines._schedule import ranked, resources
from bilevel.baselines.trace import Trace
from bilevel.internal.checks import real_number


def weight_sharing(
    key: chex.PRNGKey,
    configs: Sequence[Any],
    problem: Any,
    budget: int,
    **run_options: Unpack[RunOptions],
) -> Trace:
    """Halve the configurations by shared weights, in ``ceil(log2 |C|)`` solves.

    Parameters
    ----------
    key, configs, problem, budget, **run_options
        See :mod:`bilevel.baselines`. ``problem`` is a Selection with ``share``. A validation set
        smaller than ``configs`` leaves cells empty; their configurations rank last. A single
        configuration is returned at once, without a solve.

    Raises
    ------
    ValueError
        If the problem has no ``share``.

    Notes
    -----
    Khodak et al. (2020), Algorithm 1, corrected: see the module.

    Examples
    --------
    >>> import jax
    >>> from bilevel.baselines import Selection
    >>> def share(key, configs, probabilities, resource):
    ...     return np.array(configs), np.full(len(configs), 10)
    >>> problem = Selection(lambda key, config, resource: config, share)
    >>> trace = weight_sharing(jax.random.key(0), [.5, .2, .9, .3, .4], problem, 100)
    >>> trace.best, [c.tolist() for c in trace.candidates]
    (1, [[0, 1, 2, 3, 4], [1, 3, 4], [1, 3]])
    """
    return _halve("weight_sharing", key, configs, problem, budget, 1.0, run_options)


def fast_weight_sharing(
    key: chex.PRNGKey,
    configs: Sequence[Any],
    problem: Any,
    budget: int,
    *,
    growth: float = math.sqrt(2),
    **run_options: Unpack[RunOptions],
) -> Trace:
    """Halve the configurations by shared weights, with a resource that grows from round to round.

    The resource of round t is ``d_t = ceil(d growth^(t - R))`` for ``t = 1 ... R``.

    Parameters
    ----------
    key, configs, problem, budget
        See :func:`weight_sharing`. ``budget`` is d, the resource of the last solve.
    growth : float
        Finite, at least 1. With 1 the method is :func:`weight_sharing`.
    **run_options
        See :mod:`bilevel.baselines`.

    Raises
    ------
    ValueError
        If the problem has no ``share``, or ``growth`` is under 1 or not finite.

    Notes
    -----
    Khodak et al. (2020), Appendix B.1. Their text reaches d at the last round. The authors' code
    stops at ``d / growth``, and only the final refit uses d.

    Examples
    --------
    >>> import jax
    >>> from bilevel.baselines import Selection
    >>> def share(key, configs, probabilities, resource):
    ...     return np.array(configs), np.full(len(configs), 10)
    >>> problem = Selection(lambda key, config, resource: config, share)
    >>> trace = fast_weight_sharing(jax.random.key(0), [.5, .2, .9, .3, .4], problem, 100)
    >>> trace.best, trace.resource
    (1, array([ 50,  71, 100]))
    """
    return _halve("fast_weight_sharing", key, configs, problem, budget, growth, run_options)


def _halve(method, key, configs, problem, budget, growth, run_options) -> Trace:
    options = {"growth": growth}
    log = Recorder(method, key, configs, problem, budget, options, shares=True, **run_options)
    if not 1 <= real_number("growth", growth) < math.inf:
        raise ValueError(f"growth: expected a finite number of at least 1, got {growth}.")
    survivors = np.arange(len(log.configs))
    rounds = (len(survivors) - 1).bit_length()  # ceil(log2 |C|)
    with log.run(rounds):
        for round, resource in enumerate(resources(log.budget, growth, rounds)):
            n = len(survivors)
            shared = log.share(round, survivors, np.full(n, 1 / n), resource)
            order = ranked(survivors, shared.errors)
            log.note(order[0], np.nanmin(shared.errors))
            survivors = np.sort(order[: (n + 1) // 2])
    return log.trace()
