"""The search: steps of :func:`bilevel.descent`, or of a single loop, until all are done.

Under a transformation it is one compiled loop, otherwise a host loop over compiled chunks of steps,
with progress, checkpoints and Ctrl-C between chunks. Both run the same program.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import optax

from bilevel.contracts import LowerSolver, Pytree, SingleLoop
from bilevel.internal.checks import concrete
from bilevel.internal.processes import report_lost_process
from bilevel.outer_loop import single_loop
from bilevel.outer_loop.history import History, as_history
from bilevel.outer_loop.search_arguments import check_search_arguments
from bilevel.outer_loop.search_chunks import resumed_carry, run_chunks
from bilevel.outer_loop.search_fingerprint import search_programs, search_values
from bilevel.outer_loop.search_program import Carry, SearchSetup
from bilevel.outer_loop.search_result import SearchResult
from bilevel.outer_loop.search_warnings import result_messages
from bilevel.outer_loop.stream import Stream, feeding
from bilevel.problem.problem import Problem
from bilevel.runs.checkpoint import saving
from bilevel.runs.fingerprint import check_same
from ntk.internal.sharding import on_mesh, replicate_like

_TRACED = (
    "progress, checkpoint, callback and a stream: expected none of them under jit or vmap, got one."
)
_SAVE_SECONDS = 10.0  # between two checkpoints, or twenty times what writing one takes


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
        As in :func:`descent`. The solver may be a :class:`bilevel.SingleLoop` too, which moves
        ``w`` and ``alpha`` together (:func:`bilevel.saba`).
    alpha, w0 : pytrees of floating arrays
        Where to start. The weights go on from one outer step to the next.
    train, valid : pytrees of arrays
        The lower and the outer loss's batch, or what ``batches`` samples from.
    steps : int
        Outer steps in all, those of a resumed checkpoint included.
    batches : ``batches(key, data) -> batch``, optional
        Samples a batch of ``train`` and one of ``valid`` at every step, inside the compiled loop;
        of ``valid`` only where the solver draws those of ``train`` itself
        (``unrolled(..., batches=...)``). :func:`bilevel.jointly` makes one of both at once, of
        whose first part such a solver draws its own;
        :func:`bilevel.stream` takes both from an iterator, and ``train`` and ``valid`` are None.
        A single loop takes a :func:`bilevel.partition`; without it, all data at every step.
    key : jax.Array, optional
        Needed with ``batches``, here or in the solver.
    progress : bool, optional
        A progress bar on standard error; by default only if that is a terminal, or in a
        notebook.
    checkpoint : path, optional
        A directory that receives the state every few seconds, and at the end.
    resume : bool
        Go on from ``checkpoint`` where it holds one: the result is that of an uninterrupted search,
        bit for bit. Without ``resume`` such a directory is refused.
    callback : ``callback(result so far)``, optional
        Called between chunks; a true value ends the search. Of several processes every one has a
        callback, and all end where one says so, or raises.
    every : int, optional
        Call it after every so many steps, and at the end; by default between chunks.
    chunk : int, optional
        Steps between two chunks; by default about half a second's worth.
    diagnostics : bool
        As in :func:`descent`. Of a single loop, whose steps only report noisy residuals: whether
        the result has ``info`` on its last direction, recomputed on all data.
    history : sequence of str, or :class:`bilevel.History`, optional
        What to keep of every step: names of metrics, and ``"alpha"``. Default: all, except for an
        alpha or an aux over 64 KiB (16,384 values in float32), which has to be named.
        ``bilevel.History(names, every=100)`` keeps one row for 100 steps. A single loop's losses,
        if left out, are not checked for being finite, and the lower loss is not computed.

    Returns
    -------
    SearchResult
        ``alpha``, ``w``, ``history``, ``state``, ``stopped``, and the ``report``
        on steps that went wrong. Ctrl-C returns what there is.
        ``step_scale`` is 1, or less if alpha diverged. The search then returned to an earlier point
        and took ``step_scale`` times the optimizer's steps: a quarter after each return. After
        eight returns it ends, and ``stopped`` says so; under ``jit``, the state stops changing.
        SIGTERM writes the ``checkpoint`` after the current chunk and then ends the process; without
        a checkpoint, nothing is different from other programs.

    Raises
    ------
    ValueError
        Before anything is compiled, naming the argument: losses that are not scalars, data that is
        empty or not finite, a point off its set, missing keys, a geometry without an optimizer
        that descends. Later, with the ``result`` so far, if it turns out that something comes
        after the geometry and moves alpha off its set.
    LostProcessError
        Where another process of the run ended, or cannot be reached.
    NonFiniteError
        Where a loss, the weights or the hypergradient stop being finite; it holds the last good
        state. (Under ``jit`` the state stops changing instead: ``result.state.step`` tells.)

    Warns
    -----
    UserWarning
        Once, if the ``report`` has messages: hypergradients of many steps were wrong or 0. At the
        start, if a leaf of ``alpha`` cannot be reached by the derivative.

    Notes
    -----
    With ``progress=False`` or None and no ``checkpoint`` or ``callback``, the whole works under
    ``jax.jit`` and ``jax.vmap``. Every call traces what it is given, as it is then; calls that come
    to the same program compile once.

    Arrays stay on the devices that they lie on. With rows over devices every gradient in ``w`` and
    every Hessian product is one sum over devices of the size of ``w``, and no row moves. An outer
    step of ``unrolled(optimizer, T)`` communicates ``(3 T + 1) |w|`` bytes, |w| those of the
    weights, and some ``2 T`` scalars; ``T |alpha|`` more where rows depend on a replicated alpha;
    one of ``implicit`` ``(G + H) |w|``, with G gradients and H Hessian products. Under
    ``jax.distributed`` all processes call with the same arguments, or with arrays over the devices
    of all.

    Memory beyond the state's: ``steps`` rows of the history, in full from the start. A callback
    gets a copy of the rows so far; whoever wants some of a large alpha's history keeps it there.

    Examples
    --------
    >>> import functools
    >>> import jax.numpy as jnp
    >>> import bilevel
    >>> problem = Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2),
    ...     outer=lambda w, alpha, batch: jnp.sum((w - batch) ** 2),
    ... )
    >>> data = jnp.zeros(1), jnp.ones(1)
    >>> run = functools.partial(search, problem, bilevel.implicit(), optax.sgd(0.25))
    >>> result = run(jnp.zeros(1), jnp.zeros(1), *data, steps=3)
    >>> result.alpha, result.history["value"]
    (Array([0.875], dtype=float...), Array([1. , 0.25 , 0.0625], dtype=float...))
    """
    arrays = alpha, w0, train, valid, key
    named = dict(zip(("alpha", "w0", "train", "valid", "key"), arrays, strict=True))
    traced = not concrete(arrays)
    setup = SearchSetup(problem, solver, optimizer, batches, diagnostics, as_history(history))
    if not traced:
        options = (
            steps,
            every,
            chunk,
            resume,
            str(setup.history),
            checkpoint is None,
            callback is None,
        )
        _check_processes(setup, named, options)
    check_search_arguments(
        solver, arrays, steps, batches, resume, checkpoint, callback, every, chunk, diagnostics
    )
    asked = progress, isinstance(batches, Stream), checkpoint is not None, callback is not None
    if traced and any(asked):
        raise ValueError(_TRACED)
    given = (train, valid, key)
    data = setup.prepared(given, steps)
    if traced:
        carry, _, notes = setup.start(alpha, w0, data, steps)
        _warn(notes)
        return _compiled(setup, carry, data, steps)
    with (
        report_lost_process("search"),
        saving(checkpoint, resume=resume, seconds=_SAVE_SECONDS) as saver,
        feeding(batches, data, saver.step or 0, steps, every, chunk) as feed,
        on_mesh((alpha, w0, feed.first)),
    ):
        if checkpoint is not None:
            saver.belong_to(search_values(setup, named))
        begin = alpha, w0, feed.first
        carry, step, notes = setup.start(*begin, steps)
        _warn(notes)
        if step is None and any(asked):
            raise ValueError(_TRACED)
        if step is None:
            return _compiled(setup, carry, data, steps)
        if checkpoint is not None:
            saver.belong_to(search_programs(setup, carry.state, feed.first, step))
        start_messages = carry.monitor.report.messages()
        carry = resumed_carry(setup, saver, replicate_like(carry, begin), steps)
        result = run_chunks(setup, carry, feed, steps, saver, progress, callback, every, chunk)
        if isinstance(solver, SingleLoop):
            single_loop.warn_if_lost(result.history)
        _warn(result_messages(setup, result, data, start_messages))
        return dataclasses.replace(result, info=setup.info(result.state, data))


def _compiled(setup: SearchSetup, carry: Carry, data: Pytree, steps: int) -> SearchResult:
    """All steps at once, as a part of the caller's own program."""
    carry = setup.advance(carry, data, steps)
    state = carry.state
    info, every = setup.info(state, data), setup.history.every
    report, scale = carry.monitor.report, carry.divergence.scale
    return SearchResult(state.alpha, state.w, carry.history, state, "", report, info, every, scale)


def _check_processes(setup: SearchSetup, named: dict[str, Any], options: tuple) -> None:
    """Raise if processes have different arguments: they would not take the same steps."""
    same = setup._replace(history=History())
    same = same._replace(batches=None) if isinstance(setup.batches, Stream) else same
    # At once, where a jit is around the search whose arguments are not traced.
    with report_lost_process("search"), jax.ensure_compile_time_eval():
        check_same(
            named
            | {"problem, solver, optimizer, batches": same}
            | {"steps, options, whether there is a callback": options}
        )


def _warn(messages: Sequence[str]) -> None:
    if messages:
        warnings.warn("search: " + "\nsearch: ".join(messages), stacklevel=3)
