"""Write the measured tables in README.md and docs/ from the results files; `make tables`.

    python tools/tables.py            # rewrite them, then print the age of each results file
    python tools/tables.py --check    # exit 1 if one differs from its results
    python tools/tables.py --smoke    # check only those of docs/stochastic.md

Two comments in the Markdown enclose a table:

    <!-- table: theory/spectral.search_table -->
    <!-- end of table -->

The first comment names a function of a module in `benchmarks/`. The function gets the rows of
`benchmarks/results/spectral.jsonl`. Another results file can follow the name: `<!-- table:
deep_search/darts_gap.count_table darts_gap_deep -->`.
"""

import argparse
import functools
import importlib
import re
import sys
from pathlib import Path

from benchmarks import harness
from tools import results_age

ROOT = Path(__file__).parents[1]
MARKED = re.compile(
    r"(<!-- table: (?P<folder>\w+)/(?P<script>\w+)\.(?P<function>\w+)(?: (?P<file>\w+))? -->\n)"
    r"(?P<table>.*?)(<!-- end of table -->)",
    re.DOTALL,
)

read = functools.cache(harness.read)


def made(match: re.Match) -> str:
    """Return the marked table, computed again."""
    script, file = match["script"], match["file"] or match["script"]
    module = importlib.import_module(f"benchmarks.{match['folder']}.{script}")
    function = getattr(module, match["function"])
    rows = read(harness.RESULTS / f"{file}.jsonl")
    return f"{match[1]}\n{function(rows)}\n\n{match[7]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--check", action="store_true", help="change nothing; 1 if a table differs")
    ways.add_argument("--smoke", action="store_true", help="--check of docs/stochastic.md alone")
    parser.add_argument("files", nargs="*", type=Path, help="default: README.md and docs/*.md")
    flags = parser.parse_args()
    if flags.smoke:
        if flags.files:
            parser.error(f"--smoke: expected no files, got {len(flags.files)}.")
        flags.check, flags.files = True, [ROOT / "docs/stochastic.md"]
    differ = []
    for path in flags.files or [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        text = path.read_text()
        fresh = MARKED.sub(made, text)
        if len(re.findall("^<!-- table:", text, re.MULTILINE)) != len(MARKED.findall(text)):
            sys.exit(f"{path.name}: expected each table's comments as in tools/tables.py.")
        if fresh == text:
            continue
        differ.append(path.name)
        if not flags.check:
            path.write_text(fresh)
    if flags.smoke and not differ:
        print(f"{len(MARKED.findall(text))} tables are as their results.")
    if differ:
        print(f"{'other than their results' if flags.check else 'written'}: {', '.join(differ)}")
    if not (flags.check or flags.files):
        results_age.print_ages()
    return int(flags.check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
