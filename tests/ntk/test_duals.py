"""Test dual activations against mpmath, closed forms, finite differences and each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
from helpers import assert_close, assert_gradient, float64_only, tolerance

import ntk
from ntk.expectations import hermite as mehler
from ntk.expectations.activations import Activation
from ntk.expectations.gaussian import arc_cosines, arc_polynomials
from ntk.infinite import dual_activation, layer_expansions
from ntk.internal.jaxprs import inner_jaxprs


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def expectations(f, g, terms, wf, wg, sx, sy, p, q):
    """Return expectations of two layers and of their slopes, [2, n1, n2]."""
    how, kinks = layer_expansions.Resolution(terms, 0.5), layer_expansions.common_kinks([f, g])
    both = [
        layer_expansions.expand_layer(layer, w, s, 0 * s, kinks, how)
        for layer, w, s in ((f, wf, sx), (g, wg, sy))
    ]
    pairs = mehler.expectations(*both, (1, 0), mehler.Pair(p, q, 0 * p))
    return jnp.stack([value for value, _ in pairs])


SMOOTH = (ntk.sigmoid, ntk.tanh, ntk.swish, ntk.gelu, ntk.erf)
ACTIVATIONS = (ntk.relu, ntk.leaky_relu(0.1), *SMOOTH, ntk.identity)
NAMED = {s.name: s for s in ACTIVATIONS} | {s.derivative.name: s.derivative for s in ACTIVATIONS}
NAMED["gelu''"] = ntk.gelu.derivative.derivative
PAIRS = pytest.mark.parametrize(
    ("a", "b"),
    [
        (ntk.relu, ntk.leaky_relu(0.1)),
        (ntk.tanh, ntk.tanh),
        (ntk.relu, ntk.tanh),
        (ntk.swish, ntk.leaky_relu(0.1)),
        (ntk.gelu, ntk.sigmoid),
        (ntk.erf, ntk.identity),
    ],
    ids=repr,
)

# E[a(u) b(u')] in mpmath with 20 digits, by Gauss-Legendre panels or arc-cosine closed forms.
MPMATH = [
    ("relu'", "tanh'", 25.0, 25.0, 24.75, 0.07851912021872815),
    ("tanh'", "tanh'", 25.0, 25.0, 24.975, 0.103685028048305),
    ("tanh", "tanh", 1.0, 4.0, -1.8, -0.4321911386796933),
    ("swish'", "swish'", 4.0, 9.0, 3.0, 0.3445957993412868),
    ("relu", "swish", 1.0, 2.0, 0.4242640687119285, 0.2611285269304108),
    ("relu", "tanh", 25.0, 1.0, 4.999995, 1.514262259741623),
    ("relu'", "swish'", 1.0, 1.0, -0.999999, 0.09394028365472636),
    ("sigmoid", "gelu", 2.0, 3.0, 1.7146428199482244, 0.1556732129443195),
    ("gelu", "gelu", 1.0, 4.0, 1.2, 0.5684290810233084),
    ("gelu'", "gelu'", 25.0, 9.0, -12.0, 0.09033196523212051),
    ("erf'", "erf'", 25.0, 25.0, 24.975, 0.1236694152938918),
    ("erf", "erf", 0.5, 2.0, 0.4, 0.1628228290862526),
    ("erf", "erf", 1e-12, 1e-12, 5e-13, 6.3661977236630809e-13),
    ("erf'", "erf'", 1e10, 1e10, 9999999999.0, 3.6755259695245577e-6),
    ("gelu'", "gelu'", 1e10, 1e10, 9999999999.0, 0.49999860739424771),
    ("gelu''", "gelu''", 1e6, 1e6, 999999.0, 0.00013428701307535344),
    ("relu", "relu", 1.0, 1.0, -0.999999, 1.500527268686272e-10),
    ("relu'", "relu'", 1.0, 1.0, 0.999999999999, 0.4999997749234105),
    ("leaky_relu(0.1)", "relu", 2.0, 3.0, 1.224744871391589, 0.7325174616900794),
    ("relu", "relu'", 1.0, 2.0, 0.4242640687119285, 0.2593124822609312),
    ("identity", "tanh", 0.04, 1.0, 0.1, 0.06057055096021589),
    ("sigmoid'", "tanh'", 9.0, 16.0, -11.399999999999999, 0.03876342775537711),
]


def largest(jaxpr):
    own = [v.aval.size for e in jaxpr.eqns for v in e.outvars]
    return max([*own, *(largest(p.jaxpr) for e in jaxpr.eqns for p in inner_jaxprs(e))])


@pytest.mark.slow
@float64_only
@pytest.mark.parametrize(("a", "b", "vx", "vy", "c", "value"), MPMATH)
def test_duals_are_mpmaths_to_1e_12_of_themselves(a, b, vx, vy, c, value):
    assert abs(float(ntk.dual(NAMED[a], NAMED[b], vx, vy, c)) / value - 1) < 1e-12


@float64_only
@pytest.mark.parametrize("angle", [1e-9, 1e-6, 1e-3, 1.0, np.pi - 1e-3, np.pi - 1e-6])
def test_arc_cosines_are_exact_relative_to_themselves_at_every_angle(angle):
    # Truth: Taylor series of the closed forms near 0 and pi, else the closed forms.
    t = min(angle, np.pi - angle)
    p, q = np.sin(angle / 2) ** 2, np.sin((np.pi - angle) / 2) ** 2
    step, relu, gap = (float(x) for x in arc_cosines(jnp.array(p), jnp.array(q)))
    if t < 0.01:
        gap_angle = t**3 / 6 * (1 - t**2 / 20 * (1 - t**2 / 42))
        tilt = t**2 / 2 * (1 - t**2 / 12 * (1 - t**2 / 30))  # 1 - cos t
        small = gap_angle + tilt * (np.pi - t) if angle < 1 else tilt * t - gap_angle
        small /= 2 * np.pi
    else:
        small = 0.5 - (np.sin(t) + (np.pi - t) * np.cos(t)) / (2 * np.pi)
    expected = (np.pi - angle) / (2 * np.pi) if angle < 2 else t / (2 * np.pi)
    assert abs(step / expected - 1) < 1e-14
    assert abs((gap if angle < 2 else relu) / small - 1) < 1e-13
    assert abs(relu + gap - 0.5) < 1e-16 * 2


@pytest.mark.parametrize("degrees", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_pairs_of_kinks_are_integrals_over_the_angle(degrees):
    # u = r cos(t) and u' = r cos(t - angle), where t is uniform and r has a Rayleigh distribution.
    kinks, sizes, angle = ((-0.7, 1.9), (0.4, 2.6)), (1.3, 0.6), 1.2
    radial = {0: 1, 1: np.sqrt(np.pi / 2), 2: 2}[sum(degrees)]

    def product(t):
        us = np.multiply(sizes, (np.cos(t), np.cos(t - angle)))
        sides = [kink[int(u > 0)] for kink, u in zip(kinks, us, strict=True)]
        return np.prod(sides * us ** np.array(degrees))

    jumps = sorted(np.mod([np.pi / 2, -np.pi / 2, angle + np.pi / 2, angle - np.pi / 2], 2 * np.pi))
    integral = scipy.integrate.quad(product, 0, 2 * np.pi, points=jumps)[0] / (2 * np.pi)
    f, g = (Activation("", kink=k, degree=d) for k, d in zip(kinks, degrees, strict=True))
    actual = ntk.dual(f, g, sizes[0] ** 2, sizes[1] ** 2, np.prod(sizes) * np.cos(angle))
    assert_close(actual, radial * integral, f64=1e-9, f32=1e-5)


def test_arc_polynomials_keep_their_length_where_the_last_coefficient_rounds_to_zero(monkeypatch):
    # numpy 2.5 fits a last coefficient of 0.
    module = np.polynomial.chebyshev
    fit, full = module.chebfit, arc_polynomials.__wrapped__(8)
    monkeypatch.setattr(module, "chebfit", lambda *args: fit(*args) * (np.arange(21) < 20))
    short = arc_polynomials.__wrapped__(8)
    assert_close(short[:, :-1], full[:, :-1], f64=1e-8, f32=1e-8)
    assert np.all(short[:, -1] == 0)


def test_a_dual_takes_no_more_memory_than_some_rows_of_its_grid(monkeypatch):
    # Truth: the whole grid at once, which takes 94 GB at a variance of 1e6.
    dual = functools.partial(ntk.dual, ntk.tanh, ntk.swish, 4.0, 3.0)
    at_once = float(dual(1.0))
    monkeypatch.setattr(dual_activation, "_BLOCK", 200)
    jax.clear_caches()
    assert abs(float(dual(1.0)) / at_once - 1) < tolerance(1e-13, 1e-5)
    assert largest(jax.make_jaxpr(dual)(1.0).jaxpr) <= 2 * 200


@pytest.mark.slow
def test_a_smooth_pairs_nodes_follow_its_own_variance_traced_or_not():
    evaluated = []

    def counted(z):
        jax.debug.callback(lambda: evaluated.append(z.size))
        return jnp.tanh(z)

    s = Activation("counted", counted, strip=np.pi / 2)

    def nodes(variances, jit):
        evaluated.clear()
        run = jax.jit(ntk.dual, static_argnums=(0, 1)) if jit else ntk.dual
        actual = run(s, s, variances, variances, 0.3 * variances)
        expected = ntk.dual(ntk.tanh, ntk.tanh, variances, variances, 0.3 * variances)
        assert_close(actual, expected, f64=1e-15, f32=1e-6)
        jax.effects_barrier()
        return sum(evaluated)

    one = jnp.ones(4)
    assert nodes(one, False) == nodes(one, True) <= 4 * 2 * (133**2 + dual_activation._BLOCK)
    # An entry beyond the limit is NaN, and takes few nodes.
    evaluated.clear()
    far = ntk.dual(s, s, 1e9, 1e9, 0.0, max_variance=1.0)
    jax.effects_barrier()
    assert bool(jnp.isnan(far))
    assert sum(evaluated) <= nodes(one[:1], True)


@pytest.mark.long
@PAIRS
def test_mehlers_series_is_the_dual_at_any_variance_and_correlation(a, b):
    # Two independent methods: quadrature of the pair, and Hermite coefficients of each.
    rho = jnp.array([-1.0, -0.9, -0.3, 0.0, 0.5, 0.99, 1 - 1e-6, 1.0])
    one = jnp.ones(1)
    for order, (f, g) in enumerate(((a, b), (a.derivative, b.derivative))):
        vx, vy = 1.7, 0.6
        size = float(jnp.sqrt(ntk.dual(f, f, vx, vx, vx) * ntk.dual(g, g, vy, vy, vy)))
        pointwise = ntk.dual(f, g, vx, vy, rho * np.sqrt(vx * vy))
        sx, sy = jnp.sqrt(jnp.array([vx])), jnp.sqrt(jnp.array([vy]))
        p, q = (1 - rho)[None] / 2, (1 + rho)[None] / 2
        series = expectations((a,), (b,), 1024, one, one, sx, sy, p, q)[order]
        # float32 rounds rho = 1 - 1e-6 to 1 - 1.2e-6, which moves a step by 1e-3.
        assert float(jnp.abs(series - pointwise).max()) < tolerance(2e-12, 1e-3) * size


@pytest.mark.long
@PAIRS
def test_the_derivative_in_the_covariance_is_prices(a, b):
    vx, vy = 1.3, 0.8
    c = np.array([-1.0, -0.6, 0.0, 0.4, 1.0]) * np.sqrt(vx * vy)
    slope = jax.jit(jax.grad(lambda c: ntk.dual(a, b, vx, vy, c, max_variance=2.0).sum()))(c)
    assert_close(slope, ntk.dual(a.derivative, b.derivative, vx, vy, c), f64=1e-11, f32=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, pytest.param(1, marks=pytest.mark.long)])
@PAIRS
def test_all_derivatives_are_finite_differences(a, b, order):
    a, b = (a.derivative, b.derivative) if order else (a, b)
    value = lambda v: ntk.dual(a, b, *v, max_variance=2.0)  # noqa: E731
    assert_gradient(value, np.array([1.3, 0.8, 0.5]), f64=1e-9, f32=5e-3)


@pytest.mark.long
def test_a_variance_of_zero_gives_the_value_at_zero_and_no_nan():
    for a in ACTIVATIONS:
        dual = jax.value_and_grad(lambda v, a=a: ntk.dual(a, ntk.tanh, *v, max_variance=1.0))
        value, grads = jax.jit(dual)(jnp.array([0.0, 1.0, 0.0]))
        assert float(value) == pytest.approx(0.0, abs=1e-12)
        assert bool(jnp.isfinite(grads).all())
    assert float(ntk.dual(jnp.cos, jnp.cos, 0.0, 0.0, 0.0)) == pytest.approx(1.0, rel=1e-6)


def test_any_smooth_function_has_its_dual():
    # E cos(u) cos(u') = exp(-(vx + vy) / 2) cosh(c).
    activation = ntk.dual(jnp.cos, ntk.activation(jnp.cos, strip=np.inf), 1.5, 0.5, -0.4)
    assert_close(activation, np.exp(-1.0) * np.cosh(0.4), f64=1e-14, f32=1e-6)


@pytest.mark.slow
def test_duals_are_vmapped_jitted_and_broadcast():
    c = jnp.linspace(-1, 1, 5)
    plain = ntk.dual(ntk.relu, ntk.tanh, 1.0, jnp.ones(5), c)
    mapped = jax.jit(jax.vmap(lambda c: ntk.dual(ntk.relu, ntk.tanh, 1.0, 1.0, c)))(c)
    assert plain.shape == (5,)
    assert_close(mapped, plain, f64=1e-13, f32=1e-5)


def test_duals_run_in_a_shard_map():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("rows")
    of_correlation = functools.partial(ntk.dual, ntk.tanh, ntk.sigmoid, 1.0, 0.7)
    c = jnp.linspace(-0.5, 0.8, 3)
    divided = jax.jit(jax.shard_map(of_correlation, mesh=mesh, in_specs=rows, out_specs=rows))
    assert_close(divided(c), of_correlation(c), f64=1e-14, f32=1e-6)


def test_smooth_pairs_beyond_the_variance_asked_for_are_nan():
    assert bool(jnp.isnan(ntk.dual(ntk.tanh, ntk.tanh, 9.0, 9.0, 1.0, max_variance=4.0)))
    assert jnp.isnan(jax.jit(lambda v: ntk.dual(ntk.tanh, ntk.tanh, v, v, v))(30.0))
    # The limit holds for smooth pairs only.
    one_kink = jax.jit(lambda v: ntk.dual(ntk.relu, ntk.tanh, v, v, v))
    assert_close(one_kink(30.0), ntk.dual(ntk.relu, ntk.tanh, 30.0, 30.0, 30.0), f64=1e-13)


@pytest.mark.long
def test_duals_of_piecewise_functions_are_closed_forms():
    # P(u > 1/2, u' > 1/2) at rho = 0 is Phi(-1/2)^2; E step(u) u' = c times the density.
    step = ntk.activation(lambda z: jnp.where(z > 0.5, 1.0, 0.0))
    assert_close(ntk.dual(step, step, 1.0, 1.0, 0.0), 0.3085375387259869**2, f64=1e-14, f32=1e-5)
    expected = 0.3 * 0.3520653267642995
    assert_close(ntk.dual(step, ntk.identity, 1.0, 1.0, 0.3), expected, f64=1e-14, f32=1e-5)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_duals_keep_their_digits_at_tiny_and_huge_variances(size):
    assert_close(ntk.dual(ntk.relu, ntk.relu, size, size, size) / size, 0.5, f64=1e-15, f32=1e-6)


def test_equal_activations_are_equal_and_hash_alike():
    assert ntk.leaky_relu(0.1) == ntk.leaky_relu(0.1)
    assert ntk.tanh.derivative == ntk.tanh.derivative
    assert len({ntk.swish.derivative, ntk.swish.derivative}) == 1
    assert isinstance(ntk.activation(jnp.cos), Activation)


def test_a_step_against_a_point_mass_is_the_density_at_the_kink():
    """E[1(u > 0) delta(u')] = 1/2 of u's density at 0, 1 / sqrt(2 pi vy), at every correlation."""
    step, mass = ntk.relu.derivative, ntk.relu.derivative.derivative
    for c in (-0.9, 0.0, 0.4):
        expected = 0.5 / np.sqrt(2 * np.pi * 2.0)
        assert_close(ntk.dual(step, mass, 1.5, 2.0, c), expected, f64=1e-14, f32=1e-6)
