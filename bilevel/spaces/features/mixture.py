"""Feature-map search by continuous relaxation (Oymak et al. 2021, Definition 2).

Ridge regression on a superposition of feature maps, all of one dimension p:

    phi_alpha(x) = sum_i alpha_i phi_i(x),    f(x) = w' phi_alpha(x)
    w = argmin 1/2 |Phi_alpha w - y|^2 + 1/2 lambda |w|^2

The paper's alpha_1..h are ``alpha["mixture"]``, on the simplex. Its alpha_{h+1} is lambda =
``exp(alpha["log_penalty"])``, learned too; minus infinity is ridgeless. Classification is
regression to one-vs-rest labels +-1, :func:`bilevel.spaces.targets.sign_labels`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from bilevel.contracts import LowerSolver
from bilevel.internal.checks import as_floating, one_of, sequence
from bilevel.problem.problem import Problem
from bilevel.solvers import ridge
from bilevel.spaces import targets
from bilevel.spaces.space import Space, distinct, name_of


@dataclasses.dataclass(frozen=True)
class FeatureSpace(Space):
    """A search space of feature maps; see :func:`feature_space`.

    ``alpha`` is {"mixture": [h], "log_penalty"}, at first uniform and log 0.1; ``w`` is [p], or [p,
    classes], at first 0. Batches are ``(blocks, y)``, outputs like y: [n], or [n, classes]. An
    architecture is a map's name; its vertex has the penalty of the start.

    ``blocks(x) -> [h, n, p]`` has every map of every row. ``solver`` is :func:`bilevel.ridge`, one
    Cholesky factorisation, min(n, p)^3 / 3; :func:`bilevel.implicit` fits ``problem`` as well.
    """

    blocks: Callable[[jax.Array], jax.Array]
    solver: LowerSolver


def feature_space(
    maps: Sequence[Callable[[jax.Array], jax.Array]],
    *,
    names: Sequence[str] | None = None,
    outer: str = "squared",
) -> FeatureSpace:
    """Make a space of ridge regression on ``sum_i alpha_i phi_i(x)`` with a learned penalty.

    Parameters
    ----------
    maps : sequence of functions ``x -> [n, p]``
        The feature maps, with one p in common.
    names : sequence of str, optional
        Default: the functions' own.
    outer : {"squared", "hinge", "logistic"}
        The validation loss, mean over the targets: ``(f - y)^2`` of any real targets, or a loss of
        the margin ``y f``, y = +-1.

    Raises
    ------
    ValueError
        If there is no map, the number of names differs, or the loss is unknown. ``blocks`` raises
        it for maps with features other than matrices of one shape.

    Notes
    -----
    Memory: h n p values for the blocks, n p for their mixture. Time of a hypergradient: h n p for
    the mixture and min(n, p)^2 max(n, p) for the solve. The paper's loss is twice the lower loss
    here, with the same minimiser and lambda.

    Examples
    --------
    The search selects the useful one of two maps and learns the penalty:

    >>> import bilevel, optax
    >>> space = feature_space([jnp.cos, jnp.sin], names=["even", "odd"])
    >>> x = jnp.linspace(-1, 1, 20)[:, None]
    >>> train = valid = space.blocks(x), x[:, 0]
    >>> adam = optax.adam(0.3)
    >>> geometry = {"mixture": optax.chain(adam, bilevel.exponentiate()), "log_penalty": adam}
    >>> optimizer = optax.partition(geometry, {name: name for name in geometry})
    >>> start = space.start(), space.init(jax.random.key(0), train)
    >>> result = bilevel.search(
    ...     space.problem, space.solver, optimizer, *start, train, valid, steps=10
    ... )
    >>> bool(result.alpha["mixture"][1] > 0.9)
    True
    """
    maps = sequence("maps", maps, "a sequence of functions")
    if not maps:
        raise ValueError("maps: expected at least one feature map, got none.")
    names = distinct([name_of(phi) for phi in maps]) if names is None else tuple(names)
    if len(names) != len(maps):
        raise ValueError(f"names: expected {len(maps)}, one per map, got {len(names)}.")
    one_of("outer", outer, targets.OUTER_LOSSES)

    def blocks(x):
        features = [phi(x) for phi in maps]
        shapes = [f.shape for f in features]
        if len(set(shapes)) > 1 or len(shapes[0]) != 2:
            raise ValueError(f"maps: expected matrices of one shape [n, p], got shapes {shapes}.")
        return as_floating("maps", jnp.stack(features))

    def init(key, batch):
        blocks, y = batch
        return jnp.zeros((blocks.shape[-1], *y.shape[1:]), blocks.dtype)

    def features(alpha, blocks):
        return jnp.tensordot(alpha["mixture"], blocks, 1)

    def penalty(alpha):
        return jnp.exp(alpha["log_penalty"])

    def apply(w, alpha, blocks):
        return features(alpha, blocks) @ w

    def lower(w, alpha, batch):
        blocks, y = batch
        f = apply(w, alpha, blocks)
        error = f - targets.like_outputs(f, y)
        return 0.5 * (jnp.vdot(error, error) + penalty(alpha) * jnp.vdot(w, w))

    return FeatureSpace(
        names=names,
        **targets.mixture_and_penalty(names),
        init=init,
        apply=apply,
        problem=Problem(lower, targets.validation_loss(apply, outer)),
        predict=targets.predict_labels,
        blocks=blocks,
        solver=ridge(features, penalty),
    )
