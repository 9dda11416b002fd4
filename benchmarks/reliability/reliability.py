"""Is anything silently wrong? Attacks on every public function and every command.

Each generated input is right, refused in a sentence that names an argument, or visibly not finite.
What is left is *silent* (a wrong answer, or a NaN that went in and did not come out) or a *raw
error* (an exception that is not one sentence naming an argument). The exit status is 1 if anything
is silent or raw. Raw errors for an argument of a type that it could never be are only counted.
What counts as which: `reliability/case.py`. Parts:

    functions   generated good and bad inputs of every public name of `bilevel` and `ntk`
    commands    generated command lines
    kills       SIGKILL at random moments; the resumed result has to be the uninterrupted one
    flips       bits flipped in checkpoints, journals and records; the same, or a sentence
    disks       a full disk at random moments: a sentence, and nothing in memory lost
    writers     two processes on one directory
    nonfinite   NaN at every quantity of a search, at step 0 and later

    python benchmarks/reliability/reliability.py          # all of it: hours; go on by the same line
    python benchmarks/reliability/reliability.py --quick  # one or two minutes
    python benchmarks/reliability/reliability.py --smoke  # two inputs of a few public names
    python benchmarks/reliability/reliability.py --only bilevel.cg  # one public name, or one part
    # one input, and what came of it
    python benchmarks/reliability/reliability.py --only bilevel.cg --case 17
    python benchmarks/reliability/reliability.py --table  # the results file as Markdown

Every input is made from `--seed`, its name and its number alone: the line printed for one that is
silent or raw is its reproducer. Results are appended to `results/reliability.jsonl`, and what is
there is not run again.
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

import jax

from benchmarks import harness
from benchmarks.reliability import parts, records
from benchmarks.reliability.case import LISTED

RESULTS = harness.RESULTS / "reliability.jsonl"
BLOCK = 10  # inputs to a line of results
SMOKE = "bilevel.argmax", "bilevel.top_k", "ntk.certified_min_eigenvalue"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=10_000, help="of all functions together")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--smoke", action="store_true", help="only shows that the script runs")
    sizes.add_argument("--quick", action="store_true", help="a few inputs of each, no results file")
    sizes.add_argument("--table", action="store_true", help="print the table of the results file")
    parser.add_argument("--only", help="a part, or a public name (a beginning will do)")
    parser.add_argument("--case", type=int, help="the number of one input of --only")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.case is not None and args.only is None:
        parser.error("--case: expected --only with the name of a part or function, got none.")
    if args.smoke and args.only is not None:
        parser.error("--smoke: expected no --only, got one.")
    if args.quick or args.smoke:
        for name in ("inputs", "results"):
            if getattr(args, name) != parser.get_default(name):
                size = "--quick" if args.quick else "--smoke"
                parser.error(f"--{name}: expected the default size, got {size}.")
    if args.table:
        print(records.table(records.of_seed(args.results, args.seed).values()))
        return 0
    if args.case is not None:
        print(*parts.one(args.only, args.seed, args.case), sep="\n  ")
        return 0
    small = args.quick or args.smoke
    kept = records.Records(Path(os.devnull) if small else args.results, args.seed)
    plan = parts.plan(args.inputs, quick=small, only=args.only, block=BLOCK)
    if args.smoke:
        plan = [block for block in plan if block.name in SMOKE]
    if not plan:
        parser.error(f"--only: expected a part or the beginning of a public name, got {args.only}")
    return campaign(kept, plan)


def campaign(kept: records.Records, plan: list[parts.Block]) -> int:
    """Run what is not known yet; 1 if anything is silent or raw."""
    began, name, started = time.time(), "", 0
    for done, block in enumerate(plan):
        if kept.knows(block.part, block.name, block.number, len(block.inputs)):
            continue
        if block.name != name:
            name, started = block.name, started + 1
            if started % 20 == 0:  # compiled programs add up
                jax.clear_caches()
            seconds = time.time() - began
            print(f"[{done}/{len(plan)}, {seconds:.0f} s] {block.part}: {name}", flush=True)
        counts, listed = Counter(), []
        for number in block.inputs:
            outcome = parts.one(name, kept.seed, number)
            counts[outcome.verdict] += 1
            if outcome.verdict in LISTED:
                line = f"--only '{name}' --seed {kept.seed} --case {number}"
                listed.append(f"{outcome.verdict}, {outcome.attack}: {outcome.detail} [{line}]")
                print("  " + listed[-1], flush=True)
        kept.add(block.part, name, block.number, counts, listed)
    lines = [kept.lines[block.part, block.name, block.number] for block in plan]
    print(records.table(lines))
    print("not covered:", ", ".join(parts.uncovered()))
    return int(any(records.failures(counts) for counts in records.totals(lines, "part").values()))


if __name__ == "__main__":
    sys.exit(main())
