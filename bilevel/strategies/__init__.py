"""How to search with shared weights: DARTS, GAEA and others, as values for :func:`bilevel.search`.

Each function takes a :class:`bilevel.spaces.Space` (or a :class:`bilevel.Problem`, all of whose
``alpha`` is on simplices), the optimizer of the weights, that of ``alpha``, and a batch size; it
returns a :class:`Strategy`, which :func:`run` searches by.

======================  =======================  =====================  ======================
strategy                alpha descends on        weights respond by     alpha's simplices
======================  =======================  =====================  ======================
:func:`darts`           validation batches       no step, or one        Adam on logits
:func:`gaea`            validation or training   no step                exponentiated gradient
:func:`unrolled`        validation batches       K steps                Adam on logits
:func:`joint`           training batches         no step                Adam on logits
:func:`weight_sharing`  nothing                  architectures drawn
======================  =======================  =====================  ======================

None of them has an estimate of its hypergradient's error, as the shared weights are never trained
to a minimum: ``Strategy.error`` says so in a sentence. For one that has, use
:func:`bilevel.implicit`.

References
----------
Liu, Simonyan & Yang, DARTS, ICLR 2019; Li, Khodak, Balcan & Talwalkar, Geometry-Aware Gradient
Algorithms for NAS, ICLR 2021; Li & Talwalkar, Random Search and Reproducibility for NAS, UAI 2019.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
