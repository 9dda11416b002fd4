"""Docstrings document the parameters, results and errors of public functions.

Names of the API reference have numpydoc sections; functions behind them need a sentence only.
"""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

from test_docs import entries, thing

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "bilevel").rglob("*.py"), *(ROOT / "ntk").rglob("*.py")])
CHECKS = {
    "bilevel.internal.checks": "bilevel/internal/checks.py",
    "ntk.internal.checks": "ntk/internal/checks.py",
}

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


def those_that_raise(functions: dict[str, ast.AST], known: set[str] = frozenset()) -> set[str]:
    """Which functions of a module raise, themselves or by calling each other or the ``known``."""
    raising = {name for name, node in functions.items() if raises(node) or calls(node) & known}
    while more := {n for n, f in functions.items() if calls(f) & raising} - raising:
        raising |= more
    return raising


def top_functions(path: Path) -> dict[str, ast.AST]:
    return {n.name: n for n in parsed(path).body if isinstance(n, Function)}


@cache
def check_functions() -> dict[str, set[str]]:
    """By module, the names of the checks that refuse something."""
    shared = those_that_raise(top_functions(ROOT / CHECKS["ntk.internal.checks"]))
    own = those_that_raise(top_functions(ROOT / CHECKS["bilevel.internal.checks"]), shared)
    return {"ntk.internal.checks": shared, "bilevel.internal.checks": own | shared}


@cache
def checks_imported(path: Path) -> frozenset[str]:
    """The checks by the names that a module has for them."""
    known = set()
    for n in ast.walk(parsed(path)):
        if not isinstance(n, ast.ImportFrom):
            continue
        for alias in n.names:
            name = alias.asname or alias.name
            if alias.name in check_functions().get(n.module, ()):
                known.add(name)
            for check in check_functions().get(f"{n.module}.{alias.name}", ()):
                known.add(f"{name}.{check}")
    return frozenset(known)


def checks_called(path: Path, node: ast.AST) -> set[str]:
    return calls(node) & checks_imported(path)


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


def docstrings() -> list[tuple[str, str]]:
    """Every docstring, also of commands, and every text under a field of a class."""
    places = []
    for path in SOURCES:
        for n in ast.walk(parsed(path)):
            if isinstance(n, ast.Expr) and isinstance(text := getattr(n.value, "value", None), str):
                places.append((f"{path.relative_to(ROOT).as_posix()}:{n.lineno}", text))
    return places


def test_public_functions_say_what_they_raise():
    """Those that raise, or call a check of arguments: in a section of their docstring."""
    missing = [
        place
        for place, path, node in documented()
        if any(raises(part) or checks_called(path, part) for part in called(node))
        and not re.search(r"^Raises\n-+$", ast.get_docstring(node) or "", re.MULTILINE)
    ]
    assert not missing


def test_docstrings_begin_with_what_they_describe():
    assert not [place for place, text in docstrings() if text.lstrip().startswith("Of ")]


def test_docstrings_have_sections_instead_of_pointers():
    pointer = re.compile(r"^\s*(Parameters|Returns|Raises)\b.*:? as (in )?:\w+:", re.MULTILINE)
    assert not [place for place, text in docstrings() if pointer.search(text)]


def test_the_line_below_a_heading_is_a_line_of_its_own():
    headings = "Parameters|Returns|Raises|Notes|References|Examples"
    flattened = re.compile(rf"^\s*({headings}) -{{3,}}", re.MULTILINE)
    assert not [place for place, text in docstrings() if flattened.search(text)]
