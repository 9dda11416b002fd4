"""Rigorous bounds of smallest eigenvalues: of one kernel, and over a simplex of mixtures.

**One kernel.** If LAPACK's Cholesky factorisation of ``B = fl(A - t I)`` completes, then
``lambda_min(A) >= t - slack``, for all rounding errors (Demmel 1989; Rump 2006):

    slack = phi tr(B) + u max_i B_ii + tiny,   phi = g / (1 - g),   g = (n + 2) u / (1 - (n + 2) u).

*Proof.* Each entry of the factor takes at most n + 2 roundings, for any order or blocks of its sum,
with or without fused multiply-adds, by division or by reciprocals. So the computed factor R
satisfies ``|R'R - B|_ij <= g (|R|'|R|)_ij <= g |r_i| |r_j|`` (Higham 2002, Lemma 8.4). On the
diagonal, ``|r_i|^2 <= B_ii / (1 - g)``; hence ``|R'R - B|_2 <= phi tr(B)``, and ``R'R`` is positive
semidefinite. Rounding the diagonal of ``A - t I`` moves it by at most ``u max B_ii``. Entries are
scaled to at most 1, so ``tiny = 1e-290`` covers underflows. Assumptions: IEEE double precision
rounding to nearest, and a BLAS with ordinary products and substitutions (no Strassen).

**A simplex.** ``K_alpha = sum_ij alpha_i alpha_j K_ij`` on a sub-simplex with vertices ``v_k`` is a
convex combination of its Bernstein coefficients ``K(v_k, v_l) = sum_ij v_ki v_lj K_ij``. Therefore
the smallest of their eigenvalues is a lower bound there; the gap is quadratic in the diameter. To
prove ``min >= s``, bisect until every coefficient of every leaf passes the test above.

**All blocks at once.** With the [hn, hn] matrix B of the blocks, ``x'K_alpha x = z'Bz`` for ``z =
alpha (x) x``, of squared length ``|alpha|^2`` in ``[1/h, 1]``. So ``lambda_min(B)``, or 1/h of it
if it is positive, is a lower bound too: 0 up to rounding for blocks of features, ``K_ij = Phi_i
Phi_j'``. We use it if every K_alpha is singular, or the cells are used up.

Here u is the unit roundoff 2^-53, t is `shift`, and K_ij are `blocks` [h, h, n, n] of h activations
and n inputs.

References: Rump (2006), "Verification of positive definiteness", BIT 46; Demmel (1989), LAPACK
Working Note 14; Higham (2002), "Accuracy and stability of numerical algorithms", chapters 8 and 10.
"""

import heapq
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize

from ntk.internal import summary
from ntk.internal.checks import check_finite, concrete, integer, numpy_array, real_number
from ntk.kernels.functions import as_kernel_matrix, measured, mixed_blocks
from ntk.kernels.record import Kernels
from ntk.kernels.symmetric import allowed_asymmetry, check_symmetric, flatten_outputs, square_matrix
from ntk.spectrum.verified_cholesky import (
    SUMMED,
    TINY,
    UNIT,
    cholesky_slack,
    down,
    norm_bound,
    power_of_two,
    shifted_bound,
    smallest,
    threads,
    up,
)

_GRID = 2.0**48  # points of the simplex are multiples of 1 / _GRID: sums and midpoints are exact


def certified_min_eigenvalue(K: Any, entry_error: Any = None, *, x: Any = None) -> float:
    """Return a rigorous lower bound of the smallest eigenvalue, valid for all rounding errors.

    It holds for every symmetric matrix with entries within ``entry_error`` of the entries of ``K``.

    Parameters
    ----------
    K : array [n, n] or [n, n, o, o], :class:`ntk.Kernels` or kernel function
        A kernel of o outputs is the matrix ``[n o, n o]`` of all pairs of an input and an output.
        Symmetric, up to rounding: it stands for ``(K + K') / 2``. float32 values count as exact;
        ``entry_error`` is for errors made before. The tangent kernel of
        :func:`ntk.network_kernel`'s result is taken. A function is evaluated in float64.
    entry_error : float or array like ``K``, optional
        Largest error of each entry. Default: 0 for an array, the ``error`` of kernels, and an
        estimate from two precisions for a function without errors (:mod:`ntk.kernels.functions`).
    x : array [n, ...], optional
        Inputs, if ``K`` is a kernel function.

    Returns
    -------
    float
        For an exact ``K``, within about 2e-16 n sum_i |K_ii| of the smallest eigenvalue. Negative
        if ``K`` is singular or indefinite.

    Raises
    ------
    ValueError
        If ``K`` is not a finite, symmetric, non-empty square matrix, or traced, ``entry_error`` is
        negative, not finite, or of another shape, or ``x`` is missing or superfluous.

    Notes
    -----
    :mod:`ntk.spectrum.certificate` has the proof. It runs on the host in float64: two Cholesky
    factorisations and a Lanczos run. Memory: three matrices.

    Examples
    --------
    >>> K = np.array([[2.0, 1.0], [1.0, 2.0]])
    >>> bound = certified_min_eigenvalue(K)
    >>> bound < 1, 1 - bound < 1e-14
    (True, True)
    >>> certified_min_eigenvalue(K, entry_error=0.1)
    0.8
    >>> round(certified_min_eigenvalue(lambda x1, x2: x1 @ x2.T, x=np.diag([2.0, 3.0])), 6)
    4.0
    """
    if entry_error is None and isinstance(K, Kernels):
        entry_error = K.error
    if x is not None and callable(K):
        K, entry_error = measured(K, x, entry_error)
    else:
        K = as_kernel_matrix(K, x)
    K, dtype = _finite_float64("K", K)
    entry_error = 0.0 if entry_error is None else entry_error
    if K.ndim == 4:
        entry_error = numpy_array("entry_error", entry_error)
        if (got := entry_error.shape) not in ((), K.shape):
            raise ValueError(f"entry_error: expected a number or shape {K.shape}, got {got}.")
        entry_error = flatten_outputs(entry_error)
    K = square_matrix(K)
    check_symmetric(K, allowed_asymmetry(dtype, len(K)), "K")
    scale = power_of_two(K)
    error = norm_bound(_check_entry_error(entry_error, K.shape)) / scale
    return down(down(_bound_min_eigenvalue(K / scale) - error) * scale)


def _bound_min_eigenvalue(K) -> float:
    """Return the bound for the symmetric part of ``K``, with entries of about 1 at most."""
    A = K / 2 + K.T / 2
    shift, best = 0.0, -math.inf
    with threads(len(A)):
        for _ in range(2):  # a second time from just below, where eigenvalues are less crowded
            estimate = smallest(A, shift)[0]
            margin = least = 2 * cholesky_slack(np.abs(A.diagonal() - estimate))
            while (bound := shifted_bound(A, estimate - margin)) is None:
                margin *= 4
            shift, best = -bound, max(best, bound)
            if margin == least:
                break
    return down(best - UNIT * norm_bound(np.abs(A)))


class Certificate(NamedTuple):
    """Result of :func:`certify_simplex`."""

    lower: float  # rigorous: at most the minimum
    upper: float  # rigorous: at least the minimum
    argmin: np.ndarray  # [h], the point of the simplex where lambda_min is at most `upper`
    cells: int  # sub-simplices that cover the simplex, each verified to be above `lower`
    converged: bool  # whether upper - lower <= rtol |upper|

    def __repr__(self) -> str:
        rows = [
            ("lambda_min", f"{self.lower:.6g} to {self.upper:.6g} (proved)"),
            ("argmin", np.array2string(self.argmin, precision=4, threshold=8)),
            ("cells", f"{self.cells:,}"),
            ("converged", "yes" if self.converged else "no: the cells allowed are used up"),
        ]
        return summary.table("Certificate", rows)


def certify_simplex(
    blocks: Any,
    *,
    x: Any = None,
    rtol: float = 1e-3,
    entry_error: Any = None,
    max_cells: int = 3000,
) -> Certificate:
    """Return a rigorous bracket of the minimum of ``lambda_min(K_alpha)`` over the simplex.

        K_alpha = sum_ij alpha_i alpha_j K_ij,    alpha >= 0,  sum_i alpha_i = 1

    The minimum is lambda_0 of Oymak et al. (2021), Assumption 3; in general it is not at a vertex.

    Parameters
    ----------
    blocks : array [h, h, n, n], or a sequence of h kernel functions
        ``K_ij``; every ``K_alpha`` must be symmetric up to rounding. Functions ``k_i`` are mixed
        directly, ``K_alpha = sum_i alpha_i k_i(x, x)``, in float64; the minimum is at a vertex.
    x : array [n, ...], optional
        Inputs, if ``blocks`` are kernel functions.
    rtol : float
        Target for ``upper - lower``, relative to ``upper``.
    entry_error : float or array [n, n] or [h, h, n, n], optional
        Largest error of each entry of ``blocks``, e.g. of :func:`ntk.mixture_blocks` with
        ``error=True``; the bracket holds for all kernels within it. Default: 0, and for functions
        the estimate of :func:`certified_min_eigenvalue`.
    max_cells : int
        Maximum number of cells; a bracket at the maximum is rigorous, but wider.

    Returns
    -------
    Certificate
        Not converged at ``max_cells``, or if rounding and ``entry_error`` exceed the target gap,
        e.g. for a minimum of 0 (two equal inputs, activations that cancel).

    Raises
    ------
    ValueError
        If ``blocks`` are not finite [h, h, n, n] blocks, non-empty and with symmetric mixtures, or
        traced, or another argument is out of its range.

    Notes
    -----
    Alternating minimisation over ``alpha`` and the eigenvector gives ``upper``. Every test is then
    one Cholesky factorisation at ``(1 - rtol) upper``, shared between cells with a common edge. The
    largest cell is next, halved at its longest failing edge; ``tr K(d, d)`` measures edges.
    Vertices are dyadic, hence exact, so the cells cover the simplex. Time: about (h + 1) cells
    times n^3 / 3 + h^2 n^2. Memory: h (h + 1) / 2 matrices. If this is not enough, or the minimum
    seems to be 0, the matrix of all blocks gives a lower bound, in (h n)^3 time and memory of three
    times the blocks.

    Examples
    --------
    >>> phi = np.array([[[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, -1.0]]])  # two feature maps
    >>> blocks = np.einsum("iap,jbp->ijab", phi, phi)
    >>> certificate = certify_simplex(blocks)  # singular: the second features cancel
    >>> certificate.argmin, bool(certificate.lower <= 0 <= certificate.upper < 1e-12)
    (array([0.5, 0.5]), True)
    >>> kernels = [lambda x1, x2: x1 @ x2.T, lambda x1, x2: (1 + x1 @ x2.T) ** 2]
    >>> certify_simplex(kernels, x=np.diag([2.0, 3.0])).argmin
    array([1., 0.])
    """
    if x is not None:
        blocks, entry_error = mixed_blocks(blocks, x, entry_error)
    entry_error = 0.0 if entry_error is None else entry_error
    blocks, dtype = _finite_float64("blocks", blocks)
    h, n = blocks.shape[::2] if blocks.ndim == 4 else (0, 0)
    if blocks.shape != (h, h, n, n) or blocks.size == 0:
        raise ValueError(f"blocks: expected shape [h, h, n, n], got {blocks.shape}.")
    if not 0 < real_number("rtol", rtol) < 1:
        raise ValueError(f"rtol: expected a number between 0 and 1, got {rtol}.")
    max_cells = integer("max_cells", max_cells, 1)
    _check_mixtures(blocks, allowed_asymmetry(dtype, n))
    mixture = _Mixture(blocks, _check_entry_error(entry_error, blocks.shape))
    with threads(n):
        return _BranchAndBound(mixture, rtol).run(max_cells)


class _Mixture:
    """``K(v, w) = sum_ij v_i w_j K_ij``, symmetrised and scaled, with a bound of its error."""

    def __init__(self, blocks, entry_error):
        self.h, _, self.n, _ = blocks.shape
        self.blocks, self.scale = blocks, power_of_two(blocks)
        self.i, self.j = np.triu_indices(self.h)  # K(v, w) needs the sum of K_ij and K_ji only
        parts = np.empty((len(self.i), self.n, self.n))
        for part, i, j in zip(parts, self.i, self.j, strict=True):
            mixed = blocks[i, j] / (4 * self.scale) + blocks[j, i] / (4 * self.scale)
            np.add(mixed, mixed.T, out=part)
        self.parts = parts.reshape(len(parts), -1)
        self.traces = self._square(np.trace(parts, axis1=1, axis2=2))
        # An entry of K(v, w) takes 2 roundings in the parts, 2 in the weights, h^2 in their sum.
        norms = [norm_bound(np.abs(part)) for part in parts]
        rounding = self._square(2 * (self.h**2 + 4) * UNIT * np.array(norms) + TINY)
        entry_norms = np.array([[norm_bound(e) for e in row] for row in entry_error])
        self.errors = rounding + (entry_norms + entry_norms.T) / (2 * self.scale)

    def _square(self, values):
        square = np.empty((self.h, self.h))
        square[self.i, self.j] = square[self.j, self.i] = values
        return square

    def kernel(self, v, w):
        weights = v[self.i] * w[self.j] + v[self.j] * w[self.i]
        weights[self.i == self.j] /= 2
        return (weights @ self.parts).reshape(self.n, self.n)

    def error(self, v, w) -> float:
        """Return a bound of the spectral norm of the error of ``kernel(v, w)``."""
        return (v @ self.errors @ w) * SUMMED

    def forms(self, x):
        """Return ``x' K_ij x`` [h, h]."""
        return self._square(self.parts @ np.outer(x, x).ravel())

    def lower_bound(self) -> float:
        """Return a rigorous lower bound of all ``lambda_min(K_alpha)``, by all blocks at once."""
        size = self.h * self.n
        bound = _bound_min_eigenvalue(
            self.blocks.transpose(0, 2, 1, 3).reshape(size, size) / self.scale
        )
        bound = bound / self.h if bound > 0 else bound
        return down(down(bound) - self.errors.max())

    def upper_bound(self, alpha):
        """Return a rigorous upper bound of ``lambda_min(K_alpha)``, and the vector for it."""
        K = self.kernel(alpha, alpha)
        x = smallest(K)[1]
        size = np.abs(x)
        rounding = 2 * (2 * self.n + 4) * UNIT * (size @ np.abs(K) @ size) + TINY
        numerator = x @ K @ x + rounding
        worst = 1 + math.copysign(2 * (self.n + 4) * UNIT, numerator)  # for x'x and the division
        return up(numerator / (x @ x) * worst + self.error(alpha, alpha)), x


class _BranchAndBound:
    """Branch and bound for one target below the smallest upper bound. Cells are vertex tuples."""

    def __init__(self, mixture, rtol):
        self.mixture, self.rtol = mixture, rtol
        self.passed: dict = {}  # pair -> lower bound of lambda_min(K(v, w))
        self.failed: dict = {}  # pair -> smallest shift at which its test has failed
        self.upper, self.argmin = math.inf, np.empty(0)
        for alpha in [*np.eye(mixture.h), np.full(mixture.h, 1 / mixture.h)]:
            self.descend(alpha)

    def descend(self, alpha):
        """Lower `upper`, alternating between alpha's eigenvector and the best alpha for it."""
        for _ in range(50):
            alpha = _on_grid(alpha)
            value, x = self.mixture.upper_bound(alpha)
            if value < self.upper:
                self.upper, self.argmin = value, alpha
            forms = self.mixture.forms(x)
            alpha = _simplex_minimum(forms)
            if not alpha @ forms @ alpha < value - 0.02 * self.rtol * abs(value):
                break
        # The gap must exceed the rounding losses of both bounds.
        noise = cholesky_slack(np.full(1, self.mixture.traces.max())) + self.mixture.errors.max()
        noise += (self.mixture.n + 2) * UNIT
        self.gap = max(0.99 * self.rtol * abs(self.upper) - noise, 4 * noise)

    def run(self, max_cells) -> Certificate:
        order = itertools.count()
        heap: list = []  # (-size, order, cell): the largest cell first
        finished: list = []

        def push(cell):
            size = max((self.length(v, w) for v, w in itertools.combinations(cell, 2)), default=0)
            heapq.heappush(heap, (-size, next(order), cell))

        floor = -math.inf
        # For a minimum of 0 to rounding, no number of cells is better than the matrix of blocks.
        if self.gap > self.rtol * abs(self.upper):
            floor = self.mixture.lower_bound()
            if self.upper - floor < self.mixture.h**2 * self.gap:
                return self.certificate(floor, 1)
        push(tuple(tuple(vertex) for vertex in np.eye(self.mixture.h).tolist()))
        while heap and len(heap) + len(finished) < max_cells:
            cell = heapq.heappop(heap)[-1]
            halves = self.examine(cell)
            finished += [] if halves else [cell]
            for half in halves:
                push(half)
        cells = finished + [cell for _, _, cell in heap]
        pairs = {pair for cell in cells for pair in _vertex_pairs(cell)}
        if not all([self.passes(pair) for pair in pairs]):
            floor = max(floor, self.mixture.lower_bound())
        # At the maximum number of cells, lower the target until all cells pass.
        while self.upper - self.gap > floor and not all([self.passes(pair) for pair in pairs]):
            self.gap *= 1.5
        proved = [self.passed[pair] for pair in pairs if pair in self.passed]
        lower = min(proved) if len(proved) == len(pairs) else -math.inf
        return self.certificate(max(lower, floor), len(cells))

    def certificate(self, lower, cells) -> Certificate:
        lower, upper = down(lower * self.mixture.scale), up(self.upper * self.mixture.scale)
        converged = upper - lower <= self.rtol * abs(upper)
        return Certificate(lower, upper, self.argmin, cells, converged)

    def examine(self, cell):
        """Return two halves of a cell that fails; [] if it passes or cannot be halved."""
        for v in cell:
            if not self.passes((v, v)):
                self.descend(np.array(v))  # the minimum can be lower
        failing = [(v, w) for v, w in _vertex_pairs(cell) if v != w and not self.passes((v, w))]
        if not failing:
            return []
        v, w = max(failing, key=lambda pair: self.length(*pair))
        middle = tuple((a + b) / 2 for a, b in zip(v, w, strict=True))
        if any(m * _GRID % 1 for m in middle):
            return []
        return [tuple(middle if u == end else u for u in cell) for end in (v, w)]

    def passes(self, pair) -> bool:
        """Return whether ``lambda_min(K(v, w))`` is proved to be above the target."""
        if pair in self.passed:
            return True
        v, w = map(np.array, pair)
        error = self.mixture.error(v, w)
        shift = self.upper - self.gap + error
        if shift >= self.failed.get(pair, math.inf):
            return False
        bound = shifted_bound(self.mixture.kernel(v, w), shift)
        if bound is None:
            self.failed[pair] = shift
            return False
        self.passed[pair] = down(bound - error)
        return True

    def length(self, v, w) -> float:
        d = np.subtract(v, w)
        return float(d @ self.mixture.traces @ d)


def _vertex_pairs(cell):
    return [(min(v, w), max(v, w)) for v, w in itertools.combinations_with_replacement(cell, 2)]


def _on_grid(alpha):
    """Return a point of the simplex near ``alpha`` that sums to 1 exactly."""
    coarse = 2.0**-30  # products of coordinates are then exact
    alpha = np.round(np.maximum(alpha, 0) / coarse) * coarse
    alpha[np.argmax(alpha)] += 1 - alpha.sum()
    return alpha


def _simplex_minimum(forms):
    """Return ``argmin a' M a`` over the simplex."""
    # It is proportional to the minimiser of a'Ma + c (1'a - 1)^2, nonnegative least squares.
    values, vectors = np.linalg.eigh(forms)
    root = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    weight = np.sqrt(np.trace(np.abs(forms)) + TINY)
    system = np.vstack([root, np.full(len(forms), weight)])
    alpha, _ = scipy.optimize.nnls(system, np.append(np.zeros(len(forms)), weight))
    return alpha / alpha.sum()


def _finite_float64(name, array):
    """Return a finite float64 array, and the original dtype."""
    original = numpy_array(name, array)
    if not concrete(original):
        raise ValueError(f"{name}: expected known numbers, got what jit or vmap traces.")
    array = original.astype(np.float64)
    check_finite(name, array, "entries")
    return array, original.dtype


def _check_mixtures(blocks, allowed):
    """Raise ValueError unless all ``K_ij + K_ji`` are symmetric up to rounding."""
    largest = np.abs(blocks).max((2, 3))
    diagonal = largest.diagonal()
    # For orthogonal features K_ij is roundoff, relative to the diagonal blocks.
    size = np.maximum(largest, np.sqrt(diagonal)[:, None] * np.sqrt(diagonal))
    for i, j in itertools.combinations_with_replacement(range(len(blocks)), 2):
        mixed = blocks[i, j] / 4 + blocks[j, i] / 4
        off = float(np.abs(mixed - mixed.T).max())
        if off > allowed * max(size[i, j], size[j, i]) / 2:
            raise ValueError(
                "blocks: expected symmetric mixtures, got entries (a, b) and (b, a) of "
                f"K_{i}{j} + K_{j}{i} that differ by {4 * off:.3g}."
            )


def _check_entry_error(entry_error, shape):
    e, _ = _finite_float64("entry_error", entry_error)
    if e.shape not in ((), shape[-2:], shape):
        raise ValueError(f"entry_error: expected a number or shape {shape}, got {e.shape}.")
    if not (e >= 0).all():
        raise ValueError(f"entry_error: expected nonnegative errors, got {e.min()}.")
    return np.broadcast_to(e, shape)
