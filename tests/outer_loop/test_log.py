"""Metrics as lines of JSON: every step once, whatever the run goes through."""

import functools
import itertools
import json
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import no_room

import bilevel
from bilevel.cli import main
from bilevel.cli.runtime import invocation


def outer(w, alpha, batch):
    aux = {"accuracy": jnp.mean(w), "many": jnp.ones(17), "few": jnp.stack([w[0], jnp.nan])}
    return jnp.sum((w - 1.0) ** 2), aux


PROBLEM = bilevel.Problem(
    lambda w, alpha, batch: (0.5 * jnp.sum((w - alpha["a"]) ** 2), None), outer, has_aux=True
)
search = functools.partial(
    bilevel.search,
    *(PROBLEM, bilevel.unrolled(0.5, 1), optax.sgd(0.25), {"a": np.zeros(2)}, np.zeros(2)),
    *(None, None),
    progress=False,
)


def lines(path):
    def strict(word):
        raise ValueError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=strict) for line in path.read_text().splitlines()]


def test_every_step_is_a_line_with_all_small_arrays(tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    result = search(steps=7, callback=bilevel.log(path), every=3)
    rows = lines(path)
    assert [row["step"] for row in rows] == [*range(1, 8)]
    keys = ("step", "alpha.a", "aux.outer.accuracy", "aux.outer.few", "grad_norm", "lower", "value")
    assert tuple(rows[0]) == keys
    np.testing.assert_array_equal([row["value"] for row in rows], result.history["value"])
    np.testing.assert_array_equal([row["alpha.a"] for row in rows], result.history["alpha"]["a"])
    assert rows[0]["aux.outer.few"][1] is None


@pytest.mark.slow
def test_a_resumed_search_writes_no_step_twice(tmp_path):
    path, kept = tmp_path / "run.jsonl", {"checkpoint": tmp_path / "a"}
    search(steps=3, callback=bilevel.log(path), **kept)
    # The state after a kill: more lines than the checkpoint has steps, and an incomplete one.
    search(steps=5, callback=bilevel.log(tmp_path / "longer.jsonl"))
    longer = (tmp_path / "longer.jsonl").read_text()
    path.write_text(longer + '{"step": 6, "va')
    with pytest.raises(ValueError, match="path: expected a new file or resume=True, got"):
        bilevel.log(path)
    search(steps=7, callback=bilevel.log(path, resume=True), resume=True, **kept)
    assert [row["step"] for row in lines(path)] == [*range(1, 8)]
    assert path.read_text().startswith(longer)


def test_a_history_of_some_steps_is_a_line_for_each_of_its_rows(tmp_path):
    path = tmp_path / "run.jsonl"
    options = {"history": bilevel.History(every=10), "every": 10, "callback": bilevel.log(path)}
    result = search(steps=25, **options)
    assert [line["step"] for line in lines(path)] == [10, 20, 25]
    values = [line["value"] for line in lines(path)]
    np.testing.assert_array_equal(values, np.asarray(result.history["value"], float))
    assert result.history_every == 10


@pytest.mark.skipif(sys.platform != "linux", reason="sets the system's limit of file sizes")
def test_a_full_disk_costs_lines_and_not_the_run(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = bilevel.log(path)
    first = search(steps=2, callback=writer)
    whole = path.read_text()
    with no_room(len(whole) + 10), pytest.warns(UserWarning, match="the run continues without it"):
        writer(search(steps=3))
    assert path.read_text() == whole
    writer(search(steps=4))  # there is room again: the lines that were lost too
    assert [row["step"] for row in lines(path)] == [1, 2, 3, 4] and not first.stopped


def test_a_resumed_command_logs_no_step_of_a_phase_twice(tmp_path):
    path = tmp_path / "log"

    def log(steps, resume):
        record = invocation.recorder(path, "search", resume)
        record({"phase": "search", "share": 0.0})
        for step in steps:
            record({"phase": "search", "share": step / 4, "done": step, "value": float("nan")})
        return [line["done"] for line in lines(path) if "done" in line]

    assert log([1, 2, 3], resume=False) == [1, 2, 3]
    assert log([2, 3, 4], resume=True) == [1, 2, 3, 4]  # killed after the checkpoint of step 1
    assert log([1, 2], resume=False) == [1, 2, 3, 4, 1, 2]  # another run, in the same file


SEARCH = "search --steps 2 --inner-steps 2 --width 16 --train 30 --valid 30 --test 30"


@pytest.mark.long
@pytest.mark.parametrize("line", ["certify --rows 6", SEARCH])
def test_commands_log_what_their_bars_show(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = "--activations", "relu", "tanh", "--log", "log", "--quiet"
    for _ in range(2):
        assert main([*line.split(), *flags]) == 0
    rows = lines(tmp_path / "log")
    command = line.split()[0]
    assert {row["command"] for row in rows} == {command}
    assert rows[0]["phase"] == "data" and rows[-1]["share"] == 1
    phases = [name for name, _ in itertools.groupby(row["phase"] for row in rows)]
    half = len(phases) // 2
    assert phases[:half] == phases[half:] and len(set(phases)) == half > 1
    if command == "search":
        losses = [row for row in rows if "lower" in row]
        assert losses[-1]["done"] == 2 and losses[-1]["value"] > 0


def test_other_files_stay_unchanged(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("hello\nimportant last line")
    for path, options, message in [
        (notes, {"resume": True}, "lines of JSON, got another file"),
        (notes / "below", {}, "a file to write in, got"),
    ]:
        with pytest.raises(ValueError, match=f"path: expected {message}"):
            bilevel.log(path, **options)
    assert notes.read_text() == "hello\nimportant last line"
    whole = tmp_path / "whole.jsonl"
    whole.write_text('{"step": 3}')  # an editor's, without the last newline
    bilevel.log(whole, resume=True)
    assert whole.read_text() == '{"step": 3}\n'
    whole.write_text('{"step": 3}\n{"ste')
    bilevel.log(whole, resume=True)
    assert whole.read_text() == '{"step": 3}\n'
