"""Sizes of tiles from a device's memory and kind, and kernels that do not depend on them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_gradient, normal

import ntk
from ntk.infinite import layer_expansions, mixtures, network_kernel
from ntk.internal.tiles import CPU_TILE, assemble, gram_tile_size, tile_entries, tile_size

CARD = 80 * 10**9


def tiles(n, size):
    side = -(-n // size)
    return side * (side + 1) // 2


def test_a_large_card_takes_few_tiles_and_a_full_one_or_a_processor_the_smallest():
    assert tiles(20_000, tile_size(CARD, "gpu", 20_000, 3, 4)) <= 20
    assert tiles(5_000, tile_size(CARD, "gpu", 5_000, 3, 4)) <= 6
    assert tile_size(CARD, "gpu", 1_000, 3, 4) == 1_000  # one tile
    assert tile_size(10**9, "gpu", 50_000, 3, 4) == CPU_TILE
    assert tile_entries(CARD, 4) > 1e7
    assert tile_entries(1, 4) == CPU_TILE**2
    assert {tile_size(memory, "cpu", 5000, 3, 8) for memory in (1, CARD)} == {CPU_TILE}
    assert tile_size(CARD, "cpu", 9, 3, 8) == 9


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
@pytest.mark.parametrize("layers", [1, 3, 30])
def test_tiles_and_results_fit(kind, layers):
    for memory, n, itemsize in itertools.product((4e9, 16e9, 80e9), (300, 7000, 50_000), (4, 8)):
        results = 3 * n**2 * itemsize
        if results > 0.8 * memory:
            continue
        size = tile_size(int(memory), kind, n, layers, itemsize)
        assert CPU_TILE <= size <= n or size == n
        arrays = 16 + 6 * layers
        held = results + arrays * itemsize * size**2
        assert held <= max(1.5 * results, results + memory / 64) or size == CPU_TILE
        assert held <= memory


def test_tiles_of_a_gram_matrix_take_a_part_of_the_result():
    for n, arrays in itertools.product((5_000, 20_000, 100_000), (7, 12, 100)):
        size = gram_tile_size(CARD, "gpu", n, arrays, 4)
        held = 4 * arrays * size**2
        # Tiles are rounded up to multiples of 128 rows.
        assert held <= 1.3 * max(4 * n**2 / 6, CARD / 256) or size == CPU_TILE
    assert gram_tile_size(CARD, "cpu", 5_000, 7, 4) == 1024
    assert gram_tile_size(1, "gpu", 5_000, 7, 4) == CPU_TILE


def compiled_kernel(n, size, activation, depth):
    parts = [activation] * depth, None, None, jnp.float32
    layers, *network = layer_expansions.parse_architecture(*parts)
    x = jax.ShapeDtypeStruct((n, 16), jnp.float32)

    def features(x):
        how = layer_expansions.RESOLUTIONS[0]
        rows = network_kernel._features_of_inputs(layers, x, network, how, True)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves, 1), *rows)

    rows = jax.eval_shape(features, x)
    exact = jax.ShapeDtypeStruct((depth,), bool)
    arguments = x, None, rows, rows, *network[1:], exact
    return network_kernel._kernels_from_features.lower(*arguments, equal=True, size=size).compile()


@pytest.mark.parametrize("activation", [ntk.relu, ntk.tanh])
def test_memory_of_tiles_is_within_the_count(activation):
    n, size, depth = 1024, 512, 3
    memory = compiled_kernel(n, size, activation, depth).memory_analysis()
    assert memory.temp_size_in_bytes <= (16 + 6 * depth) * 4 * size**2


def test_a_layer_is_a_few_passes():
    programs = [compiled_kernel(512, 256, ntk.relu, depth).as_text() for depth in (2, 5)]
    counts = [program.count(" fusion(") for program in programs]
    assert counts[0] == counts[1] <= 90  # 86 on 2026-11-28: layers share their passes


def small_tiles(monkeypatch, size):
    for module in (network_kernel, mixtures):
        monkeypatch.setattr(module, "device_tile_size", lambda n, layers, dtype: min(size, n))
    mixtures._blocks_with_errors.clear_cache()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tiles_are_seams_that_do_not_show(monkeypatch, dtype):
    x = normal(0, 23, 4).astype(dtype)
    arguments = dict(activations=[ntk.relu, ntk.tanh], skips=[0.5])
    whole = ntk.network_kernel(x, **arguments)
    small_tiles(monkeypatch, 8)
    tiled, cross = ntk.network_kernel(x, **arguments), ntk.network_kernel(x, x[:17], **arguments)
    different = ~np.eye(23, 17, dtype=bool)
    for a, b, c in zip(tiled, cross, whole, strict=True):
        assert bool((a == a.T).all())
        assert_close(a, c, f64=1e-13 if dtype == "float64" else 1e-5, f32=1e-5)
        assert_close(b[different], c[:, :17][different], f64=1e-5, f32=1e-5)


@pytest.mark.long
def test_tiles_have_the_same_derivative(monkeypatch):
    x = normal(0, 23, 4)
    small_tiles(monkeypatch, 8)
    network = {"activations": [ntk.relu] * 2}
    total = lambda skips: ntk.network_kernel(x, **network, skips=skips).ntk.sum()  # noqa: E731
    assert_gradient(total, jnp.array([0.5]), f64=1e-8, f32=2e-2)
    blocks = ntk.mixture_blocks(x, [ntk.relu, ntk.tanh])
    monkeypatch.undo()
    mixtures._blocks_with_errors.clear_cache()
    assert_close(ntk.mixture_blocks(x, [ntk.relu, ntk.tanh]), blocks, f64=1e-13, f32=1e-5)


def test_a_tile_on_the_diagonal_is_mirrored():
    rough = normal(1, 9, 9)

    def tile(i, j, size1, size2):
        return jax.lax.dynamic_slice(rough, (i, j), (size1, size2))

    for size in (4, 9):
        whole = assemble(tile, 9, 9, symmetric=True, size=size)
        np.testing.assert_array_equal(whole, np.triu(rough) + np.triu(rough, 1).T)
