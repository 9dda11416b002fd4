"""Figures of searches, error estimates and kernels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bilevel.internal.checks import one_of
from bilevel.plots.appearance import COLOURS, DASHES, MARKERS, pyplot, style


def _axes_or_new(ax: Any) -> Any:
    return ax if ax is not None else pyplot().subplots(figsize=(6, 3.5), layout="constrained")[1]


def _line_style(i: int, dashed: bool = True) -> dict[str, Any]:
    """Return colour and dashes of line ``i``; the caller's axes may have another cycle."""
    lap, place = divmod(i, len(COLOURS))
    dashes = DASHES[(place + lap) % len(DASHES)] if dashed else "-"
    return {"color": COLOURS[place], "linestyle": dashes}


def _whole_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def _banded(ax: Any, x: Any, rows: Any, step: bool = False, **look: Any) -> Any:
    """Draw the mean of ``rows`` [seeds, n] as a line, with its standard error as a band."""
    rows = np.asarray(rows, float)
    mean, kind = rows.mean(axis=0), {"drawstyle": "steps-post"} if step else {}
    (line,) = ax.plot(x, mean, **kind, **look)
    if len(rows) > 1:
        error = rows.std(axis=0, ddof=1) / np.sqrt(len(rows))
        how = {"step": "post" if step else None, "color": line.get_color(), "linewidth": 0}
        ax.fill_between(x, mean - error, mean + error, alpha=0.15, **how)
    return line


def _mean_label(count: int, what: str) -> str:
    return f", mean ± s.e. of {count} {what}" if count > 1 else ""


@style()
def alpha_path(alpha: Any, names: Any = None, ax: Any = None, start: Any = None) -> Any:
    """Draw the entries of a simplex along a search, a line for each.

    Parameters
    ----------
    alpha : array [steps, h], ``result.history["alpha"]`` for an alpha of one leaf
        Or [steps, seeds, h]: mean and, shaded, standard error over seeds.
    names : h strings, optional
        Written at the lines' right ends.
    ax : matplotlib axes, optional
    start : array [h] or [seeds, h], optional
        Start of the search, drawn as step 0: a history begins after the first step.

    Examples
    --------
    >>> ax = alpha_path(np.full((5, 2), 0.5), ["relu", "tanh"], start=[0.5, 0.5])
    >>> ax.get_ylabel(), ax.lines[0].get_xdata()
    ('α', array([0, 1, 2, 3, 4, 5]))
    """
    ax = _axes_or_new(ax)
    alpha = np.asarray(alpha, float)
    alpha = alpha if alpha.ndim == 3 else alpha[:, None]
    steps = np.arange(1, len(alpha) + 1)
    if start is not None:
        first = np.broadcast_to(np.asarray(start, float), alpha.shape[1:])
        alpha, steps = np.concatenate([first[None], alpha]), np.arange(len(alpha) + 1)
    lines = [_banded(ax, steps, alpha[..., i].T, **_line_style(i)) for i in range(alpha.shape[-1])]
    top = max(0.5, 1.05 * alpha.mean(axis=1).max())
    label = "α" + _mean_label(alpha.shape[1], "seeds")
    ax.set(xlabel="outer step", ylabel=label, ylim=(-0.02, top))
    _whole_ticks(ax.xaxis)
    ax.margins(x=0.02)
    ends = [line.get_ydata()[-1] for line in lines]
    places = _spread_labels(ends, 0, top, 0.062 * top)
    look = {"textcoords": ax.get_yaxis_transform(), "va": "center", "fontsize": 9}
    for line, end, place, name in zip(lines, ends, places, names or [], strict=False):
        arrow = {"arrowstyle": "-", "color": line.get_color(), "relpos": (0, 0.5)}
        ax.annotate(name, (steps[-1], end), (1.04, place), arrowprops=arrow, **look)
    return ax


def _spread_labels(heights: Any, low: float, high: float, gap: float) -> Any:
    """Return label positions near ``heights``, from low to high, at least ``gap`` apart."""
    order, slots = np.argsort(heights), gap * np.arange(len(heights))
    lowered = np.asarray(heights, float)[order] - slots  # ascending, the labels keep apart
    up, down = np.maximum.accumulate(lowered), np.minimum.accumulate(lowered[::-1])[::-1]
    placed = np.empty(len(order))
    placed[order] = np.clip((up + down) / 2, low, high - slots[-1]) + slots
    return placed


@style()
def losses(
    history: dict[str, Any] | Sequence[dict[str, Any]], axes: Any = None, scale: float = 1.0
) -> Any:
    """Draw outer and lower loss along a search, one below the other; return the two axes.

    A step's losses are at the alpha before the step. A loss that changes tenfold has a log axis.

    Parameters
    ----------
    history : ``result.history`` of :func:`bilevel.search`
        Or a sequence of them, one for each seed: mean and, shaded, standard error.
    axes : two matplotlib axes, optional
    scale : float
        Divides both losses; the number of copies of a :func:`bilevel.stack_problems` problem.

    Examples
    --------
    >>> outer, lower = losses({"value": [2.0, 1.0], "lower": [4.0, 3.0]})
    >>> outer.get_ylabel(), lower.get_ylabel(), lower.get_xlabel()
    ('outer (validation) loss', 'lower (training) loss', 'outer step')
    """
    if axes is None:
        axes = pyplot().subplots(2, 1, figsize=(6, 4.6), layout="constrained", sharex=True)[1]
    runs = [history] if isinstance(history, dict) else list(history)
    keys = {"value": "outer (validation) loss", "lower": "lower (training) loss"}
    for i, (ax, (key, label)) in enumerate(zip(axes, keys.items(), strict=True)):
        values = np.array([np.asarray(run[key], float) for run in runs]) / scale
        steps = np.arange(values.shape[1])
        _banded(ax, steps, values, **_line_style(i, dashed=False))
        least, most = values.mean(axis=0).min(), values.mean(axis=0).max()
        ax.set(ylabel=label, yscale="log" if 0 < 10 * least < most else "linear")
        _whole_ticks(ax.xaxis)
    axes[0].tick_params(labelbottom=False)
    axes[-1].set_xlabel("outer step" + _mean_label(len(runs), "seeds"))
    return axes


@style()
def learning_curves(curves: dict[str, dict[str, Any]], axes: Any = None) -> Any:
    """Draw training losses and test errors over epochs, a line for each network; return the axes.

    Parameters
    ----------
    curves : dict of str to {"losses", "errors"}, arrays [epochs] or [seeds, epochs]
        From :func:`bilevel.nets.fit`, by network: mean and, shaded, standard error over seeds.
        Epochs without an error (NaN) are left out.
    axes : two matplotlib axes, optional

    Examples
    --------
    >>> curves = {"search": {"losses": [2.0, 1.0, 0.5], "errors": [np.nan, 0.4, 0.2]}}
    >>> loss, error = learning_curves(curves)
    >>> error.lines[0].get_xdata(), error.get_ylabel()
    (array([2, 3]), 'test error, %')
    """
    if axes is None:
        axes = pyplot().subplots(1, 2, figsize=(8, 3.4), layout="constrained")[1]
    seeds = 1
    for i, (name, curve) in enumerate(curves.items()):
        for ax, key, unit in zip(axes, ("losses", "errors"), (1, 100), strict=True):
            values = unit * np.atleast_2d(np.asarray(curve[key], float))
            shown = np.isfinite(values).all(axis=0)
            _banded(ax, 1 + np.flatnonzero(shown), values[:, shown], label=name, **_line_style(i))
            seeds = max(seeds, len(values))
    axes[0].set(ylabel="training loss")
    axes[1].set(ylabel="test error, %")
    for ax in axes:
        ax.set_xlabel("epoch" + _mean_label(seeds, "seeds"))
        _whole_ticks(ax.xaxis)
    axes[1].legend()
    return axes


@style()
def error_estimates(steps: Any, true: Any, estimates: dict[str, Any], ax: Any = None) -> Any:
    """Draw error estimates and the true error of a hypergradient over inner steps, log-log.

    Parameters
    ----------
    steps : array [n]
        Inner step counts.
    true : array [n], or dict of str to array [n]
        True errors: one array for all, or one by name, with the keys of ``estimates``.
    estimates : dict of str to array [n]
        Estimates by name.
    ax : matplotlib axes, optional

    Examples
    --------
    >>> error_estimates([1, 10], [1.0, 0.1], {"cg": [1.1, 0.09]}).get_xscale()
    'log'
    """
    ax = _axes_or_new(ax)
    if not isinstance(true, dict):
        ax.plot(steps, true, color="black", linestyle="-", label="true error")
    for i, (name, values) in enumerate(estimates.items()):
        if isinstance(true, dict):
            ax.plot(steps, true[name], label=f"{name}: true error", **_line_style(i))
        marker = MARKERS[i % len(MARKERS)]
        look = _line_style(i) | {"linestyle": "", "marker": marker, "fillstyle": "none"}
        ax.plot(steps, values, label=f"{name}: estimate", markersize=7, **look)
    ax.set(xlabel="inner steps", xscale="log")
    ax.set(ylabel="norm of the hypergradient's error", yscale="log")
    ax.legend()
    return ax


@style()
def spectrum(eigenvalues: dict[str, Any], ax: Any = None) -> Any:
    """Draw the positive eigenvalues of kernels, largest first, on a log scale.

    Parameters
    ----------
    eigenvalues : dict of str to array [n]
        By the kernel's name, in any order.
    ax : matplotlib axes, optional

    Examples
    --------
    >>> spectrum({"relu": [0.1, 1.0, 2.0]}).get_yscale()
    'log'
    """
    ax = _axes_or_new(ax)
    for i, (name, values) in enumerate(eigenvalues.items()):
        values = np.sort(np.asarray(values))[::-1]
        positive = np.where(values > 0, values, np.nan)
        # A few markers, shifted from kernel to kernel, because spectra are close together.
        every = max(1, len(values) // 6)
        markers = {"marker": MARKERS[i % len(MARKERS)], "markevery": (i % every, every)}
        ax.plot(np.arange(1, len(values) + 1), positive, label=name, **_line_style(i), **markers)
    ax.set(xlabel="index, from the largest", ylabel="eigenvalue of the kernel", yscale="log")
    _whole_ticks(ax.xaxis)
    ax.legend()
    return ax


_VERTICES = np.array([[0, 0], [1, 0], [0.5, np.sqrt(0.75)]])  # of the triangle that is the simplex


@style()
def simplex_min_eigenvalue(
    alphas: Any, values: Any, names: Any = None, argmin: Any = None, ax: Any = None
) -> Any:
    """Draw a smallest eigenvalue over the simplex of three activations, as colours of a triangle.

    Parameters
    ----------
    alphas : array [m, 3]
        Points of the simplex, including its vertices.
    values : array [m]
        ``lambda_min(K_alpha)`` at each.
    names : 3 strings, optional
        Written at the vertices.
    argmin : array [3], optional
        Marked by a dot.
    ax : matplotlib axes, optional

    Examples
    --------
    >>> simplex_min_eigenvalue(np.eye(3), [1.0, 2.0, 3.0], ["relu", "tanh", "swish"]).get_aspect()
    1.0
    """
    ax = _axes_or_new(ax)
    x, y = (np.asarray(alphas) @ _VERTICES).T
    values = np.asarray(values)
    norm = "log" if values.min() > 0 else "linear"
    colours = ax.tripcolor(x, y, values, shading="gouraud", cmap="viridis", norm=norm)
    label = r"smallest eigenvalue $\lambda_{\min}(K_\alpha)$"
    ax.figure.colorbar(colours, ax=ax, label=label, shrink=0.9)
    if argmin is not None:
        place, look = np.asarray(argmin) @ _VERTICES, {"color": "white", "markeredgecolor": "black"}
        ax.plot(*place, "o", markersize=8, label="smallest of all", **look)
        ax.legend(loc="upper left", bbox_to_anchor=(-0.25, 1), borderaxespad=0, handlelength=1)
    for name, corner in zip(names or [], _VERTICES, strict=False):
        shift, side = (6, "bottom") if corner[1] > 0 else (-6, "top")
        ax.annotate(name, corner, (0, shift), textcoords="offset points", ha="center", va=side)
    ax.set(xlim=(-0.05, 1.05), ylim=(-0.09, 0.97), aspect="equal")  # room for names and a title
    ax.set_axis_off()
    return ax


@style()
def traces(methods: dict[str, Any], against: str = "calls", ax: Any = None) -> Any:
    """Draw the oracle test error of the incumbent during a search, a curve for each method.

    Axes are logarithmic; that of errors is linear if one is 0, or all are nearly equal.

    Parameters
    ----------
    methods : dict of str to Trace, or to a list of Trace
        A list of trials gives mean and, shaded, standard error. A curve starts where every trial
        has an incumbent, and ends with the longest.
    against : {"calls", "seconds"}
    ax : matplotlib axes, optional

    Raises
    ------
    ValueError
        If a trace has no solves (of a single configuration), or ``against`` is another word.

    Examples
    --------
    >>> from types import SimpleNamespace as Trace
    >>> trace = Trace(calls=np.array([1, 2]), test=np.array([0.5, 0.1]))
    >>> ax = traces({"random search": trace})
    >>> ax.get_xlabel(), ax.get_yscale()
    ('solver calls', 'log')
    """
    labels = {"calls": "solver calls", "seconds": "seconds of solves, compilation included"}
    one_of("against", against, labels)
    curves = {n: t if isinstance(t, list) else [t] for n, t in methods.items()}
    for name, trials in curves.items():
        if any(len(t.calls) == 0 for t in trials):
            raise ValueError(f"methods: expected a solve in every trace, got none for {name}.")
    ax = _axes_or_new(ax)
    widths = np.linspace(4, 1.2, len(curves)) if len(curves) > 1 else [1.8]
    for i, (name, trials) in enumerate(curves.items()):
        times = [np.asarray(getattr(t, against), float) for t in trials]
        grid = np.unique(np.concatenate(times))
        grid = grid[grid >= max(t[0] for t in times)]
        tests = [
            np.asarray(t.test)[np.searchsorted(s, grid, "right") - 1]
            for t, s in zip(trials, times, strict=True)
        ]
        look = _line_style(i, dashed=False) | {"linewidth": widths[i], "markeredgecolor": "white"}
        look |= {"marker": MARKERS[i % len(MARKERS)], "markevery": [0, -1], "markersize": 8}
        _banded(ax, grid, tests, step=True, label=name, **look)
    count = max(map(len, curves.values()))
    ax.set(xlabel=labels[against], xscale="log")
    ax.set_ylabel("test error, retrained" + _mean_label(count, "trials"))
    _log_percent(ax)
    ax.legend()
    return ax


def _log_percent(ax: Any) -> None:
    """Set a log axis of shares, in percent; linear if one is 0 or all are nearly equal."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    heights = np.concatenate([np.asarray(line.get_ydata(), float) for line in ax.lines])
    heights = heights[np.isfinite(heights)]
    percent = FuncFormatter(lambda share, _: f"{100 * share:.3g} %")
    if len(heights) and 0 < 1.3 * heights.min() < heights.max():
        ax.set_yscale("log")
        ratio = heights.max() / heights.min()
        lowest = max(ax.dataLim.y0, 0.6 * heights.min())  # a band may come near 0
        ax.set_ylim(lowest / ratio**0.06 / 1.01, ax.dataLim.y1 * ratio**0.06 * 1.01)
        subdivisions = (ticks for limit, ticks in _SUBDIVISIONS.items() if ratio < limit)
        ax.yaxis.set_major_locator(LogLocator(subs=next(subdivisions, (1,))))
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(percent)


# The multiples of powers of ten that have ticks, by the largest ratio of heights.
_SUBDIVISIONS = {
    2: (1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 6.5, 7, 8, 9),
    4: (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
    15: (1, 1.5, 2, 3, 5, 7),
    1000: (1, 2, 5),
}


@style()
def heatmap(values: Any, columns: Sequence[str], rows: Sequence[str], ax: Any = None) -> Any:
    """Draw values from 0 to 1 as shades, with numbers in the cells; NaN is blank.

    Parameters
    ----------
    values : array [rows, columns]
        As alpha of the edges of a cell, with a column for each operation.
    columns, rows : sequences of str
        Their names.
    ax : matplotlib axes, optional

    Examples
    --------
    >>> ax = heatmap([[0.7, 0.3], [1.0, np.nan]], ["skip", "pool"], ["0 → 2", "1 → 2"])
    >>> [text.get_text() for text in ax.texts]
    ['0.70', '0.30', '1.00']
    """
    ax = _axes_or_new(ax)
    ax.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    ax.grid(False)
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "white" if value > 0.6 else "black"
            ax.text(column, row, f"{value:.2f}", color=color, **look)
    ax.set_xticks(range(len(columns)), columns, rotation=30, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


@style()
def ranking(score: Any, accuracy: Any, ax: Any = None) -> Any:
    """Draw accuracy over the rank of a score, best at the right, with Kendall's tau.

    Triangles at the lower edge are the lowest twentieth of accuracies: networks that learn nothing.

    Parameters
    ----------
    score, accuracy : arrays [m]
        Larger is better; NaN ranks last.
    ax : matplotlib axes, optional

    Examples
    --------
    >>> ranking(np.arange(5), [10.0, 50.0, 60.0, 90.0, 91.0]).texts[0].get_text()
    'τ = 1.00'
    """
    from scipy.stats import kendalltau, rankdata

    ax = _axes_or_new(ax)
    score, accuracy = np.asarray(score, float), np.asarray(accuracy, float)
    ranks = rankdata(np.where(np.isnan(score), -np.inf, score))
    least = np.quantile(accuracy, 0.05)
    size = 25 if len(ranks) <= 100 else 8
    look = {"alpha": 0.6, "linewidths": 0, "color": COLOURS[0]}
    ax.scatter(ranks, np.maximum(accuracy, least), s=size, **look)
    below = accuracy < least
    ax.scatter(ranks[below], np.full(below.sum(), least), s=30, marker="v", color=COLOURS[5])
    tau = kendalltau(ranks, accuracy).statistic
    box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 2}
    ax.text(0.97, 0.05, f"τ = {tau:.2f}", transform=ax.transAxes, ha="right", bbox=box)
    ax.set(xlabel=f"rank by the score (best: {len(ranks)})", ylabel="accuracy (%)")
    return ax
