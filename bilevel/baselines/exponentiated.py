"""Exponentiated gradient over configurations, scored by weights that they share.

A distribution theta over the configurations is moved against the gradient of the expected error
``<theta, e>``. One solve with every datapoint under a random configuration drawn from theta
estimates it, the cells' sizes |V_c| serving as importance weights:

    g_c = (e_c - b) |V_c| / (|V| theta_c),    theta <- theta exp(-eta g) / Z,

with g_c = 0 where the cell is empty. E[g_c] = e_c - b for every c, whatever theta.

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
    """Exponentiated gradient on a distribution over configurations, one shared solve a step.

    Parameters
    ----------
    key, configs, problem, budget
        As in :func:`bilevel.baselines.weight_sharing`.
    rounds : int
        Steps.
    rate : float
        Step size eta, positive.
    baseline : bool
        Whether ``b`` is the running mean of the past rounds' mean errors, for less variance, or 0.
    **run_options
        As in :func:`bilevel.baselines.weight_sharing`.

    Returns
    -------
    Trace
        A row for each round: the incumbent is the configuration of the largest theta after the
        step, among those with an error so far, and ``valid`` the last error of its cell. Ctrl-C
        returns the rows there are.

    Raises
    ------
    ValueError
        Before the first solve: for ``rounds`` under 1, a ``rate`` that is not positive, and what
        :func:`bilevel.baselines.weight_sharing` refuses.
    FloatingPointError
        If all cells of a solve are empty or NaN.

    Notes
    -----
    Deviations from the released code: logarithms of theta, which do not underflow; the baseline is
    the running mean that its ``baseline_avg`` is named for (which divides the sum by the round's
    number at every round); a configuration that was never scored cannot be the incumbent, nor can
    one keep its weight whose error is NaN in a cell that is not empty.

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
    means: list[float] = []  # unbiased estimates of <theta, e>, one for each round
    calls = rounds if n > 1 else 0
    with log.run(calls):
        for round in range(calls):
            shared = log.share(round, everyone, np.exp(log_theta), log.budget)
            offset = float(np.mean(means)) if baseline and means else 0.0
            log_theta = log_theta - rate * _estimate_gradient(log_theta, shared, offset)
            log_theta = log_theta - logsumexp(log_theta)
            means.append(_mean_error(shared))
            latest = np.where(shared.counts > 0, shared.errors, latest)
            incumbent = int(np.argmax(np.where(np.isnan(latest), -np.inf, log_theta)))
            log.note(incumbent, latest[incumbent])
    return log.trace()


def _estimate_gradient(log_theta: np.ndarray, shared: Shared, baseline: float) -> np.ndarray:
    """[n], the estimate g; infinite where a cell that is not empty has NaN for its error."""
    errors, counts = shared
    theta = np.exp(log_theta)
    seen = (counts > 0) & (theta > 0)  # a weight that has underflowed stays where it is
    weights = counts[seen] / counts.sum() / theta[seen]
    gradient = np.zeros(len(counts))
    gradient[seen] = np.where(np.isnan(errors[seen]), np.inf, (errors[seen] - baseline) * weights)
    return gradient


def _mean_error(shared: Shared) -> float:
    """The mean error over all rows whose configuration has one."""
    scored = ~np.isnan(shared.errors)
    return float(np.average(shared.errors[scored], weights=shared.counts[scored]))
