"""Train-free scores of many networks through one compiled function each.

    score(genotype) = s(f(., genotype, .), w, batch)

s is one of :mod:`ntk.scores`, or a user's function. All networks are scored on the same batch and
with the same weights ``w``, each with its own part, so that scores differ by the networks only.
"""

import functools
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal.processes import is_first_process, to_numpy
from bilevel.runs import records
from bilevel.runs.fingerprint import describe_difference, digest, fingerprint
from bilevel.runs.progress import progress_bar
from bilevel.spaces.nasbench201.genotype import PRIMITIVES, encode
from bilevel.spaces.nasbench201.network import AllNetworks
from ntk import scores as ntk_scores
from ntk.internal import compile_cache
from ntk.internal.sharding import replicate_like
from ntk.scores import registry
from ntk.spectrum.certificate import certified_min_eigenvalue

SCORES = tuple(sorted((*registry.builtin_score_names(), *registry.HOST_SCORES)))
"""The built-in scores: those of :mod:`ntk.scores`, and ``certified_min_eigenvalue``."""

Score = Callable[[chex.PRNGKey, Callable, Any, tuple], jax.Array]

_OTHER_SCORE = registry.ScoreDescription("unknown", gradients="unknown", batch_norm="joint")
_SAVE_SECONDS = 20.0  # between two writings of the scores


class Scored(NamedTuple):
    """Result of :func:`score_networks`."""

    values: dict[str, np.ndarray]  # name -> float64 [m], as the score returns them
    seconds: dict[str, float]  # name -> per network, without compilation
    compile_seconds: dict[str, float]  # until the first score; short if compiled before

    def oriented(self) -> dict[str, np.ndarray]:
        """Return the values with the sign that makes larger better."""
        return {k: -v if _description(k).smaller_is_better else v for k, v in self.values.items()}


def score_networks(
    names: Sequence[str],
    networks: AllNetworks,
    w: Any,
    genotypes: Any,
    batch: tuple[chex.Array, chex.Array],
    *,
    at_once: int = 1,
    place: Callable[[chex.Array], chex.Array] = jnp.asarray,
    progress: bool | None = None,
    file: str | pathlib.Path | None = None,
    functions: Mapping[str, Score] | None = None,
    key: chex.PRNGKey | None = None,
) -> Scored:
    """Score genotypes by name; each score is compiled once.

    Parameters
    ----------
    names : of :data:`SCORES`, or keys of ``functions``
    networks : AllNetworks
    w : pytree
        From ``networks.init``.
    genotypes : Genotypes, or int [m, 6]
    batch : (images [n, h, w, c], int labels [n])
        At least two samples.
    at_once : int
        Number of genotypes in one program; 1 is right on a CPU.
    place : ``place(genotypes [at_once, 6]) -> the same``
        Puts them on the scoring devices, e.g. a ``jax.device_put`` over a mesh, also a multi-host
        one.
    progress : bool, optional
        A progress bar; by default in a terminal.
    file : path, optional
        An ``.npz`` that stores the scores, during the run and at the end. Its scores are not
        computed again, if it was made with the same networks, ``w`` and ``batch``, and the same
        first genotypes. If the disk is full, the run warns and continues without the file.
    functions : dict of ``score(key, apply, params, batch) -> scalar``, optional
        User's scores by name; JAX must be able to trace them. Larger is better. Scores of a changed
        function are computed again.
    key : jax.Array, optional
        The ``key`` of the user's scores, the same for all networks; by default of seed 0.

    Raises
    ------
    ValueError
        If a name is unknown, the batch has one sample, a function does not return a real scalar, or
        a file is damaged, made from something else, or in use.

    Notes
    -----
    ``certified_min_eigenvalue`` is certified for the kernel in float32. ``knas_released`` takes the
    first leaves of ``w``, even those of other networks.

    Examples
    --------
    >>> from bilevel.spaces.nasbench201 import genotypes, all_networks
    >>> networks = all_networks(cells=1, channels=1)
    >>> w = jax.jit(networks.init, static_argnums=1)(jax.random.key(0), (4, 4, 1))
    >>> batch = jnp.ones((2, 4, 4, 1)), jnp.arange(2)
    >>> scored = score_networks(["l2_norm"], networks, w, genotypes()[:3], batch)
    >>> scored.values["l2_norm"].shape
    (3,)
    """
    functions = {} if functions is None else functions
    cells, batch = _check_scoring(names, functions, genotypes, batch, at_once)
    key = jax.random.key(0) if key is None else key
    made_from = fingerprint({"networks": networks, "w": w, "batch": batch})
    programs = _score_programs(names, functions, networks, key)
    own = {name: functions[name] for name in names if name in functions}
    for name in own:
        try:  # without computing
            jax.eval_shape(programs[name], w, cells[0], batch)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"scores: expected {name} to be a function that JAX can trace, got: {reason}"
            ) from error
    versions = {name: digest({"score": score, "key": key}) for name, score in own.items()}
    m = len(cells)
    alone: AbstractContextManager = nullcontext()
    if file is not None and is_first_process():
        alone = records.locked(file, "file", directory=False)
    with alone, progress_bar(progress, "scores", m * len(programs), "{score}") as show:
        store = _ScoreStore(file, cells, made_from, versions)
        for i, (label, program) in enumerate(programs.items()):

            def shown(done, before=i * m, label=label):
                show(before + done, lambda: {"score": label})

            _score_in_chunks(label, program, store, w, cells, batch, at_once, place, shown)
    return store.scored(names)


def _check_scoring(names, functions, genotypes, batch, at_once):
    for name in functions:
        if name in (*SCORES, *ntk_scores.__all__) or "/" in name:
            raise ValueError(
                f"functions: expected names without / that ntk.scores does not have, got {name!r}."
            )
    for name in names:
        if name not in (known := (*functions, *SCORES)):
            raise ValueError(f"scores: expected names among {', '.join(known)}, got {name!r}.")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"scores: expected distinct names, got {list(names)}.")
    if at_once < 1:
        raise ValueError(f"at_once: expected at least 1, got {at_once}.")
    cells = genotypes if isinstance(genotypes, np.ndarray) else encode(genotypes)
    if cells.ndim != 2 or cells.shape[1:] != (6,) or not len(cells):
        raise ValueError(f"genotypes: expected at least one, [m, 6], got {list(cells.shape)}.")
    if not np.isin(cells, range(len(PRIMITIVES))).all():  # a program would clip them
        raise ValueError(
            f"genotypes: expected entries 0 to {len(PRIMITIVES) - 1}, got {cells.min()} to "
            f"{cells.max()}."
        )
    x, y = map(jnp.asarray, batch)
    if len(x) < 2:
        raise ValueError(f"batch: expected at least 2 samples, got {len(x)}.")
    return cells, (x, y)


def _score_programs(
    names: Sequence[str], functions: Mapping[str, Score], networks: AllNetworks, key: chex.PRNGKey
) -> dict[str, Callable]:
    """Return ``program(w, genotype, batch) -> {name: score}`` by label."""
    programs: dict[str, Callable] = {}
    for name in names:
        label = _program_label(name)
        if name in functions:
            score = functools.partial(_real_scalar, name, functions[name], key)
        else:
            score = functools.partial(registry.score_program(label), None)
        normalized = _description(name).batch_norm != "removed"
        apply = networks.apply if normalized else networks.apply_unnormalized
        programs[label] = functools.partial(_evaluate_score, label, score, apply, networks.select)
    return programs


def _program_label(name: str) -> str:
    """Return the name of the function that computes a score, alone or with others."""
    return registry.HOST_SCORES.get(name) or _description(name).together or name


def _description(name: str) -> registry.ScoreDescription:
    if name in registry.builtin_score_names():
        return registry.score_description(name)
    return _OTHER_SCORE


def _evaluate_score(label, score, apply, select, w, genotype, batch) -> dict[str, jax.Array]:
    def network(w, x):
        return apply(w, genotype, x)

    value = score(network, select(w, genotype), batch)
    return value if isinstance(value, dict) else {label: value}


def _real_scalar(name: str, score: Score, *arguments: Any) -> jax.Array:
    """Evaluate a user's score; raise ``ValueError`` if it is not a real scalar."""
    value, real = score(*arguments), (np.floating, np.integer, np.bool_)
    if not isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
        got = f"a {type(value).__name__}"
    elif jnp.shape(value) or not any(jnp.issubdtype(jnp.result_type(value), r) for r in real):
        got = f"{jnp.result_type(value)}{list(jnp.shape(value))}"
    else:
        return jnp.asarray(value)
    raise ValueError(f"scores: expected {name} to return a real scalar, got {got}.")


def _score_in_chunks(label, program, store, w, cells, batch, at_once, place, shown) -> None:
    done = store.done(label)
    shown(min(done, len(cells)))
    if done >= len(cells):
        return

    def score(w, chunk, batch):
        if at_once == 1:  # vmap would run the branches of all operations
            return program(w, chunk[0], batch)
        return jax.vmap(program, in_axes=(None, 0, None))(w, chunk, batch)

    began = time.perf_counter()
    example = place(cells[:1].repeat(at_once, axis=0))
    w, batch = replicate_like((w, batch), example)
    # A later call with the same score and shapes reuses the compiled program.
    compiled = compile_cache.program(score, w, example, batch)
    jax.block_until_ready(compiled(w, example, batch))
    store.compile_seconds[label] = time.perf_counter() - began
    while done < len(cells):
        began = time.perf_counter()
        chunk = cells[done : done + at_once]
        # The last chunk is padded, so that only one shape is compiled.
        full = np.concatenate([chunk, chunk[-1:].repeat(at_once - len(chunk), axis=0)])
        values = jax.tree.map(to_numpy, compiled(w, place(full), batch))
        rows = {k: v[None] if at_once == 1 else v[: len(chunk)] for k, v in values.items()}
        done = store.add(label, rows, time.perf_counter() - began)
        shown(done)
    store.save()


class _ScoreStore:
    """Scores of the first genotypes so far, by program and name; in a file, if there is one."""

    def __init__(
        self,
        file: str | pathlib.Path | None,
        cells: np.ndarray,
        fingerprint: dict[str, str],
        versions: dict[str, str],
    ):
        self.file = None if file is None else pathlib.Path(file)
        self.versions = versions  # digests of the user's score functions
        self.cells, self.fingerprint, self.count = cells, fingerprint, len(cells)
        self.arrays: dict[str, list[np.ndarray]] = {}  # "label/name" -> chunks of rows
        self.seconds: dict[str, float] = {}
        self.compile_seconds: dict[str, float] = {}
        self.saved = time.perf_counter()
        if self.file is not None and self.file.exists():
            self._read(self.file)

    def _read(self, file: pathlib.Path) -> None:
        try:
            arrays, notes = records.read_arrays(file)
        except records.DamagedError as error:
            raise records.DamagedError(f"{error} Remove it to score all networks anew.") from None
        known = arrays.pop("genotypes")
        shorter = min(len(known), len(self.cells))
        other = describe_difference(notes["fingerprint"], self.fingerprint)
        if not other and not np.array_equal(known[:shorter], self.cells[:shorter]):
            other = "other genotypes"
        if other:
            raise ValueError(
                f"file: expected scores of these networks, weights and batch in {file}, "
                f"got {other}."
            )
        self.arrays = {key: [rows] for key, rows in arrays.items()}
        if len(known) > len(self.cells):  # keep the further networks of the file
            self.cells = known
        self.seconds, self.compile_seconds = notes["seconds"], notes["compiling"]
        before = notes.get("versions", {})
        for name, version in self.versions.items():
            if before.get(name, version) != version:
                warnings.warn(
                    f"scores: {name} has changed since {file} was written; its scores are "
                    "computed again.",
                    stacklevel=4,
                )
                self.arrays.pop(f"{name}/{name}", None)
                self.seconds.pop(name, None)
        self.versions = before | self.versions

    def done(self, label: str) -> int:
        own = (chunks for key, chunks in self.arrays.items() if key.startswith(f"{label}/"))
        return min((sum(map(len, chunks)) for chunks in own), default=0)

    def add(self, label: str, rows: dict[str, np.ndarray], seconds: float) -> int:
        for name, values in rows.items():
            self.arrays.setdefault(f"{label}/{name}", []).append(values)
        self.seconds[label] = self.seconds.get(label, 0.0) + seconds
        if time.perf_counter() - self.saved > _SAVE_SECONDS:
            self.save()
        return self.done(label)

    def save(self) -> None:
        self.arrays = {key: [np.concatenate(chunks)] for key, chunks in self.arrays.items()}
        self.saved = time.perf_counter()
        if self.file is None or not is_first_process():
            return
        arrays = {key: chunks[0] for key, chunks in self.arrays.items()}
        notes = {
            "fingerprint": self.fingerprint,
            "seconds": self.seconds,
            "compiling": self.compile_seconds,
            "versions": self.versions,
        }
        with records.warn_if_disk_full(f"file: scores in {self.file}"):
            records.write_arrays(self.file, arrays | {"genotypes": self.cells}, notes)

    def scored(self, names: Sequence[str]) -> Scored:
        values, seconds, compiling = {}, {}, {}
        for name in names:
            label = _program_label(name)
            count = self.done(label)
            seconds[name] = self.seconds[label] / count
            compiling[name] = self.compile_seconds.get(label, 0.0)
            if name in registry.HOST_SCORES:
                kernels = np.concatenate(self.arrays[f"{label}/kernel"])[: self.count]
                values[name] = np.full(len(kernels), np.nan)
                for i in np.flatnonzero(np.isfinite(kernels).all(axis=(1, 2))):
                    values[name][i] = certified_min_eigenvalue(kernels[i])
            else:
                rows = np.concatenate(self.arrays[f"{label}/{name}"])[: self.count]
                values[name] = rows.astype(np.float64)
        return Scored(values, seconds, compiling)
