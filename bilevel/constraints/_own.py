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
    alone = _positional(project) == 1
    return _own("projected", lambda w, _, alpha: project(w) if alone else project(w, alpha))


def prox(operator: Callable) -> Constraint:
    """Add a convex term with your own proximal operator to the lower loss.

    Parameters
    ----------
    operator : ``operator(w, step, alpha) -> w``
        ``argmin_x step * term(x, alpha) + |x - w|^2 / 2``, differentiable by JAX.

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
        value = operator(z, eta, alpha)
        got, expected = map(_shapes_of, (value, z))
        if got != expected:
            raise ValueError(
                f"{name}: expected a function that keeps shapes and dtypes, {expected}, got {got}."
            )
        return value

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


def _shapes_of(tree: Pytree) -> str:
    leaves = [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in jax.tree.leaves(tree)]
    return f"{jax.tree.structure(tree)} of {', '.join(leaves)}"


def free() -> Constraint:
    """Leave the weights free: no set and no term."""
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

    Examples
    --------
    >>> import bilevel
    >>> lower = lambda w, alpha, batch: jnp.sum((w["mix"] - 1) ** 2) + (w["bias"] - 3) ** 2
    >>> solver = bilevel.implicit(bilevel.projected({"mix": "simplex", "bias": None}))
    >>> w = {"mix": jnp.zeros(2), "bias": jnp.zeros(())}
    >>> solver.run(lower, None, w, solver.init(w), None)[0]["mix"]
    Array([0.5, 0.5], dtype=float...)
    """
    leaves, structure = jax.tree.flatten(parts, is_leaf=_is_part)
    upper: Any = structure
    for x in leaves:
        if not _is_part(x):
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

    def each(name, kinds, joined=True):
        """Call a member of every part: codes (c) are lists, trees (t) are split."""
        repeat = {"c": lambda x: x, "t": split, "-": lambda x: [x] * len(sets)}

        def applied(*args):
            columns = [repeat[kind](x) for kind, x in zip(kinds, args, strict=True)]
            values = [getattr(s, name)(*row) for s, *row in zip(sets, *columns, strict=True)]
            return jax.tree.unflatten(upper, values) if joined else values

        return applied

    def check(w, alpha):
        valid = each("check", "t-", joined=False)(w, alpha)
        return jnp.stack([jnp.asarray(x) for x in valid]).all()

    def smooth(w, alpha):
        pairs = [(s.smooth, x) for s, x in zip(sets, split(w), strict=True)]
        return sum(f(x, alpha) for f, x in pairs if f is not None)

    known = all(s.tangent is not None and s.margins is not None for s in sets)
    return Constraint(
        blank=each("blank", "t", joined=False),
        identify=each("identify", "tt--", joined=False),
        prox=each("prox", "ct--"),
        step=each("step", "ctt--"),
        tangent=each("tangent", "ct-t") if known else None,
        curvature=each("curvature", "ctt-t"),
        margins=each("margins", "ctt-", joined=False) if known else None,
        check=check,
        smooth=smooth if any(s.smooth is not None for s in sets) else None,
    )


def _is_part(value: Any) -> bool:
    return value is None or isinstance(value, Constraint)
