"""Single loops without a step size: the metric, the pace of alpha, and their convergence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from problems import mean_squares, quadratics

import bilevel
from bilevel.stochastic import BatchedData, make_batched_data
from bilevel.stochastic import _steps as _metric

N, P, Q = 512, 12, 4
PARTITION = bilevel.partition(32)


@functools.cache
def family(condition, seed=0):
    """Return losses with ``w*(alpha) = C alpha + w0``, data, and |dh|^2 in numpy."""
    rng = np.random.default_rng(seed)

    def rows(spread):
        basis = np.linalg.qr(rng.normal(size=(P, P)))[0]
        scales = np.logspace(-0.5 * np.log10(spread), 0, P)
        return rng.normal(size=(N, P)) @ (basis * scales) @ basis.T

    mixing = rng.normal(size=(P, Q)) / np.sqrt(Q)
    x, xv = rows(condition), rows(10)
    train, valid = (x, 0.3 * rng.normal(size=N)), (xv, xv @ rng.normal(size=P))
    lower = lambda w, a, batch: mean_squares(w - mixing @ a, a, batch)  # noqa: E731
    problem = bilevel.Problem(lower, mean_squares)
    offset = np.linalg.solve(x.T @ x, x.T @ train[1])

    def slope(alpha):
        w = mixing @ np.asarray(alpha, np.float64) + offset
        return float(np.sum((mixing.T @ xv.T @ (xv @ w - valid[1]) / N) ** 2))

    return problem, *jax.tree.map(jnp.asarray, (train, valid)), slope


def know_only_leading(monkeypatch, spare):
    monkeypatch.setattr(_metric, "DENSE_SIZE", P - 1)
    monkeypatch.setattr(_metric, "_RANK", 4)
    monkeypatch.setattr(_metric, "_SPARE", spare)


def first_metric(condition, monkeypatch, small=False):
    problem, train, _, _ = family(condition)
    monkeypatch.setattr(_metric, "_LEAST", N)  # all batches are the sample
    if small:
        know_only_leading(monkeypatch, spare=4)
    data = make_batched_data("train", train, PARTITION)
    at = problem, jnp.zeros(P), jnp.zeros(Q)
    first = jax.jit(lambda data: _metric.renewed(_metric.unmeasured(*at, data), 0, *at, data))
    return first(data), np.asarray(train[0], np.float64)


def matrix(metric, exponent):
    return np.asarray(metric.power(exponent, jnp.eye(P)), np.float64)


def test_the_metric_is_the_inverse_hessian_and_its_length_the_steepest_batchs(monkeypatch):
    metric, x = first_metric(1e4, monkeypatch)
    hessian = x.T @ x / N
    assert_close(matrix(metric, 1.0) @ hessian, np.eye(P), f64=1e-8, f32=0.02)
    root = matrix(metric, 0.5)
    assert_close(root @ root, np.linalg.inv(hessian), f64=1e-8, f32=0.02)
    steepest = [np.linalg.eigvalsh(root @ b.T @ b @ root / 32)[-1] for b in x.reshape(-1, 32, P)]
    # Power iterations find the largest from below, in half of the batches.
    assert 0.5 / max(steepest) <= metric.length * 1.001 < 0.5 / np.median(steepest) * 1.3


def test_a_large_problems_metric_knows_the_leading_directions(monkeypatch):
    metric, x = first_metric(1e4, monkeypatch, small=True)
    values, vectors = np.linalg.eigh(x.T @ x / N)
    assert metric.vectors.shape == (P, 4)
    along = np.diag(vectors.T @ matrix(metric, 1.0) @ vectors)
    np.testing.assert_allclose(along[-2:] * values[-2:], 1, rtol=0.05)
    np.testing.assert_allclose(along[:2] * float(metric.floor), 1, rtol=0.05)


def renewals(alpha):
    """Return the metric of a step as a function of its number; a negative length was kept."""
    problem, train, _, _ = family(10)
    data = make_batched_data("train", train, PARTITION)
    empty = _metric.unmeasured(problem, jnp.zeros(P), jnp.zeros(Q), data)
    old = empty._replace(length=jnp.full((), -1.0))
    return jax.jit(lambda n: _metric.renewed(old, n, problem, jnp.zeros(P), alpha, data))


def test_the_metric_is_measured_first_and_at_the_ends_of_epochs_1_3_and_7():
    metric_of = renewals(jnp.zeros(Q))
    assert [n for n in range(0, 130, 4) if metric_of(n).length > 0] == [0, 16, 48, 112]


@pytest.mark.parametrize(("moved", "another"), [(1.0, None), (1.5, "length"), (4.0, "basis")])
def test_where_alpha_has_moved_the_metric_is_measured_anew(moved, another):
    metric = renewals(jnp.zeros(Q).at[1].set(-moved))(32)
    assert (metric.length > 0) == (another is not None)
    assert np.asarray(metric.matrix).any() == (another == "basis")
    assert float(metric.moved[1]) == (-moved if another else 0)


@pytest.mark.long
@pytest.mark.parametrize("method", [bilevel.saba, bilevel.spaba], ids=["saba", "spaba"])
def test_the_untuned_default_converges_for_every_seed_and_condition(method):
    fresh = np.random.default_rng().integers(2**31, size=8).tolist()
    for seed in [*range(8), *fresh]:
        conditions = {"condition": 10.0 ** (2 * (seed % 3)), "mixed": 10.0 ** (seed % 2)}
        problem, args, solved, _ = quadratics(seed, **conditions)
        options = {"steps": 3000, "batches": bilevel.partition(64), "key": jax.random.key(seed)}
        result = bilevel.search(problem, method(), bilevel.paced(), *args, **options, history=())
        distance = np.linalg.norm(np.asarray(result.alpha, np.float64) - solved)
        assert distance < 1e-3, (seed, conditions)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "penalty", "dense"),
    [(bilevel.spaba, 1e-2, True), (bilevel.spaba, 1e-3, False), (bilevel.saba, 1e-2, True)],
    ids=["spaba", "spaba-leading", "saba"],
)
def test_the_adjoint_is_kept_where_few_rows_are_much_steeper(method, penalty, dense, monkeypatch):
    """A weight for every label of rows with heavy tails. Truth: the whole Hessian's residual."""
    if not dense:
        know_only_leading(monkeypatch, spare=2)
    rng = np.random.default_rng(0)

    def rows(n):
        x = np.exp(rng.normal(size=(n, 1))) * rng.normal(size=(n, 40)) * np.logspace(0, -1, 40)
        return jnp.asarray(x), jnp.sign(x.sum(1) + rng.normal(size=n))

    def outer(w, alpha, batch, weights=1.0):
        x, y = batch
        return jnp.mean(weights * jax.nn.softplus(-y * (x @ w)))

    def lower(w, alpha, batch):
        *rows, index = batch
        return outer(w, alpha, rows, jax.nn.sigmoid(alpha[index])) + penalty * jnp.sum(w**2)

    train, valid = (*rows(2000), jnp.arange(2000)), rows(500)
    args = bilevel.Problem(lower, outer), method(), bilevel.paced(), jnp.zeros(2000), jnp.zeros(40)
    options = {"steps": 6000, "batches": bilevel.partition(4), "key": jax.random.key(0)}
    result = bilevel.search(*args, train, valid, **options, history=())
    hessian = jax.hessian(lower)(result.w, result.alpha, train)
    slope = jax.grad(outer)(result.w, result.alpha, valid)
    assert np.linalg.norm(hessian @ result.state.solver_state.v - slope) < np.linalg.norm(slope)


def after(optimizer, steps, state=None, residual=0.0, memory=1):
    state = optimizer.init(jnp.zeros(())) if state is None else state
    report = {"residual": residual, "memory": memory}
    run = jax.jit(lambda state: optimizer.update(jnp.ones(()), state, **report))
    for _ in range(steps):
        updates, state = run(state)
    return float(updates), state


def test_alpha_waits_for_the_adjoint_and_then_goes_at_a_rate_by_the_fifty_steps():
    optimizer = bilevel.paced(optax.sgd(0.5))
    updates, state = after(optimizer, 300, residual=1.0)
    assert updates == 0 and not state.going
    # The mean of its size over 6.25 steps falls under 0.3 in the seventh.
    assert after(optimizer, 6)[0] == 0
    np.testing.assert_allclose(after(optimizer, 7)[0], -0.5 / 50, rtol=1e-6)
    # With tables of 400 batches it is an epoch that counts.
    np.testing.assert_allclose(after(optimizer, 300, memory=400)[0], -0.5 / 400, rtol=0.05)


def test_alphas_unit_is_how_long_directions_take_to_become_exact():
    """Truth: an epoch of the longer side for SABA; steps between full passes for SPABA."""
    few, many = (BatchedData((), 1, count, 0) for count in (16, 10_000))
    assert bilevel.saba().memory(few, many) == 10_000
    np.testing.assert_allclose(bilevel.spaba().memory(few, few), 17)
    np.testing.assert_allclose(bilevel.spaba().memory(few, many), 10_024 / 8)
    np.testing.assert_allclose(bilevel.spaba(0.1).memory(few, many), 10_018 / 2)
    np.testing.assert_allclose(bilevel.spaba(probability=0.25).memory(few, few), 4)
    assert bilevel.soba(0.1).memory(few, many) == 1


def test_where_the_adjoint_is_lost_the_pace_is_halved_and_comes_back():
    optimizer = bilevel.paced(optax.sgd(0.5))
    _, state = after(optimizer, 20)
    _, lost = after(optimizer, 15, state, residual=1.0)
    _, later = after(optimizer, 25, lost, residual=1.0)
    np.testing.assert_allclose(later.pace / lost.pace, 2**-4, rtol=1e-4)
    _, actual = after(optimizer, 400, later)
    assert actual.pace == 1
    assert after(optimizer, 1000, later, residual=1.0)[1].pace == 2**-10


def test_a_units_steps_are_at_most_two_over_the_curvature():
    """Truth: gradient descent on 3 x^2 / 2 with a rate of 10 per unit, limited to 2 / 3."""
    optimizer = bilevel.paced(optax.sgd(10.0))

    @jax.jit
    def step(x, state):
        updates, state = optimizer.update(3 * x, state, residual=0.0, memory=1)
        return x + updates, updates, state

    x, state = jnp.ones(()), optimizer.init(jnp.ones(()))
    for _ in range(30):
        x, updates, state = step(x, state)
    np.testing.assert_allclose(updates / (3 * (x - updates)), -2 / 3 / 50, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("method", [bilevel.saba, bilevel.spaba], ids=["saba", "spaba"])
def test_weights_of_half_precision_are_moved_in_a_metric_of_single(method):
    """Half precision has no eigenvalues. Truth: the search in single precision."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)), rng.normal(size=64)

    def error(w, alpha, batch):
        return jnp.mean((batch[0] @ w - batch[1]) ** 2)

    problem = bilevel.Problem(lambda w, a, b: error(w, a, b) + jnp.sum(jnp.exp(a) * w**2), error)

    def measured(dtype):
        data = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
        args = problem, method(), bilevel.paced(), jnp.zeros(8, jnp.float32), jnp.zeros(8, dtype)
        options = {"steps": 100, "batches": bilevel.partition(16), "key": jax.random.key(0)}
        return bilevel.search(*args, data, data, **options)

    half, single = measured(jnp.bfloat16), measured(jnp.float32)
    assert half.w.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half.w, float), single.w, atol=0.03)
    assert np.abs(single.w).max() > 0.1
