"""No search fails in silence: each cause has a count, and one warning that names the remedy."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tolerance
from problems import follower, lasso_loss, mean_squares, soft_problem

import bilevel
from bilevel.problem.structure import leaves_used_by
from bilevel.solvers import report_of


def rows(seed, n, p):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, p)), rng.normal(size=n)


RIDGE = soft_problem()
LASSO = bilevel.Problem(lasso_loss, mean_squares)
TRAIN, VALID = rows(0, 20, 40), rows(1, 20, 40)
CLOSED_FORM = bilevel.ridge(lambda alpha, x: x, lambda alpha: 20 * jnp.exp(alpha))


def closed_form(alpha, train):
    """The weights of RIDGE."""
    x, y = train
    return jnp.linalg.solve(x.T @ x / 20 + jnp.exp(alpha) * jnp.eye(40), x.T @ y / 20)


def proximal_gradient(alpha, w, batch, *, l2=0.0, steps=2000):
    x, y = batch
    curvature = jnp.linalg.norm(x, 2) ** 2 / len(y) + l2

    def step(w, _):
        z = w - (x.T @ (x @ w - y) / len(y) + l2 * w) / curvature
        return jnp.sign(z) * jnp.maximum(jnp.abs(z) - jnp.exp(alpha) / curvature, 0), None

    return jax.lax.scan(step, w, None, length=steps)[0]


def run(problem, solver, alpha=None, w=None, *, steps=12, optimizer=None, data=(TRAIN, VALID)):
    """The result of a search, and the messages of its warnings."""
    alpha = jnp.asarray(-2.0) if alpha is None else alpha
    w = jnp.zeros(40) if w is None else w
    optimizer = optax.sgd(1e-3) if optimizer is None else optimizer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bilevel.search(problem, solver, optimizer, alpha, w, *data, steps=steps)
    return result, [str(w.message) for w in caught if w.category is UserWarning]


def test_an_adjoint_that_does_not_solve_its_system_is_reported():
    """More weights than rows and an l1 term: the Hessian is singular at the solution."""
    solver = bilevel.implicit(bilevel.solved(proximal_gradient), bilevel.cg())
    # The gradient can be 1e15, so alpha takes tiny steps.
    result, messages = run(LASSO, solver, optimizer=optax.sgd(1e-30))
    assert int(result.report.failed.total) == int(result.report.steps) == 12
    assert len(messages) == 1 and "was not solved in 12 of 12 outer steps" in messages[0]
    assert "unrolled" in messages[0]  # the remedy
    # A failed adjoint is not a warm start.
    assert float(optax.tree.norm(result.state.solver_state.adjoint)) == 0


@pytest.mark.parametrize(
    "wrap",
    [lambda solver: solver, pytest.param(bilevel.restarted, marks=pytest.mark.long)],
    ids=["warm", "restarted"],
)
def test_the_report_holds_the_residual_of_the_adjoint(wrap):
    """Truth: H q - v by numpy, after 5 steps of conjugate gradients."""
    solver = wrap(bilevel.implicit(bilevel.newton(), bilevel.cg(steps=5)))
    result, _ = run(RIDGE, solver, steps=1)
    (x, y), (xv, yv) = jax.tree.map(lambda a: np.asarray(a, float), (TRAIN, VALID))
    hessian = x.T @ x / 20 + np.exp(-2.0) * np.eye(40)
    w = np.linalg.solve(hessian, x.T @ y / 20)
    force = xv.T @ (xv @ w - yv) / 20
    # Conjugate gradients from 0 minimise q' H q / 2 - v' q over a Krylov space.
    krylov = np.stack([np.linalg.matrix_power(hessian, k) @ force for k in range(5)], 1)
    basis = np.linalg.qr(krylov)[0]
    q = basis @ np.linalg.solve(basis.T @ hessian @ basis, basis.T @ force)
    expected = np.linalg.norm(hessian @ q - force) / np.linalg.norm(force)
    report = report_of(result.state.solver_state)
    np.testing.assert_allclose(report.residual, expected, rtol=1e-3)
    assert bool(report.failed) == (expected > 0.5) and report.indefinite == 0


@pytest.mark.parametrize(
    "solver", [bilevel.implicit(), CLOSED_FORM, bilevel.restarted(bilevel.unrolled(0.1, 30))]
)
def test_a_sound_search_reports_nothing(solver):
    result, messages = run(RIDGE, solver, optimizer=optax.sgd(0.1))
    report = result.report
    assert not messages and report.messages() == ()
    assert all(int(c.total) == 0 for c in (report.zero, report.failed, report.moving))
    np.testing.assert_allclose(report.ratio, 1, atol=0.05)


def test_compiled_searches_set_the_fields():
    solver = bilevel.implicit(bilevel.solved(proximal_gradient))

    @jax.vmap
    @jax.jit
    def report(alpha):
        w, optimizer = jnp.zeros(40), optax.sgd(1e-30)
        return bilevel.search(LASSO, solver, optimizer, alpha, w, TRAIN, VALID, steps=3).report

    reported = report(jnp.full(2, -2.0))
    assert (np.asarray(reported.failed.total) == 3).all()
    with pytest.raises(ValueError, match="got 2 side by side"):
        reported.messages()
    reported = jax.tree.map(lambda x: x[0], reported)
    assert "was not solved in 3 of 3" in reported.messages()[0]


def test_weights_that_are_not_stationary_are_reported():
    """An l1 term with a strong l2 term: the adjoint is solved, at a kink."""
    elastic = bilevel.Problem(lambda w, *a: LASSO.lower(w, *a) + jnp.sum(w**2) / 2, mean_squares)
    solve = functools.partial(proximal_gradient, l2=1.0, steps=500)
    result, messages = run(elastic, bilevel.implicit(bilevel.solved(solve)))
    assert int(result.report.moving.total) == 12 and int(result.report.failed.total) == 0
    assert len(messages) == 1 and "not a stationary point" in messages[0]


def test_a_saddle_is_reported():
    saddle = bilevel.Problem(
        lambda w, a, b: 0.5 * (w[0] ** 2 - w[1] ** 2) - a * jnp.sum(w),
        lambda w, a, b: jnp.sum((w - 1) ** 2),
    )
    w = lambda alpha, w, batch: alpha * jnp.array([1.0, -1.0])  # noqa: E731
    result, messages = run(saddle, bilevel.implicit(bilevel.solved(w)), jnp.array(0.3), jnp.ones(2))
    assert int(result.report.indefinite.total) == 12
    assert len(messages) == 1 and "not positive definite" in messages[0]


def test_a_gradient_that_is_exactly_0_is_reported():
    dead = bilevel.Problem(
        lambda w, a, b: jnp.sum(jax.nn.relu(w) * a), lambda w, a, b: jnp.sum((w - 2) ** 2)
    )
    result, messages = run(dead, bilevel.unrolled(0.1, 5), jnp.array(1.0), -jnp.ones(3))
    assert int(result.report.zero.last) == 12
    assert len(messages) == 1 and "exactly 0 in the last 12 of 12" in messages[0]


def test_a_gradient_of_0_at_the_optimum_is_not_reported():
    start = jnp.array(0.0), jnp.ones(1)
    parabola = follower(lambda w, alpha, batch: jnp.sum((w - 2) ** 2))
    result, messages = run(parabola, bilevel.implicit(), *start, optimizer=optax.sgd(0.5))
    assert int(result.report.zero.last) == 11 and not messages


SCHEDULES = {
    "cosine": optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
    "injected": optax.inject_hyperparams(optax.sgd)(optax.polynomial_schedule(0.1, 0.0, 2, 10)),
    "masked": optax.masked(optax.sgd(optax.cosine_decay_schedule(0.1, 10)), True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_inner_schedule_that_ends_with_the_first_outer_step_is_reported(name):
    unrolled = bilevel.unrolled(SCHEDULES[name], 10)
    for solver in (unrolled, bilevel.implicit(unrolled))[: 2 if name == "cosine" else 1]:
        result, messages = run(RIDGE, solver, steps=9)
        assert result.report.spent > 0.5
        assert any("schedule" in message and "restarted" in message for message in messages)
    if name == "cosine":
        restarted, messages = run(RIDGE, bilevel.restarted(unrolled), steps=9)
        assert restarted.report.spent == 0 and not messages


@pytest.mark.long
def test_a_schedule_as_long_as_the_search_is_not_reported():
    warm = optax.warmup_cosine_decay_schedule(0.0, 0.1, 20, 90)
    for rate in (warm, optax.exponential_decay(0.1, 90, 0.1)):
        result, messages = run(RIDGE, bilevel.unrolled(optax.sgd(rate), 10), steps=9)
        assert result.report.spent < 0.5 and not messages


ALPHA = {"decay": np.array(0.1), "mix": np.array(1.0), "rate": np.array(0.1)}
LEAVES = bilevel.Problem(
    lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha["mix"]) ** 2) + alpha["decay"] * jnp.sum(w**2),
    lambda w, alpha, batch: jnp.sum((w - 2) ** 2) + 0.1 * alpha["mix"] ** 2,
)
RATED = bilevel.unrolled(lambda alpha: optax.sgd(alpha["rate"]), 9)
DIRECT = bilevel.unrolled(lambda alpha: optax.sgd(alpha["rate"]), 5, backprop=0)


def messages_of(solver, **options):
    return run(LEAVES, solver, ALPHA, jnp.zeros(3), data=(None, None), steps=2, **options)[1]


def test_a_constant_leaf_may_be_unused():
    labels = {"decay": "moved", "mix": "moved", "rate": "held"}
    rules = {"moved": optax.sgd(0.01), "held": optax.set_to_zero()}
    assert not messages_of(bilevel.unrolled(0.1, 5), optimizer=optax.partition(rules, labels))


@pytest.mark.parametrize(("solver", "leaf"), [(bilevel.implicit(RATED), "rate"), (DIRECT, "decay")])
def test_a_leaf_that_the_derivative_misses_gives_one_warning(solver, leaf):
    messages = messages_of(solver)
    assert len(messages) == 1 and f"alpha['{leaf}']" in messages[0] and "unrolled" in messages[0]
    with pytest.warns(UserWarning, match=leaf):
        jax.jit(bilevel.hypergradient(LEAVES, solver))(ALPHA, jnp.zeros(3), None, None)


def test_a_rate_that_is_learned_by_unrolling_gives_no_warning():
    assert not messages_of(RATED)


def test_the_program_is_read_once_for_all_leaves():
    masks = np.random.default_rng(3).integers(0, 2, 12)

    def loss(w, alpha, batch):
        def body(carry, x):
            return (carry[1], carry[0] * x), None

        used = [a for a, m in zip(alpha, masks, strict=True) if m]
        first, second = jax.lax.scan(body, (used[0], w), jnp.stack(used[1:]))[0]
        return jnp.where(w > 0, first, second)

    alpha = [jnp.asarray(float(i)) for i in range(12)]
    assert leaves_used_by(loss, jnp.asarray(1.0), alpha, None) == [bool(m) for m in masks]


def test_the_predicted_change_is_the_gradient_times_the_step():
    result, _ = run(RIDGE, CLOSED_FORM, optimizer=optax.adam(0.01), steps=20)
    history = result.history
    fn = jax.jit(bilevel.hypergradient(RIDGE, CLOSED_FORM, diagnostics=False))
    alphas = [jnp.asarray(-2.0), *history["alpha"]]
    grads = [fn(alpha, jnp.zeros(40), TRAIN, VALID).grad for alpha in alphas[:-2]]
    expected = [0, *(np.asarray(grads) * np.diff(alphas)[:-1])]
    rtol = tolerance(1e-8, 1e-3)
    np.testing.assert_allclose(history["predicted"], expected, rtol=rtol, atol=1e-7)
    np.testing.assert_allclose(history["actual"][1:], np.diff(history["value"]), atol=1e-7)
    np.testing.assert_allclose(result.report.actual, history["actual"].sum(), rtol=1e-5)


@pytest.mark.long
def test_nothing_is_predicted_if_the_value_depends_on_more_than_alpha():
    for solver, options in (
        (bilevel.unrolled(0.1, 3), {}),
        (bilevel.implicit(), {"batches": bilevel.minibatches(5), "key": jax.random.key(0)}),
    ):
        start = jnp.array(-2.0), jnp.zeros(40), TRAIN, VALID
        result = bilevel.search(RIDGE, solver, optax.sgd(0.1), *start, steps=2, **options)
        assert "predicted" not in result.history and int(result.report.compared) == 0


def test_a_decrease_that_the_gradient_does_not_predict_is_reported():
    """A staircase: flat pieces that go up, jumps that go down."""

    def stairs(alpha):
        return jax.lax.stop_gradient(-3 * alpha) + 0.01 * alpha

    staircase = bilevel.Problem(lambda w, a, b: (w - stairs(a)) ** 2 / 2, lambda w, a, b: w + 10)
    args = staircase, bilevel.implicit(), jnp.array(0.0), jnp.array(0.0)
    result, messages = run(*args, optimizer=optax.sign_sgd(0.01), steps=60)
    assert float(result.report.ratio) < 0.1
    assert len(messages) == 1 and "not its slope" in messages[0]


@pytest.mark.long
def test_the_difference_is_the_slope_over_a_step():
    alpha, h = jnp.asarray(-1.0), 0.3
    fn = bilevel.hypergradient(RIDGE, bilevel.implicit(), difference=h)
    hyper = jax.jit(fn)(alpha, jnp.zeros(40), TRAIN, VALID)
    sign = jnp.sign(hyper.grad)
    ends = [mean_squares(closed_form(alpha + s * sign * h, TRAIN), None, VALID) for s in (1, -1)]
    slope = (ends[0] - ends[1]) / (2 * h)
    np.testing.assert_allclose(hyper.info.slope, slope, rtol=tolerance(1e-7, 1e-3))


@pytest.mark.long
def test_a_resumed_search_has_the_report_of_the_whole(tmp_path):
    solver = bilevel.implicit(bilevel.solved(lambda alpha, w, batch: closed_form(alpha, batch)))

    def search(**options):
        args = solver, optax.adam(0.01), jnp.array(-2.0), jnp.zeros(40), TRAIN, VALID
        return bilevel.search(RIDGE, *args, steps=21, chunk=7, **options)

    whole = search()
    search(checkpoint=tmp_path, callback=lambda r: len(r.history["value"]) >= 7)
    resumed = search(checkpoint=tmp_path, resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.report, resumed.report)
    jax.tree.map(np.testing.assert_array_equal, whole.history, resumed.history)
