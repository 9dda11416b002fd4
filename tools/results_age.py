"""Tell which results are older than the code that they measure.

    python tools/results_age.py            # a line for each results file
    python tools/results_age.py memory     # only of these files, with the names of changed modules
    python tools/results_age.py --smoke    # only checks the lists of modules, without git

The first row of a results file holds the commit of its run. A benchmark lists the files and folders
that it measures in ``MEASURES``. A module has changed if its syntax tree differs from the one at
the commit, without docstrings, comments and imports. Renamed files are followed. A run of more than
six hours may hold ``"older code": true`` in its first row: its results need not be of today's code.
A run that needs hardware holds it as text, ``"older code": "needs a GPU"``.
"""

import argparse
import ast
import functools
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness

ROOT = Path(__file__).parents[1]
_SAME_FILE = "30%"  # of the lines: a file with as many is a renamed one


def git(*arguments: str, given: str = "") -> bytes:
    """Return the output of git, with ``given`` as its input."""
    command, text = ["git", *arguments], given.encode()
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, check=True).stdout


def measured_modules(script: Path) -> list[str]:
    """Return the modules in the files and folders that ``MEASURES`` of a script lists."""
    for statement in ast.parse(script.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "MEASURES":
            return [path for entry in ast.literal_eval(statement.value) for path in _files(entry)]
    raise ValueError(f"{script.name}: expected a tuple of paths MEASURES, got none.")


def _files(entry: str) -> Iterator[str]:
    files = [ROOT / entry] if entry.endswith(".py") else sorted((ROOT / entry).rglob("*.py"))
    if not files or not files[0].is_file():
        raise ValueError(f"MEASURES: expected files or folders of Python files, got {entry!r}.")
    return (str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py")


def changed_modules(commit: str, modules: Iterable[str]) -> list[str]:
    """Return the modules with other code than at ``commit``."""
    names = _names_at(commit)
    earlier = {path: f"{commit}:{names.get(path, path)}" for path in modules}
    sources = _contents(earlier.values())
    return [
        path
        for path, then in earlier.items()
        if sources[then] is None or _code(sources[then]) != _code((ROOT / path).read_text())
    ]


@functools.cache
def _names_at(commit: str) -> dict[str, str]:
    """Return the names at ``commit`` of the files that were renamed since."""
    output = git("diff", f"-M{_SAME_FILE}", "-l0", "--diff-filter=R", "--name-status", commit)
    return {new: old for _, old, new in (x.split("\t") for x in output.decode().splitlines())}


def _contents(objects: Iterable[str]) -> dict[str, str | None]:
    """Return the texts of git's objects; None if one does not exist."""
    names, texts = list(objects), {}
    output = git("cat-file", "--batch", given="\n".join(names))
    for name in names:
        head, _, output = output.partition(b"\n")
        size = int(head.split()[-1]) if head.split()[-1].isdigit() else None
        texts[name] = None if size is None else output[:size].decode()
        output = output if size is None else output[size + 1 :]
    return texts


@functools.cache
def _code(source: str) -> str:
    """Return the syntax tree without docstrings and imports."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _is_prose_or_import(s)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_prose_or_import(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return isinstance(statement.value.value, str)
    return isinstance(statement, ast.Import | ast.ImportFrom)


class Age(NamedTuple):
    """The commit of the rows of a results file, its date, and the modules that changed since."""

    commit: str
    date: str
    changed: list[str]

    def sentence(self) -> str:
        """Return the sentence under a table of the documentation."""
        older = ", older code" if self.changed else ""
        return f"Measured on {self.date}, commit {self.commit}{older}."


@functools.cache
def age_of(path: Path, commit: str) -> Age:
    """Return the age of rows of a results file that were measured at ``commit``."""
    date = git("log", "-1", "--format=%as", commit).decode().strip()
    return Age(
        commit, date, changed_modules(commit, measured_modules(harness.script_of(path.stem)))
    )


def describe_age(path: Path) -> tuple[str, list[str]]:
    """Return a line about a results file, and the modules that have changed since."""
    commit, date, changed = age_of(path, harness.read(path)[0]["commit"])
    age = "today's code"
    if changed:
        reason = harness.read(path)[0].get("older code")
        age = f"older code, {'a long run' if reason is True else reason}" if reason else "STALE"
        age += f": {len(changed)} of its modules changed"
    return f"{path.stem}: {date}, {commit}: {age}", changed


def print_ages(*names: str) -> None:
    """Print the age of all results files; with ``names``, of these, and their changed modules."""
    for path in sorted(harness.RESULTS.glob("*.jsonl")):
        if path.stem in names or not names:
            line, changed = describe_age(path)
            print(line, *(changed if names else ()), sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="check the lists of modules, no more")
    parser.add_argument("names", nargs="*", help="results files, by default all")
    flags = parser.parse_args()
    if not flags.smoke:
        print_ages(*flags.names)
        return
    for path in sorted(harness.RESULTS.glob("*.jsonl")):
        print(
            f"{path.stem}: measures {len(measured_modules(harness.script_of(path.stem)))} modules"
        )


if __name__ == "__main__":
    main()
