"""Methods that score all configurations by one solve, with weights that they share.

Every row x of the training and validation sets gets a random configuration c_x. The weights are
fitted to the training rows so featurized. Configuration c scores the mean validation error over its
cell, ``V_c = {x in V : c_x = c}``.
"""

import math
from collections.abc import Sequence
from typing import Any, Unpack

import chex
import numpy as np
from scipy.special import logsumexp

from bilevel.baselines._recorder import Recorder, RunOptions, Trace
from bilevel.baselines.random_search_and_halving import ranked, resources
from bilevel.contracts import Shared
from bilevel.internal.checks import check_in_range, integer, real_number


def weight_sharing(
    key: chex.PRNGKey,
    configs: Sequence[Any],
    problem: Any,
    budget: int,
    **run_options: Unpack[RunOptions],
) -> Trace:
    """Halve the configurations by shared weights, in ``ceil(log2 |C|)`` solves.

    Every round fits the weights w_t that the remaining configurations share, and keeps the half
    with the smaller validation errors over their cells.

    Khodak et al. (2020), Algorithm 1, with C = ``configs``, d = ``budget``, and s_c and |V_c| the
    errors and counts of ``share``. The paper's algorithm fails in three ways, so this one deviates:

    - An empty cell scores 0/0, which makes the median NaN and keeps no configuration. Here
      configurations are ordered by error, then index, with NaN and empty cells last.
    - Ties with the median, common in 0-1 error, keep more than half. Here ``ceil(n / 2)`` are kept.
    - log2 |C| need not be an integer. Here ``ceil(log2 |C|)`` rounds leave exactly one.

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

    The resource of round t is ``d_t = ceil(d growth^(t - R))`` for the R rounds ``t = 1 ... R``, as
    in Khodak et al. (2020), Appendix B.1. The authors' code stops at ``d / growth``, and only the
    final refit uses d.

    Parameters
    ----------
    key, configs, problem, budget
        See :func:`weight_sharing`. ``budget`` is d, the resource of the last solve.
    growth, **run_options
        Finite, at least 1 (1: :func:`weight_sharing`); see :mod:`bilevel.baselines`.

    Raises
    ------
    ValueError
        If the problem has no ``share``, or ``growth`` is under 1 or not finite.

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


def exponentiated_gradient(
    key: chex.PRNGKey,
    configs: Sequence[Any],
    problem: Any,
    budget: int,
    *,
    rounds: int = 5,
    rate: float = 5.0,
    baseline: bool = False,
    **run_options: Unpack[RunOptions],
) -> Trace:
    """Run exponentiated gradient on a distribution over configurations, one shared solve a step.

    A distribution theta over the configurations moves against the gradient of the expected error
    ``<theta, e>``. One solve, with configurations drawn from theta, estimates this gradient. The
    sizes |V_c| of the cells are importance weights:

        g_c = (e_c - b) |V_c| / (|V| theta_c),    theta <- theta exp(-eta g) / Z,

    with g_c = 0 for an empty cell. E[g_c] = e_c - b for every c and theta. In the trace, the
    incumbent is the configuration of the largest theta after the step, among those with an error so
    far. ``valid`` is the last error of its cell.

    Deviations from the code released with Khodak et al. (2020), https://github.com/mkhodak/
    weight-sharing (``hyper.py --grad``): logarithms of theta, which do not underflow; a true
    running mean as the baseline (``baseline_avg`` divides the sum by the round's number at every
    round); a configuration without a score cannot be the incumbent; a NaN error in a nonempty cell
    sets the weight to 0. Cost: ``rounds`` solves at ``budget``.

    Parameters
    ----------
    key, configs, problem, budget
        See :mod:`bilevel.baselines`. ``problem`` is a Selection with ``share``.
    rounds, rate : int, float
        Number of steps; step size eta, positive.
    baseline, **run_options
        Whether ``b`` is the mean of the past rounds' mean errors; see :mod:`bilevel.baselines`.

    Raises
    ------
    ValueError
        If ``rounds`` is under 1, ``rate`` is not positive, or the problem has no ``share``.

    Examples
    --------
    >>> import jax
    >>> from bilevel.baselines import Selection
    >>> def share(key, configs, probabilities, resource):
    ...     return np.array(configs), 100 * probabilities
    >>> problem = Selection(lambda key, config, resource: config, share)
    >>> trace = exponentiated_gradient(jax.random.key(0), [.5, .2, .9, .3], problem, 100)
    >>> trace.best, trace.calls
    (1, array([1, 2, 3, 4, 5]))
    """
    options = {"rounds": rounds, "rate": rate, "baseline": baseline}
    log = Recorder(
        "exponentiated_gradient", key, configs, problem, budget, options, shares=True, **run_options
    )
    rounds = integer("rounds", rounds, 1)
    check_in_range("rate", rate, 0, np.inf)
    n = len(log.configs)
    everyone, log_theta = np.arange(n), np.full(n, -np.log(n))
    latest = np.full(n, np.nan)  # last error of each configuration
    means: list[np.floating] = []  # unbiased estimates of <theta, e>, one for each round
    calls = rounds if n > 1 else 0
    with log.run(calls):
        for round in range(calls):
            shared = log.share(round, everyone, np.exp(log_theta), log.budget)
            offset = float(np.mean(means)) if baseline and means else 0.0
            log_theta = log_theta - rate * _estimate_gradient(log_theta, shared, offset)
            log_theta = log_theta - logsumexp(log_theta)
            scored = ~np.isnan(shared.errors)
            means.append(np.average(shared.errors[scored], weights=shared.counts[scored]))
            latest = np.where(shared.counts > 0, shared.errors, latest)
            incumbent = int(np.argmax(np.where(np.isnan(latest), -np.inf, log_theta)))
            log.note(incumbent, latest[incumbent])
    return log.trace()


def _estimate_gradient(log_theta: np.ndarray, shared: Shared, baseline: float) -> np.ndarray:
    """Return the estimate g [n], infinite for a nonempty cell with a NaN error."""
    errors, counts = shared
    theta = np.exp(log_theta)
    seen = (counts > 0) & (theta > 0)  # a weight that has underflowed stays where it is
    weights = counts[seen] / counts.sum() / theta[seen]
    gradient = np.zeros(len(counts))
    gradient[seen] = np.where(np.isnan(errors[seen]), np.inf, (errors[seen] - baseline) * weights)
    return gradient
