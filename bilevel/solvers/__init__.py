"""Lower solvers: pure functions from ``alpha`` to ``w``, differentiable in ``alpha``.

``unrolled``, ``one_step`` and ``distilled`` differentiate the optimizer's own steps. ``implicit``
differentiates the stationarity condition ``grad_w lower(w, alpha) = 0`` at the ``w`` of a forward
solver from ``minimizers`` or ``constrained``. ``ridge`` is the closed form for features.
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
