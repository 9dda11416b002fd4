"""Wrong arguments raise one message that names the argument, before anything long is computed.

Each row is one mistake: the call, the exception's type, and a regular expression that its message
has to match. Rows stand in the order of the packages.
"""

import dataclasses
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from jax.experimental import sparse

import bilevel
import ntk
from bilevel import (
    baselines,
    bounds,
    data,
    implicit,
    spaces,
    spectral,
    strategies,
    unrolled,
)
from bilevel.discretize import diagnostics
from bilevel.linear import ridge_weights
from bilevel.nets import images, training
from bilevel.nets.evaluation import wrong_rows
from bilevel.runs import checkpoint
from bilevel.spaces import darts, features, nasbench201, targets
from bilevel.spaces.activations import sign_labels
from bilevel.spaces.nasbench201 import judging
from ntk import networks as nets
from ntk.large.iterative_regression import IterativeRegression
from ntk.large.partial_cholesky import PartialCholesky

PROBLEM = bilevel.Problem(
    lower=lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2),
    outer=lambda w, alpha, batch: jnp.sum(w**2),
)
LOWER, OUTER = PROBLEM.lower, PROBLEM.outer
W0, ALPHA, SGD, KEY = jnp.zeros(2), jnp.ones(2), optax.sgd(0.1), jax.random.key(0)
UNIFORM = jnp.array([0.5, 0.5])
LABEL = "label: expected an int or a dict from str to str, got"
SCHEDULE = optax.cosine_decay_schedule(0.1, 10)
SELECTION = baselines.Selection(lambda *a: 0.0, lambda *a: None)
ONE_SOLVE = baselines.random_search(KEY, [1], lambda *_: 0.5, 1)
IMAGES = jnp.arange(16.0).reshape(1, 4, 4, 1)
SKIPS = bilevel.spaces.skip_space(["relu", "tanh"], depth=3, width=4)
RATES = {"weight_optimizer": 0.1, "alpha_optimizer": 0.1, "batch_size": 2}
NOT_A_KEY = r"key: expected a PRNG key such as jax.random.key\(0\), got"
NO_RETURN = "expected a loss that returns a floating scalar, got None; a return is missing"
AUX = r"expected .* floating scalar, got a tuple .*; Problem\(..., has_aux=True\) takes"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A pytree with a function among its leaves, like a module of equinox."""

    weight: jax.Array
    activation: Callable


MODULE = Module(jnp.zeros(2), jax.nn.relu)
A_MODULE = r"w0\.activation: expected floating arrays, got the function .*; keep the arrays in w0"


def never(*args):
    raise AssertionError("solved before the check")


def shared(errors, counts):
    return baselines.Selection(never, lambda *_: (errors, counts))


def solve(alpha, w, batch):
    return alpha


def with_aux(w, alpha, batch):
    return LOWER(w, alpha, batch), {"error": 0.0}


def without_return(w, alpha, batch):
    return None


def stateful(w, alpha, batch):
    return LOWER(w.params, alpha, batch), w.variables


def hypergradient(
    problem=PROBLEM, alpha=ALPHA, w0=W0, train=None, valid=None, solver=None, **options
):
    solver = implicit() if solver is None else solver
    return bilevel.hypergradient(problem, solver, **options)(alpha, w0, train, valid)


def search(
    optimizer=SGD, alpha=ALPHA, w0=W0, steps=1, problem=PROBLEM, solver=None, rows=None, **options
):
    solver = implicit() if solver is None else solver
    arguments = problem, solver, optimizer, alpha, w0, rows, rows
    return bilevel.search(*arguments, steps=steps, progress=False, **options)


def constrained(forward):
    return hypergradient(alpha=jnp.ones(2), solver=implicit(forward))


def descent(solver=None, w0=W0):
    init, _ = bilevel.descent(PROBLEM, implicit() if solver is None else solver, SGD)
    return init(ALPHA, w0)


def stateful_hypergradient():
    problem = bilevel.Problem(stateful, lambda w, a, b: OUTER(w.params, a, b), stateful=True)
    w0 = bilevel.Stateful(W0, jnp.zeros(2))
    return hypergradient(problem, w0=w0, solver=bilevel.restarted(implicit()))


EYE, ONES, RELU = jnp.eye(3), jnp.ones(3), nets.act(ntk.relu)
FLAT = nets.serial(nets.flatten(), nets.dense())
TWO = jnp.einsum("ij,ab->ijab", EYE, jnp.eye(2))  # a kernel of two outputs
ONE_BLOCK, LABELS = np.ones((1, 1, 1, 1)), jnp.arange(3)
OPERATOR = ntk.KernelOperator(lambda a, b: a @ b.T, EYE)
FIT = IterativeRegression(ONES, jnp.array(0.0), jnp.array(0.0), jnp.array(1), 0.1)


def value_errors(*rows):
    """Rows of calls that raise ``ValueError``."""
    return [(call, ValueError, message) for call, message in rows]


def theorem3(y=ONES, activations=(ntk.relu,), **options):
    return ntk.bounds.zhu_theorem3(EYE, y, activations=activations, C=1.0, **options)


def linear(w, x):
    return x @ w


def ntk_score(name, params=EYE, batch=(EYE, LABELS), apply=linear, **options):
    return getattr(ntk.scores, name)(None, apply, params, batch, **options)


def network_kernel(x1=EYE, x2=None, activations=(ntk.relu,), **options):
    return ntk.network_kernel(x1, x2, activations=activations, **options)


def empirical(apply=lambda w, x: x @ w, params=ONES, x1=EYE, **options):
    return ntk.empirical_kernel(apply, params, x1, **options)


def layers(*parts, shape=(2, 4), **options):
    return nets.serial(*parts).kernel(jnp.ones(shape), **options)


def regression(K=OPERATOR, y=ONES, penalty=1.0, **options):
    return ntk.iterative_regression(K, y, penalty=penalty, **options)


def posterior(K=EYE, y=ONES, cross=EYE, prior=EYE, **options):
    return ntk.posterior(K, y, cross, prior, **options)


def ensemble(train=None, y=ONES, cross=None, prior=EYE, **options):
    same = ntk.Kernels(nngp=EYE, ntk=EYE)
    return ntk.ensemble(same if train is None else train, y, cross or same, prior, **options)


SKIP_SPACE = spaces.skip_space(depth=3, width=2, classes=2)
SKIP_W = SKIP_SPACE.init(KEY, (jnp.ones((1, 2)), None))
CELL = nasbench201.genotypes()[-1]
FOURIER = features.fourier_features(KEY, jnp.ones((2, 3)))
GENOTYPE = "Genotype(normal=[{0}], normal_concat=range(2, 6), reduce=[{0}], reduce_concat=[2, 3])"
GENOTYPE = GENOTYPE.format("('skip_connect', 0), ('skip_connect', 1), " * 4)
PART = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])
TEXTS = ["fine", "dull"], [1, 0]
F, X, BALL = np.ones((3, 2)), np.ones((3, 2, 4)), bounds.ball_covering(2, 1.0)


def score(names=("l2_norm",), cells=CELL, rows=2, **options):
    cells = cells if isinstance(cells, np.ndarray) else [cells]
    batch = jnp.ones((rows, 4, 4, 1)), jnp.zeros(rows, int)
    networks = nasbench201.all_networks(cells=1, channels=1)
    return nasbench201.score_networks(names, networks, None, cells, batch, **options)


def condition_six(outputs=F, alpha=ALPHA / 2, targets=None, **options):
    return bilevel.condition_six(outputs, alpha, targets, **options)


def lipschitz(alphas=ALPHA, deltas=(0.1,), **options):
    return bilevel.lipschitz(lambda alpha: alpha, alphas, deltas, **options)


# (call, exception, message)
HYPERGRADIENTS = value_errors(
    (lambda: hypergradient(alpha="one"), "alpha"),
    (
        lambda: hypergradient(alpha={"a": ALPHA, "kind": "relu"}),
        r"alpha\['kind'\]: expected floating arrays, got 'relu'",
    ),
    (
        lambda: hypergradient(alpha=jnp.ones(2, int)),
        r"alpha: expected floating arrays, got int.*; convert it with jnp.asarray\(x, float\)",
    ),
    (lambda: hypergradient(w0={}), "w0: expected at least one array, got {}"),
    (lambda: hypergradient(w0=MODULE), A_MODULE),
    (
        lambda: hypergradient(solver=unrolled(SCHEDULE, 3), alpha={"x": ALPHA}),
        r"optimizer: expected a function alpha -> optax optimizer, got a schedule; .* optax.sgd",
    ),
    (lambda: hypergradient(bilevel.Problem(with_aux, OUTER)), "lower: " + AUX),
    (lambda: hypergradient(bilevel.Problem(LOWER, with_aux)), "outer: " + AUX),
    (
        lambda: hypergradient(bilevel.Problem(LOWER, OUTER, has_aux=True)),
        r"lower: expected a loss that returns \(loss, aux\), as has_aux=True says, got an array",
    ),
    (lambda: hypergradient(bilevel.Problem(without_return, OUTER)), "lower: " + NO_RETURN),
    (
        lambda: hypergradient(solver=implicit),
        r"solver: .* got the function implicit; call it: implicit\(...\)",
    ),
    (stateful_hypergradient, r"solver: expected restarted\(unrolled"),
    (lambda: hypergradient(difference=0.0), "difference"),
)
SOLVERS = value_errors(
    (lambda: unrolled(0.1, 2.5), "steps: expected an integer, got 2.5"),
    (
        lambda: unrolled(bilevel.projected("nonnegative"), 2, batches=lambda key, data: data),
        "batches: expected None with projected or proximal steps",
    ),
    (lambda: unrolled(bilevel.newton(), 2), "optimizer: expected .*, got .*LowerSolver"),
    (lambda: bilevel.newton(True), "steps: expected an integer, got True"),
    (lambda: bilevel.lbfgs(None), "steps: expected an integer, got None"),
    (lambda: bilevel.cg("2"), "steps: expected an integer, got '2'"),
    (
        lambda: implicit(SGD),
        r"forward: expected a LowerSolver, got .*; wrap it: unrolled\(optimizer, steps\)",
    ),
    (
        lambda: implicit(bilevel.cg()),
        r"forward: expected a LowerSolver, .*; an inverse goes into implicit\(inverse=...\)",
    ),
    (
        lambda: implicit(solve),
        r"forward: expected a LowerSolver, got the function solve; hand it to solved\(...\)",
    ),
    (
        lambda: implicit(bilevel.newton),
        r"forward: .* got the function newton; call it: newton\(...\)",
    ),
    (
        lambda: implicit(bilevel.newton(), bilevel.cg),
        r"inverse: expected an inverse, got the function cg; call it: cg\(...\)",
    ),
    (
        lambda: implicit(bilevel.newton(), bilevel.newton()),
        r"inverse: expected an inverse, got a LowerSolver; bilevel.cg\(\) makes one",
    ),
    (
        lambda: bilevel.restarted(implicit),
        r"solver: .* got the function implicit; call it: implicit\(...\)",
    ),
    (
        lambda: unrolled(optax.adam, 1),
        r"optimizer: expected an optax optimizer, got the function adam; call it",
    ),
    (lambda: bilevel.nystrom(1, 0.1, key=0), NOT_A_KEY),
)
OUTER_LOOP = value_errors(
    (lambda: search(steps=0), "steps"),
    (lambda: search(steps=2.0), "steps: expected an integer, got 2.0"),
    (
        lambda: search(batches=bilevel.jointly(lambda key, t, v: (t, v, v)), key=KEY),
        r"sample: expected a function that returns a pair \(train, valid\), got 3 things",
    ),
    (
        lambda: search(problem=bilevel.Problem(with_aux, OUTER)),
        r"lower: expected .* floating scalar, got a tuple",
    ),
    (lambda: search(problem=bilevel.Problem(LOWER, without_return)), "outer: " + NO_RETURN),
    (
        lambda: search(solver=implicit),
        r"solver: .* got the function implicit; call it: implicit\(...\)",
    ),
    (
        lambda: search(optimizer=0.1),
        r"optimizer: expected an optax optimizer, got 0.1; optax.sgd\(step_size\) makes one",
    ),
    (lambda: search(batches=lambda key, data: data, key=0), NOT_A_KEY),
    (
        lambda: search(batches=32, key=KEY),
        r"batches: expected a function \(key, data\) -> batch, got 32",
    ),
    (lambda: search(w0=MODULE), A_MODULE),
    (lambda: descent(w0=MODULE), A_MODULE),
    (
        lambda: descent(w0=[jnp.ones(2, int)]),
        r"w0\[0\]: expected floating arrays, got int.*; convert it",
    ),
    (
        lambda: descent(solver=unrolled),
        r"solver: .* got the function unrolled; call it: unrolled\(...\)",
    ),
    (lambda: bilevel.minibatches(2)(0, jnp.ones(4)), NOT_A_KEY),
    (  # an index beyond the shorter array would be its last row
        lambda: bilevel.minibatches(2)(KEY, (jnp.arange(10), jnp.arange(7))),
        "data: expected arrays of as many rows each",
    ),
    (lambda: search(chunk=0), "chunk: expected at least 1"),
    (lambda: search(resume=True), "resume: expected a checkpoint directory"),
    (lambda: search(batches=lambda key, data: data), "key: expected a PRNG key"),
    (lambda: search(alpha=()), "alpha: expected at least one array"),
    (lambda: search(alpha=jnp.array([1, 0])), "alpha: expected floating arrays, got"),
    (lambda: search(w0=W0 * jnp.nan), "w0: expected finite numbers"),
    (lambda: search(rows=jnp.zeros((0, 4))), "train: expected data, got an empty"),
    (lambda: search(history=["loss"]), "history: expected names among .*alpha"),
    (lambda: search(history="value"), "history: expected a sequence of names, got th"),
    (
        lambda: jax.jit(lambda w: search(w0=w, checkpoint="folder").alpha)(W0),
        "progress, checkpoint, callback and a stream",
    ),
    (lambda: search(rows=ALPHA, batches=bilevel.stream([])), "train, valid: expected"),
    (lambda: bilevel.stream(3), r"source: expected an iterable of pairs .* got 3"),
    (lambda: search(bilevel.exponentiate(), UNIFORM), r"exponentiate\(\) with an opti"),
    (lambda: bilevel.project("ball"), "onto: expected"),
    (
        lambda: bilevel.exponentiate().init(jnp.array([1.5, -0.5])),
        "alpha: expected points of the simplex.*smallest entry of -0.5",
    ),
    (lambda: bilevel.exponentiate().init(jnp.ones(())), "alpha: .*got a scalar"),
    (lambda: bilevel.project().init(UNIFORM * jnp.nan), "alpha: expected points of"),
    (lambda: bilevel.project("box").init(jnp.array([1.1])), r"box \[0, 1\]"),
    (lambda: bilevel.exponentiate().update(UNIFORM, optax.EmptyState()), "params: expected alpha"),
)


def two_updates(optimizer, alpha, gradient):
    """Take two steps in an eager loop of optax."""
    state = optimizer.init(alpha)
    for _ in range(2):
        updates, state = optimizer.update(gradient, state, alpha)
        alpha = optax.apply_updates(alpha, updates)


def traced_search(**options):
    def run(rate):
        return search(solver=unrolled(rate, 3), steps=3, **options).alpha

    return jax.vmap(run)(jnp.array([0.1, 0.2]))


def unused_leaves(mode):
    def loss(w, alpha, batch):
        return jnp.sum((w - alpha["mix"]) ** 2)

    alpha = {"mix": jnp.ones(()), "mixture": jnp.ones(2), "decya": jnp.ones(())}
    problem = bilevel.Problem(loss, loss)
    return hypergradient(problem, alpha, solver=unrolled(0.1, 3), mode=mode)


OUTER_LOOP += value_errors(
    (
        lambda: two_updates(
            optax.chain(SGD, bilevel.exponentiate(), optax.clip(0.1)),
            jnp.array([0.2, 0.3, 0.5]),
            jnp.array([30.0, 10.0, 20.0]),
        ),
        r"sums off by .* has to be the last of its chain\.",
    ),
    *(
        (
            lambda optimizer=optimizer: optimizer.update(
                ONES[:2], optimizer.init(UNIFORM[None, None]), UNIFORM[None, None]
            ),
            r"updates: expected the shape \(1, 1, 2\) of alpha, got",
        )
        for optimizer in (bilevel.project(lambda alpha: alpha), bilevel.softmax(SGD))
    ),
    (lambda: traced_search(callback=print), "progress, checkpoint, callback and a stream"),
    (lambda: search(checkpoint=__file__), "checkpoint: expected a place to write in, got"),
)
HYPERGRADIENTS += value_errors(
    *(
        (
            lambda mode=mode: unused_leaves(mode),
            r"alpha\['decya'\], alpha\['mixture'\]: expected to enter",
        )
        for mode in ("reverse", "forward")
    ),
)
RUNS = value_errors(
    (lambda: checkpoint.save("folder", 2.5, W0), "step: expected an integer"),
    (lambda: checkpoint.save("folder", -1, W0), "step: expected at least 0"),
    (lambda: checkpoint.save("folder", 1, W0, {"seed": 1}), LABEL),
    (lambda: checkpoint.save("folder", 1, W0, None), LABEL),
)
STOCHASTIC = value_errors(
    (
        lambda: search(
            problem=bilevel.Problem(OUTER, OUTER), solver=bilevel.soba(0.1), rows=jnp.ones((4, 2))
        ),
        "alpha: expected to enter the lower loss, the outer loss or the solver, got one",
    ),
    (
        lambda: search(
            problem=bilevel.Problem(lambda *_: "loss", OUTER),
            solver=bilevel.soba(0.1),
            rows=jnp.ones((4, 2)),
        ),
        "lower: expected a loss that returns a floating scalar, got 'loss'",
    ),
)
LINEAR_AND_BASELINES = [
    *value_errors(
        (lambda: baselines.random_search(0, [1, 2], lambda *a: 0.0, 4), NOT_A_KEY),
        (lambda: baselines.weight_sharing(ALPHA, [1, 2], SELECTION, 4), NOT_A_KEY),
        (lambda: baselines.exponentiated_gradient(0, [1, 2], SELECTION, 4), NOT_A_KEY),
        (
            lambda: baselines.successive_halving(KEY, [1, 2], lambda k, c, r: c, 10, minimum=1.5),
            "minimum: expected an integer, got 1.5",
        ),
        (lambda: baselines.random_search(KEY, [], never, 9), "configs: expected at least"),
        (lambda: baselines.random_search(KEY, [1], never, 0), "budget: expected at least 1"),
        (lambda: baselines.hyperband(KEY, [1, 2], None, 9), "problem: expected a function"),
        (
            lambda: baselines.random_search(KEY, [1, 2], never, 9, evaluations=3),
            "evaluations: expected 1 to 2, got 3",
        ),
        (
            lambda: baselines.successive_halving(KEY, [1, 2], never, 9, eta=1),
            "eta: expected a finite number over 1, got 1",
        ),
        (
            lambda: baselines.hyperband(KEY, [1, 2], never, 9, minimum=10),
            "minimum: expected 1 to 9, got 10",
        ),
        (
            lambda: baselines.fast_weight_sharing(KEY, [1, 2], SELECTION, 9, growth=0.5),
            "growth: expected a finite number of at least 1, got 0.5",
        ),
        (
            lambda: baselines.exponentiated_gradient(KEY, [1, 2], SELECTION, 9, rate=0.0),
            "rate: expected a positive number, got 0.0",
        ),
        (
            lambda: baselines.weight_sharing(KEY, [1, 2], baselines.Selection(never), 9),
            "problem: expected a Selection with `share`, got",
        ),
        (
            lambda: baselines.weight_sharing(KEY, [1, 2], shared(np.zeros(3), np.ones(3)), 9),
            r"share: expected errors and counts of shape \(2,\)",
        ),
        (
            lambda: bilevel.plots.traces({"one": ONE_SOLVE}, "time"),
            "against: expected one of calls, seconds, got 'time'",
        ),
        (
            lambda: bilevel.plots.traces({"one": baselines.weight_sharing(KEY, [1], SELECTION, 1)}),
            "methods: expected a solve .* got none for one",
        ),
    ),
    (lambda: baselines.random_search(KEY, [1], never, 9, jornal="x"), TypeError, "jornal"),
    (
        lambda: baselines.weight_sharing(KEY, [1, 2], shared(np.zeros(2), np.zeros(2)), 9),
        FloatingPointError,
        "share: expected a finite error .* 2 of them empty",
    ),
    (
        lambda: baselines.random_search(KEY, [1, 2], lambda *_: np.nan, 9),
        FloatingPointError,
        "problem: expected a finite validation error, got none in 2 solves",
    ),
]
# Solvers, hypergradients and searches of small problems.
PLAIN = bilevel.Problem(OUTER, OUTER)  # alpha is the solver's alone
COUNTING = bilevel.Problem(lambda w, a, b: (LOWER(w.params, a, b), {}), OUTER, stateful=True)
AT_VARIABLES = bilevel.Problem(
    lambda w, a, b: (LOWER(w.params, a, b), w.params),
    lambda w, a, b: OUTER(w.variables, a, b),
    stateful=True,
)
STOPPED = bilevel.Problem(lambda w, a, b: LOWER(w, jax.lax.stop_gradient(a), b), OUTER)
STATEFUL = bilevel.Stateful(W0, jnp.zeros(2))
DRAWING = unrolled(0.1, 2, batches=lambda key, data: data)
ONCE = jax.custom_vjp(jnp.cosh)  # its reverse pass is a loop that ends by a test
ONCE.defvjp(
    lambda x: (ONCE(x), x),
    lambda x, g: (jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, g * x), (0, g))[1],),
)
BCOO, BCSR = sparse.BCOO.fromdense(EYE), sparse.BCSR.fromdense(EYE)


def of_rate(alpha):
    return optax.sgd(alpha)


def hidden_rate(alpha):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=alpha[0])


HYPERGRADIENTS += value_errors(
    (lambda: hypergradient(mode="sideways"), "mode: expected .*, got 'sideways'"),
    (
        lambda: hypergradient(solver=bilevel.one_step(0.1), mode="forward"),
        'mode: expected "reverse" for a solver',
    ),
    (
        lambda: hypergradient(bilevel.Problem(lambda w, a, b: w, OUTER)),
        r"lower: .*floating scalar.*\(2,\)",
    ),
    (
        lambda: hypergradient(bilevel.Problem(LOWER, lambda w, a, b: jnp.array(1))),
        "outer: .*floating scalar.*int",
    ),
    (lambda: bilevel.Problem(None, OUTER), "lower: expected a function .*, got None"),
    (
        lambda: bilevel.Problem(LOWER, OUTER, differentiated=True),
        "differentiated: expected stateful=True",
    ),
    (
        lambda: hypergradient(bilevel.Problem(lambda w, a, b: jnp.sum(ONCE(w - a)), OUTER)),
        r"lower: .*DirectAdjoint\(\).*f2sa",
    ),
    (
        lambda: hypergradient(solver=unrolled(0.1, 5, backprop=0)),
        "alpha: expected a way to the outer loss",
    ),
    (lambda: hypergradient(STOPPED), "alpha: expected a way to the outer loss"),
    (lambda: hypergradient(PLAIN), "alpha: expected to enter the lower loss, the outer loss"),
    (lambda: hypergradient(w0=1j * W0), "w0: expected real floating arrays, got complex"),
    (lambda: hypergradient(COUNTING), r"w0: expected a bilevel.Stateful\(params, variables\)"),
    (
        lambda: hypergradient(COUNTING, w0=STATEFUL, solver=unrolled(0.1, 1)),
        "lower: expected variables.*of the form of w0's",
    ),
    (
        lambda: hypergradient(AT_VARIABLES, w0=STATEFUL, solver=unrolled(0.1, 1)),
        "outer: expected .* params.*differentiated=True",
    ),
    (lambda: bilevel.standard_error(PLAIN, 2), "fn: expected a function"),
    (lambda: bilevel.standard_error(never, 1), "parts: expected at least 2, got 1"),
    (
        lambda: bilevel.standard_error(never, 5)(ALPHA, W0, EYE, EYE),
        "parts: expected a divisor of the rows of train, got 5",
    ),
    (lambda: bilevel.truncation(PLAIN, 0.1, 0), "steps: expected at least 1"),
    (lambda: bilevel.truncation(never, 0.1, 2), r"problem: expected a bilevel\.Problem"),
)
SOLVERS += value_errors(
    (lambda: unrolled(0.1, 3, backprop=4), "backprop: .* steps=3, got 4"),
    (lambda: unrolled(of_rate, 2).init(W0), r"depends on alpha; call solver\.start"),
    (
        lambda: hypergradient(solver=unrolled(0.3, 5, average=jax.nn.softmax)),
        r"average: expected 5 weights, got shape \(2,\)",
    ),
    (
        lambda: unrolled(optax.contrib.sam(SGD, SGD), 2),
        "optimizer: expected .*takes further arguments",
    ),
    (
        lambda: bilevel.one_step(optax.lookahead(SGD, 2, 0.5)),
        "optimizer: expected .*of the parameters alone, got optax.lookahead",
    ),
    (
        lambda: hypergradient(solver=unrolled(optax.lbfgs(), 2), diagnostics=False),
        r"solver: .*line search.*implicit\(lbfgs\(\)\)",
    ),
    (
        lambda: hypergradient(PLAIN, solver=unrolled(hidden_rate, 3)),
        "solver: expected an optimizer whose state at the start",
    ),
    (lambda: bilevel.one_step(0.1, radius=0.0), "radius: expected a positive number"),
    (lambda: bilevel.one_step(of_rate).init(W0), r"init: .*solver.start\(alpha, w\)"),
    (
        lambda: hypergradient(solver=bilevel.one_step(optax.lbfgs())),
        "one_step can differentiate, got a line search",
    ),
    (lambda: bilevel.distilled(0.1, decay=1.0), "decay: expected at least 0 and under 1, got"),
    (lambda: bilevel.restarted(unrolled(0.1, 1), key=KEY), "start: expected a function"),
    (lambda: bilevel.restarted(unrolled(0.1, 1), never, key=3.0), "key: expected"),
    (
        lambda: hypergradient(solver=bilevel.restarted(implicit(), start=lambda a, w: EYE)),
        "start: expected weights of",
    ),
    (
        lambda: hypergradient(solver=implicit(bilevel.solved(lambda a, w, b: EYE))),
        "solve: expected weights of",
    ),
    (lambda: implicit(DRAWING), "forward: expected a solver of one lower problem, got"),
    (lambda: bilevel.cg(0), "steps: expected at least 1, got 0"),
    (lambda: bilevel.cg(tol=-1e-3), "tol: expected at least 0, got -0.001"),
    (lambda: bilevel.dense(float("nan")), "damping: expected at least 0, got nan"),
    (lambda: bilevel.neumann(0, 0.1), "terms: expected at least 1, got 0"),
    (lambda: bilevel.nystrom(0, 0.1), "rank: expected at least 1, got 0"),
    (lambda: bilevel.nystrom(3, 0.0), "damping: expected a positive number, got 0.0"),
    (lambda: bilevel.gram(None), "outputs: expected a function .*, got None"),
    (lambda: bilevel.gram(never, damping=-1.0), "damping: expected at least 0"),
    (
        lambda: hypergradient(
            solver=bilevel.ridge(lambda a, x: x, lambda a: 1.0),
            train=(EYE, ONES),
            valid=(EYE, ONES),
        ),
        "w0: expected an array of shape",
    ),
    (
        lambda: bilevel.ridge(lambda a, x: EYE, never).run(LOWER, ALPHA, W0, (), (None, W0)),
        "features: expected a matrix with 2 rows, one per label, got shape",
    ),
    (
        lambda: bilevel.ridge(lambda a, x: x, never).run(LOWER, ALPHA, W0, (), (BCOO, ONES)),
        r"features: expected a dense array, got a BCOO: call todense\(\)",
    ),
)
OUTER_LOOP += value_errors(
    (lambda: search(solver=DRAWING), "key: expected a PRNG key to sample batches with"),
    (lambda: search(optimizer=optax.lookahead(SGD, 2, 0.5)), "got optax.lookahead"),
    (lambda: search(problem=PLAIN), "alpha: expected to enter the lower loss, the outer loss"),
    (lambda: search(every=1), "every: expected a callback to call so often, got none"),
    (
        lambda: search(rows=scipy.sparse.eye_array(2).tocsr()),
        "train: expected arrays, got a csr_array; .*BCSR.from_scipy_sparse",
    ),
    (lambda: bilevel.minibatches(2)(KEY, BCOO), "expected dense arrays or BCSR matrices"),
)
LINEAR_AND_BASELINES += value_errors(
    (lambda: ridge_weights(EYE, jnp.ones(4), 1.0), r"y: expected 3 rows, got shape \(4,\)"),
    (lambda: ridge_weights(ONES, ONES, 1.0), r"features: expected a matrix .* shape \(3,\)"),
    (lambda: ridge_weights(EYE * np.nan, ONES, 1.0), "features: expected finite numbers"),
    (
        lambda: ridge_weights(EYE, ONES / 0, 1.0),
        "y: expected finite numbers, got NaN or inf",
    ),
    (lambda: ridge_weights(EYE, ONES, -1.0), "penalty: expected a finite .* >= 0, got -1.0"),
    (
        lambda: ridge_weights(EYE, ONES, 1.0, method="qr"),
        "method: .* dual, cg .*'qr'",
    ),
    (
        lambda: ridge_weights(BCSR, ONES, 1.0, method="dual"),
        "method: expected one of auto, cg for Sparse features, got 'dual'",
    ),
    (
        lambda: jax.jit(lambda x: ridge_weights(x, ONES, 0.1))(BCOO),
        "features: expected .*known entries, got a traced one",
    ),
)
SPACES = value_errors(
    (lambda: features.feature_space(None), "maps: expected a sequence of"),
    (
        lambda: bilevel.spaces.on_simplices("ab").discretize(jnp.array([1j, 0])),
        "alpha: expected real numbers",
    ),
    (lambda: features.sample_fourier(0, 2), NOT_A_KEY),
    (lambda: features.sample_text(0, 2), NOT_A_KEY),
    (lambda: features.fourier_features(0, jnp.ones((2, 2))), NOT_A_KEY),
    (
        lambda: bilevel.rank_agreement(jax.random.split(KEY), jnp.arange(4), jnp.arange(4)),
        NOT_A_KEY,
    ),
    (lambda: spaces.activation_space(["rleu"]), "activations: .* names among .*'rleu'"),
    (lambda: spaces.activation_space([]), "activations: expected at least one"),
    (lambda: spaces.activation_space(["relu"], outer="l1"), "outer: expected one of"),
    (
        lambda: spaces.activation_space(["relu"], width=24, classes=10),
        "width: expected a multiple of 16 for 10 classes, got 24",
    ),
    (
        lambda: spaces.activation_space(["relu"], output_scale=math.inf),
        "output_scale: expected a positive number, got inf",
    ),
    (lambda: spaces.unit_inputs(jnp.ones((0, 3))), "x: expected inputs"),
    (lambda: spaces.on_simplices("aa"), "names: expected at least one, each once"),
    (
        lambda: spaces.on_simplices("ab").discretize(jnp.ones(3)),
        r"alpha: expected \(2,\) finite weights, got \(3,\)",
    ),
    (lambda: spaces.on_simplices("ab", (2,)).one_hot(("a",)), "architecture: expected 2 of a, b"),
    (lambda: spaces.on_simplices("ab").draw(0), NOT_A_KEY),
    (lambda: spaces.kernel_function_space(jnp.eye(2), 0.0), "kernel: expected a func"),
    (lambda: spaces.kernel_mixture_space([jnp.dot]), "kernels: expected functions by"),
    (lambda: spaces.network_space(ntk.networks.dense()), "network: expected names"),
    (lambda: spaces.skip_space(["relu", "relu"]), "activations: .* each once, got"),
    (lambda: spaces.skip_space(depth=2), "depth: expected at least 3, got 2"),
    (lambda: spaces.skip_space(parametrization="mup"), "parametrization: expected one"),
    (
        lambda: spaces.skip_space(width=math.inf, parametrization="he"),
        'parametrization: expected "ntk" at infinite width',
    ),
    (lambda: spaces.skip_space(outer="hinge"), "outer: expected"),
    (lambda: SKIP_SPACE.apply(SKIP_W, SKIP_SPACE.start(), W0), r"x: expected rows \[n, 2\], got"),
    (
        lambda: SKIP_SPACE.discretize(SKIP_SPACE.start() | {"skips": jnp.ones(3)}),
        r"skips of shapes \(\(2, 5\), \(1,\)\), got",
    ),
    (lambda: darts.darts_space(["conv"]), "operations: expected names among none, max"),
    (lambda: darts.darts_space(["none"]), "operations: .* one other than 'none'"),
    (lambda: darts.darts_space(classes=1), "classes: expected at least 2, got 1"),
    (
        lambda: darts.darts_space().init(KEY, (jnp.ones((1, 3, 32, 3)), None)),
        r"x: expected images \[n, h, w, c\] of at least 4 x 4 pixels, got",
    ),
    (
        lambda: darts.darts_network(darts.parse_genotype(GENOTYPE)).init(KEY, (28, 28, 1)),
        "auxiliary: expected at least 8 x 8 pixels",
    ),
    (
        lambda: darts.darts_space(["none", "skip_connect"]).one_hot(
            darts.parse_genotype(GENOTYPE.replace("skip_connect", "sep_conv_3x3"))
        ),
        "normal: expected operations among none, skip_connect, on two edges",
    ),
    (
        lambda: darts.darts_space().discretize(dict.fromkeys(("normal", "reduce"), np.ones(8))),
        r"normal.*: expected \(14, 8\) finite weights, got \(8,\)",
    ),
    (
        lambda: nasbench201.nasbench201_space(["none", "skip_connect"]).one_hot(CELL),
        "architecture: expected 6 of none, skip_connect, got",
    ),
    (lambda: nasbench201.all_networks(classes=1), "classes: expected at least 2, got"),
    (
        lambda: nasbench201.all_networks().apply(None, np.full(6, 5), jnp.ones((2, 4, 4, 1))),
        "genotype: expected indices from 0 to 4, got 5 to 5",
    ),
    (lambda: nasbench201.encode(["none"]), "genotype: expected a Genotype, got"),
    (lambda: nasbench201.parameter_count(CELL, cells=0), "cells: expected at least 1, got 0"),
    (lambda: score(["nas"]), "scores: expected names among .*, got 'nas'"),
    (lambda: score([]), "scores: expected distinct names"),
    (lambda: score(at_once=0), "at_once: expected at least 1, got 0"),
    (lambda: score(rows=1), "batch: expected at least 2 samples"),
    (lambda: score(cells=np.full((1, 6), 5)), "genotypes: expected entries 0 to 4, got 5 to 5"),
    (
        lambda: score(["snip"], functions={"snip": lambda *_: 0.0}),
        "functions: expected names .* that ntk.scores does not have, got 'snip'",
    ),
    (lambda: judging.correlations([1, 2], [1.0]), "accuracy: expected one number for"),
    (lambda: judging.correlations([], []), r"score: expected a vector, got shape \[0\]"),
    (lambda: judging.best_of_k([1, 2], [1, 2], [1, 2], 2, pool=3), "pool: expected 1 to 2, got 3"),
    (lambda: judging.best_of_k_random([1, 2], [1, 2], 0), "k: expected 1 to 2, got 0"),
    (judging.sum_of_log_ranks, "scores: expected at least one, got none"),
    (lambda: features.feature_space([]), "maps: expected at least one"),
    (lambda: features.feature_space([jnp.sin], names=["a", "b"]), "names: expected 1, .* got 2"),
    (
        lambda: features.feature_space([jnp.sin]).blocks(jnp.ones(2)),
        r"maps: expected matrices of one shape .* got shapes \[\(2,\)\]",
    ),
    (lambda: features.fourier_config("scale"), "preprocess: expected one of none"),
    (lambda: features.fourier_config(gamma=0), "gamma: expected a positive number"),
    (lambda: features.sample_fourier(KEY, 1, gammas=(1, 0.1)), "gammas: expected an interval"),
    (lambda: features.fourier_features(KEY, W0), "x_train: expected a matrix, got"),
    (lambda: FOURIER.apply(None, jnp.ones((2, 3)), 0), "dimension: expected at least 1"),
    (
        lambda: FOURIER.apply(features.fourier_config(), jnp.ones((2, 2)), 5),
        "x: expected rows of length 3, got shape",
    ),
    (lambda: features.text_config(order=4), "order: expected one of 1, 2, 3, got 4"),
    (lambda: features.text_config(stem=True), "fields: expected some of .* got 'stem'"),
    (
        lambda: features.fourier_selection(
            KEY, PART, (PART[0][:0], PART[1][:0]), PART, dimension=8
        ),
        "valid: expected rows with a label each, got 0 rows",
    ),
    (
        lambda: features.fourier_selection(KEY, PART, PART, PART, dimension=8, penalty=-1),
        "penalty: expected a finite number >= 0, got -1",
    ),
    (
        lambda: features.text_selection(TEXTS, TEXTS, (TEXTS[0], [-1, 1])),
        r"test: expected labels 0 and 1, as in training, got \[-1, 1\]",
    ),
    (lambda: features.text_selection(*[TEXTS] * 3, cost=0), "cost: expected a positive"),
)
SPACES += [(lambda: spaces.linearized_space(W0, W0), TypeError, "space: expected a")]


def gaussian(alpha, x1, x2):
    return jnp.exp(-jnp.sum((x1[:, None] - x2) ** 2, -1))


def kernel_loss(level, y, batch_inputs=EYE, x=None):
    """Call a loss of a space of one kernel, or its solver, with three training rows."""
    space = spaces.kernel_function_space(gaussian, jnp.zeros(()), x=x)
    alpha, w = space.start(), jnp.zeros(3)
    inputs = batch_inputs if x is not None else space.inputs(batch_inputs, EYE)
    if level == "solver":
        return space.solver.run(space.problem.lower, alpha, w, (), (space.inputs(EYE), y))
    return getattr(space.problem, level)(w, alpha, (inputs, y))


def kernel_outputs(transform=lambda apply: apply):
    space = spaces.kernel_function_space(gaussian, jnp.zeros(()))
    return transform(space.apply)(jnp.ones(3), space.start(), EYE)


def linearized(layer):
    space = nasbench201.nasbench201_space([layer, "skip_connect"], cells=1, channels=2, classes=2)
    x = jax.random.normal(KEY, (3, 4, 4, 1))
    return spaces.linearized_space(space, space.init(KEY, (x, None))).inputs(x)


SPACES += value_errors(
    (lambda: sign_labels(ONES[:, None], 3), r"labels: expected one a row, shape \[n\], got shape"),
    (
        lambda: wrong_rows(targets.predict_labels, EYE, LABELS[:, None]),
        r"labels: expected one a row, shape \(3,\), got shape",
    ),
    (
        lambda: targets.predict_labels(jnp.ones((3, 1))),
        r"f: expected outputs \[n\], or \[n, classes\]",
    ),
    (
        lambda: spaces.network_space(nets.dense("variance")).one_hot({"width": 1.0}),
        "architecture: expected",
    ),
    (lambda: kernel_loss("lower", ONES[:, None]), "y: expected one for each output, shape"),
    (lambda: kernel_loss("outer", ONES[:1]), "y: expected one for each output, shape"),
    (lambda: kernel_loss("solver", ONES[:1]), "y: expected 3 rows as in training, got shape"),
    (
        lambda: kernel_loss("lower", ONES, 2 * EYE, x=EYE),
        "batch: expected the training inputs x",
    ),
    (
        lambda: jax.jit(lambda x: kernel_loss("lower", jnp.ones(4), x, x=EYE))(jnp.ones((4, 3))),
        "batch: expected the training inputs x",
    ),
    (lambda: kernel_outputs(), r"inputs: expected space.inputs\(rows, x\)"),
    (lambda: kernel_outputs(jax.jit), r"inputs: expected space.inputs\(rows, x\)"),
    (
        lambda: linearized("nor_conv_1x1"),
        "space: expected networks that see every row by itself",
    ),
    (
        lambda: spaces.unit_inputs(EYE, jnp.full((1, 3), 1 / 3).at[0].set(EYE.mean(0))),
        "x: expected rows that differ from their mean",
    ),
    # The sum of seven tenths divided by 7 is not 0.1.
    (
        lambda: spaces.unit_inputs(jnp.full((7, 3), 0.1, jnp.float32)),
        "x: expected rows that differ from their mean",
    ),
    (
        lambda: condition_six(np.ones((3, 10)), jnp.full(10, 0.11, jnp.bfloat16)),
        "alpha: expected points of the simplex",
    ),
    *(
        (
            lambda size=size: diagnostics.alpha_curvature(
                lambda w, alpha, batch: jnp.sum(jnp.sqrt(alpha)), "free"
            )(None, jnp.zeros(size), None),
            "alpha: expected a loss whose second derivatives are fin",
        )
        for size in (3, 40)
    ),
)
NETS_AND_DATA = value_errors(
    (lambda: data.stratified_split(0, np.zeros(4, int), (2, 1)), NOT_A_KEY),
    (
        lambda: data.stratified_split(KEY, [0, 1, 0], (2, -1)),
        r"sizes\[1\]: expected at least 1, got -1",
    ),
    (lambda: data.stratified_split(KEY, [0, 1, 0], (2, 2)), "3 samples.* got 4"),
    (lambda: data.stratified_split(KEY, [[0], [1]], (1,)), r"vector.* \(2, 1\)"),
    (
        lambda: data.draw_splits("digits", [KEY], train=1000, valid=797, test=20),
        "train, valid: expected at most 1796 rows together and one",
    ),
    (
        lambda: data.draw_splits("digits", KEY, train=100, valid=50, test=20),
        "keys: expected a sequence of PRNG keys, got one",
    ),
    (lambda: data.load("minst"), "'minst'"),
    (lambda: training.train(0, LOWER, ALPHA, W0, jnp.ones(4), optimizer=0.1), NOT_A_KEY),
    (lambda: images.crop_and_flip(0, jnp.ones((2, 4, 4, 1))), NOT_A_KEY),
    (lambda: images.cutout(0, jnp.ones((2, 4, 4, 1))), NOT_A_KEY),
    (
        lambda: bilevel.nets.convolve_images(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 0))),
        "kernel: expected",
    ),
    (
        lambda: bilevel.nets.convolve_images(jnp.ones((1, 4, 4, 3)), jnp.ones((3, 3, 2, 4))),
        r"x: expected \[n, h, w, 2\] for a kernel",
    ),
    (
        lambda: bilevel.nets.convolve_images(IMAGES, jnp.ones((5, 5, 1, 1)), padding=0),
        "x: expected images of at least 5 pixels a side, got",
    ),
    (
        lambda: bilevel.nets.max_pooling(jnp.ones((4, 4, 1)), 2),
        r"x: expected images \[n, h, w, c\], got",
    ),
    (lambda: bilevel.nets.max_pooling(IMAGES, 2.5), "size: expected an integer, got 2.5"),
    (
        lambda: bilevel.nets.max_pooling(IMAGES, 2, padding=2),
        "padding: expected less than the window's 2 pixels, got 2",
    ),
    (lambda: bilevel.nets.unit_images(jnp.ones((2, 4, 4, 1))), "x: expected channels that vary"),
    (
        lambda: bilevel.nets.unit_images(IMAGES, jnp.ones((2, 4, 5, 1))),
        r"others: expected images \(4, 4, 1\), got",
    ),
    (
        lambda: bilevel.nets.unit_images(jnp.ones((5, 8, 12, 1)), pixels=2),
        "pixels: expected at least 3 for images of 8 x 12, whose",
    ),
)
TENTHS = np.full((5, 6, 6, 1), 0.1, np.float32)  # their mean is not 0.1
NETS_AND_DATA += value_errors(
    *(
        (
            lambda x=x, pixels=pixels: bilevel.nets.unit_images(x, pixels=pixels),
            "x: expected channels that vary",
        )
        for x in (TENTHS, jnp.asarray(TENTHS))
        for pixels in (None, 3)
    )
)
STRATEGIES = value_errors(
    (lambda: strategies.darts(SKIPS, order=3, **RATES), "order: expected 1 or 2, got 3"),
    (lambda: strategies.darts(SKIPS, radius=0.1, **RATES), "radius: expected None with"),
    (lambda: strategies.unrolled(SKIPS, steps=0, **RATES), "steps: expected at least 1"),
    (
        lambda: strategies.weight_sharing(PROBLEM, weight_optimizer=0.1, batch_size=2),
        "space: expected a Space",
    ),
    (
        lambda: strategies.joint(SKIPS, **RATES | {"batch_size": 0}),
        "batch_size: expected at least 1, got 0",
    ),
    (
        lambda: strategies.on_sets({"a": "circle"}, simplex=SGD, other=SGD),
        "sets: expected simplex, box or free, got",
    ),
    (
        lambda: strategies.eigen_nas(KEY, SKIPS, jnp.ones((3, 4)), pool=2, keep=3),
        "keep: expected at most the pool's 2, got 3",
    ),
    (
        lambda: strategies.te_nas(KEY, SKIPS, SKIPS, None, jnp.ones((3, 4))),
        r"space: expected alpha \[edges, operations\]",
    ),
    (
        lambda: strategies.nasi(KEY, SKIPS, (jnp.ones((3, 4)), jnp.zeros(3, int))),
        "space: expected all of alpha on simplices",
    ),
)
THEORY = value_errors(
    (lambda: spectral.spectral_sample(0, 3, 2, 1), NOT_A_KEY),
    (lambda: bilevel.bounds.khodak_corollary_a1(1.0, 10, C="1"), "C: expected"),
    (
        lambda: spectral.spectral_alpha(jnp.ones((3, 2, 4)), jnp.ones((3, 0))),
        "labels: expected shape",
    ),
    (lambda: bilevel.argmax(jnp.array([0.5, jnp.nan])), "alpha: expected numbers, got"),
    (lambda: bilevel.top_k(ALPHA, 3), "k: expected 1 to 2, got 3"),
    (lambda: condition_six(F[:1]), "outputs: expected shape"),
    (lambda: condition_six(alpha=ALPHA), "alpha: expected points of the simplex"),
    (lambda: condition_six(targets=F), "targets: expected shape"),
    (lambda: condition_six(confidence=95), "confidence: expected a number in"),
    (lambda: bilevel.rank_by_shared_weights(jnp.diag, F[:, None]), "evaluate: expected a scalar"),
    (
        lambda: bilevel.rank_agreement(KEY, ALPHA, jnp.ones(3)),
        "a, b: expected two vectors of one length",
    ),
    (
        lambda: spectral.spectral_alpha(jnp.ones((3, 2)), W0),
        r"features: expected shape \[n, h, p\] or kernels .* got \(3, 2\)",
    ),
    (
        lambda: spectral.spectral_estimator((X, F[:, 0]), (X[:, 1:], F[:, 0])),
        "train, valid: .* the same h maps",
    ),
    (lambda: spectral.simplex_start(W0), "alpha: expected a direction, got zero"),
    (lambda: spectral.simplex_start(ALPHA, uniform=1.5), r"uniform: .* \[0, 1\], got 1.5"),
    (lambda: spectral.spectral_limits(0.0, 0.1), "p_over_n: expected a positive number, got 0.0"),
    (
        lambda: spectral.spectral_limits(jnp.ones(2), jnp.ones(3)),
        r"h_over_n: expected a shape that broadcasts with \(2,\)",
    ),
    (lambda: lipschitz(jnp.zeros((0, 2))), "alphas: .*leading axis.*length at least 1"),
    (lambda: lipschitz(jnp.array([jnp.nan])), "alphas: expected finite"),
    (lambda: lipschitz(deltas=[0.1, 0.0]), "deltas: expected a positive number, got 0"),
    (lambda: lipschitz(F), "directions: .*None"),
    (lambda: lipschitz(F, directions=np.zeros(2)), "directions: .*length 0"),
    (lambda: lipschitz(batch_size=0), "batch_size: expected at least 1, got 0"),
    (
        lambda: bounds.uniform_convergence(0, covering=BALL, L=1.0),
        "n_valid: expected a positive number, got 0",
    ),
    (
        lambda: bounds.uniform_convergence(9, covering=BALL, L=1.0, tau=0.5),
        r"tau: expected a number above log\(2\), got 0.5",
    ),
    (lambda: BALL(jnp.zeros(1)), "radii: expected positive numbers"),
    (lambda: bounds.simplex_covering(2.5), "h: expected an integer, got 2.5"),
    (lambda: bounds.sparse_covering(3, 4, 1.0), r"s: .* in \[1, h = 3\], got 4"),
    (lambda: bounds.finite_covering(W0), r"points: expected shape \[m, h\]"),
    (
        lambda: bounds.effective_dimension([1.0], [4.0], C_bar=3.0),
        "radii: expected numbers of at most",
    ),
    (
        lambda: bounds.feature_map_lipschitz(9, h=2, B=1.0, y_norm=0.0, lambda0=1),
        "y_norm: expected",
    ),
    (lambda: bounds.oymak_theorem1(9, -1.0, h=1, C=1.0), "h_bar: expected numbers of"),
    (
        lambda: bounds.oymak_proposition1(9, 9, risk=F[0], complexity=X[0], h_eff=1, C=1.0),
        r"complexity: expected a shape that broadcasts with \(2,\), risk's, got",
    ),
    (lambda: bounds.oymak_lemma1(9, h=1, B=1.0, lambda0=1.0, R=0.5), "R: expected .* at least 1"),
    (lambda: bounds.oymak_lemma2(1.0), "cross: expected either it or smoothness"),
    (
        lambda: bounds.oymak_theorem2(F, ALPHA, 9, h=1, B=1.0, lambda0=1.0, C=1.0),
        r"K: expected square matrices \[..., n, n\], got shape",
    ),
    (
        lambda: bounds.oymak_theorem3(jnp.eye(9), jnp.ones(9), 9, h=1, B=1.0, t=1.0, C=1.0),
        "t: expected a number that leaves a positive probability for n_T = 9 rows and h = 1",
    ),
    (lambda: bounds.khodak_theorem_a2(-1.0, 10), "entropy: expected numbers of at least"),
    (
        lambda: bounds.khodak_theorem_a2(1.0, np.array([100.0, 1000.0])),
        r"n_valid: expected a number, got shape \(2,\)",
    ),
    (lambda: bounds.khodak_theorem_a2(1.0, 10, delta=0.5), r"delta: .* in \(0, 1/3\), got 0.5"),
    (lambda: bounds.khodak_theorem_a2(1.0, 10, epsilon=0.1), "lipschitz: expected .* got none"),
    (lambda: bounds.khodak_corollary_a2(1.0, 10, 10, 0, C=1.0), "configurations: expected"),
    (lambda: bounds.version_entropy(1.0), "one per configuration, got a scalar"),
    (
        lambda: bounds.sample_size(0.1, lambda n: bounds.khodak_theorem_a2(5.0, n, excess=0.2)),
        r"gap: expected .* 1e\+15 rows reach, got 0.1",
    ),
)
NTK_KERNELS = value_errors(
    (lambda: network_kernel(EYE[0]), "x1: expected a nonempty array"),
    (lambda: network_kernel("X"), "x1: expected an array of numbers"),
    (lambda: network_kernel(EYE * np.nan), "x1: expected finite entries"),
    (lambda: network_kernel(EYE + 1j), "x1: expected real numbers, got complex"),
    (lambda: network_kernel(EYE, EYE[:, :2]), "x2: expected 3 columns as in x1, got 2"),
    (
        lambda: network_kernel(1e20 * jnp.float32(EYE)),
        "x1: expected rows whose squared norms are within",
    ),
    (lambda: network_kernel(activations=ntk.relu), "activations: expected a list of at least one"),
    (lambda: network_kernel(activations=[{}]), "activations: expected at least one in each layer"),
    (lambda: network_kernel(activations=["relu"]), "fn: expected an elementwise function"),
    (
        lambda: network_kernel(activations=[ntk.relu] * 2, skips=[1.0, 2.0]),
        "skips: expected 1 numbers",
    ),
    (
        lambda: network_kernel(activations=[ntk.relu] * 2, skips=[jnp.ones(1)]),
        "skips: .* got arrays",
    ),
    (lambda: network_kernel(variances=[1.0]), "variances: expected 2 numbers"),
    (lambda: network_kernel(variances=[1.0, -1.0]), "variances: expected nonnegative numbers"),
    (lambda: network_kernel(variances=[1.0, 2j]), "variances: expected real numbers, got complex"),
    (lambda: network_kernel(variances=[1.0, np.nan]), "variances: expected finite numbers"),
    (lambda: ntk.mixture_blocks(EYE, []), "activations: expected at least one, got none"),
    (lambda: ntk.mixture_kernel(ONES, jnp.ones((2, 2, 4, 4))), r"blocks: expected shape \[3, 3"),
    (
        lambda: ntk.lemma1_kernel_as_printed(EYE * 1j, activations=[ntk.relu]),
        "x: expected real numbers",
    ),
    (lambda: ntk.dual(ntk.relu, ntk.relu, -1.0, 1.0, 0.0), "vx: expected finite variances"),
    (lambda: ntk.dual(ntk.relu, ntk.relu, 1.0, 1.0, 1.1), "c: expected at most"),
    (lambda: ntk.dual(ntk.relu, ntk.relu, 1.0, 1.0, 0.5j), "c: expected real numbers, got complex"),
    (lambda: ntk.activation("relu"), "fn: expected an elementwise function"),
    (lambda: ntk.activation(jnp.sum), "fn: expected an elementwise function"),
    (lambda: ntk.activation(jnp.sort), "fn: expected an elementwise function, got values that"),
    (
        lambda: ntk.activation(lambda z: z + jax.lax.stop_gradient(jnp.tanh(z) - z)),
        "fn: expected an elementwise function with its own derivative",
    ),
    (lambda: ntk.activation(jnp.round), "fn: expected at most 16 kinks"),
    (lambda: ntk.activation(jnp.log), "fn: expected finite values and slopes"),
    (lambda: ntk.activation(jax.nn.hard_tanh, kinks=[1.0]), "kinks: expected .* without -1"),
    (lambda: ntk.activation(jnp.tanh, strip=0.0), "strip: expected a positive number"),
    (lambda: ntk.leaky_relu(np.inf), "slope: expected a finite number"),
    (lambda: ntk.relu.derivative.derivative(0.0), "z: expected a function with values"),
    (lambda: ntk.relu.derivative.derivative.derivative, "derivative: expected degree"),
    (
        lambda: empirical(method="fast"),
        "method: expected one of auto, layerwise, jacobian, neural_t",
    ),
    (lambda: empirical(outputs="mean"), "outputs: expected one of sum, trace, full, got 'mean'"),
    (lambda: empirical(batch_size=0), "batch_size: expected at least 1, got 0"),
    (lambda: empirical(x1=1.0), "x1: expected samples"),
    (lambda: empirical(x1={}), "x1: expected"),
    (lambda: empirical(x1=EYE[:0]), "x1: expected samples"),
    (lambda: empirical(x1={"a": EYE, "b": EYE[:2]}), "x1: expected as many samples in every array"),
    (lambda: empirical(x1=EYE * np.nan), "x1: expected finite numbers"),
    (lambda: empirical(x2=EYE[:, :1]), r"x2: expected samples of the shape \(3,\), got \(1,\)"),
    (lambda: empirical(params=ONES * np.inf), "params: expected finite numbers"),
    (lambda: empirical(params={}), "params: expected at least one leaf"),
    (lambda: empirical(params=jnp.arange(3)), "params: expected at least one leaf"),
    (
        lambda: empirical(apply=nn.Dense(1).apply, params={"w": EYE}),
        "params: expected the variables",
    ),
    (lambda: empirical(apply=lambda w, x: x.sum() * w[0]), r"apply: expected outputs \[n, o\]"),
    (
        lambda: empirical(apply=lambda w, x: x.astype(int)),
        "apply: expected outputs of floating point",
    ),
    (
        lambda: empirical(apply=lambda w, x: jnp.sin(w) + x, method="layerwise"),
        "method: expected an apply",
    ),
    (
        lambda: ntk.empirical_nngp(lambda w, x: x @ w, EYE, EYE, outputs="sum"),
        "outputs: expected one of",
    ),
    (
        lambda: ntk.kernel_vector_product(lambda w, x: x @ w, EYE, EYE)(np.ones(4)),
        "v: expected the shape",
    ),
    (lambda: ntk.taylor_expand(jnp.multiply, 1.0, -1), "order: expected at least 0, got -1"),
    (lambda: ntk.taylor_expand(3, 1.0, 1), "apply: expected a function"),
    (lambda: ntk.taylor_expand(jnp.multiply, 1j, 1), "params: expected real numbers, got complex"),
    (
        lambda: ntk.taylor_expand(jnp.multiply, print, 1),
        "params: expected arrays, got the function",
    ),
    (lambda: ntk.taylor_expand(jnp.multiply, 1.0, 1)({}, 1.0), "params: expected PyTreeDef"),
    (
        lambda: ntk.taylor_expand(jnp.multiply, 1.0, 1)(EYE, 1.0),
        "params: expected leaves of the shapes",
    ),
)
NTK_NETWORKS = value_errors(
    (lambda: layers(FLAT, shape=(2,)), "x1: expected a nonempty array"),
    (lambda: layers(nets.dense(), x2=jnp.ones((2, 3))), "x2: expected inputs"),
    (lambda: nets.dense().kernel(EYE * np.nan), "x1: expected finite entries"),
    (lambda: layers(nets.dense(), shape=(2, 4, 4, 2)), "dense: expected flatten or pooling before"),
    (lambda: layers(nets.conv(3)), "conv: expected images or sequences"),
    (lambda: layers(nets.conv(3), shape=(2, 4, 4, 1)), "network: expected to end in dense"),
    (lambda: layers(nets.dense(), RELU), "network: .* no layer with weights at the end"),
    (lambda: layers(RELU, nets.dense()), "act: expected a layer with weights"),
    (lambda: layers(nets.dense(), RELU, RELU, nets.dense()), "act: expected a layer with weights"),
    (
        lambda: layers(nets.conv(5, padding="VALID"), FLAT, shape=(2, 4, 1)),
        "conv: expected a window of at mo",
    ),
    (
        lambda: layers(nets.average_pool(5), FLAT, shape=(2, 4, 1)),
        "average_pool: expected a window of at",
    ),
    (lambda: layers(nets.average_pool(5), FLAT), "average_pool: expected images"),
    (
        lambda: layers(nets.conv((3, 3)), shape=(2, 4, 1)),
        "conv: expected one number for each of 1 axes",
    ),
    (
        lambda: layers(nets.flatten(), RELU, shape=(2, 4, 1)),
        "flatten: expected dense after it, got act",
    ),
    (
        lambda: layers(nets.residual(nets.conv(1)), FLAT, shape=(2, 4, 1)),
        "add: expected a layer with weights",
    ),
    (
        lambda: layers(nets.dense(), nets.residual(RELU), nets.dense()),
        "add: expected a layer with weights",
    ),
    (
        lambda: layers(
            nets.conv(1), nets.residual(nets.conv(2, padding="VALID")), FLAT, shape=(2, 4, 1)
        ),
        "add: expected branches of one shape",
    ),
    (lambda: layers(nets.dense("v")), "alpha: expected an entry 'v'"),
    (lambda: layers(nets.dense("v"), alpha={"v": jnp.ones(2)}), "alpha: v: expected a number"),
    (lambda: layers(nets.dense("v"), alpha={"v": -1.0}), "alpha: v: expected a nonnegative number"),
    (lambda: layers(nets.dense("v"), alpha={"v": np.inf}), "alpha: v: expected finite numbers"),
    (
        lambda: layers(nets.dense(), nets.act({ntk.relu: np.nan}), nets.dense()),
        "weights: expected finite nu",
    ),
    (
        lambda: nets.serial(nets.act({ntk.relu: "a"}), nets.act([ntk.relu, ntk.tanh], "a")).names,
        "one number of choices for the name 'a'",
    ),
    (
        lambda: nets.conv(3, padding="REFLECT"),
        "padding: expected one of SAME, VALID, CIRCULAR, got 'REFL",
    ),
    (lambda: nets.conv(0), "window: expected at least 1, got 0"),
    (lambda: nets.dense(-1.0), "weight_variance: expected a nonnegative number"),
    (lambda: nets.dense(1.0, np.nan), "bias_variance: expected a nonnegative number"),
    (lambda: nets.act([]), "activations: expected at least one"),
    (lambda: nets.act([ntk.relu], [1.0, 2.0]), "weights: expected 1 weights, got 2"),
    (lambda: nets.add([]), "branches: expected at least one network"),
    (lambda: nets.serial(ntk.relu), "networks: expected a network such as dense()"),
    (lambda: nets.dense().module(width=0), "width: expected at least 1"),
    (lambda: nets.dense().module(width=8).init(KEY, ONES), "x: expected inputs"),
    (
        lambda: nets.add([nets.dense()]).module(width=3).init(KEY, EYE),
        "network: expected dense or conv to make",
    ),
)
NTK_SPECTRUM_AND_BOUNDS = value_errors(
    (lambda: ntk.min_eigenvalue(jnp.zeros((0, 0))), "K: expected a square matrix, got shape"),
    (lambda: ntk.eigenvalues(np.zeros((2, 3, 2, 2))), r"K: .* square matrix, .* \[n, n, outputs"),
    (lambda: ntk.min_eigenvalue(EYE * np.nan), "K: expected finite entries"),
    (lambda: ntk.min_eigenvalue(EYE, size=3), "size: expected None with a matrix"),
    (lambda: ntk.min_eigenvalue(lambda v: v), "size: expected the positive size"),
    (lambda: ntk.min_eigenvalue([jnp.dot, jnp.dot], x=EYE), "K: expected one kernel function, got"),
    (lambda: ntk.eigenvalues(EYE, x=EYE), "x: expected none with a matrix K"),
    (lambda: ntk.kernel_matrix(EYE, EYE), "kernel: expected a function"),
    (
        lambda: ntk.kernel_matrix(lambda a, b: jnp.sum(a @ b.T), EYE),
        r"kernel: expected a matrix \(3, 3\), got shape \(\)",
    ),
    (lambda: ntk.kernel_matrix(jnp.dot, EYE, get="both"), "get: expected one of ntk, nngp"),
    (lambda: ntk.kernel_matrix(jnp.dot, EYE[:0]), "x1: expected inputs"),
    (lambda: ntk.certified_min_eigenvalue([[1, 2], [0, 1]]), "K: expected a symmetric"),
    (lambda: ntk.certified_min_eigenvalue([[np.inf]]), "K: expected finite entries"),
    (lambda: ntk.certified_min_eigenvalue(EYE, -1), "entry_error: expected nonneg"),
    (lambda: ntk.certified_min_eigenvalue(EYE, [1, 2]), "entry_error: expected a number or shape"),
    (lambda: jax.jit(ntk.certified_min_eigenvalue)(EYE), "K: expected known numbers, got"),
    (
        lambda: ntk.certified_min_eigenvalue(jnp.dot),
        "x: expected the inputs of the kernel function",
    ),
    (
        lambda: ntk.certified_min_eigenvalue(lambda a, b: a @ b.T / 0.0, x=EYE),
        "K: expected a kernel function with finite values",
    ),
    (lambda: ntk.certify_simplex(EYE), r"blocks: expected shape \[h, h, n, n\]"),
    (lambda: ntk.certify_simplex("blocks"), "blocks: expected numbers, got 'blocks'"),
    (lambda: ntk.certify_simplex([], x=EYE), "kernels: expected at least one function"),
    (lambda: ntk.certify_simplex(ONE_BLOCK, rtol=0), "rtol: expected"),
    (lambda: ntk.certify_simplex(ONE_BLOCK, max_cells=2.5), "max_cells: expected an integer"),
    (lambda: ntk.bounds.table1(ntk.relu, 0.0), "t: expected a positive variance, got 0.0."),
    (lambda: ntk.bounds.diagonal_upper_bound(EYE[:2]), "K: expected a square matrix"),
    (lambda: ntk.bounds.eigen_nas_as_printed(EYE, 0), "d: expected a positive number, got 0."),
    (
        lambda: ntk.bounds.hermite_lower_bound(EYE * ONES.at[0].set(2), activations=[ntk.relu]),
        "x: expected rows of equal norm",
    ),
    (
        lambda: ntk.bounds.hermite_lower_bound(0 * EYE, activations=[ntk.relu]),
        "x: expected rows of equal norm, not 0",
    ),
    (
        lambda: ntk.bounds.hermite_lower_bound(EYE, activations=[ntk.relu], terms=3),
        "terms: expected an even number",
    ),
    (
        lambda: ntk.bounds.zhu_theorem1_as_printed(5, 2, activations=[ntk.relu], C=-1.0),
        "C: expected a positive number, got -1.0.",
    ),
    (
        lambda: ntk.bounds.zhu_theorem2_as_printed(0, 2, activations=[ntk.relu], C=1.0),
        "n: expected a positive",
    ),
    (lambda: theorem3(y=jnp.ones(2)), r"y: expected shape \[3\] as K has rows, got \(2,\)."),
    (lambda: theorem3(delta=0.5), r"delta: expected a number in \(0, 1/e\], got 0.5."),
    (
        lambda: theorem3(activations=[ntk.activation(jnp.square)]),
        "activation: expected a Lipschitz function",
    ),
)
NTK_REGRESSION_AND_LARGE = value_errors(
    (lambda: ntk.KernelOperator(1, EYE), "kernel: expected a function"),
    (lambda: ntk.KernelOperator(lambda a, b: a, EYE), "kernel: expected a matrix"),
    (lambda: ntk.KernelOperator(jnp.dot, EYE[:0]), "x: expected inputs"),
    (lambda: ntk.KernelOperator(jnp.dot, EYE, EYE * np.nan), "x2: expected finite"),
    (lambda: ntk.KernelOperator(jnp.dot, EYE, get="both"), "get: expected one of ntk, nngp"),
    (lambda: ntk.KernelOperator(jnp.dot, EYE, tile=0), "tile: expected at least 1"),
    (lambda: OPERATOR @ jnp.ones(4), r"v: expected shape \[3\]"),
    (lambda: OPERATOR @ (1j * ONES), "v: expected real numbers"),
    (lambda: OPERATOR.columns(jnp.ones(2)), "indices: expected integers"),
    (lambda: OPERATOR.columns(jnp.array([0, 3])), "indices: expected integers from 0 to 2, got 3"),
    (
        lambda: ntk.EmpiricalOperator(jnp.dot, EYE, EYE, batch_size=0),
        "batch_size: expected at least 1",
    ),
    (lambda: ntk.EmpiricalOperator(jnp.dot, EYE * np.nan, EYE), "params: expected finite"),
    (lambda: regression(EYE), "K: expected a KernelOperator"),
    (lambda: regression(OPERATOR.at(EYE[:2])), "K: expected as many rows"),
    (
        lambda: regression(ntk.KernelOperator(lambda a, b: -2 * a @ b.T, EYE)),
        "K: expected a positive definite",
    ),
    (lambda: regression(y=jnp.ones(2)), r"y: expected shape \[3\]"),
    (lambda: regression(y=ONES * np.nan), "y: expected finite targets"),
    (lambda: regression(penalty=-1.0), "penalty: expected a nonnegative number"),
    (lambda: regression(tol=0.0), "tol: expected a positive number"),
    (lambda: regression(steps=0), "steps: expected at least 1"),
    (
        lambda: regression(preconditioner=1),
        "preconditioner: expected the result of partial_cholesky",
    ),
    (
        lambda: regression(preconditioner=PartialCholesky(EYE[:2], ONES, ONES)),
        "preconditioner: expected 3 rows, as K has, got 2",
    ),
    (lambda: regression(start=1), "start: expected a SolverState"),
    (lambda: regression(callback=1), "callback: expected a function"),
    (lambda: FIT.error_bound(EYE), r"prior: expected shape \[m\]"),
    (
        lambda: FIT.error_bound(jnp.ones(2), smallest=-1.0),
        "smallest: expected a nonnegative number",
    ),
    (lambda: ntk.partial_cholesky(OPERATOR, 1, key=0), NOT_A_KEY),
    (lambda: ntk.partial_cholesky(OPERATOR, 0, key=KEY), "rank: expected at least 1"),
    (lambda: ntk.partial_cholesky(OPERATOR, 4, key=KEY), "rank: expected at most the 3 rows"),
    (
        lambda: ntk.leave_one_out_estimate(OPERATOR, 1, key=KEY),
        "fit: expected an IterativeRegression",
    ),
    (
        lambda: ntk.leave_one_out_estimate(OPERATOR.at(EYE), FIT._replace(weights=W0), key=KEY),
        "fit: expected 3 weights",
    ),
    (
        lambda: ntk.eigenvalue_interval(OPERATOR, key=KEY),
        "steps: expected steps times block at most",
    ),
    (
        lambda: ntk.eigenvalue_interval(OPERATOR, key=KEY, steps=2, block=1, failure=1.5),
        "failure: expected",
    ),
    (lambda: ntk.kernel_regression(EYE[:2], ONES), "K: expected a square matrix"),
    (lambda: ntk.kernel_regression(EYE, ONES * 1j), "y: expected real numbers, got complex"),
    (lambda: ntk.gradient_flow(EYE + EYE[0], ONES, 1.0), "K: expected a symmetric"),
    (lambda: ntk.gradient_flow(EYE, ONES, 1j), "t: expected real numbers, got complex"),
    (lambda: ntk.kernel_regression(TWO, ONES), r"y: expected shape \[3, 2\], as K has"),
    (lambda: ntk.kernel_regression(EYE, ONES).predict(TWO), r"cross: expected shape \[m, 3\]"),
    (lambda: ntk.kernel_regression(EYE, jnp.ones((3, 0))), r"y: expected shape \[3\] or"),
    (lambda: ntk.gradient_flow(EYE, ONES, 1.0, f0=EYE), "f0: expected a number"),
    (lambda: posterior(y=jnp.ones(2)), r"y: expected shape \[3\]"),
    (lambda: posterior(cross=EYE[:, :2]), r"cross: expected shape \[m, 3\], got"),
    (lambda: posterior(cross=2 * EYE), r"cross: expected \|cross\[i, j\]\| <="),
    (lambda: posterior(prior=EYE[:2, :2]), r"prior: expected shape \(3, 3\), got \(2, 2\)"),
    (lambda: posterior(prior=EYE + EYE[0]), "prior: expected a symmetric"),
    (lambda: posterior(jnp.ones((3, 3))), "K: expected a positive definite"),
    (lambda: ntk.posterior(EYE, ONES), "cross: expected an array, as K is matrices"),
    (
        lambda: ntk.posterior(jnp.dot, ONES, x=EYE),
        "at: expected an array, as K is a kernel function",
    ),
    (lambda: ensemble(EYE), "train: expected kernels with"),
    (lambda: ensemble(ntk.Kernels(EYE, TWO), jnp.ones((3, 2))), "train: expected kernels of one"),
    (lambda: ensemble(cross=ntk.Kernels(EYE[:2], EYE)), "cross: expected kernels of as many rows"),
    (lambda: ensemble(cross=ntk.Kernels(EYE, EYE * np.nan)), "cross.ntk: expected finite"),
    (
        lambda: ensemble(cross=ntk.Kernels(2 * EYE, EYE)),
        r"cross.nngp: expected \|cross.nngp\[i, j\]\| <=",
    ),
    (lambda: ensemble(penalty=-1), "penalty: expected a nonnegative"),
    (lambda: ensemble(t=-1), "t: expected nonnegative times"),
    (lambda: ensemble(x=EYE), "x: expected none, as train is matrices"),
    (
        lambda: ntk.ensemble(jnp.dot, ONES, prior=EYE, x=EYE, at=EYE),
        "prior: expected none, as train",
    ),
    (
        lambda: ntk.ensemble(lambda a, b: a @ b.T, ONES, x=EYE, at=EYE),
        "kernel: expected a function that returns the fields",
    ),
)
NTK_SCORES = value_errors(
    (lambda: ntk_score("snip", batch=EYE), "batch: expected a pair"),
    (lambda: ntk_score("snip", batch=(EYE[:0], LABELS[:0])), "batch: expected inputs"),
    (lambda: ntk_score("snip", batch=(EYE, LABELS[:2])), "batch: expected 3 integer labels"),
    (lambda: ntk_score("snip", batch=(EYE, LABELS + 1)), "batch: expected labels from 0 to 2"),
    (lambda: ntk_score("naswot", batch=(EYE * np.nan, LABELS)), "batch: expected finite"),
    (lambda: ntk_score("l2_norm", EYE * np.nan), "params: expected finite"),
    (lambda: ntk_score("nasi", apply=lambda w, x: x[:, 0]), "apply: expected logits"),
    (lambda: ntk_score("snip", ONES, apply=jnp.multiply), "params: expected leaves named"),
    (lambda: ntk_score("knas_released", batch=(EYE[:2], LABELS[:2])), "params: .* at least 50"),
    (lambda: ntk_score("knas_released"), "batch: expected an even number"),
    (lambda: ntk_score("zico", parts=2), "parts: expected 2 or more, dividing the 3"),
    (lambda: ntk_score("naswot", apply=lambda w, x: jnp.tanh(x @ w)), "depend on a ReLU, got none"),
    (
        lambda: ntk_score(
            "naswot",
            apply=lambda w, x: jax.lax.while_loop(lambda h: h.sum() > 9, jax.nn.relu, x @ w),
        ),
        "apply: expected no ReLU inside `while`",
    ),
    (lambda: ntk.scores.of_kernel(jnp.dot, jnp.arange(2), x=EYE), "y: expected 3 labels"),
    (
        lambda: ntk.scores.of_kernel(jnp.einsum("ij,ab->ijab", EYE, EYE), jnp.arange(3) + 1),
        "y: expected labels below 3, the outputs of K",
    ),
)

ROWS_OF_TWO = jnp.ones((4, 2))


def one_of_two(w, alpha, batch):
    return OUTER(w.params, alpha, batch)


HYPERGRADIENTS += value_errors(
    (
        lambda: hypergradient(
            bilevel.Problem(one_of_two, one_of_two, stateful=True),
            w0=STATEFUL,
            solver=unrolled(0.1, 1),
        ),
        r"lower: expected .* returns \(loss, variables\)",
    ),
)
STOCHASTIC += value_errors(
    (lambda: bilevel.saba(-1.0), "step_size: expected a positive"),
    (lambda: bilevel.ma_soba(0.1, 1.5), "average: expected"),
    (lambda: bilevel.spaba(0.1, probability=2.0), "probability: expected"),
    (lambda: bilevel.f2sa(0.1, -1.0), "penalty: expected a positive"),
    (lambda: bilevel.f2sa(0.1, optax.constant_schedule(3.0)), "penalty: expected numbers"),
    (lambda: bilevel.amigo(0.1, inner=0), "inner: expected at least 1"),
    (lambda: bilevel.meha(0.1, growth=0.5), "growth: expected"),
    (lambda: bilevel.partition(0), "batch_size: expected at least 1"),
    (
        lambda: search(solver=bilevel.saba(0.1), batches=bilevel.minibatches(3), key=KEY),
        "batches: expected bilevel.partition",
    ),
    (lambda: search(batches=bilevel.partition(2), key=KEY), "batches: expected a sampler"),
    (
        lambda: search(solver=bilevel.soba(0.1), batches=bilevel.partition(2), rows=ROWS_OF_TWO),
        "key: expected a PRNG key",
    ),
    (
        lambda: search(solver=bilevel.f2sa(0.1), diagnostics=True, rows=ROWS_OF_TWO),
        "diagnostics: expected False",
    ),
    (
        lambda: search(
            solver=bilevel.soba(0.1),
            batches=bilevel.partition(2),
            key=KEY,
            rows=(ROWS_OF_TWO, ALPHA),
        ),
        "train: expected arrays of as many rows each",
    ),
    (lambda: descent(bilevel.soba(0.1)), "solver: expected a LowerSolver.*bilevel.search runs"),
    (
        lambda: search(
            problem=bilevel.Problem(LOWER, OUTER, stateful=True), solver=bilevel.soba(0.1)
        ),
        "problem: expected one without variables",
    ),
    (
        lambda: search(bilevel.paced()),
        r"optimizer: expected bilevel.paced with bilevel.saba",
    ),
    (lambda: bilevel.paced(0.1), "optimizer: expected an optax optimizer"),
)

CONSTRAINTS = [
    (lambda: bilevel.projected("ball"), ValueError, r"projected: expected one of box, .*'ball'"),
    (lambda: bilevel.projected("l1"), ValueError, r"projected: expected one of"),
    (lambda: bilevel.projected("box", 1.0, 0.0), ValueError, r"high: expected bounds of at least"),
    (lambda: bilevel.projected("box", np.nan, 0.0), ValueError, r"low: expected bounds that are"),
    (lambda: bilevel.projected("box", 0, 1, 2), ValueError, r"projected: expected the parameters"),
    (lambda: bilevel.projected("simplex", 0.0), ValueError, r"total: expected a positive number"),
    (lambda: bilevel.projected("l2_ball", -1.0), ValueError, r"radius: expected a number of at"),
    (lambda: bilevel.projected("l1_ball", "1"), ValueError, r"radius: expected numbers or a func"),
    (
        lambda: bilevel.projected("affine", np.ones((2, 3)), [1.0, 2.0]),
        ValueError,
        r"right: expected right-hand sides that some weights attain, got an empty set",
    ),
    (
        lambda: constrained(bilevel.projected("affine", np.ones((2, 2)), lambda a: a * EYE[0, :2])),
        ValueError,
        r"right: expected right-hand sides that some weights attain",
    ),
    (
        lambda: constrained(bilevel.projected("affine", np.ones(3), 1.0)),
        ValueError,
        r"matrix: expected 2 columns, one per weight, got 3",
    ),
    (lambda: bilevel.proximal("l1", -1.0), ValueError, r"weight: expected numbers of at least 0"),
    (
        lambda: constrained(bilevel.proximal("l1", lambda a: -a)),
        ValueError,
        r"weight: expected numbers of at least 0, got -1",
    ),
    (
        lambda: search(solver=implicit(bilevel.proximal("l1", lambda a: -1 - 0 * a))),
        ValueError,
        r"weight: expected numbers of at least 0, got -1",
    ),
    (
        lambda: descent(implicit(bilevel.projected("box", 1.0, lambda a: 0 * a))),
        ValueError,
        r"high: expected bounds of at least low, got 0",
    ),
    (
        lambda: constrained(bilevel.proximal("l1", np.ones(3))),
        ValueError,
        r"weight: expected a number or the shape \(2,\) of the weights, got shape \(3,\)",
    ),
    (
        lambda: bilevel.proximal("group_l1", 1.0, groups=[[0, 1], [1]]),
        ValueError,
        r"groups: expected disjoint groups",
    ),
    (
        lambda: constrained(bilevel.proximal("group_l1", 1.0, groups=[[0, 2]])),
        ValueError,
        r"groups: expected indices below 2, got 2",
    ),
    (
        lambda: constrained(bilevel.projected(lambda w, alpha: w[:1])),
        ValueError,
        r"projected: expected a function that keeps shapes and dtypes",
    ),
    (
        lambda: constrained(bilevel.proximal(lambda w, step, alpha: w.astype(jnp.bfloat16))),
        ValueError,
        r"proximal: expected a function that keeps shapes and dtypes",
    ),
    (
        lambda: hypergradient(w0=jnp.zeros(()), solver=implicit(bilevel.projected("simplex"))),
        ValueError,
        r"w0: expected a simplex on the last axis of every leaf",
    ),
    (
        lambda: implicit(bilevel.projected("box"), bilevel.gram(lambda w, a, b: w)),
        ValueError,
        r"inverse: expected cg, dense, neumann, nystrom or scale",
    ),
    (lambda: bilevel.projected(3.0), ValueError, r"parts: expected names such as"),
]


INDEFINITE = jnp.array([[1.0, 3.0], [3.0, 1.0]])


class BatchStatistics(nn.Module):
    """A layer whose outputs depend on the other rows of the batch."""

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


def deep_product(w, x):
    for _ in range(12):
        x = jax.nn.relu(x @ w)
    return x


NTK_KERNELS += value_errors(
    (lambda: network_kernel(activations=[ntk.relu.derivative.derivative]), "expected functions of"),
    (
        lambda: empirical(BatchStatistics().apply, BatchStatistics().init(KEY, EYE)),
        "^apply: expected BatchNorm with use_running_average",
    ),
)
NTK_SPECTRUM_AND_BOUNDS += [
    (
        lambda: jax.hessian(ntk.min_eigenvalue)(EYE),
        NotImplementedError,
        "K: expected first derivatives only",
    ),
]
NTK_REGRESSION_AND_LARGE += value_errors(
    (
        lambda: ntk.kernel_regression(jnp.diag(jnp.array([1.0, -0.25])), ONES[:2]),
        r"K: expected a positive definite .* got .* -0\.25\.",
    ),
)


def half_per_sample(w, x):
    return jax.nn.relu((x @ w).reshape(-1, 2)).reshape(len(x), -1)


def three_samples(w, x):
    return jax.nn.relu(x @ w).reshape(3, 4)


def by_number_of_samples(w, x):
    x = jax.nn.relu(x @ w)
    return x if len(x) == 3 else jnp.tanh(x)


def guarded(x):
    """Batch norm whose variance is kept nonnegative: its ``maximum`` is no activation."""
    variance = (x**2).mean(1, keepdims=True) - x.mean(1, keepdims=True) ** 2
    return x / jnp.sqrt(jnp.maximum(variance, 0) + 1e-3)


NTK_SCORES += value_errors(
    *(
        (
            lambda apply=apply: ntk_score("naswot", jnp.ones((3, 4)), apply=apply),
            f"^apply: expected .*{message}",
        )
        for apply, message in (
            (half_per_sample, "samples on an axis, got"),
            (three_samples, "a function of any number of samples, got"),
            (by_number_of_samples, "the same operations for any number of samples, got"),
        )
    ),
    *(
        (
            lambda act=act: ntk_score("naswot", apply=lambda w, x: act(x @ w)),
            "apply: expected logits that depend on a ReLU",
        )
        for act in (jax.nn.leaky_relu, jnp.abs, lambda x: jnp.maximum(x, -1), guarded)
    ),
    (lambda: ntk.scores.of_kernel(INDEFINITE), "K: expected a positive semidefinite matrix, got"),
    (
        lambda: ntk_score(
            "synflow",
            jnp.full((1, 1), 1e30, jnp.float32),
            (jnp.ones((1, 1), jnp.float32), LABELS[:1]),
            deep_product,
        ),
        "synflow sum is nonnegative and below 1e308, got inf",
    ),
)

ROWS = {
    "constraints": CONSTRAINTS,
    "hypergradients": HYPERGRADIENTS,
    "solvers": SOLVERS,
    "outer_loop": OUTER_LOOP,
    "runs": RUNS,
    "stochastic": STOCHASTIC,
    "linear_and_baselines": LINEAR_AND_BASELINES,
    "spaces": SPACES,
    "nets_and_data": NETS_AND_DATA,
    "strategies": STRATEGIES,
    "theory": THEORY,
    "ntk_kernels": NTK_KERNELS,
    "ntk_networks": NTK_NETWORKS,
    "ntk_spectrum_and_bounds": NTK_SPECTRUM_AND_BOUNDS,
    "ntk_regression_and_large": NTK_REGRESSION_AND_LARGE,
    "ntk_scores": NTK_SCORES,
}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(*row, id=f"{area}-{number}")
        for area, rows in ROWS.items()
        for number, row in enumerate(rows)
    ],
)
def test_a_wrong_argument_raises_one_message_that_names_it(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert not isinstance(raised.value, jax.errors.JAXTypeError)


@pytest.mark.parametrize(
    "make", [lambda n: unrolled(0.1, n), bilevel.newton, bilevel.lbfgs, bilevel.cg]
)
def test_an_integer_of_numpy_is_a_count(make):
    make(np.int32(1))


@pytest.mark.long
def test_an_old_style_key_and_a_leaf_that_is_none_are_accepted():
    search(batches=lambda key, data: data, key=jax.random.PRNGKey(0))
    problem = bilevel.Problem(
        lambda w, alpha, batch: LOWER(w["w"], alpha, batch),
        lambda w, alpha, batch: OUTER(w["w"], alpha, batch),
    )
    assert np.isfinite(hypergradient(problem, w0={"w": W0, "none": None}).value)
