"""Pictures of searches, error estimates, kernels; needs matplotlib: ``pip install matplotlib``.

Every function draws on axes it is given, or on new ones, and returns the axes. ``style()`` is the
context for pictures that look alike; it gives their colours.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
