"""Batches from an iterator: the same search as from memory, read ahead, resumed by step."""

import functools
import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close

import bilevel

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(2, 20, 4, 3)).astype(float)  # twenty batches of either level


def loss(w, alpha, batch):
    return jnp.mean((batch - w) ** 2)


PROBLEM = bilevel.Problem(lambda w, a, b: loss(w, a, b) + jnp.sum(jnp.exp(a) * w**2), loss)
SOLVER = bilevel.unrolled(optax.adam(0.1), 2)
START = SOLVER, optax.adam(0.1), np.zeros(3), np.ones(3), None, None
search = functools.partial(bilevel.search, PROBLEM, *START, progress=False)


def pairs(step=0):
    """From ``step`` on, for ever."""
    for i in itertools.count(step):
        yield ROWS[0, i % 20], ROWS[1, i % 20]


def by_hand(steps):
    """Descent on these very batches, one after the other."""
    init, step = bilevel.descent(PROBLEM, SOLVER, optax.adam(0.1))
    state, step, values = init(jnp.zeros(3), jnp.ones(3)), jax.jit(step), []
    for pair in itertools.islice(pairs(), steps):
        state, metrics = step(state, pair)
        values.append(metrics["value"])
    return state, jnp.stack(values)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "chunk"), [(None, None), (3, 4)])
def test_a_stream_is_descent_on_its_batches(chunk, every):
    seen = []
    options = {} if every is None else {"callback": lambda r: seen.append(int(r.state.step))}
    result = search(batches=bilevel.stream(pairs), steps=11, chunk=chunk, every=every, **options)
    state, values = by_hand(11)
    assert_close(result.history["value"], values, f64=1e-12, f32=1e-5)
    assert_close(result.w, state.w, f64=1e-12, f32=1e-5)
    assert not result.stopped and seen == ([3, 6, 9, 11] if every else [])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["function", "list"])
def test_a_search_is_resumed_at_its_step(kind, tmp_path):
    told = tmp_path / "told"  # a list would change the values that the function closes over
    told.touch()

    def from_step(step):
        with told.open("a") as file:
            file.write(f"{step} ")
        return pairs(step)

    source = from_step if kind == "function" else list(itertools.islice(pairs(), 9))
    whole = search(batches=bilevel.stream(source), steps=9)
    told.write_text("")
    kept = {"checkpoint": tmp_path / "a"}
    search(batches=bilevel.stream(source), steps=4, **kept)
    rest = search(batches=bilevel.stream(source), steps=9, resume=True, **kept)
    np.testing.assert_array_equal(rest.alpha, whole.alpha)
    np.testing.assert_array_equal(rest.history["value"], whole.history["value"])
    assert told.read_text().split() == (["0", "4"] if kind == "function" else [])
    again = search(batches=bilevel.stream(source), steps=9, resume=True, **kept)
    np.testing.assert_array_equal(again.alpha, whole.alpha)


@pytest.mark.long
def test_another_source_or_one_that_has_begun_is_not_resumed(tmp_path):
    def scaled(factor):
        return bilevel.stream(lambda step: ((factor * a, b) for a, b in pairs(step)))

    kept = {"checkpoint": tmp_path / "a"}
    search(batches=scaled(1.0), steps=4, **kept)
    with pytest.raises(ValueError, match=r"another batches \(factor was 1, is 2\)"):
        search(batches=scaled(2.0), steps=9, resume=True, **kept)
    # A used generator cannot skip pairs again.
    used, kept = pairs(), {"checkpoint": tmp_path / "b"}
    search(batches=bilevel.stream(used), steps=4, **kept)
    with pytest.raises(ValueError, match="source: expected an iterable that begins anew"):
        search(batches=bilevel.stream(used), steps=9, resume=True, **kept)


def test_no_more_than_two_chunks_are_in_memory():
    """Counts the bytes of the pairs on the device at every callback."""
    sizes = []

    def callback(result):
        time.sleep(0.2)  # until the thread has read the next chunk
        sizes.append(sum(x.nbytes for x in jax.live_arrays() if x.shape[1:] == (977, 3)))

    pairs = ((np.ones((977, 3)), np.ones((977, 3))) for _ in range(20))
    search(batches=bilevel.stream(pairs), steps=16, chunk=4, callback=callback)
    pair = 2 * 977 * 3 * np.dtype(float).itemsize
    assert 0 < max(sizes) <= 2 * 4 * pair


def test_the_next_chunk_is_read_while_one_runs_and_no_more():
    """Counts the pairs that were read at each callback, between chunks of three steps."""
    taken, seen = [], []

    def counted(step):
        for pair in pairs(step):
            taken.append(1)
            yield pair

    def callback(result):
        wanted = min(int(result.state.step) + 3, 12)
        until = time.time() + 20
        while len(taken) < wanted and time.time() < until:
            time.sleep(0.01)
        time.sleep(0.05)  # an eager reader would have taken more
        seen.append(len(taken))

    search(batches=bilevel.stream(counted), steps=12, chunk=3, callback=callback)
    # The first chunk's steps have begun when the second is read; each callback sees one ahead.
    assert seen == [6, 9, 12, 12]


@pytest.mark.long
def test_batches_that_end_long_after_a_checkpoint_end_the_search(tmp_path):
    """The last step's checkpoint is written when the end is seen, not before."""
    source = list(itertools.islice(pairs(), 5))
    options = {"chunk": 2, "checkpoint": tmp_path}
    result = search(batches=bilevel.stream(source), steps=9, **options)
    assert result.stopped == "the batches ended after step 5"
    assert [path.stem for path in sorted(tmp_path.glob("*.npz"))][-1] == "5"
    assert_close(result.alpha, by_hand(5)[0].alpha, f64=1e-12, f32=1e-5)
    again = search(batches=bilevel.stream(source), steps=9, resume=True, **options)
    assert again.stopped == result.stopped  # once more
    np.testing.assert_array_equal(again.alpha, result.alpha)


def test_a_solver_draws_its_batches_from_the_shard_of_its_step():
    solver = bilevel.unrolled(1.0, 3, batches=lambda key, x: x[jax.random.randint(key, (), 0, 4)])
    shards = [(np.full((4, 1), 10.0 * i), np.zeros(1)) for i in range(1, 4)]
    problem = bilevel.Problem(
        lambda w, a, b: jnp.sum(0.5 * (w - b) ** 2) + 0 * a, lambda w, a, b: a**2
    )
    args = problem, solver, optax.sgd(0.1), jnp.array(1.0), jnp.zeros(1), None, None
    options = {"steps": 2, "key": jax.random.key(0), "progress": False}
    assert bilevel.search(*args, batches=bilevel.stream(shards), **options).w == 20


@pytest.mark.long
def test_leaves_of_any_library_and_other_trees_work():
    """torch tensors are objects with __array__; a DataLoader's batches are lists."""

    class Tensor:
        def __init__(self, x):
            self.x = x

        def __array__(self, dtype=None, copy=None):
            return self.x if dtype is None else self.x.astype(dtype)

    problem = bilevel.Problem(
        lambda w, a, b: PROBLEM.lower(w, a, b["x"]), lambda w, a, b: loss(w, a, b[0])
    )
    source = [[{"x": Tensor(a)}, [b]] for a, b in itertools.islice(pairs(), 4)]
    options = {"batches": bilevel.stream(source), "steps": 4, "progress": False}
    result = bilevel.search(problem, *START, **options)
    assert_close(result.alpha, by_hand(4)[0].alpha, f64=1e-12, f32=1e-5)


def first(count, *others):
    return [*itertools.islice(pairs(), count), *others]


def broken(step):
    yield from first(3)
    raise OSError("the disk is gone")


MISTAKES = [
    (first(3, (ROWS[0, 3][:2], ROWS[1, 3])), r"got float64\[2, 3\] after .*\[4, 3\] at step 3"),
    (first(1, (ROWS[0, 3], [ROWS[1, 3]])), "batches: expected pairs of one structure, .* step 1"),
    ([], "batches: expected a pair .* at step 0, got none"),
    ([ROWS[0, 0]], "batches: expected a pair .* at step 0, got a ndarray"),
    (first(3, (ROWS[0, 3], ROWS[1, 3] * np.nan)), "batches, valid at step 3: expected finite"),
    (first(3, (ROWS[0, 3], ROWS[1, 3][:0])), "batches, valid at step 3: expected data"),
    (broken, "the disk is gone"),
]


@pytest.mark.long
def test_wrong_batches_raise_one_message_and_end_the_thread():
    before = threading.active_count()
    for source, message in MISTAKES:
        with pytest.raises((ValueError, OSError), match=message):
            search(batches=bilevel.stream(source), steps=9, chunk=2)
    assert threading.active_count() == before
