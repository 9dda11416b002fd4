"""Fingerprints: equal in every process, and different wherever a run would be."""

import collections
import dataclasses
import fractions
import functools
import json
import math
import operator
import os
import random
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import run

from bilevel.runs.fingerprint import describe_difference, fingerprint

SEARCH = """
import functools
import jax, jax.numpy as jnp, numpy as np, optax
import bilevel
from bilevel.outer_loop.history import History
from bilevel.outer_loop.search_program import SearchSetup, search_programs, search_values

PENALTY = 0.1
TABLE = np.arange(2000.0)  # long enough to be left out of a printed program
rate = [0.1]

def shrunk(w):
    return PENALTY * jnp.sum(w**2)

@jax.jit
def predict(w, x):
    return jax.nn.relu(x @ w) * TABLE[7]

def lower(w, alpha, batch, *, scale=2.0):
    return scale * jnp.mean((predict(w, batch) - alpha) ** 2) + shrunk(w)

def outer(w, alpha, batch):
    return jnp.sum(w - alpha) + jnp.mean(predict(w, batch))

def batches(key, data):
    return data[jax.random.randint(key, (2,), 0, 3)]

problem = bilevel.Problem(lower, outer)
solver = bilevel.implicit(bilevel.lbfgs(), bilevel.nystrom(3, 0.1))
schedule = optax.cosine_decay_schedule(rate[0], 9)
optimizer = optax.chain(optax.adamw(schedule), bilevel.project("box"))

def label():
    data = jnp.ones((3, 4)), jnp.ones((3, 4)), jax.random.key(0)
    setup = SearchSetup(problem, solver, optimizer, batches, False, History())
    carry, traced, _ = setup.start(jnp.full(3, 0.5), jnp.zeros((4, 3)), data, 5)
    return search_programs(setup._replace(traced=traced), carry, data)
"""
OTHER_PROCESS = (
    SEARCH.replace("def shrunk(w):", 'def shrunk(w):  # ridge\n    """Say so."""\n\n')
    + "import json\nprint(json.dumps(label()))"
)


def names_of(script):
    names = {"__name__": "__main__"}
    exec(compile(script, "script.py", "exec"), names)
    return names


def label_of(script):
    return names_of(script)["label"]()


@pytest.fixture(scope="module")
def label():
    return label_of(SEARCH)


def test_another_process_with_another_hash_seed_has_the_same_fingerprint(label):
    """The same script with a comment and a docstring more; a script twice in one process."""
    x64 = str(int(jax.config.jax_enable_x64))
    environment = os.environ | {"PYTHONHASHSEED": "1", "JAX_ENABLE_X64": x64}
    other = run("python", "-c", "# new\n\n" + OTHER_PROCESS, env=environment)
    assert json.loads(other) == label == label_of(SEARCH)


@pytest.mark.parametrize(
    "old, new, part",
    [
        ("PENALTY = 0.1", "PENALTY = 0.2", "lower loss"),  # a global of a function of a function
        ("np.arange(2000.0)", "np.arange(2000.0)[::-1] ** 2", "lower loss"),
        ("nn.relu", "nn.gelu", "lower loss"),
        ("scale=2.0", "scale=3.0", "lower loss"),
        ("sum(w - alpha)", "sum(alpha - w)", "outer loss"),
        ("lbfgs()", "newton()", "solver"),
        ("lbfgs()", "lbfgs(steps=7)", "solver"),
        ("rate = [0.1]", "rate = [0.2]", "optimizer"),
        ("adamw", "adam", "optimizer"),
        ('project("box")', "exponentiate()", "optimizer"),
        ("(2,), 0, 3", "(3,), 0, 3", "batches"),
    ],
)
def test_a_changed_part_of_a_search_is_named(old, new, part, label):
    assert old in SEARCH
    text = SEARCH.replace(old, new).replace("jnp.full(3, 0.5)", "jnp.full(3, 1 / 3)")
    assert describe_difference(label, label_of(text)) == f"another {part}"


def test_programs_of_another_jax_are_not_compared_but_arrays_are(label):
    then = label | fingerprint({"train": np.ones(3)})
    for name in label:
        then[name] = label[name].replace(jax.__version__, "0.1")
    with pytest.warns(UserWarning, match="the record is of JAX 0.1, this is JAX"):
        assert describe_difference(then, label | fingerprint({"train": np.ones(3)})) == ""
    changed = label | fingerprint({"train": np.zeros(3)})
    assert describe_difference(then, changed).startswith("another train")


def test_functions_of_callbacks_count(tmp_path):
    import bilevel

    def searched(power, **options):
        def lower(w, alpha, batch):
            kind = jax.ShapeDtypeStruct((), jnp.result_type(float))
            weight = jax.pure_callback(lambda: np.asarray(2.0**power, kind.dtype), kind)
            return jax.lax.stop_gradient(weight) * jnp.sum((w - alpha) ** 2)

        problem = bilevel.Problem(lower, lambda w, alpha, batch: jnp.sum(w**2))
        start = jnp.ones(2), jnp.zeros(2), None, None
        solver, optimizer = bilevel.unrolled(0.1, 2), optax.sgd(0.1)
        options |= {"steps": 2, "checkpoint": tmp_path, "progress": False}
        return bilevel.search(problem, solver, optimizer, *start, **options)

    searched(1)
    searched(1, resume=True)
    with pytest.raises(ValueError, match="another lower loss"):
        searched(2, resume=True)


FLAGS = """
import argparse, dataclasses
flags = argparse.Namespace(penalty=0.1, resume=False)

@dataclasses.dataclass
class Config:
    scale: float = 2.0
    out: str = "runs/1"

def evaluate(config, table):
    lower = lambda w: flags.penalty * w**2 + table["shift"]
    return lower, lambda w: config.scale * w

parts = {"evaluate": evaluate(Config(), {"shift": 1, "workers": 2})}
"""


CLASSES = """
import functools

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

parts = {"evaluate": (lower, {"ridge", "lasso"})}
"""


def of_script(script):
    return fingerprint(names_of(script)["parts"])


@pytest.mark.parametrize(
    "script, old, new, same",
    [
        # A run that is resumed with another flag for another purpose is not refused.
        (FLAGS, "resume=False", "resume=True", True),
        (FLAGS, "runs/1", "runs/2", True),
        (FLAGS, '"workers": 2', '"workers": 3', True),
        (FLAGS, "=0.1", "=0.2", False),
        (FLAGS, "= 2.0", "= 3.0", False),
        (FLAGS, '"shift": 1', '"shift": 2', False),
        (CLASSES, "l2 = 0.1", "l2 = 0.1", True),
        (CLASSES, "l2 = 0.1", "l2 = 0.2", False),  # read through an instance
        (CLASSES, '"shift": 1', '"shift": 2', False),
        (CLASSES, "2.0 * w", "3.0 * w", False),  # of a static method
        (CLASSES, "w + 5", "w + 6", False),
        (CLASSES, "return 7.0", "return 8.0", False),
        (CLASSES, "return 9", "return 10", False),
        (CLASSES, "3, 4", "3, 5", False),  # a field that a helper reads from the whole record
        (CLASSES, '"b": 12', '"b": 13', False),  # an entry that ** hands on
        (CLASSES, '"ridge", "lasso"', '"ridge", "huber"', False),
        (CLASSES, "a * w + b", "a + w * b", False),
    ],
)
def test_settings_and_classes_count_if_the_code_reads_them(script, old, new, same):
    assert script.count(old) == 1
    difference = describe_difference(of_script(script), of_script(script.replace(old, new)))
    assert (difference == "") == same


class Slots:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate


@dataclasses.dataclass
class Undeclared:
    given: dataclasses.InitVar[int]

    def __post_init__(self, given):
        self.rate = given


OF_TWO = {  # each with other values inside, for 1 and for 2
    "slots": Slots,
    "a field that a dataclass does not declare": Undeclared,
    "an optimizer": lambda k: optax.sgd(0.1 * k),
    "jnp's ufuncs": lambda k: (jnp.minimum, jnp.maximum)[k - 1],
    "numpy's ufuncs": lambda k: (np.minimum, np.maximum)[k - 1],
    "fraction": lambda k: fractions.Fraction(k, 7),
    "pattern": lambda k: re.compile("a" * k),
    "itemgetter": operator.itemgetter,
    "deque": lambda k: collections.deque([k]),
    "method of a dict": lambda k: {"a": k}.get,
    "method of an array": lambda k: np.full(3, k).dot,
    "compiled": lambda k: jax.jit(lambda x: k * x),
    "strings": lambda k: np.array(["cat", f"dog {k}"]),
    "bytes": lambda k: np.array([b"ab%d" % k]),
    "records": lambda k: np.array([(1, float(k))], "i4,f8"),
    "long doubles": lambda k: np.array([k], np.longdouble),
    "partial": lambda k: functools.partial(math.pow, k),
}


@pytest.mark.parametrize("kind", OF_TWO)
def test_objects_count_by_what_they_hold(kind):
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
