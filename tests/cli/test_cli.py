"""The command line runs the main job, leaves its results, and reports mistakes in one sentence."""

import contextlib
import datetime
import importlib
import io
import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers import arrays_in, result_of, run

import bilevel
import ntk
from bilevel.cli import main
from bilevel.cli import search as commands
from bilevel.cli.runtime import report
from bilevel.cli.search import describe_advice
from bilevel.nets.evaluation import compare_errors, standard_error_over_seeds
from bilevel.runs import progress
from bilevel.spaces.activations import ACTIVATIONS
from bilevel.spaces.kernels import mixture_eigenvalue
from bilevel.strategies.activation_search import Gap

SMALL = "--activations relu tanh --steps 3 --inner-steps 5 --width 16 --train 40 --valid 40"
# Their kernels have closed forms, which compile quickly.
CLOSED = "--activations relu leaky_relu"


def search(folder, flags):
    return main(["search", "--out", str(folder), *f"{SMALL} {flags}".split()])


@pytest.fixture
def bars(monkeypatch):
    """Records the bars of a run: ``(phase, done, total, text)``."""
    shown = []

    @contextlib.contextmanager
    def recorded(visible):
        yield (lambda *values: shown.append(values)) if visible else None

    monkeypatch.setattr(progress, "_bars", recorded)
    return shown


def check_bars(shown, phases):
    """One bar for each phase, which is never set back; the last one is full in the end."""
    assert [*dict.fromkeys(phase for phase, *_ in shown)] == phases
    for phase in phases:
        done = [done / total for name, done, total, _ in shown if name == phase]
        assert done == sorted(done) and done[0] == 0
    assert shown[-1][1:3] == (1, 1)


def test_each_phase_of_a_run_has_one_bar_that_its_loop_fills(bars):
    with (
        pytest.raises(KeyboardInterrupt, match="interrupted in phase 'second'"),
        progress.phases(True) as run,
    ):
        run.enter("first")
        run.enter("second")
        with progress.progress_bar(None, "loop", 6, "loss {x:.1f}") as show:
            show(2, lambda: {"x": 0.25})
        with progress.progress_bar(False, "silent", 6, "") as show:
            show(3, lambda: pytest.fail("looked at what is not shown"))
        raise KeyboardInterrupt
    assert bars == [("first", 0, 1, ""), ("second", 0, 1, ""), ("second", 2, 6, "loss 0.2")]
    with progress.phases(None) as run:  # no terminal
        run.enter("first")
        with progress.progress_bar(True, "loop", 6, "") as show:
            show(3, lambda: pytest.fail("looked at what is not shown"))
    assert len(bars) == 3


def test_search_ends_in_a_table_and_a_run_directory(tmp_path, capsys, bars, monkeypatch):
    # No program computes an error estimate that the command does not print.
    monkeypatch.setattr("bilevel.hypergradients.hypergradient.assess", None)
    assert search(tmp_path / "run", "--seeds 2 --progress True") == 0
    phases = ["data", "search", "retraining", "joint training", "certificates"]
    check_bars(bars, [*phases, "error of the hypergradient"])
    said = [text for phase, done, _, text in bars if (phase, done) == ("search", 3)]
    printed = capsys.readouterr().out
    for row in ("search", "relu", "tanh", "joint training", "α found:", "mean ± s.e. of 2 seeds"):
        assert row in printed
    result = result_of(tmp_path / "run")
    alpha = np.array(result["alpha"])
    assert alpha.shape == (2, 2)
    np.testing.assert_allclose(alpha.sum(1), 1, rtol=1e-5)
    # The table's search row is the network retrained at this alpha, better than chance on digits.
    assert np.mean(result["scores"]["search"]["test_error"]) < 0.8
    assert "λ_min ≥" in printed
    argmax = result["argmax"]
    assert argmax["choice"] == [result["names"][i] for i in alpha.argmax(1)]
    assert argmax["condition_six"] == [1, 1]  # of two activations, always
    # By the table's own rows: yes where no other is better by the validation rows of either.
    for s, choice in enumerate(argmax["choice"]):
        other = next(name for name in result["names"] if name != choice)
        for by in ("loss", "error"):
            alone = {n: result["scores"][n][f"valid_{by}"][s] for n in (choice, other)}
            np.testing.assert_allclose(
                argmax["by"][by]["alone"][s], [alone[n] for n in result["names"]], rtol=1e-5
            )
            if alone[choice] <= alone[other]:
                assert argmax["by"][by]["as_good"][s] and argmax["by"][by]["rank"][s] == 1
    yes = sum(argmax["discretise"])
    printed = " ".join(printed.split())
    assert f"argmax of α: use it alone in {yes} of 2 seeds" in printed
    assert "the best single activation: " in printed
    assert f"figure: {tmp_path / 'run' / 'search.png'}" in printed
    for scores in result["scores"].values():
        value, bound = scores["min_eigenvalue"], scores["certified_min_eigenvalue"]
        assert len(value) == 2
        np.testing.assert_array_less(bound, value)
        np.testing.assert_allclose(bound, value, rtol=1e-6)
    arrays = arrays_in(tmp_path / "run" / "arrays.npz")
    losses = (arrays[f"history_{name}"][-1] / 2 for name in ("lower", "value"))  # of two seeds
    assert said == ["train {:.4g}  valid {:.4g}".format(*losses)]
    assert arrays["history_alpha"].shape == (3, 2, 2)
    assert arrays["w"].shape == (2, 16, 64)
    assert (tmp_path / "run" / "search.png").stat().st_size > 10_000


def test_eigenvalues_are_of_float64_without_a_warning_where_the_rest_is_float32():
    with jax.enable_x64(False):
        value, bound, error = mixture_eigenvalue(jnp.eye(3), (ntk.relu,), jnp.ones(1))
    assert error < 1e-12 and 0 < value - bound < 1e-11
    assert abs(value - 0.5) < 1e-12  # E s'(u)^2 x'x, orthogonal inputs


def test_the_difference_of_two_errors_has_students_interval_or_that_of_the_rows():
    ours, baseline = np.array([0.10, 0.12, 0.11]), np.array([0.13, 0.14, 0.15])
    low, high = scipy.stats.ttest_rel(ours, baseline).confidence_interval(0.95)
    assert compare_errors(ours, baseline, 500) == (
        f"clearly better (-3.0 points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f}, "
        "from 3 seeds)"
    )
    # Agresti and Caffo add a success and a failure to both samples: 1 and 11 of 12 here.
    width = 100 * 1.96 * (2 * 1 / 12 * 11 / 12 / 12) ** 0.5
    assert compare_errors(np.array([1.0]), np.array([0.0]), 10) == (
        f"clearly worse (+100.0 points, 95 % interval {1000 / 12 - width:+.1f} to "
        f"{1000 / 12 + width:+.1f}, from 10 test rows)"
    )
    # Equal differences of few seeds are not proof, so the rows give the interval.
    assert "no clear difference" in compare_errors(ours + 0.001, ours, 500)


@pytest.mark.parametrize(
    ("as_good", "verdict"),
    [
        (
            True,
            "argmax of α: use sigmoid alone; retrained it has 3.5 % error on 300 validation rows, "
            "as good as every other activation by hinge loss and by error (mixture: 2.5 %)",
        ),
        (
            False,
            "argmax of α: keep the mixture (2.5 % error on 300 validation rows); sigmoid retrained "
            "alone has 3.5 % and is number 2 of 3 by error, although as good as the first by hinge "
            "loss; the first by error is relu (2.7 %)",
        ),
    ],
)
def test_the_verdict_on_the_argmax_is_one_sentence(as_good, verdict):
    by_loss = {"as_good": [True], "rank": [3], "best": ["swish"]}
    by_error = {"as_good": [as_good], "rank": [2], "best": ["relu"]}
    by_error |= {"alone": [[0.027, 0.035, 0.026]], "mixture": [0.025]}
    argmax = {"choice": ["sigmoid"], "discretise": [as_good], "valid_rows": 300}
    argmax["by"] = {"loss": by_loss, "error": by_error}
    result = {"argmax": argmax, "names": ["relu", "sigmoid", "swish"], "config": {"outer": "hinge"}}
    assert describe_advice(result) == verdict


@pytest.mark.long
@pytest.mark.parametrize(
    ("geometry", "solver"),
    [("project", "truncated"), ("softmax", "first-order"), ("exponentiate", "implicit")],
)
def test_every_geometry_and_solver_runs(tmp_path, geometry, solver):
    assert search(tmp_path / "run", f"{CLOSED} --geometry {geometry} --solver {solver}") == 0


@pytest.mark.long
def test_a_run_resumed_with_more_steps_is_one_long_run(tmp_path, capsys, monkeypatch):
    # The comparisons after the search are other tests'.
    known = Gap(np.array([1.0]), np.array([0.5]))
    monkeypatch.setattr(commands.steps, "hypergradient_error", lambda *of_task: known)
    joint = lambda _, task, alpha: (task.w0, alpha)  # noqa: E731
    monkeypatch.setattr(commands._SearchRun, "_train_jointly", joint)
    search(tmp_path / "run", CLOSED)
    error = "hypergradient error at this α: 50 % (compared with training 4 times"
    assert error in capsys.readouterr().out
    assert search(tmp_path / "run", f"{CLOSED} --resume --seed 5") == 2
    assert "seed: expected 0 as in the run to resume, got 5" in capsys.readouterr().err
    search(tmp_path / "run", f"{CLOSED} --steps 5")
    assert search(tmp_path / "run", f"{CLOSED} --resume --steps 5") == 0
    resumed, long = result_of(tmp_path / "run"), result_of(tmp_path / "run-2")
    assert resumed["alpha"] == long["alpha"] and resumed["scores"] == long["scores"]


def certify(folder, *flags):
    small = ("--rows", "40", "--activations", "relu", "leaky_relu", "tanh")
    return main(["certify", "--out", str(folder), *small, *flags])


@pytest.mark.long
def test_certify_prints_a_bracket_and_leaves_it_with_the_spectra(tmp_path, capsys):
    precision = jax.config.jax_enable_x64
    assert certify(tmp_path / "run") == 0
    assert jax.config.jax_enable_x64 == precision
    printed = capsys.readouterr().out
    for text in ("over the simplex", "worst mixture", "certified ≥", "exact to ", "cells"):
        assert text in printed
    result = result_of(tmp_path / "run")
    simplex, kernels = result["simplex"], result["kernels"]
    assert simplex["converged"]
    assert 0 < simplex["lower"] <= simplex["upper"] <= 1.001 * simplex["lower"]
    for kernel in kernels.values():
        assert simplex["lower"] <= kernel["min_eigenvalue"]
        assert kernel["certified_min_eigenvalue"] <= kernel["min_eigenvalue"]
    arrays = arrays_in(tmp_path / "run" / "arrays.npz")
    for name, kernel in kernels.items():
        spectrum = arrays[f"spectrum_{name}".replace(" ", "_")]
        assert spectrum.shape == (40,)
        ends = [kernel["min_eigenvalue"], kernel["max_eigenvalue"]]
        np.testing.assert_allclose(spectrum[[0, -1]], ends)
    # Truth: the kernel of the mixture, computed by the recursion for networks instead of by pairs.
    for name in ("relu", "worst mixture"):
        activations = tuple(ACTIVATIONS[name] for name in result["names"])
        value, *_ = mixture_eigenvalue(arrays["x"], activations, kernels[name]["alpha"])
        np.testing.assert_allclose(value, kernels[name]["min_eigenvalue"], rtol=1e-9)
    space = bilevel.spaces.activation_space(result["names"], width=np.inf)
    with jax.enable_x64(True):
        _, errors = space.blocks(jnp.asarray(arrays["x"]), error=True)
    np.testing.assert_allclose(result["entry_error"], np.max(errors), rtol=1e-6)
    assert (tmp_path / "run" / "spectrum.png").stat().st_size > 10_000


KERNELS = """
import jax.numpy as jnp

def gaussian(a, b):
    return jnp.exp(-jnp.sum((a[:, None] - b) ** 2, (-3, -2, -1)) / a[0].size)

def cubic(a, b):
    return (1 + jnp.einsum("nhwc,mhwc->nm", a, b) / a[0].size) ** 3

def one(): return gaussian
def both(): return {"gaussian": gaussian, "cubic": cubic}
def neither(): return {}
"""


@pytest.fixture
def own_kernels(tmp_path, monkeypatch):
    (tmp_path / "own_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_kernels", None)


@pytest.mark.long
def test_certify_takes_kernels_of_the_users_own(own_kernels, tmp_path, capsys):
    """Truth: the same functions, certified by the library on the rows that the run leaves."""
    flags = "--kernel", "own_kernels:both", "--pixels", "4", "--rows", "30"
    assert main(["certify", "--out", str(tmp_path / "run"), *flags]) == 0
    printed = capsys.readouterr().out
    assert "own_kernels:both" in printed and "measured, not proved" in printed
    result, x = result_of(tmp_path / "run"), arrays_in(tmp_path / "run" / "arrays.npz")["x"]
    assert x.shape == (30, 4, 4, 1) and result["names"] == ["gaussian", "cubic"]
    own = importlib.import_module("own_kernels")
    for name in result["names"]:
        bound = ntk.certified_min_eigenvalue(getattr(own, name), x=x)
        certified = result["kernels"][name]["certified_min_eigenvalue"]
        np.testing.assert_allclose(certified, bound, atol=1e-12)
    assert result["simplex"]["argmin"] in ([1, 0], [0, 1])
    assert main(["certify", "--out", str(tmp_path / "one"), "--kernel", "own_kernels:one"]) == 0
    assert "worst mixture: 1.00 one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("own_kernels:neither", "kernel: expected own_kernels:neither to return a kernel function"),
        ("own_kernels", "kernel: expected MODULE:FUNCTION, as in"),
        ("json:dumps", "kernel: expected json:dumps to be a function of 0 arguments"),
        ("{'a': lambda x: x @ x.T}", "kernel: expected a to be a function of 2 arguments, got a"),
        ("{'worst mixture': lambda x, y: x @ y.T}", "kernel: expected own_kernels:more to return"),
        ("dict.fromkeys(('a b', 'a_b'), lambda x, y: x @ y.T)", "kernel: expected names that"),
        ("lambda x, y: 1j * (x[:, 0, 0] @ y[:, 0, 0].T)", "K: expected .* real values"),
    ],
)
@pytest.mark.usefixtures("own_kernels")
def test_mistakes_in_kernels_of_ones_own_are_one_message(tmp_path, mistake, kernels, message):
    if not kernels.startswith(("own", "json")):
        (tmp_path / "own_kernels.py").write_text(f"def more():\n    return {kernels}\n")
        kernels = "own_kernels:more"
    assert re.search(message, mistake(["certify", "--rows", "10", "--quiet", "--kernel", kernels]))


@pytest.mark.long
def test_a_run_says_how_it_was_made_and_its_config_gives_it_again(tmp_path, capsys):
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    began = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    assert certify(first, "--json") == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert not printed.err and printed.out == (tmp_path / "first" / "result.json").read_text()
    assert result["command"].startswith("bilevel certify --out ")
    assert began <= datetime.datetime.fromisoformat(result["date"])
    assert set(result["versions"]) == {"bilevel", "jax", "jaxlib", "python"}
    assert result["versions"]["jax"] == result["jax"] == jax.__version__

    config = str(tmp_path / "first" / "config.json")
    assert main(["certify", "--config", config, "--out", second, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    again = result_of(tmp_path / "second")
    for name in ("kernels", "simplex", "names", "entry_error"):
        assert again[name] == result[name]
    assert main(["certify", "--config", config, "--rows", "1", "--quiet"]) == 2
    assert capsys.readouterr() == ("", "bilevel: rows: expected at least 2, got 1.\n")


def test_certify_refuses_what_it_cannot_certify(tmp_path, capsys, monkeypatch):
    assert certify(tmp_path / "run", "--rows", "5000") == 2
    assert "rows: expected at most 1437, got 5000" in capsys.readouterr().err
    digits = bilevel.data.load("digits", train_size=40)
    digits.x_train[3] = digits.x_train[7]
    monkeypatch.setattr("bilevel.data.datasets.load", lambda name, **sizes: digits)
    assert certify(tmp_path / "run") == 2
    assert "data: expected distinct rows, got 39 different ones" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_terminal_of_ascii_gets_the_table_all_the_same(tmp_path, monkeypatch):
    line = ["certify", "--out", str(tmp_path / "run"), "--rows", "3", "--activations", "relu"]
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(line) == 0
    terminal.flush()
    assert b"?_min" in terminal.buffer.getvalue()


def baseline(folder, *flags):
    small = "baseline --configs 6 --dimension 64 --train 120 --valid 80"
    return main([*small.split(), "--out", str(folder), *flags])


@pytest.mark.long
def test_baseline_compares_all_methods_in_one_table(tmp_path, capsys, bars):
    assert baseline(tmp_path / "run", "--progress", "True") == 0
    methods = ["weight-sharing", "fast-weight-sharing", "successive-halving", "hyperband"]
    check_bars(bars, ["data", *methods, "exponentiated-gradient", "random-search"])
    printed = capsys.readouterr().out
    result = result_of(tmp_path / "run")
    assert result["rows"] == [120, 80, 1597]
    assert len(result["methods"]) == 6
    for name, row in result["methods"].items():
        assert f"{name} " in printed
        assert 0 <= row["test"] <= 0.9
    # Random search has tried every configuration; the others' retraining is the same evaluation.
    tests = {row["best"]: row["test"] for row in result["methods"].values()}
    assert all(row["test"] == tests[row["best"]] for row in result["methods"].values())
    assert result["methods"]["random-search"]["calls"] == 6
    assert result["methods"]["weight-sharing"]["calls"] == 3
    assert arrays_in(tmp_path / "run" / "arrays.npz")["weight_sharing_calls"].tolist() == [1, 2, 3]
    assert (tmp_path / "run" / "baseline.png").stat().st_size > 10_000


@pytest.mark.slow
def test_baseline_handles_one_configuration(tmp_path, capsys):
    assert baseline(tmp_path / "run", "--configs", "1", "--method", "weight-sharing") == 0
    assert "weight-sharing" in capsys.readouterr().out


def arrays_of(folder, line, devices=""):
    """The arrays of a run; with ``devices``, in another process that has two of them."""
    line = [*line.split(), "--out", str(folder), *devices.split()]
    if devices:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
        run("python", "-m", "bilevel", *line, env=os.environ | {"XLA_FLAGS": flags})
    else:
        with jax.enable_x64(False):  # as the other process computes
            assert main(line) == 0
    return arrays_in(folder / "arrays.npz")


@pytest.mark.long
def test_seeds_rows_and_networks_are_spread_over_devices(tmp_path):
    seeds = f"search {SMALL} {CLOSED} --seeds 2"
    one = arrays_of(tmp_path / "one", seeds)
    two = arrays_of(tmp_path / "two", seeds, "--devices all")
    np.testing.assert_allclose(two["alpha"], one["alpha"], atol=1e-4)  # of float32
    sizes = "--train 60 --valid 30 --test 30 --dimension 16 --configs 2"
    one = arrays_of(tmp_path / "three", f"baseline --method random-search {sizes}")
    two = arrays_of(tmp_path / "four", f"baseline --method random-search {sizes}", "--devices all")
    np.testing.assert_allclose(two["random_search_valid"], one["random_search_valid"], atol=0.04)
    rank = (
        "rank --data digits --scores naswot --k 2 --batch-size 8 --cells 1 --channels 2 --train 32"
    )
    # A run on one device scores two of the five networks.
    arrays_of(tmp_path / "a", f"{rank} --networks 2")
    two = arrays_of(tmp_path / "a", f"{rank} --networks 5 --resume", "--at-once 2 --devices 2")
    one = arrays_of(tmp_path / "b", f"{rank} --networks 5")
    np.testing.assert_allclose(two["naswot"], one["naswot"], rtol=1e-5)


@pytest.mark.parametrize(
    ("line", "copies"),
    [(("search", "--seeds", "3"), "3 seeds"), (("rank", "--at-once", "3"), "3 networks at once")],
)
def test_devices_that_do_not_divide_are_refused_before_the_data_are_read(
    tmp_path, capsys, monkeypatch, line, copies
):
    def read(*args, **sizes):
        raise AssertionError("the data were read")

    monkeypatch.setattr("bilevel.data.datasets.draw_splits", read)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert main([*line, "--devices", "all", "--out", str(tmp_path / "run"), "--quiet"]) == 2
    assert f"devices: expected a divisor of the {copies}, got 2." in capsys.readouterr().err


def test_results_are_json_that_others_read():
    """The standard error of one seed is NaN, which JSON cannot store."""
    result = {"gap": [0.5, standard_error_over_seeds(np.ones(1))], "seeds": 1}
    assert json.loads(report.dump_without_nan(result)) == {"gap": [0.5, None], "seeds": 1}
