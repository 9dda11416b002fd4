"""A job that does not fit into memory is refused in one message before long work; others run."""

import jax
import jax.numpy as jnp
import pytest

from bilevel.cli import main, parse_flags
from bilevel.cli.runtime import memory
from bilevel.internal import memory as machine
from bilevel.problem.problem import split_losses
from bilevel.spaces.skips import skip_space

DARTS = "search-darts --cells 1 --operations none sep_conv_3x3"


class Begun(Exception):
    """Data would be read now: the long work begins."""


@pytest.fixture
def no_data(monkeypatch):
    def read(*args, **sizes):
        raise Begun

    monkeypatch.setattr("bilevel.data.datasets.load", read)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"certify --data mnist --rows {10**6}",
            "rows: expected sizes that fit in the 8.0 GB of memory available, got 1000000, with "
            "which the run takes at least 144,000.0 GB.",
        ),
        ("search --data mnist --train 30000", "train: expected sizes that fit in the 8.0 GB"),
        (f"search-skips --width {10**9}", "seeds, width, depth: expected sizes that fit"),
        (f"baseline --configs {10**8}", "configs: expected sizes that fit"),
        (f"{DARTS} --channels {10**6}", "seeds, cells, channels: expected sizes that fit"),
    ],
)
@pytest.mark.usefixtures("no_data")
def test_sizes_that_do_not_fit_are_refused_in_one_message(monkeypatch, mistake, line, message):
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * 10**9)
    assert mistake(line).startswith(message)


@pytest.mark.parametrize("line", ["search --quick", "certify", "search-skips --quick", "baseline"])
def test_sizes_that_just_fit_are_not_refused(no_data, tmp_path, monkeypatch, line):
    needs = []
    fitting = memory.fitting

    def recorded(config, *stages):
        needs.extend(sum(map(memory.bytes_of, parts.values())) for parts in stages)
        return fitting(config, *stages)

    monkeypatch.setattr(memory, "fitting", recorded)
    monkeypatch.setattr(memory, "available_memory", lambda: max(needs))
    with pytest.raises(Begun):
        main([*line.split(), "--out", str(tmp_path / "run"), "--quiet"])


def test_an_allocation_that_fails_names_the_flags():
    config, _ = parse_flags(["certify"])
    parts = {("rows",): memory.shape(3)}
    with (
        pytest.raises(ValueError, match=r"rows: expected .*, got 300; .* RESOURCE_EXHAUSTED"),
        memory.fitting(config, parts),
    ):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore lines")
    with pytest.raises(RuntimeError, match="another"), memory.fitting(config, parts):
        raise RuntimeError("another error")


@pytest.mark.slow
def test_what_a_backward_pass_keeps_is_near_what_the_compiler_allocates():
    """Truth: the temporary arrays of the compiled gradient."""
    space, batch = skip_space(["relu", "tanh"], depth=5, width=64, classes=10), memory.shape(64, 64)
    data = batch, memory.shape(64, dtype="int32")
    lower, key = split_losses(space.problem).lower, jax.eval_shape(jax.random.key, 0)
    w, alpha = jax.eval_shape(space.init, key, data), jax.tree.map(jnp.asarray, space.start())
    kept = memory.kept_for_backward(lambda *a: lower(*a)[0], w, alpha, data)
    program = jax.jit(jax.grad(space.problem.lower)).lower(w, alpha, data).compile()
    allocated = program.memory_analysis().temp_size_in_bytes
    assert 0.5 * allocated < memory.bytes_of(kept) < 1.5 * allocated


def test_memory_is_what_the_system_and_its_groups_leave(tmp_path, monkeypatch):
    assert 10**8 < machine.available_memory() < machine.total_memory() < 2**60
    lines = {"/proc/self/cgroup": ["0::/a/b"]}
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    read = machine._lines
    monkeypatch.setattr(machine, "_lines", lambda path: lines.get(str(path)) or read(path))
    assert machine.available_memory() == machine.total_memory() == 10**6
    lines["/proc/self/cgroup"] = ["4:memory:/c"]
    (tmp_path / "memory" / "c").mkdir(parents=True)
    (tmp_path / "memory" / "c" / "memory.limit_in_bytes").write_text("2000000\n")
    assert machine.available_memory() == 2 * 10**6
