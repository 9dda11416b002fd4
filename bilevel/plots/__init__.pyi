# Public names of `bilevel.plots` and their modules, imported on first use.

from .appearance import style
from .plots import (
    alpha_path,
    error_estimates,
    heatmap,
    learning_curves,
    losses,
    ranking,
    simplex_min_eigenvalue,
    spectrum,
    traces,
)

__all__ = [
    "alpha_path",
    "error_estimates",
    "heatmap",
    "learning_curves",
    "losses",
    "ranking",
    "simplex_min_eigenvalue",
    "spectrum",
    "style",
    "traces",
]
