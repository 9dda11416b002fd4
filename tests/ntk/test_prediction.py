"""Predictions with covariance, against neural-tangents, weights in numpy, and trained networks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cast, finite_differences, flatten, tolerance

import ntk
from ntk.regression.gaussian_process import Prediction

N, M, OUT = 5, 3, 2  # inputs to train on, others, outputs
TIMES = np.array([0.0, 0.3, 2.0, np.inf])
rng = np.random.default_rng(0)
X = rng.normal(size=(N + M, 4))
LABELS = {"one output": rng.normal(size=N), "two outputs": rng.normal(size=(N, OUT))}
Y = LABELS["two outputs"]
network = functools.partial(ntk.network_kernel, activations=[ntk.erf, ntk.relu])


class Pair(NamedTuple):
    nngp: jax.Array
    ntk: jax.Array


@functools.cache
def given():
    return network(X[:N]), Y, network(X[N:], X[:N]), network(X[N:]).nngp


# A linear network of two outputs, f = F w with w ~ N(0, S) at time 0: its NNGP is F S F' and its
# NTK is F F'. The outputs share weights.
FEATURES = rng.normal(size=(N + M, OUT, 30)) / 5
ROOT = rng.normal(size=(30, 30)) / 5
LINEAR = Pair(
    np.einsum("iap,pq,jbq->ijab", FEATURES, ROOT @ ROOT.T, FEATURES),
    np.einsum("iap,jbp->ijab", FEATURES, FEATURES),
)
TRAIN, CROSS = (Pair(*(K[rows, :N] for K in LINEAR)) for rows in (slice(N), slice(N, None)))
FULL = TRAIN, Y, CROSS, LINEAR.nngp[N:, N:]


def trained(t):
    """Mean and covariance of the linear network's outputs after a time t, by its weights."""
    design = FEATURES[:N].reshape(-1, 30)
    values, V = np.linalg.eigh(design.T @ design)
    values = np.where(values > 1e-10, values, 0)  # n outputs < weights: the rest does not move
    decay = np.where(values > 0, np.exp(-values * np.where(values > 0, t, 0)), 1)
    forgets = V * decay @ V.T  # w_t = forgets w_0 + learnt
    learnt = np.linalg.pinv(design) @ Y.ravel()
    learnt = learnt - forgets @ learnt
    covariance = forgets @ ROOT @ ROOT.T @ forgets.T
    mean = FEATURES[N:] @ learnt
    return mean, np.einsum("iap,pq,jbq->ijab", FEATURES[N:], covariance, FEATURES[N:])


@pytest.mark.long
@pytest.mark.parametrize("y", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_ensembles_are_those_of_neural_tangents(y, penalty):
    def kernel_fn(a, b, get, **_):
        kernels = network(a, b)
        return getattr(kernels, get) if isinstance(get, str) else Pair(kernels.nngp, kernels.ntk)

    (train, _, cross, prior), columns = given(), jnp.asarray(y).reshape(N, -1)
    options = {"learning_rate": columns.size, "diag_reg": penalty, "diag_reg_absolute_scale": True}
    ensemble_of = ntk.neural_tangents().predict.gradient_descent_mse_ensemble
    peer = ensemble_of(kernel_fn, jnp.asarray(X[:N]), columns, **options)
    prediction = ntk.ensemble(train, y, cross, prior, t=TIMES[:3], penalty=penalty)
    truth = peer(jnp.asarray(TIMES[:3]), jnp.asarray(X[N:]), ("ntk",), compute_cov=True).ntk
    assert prediction.mean.shape == (3, M, *y.shape[1:])
    assert prediction.covariance.shape == (3, M, M)
    assert_close(tuple(prediction), tuple(truth), f64=1e-11)
    limit = ntk.ensemble(train, y, cross, prior, penalty=penalty)
    truth = peer(None, jnp.asarray(X[N:]), ("ntk",), compute_cov=True).ntk
    assert_close(tuple(limit), tuple(truth), f64=1e-11)


@pytest.mark.long
def test_ensembles_are_linear_networks_whose_weights_are_trained():
    prediction = ntk.ensemble(*FULL, t=TIMES)
    assert prediction.mean.shape == (4, M, OUT)
    assert prediction.covariance.shape == (4, M, M, OUT, OUT)
    for i, t in enumerate(TIMES):
        assert_close([f[i] for f in prediction], list(trained(t)), f64=1e-10)
    assert_close(prediction.std() ** 2, np.einsum("tiiaa->tia", prediction.covariance))
    alone = ntk.ensemble(*given())
    assert alone.std().shape == (M,)
    assert_close(alone.std() ** 2, np.diag(alone.covariance))


def test_a_kernel_function_stands_for_its_matrices():
    places = {"x": X[:N], "at": X[N:]}
    for get in ("nngp", "ntk"):
        K, cross, prior = (getattr(network(*a), get) for a in ([X[:N]], [X[N:], X[:N]], [X[N:]]))
        prediction = ntk.posterior(network, Y, **places, get=get, penalty=0.2)
        expected = ntk.posterior(K, Y, cross, prior, penalty=0.2)
        assert_close(tuple(prediction), tuple(expected), f64=1e-13, f32=1e-5)
    prediction = ntk.ensemble(network, Y, **places, t=TIMES[:3])
    expected = ntk.ensemble(*given(), t=TIMES[:3])
    assert_close(tuple(prediction), tuple(expected), f64=1e-13, f32=1e-5)


@pytest.mark.long
def test_wide_networks_trained_by_gradient_descent_are_an_ensemble():
    width, networks, t, steps = 512, 1000, 1.0, 60
    x = jnp.array([[1.0, 0.2], [-0.3, 0.9], [0.5, -0.8], [0.7, 0.7]])
    y = jnp.array([1.0, -1.0, 0.5])

    def apply(w, x):  # the NTK parameterisation of network_kernel, variances 1 and 2
        return jax.nn.relu(x @ w[0]) @ w[1] * jnp.sqrt(2 / width)

    def train(key):
        keys = jax.random.split(key)
        w = jax.random.normal(keys[0], (2, width)), jax.random.normal(keys[1], (width,))

        def loss(w):
            return jnp.sum((apply(w, x[:3]) - y) ** 2) / 2

        def step(_, w):
            return jax.tree.map(lambda w, g: w - t / steps * g, w, jax.grad(loss)(w))

        return apply(jax.lax.fori_loop(0, steps, step, w), x)

    ends = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), networks))
    of = functools.partial(ntk.network_kernel, activations=[ntk.relu])
    prediction = ntk.ensemble(of(x[:3]), y, of(x, x[:3]), of(x).nngp, t=t)
    # Four standard errors of 1000 networks, and 3 % for width and steps.
    std = np.asarray(prediction.std())
    near = 4 * std / np.sqrt(networks) + 0.03
    assert (np.abs(np.mean(ends, 0) - prediction.mean) < near).all()
    near = np.outer(std, std) * (4 * np.sqrt(2 / networks) + 0.03)
    assert (np.abs(np.cov(ends, rowvar=False) - prediction.covariance) < near).all()


@pytest.mark.long
def test_regression_of_several_outputs_is_one_large_system():
    (train, y, cross, _), n = FULL, N * OUT

    def flat(K):
        return np.transpose(K, (0, 2, 1, 3)).reshape(K.shape[0] * OUT, n)

    K, k = flat(train.ntk) + 0.1 * np.eye(n), flat(cross.ntk)
    fit = ntk.kernel_regression(train.ntk, y, penalty=0.1)
    assert_close(fit.predict(cross.ntk), (k @ np.linalg.solve(K, y.ravel())).reshape(M, OUT))
    truth = y.ravel() @ np.linalg.solve(flat(train.ntk), y.ravel())
    assert_close(tuple(ntk.excess_risk_term(train.ntk, y)), (truth, np.sqrt(truth / N)), f64=1e-8)
    refits = []
    for i in range(N):
        others = np.delete(np.arange(N), i)
        part = ntk.kernel_regression(train.ntk[np.ix_(others, others)], y[others], penalty=0.1)
        refits.append(y[i] - part.predict(train.ntk[i, others][None])[0])
    assert_close(fit.leave_one_out(), np.array(refits))


def test_independent_outputs_are_the_same_in_either_form():
    def several(K):
        return jnp.einsum("ij,ab->ijab", K, jnp.eye(OUT))

    train, _, cross, prior = given()
    full = [Pair(several(k.nngp), several(k.ntk)) for k in (train, cross)]
    one, other = ntk.ensemble(*given()), ntk.ensemble(full[0], Y, full[1], several(prior))
    assert_close(tuple(other), (one.mean, several(one.covariance)))
    one = ntk.posterior(train.nngp, Y, cross.nngp, prior, penalty=0.1)
    other = ntk.posterior(full[0].nngp, Y, full[1].nngp, several(prior), penalty=0.1)
    assert_close(tuple(other), (one.mean, several(one.covariance)))
    fits = ntk.kernel_regression(train.ntk, Y), ntk.kernel_regression(full[0].ntk, Y)
    assert_close(fits[0].weights, fits[1].weights)
    assert_close(fits[0].leave_one_out(), fits[1].leave_one_out())
    assert_close(fits[0].predict(cross.ntk), fits[1].predict(full[1].ntk))


def test_on_the_training_inputs_variance_ends():
    train, _, cross, prior = given()
    K = train.nngp
    prediction = ntk.ensemble(train, Y, train, K, t=TIMES)
    assert_close(prediction.mean[-1], Y, f32=1e-2)
    assert_close(prediction.covariance[0], K)
    assert (np.abs(prediction.covariance[-1]) < tolerance(1e-12, 1e-3)).all()
    assert (np.abs(ntk.posterior(K, Y, K, K).covariance) < tolerance(1e-12, 1e-3)).all()
    truth = 0.1 * K @ np.linalg.inv(K + 0.1 * np.eye(N))
    assert_close(ntk.posterior(K, Y, K, K, penalty=0.1).covariance, truth)
    last_layer = [ntk.Kernels(nngp=k.nngp, ntk=k.nngp) for k in (train, cross)]
    limit = ntk.ensemble(last_layer[0], Y, last_layer[1], prior)
    assert_close(tuple(limit), tuple(ntk.posterior(K, Y, cross.nngp, prior)))


@pytest.mark.long
@pytest.mark.parametrize("penalty", [0.0, 1e-3])
def test_covariances_are_symmetric_and_positive_semidefinite_with_duplicates(penalty):
    x = jnp.concatenate([jnp.asarray(X), jnp.asarray(X[:4]), jnp.asarray(X[:4]) * (1 + 1e-5)])

    def of(a, b=None):
        return network(x[jnp.array(a)], None if b is None else x[jnp.array(b)])

    rows, there = [0, 1, 2, 3, 4, 8, 9, 12], [5, 5, 6, 7, 0, 11, 14]
    y = jnp.sin(x[jnp.array(rows), 0])
    train, cross, prior = of(rows), of(there, rows), of(there).nngp
    predictions = [ntk.ensemble(train, y, cross, prior, t=TIMES, penalty=penalty)]
    if penalty:
        predictions.append(ntk.posterior(train.nngp, y, cross.nngp, prior, penalty=penalty))
    for _, covariance in predictions:
        assert (covariance == jnp.swapaxes(covariance, -1, -2)).all()
        assert np.linalg.eigvalsh(covariance).min() > -tolerance(1e-9, 1e-3) * np.max(prior)


def test_a_singular_kernel_leaves_the_rest_at_its_prior():
    kernels = ntk.Kernels(nngp=np.diag([1.0, 2.0]), ntk=np.diag([3.0, 0.0]))
    prediction = ntk.ensemble(kernels, np.array([5.0, 7.0]), kernels, kernels.nngp)
    assert_close(prediction.mean, [5.0, 0.0])
    assert_close(prediction.covariance, np.diag([0.0, 2.0]))


@pytest.mark.long
def test_derivatives_are_those_of_finite_differences_with_multiple_eigenvalues():
    K = np.eye(3) + 0.2 * np.diag([0.0, 0.0, 1.0])  # a double eigenvalue of the NTK
    cross = rng.normal(size=(2, 3)) / 3
    prior, y, turn = np.eye(2), rng.normal(size=3), rng.normal(size=(3, 3)) / 9

    def predict(s):
        kernel = jnp.asarray(K) + s["turn"] * (turn + turn.T)
        train, k = ntk.Kernels(kernel + jnp.eye(3), kernel), ntk.Kernels(cross, cross * s["scale"])
        one = ntk.ensemble(train, y, k, prior, t=s["t"], penalty=s["penalty"])
        limit = ntk.ensemble(train, y, k, prior, penalty=s["penalty"])
        return one, limit, ntk.posterior(kernel, y, cross, prior, penalty=s["penalty"]), one.std()

    at = jax.tree.map(jnp.asarray, {"turn": 0.0, "scale": 1.0, "t": 0.8, "penalty": 0.1})
    truth = finite_differences(jax.jit(predict), at)
    for mode in (jax.jacfwd, jax.jacrev):
        columns = [jax.jit(mode(lambda v, k=k: predict(at | {k: v})))(at[k]) for k in sorted(at)]
        assert_close(np.stack([*map(flatten, columns)]).T, truth, f64=1e-8, f32=3e-2)


def test_a_variance_rounded_below_zero_is_a_deviation_of_zero_with_a_finite_slope():
    variances = jnp.diag(jnp.array([-1e-17, 4.0]))
    total = jax.value_and_grad(lambda s: Prediction(jnp.zeros(2), s * variances).std().sum())
    assert_close(total(1.0), (2.0, 1.0))


def test_variances_alone_come_row_by_row_under_vmap():
    train, _, cross, prior = given()
    posterior = functools.partial(ntk.posterior, train.nngp, Y, penalty=0.1)
    one = jax.vmap(lambda k, v: posterior(k[None], v[None, None]))
    prediction, truth = jax.jit(one)(cross.nngp, jnp.diag(prior)), posterior(cross.nngp, prior)
    assert_close(prediction.covariance.ravel(), np.diag(truth.covariance))
    assert_close(prediction.mean[:, 0], truth.mean)


@pytest.mark.long
def test_single_precision_stays_single():
    train, y, cross, prior = cast(given(), jnp.float32)
    predictions = [ntk.ensemble(train, y, cross, prior, t=1.0)]
    predictions.append(ntk.posterior(train.nngp, y, cross.nngp, prior, penalty=0.1))
    assert {x.dtype for p in predictions for x in p} == {jnp.dtype("float32")}
    truth = ntk.ensemble(*given(), t=1.0)
    np.testing.assert_allclose(predictions[0].covariance, truth.covariance, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_kernels_of_any_scale_are_predicted_with(scale):
    # In float32 the product of two variances of 1e-25 is 0, and of 1e25 infinite.
    kernels = given()[0].nngp, Y, given()[2].nngp, given()[3]
    train, y, cross, prior = cast(kernels, jnp.float32)
    prediction = ntk.posterior(train * scale, y, cross * scale, prior * scale, penalty=0.1 * scale)
    truth = ntk.posterior(*kernels, penalty=0.1)
    covariance = prediction.covariance / scale
    assert_close((prediction.mean, covariance), tuple(truth), f64=1e-4)  # single precision


def test_what_cannot_be_refused_under_a_trace_is_nan():
    train, _, cross, prior = given()
    ensemble, posterior, flow = map(jax.jit, (ntk.ensemble, ntk.posterior, ntk.gradient_flow))
    negative = ensemble(*given(), t=-1.0)
    larger = posterior(train.nngp, Y, 3 * cross.nngp, prior)
    less = posterior(train.nngp, Y, cross.nngp, prior, penalty=-1.0)
    unknown = flow(jnp.full((1, 1), jnp.nan), Y[:1], 1.0, cross=jnp.eye(1))
    for array in (*negative, *larger, *less, flow(train.ntk, Y, -1.0), unknown):
        assert np.isnan(array).all()
