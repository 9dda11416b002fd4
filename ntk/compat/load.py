"""Load neural-tangents 0.6.5, its last release, on today's JAX: the only module that imports it.

It imports names that JAX has since moved or dropped, and an experimental module that needs
TensorFlow. During its import, ``jax`` has the missing names, and an empty module replaces the
experimental one. :mod:`ntk.compat.patches` replaces functions that it calls later. Tested on JAX
0.10, 0.11 and 0.12; `benchmarks/peers/neural_tangents_tests.py` runs its own tests.
"""

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from functools import cache

import jax
import jax.extend.core
from jax.interpreters import ad

from ntk.compat.patches import apply_patches

_INSTALL = (
    "install it with `pip install --no-deps neural-tangents==0.6.5` and `pip install frozendict`."
)
_EXPERIMENTAL = "neural_tangents.experimental"


def _safe_map(function, *lists):
    return [function(*items) for items in zip(*lists, strict=True)]


def _safe_zip(*lists):
    return list(zip(*lists, strict=True))


@contextlib.contextmanager
def _lent(place, names: dict) -> Iterator[None]:
    """Add missing attributes to ``place`` during the block."""
    lent = [name for name in names if not hasattr(place, name)]
    for name in lent:
        setattr(place, name, names[name])
    try:
        yield
    finally:
        for name in lent:
            delattr(place, name)


@contextlib.contextmanager
def _placeholder(name: str, **contents) -> Iterator[types.ModuleType]:
    """Add an empty module of that name during the block, unless one exists."""
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    try:
        yield sys.modules.setdefault(name, module)
    finally:
        if sys.modules.get(name) is module:
            del sys.modules[name]


@cache
def neural_tangents() -> types.ModuleType:
    """Return the package neural-tangents 0.6.5, patched for today's JAX, without TensorFlow.

    It is imported on the first call. Afterwards ``import neural_tangents`` works in this process.

    Returns
    -------
    module
        ``neural_tangents``: ``stax`` (infinite kernels), ``batch``, ``predict``, Monte Carlo and
        empirical kernels, without ``neural_tangents.experimental``. ``jax`` is unchanged.

    Raises
    ------
    ImportError
        If neural-tangents is missing, or its import fails on this version of JAX.

    Notes
    -----
    To install it: ``pip install --no-deps neural-tangents==0.6.5`` and ``pip install frozendict``.
    Its metadata requires TensorFlow, which only the experimental module needs.

    References
    ----------
    Novak et al. (2020), "Neural Tangents"; Novak, Sohl-Dickstein & Schoenholz (2022), "Fast finite
    width neural tangent kernel", for the implementations of empirical kernels.

    Examples
    --------
    >>> nt = neural_tangents()
    >>> from neural_tangents import stax
    >>> _, _, kernel_fn = stax.serial(stax.Dense(1), stax.Relu(), stax.Dense(1))
    >>> kernel_fn(jax.numpy.ones((1, 2)), None, "ntk")
    Array([[1.]], dtype=float...)
    """
    moved = "Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var"
    core = {name: getattr(jax.extend.core, name) for name in moved}
    # It is only a key of a table, so a new primitive that no program contains is harmless.
    zeros_like = {"zeros_like_p": jax.extend.core.Primitive("zeros_like")}
    with (
        _placeholder(_EXPERIMENTAL) as experimental,
        _placeholder("jax.util", safe_map=_safe_map, safe_zip=_safe_zip),
        _lent(jax.core, core),
        _lent(ad, zeros_like),
        warnings.catch_warnings(action="ignore", category=DeprecationWarning),
    ):
        try:
            module = importlib.import_module("neural_tangents")
        except ModuleNotFoundError as error:
            raise ImportError(
                f"{error.name}: expected neural-tangents 0.6.5, got none; {_INSTALL}"
            ) from error
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"neural_tangents: expected a version that JAX {jax.__version__} can import, "
                f"got the error {str(error)!r}; {_INSTALL}"
            ) from error
    if getattr(module, "experimental", None) is experimental and _EXPERIMENTAL not in sys.modules:
        del module.experimental
    apply_patches(module)
    return module
