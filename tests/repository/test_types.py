"""Every public function says the types of its parameters and of its result."""

import importlib
import inspect

import pytest
from test_docs import entries

import bilevel
import ntk

CALLED = ("__call__", "__getstate__", "__setstate__", "__reduce__")


def public_functions(package):
    """The functions of the API reference, and the methods of its classes."""
    for listed in entries():
        module, _, name = listed.rpartition(".")
        if module.split(".")[0] != package.__name__:
            continue
        value = getattr(importlib.import_module(module), name)
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
        empty = [
            p.name
            for p in signature.parameters.values()
            if p.annotation is p.empty and p.name != "self"
        ]
        if signature.return_annotation is signature.empty:
            empty.append("return")
        count += 1
        missing += [f"{name}: {parameter}" for parameter in empty]
    assert count > 50 and not missing, "\n".join(missing)
