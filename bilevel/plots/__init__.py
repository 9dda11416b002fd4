"""Figures of searches, error estimates and kernels; they need ``pip install matplotlib``.

Every function draws on the given axes, or on new ones, and returns the axes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
