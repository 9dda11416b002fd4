"""The trace of a method, and the services: keys, clock, test errors, journal, progress bar."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypedDict

import jax
import numpy as np

from bilevel.contracts import Evaluation, Selection, Shared
from bilevel.internal.checks import integer, prng_key
from bilevel.runs import journal
from bilevel.runs.fingerprint import digest, fingerprint
from bilevel.runs.progress import progress_bar


class RunOptions(TypedDict, total=False):
    """Keywords of every method; see :mod:`bilevel.baselines`."""

    retrain_test: bool | None
    journal: str | os.PathLike[str] | None
    resume: bool
    progress: bool | None


class Trace(NamedTuple):
    """Record of a method's run: one row for each of its ``T`` solver calls.

    ``test`` is the test error of a model trained again by itself, on the incumbent alone and at the
    full budget, even if the method trained shared weights.
    """

    configs: tuple[Any, ...]
    best: int  # index of the configuration chosen; -1 if interrupted before there was one
    round: np.ndarray  # [T], int from 0
    resource: np.ndarray  # [T], int
    calls: np.ndarray  # [T], int: 1 ... T
    seconds: np.ndarray  # [T], wall time of the solves so far, with compilation, without retraining
    candidates: list[np.ndarray]  # T arrays [k], int: the configurations trained on
    errors: list[np.ndarray]  # T arrays [k]: their validation errors, NaN if missing
    incumbent: np.ndarray  # [T], int: the best so far; -1 while no error is finite
    valid: np.ndarray  # [T], the incumbent's validation error in the method's own solve
    test: np.ndarray  # [T], the retrained incumbent's test error; NaN if it was not retrained
    stopped: str = ""  # "" after a complete run, else the reason of the early end


class Recorder:
    """Run a method's solves and write its trace.

    Solve number ``n``, from 1, gets the key ``fold_in(key, n)``. ``fold_in(key, 0)`` is split into
    the keys of the method's own draws and of the retraining for test errors.
    """

    def __init__(
        self,
        method: str,
        key: jax.Array,
        configs: Sequence[Any],
        problem: Any,
        budget: int,
        options: dict[str, Any],
        *,
        shares: bool = False,
        retrain_test: bool | None = None,
        journal: Any = None,
        resume: bool = False,
        progress: bool | None = None,
    ):
        prng_key("key", key)
        if not isinstance(configs, Iterable):
            raise ValueError(f"configs: expected a sequence of configurations, got {configs!r}.")
        self.configs = tuple(configs)
        if not self.configs:
            raise ValueError("configs: expected at least one configuration, got none.")
        budget = integer("budget", budget, 1)
        selection = isinstance(problem, Selection)
        self._evaluate: Any = problem.evaluate if selection else problem
        self._share: Any = problem.share if selection else None
        if not callable(self._evaluate):
            raise ValueError(f"problem: expected a function or a Selection, got {problem!r}.")
        if shares and self._share is None:
            raise ValueError("problem: expected a Selection with `share`, got one without.")
        self.method, self.key, self.options, self.budget = method, key, options, budget
        self.draws, self._retrain_key = jax.random.split(jax.random.fold_in(key, 0))
        self._retrain_test = selection if retrain_test is None else retrain_test
        self._path, self._resume, self._progress = journal, resume, progress
        self._rows: list[dict[str, Any]] = []  # of the trace, with the seconds of one solve each
        self._tests: dict[int, float] = {}  # of models trained alone at the full budget
        self._leader: tuple[int, float, int] | None = None  # (-resource, error, index)
        self._stopped = ""

    @contextmanager
    def run(self, calls: int) -> Iterator[None]:
        """Run the method's solves, ``calls`` in all; Ctrl-C ends them."""
        header = {
            "method": self.method,
            "key": jax.random.key_data(self.key).tolist(),
            "generator": str(jax.random.key_impl(self.key)),
            "float64": bool(jax.config.read("jax_enable_x64")),
            "budget": self.budget,
            "options": self.options,
            "configs": digest(self.configs),
            "problem": fingerprint({"evaluate": self._evaluate, "share": self._share}),
        }
        label, text = self.method.replace("_", " "), "validation error {valid:.4g}"
        with (
            journal.opened(self._path, self._resume, header) as self._journal,
            progress_bar(self._progress, label, calls, text) as self._show,
        ):
            try:
                yield
            except KeyboardInterrupt:
                self._stopped = f"interrupted after solve {len(self._rows)} of {calls}"

    def evaluate(self, round: int, index: int, resource: int) -> float:
        """Train one configuration alone; return its validation error.

        The incumbent is the lowest finite error at the highest resource so far, ties to the lower
        index.
        """
        index = int(index)
        record = self._solve(lambda key: self._evaluation(key, index, resource))
        error, test = record["valid"], record["test"]
        error = error if math.isfinite(error) else math.nan
        if resource == self.budget and not math.isnan(test):
            self._tests.setdefault(index, test)
        rank = (-resource, error, index)
        if not math.isnan(error) and (self._leader is None or rank < self._leader):
            self._leader = rank
        _, valid, incumbent = self._leader or (0, math.nan, -1)
        self._pending = {"round": round, "resource": resource, "seconds": record["seconds"]}
        self._pending |= {"candidates": np.array([index]), "errors": np.array([error])}
        self.note(incumbent, valid)
        return error

    def share(
        self, round: int, candidates: np.ndarray, probabilities: np.ndarray, resource: int
    ) -> Shared:
        """Train the candidates' shared weights; the method then calls :meth:`note`."""
        configs, k = [self.configs[i] for i in candidates], len(candidates)
        record = self._solve(
            lambda key: Shared(*self._share(key, configs, probabilities, resource))
        )
        errors, counts = np.array(record["errors"], float), np.array(record["counts"], int)
        if errors.shape != (k,) or counts.shape != (k,):
            raise ValueError(
                f"share: expected errors and counts of shape ({k},), "
                f"got {errors.shape} and {counts.shape}."
            )
        errors = np.where((counts > 0) & np.isfinite(errors), errors, math.nan)
        if np.isnan(errors).all():
            raise FloatingPointError(
                f"share: expected a finite error in at least one cell at solve {self._number}, "
                f"got none in {k} cells, {np.sum(counts == 0)} of them empty."
            )
        self._pending = {"round": round, "resource": resource, "seconds": record["seconds"]}
        self._pending |= {"candidates": candidates, "errors": errors}
        return Shared(errors, counts)

    def note(self, incumbent: int, valid: float) -> None:
        """Write the row of a solve, with the best configuration after it."""
        row = self._pending | {"incumbent": int(incumbent), "valid": float(valid), "test": math.nan}
        # Append before retraining for the test error, so that Ctrl-C loses no solve.
        self._rows.append(row)
        if incumbent >= 0:
            row["test"] = self._test(row["incumbent"])
        self._show(len(self._rows), lambda: {"valid": row["valid"]})

    def trace(self) -> Trace:
        """Return the rows so far, in columns."""
        # A single configuration needs no solve to be the best.
        unsolved = 0 if len(self.configs) == 1 else -1
        best = self._rows[-1]["incumbent"] if self._rows else unsolved
        if best < 0 and not self._stopped:
            raise FloatingPointError(
                "problem: expected a finite validation error, "
                f"got none in {len(self._rows)} solves."
            )

        def column(name):
            return [row[name] for row in self._rows]

        columns: dict[str, Any] = {k: column(k) for k in ("candidates", "errors")}
        columns |= {k: np.array(column(k), int) for k in ("round", "resource", "incumbent")}
        columns |= {k: np.array(column(k), float) for k in ("seconds", "valid", "test")}
        columns["seconds"] = np.cumsum(columns["seconds"])
        calls = np.arange(1, len(self._rows) + 1)
        return Trace(self.configs, best, calls=calls, stopped=self._stopped, **columns)

    @property
    def _number(self) -> int:
        return len(self._rows) + 1

    def _solve(self, solve: Callable[[jax.Array], NamedTuple]) -> journal.Record:
        def timed():
            key = jax.random.fold_in(self.key, self._number)
            began = time.perf_counter()
            result = jax.block_until_ready(solve(key))
            seconds = time.perf_counter() - began
            record = {name: np.asarray(x).tolist() for name, x in result._asdict().items()}
            return record | {"seconds": seconds}

        return self._journal.cached(f"solve {self._number}", timed)

    def _test(self, index: int) -> float:
        if index in self._tests or not self._retrain_test:
            return self._tests.get(index, math.nan)

        def train():
            key = jax.random.fold_in(self._retrain_key, index)
            return {"test": self._evaluation(key, index, self.budget).test}

        return self._journal.cached(f"retrain {index}", train)["test"]

    def _evaluation(self, key: jax.Array, index: int, resource: int) -> Evaluation:
        result = self._evaluate(key, self.configs[index], resource)
        return Evaluation(*map(float, result if isinstance(result, tuple) else (result,)))
