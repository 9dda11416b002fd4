"""What a train-free ranking of NAS-Bench-201 is worth: the published accuracies, and verdicts.

``load_table`` reads the accuracies of all 15,625 networks. ``correlations``, ``best_of_k`` and
``best_of_k_random`` say how well scores rank them, beside what no score at all would do. The scores
themselves are computed by :func:`bilevel.spaces.nasbench201.score_networks`; what `bilevel rank`
writes about them, the papers' protocol included, is in ``verdicts``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
