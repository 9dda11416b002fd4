"""Descent and search: the loop finds known optima, resumes exactly, and fails clearly."""

import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevel
from bilevel.outer_loop import search, search_program
from bilevel.runs import checkpoint
from ntk.internal import compile_cache

SIMPLEX = optax.chain(bilevel.tangent(), optax.adam(0.1), bilevel.exponentiate())
MOMENTUM = bilevel.unrolled(optax.sgd(0.005, 0.9), 8)
ROWS = bilevel.minibatches(8)


@functools.cache
def regression(n=80, h=3, p=2):
    """Arguments of a search: ridge on a mixture of feature maps; the second made the labels."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (n, 4))
    maps = jax.random.normal(keys[1], (h, 4, p))
    y = jnp.tanh(x @ maps[1]) @ jax.random.normal(keys[2], (p,))

    def features(alpha, x):
        return jnp.einsum("i,inp->np", alpha, jnp.tanh(jnp.einsum("nd,idp->inp", x, maps)))

    def lower(w, alpha, batch):
        x, y = batch
        return 0.5 * jnp.sum((features(alpha, x) @ w - y) ** 2) + 0.05 * jnp.sum(w**2)

    def outer(w, alpha, batch):
        x, y = batch
        return jnp.mean((features(alpha, x) @ w - y) ** 2)

    half = n // 2
    return {
        "problem": bilevel.Problem(lower, outer),
        "solver": bilevel.ridge(features, lambda alpha: 0.1),
        "optimizer": SIMPLEX,
        "alpha": jnp.full(h, 1 / h),
        "w0": jnp.zeros(p),
        "train": (x[:half], y[:half]),
        "valid": (x[half:], y[half:]),
        "progress": False,
    }


def run(**options):
    return bilevel.search(**(regression() | {"solver": MOMENTUM} | options))


def noisy(**options):
    return run(**({"batches": ROWS, "key": jax.random.key(7)} | options))


def assert_identical(a, b):
    """Bit for bit: alpha, w, history and every other array of the state."""
    jax.tree.map(np.testing.assert_array_equal, (a.state, a.history), (b.state, b.history))


@pytest.mark.slow
def test_search_finds_the_minimum_over_the_simplex():
    """Truth: the outer loss at every point of a grid of step 1/20, by the closed form."""
    start = regression()
    problem, ridge, alpha, w0 = (start[key] for key in ("problem", "solver", "alpha", "w0"))
    optimizer = optax.chain(optax.sgd(5.0), bilevel.exponentiate())
    result = run(solver=bilevel.implicit(), optimizer=optimizer, steps=300)
    i, j = (x.ravel() for x in np.mgrid[:21, :21])
    grid = jnp.asarray(np.stack([i, j, 20 - i - j], -1)[i + j <= 20] / 20, alpha.dtype)

    @jax.jit
    @jax.vmap
    def value(alpha):
        w, _ = ridge.run(problem.lower, alpha, w0, (), start["train"])
        return problem.outer(w, alpha, start["valid"])

    assert value(result.alpha[None])[0] < 1.001 * value(grid).min()
    assert result.history["value"][0] > 1.5 * result.history["value"][-1]
    assert result.history["alpha"].shape == (300, 3)
    np.testing.assert_array_equal(result.history["alpha"][-1], result.alpha)


@pytest.mark.long
def test_the_whole_search_runs_under_jit_and_vmap():
    keys = jax.random.split(jax.random.key(3), 2)
    starts = jnp.stack([regression()["alpha"], jnp.array([0.6, 0.2, 0.2])])

    @jax.jit
    @jax.vmap
    def many(key, alpha):
        return noisy(alpha=alpha, steps=5, key=key)

    result = many(keys, starts)
    for i in range(2):
        one = noisy(alpha=starts[i], steps=5, key=keys[i])
        np.testing.assert_allclose(result.alpha[i], one.alpha, rtol=1e-3)
        np.testing.assert_allclose(result.history["value"][i], one.history["value"], rtol=1e-3)


@pytest.mark.long
def test_a_search_with_traced_closure_equals_a_search_alone():
    problem = bilevel.Problem(
        lambda w, a, b: 0.5 * jnp.sum((w - a - b) ** 2), lambda w, a, b: jnp.sum((w - b) ** 2)
    )

    def of_rate(rate):
        methods = bilevel.unrolled(rate, 3), optax.chain(optax.sgd(rate), bilevel.project("box"))
        zeros = jnp.zeros(2)
        return bilevel.search(problem, *methods, zeros, zeros, zeros, jnp.ones(2), steps=3)

    rates = jnp.array([0.1, 0.2])
    together = jax.vmap(of_rate)(rates)
    for i, rate in enumerate(rates):
        for result in (jax.tree.map(lambda x, i=i: x[i], together), jax.jit(of_rate)(rate)):
            alone = of_rate(rate)
            np.testing.assert_allclose(result.alpha, alone.alpha, rtol=1e-5)
            np.testing.assert_allclose(result.history["value"], alone.history["value"], rtol=1e-5)


@pytest.mark.slow
def test_stacked_searches_equal_separate_searches():
    starts = jnp.stack([regression()["alpha"], jnp.array([0.6, 0.2, 0.2])])
    data = {name: regression()[name] for name in ("w0", "train", "valid")}
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), data)
    problem = bilevel.stack_problems(regression()["problem"])
    both = run(problem=problem, alpha=starts, **twice, steps=5)
    np.testing.assert_allclose(both.alpha[1], run(alpha=starts[1], steps=5).alpha, rtol=1e-4)


def test_a_second_search_compiles_nothing():
    noisy(steps=6)
    before = len(compile_cache._programs)
    noisy(steps=6, key=jax.random.key(8), chunk=4)
    assert len(compile_cache._programs) == before


@pytest.fixture
def compiled():
    """A list that grows by one with every program that is compiled."""
    durations = []

    def note(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            durations.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield durations
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.slow
def test_callbacks_and_checkpoints_compile_nothing_after_the_first(tmp_path, monkeypatch, compiled):
    """The number of live arrays is constant too."""
    monkeypatch.setattr(search, "_SAVE_SECONDS", 0.0)
    counts, alive = [], []

    def callback(result):
        assert len(result.history["value"]) == len(counts) + 1
        counts.append(len(compiled))
        alive.append(len(jax.live_arrays()))

    noisy(steps=12, chunk=1, callback=callback, checkpoint=tmp_path, progress=True)
    assert counts[0] > 0  # the listener works
    # The second call's carry comes from the first one's program.
    assert counts[1:] == [counts[1]] * 11 and alive[1:] == [alive[1]] * 11
    noisy(steps=12, chunk=1, checkpoint=tmp_path, resume=True)
    assert len(compiled) == counts[-1]


def test_a_start_of_weak_dtype_compiles_once():
    assert regression()["alpha"].weak_type
    before = len(compile_cache._programs)
    run(solver=bilevel.unrolled(0.01, 2), steps=4, chunk=2)
    assert len(compile_cache._programs) == before + 1


@pytest.mark.long
def test_diagnostics_enter_the_history():
    history = run(steps=2, diagnostics=True).history
    assert {*bilevel.Info._fields} - {"slope"} <= set(history)
    assert np.isfinite(history["error_estimate"]).all()


@pytest.mark.long
@pytest.mark.parametrize("names", [("lower", "alpha"), ()])
def test_selected_history_equals_part_of_full_history(names, tmp_path):
    """On the host, under jit and vmap, and stopped and resumed."""
    whole, thin = noisy(steps=6), functools.partial(noisy, steps=6, history=names)
    search_result = thin(progress=True)
    assert set(search_result.history) == set(names)
    expected = dataclasses.replace(whole, history={name: whole.history[name] for name in names})
    assert_identical(search_result, expected)
    thin(checkpoint=tmp_path, chunk=2, callback=lambda result: result.state.step == 2)
    assert checkpoint.latest(tmp_path) == 2
    assert_identical(thin(checkpoint=tmp_path, resume=True), expected)
    with pytest.raises(ValueError, match=r"another history \(history was '.*', is 'all'\)"):
        noisy(steps=6, checkpoint=tmp_path, resume=True)

    @jax.jit
    @jax.vmap
    def traced(alpha):
        return thin(alpha=alpha).history

    for name, x in traced(regression()["alpha"][None]).items():
        np.testing.assert_allclose(x[0], whole.history[name], rtol=1e-3)


def weighted_mean(size, dtype=jnp.float32):
    """``alpha`` weights ``size`` samples of one number; the arguments of a search."""
    problem = bilevel.Problem(
        lambda w, a, b: 0.5 * jnp.mean(a * (w - b) ** 2), lambda w, a, b: jnp.mean((w - b) ** 2)
    )
    x = jnp.linspace(0, 1, size, dtype=dtype)
    solver = bilevel.unrolled(optax.sgd(0.5), 1)
    return problem, solver, optax.sgd(0.1), jnp.ones(size, dtype), jnp.zeros((), dtype), x, x


@pytest.mark.long
def test_memory_without_alphas_history_does_not_grow_with_steps_times_its_size():
    """Truth: XLA's memory analysis of the compiled search."""
    size = 5000
    *methods, alpha, w, train, valid = weighted_mean(size)

    def bytes_held(steps, **options):
        def run(alpha):
            return bilevel.search(*methods, alpha, w, train, valid, steps=steps, **options)

        memory = jax.jit(run).lower(alpha).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    names = ("value", "lower", "grad_norm")
    grown = bytes_held(1000, history=names) - bytes_held(10, history=names)
    assert grown < 4 * 990 * 8 * len(names)
    assert bytes_held(1000) - bytes_held(10) > 990 * 4 * size


@pytest.mark.long
def test_history_of_a_large_alpha_requires_its_name():
    small, large = weighted_mean(16_384), weighted_mean(16_385)
    run = functools.partial(bilevel.search, steps=2, progress=False)
    assert run(*small).history["alpha"].shape == (2, 16_384)
    with pytest.warns(UserWarning, match=r"history: alpha's would take .* MiB and is left out"):
        assert set(run(*large).history) == {"value", "lower", "grad_norm"}
    assert run(*large, history=["alpha"]).history["alpha"].shape == (2, 16_385)


def test_search_does_not_donate_its_inputs():
    alpha, w = jnp.array(regression()["alpha"]), jnp.ones(2)
    run(alpha=alpha, w0=w, steps=2)
    np.testing.assert_array_equal(alpha, regression()["alpha"])  # raises if the buffer was donated
    np.testing.assert_array_equal(w, 1.0)


@pytest.mark.slow
def test_a_search_stopped_and_resumed_is_an_uninterrupted_one(tmp_path):
    first = noisy(steps=9, chunk=2, callback=lambda r: r.state.step >= 4, checkpoint=tmp_path)
    assert first.stopped == "ended by the callback after step 4"
    assert first.history["alpha"].shape == (4, 3)
    assert_identical(noisy(steps=9, checkpoint=tmp_path, resume=True), noisy(steps=9))


KILLED = """
import sys, time
import test_search
from bilevel.outer_loop import search as _search
_search._SAVE_SECONDS = float(sys.argv[2])
print("in the buffer")
test_search.noisy(
    steps=2000, chunk=1, checkpoint=sys.argv[1], callback=lambda result: time.sleep(0.02)
)
print("and on")
"""


@pytest.mark.parametrize(
    ("number", "save_seconds", "saved"),
    [(signal.SIGKILL, 0.0, 2), pytest.param(signal.SIGTERM, 1e6, 1, marks=pytest.mark.long)],
)
def test_a_killed_search_resumes_exactly(tmp_path, number, save_seconds, saved):
    """SIGKILL and SIGTERM after the first checkpoints; SIGTERM saves the current state first."""
    folders = pathlib.Path(__file__).parents[:3]  # this file, its helpers, the packages
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "JAX_ENABLE_X64": str(int(jax.config.jax_enable_x64)),
        "PYTHONUNBUFFERED": "",
    }
    folder = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(folder), str(save_seconds)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    patience = time.monotonic() + 120
    while time.monotonic() < patience and process.poll() is None:
        if len(checkpoint.steps(folder)) >= saved:
            time.sleep(0.1)  # some more steps
            break
        time.sleep(0.05)
    process.send_signal(number)
    printed, _ = process.communicate()
    assert process.returncode == -number
    assert printed == ("in the buffer\n" if number == signal.SIGTERM else "")
    done = checkpoint.latest(folder)
    assert done >= 2
    assert_identical(noisy(steps=done + 3, checkpoint=folder, resume=True), noisy(steps=done + 3))


@pytest.fixture
def received(tmp_path):
    """The SIGTERMs of the program's handler, each as the newest checkpoint at that moment."""
    steps = []
    before = signal.signal(signal.SIGTERM, lambda *_: steps.append(checkpoint.latest(tmp_path)))
    yield steps
    signal.signal(signal.SIGTERM, before)


def sending(number):
    return lambda result=None: os.kill(os.getpid(), number)


terminate, interrupt = sending(signal.SIGTERM), sending(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_search_after_the_checkpoint(number, tmp_path, received):
    """SIGTERM then reaches the program's own handler."""
    handler = signal.getsignal(number)
    result = noisy(steps=9, chunk=3, callback=sending(number), checkpoint=tmp_path)
    # The signal of the first callback is seen after the second chunk.
    ended = {signal.SIGTERM: ("terminated", [6]), signal.SIGINT: ("interrupted", [])}
    assert (result.stopped, received) == (f"{ended[number][0]} after step 6", ended[number][1])
    assert_identical(dataclasses.replace(result, stopped=""), noisy(steps=6))
    assert checkpoint.latest(tmp_path) == 6
    assert signal.getsignal(number) is handler


def test_a_second_sigterm_is_not_held_back(tmp_path, received):
    def twice(result):
        terminate()
        assert not received
        terminate()
        assert len(received) == 1

    noisy(steps=9, chunk=3, callback=twice, checkpoint=tmp_path)


def test_sigterm_is_held_only_for_a_checkpoint_and_only_if_it_has_a_handler(tmp_path, received):
    def callback(result):
        terminate()
        assert len(received) == int(result.state.step) // 3  # at once

    assert not noisy(steps=6, chunk=3, callback=callback).stopped
    ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert not noisy(steps=6, chunk=3, callback=terminate, checkpoint=tmp_path).stopped
    signal.signal(signal.SIGTERM, ignored)


def test_sigterm_during_a_search_that_fails_is_not_lost(tmp_path, received):
    def callback(result):
        terminate()
        raise RuntimeError("of the callback")

    with pytest.raises(RuntimeError, match="of the callback"):
        noisy(steps=6, chunk=3, callback=callback, checkpoint=tmp_path)
    assert len(received) == 1


def test_ctrl_c_in_the_last_chunk_is_reported_after_the_last_callback():
    seen = []

    def callback(result):
        seen.append(int(result.state.step))
        if seen[-1] == 6:
            interrupt()

    result = noisy(steps=9, chunk=3, callback=callback)
    assert result.stopped == "interrupted after step 9" and seen == [3, 6, 9]


@pytest.mark.long
def test_a_finished_search_resumes_to_itself_and_can_be_prolonged(tmp_path):
    noisy(steps=3, checkpoint=tmp_path)
    assert_identical(noisy(steps=3, checkpoint=tmp_path, resume=True), noisy(steps=3))
    assert_identical(noisy(steps=5, checkpoint=tmp_path, resume=True), noisy(steps=5))


def test_a_checkpoint_is_not_overwritten_nor_shortened(tmp_path):
    noisy(steps=2, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="checkpoint: expected an empty directory or resume=True"):
        noisy(steps=2, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="steps: expected at least the 2"):
        noisy(steps=1, checkpoint=tmp_path, resume=True)


@jax.custom_jvp
def steep_nan(x, bad):
    """``x``, with a derivative that is NaN where ``bad``."""
    return x


@steep_nan.defjvp
def _(primals, tangents):
    x, bad = primals
    return x, jnp.where(bad, jnp.nan, 1) * tangents[0]


def exploding(quantity):
    """A search with a ``quantity`` that is not finite from a step on; ``alpha[0]`` counts steps."""

    def bad(alpha, batch):
        return alpha[0] > batch - 0.5

    def lower(w, alpha, batch):
        loss = 0.5 * (w[0] - batch) ** 2
        return jnp.where(bad(alpha, batch), jnp.nan, loss) if quantity == "lower loss" else loss

    def outer(w, alpha, batch):
        loss = -alpha[0] + 0 * w[0]
        if quantity == "hypergradient":
            return steep_nan(loss, bad(alpha, batch))
        return jnp.where(bad(alpha, batch), jnp.nan, loss) if quantity == "outer loss" else loss

    def solution(alpha, w, batch):
        last = jnp.where(bad(alpha, batch), jnp.inf, batch)
        return jnp.stack([batch, last if quantity == "weights" else batch])

    def update(updates, state, params):
        return -updates if quantity != "alpha" else -updates / (params[0] != state), state

    solver = bilevel.implicit(bilevel.solved(solution), bilevel.scale(1.0))
    return bilevel.Problem(lower, outer), solver, update


@pytest.mark.long
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("quantity", search_program.QUANTITIES)
def test_a_nan_stops_the_search_with_step_quantity_and_last_good_state(quantity, step, tmp_path):
    """With a checkpoint and a callback, and without; in chunks of one and of many steps."""
    problem, solver, update = exploding(quantity)
    optimizer = optax.GradientTransformation(lambda params: jnp.asarray(float(step)), update)
    args = (problem, solver, optimizer, jnp.zeros(1), jnp.zeros(2), float(step), float(step))
    hosted = {"chunk": 1, "checkpoint": tmp_path, "callback": lambda result: False}
    for options in ({}, {"chunk": 2}, hosted, hosted | {"resume": True}):
        with pytest.raises(bilevel.NonFiniteError, match=f"{quantity}: expected finite") as caught:
            bilevel.search(*args, steps=5, progress=False, **options)
        assert (caught.value.step, caught.value.quantity) == (step, quantity)
        result = caught.value.result
        # Truth: one step of size 1 after the other, from 0.
        np.testing.assert_array_equal(result.alpha, [step])
        np.testing.assert_array_equal(result.history["alpha"][:, 0], np.arange(1.0, step + 1))
        np.testing.assert_array_equal(result.history["value"], -np.arange(0.0, step))
        assert result.state.step == step and np.isfinite(result.w).all()
    # The initial state is not saved.
    assert checkpoint.latest(tmp_path) == (step or None)


def test_history_keeps_the_row_before_a_resume_if_the_next_step_is_not_finite(tmp_path):
    problem, solver, _ = exploding("outer loss")
    args = (problem, solver, optax.sgd(1.0), jnp.zeros(1), jnp.zeros(2), 3.0, 3.0)
    options = {"history": bilevel.History(every=8), "progress": False, "checkpoint": tmp_path}
    bilevel.search(*args, steps=3, **options)
    with pytest.raises(bilevel.NonFiniteError) as caught:
        bilevel.search(*args, steps=8, resume=True, **options)
    # Truth: the last good step is the third, from alpha = 2, of loss -2 and step 1.
    history = caught.value.result.history
    np.testing.assert_array_equal(history["value"], [-2.0])
    np.testing.assert_array_equal(history["alpha"], [[3.0]])


def test_under_jit_a_nan_freezes_the_last_good_state():
    problem, solver, _ = exploding("outer loss")

    @jax.jit
    def frozen(alpha):
        args = (problem, solver, optax.sgd(1.0), alpha, jnp.zeros(2))
        return bilevel.search(*args, 3.0, 3.0, steps=8, history=bilevel.History(every=2))

    result = frozen(jnp.zeros(1))
    assert result.state.step == 3
    np.testing.assert_allclose(result.state.alpha, 3.0)
    # Truth: the values of steps 2 and 3, the last good one, and no more.
    np.testing.assert_allclose(result.history["value"], [-1.0, -2.0, 0.0, 0.0])


@pytest.mark.slow
@pytest.mark.parametrize("solver", [bilevel.implicit(), MOMENTUM], ids=["implicit", "unrolled"])
@helpers.float64_only  # finite differences
def test_search_has_a_derivative_in_its_start(solver):
    def found(alpha):
        options = {"optimizer": optax.sgd(0.5), "solver": solver, "steps": 3}
        return jnp.sum(jnp.sin(run(alpha=alpha, **options).alpha))

    helpers.assert_gradient(found, regression()["alpha"], f64=1e-7)


def test_progress_shows_the_losses_on_standard_error_if_requested(capsys):
    run(steps=2)
    assert capsys.readouterr() == ("", "")
    run(steps=2, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err and "outer" in captured.err
