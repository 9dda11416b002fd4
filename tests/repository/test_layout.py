"""Files and folders stay small enough to read, names explain themselves, and prose is plain."""

import ast
import collections
import io
import json
import pathlib
import re
import tokenize

import pytest
from helpers import ROOT, run

FILES = sorted(p for package in ("bilevel", "ntk") for p in (ROOT / package).rglob("*.py"))
KINDS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
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
        inner = f"{where}.{node.name}".lstrip(".") if isinstance(node, KINDS) else where
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
    nodes = [node for tree in trees.values() for node in tree.body if isinstance(node, KINDS)]
    counts = collections.Counter(node.name.lstrip("_") for node in nodes)
    names = sorted(name for name, count in counts.items() if count > 1)
    assert len(names) <= REPEATED, names


# Phrases that second-language readers stumble over.
START = r"(?:^|(?<=[.:;!?] ))"
PHRASES = [
    START + r"(?:Of|Where|Not|Nor) [a-z]",
    START + r"What [a-z][^?]*$",
    START + r"(?:For|By|To|From) (?:what|which|that)\b",
    r"\bAs (?:that of |of |in )?:(?:func|class|mod|meth):",
    r"\bwhat (?:is|it|they|a|an|the|was|there|comes)\b",
    r"\b(?:of which|in which|whose)\b",
    r"\b(?:held|hold|holds) against\b",
    r"\bin (?:the )?place of\b",
    r"\b(?:beside|told|tells?|wants|dear|dearer)\b",
    r"\bas (?:it|they|these|those) (?:is|are|was|were|has|have)\b",
    r"\b(?:goes|go|went|going) on\b",
    r"\bof (?:its|their|his|one's|a user's|the user's) own\b",
    r"\b(?:is|are|was|were|has|have) (?:no|none)\b",
    r"\b(?:but for|so many|so much|a text)\b",
    r"\b(?:comes?|came) to\b",
    r"\bless (?:the|its|that|a|those)\b",
    r"\b(?:makes?|made|making) of\b",
    r"\bmend(?:s|ed|ing)?\b",
    r"\b(?:lies|lie|stands|stand|stood) (?:in|at|on|there|here|behind|still)\b",
    r"\bwhole numbers?\b",
    r"(?<![\w.])\.\d+ %",
]
HARD = re.compile("|".join(PHRASES))
# Most hits per 10,000 words; other libraries of the field have 7 to 16.
MOST = {"code": 20, "docs": 20, "tests": 40}
PATTERNS = {
    "code": ["bilevel/*.py", "ntk/*.py"],
    "docs": ["README.md", "CONTRIBUTING.md", "docs/*.md", "notebooks/*.ipynb"],
    "tests": ["tests/*.py", "benchmarks/*.py", "examples/*.py"],
}


def lines_of_code(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            lines = (ast.get_docstring(node) or "").splitlines()
            yield from (line for line in lines if not line.strip().startswith((">>>", "...")))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def lines_of_markdown(source):
    """Yield the lines outside code blocks and tables."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", source)
    return (line for line in text.splitlines() if not line.startswith(("|", "    ", "<!--")))


def lines_of_notebook(source):
    cells = (cell for cell in json.loads(source)["cells"] if cell["cell_type"] == "markdown")
    return lines_of_markdown("\n\n".join("".join(cell["source"]) for cell in cells))


LINES = {".md": lines_of_markdown, ".ipynb": lines_of_notebook, ".py": lines_of_code}


@pytest.mark.parametrize("part", MOST)
def test_the_prose_is_plain(part):
    hits, words = [], 0
    for name in run("git", "ls-files", *PATTERNS[part], cwd=ROOT).split():
        source = (ROOT / name).read_text()
        for line in LINES[pathlib.Path(name).suffix](source):
            words += len(line.split())
            hits += [f"{name}: {line.strip()}" for _ in HARD.finditer(line.strip())]
    assert 1e4 * len(hits) / words <= MOST[part], "\n".join(hits)
