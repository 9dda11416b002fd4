"""Weight sharing: one solve scores all configurations, and the better half stays.

Round t: every datapoint x of the training and validation sets gets a random configuration c_x;
weights w_t are fitted to the training points so featurized, and shared by all configurations;
configuration c scores the mean validation error over its cell, ``V_c = {x in V : c_x = c}``.

C -> ``configs``, d -> ``budget``, s_c, |V_c| -> the errors and counts of ``share``, R -> the
number of rounds. Reference: Khodak et al. (2020), Algorithm 1 and Appendix B.1.

Deviations from the paper, whose algorithm fails in three ways: an empty cell scores 0/0, which
makes the median NaN and keeps no configuration; ties with the median, common in 0-1 error, keep
more than half, up to all; log2 |C| need not be an integer. Here configurations are in a total
order, by error, then index, NaN and empty cells last; ``ceil(n / 2)`` are kept, and
``ceil(log2 |C|)`` rounds leave exactly one.
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
    """Successive halving by weights that the configurations share: ``ceil(log2 |C|)`` solves.

    Parameters
    ----------
    key : jax.Array
    configs : sequence of configurations
        A single one is returned at once, without a solve.
    problem : :class:`bilevel.baselines.Selection`
        With ``share``. A validation set smaller than ``configs`` leaves cells empty; their
        configurations rank last.
    budget : int
        Resource of every solve: d, the feature dimension.
    **run_options
        ``retrain_test``, ``journal``, ``resume``, ``progress``: see :mod:`bilevel.baselines`.

    Returns
    -------
    Trace
        A row for each round. Ctrl-C returns the rows there are.

    Raises
    ------
    ValueError
        Before the first solve: no key, no configurations, ``budget`` under 1, a problem
        without ``share``, a journal of another run.
    FloatingPointError
        If all cells of a solve are empty or NaN.

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

    Reference: Khodak et al. (2020), Algorithm 1; the module says where it is corrected.
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
    """Weight sharing with a resource that grows from round to round.

    ``d_t = ceil(d growth^(t - R))`` for ``t = 1 ... R``.

    Parameters
    ----------
    key, configs, problem
        As in :func:`weight_sharing`.
    budget : int
        d: resource of the last solve.
    growth : float
        At least 1, which is :func:`weight_sharing`; finite.
    **run_options
        ``retrain_test``, ``journal``, ``resume``, ``progress``: see :mod:`bilevel.baselines`.

    Returns
    -------
    Trace
        A row for each round. Ctrl-C returns the rows there are.

    Raises
    ------
    ValueError, FloatingPointError
        As :func:`weight_sharing`; if ``growth`` is under 1.

    Notes
    -----
    Reference: Khodak et al. (2020), Appendix B.1. Their text reaches d at the last round. The
    authors' code stops at ``d / growth``, and only the final refit uses d.

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
