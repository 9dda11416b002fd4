"""Sets and non-smooth terms of a lower problem.

:func:`bilevel.projected` and :func:`bilevel.proximal` make them by name. A tree of names has
one for each part of a tree of weights.

===================  ===========================================================================
set                  weights
===================  ===========================================================================
``box``              ``low <= w <= high``
``nonnegative``      ``w >= 0``
``simplex``          ``w >= 0``, with a given sum on the last axis
``l2_ball``          ``|w|_2 <= radius``
``l1_ball``          ``|w|_1 <= radius``
``affine``           ``matrix @ w = right``
``box_equality``     ``low <= w <= high`` and ``coefficients . w = total``: the SVM's dual
``projection``       your own projection
===================  ===========================================================================

===================  ===========================================================================
term                 added to the lower loss
===================  ===========================================================================
``l1``               ``sum_j weight_j |w_j|``: the Lasso
``elastic_net``      the same and ``sum_j ridge_j w_j^2 / 2``
``group_l1``         ``sum_g weight_g |w_g|_2``
``total_variation``  ``weight sum_j |w_(j+1) - w_j|``
``prox``             your own proximal operator
===================  ===========================================================================
"""

from bilevel.constraints._affine import affine
from bilevel.constraints._balls import l1_ball, l2_ball
from bilevel.constraints._boxes import box, box_equality, nonnegative
from bilevel.constraints._own import product, projection, prox
from bilevel.constraints._simplex import project_simplex as project_simplex
from bilevel.constraints._simplex import simplex
from bilevel.constraints._sparse import elastic_net, group_l1, l1
from bilevel.constraints._total_variation import total_variation

__all__ = [
    "affine",
    "box",
    "box_equality",
    "elastic_net",
    "group_l1",
    "l1",
    "l1_ball",
    "l2_ball",
    "nonnegative",
    "product",
    "projection",
    "prox",
    "simplex",
    "total_variation",
]
