"""The bilevel problem, and the derivatives of its lower loss that every other module uses.

==========  =====================================================
paper       here
==========  =====================================================
L_V, f      ``outer(w, alpha, batch)``, the validation loss
L_T, g      ``lower(w, alpha, batch)``, the training loss
H           ``d^2 lower / dw^2``, through ``hessian_operator``
==========  =====================================================
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.extend import core

from bilevel._custom_rules import REVERSE_OVER_REVERSE, exact_order, linearize
from bilevel.checks import pair, scalar_loss
from bilevel.precision import like_variables
from bilevel.protocols import LinearMap, Loss, Pytree, Stateful
from ntk._equations import bind, programs, scan_operands
from ntk._rules import in_loops, may_be_lost


@dataclasses.dataclass(frozen=True)
class Problem:
    """Minimise ``outer(w*(alpha), alpha, valid)``, ``w*(alpha) = argmin_w lower(w, alpha, train)``.

    Attributes
    ----------
    lower, outer : ``loss(w, alpha, batch) -> scalar``
        Pure functions of any pytrees. They may close over further hyperparameters, traced ones
        included: derivatives with respect to those are right too.
    has_aux : bool
        Whether both return ``(loss, aux)`` instead: metrics, or any pytree of arrays, which are
        not differentiated. They come out as ``HyperGradient.aux``, and of every step of a search
        as ``history["aux"]``, ``{"lower": ..., "outer": ...}``.
    stateful : bool
        Whether weights are :class:`bilevel.Stateful`, and ``lower`` returns ``(loss, variables)``
        (with ``has_aux``: ``(loss, (variables, aux))``): batch statistics, moving averages.
    differentiated : bool
        Whether derivatives pass through these variables. By default they do not.

    Raises
    ------
    ValueError
        If either is not callable, or a problem that is not stateful is ``differentiated``.

    Examples
    --------
    >>> problem = Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * ((w - batch) ** 2 + alpha * w**2),
    ...     outer=lambda w, alpha, batch: (w - batch) ** 2,
    ... )
    >>> float(problem.outer(1.0, 0.0, 3.0))
    4.0

    The largest residual beside the loss:

    >>> import bilevel
    >>> import jax.numpy as jnp
    >>> def squares(w, alpha, batch):
    ...     residual = jnp.abs(w - batch)
    ...     return 0.5 * jnp.sum(residual**2 + alpha * w**2), residual.max()
    >>> problem = Problem(squares, squares, has_aux=True)
    >>> fn = bilevel.hypergradient(problem, bilevel.implicit())
    >>> fn(jnp.array(1.0), jnp.zeros(2), jnp.array([2.0, 4.0]), jnp.zeros(2)).aux
    {'lower': Array(2., dtype=float...), 'outer': Array(2., dtype=float...)}
    """

    lower: Loss
    outer: Loss
    has_aux: bool = False
    stateful: bool = False
    differentiated: bool = False

    def __post_init__(self) -> None:
        if self.differentiated and not self.stateful:
            raise ValueError("differentiated: expected stateful=True beside it, got False.")
        for name in ("lower", "outer"):
            loss = getattr(self, name)
            if not callable(loss):
                raise ValueError(
                    f"{name}: expected a function (w, alpha, batch) -> scalar, got {loss!r}."
                )


_FORM = "has_aux", "stateful", "differentiated"


class Parts(NamedTuple):
    """The losses of a problem in one form, whatever they return."""

    lower: Callable[[Pytree, Pytree, Pytree], tuple]  # -> loss, variables or None, aux or None
    outer: Callable[[Pytree, Pytree, Pytree], tuple]  # -> loss, aux or None


def parts(problem: Problem) -> Parts:
    """The losses, what they return taken apart.

    Raises
    ------
    ValueError
        When called, of a loss that is no floating scalar, or returns something else than the
        problem says.

    Examples
    --------
    >>> loss = lambda w, alpha, batch: ((w - batch) ** 2, "more")
    >>> parts(Problem(loss, loss, has_aux=True)).lower(1.0, None, 3.0)
    (4.0, None, 'more')
    """
    has_aux, stateful, differentiated = (getattr(problem, name, False) for name in _FORM)

    def lower(w, alpha, batch):
        if stateful:  # flax's nnx mutates variables only where they were unflattened
            w = jax.tree.map(lambda x: x, w)
        found = problem.lower(w, alpha, batch)
        if not (has_aux or stateful):
            return scalar_loss("lower", found), None, None
        form = "(loss, aux), as has_aux=True says"
        if stateful:
            form = "(loss, variables), as stateful=True says"
        loss, rest = pair("lower", found, form)
        scalar_loss("lower", loss)
        if not stateful:
            return loss, None, rest
        form = "(loss, (variables, aux)), as stateful=True and has_aux=True say"
        variables, aux = pair("lower", rest, form) if has_aux else (rest, None)
        variables = like_variables(variables, w.variables)
        return loss, variables if differentiated else jax.lax.stop_gradient(variables), aux

    def outer(w, alpha, batch):
        found = problem.outer(w, alpha, batch)
        loss, aux = found, None
        if has_aux:
            loss, aux = pair("outer", found, "(loss, aux), as has_aux=True says")
        return scalar_loss("outer", loss), aux

    return Parts(lower, outer)


def at_variables(problem: Problem, variables: Pytree) -> Problem:
    """The problem in ``params`` alone; one that is not stateful, but for its aux, as it is."""
    losses = parts(problem)
    whole = _with(variables) if getattr(problem, "stateful", False) else lambda w: w
    return Problem(
        lambda w, alpha, batch: losses.lower(whole(w), alpha, batch)[0],
        lambda w, alpha, batch: losses.outer(whole(w), alpha, batch)[0],
    )


def _with(variables: Pytree) -> Callable[[Pytree], Stateful]:
    return lambda params: Stateful(params, variables)


def side_by_side(problem: Problem) -> Problem:
    """Many independent copies of ``problem`` as one: every array gains a leading axis.

    The losses are sums over the copies, so each copy's hypergradient, steps and geometry are what
    they would be alone, and one search runs them all (seeds, splits) with one progress bar and
    one checkpoint. Auxiliary outputs gain the axis too.

    Not so where a solver or optimizer looks at a norm over all weights: that norm is then one of
    all copies together. ``optax.clip_by_global_norm`` clips each by what the others do, and an
    iterative solver's tolerance is relative to the largest of them. ``jax.vmap`` of
    :func:`bilevel.search` keeps copies apart.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> one = Problem(lambda w, a, b: (w - a) ** 2, lambda w, a, b: (w - b) ** 2)
    >>> side_by_side(one).outer(jnp.zeros(3), jnp.ones(3), jnp.ones(3))
    Array(3., dtype=float...)
    """

    def total(loss: Loss) -> Loss:
        def of_all(w, alpha, batch):
            found = jax.vmap(loss)(w, alpha, batch)
            return (found[0].sum(), found[1]) if isinstance(found, tuple) else found.sum()

        return of_all

    return dataclasses.replace(problem, lower=total(problem.lower), outer=total(problem.outer))


def gradient(lower: Loss, alpha: Pytree, batch: Pytree) -> Callable[[Pytree], Pytree]:
    """``w -> d lower / dw``, a function of ``w`` alone."""
    return lambda w: jax.grad(lower)(w, alpha, batch)


def hessian_operator(
    lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree
) -> tuple[Pytree, LinearMap]:
    """The lower gradient at ``w`` and ``v -> H v`` there, linearised once for many products."""
    return linearize(gradient(lower, alpha, batch), w)


def mixed_product(loss: Callable, w: Pytree, alpha: Pytree, v: Pytree) -> Pytree:
    """``grad_alpha (v . grad_w loss)``, whatever derivative rules ``loss(w, alpha)`` contains.

    Examples
    --------
    >>> mixed_product(lambda w, alpha: alpha**2 * w, 1.0, 3.0, 0.5)
    Array(3., dtype=float...)
    """

    def work(alpha):
        if order == REVERSE_OVER_REVERSE:
            return optax.tree.vdot(v, jax.grad(loss)(w, alpha))
        return jax.jvp(lambda w: loss(w, alpha), (w,), (v,))[1]

    order = exact_order(jax.make_jaxpr(loss)(w, alpha))
    return jax.grad(work)(alpha)


def held(lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> Loss:
    """``lower`` at this ``alpha`` and ``batch``: what does not depend on ``w`` is computed here.

    A loop over ``w`` would compute it again at every step, and compile it once for every place that
    differentiates ``lower``: the kernel of a kernel machine, features that depend on ``alpha``.
    Of a function that :func:`jax.checkpoint` or a custom rule wraps, nothing is taken out.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> count = []
    >>> def lower(w, alpha, batch):
    ...     features = jax.pure_callback(
    ...         lambda a: (count.append(1), a)[1], jax.ShapeDtypeStruct((), float), alpha * batch
    ...     )
    ...     return 0.5 * (features * w) ** 2
    >>> loss = held(lower, 1.0, 2.0, 3.0)
    >>> [float(loss(w, None, None)) for w in (1.0, 2.0)], len(count)
    ([18.0, 72.0], 1)
    """
    trace = jax.make_jaxpr(lambda w: lower(w, alpha, batch))
    run = _without_the_known(trace(w), [_MOVING] * len(jax.tree.leaves(w)))[1]
    own = _types(w)

    def loss(w, _, __):
        # Line searches may widen the weights: another program.
        return run(jax.tree.leaves(w))[0] if _types(w) == own else lower(w, alpha, batch)

    return loss


def _types(w: Pytree) -> list:
    return [jax.numpy.result_type(x) for x in jax.tree.leaves(w)]


_MOVING = object()  # in the place of a value that is not known yet


def _without_the_known(
    closed: core.ClosedJaxpr, inputs: list
) -> tuple[list, Callable[[list], list]]:
    """The outputs of a program that do not need the moving inputs; a function for all outputs."""
    jaxpr = closed.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *inputs), strict=True))
    steps = []

    def read(values, atoms):
        return [v.val if isinstance(v, core.Literal) else values[v] for v in atoms]

    for equation in jaxpr.eqns:
        values = read(known, equation.invars)
        if all(value is not _MOVING for value in values):
            found = bind(equation, values)
        elif equation.primitive.name in ("jit", "pjit"):
            found, inner = _without_the_known(programs(equation)[0], values)
            steps.append((equation, inner))
        else:
            found = [_MOVING] * len(equation.outvars)
            steps.append((equation, functools.partial(bind, equation)))
        known |= zip(equation.outvars, found, strict=True)

    def run(inputs):
        values = known | dict(zip(jaxpr.invars, inputs, strict=True))
        for equation, step in steps:
            values |= zip(equation.outvars, step(read(values, equation.invars)), strict=True)
        return read(values, jaxpr.outvars)

    return read(known, jaxpr.outvars), run


def is_quadratic(lower: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> bool:
    """Whether ``lower`` is quadratic in ``w``, read off the program of its gradient.

    True only if every step of that program is affine in ``w``, so the answer is a proof: kinks,
    rounding and stopped gradients get False, and so may a quadratic written in an unusual way.
    Decided while tracing, at no cost at run time.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> is_quadratic(lambda w, a, b: jnp.sum(a * (w - b) ** 2), jnp.ones(2), jnp.ones(2), 1.0)
    True
    >>> is_quadratic(lambda w, a, b: jnp.sum(jnp.abs(w - b)), jnp.ones(2), jnp.ones(2), 1.0)
    False
    """
    closed = jax.make_jaxpr(gradient(lower, alpha, batch))(w)
    finest = min(map(_eps, _types(w)), default=0.0)
    degrees = _degrees(closed.jaxpr, [1] * len(closed.jaxpr.invars), finest)
    return max(degrees, default=0) <= 1


def enters(loss: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> bool:
    """Whether ``loss`` depends on ``alpha``, read off its program.

    Examples
    --------
    >>> enters(lambda w, alpha, batch: w**2, 1.0, 1.0, None)
    False
    """
    return any(entering(loss, w, alpha, batch))


def entering(loss: Loss, w: Pytree, alpha: Pytree, batch: Pytree) -> list[bool]:
    """Return for each leaf of ``alpha`` whether ``loss`` depends on it, read off its program.

    Examples
    --------
    >>> entering(lambda w, alpha, batch: alpha["b"] * w, 1.0, {"a": 1.0, "b": 1.0}, None)
    [False, True]
    """
    return _inputs_read(jax.make_jaxpr(lambda alpha: loss(w, alpha, batch))(alpha))


def with_rules(
    problem: Problem, w: Pytree, alpha: Pytree, batch: Pytree
) -> tuple[Problem, list[bool]]:
    """``problem`` with a lower loss whose loops keep the derivatives of functions in them.

    Its second derivatives would lose them: :mod:`ntk._rules`. Also for each leaf of ``alpha``
    whether that loss depends on it, read off the same program.
    """
    loss = parts(problem).lower
    closed = jax.make_jaxpr(lambda alpha: loss(w, alpha, batch)[0])(alpha)
    if may_be_lost(closed):
        form = (getattr(problem, name, False) for name in _FORM)
        problem = Problem(in_loops(problem.lower), problem.outer, *form)
    return problem, _inputs_read(closed)


def check_enters(alpha: Pytree, needed: list[bool]) -> None:
    """Raise if a leaf of ``alpha`` is ``needed`` that nothing depends on.

    Raises
    ------
    ValueError
        For a hypergradient that would be 0 for certain.
    """
    if any(needed):
        raise ValueError(
            f"{leaf_names(alpha, needed)}: expected to enter the lower loss, the outer loss or the "
            "solver, got one that enters none of them: its hypergradient would be 0."
        )


def leaf_names(alpha: Pytree, chosen: list[bool]) -> str:
    """The paths of the leaves that are chosen; only ``alpha`` if these are all.

    Examples
    --------
    >>> leaf_names({"a": 1.0, "b": 2.0, "c": 3.0}, [False, True, True])
    "alpha['b'], alpha['c']"
    """
    if all(chosen):
        return "alpha"
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(alpha)]
    return ", ".join(f"alpha{path}" for path, found in zip(paths, chosen, strict=True) if found)


def outputs_reading(function: Callable, argument: Pytree) -> list[bool]:
    """Return for each leaf of ``function(argument)`` whether it depends on the argument."""
    closed = jax.make_jaxpr(function)(argument)
    return [bool(read) for read in _sources(closed.jaxpr, [1] * len(closed.jaxpr.invars))]


def _inputs_read(closed: core.ClosedJaxpr) -> list[bool]:
    count = len(closed.jaxpr.invars)
    outputs = _sources(closed.jaxpr, [1 << i for i in range(count)])
    return [any(read >> i & 1 for read in outputs) for i in range(count)]


def _sources(jaxpr: core.Jaxpr, inputs: list[int]) -> list[int]:
    """Propagate sets through a program: a value's set is the union of those it depends on.

    A set is an integer, one bit for each of its members, so that one pass serves all of them.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom) -> int:
        if isinstance(atom, core.Literal) or 0 in getattr(atom.aval, "shape", ()):
            return 0
        return known.get(atom, 0)

    for equation in jaxpr.eqns:
        outputs = _equation_sources(equation, [read(v) for v in equation.invars])
        known |= zip(equation.outvars, outputs, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _equation_sources(equation: core.JaxprEqn, inputs: list[int]) -> list[int]:
    name, params, count = equation.primitive.name, equation.params, len(equation.outvars)
    union = functools.reduce(operator.or_, inputs, 0)
    if not union:
        return [0] * count
    if name in _READ:
        return _sources(programs(equation)[0].jaxpr, inputs)
    if name == "cond" and not inputs[0]:
        branches = [_sources(branch.jaxpr, inputs[1:]) for branch in params["branches"]]
        return [functools.reduce(operator.or_, found) for found in zip(*branches, strict=True)]
    if name == "custom_linear_solve":
        system = sum(params["const_lengths"])
        if not any(inputs[:system]):
            solve, constants = params["jaxprs"].solve, params["const_lengths"].solve
            return _sources(solve.jaxpr, [0] * constants + inputs[system:])[:count]
    if name == "scan":
        first, carried = scan_operands(equation)
        while True:  # the carry's sets can only grow
            outputs = _sources(params["jaxpr"].jaxpr, inputs)
            carry = inputs[first : first + carried]
            after = [old | new for old, new in zip(carry, outputs[:carried], strict=True)]
            if after == carry:
                return outputs
            inputs = inputs[:first] + after + inputs[first + carried :]
    return [union] * count


_OTHER = 2  # neither constant (0) nor affine (1)


_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "shard_map")
_READ = (*_CALLS, "custom_jvp_call", "custom_vjp_call")


def _degrees(jaxpr: core.Jaxpr, inputs: list[int], coarsest: float) -> list[int]:
    """The degree in ``w`` of each output, from those of the inputs; never too low.

    A cast to a type of an eps above ``coarsest`` is rounding, and not linear.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def degree(atom) -> int:
        if isinstance(atom, core.Literal) or 0 in getattr(atom.aval, "shape", ()):
            return 0  # what has no entries does not move
        return known.get(atom, 0)

    for equation in jaxpr.eqns:
        degrees = [degree(v) for v in equation.invars]
        known |= zip(equation.outvars, _outputs(equation, degrees, coarsest), strict=True)
    return [degree(v) for v in jaxpr.outvars]


def _outputs(equation: core.JaxprEqn, degrees: list[int], coarsest: float) -> list[int]:
    """The degrees of one operation's results."""
    name, params = equation.primitive.name, equation.params
    count = len(equation.outvars)
    if not any(degrees):
        return [0] * count
    if name in _CALLS:
        return _degrees(programs(equation)[0].jaxpr, degrees, coarsest)
    if name == "scan":
        return _scan(equation, degrees, coarsest)
    if name == "custom_linear_solve":
        system = sum(params["const_lengths"])
        if any(degrees[:system]):
            return [_OTHER] * count
        # The solution is linear in the right-hand side, as far as its program reads it.
        solve, constants = params["jaxprs"].solve, params["const_lengths"].solve
        read = _degrees(solve.jaxpr, [0] * constants + degrees[system:], coarsest)
        return [max(degrees) if reads else 0 for reads in read[:count]]
    if name == "cond" and degrees[0] == 0:
        branches = [_degrees(branch.jaxpr, degrees[1:], coarsest) for branch in params["branches"]]
        return [max(of_branches) for of_branches in zip(*branches, strict=True)]
    return [_result(equation, name, degrees, coarsest)] * count


def _result(equation: core.JaxprEqn, name: str, degrees: list[int], coarsest: float) -> int:
    if name in _LINEAR:
        return max(degrees)
    if name in _PRODUCTS:
        return min(sum(degrees), _OTHER)
    # Linear in some operands, where the others (a predicate, indices, a divisor) are constant.
    free = degrees[_LINEAR_IN[name]] if name in _LINEAR_IN else []
    if sum(free) == sum(degrees):
        return max(free, default=0)
    if name == "convert_element_type":
        new = equation.params["new_dtype"]
        if jax.numpy.issubdtype(new, jax.numpy.floating) and _eps(new) <= coarsest:
            return max(degrees)
    return _OTHER


def _eps(dtype: Any) -> float:
    return float(jax.numpy.finfo(dtype).eps)


def _scan(equation: core.JaxprEqn, degrees: list[int], coarsest: float) -> list[int]:
    """The carry's degrees can only rise: the body is read until they stay."""
    first, count = scan_operands(equation)
    while True:
        outputs = _degrees(equation.params["jaxpr"].jaxpr, degrees, coarsest)
        carry = degrees[first : first + count]
        after = [max(old, new) for old, new in zip(carry, outputs[:count], strict=True)]
        if after == carry:
            return outputs
        degrees = degrees[:first] + after + degrees[first + count :]


_PRODUCTS = ("mul", "dot_general", "conv_general_dilated")
_LINEAR = (
    *("add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "psum", "psum_invariant"),
    *("broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "slice", "split", "pad"),
    *(
        "concatenate",
        "stack",
        "unstack",
        "copy",
        "pvary",
        "pcast",
        "sharding_constraint",
        "optimization_barrier",
    ),
)
_LINEAR_IN = {
    "div": slice(0, 1),
    "select_n": slice(1, None),
    "gather": slice(0, 1),
    "dynamic_slice": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    "scatter-add": slice(0, None, 2),  # the operand and the updates, not the indices
    "scatter": slice(0, None, 2),
    "triangular_solve": slice(1, 2),
}
