"""The combinators: a network is described once, as a record of its layers.

=========================  =======================================================================
combinator                 what it does to features f, of width C
=========================  =======================================================================
``dense``, ``conv``        ``sqrt(c_w / fan_in) W f + sqrt(c_b) b``, W and b standard normal
``act``                    ``sum_i w_i s_i(f)``, elementwise
``average_pool``           mean over each window;  ``global_average_pool``: over all positions
``flatten``                all positions into one vector, for ``dense``
``serial``                 one after another
``add``                    ``sum_k w_k branch_k(f)``, each branch with weights of its own
``residual``               ``branch(f) + skip shortcut(f)``, an ``add`` of two
``identity``               f
=========================  =======================================================================

``fan_in`` is C times the size of the window. **Where a weight stands, a name may**: then it is an
entry of ``alpha``, which the kernel and the finite network take; equal names share their value.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk._checks import sequence, short, whole
from ntk.activations import Activation, activation
from ntk.kernels import Kernels

if TYPE_CHECKING:
    import flax.linen as nn

Window = int | Sequence[int]

_PADDINGS = ("SAME", "VALID", "CIRCULAR")


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """``dense`` and ``conv``; for ``dense`` the window is None."""

    window: int | tuple[int, ...] | None
    strides: int | tuple[int, ...]
    padding: str
    weight_variance: Any
    bias_variance: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Elementwise:
    """``act``: activations, and their weights (numbers or names) or the name of them all."""

    activations: tuple[Activation, ...]
    weights: tuple[Any, ...] | str


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """``average_pool``; the window is None for all positions."""

    window: int | tuple[int, ...] | None
    strides: int | tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Flatten:
    """``flatten``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Add:
    """``add``: branches, and their weights as those of :class:`Elementwise`."""

    branches: tuple["Network", ...]
    weights: tuple[Any, ...] | str


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """Layers one after another; what every combinator returns.

    Attributes
    ----------
    layers : tuple
        Records of this module.

    Examples
    --------
    >>> import ntk
    >>> from ntk import networks as nets
    >>> net = nets.serial(
    ...     nets.conv(3), nets.act([ntk.relu, ntk.tanh], "first"), nets.flatten(), nets.dense()
    ... )
    >>> images = jax.random.normal(jax.random.key(0), (2, 4, 4, 3))
    >>> net.kernel(images, alpha=net.start()).ntk.shape
    (2, 2)
    >>> net.names
    {'first': ('relu', 'tanh')}
    """

    layers: tuple[Any, ...]

    def kernel(
        self,
        x1: chex.Array,
        x2: chex.Array | None = None,
        *,
        alpha: Mapping[str, Any] | None = None,
    ) -> Kernels:
        """Exact NNGP and NTK at infinite width; the formulas are in :mod:`ntk.networks.pairs`.

        Parameters
        ----------
        x1 : array [n1, d], [n1, length, channels] or [n1, height, width, channels]
        x2 : array [n2, ...], optional
            ``x1`` by default: then the kernels are symmetric (exactly, unless traced).
        alpha : dict, optional
            What the names in the network stand for: a vector for a choice, a number for a weight.

        Returns
        -------
        Kernels
            Of every output; they are independent of each other.

        Raises
        ------
        ValueError
            For layers that do not fit the inputs or each other, an ``alpha`` that lacks a name, or
            inputs that are not finite, unless they are traced.
        FloatingPointError
            If an entry's error may be over 1e-6 of the diagonal (2 % in float32): nearly collinear
            patches into smooth activations at a variance far over 25, or features that cancel
            where they are pooled. Where anything is traced such entries are NaN, with an infinite
            error.

        Notes
        -----
        Differentiable in ``alpha``, variances and inputs. Compiled once for every structure and
        size: another ReLU-like or another smooth activation takes no other program for the pairs.

        With P positions in an image, before pooling all P^2 pairs of positions are needed, without
        any pooling the P equal ones. A pair of inputs costs that many times some 100 flops for
        each ReLU-like layer, and up to 2 K multiply-adds for a smooth one, with K = 64 terms, 256
        or more as the data ask for. A smooth layer takes 1200 K multiply-adds for each position of
        each input too, once for every block of inputs.

        Memory: the three results; blocks of inputs with 10 P numbers for each layer and input,
        and 2 K P more for a smooth one, which hold some 2^26 numbers at most (of one input at
        least); tiles of 2^20 pairs of positions, or of the P^2 of one pair of images, with about
        six such arrays.

        Near-duplicates keep the relative accuracy of their angle from the data on, through weights,
        biases, ReLU-like activations and sums of branches; after pooling, after a smooth activation
        and after sums of two parts with means (as in Zhu et al. 2022) angles under 1e-8 are lost
        (3e-4 in float32), which a later kink can show: the error says so.

        Examples
        --------
        >>> import ntk
        >>> from ntk import networks as nets
        >>> net = nets.serial(nets.dense(2.0), nets.act(ntk.relu), nets.dense())
        >>> net.kernel(jnp.eye(2)).ntk.round(4)
        Array([[1.    , 0.1592],
               [0.1592, 1.    ]], dtype=float...)
        """
        from ntk.networks.infinite import kernel

        return kernel(self, x1, x2, alpha=alpha)

    def module(self, *, width: int, outputs: int = 1) -> "nn.Module":
        """The finite network of the same parametrization, in flax.

        Its weights are standard normal, the factors in the network: with the width, the mean of its
        tangent kernel for each output tends to that of :meth:`kernel` like 1 / width, and a single
        one like 1 / sqrt(width).

        Parameters
        ----------
        width : int
            Features of every layer with weights but the last.
        outputs : int

        Returns
        -------
        flax.linen.Module
            ``init(key, x)`` and ``apply(params, x)``; ``alpha`` follows x where there are names.

        Raises
        ------
        ValueError
            If a number is not positive; when it is applied, as :meth:`kernel`, or if the outputs
            are those of ``add``.

        Examples
        --------
        >>> import ntk
        >>> from ntk import networks as nets
        >>> net = nets.serial(nets.dense(2.0), nets.act([ntk.relu, ntk.tanh], "a"), nets.dense())
        >>> module = net.module(width=64, outputs=3)
        >>> params = module.init(jax.random.key(0), jnp.ones((5, 2)), net.start())
        >>> module.apply(params, jnp.ones((5, 2)), net.start()).shape
        (5, 3)
        """
        from ntk.networks.finite import module

        return module(self, width=width, outputs=outputs)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """What ``alpha`` holds: names of the choices of each entry, none for a single weight."""
        return {name: choices or () for name, choices in _entries(self).items()}

    def start(self) -> dict[str, jax.Array]:
        """The uniform ``alpha``: 1 / h for each of h choices, 1 for a single weight.

        Returns
        -------
        dict of arrays
            With ``names``, the search space: its vectors weigh choices.

        Examples
        --------
        >>> add([conv(1), conv(3)], "size").start()
        {'size': Array([0.5, 0.5], dtype=float...)}
        """
        return {
            name: jnp.full(len(choices) if choices else (), 1 / (len(choices) or 1), dtype=float)
            for name, choices in self.names.items()
        }


# ----------------------------------------------------------------------------- combinators


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
    >>> dense(2.0).kernel(jnp.ones((1, 3))).nngp
    Array([[2.]], dtype=float...)
    """
    return _weights(None, 1, "VALID", weight_variance, bias_variance)


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
    window, strides : int, or one for each axis
    weight_variance, bias_variance : nonnegative number or name
        c_w and c_b.
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
    window = _window("window", window)
    return _weights(window, _window("strides", strides), padding, weight_variance, bias_variance)


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
    activations = tuple(map(activation, sequence("activations", activations, "activations")))
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
    window = _window("window", window)
    return Network((Pool(window, window if strides is None else _window("strides", strides)),))


def global_average_pool() -> Network:
    """The mean over all positions.

    Returns
    -------
    Network

    Examples
    --------
    >>> serial(conv(1), global_average_pool()).kernel(jnp.ones((1, 5, 2))).nngp
    Array([[1.]], dtype=float...)
    """
    return Network((Pool(None, 1),))


def flatten() -> Network:
    """All positions into one vector, for a ``dense`` that follows.

    Returns
    -------
    Network

    Examples
    --------
    >>> serial(flatten(), dense()).kernel(jnp.ones((1, 5, 2))).nngp
    Array([[1.]], dtype=float...)
    """
    return Network((Flatten(),))


def identity() -> Network:
    """No layer at all: what comes in.

    Returns
    -------
    Network

    Examples
    --------
    >>> identity().layers
    ()
    """
    return Network(())


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
    return Network(functools.reduce(operator.add, (_network(n).layers for n in networks), ()))


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
    branches = tuple(map(_network, sequence("branches", branches, "networks")))
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
        :func:`identity` by default; a convolution where the branch changes the size.

    Returns
    -------
    Network

    Examples
    --------
    >>> residual(conv(3), skip="gate").names
    {'gate': ()}
    """
    return add([branch, identity() if shortcut is None else shortcut], [1.0, skip])


# ----------------------------------------------------------------------------- checks, names


def _network(value: Any) -> Network:
    if not isinstance(value, Network):
        raise ValueError(f"networks: expected what a combinator returns, got {short(value)}.")
    return value


def _weights(window, strides, padding, weight_variance, bias_variance) -> Network:
    if padding not in _PADDINGS:
        raise ValueError(f"padding: expected one of {', '.join(_PADDINGS)}, got {padding!r}.")
    for name, value in (("weight_variance", weight_variance), ("bias_variance", bias_variance)):
        if isinstance(value, str | jax.core.Tracer):
            continue
        number = np.asarray(value)
        if number.shape or number.dtype.kind not in "iuf" or not 0 <= number < np.inf:
            raise ValueError(f"{name}: expected a nonnegative number or a name, got {value!r}.")
    return Network((Weights(window, strides, padding, weight_variance, bias_variance),))


def _window(name: str, value: Any) -> int | tuple[int, ...]:
    if isinstance(value, list | tuple):
        return tuple(whole(name, v, 1) for v in value)
    return whole(name, value, 1)


def _choice(weights: Any, count: int) -> tuple[Any, ...] | str:
    if isinstance(weights, str):
        return weights
    weights = tuple([1.0] * count if weights is None else weights)
    if len(weights) != count:
        raise ValueError(f"weights: expected {count} of them, got {len(weights)}.")
    return weights


def _entries(network: Network) -> dict[str, tuple[str, ...] | None]:
    """Names in ``alpha``, in order, with the names of what is chosen between, or None."""
    found: dict[str, tuple[str, ...] | None] = {}

    def enter(value, choices=None):
        if isinstance(value, str):
            if len(found.setdefault(value, choices) or ()) != len(choices or ()):
                raise ValueError(f"weights: expected one number of choices for the name {value!r}.")
        elif isinstance(value, tuple):
            for one in value:
                enter(one)

    for layer in network.layers:
        match layer:
            case Weights():
                enter((layer.weight_variance, layer.bias_variance))
            case Elementwise():
                enter(layer.weights, tuple(s.name for s in layer.activations))
            case Add():
                enter(layer.weights, tuple(str(k) for k in range(len(layer.branches))))
                for branch in layer.branches:
                    for name, choices in _entries(branch).items():
                        enter(name, choices)
    return found
