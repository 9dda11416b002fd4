"""The benchmark for accelerators runs to its end on whatever there is."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks/scale/accelerator.py"


def run(*flags):
    return subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True)


def test_parts_for_which_there_is_no_time_are_said_to_be_stopped():
    done = run("--quick", "--only", "matmul", "--minutes", "0")
    assert "matmul: stopped" in done.stdout
    assert done.returncode == 1
    assert done.stderr == "rows: expected at least one measurement, got none.\n"


@pytest.mark.long
def test_the_parts_run_to_their_end():
    # `darts_step` and `skips` compile for two minutes; `make accelerator ARGS=--quick` runs them.
    parts = "hypergradient", "empirical", "infinite", "sharded", "operator", "eigenvalue"
    parts += "genotypes", "darts"
    done = run("--quick", "--only", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n| {part} |" in done.stdout for part in parts)
