"""The generators by public name, and the public names that have none.

A generator is ``generator(rng, dtype) -> Case``, registered under one or several public names: the
one that it calls first, then those whose work shows in the same result.
"""

import importlib
import inspect
import pkgutil
import types
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.reliability.bad import mistakes, planted
from benchmarks.reliability.case import Case, Outcome, run_bad, run_good, run_traced

Generator = Callable[[np.random.Generator, Any], Case]
GENERATORS: dict[str, Generator] = {}
_SHOWN_BY: dict[str, str] = {}  # public name -> the generator it is covered by

PACKAGES = (
    "bilevel",
    "bilevel.baselines",
    "bilevel.outer_loop.batches",
    "bilevel.theory.bounds",
    "bilevel.runs.checkpoint",
    "bilevel.data",
    "bilevel.discretize.diagnostics",
    "bilevel.discretize",
    "bilevel.spaces.nasbench201.judging",
    "bilevel.linear",
    "bilevel.nets",
    "bilevel.plots",
    "bilevel.spaces",
    "bilevel.theory.spectral",
    "bilevel.strategies",
    "bilevel.strategies.train_free",
    "ntk",
    "ntk.bounds",
    "ntk.scores",
)


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
    found = mistakes(case.kinds[name], case.arguments[name], rng)
    found = {what: make for what, make in found.items() if f"{name}: {what}" not in case.fine}
    if not found:
        return run_good(case)
    what = sorted(found)[rng.integers(len(found))]
    return run_bad(case, what, {name: found[what]()})


# ----------------------------------------------------------------------------- coverage

_NETWORKS = "a network's program, which takes minutes to compile"
_INNER = "a part of such networks, called by them alone"
_FILE = "reads a file; what becomes of damaged ones is in tests/core/test_data.py"
_TABLE = "reads the benchmark's tables; its tests hold it against published figures"
_OF_KERNELS = "a kernel_function_space, which is attacked; seconds of compilation a case"
_SEARCH = "many kernels, ten seconds of compilation a case; its tests hold it against enumeration"
NOT_COVERED = {
    "bilevel.runs.checkpoint.saving": "the campaign's kills and flips are of it",
    "bilevel.runs.checkpoint.steps": "names of files",
    "bilevel.discretize.judge_choice": "held against scipy in tests/spaces/test_discretize.py",
    "bilevel.explain": "words",
    "ntk.neural_tangents": "another library, which brings tests of its own",
    "bilevel.plots.style": "how pictures look",
    "bilevel.nets.convolution.materialized": "the identity, to every reader but XLA",
    "bilevel.spaces.activations.losses_by_row": "the outer loss and predict, which are attacked",
    "bilevel.spaces.darts.darts_network": _NETWORKS,
    "bilevel.spaces.darts.darts_space": _NETWORKS,
    "bilevel.spaces.darts.plot_genotype": "a picture",
    "bilevel.spaces.darts.operations.check_image_size": _INNER,
    "bilevel.spaces.darts.operations.check_network_sizes": _INNER,
    "bilevel.spaces.darts.operations.make_operation": _INNER,
    "bilevel.spaces.darts.operations.reductions": _INNER,
    "bilevel.spaces.darts.weight_count": _INNER,
    "bilevel.nets.training.from_scratch": _NETWORKS,
    "bilevel.nets.training.run_epochs": _NETWORKS,
    "bilevel.data.check_digest": _FILE,
    "bilevel.data.find_file": _FILE,
    "bilevel.data.read_file": _FILE,
    "bilevel.nets.layers.cast_images": _INNER,
    "bilevel.nets.layers.draw_parameters": _INNER,
    "bilevel.nets.layers.accumulation_dtype": _INNER,
    "bilevel.spaces.nasbench201.judging.standing.standing": _TABLE,
    "bilevel.spaces.nasbench201.judging.verdicts.judge": _TABLE,
    "bilevel.spaces.nasbench201.judging.verdicts.paper_protocol": _TABLE,
    "bilevel.spaces.nasbench201.judging.verdicts.seed_ceiling": _TABLE,
    "bilevel.spaces.space.name_of": "words",
    "bilevel.spaces.kernels.network_space": _OF_KERNELS,
    "bilevel.spaces.linearized.linearized_space": _OF_KERNELS,
    "bilevel.spaces.nasbench201.nasbench201_network": _NETWORKS,
    "bilevel.spaces.nasbench201.all_networks": "in kills, flips, disks and writers",
    "bilevel.spaces.nasbench201.nasbench201_space": _NETWORKS,
    "bilevel.spaces.nasbench201.network.check_image_shape": _INNER,
    "bilevel.spaces.nasbench201.scoring.score_networks": "in kills, flips, disks and writers",
    "bilevel.spaces.nasbench201.supernet.mixed_cell": _INNER,
    "bilevel.strategies.train_free.eigen_nas": _SEARCH,
    "bilevel.strategies.train_free.nasi": _SEARCH,
    "bilevel.strategies.train_free.te_nas": _SEARCH,
    "bilevel.spaces.nasbench201.judging.table.cifar10_split": _TABLE,
    "bilevel.spaces.nasbench201.judging.table.load_table": _TABLE,
    "bilevel.spaces.nasbench201.judging.table.published_scores": _TABLE,
    "bilevel.spaces.nasbench201.judging.table.genotype_row": _TABLE,
}
"""Public names without a generator, and why. A test holds this list to what is so."""


def public_names() -> list[str]:
    """Every public function, and every class that is more than a record of results."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        modules = [module]
        if package in ("bilevel.spaces.nasbench201.judging", "bilevel.nets", "bilevel.spaces"):
            parts = pkgutil.walk_packages(module.__path__, package + ".")
            modules = [importlib.import_module(m.name) for m in parts if "._" not in m.name]
        for module in modules:
            for name in _listed(module):
                thing = getattr(module, name)
                if _does_something(thing):
                    found.setdefault(id(thing), f"{module.__name__}.{name}")
    return sorted(found.values())


def uncovered() -> list[str]:
    """Public names without a generator."""
    covered = {id(_thing(name.split(" ")[0])) for name in _SHOWN_BY}
    return [name for name in public_names() if id(_thing(name)) not in covered]


def _listed(module) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = module.__name__
    return [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == own
    ]


def _does_something(thing: Any) -> bool:
    is_type = isinstance(thing, types.GenericAlias | types.UnionType) or hasattr(
        thing, "__origin__"
    )
    if inspect.ismodule(thing) or is_type or not callable(thing):
        return False
    # Records of results have no behaviour; `Problem` and `Activation` have.
    return not inspect.isclass(thing) or thing.__name__ in ("Problem", "Activation", "Blocks")


def _thing(name: str) -> Any:
    return pkgutil.resolve_name(name.split(" ")[0])  # "bilevel.cg options" is one of cg
