"""The search: steps of :func:`bilevel.descent`, or of a single loop, until all are done.

Under a transformation it is one compiled loop, otherwise a host loop over compiled chunks of steps,
with progress, checkpoints and Ctrl-C between chunks. Both run the same program.
"""

import copyreg
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.contracts import DescentState, Joint, Keyed, LowerSolver, Pytree, SingleLoop, params_of
from bilevel.hypergradients.error_estimate import Info
from bilevel.internal.checks import concrete, gradient_transformation, integer
from bilevel.internal.meshes import keep_sharding, on_mesh, replicate_like, with_automatic_axes
from bilevel.internal.processes import (
    all_or_none,
    any_process,
    broadcast_first,
    is_first_process,
    put_like,
    report_lost_process,
)
from bilevel.internal.processes import to_numpy as whole_array
from bilevel.outer_loop import divergence as _divergence
from bilevel.outer_loop import geometry, nonfinite
from bilevel.outer_loop import history as _search_history
from bilevel.outer_loop import single_loop as _single_loop
from bilevel.outer_loop.descent import descent, leaves_moved, noted_descent
from bilevel.outer_loop.report import (
    SearchReport,
    StepMonitor,
    has_schedule,
    init_step_monitor,
    monitor_step,
    spent_share,
)
from bilevel.outer_loop.search_arguments import check_search_arguments
from bilevel.outer_loop.stream import Feed, Stream, feeding, of_step
from bilevel.problem.problem import Problem, at_variables
from bilevel.runs.checkpoint import Saver, saving
from bilevel.runs.fingerprint import check_same, fingerprint
from bilevel.runs.interrupts import held_signals
from bilevel.runs.progress import progress_bar
from ntk.internal.compile_cache import fresh, program

_QUANTITIES = ("lower loss", "weights", "outer loss", "hypergradient", "alpha")  # causes first
_SHOWN = "value", "lower"
_CHUNK_SECONDS = 0.5  # between two updates of the progress bar, and two looks for Ctrl-C
_TRACED = (
    "progress, checkpoint, callback and a stream: expected none of them under jit or vmap, got one."
)
_SAVE_SECONDS = 10.0  # between two checkpoints, or twenty times what writing one takes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["alpha", "w", "history", "state", "info", "report", "step_scale"],
    meta_fields=["stopped", "history_every"],
)
@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of :func:`search`; a pytree, so that functions returning it can be compiled."""

    alpha: Pytree
    w: Pytree
    history: dict[str, Any]  # name -> [rows, ...]; "alpha" as a pytree of those
    state: DescentState
    stopped: str  # "" when all steps were done and nobody interrupted them, else what ended it
    report: SearchReport  # what went wrong in the steps, in numbers
    info: Info | None = None  # of a single loop's last direction, with diagnostics
    history_every: int = 1  # steps that a row of the history stands for
    step_scale: jax.Array | float = 1.0  # alpha's last steps, by the optimizer's: less if shortened


class NonFiniteError(FloatingPointError):
    """A search met a NaN or an infinity: ``step``, ``quantity``, and ``result`` up to then."""

    def __init__(self, step: int, quantity: str, result: SearchResult, reason: str = ""):
        super().__init__(
            f"{quantity}: expected finite values, got a NaN or an infinity at outer step {step}; "
            "the state before it is in this exception's `result`." + f" {reason}".rstrip()
        )
        self.step, self.quantity, self.result = step, quantity, result

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_init(self)


class MisplacedError(ValueError):
    """Something moved alpha on after its geometry: at ``step``, with the ``result`` up to then."""

    def __init__(self, step: int, name: str, result: SearchResult):
        super().__init__(f"{geometry.MISPLACED.format(name)} It was seen at outer step {step}.")
        self.step, self.result = step, result

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_init(self)


def _without_init(error: Exception) -> tuple:
    """Pickle and copy an error without its constructor, whose arguments are not its ``args``."""
    return copyreg.__newobj__, (type(error), *error.args), error.__dict__  # type: ignore[attr-defined]


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
    history: Sequence[str] | None = None,
    history_every: int = 1,
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
    history : sequence of str, optional
        What to keep of every step: names of metrics, and ``"alpha"``. By default all; of an alpha
        or an aux over 64 KiB (16,384 numbers in float32) not its history, which has to be asked
        for. A single loop's losses, if left out, are not watched for being finite, and the lower
        loss is not computed.
    history_every : int
        Keep one row of so many steps: that of the last one.

    Returns
    -------
    SearchResult
        ``alpha``, ``w``, ``history``, ``state``, ``stopped``, and the ``report``
        (:class:`bilevel.SearchReport`) on steps that went wrong. Ctrl-C returns what there is.
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
    traced = not concrete(arrays)
    setup = _Setup(problem, solver, optimizer, batches, diagnostics, history_every)
    if not traced:
        options = steps, every, chunk, resume, history, checkpoint is None, callback is None
        _check_processes(setup, arrays, options)
    check_search_arguments(
        solver, arrays, steps, batches, resume, checkpoint, callback, every, chunk, diagnostics
    )
    integer("history_every", history_every, 1)
    asked = progress, isinstance(batches, Stream), checkpoint is not None, callback is not None
    if traced and any(asked):
        raise ValueError(_TRACED)
    given = (train, valid, key)
    data = setup.prepared(given, steps)
    if traced:
        carry, _ = setup.start(alpha, w0, data, steps, history)
        return _compiled(setup, carry, data, steps)
    with (
        report_lost_process("search"),
        saving(
            checkpoint,
            None if checkpoint is None else setup.fingerprint(alpha, w0, given, history),
            resume=resume,
            seconds=_SAVE_SECONDS,
        ) as saver,
        feeding(batches, data, saver.step or 0, steps, every, chunk) as feed,
        on_mesh((alpha, w0, feed.first)),
    ):
        begin = alpha, w0, feed.first
        carry, hidden = setup.start(*begin, steps, history)
        if hidden and any(asked):
            raise ValueError(_TRACED)
        if hidden:
            return _compiled(setup, carry, data, steps)
        given_before = carry.watch.report.messages()
        carry = _resumed(setup, saver, replicate_like(carry, begin), steps)
        found = _drive(setup, carry, feed, steps, saver, progress, callback, every, chunk)
        _warn_about_result(setup, found, data, given_before)
        return dataclasses.replace(found, info=setup.info(found.state, data))


def _compiled(setup: "_Setup", carry: "_Carry", data: Pytree, steps: int) -> SearchResult:
    """All steps at once, as a part of the caller's own program."""
    carry = setup.advance(carry, data, steps)
    state = carry.state
    info, every = setup.info(state, data), setup.history_every
    report, scale = carry.watch.report, carry.divergence.scale
    return SearchResult(state.alpha, state.w, carry.history, state, "", report, info, every, scale)


def _check_processes(setup: "_Setup", arrays: tuple, options: tuple) -> None:
    """Refuse what other processes call with other values: they would not do the same steps."""
    named = dict(zip(("alpha", "w0", "train", "valid", "key"), arrays, strict=True))
    same = setup._replace(batches=None) if isinstance(setup.batches, Stream) else setup
    # At once, where a jit is around the search whose arguments are not traced.
    with report_lost_process("search"), jax.ensure_compile_time_eval():
        check_same(
            named
            | {"problem, solver, optimizer, batches": same}
            | {"steps, options, whether there is a callback": options}
        )


# ----------------------------------------------------------------------------- the compiled part


class _Carry(NamedTuple):
    state: DescentState
    history: dict[str, Any]  # [rows, ...] each, filled up to state.step
    last: dict[str, jax.Array]  # the last step's: losses for the progress bar, a part of its row
    trouble: jax.Array  # [], int: 0, or 1 + the index of what was wrong: see _first_trouble
    watch: StepMonitor  # the observations of the steps up to state.step
    divergence: _divergence.DivergenceMonitor  # whether alpha diverges, and the state to return to


class _Setup(NamedTuple):
    """What a search is made of."""

    problem: Problem
    solver: Any  # LowerSolver or SingleLoop
    optimizer: optax.GradientTransformation
    batches: Callable | Stream | None
    diagnostics: bool
    history_every: int

    def prepared(self, data, steps) -> Pytree:
        """``(train, valid, key)`` as the steps take it."""
        if isinstance(self.solver, SingleLoop):
            return _single_loop.prepared(self.solver, self.batches, data, steps)
        return data

    def start(self, alpha, w0, data, steps, names) -> tuple[_Carry, bool]:
        """The first carry; whether a step closes over traced values, if the arguments are not."""
        if isinstance(self.solver, SingleLoop):
            state = _single_loop.init_single_loop(*self[:3], alpha, w0, data)
        else:
            state = descent(*self[:3])[0](alpha, w0)
        # Copies: the loop's carry is donated, while the caller keeps the arrays, and a state may
        # hold the same one twice. With dtypes that are not weak, as a step returns them: else the
        # second chunk would be compiled anew.
        state = jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x), copy=True), state)
        notes: list[str] = []
        noted = functools.partial(self.step, note=notes.append)
        trace = jax.make_jaxpr(fresh(noted), return_shape=True)
        closed, (after, metrics) = trace(state, state.step, data)
        spent = self.spent(alpha, w0, steps)
        watch = init_step_monitor(metrics, spent)
        _, metrics = jax.eval_shape(monitor_step, watch, after, metrics)
        row = _search_history.select_metrics(
            names, metrics | {"alpha": state.alpha}, self.rows(steps)
        )
        history = _search_history.empty_history(row, self.rows(steps))
        shown = {*_SHOWN}
        if isinstance(self.solver, SingleLoop) and names is not None:
            shown &= {*names}  # else no step computes them
        kept = shown if self.history_every == 1 else (shown | {*row}) - {"alpha"}
        last = jax.tree.map(_search_history.missing_value, {k: metrics[k] for k in sorted(kept)})
        divergence = _divergence.init_divergence_monitor(state)
        carry = _Carry(state, history, last, jnp.zeros((), int), watch, divergence)
        hidden = not concrete((carry, closed.consts))
        if not hidden:
            notes += watch.report.messages()
        _warned(dict.fromkeys(notes))
        return carry, hidden

    def spent(self, alpha, w0, steps) -> jax.Array | None:
        """How much of the search the inner optimizer's schedule leaves without steps."""
        if not has_schedule(self.solver, alpha, w0):
            return None

        def share(alpha, w0):
            return spent_share(self.solver.inner, alpha, w0, steps)

        run = jax.jit(fresh(lambda *args: with_automatic_axes(share, args, lambda: None)))
        return run(alpha, w0)

    def rows(self, steps: int) -> int:
        """How many the history of ``steps`` steps has."""
        return _search_history.history_length(steps, self.history_every)

    def fingerprint(self, alpha, w0, data, names) -> dict[str, str]:
        """What a checkpoint has to have been made from, to be resumed."""
        history = "all" if names is None else ", ".join(sorted(names))
        parts = self._asdict() | dict(zip(("train", "valid", "key"), data, strict=True))
        parts |= {"alpha": alpha, "w0": w0, "history": history}
        if not isinstance(self.batches, Stream):
            return fingerprint(parts)
        return fingerprint(parts | {"batches": "a stream"}) | self.batches.fingerprint()

    def step(self, state, number, data, scale=None, note=lambda message: None):
        """Step ``number``, which is that of the state, but the same in all copies under vmap.

        ``alpha`` takes ``scale`` times the optimizer's step.
        """
        step = functools.partial(self._step, note=note)
        return with_automatic_axes(step, (state, number, data, scale), lambda: (state, None))

    def _step(self, state, number, data, scale, note):
        if scale is None:
            return self._taken(state, number, data, note)
        optimizer = _divergence.shortening(self.optimizer, scale)
        new, metrics = self._replace(optimizer=optimizer)._taken(state, number, data, note)
        return _divergence.shortened(state, new, scale), metrics

    def _taken(self, state, number, data, note):
        if isinstance(self.solver, SingleLoop):
            return _single_loop.single_loop_step(*self[:3], state, number, data)
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
        if self.batches is not None:  # values of two batches do not differ by what alpha did
            metrics.pop("predicted", None)
        return state, metrics

    def advance(self, carry: _Carry, data, count) -> _Carry:
        """``count`` steps; those after a quantity stopped being finite change nothing."""

        def body(begun, data, i, carry):
            old, history, last, trouble, watch, divergence = carry
            number = begun + i
            new, metrics = self.step(old, number, data, divergence.scale)
            seen, metrics = monitor_step(watch, new, metrics)
            losses = {k: metrics[k] for k in _SHOWN if k in last}
            found = _first_trouble(new, losses, metrics["grad_norm"])
            trouble = jnp.where(trouble == 0, found, trouble)
            good = trouble == 0
            history = _search_history.write_row(
                history,
                metrics | {"alpha": new.alpha},
                last | {"alpha": old.alpha},
                number,
                old.step,
                good,
                self.history_every,
            )
            shown = {k: metrics[k] for k in last}
            before = old, last, watch
            state, last, watch = _single_loop.either(good, (new, shown, seen), before)
            divergence = _divergence.observed(
                divergence, metrics["grad_norm"], metrics["value"], good
            )
            single = isinstance(self.solver, SingleLoop)
            restart = functools.partial(self.restart, data)
            divergence, state, trouble = _divergence.check_divergence(
                *(divergence, state, number, trouble, restart),
                _divergence.NOISY if single else _divergence.EXACT,
            )
            return _Carry(state, history, last, trouble, watch, divergence)

        def loop(carry, data, count):
            return jax.lax.fori_loop(
                0, count, functools.partial(body, carry.state.step, data), carry
            )

        return with_automatic_axes(loop, (carry, data, count), lambda: carry)

    def restart(self, data, state, number):
        """A single loop's state, put back to an earlier one."""
        if not isinstance(self.solver, SingleLoop):
            return state
        return self.solver.restart(state, number, *data[:2])

    def info(self, state: DescentState, data: Pytree) -> Info | None:
        """What is known of a single loop's direction at the end."""
        if not (self.diagnostics and isinstance(self.solver, SingleLoop)):
            return None
        return _single_loop.info(self.problem, self.solver, state, data)


def _first_trouble(
    state: DescentState, losses: dict[str, jax.Array], grad_norm: jax.Array
) -> jax.Array:
    """0, or 1 + the index of a quantity that is not finite, or behind those of a geometry."""
    moved = geometry.moved_on(state.optimizer_state, state.alpha)
    watched = (losses.get("lower"), state.w, losses.get("value"), grad_norm)
    alpha = ~nonfinite.is_tree_finite(state.alpha) & ~jnp.stack([jnp.zeros((), bool), *moved]).any()
    bad = jnp.stack([*(~nonfinite.is_tree_finite(x) for x in watched), alpha, *moved])
    return jnp.where(bad.any(), 1 + jnp.argmax(bad), 0).astype(int)


def _raise(setup: _Setup, trouble: int, carry: _Carry, data: Pytree) -> None:
    """What :func:`_first_trouble` found, as an exception; the step is taken once more to see it."""
    index, step, result = (
        trouble - 1,
        int(carry.state.step),
        _make_result(setup, carry, "not finite"),
    )
    if index < len(_QUANTITIES):
        args = carry.state, carry.state.step, data, carry.divergence.scale
        new, _ = jax.jit(fresh(setup.step))(*args)
        quantity, single_loop = _QUANTITIES[index], isinstance(setup.solver, SingleLoop)
        reason = nonfinite.explain_nonfinite(carry.state, new, quantity, single_loop)
        raise NonFiniteError(step, quantity, result, reason)
    name = geometry.geometry_names(carry.state.optimizer_state)[index - len(_QUANTITIES)]
    raise MisplacedError(step, name, result)


# ----------------------------------------------------------------------------- the host's part


def _drive(
    setup, carry, feed: Feed, steps, saver, progress, callback, every, chunk
) -> SearchResult:
    """Chunks of steps until all are done, with what the host does in between."""
    done, count, stopped = int(carry.state.step), chunk or 1, ""
    advance = program(keep_sharding(setup.advance, carry), carry, feed.first, 1, donate=(0,))
    text = "outer {task.fields[value]:.4g}  lower {task.fields[lower]:.4g}"
    with (
        held_signals(terminations=saver.directory is not None) as came,
        progress_bar(
            progress if is_first_process() else False, "search", steps, text, _SHOWN
        ) as show,
    ):
        while done < steps:
            began = time.perf_counter()
            left = steps - done if every is None else min(steps - done, every - done % every)
            data, running = feed(done, broadcast_first(min(count, left)))
            if not running:
                stopped = f"the batches ended after step {done}"
                saver.save(done, functools.partial(_checkpoint_contents, setup, carry), last=True)
                break
            carry = jax.block_until_ready(advance(carry, data, running))
            seconds = time.perf_counter() - began
            ran, done = int(carry.state.step) - done, int(carry.state.step)
            trouble = int(carry.trouble)
            kept = functools.partial(_checkpoint_contents, setup, carry)
            if done > 0:  # before that there is nothing to go on from
                saver.save(done, kept, last=bool(trouble) or done == steps)
            if trouble == _divergence.GAVE_UP:
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
                saver.save(done, kept, last=True)
                break
            # The first chunk's time is the compiler's; later ones double at most.
            if chunk is None:
                count = max(1, min(2 * ran, int(ran * _CHUNK_SECONDS / max(seconds, 1e-6))))
    return _make_result(setup, carry, stopped)


def _warn_about_result(
    setup: _Setup, result: SearchResult, data: Pytree, given: Sequence[str]
) -> None:
    """Warn once of all that went wrong, except for the messages ``given`` at the start."""
    if isinstance(setup.solver, SingleLoop):
        _single_loop.warn_if_lost(result.history)
    report = result.report
    if report.zero.last and _at_minimum(setup, result, data):
        report = report._replace(zero=jax.tree.map(jnp.zeros_like, report.zero))
    diverged = _divergence.messages(result.step_scale)
    if diverged:  # after a return to an earlier state, changes of the loss were not predicted
        report = report._replace(compared=jnp.zeros_like(report.compared))
    _warned([m for m in (*diverged, *report.messages()) if m not in given])


def _at_minimum(setup: _Setup, result: SearchResult, data: Pytree) -> bool:
    """Whether a gradient of 0 is right at the end: the outer loss is stationary in ``w`` there.

    A single loop's direction may be 0 at a solution. An alpha that is held needs no gradient.
    """
    optimizer = gradient_transformation("optimizer", setup.optimizer)
    if isinstance(setup.solver, SingleLoop) or not any(leaves_moved(optimizer, result.state)):
        return True
    if setup.batches is not None or result.report.zero.last == result.report.steps:
        return False  # one that was 0 from the start is reported in any case

    def slope(w, alpha, valid):
        stateful = getattr(setup.problem, "stateful", False)
        outer = at_variables(setup.problem, w.variables if stateful else None).outer
        value, slope = jax.value_and_grad(outer)(params_of(w), alpha, valid)
        size = optax.tree.norm(slope) * jnp.maximum(optax.tree.norm(params_of(w)), 1)
        return size <= 1e-6 * jnp.abs(value)

    def run(*args):
        return with_automatic_axes(slope, args, lambda: None)

    args = result.w, result.alpha, data[1]
    return bool(program(run, *args)(*args))


def _warned(messages) -> None:
    if messages:
        warnings.warn("search: " + "\nsearch: ".join(messages), stacklevel=3)


def _ended(callback: Callable, result: SearchResult) -> bool:
    """Whether the callback of any process says so; where one raises, all do."""
    return any_process(all_or_none(lambda: callback(result)))


def _displayed_losses(last: dict[str, Any]) -> dict[str, float]:
    """What the bar says: the losses, NaN if no step computes them."""
    return {name: float(last.get(name, np.nan)) for name in _SHOWN}


def _make_result(setup: _Setup, carry: _Carry, stopped: str) -> SearchResult:
    # Copies: the carry's own buffers are donated to the next chunk.
    state = jax.tree.map(lambda x: jnp.array(x, copy=True), carry.state)
    rows = jax.tree.map(
        np.copy, _search_history.truncate(carry.history, setup.rows(int(state.step)))
    )
    every, rows = setup.history_every, jax.device_put(rows)
    report = jax.device_put(jax.tree.map(lambda x: np.copy(whole_array(x)), carry.watch.report))
    scale = jax.device_put(np.copy(whole_array(carry.divergence.scale)))
    return SearchResult(state.alpha, state.w, rows, state, stopped, report, None, every, scale)


def _checkpoint_contents(setup: _Setup, carry: _Carry) -> Pytree:
    """What a checkpoint holds."""
    rows = setup.rows(int(carry.state.step))
    kept = _search_history.truncate(carry.history, rows)
    return carry.state, kept, (carry.watch, carry.divergence)


def _resumed(setup: _Setup, saver: Saver, carry: _Carry, steps: int) -> _Carry:
    """``carry`` as it was at the checkpoint's step, if there is one."""
    done = saver.done("steps", steps)
    if done == 0:
        return carry
    # Shapes only: of steps not yet done there is nothing to read.
    rows = setup.rows(done)
    like = jax.tree.map(
        lambda h: jax.ShapeDtypeStruct((rows, *h.shape[1:]), h.dtype), carry.history
    )
    seen = carry.watch, carry.divergence
    state, kept, seen = saver.restore((carry.state, like, seen))

    def filled(x):
        return np.concatenate([x, np.zeros((setup.rows(steps) - rows, *x.shape[1:]), x.dtype)])

    history = jax.tree.map(filled, kept)
    # The last step's row, which comes back where the next step is not finite.
    last = carry.last | {k: jax.tree.map(lambda h: h[-1], kept[k]) for k in carry.last if k in kept}
    like = carry.state, carry.history, carry.last, (carry.watch, carry.divergence)
    state, history, last, seen = jax.tree.map(put_like, (state, history, last, seen), like)
    return _Carry(state, history, last, carry.trouble, *seen)
