"""Sets and non-smooth terms of a lower problem.

:func:`bilevel.projected` and :func:`bilevel.proximal` make them by name. A tree of names has
one for each part of a tree of weights.
"""

from bilevel.constraints._linear import affine, box, box_equality, nonnegative
from bilevel.constraints._own import product, projection, prox
from bilevel.constraints._simplex_and_balls import l1_ball, l2_ball, simplex
from bilevel.constraints._simplex_and_balls import project_simplex as project_simplex
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
