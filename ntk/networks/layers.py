"""The combinators: a network is described once, as a record of its layers.

=========================  =======================================================================
combinator                 what it does to features f, of width C
=========================  =======================================================================
``dense``, ``conv``        ``sqrt(c_w / fan_in) W f + sqrt(c_b) b``, W and b standard normal
``act``                    ``sum_i w_i s_i(f)``, elementwise
``average_pool``           mean over each window;  ``global_average_pool``: over all positions
``flatten``                all positions into one vector, for ``dense``
``serial``                 one after another; the identity if there is none
``add``                    ``sum_k w_k branch_k(f)``, each branch with weights of its own
``residual``               ``branch(f) + skip shortcut(f)``, an ``add`` of two
=========================  =======================================================================

``fan_in`` is C times the size of the window. **Where a weight stands, a name may**: then it is an
entry of ``alpha``, which the kernel and the finite network take; equal names share their value.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ntk.expectations.activations import in_a_network
from ntk.internal.checks import describe, integer, sequence
from ntk.networks.network import Network
from ntk.networks.records import Add, AveragePool, Elementwise, Flatten, Weights

Window = int | Sequence[int]

_PADDINGS = ("SAME", "VALID", "CIRCULAR")


def dense(weight_variance: Any = 1.0, bias_variance: Any = 0.0) -> Network:
    """A fully connected layer, ``sqrt(c_w / fan_in) W f + sqrt(c_b) b``.

    Parameters
    ----------
    weight_variance, bias_variance : nonnegative number or name
        c_w and c_b.

    Returns
    -------
    Network

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> dense(2.0).kernel(jnp.ones((1, 3))).nngp
    Array([[2.]], dtype=float...)
    """
    return _weights_layer(None, 1, "VALID", weight_variance, bias_variance)


def conv(
    window: Window,
    weight_variance: Any = 1.0,
    bias_variance: Any = 0.0,
    *,
    strides: Window = 1,
    padding: str = "SAME",
) -> Network:
    """A convolution, ``sqrt(c_w / fan_in) W * f + sqrt(c_b) b``, on sequences or images.

    Parameters
    ----------
    window : int, or one for each axis
    weight_variance, bias_variance : nonnegative number or name
        c_w and c_b.
    strides : int, or one for each axis
    padding : "SAME", "VALID" or "CIRCULAR"
        Outside the image: zeros (as many positions come out as go in, over the strides), nothing,
        or the image again.

    Returns
    -------
    Network

    Raises
    ------
    ValueError
        For another padding, or a window or strides that are no positive whole numbers.

    Examples
    --------
    >>> conv(3).layers[0].padding
    'SAME'
    """
    window = _check_window("window", window)
    return _weights_layer(
        window, _check_window("strides", strides), padding, weight_variance, bias_variance
    )


def act(activations: Any, weights: Any = None) -> Network:
    """An activation, or a weighted sum of them.

    Parameters
    ----------
    activations : activation, smooth function, ``{activation: weight}``, or list of activations
    weights : str or sequence of numbers and names, optional
        Of a list. One name stands for them all, a vector in ``alpha``: a choice.

    Returns
    -------
    Network

    Raises
    ------
    ValueError
        For no activation at all, or another number of weights.

    Examples
    --------
    >>> import ntk
    >>> act({ntk.relu: 0.3, ntk.tanh: "b"}).names
    {'b': ()}
    """
    if isinstance(activations, Mapping):
        activations, weights = list(activations), list(activations.values())
    elif callable(activations):
        activations, weights = [activations], [1.0]
    activations = tuple(map(in_a_network, sequence("activations", activations, "activations")))
    if not activations:
        raise ValueError("activations: expected at least one, got none.")
    return Network((Elementwise(activations, _choice(weights, len(activations))),))


def average_pool(window: Window, *, strides: Window | None = None) -> Network:
    """The mean over each window; what is left over at the end is dropped.

    Parameters
    ----------
    window : int, or one for each axis
    strides : int, or one for each axis, optional
        The window by default.

    Returns
    -------
    Network

    Examples
    --------
    >>> average_pool(2).layers[0].strides
    2
    """
    window = _check_window("window", window)
    return Network(
        (AveragePool(window, window if strides is None else _check_window("strides", strides)),)
    )


def global_average_pool() -> Network:
    """The mean over all positions.

    Returns
    -------
    Network

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> serial(conv(1), global_average_pool()).kernel(jnp.ones((1, 5, 2))).nngp
    Array([[1.]], dtype=float...)
    """
    return Network((AveragePool(None, 1),))


def flatten() -> Network:
    """All positions into one vector, for a ``dense`` that follows.

    Returns
    -------
    Network

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> serial(flatten(), dense()).kernel(jnp.ones((1, 5, 2))).nngp
    Array([[1.]], dtype=float...)
    """
    return Network((Flatten(),))


def serial(*networks: Network) -> Network:
    """One network after another.

    Parameters
    ----------
    *networks : Network

    Returns
    -------
    Network

    Raises
    ------
    ValueError
        For what is no network.

    Examples
    --------
    >>> len(serial(conv(3), serial(flatten(), dense())).layers)
    3
    """
    return Network(functools.reduce(operator.add, (_check_network(n).layers for n in networks), ()))


def add(branches: Sequence[Network], weights: Any = None) -> Network:
    """``sum_k w_k branch_k(f)``: a mixture of networks, each with random weights of its own.

    All but one of the branches have to have a layer with weights.

    Parameters
    ----------
    branches : sequence of networks
    weights : str or sequence of numbers and names, optional
        One name stands for them all, a vector in ``alpha``: a choice. 1 by default.

    Returns
    -------
    Network

    Raises
    ------
    ValueError
        For no branch, what is no network, or another number of weights.

    Examples
    --------
    >>> add([conv(1), conv(3)], "size").names
    {'size': ('0', '1')}
    """
    branches = tuple(map(_check_network, sequence("branches", branches, "networks")))
    if not branches:
        raise ValueError("branches: expected at least one network, got none.")
    return Network((Add(branches, _choice(weights, len(branches))),))


def residual(branch: Network, *, skip: Any = 1.0, shortcut: Network | None = None) -> Network:
    """``branch(f) + skip shortcut(f)``.

    Parameters
    ----------
    branch : Network
    skip : number or name
    shortcut : Network, optional
        The identity, ``serial()``, by default; a convolution where the branch changes the size.

    Returns
    -------
    Network

    Examples
    --------
    >>> residual(conv(3), skip="gate").names
    {'gate': ()}
    """
    return add([branch, serial() if shortcut is None else shortcut], [1.0, skip])


# ----------------------------------------------------------------------------- checks


def _check_network(value: Any) -> Network:
    if not isinstance(value, Network):
        raise ValueError(f"networks: expected what a combinator returns, got {describe(value)}.")
    return value


def _weights_layer(window, strides, padding, weight_variance, bias_variance) -> Network:
    if padding not in _PADDINGS:
        raise ValueError(f"padding: expected one of {', '.join(_PADDINGS)}, got {padding!r}.")
    for name, value in (("weight_variance", weight_variance), ("bias_variance", bias_variance)):
        if isinstance(value, str | jax.core.Tracer):
            continue
        number = np.asarray(value)
        if number.shape or number.dtype.kind not in "iuf" or not 0 <= number < np.inf:
            raise ValueError(f"{name}: expected a nonnegative number or a name, got {value!r}.")
    return Network((Weights(window, strides, padding, weight_variance, bias_variance),))


def _check_window(name: str, value: Any) -> int | tuple[int, ...]:
    if isinstance(value, list | tuple):
        return tuple(integer(name, v, 1) for v in value)
    return integer(name, value, 1)


def _choice(weights: Any, count: int) -> tuple[Any, ...] | str:
    if isinstance(weights, str):
        return weights
    weights = tuple([1.0] * count if weights is None else weights)
    if len(weights) != count:
        raise ValueError(f"weights: expected {count} of them, got {len(weights)}.")
    return weights
