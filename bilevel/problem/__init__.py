"""The bilevel problem, the structure of its lower loss, and its constant parts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
