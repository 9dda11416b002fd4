"""Single-loop methods: unbiased, exact where they should be, in place, resumable, honest at NaN.

The problem is quadratic, so that solution, adjoint and hypergradient have closed forms.
"""

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, tolerance

import bilevel
from bilevel.contracts import BatchIndices
from bilevel.outer_loop.search_program import SearchSetup
from bilevel.runs import checkpoint
from bilevel.stochastic import _steps as steps
from bilevel.stochastic import draw_batch_schedule, full_direction, make_batched_data
from bilevel.stochastic._oracles import (
    Iterate,
    directions,
    lower_oracle,
    outer_oracle,
)

N, M, P, Q = 45, 38, 4, 3  # rows of train and valid, weights, hyperparameters
BATCH = 7  # divides neither
RNG = np.random.default_rng(0)
DTYPE = jnp.zeros(()).dtype


def _rows(n):
    x, z, y = RNG.normal(size=(n, P)), RNG.normal(size=(n, Q)), RNG.normal(size=n)
    return tuple(jnp.asarray(a, DTYPE) for a in (x, z, y))


def lower(w, alpha, batch):
    x, z, y = batch
    return 0.5 * jnp.mean((x @ w - z @ alpha - y) ** 2) + 0.15 * jnp.sum(w**2)


def outer(w, alpha, batch):
    x, z, y = batch
    return 0.5 * jnp.mean((x @ w + z @ alpha - y) ** 2) + 0.1 * jnp.sum((alpha - 1) ** 2)


PROBLEM = bilevel.Problem(lower, outer)
TRAIN, VALID = _rows(N), _rows(M)
ALPHA, W = jnp.asarray(RNG.normal(size=Q), DTYPE), jnp.asarray(RNG.normal(size=P), DTYPE)
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
    return make_batched_data("train", TRAIN, partition), make_batched_data(
        "valid", VALID, partition
    )


def solution(alpha):
    """Weights, adjoint and hypergradient at the lower solution, in float64 by numpy."""
    (x, z, y), (xv, zv, yv) = jax.tree.map(lambda a: np.asarray(a, np.float64), (TRAIN, VALID))
    alpha = np.asarray(alpha, np.float64)
    hessian = x.T @ x / N + 0.3 * np.eye(P)
    w = np.linalg.solve(hessian, x.T @ (z @ alpha + y) / N)
    residual = xv @ w + zv @ alpha - yv
    v = np.linalg.solve(hessian, xv.T @ residual / M)
    return w, v, zv.T @ residual / M + 0.2 * (alpha - 1) + z.T @ x @ v / N


def optimum():
    """Where the hypergradient, which is affine in alpha, is zero."""
    offset = solution(np.zeros(Q))[2]
    slope = np.stack([solution(e)[2] - offset for e in np.eye(Q)], 1)
    return np.linalg.solve(slope, -offset)


def squared_slope(alpha):
    return np.sum(solution(alpha)[2] ** 2)


search = functools.partial(
    bilevel.search, PROBLEM, alpha=ALPHA, w0=W, train=TRAIN, valid=VALID, progress=False
)
noisy = functools.partial(
    search, optimizer=optax.sgd(0.05), batches=PARTITION, key=jax.random.key(5)
)


def walk(method, order, steps, *, at=None, begun=None, move=0.0, partition=PARTITION):
    """Directions of ``steps`` steps; ``alpha`` moves by ``move``, or all stays frozen ``at``."""
    train, valid = cut(partition)
    alpha, w, v = at if at is not None else (ALPHA, W, jnp.zeros_like(W))
    start = begun if begun is not None else (alpha, w)

    @jax.jit
    def run(order, train, valid):
        first = order.at(jnp.zeros((), int), method.draws)
        state = method.init(PROBLEM, *start, first, train, valid)
        if at is not None:
            state = state._replace(v=v)

        def body(carry, number):
            alpha, w, state = carry
            indices = order.at(number, method.draws)
            args = (PROBLEM, alpha, w, state, indices, train, valid)
            direction, w_new, new, _ = method.step(*args)
            if at is not None:
                w_new, new = w, new._replace(v=v)
            out = direction, (alpha, w, state.v)
            return (alpha - move * direction, w_new, new), out

        return jax.lax.scan(body, (alpha, w, state), jnp.arange(steps))[1]

    return run(order, train, valid)


def order_of(steps, method=METHODS["saba"], partition=PARTITION, key=3):
    train, valid = cut(partition)
    return draw_batch_schedule(jax.random.key(key), (train.count, valid.count), steps, method.draws)


# ---------------------------------------------------------------------- batches and estimates


@pytest.mark.slow
def test_estimates_are_unbiased_with_a_shorter_last_batch():
    """Test 1. Truth: the same oracles on all rows."""
    point = Iterate(W, 1 + W, ALPHA)
    for side, data, oracle in zip(cut(), (TRAIN, VALID), (lower_oracle, outer_oracle), strict=True):
        exact, _ = oracle(PROBLEM, point)(data, 1)
        each = jax.jit(lambda side, oracle=oracle: side.table(oracle(PROBLEM, point)))(side)
        assert side.tail
        assert_close(jax.tree.map(lambda t: t.mean(0), each), exact, f64=1e-12, f32=1e-5)
        assert_close(side.mean(oracle(PROBLEM, point)), exact, f64=1e-12, f32=1e-5)


@pytest.mark.parametrize(("columns", "wide"), [(2, 16), (2**15, 2), (2**17, 1)])
def test_a_pass_takes_wide_batches_that_a_processors_cache_holds(columns, wide, monkeypatch):
    rows = jax.ShapeDtypeStruct((16 * 40 + 3, columns), jnp.float32)
    seen = set()

    def oracle(x, weight):
        seen.add(x.shape[0])
        return weight * jnp.mean(x), None

    def shapes(together):
        seen.clear()
        jax.eval_shape(
            lambda x: make_batched_data("rows", x, bilevel.partition(16)).mean(oracle), rows
        )
        whole, rest = divmod(16 * 40 + 3, 16 * together)
        assert whole > 1 and seen == {16 * together, rest}

    shapes(wide)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shapes(16)


@pytest.mark.slow
def test_an_epoch_takes_each_batch_once_and_longer_searches_begin_alike():
    order = draw_batch_schedule(jax.random.key(0), (5, 3), 15, (2, 1))
    assert order.train.shape == (31,) and order.valid.shape == (16,)
    for epoch in order.train[:30].reshape(6, 5).tolist():
        assert sorted(epoch) == list(range(5))
    for epoch in order.valid[:15].reshape(5, 3).tolist():
        assert sorted(epoch) == list(range(3))
    assert len({tuple(e) for e in order.train[:30].reshape(6, 5).tolist()}) > 1
    longer = draw_batch_schedule(jax.random.key(0), (5, 3), 150, (2, 1))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[: len(a)]), order, longer)
    uniforms = draw_batch_schedule(jax.random.key(0), (5, 3), 20_000, (1, 1)).uniforms
    assert abs(np.mean(uniforms < 0.2) - 0.2) < 4 * np.sqrt(0.16 / 20_000)


def test_every_order_of_a_few_batches_is_as_likely_and_very_many_are_shuffled_too():
    """Truth: each of the six orders of three batches a sixth of the time."""
    order = draw_batch_schedule(jax.random.key(1), (3, 2**16 + 1), 2**16, (1, 1))
    epochs = np.asarray(order.train[: 3 * 20_000]).reshape(-1, 3)
    counts = np.unique(epochs @ [9, 3, 1], return_counts=True)[1]
    assert len(counts) == 6 and np.abs(counts / 20_000 - 1 / 6).max() < 0.012
    many = np.asarray(order.valid)
    np.testing.assert_array_equal(np.sort(many), np.arange(2**16 + 1))
    assert abs(np.corrcoef(many, np.arange(2**16 + 1))[0, 1]) < 0.02


@pytest.mark.parametrize("name", ["saba", "spaba"])
def test_a_solution_is_a_fixed_point(name):
    """Test 2. There SOBA's directions are not zero, but their mean is."""
    alpha = jnp.asarray(optimum(), DTYPE)
    w, v = (jnp.asarray(x, DTYPE) for x in solution(alpha)[:2])
    method = METHODS[name]
    order = order_of(60)
    exact = walk(method, order, 60, at=(alpha, w, v), begun=(alpha, w))[0]
    # The tables begin with another adjoint: the first epoch mends them; PAGE has to toss its coin.
    last = exact[14:] if name == "saba" else exact[np.argmax(np.asarray(order.uniforms) < 0.1) :]
    assert np.abs(last).max() < tolerance(1e-14, 1e-5)
    noise = walk(METHODS["soba"], order, 42, at=(alpha, w, v))[0][:42]
    assert np.abs(noise).max() > 0.01


@pytest.mark.long
def test_at_a_frozen_point_an_epoch_makes_directions_exact():
    """Test 3. Truth: the direction on all rows; the tables began elsewhere."""
    v = jnp.arange(1.0, P + 1)
    at = ALPHA, W, v
    exact = full_direction(PROBLEM, W, v, ALPHA, *cut())
    count = max(side.count for side in cut())
    actual = walk(METHODS["saba"], order_of(20), 20, at=at, begun=(1 - ALPHA, 2 - W))[0]
    spread = np.abs(actual[count:] - exact).max()
    assert spread < tolerance(1e-14, 1e-5) < np.abs(actual[:3] - exact).max()
    never = walk(bilevel.spaba(0.1, probability=0.0), order_of(20), 20, at=at, begun=(ALPHA, W))[0]
    assert np.abs(never - never[0]).max() < tolerance(1e-14, 1e-5)
    always = walk(bilevel.spaba(0.1, probability=1.0), order_of(20), 20, at=at)[0]
    assert np.abs(always - exact).max() < tolerance(1e-14, 1e-5)


@pytest.mark.long
def test_with_one_batch_the_methods_are_one():
    """Test 4."""
    equal = (bilevel.saba(0.1), bilevel.spaba(0.1, probability=0.0), bilevel.ma_soba(0.1, 1.0))
    sgd = optax.sgd(0.05)
    truth = search(bilevel.soba(0.1), sgd, steps=20).alpha
    for method in (*equal, bilevel.spaba(0.1, probability=1.0)):
        assert_close(search(method, sgd, steps=20).alpha, truth, f64=1e-12, f32=1e-5)
    whole = noisy(bilevel.soba(0.1), steps=20, batches=bilevel.partition(100)).alpha
    assert_close(whole, truth, f64=1e-12, f32=1e-5)


@pytest.mark.long
def test_saba_converges_linearly_where_soba_stalls():
    """Test 5."""
    sgd = optax.sgd(0.1)
    slopes = [
        squared_slope(noisy(bilevel.saba(0.2), optimizer=sgd, steps=steps, history=()).alpha)
        for steps in (1000, 3000)
    ]
    stalled = squared_slope(noisy(bilevel.soba(0.2), optimizer=sgd, steps=3000, history=()).alpha)
    assert slopes[0] < tolerance(1e-12, 1e-8) and slopes[1] < tolerance(1e-25, 1e-8)
    assert stalled > 1e-6


@pytest.mark.long
def test_page_adds_differences_and_its_coin_takes_everything():
    """Test 6. Truth: the differences, added up one by one."""
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
        i, j = order.train[k], order.valid[k]
        total = total + single(points[k], i, j) - single(points[k - 1], i, j)
    assert_close(actual[-1], total, f64=1e-12, f32=1e-4)
    tossed, visited = walk(bilevel.spaba(0.1, probability=0.4), order, 12, move=0.05)
    taken = np.asarray(order.uniforms) < 0.4
    assert 0 < taken.sum() < 12
    for k in np.flatnonzero(taken):
        alpha, w, v = (x[k] for x in visited)
        assert_close(tossed[k], full_direction(PROBLEM, w, v, alpha, train, valid), f64=1e-12)


# ------------------------------------------------------------------------- what they estimate


def first_order(method, steps):
    """The direction at a frozen alpha, all rows at every step."""
    result = search(method, optax.sgd(0.0), steps=steps, history=())
    state = result.state
    indices = BatchIndices(
        jnp.asarray(steps), *(jnp.zeros(1, int),) * 2, *(jnp.zeros((), int),) * 3
    )
    args = PROBLEM, state.alpha, state.w, state.solver_state, indices
    return method.step(*args, *cut(None))[0]


@pytest.mark.long
def test_f2sas_bias_falls_as_one_over_the_penalty():
    """Test 7."""
    truth = solution(ALPHA)[2]
    penalties = (10.0, 100.0)
    methods = [bilevel.f2sa(0.3, penalty, growth=0.0) for penalty in penalties]
    bias = [np.linalg.norm(first_order(m, 800) - truth) for m in methods]
    assert bias[0] > 1e-3
    np.testing.assert_allclose(bias[0] / bias[1], 10, rtol=0.15)


def test_f2sas_penalty_grows_with_the_seventh_root():
    method = bilevel.f2sa(0.1, 2.0)
    ids, zero = jnp.zeros(1, int), jnp.zeros((), int)
    state = method.init(PROBLEM, ALPHA, W, None, *cut(None))._replace(y=W + 1)

    def direction(number):
        indices = BatchIndices(jnp.asarray(number), ids, ids, zero, zero, zero)
        return method.step(PROBLEM, ALPHA, W, state, indices, *cut(None))[0]

    fixed = jax.grad(outer, 1)(W + 1, ALPHA, VALID)
    ratio = (direction(9_999) - fixed) / (direction(0) - fixed)
    np.testing.assert_allclose(ratio, 10_000 ** (1 / 7), rtol=1e-4)


@pytest.mark.long
def test_meha_and_amigo_come_to_the_hypergradient_too():
    truth = solution(ALPHA)[2]
    close = first_order(bilevel.amigo(0.3, inner=5), 60)
    assert_close(close, truth, f64=1e-9)
    bias = [
        np.linalg.norm(first_order(bilevel.meha(0.3, penalty=c, growth=0.0), 4000) - truth)
        for c in (10.0, 100.0)
    ]
    assert bias[1] < 0.2 * bias[0] < 0.2 * np.linalg.norm(truth)


@pytest.mark.long
def test_v_is_the_adjoint_and_the_direction_the_hypergradient():
    """Test 8, signs. Truth: the closed form, and the library's own."""
    result = search(bilevel.saba(0.3), optax.sgd(0.0), steps=400, diagnostics=True)
    w, v, grad = solution(ALPHA)
    assert_close(result.w, w, f64=1e-8)
    assert_close(result.state.solver_state.v, v, f64=1e-8)
    exact = bilevel.hypergradient(PROBLEM, bilevel.implicit())(ALPHA, W, TRAIN, VALID)
    assert_close(exact.grad, grad, f64=1e-8)
    direction = full_direction(PROBLEM, result.w, result.state.solver_state.v, ALPHA, *cut())
    assert_close(direction, grad, f64=1e-8)
    assert result.info.converged


# ------------------------------------------------------------------------------ the machinery


def compiled(method, steps, history=()):
    """The search's compiled chunk, as text."""
    setup = SearchSetup(
        PROBLEM, method, optax.adam(0.1), PARTITION, False, bilevel.History(history)
    )
    data = setup.prepared((TRAIN, VALID, jax.random.key(0)), steps)
    carry, *_ = setup.start(ALPHA, W, data, steps)
    return jax.jit(setup.advance, donate_argnums=0).lower(carry, data, 1).compile().as_text()


def test_no_step_copies_a_table_or_the_history():
    """Test 9, on the program that XLA makes."""
    text = compiled(METHODS["saba"], 977, ("value", "alpha"))
    train, valid = (side.count for side in cut())
    kind = {"float64": "f64", "float32": "f32"}[str(DTYPE)]
    assert f"{kind}[{train},{P}]" in text and f"{kind}[977,{Q}]" in text
    for rows, columns in ((train, P), (train, Q), (valid, P), (valid, Q), (977, Q)):
        shape = re.escape(f"{kind}[{rows},{columns}]")
        assert not re.findall(rf"= {shape}\S* (?:copy|select)\(.*", text)
    assert not re.findall(rf"= {kind}\[977\]\S* (?:copy|select)\(.*", text)


@pytest.mark.long
def test_a_step_takes_no_longer_where_there_are_more_batches():
    """Test 9, by the clock. Copying 16 times the rows would take several times as long."""
    problem = bilevel.Problem(
        lambda w, alpha, batch: 0.5 * jnp.mean((w - alpha - batch) ** 2),
        lambda w, alpha, batch: 0.5 * jnp.mean((w - batch) ** 2),
    )
    runs = []
    for count in (16, 256):
        rows = jnp.zeros((count, 1)), jnp.zeros((count, 1))
        setup = SearchSetup(
            *(problem, bilevel.saba(0.1), optax.sgd(0.1), bilevel.partition(1)),
            *(False, bilevel.History(())),
        )
        data = setup.prepared((*rows, jax.random.key(0)), 3000)
        carry, *_ = setup.start(jnp.zeros(1), jnp.zeros(4000), data, 3000)
        runs.append((jax.jit(setup.advance, donate_argnums=0), carry, data))
    best = [np.inf, np.inf]
    for _ in range(8):
        for i, (advance, carry, data) in enumerate(runs):
            begun = time.process_time()
            carry = jax.block_until_ready(advance(carry, data, 100))
            best[i] = min(best[i], time.process_time() - begun)
            runs[i] = advance, carry, data
    assert best[1] < 2 * best[0]


@pytest.mark.long
def test_reading_rows_ahead_changes_nothing():
    """Test 10, bit for bit, with a batch that comes twice running. Truth: SAGA as it is written.

    Numbers are small multiples of powers of two, that float64 adds and multiplies without rounding:
    how XLA fuses products and sums makes no difference.
    """
    rng = np.random.default_rng(3)
    rows = tuple(jnp.asarray(rng.integers(-1, 2, size), DTYPE) for size in ((8, 2), (8, 3), 8))
    problem = bilevel.Problem(
        lambda w, a, b: 0.5 * jnp.mean((b[0] @ w - b[1] @ a - b[2]) ** 2) + 0.25 * jnp.sum(w**2),
        lambda w, a, b: 0.5 * jnp.mean((b[0] @ w + b[1] @ a - b[2]) ** 2) + 0.25 * jnp.sum(a**2),
    )
    train, valid = (
        make_batched_data(side, rows, bilevel.partition(2)) for side in ("train", "valid")
    )
    ids = [jnp.array([1, 1, 0, 3, 1, 0, 2, 3, 3, 2]), jnp.array([0, 2, 2, 1, 0, 0, 3, 3, 0, 2])]
    order = draw_batch_schedule(jax.random.key(0), (4, 4), 9, (1, 1))._replace(
        train=ids[0], valid=ids[1]
    )
    start, method = (jnp.ones(3), jnp.zeros(2)), bilevel.saba(0.25)

    @jax.jit
    def ahead(order, train, valid):
        def body(carry, number):
            alpha, w, state = carry
            indices = order.at(number, method.draws)
            direction, w, state, _ = method.step(problem, alpha, w, state, indices, train, valid)
            return (alpha - 0.25 * direction, w, state), (direction, w, state.v)

        state = method.init(problem, *start, order.at(jnp.zeros((), int), (1, 1)), train, valid)
        return jax.lax.scan(body, (*start, state), jnp.arange(9))[1]

    @jax.jit
    def naive(train, valid):
        def body(carry, number):
            alpha, w, v, tables, means = carry
            point = Iterate(w, v, alpha)
            estimates, kept, averages = [], [], []
            sides = (train, lower_oracle, ids[0]), (valid, outer_oracle, ids[1])
            for (side, oracle, which), table, average in zip(sides, tables, means, strict=True):
                i = which[number]
                new, _ = side.at(i, oracle(problem, point))
                change = jax.tree.map(lambda x, t, i=i: x - t[i], new, table)
                estimates.append(
                    jax.tree.map(
                        # The mean counts once all rows have come.
                        lambda x, c, m, side=side: jnp.where(number < side.count, x, c + m),
                        *(new, change, average),
                    )
                )
                kept.append(jax.tree.map(lambda t, x, i=i: t.at[i].set(x), table, new))
                averages.append(optax.tree.add_scale(average, 1 / side.count, change))
            step = directions(*estimates)
            w, v = steps.against((w, v), step[:2], 0.25)
            carry = alpha - 0.25 * step.alpha, w, v, tuple(kept), tuple(averages)
            return carry, (step.alpha, w, v)

        point = Iterate(start[1], jnp.zeros(2), start[0])
        oracles = (train, lower_oracle(problem, point)), (valid, outer_oracle(problem, point))
        tables = tuple(optax.tree.zeros_like(side.table(oracle)) for side, oracle in oracles)
        means = tuple(jax.tree.map(lambda t: t[0], table) for table in tables)
        return jax.lax.scan(body, (*start, point.v, tables, means), jnp.arange(9))[1]

    read_ahead, truth = ahead(order, train, valid), naive(train, valid)
    if np.float64 == DTYPE:
        assert all((x * 2.0**45 == np.round(x * 2.0**45)).all() for x in jax.tree.leaves(truth))
        jax.tree.map(np.testing.assert_array_equal, read_ahead, truth)
    else:  # nine steps have too many digits
        assert_close(read_ahead, truth, f32=1e-5)
    assert not (read_ahead[0][1] == read_ahead[0][2]).all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["saba", "spaba", "f2sa"])
def test_resumed_in_mid_epoch_it_is_the_same_search(name, tmp_path):
    """Test 11, bit for bit. Of a thinned history, whose program is another, up to rounding."""
    run = functools.partial(noisy, METHODS[name], steps=17)
    whole = run(history=bilevel.History(every=3))
    run(
        checkpoint=tmp_path,
        chunk=4,
        callback=lambda result: result.state.step >= 8,
        history=bilevel.History(every=3),
    )
    assert checkpoint.latest(tmp_path) == 8
    resumed = run(checkpoint=tmp_path, resume=True, history=bilevel.History(every=3))
    jax.tree.map(
        np.testing.assert_array_equal,
        (whole.state, whole.history),
        (resumed.state, resumed.history),
    )
    last = [2, 5, 8, 11, 14, 16]  # of its three steps, and of what is left
    every = run().history
    for key, values in whole.history.items():
        assert_close(values, every[key][np.array(last)], f64=1e-12)


@pytest.mark.long
def test_seeds_run_together_as_they_would_alone():
    keys = jax.random.split(jax.random.key(1), 2)

    @jax.jit
    @jax.vmap
    def many(key):
        return search(METHODS["saba"], optax.sgd(0.05), batches=PARTITION, key=key, steps=15)

    result = many(keys)
    for i in range(2):
        alone = noisy(METHODS["saba"], key=keys[i], steps=15)
        assert_close(result.alpha[i], alone.alpha)
        assert_close(result.history["value"][i], alone.history["value"])
    assert np.abs(result.alpha[0] - result.alpha[1]).max() > 1e-6


@pytest.mark.long
def test_a_nan_leaves_the_last_good_point():
    """Test 12: of weights, adjoint and alpha; by the host, under jit, with a thinned history."""

    def broken(w, alpha, batch):
        return outer(w, alpha, batch) * jnp.where(alpha[0] > -3, 1.0, jnp.nan)

    problem = bilevel.Problem(lower, broken)
    args = problem, METHODS["saba"], optax.sgd(1.0), ALPHA, W, TRAIN, VALID
    options = {"steps": 60, "batches": PARTITION, "key": jax.random.key(7)}
    with pytest.raises(bilevel.NonFiniteError) as caught:
        bilevel.search(*args, **options, progress=False, history=bilevel.History(every=4))
    step, result = caught.value.step, caught.value.result
    good = bilevel.search(*args, **(options | {"steps": step}), progress=False)
    assert 2 < step < 60 and step % 4
    jax.tree.map(
        np.testing.assert_array_equal,
        (result.alpha, result.w, result.state.solver_state.v),
        (good.alpha, good.w, good.state.solver_state.v),
    )
    np.testing.assert_array_equal(result.history["alpha"][-1], good.alpha)
    np.testing.assert_array_equal(result.history["value"][-1], good.history["value"][-1])

    def traced(alpha):
        return bilevel.search(
            *args[:3], alpha, *args[4:], **options, history=bilevel.History(every=4)
        )

    frozen = jax.jit(traced)(ALPHA)
    assert frozen.state.step == step
    assert_close(frozen.alpha, good.alpha)
    rows = -(-step // 4)
    assert_close(frozen.history["value"][:rows], result.history["value"])
    assert not np.asarray(frozen.history["value"][rows:]).any()


def test_an_adjoint_that_is_not_finite_is_seen_at_once():
    """The first to go, where a second derivative is not finite and all first ones are."""

    def kinked(w, alpha, batch):
        t = jnp.where(alpha[0] > 0, 1.0, 0.0) * w[0]
        return lower(w, alpha, batch) + 1e-3 * jnp.abs(t) ** 1.5

    problem = bilevel.Problem(kinked, lambda w, alpha, batch: outer(w, alpha, batch) + alpha[0])
    args = problem, METHODS["soba"], optax.sgd(0.3), jnp.ones(Q), W, TRAIN, VALID
    with pytest.raises(bilevel.NonFiniteError) as caught:
        bilevel.search(*args, steps=200, progress=False, history=())
    result = caught.value.result
    assert caught.value.quantity == "hypergradient" and result.alpha[0] <= 0
    assert np.isfinite(result.state.solver_state.v).all()


def test_an_adjoint_that_runs_away_is_told():
    """Its steps are too large, though weights that begin at their solution stay there."""
    problem = bilevel.Problem(
        lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2),
        lambda w, alpha, batch: jnp.sum((w - 3) ** 2),
    )
    run = functools.partial(bilevel.search, problem, optimizer=optax.set_to_zero())
    data = dict(alpha=jnp.ones(2), w0=jnp.ones(2), train=jnp.ones((1, 1)), valid=jnp.ones((1, 1)))
    fine = run(bilevel.soba(0.9), **data, steps=30)
    assert fine.history["noisy_residual"][-1] < 0.1
    with pytest.warns(UserWarning, match="the adjoint's residual is .* times the outer gradient"):
        run(bilevel.soba(2.5), **data, steps=30)
    with pytest.raises(bilevel.NonFiniteError, match=r"adjoint .*; a smaller step_size of the"):
        run(bilevel.soba(9.0), **data, steps=600)


def test_a_loss_that_is_not_kept_is_not_computed_and_not_watched():
    """Its value is NaN, its derivatives are not."""
    problem = bilevel.Problem(
        lambda w, alpha, batch: lower(w, alpha, batch) + jax.lax.stop_gradient(jnp.nan), outer
    )
    args = problem, METHODS["soba"], optax.sgd(0.05), ALPHA, W, TRAIN, VALID
    result = bilevel.search(*args, steps=3, progress=False, history=("value",))
    assert np.isfinite(result.history["value"]).all()
    with pytest.raises(bilevel.NonFiniteError, match="lower loss"):
        bilevel.search(*args, steps=3, progress=False, history=("lower",))


@pytest.mark.long
def test_the_estimate_at_the_end_is_near_the_truth():
    """Test 12. Truth: the closed form."""
    result = noisy(METHODS["saba"], steps=60, diagnostics=True)
    direction = full_direction(PROBLEM, result.w, result.state.solver_state.v, result.alpha, *cut())
    error = np.linalg.norm(direction - solution(result.alpha)[2])
    assert error > 1e-4
    assert error / 3 < result.info.error_estimate < 10 * error


def test_the_estimate_at_the_end_is_near_the_truth_for_a_logistic_regression():
    """Test 12, in ijcnn1's shape: 22 features, ten of them one-hot. Truth: Newton's in numpy."""
    rng = np.random.default_rng(1)

    def rows(n, shrink):
        x = np.hstack([np.eye(10)[rng.integers(0, 10, n)], rng.normal(size=(n, 12))])
        y = np.where(rng.random(n) < 1 / (1 + np.exp(-shrink * x @ truth)), 1.0, -1.0)
        return x, y

    def each(w, x, y):
        return jnp.mean(jax.nn.softplus(-y * (x @ w)))

    truth = rng.normal(size=22)
    train, valid = rows(1000, 1.0), rows(1500, 0.5)
    problem = bilevel.Problem(
        lambda w, alpha, batch: each(w, *batch) + 0.5 * jnp.sum(jnp.exp(alpha) * w**2),
        lambda w, alpha, batch: each(w, *batch),
    )
    data = jax.tree.map(lambda a: jnp.asarray(a, DTYPE), (train, valid))
    result = bilevel.search(
        *(problem, bilevel.saba(0.2), optax.sgd(0.2)),
        *(jnp.full(22, -2.0, DTYPE), jnp.asarray(rng.normal(size=22), DTYPE), *data),
        steps=160,
        batches=bilevel.partition(64),
        key=jax.random.key(3),
        diagnostics=True,
        history=(),
    )
    (x, y), penalty, w = train, np.exp(np.asarray(result.alpha, np.float64)), np.zeros(22)
    for _ in range(30):
        p = 1 / (1 + np.exp(y * (x @ w)))
        hessian = (x.T * (p * (1 - p))) @ x / len(x) + np.diag(penalty)
        w = w - np.linalg.solve(hessian, -x.T @ (y * p) / len(x) + penalty * w)
    outer_slope = -valid[0].T @ (valid[1] / (1 + np.exp(valid[1] * (valid[0] @ w)))) / 1500
    exact = -penalty * w * np.linalg.solve(hessian, outer_slope)
    sides = (make_batched_data("", side, bilevel.partition(64)) for side in data)
    direction = full_direction(problem, result.w, result.state.solver_state.v, result.alpha, *sides)
    error = np.linalg.norm(direction - exact)
    assert error > 1e-3 * np.linalg.norm(exact)
    assert error / 3 < result.info.error_estimate < 10 * error


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_methods_run_in_float32_on_trees_with_auxiliary_outputs_and_geometries(name):
    """Under x64 too, whose numbers are wider than the problem's."""
    to32 = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))

    def paired(loss):
        return lambda w, a, b: (loss(w["w"], a["a"] + a["b"][0], b), {"size": jnp.sum(w["w"] ** 2)})

    problem = bilevel.Problem(paired(lower), paired(outer), has_aux=True)
    alpha = {"a": jnp.full(Q, 1 / Q, jnp.float32), "b": jnp.ones((1, Q), jnp.float32) / Q}
    optimizer = optax.chain(optax.adam(0.01), bilevel.exponentiate())
    result = bilevel.search(
        *(problem, METHODS[name], optimizer, alpha, {"w": to32(W)}, to32(TRAIN), to32(VALID)),
        steps=6,
        batches=PARTITION,
        key=jax.random.key(0),
        progress=False,
        history=("aux", "value", "lower", "noisy_stationarity", "grad_norm"),
    )
    assert {x.dtype for x in jax.tree.leaves((result.alpha, result.w))} == {np.dtype("float32")}
    np.testing.assert_allclose(result.alpha["b"].sum(), 1, rtol=1e-5)
    assert result.history["aux"]["lower"]["size"].shape == (6,)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.history))
