"""Would the tests notice?  (random mistakes planted in the core, one at a time)

A mutant is the package with one operator, comparison, number or condition changed, where and how
drawn at random by cosmic-ray (``pip install cosmic-ray``). It is killed if a test fails. Of those
that survive some are equivalent: no test can tell them from the original, for a reason that is
given (`EQUIVALENT`). The others are named.

    python benchmarks/reliability/mutants.py    # 60 of them; hours of processor time; resumable
    python benchmarks/reliability/mutants.py --count 90  # 30 more
    python benchmarks/reliability/mutants.py --again  # those alive, after tests were added
    # one planted by hand, and a test that kills it
    python benchmarks/reliability/mutants.py --smoke
    python benchmarks/reliability/mutants.py --table
"""

import difflib
import hashlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import harness

ROOT = Path(__file__).parents[2]
# The tests that are about each file, its own first.
TESTS = {
    "bilevel/solvers/_unrolled.py": "solvers unrolled_optimizers hypergradient",
    "bilevel/solvers/_implicit.py": "solvers hypergradient precision",
    "bilevel/solvers/_ridge.py": "solvers linear hypergradient",
    "bilevel/solvers/_optimizer.py": "unrolled_optimizers",
    "bilevel/solvers/conjugate_gradients.py": "soft_directions inverse solvers",
    "bilevel/solvers/inverses.py": "inverse solvers hypergradient",
    "bilevel/solvers/minimizers.py": "solvers precision soft_directions hypergradient",
    "bilevel/hypergradients/error_estimate.py": (
        "estimate soft_directions hypergradient search_error"
    ),
    "bilevel/hypergradients/refinement.py": "estimate soft_directions hypergradient",
    "bilevel/hypergradients/curvature.py": "curvature estimate soft_directions",
    "bilevel/outer_loop/geometry.py": "geometry search",
    "bilevel/outer_loop/search.py": "search not_finite",
    "bilevel/outer_loop/search_chunks.py": "search checkpoint not_finite",
    "bilevel/outer_loop/search_program.py": "search not_finite",
    "bilevel/hypergradients/hypergradient.py": "hypergradient estimate not_finite",
    "bilevel/strategies/methods.py": "strategies",
    "bilevel/baselines/halving.py": "baselines feature_selection",
    "bilevel/baselines/weight_sharing.py": "baselines feature_selection",
    "bilevel/baselines/exponentiated.py": "baselines feature_selection",
    "bilevel/spaces/features/fourier.py": "feature_maps feature_mixture",
    "ntk/infinite/dual_activation.py": "duals activations kernel_entries",
    "ntk/expectations/gaussian.py": "duals infinite kernel_entries",
    "ntk/expectations/hermite.py": "duals infinite kernel_entries",
    "ntk/infinite/mixtures.py": "infinite kernel_entries",
    "ntk/infinite/network_kernel.py": "infinite kernel_entries",
    "ntk/spectrum/certificate.py": "spectrum",
    "ntk/spectrum/eigenvalues.py": "spectrum",
}
# Subtle ones: most of the others are no program that runs.
SWAPS = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "Mul_Add", "Pow_Mul")
COMPARISONS = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_Gt", "Gt_Lt", "Eq_NotEq", "Is_IsNot")
OPERATORS = (
    *(f"core/ReplaceBinaryOperator_{swap}" for swap in SWAPS),
    *(f"core/ReplaceComparisonOperator_{swap}" for swap in COMPARISONS),
    *("core/ReplaceUnaryOperator_Delete_USub", "core/ReplaceUnaryOperator_Delete_Not"),
    *("core/AddNot", "core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue"),
    *("core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/NumberReplacer"),
)
LIMIT = 900  # seconds of tests: a mutant that hangs is noticed
SMOKE = (
    "    return down(down(_bound_min_eigenvalue(K / scale) - error) * scale)",
    "    return down(down(_bound_min_eigenvalue(K / scale) - error) / -scale)",
)

# Survivors that no test can tell from the original: key -> reason.
EQUIVALENT = {
    "1478f1bb": "a trajectory of exactly 64 MiB: kept or run twice, the numbers are the same",
    "db3a4915": "adds a damping of 0 to the loss",
    "dad223a2": "divides a 0",
    "53ccac11": "phases in [-2 pi, 0) in the place of [0, 2 pi)",
    "8c747dd2": "the residual of an invariant subspace: 0, or under it; both end the iteration",
    "3f0cb5b0": "where a search of shifts begins; what it ends at is proved by itself",
}


def sites(file):
    """All (operator, occurrence) in a file."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    nodes = list(ast_nodes(get_ast((ROOT / file).read_text())))
    for name in OPERATORS:
        operator = get_operator(name)()
        count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        yield from ((name, number) for number in range(count))


def mutants():
    """(file, operator, occurrence), without end or repetition: one of each file, and again."""
    draw = random.Random(0)
    queues = {}
    for file in TESTS:
        queue = sorted(sites(file))
        draw.shuffle(queue)
        queues[file] = iter(queue)
    for _ in itertools.count():
        for file, queue in queues.items():
            yield from ((file, *site) for site in itertools.islice(queue, 1))


def mutated(file, operator, occurrence):
    """The file, its text with the mistake, the difference as lines; None for what is no program."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    old = (ROOT / file).read_text()
    new = mutate_code(old, get_operator(operator)(), occurrence)
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    difference = [line for line in lines if line[:3] not in ("---", "+++")]
    try:
        compile(new, file, "exec")
    except SyntaxError:
        return None
    # The star between positional and keyword arguments is no product.
    star = "Mul_" in operator and "*, " in difference[1]
    return None if star else (file, new, difference)


def fate(file, text, tests=None) -> dict:
    """Run the tests on a copy of the repository with ``file`` changed in this way.

    By default the tests that are about the file, those that are slow last.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        left_out = shutil.ignore_patterns(".*", "_build", "results", "notebooks", "runs")
        shutil.copytree(ROOT, copy, ignore=left_out)
        (copy / "benchmarks/results").mkdir()
        (copy / file).write_text(text)
        # Programs compiled before are found again: most are as they were.
        programs = ROOT / ".pytest_cache/mutants"
        programs.mkdir(parents=True, exist_ok=True)
        (copy / ".pytest_cache").symlink_to(programs)
        if tests:
            killer = failed(copy, tests, "not slow")
        else:
            tests = [file, *(path for name in TESTS[file].split() for path in named(name))]
            killer = failed(copy, tests, "not slow") or failed(copy, tests, "slow")
    return {"killed_by": killer, "seconds": round(time.perf_counter() - began)}


def named(name):
    """The file of the tests of this name, relative to the repository."""
    return [str(path.relative_to(ROOT)) for path in ROOT.glob(f"tests/*/test_{name}.py")]


def failed(copy, tests, marks):
    """The first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-m", marks, "--tb=no", *tests]
    command += ["-p", "no:cacheprovider"]
    paths = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=os.environ | paths, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return "the time limit"
    if done.returncode in (0, 5):  # all passed; there are none
        return None
    named = [
        line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return named[0] if named else done.stdout.strip().splitlines()[-1]


def key_of(file, difference) -> str:
    """Short, and the same as long as the changed lines are."""
    changed = [line for line in difference if not line.startswith("@@")]
    return hashlib.sha256("\n".join([file, *changed]).encode()).hexdigest()[:8]


def main() -> None:
    count = {"type": int, "default": 60, "help": "mutants in all"}
    again = {"action": "store_true", "help": "those alive"}
    arguments = harness.command_line(__file__, __doc__, report, count=count, again=again)
    rows = latest(harness.read(arguments.results or Path()))
    if arguments.small:
        harness.unused(arguments, "count", "again")
    if arguments.smoke:
        new = [smoke()]
        harness.finish(new, None, report)
        return
    wanted = 3 if arguments.size == "quick" else max(0, arguments.count - len(rows))
    fresh = filter(None, (mutated(*mutant) for mutant in mutants()))
    fresh = (mutant for mutant in fresh if key_of(mutant[0], mutant[2]) not in rows)
    planted = filter(None, map(repeated, alive(rows))) if arguments.again else fresh
    for file, text, difference in itertools.islice(planted, None if arguments.again else wanted):
        key = key_of(file, difference)
        row = {"mutant": key, "file": file, "difference": difference} | fate(file, text)
        harness.append(arguments.results, row)
        rows[key] = row
        told = row["killed_by"] or "ALIVE"
        print(f"{key} {file:36s} {row['seconds']:4d} s  {told}", flush=True)
    harness.finish(list(rows.values()), arguments.results, report, write_rows=False)


def smoke() -> dict:
    """One mutant, by text and without cosmic-ray, and the doctests of its file."""
    file, line, mistake = "ntk/spectrum/certificate.py", *SMOKE
    difference = ["@@", f"-{line}", f"+{mistake}"]
    planted = repeated({"file": file, "difference": difference})
    if planted is None:
        sys.exit(f"{file}: expected the line {line!r} once, for --smoke.")
    return {"mutant": key_of(file, difference), "file": file, "difference": difference} | fate(
        file, planted[1], tests=[file]
    )


def latest(rows) -> dict[str, dict]:
    """The last row on each mutant."""
    return {row["mutant"]: row for row in rows}


def alive(rows) -> list[dict]:
    """Those that no test noticed, though one could."""
    return [row for key, row in rows.items() if not row["killed_by"] and key not in EQUIVALENT]


def repeated(row):
    """A mutant by its difference, as of `mutated`; None where the line is gone."""
    _, old, new = row["difference"]
    text = (ROOT / row["file"]).read_text()
    if text.count(f"{old[1:]}\n") != 1:
        return None
    return row["file"], text.replace(f"{old[1:]}\n", f"{new[1:]}\n"), row["difference"]


def report(rows) -> str:
    """By package: planted, killed, equivalent; then those that live."""
    by_mutant = latest(rows)
    living, rows = alive(by_mutant), by_mutant.values()
    lines = []
    for package in ("bilevel", "ntk"):
        own = [row for row in rows if row["file"].startswith(package)]
        killed = sum(bool(row["killed_by"]) for row in own)
        same = sum(row["mutant"] in EQUIVALENT for row in own if not row["killed_by"])
        share = f"{killed / max(len(own) - same, 1):.0%}"
        lines.append((f"`{package}`", len(own), killed, same, share))
    head = ("package", "planted", "killed", "equivalent", "killed of the others")
    text = harness.table(head, lines)
    for row in living:
        changed = " ".join(line.strip() for line in row["difference"] if line.startswith("+"))
        text += f"\n- alive: `{row['file']}`: `{changed.lstrip('+').strip()}`"
    return text


if __name__ == "__main__":
    main()
