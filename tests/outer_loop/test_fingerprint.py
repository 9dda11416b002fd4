"""Fingerprints: equal in every process, and different wherever a search would be."""

import collections
import dataclasses
import decimal
import fractions
import json
import math
import operator
import os
import random
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bilevel.runs.fingerprint import describe_difference, fingerprint

SCRIPT = """
import functools, jax.numpy as jnp, numpy as np, optax
import bilevel
PENALTY = 0.1
TABLE = {"kind": {"ridge", "lasso", "none"}, "sizes": np.arange(3)}

def shrunk(w):
    return PENALTY * jnp.sum(w**2) if "ridge" in TABLE["kind"] else 0

class Model:
    def __init__(self, width):
        self.width = width
    def predict(self, w, x):
        return jnp.tanh(x @ w) * self.width

def loss(model, w, alpha, batch, *, scale=2.0):
    return scale * jnp.mean((model.predict(w, batch) - alpha) ** 2) + shrunk(w)

parts = {
    "problem": bilevel.Problem(functools.partial(loss, Model(3)), lambda w, a, b: jnp.sum(w - a)),
    "solver": bilevel.implicit(bilevel.lbfgs(), bilevel.nystrom(3, 0.1)),
    "optimizer": optax.chain(
        optax.adamw(optax.cosine_decay_schedule(0.1, 9)), bilevel.project("box")
    ),
    "w0": {"a": jnp.ones(3), "b": [np.zeros((2, 2), np.float32)]},
}
"""
EDITED = SCRIPT.replace("def shrunk(w):", 'def shrunk(w):  # of ridge\n    """Say so."""\n\n')
PRINTED = """
import json
from bilevel.runs.fingerprint import fingerprint
print(json.dumps(fingerprint(parts)))
"""


def of_script(text):
    names = {"__name__": "__main__"}
    exec(compile(text, "script.py", "exec"), names)
    return fingerprint(names["parts"])


def test_fingerprints_do_not_know_process_hash_seed_comments_or_line_numbers():
    """The same script in another process, with a comment and a docstring more."""
    environment = os.environ | {
        "PYTHONHASHSEED": "1",
        "JAX_ENABLE_X64": str(int(jax.config.jax_enable_x64)),
    }
    command = [sys.executable, "-c", "# new\n\n" + EDITED + PRINTED]
    there = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    assert describe_difference(json.loads(there), of_script(SCRIPT)) == ""


@pytest.mark.parametrize(
    "old, new",
    [
        ("PENALTY = 0.1", "PENALTY = 0.2"),  # a global of a function of a function
        ('"ridge", "lasso"', '"ridge", "huber"'),  # within a set, within a global
        ("np.arange(3)", "np.arange(4)"),
        ("w**2", "w**4"),  # a constant
        ("jnp.tanh", "jnp.sin"),  # a method of a class of the script's
        ("Model(3)", "Model(4)"),  # an attribute
        ("scale=2.0", "scale=3.0"),  # a default
        ("jnp.mean", "jnp.sum"),
        ("sum(w - a)", "sum(a - w)"),  # a lambda
        ("lbfgs()", "newton()"),
        ("lbfgs()", "lbfgs(steps=7)"),
        ("nystrom(3, 0.1)", "nystrom(3, 0.2)"),
        ("decay_schedule(0.1, 9)", "decay_schedule(0.1, 8)"),
        ("adamw", "adam"),
        ('"box"', '"simplex"'),
        ("jnp.ones(3)", "jnp.ones((3, 1))"),
        ("[np.zeros((2, 2), np.float32)]", "(np.zeros((2, 2), np.float32),)"),
        ("np.float32", "np.float64"),
    ],
)
def test_fingerprints_know_what_a_search_depends_on(old, new):
    assert old in SCRIPT
    assert describe_difference(of_script(SCRIPT), of_script(SCRIPT.replace(old, new)))


FLAGS = """
import argparse, dataclasses
import bilevel
flags = argparse.Namespace(penalty=0.1, resume=False)

@dataclasses.dataclass
class Config:
    scale: float = 2.0
    out: str = "runs/1"

def problem(config, table):
    lower = lambda w, a, b: flags.penalty * w**2 + table["shift"]
    return bilevel.Problem(lower, lambda w, a, b: config.scale * w)

parts = {"problem": problem(Config(), {"shift": 1, "workers": 2})}
"""


def test_settings_count_where_the_code_names_them():
    """A run resumed with another flag for what is no part of the problem is not refused."""
    for old, new in (("resume=False", "resume=True"), ("runs/1", "runs/2"), ('rs": 2', 'rs": 3')):
        assert not describe_difference(of_script(FLAGS), of_script(FLAGS.replace(old, new)))
    for old, new in (("=0.1", "=0.2"), ("= 2.0", "= 3.0"), ('shift": 1', 'shift": 2')):
        assert old in FLAGS
        assert describe_difference(of_script(FLAGS), of_script(FLAGS.replace(old, new)))


CLASSES = """
import functools
import bilevel

class Settings:
    l2 = 0.1
    table = {"shift": 1}
    @staticmethod
    def scaled(w): return 2.0 * w
    @classmethod
    def moved(cls, w): return w + 5
    @property
    def rate(self): return 7.0
    @functools.cached_property
    def power(self): return 9

class Flags:
    def __init__(self):
        self.steps, self.width = 3, 4

settings, flags, cfg = Settings(), Flags(), {"a": 11, "b": 12}

def net(flags, w): return flags.width * w

def shifted(w, a, b): return a * w + b

def lower(w, a, b):
    return settings.l2 * w + net(flags, w) * flags.steps + shifted(w, **cfg) * cfg["a"]

parts = {"problem": bilevel.Problem(lower, lambda w, a, b: w)}
"""


@pytest.mark.parametrize(
    "old, new",
    [
        ("l2 = 0.1", "l2 = 0.2"),  # read through an instance
        ('"shift": 1', '"shift": 2'),
        ("2.0 * w", "3.0 * w"),  # of a static method
        ("w + 5", "w + 6"),
        ("return 7.0", "return 8.0"),
        ("return 9", "return 10"),
        ("3, 4", "3, 5"),  # a field that a helper reads, to whom the record is handed on
        ('"b": 12', '"b": 13'),  # an entry that ** hands on
    ],
)
def test_fingerprints_know_classes_and_what_is_handed_on(old, new):
    assert CLASSES.count(old) == 1
    assert describe_difference(of_script(CLASSES), of_script(CLASSES.replace(old, new)))
    assert not describe_difference(of_script(CLASSES), of_script(CLASSES))


def test_fingerprints_know_the_weights_in_modules_and_states_of_nnx():
    from flax import nnx

    one, other = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    for of in (lambda m: m, lambda m: nnx.split(m)[1], lambda m: lambda x: m(x)):
        assert describe_difference(fingerprint({"w0": of(one)}), fingerprint({"w0": of(other)}))
        again = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        assert not describe_difference(fingerprint({"w0": of(one)}), fingerprint({"w0": of(again)}))


def test_texts_and_records_of_any_size_have_fingerprints():
    for one, other in (
        (np.array(["cat", "dog"]), np.array(["cat", "dot"])),
        (np.array([b"abc"]), np.array([b"abd"])),
        (np.array([(1, 2.0)], "i4,f8"), np.array([(1, 3.0)], "i4,f8")),
        (np.array([1], np.longdouble), np.array([2], np.longdouble)),
    ):
        assert describe_difference(fingerprint({"x": one}), fingerprint({"x": other}))
        assert not describe_difference(fingerprint({"x": one}), fingerprint({"x": one.copy()}))


class Slots:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate


@dataclasses.dataclass
class Undeclared:
    given: dataclasses.InitVar[int]

    def __post_init__(self, given):
        self.rate = given


class Rated(random.Random):
    def __init__(self, rate):
        super().__init__(0)
        self.rate = rate


class Named(list):
    pass


def named(k):
    instance = Named([1])
    instance.rate = k
    return instance


def schedule(k):
    return optax.MultiSteps(optax.sgd(0.1), lambda step: k)


OF_TWO = {  # each with other values inside, for 1 and for 2
    "slots": Slots,
    "a field that a dataclass does not declare": Undeclared,
    "a list's own field": named,
    "MultiSteps' optimizer": lambda k: optax.MultiSteps(optax.sgd(0.1 * k), 2),
    "MultiSteps' count": lambda k: optax.MultiSteps(optax.sgd(0.1), 1 + k),
    "MultiSteps' schedule": schedule,
    "MultiSteps, as optax hands it on": lambda k: schedule(k).gradient_transformation(),
    "jnp's ufuncs": lambda k: (jnp.minimum, jnp.maximum)[k - 1],
    "numpy's ufuncs": lambda k: (np.minimum, np.maximum)[k - 1],
    "a generator's own field": Rated,
    "fraction": lambda k: fractions.Fraction(k, 7),
    "decimal": decimal.Decimal,
    "pattern": lambda k: re.compile("a" * k),
    "itemgetter": operator.itemgetter,
    "deque": lambda k: collections.deque([k]),
    "factory": lambda k: collections.defaultdict((list, dict)[k - 1]),
}


@pytest.mark.parametrize("kind", OF_TWO)
def test_fingerprints_see_what_lies_in_no_public_field(kind):
    one, same, other = (fingerprint({"problem": OF_TWO[kind](k)}) for k in (1, 1, 2))
    assert describe_difference(one, same) == ""
    assert describe_difference(one, other).startswith("another problem")


@pytest.mark.parametrize("made", [random.Random, np.random.default_rng, np.random.RandomState])
def test_where_a_generator_of_random_numbers_stands_is_no_part_of_a_problem(made):
    fresh, used = made(0), made(0)
    draw = used.normal if hasattr(used, "normal") else used.gauss
    draw(0.0, 1.0)
    assert not describe_difference(fingerprint({"draws": fresh}), fingerprint({"draws": used}))


def test_fingerprints_follow_modules_in_packages_of_the_users_own(tmp_path, monkeypatch):
    package = tmp_path / "fingerprinted"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "settings.py").write_text("RATE, OTHER = 1.0, 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    text = "import fingerprinted.settings\nparts = {'loss': lambda w: fingerprinted.settings.RATE}"
    first = of_script(text)
    settings = sys.modules["fingerprinted.settings"]
    assert isinstance(settings, types.ModuleType)
    settings.OTHER = 2.0
    assert describe_difference(first, of_script(text)) == ""
    settings.RATE = 2.0
    assert describe_difference(first, of_script(text)) == "another loss (RATE was 1, is 2)"


def test_a_schedule_that_was_called_is_the_same_schedule():
    """Its first call turns the number of steps that it closes over into a float."""
    schedule = optax.cosine_decay_schedule(0.1, 6)
    before = fingerprint(schedule)
    schedule(jnp.int32(3))
    assert fingerprint(schedule) == before
    assert fingerprint(6) == fingerprint(6.0) != fingerprint(6.5)
    assert fingerprint(0.0) != fingerprint(-0.0) and fingerprint(1) != fingerprint(True)


def test_whose_method_a_builtin_is():
    assert describe_difference(fingerprint({"a": 1}.get), fingerprint({"a": 2}.get))
    assert describe_difference(fingerprint(np.ones(3).dot), fingerprint(np.zeros(3).dot))
    assert not describe_difference(fingerprint({"a": 1}.get), fingerprint({"a": 1}.get))
    assert not describe_difference(fingerprint(math.sin), fingerprint(math.sin))
