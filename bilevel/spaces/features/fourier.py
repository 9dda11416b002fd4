"""Random Fourier features with configurable preprocessing, kernel and bandwidth.

    phi_j(x) = sqrt(2) cos(s_c w_j' t_c(x) + b_j),    b_j ~ U[0, 2 pi],
    (1/D) sum_{j < D} phi_j(x) phi_j(y)  ->  k_c(t_c(x), t_c(y))    with rms error about 1/sqrt(D)

======================  =======================  =====================  ==============
kernel                  k(x, y)                  w_j                    s_c
======================  =======================  =====================  ==============
``gaussian``            exp(-gamma |x - y|_2^2)  z ~ N(0, I)            sqrt(2 gamma)
``laplace``             exp(-gamma |x - y|_1)    iid Cauchy             gamma
``laplace_isotropic``   exp(-gamma |x - y|_2)    z / |z_0|, z_0 ~ N     gamma
======================  =======================  =====================  ==============

Khodak et al. say "Laplace"; their released code has the first. The draws are the same for every
configuration and row, so that coordinate j of shared weights belongs to one random direction. They
form an endless sequence; every part of it can be computed alone.

Rahimi & Recht (2007); search space of Khodak, Li, Balcan & Talwalkar (2020), section 2 and B.2.1.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.internal import checks

PREPROCESS = ("none", "minmax", "unit", "standardize")
"""``t_c``: nothing, columns to [0, 1], rows to unit 2-norm, columns to mean 0 and variance 1."""

KERNELS = ("gaussian", "laplace", "laplace_isotropic")

_GAUSSIAN, _LAPLACE, _ISOTROPIC = range(3)
_UNIT = PREPROCESS.index("unit")
_BLOCK = 256  # features of one random key


class FourierConfig(NamedTuple):
    """One configuration, or one per row: leaves are scalars or [n]; see :func:`fourier_config`."""

    preprocess: jax.Array  # int, index into PREPROCESS
    kernel: jax.Array  # int, index into KERNELS
    gamma: jax.Array  # bandwidth, positive

    def __str__(self) -> str:
        """Describe one configuration in a few words; several or traced ones give the fields."""
        if not checks.concrete(self) or np.size(self.gamma) > 1:
            return repr(self)
        preprocess, kernel = PREPROCESS[int(self.preprocess)], KERNELS[int(self.kernel)]
        return f"{kernel}, γ = {float(self.gamma):.2g}, {preprocess}"


class FourierMap(NamedTuple):
    """Pure functions of one sequence of draws; see :func:`fourier_features`."""

    # (config, x [n, p], dimension, start=0) -> features ``start`` to ``start + dimension``, without
    # the factor ``1/sqrt(D)``; ``start`` may be traced.
    apply: Callable[..., jax.Array]
    # (config, x, dimension, start=0) -> ``w_j' t_c(x)`` [n, dimension], the costly part, which does
    # not depend on ``gamma``.
    project: Callable[..., jax.Array]
    # (dimension, start=0, dtype=float) -> b [dimension], for :func:`from_projection`
    phases: Callable[..., jax.Array]


def fourier_config(
    preprocess: str = "none", kernel: str = "gaussian", gamma: float | chex.Array = 1.0
) -> FourierConfig:
    """Make a configuration by the names in ``PREPROCESS`` and ``KERNELS``.

    Raises
    ------
    ValueError
        If a name is unknown, or ``gamma`` is not positive and finite.

    Examples
    --------
    >>> print(fourier_config("unit", "laplace", 0.5))
    laplace, γ = 0.5, unit
    """
    checks.check_in_range("gamma", gamma, 0, math.inf)
    preprocess_index = jnp.asarray(_index("preprocess", preprocess, PREPROCESS))
    kernel_index = jnp.asarray(_index("kernel", kernel, KERNELS))
    return FourierConfig(preprocess_index, kernel_index, jnp.asarray(gamma, float))


def sample_fourier(
    key: chex.PRNGKey,
    count: int,
    *,
    kernels: Sequence[str] = ("gaussian", "laplace"),
    gammas: tuple[float, float] = (1e-5, 10.0),
) -> list[FourierConfig]:
    """Draw configurations: preprocessing and kernel uniform, ``gamma`` log-uniform.

    ``kernels`` are names in ``KERNELS``, ``gammas`` the smallest and the largest bandwidth. The
    defaults are the search space of Khodak et al.'s released code.

    Raises
    ------
    ValueError
        If ``key`` is not a PRNG key, ``count`` is negative, a kernel is unknown, there are no
        kernels, or ``gammas`` is not an interval of positive numbers.

    Examples
    --------
    One configuration per row, to share weights between configurations:

    >>> configs = sample_fourier(jax.random.key(0), 4)
    >>> stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *configs)
    >>> features = fourier_features(jax.random.key(1), jnp.eye(4))
    >>> apply = jax.jit(features.apply, static_argnames="dimension")
    >>> apply(stacked, jnp.eye(4), dimension=16).shape
    (4, 16)
    """
    checks.prng_key("key", key)
    count = checks.integer("count", count, 0)
    if not kernels:
        raise ValueError("kernels: expected at least one kernel, got none.")
    allowed = jnp.array([_index("kernels", kernel, KERNELS) for kernel in kernels])
    try:
        low, high = gammas
        known = 0 < low <= high < math.inf
    except (TypeError, ValueError):
        known = False
    if not known:
        raise ValueError(f"gammas: expected an interval of positive numbers, got {gammas}.")
    for_preprocess, for_kernel, for_gamma = jax.random.split(key, 3)
    preprocess = jax.random.randint(for_preprocess, (count,), 0, len(PREPROCESS))
    kernel = jax.random.choice(for_kernel, allowed, (count,))
    log_gamma = jax.random.uniform(for_gamma, (count,), float, math.log(low), math.log(high))
    # On the host: indexing device arrays entry by entry compiles a program for each.
    fields = jax.device_get((preprocess, kernel, jnp.exp(log_gamma)))
    return [FourierConfig(*config) for config in zip(*fields, strict=True)]


def fourier_features(key: chex.PRNGKey, x_train: chex.Array) -> FourierMap:
    """Make random Fourier features of rows like ``x_train``, for every configuration.

    Parameters
    ----------
    key : jax.Array
        For the draws, which are the same for float32 and float64 up to rounding.
    x_train : array [n, p]
        Training rows: the only source of the statistics of the preprocessing. As in scikit-learn, a
        constant column is shifted but not scaled, and a row of zeros stays zero.

    Returns
    -------
    FourierMap
        Its functions work under jit, grad (in ``x`` and ``gamma``) and vmap, in the dtype of ``x``.

    Raises
    ------
    ValueError
        If ``key`` is not a PRNG key, or ``x_train`` is not a matrix, empty or not finite. The
        functions raise it for rows of another length, a ``dimension`` under 1 or a negative
        ``start``.

    Notes
    -----
    ``project`` costs one product [n, p] x [p, D] for a scalar configuration, and two for one
    configuration per row with different kernels, plus p D random numbers each. The random bits of
    feature j depend on the key and j alone; features of different ``dimension`` and ``start`` agree
    up to rounding.

    Examples
    --------
    >>> x = jnp.array([[0.0, 1.0], [1.0, 1.0]])
    >>> features = fourier_features(jax.random.key(0), x)
    >>> config = fourier_config(gamma=0.5)
    >>> phi = jax.jit(lambda x: features.apply(config, x, dimension=20_000))(x)
    >>> [round(k, 1) for k in (phi[0] @ phi.T / 20_000).tolist()]  # 1 and exp(-0.5)
    [1.0, 0.6]
    """
    checks.prng_key("key", key)
    x_train = _check_matrix("x_train", x_train)
    if x_train.size == 0:
        raise ValueError(f"x_train: expected a matrix with entries, got shape {x_train.shape}.")
    checks.check_finite("x_train", x_train, "entries")
    p = x_train.shape[1]
    shifts, scales = _column_statistics(x_train)

    def preprocess(index, x):
        x = _check_matrix("x", x, p)
        of_unit = jnp.reshape(index == _UNIT, (-1, 1))
        x = x / jnp.where(of_unit, _unsquarable(x), 1)
        squares = jnp.sum(x**2, axis=1, keepdims=True)
        norm = jnp.sqrt(jnp.where(squares == 0, 1, squares))
        divisor = jnp.where(of_unit, norm, 1)
        shift, scale = (a[index].reshape(-1, p).astype(x.dtype) for a in (shifts, scales))
        return (x - shift) / (scale * divisor)

    def project(config, x, dimension, start=0):
        dimension, start = _part(dimension, start)
        x = preprocess(jnp.asarray(config.preprocess), x)
        kernel = jnp.asarray(config.kernel)

        def along(stream):
            return x @ _draw_stream(key, stream, (p,), start, dimension, x.dtype)

        laplace = kernel == _LAPLACE
        if kernel.ndim == 0:
            projection = jax.lax.cond(laplace, lambda: along(_CAUCHY), lambda: along(_DIRECTIONS))
        else:
            zeros = jnp.zeros((len(x), dimension), x.dtype)
            cauchy, directions = (
                jax.lax.cond(jnp.any(rows), functools.partial(along, stream), lambda: zeros)
                for rows, stream in ((laplace, _CAUCHY), (~laplace, _DIRECTIONS))
            )
            projection = jnp.where(laplace[:, None], cauchy, directions)
        radius = jnp.abs(_draw_stream(key, _RADII, (), start, dimension, x.dtype))
        isotropic = jnp.reshape(kernel == _ISOTROPIC, (-1, 1))
        return projection / jnp.where(isotropic, radius[None], 1)

    def phases(dimension, start=0, dtype=float):
        dimension, start = _part(dimension, start)
        return _draw_stream(key, _PHASES, (), start, dimension, dtype)

    def apply(config, x, dimension, start=0):
        projection = project(config, x, dimension, start)
        return from_projection(config, projection, phases(dimension, start, projection.dtype))

    return FourierMap(apply, project, phases)


def from_projection(config: FourierConfig, projection: chex.Array, phases: chex.Array) -> jax.Array:
    """Return features ``sqrt(2) cos(s_c P + b)`` [n, D] of a projection P [n, D] and phases b [D].

    P comes from ``FourierMap.project`` for the preprocessing and kernel of ``config``.
    """
    gamma = jnp.asarray(config.gamma, projection.dtype)
    scale = jnp.where(jnp.asarray(config.kernel) == _GAUSSIAN, jnp.sqrt(2 * gamma), gamma)
    return math.sqrt(2) * jnp.cos(scale.reshape(-1, 1) * projection + phases[None])


def _standard_normal(v):
    return math.sqrt(2) * jax.scipy.special.erfinv(v)


def _standard_cauchy(v):
    # tan(pi v / 2), computed from the interval's end where it is ill-conditioned.
    near_end = jnp.abs(v) > 0.5
    tangent = jnp.tan(math.pi / 2 * jnp.where(near_end, jnp.sign(v) - v, v))
    return jnp.where(near_end, 1 / jnp.where(near_end, tangent, 1), tangent)


# The four streams of random numbers, by number for `fold_in`, and their maps of v ~ U(-1, 1).
_DIRECTIONS, _CAUCHY, _RADII, _PHASES = range(4)
_TRANSFORMS = (_standard_normal, _standard_cauchy, _standard_normal, lambda v: math.pi * (v + 1))


def _part(dimension, start):
    if checks.concrete(start):
        start = checks.integer("start", start, 0)
    return checks.integer("dimension", dimension, 1), start


def _draw_stream(key, stream, shape, start, dimension, dtype):
    """Return entries ``start`` to ``start + dimension`` of an endless stream, [*shape, dimension].

    Every block of ``_BLOCK`` entries has its own key.
    """
    if not checks.concrete(start):
        count = 1 + math.ceil((dimension - 1) / _BLOCK)  # enough for every start in a block
    else:
        count = math.ceil((start % _BLOCK + dimension) / _BLOCK)

    def block(number):
        block_key = jax.random.fold_in(jax.random.fold_in(key, stream), number)
        # Odd multiples of 2^-23 between -1 and 1 are exact in float32 in every compiled program.
        return 2 * jax.random.uniform(block_key, (*shape, _BLOCK), jnp.float32) - (1 - 2.0**-23)

    blocks = jax.vmap(block, out_axes=-2)(start // _BLOCK + jnp.arange(count))
    entries = blocks.reshape(*shape, count * _BLOCK)
    part = jax.lax.dynamic_slice_in_dim(entries, start % _BLOCK, dimension, axis=-1)
    # In 16 bits values near the interval's ends would become the ends, and their transforms NaN.
    # The name `float` would be a weak type and give way to float32.
    wide = checks.at_least_float32(jnp.result_type(dtype))
    return _TRANSFORMS[stream](part.astype(wide)).astype(dtype)


def _column_statistics(x):
    """Return each column's shift and scale for each of PREPROCESS: [4, p] each."""
    low, high = jnp.min(x, axis=0), jnp.max(x, axis=0)
    constant = low == high
    zeros, ones = jnp.zeros_like(low), jnp.ones_like(low)
    # The mean of equal values can differ from them by rounding.
    shifts = {"minmax": low, "standardize": jnp.where(constant, low, jnp.mean(x, axis=0))}
    # Scaled first, because squares of tiny or huge numbers underflow or overflow.
    extent = jnp.where(constant, 1, high - low)
    deviation = extent * jnp.std((x - low[None]) / extent[None], axis=0)
    scales = {"minmax": extent, "standardize": deviation}
    return (
        jnp.stack([shifts.get(name, zeros) for name in PREPROCESS]),
        jnp.stack([jnp.where(constant, 1, scales.get(name, ones)) for name in PREPROCESS]),
    )


def _unsquarable(x):
    """Return the largest entry of every row with squares out of range, else 1: [n, 1]."""
    # A row's direction does not depend on its scale, so the scale needs no derivative.
    most = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=1, keepdims=True))
    limits = jnp.finfo(x.dtype)
    squares = most**2
    fits = (squares > limits.tiny / limits.eps) & (squares < limits.max / x.shape[1])
    # XLA may multiply by a reciprocal, which is 0 for the very largest numbers.
    return jnp.where(fits | (most == 0), 1, jnp.minimum(most, limits.max / 8))


def _check_matrix(name, x, columns=None):
    x = checks.as_floating(name, x)
    if x.ndim != 2 or columns not in (None, x.shape[1]):
        rows = "a matrix" if columns is None else f"rows of length {columns}"
        raise ValueError(f"{name}: expected {rows}, got shape {x.shape}.")
    return x


def _index(argument, name, names):
    checks.one_of(argument, name, names)
    return names.index(name)
