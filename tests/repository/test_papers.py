"""Grades and optimizers in the benchmarks of the papers' experiments."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.deep_search import activation_skip_search, activation_skip_tables
from bilevel.spaces.skips import skip_space

RUNS, LAYERS = 3, 9
GRADES = "**reproduced**", "reproduced in part", "not reproduced"


SPACE = skip_space(["relu", "tanh"], depth=3, width=4, classes=2)
SLOPE = {"activations": jnp.array([[1.0, -1.0], [0.5, 0.0]]), "skips": jnp.array([1.0])}


def path(moving, steps):
    """Alpha at first and after each step down the same slope."""
    optimizer = activation_skip_search.optimizer_of_alpha(SPACE, 0.1, moving)
    alphas = [SPACE.start()]
    state = optimizer.init(alphas[0])
    for _ in range(steps):
        updates, state = optimizer.update(SLOPE, state, alphas[-1])
        alphas.append(optax.apply_updates(alphas[-1], updates))
    return alphas


def moved(before, after):
    return {name for name in before if (before[name] != after[name]).any()}


@pytest.mark.long
def test_activations_and_skips_take_turns_of_a_step_each():
    alphas = path("in turn", 4)
    steps = [moved(*pair) for pair in itertools.pairwise(alphas)]
    assert steps == [{"activations"}, {"skips"}] * 2
    # Adam's first step is its rate, here of logits that start level: twice 0.1, in half the steps.
    logits = np.log(alphas[1]["activations"][0])
    np.testing.assert_allclose(logits[1] - logits[0], 2 * 0.2, rtol=1e-3)


def test_searched_apart_the_other_part_stays():
    for part in ("activations", "skips"):
        first, second, third = path(part, 2)
        assert moved(first, second) == moved(second, third) == {part}
    assert activation_skip_search.optimizer_of_alpha(SPACE, 0.1, "jointly") == 0.1


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
