"""Run the packages under JAX's flags, all that can be on together, with uncached functions."""

import contextlib
import functools
import gc

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from helpers import long_except
from jax.experimental.sparse import BCSR
from problems import LOGISTIC, mean_squares, separate_penalties

import bilevel
import ntk
from bilevel.linear import matrices, ridge_weights

ROWS, WEIGHTS = 16, 8


@contextlib.contextmanager
def together():
    promotions = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    checks = jax.debug_nans(True), jax.debug_infs(True), jax.enable_checks(True)
    with contextlib.ExitStack() as stack:
        for flag in (*promotions, *checks):
            stack.enter_context(flag)
        yield


def rows(seed=0, width=WEIGHTS):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, width)) / width**0.5
    y = np.sign(x[:, 0] + 0.3 * rng.normal(size=ROWS))
    return jnp.asarray(x, float), jnp.asarray(y, float)


SQUARES = bilevel.Problem(separate_penalties, mean_squares)  # quadratic in the weights


def mixture(w, alpha, batch):
    """A mixture of three features, for alpha on the simplex."""
    x, y = batch
    features = alpha[0] * x + alpha[1] * jnp.tanh(x) + alpha[2] * jnp.sin(x)
    return 0.5 * jnp.mean((features @ w - y) ** 2)


MIXTURE = bilevel.Problem(lambda w, *args: mixture(w, *args) + 0.05 * jnp.sum(w**2), mixture)
# Its lower Hessian is singular along differences of weights.
SUM = bilevel.Problem(lambda w, a, b: (jnp.sum(w) - a[0]) ** 2, lambda w, a, b: jnp.sum(w**2))


def search(problem, solver, alpha=None, optimizer=None, steps=2, data=rows, **options):
    if "batches" in options:
        options["key"] = jax.random.key(0)
    alpha = jnp.full(WEIGHTS, -2.0) if alpha is None else alpha
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer  # adam fails: strict promotion
    args = alpha, jnp.zeros(WEIGHTS), data(0), data(1)
    return bilevel.search(problem, solver, optimizer, *args, steps=steps, **options)


def hypergradient(problem, solver, alpha, weights=WEIGHTS, **options):
    args = alpha, jnp.zeros(weights), rows(0, weights), rows(1, weights)
    return helpers.hypergradient(problem, solver, *args, diagnostics=True, **options)


def single(method, optimizer=None, **options):
    batches = bilevel.partition(5)
    return search(LOGISTIC, method, optimizer=optimizer, steps=8, batches=batches, **options)


def logistic_search(make, **options):
    return lambda: search(LOGISTIC, make(), **options)


def simplex_search(make):
    """Search on the simplex; ``make`` makes the optimizer of alpha."""
    return lambda: search(MIXTURE, bilevel.unrolled(0.3, 2), jnp.full(3, 1 / 3), make())


def sparse_rows(seed):
    x, y = rows(seed)
    return BCSR.fromdense(jnp.where(x > 0, x, 0)), y


unrolled = bilevel.unrolled
IMPLICIT = bilevel.implicit(unrolled(0.1, 5))
DESCENT, DRAWS = functools.partial(unrolled, 0.3, 5), bilevel.minibatches(4)
METHODS = bilevel.ma_soba, bilevel.saba, bilevel.amigo, bilevel.bome, bilevel.f2sa, bilevel.meha
SEARCHES = {method.__name__: lambda method=method: single(method(0.1)) for method in METHODS} | {
    "unrolled": logistic_search(DESCENT),
    "truncated": logistic_search(lambda: bilevel.unrolled(optax.sgd(0.3, 0.9), 5, backprop=2)),
    "implicit": logistic_search(bilevel.implicit, diagnostics=True),
    "lbfgs, dense": logistic_search(lambda: bilevel.implicit(bilevel.lbfgs(), bilevel.dense())),
    "nystrom": logistic_search(lambda: bilevel.implicit(DESCENT(), bilevel.nystrom(4, 1e-2))),
    "ridge": lambda: search(
        SQUARES,
        bilevel.ridge(lambda alpha, x: x, lambda alpha: ROWS * jnp.exp(alpha[0])),
        jnp.zeros(1),
        diagnostics=True,
    ),
    "one_step": logistic_search(lambda: bilevel.one_step(optax.sgd(0.3))),
    "distilled": logistic_search(lambda: bilevel.distilled(0.3, decay=0.5)),
    "batches": logistic_search(lambda: DESCENT(batches=DRAWS), batches=DRAWS),
    "sparse batches": lambda: search(
        SQUARES, unrolled(0.1, 2), jnp.zeros(1), data=sparse_rows, batches=DRAWS
    ),
    "under jit": lambda: jax.jit(lambda a: search(LOGISTIC, DESCENT(), a).alpha)(
        jnp.zeros(WEIGHTS)
    ),
    "exponentiate": simplex_search(
        lambda: optax.chain(bilevel.tangent(), optax.sgd(0.1), bilevel.exponentiate())
    ),
    "softmax": simplex_search(lambda: bilevel.softmax(optax.sgd(0.1))),
    "spaba and paced": lambda: single(bilevel.spaba(), bilevel.paced(), diagnostics=True),
    "info, 600 weights": lambda: hypergradient(SQUARES, IMPLICIT, jnp.zeros(1), 600),
    "info, free directions": lambda: hypergradient(SUM, unrolled(0.01, 5), jnp.ones(1), 600),
    "forward mode": lambda: hypergradient(SQUARES, DESCENT(), jnp.zeros(1), mode="forward"),
    "steps in a box": logistic_search(lambda: unrolled(bilevel.projected("box", 0.0, 0.1), 5)),
    "truncation": lambda: bilevel.truncation(LOGISTIC, 0.3, 5)(
        jnp.full(WEIGHTS, -2.0), jnp.zeros(WEIGHTS), rows(0), rows(1)
    ),
}


def size(alpha):
    return jnp.exp(alpha[0])


PARTS = {"box": ("box", -jnp.inf, size), "simplex": "simplex", "free": None}
CONSTRAINED = {
    "affine": bilevel.projected("affine", np.ones((1, WEIGHTS)), jnp.exp),
    "box": bilevel.projected("box", -np.inf, size),
    "box_equality": bilevel.projected("box_equality", -0.3, np.inf, 1.0, size),
    "elastic_net": bilevel.proximal("elastic_net", size, size),
    "group_l1": bilevel.proximal("group_l1", size, [[0, 1], [2, 3]]),
    "l1": bilevel.proximal("l1", size),
    "l1_ball": bilevel.projected("l1_ball", size),
    "l2_ball": bilevel.projected("l2_ball", size),
    "own_prox": bilevel.proximal(lambda w, step, alpha: w / (1 + step * size(alpha))),
    "own_set": bilevel.projected(lambda w, alpha: jnp.minimum(w, size(alpha))),
    "product": bilevel.projected(PARTS),
    "simplex": bilevel.projected("simplex", size),
    "total_variation": bilevel.proximal("total_variation", size),
}


def constrained(name):
    """Return a hypergradient with its estimate, for a quadratic loss and alpha = exp(-2)."""

    def lower(w, alpha, batch):
        w = jnp.concatenate([w[part] for part in PARTS]) if name == "product" else w
        return mean_squares(w, alpha, batch)

    sizes = dict(zip(PARTS, (3, 3, 2), strict=True))
    w0 = {k: jnp.zeros(n) for k, n in sizes.items()} if name == "product" else jnp.zeros(WEIGHTS)
    problem, solver = bilevel.Problem(lower, lower), bilevel.implicit(CONSTRAINED[name])
    args = jnp.full(1, -2.0), w0, rows(0), rows(1)
    return helpers.hypergradient(problem, solver, *args, diagnostics=True)


def linear_models():
    x, y = rows()
    sparse = matrices.sparse(scipy.sparse.csr_array(np.asarray(x)))
    return [ridge_weights(a, y, 0.1, method="cg") for a in (x, sparse)]


def spectral():
    rng = np.random.default_rng(0)
    features, y = jnp.asarray(rng.normal(size=(12, 3, 5)), float), rows()[1][:12]
    estimator = bilevel.spectral_estimator((features, y), (features[::-1], y[::-1]))
    return bilevel.spectral_alpha(features, y, whiten=True), estimator.alpha


def discrete_choices():
    ranks = jnp.array([1.0, 3.0, 2.0, 4.0, 5.0])
    agreement = bilevel.rank_agreement(jax.random.key(0), jnp.arange(5.0), ranks)
    return bilevel.top_k(jnp.array([0.5, 0.3, 0.2]), 2), agreement


def infinite_kernels():
    x, _ = rows()
    kernels = [ntk.network_kernel(x, activations=[a, a]).ntk for a in (ntk.relu, ntk.tanh)]
    return kernels, ntk.dual(ntk.gelu, ntk.gelu, 1.0, 1.0, jnp.linspace(-0.9, 0.9, 5))


def mixtures_of_kernels():
    blocks = ntk.mixture_blocks(rows()[0], [ntk.relu, ntk.tanh])
    ntk.certify_simplex(np.asarray(blocks))
    return ntk.mixture_kernel(jnp.array([0.5, 0.5]), blocks)


def networks():
    nets = ntk.networks
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 6, 2)), float)
    mixed = nets.act({ntk.relu: 0.3, ntk.tanh: 0.7})
    layers = nets.conv(3), nets.act(ntk.relu), nets.average_pool(2), nets.conv(3), mixed
    return nets.serial(*layers, nets.residual(nets.conv(3)), nets.flatten(), nets.dense()).kernel(x)


def network():
    rng = np.random.default_rng(1)
    params = {"a": rng.normal(size=(WEIGHTS, 64)), "b": rng.normal(size=(64, 3)) / 8}
    apply = lambda params, x: jax.nn.relu(x @ params["a"]) @ params["b"]  # noqa: E731
    return apply, jax.tree.map(lambda a: jnp.asarray(a, float), params)


def finite_kernels():
    apply, params = network()
    x, _ = rows()
    expanded = ntk.taylor_expand(apply, params, 1)(params, x)
    return ntk.empirical_kernel(apply, params, x), ntk.empirical_nngp(apply, params, x), expanded


def operators():
    x, y = rows()
    key = jax.random.key(0)
    K = ntk.KernelOperator(lambda a, b: jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, -1)), x)
    partial = ntk.partial_cholesky(K, 4, key=key)
    fit = ntk.iterative_regression(K, y, penalty=0.1, preconditioner=partial)
    interval = ntk.eigenvalue_interval(K, key=key, steps=4, block=2)
    return fit, interval, ntk.leave_one_out_estimate(K, fit, key=key, probes=2)


def regressions():
    x, y = rows()
    K = ntk.network_kernel(x, activations=[ntk.relu])
    at = x[:3] + 0.1
    cross = ntk.network_kernel(at, x, activations=[ntk.relu])
    prior = ntk.network_kernel(at, activations=[ntk.relu])
    ntk.certified_min_eigenvalue(K.ntk)
    return (
        ntk.kernel_regression(K.ntk, y, penalty=0.1).weights,
        ntk.gradient_flow(K.ntk, y, jnp.array([0.0, 1.0])),
        ntk.excess_risk_term(K.ntk, y),
        ntk.posterior(K.ntk, y, cross.ntk, prior.ntk, penalty=0.1),
        ntk.ensemble(K, y, cross, prior.nngp, penalty=0.1),  # t = infinity
    )


def bounds():
    x, _ = rows()
    x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    layers = [ntk.relu, ntk.relu]
    return (
        ntk.bounds.diagonal_upper_bound(x @ x.T).value,
        ntk.bounds.schur_lower_bound(x, activations=layers).value,
        ntk.bounds.hermite_lower_bound(x, activations=layers).value,
    )


def scores():
    apply, params = network()
    batch = rows()[0], jnp.arange(ROWS) % 3
    names = "naswot", "synflow", "jacov", "zico", "min_eigenvalue", "te_nas", "log_traces", "snip"
    return [getattr(ntk.scores, name)(jax.random.key(0), apply, params, batch) for name in names]


OTHERS = linear_models, spectral, discrete_choices, infinite_kernels, mixtures_of_kernels, networks
OTHERS += finite_kernels, operators, regressions, bounds, scores
CALLS = {name.replace(" ", "_"): call for name, call in SEARCHES.items()}
CALLS |= {call.__name__: call for call in OTHERS}
FAST = "unrolled", "one_step", "ma_soba"
FAST += "linear_models", "discrete_choices", "finite_kernels"
SLOW = [pytest.param("implicit", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", SLOW + long_except(FAST, sorted(CALLS.keys() - {"implicit"})))
def test_a_call_passes_under_flags_of_jax(name):
    with together():
        jax.block_until_ready(CALLS[name]())


@pytest.mark.long
@pytest.mark.parametrize("name", CONSTRAINED)
def test_constrained_problems_pass_under_flags_and_keep_their_values(name):
    """Infinity is allowed as a bound; an estimate of infinity becomes the largest number."""
    with together():
        result = constrained(name)
    largest = np.finfo(result.info.error_estimate.dtype).max
    assert (result.info.error_estimate == largest) == (int(result.info.reason) > 0)
    assert (int(result.info.reason) == 10) == name.startswith("own")
    np.testing.assert_array_equal(result.grad, constrained(name).grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("implicit", marks=pytest.mark.long), "ma_soba", "finite_kernels"]
)
def test_no_tracer_leaks(name):
    # JAX collects garbage 60 times per search. Without older objects this is fast.
    gc.collect()
    gc.freeze()
    try:
        with jax.checking_leaks():
            CALLS[name]()
    finally:
        gc.unfreeze()


def test_a_search_runs_without_jit():
    with jax.disable_jit():
        result = search(LOGISTIC, bilevel.unrolled(0.3, 5))
    assert np.isfinite(result.alpha).all()


def lower_plus(term):
    return bilevel.Problem(lambda w, *args: LOGISTIC.lower(w, *args) + term(w), LOGISTIC.outer)


@pytest.mark.slow
def test_a_nan_in_the_users_loss_raises_inside_loops():
    problem = lower_plus(lambda w: jnp.sum(jnp.sqrt(w - 1)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        search(problem, bilevel.unrolled(0.3, 2))


def test_a_promotion_in_the_users_loss_raises():
    problem = lower_plus(lambda w: jnp.sum((w - jnp.arange(WEIGHTS)) ** 2))
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="promotion"):
        search(problem, bilevel.implicit(bilevel.lbfgs()))


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "mode"), [(5, "reverse"), (1100, "forward")])
def test_under_debug_infs_the_largest_number_stands_for_infinity(weights, mode):
    problem = bilevel.Problem(SUM.lower, lambda w, alpha, batch: 0.01 * w[0] ** 2)
    arguments = problem, bilevel.unrolled(1e-5, 5), jnp.ones(1), weights
    with jax.debug_infs(True):
        info = hypergradient(*arguments, mode=mode).info
    assert info.error_estimate == np.finfo(info.error_estimate.dtype).max
    assert int(info.reason) == 2 and not info.converged
    assert hypergradient(*arguments).info.error_estimate == np.inf
