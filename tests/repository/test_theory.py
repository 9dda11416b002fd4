"""The table of theorems names functions and tests that exist."""

import ast
import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# The tables of theorems are between the summary and the experiments.
_, TEXT = (ROOT / "docs" / "theory.md").read_text().split("\n## All theorems")
TEXT, _ = TEXT.split("\n# Experiments")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith(("| paper", "| ---"))
]
PAPERS = {
    "Oymak": "Theorem 1 (2)|Theorem 1 (3)|Theorem 1 (4)|Proposition 1|Lemma 1|Lemma 2|Theorem 2"
    "|Theorem 3|Theorem 4|Definition 1|Assumption 3",
    "Roberts": "Theorem 1|Lemma 2|Condition 3|Theorem 4|Lemma 5|Condition 6|Theorem 7",
    "Khodak": "Definition 3.1|Theorem 3.1|Theorem A.1|Theorem A.2|Corollary A.1|Corollary 3.1 (A.2)"
    "|Corollary 3.2 (A.3)|Corollary A.4",
    "Zhu": "Lemma 1|Theorem 1|Theorem 2|Theorem 3",
}


def resolve(name):
    """The object that a dotted name stands for."""
    parts = name.split(".")
    target = importlib.import_module(parts[0])
    for part in parts[1:]:
        target = getattr(target, part)
    return target


@pytest.mark.parametrize(("paper", "function", "status", "test"), ROWS, ids=lambda cell: cell[:40])
def test_every_row_names_a_public_function_and_a_test(paper, function, status, test):
    names = re.findall(r"`([\w.]+)`", function)
    assert names and all(callable(resolve(name)) for name in names)
    assert status.split()[0].strip(",:;") in ("exact", "corrected", "as", "proved", "rate")
    (path, name), *_ = re.findall(r"`(test_\w+\.py)::(\w+)`", test)
    (source,) = ROOT.glob(f"tests/*/{path}")
    functions = {
        node.name
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert name in functions


@pytest.mark.parametrize("paper", PAPERS)
def test_nothing_in_the_papers_is_missing(paper):
    (section,) = re.findall(rf"## {paper}\b.*?(?=\n## |\Z)", TEXT, re.DOTALL)
    claims = " ".join(re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE))
    assert not [claim for claim in PAPERS[paper].split("|") if claim not in claims]
