"""Style of the figures drawn here; matplotlib's own settings are restored."""

import contextlib
from collections.abc import Iterator
from typing import Any

# Okabe & Ito (2008), distinct for any kind of colour vision; without the faint yellow.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000", "#D55E00", "#56B4E9")
# One for each colour, for prints in black and white.
DASHES = ("-", (0, (6, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (12, 3)), (0, (3, 1.5)), "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def _matplotlib() -> Any:
    try:
        import matplotlib.rcsetup
    except ImportError as error:
        raise ImportError(
            "plots: expected matplotlib, got none; install it with `pip install matplotlib`."
        ) from error
    return matplotlib


def pyplot() -> Any:
    """Return ``matplotlib.pyplot``, for new figures."""
    _matplotlib()
    import matplotlib.pyplot as plt

    return plt


@contextlib.contextmanager
def style() -> Iterator[tuple[str, ...]]:
    """Apply the style of the figures here to figures drawn inside ``with style():``.

    Colours and line styles change from line to line. ``with style() as colours:`` gives the
    colours. Use ``colours[i]``, because ``"C0"`` is read when the figure is shown.

    Raises
    ------
    ImportError
        If matplotlib is missing.

    Examples
    --------
    >>> import matplotlib
    >>> with style():
    ...     matplotlib.rcParams["axes.spines.top"]
    False
    >>> matplotlib.rcParams["axes.spines.top"]
    True
    """
    rc = _matplotlib().rcParams
    cycle = _matplotlib().rcsetup.cycler(color=COLOURS, linestyle=DASHES)
    ours = _SETTINGS | {"axes.prop_cycle": cycle}
    before = {name: rc[name] for name in ours}
    rc.update(ours)
    try:
        yield COLOURS
    finally:
        # rc_context would restore all settings. A notebook's first figure makes matplotlib
        # interactive, and without that setting no later figure would be shown.
        rc.update(before)


_SETTINGS = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10.5,
    "figure.titlesize": 11,
    "font.size": 10,
    "grid.color": "0.93",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 2.6,  # shows a whole period of a dashed line
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
