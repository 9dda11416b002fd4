"""Files and folders of the packages stay small enough to read."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["bilevel", "ntk"])
def test_no_module_has_more_than_500_lines(package):
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / package).rglob("*.py")
    }
    assert len(lines) > 50
    assert {path: count for path, count in lines.items() if count > 500} == {}


@pytest.mark.parametrize("package", ["bilevel", "ntk"])
def test_no_folder_has_more_than_20_modules(package):
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    modules = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in modules.items() if count > 20} == {}
