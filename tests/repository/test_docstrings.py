"""Docstrings of names in the API reference document parameters, results and errors."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from helpers import ROOT
from test_docs import entries, thing

SOURCES = sorted([*(ROOT / "bilevel").rglob("*.py"), *(ROOT / "ntk").rglob("*.py")])
CHECKS = "bilevel.internal.checks", "ntk.internal.checks"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def calls(node: ast.AST) -> set[str]:
    """The names of called functions: ``f`` for ``f(x)``, ``checks.f`` for ``checks.f(x)``."""
    functions = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
    return {ast.unparse(f) for f in functions if isinstance(f, ast.Name | ast.Attribute)}


def raises(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Raise) for n in ast.walk(node))


@cache
def raising_checks() -> set[str]:
    """The checks of arguments that raise, directly or through each other."""
    paths = (ROOT / f"{name.replace('.', '/')}.py" for name in CHECKS)
    functions = {n.name: n for p in paths for n in parsed(p).body if isinstance(n, Function)}
    raising = {name for name, node in functions.items() if raises(node)}
    while more := {name for name, f in functions.items() if calls(f) & raising} - raising:
        raising |= more
    return raising


@cache
def checks_imported(path: Path) -> frozenset[str]:
    known = set()
    for n in ast.walk(parsed(path)):
        for alias in n.names if isinstance(n, ast.ImportFrom) else ():
            name = alias.asname or alias.name
            if n.module in CHECKS and alias.name in raising_checks():
                known.add(name)
            if f"{n.module}.{alias.name}" in CHECKS:
                known |= {f"{name}.{check}" for check in raising_checks()}
    return frozenset(known)


def documented() -> list[tuple[str, Path, Function | ast.ClassDef]]:
    """Every name of the API reference: the name, its module's file, and its node there."""
    nodes_by_name = []
    for name in entries():
        defined = inspect.unwrap(thing(name))
        if not (inspect.isclass(defined) or inspect.isfunction(defined)):
            continue
        path = Path(inspect.getsourcefile(defined))
        nodes = (n for n in parsed(path).body if isinstance(n, Function | ast.ClassDef))
        nodes_by_name += [(name, path, n) for n in nodes if n.name == defined.__qualname__]
    return nodes_by_name


def called(node: Function | ast.ClassDef) -> list[Function]:
    """The functions that a call of the object runs; for a class, its constructors."""
    if isinstance(node, Function):
        return [node]
    methods = (n for n in node.body if isinstance(n, Function))
    return [n for n in methods if n.name in ("__init__", "__post_init__")]


@cache
def docstrings() -> list[tuple[str, str]]:
    """Every docstring, also of commands, and every text under a field of a class."""
    return [
        (f"{path.relative_to(ROOT).as_posix()}:{n.lineno}", text)
        for path in SOURCES
        for n in ast.walk(parsed(path))
        if isinstance(n, ast.Expr) and isinstance(text := getattr(n.value, "value", None), str)
    ]


def test_public_functions_say_what_they_raise():
    """Those that raise, or call a check of arguments: in a section of their docstring."""
    missing = [
        place
        for place, path, node in documented()
        if any(raises(part) or calls(part) & checks_imported(path) for part in called(node))
        and not re.search(r"^Raises\n-+$", ast.get_docstring(node) or "", re.MULTILINE)
    ]
    assert not missing


@pytest.mark.parametrize(
    "fault",
    [
        r"\A\s*Of ",  # instead of the thing that it describes
        r"^\s*(Parameters|Returns|Raises)\b.*:? as (in )?:\w+:",  # a pointer instead of a section
        # The line below a heading is a line of its own.
        r"^\s*(Parameters|Returns|Raises|Notes|References|Examples) -{3,}",
    ],
)
def test_no_docstring_has_a_fault(fault):
    pattern = re.compile(fault, re.MULTILINE)
    assert not [place for place, text in docstrings() if pattern.search(text)]
