"""The notebooks' first cells are those that notebooks/first_cells.py writes."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))

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


def test_every_address_of_the_repository_is_the_one_that_is_set():
    notebook_by_address = {}
    for path in (*NOTEBOOKS, *ROOT.glob("*.*"), *(ROOT / "docs").glob("*.md")):
        if path.suffix in (".ipynb", ".md", ".toml", ".cff"):
            for address in re.findall(r"github(?:\.com)?/[\w.<>-]+/bilevel\b", path.read_text()):
                notebook_by_address[address.partition("/")[2]] = path.name
    named = {(first_cells.repository() or "").removeprefix("https://github.com/")}
    assert set(notebook_by_address) <= named, notebook_by_address


@pytest.mark.parametrize("missing", [(), ("bilevel",), ("matplotlib",)])
@pytest.mark.parametrize("address", [None, NAMED])
def test_the_first_cells_install_what_is_missing(missing, address, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find(name)
    )
    head, cell = first_cells.first_cells("# A title", "x.ipynb", address)
    if address is None:
        assert head.startswith("# A title\n\n") and "wheel" in head
        assert "http" not in head + cell and "bilevel-*.whl" in cell
    installed = []
    exec(re.sub("%pip install -q (.*)", r"installed.append('\1')", cell), {"installed": installed})
    bilevel = "matplotlib bilevel-*.whl" if address is None else f'"bilevel[plots] @ git+{NAMED}"'
    others = ["matplotlib"] * ("matplotlib" in missing)
    assert installed == ([bilevel] if "bilevel" in missing else others)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_one_output_for_each_stream(path):
    for cell in nbformat.read(path, as_version=4).cells:
        streams = [x.name for x in cell.get("outputs", []) if x.output_type == "stream"]
        assert len(streams) == len(set(streams))


PROGRESS = """
import sys
sys.modules["ipywidgets"] = None  # not installed
import optax
from IPython.display import DisplayHandle
import bilevel

texts, update = [], DisplayHandle.update

def recorded(handle, data, **options):
    texts.append(data["text/plain"])
    update(handle, data, **options)

DisplayHandle.update = recorded

def search(**options):
    problem = bilevel.Problem(lambda w, a, b: (w - a) ** 2, lambda w, a, b: (w - b) ** 2)
    arguments = problem, bilevel.implicit(), optax.sgd(0.1), 0.0, 0.0, 0.0, 1.0
    bilevel.search(*arguments, steps=3, chunk=1, **options)
"""


@pytest.mark.long
def test_progress_in_a_notebook_is_one_text_that_updates():
    """Without ipywidgets, which rich would ask for in a warning above an empty box."""
    cells = [
        PROGRESS,
        "search()",
        "bilevel.runs.progress._NOTEBOOK_SECONDS = 0.0\nsearch(progress=True)",
        "search(progress=False)",
        "print(*(text.split('/3')[0][-1] for text in texts[-4:]))",
    ]
    cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[0] == outputs[3] == []
    for (output,) in outputs[1:3]:
        assert output.output_type == "display_data" and set(output.data) == {"text/plain"}
        text = output.data["text/plain"]
        assert re.fullmatch(r"search ━+ 3/3 outer 0.4096  lower 0 0:00:00", text), text
    assert outputs[4][0].text == "1 2 3 3\n"  # the last is drawn when the search has ended
