"""Inverse-Hessian-vector products: how an implicit hypergradient solves ``H q = v``.

Every factory returns an ``Inverse``: ``(hvp, b, x0, point) -> x``. ``neumann``, ``nystrom`` and
``scale`` approximate; ``info.error_estimate`` shows their bias.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Inverse, LinearMap, Point, Pytree
from bilevel.internal import checks
from bilevel.internal.conjugate_gradients import default_tolerance, solve_conjugate_gradients
from bilevel.internal.precision import coarsest_eps, narrow, widen
from ntk.internal.jaxprs import operation_names
from ntk.internal.products import in_full_precision, matmul
from ntk.internal.sharding import match_varying_axes, pcast_varying, varying

_UNSOLVED = 0.5  # relative residual above which a solve has failed
_DIVERGED = 1.0  # the same for a truncated series
_INEXACT = 1e-2  # relative residual above which nonpositive curvature is reported


class Outcome(NamedTuple):
    """The outcome of a solve of ``H x = b``: scalars."""

    residual: chex.Numeric = 0.0  # |b - H x| / |b|
    failed: chex.Numeric = 0.0  # 1 if x is not the solution, else 0
    indefinite: chex.Numeric = 0.0  # 1 if a direction without positive curvature ended the solve
    curvature: chex.Numeric = 0.0  # the largest of H that the solve has met; 0 if unknown


@dataclasses.dataclass(frozen=True)
class ReportingInverse:
    """An ``Inverse`` that can also report its outcome."""

    solve: Callable[[LinearMap, Pytree, Pytree, Point], tuple[Pytree, Outcome]]
    of_range: bool = False  # it approximates the range of H, which should be small

    def __call__(self, hvp: LinearMap, b: Pytree, x0: Pytree, point: Point) -> Pytree:
        """Return the solution alone."""
        return self.solve(hvp, b, x0, point)[0]


def solve_and_report(
    inverse: Inverse, hvp: LinearMap, b: Pytree, x0: Pytree, point: Point
) -> tuple[Pytree, Outcome]:
    """Return ``inverse(hvp, b, x0, point)`` and its outcome: zeros if the inverse reports none."""
    if isinstance(inverse, ReportingInverse):
        return inverse.solve(hvp, b, x0, point)
    return inverse(hvp, b, x0, point), Outcome()


def ratio_to_norm(size: jax.Array, whole: Pytree) -> jax.Array:
    """Return ``size`` over the 2-norm of ``whole``, or ``size`` if that norm is 0."""
    norm = optax.tree.norm(whole)
    return size / jnp.where(norm > 0, norm, 1)


def ratio_of_norms(part: Pytree, whole: Pytree) -> jax.Array:
    """Return the norm of ``part`` over that of ``whole``, or alone if the latter is 0."""
    return ratio_to_norm(optax.tree.norm(part), whole)


def _outcome(b: Pytree, residual: jax.Array, limit: float, **diagnostics: jax.Array) -> Outcome:
    """Return the outcome of a solve, which fails above this limit of the relative residual."""
    relative = ratio_to_norm(residual, b)
    numbers = {name: jnp.asarray(x, relative.dtype) for name, x in diagnostics.items()}
    return Outcome(relative, (relative > limit).astype(relative.dtype), **numbers)


def cg(steps: int = 500, tol: float | None = None, damping: float = 0.0) -> Inverse:
    """Solve ``(H + damping I) x = b`` by conjugate gradients, for positive definite ``H``.

    Parameters
    ----------
    steps : int
        Maximum number of iterations, one Hessian product each. Memory: 6 copies of ``w``.
    tol : float, optional
        Relative residual ``|b - H x| / |b|`` at which to stop. Default: 1e-10 in float64, ten units
        of roundoff in float32, and one unit of the weights' roundoff in narrower types.
    damping : float
        Added to the Hessian's diagonal. It makes a singular Hessian invertible, with a bias.

    Raises
    ------
    ValueError
        If ``steps`` is under 1, or ``tol`` or ``damping`` negative.

    Examples
    --------
    >>> b = jnp.array([2.0, 8.0])
    >>> cg()(lambda v: jnp.array([1.0, 4.0]) * v, b, None, None)
    Array([2., 2.], dtype=float...)
    """
    steps = checks.integer("steps", steps, 1)
    checks.check_at_least("damping", damping, 0)
    if tol is not None:
        checks.check_at_least("tol", tol, 0)

    def inverse(hvp, b, x0, point):
        relative = tol
        if tol is None:
            # Products have the weights' roundoff, which may be coarser than that of `b`.
            relative = max(default_tolerance(b), coarsest_eps(b if point is None else point.w))
        threshold = relative * optax.tree.norm(b)

        def damped(v):
            return optax.tree.add_scale(hvp(v), damping, v)

        solved = solve_conjugate_gradients(damped, b, x0, steps=steps, threshold=threshold)
        stopped = ~solved.positive & (solved.residual > _INEXACT * optax.tree.norm(b))
        diagnostics = {"indefinite": stopped, "curvature": solved.curvature}
        return solved.x, _outcome(b, solved.residual, _UNSOLVED, **diagnostics)

    return ReportingInverse(inverse)


def neumann(terms: int, step_size: float) -> Inverse:
    """Sum the truncated Neumann series ``x = eta sum_{k < terms} (I - eta H)^k b``.

    It equals back-propagation through the last ``terms`` gradient steps of size ``step_size`` at a
    stationary ``w`` (Lorraine, Vicol & Duvenaud 2020), without a warm start. Its bias shrinks as
    ``(1 - eta mu)^terms``. Cost: ``terms - 1`` Hessian products, 2 copies of ``w``.

    Raises
    ------
    ValueError
        If ``terms`` is under 1 or ``step_size`` negative.

    Examples
    --------
    >>> neumann(2, 0.5)(lambda v: v, jnp.ones(1), None, None)
    Array([0.75], dtype=float...)
    """
    terms = checks.integer("terms", terms, 1)
    checks.check_at_least("step_size", step_size, 0)

    def inverse(hvp, b, x0, point):
        def step(x):
            return optax.tree.add_scale(x, step_size, optax.tree.sub(b, hvp(x)))

        def again(carry, _):
            x, _ = carry
            after = step(x)
            return (after, optax.tree.norm(optax.tree.sub(after, x))), None

        start = match_varying_axes(step, optax.tree.scale(step_size, b))
        if terms == 1:
            return start, Outcome()
        first = start, optax.tree.norm(start)
        (x, moved), _ = jax.lax.scan(again, first, length=terms - 1)
        # The last term is the step size times the residual before it.
        size = moved / jnp.where(step_size > 0, step_size, 1)
        return x, _outcome(b, size, _DIVERGED)

    return ReportingInverse(inverse)


def scale(step_size: float) -> Inverse:
    """Use ``x = step_size * b``: the identity replaces the inverse Hessian.

    With the learning rate as ``step_size`` this is second-order DARTS' one-step approximation
    (Liu, Simonyan & Yang 2019, Eq. 7) at a stationary point.

    Raises
    ------
    ValueError
        If ``step_size`` is negative.

    Examples
    --------
    >>> scale(0.5)(None, jnp.ones(1), None, None)
    Array([0.5], dtype=float...)
    """
    checks.check_at_least("step_size", step_size, 0)
    return lambda hvp, b, x0, point: optax.tree.scale(step_size, b)


def dense(damping: float = 0.0) -> Inverse:
    """Factorize the p x p Hessian by LU: exact, also at a saddle, for a few thousand weights.

    Raises
    ------
    ValueError
        If ``damping`` is negative.

    Examples
    --------
    >>> dense()(lambda v: jnp.array([1.0, 4.0]) * v, jnp.array([2.0, 8.0]), None, None)
    Array([2., 2.], dtype=float...)
    """
    checks.check_at_least("damping", damping, 0)

    def inverse(hvp, b, x0, point):
        flat, unravel = ravel_pytree(b)
        matrix = hessian_matrix(hvp, b) + damping * jnp.eye(flat.size, dtype=flat.dtype)
        factor = jax.scipy.linalg.lu_factor(matrix)
        x = jax.scipy.linalg.lu_solve(factor, flat)
        size = jnp.linalg.norm(matrix)
        # Roundoff alone leaves a residual of this size.
        rounding = jnp.finfo(flat.dtype).eps * size * jnp.linalg.norm(x)
        residual = jnp.maximum(jnp.linalg.norm(flat - matmul(matrix, x)), rounding)
        # A number divided by infinity is 0, which would look like a solution.
        x = checks.nan_unless_finite(unravel(x), matrix)
        return x, _outcome(b, residual, _UNSOLVED, curvature=size)

    return ReportingInverse(inverse)


def hessian_matrix(hvp: LinearMap, like: Pytree) -> jax.Array:
    """Return ``H`` as a [p, p] array, symmetrized, in the order of ``ravel_pytree(like)``."""
    flat, _ = ravel_pytree(like)
    basis = pcast_varying(jnp.eye(flat.size, dtype=flat.dtype), varying(like))
    columns = row_products(hvp, like, basis)
    return (columns + columns.T) / 2


def row_products(hvp: LinearMap, like: Pytree, rows: jax.Array) -> jax.Array:
    """Return ``hvp`` of each row, in the order of ``ravel_pytree(like)``, in full precision."""
    _, unravel = ravel_pytree(like)
    program = jax.make_jaxpr(lambda v: ravel_pytree(hvp(unravel(v)))[0])(rows[0])
    results = jax.vmap(in_full_precision(program))(rows)
    if "fft" not in operation_names(program):
        return results
    # XLA on CPUs refuses batches of Fourier transforms in some layouts. A long array has one.
    return jax.lax.optimization_barrier(results.ravel()).reshape(results.shape)


def nystrom(rank: int, damping: float, *, key: chex.PRNGKey | None = None) -> Inverse:
    """Use the randomized Nystrom approximation ``(H_rank + damping I)^-1 b``.

    A rank-``rank`` sketch of a positive semidefinite Hessian, inverted by Woodbury's formula
    (Hataya & Yamada 2023; numerically stable form of Frangella, Tropp & Udell 2023, Alg. 2.1).
    It is exact up to the damping if the rank of ``H`` is at most ``rank``.

    Parameters
    ----------
    rank : int
        Sketch size: this many Hessian products, two copies of ``w`` each. At most p is used.
    damping : float
        Positive, and far above the roundoff of the largest eigenvalue. The inverse is 1 / damping
        in directions outside the sketch.
    key : jax.Array, optional
        Seed of the Gaussian sketch, ``jax.random.key(0)`` by default.

    Raises
    ------
    ValueError
        If ``rank`` is under 1, ``damping`` not positive and finite, or ``key`` not a PRNG key.

    Examples
    --------
    >>> x = nystrom(2, 1e-3)(lambda v: jnp.array([1.0, 4.0]) * v, jnp.array([2.0, 8.0]), None, None)
    >>> bool(jnp.allclose(x, 2.0, rtol=1e-2))
    True
    """
    rank = checks.integer("rank", rank, 1)
    checks.check_in_range("damping", damping, 0, math.inf)
    if key is not None:
        checks.prng_key("key", key)

    def inverse(hvp, b, x0, point):
        flat, unravel = ravel_pytree(b)
        seed = jax.random.key(0) if key is None else key
        omega = jax.random.normal(seed, (flat.size, min(rank, flat.size)), flat.dtype)
        omega = pcast_varying(jnp.linalg.qr(omega)[0], varying(b))
        sketch = row_products(hvp, b, omega.T).T
        # The shift keeps the Cholesky factorization safe for a singular H. We subtract it below.
        shift = jnp.sqrt(flat.size) * jnp.finfo(flat.dtype).eps * jnp.linalg.norm(sketch)
        shifted = sketch + shift * omega
        factor = jnp.linalg.cholesky(matmul(omega.T, shifted), symmetrize_input=True)
        root = jax.scipy.linalg.solve_triangular(factor, shifted.T, lower=True).T
        u, s, _ = jnp.linalg.svd(root, full_matrices=False)
        eigenvalues = jnp.maximum(s**2 - shift, 0)
        inside = matmul(u.T, flat)
        outside = flat - matmul(u, inside)
        x = unravel(matmul(u, inside / (eigenvalues + damping)) + outside / damping)
        return x, Outcome()

    return ReportingInverse(inverse, of_range=True)


def _squared_error(outputs, batch):
    return 0.5 * jnp.sum((outputs - batch[1]) ** 2)


def gram(
    outputs: Callable[[Pytree, Pytree, Pytree], jax.Array],
    loss: Callable[[jax.Array, Pytree], jax.Array] = _squared_error,
    *,
    damping: float | Callable[[Pytree], jax.Array] = 0.0,
) -> Inverse:
    """Solve in function space, with the n x n Gram matrix of the Jacobian, for n << p.

    For ``lower(w) = loss(outputs(w), batch) + damping/2 |w|^2`` the Gauss-Newton Hessian is
    ``J'SJ + damping I`` with ``J = d outputs / dw`` [n, p], ``S = d^2 loss / d outputs^2``, and

        x = (b - J' S (damping I + K S)^-1 J b) / damping,    K = J J'  (the empirical NTK),

    exact for models linear in ``w`` and at interpolation. The minimum-norm limit is
    ``x = J' K^-1 S^-1 K^-1 J b``, the pseudo-inverse.

    Parameters
    ----------
    outputs : ``outputs(w, alpha, batch) -> array``
        All predictions of the batch; n is its size.
    loss : ``loss(outputs, batch) -> scalar``
        The data term of ``lower``; half the summed squared error to ``batch[1]`` by default.
    damping : float or ``damping(alpha) -> scalar``
        The weight decay that ``lower`` contains. 0 is the minimum-norm limit, which misses the
        motion of the solution in the null space of ``J``. If that part matters, use a small weight
        decay, in ``lower`` and here.

    Raises
    ------
    ValueError
        If ``outputs`` is not a function, or ``damping`` is negative.

    Notes
    -----
    Memory: sqrt(n) copies of w and a few n x n matrices. Time: n output gradients, n derivatives
    of the outputs along one direction each, and n^3 / 3. A batch sharded over devices stays so.

    Examples
    --------
    >>> x = jnp.array([[1.0, 0.0, 2.0]])
    >>> from bilevel.contracts import Point
    >>> point = Point(w=jnp.zeros(3), alpha=None, batch=(x, jnp.ones(1)))
    >>> inverse = gram(lambda w, alpha, batch: batch[0] @ w)
    >>> jax.jit(lambda b: inverse(None, b, None, point))(jnp.array([1.0, 5.0, 2.0]))
    Array([0.2, 0. , 0.4], dtype=float...)
    """
    if not callable(damping):
        checks.check_at_least("damping", damping, 0)
    checks.function("outputs", outputs, "(w, alpha, batch) -> predictions")

    def inverse(hvp, b, x0, point):
        w, alpha, batch = point
        decay = damping(alpha) if callable(damping) else damping
        flat, unravel = ravel_pytree(b)
        start, unravel_w = ravel_pytree(widen(w))

        def predict(v):
            return outputs(narrow(unravel_w(v), w), alpha, batch)

        # J is never formed: rows of K are products with J' and J. So no device holds more than
        # sqrt(n) rows at a time, also if the batch is sharded.
        predictions, push = jax.linearize(lambda v: predict(v).ravel(), start)
        pull = jax.linear_transpose(push, start)
        n = predictions.size
        rows = pcast_varying(jnp.eye(n, dtype=predictions.dtype), varying(predictions))
        row = jax.make_jaxpr(lambda e: push(pull(e)[0]))(rows[0])
        kernel = jax.lax.map(in_full_precision(row), rows, batch_size=math.isqrt(n))
        shape = jax.eval_shape(predict, start).shape
        curvature = jax.hessian(lambda f: loss(f.reshape(shape), batch))(predictions)
        projected = push(flat)
        damped = jnp.linalg.solve(
            decay * jnp.eye(n, dtype=flat.dtype) + matmul(kernel, curvature), projected
        )
        if not checks.concrete(decay) or decay > 0:
            return unravel((flat - pull(matmul(curvature, damped))[0]) / decay)
        # With decay 0 `damped` is S^-1 K^-1 J b already.
        return unravel(pull(jnp.linalg.solve(kernel, damped))[0])

    return inverse
