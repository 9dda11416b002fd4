"""Every measured table of README.md and docs/ is what its results file says."""

import pathlib
import subprocess
import sys

import pytest

from benchmarks import harness
from tools.tables import AGE, MARKED

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tools/tables.py"
TABLE = "<!-- table: hypergradients/memory.report -->\n{}<!-- end of table -->\n"


def tables(*flags):
    # A separate process, because some benchmarks change the precision.
    return subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True)


def test_tables_state_the_commit_of_their_rows():
    for path in sorted(ROOT.glob("docs/*.md")):
        for block in MARKED.finditer(path.read_text()):
            rows = harness.read(harness.RESULTS / f"{block['file'] or block['script']}.jsonl")
            if rows:
                line = AGE.search(block["table"])
                assert line, f"{path.name}, {block['function']}: run `make tables`"
                assert line[1] in {row.get("commit") for row in rows}, path


@pytest.mark.slow
def test_every_table_is_made_of_its_results():
    done = tables("--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_table_that_was_typed_is_found_and_written_anew(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n\n" + TABLE.format("| temporaries | 1 MB |\n") + "\nafter\n")
    assert tables("--check", page).returncode == 1
    assert "1 MB" in page.read_text()
    assert tables(page).returncode == 0
    text = page.read_text()
    assert "| lax.scan, reverse |" in text and "1 MB" not in text
    assert text.startswith("before\n\n<!--") and text.endswith("-->\n\nafter\n")
    assert tables("--check", page).returncode == 0


def test_a_table_without_its_comments_raises(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: hypergradients/memory.report a b -->\n")
    done = tables(page)
    assert done.returncode == 1 and "page.md: expected each table's comments" in done.stderr
