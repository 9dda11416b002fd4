"""Real datasets as numpy arrays, every file checked before it is used; stratified splits.

A dataset is looked for in ``$BILEVEL_DATA/<name>``, then in the user cache,
``pooch.os_cache("bilevel")/<name>``, and is otherwise downloaded into that cache from its public
host. A file may be plain, ``.gz`` or ``.xz``: it is the digest of its content that is checked.
Archives are read in place, and nothing is ever unpickled.

=============  ===============  =======================================================
name           train / test     files
=============  ===============  =======================================================
digits         1,437 / 360      none: it comes with scikit-learn
mnist          60,000 / 10,000  idx, four files
fashion-mnist  60,000 / 10,000  idx, four files
cifar10        50,000 / 10,000  the binary version: six batches, or their archive
imdb           25,000 / 25,000  ``imdb_reviews.csv``, or ``aclImdb/``, or its archive
=============  ===============  =======================================================

References: LeCun, Cortes, Burges, the MNIST database; Xiao, Rasul, Vollgraf, Fashion-MNIST, 2017;
Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; Maas et al., Learning Word
Vectors for Sentiment Analysis, ACL 2011.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
