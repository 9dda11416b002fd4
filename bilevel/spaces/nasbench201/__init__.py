"""NAS-Bench-201: 15,625 networks with known accuracies (Dong & Yang 2020).

``nasbench201_space`` is the supernet to search. ``all_networks`` is one function of a genotype for
all networks. ``score_networks`` computes train-free scores of many networks. ``genotypes`` lists
all genotypes, and ``str`` of a genotype is the benchmark's string.
:mod:`bilevel.spaces.nasbench201.judging` has the accuracies after training, and judges rankings.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
