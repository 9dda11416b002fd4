"""Forward solvers for constraints and non-smooth terms."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel import constraints
from bilevel.contracts import Constraint, LowerSolver, Pytree
from bilevel.internal.checks import check_at_least, describe, integer, nan_unless, nan_unless_finite
from bilevel.internal.precision import coarsest_eps, narrow, widen, widened
from bilevel.problem.problem import hessian_operator
from bilevel.problem.structure import hoist_constants, is_quadratic
from bilevel.solvers._proximal_newton import ProximalProblem

_SETS = "box", "nonnegative", "simplex", "l2_ball", "l1_ball", "affine", "box_equality"
_TERMS = "l1", "elastic_net", "group_l1", "total_variation"


class ProximalState(NamedTuple):
    """State of :func:`projected` and :func:`proximal`."""

    code: Pytree  # the active set of the last solution
    step: jax.Array  # [], step size; 0 before the first run


def projected(
    onto: Any, *parameters: Any, steps: int = 5000, tol: float | None = None, **named: Any
) -> LowerSolver:
    """Find a lower minimum in a convex set. Use it inside :func:`bilevel.implicit`.

    Parameters
    ----------
    onto : str, function or tree
        The name of a set, or ``project(w, alpha) -> w``, your own Euclidean projection. A tree of
        these has one set for each part of the weights: names, tuples of a name and its parameters
        such as ``("box", 0.0, 1.0)``, functions, or None for free weights.

        ===================  ===========================================
        name                 parameters
        ===================  ===========================================
        ``"nonnegative"``
        ``"box"``            ``low``, ``high``
        ``"simplex"``        ``total``, 1 by default
        ``"l2_ball"``        ``radius``
        ``"l1_ball"``        ``radius``
        ``"affine"``         ``matrix``, ``right``
        ``"box_equality"``   ``low``, ``high``, ``coefficients``, ``total``
        ===================  ===========================================
    *parameters
        Parameters of a named set: numbers, trees like ``w``, or functions of alpha.
    steps : int
        Maximum number of proximal gradient steps.
    tol : float, optional
        Iteration stops at this natural residual ``|w - prox(w - eta g)| / |w|``, with the gradient
        ``g`` and ``eta`` the inverse of the largest curvature. By default it stops if Newton's last
        step kept the active set and is below 1e-9 (one unit of roundoff in narrower types) of
        ``|w|``, or if rounding hides any progress.
    **named
        Parameters by name.

    Returns
    -------
    LowerSolver
        It finds ``w`` only; :func:`bilevel.implicit` gives the derivative, also in the parameters
        of the set. Its state carries the active set and the step size.

    Raises
    ------
    ValueError
        If the set is unknown, ``steps`` is under 1, ``tol`` is negative, or a parameter is invalid:
        NaN, crossing bounds, a negative radius, an empty affine set, or shapes that do not fit the
        weights. Under ``jax.jit``, invalid values that depend on alpha give NaN weights. At run
        time, if your own projection changes shapes or dtypes.

    Notes
    -----
    Memory: 12 copies of ``w``. No matrix of the size of the Hessian is formed. The active set of
    your own projection is unknown: ``info.error_estimate`` is infinite, and the inverse should be
    ``cg`` or ``neumann``.

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: jnp.sum((w - batch) ** 2),
    ...     outer=lambda w, alpha, batch: jnp.sum(w**2),
    ... )
    >>> solver = bilevel.implicit(bilevel.projected("box", 0.0, lambda alpha: alpha))
    >>> target = jnp.array([0.5, 3.0, -1.0])
    >>> result = bilevel.hypergradient(problem, solver)(2.0, jnp.zeros(3), target, None)
    >>> result.w, result.grad  # w = (0.5, alpha, 0)
    (Array([0.5, 2. , 0. ], dtype=float...), Array(4., dtype=float...))
    """
    constraint = _named("projected", onto, _SETS, constraints.projection, parameters, named)
    return forward_solver(constraint, steps, tol)


def proximal(
    term: Any, *parameters: Any, steps: int = 5000, tol: float | None = None, **named: Any
) -> LowerSolver:
    """Find the minimum of the lower loss plus a convex non-smooth term.

    Use it inside :func:`bilevel.implicit`.

    Parameters
    ----------
    term : str, function or tree
        The name of a term, or ``prox(w, step, alpha) -> w``, your own proximal operator. A tree has
        one term for each part of the weights, as for :func:`bilevel.projected`; names of sets are
        allowed.

        =====================  ==================================================
        name                   parameters
        =====================  ==================================================
        ``"l1"``               ``weight``
        ``"elastic_net"``      ``weight``, ``ridge``
        ``"group_l1"``         ``weight`` [groups], ``groups=[[0, 1], [2, 3]]``
        ``"total_variation"``  ``weight``
        =====================  ==================================================
    *parameters, steps, tol, **named
        As for :func:`bilevel.projected`.

    Returns
    -------
    LowerSolver
        It finds ``w`` only; :func:`bilevel.implicit` differentiates in the parameters of the term.

    Raises
    ------
    ValueError
        If the term is unknown, ``steps`` is under 1, ``tol`` is negative, a parameter is negative
        or NaN, or groups overlap or leave the range of indices. Under ``jax.jit``, invalid values
        that depend on alpha give NaN weights. At run time, if your own operator changes shapes or
        dtypes.

    Notes
    -----
    Memory: 12 copies of ``w``. The active set of your own operator is unknown:
    ``info.error_estimate`` is infinite, and the inverse should be ``cg`` or ``neumann``.

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.Problem(
    ...     lower=lambda w, alpha, batch: jnp.sum((w - batch) ** 2) / 2,
    ...     outer=lambda w, alpha, batch: jnp.sum(w),
    ... )
    >>> solver = bilevel.implicit(bilevel.proximal("l1", lambda alpha: alpha))
    >>> target = jnp.array([3.0, 0.5, 2.0])
    >>> result = bilevel.hypergradient(problem, solver)(1.0, jnp.zeros(3), target, None)
    >>> result.w, result.grad  # w = (3 - alpha, 0, 2 - alpha)
    (Array([2., 0., 1.], dtype=float...), Array(-2., dtype=float...))
    """
    constraint = _named("proximal", term, _TERMS, constraints.prox, parameters, named)
    return forward_solver(constraint, steps, tol)


def _named(name: str, value: Any, names: tuple, own: Callable, parameters: tuple, named: dict):
    if isinstance(value, str):
        if value not in names:
            raise ValueError(f"{name}: expected one of {', '.join(names)}, got {value!r}.")
        return _with_parameters(name, value, parameters, named)
    if parameters or named:
        raise ValueError(
            f"{name}: expected parameters for a named {name} problem only, got some for "
            f"{describe(value)}."
        )
    if isinstance(value, Constraint):
        return value
    if callable(value):
        return own(value)
    if _is_pair(value):
        return _named(name, value[0], names, own, value[1:], {})

    def part(x):
        constrained = x is not None and _is_part(x)
        return _named(name, x, (*_SETS, *_TERMS), own, (), {}) if constrained else x

    return constraints.product(jax.tree.map(part, value, is_leaf=_is_part))


def _is_pair(value: Any) -> bool:
    named = isinstance(value, tuple) and len(value) > 1 and isinstance(value[0], str)
    return named and not (value[1] is None or isinstance(value[1], str | Constraint))


def _is_part(value: Any) -> bool:
    named = isinstance(value, str | Constraint) or _is_pair(value)
    return value is None or named or callable(value)


def _with_parameters(name: str, of: str, parameters: tuple, named: dict) -> Constraint:
    make = getattr(constraints, of)
    try:
        return make(*parameters, **named)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ValueError(f"{name}: expected the parameters of {of!r}; {error}.") from None


def forward_solver(constraint: Constraint, steps: int, tol: float | None) -> LowerSolver:
    """Return the forward solver of a constraint."""
    steps = integer("steps", steps, 1)
    if tol is not None:
        check_at_least("tol", tol, 0)

    def run(lower, alpha, w, state, batch):
        short = max(1e-9, coarsest_eps(w))  # relative length of a last Newton step
        own, w = w, widen(w)
        valid = constraint.check(w, alpha)
        lower = widened(constraint.completed(lower), own)
        lower = hoist_constants(lower, w, alpha, batch)
        problem = ProximalProblem(
            constraint=constraint,
            loss=lambda w: lower(w, alpha, batch),
            hessian=lambda w: hessian_operator(lower, w, alpha, batch)[1],
            alpha=alpha,
            quadratic=is_quadratic(lower, w, alpha, batch),
            short=short,
            aim=-1.0 if tol is None else tol,
        )
        w, code, eta, size = problem.solve(w, state, steps)
        w = nan_unless(valid, nan_unless_finite(w, size))
        return narrow(w, own), ProximalState(code, eta)

    return LowerSolver(lambda w: first_state(constraint, widen(w)), run, constraint=constraint)


def first_state(constraint: Constraint, w: Pytree) -> ProximalState:
    """Return the state before the first run."""
    dtype = jnp.result_type(*jax.tree.leaves(w))
    return ProximalState(constraint.blank(w), jnp.zeros((), dtype))
