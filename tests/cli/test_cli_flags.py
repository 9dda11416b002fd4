"""No flag of any command is accepted in silence or ends in a traceback; nothing long is run."""

import dataclasses
import gc
import io
import json
import logging
import math
import os
import pathlib
import platform
import re
import signal
import sys
import time
import types
from importlib import metadata
from typing import Annotated, Literal, Union, get_args, get_origin

import helpers
import hypothesis
import hypothesis.strategies as st
import pooch
import pytest

from bilevel.cli import baseline, main, parse_flags
from bilevel.cli.deep_search import run
from bilevel.cli.flags import commands, datasets, deep_searches, from_config_file, rules
from bilevel.cli.runtime import command_run, invocation, memory
from bilevel.data import load
from bilevel.data.datasets import SOURCES
from bilevel.spaces.activations import ACTIVATIONS
from bilevel.spaces.darts import genotype as darts
from bilevel.spaces.features.text import BINS
from bilevel.spaces.nasbench201 import genotype
from bilevel.spaces.nasbench201.judging.verdicts import BASELINES
from bilevel.spaces.nasbench201.scoring import SCORES
from bilevel.spaces.skips import CANDIDATES
from bilevel.spaces.targets import OUTER_LOSSES
from bilevel.strategies.activation_search import SOLVERS

COMMANDS = {name: [name] for name in ("search", "certify", "baseline", "rank")}
COMMANDS |= {name: [f"search-{name}"] for name in ("skips", "darts", "nasbench201")}
COMMANDS["own"] = ["search-own", "--space", "own_space:looks"]
every_command = pytest.mark.parametrize("command", COMMANDS)
UGLY = (
    *(0, -1, 1, 2, 3, 7, 10**3, 10**6, 10**9, 10**12, 2**31, 2**32, 2**63, 10**30, 10**400),
    *(0.0, -1.0, 0.5, 1.0, 1e-300, 1e308, math.inf, -math.inf, math.nan),
    *((), ("relu",), ("relu", "relu"), ("none", "relo"), ("all",), ("all", "naswot"), ("",)),
    *(True, False, None, "", "digits", "all", "10^30", "x" * 300, pathlib.Path("a\0b")),
    *(pathlib.Path("\udcff"), pathlib.Path("ordinary")),
)


@pytest.fixture(autouse=True)
def eight_gigabytes_and_the_examples(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * 10**9)
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "examples")


@pytest.fixture(scope="module")
def defaults():
    return {command: parse_flags(arguments)[0] for command, arguments in COMMANDS.items()}


def may_be(hint, value):
    """A weaker check by the type alone: finite, at least 0, distinct names, printable."""
    options = get_args(hint)
    if get_origin(hint) is Annotated:
        return may_be(options[0], value)
    if get_origin(hint) in (Union, types.UnionType):
        return any(may_be(option, value) for option in options)
    if get_origin(hint) is Literal:
        return value in options
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and len(set(value)) == len(value) and "" not in value
    if hint in (int, float):
        number = isinstance(value, int if hint is int else int | float)
        return number and not isinstance(value, bool) and 0 <= value <= 10**18
    if hint is pathlib.Path:
        return isinstance(value, pathlib.Path) and str(value).isprintable()
    return isinstance(value, hint)


@pytest.mark.slow
@every_command
@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_a_flag_is_refused_in_a_sentence_that_names_it_or_may_be_used(defaults, command, data):
    config = defaults[command]
    hints = rules.hints(type(config))
    name = data.draw(st.sampled_from(sorted(hints)))
    others = st.integers() | st.floats() | st.text() | st.lists(st.text()).map(tuple)
    value = data.draw(st.sampled_from(UGLY) | others)
    changed = dataclasses.replace(config, **{name: value})
    try:
        changed.check()
    except ValueError as error:
        sentence = str(error)
        assert sentence.count("\n") == 0 and sentence.endswith(".") and len(sentence) < 500
        # With the flags that it depends on: more rows leave fewer, smaller sets make batches large.
        rest = {"train": "valid batch_size", "valid": "batch_size", "rows": ""}
        rest |= {"pool": "k", "k": "networks", "scores": "aggregate", "data": "train valid rows"}
        named = sentence.split(":")[0].split(", ")
        assert {name, *rest.get(name, "").split()} & set(named)
    else:
        assert may_be(hints[name], value), (name, value)
        json.dumps(from_config_file.flags_of(changed), allow_nan=False)


MISTAKES = [
    ("search --inner-steps 0", "inner_steps: expected at least 1, got 0."),
    ("search --alpha-rate nan", "alpha_rate: expected at least 1e-12, got nan."),
    ("search --activations relu relu", "activations: expected different names, got relu relu."),
    (f"search --steps {10**30}", "steps: expected at most 100000000, got about 10^30."),
    ("search --valid 1496", "valid: expected at most 1495 of the rows of digits, got 1496."),
    ("search --out .", "out: expected a path that ends in a name, got '.'."),
    ("search --out FILE", "out: expected a directory, got the file 'FILE'."),
    ("search --out FILE/x", "out: expected a directory that can be made, got 'FILE/x' ("),
    (f"rank --out new/{'x' * 300}", "out: expected a directory that can be made, got 'new/xxx"),
    (f"baseline --dimension {10**12}", "dimension: expected at most 1073741824, got 10000000"),
    ("certify --kernel no_such_module:f", "kernel: expected MODULE:FUNCTION, got 'no_such_m"),
    ("certify --pixels 4", "pixels: expected --kernel next to it, got 4 alone."),
    ("search --resume --out none", "out: expected the directory of a run"),
    ("search-skips --strategy eigen-nas --samples 4", "kept: expected at most the 4 samples"),
    ("search-darts --batch-size 501", "batch_size: expected at most the 500 rows of a split"),
    ("search-darts --operations conv_7x7", "operations: expected names among none, max_pool"),
    ("search-darts --drop-path 1", "drop_path: expected under 1, got 1.0."),
    ("search-darts --pixels 2", "x: expected images [n, h, w, c] of at least 4 x 4"),
    ("search-darts --auxiliary", "auxiliary: expected at least 8 x 8 pixels after two reduct"),
    ("rank --networks 2", "networks: expected 20 (--k) to 15625"),
    ("rank --pool 2", "k: expected at most the 2 of --pool"),
    ("rank --batch-size 501", "batch_size: expected at most the 500 training rows, got 501"),
    ("search --devices 2", "devices: expected at most the 1 that JAX finds, got 2."),
]


OWN_SPACES = [
    ("own_space", "MODULE:FUNCTION, as in my_module:my_space, got 'own_space'"),
    ("no_such_module:f", "MODULE:FUNCTION, got 'no_such_module:f' (no module"),
    ("own_space:WIDTH", "own_space:WIDTH to be a function, got 32."),
    ("json:dump", "json:dump to be a function of 1 argument, got json:dump("),
    ("builtins:int", "builtins:int to return a bilevel.spaces.Space, got a"),
]
OWN_SPACES = [(f"search-own --space {s}", f"space: expected {words}") for s, words in OWN_SPACES]


@pytest.mark.parametrize(("line", "sentence"), MISTAKES + OWN_SPACES)
def test_no_mistake_leaves_a_directory(tmp_path, mistake, line, sentence):
    (tmp_path / "FILE").touch()
    assert mistake(line).startswith(sentence)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"certify"}))
def test_a_run_is_resumed_with_the_flags_it_had_and_no_others(defaults, command, tmp_path, capsys):
    out = ["--out", str(tmp_path), "--resume"]
    good = from_config_file.flags_of(defaults[command])
    values = ([], {}, None, 3, "text", {"a": 1}, -1, 1e400, True)
    wrong = [json.dumps(value) for value in ([], 3, None, "text", {}, [good])]
    wrong += ["", "{", "[" * 100_000, "nonsense", json.dumps(good | {"unknown": 1})]
    wrong += [json.dumps({k: v for k, v in good.items() if k != name}) for name in good]
    wrong += [
        json.dumps(good | {name: value})
        for name in set(good) - {"out", "resume", "progress"}
        for value in values
        if name not in defaults[command].changeable
        if value != good[name] or isinstance(value, bool) != isinstance(good[name], bool)
    ]
    resumed = dataclasses.replace(defaults[command], out=tmp_path, resume=True)
    for text in wrong:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError) as raised, command_run.run_directory(resumed):
            pytest.fail(f"went on with {text}")
        assert str(raised.value).count("\n") == 0 and len(str(raised.value)) < 500
    other = "out: expected a run of this command and space, got one whose flags differ in"
    for text, message in [
        (b"\xff\xfe", "out: expected the flags of a run in "),
        (b'{"no_flag": 0}', f"{other} '{min(good)}'.\n"),
    ]:
        (tmp_path / "config.json").write_bytes(text)
        assert main([*COMMANDS[command], *out]) == 2
        assert capsys.readouterr().err.startswith(f"bilevel: {message}")


def test_a_run_that_fails_before_its_first_result_is_removed(defaults, tmp_path):
    config = dataclasses.replace(defaults["baseline"], out=tmp_path / "new" / "run")
    for error in (ValueError, MemoryError, KeyboardInterrupt):
        with pytest.raises(error) as raised, command_run.run_directory(config) as folder:
            (folder / "method.jsonl").write_text("a header\n")
            (folder / "checkpoint").mkdir()
            raise error
    assert str(raised.value) == "interrupted; nothing is saved"
    assert not list(tmp_path.iterdir())
    with pytest.raises(error) as raised, command_run.run_directory(config) as folder:
        (folder / "method.jsonl").write_text("a header\na solve\n")
        raise KeyboardInterrupt
    kept = "interrupted; its results are saved; resume with --resume --out"
    assert str(raised.value) == f"{kept} {folder}"
    assert folder == config.out and (folder / "config.json").exists()
    with pytest.raises(ValueError), command_run.run_directory(config) as second:
        raise ValueError
    assert second.name == "run-2" and not second.exists() and folder.exists()


@pytest.mark.long
@every_command
def test_ctrl_c_is_one_sentence_and_exits_with_130(command, tmp_path, monkeypatch, capsys):
    """While data are loaded, and when there is something to keep."""
    run, left = tmp_path / "run", []

    def interrupted(*args, **options):
        if left:
            (run / left[0]).write_text("{}\n{}\n")
        raise KeyboardInterrupt

    monkeypatch.setattr("bilevel.data.datasets.load", interrupted)
    line = [*COMMANDS[command], "--out", str(run), "--progress", "True"]
    assert main([*line, "--quiet"]) == 130
    assert capsys.readouterr() == ("", "bilevel: interrupted in phase 'data'; nothing is saved\n")
    assert not run.exists()
    left.append("solves.jsonl")
    assert main([*line, "--json"]) == 130
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("bilevel: interrupted in phase 'data'; ") and " saved" in error
    how = f" in {run}" if command == "certify" else f"; resume with --resume --out {run}"
    assert error.endswith(how) and (run / left[0]).exists()


def test_ctrl_c_during_a_garbage_collection_is_not_lost(capfd):
    """Python ignores exceptions there, and JAX runs Python code at every collection."""
    seen = []

    def callback(phase, info):
        if not seen:
            seen.append(phase)
            raise KeyboardInterrupt

    gc.disable()  # or a collection may come before anything is heard
    gc.callbacks.append(callback)
    # Shells ignore SIGINT in background processes.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), invocation.heard():
            gc.collect()
            for _ in range(1000):
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, handler)
        gc.callbacks.remove(callback)
        gc.enable()
    assert seen and not capfd.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_parsers_refusal_is_one_sentence_in_any_terminal(encoding, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    for line, message in [
        (["search", "--seeds", "2.5"], r"^Error parsing --seeds: .* '2.5'; see --help\.$"),
        (["search", "word"], r"^Unrecognized (options|arguments): word; see --help\.$"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_flags(line)


@every_command
def test_a_typing_error_gets_the_nearest_command_or_flag(command, capsys):
    """Each name with two letters exchanged, one left out, and one doubled."""
    (word,) = COMMANDS[command][:1]
    typed = [*rules.hints(type(parse_flags(COMMANDS[command])[0])), *rules.hints(commands.Output)]
    for name in (word, *(f"--{flag.replace('_', '-')}" for flag in typed), "--no-progress"):
        for wrong in (name[:-3] + name[-2] + name[-3] + name[-1], name[:-2] + name[-1], name + "x"):
            if wrong == name or len(name) < 6:
                continue
            assert main([wrong] if name == word else [word, wrong]) == 2
            error = capsys.readouterr().err
            assert f"got '{wrong}' (did you mean {name}?); see bilevel " in error
            assert error.count("\n") == 1


def test_help_and_the_version_are_there_in_every_form(capsys):
    def printed(*line):
        with pytest.raises(SystemExit) as end:
            main(line)
        assert not end.value.code
        return capsys.readouterr().out

    assert printed() == printed("help") == printed("--help") == printed("help", "help")
    for command, *_ in COMMANDS.values():
        assert printed("help", command) == printed(command, "--help")
        assert f"usage: bilevel {command} " in printed(command, "--help")
        assert main([command, "--version"]) == 0
        assert main(["--version"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == lines[1] and lines[0].startswith("bilevel ")


@pytest.mark.parametrize(
    ("typed", "progress"),
    [
        *(("", None), ("--no-progress", False), ("--progress=True", True)),
        *(("--progress None", None), ("--progress --seed 3", True)),
    ],
)
def test_progress_is_requested_and_declined(typed, progress):
    assert parse_flags(["search", *typed.split()])[0].progress is progress


@every_command
def test_the_line_goes_before_quick_sizes_and_these_before_the_file(defaults, command, tmp_path):
    usual, file = defaults[command], tmp_path / "config.json"
    saved_run = dataclasses.replace(usual, seed=7, data="mnist", out=tmp_path)
    file.write_text(json.dumps(from_config_file.flags_of(saved_run)))
    config, output = parse_flags([*COMMANDS[command], "--config", str(file)])
    assert config == saved_run and output.config == file
    quick = parse_flags([*COMMANDS[command], "--quick"])[0]
    assert quick.data == "digits"  # which needs no download
    line = [*COMMANDS[command], "--quick", f"--config={file}"]
    both = parse_flags(line)[0]
    for name in rules.hints(type(usual)):
        is_size = getattr(quick, name) != getattr(usual, name)
        assert getattr(both, name) == getattr(quick if is_size else saved_run, name)
    typed = parse_flags([*line, "--seed", "13", "--out", "other"])[0]
    assert typed == dataclasses.replace(both, seed=13, out=pathlib.Path("other"))
    file.write_text('{"seed": 7}')  # of an earlier version, say, which had fewer flags
    config = parse_flags([*COMMANDS[command], "--config", str(file)])[0]
    assert config == dataclasses.replace(usual, seed=7)


def test_quiet_downloads_say_nothing(tmp_path, monkeypatch, capsys):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.levelname)

    def download(*args, **options):
        pooch.get_logger().info("Downloading data from 'https://example.org' to file 'x'.")
        pooch.get_logger().warning("and something that matters")
        raise FileNotFoundError("no network")

    monkeypatch.setattr("bilevel.data.datasets.load", download)
    pooch.get_logger().addHandler(handler)
    try:
        for quiet in (["--quiet"], []):
            assert main(["certify", "--out", str(tmp_path / "run"), *quiet]) == 2
    finally:
        pooch.get_logger().removeHandler(handler)
    assert said == ["WARNING", "INFO", "WARNING"]
    assert "bilevel: no network\n" in capsys.readouterr().err


NEED_JAX = "FILE/x", "new/", "--pixels 2", "--auxiliary", "--devices 2"
LINES = [
    *("--version", "help rank", "search --help", "search --steps none", "search --stepz 3"),
    *("search --resume --out run", "search --config nothing", "serach", "search-own"),
    *("search-own --space no_such_module:space", "baseline --data imdb --devices 3"),
    "rank --scores nas",
    *(line for line, _ in MISTAKES if not any(word in line for word in NEED_JAX)),
]
ANSWERED = """
import json, sys
from bilevel.cli import main
for line in json.loads(sys.argv[1]):
    try:
        status = main(line.split())
    except SystemExit as end:
        status = end.code or 0
    assert status == (0 if "help" in line or "version" in line else 2), line
    assert "jax" not in sys.modules, line
"""


def test_help_mistakes_and_the_version_do_not_wait_for_jax(tmp_path):
    (tmp_path / "FILE").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"seed": 3}')
    output = helpers.run("python", "-c", ANSWERED, json.dumps(LINES), cwd=tmp_path)
    assert "--inner-steps" in output
    match = re.match(r"bilevel (\S+), jax (\S+), jaxlib (\S+), Python (\S+)\n", output)
    versions = (metadata.version(name) for name in ("bilevel", "jax", "jaxlib"))
    assert match and match.groups() == (*versions, platform.python_version())


def choices(flags, name):
    return get_args(rules.hints(flags)[name])


def test_names_and_sizes_of_flags_are_those_of_the_library():
    assert choices(commands.Search, "solver") == SOLVERS
    assert set(choices(commands.Search, "outer")) == set(OUTER_LOSSES)
    assert {*datasets.SHAPES, "imdb"} == {*datasets.ROWS} == {*SOURCES, "digits"}
    assert set(choices(commands.Baseline, "method")) == {"all", *baseline._METHODS}
    assert set(get_args(deep_searches.Strategy)) == set(run.STRATEGIES)
    assert set(commands.ACTIVATIONS) == set(ACTIVATIONS)
    assert deep_searches.SkipSearch().activations == CANDIDATES
    assert deep_searches.DARTS_OPERATIONS == darts.PRIMITIVES
    assert deep_searches.NASBENCH201_OPERATIONS == genotype.PRIMITIVES
    assert (tuple(SCORES), tuple(BASELINES)) == (commands.SCORES, commands.BASELINES)
    dimension = rules.hints(commands.Baseline)["dimension"]
    assert not rules.fault(dimension, BINS) and rules.fault(dimension, BINS + 1)
    data = load("digits")
    assert datasets.ROWS["digits"] == (len(data.x_train) + len(data.x_test), 0)
    assert datasets.SHAPES["digits"] == (*data.x_train.shape[1:], 1)
    assert len(data.classes) == datasets.CLASSES


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"rowz": 3}', "config: expected the flags of a run of this command and space"),
        ('{"rows": "3"}', "config: rows in 'FILE': expected an integer, got '3'."),
        ('{"out": 3}', "config: out in 'FILE': expected a path, got 3."),
        ('{"activations": "relu"}', "config: activations in 'FILE': expected names,"),
        ("[]", "config: expected the flags of a run in 'FILE', as a JSON object, got a"),
    ],
)
def test_a_config_that_is_not_the_commands_is_refused(tmp_path, mistake, text, sentence):
    (tmp_path / "FILE").write_text(text)
    assert mistake("certify --config FILE").startswith(sentence)
    assert "--config" in mistake("certify --config")
    missing = mistake("certify --config nothing")
    assert missing.endswith("'nothing', as a JSON object, got no such file.")


def test_a_run_that_was_resumed_with_more_leaves_the_flags_that_give_its_result(defaults, tmp_path):
    config = dataclasses.replace(defaults["search"], out=tmp_path / "run", steps=3)
    with command_run.run_directory(config) as folder:
        pass
    more = dataclasses.replace(config, steps=5, resume=True)
    with pytest.raises(ValueError), command_run.run_directory(more):
        raise ValueError
    (file,) = folder.iterdir()
    assert json.loads(file.read_text()) == from_config_file.flags_of(config)
    with command_run.run_directory(more):
        pass
    saved = from_config_file.flags_of(dataclasses.replace(config, steps=5))
    assert json.loads(file.read_text()) == saved
    assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("command", "flags", "cuda", "after"),
    [
        ("search", "", True, "--xla_gpu_autotune_level=0"),
        ("search", "--xla_a=1", True, "--xla_a=1 --xla_gpu_autotune_level=0"),
        ("search", "--xla_gpu_autotune_level=4", True, "--xla_gpu_autotune_level=4"),
        ("search-darts", "", True, ""),
        ("search", "", False, ""),
    ],
)
def test_commands_of_small_programs_switch_autotuning_off(command, flags, cuda, after, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(invocation.importlib.util, "find_spec", lambda name: cuda or None)
    invocation.switch_autotuning_off(command)
    assert os.environ["XLA_FLAGS"] == after


PROGRAMS = """
import os, pathlib, jax, pooch
{user}
from bilevel.cli.runtime import invocation
invocation.keep_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x + 1)(1.0)
print(jax.config.values["jax_compilation_cache_dir"], pathlib.Path("~").exists())
"""


@pytest.mark.parametrize(
    ("user", "own", "folder"),
    [
        pytest.param("", {}, "cache/bilevel/programs", marks=pytest.mark.long),
        pytest.param("", {"JAX_COMPILATION_CACHE_DIR": "own"}, "own", marks=pytest.mark.long),
        ("pooch.os_cache = lambda name: pathlib.Path('~', name)", {}, None),  # without a home
        ("os.access = lambda folder, mode: False", {}, None),  # without permission to write
    ],
)
def test_programs_are_kept_for_the_next_command_if_they_can_be(tmp_path, user, own, folder):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")} | own
    printed = helpers.run("python", "-c", PROGRAMS.format(user=user), env=environment, cwd=tmp_path)
    assert printed.endswith(f"{folder} False\n")
    if folder:
        assert [path.name for path in tmp_path.iterdir()] == folder.split("/")[:1]
        assert list((tmp_path / folder).glob("jit_*"))
