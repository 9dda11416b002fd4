"""The search: steps of :func:`bilevel.descent`, or of a single loop.

Under a transformation of JAX it is one compiled loop. Otherwise the host runs compiled chunks of
steps, with progress, checkpoints and Ctrl-C between them.
"""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import LowerSolver, Partition, Pytree, SingleLoop, params_of
from bilevel.hypergradients.hypergradient import check_constraint
from bilevel.internal import checks, processes
from bilevel.outer_loop import divergence, geometry, search_program, single_loop
from bilevel.outer_loop.descent import leaves_moved, run_once
from bilevel.outer_loop.history import History, as_history, truncate
from bilevel.outer_loop.search_program import Carry, SearchSetup
from bilevel.outer_loop.search_result import (
    MisplacedError,
    NonFiniteError,
    SearchResult,
    explain_nonfinite,
)
from bilevel.outer_loop.stream import Stream, feeding
from bilevel.problem.problem import Problem, at_variables
from bilevel.runs.checkpoint import Saver, saving
from bilevel.runs.fingerprint import check_same
from bilevel.runs.interrupts import held_signals
from bilevel.runs.progress import progress_bar
from ntk.internal.compile_cache import fresh, program
from ntk.internal.sharding import keep_sharding, on_mesh, replicate_like

_TRACED = (
    "progress, checkpoint, callback and a stream: expected none of them under jit or vmap, got one."
)
_CHUNK_SECONDS = 0.5  # between two updates of the progress bar, and two checks for Ctrl-C
_SAVE_SECONDS = 10.0  # between two checkpoints, or twenty times the duration of writing one


def search(
    problem: Problem,
    solver: LowerSolver | SingleLoop,
    optimizer: optax.GradientTransformation,
    alpha: Pytree,
    w0: Pytree,
    train: Pytree,
    valid: Pytree,
    *,
    steps: int,
    batches: Callable[[jax.Array, Pytree], Pytree] | None = None,
    key: chex.PRNGKey | None = None,
    progress: bool | None = None,
    checkpoint: Any = None,
    resume: bool = False,
    callback: Callable[[SearchResult], Any] | None = None,
    every: int | None = None,
    chunk: int | None = None,
    diagnostics: bool = False,
    history: History | Sequence[str] | None = None,
) -> SearchResult:
    """Minimise the outer loss over ``alpha``: ``steps`` steps of :func:`descent`.

    Parameters
    ----------
    problem, solver, optimizer
        The same as for :func:`descent`. A :class:`bilevel.SingleLoop` is a solver that moves ``w``
        and ``alpha`` together (:func:`bilevel.saba`).
    alpha, w0 : pytrees of floating arrays
        Start. The weights carry over from one outer step to the next.
    train, valid : pytrees of arrays
        The batch of the lower and of the outer loss, or the data that ``batches`` samples from.
    steps : int
        Total number of outer steps, including those of a resumed checkpoint.
    batches : ``batches(key, data) -> batch``, optional
        Samples a batch of ``train`` and one of ``valid`` at every step; of ``valid`` only if the
        solver draws batches of ``train`` itself (``unrolled(..., batches=...)``).
        :func:`bilevel.jointly` samples both at once; such a solver draws from the first part.
        :func:`bilevel.stream` takes both from an iterator; ``train`` and ``valid`` are then None. A
        single loop takes a :func:`bilevel.partition`, by default all data.
    key : jax.Array, optional
        Required if ``batches``, here or in the solver, draws.
    progress : bool, optional
        A progress bar on standard error. Default: in a terminal or a notebook.
    checkpoint : path, optional
        A directory that receives the state every few seconds, and at the end.
    resume : bool
        Resume from ``checkpoint`` if the directory has one. The result equals an uninterrupted
        search, bit for bit. Without ``resume`` such a directory raises ``ValueError``.
    callback : ``callback(result so far)``, optional
        Called between chunks. A true value ends the search. With multiple processes, each has a
        callback, and all end if one returns true or raises.
    every : int, optional
        Number of steps between two calls of ``callback``. Default: a chunk.
    chunk : int, optional
        Number of steps of a chunk. Default: about half a second of steps.
    diagnostics : bool
        Whether the history has the fields of :class:`bilevel.Info`. For a single loop: whether the
        result has ``info`` on its last direction, recomputed on all data.
    history : sequence of str, or :class:`bilevel.History`, optional
        Names of the metrics to record at every step, and ``"alpha"``. Default: all, except for an
        alpha or an aux over 64 KiB. ``bilevel.History(names, every=100)`` keeps one row for 100
        steps. Losses that a single loop does not record are not checked for being finite.

    Returns
    -------
    SearchResult
        ``alpha``, ``w``, ``history``, ``state``, ``stopped``, and the ``report`` on faulty steps.
        Ctrl-C returns the result so far. SIGTERM writes the ``checkpoint``, if there is one, and
        then ends the process. If alpha diverges, the search returns to an earlier point with steps
        a quarter as long, and ``step_scale`` is less than 1. After eight returns it ends, and
        ``stopped`` says so; under ``jit``, the state stops changing.

    Raises
    ------
    ValueError
        If an argument is wrong, before anything is compiled: losses that are not scalars, data
        that is empty or not finite, a point off its set, missing keys, a geometry without an
        optimizer that descends. Later, if a transformation moves alpha after its geometry; the
        exception has the ``result`` so far.
    LostProcessError
        If another process of the run ended, or cannot be reached.
    NonFiniteError
        If a loss, the weights or the hypergradient are not finite. The exception's ``result`` holds
        the last finite state. (Under ``jit`` the state stops changing: see ``result.state.step``.)

    Warns
    -----
    UserWarning
        Once, if the ``report`` has messages: hypergradients of many steps were wrong or 0. At the
        start, if the derivative cannot reach a leaf of ``alpha``.

    Notes
    -----
    Without ``progress``, ``checkpoint`` and ``callback``, a search works under ``jax.jit``,
    ``jax.vmap`` and ``jax.grad``. Every call traces its arguments; calls with the same program
    compile once.

    Arrays stay on their devices. If rows are sharded, no row moves: every gradient in ``w`` and
    every Hessian product is one sum over devices. An outer step of ``unrolled(optimizer, T)``
    communicates ``(3 T + 1) |w|`` bytes, with |w| those of the weights, and about ``2 T`` scalars;
    ``T |alpha|`` more if rows depend on a replicated alpha. A step of ``implicit`` communicates
    ``(G + H) |w|``, with G gradients and H Hessian products. Under ``jax.distributed`` all
    processes call with equal arguments, or arrays over all devices. Memory beyond the state: the
    rows of the history, and their copy for a callback.

    Examples
    --------
    >>> import bilevel
    >>> problem = Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2),
    ...     outer=lambda w, alpha, batch: jnp.sum((w - batch) ** 2),
    ... )
    >>> zero, one = jnp.zeros(1), jnp.ones(1)
    >>> methods = bilevel.implicit(), optax.sgd(0.25)
    >>> result = search(problem, *methods, zero, zero, zero, one, steps=3)
    >>> result.alpha, result.history["value"]
    (Array([0.875], dtype=float...), Array([1. , 0.25 , 0.0625], dtype=float...))
    """
    named = {"alpha": alpha, "w0": w0, "train": train, "valid": valid, "key": key}
    traced = not checks.concrete(named)
    setup = SearchSetup(problem, solver, optimizer, batches, diagnostics, as_history(history))
    present = checkpoint is not None, callback is not None
    if not traced:
        _check_processes(setup, named, (steps, every, chunk, resume, str(setup.history), present))
    _check_search_arguments(setup, named, steps, resume, checkpoint, callback, every, chunk)
    on_host = any((progress, isinstance(batches, Stream), *present))
    if traced and on_host:
        raise ValueError(_TRACED)
    data = setup.prepared((train, valid, key), steps)
    with (
        processes.report_lost_process("search"),
        saving(checkpoint, resume=resume, seconds=_SAVE_SECONDS) as saver,
        feeding(batches, data, saver.step or 0, steps, every, chunk) as feed,
        on_mesh((alpha, w0, feed.first)),
    ):
        if checkpoint is not None:
            saver.belong_to(search_program.search_values(setup, named))
        begin = alpha, w0, feed.first
        carry, step, notes = setup.start(*begin, steps)
        setup = setup._replace(traced=step)
        _warn(notes)
        traced = traced or not checks.concrete((carry, step.program.consts))
        if traced and on_host:
            raise ValueError(_TRACED)
        if traced:  # all steps become a part of the caller's program
            carry = setup.advance(carry, data, steps)
            parts = carry.state, carry.history, carry.monitor.report, carry.divergence.scale
            return setup.result(*parts, info=setup.info(carry.state, data))
        if checkpoint is not None:
            saver.belong_to(search_program.search_programs(setup, carry, feed.first))
        start_messages = carry.monitor.report.messages()
        carry = _resumed_carry(setup, saver, replicate_like(carry, begin), steps)
        result = _run_chunks(setup, carry, feed, steps, saver, progress, callback, every, chunk)
        if isinstance(solver, SingleLoop):
            single_loop.warn_if_lost(result.history)
        _warn(_result_messages(setup, result, data, start_messages))
        return dataclasses.replace(result, info=setup.info(result.state, data))


def _check_processes(setup: SearchSetup, named: dict[str, Any], options: tuple) -> None:
    """Raise if processes have different arguments, because their steps would differ."""
    same = setup._replace(history=History())
    same = same._replace(batches=None) if isinstance(setup.batches, Stream) else same
    # Evaluated at once, even inside a jit that does not trace the arguments.
    with processes.report_lost_process("search"), jax.ensure_compile_time_eval():
        check_same(
            named
            | {"problem, solver, optimizer, batches": same}
            | {"steps, options, whether there is a callback": options}
        )


def _warn(messages: Sequence[str]) -> None:
    if messages:
        warnings.warn("search: " + "\nsearch: ".join(messages), stacklevel=3)


def _check_search_arguments(setup, named, steps, resume, checkpoint, callback, every, chunk):
    """Raise ``ValueError`` if an argument is wrong, or does not fit the others."""
    solver, batches, key = setup.solver, setup.batches, named["key"]
    checks.integer("steps", steps, 1)
    if chunk is not None:
        checks.integer("chunk", chunk, 1)
    streamed = isinstance(batches, Stream)
    if streamed and (named["train"] is not None or named["valid"] is not None):
        raise ValueError("train, valid: expected None next to a stream of both, got data.")
    if batches is not None and not streamed:
        checks.function("batches", batches, "(key, data) -> batch")
    if isinstance(solver, SingleLoop) and not isinstance(batches, Partition | None):
        raise ValueError(
            "batches: expected bilevel.partition(batch_size) for a single-loop method, got a "
            "sampler of other batches."
        )
    if setup.diagnostics and isinstance(solver, SingleLoop) and solver.adjoint is None:
        raise ValueError(
            "diagnostics: expected False for a method without an adjoint, got True; "
            "hypergradient(problem, implicit()) at the result has an error estimate."
        )
    if callback is not None:
        checks.function("callback", callback, "result -> bool")
    if every is not None:
        checks.integer("every", every, 1)
        if callback is None:
            raise ValueError(f"every: expected a callback to call so often, got none and {every}.")
    if resume and checkpoint is None:
        raise ValueError("resume: expected a checkpoint directory to resume from, got None.")
    drawn = (batches is not None and not streamed) or getattr(solver, "batches", None) is not None
    if drawn and key is None:
        raise ValueError("key: expected a PRNG key to sample batches with, got None.")
    if key is not None:
        checks.prng_key("key", key)
    for name in ("alpha", "w0"):
        checks.check_not_empty(name, named[name])
        checks.check_floating(name, params_of(named[name]))
    for name in ("alpha", "w0", "train", "valid"):
        checks.check_data(name, named[name])
    check_constraint(solver, named["alpha"], named["w0"])


def _run_chunks(setup, carry, feed, steps, saver, progress, callback, every, chunk) -> SearchResult:
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
    index, step, quantities = trouble - 1, int(carry.state.step), search_program.QUANTITIES
    result = _make_result(setup, carry, "not finite")
    if index < len(quantities):
        args = carry.state, carry.state.step, data, carry.divergence.scale
        new, _ = jax.jit(fresh(setup.step))(*args)
        is_single = isinstance(setup.solver, SingleLoop)
        reason = explain_nonfinite(carry.state, new, quantities[index], is_single)
        raise NonFiniteError(step, quantities[index], result, reason)
    name = geometry.geometry_names(carry.state.optimizer_state)[index - len(quantities)]
    raise MisplacedError(step, name, result)


def _ended(callback: Callable, result: SearchResult) -> bool:
    """Return whether the callback of any process ends the search; if one raises, all do."""
    return processes.any_process(processes.all_or_none(lambda: callback(result)))


def _displayed_losses(last: dict[str, Any]) -> dict[str, float]:
    """Return the losses that the bar shows, NaN if no step computes them."""
    return {name: float(last.get(name, np.nan)) for name in search_program.SHOWN}


def _make_result(setup: SearchSetup, carry: Carry, stopped: str) -> SearchResult:
    """Return the result so far. ``stopped`` is the reason for the end of the search."""
    # Copies: the carry's own buffers are donated to the next chunk.
    state = jax.tree.map(lambda x: jnp.array(x, copy=True), carry.state)
    rows = truncate(carry.history, setup.rows(int(state.step)))
    parts = rows, carry.monitor.report, carry.divergence.scale
    copies = jax.tree.map(lambda x: np.copy(processes.to_numpy(x)), parts)
    rows, report, scale = jax.device_put(copies)
    return setup.result(state, rows, report, scale, stopped)


def _checkpoint_contents(setup: SearchSetup, carry: Carry) -> Pytree:
    """Return the contents of a checkpoint."""
    rows = setup.rows(int(carry.state.step))
    history = truncate(carry.history, rows)
    return carry.state, history, (carry.monitor, carry.divergence)


def _resumed_carry(setup: SearchSetup, saver: Saver, carry: Carry, steps: int) -> Carry:
    """Return ``carry`` at the checkpoint's step, if there is a checkpoint."""
    done = saver.done("steps", steps)
    if done == 0:
        return carry
    # The checkpoint has no rows of later steps.
    rows = setup.rows(done)
    like = truncate(carry.history, rows)
    seen = carry.monitor, carry.divergence
    state, saved_history, seen = saver.restore((carry.state, like, seen))

    def filled(x):
        return np.concatenate([x, np.zeros((setup.rows(steps) - rows, *x.shape[1:]), x.dtype)])

    history = jax.tree.map(filled, saved_history)
    # The last step's row, which the history needs again if the next step is not finite.
    names = carry.last.keys() & saved_history.keys()
    last = carry.last | {k: jax.tree.map(lambda h: h[-1], saved_history[k]) for k in names}
    like = carry.state, carry.history, carry.last, (carry.monitor, carry.divergence)
    parts = jax.tree.map(processes.put_like, (state, history, last, seen), like)
    state, history, last, seen = parts
    return Carry(state, history, last, carry.trouble, *seen)


def _result_messages(
    setup: SearchSetup, result: SearchResult, data: Pytree, known: Sequence[str]
) -> list[str]:
    """Return a message for each fault, without the messages ``known`` at the start."""
    report = result.report
    if report.zero.last and _at_minimum(setup, result, data):
        report = report._replace(zero=jax.tree.map(jnp.zeros_like, report.zero))
    diverged = divergence.messages(result.step_scale)
    if diverged:  # the hypergradients do not predict a return to an earlier state
        report = report._replace(compared=jnp.zeros_like(report.compared))
    return [m for m in (*diverged, *report.messages()) if m not in known]


def _at_minimum(setup: SearchSetup, result: SearchResult, data: Pytree) -> bool:
    """Return whether a gradient of 0 is right: the outer loss is stationary in ``w`` at the end."""
    optimizer = checks.gradient_transformation("optimizer", setup.optimizer)
    moved = leaves_moved(optimizer, result.state.optimizer_state, result.state.alpha)
    if isinstance(setup.solver, SingleLoop) or not any(moved):
        return True
    if setup.batches is not None or result.report.zero.last == result.report.steps:
        return False  # a hypergradient that was always 0 is reported in any case

    def stationary(w, alpha, valid):
        stateful = getattr(setup.problem, "stateful", False)
        outer = at_variables(setup.problem, w.variables if stateful else None).outer
        value, slope = jax.value_and_grad(outer)(params_of(w), alpha, valid)
        size = optax.tree.norm(slope) * jnp.maximum(optax.tree.norm(params_of(w)), 1)
        return size <= 1e-6 * jnp.abs(value)

    return bool(run_once(stationary, result.w, result.alpha, data[1]))
