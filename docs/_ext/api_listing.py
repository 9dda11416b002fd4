"""The directive ``public``: a table of public names of a module, followed by their entries.

    ```{public} bilevel
    hypergradient
    search
    ```

Without names, the directive lists all of ``__all__``.

tests/repository/test_docs.py reads these lists and fails if a public name is in none of them. The
directive ``scores`` does the same for the built-in scores. It takes their names and table from
their registry.
"""

import functools
import importlib
import inspect
import pathlib
import re
import types
import typing

from docutils.parsers.rst.states import Inliner
from sphinx.domains.python import PyObject
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

from ntk.scores.registry import builtin_score_names, score_description

API = pathlib.Path(__file__).parents[1] / "api"


class Public(SphinxDirective):
    """The directive ``public``: a table of names, then their entries."""

    required_arguments = 1
    has_content = True

    def run(self):
        """Return the nodes, made by Sphinx's own directives."""
        module = self.arguments[0]
        names = "\n".join(self.content).split() or importlib.import_module(module).__all__
        table = [".. autosummary::", "", *(f"   {name}" for name in names), ""]
        return _parsed_listing(self, module, table, names)


class Scores(SphinxDirective):
    """The directive ``scores``: a table of the built-in scores, then their entries."""

    def run(self):
        """Return the nodes, made by Sphinx's own directives."""
        names = builtin_score_names()
        rows = [("score", "formula", "better", "gradients", "batch norm")]
        for name in names:
            about = score_description(name)
            better = "smaller" if about.smaller_is_better else "larger"
            rows.append(
                (f":func:`{name}`", about.formula, better, about.gradients, about.batch_norm)
            )
        table = [".. list-table::", "   :header-rows: 1", ""]
        for first, *others in rows:
            table += [f"   * - {first}", *(f"     - {cell}" for cell in others)]
        return _parsed_listing(self, "ntk.scores", [*table, ""], names)


def _parsed_listing(directive, module, table, names):
    """Parse a table, followed by the entries of the ``names`` of a module."""
    listing = [".. currentmodule:: " + module, "", *table]
    for name in names:
        listing += _entry(name, getattr(importlib.import_module(module), name))
    return directive.parse_text_to_nodes("\n".join(["```{eval-rst}", *listing, "```"]))


def _entry(name, thing):
    if inspect.isclass(thing) and not isinstance(thing, types.GenericAlias):
        return [f".. autoclass:: {name}", "   :members:", ""]
    if inspect.isroutine(thing) or hasattr(thing, "__wrapped__"):
        return [f".. autofunction:: {name}", ""]
    return [f".. autodata:: {name}", ""]


def _skip_fields(app, what, name, thing, skip, options):
    """Skip the fields of a named tuple: its section of attributes describes them."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def _no_docstring_of_the_type(app, what, name, thing, options, lines):
    """Clear the docstring of a constant. Python would show the docstring of its type."""
    if what == "data" and inspect.getdoc(thing) == inspect.getdoc(type(thing)):
        lines.clear()


def _fields_told_in_comments(app, what, name, thing, options, lines):
    """Describe a record's fields by their trailing comments, if it has no section of attributes."""
    fields = getattr(thing, "_fields", ()) or getattr(thing, "__dataclass_fields__", ())
    if what != "class" or not fields or "Attributes" in lines:
        return
    source = inspect.getsource(thing)
    comments = {
        field: re.search(rf"^    {field}: .*#\s(.*)$", source, re.MULTILINE) for field in fields
    }
    if any(comments.values()):
        lines += ["", "Attributes", "----------"]
        for field, comment in comments.items():
            lines += [field, f"    {comment[1] if comment else ''}"]
        lines.append("")


@functools.cache
def _listed():
    """Return the classes that have an entry in the API pages."""
    text = "\n".join(path.read_text() for path in API.glob("*.md"))
    listings = re.findall(r"```\{public\} (\S+)\n(.*?)```", text, re.DOTALL)
    names = [(module, name) for module, names in listings for name in names.split()]
    return {getattr(importlib.import_module(module), name) for module, name in names}


def _records(function):
    """Return the classes of `bilevel` and `ntk` that a function returns and that have no entry."""
    try:
        result = typing.get_type_hints(inspect.unwrap(function)).get("return")
    except (NameError, TypeError):
        return []
    options = typing.get_args(result) if isinstance(result, types.UnionType) else [result]
    ours = [
        r for r in options if inspect.isclass(r) and r.__module__.startswith(("bilevel", "ntk"))
    ]
    return [record for record in ours if record not in _listed()]


def _described_record(record):
    """Return a record's text after the first line, its fields and its methods, as lines."""
    lines = inspect.getdoc(record).split("\n")[1:]
    _fields_told_in_comments(None, "class", None, record, None, lines)
    text, _, attributes = "\n".join(lines).partition("Attributes\n----------\n")
    lines = [line for line in text.split("\n") if not line.startswith(">>>")]
    for line in attributes.split("\n"):
        if re.match(r"[A-Z]\w+$", line):  # the next section
            break
        name, _, kind = line.partition(" : ")
        field = f"- ``{name}``" + (f" : {kind}" if kind else "")
        lines += [field] if line[:1].strip() else [f"  {line}".rstrip()]
    for name, method in vars(record).items():
        if inspect.isfunction(method) and name[0] != "_":
            first = inspect.getdoc(method).split("\n")[0]
            lines += [f"- ``{name}{_parameters(method)}``", f"  {first}"]
    return lines


def _parameters(method):
    names = [p for p in inspect.signature(method).parameters if p != "self"]
    return f"({', '.join(names)})"


def _records_in_returns(app, what, name, thing, options, lines):
    """Insert the fields of records without an entry into the section "Returns" of a function."""
    if what != "function" or "Returns" not in lines:
        return
    start = lines.index("Returns") + 2
    ends = [i for i in range(start, len(lines)) if re.match(r"-{3,}$", lines[i])]
    end = ends[0] - 1 if ends else len(lines)
    while not lines[end - 1].strip():
        end -= 1
    added = [line for record in _records(thing) for line in ["", *_described_record(record)]]
    if end == start + 1:  # a type without a description: the record's description follows directly
        added = added[next((i for i, line in enumerate(added) if line), 0) :]
    lines[end:end] = [f"    {line}".rstrip() for line in [*added, ""]]


def _formulas_as_written(app, what, name, thing, options, lines):
    """Show an indented block under a paragraph literally: it is a formula."""
    shown_lines, before = [], ""
    for line, last in zip(lines, ["", *lines], strict=False):
        starts = line.startswith("    ") and not last.strip()
        paragraph = before and not before.startswith((" ", ".. ", "- ", "* "))
        if starts and paragraph and not before.endswith("::"):
            shown_lines += [".. code-block:: text", ""]
        shown_lines.append(line)
        before = line or before
    lines[:] = shown_lines


def _elsewhere(app, env, node, content):
    """Resolve a reference to a name that has a single entry, in whichever module."""
    last = node.get("reftarget", "").rpartition(".")[2]
    objects = env.domains["py"].objects
    matching = [name for name in objects if name.rpartition(".")[2] == last]
    if node.get("refdomain") != "py" or len(matching) != 1:
        return None
    entry = objects[matching[0]]
    place = node["refdoc"], entry.docname, entry.node_id
    return make_refnode(app.builder, *place, content, matching[0])


def _bar(inliner, match, lineno):
    """Return a bar as text: docstrings contain ``|x|`` and no substitutions."""
    return match.string[: match.end()], [], match.string[match.end() :], []


def setup(app):
    """Register the directives and the hooks for docstrings."""
    Inliner.dispatch = Inliner.dispatch | {"|": _bar}
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.add_directive("public", Public)
    app.add_directive("scores", Scores)
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("autodoc-process-docstring", _no_docstring_of_the_type)
    app.connect("missing-reference", _elsewhere)
    # This runs before napoleon, which has priority 500.
    app.connect("autodoc-process-docstring", _fields_told_in_comments, priority=300)
    app.connect("autodoc-process-docstring", _records_in_returns, priority=350)
    app.connect("autodoc-process-docstring", _formulas_as_written, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
