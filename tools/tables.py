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

The last line of a table is the date and the commit of its rows, and "older code" if a module that
the script measures has changed since. `--check`, and runs on named files, only compare the commit.
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

AGE = re.compile(r"^Measured .*\bcommit (\w+).*\.$", re.MULTILINE)

read = functools.cache(harness.read)


def made(match: re.Match, *, aged: bool = False) -> str:
    """Return the marked table, computed again. With ``aged`` the age of its rows, too."""
    script, file = match["script"], match["file"] or match["script"]
    module = importlib.import_module(f"benchmarks.{match['folder']}.{script}")
    function = getattr(module, match["function"])
    path = harness.RESULTS / f"{file}.jsonl"
    rows = read(path)
    parts = [f"{match[1]}\n{function(rows)}"]
    own = [row for row in rows if row.get("part") == match["function"] and "commit" in row]
    commit = (own or rows or [{}])[0].get("commit")  # of the part, or of the whole file
    if commit and (age := age_line(path, commit, match["table"], aged=aged)):
        parts.append(age)
    return "\n\n".join([*parts, match[7]])


def age_line(path: Path, commit: str, table: str, *, aged: bool) -> str:
    """Return the line on the age of the rows; without ``aged`` that of the table if it agrees."""
    if aged:
        return results_age.age_of(path, commit).sentence()
    line = AGE.search(table)
    return line[0] if line and line[1] == commit else f"Measured at commit {commit}."


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
    differ, aged = [], not (flags.check or flags.files)
    for path in flags.files or [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        text = path.read_text()
        fresh = MARKED.sub(functools.partial(made, aged=aged), text)
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
    if aged:
        results_age.print_ages()
    return int(flags.check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
