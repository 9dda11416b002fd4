"""Bounds of lambda_min and of the error: valid bounds hold, printed bounds fail.

"MATH" values were computed independently, in float64, by quadrature and dense eigenvalues.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DTYPES, assert_close, assert_gradient, tolerance, unit_rows

import ntk
from ntk import activation, bounds, gelu, leaky_relu, network_kernel, relu, sigmoid, swish, tanh
from ntk.bounds import hermite_lower_bound, schur_lower_bound, table1, zhu_theorem3
from ntk.bounds.bound import lower_bound, rounded, upper_bound
from ntk.bounds.constants import activation_lipschitz, hermite_coefficients

LEAKY = leaky_relu(0.3)


def smallest(K):
    return np.linalg.eigvalsh(np.asarray(K, np.float64))[0]


def held(bound):
    return dict(bound.assumptions)


def test_printed_bounds_are_bounds():
    assert rounded(0.0022352039, 7) == "0.002235203"
    assert rounded(-1.234e-12, 3) == "-1.24e-12"
    assert rounded(0.0022352031, 7, upper=True) == "0.002235204"
    assert rounded(0.5, 3, upper=True) == "0.5"
    printed = [str(lower_bound(jnp.asarray(2 / 3), {}))]
    printed += [str(upper_bound(jnp.asarray(value), {})) for value in (1 / 3, jnp.inf)]
    values = [text.splitlines()[0].partition("value = ")[2] for text in printed]
    assert values == ["0.666666", "0.333334", "inf"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("s", "mu1", "beta1", "beta2", "beta3"),
    [
        (relu, 1 / 2, 1, 1, 1),
        (LEAKY, 1.3 / 2, 1.09, 1.09, 1.09),
        (sigmoid, 0.206620964142, 1 / 8, 1 / 8, 0.064590894446),
        (tanh, 0.605705509602, 2, 2, 0.584034261384),
        (swish, 1 / 2, 1, 1.0167833872, 1 / 2),
    ],
    ids=str,
)
def test_table_1_with_swish_put_right(s, mu1, beta1, beta2, beta3):
    """MATH; the paper prints 1.22 for swish's beta_2. The last column at t = 3."""
    row = table1(s, 3.0)
    assert_close(hermite_coefficients(s)[1], mu1)
    assert_close([row.beta1, row.beta2, row.beta3], [beta1, beta2, beta3], f32=1e-5)


@pytest.mark.slow
def test_beta_3_of_sigmoid_and_tanh_falls_with_the_variance():
    """MATH: f_S(t), f_T(t), with the infimum at y = t; an asymptotic formula at t = 1e9."""
    assert_close(table1(sigmoid, 12).beta3, 0.036502141337, f32=1e-5)
    assert_close(table1(tanh, 24).beta3, 0.215715132551, f32=1e-5)
    assert_close(table1(tanh, 1e9).beta3, 8 / 3 / math.sqrt(2 * math.pi * 1e9), f64=1e-6, f32=1e-2)
    assert table1(tanh).beta3 == 0


def test_an_activation_with_a_value_at_0_has_no_beta_1():
    plain = activation(jax.nn.sigmoid, strip=math.pi)
    for s in (plain, activation(jnp.sign), relu.derivative):
        assert table1(s).beta1 == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("s", [relu.derivative, jnp.sign, lambda z: jnp.where(z > 1, 1.0, 0.0)])
def test_a_step_has_no_lipschitz_constant(s):
    s = activation(s)
    for mixture in (s, {tanh: 1.0, s: 0.5}):
        with pytest.raises(ValueError, match="activation: expected a Lipschitz function, got one"):
            activation_lipschitz(mixture)
    assert_close(activation_lipschitz({tanh: 1.0, s: 0.0}), 1.0, f32=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("layers", [[relu.derivative], [relu.derivative, relu]])
def test_the_hermite_bound_of_a_step_is_one(layers):
    bound = hermite_lower_bound(jnp.eye(3), activations=layers)
    exact = smallest(network_kernel(jnp.eye(3), activations=layers).ntk)
    assert 0.4 < bound.value <= exact * (1 + 1e-6)
    if len(layers) == 1:  # rows at right angles
        assert_close(bound.value, exact, f64=1e-6, f32=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s", [gelu, tanh, relu], ids=["gelu", "tanh", "relu"])
def test_lower_bounds_of_two_equal_inputs_are_rounding(s, dtype):
    """The eigenvalue is 0; each layer adds rounding."""
    x = unit_rows(0, 2, 3)[jnp.array([0, 1, 1])].astype(dtype)
    many = unit_rows(0, 50, 10)[np.r_[0, 0, 2:50]]
    for bound in (schur_lower_bound, hermite_lower_bound):
        assert bound(x, activations=[s] * 3).vacuous
        assert not bound(x[:2], activations=[s] * 3).vacuous
        assert s != relu or bound(many, activations=[s] * 2).vacuous


@pytest.mark.long
def test_the_schur_bound_of_near_duplicates_is_noise_for_every_kink():
    x = unit_rows(131, 2, 3)
    x[1] = x[0] + 1e-10 * np.random.default_rng(131).standard_normal(3)
    x[1] /= np.linalg.norm(x[1])
    for s in (relu, activation(jax.nn.hard_tanh)):
        assert schur_lower_bound(jnp.asarray(x), activations=[s]).vacuous


def test_a_bound_that_is_no_number_is_vacuous():
    assert lower_bound(jnp.array(jnp.nan), {}, 0.0).vacuous
    for seed in range(2):
        A = np.random.default_rng(seed).normal(size=(6, 3))  # K of rank 3
        options = {"activations": [relu], "C": 1e-9, "label_aware": True}
        bound = zhu_theorem3(jnp.asarray(A @ A.T), jnp.array([1.0, -1, 1, -1, 1, 1]), **options)
        assert bound.vacuous and held(bound)["K is positive definite"] is False


def test_hermite_coefficients_of_relu_in_closed_form():
    """E[relu(z) h_k(z)] from E relu = phi(0), E[z relu] = 1/2, E[z^2 relu] = 2 phi(0)."""
    phi = 1 / math.sqrt(2 * math.pi)
    assert_close(hermite_coefficients(relu, terms=4), [phi, 0.5, phi / math.sqrt(2), 0], f32=1e-5)


@pytest.mark.parametrize(
    ("s", "expected"),
    [
        (leaky_relu(-2.0), 2),
        (swish, 1.099839320129),  # MATH: at 2.39935728
        # at sqrt 2, where the slope Phi + z phi has the derivative (2 - z^2) phi = 0
        (gelu, (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi)),
        ({relu: 1.0, tanh: 0.5}, 1.5),  # at 0+
    ],
    ids=str,
)
def test_lipschitz_constants(s, expected):
    assert_close(activation_lipschitz(s), expected, f32=1e-5)


def test_the_lipschitz_constant_of_any_function_even_if_steep_between_the_nodes_of_a_scan():
    s = activation(lambda z: jnp.log1p(z * z))
    assert_close(activation_lipschitz(s), 1.0, f32=1e-5)  # 2z / (1 + z^2) at 1
    clip = activation(lambda z: jnp.clip(20 * (z - 3), -1, 1))
    assert_close(activation_lipschitz(clip), 20, f32=1e-5)
    steep = activation(lambda z: jnp.tanh(1e3 * (z - 0.7)))
    assert_close(activation_lipschitz(steep), 1e3, f32=1e-4)


NETWORKS = [([relu], [], None), ([{relu: 0.6, tanh: 0.4}, LEAKY], [-1.3], (0.7, 1.5, 2.0))]


@pytest.mark.long
@pytest.mark.parametrize(("network", "norms"), [(0, "equal"), (1, "unequal"), (1, "equal")])
def test_valid_bounds_enclose_the_smallest_eigenvalue(network, norms):
    activations, skips, variances = NETWORKS[network]
    options = {"activations": activations, "skips": skips, "variances": variances}
    x, lower = unit_rows(network, 12, 4), [schur_lower_bound, hermite_lower_bound]
    if norms == "unequal":
        x = x * np.random.default_rng(network).uniform(0.5, 2, (12, 1))
        lower = [schur_lower_bound]
    K = network_kernel(x, **options).ntk
    exact = smallest(K)
    slack = tolerance(1e-12, 1e-5) * np.trace(K)
    for function in lower:
        bound = function(x, **options)
        assert 0 < bound.value <= exact + slack
        assert not bound.vacuous and bound.unspecified == ()
    diagonal, frobenius = bounds.diagonal_upper_bound(K), bounds.frobenius_upper_bound(K)
    assert exact <= diagonal.value <= diagonal.terms["tr K / N"] + slack
    assert diagonal.terms["tr K / N"] <= frobenius.value + slack


@pytest.mark.long
@pytest.mark.parametrize(
    ("activations", "skips", "exact", "expected"),
    [
        ([relu, relu], [0.0], 0.57553, 0.39557),
        ([relu, relu, relu], [1.0, 1.0], 2.37295, 1.60431),
        ([relu, tanh, swish], [1.0, 0.0], 0.80909, 0.55842),
    ],
    ids=str,
)
def test_schur_bound_is_two_thirds_of_the_eigenvalue(activations, skips, exact, expected):
    """MATH section 9, to five decimals: N = 50, d = 10, rows of default_rng(0) normalised."""
    bound = schur_lower_bound(unit_rows(0, 50, 10), activations=activations, skips=skips)
    assert abs(bound.value - expected) < 6e-6 + tolerance(0, 1e-4)
    assert 0.62 < bound.value / exact < 0.7
    assert_close(sum(bound.terms.values()), bound.value)


@pytest.mark.long
def test_hermite_bound_is_a_quarter_of_the_eigenvalue_where_theorem_1s_term_is_0():
    """rho has rank 10 of 50: the term k = 1 of Theorem 1 vanishes, those above do not."""
    x = unit_rows(0, 50, 10)
    bound = hermite_lower_bound(x, activations=[relu, relu])
    assert 0.23 * 0.57553 < bound.value < 0.57553
    assert hermite_lower_bound(x, activations=[relu, relu], terms=4).value < bound.value


@pytest.mark.long
def test_hermite_bound_is_attained_by_orthonormal_inputs_and_an_odd_activation():
    """Then rho^{ok} = I for every k, and K = 2 (E s^2 + E s'^2) I; duals: MATH section 2."""
    bound = hermite_lower_bound(jnp.eye(4), activations=[ntk.erf])
    assert_close(bound.value, 2 * (2 / math.pi * math.asin(2 / 3) + 4 / (math.pi * math.sqrt(5))))


def test_one_input_has_its_kernel_as_schur_bound():
    bound = schur_lower_bound(jnp.ones((1, 1)), activations=[relu] * 3, skips=[1.0, 1.0])
    assert_close(bound.value, 15.97730386979)  # MATH section 2


@pytest.mark.long
def test_schur_bound_is_differentiable_in_skips():
    bound = functools.partial(schur_lower_bound, unit_rows(2, 5, 3), activations=[relu, relu])
    assert_gradient(lambda a: bound(skips=a).value, jnp.array([0.6]), f64=1e-7, f32=1e-2)


def test_hermite_bound_compiles_with_its_check_of_norms_left_open():
    x = jnp.asarray(unit_rows(2, 5, 3))
    plain = hermite_lower_bound(x, activations=[relu], terms=4)
    compiled = jax.jit(lambda x: hermite_lower_bound(x, activations=[relu], terms=4))(x)
    assert held(plain)["inputs have equal norms"] is True
    assert held(compiled)["inputs have equal norms"] is None
    assert_close(compiled.value, plain.value, f32=1e-2)


def test_identity_kernels_refute_the_eigen_nas_inequalities_and_not_the_diagonal():
    """tr I / d = N / d < 1 for N < d; tr I / d > |I|_F for N > d^2."""
    few = bounds.eigen_nas_as_printed(jnp.eye(10), 3072)
    assert few.value < 1 / 100
    assert held(few)["N >= d"] is False
    many = bounds.eigen_nas_as_printed(jnp.eye(16), 2)
    assert_close([many.terms["tr K / d"], many.terms["|K|_F"]], [8.0, 4.0])
    assert held(many)["tr K / d <= |K|_F"] is False
    for n in (10, 16):
        assert_close(bounds.diagonal_upper_bound(jnp.eye(n)).value, 1.0)
        assert_close(bounds.frobenius_upper_bound(jnp.eye(n)).value, 1.0)


@pytest.mark.long
def test_theorem_1_lower_bound_is_false_for_more_inputs_than_dimensions():
    """N = d^4 = 81, d = 3: 2 mu_1^2 N / d = 13.5, over the diagonal 3 and the eigenvalue."""
    lower, _ = bounds.zhu_theorem1_as_printed(81, 3, activations=[relu, relu], C=1.0)
    assert_close(lower.value, 13.5)
    assert_close(lower.terms["exact K_ii"], 3.0)
    assert held(lower)["N <= d: else X X' is singular"] is False
    assert held(lower)["value <= exact K_ii"] is False
    assert smallest(network_kernel(unit_rows(0, 81, 3), activations=[relu, relu]).ntk) < 0.05
    assert "FAILS" in str(lower)


@pytest.mark.long
@pytest.mark.parametrize(
    ("depth", "printed", "exact"), [(4, 12, 15.97730386979), (10, 1536, 9049.6)]
)
def test_theorem_1_upper_bound_without_its_n_over_d_is_under_the_diagonal(depth, printed, exact):
    """MATH: all-skip ReLU, exact to the digits given."""
    options = {"activations": [relu] * (depth - 1), "skips": [1.0] * (depth - 2), "C": 1.0}
    _, upper = bounds.zhu_theorem1_as_printed(20, 10, **options)
    assert_close([upper.terms["sum"], upper.value], [printed, 2 * printed])
    assert abs(upper.terms["exact K_ii"] / exact - 1) < 3e-4
    assert held(upper)["sum >= exact K_ii"] is False


@pytest.mark.long
def test_theorem_1_upper_bound_is_false_for_fewer_inputs_than_dimensions():
    """One input: lambda_min = K_11 = L = 3; printed is 3 / d."""
    _, upper = bounds.zhu_theorem1_as_printed(1, 10, activations=[relu, relu], C=1.0)
    assert upper.value < 0.31
    assert held(upper)["N >= d: else N / d is too small"] is False
    assert_close(network_kernel(np.eye(10)[:1], activations=[relu, relu]).ntk[0, 0], 3.0)


def test_theorem_1_by_hand_for_a_mixed_network():
    """tanh, leaky(.3), L = 3, alpha = 1: mu_1(tanh), beta(leaky) = 1.09, beta(tanh) = 2."""
    options = {"activations": [tanh, LEAKY], "skips": [1.0]}
    lower, upper = bounds.zhu_theorem1_as_printed(8, 4, C=0.1, **options)
    assert_close(lower.value, 2 * 0.605705509602**2 * 0.1 * 2 * 2.09)
    # l = 1: 2 * 2.09; l = 2: 2 * 2.09; l = 3: 1.09 * 2.
    assert_close(upper.value, 2 * (4.18 + 4.18 + 2.18))
    assert all(bound.unspecified[-1] == '"not very large" L' for bound in (lower, upper))
    assert lower.unspecified[0].startswith("C, supplied")


@pytest.mark.parametrize(("depth", "t", "exact"), [(7, 48, 60.31), (10, 384, 1469)])
def test_printed_t_does_not_bound_the_variance_of_relu_with_skips(depth, t, exact):
    """MATH, exact to the digits given."""
    bound = bounds.zhu_variance_as_printed([relu] * (depth - 1), [1.0] * (depth - 2))
    assert bound.value == t
    assert abs(bound.terms["exact"] / exact - 1) < 3e-4
    assert held(bound)["value >= exact"] is False


def test_printed_t_has_the_leaky_slope_in_it():
    assert_close(bounds.zhu_variance_as_printed([LEAKY, tanh, tanh]).value, 3 * 1.09 * 2.09)


def _jacobian_gram(key, x, width, s):
    """J J' of v.s(W_2 s(W_1 x)) with all weights N(0, 1 / width), by reverse mode."""
    shapes = (width, x.shape[1]), (width, width), (width,)
    pairs = zip(jax.random.split(key, 3), shapes, strict=True)
    weights = [width**-0.5 * jax.random.normal(*pair) for pair in pairs]
    rows = jax.jacrev(lambda w: s(s(x @ w[0].T) @ w[1].T) @ w[2])(weights)
    rows = [r.reshape(len(x), -1) for r in rows]
    return sum(r @ r.T for r in rows)


@pytest.mark.long
def test_theorem_2_lower_bound_fails_for_tanh_as_the_width_grows():
    """Simulation: J J' tends to rank d = 4 < N, lambda_min falling like 1 / m^2."""
    x = jnp.asarray(unit_rows(0, 12, 4))
    gram = jax.jit(_jacobian_gram, static_argnums=(2, 3))
    eigenvalues = [smallest(gram(jax.random.key(0), x, m, tanh)) for m in (64, 256)]
    lower, upper = bounds.zhu_theorem2_as_printed(12, 4, activations=[tanh, tanh], C=1.0)
    assert lower.value > 0.5
    assert eigenvalues[1] < eigenvalues[0] / 6
    assert eigenvalues[0] < 1e-3 * lower.value
    assert held(lower)["the betas belong to weights N(0, 1/m)"] is False
    # 3 (beta_2 + 1 + 1), beta_2 = 2
    assert_close(upper.value, 12.0)


def test_theorem_2s_initialisation_has_a_quarter_of_lemma_1s_relu_kernel():
    x = jnp.asarray(unit_rows(0, 12, 4))
    K = jax.jit(_jacobian_gram, static_argnums=(2, 3))(jax.random.key(1), x, 512, relu)
    assert abs(jnp.trace(K) / 12 - 0.75) < 0.1


def test_theorem_3_is_vacuous_for_relu_networks_at_every_sample_size():
    """K_ii = L for unit inputs, and y'y = N: at least C_2 / sqrt(L), for any such K."""
    for depth, n in (3, 5), (6, 20):
        K = depth * (unit_rows(depth, n, 8) @ unit_rows(depth, n, 8).T) ** 3
        y = np.where(np.arange(n) % 2, 1, -1)
        bound = zhu_theorem3(K, y, activations=[relu] * (depth - 1), C=1.0)
        assert_close(bound.terms["least for this diagonal"], 4 ** (depth - 1), f32=1e-5)
        assert bound.terms["eigenvalue term"] >= 4 ** (depth - 1) * (1 - 1e-5)
        assert bound.vacuous
        assert_close(bound.terms["Lip"], 1.0)


def test_theorem_3_by_hand():
    """K = diag(1, 4), y = (1, 1), L = 2, swish: C_2 = sqrt 2 (3 Lip + 1); 1 and (1 + 1/4) / 2."""
    K, y, lip = jnp.diag(jnp.array([1.0, 4.0])), jnp.ones(2), 1.099839320129
    options = {"activations": [swish], "delta": 0.1, "C": 0.5}
    C_2, confidence = math.sqrt(2) * (3 * lip + 1), math.sqrt(math.log(10) / 2)
    plain, aware = (zhu_theorem3(K, y, **options, label_aware=aware) for aware in (False, True))
    assert_close(plain.value, 0.5 * (C_2 + confidence), f32=1e-5)
    assert_close(aware.value, 0.5 * (C_2 * math.sqrt(0.625) + confidence), f32=1e-5)
    assert_close(plain.terms["C_1"], math.sqrt(2) / (3 * lip + 1), f32=1e-5)
    assert plain.probability == 0.9
    assert held(plain)["labels are +-1"] is True


def test_theorem_3_of_a_singular_kernel_is_infinite():
    for aware in (False, True):
        options = {"activations": [relu], "C": 1.0, "label_aware": aware}
        bound = zhu_theorem3(jnp.diag(jnp.array([1.0, 0.0])), jnp.ones(2), **options)
        assert bound.value == math.inf and bound.vacuous
        assert held(bound)["K is positive definite"] is False
