"""Features of a training loop: learned rates and starts, a batch and a key for each step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_resumes, hypergradient, loop_of_steps, normal, tolerance
from problems import mean_squares as loss
from problems import separate_penalties

import bilevel

X, Y, XV, YV = normal(0, 12, 3), normal(1, 12), normal(2, 8, 3), normal(3, 8)
TRAIN, VALID, W0 = (X, Y), (XV, YV), np.array([0.3, -0.2, 0.1])


PLAIN = bilevel.Problem(loss, loss)


def of_parts(alpha):
    """Return an optimizer with a learned schedule, and a rate for each part."""

    def schedule(step):
        return alpha["rate"] * jnp.exp(-alpha["decay"] * step)

    scales = jnp.array([alpha["first"], 1, 1])
    scaled = optax.stateless(lambda updates, _: jax.tree.map(lambda g: scales * g, updates))
    return optax.chain(scaled, optax.sgd(schedule))


def with_momentum(alpha):
    return optax.sgd(alpha["rate"], momentum=alpha["momentum"])


CASES = {
    "rate and momentum": (with_momentum, {"rate": np.array(0.2), "momentum": np.array(0.5)}),
    "schedule and rates of parts": (
        of_parts,
        {"rate": np.array(0.3), "decay": np.array(0.2), "first": np.array(1.5)},
    ),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("rate and momentum", "reverse"), ("schedule and rates of parts", "forward")),
        pytest.param("rate and momentum", "forward", marks=pytest.mark.long),
        pytest.param("schedule and rates of parts", "reverse", marks=pytest.mark.long),
    ],
)
def test_hyperparameters_of_the_optimizer_have_the_derivatives_of_a_loop(name, mode):
    optimizer, alpha = CASES[name]
    given = PLAIN, bilevel.unrolled(optimizer, 7), alpha, W0, TRAIN, VALID
    hyper = hypergradient(*given, mode=mode, diagnostics=True)

    def by_hand(alpha):
        return loss(loop_of_steps(loss, optimizer(alpha), W0, alpha, TRAIN, 7), None, VALID)

    value, grad = jax.value_and_grad(by_hand)(alpha)
    assert_close(hyper.value, value, f64=1e-12, f32=1e-5)
    assert_close(hyper.grad, grad, f64=1e-10, f32=1e-4)
    # No loss depends on alpha, so the solution map is constant.
    assert not hyper.info.converged and "only the solver does" in bilevel.explain(hyper.info)


def test_when_to_stop_is_a_hyperparameter():
    solver = bilevel.unrolled(0.3, 5, average=jax.nn.softmax)
    alpha = jnp.array([0.1, 0.5, -0.3, 0.0, 1.0])
    hyper = hypergradient(PLAIN, solver, alpha, W0, TRAIN, VALID)
    path = [W0]
    for _ in range(5):
        path.append(path[-1] - 0.3 * jax.grad(loss)(path[-1], None, TRAIN))
    path = jnp.stack(path[1:])
    value = lambda alpha: loss(jax.nn.softmax(alpha) @ path, None, VALID)  # noqa: E731
    assert_close(hyper.grad, jax.grad(value)(alpha), f64=1e-10, f32=1e-4)
    half = bilevel.unrolled(0.3, 5, average=jax.nn.softmax, backprop=2)
    assert_close(half.run(loss, alpha, W0, half.init(W0), TRAIN)[0], hyper.w, f64=1e-12, f32=1e-6)


def noisy(key, data):
    """Return four rows, and the key for a mask."""
    rows = jax.random.randint(key, (4,), 0, len(data[1]))
    return *(jnp.asarray(part)[rows] for part in data), key


def dropped(w, alpha, batch):
    """Return squares with dropout of the inputs, and a penalty."""
    x, y, key = batch
    x = x * jax.random.bernoulli(jax.random.fold_in(key, 9), 0.5, x.shape) / 0.5
    return 0.5 * jnp.mean((x @ w - y) ** 2) + 0.5 * jnp.sum(jnp.exp(alpha) * w**2)


NOISY = bilevel.Problem(dropped, loss)


def key():
    return jax.random.key(4)


def by_hand(alpha, steps):
    def step(w, number):
        batch = noisy(jax.random.fold_in(key(), number), TRAIN)
        return w - 0.1 * jax.grad(dropped)(w, alpha, batch), None

    w, _ = jax.lax.scan(step, W0, jnp.arange(steps))
    return loss(w, None, VALID)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "mode"),
    [
        *((5, "forward"), (150, "reverse")),
        pytest.param(5, "reverse", marks=pytest.mark.long),
        pytest.param(150, "forward", marks=pytest.mark.long),
    ],
)
def test_every_step_has_its_own_batch_and_key(mode, steps):
    """Truth: the loop written out. Reverse mode runs 150 steps twice, on the same batches."""
    solver = bilevel.unrolled(0.1, steps, batches=noisy)
    alpha = jnp.array([-1.0, -2.0, 0.5])
    hyper = hypergradient(NOISY, solver, alpha, W0, (key(), TRAIN), VALID, mode=mode)
    value, grad = jax.jit(jax.value_and_grad(lambda a: by_hand(a, steps)))(alpha)
    assert_close(hyper.value, value, f64=1e-12, f32=1e-5)
    assert_close(hyper.grad, grad, f64=1e-10, f32=1e-4)


@pytest.mark.long
def test_a_search_with_batches_inside_resumes_bit_for_bit_and_maps(tmp_path):
    solver = bilevel.unrolled(optax.adam(0.05), 4, batches=noisy)
    args = NOISY, solver, optax.adam(0.1), jnp.zeros(3), W0, TRAIN, VALID
    whole = assert_resumes(args, tmp_path, steps=7, key=key())
    keys = jnp.stack([key(), jax.random.key(5)])
    mapped = jax.jit(jax.vmap(lambda key: bilevel.search(*args, steps=7, key=key).alpha))(keys)
    assert_close(mapped[0], whole.alpha, f64=1e-12, f32=1e-5)
    assert np.abs(mapped[1] - mapped[0]).max() > 1e-3


PENALISED = bilevel.Problem(separate_penalties, loss)
START = np.array([-1.0, 0.0, 0.5])


def value(alpha):
    w = jnp.linalg.solve(X.T @ X / len(Y) + jnp.diag(jnp.exp(alpha)), X.T @ Y / len(Y))
    return loss(w, None, VALID)


ABOVE = {
    "lbfgs": optax.lbfgs(),
    "Polyak": optax.polyak_sgd(f_min=0.0),
    "plateau": optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1)),
    "MultiSteps": optax.MultiSteps(optax.sgd(0.5), 2),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ABOVE)
def test_optimizers_of_alpha_that_ask_for_the_loss_get_it(name):
    """Truth: the same optimizer on the closed form of the outer loss."""
    args = PENALISED, bilevel.implicit(), ABOVE[name], START, W0, TRAIN, VALID
    result = bilevel.search(*args, steps=6)
    rule = ABOVE[name]
    rule = rule.gradient_transformation() if isinstance(rule, optax.MultiSteps) else rule
    rule, alpha = optax.with_extra_args_support(rule), START
    state = rule.init(alpha)
    for _ in range(6):
        now, grad = jax.value_and_grad(value)(alpha)
        updates, state = rule.update(grad, state, alpha, value=now, grad=grad, value_fn=value)
        alpha = optax.apply_updates(alpha, updates)
    assert_close(result.alpha, alpha, f64=1e-5, f32=1e-2)  # line searches branch on roundings
    assert np.abs(alpha - START).max() > tolerance(1e-3, 1e-3)


@pytest.mark.long
def test_a_line_search_under_softmax_moves_logits():
    """L-BFGS reaches the minimum only if its loss function takes logits."""
    target = jnp.array([0.6, 0.3, 0.1])
    problem = bilevel.Problem(
        lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2),
        lambda w, alpha, batch: jnp.sum((w - target) ** 2),
    )
    optimizer = bilevel.softmax(optax.lbfgs())
    args = problem, bilevel.implicit(), optimizer, jnp.ones(3) / 3, jnp.zeros(3), None, None
    result = bilevel.search(*args, steps=25)
    assert_close(result.alpha, target, f64=1e-5, f32=1e-3)


def with_metrics(w, alpha, batch):
    x, y = batch
    metrics = {"largest": jnp.abs(x @ w - y).max(), "rows": jnp.int32(len(y))}
    return separate_penalties(w, alpha, batch), metrics


WITH_AUX = bilevel.Problem(
    with_metrics, lambda w, alpha, batch: (loss(w, None, batch), w), has_aux=True
)
SOLVERS = {
    "implicit": bilevel.implicit(),
    "unrolled": bilevel.unrolled(0.1, 5),
    "one_step": bilevel.one_step(0.1),
    "restarted": bilevel.restarted(bilevel.unrolled(0.1, 5)),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "reverse") for name in SOLVERS]
    + [(name, "forward") for name in SOLVERS if name != "one_step"],
)
def test_auxiliary_outputs_come_out_and_change_nothing(name, mode):
    given, options = (START, W0, TRAIN, VALID), {"mode": mode, "diagnostics": True}
    hyper, without_aux = (
        hypergradient(problem, SOLVERS[name], *given, **options)
        for problem in (WITH_AUX, PENALISED)
    )
    assert without_aux.aux is None
    # Two programs: XLA may round their sums differently in the last bit.
    assert_close(hyper[:4], without_aux[:4], f64=1e-14, f32=1e-6)
    assert_close(hyper.aux["outer"], hyper.w, f64=1e-12, f32=1e-6)
    largest = np.abs(X @ hyper.w - Y).max()
    assert_close(hyper.aux["lower"]["largest"], largest, f64=1e-12, f32=1e-5)
    assert hyper.aux["lower"]["rows"] == len(Y)


@pytest.mark.long
def test_a_search_keeps_auxiliary_outputs(tmp_path):
    rows = bilevel.minibatches(6)
    args = WITH_AUX, bilevel.implicit(), optax.adam(0.1), START, W0, TRAIN, VALID
    options = {"batches": rows, "key": key()}
    whole = assert_resumes(args, tmp_path, **options)
    aux = whole.history["aux"]
    assert aux["lower"]["largest"].shape == (4,) and aux["outer"].shape == (4, 3)
    np.testing.assert_array_equal(aux["outer"][-1], whole.w)
    few = bilevel.search(*args, steps=2, history=["value"], **options)
    assert list(few.history) == ["value"]


def test_a_large_auxiliary_output_is_kept_only_on_request():
    large = bilevel.Problem(
        lambda w, alpha, batch: (loss(w, None, batch) * alpha**2, None),
        lambda w, alpha, batch: (loss(w, None, batch), jnp.zeros(20_000)),
        has_aux=True,
    )
    args = large, bilevel.unrolled(0.1, 1), optax.sgd(0.1), jnp.array(0.1), W0, TRAIN, VALID
    with pytest.warns(UserWarning, match="history: aux's would take .* MiB and is left out"):
        result = bilevel.search(*args, steps=2)
    assert "aux" not in result.history
    requested = bilevel.search(*args, steps=2, history=["aux"])
    assert requested.history["aux"]["outer"].shape == (2, 20_000)


def normalised(w, alpha, batch):
    """Apply a layer on the batch's mean; the running mean and a count of calls are variables."""
    x, y, *_ = batch
    mean = x.mean(0)
    average = 0.9 * w.variables["mean"] + 0.1 * mean
    value = separate_penalties(w.params, alpha, (x - mean, y))
    return value, {"mean": average, "count": w.variables["count"] + 1}


def predicted(w, alpha, batch):
    """Predict with the running mean."""
    return loss(w.params, None, (batch[0] - w.variables["mean"], batch[1]))


NORMALISED = bilevel.Problem(normalised, predicted, stateful=True)
VARIABLES = {"mean": np.zeros(3), "count": np.int32(0)}
STATEFUL = bilevel.Stateful(W0, VARIABLES)


@pytest.mark.long
def test_solvers_that_hold_variables_fixed_update_them_at_their_solution():
    given = NORMALISED, bilevel.implicit(), START, STATEFUL, TRAIN, VALID
    hyper = hypergradient(*given, diagnostics=True)
    mean = X.mean(0)
    H = (X - mean).T @ (X - mean) / len(Y)

    def value(alpha):
        w = jnp.linalg.solve(H + jnp.diag(jnp.exp(alpha)), (X - mean).T @ Y / len(Y))
        return loss(w, None, (XV - 0.1 * mean, YV))

    assert_close(hyper.value, value(START), f64=1e-10, f32=1e-4)
    assert_close(hyper.grad, jax.grad(value)(START), f64=1e-7, f32=1e-3)
    assert hyper.info.converged and hyper.w.variables["count"] == 1


ON_BATCHES = bilevel.unrolled(optax.adam(0.05), 3, batches=noisy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("solver", "calls"),
    [(ON_BATCHES, 12), (bilevel.implicit(), 4), (bilevel.restarted(ON_BATCHES), 3)],
)
def test_a_search_carries_variables_and_resumes_bit_for_bit(solver, calls, tmp_path):
    args = NORMALISED, solver, optax.adam(0.1), START, STATEFUL, TRAIN, VALID
    assert assert_resumes(args, tmp_path, key=key()).w.variables["count"] == calls


@pytest.mark.long
def test_variables_and_auxiliary_outputs_go_together_and_side_by_side():
    def lower(w, alpha, batch):
        value, variables = normalised(w, alpha, batch)
        return value, (variables, {"value": value})

    problem = bilevel.Problem(
        lower, lambda w, a, b: (predicted(w, a, b), w.variables["count"]), True, True
    )
    solver = bilevel.unrolled(0.1, 4)
    alone = bilevel.hypergradient(problem, solver)(START, STATEFUL, TRAIN, VALID)
    assert alone.aux["outer"] == 4
    value = normalised(alone.w, START, TRAIN)[0]
    assert_close(alone.aux["lower"]["value"], value, f64=1e-12, f32=1e-6)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), (START, STATEFUL, TRAIN, VALID))
    stack = bilevel.hypergradient(bilevel.stack_problems(problem), solver)(*stacked)
    assert_close(stack.grad[1], alone.grad, f64=1e-11, f32=1e-5)
    assert stack.aux["outer"].tolist() == [4, 4]


def test_a_callback_is_called_after_every_so_many_steps():
    seen = []

    def note(result):
        seen.append(int(result.state.step))

    args = PENALISED, bilevel.unrolled(0.1, 1), optax.sgd(0.1), START, W0, TRAIN, VALID
    result = bilevel.search(*args, steps=11, callback=note, every=4)
    assert seen == [4, 8, 11]
    np.testing.assert_array_equal(result.alpha, bilevel.search(*args, steps=11).alpha)
    ended = bilevel.search(*args, steps=11, callback=lambda r: True, every=3)
    assert int(ended.state.step) == 3


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:search. the hypergradient was exactly 0")  # alpha stays at 0
def test_both_batches_can_be_drawn_together():
    """Both losses get rows of the same number."""
    rows = jnp.arange(9.0)

    def together(key, train, valid):
        number = jax.random.randint(key, (), 0, 9)
        return train[number], valid[number]

    problem = bilevel.Problem(
        lambda w, alpha, batch: 0.5 * jnp.sum((w - batch) ** 2) + 0 * alpha,
        lambda w, alpha, batch: jnp.sum((10 * w - batch) ** 2) + alpha**2,
    )
    args = problem, bilevel.implicit(), optax.sgd(0.0), jnp.array(0.0), jnp.zeros(())
    options = {"steps": 8, "key": key()}
    result = bilevel.search(*args, rows, 10 * rows, batches=bilevel.jointly(together), **options)
    assert_close(result.history["value"], jnp.zeros(8), f64=1e-9, f32=1e-3)
    apart = bilevel.minibatches(1)
    result = bilevel.search(*args, rows, 10 * rows, batches=apart, **options)
    assert result.history["value"].max() > 1
    # Inner steps draw from the outer draw: five rows of one number, and a step of rate 1 to it.
    many = bilevel.Problem(lambda w, a, b: 0.5 * jnp.mean((w - b) ** 2) + 0 * a, problem.outer)
    of_task = bilevel.jointly(
        lambda key, *data: (jnp.full(5, n := together(key, *data)[0]), 10 * n)
    )
    drawing = bilevel.unrolled(1.0, 2, batches=apart)
    result = bilevel.search(many, drawing, *args[2:], rows, 10 * rows, batches=of_task, **options)
    assert_close(result.history["value"], jnp.zeros(8), f64=1e-9, f32=1e-3)


def test_restarted_inject_hyperparams_has_the_exact_derivative():
    """Without the restart the state would keep the first alpha."""
    alpha = jnp.array(0.1)
    hidden = bilevel.unrolled(lambda a: optax.inject_hyperparams(optax.sgd)(learning_rate=a), 3)
    open_, anew = (
        hypergradient(PLAIN, solver, alpha, W0, TRAIN, VALID).grad
        for solver in (bilevel.unrolled(lambda a: optax.sgd(a), 3), bilevel.restarted(hidden))
    )
    assert_close(anew, open_, f64=1e-7, f32=1e-5)
