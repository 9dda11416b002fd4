"""Gaussian predictions of infinitely wide networks: the posterior, or trained ensembles.

An infinitely wide network at its initialisation is a Gaussian process with the NNGP kernel. Given
targets, :func:`posterior` is Bayesian inference; :func:`ensemble` has networks after training.

=======  ===================================================================================
letter   meaning
=======  ===================================================================================
X, x     the n training inputs; the m inputs to predict at
K, k     the NNGP kernel: `K` [n, n] of X, `cross` [m, n] of x with X, `prior` [m, m] of x
T        the NTK, of the same pairs of inputs
y        targets, [n] or [n, outputs]
t        time: number of steps times their size, of the loss ``1/2 |f(X) - y|^2``
=======  ===================================================================================

Every output has the same covariance [m, m], and outputs are independent. If outputs have a kernel
with each other, all kernels are ``[., ., outputs, outputs]``, and so is the covariance.

References: Lee et al. (2018), "Deep neural networks as Gaussian processes"; Lee et al. (2019),
Eqs. (13)-(16); He, Lakshminarayanan & Teh (2020).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ntk.internal.checks import concrete, describe, float_array, nan_unless
from ntk.internal.products import matmul
from ntk.kernels.functions import kernel_matrix, kernel_record
from ntk.kernels.symmetric import flatten_outputs, symmetric_matrix
from ntk.regression.gradient_flow import check_times, flow, flows
from ntk.regression.targets import (
    TrainingSet,
    as_kernel,
    check_cross_kernel,
    check_training_set,
    cholesky,
    kernel_entry_error,
    with_penalty,
)

_ROOM = 0.01  # relative to the largest entry; covers the rounding of 16-bit entries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prediction:
    """A Gaussian distribution of m inputs' outputs, at one time or several.

    ``mean, covariance = prediction`` unpacks it.

    Attributes
    ----------
    mean : array [..., m] or [..., m, outputs], times first.
    covariance : array [..., m, m] or [..., m, m, outputs, outputs]
        The same for every output, or of all outputs. Symmetric, and positive semidefinite up to the
        prior's rounding.
    mean_error, std_error : arrays like ``mean`` and ``std()``
        Errors from rounded kernels, to first order, if every entry has an error of 64 eps relative
        to the variances of its two inputs. Infinite for an :func:`ensemble` at a large ``t`` if the
        NTK is singular to rounding: enable float64 or add a penalty then.
    """

    mean: jax.Array
    covariance: jax.Array
    mean_error: jax.Array | float = dataclasses.field(default=math.nan, repr=False)
    std_error: jax.Array | float = dataclasses.field(default=math.nan, repr=False)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter((self.mean, self.covariance))

    def std(self) -> jax.Array:
        """Return standard deviations [..., m]; like ``mean`` if outputs differ in covariance."""
        full = self.covariance.ndim > self.mean.ndim + 1
        variance = jnp.einsum("...iiaa->...ia" if full else "...ii->...i", self.covariance)
        return _root_of_variance(variance)


def _root_of_variance(variance: jax.Array) -> jax.Array:
    # Variances rounded below 0 count as 0. The root has infinite slope there; 0 times it is NaN.
    return jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)


def posterior(
    K: Any,
    y: chex.Array,
    cross: chex.Array | None = None,
    prior: chex.Array | None = None,
    *,
    x: Any = None,
    at: Any = None,
    get: str = "nngp",
    penalty: float = 0.0,
) -> Prediction:
    """Return the Gaussian process posterior of the kernel ``K``.

    Its mean is ``k(x, X) (K + penalty I)^-1 y``, and its covariance ``k(x, x) - k(x, X) (K +
    penalty I)^-1 k(X, x)``. With the NNGP kernel it is Bayesian inference in an infinitely wide
    network. With the NTK it is the "NTKGP" of He et al. (2020), the limit of ensembles with an
    added random function.

    Parameters
    ----------
    K : array [n, n] or [n, n, outputs, outputs], or kernel function
        Kernel of the training inputs, symmetric up to rounding; or a function of inputs
        (:func:`ntk.kernel_matrix`), with ``x`` and ``at`` instead of ``cross`` and ``prior``.
    y : array [n] or [n, outputs]
        Targets.
    cross, prior : arrays [m, n] and [m, m], or [m, n, outputs, outputs] and so on
        Kernels of the inputs to predict at, with the training inputs and with each other.
    x, at : arrays [n, ...] and [m, ...], optional
        Training inputs, and inputs to predict at, if ``K`` is a function.
    get : {"nngp", "ntk"}
        The kernel to use if the function returns both.
    penalty : float
        Variance of the targets' noise, added to the diagonal of ``K``. No hidden jitter is added.

    Returns
    -------
    Prediction
        For the function, without the noise. NaN if an invalid argument is traced.

    Raises
    ------
    ValueError
        If the shapes do not fit, an argument is not finite, ``K`` or ``prior`` is not symmetric,
        ``cross`` is larger than a covariance can be, or ``penalty`` is negative. Also if
        ``K + penalty I`` is not positive definite, or singular to rounding.

    Notes
    -----
    Time n^3 / 3 + n^2 m + n m^2, memory n (n + m) + m^2; for a kernel of several outputs, n and m
    count pairs of inputs and outputs. For variances of many inputs alone, ``jax.vmap`` over rows of
    ``cross``: ``K`` is factorised once. Source: Rasmussen & Williams (2006), Eqs. (2.23)-(2.24).

    Examples
    --------
    >>> K, y = jnp.eye(2), jnp.array([1.0, 0.0])
    >>> posterior(K, y, jnp.array([[0.6, 0.0]]), jnp.array([[1.0]]))
    Prediction(mean=Array([0.6], dtype=float...), covariance=Array([[0.64]], dtype=float...))
    """
    if _is_function("K", K, cross, prior, x, at):
        of = functools.partial(kernel_matrix, K, get=get)
        K, cross, prior = of(x), of(at, x), of(at)
    training = check_training_set(K, y)
    cross, there = check_cross_kernel("cross", cross, training)
    prior = _prior(prior, there, training)
    cross = _bounded(cross, training.matrix, prior)
    factor = cholesky(training.matrix, penalty)
    whitened = jax.scipy.linalg.solve_triangular(factor, cross.T, lower=True)
    columns = jax.scipy.linalg.solve_triangular(factor, training.columns, lower=True)
    mean = matmul(whitened.T, columns).reshape(there)
    back = jax.scipy.linalg.solve_triangular(
        factor, jnp.hstack([whitened, columns]), lower=True, trans="T"
    )
    rows, weights = back[:, : len(cross)].T, back[:, len(cross) :]
    size = jnp.sqrt(jnp.diagonal(training.matrix))
    reach = jnp.sqrt(jnp.diagonal(prior)) + _row_norms(rows * size[None])
    mean_error = reach[:, None] * _row_norms(weights.T * size[None])[None]
    covariance = prior - matmul(whitened.T, whitened)
    return _prediction(mean, covariance, training, mean_error, reach**2)


def ensemble(
    train: Any,
    y: chex.Array,
    cross: Any = None,
    prior: chex.Array | None = None,
    *,
    x: Any = None,
    at: Any = None,
    t: chex.Array | float = jnp.inf,
    penalty: float = 0.0,
) -> Prediction:
    """Return predictions of infinitely wide networks, trained from random weights up to time t.

    Gradient flow leads to ``f_t(x) = f_0(x) + A (y - f_0(X))``, with mean and covariance over
    initialisations

        A y,    k(x, x) - A k(X, x) - k(x, X) A' + A K A',    A = T(x, X) phi_t(T + penalty I).

    At t = 0 it is the prior. In the limit t = inf all networks agree on the training inputs if
    ``penalty`` is 0. With the NNGP kernel as both kernels only the last layer is trained, and the
    limit is :func:`posterior` without noise. With the NTK it is not a posterior.

    Parameters
    ----------
    train : Kernels, or another record with ``nngp`` and ``ntk``, or function that returns one
        Kernels of the training inputs, [n, n] or [n, n, outputs, outputs]; or a function of inputs
        (:func:`ntk.kernel_matrix`), with ``x`` and ``at`` instead of ``cross`` and ``prior``.
    y : array [n] or [n, outputs]
        Targets.
    cross : Kernels, or another record with ``nngp`` and ``ntk``
        Kernels of the inputs to predict at with the training inputs.
    prior, x, at
        As in :func:`posterior`; ``prior`` is the NNGP kernel.
    t : float or array [...]
        Nonnegative times; ``inf``, the default, is the limit. T steps of size eta on the summed
        loss are ``t = eta T``.
    penalty : float
        Weight decay towards the weights at time 0.

    Returns
    -------
    Prediction
        Axes of ``t`` first. Differentiable once in all arguments. NaN if an invalid argument is
        traced.

    Raises
    ------
    ValueError
        If the shapes do not fit, an argument is not finite, a kernel is not symmetric,
        ``cross.nngp`` is larger than a covariance can be, or a ``t`` or the ``penalty`` is
        negative.

    Notes
    -----
    Time: about 10 n^3 for the eigendecomposition, then n^2 m + n m^2 for each time; memory m (n +
    m) for each time. Directions that are singular to rounding do not move in the limit, and hardly
    before it: :func:`ntk.gradient_flow`. Source: Lee et al. (2019), "Wide neural networks of any
    depth evolve as linear models under gradient descent", Eqs. (14)-(16).

    Examples
    --------
    >>> import ntk
    >>> x, at, y = jnp.eye(2), jnp.array([[0.6, 0.6]]), jnp.array([1.0, 0.0])
    >>> of = lambda x1, x2: ntk.Kernels(nngp=x1 @ x2.T, ntk=2 * x1 @ x2.T)  # a linear network
    >>> predictions = jax.jit(ntk.ensemble)(of(x, x), y, of(at, x), of(at, at).nngp)
    >>> predictions.mean.round(2), predictions.std().round(2)
    (Array([0.6], dtype=float...), Array([0.], dtype=float...))
    """
    if _is_function("train", train, cross, prior, x, at):
        of = functools.partial(kernel_record, train)
        train, cross, prior = of(x), of(at, x), kernel_matrix(train, at, get="nngp")
    (K, T), (cross_nngp, cross_ntk) = _nngp_and_ntk("train", train), _nngp_and_ntk("cross", cross)
    training = check_training_set(T, y, "train.ntk")
    nngp = check_training_set(K, y, "train.nngp").matrix
    if nngp.shape != training.matrix.shape:
        raise ValueError(f"train: expected kernels of one shape, got {K.shape} and {T.shape}.")
    cross_ntk, there = check_cross_kernel("cross.ntk", cross_ntk, training)
    cross_nngp, same = check_cross_kernel("cross.nngp", cross_nngp, training)
    if there != same:
        got = f"{same[0]} of nngp and {there[0]} of ntk"
        raise ValueError(f"cross: expected kernels of as many rows, got {got}.")
    prior = _prior(prior, there, training)
    cross_nngp = _bounded(cross_nngp, nngp, prior, "cross.nngp")
    t = check_times(t, training.matrix.dtype)
    penalised = with_penalty(training.matrix, penalty)
    kernels = nngp, cross_nngp, prior
    moments = _trained_moments(penalised, cross_ntk, training.columns, *kernels, t.ravel())
    mean, covariance, *errors = (x.reshape(*t.shape, *x.shape[1:]) for x in moments)
    return _prediction(mean.reshape(*t.shape, *there), covariance, training, *errors)


def _is_function(name: str, K, cross, prior, x, at) -> bool:
    """Return whether ``K`` is a function; raise ``ValueError`` for arguments of the other form."""
    one, other = {"cross": cross, "prior": prior}, {"x": x, "at": at}
    needed, superfluous = (other, one) if callable(K) else (one, other)
    kind = "a kernel function" if callable(K) else "matrices"
    for key, value in needed.items():
        if value is None:
            raise ValueError(f"{key}: expected an array, as {name} is {kind}, got none.")
    for key, value in superfluous.items():
        if value is not None:
            raise ValueError(f"{key}: expected none, as {name} is {kind}, got {describe(value)}.")
    return callable(K)


@jax.jit
def _trained_moments(T, cross_ntk, columns, K, cross, prior, t):
    """Return mean, covariance, and errors of mean and variances over the entry error."""
    m = len(cross)
    size, of_T = (jnp.sqrt(jnp.diagonal(x))[None, None] for x in (K, T))
    moved = flows(T, jnp.hstack([cross_ntk.T, jax.lax.stop_gradient(columns)]), t)
    A = jnp.swapaxes(moved[..., :m], 1, 2)
    once = matmul(A, cross.T)
    covariance = prior[None] - once - jnp.swapaxes(once, 1, 2)
    covariance += matmul(matmul(A, K), jnp.swapaxes(A, 1, 2))
    # An error of T changes A by (dcross - A dT) phi; phi is applied to these columns.
    to = jax.lax.stop_gradient((matmul(K, jnp.swapaxes(A, 1, 2)), cross.T, T))
    through = jax.vmap(flow, (None, 0, 0))(to[2], to[0] - to[1][None], t)
    reach = jnp.max(of_T) + _row_norms(A * of_T)
    mean_error = reach[..., None] * _row_norms(jnp.swapaxes(moved[..., m:], 1, 2) * of_T)[:, None]
    variance_error = (jnp.sqrt(jnp.diagonal(prior))[None] + _row_norms(A * size)) ** 2
    variance_error += 2 * reach * _row_norms(jnp.swapaxes(through, 1, 2) * of_T)
    # First order holds unless a direction is below the entries' errors.
    smallest = jnp.maximum(jnp.linalg.eigvalsh(to[2])[0], jnp.finfo(T.dtype).tiny)
    lost = kernel_entry_error(T.dtype) * jnp.max(of_T) ** 2 * jnp.minimum(t, 1 / smallest)
    beyond = 1 / jnp.maximum(1 - lost, 0)[:, None]
    return matmul(A, columns), covariance, beyond[..., None] * mean_error, beyond * variance_error


def _row_norms(rows):
    return jnp.linalg.norm(jax.lax.stop_gradient(rows), axis=-1)


def _prediction(mean, covariance, training: TrainingSet, mean_error, variance_error) -> Prediction:
    covariance = covariance / 2 + jnp.swapaxes(covariance, -1, -2) / 2
    error, mean_error, variance_error = jax.lax.stop_gradient(
        (kernel_entry_error(mean.dtype), mean_error, variance_error)
    )
    variance = jax.lax.stop_gradient(jnp.diagonal(covariance, axis1=-2, axis2=-1))
    lower, upper = variance - error * variance_error, variance + error * variance_error
    std = _root_of_variance(variance)
    std_error = jnp.maximum(_root_of_variance(upper) - std, std - _root_of_variance(lower))
    if training.full:
        covariance = as_kernel(covariance, training.shape[1])
        std_error = std_error.reshape(mean.shape)
    return Prediction(mean, covariance, error * mean_error.reshape(mean.shape), std_error)


def _nngp_and_ntk(name: str, kernels: Any) -> tuple[Any, Any]:
    try:
        return kernels.nngp, kernels.ntk
    except AttributeError:
        raise ValueError(
            f"{name}: expected kernels with the fields nngp and ntk, as network_kernel's, "
            f"got a {type(kernels).__name__}."
        ) from None


def _prior(prior: Any, there: tuple[int, ...], training: TrainingSet) -> jax.Array:
    prior = float_array("prior", prior)
    m, *outputs = there
    expected = (m, m, *outputs, *outputs) if training.full else (m, m)
    if prior.shape != expected:
        raise ValueError(f"prior: expected shape {expected}, got {prior.shape}.")
    return symmetric_matrix(flatten_outputs(prior), "prior").astype(training.matrix.dtype)


def _bounded(cross, K, prior, name: str = "cross") -> jax.Array:
    """Return ``cross`` if ``cross[i, j]^2 <= prior[i, i] K[j, j]``, as for covariances."""
    largest = jnp.outer(jnp.sqrt(jnp.diagonal(prior)), jnp.sqrt(jnp.diagonal(K)))
    fits = jnp.abs(cross) <= largest + _ROOM * jnp.max(largest)
    if not concrete(fits):
        return nan_unless(fits.all(), cross)
    if not fits.all():
        at = tuple(int(i) for i in np.argwhere(~np.asarray(fits))[0])
        raise ValueError(
            f"{name}: expected |{name}[i, j]| <= sqrt(prior[i, i] K[j, j]), as covariances have "
            f"it, got {float(cross[at]):.3g} where that is {float(largest[at]):.3g}."
        )
    return cross
