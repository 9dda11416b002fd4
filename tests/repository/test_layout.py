"""Files and folders of the packages stay small enough to read, and names explain themselves."""

import ast
import collections
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(p for package in ("bilevel", "ntk") for p in (ROOT / package).rglob("*.py"))
VAGUE = 10  # functions that call a variable of theirs `found`, at most
REPEATED = 30  # names of top-level functions and classes that are defined more than once, at most


def test_no_module_has_more_than_500_lines_and_no_folder_more_than_20_modules():
    assert len(FILES) > 100
    assert [path for path in FILES if len(path.read_text().splitlines()) > 500] == []
    modules = collections.Counter(path.parent for path in FILES)
    assert [folder for folder, count in modules.items() if count > 20] == []


def vague(tree: ast.AST, name: str, where: str = "") -> set[str]:
    """The functions that bind ``name``, as a parameter or a variable."""
    functions = set()
    match tree:
        case ast.Name(id=bound, ctx=ast.Store()) | ast.arg(arg=bound) if bound == name:
            functions.add(where)
    for node in ast.iter_child_nodes(tree):
        inner = where
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{where}.{node.name}".lstrip(".")
        functions |= vague(node, name, inner)
    return functions


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in FILES}


def test_variables_say_what_they_hold_and_not_that_they_were_found(trees):
    functions = [f"{path}: {f}" for path, tree in trees.items() for f in vague(tree, "found")]
    assert len(functions) <= VAGUE, functions


def test_few_names_are_defined_in_more_than_one_place(trees):
    """Leading underscores are ignored."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    counts = collections.Counter(
        node.name.lstrip("_")
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, kinds)
    )
    names = sorted(name for name, count in counts.items() if count > 1)
    assert len(names) <= REPEATED, names
