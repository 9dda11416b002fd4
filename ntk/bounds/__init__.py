"""Bounds of the smallest eigenvalue of a neural tangent kernel, and of the resulting error.

Every function returns a :class:`Bound`: a value with its terms, assumptions and open constants.

==============================  ==================================================================
``ntk.bounds.eigenvalue``       bounds that hold: diagonal, Frobenius, Schur chain, Hermite
``ntk.bounds.zhu``              the theorems of Zhu et al. 2022, three of them false as printed
``ntk.bounds.constants``        Hermite coefficients, betas (Table 1), Lipschitz constants
==============================  ==================================================================
"""

from ntk.bounds.bound import Bound
from ntk.bounds.constants import table1
from ntk.bounds.eigenvalue import (
    diagonal_upper_bound,
    frobenius_upper_bound,
    hermite_lower_bound,
    schur_lower_bound,
)
from ntk.bounds.zhu import (
    eigen_nas_as_printed,
    zhu_theorem1_as_printed,
    zhu_theorem2_as_printed,
    zhu_theorem3,
    zhu_variance_as_printed,
)

__all__ = [
    "Bound",
    "diagonal_upper_bound",
    "eigen_nas_as_printed",
    "frobenius_upper_bound",
    "hermite_lower_bound",
    "schur_lower_bound",
    "table1",
    "zhu_theorem1_as_printed",
    "zhu_theorem2_as_printed",
    "zhu_theorem3",
    "zhu_variance_as_printed",
]
