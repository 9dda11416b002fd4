"""A solver that begins anew at every outer step."""

from typing import NamedTuple

from bilevel.checks import lower_solver
from bilevel.protocols import LowerSolver, Pytree


class RestartedState(NamedTuple):
    """State of :func:`restarted`."""

    start: Pytree  # like w: where every run begins


def restarted(solver: LowerSolver) -> LowerSolver:
    """``solver``, begun anew from the first ``w`` at every outer step.

    A search otherwise goes on from the last weights (warm start), so that what it returns depends
    on its path. Restarted, ``w`` is the fixed algorithm ``A(alpha)`` of the papers, and the search
    minimises a well-defined function of ``alpha``. The ``w`` given to ``run`` is ignored; the
    derivative with respect to the starting point is that of the ``w`` given to ``init``.

    Raises
    ------
    ValueError
        If ``solver`` is no lower solver.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from bilevel.solvers import unrolled
    >>> solver = restarted(unrolled(0.5, steps=1))
    >>> lower = lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2)
    >>> state = solver.init(jnp.zeros(1))
    >>> solver.run(lower, jnp.ones(1), jnp.full(1, 99.0), state, None)[0]
    Array([0.5], dtype=float...)
    """
    lower_solver("solver", solver)

    def run(lower, alpha, w, state, batch):
        return solver.run(lower, alpha, state.start, solver.init(state.start), batch)[0], state

    return solver._replace(init=RestartedState, run=run)


def start_of(state: Pytree, w: Pytree) -> Pytree:
    """Where a run begins that is given ``state`` and ``w``."""
    return state.start if isinstance(state, RestartedState) else w
