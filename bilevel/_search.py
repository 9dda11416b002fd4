"""The outer loop: one step of descent in ``alpha``, and the search that repeats it.

``descent`` is a pair of pure functions to ``jit``, ``vmap`` or ``scan`` oneself. ``search`` runs
it: under a transformation as one compiled loop, otherwise as a host loop over compiled chunks of
steps, with progress, checkpoints and Ctrl-C between chunks. Both run the same program.
"""

import dataclasses
import functools
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel import checkpoint as checkpoints
from bilevel._hypergradient import stateful_hypergradient
from bilevel._progress import progress_bar
from bilevel.checks import floating, function, gradient_transformation, prng_key, whole
from bilevel.problem import Problem
from bilevel.protocols import LowerSolver, Pytree

_QUANTITIES = ("lower loss", "weights", "outer loss", "hypergradient", "alpha")  # causes first
_CHUNK_SECONDS = 0.5  # between two looks at the screen and the keyboard
_SAVE_SECONDS = 10.0  # between two checkpoints, or twenty times what one takes


class DescentState(NamedTuple):
    """State of :func:`descent`."""

    alpha: Pytree
    w: Pytree
    solver: Pytree  # the lower solver's: momentum, warm starts
    optimizer: Pytree  # of alpha
    step: jax.Array  # [], int: outer steps done


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["alpha", "w", "history", "state"],
    meta_fields=["stopped"],
)
@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of :func:`search`; a pytree, so that functions returning it can be compiled."""

    alpha: Pytree
    w: Pytree
    history: dict[str, Any]  # name -> [steps, ...]; "alpha" as a pytree of those
    state: DescentState
    stopped: str  # "" when all steps were done, else why not


class NonFiniteError(FloatingPointError):
    """A search met a NaN or an infinity: ``step``, ``quantity``, and ``result`` up to then."""

    def __init__(self, step: int, quantity: str, result: SearchResult):
        super().__init__(
            f"{quantity}: expected finite values, got a NaN or an infinity at outer step {step}; "
            "the state before it is in this exception's `result`."
        )
        self.step, self.quantity, self.result = step, quantity, result


def descent(
    problem: Problem,
    solver: LowerSolver,
    optimizer: optax.GradientTransformation,
    *,
    diagnostics: bool = False,
) -> tuple[Callable, Callable]:
    """One outer step as a pair of pure functions.

    Parameters
    ----------
    problem, solver
        As in :func:`bilevel.hypergradient`.
    optimizer : optax.GradientTransformation
        Of ``alpha``, its geometry included (:func:`bilevel.exponentiate`, ...).
    diagnostics : bool
        Whether ``metrics`` has the fields of :class:`bilevel.Info` too, at their cost.

    Returns
    -------
    init : ``init(alpha, w) -> DescentState``
    step : ``step(state, (train, valid)) -> (state, metrics)``
        ``metrics``: ``value`` (outer loss) and ``lower`` (lower loss) at the new ``w`` and the old
        ``alpha``, and ``grad_norm``, the 2-norm of the hypergradient; all scalars.

    Examples
    --------
    >>> import bilevel
    >>> problem = Problem(
    ...     lower=lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2),
    ...     outer=lambda w, alpha, batch: jnp.sum((w - batch) ** 2),
    ... )
    >>> init, step = descent(problem, bilevel.implicit(), optax.sgd(0.25))
    >>> state, metrics = jax.jit(step)(init(jnp.zeros(1), jnp.zeros(1)), (None, jnp.ones(1)))
    >>> state.alpha, metrics["value"]
    (Array([0.5], dtype=float...), Array(1., dtype=float...))
    """
    gradient_transformation("optimizer", optimizer)
    hypergradient = stateful_hypergradient(problem, solver, diagnostics=diagnostics)

    def init(alpha, w):
        floating("alpha", alpha)
        floating("w0", w)
        alpha, w = jax.tree.map(jnp.asarray, (alpha, w))
        return DescentState(alpha, w, solver.init(w), optimizer.init(alpha), jnp.zeros((), int))

    def step(state, data):
        train, valid = data
        hyper, solver_state = hypergradient(state.alpha, state.w, state.solver, train, valid)
        updates, optimizer_state = optimizer.update(hyper.grad, state.optimizer, state.alpha)
        metrics = {
            "value": hyper.value,
            "lower": problem.lower(hyper.w, state.alpha, train),
            "grad_norm": optax.tree.norm(hyper.grad),
        }
        if hyper.info is not None:
            metrics |= hyper.info._asdict()
        alpha = optax.apply_updates(state.alpha, updates)
        return DescentState(alpha, hyper.w, solver_state, optimizer_state, state.step + 1), metrics

    return init, step


def search(
    problem: Problem,
    solver: LowerSolver,
    optimizer: optax.GradientTransformation,
    alpha: Pytree,
    w0: Pytree,
    train: Pytree,
    valid: Pytree,
    *,
    steps: int,
    batches: Callable[[jax.Array, Pytree], Pytree] | None = None,
    key: jax.Array | None = None,
    progress: bool | None = None,
    checkpoint: Any = None,
    resume: bool = False,
    callback: Callable[[SearchResult], Any] | None = None,
    chunk: int | None = None,
    diagnostics: bool = False,
) -> SearchResult:
    """Minimise the outer loss over ``alpha``: ``steps`` steps of :func:`descent`.

    Parameters
    ----------
    problem, solver, optimizer, diagnostics
        As in :func:`descent`.
    alpha, w0 : pytrees of floating arrays
        Where to start. The weights go on from one outer step to the next.
    train, valid : pytrees of arrays
        The lower and the outer loss's batch, or what ``batches`` samples from.
    steps : int
        Outer steps in all, those of a resumed checkpoint included.
    batches : ``batches(key, data) -> batch``, optional
        Samples a batch of ``train`` and one of ``valid`` at every step, inside the compiled loop.
    key : jax.Array, optional
        Needed with ``batches``.
    progress : bool, optional
        A progress bar on standard error; by default only where that is a terminal.
    checkpoint : path, optional
        A directory that receives the state every few seconds, and at the end.
    resume : bool
        Go on from ``checkpoint`` where it holds one: the result is that of an uninterrupted search,
        bit for bit. Without ``resume`` such a directory is refused.
    callback : ``callback(result so far)``, optional
        Called between chunks; a true value ends the search.
    chunk : int, optional
        Steps between two chunks; by default about half a second's worth.

    Returns
    -------
    SearchResult
        ``alpha``, ``w``, ``history``, ``state``, ``stopped``. Ctrl-C returns what there is.

    Raises
    ------
    ValueError
        Before anything is compiled, naming the argument: losses that are not scalars, data that is
        empty or not finite, a point off its set, missing keys.
    NonFiniteError
        Where a loss, the weights or the hypergradient stop being finite; it holds the last good
        state. (Under ``jit`` the state stops changing instead: ``result.state.step`` tells.)

    Notes
    -----
    With ``progress=False`` or None and no ``checkpoint`` or ``callback``, the whole works under
    ``jax.jit`` and ``jax.vmap``. Calls with the same ``problem``, ``solver``, ``optimizer`` and
    ``batches`` objects and equal shapes compile once.

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
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))
    _check(problem, arrays, steps, batches, resume, checkpoint, chunk)
    if traced and (progress or checkpoint is not None or callback is not None):
        raise ValueError(
            "progress, checkpoint and callback: expected none of them under jit or vmap, got one."
        )
    setup = _Setup(problem, solver, optimizer, batches, diagnostics)
    data = (train, valid, key)
    carry = setup.start(alpha, w0, data, steps)
    if traced:
        carry = setup.advance(carry, data, steps)
        return SearchResult(carry.state.alpha, carry.state.w, carry.history, carry.state, "")
    saver = _Saver(checkpoint, resume, arrays)
    carry = saver.restore(carry)
    return _drive(setup, carry, data, steps, saver, progress, callback, chunk)


# ----------------------------------------------------------------------------- the compiled part


class _Carry(NamedTuple):
    state: DescentState
    history: dict[str, Any]  # [steps, ...] each, filled up to state.step
    trouble: jax.Array  # [], int: 0, or 1 + the index of the quantity that was not finite


class _Setup(NamedTuple):
    """What a search is made of; hashable, so that equal searches share one compilation."""

    problem: Problem
    solver: LowerSolver
    optimizer: optax.GradientTransformation
    batches: Callable | None
    diagnostics: bool

    def start(self, alpha, w0, data, steps) -> _Carry:
        init, _ = descent(*self[:3])
        # Copies: the loop's carry is donated, while the caller keeps the arrays, and a state may
        # hold the same one twice. With dtypes that are not weak, as a step returns them: else the
        # second chunk would be compiled anew.
        state = jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x), copy=True), init(alpha, w0))
        _, metrics = jax.eval_shape(self.step, state, data)
        shapes = metrics | {"alpha": state.alpha}
        history = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), shapes)
        return _Carry(state, history, jnp.zeros((), int))

    def step(self, state, data):
        train, valid, key = data
        _, step = descent(*self[:3], diagnostics=self.diagnostics)
        if self.batches is not None:
            keys = jax.random.split(jax.random.fold_in(key, state.step))
            train, valid = self.batches(keys[0], train), self.batches(keys[1], valid)
        return step(state, (train, valid))

    def advance(self, carry: _Carry, data, count) -> _Carry:
        """``count`` steps; those after a quantity stopped being finite change nothing."""

        def body(_, carry):
            old, history, trouble = carry
            new, metrics = self.step(old, data)
            trouble = jnp.where(trouble > 0, trouble, _first_not_finite(new, metrics))
            good = trouble == 0
            entry = metrics | {"alpha": new.alpha}
            history = jax.tree.map(
                lambda h, x: h.at[old.step].set(jnp.where(good, x, h[old.step])), history, entry
            )
            state = jax.tree.map(functools.partial(jnp.where, good), new, old)
            return _Carry(state, history, trouble)

        return jax.lax.fori_loop(0, count, body, carry)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _advance(setup: _Setup, carry: _Carry, data, count) -> _Carry:
    return setup.advance(carry, data, count)


def _first_not_finite(state: DescentState, metrics: dict[str, jax.Array]) -> jax.Array:
    def finite(tree):
        return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()

    watched = (metrics["lower"], state.w, metrics["value"], metrics["grad_norm"], state.alpha)
    bad = jnp.stack([~finite(x) for x in watched])
    return jnp.where(bad.any(), 1 + jnp.argmax(bad), 0).astype(int)


# ----------------------------------------------------------------------------- the host's part


def _drive(setup, carry, data, steps, saver, progress, callback, chunk) -> SearchResult:
    """Chunks of steps until all are done, with what the host does in between."""
    done, count, stopped = int(carry.state.step), chunk or 1, ""
    text = "outer {task.fields[value]:.4g}  lower {task.fields[lower]:.4g}"
    shown = "value", "lower"
    with (
        progress_bar(progress, "search", steps, text, shown) as show,
        _held_interrupts() as interrupted,
    ):
        while done < steps:
            began = time.perf_counter()
            carry = jax.block_until_ready(_advance(setup, carry, data, min(count, steps - done)))
            seconds = time.perf_counter() - began
            ran, done = int(carry.state.step) - done, int(carry.state.step)
            trouble = int(carry.trouble)
            saver.save(carry, last=bool(trouble) or done == steps)
            if trouble:
                raise NonFiniteError(done, _QUANTITIES[trouble - 1], _result(carry, "not finite"))
            show(done, lambda: {k: float(carry.history[k][done - 1]) for k in shown})  # noqa: B023
            if interrupted():
                stopped = f"interrupted after step {done}"
            elif callback is not None and callback(_result(carry, "")):
                stopped = f"ended by the callback after step {done}"
            if stopped:
                saver.save(carry, last=True)
                break
            # The first chunk's time is the compiler's; later ones double at most.
            if chunk is None:
                count = max(1, min(2 * ran, int(ran * _CHUNK_SECONDS / max(seconds, 1e-6))))
    return _result(carry, stopped)


def _result(carry: _Carry, stopped: str) -> SearchResult:
    # Copies: the carry's own buffers are donated to the next chunk.
    state, history = jax.tree.map(lambda x: jnp.array(x, copy=True), carry[:2])
    history = jax.tree.map(lambda x: x[: int(state.step)], history)
    return SearchResult(state.alpha, state.w, history, state, stopped)


class _Saver:
    """Writes checkpoints now and then, and reads the one to resume from."""

    def __init__(self, directory, resume: bool, arrays: Pytree):
        self.directory = directory
        if directory is None:
            return
        self.label = _fingerprint(arrays)
        self.found = checkpoints.latest(directory)
        if self.found is not None and not resume:
            raise ValueError(
                f"checkpoint: expected an empty directory or resume=True, got {directory} with "
                f"step {self.found} in it."
            )
        self.saved_at, self.interval = -np.inf, _SAVE_SECONDS

    def restore(self, carry: _Carry) -> _Carry:
        if self.directory is None or self.found is None:
            return carry
        state, history = checkpoints.restore(self.directory, carry[:2], self.label)
        steps = jax.tree.leaves(carry.history)[0].shape[0]
        if self.found > steps:
            raise ValueError(
                f"steps: expected at least the {self.found} that the checkpoint holds, got {steps}."
            )
        history = jax.tree.map(lambda h, x: h.at[: self.found].set(x), carry.history, history)
        return _Carry(jax.tree.map(jnp.asarray, state), history, carry.trouble)

    def save(self, carry: _Carry, *, last: bool) -> None:
        now = time.perf_counter()
        if self.directory is None or not (last or now - self.saved_at > self.interval):
            return
        step = int(carry.state.step)
        history = jax.tree.map(lambda x: x[:step], carry.history)
        checkpoints.save(self.directory, step, (carry.state, history), self.label)
        self.saved_at = time.perf_counter()
        self.interval = max(_SAVE_SECONDS, 20 * (self.saved_at - now))


def _fingerprint(arrays: Pytree) -> int:
    """A checksum of everything a search depends on besides its functions."""
    crc = 0
    for x in jax.tree.leaves(jax.tree.map(_raw, arrays)):
        crc = zlib.crc32(np.ascontiguousarray(x).tobytes(), crc)
    return crc


def _raw(x) -> np.ndarray:
    typed_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if typed_key else x)


@contextmanager
def _held_interrupts() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back until the chunk is done; a second one gets through at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen: list[int] = []
    usual = signal.getsignal(signal.SIGINT)

    def note(number, frame):
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, usual)


# ----------------------------------------------------------------------------- validation


def _check(problem, arrays, steps, batches, resume, checkpoint, chunk) -> None:
    """Raise on anything wrong that can be seen before the first compilation."""
    alpha, w0, train, valid, key = arrays
    whole("steps", steps, 1)
    if chunk is not None:
        whole("chunk", chunk, 1)
    if batches is not None:
        function("batches", batches, "(key, data) -> batch")
    if resume and checkpoint is None:
        raise ValueError("resume: expected a checkpoint directory to resume from, got None.")
    if batches is not None and key is None:
        raise ValueError("key: expected a PRNG key to sample batches with, got None.")
    if key is not None:
        prng_key("key", key)
    for name, tree in (("alpha", alpha), ("w0", w0)):
        if not jax.tree.leaves(tree):
            raise ValueError(f"{name}: expected at least one array, got {tree!r}.")
        floating(name, tree)
    for name, tree in (("alpha", alpha), ("w0", w0), ("train", train), ("valid", valid)):
        for x in jax.tree.leaves(tree):
            if jnp.size(x) == 0:
                shape = jnp.shape(x)
                raise ValueError(f"{name}: expected data, got an empty array of shape {shape}.")
            inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
            if isinstance(x, jax.core.Tracer) or not inexact:
                continue
            # In numpy, which computes at once even while JAX is tracing.
            if not np.isfinite(np.asarray(x)).all():
                raise ValueError(f"{name}: expected finite values, got a NaN or an infinity.")
