"""The theorems of Zhu et al. 2022, with their hidden constants and their errors.

Their O, Omega and Theta hide constants. The caller supplies ``C`` for constants that scale a value,
and ``Bound.unspecified`` lists all of them. Functions named ``as_printed`` compute statements of
the paper that are false; :mod:`ntk.bounds.eigenvalue` has bounds that hold.

Reference: Zhu, Liu, Chrysos & Cevher (2022), "Generalization Properties of NAS under Activation and
Skip Connection Search".
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from ntk.bounds.bound import Bound, Bracket, Mixture, holds, lower_bound, upper_bound
from ntk.bounds.constants import activation_lipschitz, hermite_coefficients, table1, unit_features
from ntk.expectations.activations import Activation
from ntk.infinite.layer_expansions import parse_architecture
from ntk.internal.checks import positive, real_array, real_number
from ntk.kernels.symmetric import square_matrix, symmetric_matrix
from ntk.spectrum.eigenvalues import min_eigenvalue

_SETTING = (("inputs of norm 1, isotropic", None), ("N >= Omega(d^4)", None))


def eigen_nas_as_printed(K: chex.Array, d: int) -> Bound:
    """Return ``lambda_min(K) <= tr K / d <= |K|_F`` of Zhu et al. 2022, section 5.2; false.

    For K = I it reads 1 <= N / d <= sqrt(N), which needs N >= d and N <= d^2. On fixed data the
    value ranks networks like the bound ``tr K / N`` of :func:`diagonal_upper_bound`.

    Parameters
    ----------
    K : array [N, N], or [n, n, o, o] of o outputs: the matrix [n o, n o]
    d : int
        Dimension of the inputs.

    Raises
    ------
    ValueError
        If K is not a finite symmetric matrix, or d is not positive.

    Examples
    --------
    >>> dict(eigen_nas_as_printed(jnp.eye(10), 3072).assumptions)["N >= d"]
    False
    """
    K = symmetric_matrix(square_matrix(K))
    d = positive("d", d)
    score, norm = jnp.trace(K) / d, jnp.linalg.norm(K)
    terms = {"tr K / d": score, "|K|_F": norm, "tr K / N": jnp.trace(K) / len(K)}
    needs = (("N >= d", len(K) >= d), ("tr K / d <= |K|_F", holds(score <= norm)))
    return upper_bound(score, terms, assumptions=needs)


def zhu_variance_as_printed(
    activations: Sequence[Mixture], skips: Sequence[Any] | chex.Array | None = None
) -> Bound:
    """Return ``t = 3 (1 + eta^2) (2 + eta^2)^(L-3)``, the argument of f_S and f_T in Table 1.

    The paper uses t as a bound of the variance of all pre-activations. This is false: all-skip ReLU
    networks exceed it from L = 7 on, because the second moment of the features grows by a factor of
    2.904 per layer instead of 2. ``terms`` has the exact variance for unit inputs.

    Parameters
    ----------
    activations, skips
        L - 1 activations and L - 2 skips of :func:`ntk.network_kernel`. eta is the largest slope at
        z < 0 of a kinked activation, 0 without any.

    Raises
    ------
    ValueError
        If the architecture does not fit :func:`ntk.network_kernel`.

    Examples
    --------
    >>> from ntk.expectations.activations import relu
    >>> bound = zhu_variance_as_printed([relu] * 6, [1.0] * 5)
    >>> float(bound.value), round(float(bound.terms["exact"]), 2)
    (48.0, 60.31)
    """
    scales = [layer.scale[0] for layer in unit_features(activations, skips)]
    t, exact = jnp.asarray(_printed_variance(activations)), jnp.stack(scales).max() ** 2
    return Bound(
        "variance of the pre-activations <= value",
        value=t,
        terms={"exact": exact},
        vacuous=~jnp.isfinite(t),
        assumptions=(("value >= exact", holds(t >= exact)),),
    )


def zhu_theorem1_as_printed(
    n: int,
    d: int,
    *,
    activations: Sequence[Mixture],
    skips: Sequence[Any] | chex.Array | None = None,
    C: float,
) -> Bracket:
    """Return Theorem 1 of Zhu et al. 2022: bounds of the NTK's lambda_min at infinite width; false.

        lower    2 mu_1(s_1)^2 C (N / d) prod_{p=3}^L (beta_3(s_{p-1}) + alpha_{p-2})
        upper    (N / d) sum_{l=1}^L beta_1(s_{l-1})
                     prod_{p=2}^{l-1} (beta_1(s_{p-1}) + alpha_{p-2})
                     prod_{p=l+1}^L (beta_2(s_{p-1}) + alpha_{p-2})

    The lower bound is false for N > d, so for all N >= Omega(d^4) of the theorem: N / d is the
    smallest eigenvalue of X'X, while X X' has the eigenvalue 0. ``assumptions`` reports whether the
    value exceeds the exact K_ii. In the upper bound, s_0 and alpha_0 are undefined (here
    beta_1(s_0) = 1, alpha_0 = 0). Its factor N / d is too large for N > d, and makes the bound
    false for N < d (N = 1 has lambda_min = K_11). Without N / d the sum does not bound K_ii, for
    skips between activations that are not odd: three ReLU layers have the sum 12 and K_ii = 15.98.
    Use :func:`hermite_lower_bound`, :func:`schur_lower_bound` and :func:`diagonal_upper_bound`. The
    betas are :func:`table1`'s, at :func:`zhu_variance_as_printed`. ``terms`` has the product or sum
    without N / d, and the exact K_ii for unit inputs.

    Parameters
    ----------
    n, d : int
        Number of inputs, their dimension.
    activations, skips
        L - 1 activations and L - 2 skips of :func:`ntk.network_kernel`.
    C : float
        For the constant in Theta(N / d).

    Raises
    ------
    ValueError
        If the architecture does not fit :func:`ntk.network_kernel`, or n, d or C is not positive.

    Examples
    --------
    >>> from ntk.expectations.activations import relu
    >>> bounds = jax.jit(lambda C: zhu_theorem1_as_printed(81, 3, activations=[relu, relu], C=C))
    >>> lower, upper = bounds(1.0)
    >>> round(float(lower.value), 4), round(float(lower.terms["exact K_ii"]), 4)
    (13.5, 3.0)
    """
    betas, (steps1, steps2, steps3), alpha, t_holds = _zhu_constants(n, d, activations, skips, C)
    # Entry i belongs to layer i + 1: the part of W_l has i = l - 1.
    forward = [1.0] + [
        layer.beta1 * _product_of_factors(steps1[:i]) for i, layer in enumerate(betas)
    ]
    parts = [f * _product_of_factors(steps2[i:]) for i, f in enumerate(forward)]
    mu1 = hermite_coefficients(activations[0], terms=2)[1]
    product, total = _product_of_factors(steps3[1:]), jnp.stack(parts).sum()
    last = unit_features(activations, skips)[-1]
    exact = 2 * (last.second + last.tangent)[0]  # for inputs of norm 1
    lower, upper = 2 * mu1**2 * C * (n / d) * product, n / d * total
    common = (
        *_SETTING,
        ("L is not very large", None),
        ("alpha is 0 or 1", holds(jnp.all((alpha == 0) | (alpha == 1)))),
    )
    hidden = ("constant of Omega(d^4)", '"not very large" L')
    below = lower_bound(
        lower,
        {"mu_1": mu1, "product": product, "exact K_ii": exact},
        assumptions=(
            ("N <= d: else X X' is singular", n <= d),
            ("value <= exact K_ii", holds(lower <= exact)),
            ("pre-activation variances <= t", t_holds),
            *common,
        ),
        unspecified=("C, supplied: constant of Theta(N / d)", *hidden),
        probability=1 - math.exp(-d),
    )
    above = upper_bound(
        upper,
        {"sum": total, "exact K_ii": exact},
        assumptions=(
            ("N >= d: else N / d is too small", n >= d),
            ("sum >= exact K_ii", holds(total >= exact)),
            *common,
        ),
        unspecified=hidden,
        probability=1 - math.exp(-d),
    )
    return Bracket(below, above)


def zhu_theorem2_as_printed(
    n: int,
    d: int,
    *,
    activations: Sequence[Mixture],
    skips: Sequence[Any] | chex.Array | None = None,
    C: float,
) -> Bracket:
    """Return Theorem 2 of Zhu et al. 2022: Theorem 1 for networks of finite width m; also false.

        lower    C (N / d) prod_{i=2}^{L-1} (beta_3(s_i) + alpha_{i-1})
        upper    (N / d) sum_{k=0}^{L-1} C prod_{i=k+2}^{L-1} (beta_2(s_i) + alpha_{i-1})

    It has the errors of Theorem 1. In addition, the betas, which contain a factor 2, do not belong
    to the initialisation with all weights N(0, 1/m). There, J J' of a bias-free ReLU network is
    2^-(L-1) times Lemma 1's kernel. With tanh, sigmoid or swish the pre-activations vanish like
    1 / sqrt(m). J J' then tends to rank d, and its lambda_min to 0 as m grows, for every N > d.

    Parameters
    ----------
    n, d, activations, skips
        As in :func:`zhu_theorem1_as_printed`.
    C : float
        For the constants of both Theta.

    Raises
    ------
    ValueError
        If the architecture does not fit :func:`ntk.network_kernel`, or n, d or C is not positive.

    Examples
    --------
    >>> from ntk.expectations.activations import relu
    >>> lower, upper = zhu_theorem2_as_printed(12, 4, activations=[relu, relu], C=1.0)
    >>> round(float(lower.value), 4), round(float(upper.value), 4)
    (3.0, 9.0)
    """
    _, (_, steps2, steps3), _, t_holds = _zhu_constants(n, d, activations, skips, C)
    product = _product_of_factors(steps3[1:])
    total = jnp.stack([_product_of_factors(steps2[k + 1 :]) for k in range(len(steps2) + 1)]).sum()
    common = (*_SETTING, ("the betas belong to weights N(0, 1/m)", False))
    hidden = ("C, supplied: constant of Theta", "constants of Omega(d^4), Omega(m), Omega(1)")
    chance = "1 - (L - 1) exp(-Omega(m)) - exp(-Omega(1))"
    below = lower_bound(
        C * n / d * product,
        {"product": product},
        assumptions=(
            ("N <= d: else X X' is singular", n <= d),
            ("pre-activation variances <= t", t_holds),
            *common,
        ),
        unspecified=hidden,
        probability=f"{chance} - exp(-d)",
    )
    above = upper_bound(
        C * n / d * total,
        {"sum": total},
        assumptions=(("N >= d: else N / d is too small", n >= d), *common),
        unspecified=hidden,
        probability=chance,
    )
    return Bracket(below, above)


def zhu_theorem3(
    K: chex.Array,
    y: chex.Array,
    *,
    activations: Sequence[Mixture],
    delta: float = 0.05,
    C: float,
    label_aware: bool = False,
) -> Bound:
    """Return Theorem 3 of Zhu et al. 2022: the 0-1 error after one epoch of SGD on a wide network.

        error <= C (C_2 sqrt(y'y / (lambda_min N)) + sqrt(log(1/delta) / N))
        C_2 = sqrt(L) (3 Lip + 1)^(L-1)

    With C = 1 it is vacuous in its setting: labels +-1 have y'y = N, so the first term does not
    fall with N, and ``lambda_min <= K_ii`` keeps it above C_2 / sqrt(K_ii), which is 4^(L-1) for
    ReLU without skips. C_2 ignores skip connections, although they multiply Lipschitz constants.

    With ``label_aware``, the theorem before its last step: ``y'K^-1 y`` instead of its bound
    ``y'y / lambda_min``. It is never larger. Like the bound of Cao & Gu (2019), it falls with N for
    labels that are aligned with K.

    ``terms`` has the "eigenvalue term" or "label term" and the "confidence term", without C; C_1, a
    factor of the step size; C_2, Lip, lambda_min; and the smallest possible first term for this
    diagonal of K.

    Parameters
    ----------
    K : array [N, N]
        The NTK of the network, of depth L = ``len(activations) + 1``.
    y : array [N]
        Labels, +-1.
    activations : L - 1 activations, or {activation: weight}
    delta : float
        In (0, 1/e].
    C : float
        For the constants and logarithms in both O.
    label_aware : bool
        Whether to use the labels' alignment with K.

    Raises
    ------
    ValueError
        If K is not finite and symmetric, y does not fit, ``delta`` is out of range, C not positive.

    Examples
    --------
    >>> from ntk import relu
    >>> bound = zhu_theorem3(3 * jnp.eye(2), jnp.array([1, -1]), activations=[relu, relu], C=1.0)
    >>> round(float(bound.terms["eigenvalue term"]), 3), bool(bound.vacuous)
    (16.0, True)
    """
    K = symmetric_matrix(K)
    y = real_array("y", y).astype(K.dtype)
    if y.shape != K.shape[:1]:
        raise ValueError(f"y: expected shape [{len(K)}] as K has rows, got {y.shape}.")
    smallest = min_eigenvalue(K)
    if label_aware:
        factor = jax.scipy.linalg.cho_factor(K, lower=True)
        name, energy = "label term", y @ jax.scipy.linalg.cho_solve(factor, y)
    else:
        name, energy = "eigenvalue term", y @ y / smallest
    C = positive("C", C)
    if not 0 < real_number("delta", delta) <= 1 / math.e:
        raise ValueError(f"delta: expected a number in (0, 1/e], got {delta}.")
    if not isinstance(activations, Sequence) or not activations:
        raise ValueError("activations: expected a sequence of at least one, got none.")
    n, depth = len(y), len(activations) + 1
    lip = functools.reduce(jnp.maximum, [activation_lipschitz(s) for s in activations])
    growth = (3 * lip + 1) ** (depth - 1)
    C_2 = math.sqrt(depth) * growth
    definite = smallest > n * float(jnp.finfo(K.dtype).eps) * jnp.diag(K).max()  # beyond rounding
    data = C_2 * jnp.where(definite, jnp.sqrt(energy / n), jnp.inf)
    confidence = jnp.asarray(math.sqrt(math.log(1 / delta) / n))
    value = C * (data + confidence)
    return Bound(
        "E[0-1 error] <= value",
        value=value,
        terms={
            name: data,
            "confidence term": confidence,
            "C_1": math.sqrt(depth) / growth,
            "C_2": C_2,
            "Lip": lip,
            "lambda_min": smallest,
            "least for this diagonal": C_2 * jnp.sqrt(y @ y / n / jnp.diag(K).min()),
        },
        vacuous=~(value < 1),
        assumptions=(
            ("K is positive definite", holds(definite)),
            ("labels are +-1", holds(jnp.all(jnp.abs(y) == 1))),
            ("inputs of norm 1, isotropic", None),
            ("width m >= m-hat(lambda_min, delta, N, L), L not very large", None),
            ("no skip connections: C_2 ignores them", None),
        ),
        unspecified=("C, supplied: of both O, with the logarithms", "kappa of the step", "m-hat"),
        probability=1 - delta,
    )


def _printed_variance(activations: Sequence[Mixture]) -> float:
    parts = itertools.chain(*(s if isinstance(s, Mapping) else (s,) for s in activations))
    kinked = [s for s in parts if isinstance(s, Activation) and s.smooth is None]
    eta = max((abs(s.kink[0]) for s in kinked), default=0.0)
    return 3 * (1 + eta**2) * (2 + eta**2) ** (len(activations) - 2)


def _zhu_constants(n, d, activations, skips, C):
    """Return the betas, their sums with alpha_{l-1}, alpha, and whether t bounds the variances."""
    for name, value in ("n", n), ("d", d), ("C", C):
        positive(name, value)
    _, _, alpha, _ = parse_architecture(activations, skips, None)
    betas = [table1(s, _printed_variance(activations)) for s in activations]
    alpha = jnp.concatenate([jnp.zeros(1), alpha])
    steps = [[layer[i] + a for layer, a in zip(betas, alpha, strict=True)] for i in range(3)]
    t_holds = zhu_variance_as_printed(activations, skips).assumptions[0][1]
    return betas, steps, alpha, t_holds


def _product_of_factors(factors: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.multiply, factors, jnp.ones(()))
