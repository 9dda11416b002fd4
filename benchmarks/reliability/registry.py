"""The generators by public name, and the public names that have none.

A generator is ``generator(rng, dtype) -> Case``, registered under one or several public names: the
one that it calls first, then those whose work shows in the same result.
"""

import importlib
import inspect
import pathlib
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import bilevel
from benchmarks.reliability.bad import mistakes, planted
from benchmarks.reliability.case import Case, Outcome, run_bad, run_good, run_traced
from ntk.scores.registry import builtin_score_names

Generator = Callable[[np.random.Generator, Any], Case]
GENERATORS: dict[str, Generator] = {}
_SHOWN_BY: dict[str, str] = {}  # public name -> the generator it is covered by


def generates(*names: str) -> Callable[[Generator], Generator]:
    """Register a generator for public names; the first is the one it is run under."""

    def register(generator: Generator) -> Generator:
        GENERATORS[names[0]] = generator
        for name in names:
            _SHOWN_BY[name] = names[0]
        return generator

    return register


def is_covered(name: str) -> bool:
    """Return whether a generator is registered for a public name."""
    return name in _SHOWN_BY


def attack(name: str, seed: int, number: int) -> Outcome:
    """Input ``number`` of a generator: the same one every time, whatever ran before it."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
    dtype = np.float64 if rng.random() < 0.5 else np.float32
    # As users have it: float64 needs x64, float32 mostly comes without.
    with jax.enable_x64(dtype == np.float64):
        case = GENERATORS[name](rng, dtype)
        return _attacked(case, rng)


def _attacked(case: Case, rng: np.random.Generator) -> Outcome:
    if case.mistake:
        return run_bad(case, case.mistake, {})
    draw = rng.random()
    if not case.kinds:
        draw *= 0.5
    if draw < 0.3 or (draw < 0.5 and not case.traced):
        return run_good(case)
    if draw < 0.5:
        return run_good(case, "vmap" if draw > 0.42 and case.vmapped else "jit")
    if draw < 0.58 and case.traced:
        name = case.traced[rng.integers(len(case.traced))]
        return run_traced(case, name, planted(case.arguments[name], np.nan, rng))
    names = sorted(case.kinds)
    name = names[rng.integers(len(names))]
    candidates = mistakes(case.kinds[name], case.arguments[name], rng)
    candidates = {
        what: make for what, make in candidates.items() if f"{name}: {what}" not in case.fine
    }
    if not candidates:
        return run_good(case)
    what = sorted(candidates)[rng.integers(len(candidates))]
    return run_bad(case, what, {name: candidates[what]()})


# ----------------------------------------------------------------------------- coverage

_NETWORKS = "a network's program, which takes minutes to compile"
_LAYERS = "a record; its kernel is compared with neural-tangents' in tests/ntk/test_networks.py"
_OF_KERNELS = "a kernel_function_space, which is attacked; seconds of compilation a case"
_SEARCH = "many kernels, ten seconds of compilation a case; its tests hold it against enumeration"
NOT_COVERED = {
    "bilevel.explain": "words",
    "bilevel.nets.from_scratch": _NETWORKS,
    "bilevel.plots.style": "how pictures look",
    "bilevel.spaces.darts.darts_network": _NETWORKS,
    "bilevel.spaces.darts.darts_space": _NETWORKS,
    "bilevel.spaces.darts.plot_genotype": "a picture",
    "bilevel.spaces.network_space": _OF_KERNELS,
    "bilevel.spaces.linearized_space": _OF_KERNELS,
    "bilevel.spaces.nasbench201.all_networks": "in kills, flips, disks and writers",
    "bilevel.spaces.nasbench201.judging.load_table": "held against published figures",
    "bilevel.spaces.nasbench201.nasbench201_space": _NETWORKS,
    "bilevel.spaces.nasbench201.score_networks": "in kills, flips, disks and writers",
    "bilevel.strategies.eigen_nas": _SEARCH,
    "bilevel.strategies.nasi": _SEARCH,
    "bilevel.strategies.te_nas": _SEARCH,
    "ntk.networks.act": _LAYERS,
    "ntk.networks.add": _LAYERS,
    "ntk.networks.average_pool": _LAYERS,
    "ntk.networks.conv": _LAYERS,
    "ntk.networks.dense": _LAYERS,
    "ntk.networks.flatten": _LAYERS,
    "ntk.networks.global_average_pool": _LAYERS,
    "ntk.networks.residual": _LAYERS,
    "ntk.networks.serial": _LAYERS,
    "ntk.neural_tangents": "another library, which brings tests of its own",
}
"""Public names without a generator, and why. A test holds this list to what is so."""


def public_names() -> list[str]:
    """Every function in the API reference, and every class that is more than a record."""
    folder = pathlib.Path(bilevel.__file__).parents[1] / "docs" / "api"
    text = "\n".join(path.read_text() for path in folder.glob("*.md"))
    listings = re.findall(r"```\{public\} (\S+)\n(.*?)```", text, re.DOTALL)
    names = [
        f"{module}.{name}"
        for module, listed in listings
        for name in listed.split() or importlib.import_module(module).__all__
    ]
    names += [f"ntk.scores.{name}" for name in builtin_score_names()]
    return sorted(name for name in names if _does_something(_thing(name)))


def uncovered() -> list[str]:
    """Public names without a generator."""
    covered = {id(_thing(name.split(" ")[0])) for name in _SHOWN_BY}
    return [name for name in public_names() if id(_thing(name)) not in covered]


def _does_something(thing: Any) -> bool:
    # Records of results have no behaviour; `Problem` has.
    return callable(thing) and (not inspect.isclass(thing) or thing is bilevel.Problem)


def _thing(name: str) -> Any:
    module, _, last = name.split(" ")[0].rpartition(".")  # "bilevel.cg options" is one of cg
    return getattr(importlib.import_module(module), last)
