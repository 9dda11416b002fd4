"""Every public name has an entry in the API reference and types, and every entry has a name."""

import ast
import importlib
import inspect
import operator
import re
import types

import pytest
from helpers import ROOT

import bilevel
import ntk
from ntk.scores.registry import builtin_score_names

DOCS = ROOT / "docs"
# Public too, but found by their own names only.
MODULES = ("bilevel.solvers", "bilevel.spaces.nasbench201.judging", "bilevel.stochastic")


def entries():
    """The dotted names in docs/api; a directive ``public`` without names has all of a module."""
    text = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    scores = [f"ntk.scores.{name}" for name in builtin_score_names()] * text.count("```{scores}")
    return scores + [
        f"{module}.{name}"
        for module, names in re.findall(r"```\{public\} (\S+)\n(.*?)```", text, re.DOTALL)
        for name in names.split() or importlib.import_module(module).__all__
    ]


def public(module):
    """The names in ``__all__`` of a module, or else its definitions; submodules included."""
    own = [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
    ]
    for name in getattr(module, "__all__", own):
        thing = getattr(module, name)
        if isinstance(thing, types.ModuleType):
            yield from public(thing)
        else:
            yield f"{module.__name__}.{name}"


def thing(dotted):
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_has_an_entry():
    """An entry under another name is enough: ``bilevel.argmax``, ``discretize.argmax``."""
    listed = entries()
    shown = {id(thing(name)) for name in listed}
    modules = [bilevel, ntk, *map(importlib.import_module, MODULES)]
    names = {name for module in modules for name in public(module)}
    assert sorted(n for n in names - set(listed) if id(thing(n)) not in shown) == []


def test_at_most_260_names_are_public_and_none_has_two_entries():
    listed = entries()
    assert len(listed) <= 260
    assert sorted({name for name in listed if listed.count(name) > 1}) == []


CALLED = ("__call__", "__getstate__", "__setstate__", "__reduce__")


def public_functions(package):
    """The functions of the API reference, and the methods of its classes."""
    for listed in entries():
        if listed.split(".")[0] != package.__name__:
            continue
        value = thing(listed)
        if inspect.isclass(value):
            for method, function in vars(value).items():
                public = method[0] != "_" or method in CALLED
                # Without what flax, dataclasses and NamedTuple add.
                own = getattr(function, "__module__", None) == value.__module__
                if public and own and inspect.isfunction(function):
                    yield f"{listed}.{method}", function
        elif inspect.isfunction(inspect.unwrap(value)):
            yield listed, value


@pytest.mark.parametrize("package", [bilevel, ntk])
def test_parameters_and_results_of_public_functions_have_types(package):
    count, missing = 0, []
    for name, function in public_functions(package):
        signature = inspect.signature(function)
        hints = {p.name: p.annotation for p in signature.parameters.values() if p.name != "self"}
        hints["return"] = signature.return_annotation
        missing += [f"{name}: {part}" for part, hint in hints.items() if hint is signature.empty]
        count += 1
    assert count > 50 and not missing, "\n".join(missing)


# The tables of theorems are between the summary and the experiments.
_, TEXT = (DOCS / "theory.md").read_text().split("\n## All theorems")
TEXT, _ = TEXT.split("\n# Experiments")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith(("| paper", "| ---"))
]
PACKAGES = types.SimpleNamespace(bilevel=bilevel, ntk=ntk)
PAPERS = {
    "Oymak": "Theorem 1 (2)|Theorem 1 (3)|Theorem 1 (4)|Proposition 1|Lemma 1|Lemma 2|Theorem 2"
    "|Theorem 3|Theorem 4|Definition 1|Assumption 3",
    "Roberts": "Theorem 1|Lemma 2|Condition 3|Theorem 4|Lemma 5|Condition 6|Theorem 7",
    "Khodak": "Definition 3.1|Theorem 3.1|Theorem A.1|Theorem A.2|Corollary A.1|Corollary 3.1 (A.2)"
    "|Corollary 3.2 (A.3)|Corollary A.4",
    "Zhu": "Lemma 1|Theorem 1|Theorem 2|Theorem 3",
}


@pytest.mark.parametrize(("paper", "function", "status", "test"), ROWS, ids=lambda cell: cell[:40])
def test_every_row_names_a_public_function_and_a_test(paper, function, status, test):
    names = re.findall(r"`([\w.]+)`", function)
    assert names and all(callable(operator.attrgetter(name)(PACKAGES)) for name in names)
    assert status.split()[0].strip(",:;") in ("exact", "corrected", "as", "proved", "rate")
    (path, name), *_ = re.findall(r"`(test_\w+\.py)::(\w+)`", test)
    (source,) = DOCS.parent.glob(f"tests/*/{path}")
    nodes = ast.walk(ast.parse(source.read_text()))
    assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("paper", PAPERS)
def test_nothing_in_the_papers_is_missing(paper):
    (section,) = re.findall(rf"## {paper}\b.*?(?=\n## |\Z)", TEXT, re.DOTALL)
    claims = " ".join(re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE))
    assert not [claim for claim in PAPERS[paper].split("|") if claim not in claims]
