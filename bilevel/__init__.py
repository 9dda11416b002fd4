"""Differentiable bilevel optimization in JAX: flat public names, imported when first used.

Read ``contracts`` first, then the packages ``problem``, ``solvers``, ``hypergradients`` and
``outer_loop``. The names and their places: ``__init__.pyi``.
"""

import lazy_loader

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name):
    if name != "__version__":
        return _imported(name)
    from importlib import metadata

    try:
        return metadata.version("bilevel")
    except metadata.PackageNotFoundError:  # on the path, but not installed
        return "unknown"
