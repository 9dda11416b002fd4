"""Train-free scores: how good a network will be, read off at its initialisation.

Every score is a pure function ``score(key, apply, params, batch) -> scalar``, with

====================  ==========================================================================
``key``               unused, for now: no score here draws anything
``apply(p, x)``       logits [n, classes]; pass it closed over when jitting
``params``            pytree of weights; ``jax.vmap`` over it scores many draws or networks. Of
                      flax's variables only the collection "params" counts as weights
``batch = (x, y)``    inputs [n, ...] and integer labels [n]
====================  ==========================================================================

Larger is better, except for :func:`te_nas` and :func:`condition_number`. Every score raises
ValueError for a batch that is no such pair, for numbers that are not finite, and for logits of
another shape.

=============================  ============================================  ============  =======
score                          formula                                       gradients     norm
=============================  ============================================  ============  =======
:func:`eigen_nas`              ``tr K / n``                                  n, singly     alone
:func:`min_eigenvalue`         ``lambda_min(K)``                             n, singly     alone
:func:`condition_number`       ``lambda_max(K) / lambda_min(K)``             n, singly     alone
:func:`cosine_min_eigenvalue`  ``lambda_min`` of ``K_ij / sqrt(K_ii K_jj)``  n, singly     alone
:func:`label_energy`           ``-y'K^-1 y`` of the centred one-hot labels   n, singly     alone
:func:`spectral_entropy`       entropy of K's eigenvalues, which add to 1    n, singly     alone
:func:`log_traces`             ``sum_l log tr K_l / n``, layer by layer      n, singly     alone
:func:`knas`                   ``|mean_i grad ell_i|^2``                     n, singly     alone
:func:`knas_released`          covariance between two halves                 n, singly     alone
:func:`te_nas`                 ``lambda_max(K) / lambda_min(K)``             n             joint
:func:`nasi`                   ``|grad L|^2``, penalised where large         1             joint
:func:`grad_norm`              ``sum_l |grad_l L|``                          1             joint
:func:`snip`                   ``sum |w * grad L|``                          1             joint
:func:`grasp`                  ``-sum w * (H grad L)``                       2             joint
:func:`fisher`                 ``sum_c mean_n (a . dL/da)^2 / 2``            1             joint
:func:`zico`                   ``sum_l log sum_w mean|g| / std(g)``          one per part  joint
:func:`jacov`                  spectrum of the inputs' gradients             1             joint
:func:`synflow`                ``log sum |w * dR/dw|`` at ``|w|``            1             removed
:func:`naswot`                 ``log det`` of agreements of ReLU signs       none          joint
:func:`regions`                number of distinct ReLU sign patterns         none          joint
:func:`wrcor`                  ``log det`` of correlations at the ReLUs      1             joint
:func:`l2_norm`                ``sum_l |w_l|``                               none          -
=============================  ============================================  ============  =======

Batch normalisation on batch statistics, ``apply = lambda p, x: model.apply(p, x,
mutable=["batch_stats"])[0]`` for flax, makes samples interact. *Joint*: all samples go through
together, and the gradient of sample i's logits runs through the statistics of all. *Alone*: each
sample is a batch of one, as in KNAS's code. Without batch normalisation the two are the same.

*Weights* are the kernels of convolutions and dense layers: the leaves named ``kernel`` where
``params`` has such, otherwise all leaves of two or more axes. Biases and normalisations' scales do
not count. One leaf is one layer: give stacked layers (``nn.scan``) unstacked to :func:`grad_norm`,
:func:`zico` and :func:`l2_norm`.

No score is NaN for a dead network, or for equal samples: sums over gradients are 0, a logarithm of
0 is ``-inf``, a condition number ``inf``.

References
----------
Zhu, Liu, Chrysos & Cevher (2022), section 5.2; zero-cost-nas: Abdelfattah et al. (ICLR 2021);
the others at their functions.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
