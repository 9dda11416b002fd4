"""Checkpoints: no damage, full disk, second writer or other search passes unnoticed."""

import contextlib
import functools
import re
import shutil
import tempfile

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from generated import examples, seeds
from helpers import no_room
from hypothesis import given
from test_search import MOMENTUM, ROWS, assert_identical, noisy, regression

import bilevel
from bilevel.outer_loop import search
from bilevel.runs import checkpoint, records
from bilevel.runs.fingerprint import fingerprint


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.fixture
def every_chunk(monkeypatch):
    """A checkpoint after every chunk."""
    monkeypatch.setattr(search, "_SAVE_SECONDS", 0.0)


# Always of six steps, so that it is compiled once; in chunks of three.
six = functools.partial(noisy, steps=6, chunk=3)


@pytest.fixture(scope="module")
def expected():
    return six()


def test_a_flipped_bit_in_any_byte_of_a_record_changes_nothing_in_silence(tmp_path):
    """zip stores names and sizes twice, so some flips have no effect."""
    path = tmp_path / "x.npz"
    records.write_arrays(path, {"x": np.arange(3.0), "y": np.ones(1)}, {"step": 3})
    whole, unchanged = path.read_bytes(), 0
    for byte in range(len(whole)):
        flip(path, 8 * byte + byte % 8)
        if records.checksums(path) is not None:
            arrays, notes = records.read_arrays(path)
            assert {k: x.tolist() for k, x in arrays.items()} == {"x": [0.0, 1.0, 2.0], "y": [1.0]}
            assert notes == {"step": 3}, byte
            unchanged += 1
        path.write_bytes(whole)
    assert 0 < unchanged < 0.25 * len(whole)  # most bytes of so small a file are zip's
    for length in (0, 1, 32, 33, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert records.checksums(path) is None


@pytest.mark.long
@pytest.mark.usefixtures("every_chunk")
def test_flipped_bits_never_change_what_a_resumed_search_returns(tmp_path, expected):
    """A flip in the newest step gives a warning and the same result."""
    six(checkpoint=tmp_path / "whole")
    assert checkpoint.steps(tmp_path / "whole") == [6, 3]
    random = np.random.default_rng(0)
    for trial in range(16):
        folder = tmp_path / str(trial)
        shutil.copytree(tmp_path / "whole", folder)
        path = random.choice([p for p in folder.iterdir() if p.stat().st_size])
        flip(path, random.integers(8 * path.stat().st_size))
        warned = pytest.warns(UserWarning, match="checkpoint: step 6 in .* is damaged")
        with warned if path.stem == "6" else contextlib.nullcontext():
            assert_identical(six(checkpoint=folder, resume=True), expected)
        assert checkpoint.latest(folder) == 6  # the damaged step is written again


@pytest.mark.slow
@pytest.mark.usefixtures("every_chunk")
def test_when_all_steps_are_damaged_one_sentence_says_what_to_do(tmp_path):
    six(checkpoint=tmp_path)
    for path in tmp_path.glob("*.npz"):
        flip(path, 1000)
    message = rf"in {re.escape(str(tmp_path))}, got damaged ones only; remove .*\.$"
    warned = pytest.warns(UserWarning, match="is damaged")
    with warned, pytest.raises(records.DamagedError, match=message):
        six(checkpoint=tmp_path, resume=True)


def test_a_step_under_the_name_of_another_is_not_taken_for_it(tmp_path):
    checkpoint.save(tmp_path, 3, {"x": np.ones(2)})
    (tmp_path / "3.npz").rename(tmp_path / "5.npz")
    with pytest.raises(records.DamagedError, match=r"expected step 5 in .*, got 3\."):
        checkpoint.restore(tmp_path, {"x": np.ones(2)})


@pytest.mark.slow
@pytest.mark.usefixtures("every_chunk")
def test_a_full_disk_costs_the_checkpoint_and_not_the_search(tmp_path, expected):
    six(checkpoint=tmp_path, callback=lambda result: len(result.history["value"]) == 3)
    message = r"checkpoint: .* could not be written \(File too large\)"
    with no_room(700), pytest.warns(UserWarning, match=message):
        assert_identical(six(checkpoint=tmp_path, resume=True), expected)
    assert checkpoint.latest(tmp_path) == 3  # the one from before is whole
    assert not list(tmp_path.glob("*.part"))
    assert_identical(six(checkpoint=tmp_path, resume=True), expected)


def test_half_written_files_of_killed_writers_are_removed(tmp_path):
    (tmp_path / "4.npz.part").write_bytes(b"half")
    six(checkpoint=tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_a_second_writer_is_refused_while_the_first_one_runs(tmp_path):
    def second(result):
        with pytest.raises(ValueError, match=r"checkpoint: .* which is in use\."):
            six(checkpoint=tmp_path, resume=True)

    six(checkpoint=tmp_path, callback=second)
    six(checkpoint=tmp_path, resume=True)


def scaled_by(factor):
    old = regression()["problem"]
    return bilevel.Problem(old.lower, lambda w, alpha, batch: factor * old.outer(w, alpha, batch))


CHANGES = {  # the argument, its new value as a function of the old one, the message
    "problem's constant": ("problem", lambda _: scaled_by(2.0), "another outer loss"),
    "solver": ("solver", lambda _: bilevel.implicit(), "another solver"),
    "optimizer": ("optimizer", lambda _: optax.sgd(0.1), "another optimizer"),
    "key": ("key", lambda _: jax.random.key(1), "another key"),
    "alpha": ("alpha", lambda _: jnp.array([0.5, 0.25, 0.25]), "another alpha"),
    "w0": ("w0", lambda w: w + 1, "another w0"),
    "data": ("train", lambda d: (d[0], d[1] + 1), r"another train \(train\.1 differs\)"),
    "shape": ("train", lambda d: (d[0].reshape(80, 2), d[1]), r"was .*\[40, 4\], is .*\[80, 2\]"),
    "dtype": ("valid", lambda d: jax.tree.map(lambda x: x.view("i4"), d), "another valid"),
    "structure": ("valid", list, "another valid"),
    "diagnostics": ("diagnostics", lambda _: True, "another diagnostics"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    arguments = regression() | {
        "problem": scaled_by(1.0),
        "solver": MOMENTUM,
        "valid": regression()["train"],  # any rows will do
        "batches": ROWS,
        "key": jax.random.key(0),
        "steps": 2,
        "checkpoint": tmp_path_factory.mktemp("saved"),
    }
    bilevel.search(**arguments)
    return arguments


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_of_another_search_is_refused_and_what_differs_is_named(change, saved):
    name, changed, words = CHANGES[change]
    other = saved | {name: changed(saved.get(name))}
    with pytest.raises(ValueError, match=words) as caught:
        bilevel.search(**other, resume=True)
    assert "checkpoint: expected one of this very run" in str(caught.value)


def test_python_objects_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a: expected numbers or strings, got an array"):
        records.write_arrays(tmp_path / "x.npz", {"a": np.array([{}])})
    assert not (tmp_path / "x.npz").exists()


def test_keys_and_numbers_come_back_as_they_were(tmp_path):
    """The generated test below restores arrays of all other kinds."""
    tree = {"key": jax.random.split(jax.random.key(0), 2), "number": 3}
    checkpoint.save(tmp_path, 0, tree)
    restored = checkpoint.restore(tmp_path, tree)
    assert jax.random.key_impl(restored["key"]) == jax.random.key_impl(tree["key"])
    assert fingerprint(restored["key"]) == fingerprint(tree["key"])
    assert restored["number"] == 3 and np.shape(restored["number"]) == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a": np.zeros((3, 2), np.float32), "b": np.ones(2)}, r"an array of .*, got float32\["),
        ({"a": np.zeros((2, 3), np.int32), "b": np.ones(2)}, r"an array of .*, got float32\["),
        ({"b": np.ones(2), "c": np.zeros(2)}, r"an array \['b'\] in .*, got one \['a'\]"),
    ],
    ids=["shape of the same bytes", "dtype of the same bytes", "names"],
)
def test_arrays_of_another_structure_raise(tmp_path, changed, message):
    checkpoint.save(tmp_path, 0, {"a": np.zeros((2, 3), np.float32), "b": np.zeros(2)})
    with pytest.raises(ValueError, match=f"checkpoint: expected {message}"):
        checkpoint.restore(tmp_path, changed)


@pytest.mark.slow
def test_the_step_saved_last_is_the_newest(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, np.full(2, step))
    assert checkpoint.steps(tmp_path) == [3, 2]
    checkpoint.save(tmp_path, 2, np.full(2, 20))
    assert checkpoint.restore(tmp_path, np.zeros(2, int))[0] == 20


LEAVES = ("float16", "bfloat16", "float8_e4m3fn", "float32", "int8", "uint32", "bool", "complex64")
trees = st.dictionaries(
    st.text("ab.[]/'é ", min_size=1, max_size=4),
    st.tuples(st.sampled_from(LEAVES), st.lists(st.integers(0, 3), max_size=3)),
    min_size=1,
    max_size=4,
)


@examples(10)
@given(parts=trees, seed=seeds, step=st.integers(0, 10**6))
def test_a_tree_of_any_names_shapes_and_dtypes_is_restored_bit_for_bit(parts, seed, step):
    rng = np.random.default_rng(seed)
    tree = {name: np.asarray(100 * rng.normal(size=shape)) for name, (_, shape) in parts.items()}
    tree = {name: x.astype(jnp.dtype(parts[name][0])) for name, x in tree.items()}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, step, tree)
        assert checkpoint.latest(folder) == step
        restored = checkpoint.restore(folder, tree)
    for name, array in tree.items():
        assert np.asarray(restored[name]).dtype == array.dtype
        assert np.asarray(restored[name]).tobytes() == array.tobytes()
