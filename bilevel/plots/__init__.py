"""Figures of searches, error estimates and kernels; they need ``pip install matplotlib``.

Every function draws on the given axes, or on new ones, and returns the axes. The context
``style()`` sets the common style of the figures and gives their colours.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
