"""Train-free scores: predict a network's accuracy from its initialisation.

Every score is a pure function ``score(key, apply, params, batch) -> scalar``, with

====================  ==========================================================================
``key``               PRNG key; currently unused, because no score draws random numbers
``apply(p, x)``       logits [n, classes]; pass it closed over when jitting
``params``            pytree of weights; ``jax.vmap`` over it scores many draws or networks. For
                      flax variables, only the collection "params" counts as weights
``batch = (x, y)``    inputs [n, ...] and integer labels [n]
====================  ==========================================================================

Every score raises ValueError if the batch is not such a pair, values are not finite, or logits have
another shape. The documentation has a table of the scores, from :mod:`ntk.scores.registry`. Larger
is better unless a description says otherwise.

Batch normalisation with batch statistics, ``apply = lambda p, x: model.apply(p, x,
mutable=["batch_stats"])[0]`` for flax, makes samples interact. *Joint*: all samples pass through
together, and the gradient of sample i's logits runs through the statistics of all. *Alone*: each
sample is a batch of one, as in KNAS's code. Without batch normalisation the two are the same.

*Weights* are the kernels of convolutions and dense layers: the leaves named ``kernel`` if
``params`` has any, otherwise all leaves of two or more axes that enter a matrix product. Biases and
scales of normalisations do not count. One leaf is one layer: unstack stacked layers (``nn.scan``)
for :func:`grad_norm`, :func:`zico` and :func:`l2_norm`.

No score is NaN for a dead network or equal samples: sums over gradients are 0, a logarithm of 0 is
``-inf``, and a condition number is ``inf``.

References
----------
Zhu, Liu, Chrysos & Cevher (2022), section 5.2; zero-cost-nas: Abdelfattah et al. (ICLR 2021); and
those of each function.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
