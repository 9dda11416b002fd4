"""Terms that make weights, or groups of weights, exactly zero."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevel.constraints import _members as members
from bilevel.contracts import Constraint
from bilevel.internal.checks import sequence

_WEIGHTS = "numbers of at least 0"


def l1(weight: Any = 1.0) -> Constraint:
    """Add ``sum_j weight_j |w_j|`` to the lower loss.

    Parameters
    ----------
    weight : float, tree like ``w``, or function of alpha
        Nonnegative; 0 for weights without this penalty, such as an intercept.
    """
    members.check_at_once("weight", weight, lambda x: x >= 0, _WEIGHTS)

    def identify(w, g, eta, weight):
        up, down = w > eta * (g + weight), w < eta * (g - weight)
        # Without a penalty a weight is free, and has the sign that it takes.
        free = (weight == 0) & ~(up | down)
        return jnp.where(up | free, 1, jnp.where(down, -1, 0)).astype(jnp.int8)

    def pull(signs, weight):
        return signs.astype(weight.dtype) * weight

    def margins(signs, w, g, weight):
        slack = jnp.where(signs != 0, pull(signs, w), weight - jnp.abs(g))
        return jnp.where(weight == 0, jnp.inf, slack)

    return members.on_vector(
        parameters=lambda w, alpha: (members.per_weight("weight", weight, w, alpha),),
        blank=lambda size: jnp.zeros(size, jnp.int8),
        identify=identify,
        prox=lambda signs, z, eta, weight: jnp.where(signs != 0, z - eta * pull(signs, weight), 0),
        step=lambda signs, w, g, eta, weight: jnp.where(
            signs != 0, -eta * (g + pull(signs, weight)), -w
        ),
        tangent=lambda signs, w, v, weight: jnp.where(signs != 0, v, 0),
        margins=margins,
        check=lambda weight: members.require_nonnegative("weight", weight),
    )


def elastic_net(weight: Any = 1.0, ridge: Any = 1.0) -> Constraint:
    """Add ``sum_j weight_j |w_j| + ridge_j w_j^2 / 2`` to the lower loss.

    Parameters
    ----------
    weight, ridge : float, tree like ``w``, or function of alpha
        Nonnegative.
    """
    members.check_at_once("ridge", ridge, lambda x: x >= 0, _WEIGHTS)
    sparse = l1(weight)

    def check(w, alpha):
        size = members.per_weight("ridge", ridge, w, alpha)
        return sparse.check(w, alpha) & members.require_nonnegative("ridge", size)

    def smooth(w, alpha):
        flat = jax.flatten_util.ravel_pytree(w)[0]
        return 0.5 * jnp.sum(members.per_weight("ridge", ridge, w, alpha) * flat**2)

    return sparse._replace(check=check, smooth=smooth)


def group_l1(weight: Any, groups: Sequence[Sequence[int]]) -> Constraint:
    """Add ``sum_g weight_g |w_g|_2`` over groups of weights to the lower loss.

    Parameters
    ----------
    weight : float, array [groups], or function of alpha
        Nonnegative.
    groups : sequence of sequences of int
        Disjoint groups of indices in the order of ``ravel_pytree``. Weights without a group have no
        penalty.
    """
    members.check_at_once("weight", weight, lambda x: x >= 0, _WEIGHTS)
    arrays = [np.asarray(sequence("groups", g), int) for g in sequence("groups", groups)]
    indices = np.concatenate([np.zeros(0, int), *arrays])
    if not arrays or any(len(g) == 0 for g in arrays):
        raise ValueError(f"groups: expected groups with indices, got {groups}.")
    if len(np.unique(indices)) < len(indices) or indices.min() < 0:
        raise ValueError(f"groups: expected disjoint groups of indices from 0, got {groups}.")
    count = len(arrays)

    def parameters(w, alpha):
        size = optax.tree.size(w)
        if indices.max() >= size:
            raise ValueError(f"groups: expected indices below {size}, got {indices.max()}.")
        of = np.full(size, count)  # the last group has no penalty
        for number, group in enumerate(arrays):
            of[group] = number
        value = members.value_at(weight, alpha)
        if jnp.shape(value) not in ((), (count,)):
            raise ValueError(
                f"weight: expected one number per group, {count}, got shape {jnp.shape(value)}."
            )
        dtype = jnp.result_type(*jax.tree.leaves(w))
        sizes = jnp.broadcast_to(jnp.asarray(value, dtype), (count,))
        return jnp.concatenate([sizes, jnp.zeros(1, dtype)]), jnp.asarray(of)

    def sums(x, of):
        return jax.ops.segment_sum(x, of, count + 1)

    def norms(active, x, of):
        """Return the norms of active groups, and 1 for all others."""
        square = sums(x**2, of)
        return jnp.sqrt(jnp.where(active & (square > 0), square, 1))

    def identify(w, g, eta, weight, of):
        z = w - eta * g
        still = sums(w**2, of) == 0  # then eta cancels, and the slope alone decides
        slope, size = jnp.sqrt(sums(g**2, of)), jnp.sqrt(sums(z**2, of))
        active = jnp.where(still, slope > weight, size > eta * weight)
        return active | (jnp.arange(count + 1) == count) | (weight == 0)

    def prox(active, z, eta, weight, of):
        shrink = jnp.where(active, 1 - eta * weight / norms(active, z, of), 0)
        return shrink[of] * z

    def step(active, w, g, eta, weight, of):
        z = w - eta * g
        pull = (weight / norms(active, z, of))[of] * z
        return jnp.where(active[of], -eta * (g + pull), -w)

    def curvature(active, w, g, v, weight, of):
        size = norms(active, w, of)
        unit = jnp.where(active[of], w / size[of], 0)
        across = jnp.where(active[of], v - unit * sums(unit * v, of)[of], 0)
        return (weight / size)[of] * across

    def margins(active, w, g, weight, of):
        size, slope = jnp.sqrt(sums(w**2, of)), jnp.sqrt(sums(g**2, of))
        return jnp.where(weight == 0, jnp.inf, jnp.where(active, size, weight - slope))

    return members.on_vector(
        parameters=parameters,
        blank=lambda size: jnp.zeros(count + 1, bool),
        identify=identify,
        prox=prox,
        step=step,
        tangent=lambda active, w, v, weight, of: jnp.where(active[of], v, 0),
        curvature=curvature,
        margins=margins,
        check=lambda weight, of: members.require_nonnegative("weight", weight),
    )
