"""The two stages: the mixture by one eigenvector, and least squares with the mixture."""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal.checks import common_dtype, concrete, nan_unless, real_array, real_number
from bilevel.theory.spectral.columns import (
    Columns,
    Features,
    as_finite_floating,
    block_shape,
    check_features_and_labels,
    is_kernels,
    sum_over_blocks,
)
from ntk.internal.derivative_rules import custom_jvp
from ntk.kernels.symmetric import symmetric_matrix


def spectral_alpha(features: Features, labels: chex.Array, *, whiten: bool = False) -> jax.Array:
    """Return the spectral estimate [h] of the mixture: the top left singular vector of M.

    ``M = sum_i y_i X_i`` (Oymak et al. 2021, section 5, step 1, and Theorem 4). The estimate has
    unit norm and a nonnegative sum (the sign is arbitrary). It is differentiable if the top
    eigenvalue is simple.

    Parameters
    ----------
    features : array [n, h, p], bilevel.theory.spectral.columns.Columns, or array [h, h, n, n]
        Features of h maps, or the kernels of these maps.
    labels : array [n] or [n, c]
        The mean is not subtracted: a mean that labels and features share counts as signal.
    whiten : bool
        Divide by :func:`noise_gram`: see Notes. False is the paper's estimator.

    Raises
    ------
    ValueError
        If shapes do not fit, an argument is empty, or concrete values are not finite.

    Notes
    -----
    The paper's features are uncorrelated and of one size. With rows of covariance A, M leans to
    ``A alpha*``: larger maps and maps that are alike weigh more. ``whiten`` takes instead

        alpha that maximises  (alpha' M M' alpha) / (alpha' A alpha)

    with the noise Gram matrix for A; it is proportional to A up to a relative 2/p. Theorem 4 and
    its limits then hold for the correlation in the inner product of A, that of predictions. The
    ratio is ``y' K_alpha y`` over its expectation for labels of random signs, a kernel's alignment
    with the labels. Between maps that are alike the estimate may have large entries of opposite
    sign; :func:`simplex_start` projects it to the simplex.

    Dependence across columns is not undone. The ratio measures the share of a kernel's trace that
    is aligned with the labels, and ignores how ridge regression uses the rest.

    Time: c n h p, and h^2 (c p + h); whitened n h^2 p more; with kernels c h^2 n^2. Memory:
    h (n + c) b for blocks of b columns, h p (n + c) for an array.

    Examples
    --------
    >>> X = jax.random.normal(jax.random.key(0), (200, 3, 50))
    >>> y = X[:, 1, 0]  # alpha* = (0, 1, 0)
    >>> bool(spectral_alpha(X, y)[1] > 0.9)
    True
    """
    largest = jnp.max(jnp.abs(real_array("labels", labels)), initial=0)
    labels = labels / jnp.where(largest > 0, largest, 1)  # the direction does not change
    noise = noise_gram(features, labels) if whiten else None
    return top_direction(spectral_gram(features, labels), noise)


def spectral_gram(features: Features, labels: chex.Array) -> jax.Array:
    """Return ``G_ij = sum_c y_c' K_ij y_c`` [h, h], which is ``M M'`` summed over outputs."""
    features, y = check_features_and_labels(features, labels)

    def term(x):
        dtype = common_dtype(x, y)
        m = jnp.einsum("nhb,nc->hcb", x.astype(dtype), y.astype(dtype)).reshape(x.shape[1], -1)
        return m @ m.T

    if is_kernels(features):
        dtype = common_dtype(features, y)
        y = y.astype(dtype)
        return jnp.einsum("nc,ijnm,mc->ij", y, jnp.asarray(features, dtype), y)
    return sum_over_blocks(term, features)


def noise_gram(features: Features, labels: chex.Array) -> jax.Array:
    """Return the expectation [h, h] of ``M M'`` if each row's labels had a random sign.

    ``N_ij = sum_n |y_n|^2 K_ij(x_n, x_n)``. Under Theorem 4 it is n p times the identity, up to
    fluctuations which vanish as p grows.

    Parameters
    ----------
    features, labels
        See :func:`spectral_alpha`.

    Raises
    ------
    ValueError
        If shapes do not fit, an argument is empty, or concrete values are not finite.

    Examples
    --------
    >>> noise_gram(jnp.array([[[1.0], [2.0]], [[1.0], [1.0]]]), jnp.array([1.0, -1.0]))
    Array([[2., 3.], [3., 5.]], dtype=float...)
    """
    features, y = check_features_and_labels(features, labels)
    weights = (y**2).sum(1)
    if is_kernels(features):
        return jnp.einsum("ijnn,n->ij", features, weights)
    return sum_over_blocks(lambda x: jnp.einsum("nhb,n,ngb->hg", x, weights, x), features)


def top_direction(gram: chex.Array, noise: chex.Array | None = None) -> jax.Array:
    """Return the unit ``alpha`` [h] that maximises ``alpha' gram alpha / (alpha' noise alpha)``.

    Feature maps may be zero or copies of each other: directions of the noise's correlation matrix
    below the square root of the roundoff are not resolved.
    """
    gram = symmetric_matrix(gram, "gram")
    if concrete(gram) and not np.any(gram):
        raise ValueError("gram: expected a matrix other than 0, as of labels that are all 0.")
    if noise is None:
        alpha = top_eigenvector(gram)
    else:
        noise = symmetric_matrix(noise, "noise")
        size = jnp.sqrt(jnp.diagonal(noise))
        size = jnp.where(size > 0, size, 1)
        scales = size[:, None] * size[None]
        slack = jnp.sqrt(jnp.finfo(gram.dtype).eps) * jnp.eye(len(gram), dtype=gram.dtype)
        factor = jnp.linalg.cholesky(noise / scales + slack)
        solve = partial(jax.scipy.linalg.solve_triangular, factor, lower=True)
        alpha = solve(top_eigenvector(solve(solve(gram / scales).T)), trans="T") / size
    alpha = jnp.where(alpha.sum() < 0, -alpha, alpha)
    return nan_unless(jnp.isfinite(gram).all() & (gram != 0).any(), alpha / jnp.linalg.norm(alpha))


@custom_jvp
def top_eigenvector(matrix: chex.Array) -> jax.Array:
    """Return the top eigenvector; differentiable also if other eigenvalues coincide."""
    return jnp.linalg.eigh(matrix)[1][:, -1]


@top_eigenvector.defjvp
def _top_eigenvector_jvp(primals, tangents):
    values, vectors = jnp.linalg.eigh(primals[0])
    top, others = vectors[:, -1], vectors[:, :-1]
    slope = others.T @ (tangents[0] + tangents[0].T) @ top / 2
    return top, others @ (slope / (values[-1] - values[:-1]))


def simplex_start(
    alpha: chex.Array, noise: chex.Array | None = None, *, uniform: float | chex.Array = 0.1
) -> jax.Array:
    """Return a starting point [h] on the simplex, near the direction ``alpha`` or ``-alpha``.

        (1 - uniform) a / sum(a) + uniform / h,
        a = argmin_{a >= 0} (a - s alpha)' N (a - s alpha),   s = 1 or -1 (the longer a)

    Without ``noise`` N is the identity, and negative entries become 0. With ``noise``, distances
    are between predictions: for activations that are alike, large entries of opposite sign are a
    small difference. This takes 200 sweeps of coordinate descent, h^2 operations each. For nearly
    equal directions the angle is right to about 1e-3; entries can be less accurate. The uniform
    part is for the search: exponentiated gradient would never leave an entry of 0. From ``uniform /
    h`` an entry needs about ``log(h / uniform)`` over the learning rate steps to return.

    Parameters
    ----------
    alpha : array [h]
        From :func:`spectral_alpha`.
    noise : array [h, h], optional
        :func:`noise_gram`, if ``alpha`` was whitened.
    uniform : float
        In [0, 1].

    Raises
    ------
    ValueError
        If shapes do not fit, ``uniform`` is out of range, or ``alpha`` is zero or not finite.

    Examples
    --------
    >>> simplex_start(jnp.array([0.6, -0.1, 0.2]), uniform=0.0).round(2)
    Array([0.75, 0.  , 0.25], dtype=float...)
    """
    alpha = as_finite_floating("alpha", alpha)
    if alpha.ndim != 1 or alpha.size == 0:
        raise ValueError(f"alpha: expected an array [h], got shape {alpha.shape}.")
    if concrete(alpha) and not np.any(alpha):
        raise ValueError("alpha: expected a direction, got zero.")
    h = len(alpha)
    metric = jnp.eye(h, dtype=alpha.dtype) if noise is None else as_finite_floating("noise", noise)
    if metric.shape != (h, h):
        raise ValueError(f"noise: expected shape {(h, h)}, got {metric.shape}.")
    if concrete(real_number("uniform", uniform)) and not 0 <= uniform <= 1:
        raise ValueError(f"uniform: expected a number in [0, 1], got {uniform}.")
    alpha = alpha / jnp.max(jnp.abs(alpha))  # squares of small numbers vanish
    sides = jnp.stack([alpha, -alpha])
    points = jnp.maximum(sides, 0) if noise is None else jax.vmap(partial(_cone, metric))(sides)
    lengths = jnp.einsum("si,ij,sj->s", points, metric, points)
    point = points[jnp.argmax(jnp.where(points.sum(1) > 0, lengths, -1))]
    return (1 - uniform) * point / point.sum() + uniform / h


def _cone(metric: jax.Array, alpha: jax.Array) -> jax.Array:
    """Return ``argmin_{a >= 0} (a - alpha)' metric (a - alpha)``, by coordinate descent."""
    h = len(alpha)
    curvature = jnp.diagonal(metric)
    curvature = jnp.where(curvature > 0, curvature, 1)

    def step(k, a):
        i = k % h
        slope = metric[i] @ (a - alpha)
        return a.at[i].set(jnp.maximum(a[i] - slope / curvature[i], 0))

    return jax.lax.fori_loop(0, 200 * h, step, jnp.maximum(alpha, 0))


class SpectralEstimate(NamedTuple):
    """Result of :func:`spectral_estimator`."""

    alpha: jax.Array  # [h], unit norm
    dual: jax.Array  # [n] or [n, c], one per training row: theta = Phi_alpha' dual

    def predict(self, train: Features, features: Features) -> jax.Array:
        """Return the predictions ``alpha' X theta`` [m] or [m, c] for new rows.

        ``train`` are the features of the training rows; they and ``features`` are arrays, or
        ``Columns`` of equal blocks.
        """
        expected, given = (
            (part.count if isinstance(part, Columns) else "an array", *block_shape(part)[1:])
            for part in (train, features)
        )
        if expected != given:
            raise ValueError(
                "features: expected blocks (count, h, columns) as of the training rows, "
                f"{expected}, got {given}."
            )
        return _cross_kernel_of_mixture(self.alpha, features, train) @ self.dual


def spectral_estimator(
    train: tuple[Features, chex.Array],
    valid: tuple[Features, chex.Array],
    *,
    whiten: bool = False,
) -> SpectralEstimate:
    """Return alpha from the validation rows and weights from the training rows, as in Theorem 4.

        alpha = spectral_alpha(valid),   theta = argmin |theta|  of  min |Phi_alpha theta - y|

    The result has ``dual = (Phi_alpha Phi_alpha')^+ y`` (pseudo-inverse): least squares for p < n,
    the interpolation of least norm for p > n. Its ``predict(train_features, new_features)`` gives
    the predictions of new rows.

    Time: n h p and n^2 p for the kernel, O(n^3) for its pseudo-inverse. Memory: n h b and n^2. The
    kernel has the squared condition number of ``Phi_alpha``: near p = n float32 is not enough.
    :func:`spectral_limits` has its risk in the limit (Oymak et al. 2021, section 5 and Theorem 4).

    Parameters
    ----------
    train, valid : (features [n, h, p] or ``Columns``, labels [n] or [n, c])
        Independent of each other; n may differ.
    whiten : bool
        Whether :func:`spectral_alpha` divides by :func:`noise_gram`.

    Raises
    ------
    ValueError
        If shapes do not fit, an argument is empty, or concrete values are not finite.

    Examples
    --------
    >>> X = jax.random.normal(jax.random.key(0), (120, 3, 40))
    >>> y = X[:, 1, 0]
    >>> train, valid, new = (X[:50], y[:50]), (X[50:100], y[50:100]), X[100:]
    >>> f = jax.jit(spectral_estimator)(train, valid).predict(train[0], new)
    >>> bool(jnp.mean((f - y[100:]) ** 2) < jnp.mean(y[100:] ** 2))
    True
    """
    features, others = check_features_and_labels(*train)[0], check_features_and_labels(*valid)[0]
    shapes = block_shape(features), block_shape(others)
    if {len(shape) for shape in shapes} != {3} or shapes[0][1] != shapes[1][1]:
        raise ValueError(
            "train, valid: expected features [n, h, p] of the same h maps, "
            f"got shapes {shapes[0]} and {shapes[1]}."
        )
    alpha = spectral_alpha(*valid, whiten=whiten)
    kernel = _cross_kernel_of_mixture(alpha, features, features)
    labels = jnp.asarray(train[1], kernel.dtype)
    return SpectralEstimate(alpha, jnp.linalg.pinv(kernel, hermitian=True) @ labels)


def _cross_kernel_of_mixture(alpha, rows, columns):
    """Return ``Phi_alpha Phi_alpha'`` between two sets of rows."""

    def term(x, z):
        return jnp.einsum("h,nhb->nb", alpha, x) @ jnp.einsum("h,nhb->bn", alpha, z)

    return sum_over_blocks(term, rows, columns)
