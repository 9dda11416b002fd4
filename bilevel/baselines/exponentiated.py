"""Exponentiated gradient over configurations, scored by shared weights.

A distribution theta over the configurations moves against the gradient of the expected error
``<theta, e>``. One solve estimates this gradient: every row gets a random configuration drawn from
theta, and the sizes |V_c| of the cells are importance weights:

    g_c = (e_c - b) |V_c| / (|V| theta_c),    theta <- theta exp(-eta g) / Z,

with g_c = 0 for an empty cell. E[g_c] = e_c - b for every c and theta.

theta -> ``theta``, e, |V_c| -> the errors and counts of ``share``, eta -> ``rate``, b -> the
baseline. Reference: the code released with Khodak et al. (2020), https://github.com/mkhodak/
weight-sharing (``hyper.py --grad``).
"""

from collections.abc import Sequence
from typing import Any, Unpack

import chex
import numpy as np
from scipy.special import logsumexp

from bilevel.baselines._recorder import Recorder, RunOptions
from bilevel.baselines.trace import Trace
from bilevel.contracts import Shared
from bilevel.internal.checks import check_in_range, integer


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

    In the trace, the incumbent is the configuration of the largest theta after the step, among
    those with an error so far. ``valid`` is the last error of its cell.

    Parameters
    ----------
    key, configs, problem, budget
        See :mod:`bilevel.baselines`. ``problem`` is a Selection with ``share``.
    rounds : int
        Number of steps.
    rate : float
        Step size eta, positive.
    baseline : bool
        Whether ``b`` is the running mean of the past rounds' mean errors, for less variance, or 0.
    **run_options
        See :mod:`bilevel.baselines`.

    Raises
    ------
    ValueError
        If ``rounds`` is under 1, ``rate`` is not positive, or the problem has no ``share``.

    Notes
    -----
    Deviations from the released code: logarithms of theta, which do not underflow; a true running
    mean as the baseline (``baseline_avg`` divides the sum by the round's number at every round); a
    configuration without a score cannot be the incumbent; a NaN error in a nonempty cell sets the
    weight to 0.

    Cost: ``rounds`` solves at ``budget``.

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
