"""Methods that choose among configurations: schedules, rankings, traces and journals."""

import functools
import json
import math
import re
import warnings

import jax
import numpy as np
import pytest
from helpers import no_room

from bilevel import baselines
from bilevel.baselines import Selection
from bilevel.contracts import Evaluation, Shared
from bilevel.runs import records

key = functools.partial(jax.random.key, 3)
HALVING = [baselines.weight_sharing, baselines.fast_weight_sharing]
SHARING = [*HALVING, baselines.exponentiated_gradient]
ALONE = [baselines.random_search, baselines.successive_halving, baselines.hyperband]
METHODS = ALONE + SHARING
UNWRITTEN = "journal: a line of .* could not be written"


def generator(key):
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def noisy_selection(rows=2000, noise=0.5):
    """``config`` is the error rate; the test error is 100 more."""

    def evaluate(key, config, resource):
        error = config + noise * generator(key).normal() / math.sqrt(resource)
        return Evaluation(error, config + 100.0)

    def share(key, configs, probabilities, resource):
        rng, k = generator(key), len(configs)
        counts = np.bincount(rng.choice(k, rows, p=probabilities), minlength=k)
        return Shared(rng.binomial(counts, configs) / np.maximum(counts, 1), counts)

    return Selection(evaluate, share)


def exact_selection(errors, counts=None):
    """``config`` is an index; no noise, cells of given sizes."""
    errors = np.asarray(errors, float)

    def share(key, configs, probabilities, resource):
        sizes = np.full(len(configs), 10) if counts is None else np.asarray(counts)[configs]
        return Shared(errors[configs], sizes)

    return Selection(lambda key, config, resource: float(errors[config]), share)


def preceded(function, call):
    """The same function, but each of its calls is preceded by another with its arguments."""

    def both(*args):
        call(*args)
        return function(*args)

    return both


def assert_identical(a, b):
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), a, b)


@pytest.mark.parametrize("n, rounds", [(1, 0), (2, 1), (3, 2), (5, 3), (8, 3), (255, 8), (256, 8)])
@pytest.mark.parametrize("method", HALVING)
def test_weight_sharing_takes_the_ceiling_of_log2_rounds_and_leaves_one(method, n, rounds):
    errors = np.random.default_rng(n).permutation(n) / n
    trace = method(key(), range(n), exact_selection(errors), 1000)
    sizes = [len(c) for c in trace.candidates]
    assert len(trace.calls) == rounds and sizes == [-(-n // 2**t) for t in range(rounds)]
    assert trace.best == np.argmin(errors)
    np.testing.assert_array_equal(trace.valid, errors[trace.incumbent])


def test_weight_sharing_keeps_the_better_half_of_each_round():
    trace = baselines.weight_sharing(key(), np.linspace(0.1, 0.9, 37), noisy_selection(), 10)
    steps = zip(trace.candidates, trace.errors, trace.candidates[1:], strict=False)
    for candidates, errors, survivors in steps:
        better = candidates[np.lexsort([candidates, errors])[: (len(errors) + 1) // 2]]
        assert sorted(better) == survivors.tolist()


@pytest.mark.parametrize(
    ("n", "options", "expected"),
    [
        (16, {"growth": 1}, [81] * 4),
        (16, {"growth": 3}, [3, 9, 27, 81]),
        (16, {"growth": 10}, [1, 1, 9, 81]),
        # The paper: ceil(100000 * 2^((t - 8) / 2)) for t = 1 ... 8.
        (256, {}, [8839, 12500, 17678, 25000, 35356, 50000, 70711, 100000]),
    ],
)
def test_fast_weight_sharing_grows_by_the_factor_given(n, options, expected):
    selection = exact_selection(np.arange(n))
    trace = baselines.fast_weight_sharing(key(), range(n), selection, expected[-1], **options)
    assert trace.resource.tolist() == expected


@pytest.mark.parametrize(
    "n, budget, options, rungs",
    [
        (8, 100, {}, [(8, 13), (4, 25), (2, 50), (1, 100)]),
        (5, 8, {}, [(5, 1), (3, 2), (2, 4), (1, 8)]),
        (256, 4, {}, [(256, 1), (128, 2), (64, 4)]),
        (8, 100, {"minimum": 40}, [(8, 50), (4, 100)]),
        (27, 27, {"eta": 3}, [(27, 1), (9, 3), (3, 9), (1, 27)]),
        (4, 1, {}, [(4, 1)]),
        (1, 7, {}, [(1, 7)]),
    ],
)
def test_successive_halving_climbs_the_rungs(n, budget, options, rungs):
    """Truth: ceil(n / eta^i) at ceil(budget / eta^(s - i)), by hand."""
    trace = baselines.successive_halving(key(), np.arange(n), lambda k, c, r: c, budget, **options)
    assert trace.resource.tolist() == [r for size, r in rungs for _ in range(size)]
    assert trace.round.tolist() == [i for i, (size, _) in enumerate(rungs) for _ in range(size)]
    assert trace.best == 0


def test_hyperband_races_the_brackets_of_its_algorithm():
    """Truth: Li et al. (2018), Algorithm 1 at R = 81, eta = 3, by hand."""
    brackets = [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ]
    trace = baselines.hyperband(key(), np.arange(100), lambda k, c, r: c, 81)
    rungs = [rung for bracket in brackets for rung in bracket]
    assert trace.resource.tolist() == [r for size, r in rungs for _ in range(size)]
    assert len(trace.calls) == 206
    assert len(set(np.concatenate(trace.candidates)[trace.round == 5])) == 34
    # It makes do with few configurations.
    trace = baselines.hyperband(key(), [0.2, 0.1], lambda k, c, r: c, 9)
    assert trace.resource.tolist() == [1, 1, 3, 9, 3, 3, 9, 9, 9]
    assert trace.best == 1


def test_random_search_trains_each_configuration_once_in_a_random_order():
    run = functools.partial(baselines.random_search, configs=range(20), budget=7)
    trace = run(key(), problem=lambda k, c, r: c)
    order = np.concatenate(trace.candidates)
    assert sorted(order) == list(range(20)) and order.tolist() != list(range(20))
    assert set(trace.resource) == {7}
    np.testing.assert_array_equal(trace.incumbent, np.minimum.accumulate(order))
    assert len(run(key(), problem=lambda k, c, r: c, evaluations=4).calls) == 4


@pytest.mark.parametrize("method", ALONE)
def test_the_incumbent_is_the_best_on_the_highest_resource_so_far(method):
    trace = method(key(), np.linspace(0, 1, 9), noisy_selection(noise=3.0), 9)
    seen = []
    columns = trace.resource, trace.candidates, trace.errors, trace.incumbent, trace.valid
    for resource, (index,), (error,), incumbent, valid in zip(*columns, strict=True):
        seen.append((-resource, error, index))
        assert (valid, incumbent) == min(seen)[1:]
    assert trace.best == trace.incumbent[-1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [4, 256])
def test_ties_go_to_the_lower_index(method, n):
    trace = method(key(), range(n), exact_selection(np.full(n, 0.1)), 4, retrain_test=False)
    at_the_top = np.flatnonzero(trace.resource == trace.resource.max())
    assert trace.best == min(np.concatenate([trace.candidates[row] for row in at_the_top]))
    assert trace.best == 0 or method is baselines.hyperband  # hyperband draws a part


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_error_that_is_not_finite_never_ranks_first(method, bad):
    selection = exact_selection([bad, bad, 0.7, bad, 0.8])
    trace = method(key(), range(5), selection, 4, retrain_test=False)
    assert trace.best == 2
    seen = trace.incumbent >= 0
    assert np.isfinite(trace.valid[seen]).all() and np.isnan(trace.valid[~seen]).all()
    at_the_top = np.flatnonzero(trace.resource == trace.resource.max())
    assert any(2 in trace.candidates[row] for row in at_the_top)


@pytest.mark.parametrize("method", SHARING)
def test_empty_cells_rank_last(method):
    """Configuration 0 would be the best, but no validation row was drawn for it."""
    selection = exact_selection([0.0, 0.3, 0.2, 0.4], counts=[0, 5, 5, 5])
    options = {"rounds": 1} if method is baselines.exponentiated_gradient else {}
    trace = method(key(), range(4), selection, 1, retrain_test=False, **options)
    assert trace.best == 2
    assert math.isnan(trace.errors[0][0])


@pytest.mark.parametrize("method, calls", list(zip(METHODS, [1, 1, 3, 0, 0, 0], strict=True)))
def test_one_configuration_is_the_best(method, calls):
    trace = method(key(), [0], exact_selection([0.5]), 4, retrain_test=False)
    assert trace.best == 0 and len(trace.calls) == calls and trace.stopped == ""


def test_exponentiated_gradient_follows_its_formula():
    """Truth: theta exp(-eta g) / Z with g = (e - b) |V_c| / (|V| theta), step by step."""
    errors, counts = np.array([0.4, 0.1, 0.3, 0.2]), np.array([2, 3, 0, 5])
    exact = exact_selection(errors, counts)
    for baseline in (False, True):
        seen = []
        share = preceded(exact.share, lambda *args, seen=seen: seen.append(args[2]))
        selection = exact._replace(share=share)
        options = {"rounds": 4, "rate": 0.3, "baseline": baseline, "retrain_test": False}
        trace = baselines.exponentiated_gradient(key(), range(4), selection, 1, **options)
        theta, mean = np.full(4, 1 / 4), 0.0
        for t in range(4):
            np.testing.assert_allclose(seen[t], theta, rtol=1e-12)
            gaps = np.where(counts > 0, errors - (mean if baseline else 0.0), 0)
            theta = theta * np.exp(-0.3 * gaps * counts / (10 * theta))
            theta = theta / theta.sum()
            mean = errors @ counts / 10  # the same in every round, hence also the running mean
            assert trace.incumbent[t] == np.argmax(np.where(counts > 0, theta, -1))


def test_exponentiated_gradient_survives_probabilities_that_underflow():
    selection = exact_selection(np.linspace(1, 2, 5), counts=[0, 10**6, 1, 1, 10**6])
    options = {"rounds": 2, "rate": 100.0, "retrain_test": False}
    trace = baselines.exponentiated_gradient(key(), range(5), selection, 1, **options)
    assert trace.best in range(1, 5)


@pytest.mark.parametrize("method", METHODS)
def test_the_oracle_trains_each_incumbent_once_alone_and_in_full(method):
    configs, asked, noisy = np.linspace(0.1, 0.9, 9), [], noisy_selection()
    evaluate = preceded(noisy.evaluate, lambda *args: asked.append(args))
    trace = method(key(), configs, Selection(evaluate, noisy.share), 9)
    np.testing.assert_allclose(trace.test, configs[trace.incumbent] + 100)
    solves = 0 if method in SHARING else len(trace.calls)
    retrained = len(asked) - solves
    assert retrained <= len(set(trace.incumbent))
    method(key(), configs, Selection(evaluate, noisy.share), 9, retrain_test=False)
    assert len(asked) == retrained + 2 * solves
    if method is baselines.random_search:
        assert retrained == 0  # every evaluation was at full budget already
    assert trace.calls.tolist() == list(range(1, len(trace.calls) + 1))


def test_seconds_are_those_of_the_solves_and_not_of_the_retraining(monkeypatch):
    """Truth: a clock that moves by 1 s in a shared solve, by 100 s in a model trained alone."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def wait(seconds, *args):
        now[0] += seconds

    waits = functools.partial(wait, 100.0), functools.partial(wait, 1.0)
    slow = Selection(*map(preceded, noisy_selection(), waits))
    trace = baselines.weight_sharing(key(), np.linspace(0, 1, 8), slow, 5, progress=False)
    assert trace.seconds.tolist() == [1, 2, 3] and now[0] >= 103


@pytest.mark.parametrize("method", METHODS)
def test_the_same_key_gives_the_same_trace_and_each_solve_has_its_own(method):
    keys = []

    def note(key, *args):
        keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))

    selection = Selection(*(preceded(solve, note) for solve in noisy_selection()))
    one, two = (method(key(), np.linspace(0, 1, 8), selection, 9) for _ in range(2))
    half = len(keys) // 2
    assert keys[:half] == keys[half:] and len(set(keys[:half])) == half
    assert_identical(one._replace(seconds=None), two._replace(seconds=None))
    other = method(jax.random.key(4), np.linspace(0, 1, 8), selection, 9)
    assert any((a != b).any() for a, b in zip(one.errors, other.errors, strict=True))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


class Killed(Exception):
    pass


def dying(selection, after, exception=Killed):
    """The same problem, which raises at solve number ``after``, counting from 0."""
    lives = iter(range(after))  # fingerprints ignore iterators

    def die(*args):
        if next(lives, None) is None:
            raise exception

    return Selection(*(preceded(solve, die) for solve in selection))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_at_any_solve_resumes_to_the_same_trace(method, path):
    run = functools.partial(method, key(), np.linspace(0.1, 0.9, 6), budget=9)
    whole = run(problem=noisy_selection())
    for _ in range(100):
        try:
            trace = run(problem=dying(noisy_selection(), 1), journal=path, resume=True)
            break
        except Killed:
            continue
    assert_identical(whole._replace(seconds=None), trace._replace(seconds=None))
    assert_identical(trace, run(problem=dying(noisy_selection(), 0), journal=path, resume=True))


def test_a_last_line_cut_short_is_solved_again(path):
    run = functools.partial(baselines.weight_sharing, key(), np.linspace(0, 1, 8), budget=9)
    whole = run(problem=noisy_selection(), journal=path)
    text = path.read_bytes()
    for length in (len(text) - 1, len(text) - 30, 20, 0):
        path.write_bytes(text[:length])
        again = run(problem=noisy_selection(), journal=path, resume=True)
        assert_identical(whole._replace(seconds=None), again._replace(seconds=None))
        assert len(path.read_bytes().splitlines()) == len(text.splitlines())
        assert all(json.loads(line) for line in path.read_text().splitlines())


def test_the_journal_of_another_run_raises(path):
    configs = [{"kernel": "laplace", "gamma": 0.1}, {"kernel": "gauss", "gamma": 0.2}]
    problem = Selection(lambda k, c, r: c["gamma"], noisy_selection().share)
    usual = {"key": key(), "configs": configs, "problem": problem, "budget": 9}
    usual |= {"journal": path, "resume": True}
    for _ in range(2):
        baselines.random_search(**usual)
    for name, changed in [
        ("key", {"key": jax.random.key(9)}),
        ("budget", {"budget": 8}),
        ("configs", {"configs": [configs[0], {"kernel": "gauss", "gamma": 0.3}]}),
        ("options", {"evaluations": 1}),
        ("method", {}),
    ]:
        method = baselines.hyperband if name == "method" else baselines.random_search
        with pytest.raises(ValueError, match=rf"^journal: expected .*{name}.*, got .*\.$"):
            method(**(usual | changed))


def test_an_existing_journal_is_not_overwritten_nor_a_missing_one_resumed(tmp_path):
    path = tmp_path / "new" / "journal.jsonl"
    run = functools.partial(baselines.random_search, key(), [1, 2], lambda k, c, r: c, 9)
    run(journal=path)
    for text, options, message in [
        (path.read_text(), {"journal": path}, r"^journal: expected a new file or resume=True, got"),
        (path.read_text(), {"resume": True}, "^resume: expected a journal"),
        *(
            (foreign, {"journal": path, "resume": True}, r"^journal: expected .*, got .*\.$")
            for foreign in ("notes", "notes\nmore", "3\n", "{}\n{}\n")
        ),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            run(**options)
        assert path.read_text() == text  # the file stays


def test_a_flipped_bit_in_a_journal_is_solved_again_or_refused(tmp_path):
    run = functools.partial(baselines.hyperband, key(), np.linspace(0, 1, 6), budget=9)
    path, random = tmp_path / "journal.jsonl", np.random.default_rng(0)
    whole = run(problem=noisy_selection(), journal=path)._replace(seconds=None)
    text, outcomes = path.read_bytes(), []
    header = text.index(b"\n") + 1
    for byte in (*random.integers(header, size=10), *random.integers(header, len(text), 30)):
        flipped = bytearray(text)
        flipped[byte] ^= 1 << random.integers(8)
        path.write_bytes(flipped)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                trace = run(problem=noisy_selection(), journal=path, resume=True)
            except ValueError as error:
                assert byte < header and re.match(r"journal: .*damaged.*\.$", str(error))
                assert path.read_bytes() == flipped
                continue
        assert_identical(whole, trace._replace(seconds=None))
        outcomes += [str(w.message) for w in warned]
    assert len(outcomes) > 20 and all("solved again" in words for words in outcomes)


def test_lines_of_another_journal_are_solved_again(tmp_path):
    """A checksum of the line alone would accept them."""
    run = functools.partial(baselines.hyperband, configs=np.linspace(0, 1, 6), budget=9)
    paths = tmp_path / "own", tmp_path / "other"
    for key, path in enumerate(paths):
        whole = run(jax.random.key(key), problem=noisy_selection(), journal=path)
    own, other = (path.read_bytes().splitlines(keepends=True) for path in paths)
    whole = run(jax.random.key(0), problem=noisy_selection())._replace(seconds=None)
    mixed = tmp_path / "mixed"
    for lines in ([own[0], *other[1:]], [own[0], *own], own + other):
        mixed.write_bytes(b"".join(lines))
        with pytest.warns(UserWarning, match="damaged lines of .* are solved again"):
            trace = run(jax.random.key(0), problem=noisy_selection(), journal=mixed, resume=True)
        assert_identical(whole, trace._replace(seconds=None))


def test_a_journal_is_of_one_precision_and_one_generator(path):
    def run(key, **recording):
        return baselines.random_search(key, [0.1, 0.2], noisy_selection(), np.array(9), **recording)

    run(jax.random.key(0, impl="rbg"), journal=path)
    with pytest.raises(ValueError, match="with generator unsafe_rbg, got rbg"):
        run(jax.random.key(0, impl="unsafe_rbg"), journal=path, resume=True)
    wide = jax.config.jax_enable_x64
    message = f"with float64 {not wide}, got {wide}"
    with jax.enable_x64(not wide), pytest.raises(ValueError, match=message):
        run(jax.random.key(0, impl="rbg"), journal=path, resume=True)


def test_the_journal_of_another_problem_raises(path):
    def shifted_by(offset):
        return lambda key, config, resource: config + offset

    run = functools.partial(baselines.random_search, key(), [1, 2], budget=1, journal=path)
    run(problem=shifted_by(0.5))
    run(problem=shifted_by(0.5), resume=True)  # another function object
    with pytest.raises(ValueError, match=r"^journal: .* \(offset was 0\.5, is 0\.25\) in .*\.$"):
        run(problem=shifted_by(0.25), resume=True)


@pytest.mark.parametrize("full_at", ["in the header", "half way"])
def test_a_full_disk_costs_the_journals_lines_and_not_the_run(path, full_at):
    run = functools.partial(baselines.hyperband, key(), np.linspace(0, 1, 6), noisy_selection(), 9)
    whole = run()._replace(seconds=None)
    run(journal=path)
    header, *lines = path.read_bytes().splitlines()
    room = len(path.read_bytes()) // 2
    if full_at == "in the header":
        room = len(header) - 5
        assert len(lines[0]) + 1 < room
    path.unlink()
    with no_room(room), pytest.warns(UserWarning, match=UNWRITTEN):
        trace = run(journal=path)
    assert_identical(whole, trace._replace(seconds=None))
    assert path.read_bytes()[-1:] in (b"\n", b"")  # no partial line
    assert_identical(whole, run(journal=path, resume=True)._replace(seconds=None))


def test_lines_that_found_no_room_are_written_once_there_is_some(path, monkeypatch):
    run = functools.partial(baselines.random_search, key(), [3, 1, 2], noisy_selection(), 1)
    whole = run(journal=path)
    left_alone = path.read_bytes().splitlines()
    path.unlink()
    append, full = records.append_whole, iter([True, True, True])

    def append_if_room(file, line):
        if next(full, False):
            raise OSError("no room")
        append(file, line)

    monkeypatch.setattr(records, "append_whole", append_if_room)
    with pytest.warns(UserWarning, match=UNWRITTEN):
        assert_identical(whole._replace(seconds=None), run(journal=path)._replace(seconds=None))
    lines = path.read_bytes().splitlines()
    assert lines[0] == left_alone[0] and len(lines) == len(left_alone)


def test_a_journal_that_another_run_writes_raises(path, tmp_path):
    def second(k, config, res):
        with pytest.raises(ValueError, match=r"^journal: .* which is in use\.$"):
            baselines.random_search(key(), [1, 2], second, 1, journal=path, resume=True)
        return 0.5

    baselines.random_search(key(), [1, 2], second, 1, journal=path)
    with pytest.raises(ValueError, match=r"^journal: expected a file to write in, got .*\.$"):
        baselines.random_search(key(), [1, 2], second, 1, journal=tmp_path, resume=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("after", [0, 2])
def test_ctrl_c_returns_the_trace_so_far(method, after, path):
    options = {"budget": 9, "journal": path, "resume": True}
    run = functools.partial(method, key(), np.linspace(0, 1, 8), **options)
    trace = run(problem=dying(noisy_selection(), after, KeyboardInterrupt))
    assert trace.stopped.startswith("interrupted after solve")
    assert len(trace.valid) == len(trace.test) == len(trace.errors) <= after
    assert trace.best == (trace.incumbent[-1] if len(trace.valid) else -1)
    assert run(problem=dying(noisy_selection(), 100, KeyboardInterrupt)).stopped == ""


def test_ctrl_c_in_the_oracle_loses_no_solve():
    broken = dying(noisy_selection(), 0, KeyboardInterrupt)
    selection = noisy_selection()._replace(evaluate=broken.evaluate)
    trace = baselines.weight_sharing(key(), np.linspace(0, 1, 8), selection, 9)
    assert len(trace.calls) == 1 and math.isnan(trace.test[0]) and trace.best >= 0


def test_the_last_resource_is_the_budget_however_large():
    for budget in (10**13, 2**41, 3 * 10**15):
        trace = baselines.successive_halving(key(), [0.1, 0.2], lambda k, c, r: c, budget)
        assert trace.resource[-1] == budget
