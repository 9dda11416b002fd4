"""The compiled part of a search: its first state, the loop over its steps, their fingerprint."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import DescentState, Joint, Keyed, Partition, Pytree, SingleLoop
from bilevel.hypergradients.error_estimate import Info
from bilevel.internal.checks import concrete, gradient_transformation
from bilevel.outer_loop import divergence, geometry, single_loop
from bilevel.outer_loop import history as search_history
from bilevel.outer_loop.descent import descent, noted_descent
from bilevel.outer_loop.divergence import DivergenceMonitor
from bilevel.outer_loop.report import StepMonitor, init_step_monitor, monitor_step, spent_share
from bilevel.outer_loop.search_result import SearchResult, is_tree_finite
from bilevel.outer_loop.stream import Chunk, Stream, of_step
from bilevel.problem.problem import Problem
from bilevel.runs.fingerprint import fingerprint, program_digest
from ntk.internal.compile_cache import fresh
from ntk.internal.sharding import with_automatic_axes

QUANTITIES = ("lower loss", "weights", "outer loss", "hypergradient", "alpha")  # causes first
SHOWN = "value", "lower"
# Messages name the first part that differs: a part contains earlier parts, a step contains all.
PARTS = "batches", "lower loss", "outer loss", "optimizer", "solver"


class Carry(NamedTuple):
    """State that the loop of a search carries from step to step."""

    state: DescentState
    history: dict[str, Any]  # [rows, ...] each, filled up to state.step
    last: dict[str, jax.Array]  # last step: losses for the progress bar, and a part of its row
    trouble: jax.Array  # [], int: 0, or 1 + the index of the faulty quantity: see first_trouble
    monitor: StepMonitor  # observations of the steps up to state.step
    divergence: DivergenceMonitor  # whether alpha diverges, and the state to return to


class TracedStep(NamedTuple):
    """The program of a step, the tree of its results, and the shapes of its losses' arguments."""

    program: Any  # ClosedJaxpr of (state, number, data, scale)
    results: Any  # PyTreeDef
    calls: dict[str, tuple]


class SearchSetup(NamedTuple):
    """The problem and the options of a search, and its steps as pure functions."""

    problem: Problem
    solver: Any  # LowerSolver or SingleLoop
    optimizer: optax.GradientTransformation
    batches: Callable | Stream | None
    diagnostics: bool
    history: search_history.History
    traced: TracedStep | None = None  # by start; the loop evaluates its program

    def prepared(self, data, steps) -> Pytree:
        """Return ``(train, valid, key)`` in the form that the steps take."""
        if isinstance(self.solver, SingleLoop):
            return single_loop.prepared(self.solver, self.batches, data, steps)
        return data

    def start(self, alpha, w0, data, steps) -> tuple[Carry, TracedStep, list[str]]:
        """Return the first carry, a step that is traced for it, and warnings."""
        if isinstance(self.solver, SingleLoop):
            state = single_loop.init_single_loop(self[:3], alpha, w0, data)
        else:
            state = descent(*self[:3])[0](alpha, w0)
        # Copies, because the loop donates its carry, the caller keeps the arrays, and a state can
        # hold one array twice. Weak dtypes would compile the second chunk anew, because a step
        # returns strong dtypes.
        state = jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x), copy=True), state)
        notes: list[str] = []
        problem, calls = recorded(self.problem)
        noted = functools.partial(self._replace(problem=problem).step, note=notes.append)
        growth = divergence.init_divergence_monitor(state)
        trace = jax.make_jaxpr(fresh(noted), return_shape=True)
        program, (after, metrics) = trace(state, state.step, data, growth.scale)
        traced = TracedStep(program, jax.tree.structure((after, metrics)), calls)
        monitor = init_step_monitor(metrics, spent_share(self.solver, alpha, w0, steps))
        _, metrics = jax.eval_shape(monitor_step, monitor, after, metrics)
        names, rows = self.history.names, self.rows(steps)
        row = search_history.select_metrics(names, metrics | {"alpha": state.alpha}, rows)
        history = search_history.zeros_like(row, rows)
        shown = {*SHOWN}
        if isinstance(self.solver, SingleLoop) and names is not None:
            shown &= {*names}  # steps do not compute the other losses
        last_names = shown if self.history.every == 1 else (shown | {*row}) - {"alpha"}
        last = search_history.zeros_like({k: metrics[k] for k in sorted(last_names)})
        carry = Carry(state, history, last, jnp.zeros((), int), monitor, growth)
        if concrete(carry):
            notes += monitor.report.messages()
        return carry, traced, list(dict.fromkeys(notes))

    def rows(self, steps: int) -> int:
        """Return the number of rows in the history of ``steps`` steps."""
        return search_history.history_length(steps, self.history.every)

    def step(self, state, number, data, scale=None, note=lambda message: None):
        """Take step ``number``, with ``scale`` times the optimizer's step of ``alpha``."""

        # ``number`` is the state's step, but the same in all copies under vmap.
        def shortened_step(state, number, data, scale):
            if scale is None:
                return self._step(state, number, data, note)
            setup = self._replace(optimizer=divergence.shortening(self.optimizer, scale))
            new, metrics = setup._step(state, number, data, note)
            return divergence.shortened(state, new, scale), metrics

        args = state, number, data, scale
        return with_automatic_axes(shortened_step, args, lambda: (state, None))

    def _traced_step(self, *args):
        """Take a step by the traced program, if it is for arguments of these types."""
        leaves = jax.tree.leaves(args)
        if self.traced is None or self.traced.program.in_avals != [*map(jax.typeof, leaves)]:
            return self.step(*args)
        program = self.traced.program
        results = jax.core.eval_jaxpr(program.jaxpr, program.consts, *leaves)
        return jax.tree.unflatten(self.traced.results, results)

    def _step(self, state, number, data, note):
        if isinstance(self.solver, SingleLoop):
            return single_loop.single_loop_step(self[:3], state, number, data)
        train, valid, key = of_step(data, state.step)
        _, step = noted_descent(*self[:3], self.diagnostics, note)
        draw = None if isinstance(self.batches, Stream) else self.batches
        inside = self.solver.batches is not None
        if draw is not None or inside:
            below, above = jax.random.split(jax.random.fold_in(key, state.step))
        if isinstance(draw, Joint):
            train, valid = draw(above if inside else below, train, valid)
        elif draw is not None:
            train, valid = train if inside else draw(below, train), draw(above, valid)
        state, metrics = step(state, (Keyed(below, train) if inside else train, valid))
        if self.batches is not None:  # values of two batches differ for other reasons than alpha
            metrics.pop("predicted", None)
        return state, metrics

    def advance(self, carry: Carry, data, count) -> Carry:
        """Take ``count`` steps. After a quantity stops being finite, steps change nothing."""

        def body(begun, data, i, carry):
            old, history, last, trouble, monitor, growth = carry
            number = begun + i
            new, metrics = self._traced_step(old, number, data, growth.scale)
            seen, metrics = monitor_step(monitor, new, metrics)
            losses = {k: metrics[k] for k in SHOWN if k in last}
            seen_trouble = first_trouble(new, losses, metrics["grad_norm"])
            trouble = jnp.where(trouble == 0, seen_trouble, trouble)
            good = trouble == 0
            row, before = metrics | {"alpha": new.alpha}, last | {"alpha": old.alpha}
            history = search_history.write_row(
                history, row, before, number, old.step, good, self.history.every
            )
            shown = {k: metrics[k] for k in last}
            state, last, monitor = divergence.where(good, (new, shown, seen), (old, last, monitor))
            growth = divergence.observed(growth, metrics["grad_norm"], metrics["value"], good)
            window = divergence.NOISY if isinstance(self.solver, SingleLoop) else divergence.EXACT
            restart = functools.partial(self.restart, shapes(data))  # tracers would leak
            growth, state, trouble = divergence.check_divergence(
                growth, state, number, trouble, restart, window
            )
            return Carry(state, history, last, trouble, monitor, growth)

        def loop(carry, data, count):
            take = functools.partial(body, carry.state.step, data)
            return jax.lax.fori_loop(0, count, take, carry)

        return with_automatic_axes(loop, (carry, data, count), lambda: carry)

    def restart(self, data, state, number):
        """Adapt an earlier state of a single loop to the present step."""
        if not isinstance(self.solver, SingleLoop):
            return state
        return self.solver.restart(state, number, *data[:2])

    def result(self, state, rows, report, scale, stopped="", info=None) -> SearchResult:
        """Return the result of a search that ended in ``state``."""
        every = self.history.every
        return SearchResult(state.alpha, state.w, rows, state, stopped, report, info, every, scale)

    def info(self, state: DescentState, data: Pytree) -> Info | None:
        """Return the error estimate of a single loop's last direction."""
        if not (self.diagnostics and isinstance(self.solver, SingleLoop)):
            return None
        return single_loop.info(self.problem, self.solver, state, data)


def first_trouble(
    state: DescentState, losses: dict[str, jax.Array], grad_norm: jax.Array
) -> jax.Array:
    """Return 0, or 1 + the index of the first quantity that is not finite."""
    moved = geometry.moved_on(state.optimizer_state, state.alpha)
    watched = (losses.get("lower"), state.w, losses.get("value"), grad_norm)
    alpha = ~is_tree_finite(state.alpha) & ~jnp.stack([jnp.zeros((), bool), *moved]).any()
    # The indices after those of QUANTITIES belong to geometries after which alpha moved.
    bad = jnp.stack([*(~is_tree_finite(x) for x in watched), alpha, *moved])
    return jnp.where(bad.any(), 1 + jnp.argmax(bad), 0).astype(int)


def recorded(problem: Problem) -> tuple[Problem, dict[str, tuple]]:
    """Return the problem, and the argument shapes of the first call of each of its losses."""
    calls: dict[str, tuple] = {}

    def recording(name: str, loss: Callable) -> Callable:
        def call(*args):
            calls.setdefault(name, shapes(args))
            return loss(*args)

        return call

    lower, outer = (recording(f"{k} loss", getattr(problem, k)) for k in ("lower", "outer"))
    form = (getattr(problem, k, False) for k in ("has_aux", "stateful", "differentiated"))
    return Problem(lower, outer, *form), calls


def search_programs(setup: SearchSetup, carry: Carry, data) -> dict[str, str]:
    """Return a digest of the program of each part, on one device."""
    assert setup.traced is not None
    (step, _, calls), state = setup.traced, carry.state
    args = shapes((state, state.step, canonical(setup, data), carry.divergence.scale))
    types = [(x.shape, x.dtype) for x in jax.tree.leaves(args)]
    arguments = [v.aval for v in step.jaxpr.invars]
    # JAX reshards constants on a mesh.
    on_a_mesh = any(not x.sharding.mesh.empty for x in arguments)
    if [(x.shape, x.dtype) for x in arguments] != types or on_a_mesh:
        problem, calls = recorded(setup.problem)
        step = jax.make_jaxpr(fresh(setup._replace(problem=problem).step))(*args)
    losses = {"lower loss": setup.problem.lower, "outer loss": setup.problem.outer}
    programs = {name: _digest(losses[name], *args) for name, args in calls.items()}
    optimizer = functools.partial(_optimizer_step, setup.optimizer)
    programs["optimizer"] = _digest(optimizer, shapes(state.alpha))
    if not isinstance(setup.batches, Stream | Partition | None):
        train, valid, key = shapes(data)
        sides = (train, valid) if isinstance(setup.batches, Joint) else (valid,)
        programs["batches"] = _digest(setup.batches, key, *sides)
    programs["solver"] = program_digest(step)
    return {name: programs[name] for name in PARTS if name in programs}


def search_values(setup: SearchSetup, start: dict[str, Pytree]) -> dict[str, str]:
    """Return the fingerprint of the arrays in ``start``, and of the options."""
    options = {"diagnostics": setup.diagnostics, "history": str(setup.history)}
    if isinstance(setup.batches, Partition):
        options["batches"] = str(setup.batches)
    streamed = setup.batches.fingerprint() if isinstance(setup.batches, Stream) else {}
    return fingerprint(start | options) | streamed


def canonical(setup: SearchSetup, data: tuple) -> tuple:
    """Return a step's data in shapes that do not depend on the length of the search or chunk."""
    chunk, *others = data
    if isinstance(chunk, Chunk):
        pairs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), chunk.pairs
        )
        return (Chunk(chunk.first, pairs), *others)
    if not isinstance(setup.solver, SingleLoop):
        return data
    train, valid, order = data
    lengths = (*(1 + n for n in setup.solver.draws), 1)
    same = (jax.ShapeDtypeStruct((n,), x.dtype) for n, x in zip(lengths, order, strict=True))
    return train, valid, type(order)(*same)


def shapes(tree: Pytree) -> Pytree:
    """Return the tree with shapes and dtypes instead of arrays."""

    def shape(x):
        kind = x if hasattr(x, "dtype") else jax.typeof(x)
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype)

    return jax.tree.map(shape, tree)


def _digest(function: Callable, *args: Pytree) -> str:
    return program_digest(jax.make_jaxpr(fresh(function))(*args))


def _optimizer_step(optimizer: Any, alpha: Pytree) -> Pytree:
    """Return the first state of the optimizer, and its step along ``alpha`` from there."""
    optimizer = gradient_transformation("optimizer", optimizer)
    state = optimizer.init(alpha)
    extra_args = geometry.trial_arguments(lambda _: jnp.zeros(()), alpha)
    return state, optimizer.update(alpha, state, alpha, grad=alpha, **extra_args)
