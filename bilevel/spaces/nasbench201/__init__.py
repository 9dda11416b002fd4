"""NAS-Bench-201: 15,625 networks with known accuracies (Dong & Yang 2020).

``nasbench201_space`` is the supernet to search, ``all_networks`` all networks as one function of a
genotype, ``score_networks`` computes train-free scores of many networks, and ``genotypes`` lists
all genotypes; ``str`` gives the benchmark's string. :mod:`bilevel.spaces.nasbench201.judging` has
the accuracies after training, and judges rankings.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
