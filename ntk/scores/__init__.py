"""Train-free scores: how good a network will be, read off at its initialisation.

Every score is a pure function ``score(key, apply, params, batch) -> scalar``, with

====================  ==========================================================================
``key``               PRNG key; unused, for now: no score here draws anything
``apply(p, x)``       logits [n, classes]; pass it closed over when jitting
``params``            pytree of weights; ``jax.vmap`` over it scores many draws or networks. Of
                      flax's variables only the collection "params" counts as weights
``batch = (x, y)``    inputs [n, ...] and integer labels [n]
====================  ==========================================================================

Every score raises ValueError for a batch that is no such pair, for numbers that are not finite,
and for logits of another shape. The table of the scores is in the documentation, made from their
descriptions (:mod:`ntk.scores.registry`). Larger is better unless a description says otherwise.

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
