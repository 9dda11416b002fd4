"""Choose among configurations by the methods that architecture search is compared with.

Every method is ``method(key, configs, problem, budget, *, ...) -> Trace``: a host loop over
expensive solves. The problem compiles each solve.

==========================  ==========================  ========================================
method                      one solver call             calls, for n configurations
==========================  ==========================  ========================================
``random_search``           one configuration           ``evaluations``
``successive_halving``      one, at a growing resource  about 2 n at ``eta=2``
``hyperband``               one, at a growing resource  by ``budget``: 206 at 81
``weight_sharing``          all survivors               ceil(log2 n)
``fast_weight_sharing``     the same, growing resource  ceil(log2 n)
``exponentiated_gradient``  all, by their weights       ``rounds``
==========================  ==========================  ========================================

Arguments of every method:

- ``key``: a PRNG key.
- ``configs``: a sequence of configurations of any type.
- ``problem``: a function ``evaluate(key, config, resource)``, or a :class:`Selection`, which can
  also train weights that the configurations share.
- ``budget``: int, the resource of a full training, e.g. a feature dimension, steps or epochs.
- ``retrain_test``: whether to train every incumbent again by itself, at the full budget and off the
  clock, for its test error. Default: True if the problem is a Selection.
- ``journal``: a file that receives every solve, as a line of JSON with its checksum.
- ``resume``: whether to resume from an existing journal. The trace is then the same as that of an
  uninterrupted run.
- ``progress``: whether to draw a progress bar. Default: only in a terminal or a notebook.

Every method raises ``ValueError`` before the first solve if ``key`` is not a PRNG key, ``configs``
is empty, or ``budget`` is under 1. It also raises it if the journal is from another problem, key,
budget or choice of options. It raises ``FloatingPointError`` if no error of a solve is finite.
Ctrl-C ends a method, which then returns the rows so far.

Reference: Khodak, Li, Roberts, Balcan & Talwalkar (2020), "A Simple Setting for Understanding
Neural Architecture Search with Weight-Sharing", section 2 and Appendix B.
"""

from bilevel.baselines._recorder import Trace
from bilevel.baselines.random_search_and_halving import hyperband, random_search, successive_halving
from bilevel.baselines.shared_weights import (
    exponentiated_gradient,
    fast_weight_sharing,
    weight_sharing,
)
from bilevel.contracts import Selection

__all__ = [
    "Selection",
    "Trace",
    "exponentiated_gradient",
    "fast_weight_sharing",
    "hyperband",
    "random_search",
    "successive_halving",
    "weight_sharing",
]
