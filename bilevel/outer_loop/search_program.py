"""The compiled part of a search: its state, its first state, and the loop over its steps."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import DescentState, Joint, Keyed, Pytree, SingleLoop
from bilevel.hypergradients.error_estimate import Info
from bilevel.internal.checks import concrete
from bilevel.outer_loop import divergence, geometry, single_loop
from bilevel.outer_loop import history as search_history
from bilevel.outer_loop.descent import descent, noted_descent
from bilevel.outer_loop.divergence import DivergenceMonitor
from bilevel.outer_loop.report import StepMonitor, init_step_monitor, monitor_step, spent_share
from bilevel.outer_loop.search_fingerprint import recorded
from bilevel.outer_loop.search_result import SearchResult, is_tree_finite
from bilevel.outer_loop.stream import Stream, of_step
from bilevel.problem.problem import Problem
from ntk.internal.compile_cache import fresh
from ntk.internal.sharding import with_automatic_axes

QUANTITIES = ("lower loss", "weights", "outer loss", "hypergradient", "alpha")  # causes first
SHOWN = "value", "lower"


class Carry(NamedTuple):
    """State that the loop of a search carries from step to step."""

    state: DescentState
    history: dict[str, Any]  # [rows, ...] each, filled up to state.step
    last: dict[str, jax.Array]  # last step: losses for the progress bar, and a part of its row
    trouble: jax.Array  # [], int: 0, or 1 + the index of the faulty quantity: see first_trouble
    monitor: StepMonitor  # observations of the steps up to state.step
    divergence: DivergenceMonitor  # whether alpha diverges, and the state to return to


class SearchSetup(NamedTuple):
    """The problem and the options of a search, and its steps as pure functions."""

    problem: Problem
    solver: Any  # LowerSolver or SingleLoop
    optimizer: optax.GradientTransformation
    batches: Callable | Stream | None
    diagnostics: bool
    history: search_history.History

    def prepared(self, data, steps) -> Pytree:
        """Return ``(train, valid, key)`` in the form that the steps take."""
        if isinstance(self.solver, SingleLoop):
            return single_loop.prepared(self.solver, self.batches, data, steps)
        return data

    def start(self, alpha, w0, data, steps) -> tuple[Carry, tuple | None, list[str]]:
        """Return the first carry, the program of a step with its losses' calls, and warnings."""
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
        trace = jax.make_jaxpr(fresh(noted), return_shape=True)
        closed, (after, metrics) = trace(state, state.step, data)
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
        growth = divergence.init_divergence_monitor(state)
        carry = Carry(state, history, last, jnp.zeros((), int), monitor, growth)
        # None if a step closes over traced values.
        traced = (closed, calls) if concrete((carry, closed.consts)) else None
        if traced:
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
            new, metrics = self.step(old, number, data, growth.scale)
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
            restart = functools.partial(self.restart, data)
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
