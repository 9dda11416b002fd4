"""Parts of neural networks: convolution, layers, images, training from scratch, error rates."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
