"""Check arguments: one sentence per mistake, with the argument's name and the remedy."""

import inspect
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import Inverse, LowerSolver, Pytree, SingleLoop
from ntk.internal.checks import at_least_float32 as at_least_float32
from ntk.internal.checks import check_dense as check_dense
from ntk.internal.checks import check_finite as check_finite
from ntk.internal.checks import common_dtype as common_dtype
from ntk.internal.checks import concrete as concrete
from ntk.internal.checks import describe as describe
from ntk.internal.checks import float_array as float_array
from ntk.internal.checks import function as function
from ntk.internal.checks import integer as integer
from ntk.internal.checks import is_sparse as is_sparse
from ntk.internal.checks import nan_unless as nan_unless
from ntk.internal.checks import nan_where as nan_where
from ntk.internal.checks import numpy_array as numpy_array
from ntk.internal.checks import offending as offending
from ntk.internal.checks import one_of as one_of
from ntk.internal.checks import positive as positive
from ntk.internal.checks import prng_key as prng_key
from ntk.internal.checks import real_array as real_array
from ntk.internal.checks import real_number as real_number
from ntk.internal.checks import sequence as sequence


def check_at_least(name: str, value: Any, least: float) -> None:
    """Raise for a number below ``least``. Traced values pass, because their value is unknown."""
    x = real_number(name, value)
    if concrete(x) and not x >= least:
        raise ValueError(f"{name}: expected at least {least}, got {value}.")


def check_in_range(name: str, value: Any, low: float, high: float) -> None:
    """Raise for a number that is not strictly between two bounds. Traced values pass."""
    x = real_number(name, value)
    if concrete(x) and not low < x < high:
        what = "a positive number" if (low, high) == (0, np.inf) else f"one in ({low}, {high})"
        raise ValueError(f"{name}: expected {what}, got {value}.")


def nonnegative(name: str, x: Any) -> jax.Array:
    """Return ``x`` as a floating array; raise for negative numbers or NaN unless traced."""
    x = numpy_array(name, x)
    if x.size == 0:
        raise ValueError(f"{name}: expected at least one number, got the shape {x.shape}.")
    if concrete(x) and not np.all(x >= 0):
        raise ValueError(f"{name}: expected numbers of at least 0, got {offending(x, x >= 0)}.")
    return jnp.asarray(x * 1.0)  # in this order, because integers may have more bits than JAX's


def positives(**numbers: Any) -> list[Any]:
    """Return the numbers as floating point; raise unless positive and finite. Traced ones pass."""
    return [positive(name, value) for name, value in numbers.items()]


def count(name: str, value: Any) -> None:
    """Raise unless ``value`` is an integer of at least 1. Traced values pass."""
    if concrete(value):
        integer(name, value, 1)


def count_rows(name: str, data: Pytree) -> int:
    """Return the common number of rows of all arrays in ``data``."""
    leaves = jax.tree.leaves(data, is_leaf=is_sparse)  # a sparse matrix is one array, not three
    shapes = [x.shape if is_sparse(x) else jnp.shape(x) for x in leaves]
    n = shapes[0][0] if shapes and shapes[0] else 0
    if any(shape[:1] != (n,) for shape in shapes):
        raise ValueError(f"{name}: expected arrays of as many rows each, got shapes {shapes}.")
    return n


def as_floating(name: str, value: Any) -> jax.Array:
    """Return ``value`` as a floating array; integers get the default floating dtype."""
    x = real_array(name, value)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)


def images(name: str, value: Any) -> jax.Array:
    """Return ``value`` as an array [n, h, w, c] with entries."""
    x = real_array(name, value)
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"{name}: expected images [n, h, w, c], got shape {x.shape}.")
    return x


def simplex_slack(dtype: Any) -> float:
    """Return the allowed error of sums: rounded decimals (0.33, 0.33, 0.34), or roundoff."""
    return max(1e-4, 4 * float(jnp.finfo(dtype).eps))


def simplex(name: str, alpha: chex.Array) -> None:
    """Raise for points off the simplex on the last axis. Traced values pass."""
    if not concrete(alpha):
        return
    values = np.asarray(alpha, dtype=np.float64)
    off = np.abs(values.sum(-1) - 1).max()
    if not (off <= simplex_slack(alpha.dtype) and values.min() >= 0):
        raise ValueError(
            f"{name}: expected points of the simplex on the last axis (nonnegative, sum 1), "
            f"got sums off by up to {off:.3g} and a smallest entry of {values.min():.3g}."
        )


def check_not_empty(name: str, tree: Pytree) -> None:
    """Raise for a tree without leaves."""
    if not jax.tree.leaves(tree):
        raise ValueError(f"{name}: expected at least one array, got {tree!r}.")


def check_data(name: str, tree: Pytree) -> None:
    """Raise for arrays without entries, or with entries that are not finite."""
    for x in jax.tree.leaves(tree):
        if is_sparse(x):  # SciPy's: JAX's are trees of arrays
            raise ValueError(
                f"{name}: expected arrays, got a {type(x).__name__}; "
                "jax.experimental.sparse.BCSR.from_scipy_sparse(matrix) makes a supported matrix."
            )
        if jnp.size(x) == 0:
            shape = jnp.shape(x)
            raise ValueError(f"{name}: expected data, got an empty array of shape {shape}.")
        check_finite(name, x)


def check_floating(name: str, tree: Pytree) -> None:
    """Raise for leaves that are not real floating arrays, with the path of the leaf."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        where = f"{name}{jax.tree_util.keystr(path)}"
        try:
            dtype = jnp.result_type(x)
        except (TypeError, ValueError):
            raise ValueError(
                f"{where}: expected floating arrays, got {describe(x)}; keep the arrays in {name} "
                "and close the losses over the rest (equinox.partition splits a module so)."
            ) from None
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"{where}: expected real floating arrays, got {dtype}; "
                "hand in real and imaginary parts as two arrays."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{where}: expected floating arrays, got {dtype}; convert it with "
                "jnp.asarray(x, float), or close the losses over it if it does not change."
            )


def nan_unless_finite(tree: Pytree, *witnesses: Pytree) -> Pytree:
    """Return ``tree``, NaN everywhere if any number among the witnesses is not finite."""
    finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(witnesses)]).all()
    return nan_unless(finite, tree)


def check_loss_pair(name: str, value: Any, form: str) -> tuple[Any, ...]:
    """Raise if a loss's output is not a pair."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(f"{name}: expected a loss that returns {form}, got {describe(value)}.")
    return value


def scalar_loss(name: str, value: Any) -> Any:
    """Raise if a loss's output is not one floating number."""
    if isinstance(value, tuple | list | dict):
        raise ValueError(
            f"{name}: expected a loss that returns a floating scalar, got a {type(value).__name__} "
            "of several values; Problem(..., has_aux=True) takes pairs (loss, aux)."
        )
    if not (isinstance(value, int | float) or hasattr(value, "dtype")):
        raise ValueError(
            f"{name}: expected a loss that returns a floating scalar, got {describe(value)}"
            f"{'; a return is missing' if value is None else ''}."
        )
    if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise ValueError(
            f"{name}: expected a loss that returns a floating scalar, "
            f"got shape {jnp.shape(value)} of {jnp.result_type(value)}."
        )
    return value


def one_a_row(labels: Any, shape: tuple[int, ...]) -> None:
    """Raise unless there is one label per row: labels [n, 1] would be compared with all rows."""
    if jnp.shape(labels) != shape:
        got = jnp.shape(labels)
        raise ValueError(f"labels: expected one a row, shape {shape}, got shape {got}.")


def check_losses(name: str, value: Any) -> None:
    """Raise unless ``value`` has a lower and an outer loss."""
    parts = [getattr(value, part, None) for part in ("lower", "outer")]
    if isinstance(value, type) or not all(map(callable, parts)):
        raise ValueError(f"{name}: expected a bilevel.Problem, got {describe(value)}.")


def lower_solver(name: str, value: Any) -> LowerSolver:
    """Raise unless ``value`` is a lower solver, with the remedy for common mistakes."""
    if isinstance(value, LowerSolver):
        return value
    if isinstance(value, SingleLoop):
        cure = "bilevel.search runs single-loop methods"
    elif isinstance(value, optax.GradientTransformation | optax.MultiSteps):
        cure = "wrap it: unrolled(optimizer, steps)"
    elif _factory(value):
        cure = f"call it: {value.__name__}(...)"
    elif callable(value) and _ours(value if hasattr(value, "__qualname__") else type(value)):
        cure = "an inverse goes into implicit(inverse=...)"
    elif callable(value):
        cure = "hand it to solved(...) inside implicit(...) if it solves the lower problem"
    else:
        cure = "bilevel.implicit() and bilevel.unrolled(step_size, steps) make one"
    raise ValueError(f"{name}: expected a LowerSolver, got {describe(value)}; {cure}.")


def inverse_map(name: str, value: Any) -> Inverse:
    """Raise unless ``value`` is an inverse-Hessian-vector product."""
    if callable(value) and not _factory(value):
        return value
    cure = f"call it: {value.__name__}(...)" if _factory(value) else "bilevel.cg() makes one"
    raise ValueError(f"{name}: expected an inverse, got {describe(value)}; {cure}.")


def _factory(value: Any) -> bool:
    """Return whether ``value`` is a function of this package that was not called."""
    return _ours(value) and "<locals>" not in value.__qualname__


def _ours(value: Any) -> bool:
    if not (callable(value) and hasattr(value, "__qualname__")):
        return False
    return (value.__module__ or "").startswith("bilevel.")


def gradient_transformation(name: str, value: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optax optimizer that takes extra arguments, or raise with the remedy."""
    if isinstance(value, optax.MultiSteps):
        value = value.gradient_transformation()
    if isinstance(value, optax.GradientTransformation):
        _check_arguments(name, value)
        return optax.with_extra_args_support(value)
    if callable(value):
        cure = "call it if it makes an optimizer, or hand it to optax.sgd if it is a schedule"
    else:
        cure = "optax.sgd(step_size) makes one"
    raise ValueError(f"{name}: expected an optax optimizer, got {describe(value)}; {cure}.")


def _check_arguments(name: str, rule: optax.GradientTransformation) -> None:
    """Raise for optimizers that need arguments that no solver and no search has."""
    if getattr(rule.update, "__qualname__", "").startswith("lookahead."):
        raise ValueError(
            f"{name}: expected an optimizer of the parameters alone, got optax.lookahead, whose "
            "parameters are pairs of fast and slow ones."
        )
    if not isinstance(rule, optax.GradientTransformationExtraArgs):
        return
    parameters = inspect.signature(rule.update).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ValueError(
            f"{name}: expected an optimizer whose update takes further arguments (**extra_args), "
            f"got one that takes {', '.join(p.name for p in parameters)} alone, as "
            "optax.contrib.sam."
        )
