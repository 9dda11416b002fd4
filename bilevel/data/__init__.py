"""Real datasets as numpy arrays, every file checked before it is used; stratified splits.

A dataset is read from ``$BILEVEL_DATA/<name>``, or from the user cache,
``pooch.os_cache("bilevel")/<name>``. If it is in neither folder, it is downloaded into the cache
from its public host. A file may be plain, ``.gz`` or ``.xz``: the digest of its content is checked.
Archives are read without unpacking, and nothing is ever unpickled.

=============  ===============  =======================================================
name           train / test     files
=============  ===============  =======================================================
digits         1,437 / 360      none: it comes with scikit-learn
mnist          60,000 / 10,000  idx, four files (LeCun, Cortes, Burges)
fashion-mnist  60,000 / 10,000  idx, four files (Xiao, Rasul, Vollgraf 2017)
cifar10        50,000 / 10,000  binary: six batches, or their archive (Krizhevsky 2009)
imdb           25,000 / 25,000  csv, ``aclImdb/``, or its archive (Maas et al. 2011)
=============  ===============  =======================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
