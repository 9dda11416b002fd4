"""Run a search outside of compilation, as chunks of steps.

Between two chunks, the host updates the progress bar, writes checkpoints, calls the callback and
handles Ctrl-C and SIGTERM.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import Pytree, SingleLoop
from bilevel.internal import processes
from bilevel.outer_loop import divergence, geometry
from bilevel.outer_loop import history as search_history
from bilevel.outer_loop.search_program import QUANTITIES, SHOWN, Carry, SearchSetup
from bilevel.outer_loop.search_result import (
    MisplacedError,
    NonFiniteError,
    SearchResult,
    explain_nonfinite,
)
from bilevel.outer_loop.stream import Feed
from bilevel.runs.checkpoint import Saver
from bilevel.runs.interrupts import held_signals
from bilevel.runs.progress import progress_bar
from ntk.internal.compile_cache import fresh, program
from ntk.internal.sharding import keep_sharding

_CHUNK_SECONDS = 0.5  # between two updates of the progress bar, and two checks for Ctrl-C


def run_chunks(
    setup, carry, feed: Feed, steps, saver, progress, callback, every, chunk
) -> SearchResult:
    """Run chunks of steps until all are done, and the host's tasks between them."""
    done, count, stopped = int(carry.state.step), chunk or 1, ""
    advance = program(keep_sharding(setup.advance, carry), carry, feed.first, 1, donate=(0,))
    text = "outer {value:.4g}  lower {lower:.4g}"
    bar = progress if processes.is_first_process() else False
    with (
        held_signals(terminations=saver.directory is not None) as came,
        progress_bar(bar, "search", steps, text) as show,
    ):
        while done < steps:
            began = time.perf_counter()
            left = steps - done if every is None else min(steps - done, every - done % every)
            data, running = feed(done, processes.broadcast_first(min(count, left)))
            if not running:
                stopped = f"the batches ended after step {done}"
                saver.save(done, functools.partial(_checkpoint_contents, setup, carry), last=True)
                break
            carry = jax.block_until_ready(advance(carry, data, running))
            seconds = time.perf_counter() - began
            ran, done = int(carry.state.step) - done, int(carry.state.step)
            trouble = int(carry.trouble)
            contents = functools.partial(_checkpoint_contents, setup, carry)
            if done > 0:  # the initial state needs no checkpoint
                saver.save(done, contents, last=bool(trouble) or done == steps)
            if trouble == divergence.GAVE_UP:
                stopped = f"alpha diverged after step {done}, with shorter steps too"
                break
            if trouble:
                _raise(setup, trouble, carry, data)
            show(done, functools.partial(_displayed_losses, carry.last))
            interrupt = came()
            due = done == steps or (not interrupt and (every is None or done % every == 0))
            if callback is not None and due and _ended(callback, _make_result(setup, carry, "")):
                stopped = f"ended by the callback after step {done}"
            if interrupt:
                stopped = f"{interrupt} after step {done}"
            if stopped:
                saver.save(done, contents, last=True)
                break
            # The first chunk includes compilation; later chunks double at most.
            if chunk is None:
                count = max(1, min(2 * ran, int(ran * _CHUNK_SECONDS / max(seconds, 1e-6))))
    return _make_result(setup, carry, stopped)


def _raise(setup: SearchSetup, trouble: int, carry: Carry, data: Pytree) -> None:
    """Raise the trouble that :func:`first_trouble` saw; repeat the step to explain its cause."""
    index, step = trouble - 1, int(carry.state.step)
    result = _make_result(setup, carry, "not finite")
    if index < len(QUANTITIES):
        args = carry.state, carry.state.step, data, carry.divergence.scale
        new, _ = jax.jit(fresh(setup.step))(*args)
        quantity, single_loop = QUANTITIES[index], isinstance(setup.solver, SingleLoop)
        reason = explain_nonfinite(carry.state, new, quantity, single_loop)
        raise NonFiniteError(step, quantity, result, reason)
    name = geometry.geometry_names(carry.state.optimizer_state)[index - len(QUANTITIES)]
    raise MisplacedError(step, name, result)


def _ended(callback: Callable, result: SearchResult) -> bool:
    """Return whether the callback of any process ends the search; if one raises, all do."""
    return processes.any_process(processes.all_or_none(lambda: callback(result)))


def _displayed_losses(last: dict[str, Any]) -> dict[str, float]:
    """Return the losses that the bar shows, NaN if no step computes them."""
    return {name: float(last.get(name, np.nan)) for name in SHOWN}


def _make_result(setup: SearchSetup, carry: Carry, stopped: str) -> SearchResult:
    """Return the result so far. ``stopped`` is the reason for the end of the search."""
    # Copies: the carry's own buffers are donated to the next chunk.
    state = jax.tree.map(lambda x: jnp.array(x, copy=True), carry.state)
    rows = search_history.truncate(carry.history, setup.rows(int(state.step)))
    parts = rows, carry.monitor.report, carry.divergence.scale
    copies = jax.tree.map(lambda x: np.copy(processes.to_numpy(x)), parts)
    rows, report, scale = jax.device_put(copies)
    return setup.result(state, rows, report, scale, stopped)


def _checkpoint_contents(setup: SearchSetup, carry: Carry) -> Pytree:
    """Return the contents of a checkpoint."""
    rows = setup.rows(int(carry.state.step))
    history = search_history.truncate(carry.history, rows)
    return carry.state, history, (carry.monitor, carry.divergence)


def resumed_carry(setup: SearchSetup, saver: Saver, carry: Carry, steps: int) -> Carry:
    """Return ``carry`` at the checkpoint's step, if there is a checkpoint."""
    done = saver.done("steps", steps)
    if done == 0:
        return carry
    # The checkpoint has no rows of later steps.
    rows = setup.rows(done)
    like = search_history.truncate(carry.history, rows)
    seen = carry.monitor, carry.divergence
    state, saved_history, seen = saver.restore((carry.state, like, seen))

    def filled(x):
        return np.concatenate([x, np.zeros((setup.rows(steps) - rows, *x.shape[1:]), x.dtype)])

    history = jax.tree.map(filled, saved_history)
    # The last step's row, which the history needs again if the next step is not finite.
    last = carry.last | {
        k: jax.tree.map(lambda h: h[-1], saved_history[k]) for k in carry.last if k in saved_history
    }
    like = carry.state, carry.history, carry.last, (carry.monitor, carry.divergence)
    state, history, last, seen = jax.tree.map(
        processes.put_like, (state, history, last, seen), like
    )
    return Carry(state, history, last, carry.trouble, *seen)
