"""Names of the packages explain themselves, and a name stands for one thing."""

import ast
import collections
import pathlib

import pytest

ROOT = next(p for p in pathlib.Path(__file__).parents if (p / "pyproject.toml").exists())
FILES = sorted(p for package in ("bilevel", "ntk") for p in (ROOT / package).rglob("*.py"))

VAGUE = 10  # functions that call a variable of theirs `found`, at most
REPEATED = 30  # names of top-level functions and classes that are defined more than once, at most


def binds(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(id=bound, ctx=ast.Store()) | ast.arg(arg=bound):
            return bound == name
    return False


def vague(tree: ast.AST, name: str, where: str = "") -> set[str]:
    """The functions that bind ``name``, as a parameter or a variable."""
    functions = {where} if binds(tree, name) else set()
    for node in ast.iter_child_nodes(tree):
        inner = where
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{where}.{node.name}".lstrip(".")
        functions |= vague(node, name, inner)
    return functions


def repeated(trees: list[ast.Module]) -> set[str]:
    """The top-level functions and classes that are defined again, leading underscores ignored."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    counts = collections.Counter(
        node.name.lstrip("_") for tree in trees for node in tree.body if isinstance(node, kinds)
    )
    return {name for name, count in counts.items() if count > 1}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in FILES}


def test_variables_say_what_they_hold_and_not_that_they_were_found(trees):
    functions = [f"{path}: {f}" for path, tree in trees.items() for f in vague(tree, "found")]
    assert len(functions) <= VAGUE, functions


def test_few_names_are_defined_in_more_than_one_place(trees):
    names = repeated(list(trees.values()))
    assert len(names) <= REPEATED, sorted(names)
