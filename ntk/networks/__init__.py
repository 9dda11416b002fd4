"""Infinitely wide networks of layers: one description for exact kernels and finite networks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
