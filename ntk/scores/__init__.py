"""Train-free scores of networks: by gradients, tangent kernels, ReLU patterns and responses."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
