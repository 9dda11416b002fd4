"""Exceptions and records survive pickle, copy and cloudpickle, as process pools and joblib need."""

import concurrent.futures
import copy
import dataclasses
import functools
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import long_except, trial

import bilevel
import ntk
from bilevel.outer_loop import search_result
from bilevel.runs import records
from ntk import networks as nets


def classes():
    kinds = set()
    for package in (bilevel, ntk):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                values = vars(importlib.import_module(module.name)).values()
                kinds |= {value for value in values if inspect.isclass(value)}
    kinds = {kind for kind in kinds if kind.__module__.split(".")[0] in ("bilevel", "ntk")}
    return sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__))


EXCEPTIONS = [kind for kind in classes() if issubclass(kind, BaseException)]
RECORDS = [k for k in classes() if hasattr(k, "_fields") or dataclasses.is_dataclass(k)]
RECORDS = [kind for kind in RECORDS if not issubclass(kind, nn.Module)]
# These forms copy closures too, e.g. solvers and optimizers.
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "cloudpickle": lambda x: pickle.loads(pytest.importorskip("cloudpickle").dumps(x)),
}
FORMS = COPIES | {
    f"pickle {protocol}": lambda x, protocol=protocol: pickle.loads(pickle.dumps(x, protocol))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
}


def lower(w, alpha, batch):
    return 0.5 * jnp.sum((w - alpha["a"]) ** 2)


def outer(w, alpha, batch):
    return jnp.sum((w - batch) ** 2)


@functools.cache
def searched():
    start = {"a": jnp.zeros(2)}, jnp.zeros(2), jnp.zeros(2), jnp.ones(2)
    args = bilevel.Problem(lower, outer), bilevel.implicit(), optax.adam(0.1), *start
    return bilevel.search(*args, steps=3, diagnostics=True)


class Diverged(bilevel.NonFiniteError):
    """A user's own."""


MADE = {
    bilevel.NonFiniteError: lambda kind: kind(3, "w", searched(), "the reason"),
    search_result.MisplacedError: lambda kind: kind(3, "softmax", searched()),
    bilevel.LostProcessError: lambda kind: kind("process 1 of 2 ended"),
    Diverged: lambda kind: kind(3, "w", searched(), "the reason"),
    records.DamagedError: lambda kind: kind("checkpoint: expected an undamaged step"),
}


def assert_equal(x, y):
    assert jax.tree.structure(x) == jax.tree.structure(y)
    jax.tree.map(np.testing.assert_array_equal, x, y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [*EXCEPTIONS, Diverged], ids=lambda kind: kind.__name__)
def test_every_exception_survives(kind, form):
    error = MADE[kind](kind)  # an exception without an entry there has no test
    error.add_note("a note")
    copied = FORMS[form](error)
    assert type(copied) is kind and str(copied) == str(error) and copied.args == error.args
    assert vars(copied).keys() == vars(error).keys()
    for name, value in vars(error).items():
        assert_equal(vars(copied)[name], value)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_record_survives(kind):
    """With a string in every field, because pickle takes functions only by name."""
    named = hasattr(kind, "_fields")
    names = kind._fields if named else [field.name for field in dataclasses.fields(kind)]
    record = kind._make(names) if named else object.__new__(kind)
    if not named:
        vars(record).update({name: name for name in names})
    for form, copied in FORMS.items():
        again = copied(record)
        assert type(again) is kind, form
        assert [getattr(again, name) for name in names] == list(names), form


def test_named_activations_are_one_object_in_a_process():
    """Kernels know the closed forms of these objects only."""
    for form in FORMS.values():
        assert form(ntk.gelu) is ntk.gelu and form(ntk.relu) is ntk.relu


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", long_except([bilevel.spaba], [lambda: bilevel.implicit(bilevel.lbfgs()), bilevel.spaba])
)
def test_solvers_and_optimizers_survive_cloudpickle(make):
    """They are records of closures, which pickle does not support."""
    start = {"a": jnp.full(2, 0.5)}, jnp.zeros(2), jnp.zeros((4, 2)), jnp.ones((4, 2))

    def searched(pair):
        return bilevel.search(bilevel.Problem(lower, outer), *pair, *start, steps=2).alpha

    pair = make(), optax.chain(optax.sgd(0.1), bilevel.project("box"))
    expected = searched(pair)
    for form in COPIES.values():
        assert_equal(searched(form(pair)), expected)


X = np.random.default_rng(0).normal(size=(5, 3))


def network():
    net = nets.serial(nets.dense(), nets.act([ntk.relu, ntk.tanh], "first"))
    return net, lambda net: (net.names, net.start())


def empirical_operator():
    operator = ntk.EmpiricalOperator(lambda w, x: x @ w, jnp.ones(3), jnp.asarray(X))
    operator @ jnp.ones(5)  # compiles a program, which other processes do not have
    return operator, lambda operator: operator @ jnp.ones(5)


def space():
    space = bilevel.spaces.activation_space(["relu", "tanh"], width=4)
    return space, lambda space: space.apply(jnp.ones((4, 3)), jnp.ones(2) / 2, jnp.asarray(X))


@pytest.mark.parametrize("make", [network, empirical_operator, space])
def test_records_of_functions_survive_cloudpickle(make):
    record, values = make()
    for form in COPIES.values():
        assert_equal(values(form(record)), values(record))


@pytest.mark.long
def test_a_diverging_trial_does_not_end_a_process_pool():
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        diverging, converging = pool.submit(trial, 1e4), pool.submit(trial, 0.1)
        with pytest.raises(bilevel.NonFiniteError) as raised:
            diverging.result(timeout=120)
        assert converging.result(timeout=120) == 3
    assert raised.value.step == 0 and raised.value.result.alpha.shape == (2,)
