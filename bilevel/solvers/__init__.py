"""Lower solvers: pure functions from ``alpha`` to ``w``, differentiable in ``alpha``.

``unrolled`` differentiates the optimizer's own steps. ``implicit`` differentiates the stationarity
condition ``grad_w lower(w, alpha) = 0`` at the ``w`` of any forward solver. ``ridge`` is the closed
form for features. Forward solvers, which find ``w`` for ``implicit``, are in ``minimizers``.

================  ==========================  =====================================================
solver            derivative                  memory, in copies of w
================  ==========================  =====================================================
``unrolled``      of T steps, exact           T, or 2 sqrt(T) if short; forward mode: 2
``one_step``      of one step, exact          3, however large the graph of a gradient
``distilled``     of the past, in one step    3, however large the graph of a gradient
``implicit``      at the solution, exact      that of the inverse; 6 for ``cg``
``ridge``         closed form, exact          the features and one min(n, p)^2 matrix
================  ==========================  =====================================================
"""

from bilevel.solvers._distilled import distilled
from bilevel.solvers._implicit import AdjointReport as AdjointReport
from bilevel.solvers._implicit import implicit
from bilevel.solvers._implicit import remember as remember
from bilevel.solvers._implicit import report_of as report_of
from bilevel.solvers._implicit import with_report as with_report
from bilevel.solvers._mixed_mode import detached as detached
from bilevel.solvers._restarted import RestartedState as RestartedState
from bilevel.solvers._restarted import restarted
from bilevel.solvers._restarted import start_of as start_of
from bilevel.solvers._ridge import ridge
from bilevel.solvers._unrolled import one_step, unrolled

__all__ = ["distilled", "implicit", "one_step", "restarted", "ridge", "unrolled"]
