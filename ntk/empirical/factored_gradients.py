"""Gradients of single samples, with those of matrices, filters and tables in factors.

Notation and method: :mod:`ntk.empirical.kernels`. Shapes: n samples, o outputs, q positions, g
groups, i and j the inputs and outputs of a product per group.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal

from ntk.empirical.linear_operations import TableRows
from ntk.empirical.network_program import NetworkProgram, replaced
from ntk.empirical.weight_products import (
    WeightProduct,
    WeightProducts,
    find_weight_products,
    leaves_of,
    map_floats,
    overlap,
    run_with_additions,
    whole_leaf,
)
from ntk.internal.checks import at_least_float32
from ntk.internal.jaxprs import shape_and_dtype
from ntk.internal.products import einsum
from ntk.internal.tiles import device_chunk_entries


class GradientPlan(NamedTuple):
    """How each input of the program is handled. Static."""

    jaxpr: Jaxpr
    products: WeightProducts  # products with weights kept in factors
    layered: list[int]  # these weights
    jacobian_leaves: list[int]  # other parameters, for the per-sample Jacobian


def plan_gradients(network: NetworkProgram, factored: bool) -> GradientPlan:
    """Return the products to be kept in factors; none if not ``factored``."""
    jaxpr = network.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    read = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    used = {v for v in read if not isinstance(v, Literal)}
    trained = [i for i in network.trained if inputs[i] in used]
    products: WeightProducts = {}
    if factored:
        count = len(jaxpr.constvars)
        weights = [
            whole_leaf(i, shape_and_dtype(v).shape) if i in trained else None
            for i, v in enumerate(jaxpr.invars, start=count)
        ]
        products, elsewhere = find_weight_products(jaxpr, weights)
        products = _only(products, set(trained) - elsewhere)
    layered = leaves_of(product.weight for product in jax.tree.leaves(products))
    jacobian_leaves = [i for i in trained if i not in layered]
    if not layered and not jacobian_leaves:  # constant outputs: the kernel's zeros need a shape
        jacobian_leaves = network.trained[:1]
    return GradientPlan(jaxpr, products, sorted(layered), jacobian_leaves)


def _only(products: WeightProducts, allowed: set[int]) -> WeightProducts:
    """Return the products of allowed weights without other uses, if their gradients add up."""
    weights = {product.key: product.weight for product in jax.tree.leaves(products)}
    for first, second in itertools.combinations(weights.values(), 2):
        if any(overlap(a, b) for a in first.parts for b in second.parts):
            allowed = allowed - leaves_of([first, second])
    # A weight that is used together with one that is not allowed is not allowed.
    while lost := allowed & leaves_of(w for w in weights.values() if not leaves_of([w]) <= allowed):
        allowed = allowed - lost
    return _filter_products(products, allowed)


def _filter_products(products: WeightProducts, allowed: set[int]) -> WeightProducts:
    filtered: WeightProducts = {}
    for place, here in products.items():
        if isinstance(here, dict) and (inner := _filter_products(here, allowed)):
            filtered[place] = inner
        elif isinstance(here, WeightProduct) and leaves_of([here.weight]) <= allowed:
            filtered[place] = here
    return filtered


class GradientFactors(NamedTuple):
    """The factors of the gradients of n samples."""

    inputs: list  # for each product, [n, steps of its loops, ...]
    sensitivities: list[jax.Array]  # for each product, [n, o, steps of its loops, ...]
    jacobians: list[jax.Array]  # per leaf, [n, o, *shape of the leaf]


def factor_gradients(plan: GradientPlan, outputs: str, inputs, x) -> GradientFactors:
    """Run a forward pass, and a backward pass per output, of each sample in ``x`` [n, ...]."""
    structure: Any = jax.tree.structure(plan.products)

    def sample(x):
        def perturbed(additions, leaves):
            arguments = [*replaced(inputs, plan.jacobian_leaves, leaves), *jax.tree.leaves(x)]
            (y,), product_inputs = run_with_additions(
                plan.jaxpr, arguments, plan.products, additions
            )
            return y, structure.flatten_up_to(product_inputs)

        zeros = jax.tree.map(lambda s: jnp.zeros(s.outputs.shape, s.outputs.dtype), plan.products)
        y, pullback, product_inputs = jax.vjp(
            perturbed, zeros, [inputs[i] for i in plan.jacobian_leaves], has_aux=True
        )
        seeds = jnp.ones((1, y.size)) if outputs == "sum" else jnp.eye(y.size)
        sensitivities, jacobians = jax.vmap(pullback)(seeds.astype(y.dtype))
        return product_inputs, jax.tree.leaves(sensitivities), jacobians

    return GradientFactors(*jax.vmap(sample)(x))


class Block(NamedTuple):
    """The gradients of one weight: sums over the positions of columns times sensitivities."""

    columns: Any  # [n, q, g, i], or Rows of [n, q]
    sensitivities: jax.Array  # [n, o, q, g, j]
    rows: int | None  # of a table


def _gradient_blocks(plan: GradientPlan, factors: GradientFactors) -> list[Block]:
    """Return the weights' gradients; uses of one weight are further positions."""
    blocks_by_weight: dict[tuple, list[Block]] = {}
    products: list[WeightProduct] = jax.tree.leaves(plan.products)
    variables = [*plan.jaxpr.constvars, *plan.jaxpr.invars]
    for weight_product, product_inputs, s in zip(
        products, factors.inputs, factors.sensitivities, strict=True
    ):
        leaf = variables[weight_product.weight.parts[0][0]]
        dtype = at_least_float32(shape_and_dtype(leaf).dtype)
        product = weight_product.product
        columns = _merge_shared_steps(weight_product, product.columns, 1, product_inputs)
        columns = map_floats(lambda x, d=dtype: x.astype(d), columns)
        s = _merge_shared_steps(weight_product, product.outputs, 2, s).astype(dtype)
        blocks_by_weight.setdefault(weight_product.key, []).append(Block(columns, s, product.rows))
    return [
        Block(
            jax.tree.map(lambda *x: jnp.concatenate(x, 1), *(b.columns for b in uses)),
            jnp.concatenate([b.sensitivities for b in uses], 2),
            uses[0].rows,
        )
        for uses in blocks_by_weight.values()
    ]


def _merge_shared_steps(weight_product: WeightProduct, function: Callable, axes: int, x):
    """Return ``function`` of every sample and step, after ``axes`` other axes.

    Steps that share a weight become positions, and steps with different weights become groups.
    """
    loops = weight_product.weight.loops
    for _ in range(axes + len(loops)):
        function = jax.vmap(function)
    own = [axes + k for k, slices in enumerate(loops) if slices]
    shared = [axes + k for k, slices in enumerate(loops) if not slices]

    def arrange(x):
        before, (q, *inner) = x.shape[:axes], x.shape[axes + len(loops) :]
        first = axes + len(loops)
        order = [*range(axes), *shared, first, *own, *range(first + 1, x.ndim)]
        positions = q * math.prod(x.shape[k] for k in shared)
        groups = [math.prod(x.shape[k] for k in own) * inner[0], *inner[1:]] if inner else []
        return x.transpose(order).reshape(*before, positions, *groups)

    return jax.tree.map(arrange, function(x))


# Letters of the second sample, of its outputs, and of the axes that are not summed.
Letters = tuple[str, str, str]
FULL, TRACE, NORMS = ("b", "m", "abom"), ("b", "o", "ab"), ("a", "o", "a")


def gram_of_factors(
    plan: GradientPlan, letters: Letters, left: GradientFactors, right: GradientFactors
):
    """Return ``K`` of two sets of samples, [n1, n2] or [n1, n2, o, o]; ``NORMS``: of pairs, [n]."""
    total: Any = 0.0  # takes the dtype of the first term
    b, m, out = letters
    for pair in zip(left.jacobians, right.jacobians, strict=True):
        flat = [g.reshape(*g.shape[:2], -1).astype(at_least_float32(g.dtype)) for g in pair]
        total += einsum(f"aop,{b}{m}p->{out}", *flat)
    blocks = (_gradient_blocks(plan, factors) for factors in (left, right))
    for first, second in zip(*blocks, strict=True):
        way = _by_pairs if _pairs_are_cheaper(letters, first, second) else _by_gradients
        total += way(letters, first, second)
    return total


def _pairs_are_cheaper(letters: Letters, left: Block, right: Block) -> bool:
    """Compare estimated flops. An entry that is stored in memory counts as 16 of them."""
    n1, o, q, g, j = left.sensitivities.shape
    n2 = len(right.sensitivities)
    samples = n1 if letters is NORMS else n1 * n2
    outputs = o**2 if letters is FULL else o
    held = 16 * (1 + (o**2 if letters is FULL else 1))
    if left.rows:
        pair, gradient = 1, left.rows * j * ((n1 + n2) * o * 16 + samples * outputs)
    else:
        pair = i = left.columns.shape[-1]
        gradient = g * i * j * ((n1 + n2) * o * (q + 16) + samples * outputs)
    return samples * q**2 * g * (pair + outputs * j + held) < gradient


def _by_pairs(letters: Letters, left: Block, right: Block):
    """Sum over all pairs of positions, some samples at a time."""
    b, m, out = letters
    norms = letters is NORMS
    pairs = "gapq" if norms else "gapbq"
    outer = "gaopbmq" if letters is FULL else pairs

    n, o, q, g, _ = left.sensitivities.shape

    def contract(left: Block, right: Block):
        if left.rows:
            inputs = _row_inner_products(left.columns, right.columns, norms)
        else:
            inputs = einsum(f"apgi,{b}qgi->{pairs}", left.columns, right.columns)
        s1, s2 = left.sensitivities, right.sensitivities
        if q == g == 1:
            # A bias has the same sensitivities: the compiler multiplies them once for both.
            outputs = einsum(f"aop,{b}{m}p->{out}", s1[:, :, 0, 0], s2[:, :, 0, 0])
            inputs = inputs.reshape(outputs.shape[: len(out.rstrip("om"))])
            return jnp.expand_dims(inputs, range(inputs.ndim, outputs.ndim)) * outputs
        outputs = einsum(f"aopgj,{b}{m}qgj->{outer}", s1, s2)
        return einsum(f"{pairs},{outer}->{out}", inputs, outputs)

    others = 1 if norms else len(right.sensitivities)
    entries = others * q**2 * g * (o**2 if letters is FULL else 1)
    size = max(1, device_chunk_entries(left.sensitivities.dtype) // max(1, entries))
    if size >= n or q == g == 1:
        return contract(left, right)

    def one(sample):
        columns, s = jax.tree.map(lambda x: x[None], sample)
        first = Block(columns, s, left.rows)
        return contract(first, first if norms else right)[0]

    return lax.map(one, (left.columns, left.sensitivities), batch_size=size)


def _row_inner_products(left: TableRows, right: TableRows, norms: bool):
    """Return inner products of columns with one nonzero entry, [1, a, p, (b,) q]."""
    between = (slice(None), slice(None), None) + (() if norms else (None,))
    other = (slice(None), None) if norms else ()
    equal = left.row[between] == right.row[other]
    return jnp.where(equal, left.value[between] * right.value[other], 0)[None]


def _by_gradients(letters: Letters, left: Block, right: Block):
    """Multiply the gradients themselves, some of the layer's outputs at a time."""
    b, m, out = letters
    inputs = left.rows or left.columns.shape[-1]
    j = left.sensitivities.shape[-1]
    entries = max(math.prod(x.sensitivities.shape[:2]) for x in (left, right)) * inputs
    entries *= left.sensitivities.shape[3]
    most = device_chunk_entries(left.sensitivities.dtype)
    fits = [c for c in range(1, j + 1) if j % c == 0 and (c == 1 or c * entries <= most)]
    size = max(fits, default=0)

    def contract(s1, s2):
        first, second = _expand_gradients(left, s1), _expand_gradients(right, s2)
        return einsum(f"aogij,{b}{m}gij->{out}", first, second)

    if size == j:
        return contract(left.sensitivities, right.sensitivities)

    def chunks(s):
        return jnp.moveaxis(s.reshape(*s.shape[:-1], -1, size), -2, 0)

    start = jax.eval_shape(contract, left.sensitivities, right.sensitivities)
    zeros = jnp.zeros(start.shape, start.dtype)
    steps = chunks(left.sensitivities), chunks(right.sensitivities)
    return lax.scan(lambda total, s: (total + contract(*s), None), zeros, steps)[0]


def _expand_gradients(block: Block, s):
    """Return all samples' and outputs' gradients, [n, o, g, i, j]."""
    if not block.rows:
        return einsum("npgi,nopgj->nogij", block.columns, s)

    def of_sample(rows, s):  # s: [o, p, 1, j]
        weighted = jnp.moveaxis(s[:, :, 0] * rows.value[:, None], 0, 1)
        return jax.ops.segment_sum(weighted, rows.row, block.rows)  # [rows, o, j]

    return jnp.moveaxis(jax.vmap(of_sample)(block.columns, s), 2, 1)[:, :, None]
