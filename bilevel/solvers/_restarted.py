"""A solver that begins anew at every outer step."""

from collections.abc import Callable
from typing import NamedTuple

from bilevel.checks import function, lower_solver
from bilevel.precision import like_start
from bilevel.protocols import LowerSolver, Pytree, params_of
from bilevel.solvers._implicit import AdjointReport, no_report, report_of, with_report


class RestartedState(NamedTuple):
    """State of :func:`restarted`."""

    start: Pytree  # like w: where every run begins
    report: AdjointReport | None = None  # the solver's, on the last adjoint


def restarted(
    solver: LowerSolver, start: Callable[[Pytree, Pytree], Pytree] | None = None
) -> LowerSolver:
    """``solver``, begun anew from the first ``w`` at every outer step.

    A search otherwise goes on from the last weights (warm start), so that what it returns depends
    on its path. Restarted, ``w`` is the fixed algorithm ``A(alpha)`` of the papers, and the search
    minimises a well-defined function of ``alpha``. The ``w`` given to ``run`` is ignored; the
    derivative with respect to the starting point is that of the ``w`` given to ``init``.

    Parameters
    ----------
    solver : LowerSolver
    start : ``start(alpha, w) -> w``, optional
        Where every run begins, from ``alpha`` and the first ``w``: a learned initialisation, as in
        MAML (Finn, Abbeel & Levine 2017). Its derivative counts where all steps are differentiated.

    Returns
    -------
    LowerSolver

    Raises
    ------
    ValueError
        If ``solver`` is no lower solver, or ``start`` no function; when it runs, where ``start``
        returns weights that are not of the shapes of the first ones.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from bilevel.solvers import unrolled
    >>> solver = restarted(unrolled(0.5, steps=1))
    >>> lower = lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2)
    >>> state = solver.init(jnp.zeros(1))
    >>> solver.run(lower, jnp.ones(1), jnp.full(1, 99.0), state, None)[0]
    Array([0.5], dtype=float...)

    MAML: ``alpha`` is where the task's own steps begin.

    >>> learned = restarted(unrolled(0.5, steps=1), start=lambda alpha, w: alpha)
    >>> to_one = lambda w, alpha, batch: 0.5 * jnp.sum((w - 1) ** 2)
    >>> learned.run(to_one, jnp.full(1, 3.0), None, state, None)[0]
    Array([2.], dtype=float...)
    """
    lower_solver("solver", solver)
    if start is not None:
        function("start", start, "(alpha, w) -> w")

    def run(lower, alpha, w, state, batch):
        begin = state.start
        if start is not None:
            begin = like_start("start", start(alpha, begin), begin)
        first = with_report(solver.start(alpha, begin), state.report)
        w, last = solver.run(lower, alpha, begin, first, batch)
        return w, with_report(state, report_of(last) if solver.reports else None)

    def init(w):
        return RestartedState(w, no_report(params_of(w)) if solver.reports else None)

    return solver._replace(init=init, run=run, init_at=None, of_alpha=True, inner=None)


def start_of(state: Pytree, w: Pytree) -> Pytree:
    """Where a run begins that is given ``state`` and ``w``."""
    return state.start if isinstance(state, RestartedState) else w
