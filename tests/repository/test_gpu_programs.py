"""Counts of our programs compiled for a card that is absent: the table on the page *On a GPU*.

They need the wheels that ``benchmarks/scale/gpu_programs.py`` names, unpacked in a folder that
``BILEVEL_CUDA_PLUGIN`` names. Tests of programs for a CPU always run.
"""

import json
import os

import pytest
from helpers import ROOT, run

SCRIPT = ROOT / "benchmarks/scale/gpu_programs.py"
PLUGIN = os.environ.get("BILEVEL_CUDA_PLUGIN")

# Launches of one iteration beyond the user's Hessian product.
BEYOND = {"conjugate gradients: ridge, 2000 x 500": 4, "conjugate gradients: network, 6 leaves": 6}
# Launches of one iteration of each loop: Newton's steps, conjugate gradients, the line search, and
# the conjugate gradients of the adjoint.
LOOPS = {
    "implicit(): ridge, 2000 x 500": (19, 8, 5, 8),
    "implicit(): network, 6 leaves": (60, 34, 13, 33),
}
# Tiles, launches of one tile, and peak memory over inputs and results. None is not counted.
KERNELS = {
    # 135 launches before a layer's features were carried, which takes a third of the time on a CPU.
    "kernels of infinite width: relu, N = 20000": (15, 145, 1.15),
    "kernels of infinite width: tanh, N = 20000": (15, None, 1.3),
    "kernels of a convolutional network: 21 layers, 32 x 32 x 3, N = 1000": (45, 1285, None),
    "empirical kernel: two hidden layers of 1024, N = 20000": (45, 23, 1.32),
    "empirical kernel, blocks of 1000: three convolutions, 32 x 32 x 3, N = 20000": (20, 405, 1.34),
}


def within(count, limit):
    return limit is None or count <= limit


@pytest.mark.long
@pytest.mark.skipif(PLUGIN is None, reason="BILEVEL_CUDA_PLUGIN names no folder of JAX's plugin")
def test_programs_for_a_card_launch_few_kernels(tmp_path):
    results, unset = tmp_path / "rows.jsonl", ("XLA_FLAGS", "JAX_ENABLE_X64")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    run("python", SCRIPT, "--plugin", PLUGIN, "--results", results, env=environment)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    rows = {row["program"]: row for row in rows if "program" in row}
    assert rows.keys() == {*BEYOND, *LOOPS, *KERNELS}
    for name, limit in BEYOND.items():
        assert rows[name]["launches"][0] - rows[name]["users"] <= limit, rows[name]
    for name, limits in LOOPS.items():
        assert all(map(within, rows[name]["launches"], limits)), rows[name]
    for name, limits in KERNELS.items():
        row = rows[name]
        counts = row["tiles"], row["tile"], row["peak"] / row["input_and_result"]
        assert all(map(within, counts, limits)), row
