"""Find the products with weights in a network's program.

A weight is followed from the inputs of the program, into calls and loops, to the products of
:mod:`ntk.empirical.linear_operations`. On the way its entries may be rearranged, or all multiplied
by one number. A weight with any other use is differentiated per sample, including weights that
enter a function with its own derivative rule.

A loop repeats its products. If all steps share a weight, the steps are further positions. If a
weight is scanned over, every step has another weight.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ntk.empirical.linear_operations import Product, product_with_operand
from ntk.internal.jaxprs import (
    CALLS,
    bind,
    bind_scan,
    inner_jaxprs,
    interpret,
    needed,
    scan_operands,
    shape_and_dtype,
)

_ENTERED = frozenset(name for name in CALLS if not name.startswith("custom_"))
_REARRANGING = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "rev"})
_ALIKE = frozenset({"copy", "copy_p", "convert_element_type", "reduce_precision"})

Box = tuple[tuple[int, int], ...]  # a start and a stop for every axis of a leaf
Parts = tuple[tuple[int, Box], ...]  # leaves, and which of their entries


class Weight(NamedTuple):
    """A variable that holds entries of leaves, each at most once, times a number."""

    parts: Parts
    layout: tuple = ()  # the operations on the entries so far
    factors: tuple[tuple[int, Any, int], ...] = ()  # loops around, variable of one entry, power
    loops: tuple[bool, ...] = ()  # for the loops around: whether every step has another slice

    def then(self, *step) -> "Weight":
        """Return the weight after one more change of its layout."""
        return self._replace(layout=(*self.layout, step))

    def multiplied(self, number, power: int) -> "Weight":
        """Return the weight times ``number**power``."""
        return self._replace(factors=(*self.factors, (len(self.loops), number, power)))


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """A product with a weight; a leaf of pytrees."""

    weight: Weight
    product: Product
    outputs: jax.ShapeDtypeStruct  # with axes of steps if it is in loops

    @property
    def key(self) -> tuple:
        """Return a key that is the same for uses with the same layout of gradients."""
        return self.weight.parts, self.weight.layout, self.product.layout


def whole_leaf(leaf: int, shape: Sequence[int]) -> Weight:
    """Return a weight with all of a leaf."""
    return Weight(((leaf, tuple((0, length) for length in shape)),))


# By the number of the equation: a WeightProduct, or for a loop the products of its body.
WeightProducts = dict[int, Any]


def inlined(program: ClosedJaxpr) -> tuple[Jaxpr, list]:
    """Return the program without unused operations and calls in ``_ENTERED``, and its constants."""

    def rule(eqn, inputs):
        if eqn.primitive.name != "scan":
            return bind(eqn, inputs)
        body, consts = inlined(inner_jaxprs(eqn)[0])
        return bind_scan(eqn, lambda inputs: interpret(body, inputs, bind, consts=consts), inputs)

    flat = jax.make_jaxpr(lambda *inputs: interpret(program, inputs, rule, enter=_ENTERED))(
        *map(shape_and_dtype, program.jaxpr.invars)
    )
    live = needed(flat.jaxpr, [True] * len(flat.jaxpr.outvars))
    return flat.jaxpr.replace(eqns=[eqn for eqn, _ in live]), flat.consts


def find_weight_products(
    jaxpr: Jaxpr, weights: Sequence[Weight | None], steps: tuple[int, ...] = ()
) -> tuple[WeightProducts, set[int]]:
    """Return the products with weights in an :func:`inlined` program, and leaves with other uses.

    ``weights`` are weights or None by input, and ``steps`` the lengths of the loops around.
    """
    single: dict[Var, Any] = {}  # variables that repeat the one entry of another
    products: WeightProducts = {}
    elsewhere: set[int] = set()
    places = itertools.count()

    def number(v):
        """Return a variable with the one number that ``v`` consists of, or None."""
        return v if shape_and_dtype(v).size == 1 else single.get(v) if isinstance(v, Var) else None

    def rule(eqn: JaxprEqn, mine: list) -> list:
        place, nothing = next(places), [None] * len(eqn.outvars)
        if eqn.primitive.name == "broadcast_in_dim" and number(eqn.invars[0]) is not None:
            single[eqn.outvars[0]] = number(eqn.invars[0])
        if not any(mine):
            return nothing
        if eqn.primitive.name == "scan":
            products[place], others = _find_in_loop(eqn, mine, steps)
            elsewhere.update(others)
            return nothing
        # The larger weight stays in factors: the other choice would store it for every sample.
        weighted = [i for i, w in enumerate(mine) if w]
        largest = max(weighted, key=lambda i: shape_and_dtype(eqn.invars[i]).size)
        weight, product = mine[largest], product_with_operand(eqn, largest)
        if product and not (product.rows and any(weight.loops)):
            one = shape_and_dtype(eqn.outvars[0])
            shape = jax.ShapeDtypeStruct((*steps, *one.shape), one.dtype)
            products[place] = WeightProduct(weight, product, shape)
            elsewhere.update(leaves_of(mine[i] for i in weighted if i != largest))
            return nothing
        outputs, lost = _rearranged(eqn, mine, number)
        elsewhere.update(leaves_of(lost))
        return outputs

    outputs = interpret(jaxpr, weights, rule, consts=jaxpr.constvars, constant=lambda _: None)
    return products, elsewhere | leaves_of(outputs)


def leaves_of(weights) -> set[int]:
    """Return the leaves with entries in any of ``weights``."""
    return {leaf for w in weights if w for leaf, _ in w.parts}


def _find_in_loop(eqn: JaxprEqn, mine: list, steps: tuple[int, ...]):
    constants, carried = scan_operands(eqn)
    body, inner, lost = inner_jaxprs(eqn)[0].jaxpr, [], []
    for i, w in enumerate(mine):
        if w and constants <= i < constants + carried:
            lost.append(w)  # a carried weight changes
            w = None
        elif w:
            own = i >= constants
            w = (w.then("step") if own else w)._replace(loops=(*w.loops, own))
        inner.append(w)
    products, elsewhere = find_weight_products(body, inner, (*steps, eqn.params["length"]))
    return products, elsewhere | leaves_of(lost)


def _rearranged(eqn: JaxprEqn, mine: list, number: Callable) -> tuple[list, list]:
    """Return the outputs as weights, or None; and the weights that the operation uses up."""
    name, options = eqn.primitive.name, eqn.params
    if name in ("mul", "div"):
        return _scaled(eqn, mine, number)
    first, before, after = mine[0], shape_and_dtype(eqn.invars[0]), shape_and_dtype(eqn.outvars[0])
    rearranged: list = []
    if name == "neg":
        rearranged = [first.multiplied(-1.0, 1)]
    elif name in _ALIKE and jnp.issubdtype(after.dtype, jnp.floating):
        rearranged = [first]
    elif name in _REARRANGING or (name == "broadcast_in_dim" and after.size == before.size):
        option_names = "new_sizes", "dimensions", "permutation", "shape", "broadcast_dimensions"
        rearranged = [first.then(name, *((k, options[k]) for k in option_names if k in options))]
    elif name == "concatenate":
        rearranged = _concatenated_weight(mine, options["dimension"])
    elif name in ("slice", "split"):
        rearranged = _sliced_weights(eqn, first)
    return (rearranged, []) if rearranged else ([None] * len(eqn.outvars), mine)


def _scaled(eqn: JaxprEqn, mine: list, number: Callable) -> tuple[list, list]:
    """Return the weight times a variable of one entry."""
    power = 1 if eqn.primitive.name == "mul" else -1
    for operand in (0, 1) if power == 1 else (0,):
        weight, other = mine[operand], number(eqn.invars[1 - operand])
        same = shape_and_dtype(eqn.invars[operand]).shape == shape_and_dtype(eqn.outvars[0]).shape
        if weight and same and other is not None:
            return [weight.multiplied(other, power)], [mine[1 - operand]]
    return [None], mine


def _concatenated_weight(mine: list, axis: int) -> list[Weight]:
    parts = tuple(part for w in mine if w for part in w.parts)
    plain = all(w and not w.factors and w.loops == mine[0].loops for w in mine)
    if not plain or any(overlap(a, b) for a, b in itertools.combinations(parts, 2)):
        return []
    return [mine[0]._replace(parts=parts, layout=("joined", axis, *(w.layout for w in mine)))]


def _sliced_weights(eqn: JaxprEqn, weight: Weight) -> list[Weight]:
    """Return slices of a leaf that is not yet changed."""
    options, ((leaf, box), *more) = eqn.params, weight.parts
    if weight.layout or more or any(stride != 1 for stride in options.get("strides") or ()):
        return []
    if eqn.primitive.name == "slice":
        bounds = [list(zip(options["start_indices"], options["limit_indices"], strict=True))]
    else:
        axis, full = options["axis"], [(0, stop - start) for start, stop in box]
        stops = itertools.accumulate(map(int, options["sizes"]), initial=0)
        bounds = [[*full[:axis], b, *full[axis + 1 :]] for b in itertools.pairwise(stops)]
    pieces = [
        tuple((start + low, start + high) for (start, _), (low, high) in zip(box, b, strict=True))
        for b in bounds
    ]
    return [weight._replace(parts=((leaf, piece),)) for piece in pieces]


def overlap(first: tuple[int, Box], second: tuple[int, Box]) -> bool:
    """Return whether two parts have an entry in common."""
    (leaf, box), (other, there) = first, second
    return leaf == other and all(
        max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, there, strict=True)
    )


def run_with_additions(
    jaxpr: Jaxpr, inputs: Sequence, products: WeightProducts, additions: Any, depth: int = 0
) -> tuple[list, Any]:
    """Return the outputs if every product gets an addition, and the products' operands.

    ``inputs`` are the constants and inputs of an :func:`inlined` program, ``additions`` are
    arranged as ``products``, and ``depth`` counts the loops around the program.
    """
    values: dict[Var, Any] = {}  # the operands so far
    product_inputs: dict[int, Any] = {}
    places = itertools.count()

    def value(v):
        return v.val if isinstance(v, Literal) else values[v]

    def scaled_operand(weight_product: WeightProduct, operand):
        """Return the product's operand, times the numbers that multiplied the weight here."""
        for loops, number, power in weight_product.weight.factors:
            if loops == depth:
                factor = number if isinstance(number, float) else jnp.reshape(value(number), ())
                operand = map_floats(functools.partial(jnp.multiply, factor**power), operand)
        return operand

    def rule(eqn: JaxprEqn, arguments: list) -> list:
        place = next(places)
        here = products.get(place)
        operands = zip(eqn.invars, arguments, strict=True)
        values.update((v, x) for v, x in operands if isinstance(v, Var))
        if isinstance(here, dict):
            body = inner_jaxprs(eqn)[0]

            def step(inputs, more):
                return run_with_additions(
                    body.jaxpr, [*body.consts, *inputs], here, more, depth + 1
                )

            outputs, inner_inputs = bind_scan(eqn, step, arguments, additions[place])
            product_inputs[place] = jax.tree.map(scaled_operand, here, inner_inputs)
            return outputs
        outputs = bind(eqn, arguments)
        if isinstance(here, WeightProduct):
            product_inputs[place] = scaled_operand(here, here.product.keep(*arguments))
            outputs = [outputs[0] + additions[place]]
        return outputs

    count = len(jaxpr.constvars)
    return interpret(jaxpr, inputs[count:], rule, consts=inputs[:count]), product_inputs


def map_floats(function, tree):
    """Return ``function`` of the floating arrays in the tree."""
    return jax.tree.map(lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
