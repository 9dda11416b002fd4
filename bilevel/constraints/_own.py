"""Sets and terms of the user, and products over the parts of a tree."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Constraint, Pytree
from bilevel.internal.checks import describe, function


def projection(project: Callable) -> Constraint:
    """Require weights in a convex set with your own Euclidean projection.

    Parameters
    ----------
    project : ``project(w, alpha) -> w``, or ``project(w) -> w``
        Differentiable by JAX.

    Raises
    ------
    ValueError
        If ``project`` is not a function; at run time, if it changes shapes or dtypes.

    Notes
    -----
    The active set is unknown, so ``info.error_estimate`` is infinite. ``cg`` and
    ``neumann`` are its inverses; ``dense`` needs a known tangent space.

    Examples
    --------
    >>> import bilevel
    >>> lower = lambda w, alpha, batch: jnp.sum((w - 2.0) ** 2)
    >>> solver = bilevel.implicit(bilevel.projected(lambda w, alpha: jnp.minimum(w, alpha)))
    >>> w = jnp.zeros(2)
    >>> solver.run(lower, 1.0, w, solver.init(w), None)[0]
    Array([1., 1.], dtype=float...)
    """
    function("projected", project, "project(w, alpha) -> w")
    if _positional(project) == 1:
        return _own("projected", lambda w, step, alpha: project(w))
    return _own("projected", lambda w, step, alpha: project(w, alpha))


def prox(operator: Callable) -> Constraint:
    """Add a convex term with your own proximal operator to the lower loss.

    Parameters
    ----------
    operator : ``operator(w, step, alpha) -> w``
        ``argmin_x step * term(x, alpha) + |x - w|^2 / 2``, differentiable by JAX.

    Raises
    ------
    ValueError
        If ``operator`` is not a function; at run time, if it changes shapes or dtypes.

    Notes
    -----
    The active set is unknown, so ``info.error_estimate`` is infinite. ``cg`` and
    ``neumann`` are its inverses; ``dense`` needs a known tangent space.

    Examples
    --------
    >>> import bilevel
    >>> lower = lambda w, alpha, batch: jnp.sum((w - 2.0) ** 2) / 2
    >>> ridge = lambda w, step, alpha: w / (1 + step * alpha)
    >>> solver, w = bilevel.implicit(bilevel.proximal(ridge)), jnp.zeros(2)
    >>> solver.run(lower, 1.0, w, solver.init(w), None)[0].round(4)
    Array([1., 1.], dtype=float...)
    """
    function("proximal", operator, "prox(w, step, alpha) -> w")
    if _positional(operator) == 2:
        return _own("proximal", lambda w, step, alpha: operator(w, step))
    return _own("proximal", operator)


def _positional(value: Callable) -> int | None:
    """Return the number of required positional arguments, if it is known."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def _own(name: str, operator: Callable) -> Constraint:
    def applied(z, alpha, eta):
        return _like(name, operator(z, eta, alpha), z)

    def step(code, w, g, alpha, eta):
        return optax.tree.sub(applied(optax.tree.add_scale(w, -eta, g), alpha, eta), w)

    return Constraint(
        blank=lambda w: (),
        identify=lambda w, g, alpha, eta: (),
        prox=lambda code, z, alpha, eta: applied(z, alpha, eta),
        step=step,
        tangent=None,
        curvature=lambda code, w, g, alpha, v: optax.tree.zeros_like(v),
        margins=None,
        check=lambda w, alpha: jnp.array(True),
    )


def _like(name: str, value: Pytree, w: Pytree) -> Pytree:
    """Return the value of a user's operator; raise if its form is not that of the weights."""
    got, expected = map(_shapes_of, (value, w))
    if got != expected:
        raise ValueError(
            f"{name}: expected a function that keeps shapes and dtypes, {expected}, got {got}."
        )
    return value


def _shapes_of(tree: Pytree) -> str:
    leaves = [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in jax.tree.leaves(tree)]
    return f"{jax.tree.structure(tree)} of {', '.join(leaves)}"


def free() -> Constraint:
    """Leave the weights free: no set and no term.

    Examples
    --------
    >>> free().blank(jnp.zeros(3))
    ()
    """
    return _own("free", lambda w, step, alpha: w)._replace(
        step=lambda code, w, g, alpha, eta: optax.tree.scale(-eta, g),
        tangent=lambda code, w, alpha, v: v,
        margins=lambda code, w, g, alpha: (),
    )


def product(parts: Any) -> Constraint:
    """Use one constraint for each part of a tree of weights.

    Parameters
    ----------
    parts : tree of :class:`bilevel.contracts.Constraint` or None
        A tree with the structure of ``w``, or of its upper levels. None leaves a part free.

    Raises
    ------
    ValueError
        If an entry is not a constraint; at run time, if the tree does not fit the weights.

    Examples
    --------
    >>> import bilevel
    >>> lower = lambda w, alpha, batch: jnp.sum((w["mix"] - 1) ** 2) + (w["bias"] - 3) ** 2
    >>> solver = bilevel.implicit(bilevel.projected({"mix": "simplex", "bias": None}))
    >>> w = {"mix": jnp.zeros(2), "bias": jnp.zeros(())}
    >>> solver.run(lower, None, w, solver.init(w), None)[0]["mix"]
    Array([0.5, 0.5], dtype=float...)
    """
    leaves, structure = jax.tree.flatten(parts, is_leaf=_is_leaf_part)
    upper: Any = structure
    for x in leaves:
        if not (x is None or isinstance(x, Constraint)):
            raise ValueError(
                f'parts: expected names such as "simplex", or ("box", 0.0, 1.0), got {describe(x)}.'
            )
    if not leaves:
        raise ValueError(f"parts: expected at least one constraint, got {describe(parts)}.")
    sets = [free() if x is None else x for x in leaves]

    def split(tree):
        try:
            return upper.flatten_up_to(tree)
        except ValueError:
            got = jax.tree.structure(tree)
            raise ValueError(f"parts: expected a tree like the weights, {got}.") from None

    def join(values):
        return jax.tree.unflatten(upper, values)

    def each(name, code, *args, trees, joined=True):
        """Call a member of every part; the first arguments after the code are ``trees``."""
        codes = [()] * len(sets) if code is None else [(k,) for k in code]
        rows = zip(sets, codes, *map(split, args[:trees]), strict=True)
        values = [getattr(s, name)(*k, *row, *args[trees:]) for s, k, *row in rows]
        return join(values) if joined else values

    def with_vector(name):
        def applied(code, w, *args):
            *middle, alpha, v = args
            rows = zip(sets, code, *map(split, (w, *middle, v)), strict=True)
            return join([getattr(s, name)(k, *row[:-1], alpha, row[-1]) for s, k, *row in rows])

        return applied

    def smooth(w, alpha):
        pairs = [(s.smooth, x) for s, x in zip(sets, split(w), strict=True)]
        return sum(f(x, alpha) for f, x in pairs if f is not None)

    known = all(s.tangent is not None and s.margins is not None for s in sets)
    return Constraint(
        blank=lambda w: [s.blank(x) for s, x in zip(sets, split(w), strict=True)],
        identify=lambda w, g, alpha, eta: each(
            "identify", None, w, g, alpha, eta, trees=2, joined=False
        ),
        prox=lambda code, z, alpha, eta: each("prox", code, z, alpha, eta, trees=1),
        step=lambda code, w, g, alpha, eta: each("step", code, w, g, alpha, eta, trees=2),
        tangent=with_vector("tangent") if known else None,
        curvature=with_vector("curvature"),
        margins=(
            (lambda code, w, g, alpha: each("margins", code, w, g, alpha, trees=2, joined=False))
            if known
            else None
        ),
        check=lambda w, alpha: jnp.stack(
            [jnp.asarray(s.check(x, alpha)) for s, x in zip(sets, split(w), strict=True)]
        ).all(),
        smooth=smooth if any(s.smooth is not None for s in sets) else None,
    )


def _is_leaf_part(value: Any) -> bool:
    return value is None or isinstance(value, Constraint)
