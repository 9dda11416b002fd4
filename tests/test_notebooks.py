"""The notebooks' first cells are those that notebooks/first_cells.py writes."""

import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))

import first_cells

ROOT = first_cells.HERE.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMED = "https://github.com/someone/something"


def sources(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cells_are_up_to_date_and_the_rest_is_left_alone(path, tmp_path):
    copy = Path(shutil.copy(path, tmp_path))
    first_cells.write(copy, first_cells.repository())
    assert copy.read_bytes() == path.read_bytes()
    first_cells.write(copy, NAMED)
    before, after = sources(path), sources(copy)
    assert after[2:] == before[2:] and after[0].splitlines()[0] == before[0].splitlines()[0]
    assert f"/github/someone/something/blob/main/notebooks/{path.name})" in after[0]
    assert f"git+{NAMED}" in after[1] and "wheel" not in after[0]
    first_cells.write(copy, first_cells.repository())
    assert copy.read_bytes() == path.read_bytes()


def test_without_a_repository_nothing_points_at_one():
    head, install = first_cells.first_cells("# A title", "x.ipynb", None)
    assert head.startswith("# A title\n\n") and "wheel" in head
    assert "http" not in head + install and "bilevel-*.whl" in install


def test_every_address_of_the_repository_is_the_one_that_is_set():
    """An address of bilevel on GitHub, be it a placeholder, is wrong in every file but for that."""
    found = {}
    for path in (*NOTEBOOKS, *ROOT.glob("*.*"), *(ROOT / "docs").glob("*.md")):
        if path.suffix in (".ipynb", ".md", ".toml", ".cff"):
            for address in re.findall(r"github(?:\.com)?/[\w.<>-]+/bilevel\b", path.read_text()):
                found[address.partition("/")[2]] = path.name
    repository = first_cells.repository() or ""
    assert set(found) <= {repository.removeprefix("https://github.com/")}, found
