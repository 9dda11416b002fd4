"""Grades in the benchmarks of the papers' experiments."""

import numpy as np

from benchmarks.deep_search import activation_skip_tables

RUNS, LAYERS = 3, 9
GRADES = "**reproduced**", "reproduced in part", "not reproduced"


def as_in_the_paper():
    """Probabilities [runs, layers, 5] and skips [runs, 8] of Figure 1, with a little noise."""
    rng = np.random.default_rng(0)
    lead = np.linspace(1, 0, LAYERS)[:, None] * np.array([0.3, 0.25, -0.1, -0.2, -0.25])
    lead[-1] = [2e-3, 1e-3, -1e-3, -1e-3, -1e-3]
    noise = 1e-4 * rng.normal(size=(RUNS, LAYERS, 5))
    return 0.2 + lead / 2 + noise, 0.9 + 0.01 * rng.normal(size=(RUNS, LAYERS - 1))


def grades(p, skips):
    cells = activation_skip_tables.findings(p, skips)
    return [GRADES.index(cells[i]) for i in (0, 3, 7)]


def test_each_finding_is_graded_by_its_own_rule():
    p, skips = as_in_the_paper()
    assert grades(p, skips) == [0, 0, 0]
    other = p.copy()
    other[:, 4, 0], other[:, 4, 2] = p[:, 4, 2], p[:, 4, 0]  # a sigmoid in one layer
    assert grades(other, skips)[0] == 1
    assert grades(p[..., ::-1], skips)[0] == 2
    assert grades(np.concatenate([p[:, :-1], p[:, 3:4]], axis=1), skips)[1] == 1  # not flat
    assert grades(p[:, ::-1], skips)[1] == 2
    assert grades(p, np.where(np.arange(LAYERS - 1) < 3, 0.2, skips))[2] == 1
    assert grades(p, 1 - skips)[2] == 2
