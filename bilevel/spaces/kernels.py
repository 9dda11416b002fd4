"""Activation search at infinite width: kernel ridge regression (Oymak et al. 2021, section 4.2).

Trained from its initial weights by gradient descent on the squared loss, a network of infinite
width is kernel regression with its tangent kernel, which is quadratic in the mixture:

    f(x) = sum_m K_alpha(x, x_m) w_m,    K_alpha = sum_ij alpha_i alpha_j K_ij
    w = argmin 1/2 w'(K_alpha + lambda I) w - w'y = (K_alpha + lambda I)^-1 y

==========  ==========================================================================
paper       here
==========  ==========================================================================
alpha       ``alpha["mixture"]``, on the simplex
lambda      ``exp(alpha["log_penalty"])``, learned too; 0 would be training to the end
K_ij        ``blocks[i, j]`` from :func:`ntk.mixture_blocks`, computed once
w           dual coefficients, one per training row: the lower problem's weights
==========  ==========================================================================

The lower loss is the dual of ridge regression: better conditioned than the primal one, and minus
``y'(K_alpha + lambda I)^-1 y / 2`` at its minimum, the papers' generalization term.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import ntk
from bilevel.problem import Problem
from bilevel.protocols import LowerSolver
from bilevel.spaces.space import Space
from bilevel.spaces.targets import mixture_and_penalty


@dataclasses.dataclass(frozen=True)
class KernelSpace(Space):
    """Activation search at infinite width; ``activation_space(..., width=math.inf)`` makes it.

    ``alpha`` is {"mixture": [h], "log_penalty"}, at first uniform and log 0.1; ``w`` is like the
    training targets, at first 0. Batches are ``(blocks, y)``: outputs ``f`` [m] for two classes,
    [m, classes] for more, and y like ``f`` with entries +-1. An architecture is an activation's
    name; its corner has the penalty of the start.

    Attributes
    ----------
    blocks : ``blocks(x) -> [h, h, n, n]`` for training, ``blocks(x_valid, x) -> [h, h, m, n]`` for
        predictions; h^2 numbers per pair of rows. With ``error=True``, their error bounds too.
    solver : LowerSolver, the closed form: one Cholesky factorisation, n^3 / 3.
    """

    blocks: Callable[..., jax.Array]
    solver: LowerSolver


def kernel_space(
    names: Sequence[str],
    activations: Sequence[Callable[[Any], jax.Array]],
    margin_loss: Callable[[jax.Array], jax.Array],
    predict: Callable[[jax.Array], jax.Array],
    scale: float,
) -> KernelSpace:
    """The parts of :class:`KernelSpace`.

    Examples
    --------
    >>> space = kernel_space(["relu"], [ntk.relu], lambda margin: (1 - margin) ** 2, jnp.sign, 1.0)
    >>> batch = space.blocks(jnp.eye(2)), jnp.array([1.0, -1.0])  # K = I / 2
    >>> alpha, w = space.start(), space.init(jax.random.key(0), batch)
    >>> space.solver.run(space.problem.lower, alpha, w, (), batch)[0].round(4)  # y / (1/2 + 1/10)
    Array([ 1.6667, -1.6667], dtype=float...)
    """
    functions = tuple(ntk.activation(s) for s in activations)

    def blocks(x, columns=None, *, error=False):
        return ntk.mixture_blocks(x, functions, x2=columns, scale=scale, error=error)

    def init(key, batch):
        return jnp.zeros_like(batch[1])

    def apply(w, alpha, blocks):
        return ntk.mixture_kernel(alpha["mixture"], blocks) @ w

    def lower(w, alpha, batch):
        blocks, y = batch
        image = apply(w, alpha, blocks) + jnp.exp(alpha["log_penalty"]) * w
        return jnp.vdot(w, 0.5 * image - y)

    def outer(w, alpha, batch):
        blocks, y = batch
        return jnp.mean(margin_loss(y * apply(w, alpha, blocks)))

    def run(lower, alpha, w, state, batch):
        blocks, y = batch
        kernel = ntk.mixture_kernel(alpha["mixture"], blocks)
        matrix = kernel + jnp.exp(alpha["log_penalty"]) * jnp.eye(len(y), dtype=y.dtype)
        return jax.scipy.linalg.solve(matrix, y, assume_a="pos"), state

    solver = LowerSolver(init=lambda w: (), run=run, closed_form=True)
    return KernelSpace(
        names=tuple(names),
        **mixture_and_penalty(names),
        init=init,
        apply=apply,
        problem=Problem(lower, outer),
        predict=predict,
        blocks=blocks,
        solver=solver,
    )
