"""Restart a solver at every outer step."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel.contracts import LowerSolver, Pytree, params_of
from bilevel.internal.checks import function, lower_solver, prng_key
from bilevel.internal.precision import like_start
from bilevel.solvers._implicit import AdjointReport, no_report, report_of, with_report


class RestartedState(NamedTuple):
    """State of :func:`restarted`."""

    start: Pytree  # like w: where every run begins
    report: AdjointReport | None = None  # the solver's, on the last adjoint
    number: jax.Array | None = None  # [], int: runs done before, if each has its own key


def restarted(
    solver: LowerSolver, start: Callable[..., Pytree] | None = None, *, key: jax.Array | None = None
) -> LowerSolver:
    """Restart ``solver`` from the first ``w`` at every outer step.

    Without it a search continues from the last weights (warm start), so its result depends on its
    path. With it ``w`` is the fixed algorithm ``A(alpha)`` of the papers, and the search minimizes
    a well-defined function of ``alpha``. The ``w`` given to ``run`` is ignored. The derivative in
    the starting point is that in the ``w`` given to ``init``.

    Parameters
    ----------
    solver : LowerSolver
    start : ``start(alpha, w) -> w``, or ``start(key, alpha, w) -> w`` with a ``key``; optional
        The start of every run, from ``alpha`` and the first ``w``: a learned initialization, as in
        MAML (Finn, Abbeel & Levine 2017). Its derivative counts if all steps are differentiated.
    key : jax.Array, optional
        A PRNG key. ``start`` gets a new key at every outer step, derived from this one and the
        step's number. The state counts the steps, so a resumed search draws the same starts.

    Raises
    ------
    ValueError
        If ``solver`` is not a lower solver, ``start`` not a function, or ``key`` not a PRNG key or
        without a ``start``. At run time, if ``start`` returns weights of other shapes.

    Examples
    --------
    >>> from bilevel.solvers import unrolled
    >>> lower = lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2)
    >>> def drawn(key, alpha, w):
    ...     return jax.random.normal(key, w.shape)
    >>> solver = restarted(unrolled(0.5, steps=1), drawn, key=jax.random.key(0))
    >>> state = solver.init(jnp.zeros(1))
    >>> first, state = solver.run(lower, jnp.ones(1), None, state, None)
    >>> second, state = solver.run(lower, jnp.ones(1), None, state, None)
    >>> bool((first == second).all()), int(state.number)
    (False, 2)
    """
    lower_solver("solver", solver)
    if start is not None:
        form = "(alpha, w) -> w" if key is None else "(key, alpha, w) -> w"
        function("start", start, form)
    if key is not None:
        prng_key("key", key)
        if start is None:
            raise ValueError(
                "start: expected a function (key, alpha, w) -> w with a key, got None."
            )

    def init(w):
        report = no_report(params_of(w)) if solver.reports else None
        return RestartedState(w, report, None if key is None else jnp.zeros((), jnp.int32))

    def run(lower, alpha, w, state, batch):
        begin = state.start
        if start is not None:
            keys = () if key is None else (jax.random.fold_in(key, state.number),)
            begin = like_start("start", start(*keys, alpha, begin), begin)
        first = with_report(solver.start(alpha, begin), state.report)
        w, last = solver.run(lower, alpha, begin, first, batch)
        if key is not None:
            state = state._replace(number=state.number + 1)
        return w, with_report(state, report_of(last) if solver.reports else None)

    # With a key, the step's number determines the solution too, not alpha alone.
    return solver._replace(init=init, run=run, init_at=None, of_alpha=key is None, inner=None)


def start_of(state: Pytree, w: Pytree) -> Pytree:
    """Return the start of a run with ``state`` and ``w``."""
    return state.start if isinstance(state, RestartedState) else w
