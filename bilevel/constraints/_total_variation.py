"""Total variation in one dimension: neighbouring weights become equal."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel.constraints._members import nonnegative_scalar, on_vector
from bilevel.contracts import Constraint
from ntk.internal.sharding import while_loop


def total_variation(weight: Any = 1.0) -> Constraint:
    """Add ``weight * sum_j |w_(j+1) - w_j|`` to the lower loss, ``w`` in order of ``ravel_pytree``.

    Parameters
    ----------
    weight : float, or ``weight(alpha) -> scalar``
        Nonnegative.

    Notes
    -----
    The proximal operator is a direct algorithm (Condat 2013, IEEE Signal Processing Letters 20(11))
    that visits the weights one after another, about 1 us each. It is for thousands of weights. It
    extends a segment as long as one value can serve all of it, and ends it at a jump.
    """

    def segments(jumps):
        return jnp.concatenate([jnp.zeros(1, int), jnp.cumsum(jumps != 0)])

    def mean(jumps, x):
        of = segments(jumps)
        size = jax.ops.segment_sum(jnp.ones(len(x), x.dtype), of, len(x))
        return (jax.ops.segment_sum(x, of, len(x)) / jnp.maximum(size, 1))[of]

    def pull(jumps, like):
        """Return the subgradient of the term: its sum over each segment is that of its ends."""
        signs = jumps.astype(like.dtype)
        zero = jnp.zeros(1, like.dtype)
        return jnp.concatenate([zero, signs]) - jnp.concatenate([signs, zero])

    def prox(jumps, z, eta, weight):
        return mean(jumps, z - eta * weight * pull(jumps, z))

    def step(jumps, w, g, eta, weight):
        along = mean(jumps, g + weight * pull(jumps, w))
        return -eta * along + (mean(jumps, w) - w)

    def identify(w, g, eta, weight):
        point = _denoise(w - eta * g, eta * weight)
        return jnp.sign(jnp.diff(point)).astype(jnp.int8)

    def margins(jumps, w, g, weight):
        # The sum of the slopes before a pair is its dual variable: the weight times the sign of a
        # jump, and anything between in a segment.
        inside = weight - jnp.abs(jnp.cumsum(g)[:-1])
        slack = jnp.where(jumps != 0, jumps.astype(w.dtype) * jnp.diff(w), inside)
        return jnp.where(weight == 0, jnp.inf, slack)

    return on_vector(
        **nonnegative_scalar("weight", weight),
        blank=lambda size: jnp.zeros(size - 1, jnp.int8),
        identify=identify,
        prox=prox,
        step=step,
        tangent=lambda jumps, w, v, weight: mean(jumps, v),
        margins=margins,
    )


class _Scan(NamedTuple):
    """State of Condat's algorithm, in his notation."""

    k: jax.Array  # the weight that is visited
    first: jax.Array  # first weight of the segment
    minus: jax.Array  # last weight at which a negative jump is possible
    plus: jax.Array  # the same for a positive jump
    low: jax.Array  # lower bound of the segment's value
    high: jax.Array
    slack_low: jax.Array  # dual variable if the segment has its lower bound
    slack_high: jax.Array
    values: jax.Array  # [p], the value of a segment at its first weight
    starts: jax.Array  # [p], bool: a segment starts here
    done: jax.Array


def _denoise(y: jax.Array, weight: jax.Array) -> jax.Array:
    """Return ``argmin_x |x - y|^2 / 2 + weight * sum |x_(j+1) - x_j|``."""
    size = len(y)
    if size < 2:
        return y
    last = size - 1

    def visit(s: _Scan) -> _Scan:
        """End the segment at a jump, or extend it by one weight. Selections avoid copies."""
        end = s.k == last
        x = y[jnp.minimum(s.k + 1, last)]
        falls = jnp.where(end, s.slack_low < 0, x + s.slack_low < s.low - weight)
        rises = jnp.where(end, s.slack_high > 0, x + s.slack_high > s.high + weight) & ~falls
        jumps = falls | rises
        closes = jumps | end
        whole = s.low + s.slack_low / (last - s.first + 1).astype(y.dtype)
        value = jnp.where(falls, s.low, jnp.where(rises, s.high, whole))
        place = jnp.where(closes, s.first, size)
        # A jump: the next segment starts after the last weight at which it was possible.
        at = jnp.where(falls, s.minus, s.plus) + 1
        top = y[jnp.minimum(at, last)]
        # No jump: the bounds of the segment's value move so that the dual variable is in range.
        k = s.k + 1
        count = (k - s.first + 1).astype(y.dtype)
        slack_low, slack_high = s.slack_low + x - s.low, s.slack_high + x - s.high
        over, under = slack_low >= weight, slack_high <= -weight

        def pick(falling, falling_at_end, rising, rising_at_end, extended):
            fell = jnp.where(end, falling_at_end, falling)
            rose = jnp.where(end, rising_at_end, rising)
            return jnp.where(falls, fell, jnp.where(rises, rose, extended))

        low = jnp.where(over, s.low + (slack_low - weight) / count, s.low)
        high = jnp.where(under, s.high + (slack_high + weight) / count, s.high)
        slack_low = jnp.where(over, weight, slack_low)
        slack_high = jnp.where(under, -weight, slack_high)
        return _Scan(
            k=jnp.where(jumps, at, k),
            first=jnp.where(jumps, at, s.first),
            minus=pick(at, at, at, s.minus, jnp.where(over, k, s.minus)),
            plus=pick(at, s.plus, at, at, jnp.where(under, k, s.plus)),
            low=pick(top, top, top - 2 * weight, s.low, low),
            high=pick(top + 2 * weight, s.high, top, top, high),
            slack_low=pick(weight, weight, weight, top - weight - s.low, slack_low),
            slack_high=pick(-weight, top + weight - s.high, -weight, -weight, slack_high),
            values=s.values.at[place].set(value, mode="drop"),
            starts=s.starts.at[place].set(True, mode="drop"),
            done=end & ~jumps,
        )

    zero = jnp.zeros((), int)
    start = _Scan(
        zero, zero, zero, zero, y[0] - weight, y[0] + weight, weight, -weight,
        jnp.zeros_like(y), jnp.zeros(size, bool), jnp.array(False),
    )  # fmt: skip
    # NaN compares false, so it never makes a jump, and the loop ends.
    result = while_loop(lambda s: ~s.done & (s.k < size), visit, start)
    of = jax.lax.cummax(jnp.where(result.starts, jnp.arange(size), 0))
    return result.values[of]
