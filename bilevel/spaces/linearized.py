"""Linearised deep features: a network's gradient at its initial weights (Oymak 2021).

    phi_alpha(x) = d f(w; alpha, x) / dw,    f_lin(x) = theta' phi_alpha(x),
    theta = argmin 1/2 sum_i (y_i - f_lin(x_i))^2 + lambda/2 |theta|^2

This is the proxy for wide networks of any depth in section 5 of the extended version. It is solved
in its dual, with the finite network's tangent kernel ``K_alpha = sum over parameters phi phi'``.
"""

import jax
import jax.numpy as jnp
import numpy as np

import ntk
from bilevel.contracts import Pytree
from bilevel.internal.checks import concrete
from bilevel.spaces.kernels import KernelFunctionSpace, kernel_search
from bilevel.spaces.space import Space


def linearized_space(space: Space, w: Pytree, *, outer: str = "squared") -> KernelFunctionSpace:
    """Make a space of the linearised features of a space's networks at weights ``w``.

    ``alpha`` is {"kernel": like the space's own, "log_penalty"}; names, sets, vertices and
    architectures are the space's.

    Parameters
    ----------
    space : Space
        Any depth. If ``apply(w, alpha, x)`` returns [n, c] instead of [n], the kernel is the mean
        over the outputs; in the limit of infinite width all outputs have it.
    w : pytree
        Point of linearisation: ``space.init(key, batch)``.
    outer : {"hinge", "logistic", "squared"}
        The validation loss.

    Raises
    ------
    TypeError, ValueError
        If ``space`` is not a Space, or ``outer`` is unknown. ``inputs`` raises it if an output
        depends on other rows of its batch (batch statistics).

    Notes
    -----
    Time of a step: n gradients and ``n^2`` times the weights; memory: n copies of the weights.

    Examples
    --------
    >>> import bilevel
    >>> import jax.numpy as jnp
    >>> from bilevel.spaces.skips import skip_space
    >>> x, y = jnp.eye(3), jnp.array([1.0, -1.0, 1.0])
    >>> deep = skip_space(["relu", "tanh"], depth=3, width=4)
    >>> space = linearized_space(deep, jax.jit(deep.init)(jax.random.key(1), (x, y)))
    >>> train = space.inputs(x), y
    >>> w = space.init(jax.random.key(2), train)
    >>> jax.jit(space.apply)(w, space.start(), train[0]).shape
    (3,)
    """
    if not isinstance(space, Space):
        raise TypeError(f"space: expected a bilevel.spaces.Space, got a {type(space).__name__}.")

    def kernel(alpha, x1, x2=None):
        def apply(w, x):
            f = space.apply(w, alpha, x)
            return f[:, None] if f.ndim == 1 else f

        outputs = jax.eval_shape(apply, w, x1).shape[1]
        return ntk.empirical_kernel(apply, w, x1, x2, outputs="trace") / outputs

    def inputs(x, columns=None):
        x, columns = jnp.asarray(x), None if columns is None else jnp.asarray(columns)
        if concrete(x, w) and len(x) > 1:
            pair, alone = (space.apply(w, space.start(), part) for part in (x[:2], x[:1]))
            if not np.allclose(pair[:1], alone, rtol=1e-2, atol=1e-3 * np.abs(pair).max()):
                raise ValueError(
                    "space: expected networks that see every row by itself, got outputs that "
                    "depend on the other rows of a batch, as with batch statistics."
                )
        return x, columns

    return kernel_search(space, kernel, outer, KernelFunctionSpace, inputs=inputs)
