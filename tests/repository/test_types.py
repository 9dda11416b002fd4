"""Every public function says the types of its parameters and of its result."""

import importlib
import inspect
import pathlib
import re

import pytest

import bilevel
import ntk

DOCS = pathlib.Path(__file__).parents[2] / "docs"
CALLED = ("__call__", "__getstate__", "__setstate__", "__reduce__")


def public_functions(package):
    """The functions of the API reference, and the methods of its classes."""
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    for module, names in re.findall(r"^```\{public\} (\S+)\n(.*?)```", pages, re.M | re.S):
        if module.split(".")[0] != package.__name__:
            continue
        for name in names.split() or importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value):
                for method, function in vars(value).items():
                    public = method[0] != "_" or method in CALLED
                    # Without what flax, dataclasses and NamedTuple add.
                    own = getattr(function, "__module__", None) == value.__module__
                    if public and own and inspect.isfunction(function):
                        yield f"{module}.{name}.{method}", function
            elif inspect.isfunction(inspect.unwrap(value)):
                yield f"{module}.{name}", value


@pytest.mark.parametrize("package", [bilevel, ntk])
def test_parameters_and_results_of_public_functions_have_types(package):
    count, missing = 0, []
    for name, function in public_functions(package):
        signature = inspect.signature(function)
        empty = [
            p.name
            for p in signature.parameters.values()
            if p.annotation is p.empty and p.name != "self"
        ]
        if signature.return_annotation is signature.empty:
            empty.append("return")
        count += 1
        missing += [f"{name}: {parameter}" for parameter in empty]
    assert count > 30 and not missing, "\n".join(missing)
