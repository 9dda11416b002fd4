"""Discretise a mixture: argmax, rankings, and conditions for the argmax to be the best choice.

A search ends in alpha on the simplex and shared weights W*. The choice of largest alpha_i is right
if no other single choice has a smaller loss at W*. Roberts et al. give conditions for this. With
``f_alpha = sum_i alpha_i f_i`` and half the squared error as loss, for every alpha,

    L_i = L_alpha + (1 - alpha_i)^2 D_i + s_i,
    D_i = 1/2 E |f_i - sum_k gamma^(i)_k f_k|^2,    gamma^(i) = alpha_{-i} / (1 - alpha_i),
    s_i = <grad L(alpha), e_i - alpha>,             sum_i alpha_i s_i = 0.

The paper assumes realizability, ``y = f_alpha``: then L_alpha and all s_i are 0. It is enough that
alpha minimises L over the simplex at W*, which is ``s >= 0`` (``s_i = 0`` where alpha_i > 0).
**Condition 6** is ``D_i >= D_j``; with ``L_i < L_j`` and ``alpha_j > 0`` it gives
``alpha_j < alpha_i`` (Theorem 7). So the argmax is the best choice b if ``D_b >= D_j`` for all j.
If b is unknown, the argmax a is best if ``D_j >= D_a`` for all j. If alpha is not a minimiser,

    L_a <= min_j L_j + g / alpha_a,    g = max_i -s_i    (the Frank-Wolfe gap of alpha).

Beyond the paper: under the same assumption no condition is needed. ``(1 - alpha_i)^2 D_i`` is
``1/2 E |f_i - f_alpha|^2``, so for an interior minimiser the best choice is the one nearest to the
mixture. Outputs without labels show which one that is.

:func:`condition_six` takes f_i(W*) as ``outputs[:, i]`` and returns L, D, s (``slack``) and g
(``stationarity``). gamma depends on i, as in the proofs; Condition 6 leaves it open. All of this is
about the shared weights. `bilevel search` also compares the losses of networks that are trained
alone.

Reference: Roberts, Liang & Sala, Understanding Neural Architecture Search by its Architecture
Parameters: Theorems 1, 4, 7, Lemmas 2, 5, Conditions 3, 6.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
