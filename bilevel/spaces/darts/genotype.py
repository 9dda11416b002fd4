"""Genotypes: the two cells that a search returns, as records, strings and figures.

A cell has two inputs, nodes 0 and 1 (the outputs of the cell before last and of the last cell), and
nodes 2 to 5. An edge leads from every node to every later one, 14 in all (``EDGES``). A genotype
has two edges into each node, with one operation on each.
"""

import ast
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal.checks import describe, one_of, prng_key
from bilevel.plots.appearance import COLOURS, DASHES, pyplot, style
from bilevel.spaces.cells import edges_by_node
from bilevel.spaces.space import finite_weights

PRIMITIVES = (
    "none",
    "max_pool_3x3",
    "avg_pool_3x3",
    "skip_connect",
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
)
"""The candidates, in the order of ``alpha``."""

NODES = (2, 3, 4, 5)
EDGES = edges_by_node(NODES)
"""The rows of ``alpha``: (source, node), by node, then by source."""

Pairs = tuple[tuple[str, int], ...]


class Genotype(NamedTuple):
    """Two cells; ``str`` gives the usual string, :func:`parse_genotype` reads it."""

    normal: Pairs  # eight pairs (operation, source), two for each of the nodes 2 to 5
    normal_concat: tuple[int, ...]  # the nodes in the cell's output
    reduce: Pairs
    reduce_concat: tuple[int, ...]

    def __str__(self) -> str:
        """Return the string of the reference implementation."""
        parts = (
            f"{field}={range(2, 6) if value == NODES else list(value)}"
            for field, value in self._asdict().items()
        )
        return f"Genotype({', '.join(parts)})"


def genotype(alpha: Any, operations: Sequence[str] = PRIMITIVES) -> Genotype:
    """Return the cells of ``alpha`` {"normal": [14, h], "reduce": [14, h]}.

    Each node keeps the two edges with the largest weights of operations other than ``none``, in
    that order, equal ones by source (Liu et al., sec. 2.4).
    """
    cells = [_best_edges(alpha[cell], operations, cell) for cell in ("normal", "reduce")]
    return Genotype(cells[0], NODES, cells[1], NODES)


def _best_edges(alpha: Any, operations: Sequence[str], cell: str) -> Pairs:
    alpha = finite_weights(f'alpha["{cell}"]', alpha, (len(EDGES), len(operations)))
    weights = np.where(np.array(operations) == "none", -np.inf, alpha)
    pairs: list[tuple[str, int]] = []
    for node in NODES:
        rows = weights[[k for k, edge in enumerate(EDGES) if edge[1] == node]]
        strongest = np.argsort(-rows.max(axis=1), kind="stable")[:2]
        pairs += [(operations[int(rows[source].argmax())], int(source)) for source in strongest]
    return tuple(pairs)


def one_hot(genotype: Genotype, operations: Sequence[str] = PRIMITIVES) -> dict[str, np.ndarray]:
    """Return the ``alpha`` of a genotype: 1 on its edges' operations, 0 everywhere else.

    The row of a missing edge is zero, so it is not on the simplex.
    """
    check_genotype(genotype)
    alpha = {}
    for cell in ("normal", "reduce"):
        concat = getattr(genotype, f"{cell}_concat")
        if tuple(concat) != NODES:  # the order is that of the channels
            raise ValueError(f"{cell}_concat: expected {NODES}, as the supernet's, got {concat}.")
        alpha[cell] = np.zeros((len(EDGES), len(operations)))
        for k, (name, source) in enumerate(getattr(genotype, cell)):
            edge = EDGES.index((source, NODES[k // 2]))
            if name not in operations or alpha[cell][edge].any():
                raise ValueError(
                    f"{cell}: expected operations among {', '.join(operations)}, on two edges into "
                    f"each node, got {name!r} from {source}."
                )
            alpha[cell][edge, operations.index(name)] = 1
    return alpha


def draw_corner(key: chex.PRNGKey, operations: Sequence[str] = PRIMITIVES) -> dict[str, jax.Array]:
    """Draw a genotype uniformly, as the ``alpha`` of :func:`one_hot`. Pure, for ``jit``."""
    prng_key("key", key)
    allowed = jnp.array([i for i, name in enumerate(operations) if name != "none"])
    into = jnp.array([node for _, node in EDGES])

    def cell(key):
        order_key, operation_key = jax.random.split(key)
        u = jax.random.uniform(order_key, (len(EDGES),))
        before = (u[:, None] < u[None]) & (into[:, None] == into[None])  # [other, edge]
        selected = before.sum(axis=0) < 2
        chosen = jax.random.choice(operation_key, allowed, (len(EDGES),))
        return jnp.where(selected[:, None], jax.nn.one_hot(chosen, len(operations)), 0)

    keys = jax.random.split(key)
    return {"normal": cell(keys[0]), "reduce": cell(keys[1])}


def parse_genotype(text: str) -> Genotype:
    """Return a genotype from its string, ``Genotype(normal=[('sep_conv_3x3', 0), ...], ...)``.

    The string is parsed, not evaluated, and then checked.

    Raises
    ------
    ValueError
        If the string is not a genotype.

    Examples
    --------
    >>> parse_genotype(str(DARTS_V2)) == DARTS_V2
    True
    """
    if not isinstance(text, str):
        raise ValueError(f"text: expected a genotype's text, got {describe(text)}.")
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args):
            raise ValueError("not a call")
        fields = {str(field.arg): _evaluate_literal(field.value) for field in call.keywords}
        if set(fields) != set(Genotype._fields):
            raise ValueError("other fields")
        cells = [tuple(map(tuple, fields[cell])) for cell in ("normal", "reduce")]
        concats = [tuple(fields[f"{cell}_concat"]) for cell in ("normal", "reduce")]
        parsed = Genotype(cells[0], concats[0], cells[1], concats[1])
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            "text: expected Genotype(normal=[...], normal_concat=[...], reduce=[...], "
            f"reduce_concat=[...]), got {text[:80]!r}."
        ) from error
    check_genotype(parsed)
    return parsed


def _evaluate_literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        start, stop = map(ast.literal_eval, node.args)
        if stop - start > len(NODES):
            raise ValueError("more nodes than there are")
        return range(start, stop)
    return ast.literal_eval(node)


def check_genotype(genotype: Genotype) -> None:
    """Raise ``ValueError`` unless both cells of a genotype can be built."""
    if not isinstance(genotype, Genotype):
        raise ValueError(f"genotype: expected a Genotype, got {describe(genotype)}.")
    operations = [name for name in PRIMITIVES if name != "none"]
    for cell in ("normal", "reduce"):
        pairs, concat = getattr(genotype, cell), getattr(genotype, f"{cell}_concat")
        if len(pairs) != 2 * len(NODES) or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"{cell}: expected 8 pairs (operation, source), got {pairs}.")
        for k, (name, source) in enumerate(pairs):
            one_of(cell, name, operations)
            if source not in range(NODES[k // 2]):
                raise ValueError(
                    f"{cell}: expected a source below {NODES[k // 2]} for that node, got {source}."
                )
        if not concat or not set(concat) <= set(NODES):
            raise ValueError(f"{cell}_concat: expected nodes among {NODES}, got {concat}.")


DARTS_V1 = parse_genotype(
    "Genotype(normal=[('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ('skip_connect', 0), "
    "('sep_conv_3x3', 1), ('skip_connect', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0), "
    "('skip_connect', 2)], normal_concat=range(2, 6), reduce=[('max_pool_3x3', 0), "
    "('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 0), ('max_pool_3x3', 0), "
    "('skip_connect', 2), ('skip_connect', 2), ('avg_pool_3x3', 0)], reduce_concat=range(2, 6))"
)
"""Found by DARTS of first order on CIFAR-10, as published."""

DARTS_V2 = parse_genotype(
    "Genotype(normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0), "
    "('sep_conv_3x3', 1), ('sep_conv_3x3', 1), ('skip_connect', 0), ('skip_connect', 0), "
    "('dil_conv_3x3', 2)], normal_concat=range(2, 6), reduce=[('max_pool_3x3', 0), "
    "('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 1), ('max_pool_3x3', 0), "
    "('skip_connect', 2), ('skip_connect', 2), ('max_pool_3x3', 1)], reduce_concat=range(2, 6))"
)
"""Found by DARTS of second order on CIFAR-10, as published."""


# Left to right, at heights (by random search) with no edge near a third node.
_PLACES = {0: (0, 1.0), 1: (0, -1.0), 2: (1.4, 1.4), 3: (2.8, -0.4), 4: (4.2, 0.7), 5: (5.6, -0.75)}
_OUTPUT = (7.0, 1.05)
_LABELS = {0: "k−2", 1: "k−1", 2: "0", 3: "1", 4: "2", 5: "3"}


def plot_genotype(genotype: Genotype, axes: Sequence[Any] | None = None) -> Sequence[Any]:
    """Draw both cells as graphs: an arrow for each edge, its colour and dashes the operation.

    ``axes`` are two of matplotlib, for the normal cell and the reduction cell.

    Examples
    --------
    >>> [ax.get_title() for ax in plot_genotype(DARTS_V2)]
    ['normal cell', 'reduction cell']
    """
    with style():
        if axes is None:
            axes = pyplot().subplots(2, 1, figsize=(8, 6.5), layout="constrained")[1]
        for ax, cell in zip(axes, ("normal", "reduce"), strict=True):
            _draw_cell(ax, getattr(genotype, cell), getattr(genotype, f"{cell}_concat"))
            ax.set_title({"normal": "normal cell", "reduce": "reduction cell"}[cell])
    return axes


def _draw_cell(ax: Any, pairs: Pairs, concat: Sequence[int]) -> None:
    def arrow(tail, head, bend=0.0, **style):
        look = {"arrowstyle": "-|>", "shrinkA": 13, "shrinkB": 13, **style}
        ax.annotate("", head, tail, arrowprops={**look, "connectionstyle": f"arc3,rad={bend}"})

    for node in concat:
        arrow(_PLACES[node], _OUTPUT, color="0.8", linewidth=1)
    for k, (name, source) in enumerate(pairs):
        bend = 0.2 if k % 2 and source == pairs[k - 1][1] else 0.0  # two edges from one node
        arrow(_PLACES[source], _PLACES[NODES[k // 2]], bend, **_operation_style(name))
    circle = {"boxstyle": "circle,pad=0.35", "facecolor": "white", "edgecolor": "0.3"}
    for node, place in itertools.chain(_PLACES.items(), [(-1, _OUTPUT)]):
        ax.text(*place, _LABELS.get(node, "k"), ha="center", va="center", bbox=circle)
    for name in sorted({name for name, _ in pairs}, key=PRIMITIVES.index):
        ax.plot([], [], label=name, **_operation_style(name))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    ax.set(xlim=(-0.5, 7.5), ylim=(-1.4, 1.8))
    ax.set_axis_off()


def _operation_style(name: str) -> dict[str, Any]:
    """Return colour and dashes of an operation other than ``none``."""
    k = PRIMITIVES.index(name) - 1
    return {"color": COLOURS[k], "linestyle": DASHES[k], "linewidth": 2}
