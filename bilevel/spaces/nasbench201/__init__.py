"""NAS-Bench-201: 15,625 networks whose accuracies are known (Dong & Yang 2020).

``all_networks``: all of them as one function of a genotype; ``nasbench201_network``: one,
to be trained from scratch; ``nasbench201_space``: the supernet to search; ``scoring``, a module of
its own: train-free scores of many networks. What networks reach when trained, and what a ranking of
them is worth, is in :mod:`bilevel.spaces.nasbench201.judging`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
