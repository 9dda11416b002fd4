"""The independent truth of constrained lower problems has the values of an enumeration.

The values come from all active sets with 40 digits and differences of the solution, step 1e-12.
"""

import numpy as np
import pytest

from benchmarks.hypergradients import constraints_truth as exact
from benchmarks.hypergradients.constraints_truth import LONG

H3 = np.array([[4, 1, 0], [1, 3, 1], [0, 1, 2]], LONG)
H4 = np.array([[3, 1, 0.5, 0], [1, 2, 0, 0], [0.5, 0, 2, 1], [0, 0, 1, 2]], LONG)


def exponential(alpha):
    """Return one weight ``exp(alpha_j)`` for each entry, and the jacobian."""
    return np.exp(alpha), np.diag(np.exp(alpha))


def radius(alpha):
    return np.exp(alpha[0]), np.exp(alpha)


def shared(alpha):
    """Return the weight ``exp(alpha_1)`` of three coordinates; ``alpha_2`` is a ridge."""
    weight = np.full(3, np.exp(alpha[0]))
    return weight, np.stack([weight, 0 * weight], 1)


def bound(index):
    def of_alpha(alpha):
        jacobian = np.zeros((3, 3), alpha.dtype)
        jacobian[:, index] = 1
        return np.full(3, alpha[index]), jacobian

    return of_alpha


def right(alpha):
    return alpha, np.eye(1, dtype=alpha.dtype)


def convex(term, H, c, slopes=None, target=(1, -1, 1), ridge=None):
    """Return ``w'Hw/2 - (c + slopes alpha)'w``, and half the squared distance from ``target``."""
    c, target = np.asarray(c, LONG), np.asarray(target, LONG)

    def smooth(w, alpha, order=2):
        moved = 0 if slopes is None else np.asarray(slopes, LONG) @ alpha
        mixed = (
            np.zeros((len(w), len(alpha)), LONG) if slopes is None else -np.asarray(slopes, LONG)
        )
        extra = 0 if ridge is None else np.exp(alpha[ridge])
        if ridge is not None:
            mixed[:, ridge] = extra * w
        hessian = (H + extra * np.eye(len(w), dtype=LONG)).astype(w.dtype)
        return hessian @ w - (c + moved), hessian, mixed.astype(w.dtype)

    def outer(w, alpha, code):
        return np.sum((w - target) ** 2) / 2, w - target, np.zeros(len(alpha), LONG)

    return exact.Convex(smooth, outer, term)


ROWS = {
    "box": (
        convex(exact.box(bound(0), bound(1)), H3, [4, -3, 1.2], [[0, 0, 1]] * 3),
        *([-0.5, 1, 0], [1, -0.5, 0.85], [0.575, 0, -0.075]),
    ),
    "simplex": (
        convex(exact.simplex(), H3, [1, 1, 0.5], [[1], [-1], [0]]),
        *([1], [7 / 12, 0, 5 / 12], [1 / 36]),
    ),
    "simplex, interior": (
        convex(exact.simplex(), H3, [1, 1, 0.5], [[1], [-1], [0]]),
        *([0], [9 / 28, 8 / 28, 11 / 28], [-31 / 28]),
    ),
    "l2 ball": (
        convex(exact.l2_ball(radius), np.diag([1, 2, 4]).astype(LONG), [3, -2, 1]),
        *([0], [0.877903329849, -0.452772158136, 0.155830408643], [-0.391532790967]),
    ),
    "l1 ball": (
        convex(exact.l1_ball(radius), H3, [4, -3, 2]),
        *([0], [10 / 19, -8 / 19, 1 / 19], [-257 / 361]),
    ),
    "affine": (
        convex(exact.affine(np.ones((1, 3), LONG), right), H3, [4, -3, 2]),
        *([0.5], [9 / 7, -16.5 / 7, 11 / 7], [3 / 14]),
    ),
    "Lasso": (
        convex(exact.l1(exponential), H3, [4, -1.5, -1.2]),
        [0, -0.5, 0.3],
        [0.899406303662, -0.597625214650, 0],
        [0.0640141703966, 0.0942930670039, 0],
    ),
    "elastic net": (
        convex(exact.l1(shared), H3, [4, -1.5, -1.2], ridge=1),
        *([0, -1], [0.773395937188, -0.378100213927, 0], [0.315675214412, 0.0585998198300]),
    ),
    "group l1": (
        convex(
            exact.group_l1(exponential, [[0, 1], [2, 3]]),
            *(H4, [4, 2, 0.5, 0.2], None, [1, -1, 1, 2]),
        ),
        *([0, 0], [0.903202068791, 0.362266934096, 0, 0], [-0.0626744052401, 0]),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_truth_has_the_values_of_an_enumeration(name):
    problem, alpha, w, grad = ROWS[name]
    truth = exact.truth(problem, alpha, np.full(len(w), 1 / len(w)))
    np.testing.assert_allclose(truth.w.astype(float), w, rtol=0, atol=2e-12)
    np.testing.assert_allclose(truth.grad.astype(float), grad, rtol=0, atol=2e-12)
    assert truth.margin > 0
