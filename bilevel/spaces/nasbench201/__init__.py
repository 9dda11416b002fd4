"""NAS-Bench-201: 15,625 networks whose accuracies are known (Dong & Yang 2020).

``nasbench201_space``: the supernet to search; ``all_networks``: all networks as one function of a
genotype; ``score_networks``: train-free scores of many networks; ``genotypes``: all genotypes, of
which ``str`` gives the benchmark's text. What networks reach when trained, and what a ranking of
them is worth, is in :mod:`bilevel.spaces.nasbench201.judging`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
