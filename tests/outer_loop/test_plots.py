"""Figures: axes with names, starts at step 0, bands over seeds, log scales."""

import importlib
from types import SimpleNamespace

import numpy as np
import optax
import pytest
from problems import follower

import bilevel
from bilevel.cli.runtime import report
from bilevel.plots import appearance, plots

matplotlib = pytest.importorskip("matplotlib")
figures = importlib.import_module("matplotlib.figure")

RNG = np.random.default_rng(0)
HISTORY = {"value": [3.0, 2.0, 1.5], "lower": [40.0, 9.0, 1.0]}
TRACE = SimpleNamespace(calls=np.array([1, 2]), seconds=np.array([0.1, 2.0]), test=[0.5, 0.01])
PICTURES = {
    "alpha_path": (RNG.dirichlet(np.ones(3), 4), ["relu", "tanh", "swish"]),
    "losses": (HISTORY,),
    "error_estimates": ([1, 10], [1.0, 0.1], {"cg": [1.1, 0.09], "dense": [1.0, 0.1]}),
    "spectrum": ({"relu": [0.1, 1.0, 2.0], "tanh": [0.2, 1.0]},),
    "traces": ({"random search": TRACE},),
    "ranking": (np.arange(9.0), RNG.uniform(50, 90, 9)),
}


def axes(rows=1):
    with appearance.style():
        return figures.Figure().subplots(rows)


@pytest.mark.parametrize("name", PICTURES)
def test_every_axis_has_a_name_and_matplotlibs_settings_are_left_alone(name):
    before = dict(matplotlib.rcParams)
    on = {"axes": axes(2)} if name == "losses" else {"ax": axes()}
    drawn = getattr(plots, name)(*PICTURES[name], **on)
    for ax in np.atleast_1d(drawn):
        assert ax.get_ylabel() and not ax.spines["top"].get_visible()
        # The figure has no second axis.
        assert len(ax.figure.axes) == np.size(drawn)
    assert np.atleast_1d(drawn)[-1].get_xlabel()
    assert dict(matplotlib.rcParams) == before


def test_colours_differ_and_so_do_the_dashes_beside_them():
    lines = plots.alpha_path(RNG.dirichlet(np.ones(14), 3), ax=figures.Figure().subplots()).lines
    looks = [(line.get_color(), str(line._unscaled_dash_pattern)) for line in lines]
    assert len(set(looks)) == 14 and all(len(set(of)) == 7 for of in zip(*looks[:7], strict=True))


def test_an_alpha_path_starts_where_the_search_did():
    alpha = RNG.dirichlet(np.ones(2), 3)
    ax = plots.alpha_path(alpha, ax=axes(), start=[0.5, 0.5])
    for i, line in enumerate(ax.lines):
        np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2, 3])
        np.testing.assert_allclose(line.get_ydata(), [0.5, *alpha[:, i]])
    assert plots.alpha_path(alpha, ax=axes()).lines[0].get_xdata()[0] == 1


def test_seeds_have_their_mean_and_standard_error():
    alpha = RNG.dirichlet(np.ones(2), (4, 3))  # [steps, seeds, h]
    ax = plots.alpha_path(alpha, ax=axes(), start=[0.5, 0.5])
    mean, error = alpha[..., 0].mean(1), alpha[..., 0].std(1, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(ax.lines[0].get_ydata()[1:], mean)
    x, y = ax.collections[0].get_paths()[0].vertices.T
    band = [(y[x == at].min(), y[x == at].max()) for at in np.unique(x)]
    np.testing.assert_allclose(band, [(0.5, 0.5), *np.transpose([mean - error, mean + error])])
    assert ax.get_ylabel() == "α, mean ± s.e. of 3 seeds"
    assert not plots.alpha_path(alpha[:, :1], ax=axes()).collections


def test_losses_start_at_the_starting_alpha_in_two_panels_and_are_log_over_decades():
    problem = follower(lambda w, alpha, batch: ((w - 1) ** 2).sum())
    init, step = bilevel.descent(problem, bilevel.unrolled(0.5, 1), optax.sgd(0.1))
    _, first = step(init(np.zeros(1), np.zeros(1)), (None, None))
    outer, _ = plots.losses({name: [first[name]] for name in ("value", "lower")}, axes(2))
    # Truth: the outer loss at the start, where w and alpha are 0.
    assert (outer.lines[0].get_xdata(), outer.lines[0].get_ydata()) == (0, 1)
    outer, lower = plots.losses([HISTORY, HISTORY], axes(2), scale=2.0)
    assert outer.get_yscale() == "linear" and lower.get_yscale() == "log"
    np.testing.assert_allclose(outer.lines[0].get_ydata(), np.divide(HISTORY["value"], 2))
    assert len(outer.collections) == 1 and "2 seeds" in lower.get_xlabel()


def test_test_errors_are_in_percent_on_a_log_axis_unless_one_is_zero():
    ax = plots.traces({"a": TRACE}, "calls", axes())
    assert ax.get_yscale() == "log" and ax.yaxis.get_major_formatter()(0.05) == "5 %"
    perfect = SimpleNamespace(calls=TRACE.calls, test=[0.5, 0.0])
    constant = SimpleNamespace(calls=TRACE.calls, test=[0.077, 0.077])  # no decade to mark
    for trace in (perfect, constant):
        assert plots.traces({"a": trace}, "calls", axes()).get_yscale() == "linear"


def test_networks_below_the_edge_are_triangles():
    accuracy = np.append(np.linspace(80, 90, 39), 10.0)
    ax = plots.ranking(np.arange(40), accuracy, axes())
    dots, triangles = (c.get_offsets() for c in ax.collections)
    np.testing.assert_allclose(dots[:, 1], np.maximum(accuracy, np.quantile(accuracy, 0.05)))
    assert 40 in triangles[:, 0] and len(triangles) == 2


def test_a_picture_of_a_command_needs_no_window_and_leaves_no_figure_open(tmp_path):
    plt, backend = plots.pyplot(), matplotlib.get_backend()
    open_before = plt.get_fignums()
    report.save_figure(tmp_path / "a.png", (4, 3), lambda f: plots.losses(HISTORY, f.subplots(2)))
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert plt.get_fignums() == open_before and matplotlib.get_backend() == backend
