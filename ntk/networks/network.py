"""The description of a network: its layers, and the methods for its kernel and finite network."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import chex
import jax
import jax.numpy as jnp

from ntk.internal.checks import describe, integer
from ntk.kernels.record import Kernels

if TYPE_CHECKING:
    import flax.linen as nn

    from ntk.networks.contracts import Layer


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """Layers one after another; the result of every combinator.

    Attributes
    ----------
    layers : tuple of :class:`ntk.networks.contracts.Layer`

    Examples
    --------
    >>> import ntk
    >>> from ntk import networks as nets
    >>> net = nets.serial(
    ...     nets.conv(3), nets.act([ntk.relu, ntk.identity], "first"), nets.flatten(), nets.dense()
    ... )
    >>> series = jax.random.normal(jax.random.key(0), (2, 4, 1))  # two series of length 4
    >>> kernel = jax.jit(lambda x: net.kernel(x, alpha=net.start()).ntk)
    >>> kernel(series).shape, net.names
    ((2, 2), {'first': ('relu', 'identity')})
    """

    layers: tuple["Layer", ...]

    def kernel(
        self,
        x1: chex.Array,
        x2: chex.Array | None = None,
        *,
        alpha: Mapping[str, Any] | None = None,
    ) -> Kernels:
        """Compute the exact NNGP and NTK at infinite width, by :mod:`ntk.networks.position_pairs`.

        They are the kernels of each output; outputs are independent of each other.

        Parameters
        ----------
        x1 : array [n1, d], [n1, length, channels] or [n1, height, width, channels]
        x2 : array [n2, ...], optional
            Default: ``x1``; then the kernels are symmetric (exactly, unless traced).
        alpha : dict, optional
            Values of the names in the network: a vector for a choice, a number for a weight.

        Raises
        ------
        ValueError
            If layers do not fit the inputs or each other, ``alpha`` lacks a name, or inputs are not
            finite. Traced inputs are not checked.
        FloatingPointError
            If an entry's error may be over 1e-6 of the diagonal (2 % in float32): nearly collinear
            patches into smooth activations at a variance far over 25, or features that cancel in
            pooling. If anything is traced, such entries are NaN, with an infinite error.

        Notes
        -----
        Differentiable in ``alpha``, variances and inputs. Compiled once for every structure and
        size, with one program of the pairs for all ReLU-like activations, and one for all smooth
        ones except erf and GELU, which have closed forms.

        Time: an image with P positions has P^2 pairs of positions before pooling, and P without
        pooling. Each costs about 100 flops for a ReLU-like layer, and up to 2 K multiply-adds for a
        smooth one (K if it is odd or even). The number of terms K grows with the largest
        correlation: at most 1024, or 4096 for standard deviations over about 4. A smooth layer is
        tabulated once. A layer with kinks away from 0, or with standard deviations over 16, takes
        1200 K multiply-adds for each position of each input.

        Memory: the three results, a block of inputs, and a tile of pairs. A block is about 2^26
        numbers, or one input: 20 P for each layer and input (2 K P without a table), and three
        copies of the data's patches. If traced, all inputs are one block, with P^2 numbers each
        before pooling. A tile has about six arrays of 2^18 pairs of positions (2^16 on a CPU
        without pooling), or of the P^2 of two images. It has K numbers for each position: at most
        512 positions per side, or those of an image.

        Near-duplicates keep the relative accuracy of their angle through weights, biases, ReLU-like
        activations and sums of branches. Pooling, smooth activations and sums of two parts with
        means (as in Zhu et al. 2022) lose angles under 1e-8 (3e-4 in float32). This matters only at
        a later kink, and the error includes it.

        Examples
        --------
        >>> import ntk
        >>> from ntk import networks as nets
        >>> net = nets.serial(nets.dense(2.0), nets.act(ntk.relu), nets.dense())
        >>> net.kernel(jnp.eye(2)).ntk.round(4)
        Array([[1.    , 0.1592],
               [0.1592, 1.    ]], dtype=float...)
        """
        from ntk.networks.infinite_kernel import exact_kernels

        return exact_kernels(self, x1, x2, alpha)

    def module(self, *, width: int, outputs: int = 1) -> "nn.Module":
        """Return the finite network of the same parametrization, in flax.

        Its weights are standard normal; the network has the factors. The mean of its tangent kernel
        for each output tends to that of :meth:`kernel` like 1 / width, a single one like
        1 / sqrt(width).

        Parameters
        ----------
        width : int
            Features of every layer with weights except the last.
        outputs : int

        Returns
        -------
        flax.linen.Module
            ``init(key, x)`` and ``apply(params, x)``; with names, ``alpha`` follows x.

        Raises
        ------
        ValueError
            If a number is not positive; when it is applied, if layers do not fit the inputs or each
            other, ``alpha`` lacks a name, or the outputs come from ``add``.

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
        from ntk.networks.flax_module import Module

        return Module(self, integer("width", width, 1), integer("outputs", outputs, 1))

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the keys of ``alpha``, each with the names of its choices; () for a weight."""
        return {name: choices or () for name, choices in _alpha_entries(self).items()}

    def start(self) -> dict[str, jax.Array]:
        """Return the uniform ``alpha``: 1 / h for each of h choices, 1 for a single weight.

        It is a dict of arrays by ``names``, the start of a search: its vectors weigh choices.

        Examples
        --------
        >>> from ntk import networks as nets
        >>> nets.add([nets.conv(1), nets.conv(3)], "size").start()
        {'size': Array([0.5, 0.5], dtype=float...)}
        """
        counts = {name: len(choices) for name, choices in self.names.items()}
        return {name: jnp.full(h or (), 1 / (h or 1), dtype=float) for name, h in counts.items()}


def _alpha_entries(network: Network) -> dict[str, tuple[str, ...] | None]:
    """Return the names in ``alpha``, in order, with the names of their choices or None."""
    entries: dict[str, tuple[str, ...] | None] = {}

    def enter(value, choices=None):
        if isinstance(value, str):
            if len(entries.setdefault(value, choices) or ()) != len(choices or ()):
                raise ValueError(f"weights: expected one number of choices for the name {value!r}.")
        elif isinstance(value, tuple):
            for one in value:
                enter(one)

    for layer in network.layers:
        for value, choices in layer.entries():
            enter(value, choices)
    return entries


def serial(*networks: Network) -> Network:
    """Put networks one after another.

    Parameters
    ----------
    *networks : Network

    Raises
    ------
    ValueError
        If an argument is not a network.

    Examples
    --------
    >>> from ntk import networks as nets
    >>> len(serial(nets.conv(3), serial(nets.flatten(), nets.dense())).layers)
    3
    """
    return Network(functools.reduce(operator.add, (check_network(n).layers for n in networks), ()))


def check_network(value: Any) -> Network:
    """Return the value if it is a network, else raise ``ValueError``."""
    if not isinstance(value, Network):
        raise ValueError(f"networks: expected a network such as dense(), got {describe(value)}.")
    return value
