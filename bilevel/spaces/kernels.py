"""Searches of kernels: kernel ridge regression with a learned kernel.

    f(x) = sum_m K_alpha(x, x_m) w_m
    w = argmin 1/2 w'(K_alpha + lambda I) w - w'y = (K_alpha + lambda I)^-1 y

=============================  =================================================================
:func:`activation_space`       ``sum_ij alpha_i alpha_j K_ij``, a mixture of activations in a
                               hidden layer, at ``width=math.inf`` (Oymak et al. 2021, sec. 4.2)
:func:`kernel_mixture_space`   ``sum_i alpha_i k_i``, kernel functions of any origin
:func:`kernel_function_space`  any differentiable ``kernel(alpha, x1, x2)``
:func:`network_space`          the kernel of an infinitely wide network of :mod:`ntk.networks`
=============================  =================================================================

The paper's alpha is ``alpha["mixture"]``, on the simplex, or ``alpha["kernel"]``. lambda =
``exp(alpha["log_penalty"])`` is learned too; 0 would be training to the end. w are dual
coefficients, one per training row. The lower loss is the dual of ridge regression, which is better
conditioned than the primal loss. Its minimum is minus ``y'(K_alpha + lambda I)^-1 y / 2``, the
papers' generalization term.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg

import ntk
from bilevel.contracts import LowerSolver, Pytree
from bilevel.internal import checks
from bilevel.problem.problem import Problem
from bilevel.spaces import targets
from bilevel.spaces.space import Kind, Space, extended
from ntk import networks as nets
from ntk.expectations.activations import Activation
from ntk.kernels.functions import measured


def kernel_ridge(
    matrix: Callable[[Pytree, Any], jax.Array],
    outer: str,
    training: Callable[[Pytree, Any], jax.Array] | None = None,
) -> dict[str, Any]:
    """Return fields of a space; ``training(alpha, inputs)`` is the kernel of the training rows."""
    training = training or matrix

    def init(key, batch):
        return jnp.zeros_like(checks.as_floating("y", batch[1]))

    def apply(w, alpha, inputs):
        return matrix(alpha, inputs) @ w

    def lower(w, alpha, batch):
        inputs, y = batch
        image = training(alpha, inputs) @ w + jnp.exp(alpha["log_penalty"]) * w
        return jnp.vdot(w, 0.5 * image - targets.like_outputs(image, y))

    def run(lower, alpha, w, state, batch):
        inputs, y = batch
        y, K = checks.as_floating("y", y), training(alpha, inputs)
        if y.shape[:1] != K.shape[:1]:
            raise ValueError(f"y: expected {len(K)} rows as in training, got shape {y.shape}.")
        penalty = jnp.exp(alpha["log_penalty"]) * jnp.eye(len(y), dtype=y.dtype)
        return jax.scipy.linalg.solve(K + penalty, y, assume_a="pos"), state

    solver = LowerSolver(init=lambda w: (), run=run, closed_form=True, of_alpha=True)
    fields = {"init": init, "apply": apply, "solver": solver, "predict": targets.predict_labels}
    return fields | {"problem": Problem(lower, targets.validation_loss(apply, outer))}


@dataclasses.dataclass(frozen=True)
class KernelSpace(Space):
    """Activation search at infinite width; ``activation_space(..., width=math.inf)`` makes it.

    ``alpha`` is {"mixture": [h], "log_penalty"}, at first uniform and log 0.1; ``w`` is like the
    training targets, at first 0. Batches are ``(blocks, y)``: outputs ``f`` [m] for two classes,
    [m, classes] for more, and y like ``f`` with entries +-1 (``outer="squared"``: any real
    numbers). An architecture is an activation's name; its vertex has the penalty of the start.

    ``blocks(x) -> [h, h, n, n]`` are for training, ``blocks(x_valid, x) -> [h, h, m, n]`` for
    predictions; with ``error=True``, they include their error bounds. ``solver`` is the closed
    form: one Cholesky factorisation, n^3 / 3.
    """

    blocks: Callable[..., jax.Array]
    solver: LowerSolver


def kernel_space(
    names: Sequence[str],
    activations: Sequence[Callable[[Any], jax.Array]],
    outer: str,
    scale: float,
) -> KernelSpace:
    """Make a space of checked names and activations."""
    functions = tuple(ntk.activation(s) for s in activations)

    def blocks(x, columns=None, *, error=False):
        return ntk.mixture_blocks(x, functions, x2=columns, scale=scale, error=error)

    def matrix(alpha, blocks):
        return ntk.mixture_kernel(alpha["mixture"], blocks)

    return KernelSpace(
        names=tuple(names),
        **targets.mixture_and_penalty(names),
        **kernel_ridge(matrix, outer),
        blocks=blocks,
    )


def mixture_eigenvalue(
    x: Any, activations: tuple[Activation, ...], alpha: Any
) -> tuple[float, float, float]:
    """Return the smallest eigenvalue of ``K_alpha``, its certified bound, and the entries' error.

    The kernel of Oymak et al. 2021, section 4.2: one hidden layer of infinite width with trained
    weights and activation ``sum_i alpha_i s_i``, unit inputs ``x``. It is always in float64.
    """
    with jax.enable_x64(True):
        x, alpha = (np.asarray(a, float) for a in (x, alpha))
        kernel, error = map(np.asarray, _mixture_kernel(x, alpha, activations))
    (value,) = scipy.linalg.eigvalsh(kernel, subset_by_index=[0, 0])
    return float(value), ntk.certified_min_eigenvalue(kernel, error), float(error.max())


@functools.partial(jax.jit, static_argnames="activations")
def _mixture_kernel(x, alpha, activations):
    """Return the kernel and the errors of its entries: one program for all ``alpha``."""
    layer: dict[Activation, Any] = {}
    for activation, weight in zip(activations, alpha, strict=True):
        layer[activation] = layer.get(activation, 0.0) + weight
    kernels = ntk.network_kernel(x, activations=[layer], variances=(1.0, 1.0))
    # The NNGP is the part of the output weights; both kernels have the error.
    return kernels.ntk - kernels.nngp, 2 * kernels.error


@dataclasses.dataclass(frozen=True)
class KernelFunctionSpace(Space):
    """A search of kernel functions: :func:`kernel_mixture_space`, :func:`kernel_function_space`.

    ``w`` is like the training targets, at first 0. Batches are ``(inputs, y)``, or ``(rows, y)`` if
    :func:`kernel_function_space` knows the training inputs: outputs ``f`` [m] for two classes, [m,
    classes] for more, and y like ``f`` with entries +-1 (``outer="squared"``: any real). A batch
    holds ``inputs(x)`` of the training rows, ``inputs(x_valid, x)`` of others.

    ``solver`` is the closed form: the kernel, and one Cholesky factorisation, n^3 / 3.
    ``certificates(alphas, x, entry_error=None) -> [steps]`` are
    :func:`ntk.certified_min_eigenvalue` of the kernel on the rows x at every ``alpha``, stacked as
    in a search's ``history["alpha"]``: in float64, on the host.
    """

    inputs: Callable[..., Any]
    solver: LowerSolver
    certificates: Callable[..., np.ndarray]


def kernel_function_space(
    kernel: Callable[[Pytree, jax.Array, jax.Array], Any],
    start: Pytree,
    *,
    sets: Pytree = "free",
    outer: str = "squared",
    x: Any = None,
) -> KernelFunctionSpace:
    """Make a space of kernel ridge regression with ``kernel(alpha, x1, x2)``.

    ``alpha`` is {"kernel": like ``start``, "log_penalty"}; the penalty starts at log 0.1.

    Parameters
    ----------
    kernel : function
        Differentiable in its first argument; returns a matrix [n1, n2], or a record with such a
        field ``ntk`` (:class:`ntk.Kernels`). At equal x1 and x2 symmetric and positive
        semidefinite.
    start : pytree of arrays
        First parameters of the kernel.
    sets : pytree of {"simplex", "box", "free"}
        Sets of the parameters: like ``start``, or one word for all.
    outer : {"hinge", "logistic", "squared"}
    x : array [n, ...], optional
        The training inputs, to which the weights belong. With them every batch is ``(rows, y)``, as
        in other spaces. Without them, batches of the outer loss are ``(space.inputs(rows, x), y)``.

    Returns
    -------
    KernelFunctionSpace
        ``discretize`` takes every simplex to its largest entry. ``draw`` moves simplices to random
        vertices and boxes to random points; free leaves stay at ``start``.

    Raises
    ------
    ValueError
        If ``kernel`` is not a function, or ``outer`` is unknown. The losses and ``apply`` raise it
        if rows come without the training inputs, or training rows differ from ``x``. Traced
        training rows that differ give NaN.

    Notes
    -----
    The kernel is evaluated at every step: n^2 entries in training, m n in validation. If it is
    costly and does not depend on ``alpha``, use :func:`kernel_mixture_space`.

    Examples
    --------
    The width of a Gaussian kernel, and the penalty:

    >>> import bilevel, optax
    >>> def gaussian(alpha, x1, x2):
    ...     squares = jnp.sum((x1[:, None] - x2[None]) ** 2, -1)
    ...     return jnp.exp(-squares * jnp.exp(alpha))
    >>> x, xv = jnp.linspace(0, 6, 12)[:, None], jnp.linspace(0.2, 5, 9)[:, None]
    >>> train, valid = ((rows, jnp.sign(jnp.sin(rows[:, 0]))) for rows in (x, xv))
    >>> space = kernel_function_space(gaussian, jnp.zeros(()), x=x)
    >>> start = space.start(), space.init(jax.random.key(0), train)
    >>> result = bilevel.search(
    ...     space.problem, space.solver, optax.adam(0.1), *start, train, valid, steps=5
    ... )
    >>> bool(result.history["value"][-1] < result.history["value"][0])
    True

    A certified lower bound of the smallest eigenvalue at every step::

        space.certificates(result.history["alpha"], x)
    """
    checks.function("kernel", kernel, "(alpha, x1, x2) -> [n1, n2]")
    checks.one_of("outer", outer, targets.OUTER_LOSSES)
    own = None if x is None else jnp.asarray(x)

    def of_rows(alpha, x, columns=None):
        return ntk.kernel_matrix(functools.partial(kernel, alpha["kernel"]), x, columns)

    def matrix(alpha, inputs):
        if isinstance(inputs, tuple):
            return of_rows(alpha, *inputs)
        if own is None:
            raise ValueError(
                "inputs: expected space.inputs(rows, x) with the training inputs x, got rows only. "
                "kernel_function_space(..., x=x) makes a space that takes rows only."
            )
        return of_rows(alpha, inputs, own)

    def training(alpha, inputs):
        if isinstance(inputs, tuple):
            return of_rows(alpha, *inputs)
        K = of_rows(alpha, inputs)
        if own is None:
            return K
        rows = jnp.asarray(inputs)
        same = jnp.array_equal(rows, own)  # False for other shapes
        if rows.shape != own.shape or (checks.concrete(same) and not same):
            raise ValueError(
                "batch: expected the training inputs x of kernel_function_space, got other rows "
                f"of shape {rows.shape}. Weights belong to the training inputs."
            )
        return checks.nan_unless(same, K)

    def inputs(x, columns=None):
        return jnp.asarray(x), None if columns is None else jnp.asarray(columns)

    def of(kernel_alpha):
        return targets.beside_penalty(kernel=jax.tree.map(jnp.asarray, kernel_alpha))

    def draw(key):
        first = of(start)["kernel"]
        keys = optax.tree.split_key_like(key, first)
        return of(jax.tree.map(_draw_leaf, keys, jax.tree.broadcast(sets, first), first))

    def discretize(alpha):
        checks.check_finite("alpha", alpha["kernel"])
        words = jax.tree.broadcast(sets, alpha["kernel"])
        return jax.tree.map(np.asarray, jax.tree.map(_vertex, words, alpha["kernel"]))

    def certificates(alphas, x, entry_error=None):
        def certified(step):
            alpha = jax.tree.map(lambda a: np.asarray(a)[step], alphas["kernel"])
            of_step = functools.partial(kernel, alpha)
            return ntk.certified_min_eigenvalue(of_step, entry_error, x=x)

        return np.array([certified(i) for i in range(len(alphas["log_penalty"]))])

    return KernelFunctionSpace(
        names=(),
        sets={"kernel": sets, "log_penalty": "free"},
        start=lambda: of(start),
        draw=draw,
        discretize=discretize,
        one_hot=of,
        **kernel_ridge(matrix, outer, training),
        inputs=inputs,
        certificates=certificates,
    )


def kernel_search(
    space: Space, matrix: Callable[..., Any], outer: str, kind: type[Kind], **fields: Any
) -> Kind:
    """Make the search of ``matrix(alpha, x1, x2)`` over the architectures of a space."""
    kernels = kernel_function_space(matrix, space.start(), sets=space.sets, outer=outer)
    return extended(
        kernels,
        kind,
        names=space.names,
        draw=lambda key: kernels.one_hot(space.draw(key)),
        discretize=lambda alpha: space.discretize(alpha["kernel"]),
        one_hot=lambda architecture: kernels.one_hot(space.one_hot(architecture)),
        **fields,
    )


@dataclasses.dataclass(frozen=True)
class NetworkSpace(KernelFunctionSpace):
    """Result of :func:`network_space`.

    ``values(alpha) -> dict`` has the value of every name in the network: the last argument of the
    finite network, and of ``net.kernel(x, alpha=space.values(alpha))``.
    """

    values: Callable[[Pytree], dict[str, jax.Array]]


def network_space(network: nets.Network, *, outer: str = "squared") -> NetworkSpace:
    """Make a space of a described network at infinite width: every name in it is searched.

    ``alpha["kernel"]`` has an entry for each name: a point of the simplex for a choice, at first
    uniform; any number for a weight, at first 1; the logarithm of a variance, at first 0.

    Parameters
    ----------
    network : ntk.networks.Network
        With names instead of weights.
    outer : {"hinge", "logistic", "squared"}

    Returns
    -------
    NetworkSpace
        An architecture is a dict by name: the choice, or a number. The kernel is computed at every
        step: n^2 entries in training, m n in validation.

    Raises
    ------
    ValueError
        If the network has no names, or ``outer`` is unknown.

    Examples
    --------
    >>> from ntk import networks as nets
    >>> act = nets.act([ntk.relu, ntk.erf], "activation")
    >>> space = network_space(nets.serial(nets.dense("variance"), act, nets.dense()))
    >>> space.discretize(space.start())
    {'activation': 'relu', 'variance': 1.0}
    """
    choices = network.names
    if not choices:
        raise ValueError("network: expected names instead of weights, got none.")
    logarithms = frozenset(_variances(network))
    start = {k: jnp.log(v) if k in logarithms else v for k, v in network.start().items()}

    def values(alpha):
        return {k: jnp.exp(v) if k in logarithms else v for k, v in alpha["kernel"].items()}

    def kernel(alpha, x1, x2=None):
        return network.kernel(x1, x2, alpha=values({"kernel": alpha}))

    sets = {name: "simplex" if choices[name] else "free" for name in start}
    space = kernel_function_space(kernel, start, sets=sets, outer=outer)

    def discretize(alpha):
        checks.check_finite("alpha", alpha["kernel"])
        return {
            name: choices[name][int(np.argmax(value))] if choices[name] else float(value)
            for name, value in values(alpha).items()
        }

    def one_hot(architecture):
        if set(architecture) != set(choices):
            raise ValueError(f"architecture: expected {list(choices)}, got {list(architecture)}.")
        coordinates = {}
        for name, value in architecture.items():
            if choices[name]:
                checks.one_of(f"architecture: {name}", value, choices[name])
                value = jax.nn.one_hot(choices[name].index(value), len(choices[name]), dtype=float)
            coordinates[name] = jnp.log(value) if name in logarithms else jnp.asarray(value, float)
        return space.one_hot(coordinates)

    return extended(space, NetworkSpace, discretize=discretize, one_hot=one_hot, values=values)


def _variances(network: nets.Network) -> Iterator[str]:
    """Yield the names of variances."""
    for layer in network.layers:
        variances = (getattr(layer, name, None) for name in ("weight_variance", "bias_variance"))
        yield from (name for name in variances if isinstance(name, str))
        for branch in getattr(layer, "branches", ()):
            yield from _variances(branch)


def kernel_mixture_space(
    kernels: Mapping[str, Callable[..., Any]], *, outer: str = "squared"
) -> KernelFunctionSpace:
    """Make a space of kernel ridge regression with ``sum_i alpha_i k_i``, to choose one kernel.

    ``alpha`` is {"mixture": [h] on the simplex, "log_penalty"}, at first uniform and log 0.1; an
    architecture is a kernel's name.

    Parameters
    ----------
    kernels : dict of kernel functions by name
        neural-tangents' ``kernel_fn``, ``functools.partial`` of :func:`ntk.network_kernel`, any
        ``k(x1, x2)``: see :func:`ntk.kernel_matrix`.
    outer : {"hinge", "logistic", "squared"}

    Returns
    -------
    KernelFunctionSpace
        ``inputs(x)`` computes all matrices once, [h, n, n]; steps of a search evaluate no kernels.

    Raises
    ------
    ValueError
        If ``kernels`` are not functions by name, or ``outer`` is unknown.

    Examples
    --------
    >>> kernels = {"linear": lambda a, b: a @ b.T, "square": lambda a, b: (1 + a @ b.T) ** 2}
    >>> space = kernel_mixture_space(kernels)
    >>> space.inputs(jnp.eye(3)).shape, space.discretize(space.one_hot("square"))
    ((2, 3, 3), 'square')
    >>> space.certificates({"mixture": jnp.eye(2)}, jnp.diag(jnp.arange(1.0, 3))).round(3)
    array([1.   , 3.952])
    """
    if not isinstance(kernels, Mapping) or not kernels:
        raise ValueError(f"kernels: expected functions by name, got {kernels!r}.")
    for name, kernel in kernels.items():
        checks.function(f"kernels[{name!r}]", kernel, "(x1, x2) -> [n1, n2]")
    checks.one_of("outer", outer, targets.OUTER_LOSSES)
    functions = tuple(kernels.values())

    def inputs(x, columns=None):
        return jnp.stack([ntk.kernel_matrix(kernel, x, columns) for kernel in functions])

    def matrix(alpha, matrices):
        return jnp.einsum("i,inm->nm", alpha["mixture"], matrices)

    def certificates(alphas, x, entry_error=None):
        measurements = [measured(kernel, x, entry_error) for kernel in functions]
        values, errors = zip(*measurements, strict=True)

        def certified(alpha):
            pairs = list(zip(np.asarray(alpha, float), values, errors, strict=True))
            K = sum(a * value for a, value, _ in pairs)
            rounding = len(pairs) * 2.0**-51 * sum(np.abs(a * value) for a, value, _ in pairs)
            return ntk.certified_min_eigenvalue(K, sum(a * e for a, _, e in pairs) + rounding)

        return np.array([certified(alpha) for alpha in alphas["mixture"]])

    return KernelFunctionSpace(
        names=tuple(kernels),
        **targets.mixture_and_penalty(list(kernels)),
        **kernel_ridge(matrix, outer),
        inputs=inputs,
        certificates=certificates,
    )


def _draw_leaf(key: jax.Array, word: str, leaf: jax.Array) -> jax.Array:
    if word not in ("simplex", "box"):
        return leaf
    return _vertex(word, jax.random.uniform(key, leaf.shape, leaf.dtype))


def _vertex(word: str, leaf: jax.Array) -> jax.Array:
    """Return the vertex of every simplex at its largest entry; other leaves are unchanged."""
    if word != "simplex":
        return leaf
    return jax.nn.one_hot(jnp.argmax(leaf, -1), leaf.shape[-1], dtype=leaf.dtype)
