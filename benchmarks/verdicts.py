"""Grade the claims of papers by one rule. All verdicts in the documentation come from here."""

from typing import Any

import numpy as np

from benchmarks.harness import standard_error

REPRODUCED, IN_PART, NOT = "**reproduced**", "reproduced in part", "not reproduced"
NOT_TESTED = "not tested"
FEWEST, ERRORS = 3, 2  # runs and standard errors that "reproduced" needs
RULE = f"""\
- *Reproduced*: the claim holds by at least {ERRORS} standard errors over at least {FEWEST} runs,
  at the paper's own setting.
- *Reproduced in part*: the mean has the claimed sign, but it is closer than that. Or the claim
  holds only for a named part, or at another setting.
- *Not reproduced*: the mean has the other sign, or it misses the claimed size.
- *Not tested*: nothing comparable was run.

A setting that differs from the paper's in length, rate, width or data is at most *reproduced in
part*. The row that is nearest to the paper decides the verdict on a claim. A claim without
randomness, e.g. an inequality, is *reproduced* if it holds in every case tried. The criterion of a
claimed size was chosen before the run."""


def clearly(runs: Any) -> Any:
    """Return whether the means over the runs, the first axis, are positive beyond the noise."""
    if len(runs) < FEWEST:
        return np.zeros(np.shape(runs)[1:], bool)
    return np.mean(runs, axis=0) > ERRORS * standard_error(runs)


def grade(fully: Any, partly: Any, *, papers_setting: bool) -> str:
    """Return the verdict on a claim that holds ``fully``, :func:`clearly`, or ``partly``."""
    if fully and papers_setting:
        return REPRODUCED
    return IN_PART if fully or partly else NOT


def grade_gains(gains: Any, *, papers_setting: bool) -> str:
    """Return the verdict on the claim that a gain is positive, from its value in every run."""
    gains = np.asarray(gains, float)
    if not len(gains):
        return NOT_TESTED
    if not np.isfinite(gains).all():
        raise ValueError("gains: expected finite values, got a NaN or an infinity.")
    return grade(clearly(gains), gains.mean() > 0, papers_setting=papers_setting)
