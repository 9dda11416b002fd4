"""What a train-free ranking of NAS-Bench-201 is worth: the published accuracies, and verdicts.

``table``: the accuracies of all 15,625 networks; ``verdicts``: correlations, choices and the
papers' protocol, beside what no score at all would do; ``standing``: where networks that a search
has found stand. The scores themselves are computed by
:mod:`bilevel.spaces.nasbench201.scoring`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
