"""The solvers of benchopt/benchmark_bilevel on our oracles, with its own code from a checkout.

benchopt itself is not needed: its solver classes import only a base class from it.
"""

import contextlib
import functools
import importlib.util
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FILES = "benchmark_utils", "solvers"


def checkout(path: str | Path) -> Path:
    """Return the checkout's folder. For a bare repository, extract HEAD to a temporary one."""
    path = Path(path)
    if all((path / name).is_dir() for name in FILES):
        return path
    folder = Path(tempfile.mkdtemp(prefix="benchmark_bilevel-"))
    archive = subprocess.run(
        ["git", "-C", str(path), "archive", "HEAD", *FILES], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def solver_class(folder: Path, name: str) -> type:
    """Return the class of ``solvers/NAME.py``."""
    _stand_in()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(f"rival_{name}", folder / f"solvers/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Solver


def _stand_in() -> None:
    """Install stand-ins for the names that the solvers import from benchopt."""
    if "benchopt" in sys.modules:
        return
    package, criterion = (types.ModuleType(n) for n in ("benchopt", "benchopt.stopping_criterion"))
    package.BaseSolver = type("BaseSolver", (), {})
    package.safe_import_context = lambda: contextlib.nullcontext(types.SimpleNamespace())
    criterion.SufficientProgressCriterion = lambda **_: None
    sys.modules |= {package.__name__: package, criterion.__name__: criterion}


class Rival:
    """One of its solvers on a race, in chunks of ``count`` steps.

    Step sizes and random states are in its carried state: another course compiles nothing.
    """

    def __init__(self, folder: Path, name: str, race: Any, count: int):
        kind = solver_class(folder, name)
        solver = kind()
        given = {key: values[0] for key, values in kind.parameters.items()}
        for key, value in (given | {"eval_freq": count}).items():
            setattr(solver, key, value)
        solver.run_once = lambda _: None  # a warm-up that is not needed here
        rows = [jax.tree.leaves(side)[0].shape[0] for side in (race.train, race.valid)]
        losses = _sliced(race.problem.lower, race.train), _sliced(race.problem.outer, race.valid)
        solver.set_objective(*losses, *rows, race.w, race.alpha)
        self.solver, self.memory, self.count = solver, name == "saba", count
        self.counted = name in ("srba", "vrbo")
        # The first chunks compile, some of them late.
        for _ in range(2):
            self.start(-1, 1e-3, 10.0)
            for _ in range(4):
                self.chunk()

    def start(self, seed: int, step: float, ratio: float) -> float:
        """Go back to the start; return the seconds that this took."""
        solver, self.done = self.solver, 0
        solver.step_size, solver.outer_ratio = step, ratio
        keys = jax.random.split(jax.random.PRNGKey(seed), 2)  # as in its set_objective
        solver.state_inner_sampler = solver.state_inner_sampler | {"key": keys[0]}
        solver.state_outer_sampler = solver.state_outer_sampler | {"key": keys[1]}
        begun = time.process_time()
        self.carry = jax.block_until_ready(solver.init())
        return time.process_time() - begun

    def chunk(self) -> float:
        """Run one more chunk; return the seconds."""
        begun = time.process_time()
        if self.memory:
            memory, carry = self.carry
            self.carry = self.solver.one_epoch(carry, memory, self.count)
        else:
            more = (self.done,) if self.counted else ()
            self.carry = self.solver.one_epoch(self.carry, self.count, *more)
        self.done += self.count
        jax.block_until_ready(self.carry)
        return time.process_time() - begun

    def course(self, seed: int, step: float, ratio: float, marks: Sequence[float]) -> Iterator:
        """Return CPU seconds, steps and point at each mark, in one run."""
        spent, steps = self.start(seed, step, ratio), 0
        for mark in marks:
            while spent < mark:
                spent += self.chunk()
                steps += self.count
            yield spent, steps, self.point()

    def point(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return ``(alpha, w)``, or None if they are not finite."""
        carry = self.carry[1] if self.memory else self.carry
        alpha_and_w = np.array(carry["outer_var"]), np.array(carry["inner_var"])
        return alpha_and_w if all(np.isfinite(x).all() for x in alpha_and_w) else None


def _sliced(loss, data):
    """Return a loss with the signature that its solvers call."""
    data = jax.tree.map(jnp.asarray, data)

    @functools.partial(jax.jit, static_argnames="batch_size")
    def of_rows(w, alpha, start=0, batch_size=1):
        batch = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, batch_size), data)
        return loss(w, alpha, batch)

    return of_rows
