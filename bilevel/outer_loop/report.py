"""Counts of faulty steps in a search. Outside ``jit`` and ``vmap`` they become one warning."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import DescentState, Inner, Pytree, params_of
from bilevel.internal.checks import gradient_transformation
from bilevel.outer_loop.descent import run_once
from bilevel.solvers import AdjointReport, report_of

_MANY = 5  # steps at the end that count as many; a shorter search needs all steps
_COMPARED = 10  # smallest number of steps for which predicted and actual changes are compared
_PREDICTED = 0.1  # share of a decrease below which it counts as not predicted
_SEEN = 1e-3  # change of the outer loss, relative to its size, below which nothing is compared


class Count(NamedTuple):
    """Count an event; both fields are arrays [], int."""

    total: jax.Array  # steps in all
    last: jax.Array  # steps without interruption up to the last one


class SearchReport(NamedTuple):
    """Counts of faulty steps in a search. All arrays are [].

    ``predicted`` and ``actual`` are compared if batches are full and the weights depend on
    ``alpha`` alone (:func:`bilevel.implicit`, :func:`bilevel.ridge`, :func:`bilevel.restarted`).
    """

    steps: jax.Array  # int: steps that were observed
    zero: Count  # steps with a hypergradient of exactly 0
    failed: Count  # steps with an adjoint that did not solve its linear system (implicit)
    indefinite: Count  # steps with a direction without positive curvature in that solve
    # Steps with a lower gradient over 0.1 % of |w| times the largest curvature: the weights were
    # not a stationary point of the lower loss (implicit).
    moving: Count
    predicted: jax.Array  # sum of <hypergradient, change of alpha> over the compared steps, or 0
    actual: jax.Array  # sum of the changes of the outer loss over these steps, or 0
    compared: jax.Array  # int: number of these steps
    value: jax.Array  # outer loss at the last of them, or 0
    spent: jax.Array  # share of steps with the inner schedule below 1 % of its peak; 0 without one

    @property
    def ratio(self) -> jax.Array:
        """Return actual over predicted change, 1 if no step was compared."""
        return _ratio(self.actual, self.predicted, self.compared)

    def messages(self) -> tuple[str, ...]:
        """Return a message for every cause of wrong hypergradients, with its remedy.

        Raises
        ------
        ValueError
            If the report describes several searches (``vmap``). Select one of them first.

        Examples
        --------
        >>> import bilevel, optax
        >>> loss = lambda w, alpha, batch: jnp.sum((w - alpha) ** 2)
        >>> result = bilevel.search(
        ...     bilevel.Problem(loss, loss), bilevel.unrolled(0.1, 3), optax.sgd(0.1),
        ...     jnp.zeros(1), jnp.ones(1), None, None, steps=3,
        ... )
        >>> result.report.messages()
        ()
        """
        if jnp.ndim(self.steps):
            raise ValueError(
                f"report: expected that of one search, got {len(self.steps)} side by side; "
                "jax.tree.map(lambda x: x[0], report) is the first one."
            )
        report = jax.tree.map(np.asarray, self)
        steps = int(report.steps)
        lines = []
        if _happened_often(report.failed, steps) or _happened_often(report.indefinite, steps):
            indefinite = int(report.indefinite.total)
            count = max(int(report.failed.total), indefinite)
            lines.append(_FAILED.format(count, steps, _INDEFINITE if indefinite else ""))
        # The first runs of a solver that starts from the last weights may stop short.
        if steps >= _MANY and _happened_often(report.moving, steps):
            lines.append(_NOT_STATIONARY.format(int(report.moving.total), steps))
        if report.spent > 0.5:
            lines.append(_SPENT.format(float(report.spent)))
        elif steps and report.zero.last >= min(_MANY, steps) and not lines:
            lines.append(_ZERO.format(int(report.zero.last), steps))
        # These causes also explain a change without prediction.
        return tuple(lines or _mispredicted(report))


@jax.jit
def _ratio(actual: jax.Array, predicted: jax.Array, compared: jax.Array) -> jax.Array:
    known = (compared > 0) & (predicted != 0)
    return jnp.where(known, actual / jnp.where(known, predicted, 1), 1)


_REMEDY = (
    "`hypergradient(problem, solver)` at the result states the error in `info`. Remedies: weight "
    "decay in the lower loss, implicit(..., cg(damping=...)), or unrolled(...)."
)
_FAILED = (
    "the adjoint's linear system was not solved in {} of {} outer steps{}, so those "
    "hypergradients are wrong. " + _REMEDY
)
_INDEFINITE = " (the lower Hessian is singular or not positive definite there)"
_NOT_STATIONARY = (
    "the weights were not a stationary point of the lower loss in {} of {} outer steps. "
    "implicit(...) assumes one, so those hypergradients are wrong. Remedies: a forward solver that "
    "converges (newton(), lbfgs(), more steps); projected(...) or proximal(...) if there are "
    "constraints or kinks such as an l1 term."
)
_SPENT = (
    "the inner optimizer's schedule is below 1 % of its peak in {:.0%} of the outer steps: its "
    "count carries over from one outer step to the next, so the weights stop moving. Remedy: "
    "restarted(solver), or a schedule as long as all inner steps of the search."
)
_ZERO = (
    "the hypergradient was exactly 0 in the last {} of {} outer steps, so alpha did not move. "
    "Remedies: another start w0, a solver that moves the weights, or "
    "`hypergradient(problem, solver)` there, whose `info` names the cause."
)
_UNPREDICTED = (
    "the outer loss changed by {actual:.2g} over {compared} steps, where the hypergradients "
    "predicted {predicted:.2g}: they are not its slope over the steps that alpha takes. Remedies: "
    "smooth activations instead of kinks (ReLU), shorter steps, or "
    "hypergradient(..., difference=step), which measures the slope over a step of that length."
)


def _happened_often(count: Count, steps: int) -> bool:
    many = count.last >= min(_MANY, steps) or 2 * count.total > steps
    return steps > 0 and bool(many)


def _mispredicted(report: SearchReport) -> list[str]:
    """Return a message if the loss decreased without prediction, or failed to decrease."""
    predicted, actual = float(report.predicted), float(report.actual)
    size = max(abs(predicted), abs(actual))
    if report.compared < _COMPARED or not _SEEN * abs(float(report.value)) < size < np.inf:
        return []
    unforeseen = actual < 0 and predicted > _PREDICTED * actual
    missing = predicted < 0 and actual >= 0
    if not (unforeseen or missing):
        return []
    compared = int(report.compared)
    return [_UNPREDICTED.format(actual=actual, predicted=predicted, compared=compared)]


_ADJOINT_EVENTS = "failed", "indefinite", "moving"


class StepMonitor(NamedTuple):
    """The part of a search's carry that observes its steps."""

    report: SearchReport
    predicted: jax.Array  # [], change of the outer loss that the last step predicted; 0 before


def init_step_monitor(row: dict[str, Any], spent: jax.Array | None) -> StepMonitor:
    """Return a monitor without observations. ``row`` holds the shapes of a step's metrics."""
    integer, number = jnp.result_type(int), row["grad_norm"].dtype

    def zero(dtype):  # a new array each time, because the carry's buffers are donated
        return jax.device_put(np.zeros((), dtype))

    parts: dict[str, Any] = {name: zero(integer) for name in ("steps", "compared")}
    parts |= {name: Count(zero(integer), zero(integer)) for name in ("zero", *_ADJOINT_EVENTS)}
    parts |= {name: zero(number) for name in ("predicted", "actual", "value")}
    parts["spent"] = zero(number) if spent is None else spent.astype(number)
    return StepMonitor(SearchReport(**parts), zero(number))


def monitor_step(
    monitor: StepMonitor, state: DescentState, metrics: dict[str, Any]
) -> tuple[StepMonitor, dict[str, Any]]:
    """Observe a step that ended in ``state``; add ``actual`` and its prediction to its metrics."""
    report, metrics = monitor.report, dict(metrics)
    adjoint = report_of(state.solver_state)
    events: dict[str, Any] = {"zero": metrics["grad_norm"] == 0}
    if isinstance(adjoint, AdjointReport):
        events |= {name: getattr(adjoint, name) > 0 for name in _ADJOINT_EVENTS}
    counts: Any = {k: _count_event(getattr(report, k), seen) for k, seen in events.items()}
    report = report._replace(steps=report.steps + 1, **counts)
    if "predicted" not in metrics:
        return monitor._replace(report=report), metrics
    dtype = monitor.predicted.dtype
    value = metrics["value"].astype(dtype)
    later = report.steps > 1
    actual = jnp.where(later, value - report.value, 0)
    report = report._replace(
        predicted=report.predicted + monitor.predicted,
        actual=report.actual + actual,
        compared=jnp.where(later, report.compared + 1, report.compared),
        value=value,
    )
    after = StepMonitor(report, metrics["predicted"].astype(dtype))
    return after, metrics | {"predicted": monitor.predicted, "actual": actual}


def _count_event(count: Count, happened: jax.Array) -> Count:
    total = jnp.where(happened, count.total + 1, count.total)
    return Count(total, jnp.where(happened, count.last + 1, 0))


_SCHEDULED = (  # optax's states with the count of a schedule; one of them is not public
    "ScaleByScheduleState",
    "InjectHyperparamsState",
    "InjectStatefulHyperparamsState",
    "WrappedScheduleState",
)
_OUTER, _INNER = 16, 8  # steps at which a schedule is evaluated


def spent_share(solver: Any, alpha: Pytree, w: Pytree, steps: int) -> jax.Array | None:
    """Return the share of ``steps`` outer steps with the inner schedule below 1 % of its peak.

    The schedule's count carries over from one outer step to the next, so a schedule for one lower
    solve ends long before the search. A solver without a schedule gives None.
    """
    inner = getattr(solver, "inner", None)
    if inner is None:
        return None
    state = jax.eval_shape(lambda alpha, w: inner.rule(alpha).init(params_of(w)), alpha, w)
    if not any(map(_is_scheduled, jax.tree.leaves(state, is_leaf=_is_scheduled))):
        return None
    return run_once(functools.partial(_share_below_peak, inner, steps), alpha, w)


def _share_below_peak(inner: Inner, steps: int, alpha: Pytree, w: Pytree) -> jax.Array:
    """Compare rates, the sizes of updates by ones, at 16 outer steps and 8 inner steps of each."""
    optimizer = gradient_transformation("optimizer", inner.rule(alpha))
    w = params_of(w)
    state = optimizer.init(w)
    ones = optax.tree.ones_like(w)

    def rate(count):
        extra_args = {"value": jnp.ones(()), "grad": ones, "value_fn": lambda w: jnp.ones(())}
        updates, _ = optimizer.update(ones, _at_count(state, count), w, **extra_args)
        return optax.tree.norm(updates)

    outer = np.unique(np.linspace(0, steps - 1, _OUTER).astype(int))
    within = np.unique(np.linspace(0, inner.steps - 1, _INNER).astype(int))
    counts = jnp.asarray(outer[:, None] * inner.steps + within)
    rates = jax.lax.map(rate, counts.ravel()).reshape(counts.shape).max(1)
    return jnp.mean(rates < 0.01 * rates.max())


def _is_scheduled(x: Any) -> bool:
    return type(x).__name__ in _SCHEDULED


def _at_count(state: Pytree, count: jax.Array) -> Pytree:
    """Return an optimizer's state with the counts of its schedules set to ``count``."""

    def moved(x):
        if not _is_scheduled(x):
            return x
        parts = {name: _at_count(part, count) for name, part in x._asdict().items()}
        return type(x)(**parts | {"count": count.astype(jnp.result_type(x.count))})

    return jax.tree.map(moved, state, is_leaf=_is_scheduled)
