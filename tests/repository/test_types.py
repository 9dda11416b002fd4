"""Every public function says the types of its parameters and of its result."""

import importlib
import inspect
import pkgutil

import pytest

import bilevel
import ntk

CALLED = ("__call__", "__getstate__", "__setstate__", "__reduce__")


def public_modules(package):
    yield package
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "._" not in found.name:
            yield importlib.import_module(found.name)


def functions(module, package):
    """Public functions, and the methods of public classes, that the package defines."""
    listed = getattr(module, "__all__", ())
    for name in sorted({*listed, *(n for n in vars(module) if n[0] != "_")}):
        value = getattr(module, name)
        home = getattr(value, "__module__", None) or ""
        if not home.startswith(package.__name__) or (
            home != module.__name__ and name not in listed
        ):
            continue
        if inspect.isclass(value):
            for method, function in vars(value).items():
                public = method[0] != "_" or method in CALLED
                # Without what flax, dataclasses and NamedTuple add.
                own = getattr(function, "__module__", None) == home
                if public and own and inspect.isfunction(function):
                    yield f"{module.__name__}.{name}.{method}", function
        elif inspect.isfunction(inspect.unwrap(value)):
            yield f"{module.__name__}.{name}", value


@pytest.mark.parametrize("package", [bilevel, ntk])
def test_parameters_and_results_of_public_functions_have_types(package):
    count, missing = 0, []
    for module in public_modules(package):
        for name, function in functions(module, package):
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
    assert count > 200 and not missing, "\n".join(missing)
