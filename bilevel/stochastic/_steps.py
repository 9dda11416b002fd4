"""Steps of the weights and the adjoint: of a given size, or in a metric of measured curvature.

The lower Hessian of a sample of the data gives a metric P near its inverse. Power iterations
measure the largest curvature l in it, and steps are ``P / (2 l)``. Both are renewed at the ends of
epochs 1, 3, 7, 15, ..., l every fourth epoch, and after ``alpha`` has moved: a curvature of
exp(alpha) triples if alpha grows by about 1, and these steps are stable up to four times l.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel.contracts import Pytree
from bilevel.hypergradients.curvature import DENSE_SIZE
from bilevel.internal.checks import at_least_float32, positive
from bilevel.problem.problem import Problem, at_variables, hessian_operator
from bilevel.solvers.inverses import row_products
from bilevel.stochastic._blocks import BatchedData, zeros_of_shape
from ntk.internal.products import matmul

_RANK = 32  # number of the Hessian's eigenvectors, unless it is decomposed
_SPARE = 8  # additional columns, for accurate last eigenvectors
_ROWS = 4  # rows of the sample per column: the covariance is then accurate to a factor of 4
_LEAST, _MOST = 8, 128  # batches in the sample
_PROBES = 4  # batches for the measurement of curvature
_ITERATIONS = 8  # of the power method
_FRACTION = 0.5  # of 1 / curvature
_EPOCHS, _SHORTEST = 4, 100  # between two measurements of the length; minimum steps of an epoch
_MOVED, _TURNED = 1.2, 3.0  # changes of alpha that renew the length, and the basis if decomposed
_LOOKED = 16  # steps between two checks of alpha


Rate = float | jax.Array | Callable[[jax.Array], jax.Array]
"""A positive number, or a schedule: ``rate(steps done) -> number``, such as optax's."""


def as_schedule(name: str, rate: Rate) -> Callable[[jax.Array], Any]:
    """Return ``rate`` as a schedule; raise unless it is one or a positive number."""
    if callable(rate):
        return rate
    positive(name, rate)
    return lambda number: rate


def against(x: Pytree, direction: Pytree, rate: Any) -> Pytree:
    """Return ``x - rate * direction``, in the dtypes of ``x``."""
    return jax.tree.map(lambda x, d: (x - rate * d).astype(x.dtype), x, direction)


class Mover(NamedTuple):
    """How weights and adjoint move together."""

    init: Callable[..., Pytree]  # (problem, w, alpha, train) -> state, in Tables: may be large
    # (pair, directions, state, number, those four, shorter: a factor) -> (pair, state)
    move: Callable[..., tuple]


def mover(step_size: Rate | None) -> Mover:
    """Return steps of this size; None takes steps in a measured metric."""
    if step_size is None:
        return Mover(unmeasured, _step_in_metric)
    rate = as_schedule("step_size", step_size)

    def step_by_rate(pair, along, state, number, *_, shorter):
        return against(pair, along, rate(number)), state

    return Mover(lambda *_: (), step_by_rate)


class Metric(NamedTuple):
    """``P = V diag(1 / values) V' + (1 - V V') / floor``, and the step's length."""

    vectors: jax.Array  # [p, k], orthonormal
    values: jax.Array  # [k], positive
    floor: jax.Array  # []
    length: jax.Array  # []
    matrix: jax.Array | None  # [p, p]: P, if all of H was decomposed
    turned: Pytree  # alpha where the basis was measured, if it was all of H's
    moved: Pytree  # alpha where the length was measured

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return ``P x`` of [..., p]."""
        return self.power(1.0, x) if self.matrix is None else matmul(x, self.matrix)

    def power(self, exponent: float, x: jax.Array) -> jax.Array:
        """Return ``P^exponent x`` of [..., p]."""
        along = matmul(x, self.vectors)
        outside = self.floor**-exponent
        factors = jnp.expand_dims(self.values**-exponent - outside, tuple(range(x.ndim - 1)))
        return outside * x + matmul(along * factors, self.vectors.T)


def _products(problem: Problem, w: Pytree, alpha: Pytree, train: BatchedData) -> tuple:
    """Return the function ``(i, rows [k, p]) -> H_i rows``, and w in a row of float32 or wider."""
    flat, _ = ravel_pytree(w)
    loss = at_variables(problem, None).lower

    def products(i, columns):
        def oracle(batch, weight):
            _, hvp = hessian_operator(loss, w, alpha, batch)
            return weight * row_products(hvp, w, columns.astype(flat.dtype)), None

        return train.at(i, oracle)[0]

    return products, flat.astype(at_least_float32(flat.dtype))


def _estimate_metric(products, flat: jax.Array, alpha: Pytree, train: BatchedData) -> Metric:
    """Return the metric without its length, from a fixed sample of the batches."""
    wide = min(flat.size, _RANK + _SPARE) if flat.size > DENSE_SIZE else flat.size
    sample = min(train.count, _MOST, max(_LEAST, -(-_ROWS * wide // max(1, train.size))))
    chosen = jnp.arange(sample) * train.count // sample

    def mean(columns):
        add = lambda total, i: (total + products(i, columns), None)  # noqa: E731
        return jax.lax.scan(add, jnp.zeros_like(columns), chosen)[0] / sample

    values, vectors = _leading(mean, flat, wide)
    # Negative curvature counts by its size. Curvatures below roundoff are not divided by.
    values = jnp.abs(values)
    least = jnp.max(values) * 10 * jnp.finfo(flat.dtype).eps
    values = jnp.where(values > least, values, jnp.where(least > 0, least, 1))
    # With all vectors any floor would do: this one cancels nothing.
    floor = jnp.max(values) if wide == flat.size else jnp.min(values)
    metric = Metric(vectors, values, floor, jnp.ones((), flat.dtype), None, None, alpha)
    if wide < flat.size:
        return metric
    whole = metric.power(1.0, jnp.eye(wide, dtype=flat.dtype))
    return metric._replace(matrix=whole, turned=alpha)


def _largest_move(alpha: Pytree, before: Pytree) -> jax.Array:
    gaps = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)).astype(float), alpha, before)
    return jnp.max(jnp.stack(jax.tree.leaves(gaps)))


def _leading(mean, flat: jax.Array, wide: int) -> tuple[jax.Array, jax.Array]:
    """Return eigenvalues and vectors of the mean: all, or the largest by subspace iteration."""
    if wide == flat.size:
        matrix = mean(jnp.eye(flat.size, dtype=flat.dtype))
        return jnp.linalg.eigh((matrix + matrix.T) / 2)
    start = jax.random.normal(jax.random.key(0), (wide, flat.size), flat.dtype)
    basis = jnp.linalg.qr(mean(start).T)[0]
    image = mean(basis.T)
    small = matmul(image, basis)
    values, rotation = jnp.linalg.eigh((small + small.T) / 2)
    return values[_SPARE:], matmul(basis, rotation)[:, _SPARE:]


def _largest_curvature(products, metric: Metric, flat: jax.Array, count: int) -> jax.Array:
    """Return the largest curvature of a few batches in the metric."""
    probes = min(_PROBES, count)
    chosen = (jnp.arange(probes) * count + count // 2) // probes

    def largest(i):
        def iterate(_, pair):
            x, _ = pair
            y = metric.power(0.5, products(i, metric.power(0.5, x)[None])[0])
            size = jnp.linalg.norm(y)
            return y / jnp.where(size > 0, size, 1), size

        start = jax.random.normal(jax.random.key(1), flat.shape, flat.dtype)
        start = start / jnp.linalg.norm(start)
        return jax.lax.fori_loop(0, _ITERATIONS, iterate, (start, jnp.ones((), flat.dtype)))[1]

    size = jnp.max(jax.lax.map(largest, chosen))
    return jnp.where(size > 0, size, 1)


def unmeasured(problem: Problem, w: Pytree, alpha: Pytree, train: BatchedData) -> Metric:
    """Return an empty metric; the first step renews it. Measuring here would compile twice."""
    products, flat = _products(problem, w, alpha, train)
    return zeros_of_shape(lambda: _estimate_metric(products, flat, alpha, train))


def renewed(
    old: Metric, number: jax.Array, problem: Problem, w: Pytree, alpha: Pytree, train: BatchedData
) -> Metric:
    """Return the metric of step ``number``: a new one at the first step, and at times after it."""

    def looked():
        epoch = number // train.count
        anew = (number % train.count == 0) & (epoch & (epoch + 1) == 0)
        if old.matrix is not None:
            anew = anew | (_largest_move(alpha, old.turned) > _TURNED)
        due = anew | (number % (_EPOCHS * max(_SHORTEST, train.count)) == 0)
        due = due | (_largest_move(alpha, old.moved) > _MOVED)

        def measured():
            products, flat = _products(problem, w, alpha, train)
            metric = jax.lax.cond(
                anew, lambda: _estimate_metric(products, flat, alpha, train), lambda: old
            )
            length = _FRACTION / _largest_curvature(products, metric, flat, train.count)
            return metric._replace(length=length, moved=alpha)

        return jax.lax.cond(due, measured, lambda: old)

    look = (number % _LOOKED == 0) | (number % train.count == 0)
    return jax.lax.cond(look, looked, lambda: old)


def _step_in_metric(pair, along, metric, number, *problem_and_point, shorter) -> tuple:
    metric = renewed(metric, number, *problem_and_point)
    directions = jnp.stack([ravel_pytree(d)[0] for d in along])
    steps = shorter * metric.length * metric(directions)
    unravel = ravel_pytree(pair[0])[1]

    def moved(x, step):
        move = unravel(step.astype(directions.dtype))
        return jax.tree.map(lambda a, b: (a - b).astype(a.dtype), x, move)

    return tuple(map(moved, pair, steps)), metric
