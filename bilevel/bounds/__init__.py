"""Generalization bounds of architecture search with a train-validation split.

Every bound is a :class:`Bound`: a value with its terms, assumptions and open constants. Those of
eigenvalues of tangent kernels are in :mod:`ntk.bounds`.

==============================  ==================================================================
``bilevel.bounds.khodak``       excess risk after selection on validation data, Khodak et al. 2020
==============================  ==================================================================
"""

from bilevel.bounds.khodak import (
    khodak_corollary_a1,
    khodak_corollary_a2,
    khodak_corollary_a3,
    khodak_corollary_a4,
    khodak_theorem_3_1_as_printed,
    khodak_theorem_a2,
    khodak_theorem_a2_as_printed,
    sample_size,
    version_entropy,
)
from ntk.bounds import Bound

__all__ = [
    "Bound",
    "khodak_corollary_a1",
    "khodak_corollary_a2",
    "khodak_corollary_a3",
    "khodak_corollary_a4",
    "khodak_theorem_3_1_as_printed",
    "khodak_theorem_a2",
    "khodak_theorem_a2_as_printed",
    "sample_size",
    "version_entropy",
]
