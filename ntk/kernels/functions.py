"""Kernels as functions of their inputs: neural-tangents', ours, any ``k(x1, x2)``.

Functions that take a kernel matrix also take such a function, together with the inputs ``x``. It
can return a matrix, or a record with the fields ``nngp`` and ``ntk`` (:class:`ntk.Kernels`,
neural-tangents' ``Kernel``). The tangent kernel of a record is the default.

**The error of an entry**, which certificates need, is the function's own if it returns one.
Otherwise it is *measured*, relative to ``sqrt(K_ii K_jj)``, as the largest of

    64 eps64                    a few roundings
    8 |K64(x + r) - K64(x)|     r a few roundings of the inputs, drawn three times
    d sqrt(eps64 / eps32)       d = |K64 - K32|, if d is above 64 eps32

Formulas with ``arccos rho`` or ``sqrt(1 - rho^2)`` lose half their digits between nearly equal
inputs, including an input and itself. This can happen in one precision only. So an entry has at
least the error of all entries with smaller correlation ``K_ij / sqrt(K_ii K_jj)``. This is an
estimate: a certificate is only as good as the estimate.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.internal.checks import describe, function, one_of, real_array, sequence
from ntk.internal.sharding import without_explicit_axes
from ntk.kernels.record import Kernels

KernelFunction = Callable[..., Any]
"""``kernel(x1, x2)`` or ``kernel(x1, x2=None)``: a matrix [n1, n2], or a record of matrices."""

_ROUNDINGS = 64  # units of roundoff of an accurate kernel's entry
_DRAWS = 3  # of moved inputs; a lossy entry differs in at least half of them
_EPS32 = float(np.finfo(np.float32).eps)


def kernel_matrix(
    kernel: KernelFunction, x1: chex.Array, x2: chex.Array | None = None, *, get: str = "ntk"
) -> jax.Array:
    """Return the matrix [n1, n2] of a kernel function.

    Parameters
    ----------
    kernel : ``kernel(x1, x2) -> [n1, n2]``
        Also neural-tangents' ``kernel_fn``, or ``functools.partial`` of :func:`ntk.network_kernel`.
    x1 : array [n1, ...]
    x2 : array [n2, ...], optional
        Default: ``x1``, or None for a function with this default for its second argument.
    get : {"ntk", "nngp"}
        Field of a record.

    Raises
    ------
    ValueError
        If ``kernel`` is not a function, or its result has another shape.

    Examples
    --------
    >>> x = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    >>> kernel_matrix(lambda a, b: a @ b.T, x)
    Array([[1., 1.],
           [1., 2.]], dtype=float...)
    """
    output = _call_kernel(kernel, x1, x2, get)
    return getattr(output, get, output)


def kernel_record(
    kernel: KernelFunction, x1: chex.Array, x2: chex.Array | None = None
) -> Kernels | Any:
    """Return the record of a kernel function, with the fields ``nngp`` and ``ntk``."""
    record = _call_kernel(kernel, x1, x2, None)
    if not (hasattr(record, "nngp") and hasattr(record, "ntk")):
        raise ValueError(
            "kernel: expected a function that returns the fields nngp and ntk, as "
            f"network_kernel does, got a {type(record).__name__}."
        )
    return record


def measured(
    kernel: KernelFunction, x: Any, entry_error: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix [n, n] in float64, and its entries' errors: given, its own, or measured."""
    x = np.asarray(x)
    output, K = _in_precision(kernel, x, True)
    if entry_error is not None:
        return K, entry_error
    if isinstance(output, Kernels) and np.isfinite(output.error).all():
        return K, np.asarray(output.error, np.float64)
    root = np.sqrt(np.abs(np.diagonal(K)))
    size = np.maximum(root[:, None] * root, np.abs(K))
    over = 1 / np.where(size > 0, size, 1)
    # A function that always computes in float32 has float32's errors.
    dtype = getattr(output, "ntk", output).dtype
    fine = float(np.finfo(np.result_type(dtype, np.float32)).eps)
    off = np.abs(K - _in_precision(kernel, x, False)[1]) * over
    error = np.where(off > _ROUNDINGS * _EPS32, off * np.sqrt(fine / _EPS32), _ROUNDINGS * fine)
    rng = np.random.default_rng(0)
    for _ in range(_DRAWS):
        moved = x * (1 + 4 * fine * rng.uniform(-1, 1, x.shape))
        error = np.maximum(error, 8 * np.abs(_in_precision(kernel, moved, True)[1] - K) * over)
    # The error of an entry is at least that of the entries of smaller correlation.
    order = np.argsort(K * over, axis=None, kind="stable")
    error.flat[order] = np.maximum.accumulate(error.flat[order])
    return K, size * error


def mixed_blocks(
    kernels: Sequence[KernelFunction], x: Any, entry_error: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``sum_i alpha_i k_i`` as :func:`ntk.certify_simplex`'s blocks, and errors.

    On the simplex ``sum_i alpha_i k_i = sum_ij alpha_i alpha_j (k_i + k_j) / 2``.
    """
    kernels = sequence("kernels", kernels, "kernel functions")
    if not kernels:
        raise ValueError("kernels: expected at least one function, got none.")
    for kernel in kernels:
        function("kernels", kernel, "(x1, x2) -> [n1, n2]")
    measurements = [measured(kernel, x, entry_error) for kernel in kernels]
    values = np.stack([K for K, _ in measurements])
    error = np.asarray(measurements[0][1])
    if error.shape not in ((), values.shape[1:]) or not (error >= 0).all():
        raise ValueError(
            f"entry_error: expected nonnegative errors, one or of shape {values.shape[1:]}, got "
            f"shape {error.shape}."
        )
    errors = np.stack([np.broadcast_to(error, values.shape[1:]) for _, error in measurements])
    blocks, off = ((stack[:, None] + stack) / 2 for stack in (values, errors))
    return blocks, off + 2.0**-52 * np.abs(blocks)  # plus the roundoff of the sum


def _in_precision(kernel: KernelFunction, x: np.ndarray, double: bool) -> tuple[Any, np.ndarray]:
    """Return the kernel's output, and its checked matrix as float64."""
    with jax.enable_x64(double), warnings.catch_warnings():
        if not double:  # we chose float32, so the caller cannot act on JAX's warning
            warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
        output = _call_kernel(kernel, jnp.asarray(x, float), None, "ntk")
        K = np.asarray(getattr(output, "ntk", output))
    if np.iscomplexobj(K):
        raise ValueError(f"K: expected a kernel function with real values, got {K.dtype}.")
    K = K.astype(np.float64)
    if not np.isfinite(K).all():
        raise ValueError("K: expected a kernel function with finite values, got NaN or infinity.")
    return output, K


def as_kernel_matrix(K: Any, x: Any, name: str = "K") -> Any:
    """Return ``K``, or the matrix of a kernel function or record at inputs ``x``."""
    if isinstance(K, Kernels):
        K = K.ntk
    if isinstance(K, list | tuple) and any(map(callable, K)):
        raise ValueError(
            f"{name}: expected one kernel function, got {len(K)}; a sum of several is one: "
            "lambda x1, x2: sum(a * k(x1, x2) for a, k in zip(alpha, kernels))."
        )
    if callable(K):
        if x is None:
            raise ValueError(f"x: expected the inputs of the kernel function {name}, got none.")
        return kernel_matrix(K, x)
    if x is not None:
        raise ValueError(f"x: expected none with a matrix {name}, got {describe(x)}.")
    return K


def _call_kernel(kernel: KernelFunction, x1, x2, get: str | None):
    """Return the output of the kernel function; ``get`` is the field to compute, None for all."""
    function("kernel", kernel, "(x1, x2) -> [n1, n2]")
    if get is not None:
        one_of("get", get, ("ntk", "nngp"))
    x1 = without_explicit_axes(real_array("x1", x1))
    if x1.ndim == 0 or not x1.size:
        raise ValueError(f"x1: expected inputs [n, ...] with n at least 1, got shape {x1.shape}.")
    parameters = _parameters(kernel)
    if x2 is not None:
        x2 = without_explicit_axes(real_array("x2", x2))
    elif not _takes_one(parameters):
        x2 = x1
    options = {"get": get} if get is not None and "get" in parameters else {}
    output = kernel(x1, x2, **options)
    shape = len(x1), len(x1 if x2 is None else x2)
    value: Any = getattr(output, get or "ntk", output)
    if jnp.shape(value) != shape:
        raise ValueError(f"kernel: expected a matrix {shape}, got shape {jnp.shape(value)}.")
    return output


def _parameters(kernel: KernelFunction):
    try:
        return inspect.signature(kernel).parameters
    except (TypeError, ValueError):  # functions written in C
        return {}


def _takes_one(parameters) -> bool:
    """Return whether the second argument is optional, with None for the inputs of the first."""
    by_place = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    places = [p for p in parameters.values() if p.kind in by_place]
    return len(places) > 1 and places[1].default is None
