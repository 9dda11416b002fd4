"""Generalization bounds of architecture search with a train-validation split.

Every function returns a :class:`Bound`: a value with its terms, assumptions and open constants.
:func:`sample_size` inverts any of them. ``docs/theory.md`` has a table of all functions, and the
proofs with every constant. Bounds of eigenvalues of tangent kernels are in :mod:`ntk.bounds`.
"""

from bilevel.theory.bounds.convergence import (
    hypergradient_convergence,
    sample_size,
    selection_risk,
    uniform_convergence,
)
from bilevel.theory.bounds.covering import (
    ball_covering,
    effective_dimension,
    finite_covering,
    simplex_covering,
    sparse_covering,
)
from bilevel.theory.bounds.khodak import (
    khodak_corollary_a1,
    khodak_corollary_a2,
    khodak_corollary_a3,
    khodak_corollary_a4,
    khodak_theorem_3_1_as_printed,
    khodak_theorem_a2,
    khodak_theorem_a2_as_printed,
    version_entropy,
)
from bilevel.theory.bounds.oymak import (
    feature_map_lipschitz,
    oymak_h_bar,
    oymak_lemma1,
    oymak_lemma2,
    oymak_lemma2_as_printed,
    oymak_proposition1,
    oymak_theorem1,
    oymak_theorem4_as_printed,
)
from bilevel.theory.bounds.oymak_kernels import (
    oymak_theorem2,
    oymak_theorem2_as_printed,
    oymak_theorem3,
)
from ntk.bounds import Bound

__all__ = [
    "Bound",
    "ball_covering",
    "effective_dimension",
    "feature_map_lipschitz",
    "finite_covering",
    "hypergradient_convergence",
    "khodak_corollary_a1",
    "khodak_corollary_a2",
    "khodak_corollary_a3",
    "khodak_corollary_a4",
    "khodak_theorem_3_1_as_printed",
    "khodak_theorem_a2",
    "khodak_theorem_a2_as_printed",
    "oymak_h_bar",
    "oymak_lemma1",
    "oymak_lemma2",
    "oymak_lemma2_as_printed",
    "oymak_proposition1",
    "oymak_theorem1",
    "oymak_theorem2",
    "oymak_theorem2_as_printed",
    "oymak_theorem3",
    "oymak_theorem4_as_printed",
    "sample_size",
    "selection_risk",
    "simplex_covering",
    "sparse_covering",
    "uniform_convergence",
    "version_entropy",
]
