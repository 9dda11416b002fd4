"""Features of training loops: learned rates, a batch and a key for each step, and their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_resumes, hypergradient, loop_of_steps, normal, tolerance
from problems import follower, separate_penalties
from problems import mean_squares as loss

import bilevel

X, Y, XV, YV = normal(0, 12, 3), normal(1, 12), normal(2, 8, 3), normal(3, 8)
TRAIN, VALID, W0 = (X, Y), (XV, YV), np.array([0.3, -0.2, 0.1])
PLAIN = bilevel.Problem(loss, loss)


def of_parts(alpha):
    def schedule(step):
        return alpha["rate"] * jnp.exp(-alpha["decay"] * step)

    scales = jnp.array([alpha["first"], 1, 1])
    scaled = optax.stateless(lambda updates, _: jax.tree.map(lambda g: scales * g, updates))
    return optax.chain(scaled, optax.sgd(schedule))


def with_momentum(alpha):
    return optax.sgd(alpha["rate"], momentum=alpha["momentum"])


@pytest.mark.parametrize(
    ("mode", "optimizer", "alpha"),
    [
        ("reverse", with_momentum, {"rate": 0.2, "momentum": 0.5}),
        ("forward", of_parts, {"rate": 0.3, "decay": 0.2, "first": 1.5}),
    ],
)
def test_hyperparameters_of_the_optimizer_have_the_derivatives_of_a_loop(mode, optimizer, alpha):
    alpha = jax.tree.map(np.array, alpha)
    given = PLAIN, bilevel.unrolled(optimizer, 7), alpha, W0, TRAIN, VALID
    hyper = hypergradient(*given, mode=mode, diagnostics=True)

    def by_hand(alpha):
        return loss(loop_of_steps(loss, optimizer(alpha), W0, alpha, TRAIN, 7), None, VALID)

    value, grad = jax.value_and_grad(by_hand)(alpha)
    assert_close(hyper.value, value, f64=1e-12, f32=1e-5)
    assert_close(hyper.grad, grad, f64=1e-10, f32=1e-4)
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
    return separate_penalties(w, alpha, (x, y))


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
@pytest.mark.parametrize(("steps", "mode"), [(5, "forward"), (150, "reverse")])
def test_every_step_has_its_own_batch_and_key(mode, steps):
    """Truth: the loop written out. Reverse mode runs 150 steps twice, on the same batches."""
    solver = bilevel.unrolled(0.1, steps, batches=noisy)
    alpha = jnp.array([-1.0, -2.0, 0.5])
    hyper = hypergradient(NOISY, solver, alpha, W0, (key(), TRAIN), VALID, mode=mode)
    value, grad = jax.jit(jax.value_and_grad(lambda a: by_hand(a, steps)))(alpha)
    assert_close(hyper.value, value, f64=1e-12, f32=1e-5)
    assert_close(hyper.grad, grad, f64=1e-10, f32=1e-4)


ON_BATCHES = bilevel.unrolled(optax.adam(0.05), 4, batches=noisy)


@pytest.mark.long
def test_a_search_with_batches_inside_resumes_bit_for_bit_and_maps(tmp_path):
    args = NOISY, ON_BATCHES, optax.adam(0.1), jnp.zeros(3), W0, TRAIN, VALID
    whole = assert_resumes(args, tmp_path, steps=7, key=key())
    keys = jnp.stack([key(), jax.random.key(5)])
    mapped = jax.jit(jax.vmap(lambda key: bilevel.search(*args, steps=7, key=key).alpha))(keys)
    assert_close(mapped[0], whole.alpha, f64=1e-12, f32=1e-5)
    assert np.abs(mapped[1] - mapped[0]).max() > 1e-3


PENALISED = bilevel.Problem(separate_penalties, loss)
START = np.array([-1.0, 0.0, 0.5])
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

    def value(alpha):
        w = jnp.linalg.solve(X.T @ X / len(Y) + jnp.diag(jnp.exp(alpha)), X.T @ Y / len(Y))
        return loss(w, None, VALID)

    rule = ABOVE[name]
    result = bilevel.search(PENALISED, bilevel.implicit(), rule, START, W0, TRAIN, VALID, steps=6)
    rule = rule.gradient_transformation() if isinstance(rule, optax.MultiSteps) else rule
    rule, alpha = optax.with_extra_args_support(rule), START
    state = rule.init(alpha)
    for _ in range(6):
        now, grad = jax.value_and_grad(value)(alpha)
        updates, state = rule.update(grad, state, alpha, value=now, grad=grad, value_fn=value)
        alpha = optax.apply_updates(alpha, updates)
    assert_close(result.alpha, alpha, f64=1e-5, f32=1e-2)  # line searches branch on roundings
    assert np.abs(alpha - START).max() > tolerance(1e-3, 1e-3)


@pytest.mark.slow
def test_a_line_search_moves_alpha_and_resumes_from_a_checkpoint(tmp_path):
    """Truth: the minimum of the outer loss, at the targets."""
    targets = jnp.array([1.0, -2.0])
    problem = follower(lambda w, alpha, batch: jnp.sum((w - targets) ** 2))
    zeros = jnp.zeros(2)
    args = problem, bilevel.implicit(), optax.lbfgs(), zeros, zeros, None, None
    bilevel.search(*args, steps=3, checkpoint=tmp_path)
    resumed = bilevel.search(*args, steps=6, checkpoint=tmp_path, resume=True)
    assert_close(resumed.alpha, targets, f64=1e-9, f32=1e-4)


@pytest.mark.long
def test_a_line_search_under_softmax_moves_logits():
    """L-BFGS reaches the minimum only if its loss function takes logits."""
    target = jnp.array([0.6, 0.3, 0.1])
    problem = follower(lambda w, alpha, batch: jnp.sum((w - target) ** 2))
    optimizer = bilevel.softmax(optax.lbfgs())
    args = problem, bilevel.implicit(), optimizer, jnp.ones(3) / 3, jnp.zeros(3), None, None
    assert_close(bilevel.search(*args, steps=25).alpha, target, f64=1e-5, f32=1e-3)


def with_metrics(w, alpha, batch):
    x, y = batch
    metrics = {"largest": jnp.abs(x @ w - y).max(), "rows": jnp.int32(len(y))}
    return separate_penalties(w, alpha, batch), metrics


WITH_AUX = bilevel.Problem(with_metrics, lambda w, a, b: (loss(w, None, b), w), has_aux=True)
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
        hypergradient(p, SOLVERS[name], *given, **options) for p in (WITH_AUX, PENALISED)
    )
    assert without_aux.aux is None
    assert_close(hyper[:4], without_aux[:4], f64=1e-14, f32=1e-6)  # XLA may round them apart
    assert_close(hyper.aux["outer"], hyper.w, f64=1e-12, f32=1e-6)
    assert_close(hyper.aux["lower"]["largest"], np.abs(X @ hyper.w - Y).max(), f64=1e-12, f32=1e-5)
    assert hyper.aux["lower"]["rows"] == len(Y)


@pytest.mark.long
def test_a_search_keeps_auxiliary_outputs(tmp_path):
    args = WITH_AUX, bilevel.implicit(), optax.adam(0.1), START, W0, TRAIN, VALID
    options = {"batches": bilevel.minibatches(6), "key": key()}
    whole = assert_resumes(args, tmp_path, **options)
    aux = whole.history["aux"]
    assert aux["lower"]["largest"].shape == (4,) and aux["outer"].shape == (4, 3)
    np.testing.assert_array_equal(aux["outer"][-1], whole.w)
    assert list(bilevel.search(*args, steps=2, history=["value"], **options).history) == ["value"]


def test_a_large_auxiliary_output_is_kept_only_on_request():
    large = bilevel.Problem(
        lambda w, a, b: (loss(w, None, b) * a**2, None),
        lambda w, a, b: (loss(w, None, b), jnp.zeros(20_000)),
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
    variables = {"mean": 0.9 * w.variables["mean"] + 0.1 * mean, "count": w.variables["count"] + 1}
    return separate_penalties(w.params, alpha, (x - mean, y)), variables


def predicted(w, alpha, batch):
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("solver", "calls"),
    [(ON_BATCHES, 16), (bilevel.implicit(), 4), (bilevel.restarted(ON_BATCHES), 4)],
)
def test_a_search_carries_variables_and_resumes_bit_for_bit(solver, calls, tmp_path):
    args = NORMALISED, solver, optax.adam(0.1), START, STATEFUL, TRAIN, VALID
    assert assert_resumes(args, tmp_path, key=key()).w.variables["count"] == calls


@pytest.mark.long
def test_variables_and_auxiliary_outputs_go_together_and_side_by_side():
    def lower(w, alpha, batch):
        value, variables = normalised(w, alpha, batch)
        return value, (variables, {"value": value})

    losses = lower, lambda w, a, b: (predicted(w, a, b), w.variables["count"])
    problem = bilevel.Problem(*losses, True, True)
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
    args = PENALISED, bilevel.unrolled(0.1, 1), optax.sgd(0.1), START, W0, TRAIN, VALID
    note = lambda result: seen.append(int(result.state.step))  # noqa: E731
    result = bilevel.search(*args, steps=11, callback=note, every=4)
    assert seen == [4, 8, 11]
    np.testing.assert_array_equal(result.alpha, bilevel.search(*args, steps=11).alpha)
    assert int(bilevel.search(*args, steps=11, callback=lambda r: True, every=3).state.step) == 3


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:search. the hypergradient was exactly 0")  # alpha stays at 0
def test_both_batches_can_be_drawn_together():
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
    of_task = bilevel.jointly(lambda k, *data: (jnp.full(5, n := together(k, *data)[0]), 10 * n))
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


@pytest.mark.parametrize("name", ["unrolled", "distilled", "restarted", "implicit"])
def test_variables_keep_the_types_that_they_began_with(name):
    def changing(w, alpha, batch):
        """Keep a running mean in half precision, as a layer may compute it."""
        mean = (0.5 * w.variables["mean"]).astype(jnp.float16)
        loss = 0.5 * jnp.sum((w.params - alpha) ** 2)
        return loss, {"mean": mean, "count": w.variables["count"] + 1}

    problem = bilevel.Problem(changing, lambda w, a, b: jnp.sum(w.params**2), stateful=True)
    w0 = bilevel.Stateful(jnp.ones(2), {"mean": jnp.ones(2), "count": jnp.zeros((), int)})
    solver = (SOLVERS | {"distilled": bilevel.distilled(0.1, decay=0.5)})[name]
    args = problem, solver, optax.sgd(0.1), jnp.array(0.3), w0, None, None
    variables = bilevel.search(*args, steps=2).w.variables
    assert variables["mean"].dtype == jnp.ones(2).dtype
    calls = {"unrolled": 10, "restarted": 5}.get(name, 2)  # a restarted run begins at the start
    np.testing.assert_allclose(variables["mean"], 0.5**calls, rtol=1e-3)


# --------------------------------------------------- truncation bias and standard errors

CASES = {
    "momentum": (PENALISED, optax.sgd(0.2, momentum=0.5), START, W0, TRAIN, None),
    "batches": (NOISY, 0.1, START, W0, TRAIN, noisy),
    "variables": (NORMALISED, 0.1, START, STATEFUL, TRAIN, None),
    "rate": (PLAIN, lambda a: optax.adam(a["rate"]), {"rate": np.array(0.1)}, W0, TRAIN, None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_all_truncations_at_once_are_those_one_by_one(name):
    problem, optimizer, alpha, w0, train, batches = CASES[name]
    train = (key(), train) if batches else train
    fn = jax.jit(bilevel.truncation(problem, optimizer, 4, batches=batches))
    truncations = fn(alpha, w0, train, VALID)
    # Without a differentiated step all are 0, because the outer loss does not read alpha. There
    # `hypergradient` raises.
    assert all((grads[0] == 0).all() for grads in jax.tree.leaves(truncations.grads))
    for k in range(1, 5):
        solver = bilevel.unrolled(optimizer, 4, backprop=k, batches=batches)
        expected = hypergradient(problem, solver, alpha, w0, train, VALID)
        here, whole = (jax.tree.map(lambda g: g[i], truncations.grads) for i in (k, -1))  # noqa: B023
        scale = optax.tree.norm(whole)
        assert optax.tree.norm(optax.tree.sub(here, expected.grad)) < tolerance(1e-11, 1e-4) * scale
        bias = optax.tree.norm(optax.tree.sub(here, whole)) / scale
        assert_close(truncations.bias[k], bias, f64=1e-10, f32=1e-4)
        assert_close(truncations.value, expected.value, f64=1e-12, f32=1e-5)
    assert truncations.bias[-1] == 0 and truncations.bias[0] > 0.01


@pytest.mark.long
def test_keys_are_split_with_the_rows():
    fn = bilevel.hypergradient(NOISY, bilevel.unrolled(0.1, 3, batches=noisy), diagnostics=False)
    hyper = jax.jit(bilevel.standard_error(fn, 4))(START, W0, (key(), TRAIN), VALID)
    train, valid = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), (TRAIN, VALID))
    parts = jax.jit(jax.vmap(fn, (None, None, 0, 0)))
    grads = np.asarray(parts(START, W0, (jax.random.split(key(), 4), train), valid).grad)
    assert_close(hyper.grad, grads.mean(0), f64=1e-12, f32=1e-5)
    error = grads.std(0, ddof=1) / 2
    assert_close(hyper.error, error, f64=1e-12, f32=1e-4)
    relative = np.linalg.norm(error) / np.linalg.norm(grads.mean(0))
    assert_close(hyper.relative, relative, f64=1e-9, f32=1e-4)


def test_a_rate_is_distilled_too():
    """At decay 1/2, the second step from w to w - r (w - 1) counts 1.5 times."""
    solver = bilevel.distilled(lambda alpha: optax.sgd(alpha), decay=0.5)
    to_one = bilevel.Problem(lambda w, a, b: 0.5 * (w - 1) ** 2, lambda w, a, b: w)
    init, step = bilevel.descent(to_one, solver, optax.sgd(0.0))
    state = init(jnp.array(0.5), jnp.array(0.0))
    for _ in range(2):
        state, metrics = step(state, (None, None))
    mean = (0.5 * 0.0 + 0.5) / 1.5  # of the weights before each step, 0 and 1/2
    assert_close(metrics["grad_norm"], 1.5 * (1 - mean), f64=1e-12, f32=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_the_past_is_distilled_as_the_paper_says(mode):
    """Truth: Lee et al. 2022, Eqs. (8), (13)."""
    decay, scale = 0.7, 1.3
    solver = bilevel.distilled(optax.sgd(0.1, momentum=0.5), decay=decay, scale=scale)
    state = solver.init(W0)
    w, mean, m = W0, W0, jnp.zeros(3)
    derivative = {"reverse": jax.jacrev, "forward": jax.jacfwd}[mode]

    def stepped(alpha, w, m):
        m = 0.5 * m + jax.grad(PENALISED.lower)(w, alpha, TRAIN)
        return w - 0.1 * m, m

    def trained(alpha, w, state):
        w, state = solver.run(PENALISED.lower, alpha, w, state, TRAIN)
        return PENALISED.outer(w, alpha, VALID), (w, state)

    for t in range(1, 6):
        share = (decay - decay**t) / (1 - decay**t)
        mean = share * mean + (1 - share) * w
        new, new_m = stepped(START, w, m)
        away = jax.grad(PENALISED.outer)(new, START, VALID)
        slope = away @ jax.jacrev(stepped)(START, mean, m)[0]
        grad, (w, state) = derivative(trained, has_aux=True)(START, w, state)
        m = new_m
        assert_close(w, new, f64=1e-12, f32=1e-6)
        assert_close(grad, scale * (1 - decay**t) / (1 - decay) * slope, f64=1e-10, f32=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_every_step_updates_the_variables(mode, differentiated):
    def lower(w, alpha, batch):
        x, y, *_ = batch
        mean = 0.9 * w.variables["mean"] + 0.1 * (jnp.exp(alpha) * x).mean(0) + 0.05 * w.params
        value = 0.5 * jnp.mean(((x - mean) @ w.params - y) ** 2)
        return value, {"mean": mean, "count": w.variables["count"] + 1}

    def outer(w, alpha, batch):
        x, y = batch
        return 0.5 * jnp.mean(((x - w.variables["mean"]) @ w.params - y) ** 2)

    problem = bilevel.Problem(lower, outer, stateful=True, differentiated=differentiated)
    solver = bilevel.unrolled(optax.sgd(0.1, momentum=0.5), 6, batches=noisy)
    given = problem, solver, START, STATEFUL, (key(), TRAIN), VALID
    hyper = hypergradient(*given, mode=mode, diagnostics=True)

    def loss(params, variables, alpha, batch):
        return lower(bilevel.Stateful(params, variables), alpha, batch)

    def by_hand(alpha):
        w, m, variables = W0, jnp.zeros(3), VARIABLES
        for number in range(6):
            batch = noisy(jax.random.fold_in(key(), number), TRAIN)
            g, variables = jax.grad(loss, has_aux=True)(w, variables, alpha, batch)
            if not differentiated:
                variables = jax.lax.stop_gradient(variables)
            m = 0.5 * m + g
            w = w - 0.1 * m
        end = bilevel.Stateful(w, variables)
        return outer(end, alpha, VALID), end

    (value, end), grad = jax.value_and_grad(by_hand, has_aux=True)(START)
    assert_close(hyper.value, value, f64=1e-12, f32=1e-5)
    assert_close(hyper.grad, grad, f64=1e-10, f32=1e-4)
    assert_close(hyper.w.params, end.params, f64=1e-12, f32=1e-5)
    assert_close(hyper.w.variables["mean"], end.variables["mean"], f64=1e-12, f32=1e-5)
    assert hyper.w.variables["count"] == 6
    assert ("pass through variables" in bilevel.explain(hyper.info)) == differentiated


@pytest.mark.long
def test_variables_at_a_solution_are_differentiated_too():
    def lower(w, alpha, batch):
        x, y = batch
        value = 0.5 * jnp.mean((x @ w.params - y) ** 2) + 0.5 * jnp.sum(w.params**2)
        return value, alpha * x.mean(0) * w.params

    def outer(w, alpha, batch):
        return jnp.sum((w.variables - 1.0) ** 2)

    problem = bilevel.Problem(lower, outer, stateful=True, differentiated=True)
    start = START, bilevel.Stateful(W0, jnp.zeros(3)), TRAIN, VALID
    hyper = hypergradient(problem, bilevel.implicit(), *start)
    w = jnp.linalg.solve(X.T @ X / len(Y) + jnp.eye(3), X.T @ Y / len(Y))
    expected = jax.grad(lambda a: jnp.sum((a * X.mean(0) * w - 1.0) ** 2))(START)
    assert_close(hyper.grad, expected, f64=1e-8, f32=1e-4)


@pytest.mark.long
def test_errors_of_a_hypergradient_that_is_nothing_are_infinite():
    problem = follower(lambda w, alpha, batch: jnp.mean(batch) * (w - 0.75 * alpha))
    start, one = (jnp.zeros(()), jnp.zeros(())), jnp.ones(2)
    # Two steps half the way: 1/4 + 1/2 - 3/4.
    bias = bilevel.truncation(problem, 0.5, 2)(*start, None, one).bias
    assert bias.tolist() == [np.inf, np.inf, 0]
    spread = bilevel.standard_error(bilevel.hypergradient(problem, bilevel.unrolled(0.5, 1)), 2)
    assert spread(*start, None, jnp.array([-1.0, 1.0])).relative == np.inf
    assert spread(*start, None, jnp.zeros(2)).relative == 0


# ---------------------------------- the methods in docs/coming_from/gradhpo_boat.md, written out

STEPS, RATE = 6, 0.55  # the second weight overshoots: the outer loss rises and falls
AIM_AND_START = {"aim": np.array([0.5, 0.4]), "start": np.array([0.1, -0.6])}


def test_the_trajectory_is_cut_where_the_outer_loss_is_largest():
    """IAPTT-GM (Liu et al. 2021): a learned start, and the worst of all iterates."""

    def below(w, alpha):
        return 0.5 * jnp.sum(np.array([1.0, 3.0]) * (w - alpha["aim"]) ** 2)

    def above(w):
        return jnp.sum(jnp.cosh(w - jnp.array([0.2, -0.1])))

    def lower(w, alpha, batch):
        return below(w.params, alpha), outer(w, alpha, batch)

    def outer(w, alpha, batch):
        return jnp.maximum(w.variables, above(w.params))

    problem = bilevel.Problem(lower, outer, stateful=True, differentiated=True)
    descent = bilevel.unrolled(RATE, STEPS)
    solver = bilevel.restarted(descent, lambda alpha, w: w._replace(params=alpha["start"]))
    w0 = bilevel.Stateful(jnp.zeros(2), jnp.array(0.0))  # no loss is under 0
    hyper = hypergradient(problem, solver, AIM_AND_START, w0, None, None)

    def by_hand(alpha):
        iterates = [alpha["start"]]
        for _ in range(STEPS):
            iterates.append(iterates[-1] - RATE * jax.grad(below)(iterates[-1], alpha))
        return jnp.stack([above(w) for w in iterates])

    values = by_hand(AIM_AND_START)
    worst = int(values.argmax())
    assert 0 < worst < STEPS  # neither the start nor the end
    assert_close(hyper.value, values[worst], f64=1e-12, f32=1e-6)
    grad = jax.grad(lambda alpha: by_hand(alpha)[worst])(AIM_AND_START)
    assert_close(hyper.grad, grad, f64=1e-11, f32=1e-5)
