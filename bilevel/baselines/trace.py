"""The record that every method returns."""

from typing import Any, NamedTuple

import numpy as np


class Trace(NamedTuple):
    """Record of a method's run: one row for each of its ``T`` solver calls.

    ``test`` is the test error of a model trained again by itself, on the incumbent alone and at the
    full budget, even if the method trained shared weights.
    """

    configs: tuple[Any, ...]
    best: int  # index of the configuration chosen; -1 if interrupted before there was one
    round: np.ndarray  # [T], int from 0
    resource: np.ndarray  # [T], int
    calls: np.ndarray  # [T], int: 1 ... T
    seconds: np.ndarray  # [T], wall time of the solves so far, with compilation, without retraining
    candidates: list[np.ndarray]  # T arrays [k], int: the configurations trained on
    errors: list[np.ndarray]  # T arrays [k]: their validation errors, NaN if missing
    incumbent: np.ndarray  # [T], int: the best so far; -1 while no error is finite
    valid: np.ndarray  # [T], the incumbent's validation error in the method's own solve
    test: np.ndarray  # [T], the retrained incumbent's test error; NaN if it was not retrained
    stopped: str = ""  # "" after a complete run, else the reason of the early end
