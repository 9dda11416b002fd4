"""Infinitely wide networks of layers: one description for exact kernels and finite networks.

Layers: :mod:`ntk.networks.layers`. A network is ``serial`` of them; its methods are ``kernel``,
``module`` (flax) and ``start``, with ``names``: its search space.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
