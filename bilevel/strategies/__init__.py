"""Search with shared weights by DARTS, GAEA and others, as values for :func:`bilevel.search`.

Each function takes a :class:`bilevel.spaces.Space` (or a :class:`bilevel.Problem` with all of
``alpha`` on simplices), the optimizer of the weights, the optimizer of ``alpha``, and a batch size.
It returns a :class:`Strategy` for :func:`run`.

======================  =======================  =====================  ======================
strategy                alpha descends on        weights respond by     alpha's simplices
======================  =======================  =====================  ======================
:func:`darts`           validation batches       no step, or one        Adam on logits
:func:`gaea`            validation or training   no step                exponentiated gradient
:func:`unrolled`        validation batches       K steps                Adam on logits
:func:`joint`           training batches         no step                Adam on logits
:func:`weight_sharing`  nothing                  architectures drawn
======================  =======================  =====================  ======================

They cannot estimate the error of their hypergradients, because the shared weights are never trained
to a minimum: see ``Strategy.error``. :func:`bilevel.implicit` has an estimate.

References
----------
Liu, Simonyan & Yang, DARTS, ICLR 2019; Li, Khodak, Balcan & Talwalkar, Geometry-Aware Gradient
Algorithms for NAS, ICLR 2021; Li & Talwalkar, Random Search and Reproducibility for NAS, UAI 2019.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
