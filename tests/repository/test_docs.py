"""Every public name has an entry in the API reference, and every entry stands for a name."""

import importlib
import pathlib
import re
import types

import bilevel
import ntk
from ntk.scores.registry import builtin_score_names

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# Public too, but found by their own names only.
MODULES = ("bilevel.solvers", "bilevel.spaces.nasbench201.judging", "bilevel.stochastic")


def entries():
    """The names in the directives ``public`` and ``scores`` of docs/api, dotted.

    A directive ``public`` without names has all of a module.
    """
    text = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    listings = re.findall(r"```\{public\} (\S+)\n(.*?)```", text, re.DOTALL)
    scores = [f"ntk.scores.{name}" for name in builtin_score_names()] * text.count("```{scores}")
    return scores + [
        f"{module}.{name}"
        for module, names in listings
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


def test_at_most_260_names_are_public():
    assert len(entries()) <= 260


def test_no_name_has_two_entries():
    listed = entries()
    assert sorted({name for name in listed if listed.count(name) > 1}) == []
