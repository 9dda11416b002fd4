"""The DARTS space: operations against numpy, cells against their definition, published counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, batch, normal

from bilevel.nets.images import crop_and_flip, cutout
from bilevel.nets.layers import Standardize, draw_parameters
from bilevel.nets.training import from_scratch
from bilevel.spaces.cells import MixedOperation
from bilevel.spaces.darts import darts_network, darts_space, parse_genotype, plot_genotype
from bilevel.spaces.darts import genotype as genotypes
from bilevel.spaces.darts.genotype import DARTS_V1, DARTS_V2, EDGES, Genotype, genotype
from bilevel.spaces.darts.network import Cell, run_operation
from bilevel.spaces.darts.supernet import MixedCell, weight_count

key = functools.partial(jax.random.key, 0)
SKIPS = Genotype(
    normal=(("skip_connect", 0), ("skip_connect", 1)) * 4,
    normal_concat=(2, 3, 4, 5),
    reduce=(("max_pool_3x3", 0), ("skip_connect", 1)) * 4,
    reduce_concat=(2, 3, 4, 5),
)


def draw(module, *args):
    shapes = jax.eval_shape(module.init, key(), *args).get("params", {})
    return {"params": draw_parameters(key(), shapes) if shapes else {}}


def relu(x):
    return np.maximum(x, 0)


def standardized(x):
    return (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5)


def depthwise(x, kernel, stride, dilation=1):
    """[n, h, w, c] with [k, k, 1, c], zeros around the image."""
    kernel = np.asarray(kernel, np.float64)
    size = len(kernel)
    p = dilation * (size // 2)
    n, height, width, c = x.shape
    padded = np.pad(x, [(0, 0), (p, p), (p, p), (0, 0)])
    full = np.zeros((n, height, width, c))
    for a, b in np.ndindex(size, size):
        top, left = a * dilation, b * dilation
        full += padded[:, top : top + height, left : left + width] * kernel[a, b, 0]
    return full[:, ::stride, ::stride]


def pointwise(x, kernel):
    return x @ np.asarray(kernel, np.float64)[0, 0]


def separable(p, x, stride):
    for i, s in ((0, stride), (2, 1)):
        x = depthwise(relu(x), p[f"Conv_{i}"]["kernel"], s)
        x = standardized(pointwise(x, p[f"Conv_{i + 1}"]["kernel"]))
    return x


def dilated(p, x, stride):
    x = depthwise(relu(x), p["Conv_0"]["kernel"], stride, dilation=2)
    return standardized(pointwise(x, p["Conv_1"]["kernel"]))


def pooled(statistic):
    def pool(p, x, stride):
        padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], constant_values=np.nan)
        height, width = x.shape[1:3]
        views = [padded[:, a : a + height, b : b + width] for a, b in np.ndindex(3, 3)]
        return standardized(statistic(np.stack(views), axis=0)[:, ::stride, ::stride])

    return pool


def skip(p, x, stride):
    if stride == 1:
        return x
    x = relu(x)
    later = np.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])[:, 1:, 1:]
    parts = x[:, ::2, ::2], later[:, ::2, ::2]
    halves = [pointwise(part, p[f"Conv_{i}"]["kernel"]) for i, part in enumerate(parts)]
    return standardized(np.concatenate(halves, axis=-1))


REFERENCE = {
    "max_pool_3x3": pooled(np.nanmax),
    "avg_pool_3x3": pooled(np.nanmean),
    "skip_connect": skip,
    "sep_conv_3x3": separable,
    "sep_conv_5x5": separable,
    "dil_conv_3x3": dilated,
    "dil_conv_5x5": dilated,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stride"),
    [(n, 1) for n in ("avg_pool_3x3", "skip_connect", "sep_conv_5x5", "dil_conv_3x3")]
    + [(n, 2) for n in REFERENCE if n not in ("sep_conv_5x5", "dil_conv_3x3")],
)
def test_each_operation_is_its_definition_in_numpy(name, stride):
    x, norms = np.asarray(normal(0, 3, 7, 6, 4)), {"norm": Standardize, "pool_norm": Standardize}
    run = functools.partial(run_operation, channels=4, stride=stride, **norms)
    edge, alpha = MixedOperation((name,), run), jnp.ones(1)
    variables = draw(edge, jnp.asarray(x), alpha)
    ours = jax.jit(edge.apply)(variables, jnp.asarray(x), alpha)
    parameters = next(iter(variables["params"].values()), None)
    assert_close(ours, REFERENCE[name](parameters, x, stride))


@pytest.mark.long
@pytest.mark.parametrize("stride", [1, 2])
def test_a_mixed_cell_adds_weighted_operations_over_all_edges(stride):
    """Edge by edge in numpy: node j is the sum over i < j; strides only at the two inputs."""
    before_last, last = normal(0, 2, 8, 8, 3), normal(1, 2, 4, 4, 5)
    alpha = np.random.default_rng(2).dirichlet(np.ones(3), 14)
    cell = MixedCell(("none", "skip_connect", "dil_conv_3x3"), 4, stride, True, True)
    variables = draw(cell, before_last, last, alpha)
    p = variables["params"]
    ours = jax.jit(cell.apply)(variables, before_last, last, jnp.asarray(alpha))

    states = [skip(p["FactorizedReduce_0"], before_last, 2)]
    states += [standardized(pointwise(relu(last), p["ReluConvNorm_0"]["Conv_0"]["kernel"]))]
    # A reduction cell has two modules: for edges out of its inputs, and for the others.
    reads_inputs = [source < 2 for source, _ in EDGES] if stride == 2 else [False] * len(EDGES)
    modules = [m for m in (True, False) if m in reads_inputs]
    states += [0, 0, 0, 0]
    for k, (source, node) in enumerate(EDGES):  # by node
        module = modules.index(reads_inputs[k])
        row = reads_inputs[:k].count(reads_inputs[k])
        stacked = p[f"ScanMixedEdge_{module}"]["operations"]
        weights = jax.tree.map(lambda leaf, row=row: leaf[row], stacked)
        s = stride if source < 2 else 1
        states[node] += alpha[k, 1] * skip(weights.get("FactorizedReduce_0"), states[source], s)
        states[node] += alpha[k, 2] * dilated(weights["DilatedConv_0"], states[source], s)
    assert_close(ours, np.concatenate(states[2:], axis=-1))


def supernet_size(cells, channels, classes):
    """Counted by hand: stem, inputs of the cells, operations on 14 edges, classifier."""
    before_last = last = 3 * channels
    total = 9 * 3 * last + 2 * last
    for cell in range(cells):
        reduce = cell in (cells // 3, 2 * cells // 3)
        channels *= 1 + reduce
        total += (before_last + last) * channels
        depthwise = 2 * 9 + 2 * 25 + 9 + 25
        total += 14 * (depthwise * channels + 6 * channels**2) + 8 * reduce * channels**2
        before_last, last = last, 4 * channels
    return total + (last + 1) * classes


@pytest.mark.long
def test_published_weight_counts():
    """The reference prints 1.930618 MB when it searches and 3.349342 MB for DARTS_V2."""
    assert supernet_size(8, 16, 10) == 1_930_618
    space, network = darts_space(cells=3, channels=4), darts_network(DARTS_V2)
    w = jax.eval_shape(lambda key: space.init(key, batch(1, 32, 32, 3)), key())
    assert weight_count(w) == supernet_size(3, 4, 10)
    w, _ = jax.eval_shape(lambda key: network.init(key, (32, 32, 3)), key())
    assert weight_count(w) == 3_349_342
    # On 576 channels: two convolutions, two norms, a classifier.
    head = 576 * 128 + 2 * 128 + 2 * 2 * 128 * 768 + 2 * 768 + 769 * 10
    assert sum(leaf.size for leaf in jax.tree.leaves(w)) - weight_count(w) == head


def test_genotype_keeps_the_two_best_edges_of_each_node_without_none():
    rng = np.random.default_rng(0)
    for _ in range(20):
        alpha = {cell: rng.dirichlet(np.ones(8), 14) for cell in ("normal", "reduce")}
        chosen = genotype(alpha)
        for cell in ("normal", "reduce"):
            expected = []
            for node in (2, 3, 4, 5):
                ranked = sorted(
                    (-alpha[cell][k, o], source, genotypes.PRIMITIVES[o])
                    for k, (source, target) in enumerate(EDGES)
                    for o in range(1, 8)
                    if target == node
                )
                sources = list(dict.fromkeys(source for _, source, _ in ranked))[:2]
                expected += [next((n, i) for _, i, n in ranked if i == s) for s in sources]
            assert list(getattr(chosen, cell)) == expected


def test_drawn_vertices_are_uniform_genotypes():
    names = ("none", "skip_connect", "dil_conv_3x3")
    drawn = jax.vmap(lambda key: genotypes.draw_corner(key, names))(jax.random.split(key(), 2000))
    for cell in drawn.values():
        corners = np.asarray(cell)
        assert set(np.unique(corners)) == {0, 1}
        into = np.array([node for _, node in EDGES])
        for node in (2, 3, 4, 5):
            np.testing.assert_array_equal(corners[:, into == node].sum((1, 2)), 2)
            # Truth: two of the node's edges, at random; 4 standard errors of 2000 draws.
            chosen = corners[:, into == node].any(2).mean(0)
            np.testing.assert_allclose(chosen, 2 / node, atol=4 * 0.5 / 2000**0.5)
        shares = corners.sum((0, 1)) / corners.sum()
        np.testing.assert_allclose(shares, [0, 0.5, 0.5], atol=4 * 0.5 / (8 * 2000) ** 0.5)
    one = {cell: corners[7] for cell, corners in drawn.items()}
    jax.tree.map(np.testing.assert_array_equal, genotypes.one_hot(genotype(one, names), names), one)


def test_genotypes_are_parsed_from_their_strings_without_evaluation():
    for printed in (DARTS_V1, DARTS_V2, DARTS_V2._replace(normal_concat=(3, 5))):
        assert parse_genotype(str(printed)) == parse_genotype(repr(printed)) == printed
    assert str(DARTS_V1).endswith("('avg_pool_3x3', 0)], reduce_concat=range(2, 6))")
    text = str(DARTS_V1)
    assert parse_genotype(text.replace("range(2, 6)", "range(3, 6)")).normal_concat == (3, 4, 5)
    for wrong, message in [
        ("__import__('os').abort()", "text: expected Genotype"),
        (text.replace("avg_pool_3x3", "avg_pool"), "reduce: expected one of"),
        (text.replace("('sep_conv_3x3', 1)", "('sep_conv_3x3', 2)", 1), "a source below 2"),
        (text.replace("[('sep_conv_3x3', 1), ", "[", 1), "normal: expected 8 pairs"),
        (text.replace("range(2, 6)", "[1]"), "normal_concat: expected nodes"),
        (text.replace("range(2, 6)", "range(2, 9**9)"), "text: expected Genotype"),
        (text.replace("range(2, 6)", "range(4, 7)"), "normal_concat: expected nodes"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_genotype(wrong)


def test_a_drawn_genotype_has_an_arrow_for_each_edge():
    pytest.importorskip("matplotlib").use("agg")
    axes = plot_genotype(DARTS_V1)
    for ax in axes:
        arrows = [text for text in ax.texts if getattr(text, "arrow_patch", None)]
        assert len(arrows) == 8 + 4  # two edges into each node, and each node to the output
    axes[0].figure.clear()


def test_drop_path_leaves_identities_alone_and_drops_every_other_edge():
    x = normal(0, 2, 4, 4, 3)
    for stride in (1, 2):
        make = functools.partial(Cell, SKIPS, 4, stride, False, Standardize)
        identity, zeros = make(lambda y: y), make(jnp.zeros_like)
        variables = draw(identity, x, x)
        whole, dropped = (jax.jit(c.apply)(variables, x, x) for c in (identity, zeros))
        assert_close(dropped, whole if stride == 1 else 0 * whole)


@pytest.mark.long
def test_the_network_trains_on_batch_statistics_and_predicts_with_running_averages():
    """One layer of averages by hand: 0.9 of the old, 0.1 of the batch's."""
    network = darts_network(SKIPS, classes=3, cells=1, channels=2, auxiliary=False)
    w, averages = network.init(key(), (4, 4, 1))
    x, labels = jnp.asarray(normal(0, 6, 4, 4, 1), jnp.float32), jnp.array([0, 1, 2] * 2)
    loss = jax.jit(network.loss)
    value, new = loss(w, averages, (x, labels), key(), 0.0)
    stem = depthwise(np.repeat(x, 6, -1).astype(float), np.asarray(w["Conv_0"]["kernel"]), 1)
    stem_averages = new["BatchNorm_0"]
    assert_close(stem_averages["mean"], 0.1 * stem.mean((0, 1, 2)), f64=1e-5)
    assert_close(stem_averages["var"], 0.9 + 0.1 * stem.var((0, 1, 2)), f64=1e-5)
    settled = jax.tree.map(lambda new, old: 10 * new - 9 * old, new, averages)
    logits = jax.jit(network.apply)(w, settled, x)
    entropy = jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(6), labels]
    assert_close(entropy.mean(), value, f64=1e-4)
    assert loss(w, averages, (x, labels), key(), 0.5)[0] != value


@pytest.mark.long
def test_the_auxiliary_classifiers_loss_counts_two_fifths():
    """Without weights it predicts its biases: closed form. 0.4 as in the reference."""
    network = darts_network(SKIPS, classes=3, cells=3, channels=2)
    w, averages = network.init(key(), (32, 32, 1))
    rows = jnp.asarray(normal(0, 3, 32, 32, 1), jnp.float32), jnp.array([0, 1, 1])
    head = w["auxiliary"]["Dense_0"]

    @jax.jit
    def loss(bias):
        dense = {"kernel": 0 * head["kernel"], "bias": bias}
        weights = w | {"auxiliary": w["auxiliary"] | {"Dense_0": dense}}
        return network.loss(weights, averages, rows, key())[0]

    bias = jnp.array([1.0, -2.0, 0.5], jnp.float32)
    entropy = jax.nn.logsumexp(bias) - bias[rows[1]].mean()
    assert_close(loss(bias) - loss(0 * bias), 0.4 * (entropy - np.log(3)), f64=1e-5)


@pytest.mark.long
def test_an_epoch_is_each_row_once_by_the_optimizer():
    """With a step size of 0 the mean loss is that of the batches; weights stay, averages move."""
    network = darts_network(SKIPS, classes=3, cells=1, channels=2, auxiliary=False)
    init, epoch = from_scratch(network, optax.sgd(0.0), batch_size=6)
    state = init(key(), (4, 4, 1))
    x, labels = jnp.asarray(normal(0, 6, 4, 4, 1), jnp.float32), jnp.array([0, 1, 2] * 2)
    after, loss = jax.jit(epoch)(key(), state, (x, labels))
    value, averages = jax.jit(network.loss)(state.w, state.averages, (x, labels), key())
    assert_close(loss, value, f64=1e-5)  # one batch: every row once, in whatever order
    assert_close(after.averages, averages, f64=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after.w, state.w)


def test_crops_are_the_image_moved_and_mirrored():
    image = np.arange(1.0, 31.0).reshape(5, 6, 1)
    moved = np.asarray(crop_and_flip(key(), jnp.asarray(np.stack([image] * 200)), padding=1))
    padded = np.pad(image, [(1, 1), (1, 1), (0, 0)])
    views = [padded[a : a + 5, b : b + 6] for a in range(3) for b in range(3)]
    views += [view[:, ::-1] for view in views]
    seen = [[np.array_equal(view, one) for view in views].index(True) for one in moved]
    assert len(set(seen)) == 18  # all of them, each expected 11 times


def test_cutout_is_one_square_cut_off_at_the_borders():
    x = np.asarray(cutout(key(), jnp.ones((200, 8, 10, 2)), size=4))
    hidden = x[..., 0] == 0
    np.testing.assert_array_equal(x[..., 0], x[..., 1])
    rows, columns = hidden.any(2).sum(1), hidden.any(1).sum(1)
    np.testing.assert_array_equal(hidden.sum((1, 2)), rows * columns)  # rectangles
    # Centres 0..7, squares from centre - 2 to centre + 1: 2, 3, 4, ..., 4, 3 rows.
    assert set(rows) == set(columns) == {2, 3, 4}
    assert 0 < np.mean(rows == 2) < 0.25
