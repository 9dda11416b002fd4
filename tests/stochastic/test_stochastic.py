"""Single-loop methods: unbiased, exact at solutions, in place, resumable, and correct at NaN."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from generated import wide
from helpers import assert_close, tolerance
from problems import LOGISTIC, follower

import bilevel
from bilevel.contracts import BatchIndices
from bilevel.outer_loop.search_program import SearchSetup
from bilevel.runs import checkpoint
from bilevel.stochastic import _steps as steps
from bilevel.stochastic import draw_batch_schedule, full_direction, make_batched_data
from bilevel.stochastic._oracles import Iterate, directions, lower_oracle, outer_oracle

N, M, P, Q = 45, 38, 4, 3  # rows of train and valid, weights, hyperparameters
BATCH = 7  # divides neither
RNG = np.random.default_rng(0)
DTYPE = jnp.result_type(float)


def _rows(n):
    x, z, y = RNG.normal(size=(n, P)), RNG.normal(size=(n, Q)), RNG.normal(size=n)
    return tuple(np.asarray(a, DTYPE) for a in (x, z, y))


def lower(w, alpha, batch):
    x, z, y = batch
    return 0.5 * jnp.mean((x @ w - z @ alpha - y) ** 2) + 0.15 * jnp.sum(w**2)


def outer(w, alpha, batch):
    x, z, y = batch
    return 0.5 * jnp.mean((x @ w + z @ alpha - y) ** 2) + 0.1 * jnp.sum((alpha - 1) ** 2)


PROBLEM = bilevel.Problem(lower, outer)
TRAIN, VALID = _rows(N), _rows(M)
ALPHA, W = np.asarray(RNG.normal(size=Q), DTYPE), np.asarray(RNG.normal(size=P), DTYPE)
PARTITION = bilevel.partition(BATCH)
METHODS = {
    "soba": bilevel.soba(0.1),
    "ma_soba": bilevel.ma_soba(0.1),
    "saba": bilevel.saba(0.1),
    "spaba": bilevel.spaba(0.1),
    "amigo": bilevel.amigo(0.1, inner=2),
    "f2sa": bilevel.f2sa(0.1, 3.0, inner=2),
    "meha": bilevel.meha(0.1),
}


def cut(partition=PARTITION):
    return [make_batched_data(n, x, partition) for n, x in (("train", TRAIN), ("valid", VALID))]


def solution(alpha):
    """Return weights, adjoint and hypergradient at the lower solution, in float64 by numpy."""
    (x, z, y), (xv, zv, yv), alpha = wide((TRAIN, VALID, alpha))
    hessian = x.T @ x / N + 0.3 * np.eye(P)
    w = np.linalg.solve(hessian, x.T @ (z @ alpha + y) / N)
    residual = xv @ w + zv @ alpha - yv
    v = np.linalg.solve(hessian, xv.T @ residual / M)
    return w, v, zv.T @ residual / M + 0.2 * (alpha - 1) + z.T @ x @ v / N


START = {"alpha": ALPHA, "w0": W, "train": TRAIN, "valid": VALID, "progress": False}
search = functools.partial(bilevel.search, PROBLEM, **START)


def noisy(method, **options):
    usual = {"optimizer": optax.sgd(0.05), "batches": PARTITION, "key": jax.random.key(5)}
    return search(method, **(usual | options))


def walk(method, order, steps, *, move, partition=PARTITION):
    """Return the directions of ``steps`` steps and their points; ``alpha`` moves by ``move``."""

    @jax.jit
    def run(order, *data):
        state = method.init(PROBLEM, ALPHA, W, order.at(jnp.zeros((), int), method.draws), *data)

        def body(carry, number):
            indices = order.at(number, method.draws)
            direction, w_new, new, _ = method.step(PROBLEM, *carry, indices, *data)
            alpha, w, state = carry
            return (alpha - move * direction, w_new, new), (direction, (alpha, w, state.v))

        return jax.lax.scan(body, (ALPHA, W, state), jnp.arange(steps))[1]

    return run(order, *cut(partition))


def order_of(steps, partition=PARTITION):
    counts, draws = [side.count for side in cut(partition)], METHODS["saba"].draws
    return draw_batch_schedule(jax.random.key(3), tuple(counts), steps, draws)


@pytest.mark.slow
def test_estimates_are_unbiased_with_a_shorter_last_batch():
    point = Iterate(W, 1 + W, ALPHA)
    for side, data, oracle in zip(cut(), (TRAIN, VALID), (lower_oracle, outer_oracle), strict=True):
        exact, _ = oracle(PROBLEM, point)(data, 1)
        table = jax.jit(lambda side, oracle=oracle: side.table(oracle(PROBLEM, point)))(side)
        assert side.tail
        assert_close(jax.tree.map(lambda t: t.mean(0), table), exact, f64=1e-12, f32=1e-5)
        assert_close(side.mean(oracle(PROBLEM, point)), exact, f64=1e-12, f32=1e-5)


@pytest.mark.slow
def test_an_epoch_takes_each_batch_once_and_longer_searches_begin_alike():
    order = draw_batch_schedule(jax.random.key(0), (5, 3), 15, (2, 1))
    assert order.train.shape == (31,) and order.valid.shape == (16,)
    for ids, count in ((order.train, 5), (order.valid, 3)):
        epochs = np.asarray(ids[:-1]).reshape(-1, count)
        assert (np.sort(epochs) == np.arange(count)).all() and len(np.unique(epochs, axis=0)) > 1
    longer = draw_batch_schedule(jax.random.key(0), (5, 3), 150, (2, 1))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[: len(a)]), order, longer)
    uniforms = draw_batch_schedule(jax.random.key(0), (5, 3), 20_000, (1, 1)).uniforms
    assert abs(np.mean(uniforms < 0.2) - 0.2) < 4 * np.sqrt(0.16 / 20_000)


def test_all_orders_of_three_batches_are_equally_likely_and_many_batches_are_shuffled():
    order = draw_batch_schedule(jax.random.key(1), (3, 2**16 + 1), 2**16, (1, 1))
    epochs = np.asarray(order.train[: 3 * 20_000]).reshape(-1, 3)
    counts = np.unique(epochs @ [9, 3, 1], return_counts=True)[1]
    assert len(counts) == 6 and np.abs(counts / 20_000 - 1 / 6).max() < 0.012
    many = np.asarray(order.valid)
    np.testing.assert_array_equal(np.sort(many), np.arange(2**16 + 1))
    assert abs(np.corrcoef(many, np.arange(2**16 + 1))[0, 1]) < 0.02


@pytest.mark.long
def test_saba_converges_linearly_where_soba_stalls():
    runs = (bilevel.saba, 1000), (bilevel.saba, 3000), (bilevel.soba, 3000)
    run = functools.partial(noisy, optimizer=optax.sgd(0.1), history=())
    slopes = [solution(run(method(0.2), steps=n).alpha)[2] for method, n in runs]
    early, late, stalled = np.sum(np.square(slopes), 1)
    assert early < tolerance(1e-12, 1e-8) and late < tolerance(1e-25, 1e-8) and stalled > 1e-6


@pytest.mark.long
def test_page_sums_differences_and_its_full_passes_are_exact():
    order, train, valid = order_of(12), *cut()
    actual, visited = walk(bilevel.spaba(0.1, probability=0.0), order, 12, move=0.05)
    points = [Iterate(w, v, alpha) for alpha, w, v in zip(*visited, strict=True)]

    @jax.jit
    def single(point, i, j):
        lower, _ = train.at(i, lower_oracle(PROBLEM, point))
        outer, _ = valid.at(j, outer_oracle(PROBLEM, point))
        return directions(lower, outer).alpha

    total = full_direction(PROBLEM, *points[0], train, valid)
    for k in range(1, 12):
        ids = order.train[k], order.valid[k]
        total = total + single(points[k], *ids) - single(points[k - 1], *ids)
    assert_close(actual[-1], total, f64=1e-12, f32=1e-4)
    tossed, visited = walk(bilevel.spaba(0.1, probability=0.4), order, 12, move=0.05)
    taken = np.asarray(order.uniforms) < 0.4
    assert 0 < taken.sum() < 12
    for k in np.flatnonzero(taken):
        alpha, w, v = (x[k] for x in visited)
        assert_close(tossed[k], full_direction(PROBLEM, w, v, alpha, train, valid), f64=1e-12)


@pytest.mark.long
def test_f2sas_bias_falls_as_one_over_the_penalty():
    """The direction at a frozen alpha, all rows at every step."""
    indices = BatchIndices(jnp.asarray(800), *(jnp.zeros(1, int),) * 2, *(jnp.zeros((), int),) * 3)
    bias = []
    for penalty in (10.0, 100.0):
        method = bilevel.f2sa(0.3, penalty, growth=0.0)
        state = search(method, optax.sgd(0.0), steps=800, history=()).state
        args = PROBLEM, state.alpha, state.w, state.solver_state, indices
        direction, *_ = method.step(*args, *cut(None))
        bias.append(np.linalg.norm(direction - solution(ALPHA)[2]))
    assert bias[0] > 1e-3
    np.testing.assert_allclose(bias[0] / bias[1], 10, rtol=0.15)


def test_no_step_copies_a_table_or_the_history():
    history = bilevel.History(("value", "alpha"))
    setup = SearchSetup(PROBLEM, METHODS["saba"], optax.adam(0.1), PARTITION, False, history)
    data = setup.prepared((TRAIN, VALID, jax.random.key(0)), 977)
    carry, *_ = setup.start(ALPHA, W, data, 977)
    text = jax.jit(setup.advance, donate_argnums=0).lower(carry, data, 1).compile().as_text()
    train, valid = (side.count for side in cut())
    kind = {"float64": "f64", "float32": "f32"}[str(DTYPE)]
    assert f"{kind}[{train},{P}]" in text and f"{kind}[977,{Q}]" in text
    for rows, columns in ((train, P), (train, Q), (valid, P), (valid, Q), (977, Q)):
        shape = re.escape(f"{kind}[{rows},{columns}]")
        assert not re.findall(rf"= {shape}\S* (?:copy|select)\(.*", text)
    assert not re.findall(rf"= {kind}\[977\]\S* (?:copy|select)\(.*", text)


@pytest.mark.long
def test_saba_reads_table_rows_ahead_without_changing_sagas_directions():
    """One batch comes twice in a row. Truth: SAGA as the paper writes it, in a Python loop."""
    ids = jnp.array([1, 1, 0, 3, 1, 0, 2, 3, 3, 2]), jnp.array([0, 2, 2, 1, 0, 0, 3, 3, 0, 2])
    partition = bilevel.partition(12)
    order = order_of(9, partition=partition)._replace(train=ids[0], valid=ids[1])
    options = {"move": 0.25, "partition": partition}
    read_ahead, (_, weights, adjoints) = walk(METHODS["saba"], order, 9, **options)
    alpha, point_w, v = ALPHA, W, jnp.zeros_like(W)
    sides = list(zip(cut(partition), (lower_oracle, outer_oracle), ids, strict=True))
    point = Iterate(point_w, v, alpha)
    tables = [optax.tree.zeros_like(s.table(oracle(PROBLEM, point))) for s, oracle, _ in sides]
    for number in range(9):
        assert_close((weights[number], adjoints[number]), (point_w, v), f64=1e-12, f32=1e-5)
        point, estimates = Iterate(point_w, v, alpha), []
        for k, (side, oracle, order_of_side) in enumerate(sides):
            i = order_of_side[number]
            new, _ = side.at(i, oracle(PROBLEM, point))
            saga = jax.tree.map(lambda x, t, i=i: x - t[i] + t.mean(0), new, tables[k])
            estimates.append(saga if number >= side.count else new)
            tables[k] = jax.tree.map(lambda t, x, i=i: t.at[i].set(x), tables[k], new)
        along = directions(*estimates)
        assert_close(read_ahead[number], along.alpha, f64=1e-12, f32=1e-5)
        point_w, v = steps.against((point_w, v), along[:2], 0.1)
        alpha = alpha - 0.25 * along.alpha


@pytest.mark.long
@pytest.mark.parametrize("name", ["saba", "spaba", "f2sa"])
def test_resumed_in_mid_epoch_it_is_the_same_search(name, tmp_path):
    run = functools.partial(noisy, METHODS[name], steps=17, history=bilevel.History(every=3))
    whole = run()
    run(checkpoint=tmp_path, chunk=4, callback=lambda result: result.state.step >= 8)
    assert checkpoint.latest(tmp_path) == 8
    resumed = run(checkpoint=tmp_path, resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.state, resumed.state)
    jax.tree.map(np.testing.assert_array_equal, whole.history, resumed.history)
    last = [2, 5, 8, 11, 14, 16]  # the last step of each three, and the last of all
    every = run(history=None).history
    for key, values in whole.history.items():
        assert_close(values, every[key][np.array(last)], f64=1e-12)


@pytest.mark.long
def test_seeds_run_together_as_they_would_alone():
    keys = jax.random.split(jax.random.key(1), 2)
    result = jax.jit(jax.vmap(lambda key: noisy(METHODS["saba"], key=key, steps=15)))(keys)
    for i in range(2):
        alone = noisy(METHODS["saba"], key=keys[i], steps=15)
        assert_close(result.alpha[i], alone.alpha)
        assert_close(result.history["value"][i], alone.history["value"])
    assert np.abs(result.alpha[0] - result.alpha[1]).max() > 1e-6


@pytest.mark.long
def test_a_nan_leaves_the_last_good_point():
    problem = bilevel.Problem(
        lower, lambda w, a, batch: outer(w, a, batch) * jnp.where(a[0] > -3, 1.0, jnp.nan)
    )
    options = START | {"batches": PARTITION, "key": jax.random.key(7)}
    run = functools.partial(bilevel.search, problem, METHODS["saba"], optax.sgd(1.0), **options)
    with pytest.raises(bilevel.NonFiniteError) as caught:
        run(steps=60, history=bilevel.History(every=4))
    step, result = caught.value.step, caught.value.result
    good = run(steps=step)
    assert 2 < step < 60 and step % 4
    ends = [(r.alpha, r.w, r.state.solver_state.v) for r in (result, good)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    np.testing.assert_array_equal(result.history["alpha"][-1], good.alpha)
    np.testing.assert_array_equal(result.history["value"][-1], good.history["value"][-1])


def test_an_adjoint_that_is_not_finite_is_seen_at_once():
    """Only the second derivative is not finite."""

    def kinked(w, alpha, batch):
        t = jnp.where(alpha[0] > 0, 1.0, 0.0) * w[0]
        return lower(w, alpha, batch) + 1e-3 * jnp.abs(t) ** 1.5

    problem = bilevel.Problem(kinked, lambda w, alpha, batch: outer(w, alpha, batch) + alpha[0])
    options = START | {"alpha": jnp.ones(Q), "steps": 200, "history": ()}
    with pytest.raises(bilevel.NonFiniteError) as caught:
        bilevel.search(problem, METHODS["soba"], optax.sgd(0.3), **options)
    result = caught.value.result
    assert caught.value.quantity == "hypergradient" and result.alpha[0] <= 0
    assert np.isfinite(result.state.solver_state.v).all()


def test_a_diverging_adjoint_is_reported():
    """Its steps are too large, while the weights start at their solution and stay there."""
    problem = follower(lambda w, alpha, batch: jnp.sum((w - 3) ** 2))
    run = functools.partial(bilevel.search, problem, optimizer=optax.set_to_zero())
    data = dict(alpha=jnp.ones(2), w0=jnp.ones(2), train=jnp.ones((1, 1)), valid=jnp.ones((1, 1)))
    assert run(bilevel.soba(0.9), **data, steps=30).history["noisy_residual"][-1] < 0.1
    with pytest.warns(UserWarning, match="the adjoint's residual is .* times the outer gradient"):
        run(bilevel.soba(2.5), **data, steps=30)
    with pytest.raises(bilevel.NonFiniteError, match=r"adjoint .*; a smaller step_size of the"):
        run(bilevel.soba(9.0), **data, steps=600)


def test_a_loss_outside_the_history_is_neither_computed_nor_checked():
    """Its value is NaN, and its derivatives are finite."""
    problem = bilevel.Problem(
        lambda w, alpha, batch: lower(w, alpha, batch) + jax.lax.stop_gradient(jnp.nan), outer
    )
    run = functools.partial(bilevel.search, problem, METHODS["soba"], optax.sgd(0.05), **START)
    assert np.isfinite(run(steps=3, history=("value",)).history["value"]).all()
    with pytest.raises(bilevel.NonFiniteError, match="lower loss"):
        run(steps=3, history=("lower",))


@pytest.mark.long
def test_the_estimate_at_the_end_is_near_the_truth_for_a_logistic_regression():
    """The data have ijcnn1's shape. Truth: Newton in numpy."""
    rng = np.random.default_rng(1)

    def rows(n, shrink):
        x = np.hstack([np.eye(10)[rng.integers(0, 10, n)], rng.normal(size=(n, 12))])
        return x, np.where(rng.random(n) < 1 / (1 + np.exp(-shrink * x @ truth)), 1.0, -1.0)

    truth = rng.normal(size=22)
    train, valid = rows(1000, 1.0), rows(1500, 0.5)
    data = jax.tree.map(lambda a: jnp.asarray(a, DTYPE), (train, valid))
    start = jnp.full(22, -2.0, DTYPE), jnp.asarray(rng.normal(size=22), DTYPE)
    options = {"steps": 160, "batches": bilevel.partition(64), "key": jax.random.key(3)}
    options |= {"diagnostics": True, "history": ()}
    result = bilevel.search(LOGISTIC, bilevel.saba(0.2), optax.sgd(0.2), *start, *data, **options)
    (x, y), penalty, w = train, np.exp(np.asarray(result.alpha, np.float64)), np.zeros(22)
    for _ in range(30):
        p = 1 / (1 + np.exp(y * (x @ w)))
        hessian = (x.T * (p * (1 - p))) @ x / len(x) + np.diag(penalty)
        w = w - np.linalg.solve(hessian, -x.T @ (y * p) / len(x) + penalty * w)
    outer_slope = -valid[0].T @ (valid[1] / (1 + np.exp(valid[1] * (valid[0] @ w)))) / 1500
    exact = -penalty * w * np.linalg.solve(hessian, outer_slope)
    sides = (make_batched_data("", side, bilevel.partition(64)) for side in data)
    v = result.state.solver_state.v
    error = np.linalg.norm(full_direction(LOGISTIC, result.w, v, result.alpha, *sides) - exact)
    assert error > 1e-3 * np.linalg.norm(exact)
    assert error / 3 < result.info.error_estimate < 10 * error


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_methods_run_in_float32_on_trees_with_auxiliary_outputs_and_geometries(name):
    to32 = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))

    def paired(loss):
        return lambda w, a, b: (loss(w["w"], a["a"] + a["b"][0], b), {"size": jnp.sum(w["w"] ** 2)})

    problem = bilevel.Problem(paired(lower), paired(outer), has_aux=True)
    alpha = {"a": jnp.full(Q, 1 / Q, jnp.float32), "b": jnp.ones((1, Q), jnp.float32) / Q}
    optimizer = optax.chain(optax.adam(0.01), bilevel.exponentiate())
    args = problem, METHODS[name], optimizer, alpha, {"w": to32(W)}, to32(TRAIN), to32(VALID)
    options = {"steps": 6, "batches": PARTITION, "key": jax.random.key(0), "progress": False}
    history = "aux", "value", "lower", "noisy_stationarity", "grad_norm"
    result = bilevel.search(*args, **options, history=history)
    assert {x.dtype for x in jax.tree.leaves((result.alpha, result.w))} == {np.dtype("float32")}
    np.testing.assert_allclose(result.alpha["b"].sum(), 1, rtol=1e-5)
    assert result.history["aux"]["lower"]["size"].shape == (6,)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.history))
