"""The benchmark for accelerators runs to its end on whatever there is."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks/scale/accelerator.py"

# The script, with the other benchmarks in the folder of this program.
ELSEWHERE = """
import pathlib
from benchmarks.scale import accelerator
accelerator.__file__, accelerator.HERE = __file__, pathlib.Path(__file__).parent
accelerator.main()
"""


def run(*flags, script=SCRIPT):
    return subprocess.run([sys.executable, script, *flags], capture_output=True, text=True)


def test_parts_for_which_there_is_no_time_are_said_to_be_stopped():
    done = run("--quick", "--only", "matmul", "--minutes", "0")
    assert "matmul: stopped" in done.stdout
    assert done.returncode == 1
    assert done.stderr == "rows: expected at least one measurement, got none.\n"


@pytest.mark.slow
def test_a_script_that_fails_is_recorded_as_failed_and_measured_again(tmp_path):
    out, step = tmp_path / "rows.jsonl", tmp_path / "deep_search/darts_step.py"
    step.parent.mkdir()
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    flags = "--only", "darts_step", "--peers", "--out", out

    step.write_text("import sys; sys.exit('cannot import parameter_count')")
    broken = run(*flags, script=tmp_path / "elsewhere.py")
    assert broken.returncode == 1
    assert broken.stderr.startswith("failed: 1 of the rows; the first, darts_step")
    assert "cannot import parameter_count" in broken.stderr
    assert "| darts_step | without PyTorch | failed RuntimeError: cannot" in broken.stdout

    step.write_text("print('a table')")
    repaired = run(*flags, script=tmp_path / "elsewhere.py")
    assert repaired.returncode == 0, repaired.stderr
    assert repaired.stdout.count("| darts_step |") == 1 and "a table" in repaired.stdout
    assert "failed" not in repaired.stdout

    kept = run(*flags, script=tmp_path / "elsewhere.py")
    assert kept.returncode == 0 and not kept.stdout.startswith("darts_step:")


@pytest.mark.long
def test_the_parts_run_to_their_end():
    # `darts_step` and `skips` compile for two minutes; `make accelerator ARGS=--quick` runs them.
    parts = "hypergradient", "empirical", "infinite", "sharded", "operator", "eigenvalue"
    parts += "genotypes", "darts"
    done = run("--quick", "--only", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n| {part} |" in done.stdout for part in parts)
