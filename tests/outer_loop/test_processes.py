"""Two processes over gloo on this machine: one search, one checkpoint, one end."""

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevel.cli import main
from bilevel.runs.fingerprint import _sum_of_entries, fingerprint

PROBLEM = """
import contextlib, json, os, signal, sys, warnings
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
import bilevel

rng = np.random.default_rng(0)
x, y = rng.normal(size=(32, 4)), rng.normal(size=32)


def outer(w, alpha, batch):
    x, y = batch
    return jnp.mean((x @ w - y) ** 2)


def lower(w, alpha, batch):
    return outer(w, alpha, batch) + jnp.sum(jnp.exp(alpha) * w**2)


problem = bilevel.Problem(lower, outer)


def search(data, steps, alpha=None, problem=problem, **options):
    alpha = jnp.zeros(4) if alpha is None else alpha
    args = problem, bilevel.unrolled(0.1, 3), optax.adam(0.1), alpha, jnp.zeros(4)
    return bilevel.search(*args, data, data, steps=steps, **({"chunk": 1} | options))


def weighted(w, alpha, batch):
    # A hyperparameter for each row.
    x, y = batch
    return jnp.mean(jnp.exp(alpha) * (x @ w - y) ** 2)


def weights_of_rows(data, alpha, steps, **options):
    problem = bilevel.Problem(weighted, outer)
    return search(data, steps, alpha, problem, history=("value",), **options)


def pairs(step):
    while True:
        step += 1
        yield (step + x, y), (x, y)


def streamed(source):
    return search(None, 4, batches=bilevel.stream(source), chunk=2).alpha
"""

PROCESS = (
    PROBLEM
    + """
rank, port, folder, task = int(sys.argv[1]), *sys.argv[2:]
jax.distributed.initialize(
    f"localhost:{port}", 2, rank, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=5
)
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def mine(a):
    # This process has read its own half of the rows.
    half = a[16 * rank : 16 * (rank + 1)]
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), half)


def signal_after(steps, number):
    # A callback that sends the second process a signal.
    def callback(result):
        if rank == 1 and len(result.history["value"]) == steps:
            os.kill(os.getpid(), number)

    return callback


data, answers = (mine(x), mine(y)), {}
if task == "die":
    search(data, 50, checkpoint=folder, callback=signal_after(3, signal.SIGKILL))
whole = search(data, 6)
search(data, 3, checkpoint=folder)
again = search(data, 6, checkpoint=folder, resume=True)
answers["alpha"] = np.asarray(whole.alpha).tolist()
answers["again"] = np.asarray(again.alpha).tolist()
answers["print"] = bilevel.runs.fingerprint.fingerprint(data)


answers["stopped"] = search(data, 50, callback=signal_after(2, signal.SIGINT)).stopped
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
options = {"checkpoint": folder + "/terminated", "callback": signal_after(2, signal.SIGTERM)}
answers["terminated"] = search(data, 50, **options).stopped, len(received)
enough = lambda result: rank == 1 and len(result.history["value"]) == 4
answers["ended"] = search(data, 50, callback=enough).stopped

# Arrays that no process has all of: each writes what it has.
alpha, rows = mine(np.zeros(32)), folder + "/rows"
answers["rows"] = np.asarray(
    [s.data for s in weights_of_rows(data, alpha, 6).alpha.addressable_shards]
).tolist()
weights_of_rows(data, alpha, 3, checkpoint=rows)
found = weights_of_rows(data, alpha, 6, checkpoint=rows, resume=True).alpha
answers["rows again"] = np.asarray([s.data for s in found.addressable_shards]).tolist()

# What goes wrong in one of them alone.
write = bilevel.runs.records.write_arrays


def full(path, *args):
    if rank == 1:
        raise OSError(28, "No space left on device")
    write(path, *args)


bilevel.runs.records.write_arrays = full
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = weights_of_rows(data, alpha, 6, checkpoint=folder + "/full").alpha
bilevel.runs.records.write_arrays = write
# Now: the first deletes old steps of a search that both of them have left behind by then.
answers["files"] = sorted(os.listdir(rows))
answers["full"] = [str(s.message).partition(":")[0] for s in said], found.sharding == alpha.sharding


def raises(result):
    if rank == 1:
        raise KeyError("in one of them")


def taken():
    locked = bilevel.runs.records.locked
    with locked(folder + "/taken", "x") if rank == 0 else contextlib.nullcontext():
        search(data, 2, checkpoint=folder + "/taken")


bare = lambda changed: (jnp.asarray(changed), jnp.asarray(y))
wrong = {
    "differ": lambda: search(bare(x + rank), 2),
    "nan": lambda: search((mine(np.where(x > 2, np.nan, x)), data[1]), 2),
    "nan in one": lambda: search(bare(np.where(rank, np.nan, x)), 2),
    "steps": lambda: search(data, 2 + rank),
    "raises": lambda: search(data, 2, callback=raises),
    "taken": taken,
    "streams differ": lambda: streamed(lambda step: pairs(step + rank)),
}
for name, run in wrong.items():
    try:
        answers[name] = run() and ""
    except Exception as error:
        answers[name] = f"{type(error).__name__}: {error}"
answers["stream"] = np.asarray(streamed(pairs)).tolist()
search(data, 3, callback=bilevel.log(folder + "/log.jsonl"), every=1)
answers["lines"] = len(open(folder + "/log.jsonl").readlines())
print("ANSWERS", json.dumps(answers), flush=True)
"""
)


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def in_two_processes(arguments_of, environment_of=lambda rank: {}):
    """The output of two Python processes, and their exit codes."""
    started, pipe = [], subprocess.PIPE
    for rank in range(2):
        environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment_of(rank)
        options = {"env": environment, "stdout": pipe, "stderr": pipe, "text": True}
        started.append(subprocess.Popen([sys.executable, *arguments_of(rank)], **options))
    try:
        return [(*p.communicate(timeout=120), p.returncode) for p in started]
    finally:
        for process in started:
            process.kill()


def program_in_two_processes(folder, task):
    port = free_port()
    return in_two_processes(lambda rank: ["-c", PROCESS, str(rank), port, str(folder), task])


@pytest.fixture(scope="module")
def namespace():
    names = {}
    exec(PROBLEM, names)
    return names


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder, and the answers of two processes that worked there."""
    folder = tmp_path_factory.mktemp("two") / "run"
    report = program_in_two_processes(folder, "agree")
    assert [code for _, _, code in report] == [0, 0], report[0][1] + report[1][1]
    return folder, *(json.loads(out.partition("ANSWERS")[2]) for out, _, _ in report)


@pytest.mark.long
def test_two_processes_search_as_one(two, namespace):
    folder, first, second = two
    shared = first.keys() - {"rows", "rows again", "raises"}
    assert first.keys() == second.keys()
    assert all(first[name] == second[name] for name in shared)
    # Resumed by as many processes: to the last bit.
    assert first["again"] == first["alpha"]
    data = namespace["x"], namespace["y"]
    np.testing.assert_allclose(first["alpha"], namespace["search"](data, 6).alpha, rtol=1e-12)
    # By one process: the fingerprint is the same, the result to rounding.
    assert first["print"] == fingerprint(tuple(map(jnp.asarray, data)))
    further = namespace["search"](data, 8, checkpoint=folder, resume=True)
    np.testing.assert_allclose(further.alpha, namespace["search"](data, 8).alpha, rtol=1e-12)
    assert len(further.history["value"]) == 8
    assert first["stopped"] == "interrupted after step 3"  # of both, at the next look
    assert first["terminated"] == ["terminated after step 3", 1]  # and the same in the second
    assert first["ended"] == "ended by the callback after step 4"
    refused = "expected the same values in every process"
    for name, told in {
        "differ": f"ValueError: train: {refused}",
        "nan": "ValueError: train: expected finite numbers, got NaN or infinity.",
        "nan in one": f"ValueError: train: {refused}",
        "steps": f"ValueError: steps, options, whether there is a callback: {refused}",
        "taken": "ValueError: checkpoint: expected one that no other run is writing",
        "streams differ": f"ValueError: batches: {refused}",
    }.items():
        assert first[name].startswith(told), first[name]
    assert second["raises"] == "KeyError: 'in one of them'"
    assert first["raises"] == "LostProcessError: process 1 of 2 raised: 'in one of them'"
    assert first["lines"] == 3  # and not twice as many
    np.testing.assert_allclose(first["stream"], namespace["streamed"](namespace["pairs"]), 1e-12)


@pytest.mark.long
def test_what_no_process_has_all_of_is_written_and_read_by_parts(two, namespace):
    folder, first, second = two
    assert first["files"] == ["4-0.npz", "4-1.npz", "4.npz", "6-0.npz", "6-1.npz", "6.npz", "lock"]
    assert (first["rows again"], second["rows again"]) == (first["rows"], second["rows"])
    assert first["full"] == [2 * ["checkpoint"], True]  # two warnings, and the search continues
    data = jnp.asarray(namespace["x"]), jnp.asarray(namespace["y"])
    run = functools.partial(namespace["weights_of_rows"], data, jnp.zeros(32))
    np.testing.assert_allclose(run(6).alpha, np.ravel([first["rows"], second["rows"]]), rtol=1e-12)
    # By one process, from what two wrote: the newest step, or where another part got there, the
    # one before.
    kept, truth = shutil.copytree(folder / "rows", folder / "kept"), run(8).alpha
    result = run(8, checkpoint=kept, resume=True)
    np.testing.assert_allclose(result.alpha, truth, rtol=1e-12)
    assert not any(kept.glob("*-*.npz"))
    shutil.copy(folder / "rows/4-0.npz", folder / "rows/6-0.npz")
    with pytest.warns(UserWarning, match="step 6 in .* is damaged"):
        result = run(8, checkpoint=folder / "rows", resume=True)
    np.testing.assert_allclose(result.alpha, truth, rtol=1e-12)


@pytest.mark.long
def test_when_a_process_is_killed_the_other_ends_and_the_checkpoint_is_whole(tmp_path, namespace):
    began = time.monotonic()
    (_, error, code), (_, _, killed) = program_in_two_processes(tmp_path / "run", "die")
    assert killed == -signal.SIGKILL and code != 0
    assert time.monotonic() - began < 100  # mostly compilation
    assert "LostProcessError: search: another of the 2 processes ended" in error
    data = namespace["x"], namespace["y"]
    result = namespace["search"](data, 6, checkpoint=tmp_path / "run", resume=True)
    np.testing.assert_allclose(result.alpha, namespace["search"](data, 6).alpha, rtol=1e-12)


def command_in_two_processes(*args):
    """The output of a ``bilevel`` command in two processes, started as SLURM starts them."""
    common = {"JAX_ENABLE_X64": "0", "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}"}
    common |= {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    return in_two_processes(
        lambda rank: ["-m", "bilevel", *args, "--distributed"],
        lambda rank: common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
    )


def alone(*args):
    with jax.enable_x64(False):  # as the other processes compute
        assert main([*args, "--quiet"]) == 0


@pytest.mark.long
def test_a_command_over_two_processes_is_that_of_one(tmp_path):
    search = "search --activations relu leaky_relu --steps 3 --width 16 --inner-steps 5 --train 40"
    search = f"{search} --valid 40 --seeds 2".split()
    ended = command_in_two_processes(*search, "--out", str(tmp_path / "two"))
    assert [code for _, _, code in ended] == [0, 0], ended
    # One process writes and prints.
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    assert "results: " in ended[0][0] and "results: " not in ended[1][0]
    alone(*search, "--out", str(tmp_path / "one"))
    one, two = (np.load(tmp_path / name / "arrays.npz") for name in ("one", "two"))
    np.testing.assert_allclose(two["alpha"], one["alpha"], atol=1e-5)  # of float32
    np.testing.assert_allclose(two["history_value"], one["history_value"], rtol=1e-4)


@pytest.mark.long
def test_networks_ranked_by_two_processes_are_taken_over_by_one(tmp_path):
    def rank(networks):
        line = f"rank --data digits --scores naswot --networks {networks} --at-once 2 --cells 1"
        return f"{line} --channels 2 --batch-size 8 --train 32 --k 2".split()

    ended = command_in_two_processes(*rank(3), "--out", str(tmp_path / "two"))
    assert [code for _, _, code in ended] == [0, 0], ended
    alone(*rank(5), "--out", str(tmp_path / "two"), "--resume")
    alone(*rank(5), "--out", str(tmp_path / "one"))
    one, two = (np.load(tmp_path / name / "arrays.npz") for name in ("one", "two"))
    np.testing.assert_allclose(two["naswot"], one["naswot"], rtol=1e-5)
    # All processes report an error of one.
    ended = command_in_two_processes(*rank(5), "--out", str(tmp_path / "nothing"), "--resume")
    assert [code for _, _, code in ended] == [2, 2]
    assert all("out: expected the directory of a run, got" in error for _, error, _ in ended)


def test_a_process_that_finds_no_other_says_so(capsys):
    assert main(["search", "--distributed"]) == 2
    assert "distributed: expected processes that JAX can bring" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.complex128, bool])
@pytest.mark.parametrize("shape", [(7,), (4, 6), (3, 5, 8), (1, 9)])
def test_a_fingerprint_does_not_depend_on_how_an_array_is_cut(shape, dtype):
    x = np.random.default_rng(0).normal(size=shape)
    x = x > 0 if dtype is bool else (10 * x).astype(dtype)
    everything = (slice(None),) * x.ndim
    whole = _sum_of_entries([(x, everything)], shape)
    for axis, n in enumerate(shape):
        halves = slice(0, n // 2), slice(n // 2, n)
        cuts = [(*everything[:axis], half, *everything[axis + 1 :]) for half in halves]
        assert _sum_of_entries([(x[cut], cut) for cut in cuts], shape) == whole
    # Every entry counts, and its place.
    third = np.arange(x.size).reshape(shape) == 3
    for change in (np.roll(x, 1), np.where(third, (x == 0).astype(dtype), x)):
        assert (_sum_of_entries([(change, everything)], shape) != whole) == (change != x).any()
