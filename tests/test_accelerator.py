"""The benchmark for accelerators runs to its end on whatever there is."""

import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks/accelerator.py"


def run(*flags):
    return subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True)


def test_what_a_results_file_holds_is_not_measured_again(tmp_path):
    out = tmp_path / "rows.jsonl"
    flags = "--part", "matmul", "--quick", "--out", out
    first, second = run(*flags), run(*flags)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.count("tflops") == 3 and second.stdout == ""
    assert run("--table", "--out", out).stdout.count("| matmul |") == 3


def test_parts_for_which_there_is_no_time_are_said_to_be_stopped():
    done = run("--quick", "--only", "matmul", "--minutes", "0")
    assert done.returncode == 0, done.stderr
    assert "matmul: stopped" in done.stdout


def test_the_parts_run_to_their_end():
    # The other two, `darts_step` and `skips`, are benchmarks of their own that compile for two
    # minutes: `make accelerator ARGS=--quick` runs them too.
    parts = "hypergradient", "empirical", "infinite", "sharded", "operator", "eigenvalue"
    parts += "genotypes", "darts"
    done = run("--quick", "--only", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n| {part} |" in done.stdout for part in parts)
