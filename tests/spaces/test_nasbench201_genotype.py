"""Genotypes of NAS-Bench-201: strings, arrays, graphs, costs; published counts, brute force."""

import itertools

import numpy as np
import pytest

from benchmarks.train_free.cell_formulas import canonical
from bilevel.spaces.nasbench201 import encode, genotype, genotypes, parameter_count
from bilevel.spaces.nasbench201.genotype import EDGES, live_edges, multiply_adds, parse_genotype

# the paper's
RESNET = "|nor_conv_3x3~0|+|none~0|nor_conv_3x3~1|+|skip_connect~0|none~1|skip_connect~2|"
BEST = (
    "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|"
    "+|skip_connect~0|nor_conv_1x1~1|nor_conv_3x3~2|"  # on CIFAR-10, in the benchmark
)


def test_the_official_text_is_read_edge_by_edge():
    g = parse_genotype(RESNET)
    on = dict(zip(EDGES, g.operations, strict=True))
    assert on[0, 1] == on[1, 2] == "nor_conv_3x3" and on[0, 3] == on[2, 3] == "skip_connect"
    assert on[0, 2] == on[1, 3] == "none" and str(g) == RESNET


def test_a_genotypes_place_is_its_code_in_base_5():
    codes = encode(genotypes())
    assert all(parse_genotype(str(g)) == g for g in genotypes())
    assert encode(genotypes()[7]).shape == (6,) and encode(()).shape == (0, 6)
    assert codes.dtype == np.int32
    np.testing.assert_array_equal(codes @ 5 ** np.arange(6)[::-1], np.arange(5**6))


@pytest.mark.parametrize("text", ["", BEST + "|", BEST.replace("~1|+", "~2|+"), BEST + "+" + BEST])
def test_a_malformed_string_raises(text):
    with pytest.raises(ValueError, match=r"^text: expected \|op~0\|\+.*, got '.*'\.$"):
        parse_genotype(text)


def paths(g):
    """All paths without ``none`` from node 0 to node 3, as lists of edges."""
    on = dict(zip(EDGES, g.operations, strict=True))
    for middle in ((), (1,), (2,), (1, 2)):
        path = list(itertools.pairwise((0, *middle, 3)))
        if all(on[edge] != "none" for edge in path):
            yield path


def test_live_edges_are_those_on_a_path_from_input_to_output():
    for g in genotypes():
        edges = {edge for path in paths(g) for edge in path}
        assert {e for e, live in zip(EDGES, live_edges(g), strict=True) if live} == edges
        on = dict(zip(EDGES, g.operations, strict=True))
        convolutions = sum(on[edge].startswith("nor_conv") for edge in edges)
        assert genotype.trainable_layers(g) == 8 + 15 * convolutions
        assert genotype.trainable_layers(g, cells=1) == 8 + 3 * convolutions
        assert convolutions <= genotype.conv_edges(g)


def test_formulas_count_the_different_networks():
    """5,260, found independently by evaluating every cell with generic functions; 341 are dead."""
    formulas = [canonical(g) for g in genotypes()]
    assert len(set(formulas)) == 5260
    dead = [not any(live_edges(g)) for g in genotypes()]
    assert [not formula for formula in formulas] == dead and sum(dead) == 341


def test_parameters_and_multiply_adds_follow_the_published_formulas():
    """So both rank all networks alike. The benchmark records 153.27 M for the best network."""
    for g in genotypes():
        n1, n3 = map(g.operations.count, ("nor_conv_1x1", "nor_conv_3x3"))
        assert parameter_count(g) == 73_306 + 243_040 * n3 + 28_000 * n1
        assert multiply_adds(g) == 7_783_040 + 35_389_440 * n3 + 3_932_160 * n1
    assert round(multiply_adds(parse_genotype(BEST)) / 1e6, 2) == 153.27


def test_the_classifier_and_the_image_are_counted_apart():
    g = parse_genotype(BEST)
    assert parameter_count(g, classes=100) - parameter_count(g) == 90 * 65
    assert multiply_adds(g, classes=100) - multiply_adds(g) == 90 * 64
    assert multiply_adds(g, pixels=16, classes=120) == (multiply_adds(g) - 640) // 4 + 64 * 120
