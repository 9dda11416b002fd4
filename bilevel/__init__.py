"""Differentiable bilevel optimization in JAX: flat public names.

A newcomer's path through the code: ``problem``, ``inverse``, ``forward``, ``solvers``,
``estimate``, ``_hypergradient``, ``geometry``, ``_descent``, ``_search``.

The names and their places: ``__init__.pyi``. They are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
