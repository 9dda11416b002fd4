"""Judge train-free rankings of NAS-Bench-201 by the published accuracies.

``load_table`` reads the accuracies of all 15,625 networks. ``correlations``, ``best_of_k`` and
``best_of_k_random`` judge how well scores rank them, compared with no score.
:func:`bilevel.spaces.nasbench201.score_networks` computes the scores. ``verdicts`` has the report
of `bilevel rank`, including the papers' protocol.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
