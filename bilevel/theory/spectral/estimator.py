"""The two stages together: least squares on the training rows, with the estimated mixture."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from bilevel.theory.spectral.columns import (
    Columns,
    Features,
    block_shape,
    check_features_and_labels,
    sum_over_blocks,
)
from bilevel.theory.spectral.directions import spectral_alpha


class SpectralEstimate(NamedTuple):
    """Result of :func:`spectral_estimator`."""

    alpha: jax.Array  # [h], unit norm
    dual: jax.Array  # [n] or [n, c], one per training row: theta = Phi_alpha' dual

    def predict(self, train: Features, features: Features) -> jax.Array:
        """Return the predictions ``alpha' X theta`` [m] or [m, c] for new rows.

        ``train`` are the features of the training rows; they and ``features`` are arrays, or
        ``Columns`` of equal blocks.
        """
        forms = [
            (part.count if isinstance(part, Columns) else "an array", *block_shape(part)[1:])
            for part in (train, features)
        ]
        if forms[0] != forms[1]:
            raise ValueError(
                "features: expected blocks (count, h, columns) as of the training rows, "
                f"{forms[0]}, got {forms[1]}."
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

    Parameters
    ----------
    train, valid : (features [n, h, p] or ``Columns``, labels [n] or [n, c])
        Independent of each other; n may differ.
    whiten : bool
        Whether :func:`spectral_alpha` divides by :func:`noise_gram`.

    Returns
    -------
    SpectralEstimate
        ``dual = (Phi_alpha Phi_alpha')^+ y`` (pseudo-inverse): least squares for p < n, the
        interpolation of least norm for p > n. ``predict(train_features, new_features)`` gives
        the predictions of new rows.

    Raises
    ------
    ValueError
        If shapes do not fit, an argument is empty, or concrete values are not finite.

    Notes
    -----
    Time: n h p and n^2 p for the kernel, O(n^3) for its pseudo-inverse. Memory: n h b and n^2. The
    kernel has the squared condition number of ``Phi_alpha``: near p = n float32 is not enough.
    :func:`spectral_limits` has its risk in the limit (Oymak et al. 2021, section 5 and Theorem 4).

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
