"""Single-loop stochastic methods: weights, adjoint and hyperparameters move together, by batches.

Use them if data or weights are too large for full passes. Each function returns a
:class:`bilevel.SingleLoop`, for :func:`bilevel.search` with ``batches=bilevel.partition(...)`` and
any optax optimizer of ``alpha``. ``f2sa``, ``meha`` and ``bome`` need no second derivatives. Only
the directions of ``saba`` and ``spaba`` become exact at a solution, so constant rates converge.
"""

from bilevel.stochastic._blocks import BatchedData as BatchedData
from bilevel.stochastic._blocks import BatchSchedule as BatchSchedule
from bilevel.stochastic._blocks import draw_batch_schedule as draw_batch_schedule
from bilevel.stochastic._blocks import make_batched_data as make_batched_data
from bilevel.stochastic._first_order import bome, f2sa, meha
from bilevel.stochastic._oracles import full_direction as full_direction
from bilevel.stochastic._oracles import tree_norm as tree_norm
from bilevel.stochastic._paced import paced
from bilevel.stochastic._soba import amigo, ma_soba, soba
from bilevel.stochastic._variance_reduced import saba, spaba

__all__ = ["amigo", "bome", "f2sa", "ma_soba", "meha", "paced", "saba", "soba", "spaba"]
