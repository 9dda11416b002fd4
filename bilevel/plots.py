"""Pictures of searches, error estimates, kernels; needs matplotlib: ``pip install bilevel[plots]``.

Every function draws on axes it is given, or on new ones, and returns the axes.
"""

import itertools
from typing import Any

import numpy as np


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plots: expected matplotlib, got none; install it with `pip install bilevel[plots]`."
        ) from error
    return plt.subplots(figsize=(6, 3.5), layout="constrained")[1]


def alpha_path(alpha: Any, names: Any = None, ax: Any = None) -> Any:
    """The entries of a simplex along a search: ``alpha`` [steps, h], a line for each.

    Parameters
    ----------
    alpha : array [steps, h], ``result.history["alpha"]`` for an alpha of one leaf.
    names : h strings, optional
        Written at the lines' right ends.
    ax : matplotlib axes, optional

    Examples
    --------
    >>> alpha_path(np.full((5, 2), 0.5), ["relu", "tanh"]).get_ylabel()
    'α'
    """
    ax = _axes(ax)
    alpha = np.asarray(alpha)
    lines = ax.plot(np.arange(1, len(alpha) + 1), alpha)
    for line, height, name in zip(lines, _spread(alpha[-1]), names or [], strict=False):
        ax.annotate(
            f" {name}",
            (1, height),
            xycoords=("axes fraction", "data"),
            color=line.get_color(),
            va="center",
        )
    ax.set(xlabel="outer step", ylabel="α", ylim=(-0.02, max(0.5, 1.05 * alpha.max())))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _spread(heights: Any, gap: float = 0.045) -> Any:
    """Label positions near ``heights``, none closer than ``gap`` to the next."""
    order = np.argsort(heights)
    placed = np.array(heights, dtype=float)
    for below, above in itertools.pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    return placed


def losses(history: dict[str, Any], ax: Any = None, scale: float = 1.0) -> Any:
    """Outer and lower loss along a search, each on its own axis.

    Parameters
    ----------
    history : ``result.history`` of :func:`bilevel.search`.
    ax : matplotlib axes, optional
    scale : float
        Divides both losses; the number of copies of a ``side_by_side`` problem.

    Examples
    --------
    >>> losses({"value": [2.0, 1.0], "lower": [4.0, 3.0]}).get_xlabel()
    'outer step'
    """
    ax = _axes(ax)
    steps = np.arange(1, len(history["value"]) + 1)
    for axis, key, label, color in (
        (ax, "value", "outer (validation) loss", "C0"),
        (ax.twinx(), "lower", "lower (training) loss", "C1"),
    ):
        axis.plot(steps, np.asarray(history[key]) / scale, color=color)
        axis.set_ylabel(label, color=color)
        axis.spines["top"].set_visible(False)
    ax.set_xlabel("outer step")
    return ax


def error_estimates(steps: Any, true: Any, estimates: dict[str, Any], ax: Any = None) -> Any:
    """Error estimates beside the true error of a hypergradient, over inner steps, log-log.

    Parameters
    ----------
    steps : inner step counts [n].
    true : true errors: one array [n], or ``name -> [n]`` with the keys of ``estimates``.
    estimates : ``name -> [n]``
    ax : matplotlib axes, optional

    Examples
    --------
    >>> error_estimates([1, 10], [1.0, 0.1], {"cg": [1.1, 0.09]}).get_xscale()
    'log'
    """
    ax = _axes(ax)
    for i, (name, values) in enumerate(estimates.items()):
        truth = true[name] if isinstance(true, dict) else true
        ax.loglog(steps, truth, color=f"C{i}", label=f"{name}: true error")
        ax.loglog(steps, values, "o", color=f"C{i}", fillstyle="none", label=f"{name}: estimate")
    ax.set(xlabel="inner steps", ylabel="hypergradient error")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def spectrum(eigenvalues: dict[str, Any], ax: Any = None) -> Any:
    """Eigenvalues of kernels, largest first, on a log scale: those that are positive.

    Parameters
    ----------
    eigenvalues : ``name -> [n]``, in any order.
    ax : matplotlib axes, optional

    Examples
    --------
    >>> spectrum({"relu": [0.1, 1.0, 2.0]}).get_yscale()
    'log'
    """
    ax = _axes(ax)
    for name, values in eigenvalues.items():
        values = np.sort(np.asarray(values))[::-1]
        ax.semilogy(np.arange(1, len(values) + 1), np.where(values > 0, values, np.nan), label=name)
    ax.set(xlabel="index", ylabel="eigenvalue of K")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


_CORNERS = np.array([[0, 0], [1, 0], [0.5, np.sqrt(0.75)]])  # of the triangle that is the simplex


def simplex_min_eigenvalue(
    alphas: Any, values: Any, names: Any = None, argmin: Any = None, ax: Any = None
) -> Any:
    """A smallest eigenvalue over the simplex of three activations, as colours of a triangle.

    Parameters
    ----------
    alphas : array [m, 3], points of the simplex, its corners among them.
    values : array [m], ``lambda_min(K_alpha)`` at each.
    names : 3 strings, optional
        Written at the corners.
    argmin : array [3], optional
        Marked by a dot.
    ax : matplotlib axes, optional

    Examples
    --------
    >>> simplex_min_eigenvalue(np.eye(3), [1.0, 2.0, 3.0], ["relu", "tanh", "swish"]).get_aspect()
    1.0
    """
    ax = _axes(ax)
    x, y = (np.asarray(alphas) @ _CORNERS).T
    values = np.asarray(values)
    norm = "log" if values.min() > 0 else "linear"
    colours = ax.tripcolor(x, y, values, shading="gouraud", cmap="viridis", norm=norm)
    ax.figure.colorbar(colours, ax=ax, label="λ_min(K_α)", shrink=0.8)
    if argmin is not None:
        ax.plot(*(np.asarray(argmin) @ _CORNERS), "o", color="white", markeredgecolor="black")
    for name, corner in zip(names or [], _CORNERS, strict=False):
        shift, side = (6, "bottom") if corner[1] > 0 else (-6, "top")
        ax.annotate(name, corner, (0, shift), textcoords="offset points", ha="center", va=side)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def traces(methods: dict[str, Any], against: str = "calls", ax: Any = None) -> Any:
    """Oracle test error of the incumbent as a search goes on, a curve for each method.

    Parameters
    ----------
    methods : ``name -> Trace``, or a list of them: mean and, shaded, standard error over trials.
        A curve starts where every trial has an incumbent, and ends with the longest.
    against : {"calls", "seconds"}
    ax : matplotlib axes, optional

    Raises
    ------
    ValueError
        For a trace without solves (of a single configuration), or another ``against``.

    Examples
    --------
    >>> from types import SimpleNamespace as Trace
    >>> trace = Trace(calls=np.array([1, 2]), test=np.array([0.5, 0.4]))
    >>> traces({"random search": trace}).get_xlabel()
    'solver calls'
    """
    labels = {"calls": "solver calls", "seconds": "seconds"}
    if against not in labels:
        raise ValueError(f"against: expected one of {', '.join(labels)}, got {against!r}.")
    curves = {n: t if isinstance(t, list) else [t] for n, t in methods.items()}
    for name, trials in curves.items():
        if any(len(t.calls) == 0 for t in trials):
            raise ValueError(f"methods: expected a solve in every trace, got none for {name}.")
    ax = _axes(ax)
    for name, trials in curves.items():
        times = [np.asarray(getattr(t, against), float) for t in trials]
        grid = np.unique(np.concatenate(times))
        grid = grid[grid >= max(t[0] for t in times)]
        tests = [
            np.asarray(t.test)[np.searchsorted(s, grid, "right") - 1]
            for t, s in zip(trials, times, strict=True)
        ]
        mean = np.mean(tests, axis=0)
        (line,) = ax.step(grid, mean, where="post", label=name, marker="o", markersize=3)
        if len(trials) > 1:
            error = np.std(tests, axis=0, ddof=1) / np.sqrt(len(trials))
            ax.fill_between(
                grid, mean - error, mean + error, step="post", alpha=0.2, color=line.get_color()
            )
    ax.set(xlabel=labels[against], ylabel="oracle test error", xscale="log")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def ranking(score: Any, accuracy: Any, ax: Any = None) -> Any:
    """Accuracy over the rank of a score, best at the right, and Kendall's tau.

    The worst twentieth, networks that learn nothing, is drawn at the lower edge.

    Parameters
    ----------
    score, accuracy : arrays [m]
        Larger is better; NaN is last.
    ax : matplotlib axes, optional

    Examples
    --------
    >>> ranking(np.arange(5), [10.0, 50.0, 60.0, 90.0, 91.0]).texts[0].get_text()
    'τ = 1.00'
    """
    from scipy.stats import kendalltau, rankdata

    ax = _axes(ax)
    score, accuracy = np.asarray(score, float), np.asarray(accuracy, float)
    ranks = rankdata(np.where(np.isnan(score), -np.inf, score))
    shown = np.maximum(accuracy, np.quantile(accuracy, 0.05))
    ax.scatter(ranks, shown, s=5, alpha=0.5, linewidths=0)
    tau = kendalltau(ranks, accuracy).statistic
    ax.text(0.95, 0.06, f"τ = {tau:.2f}", transform=ax.transAxes, ha="right")
    ax.set(xlabel="rank by the score")
    ax.spines[["top", "right"]].set_visible(False)
    return ax
