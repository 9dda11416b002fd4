"""Wrong arguments raise one message that names the argument, before anything long is computed."""

import dataclasses
import functools
import itertools
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
from problems import follower, reverse_once

import bilevel
import ntk
from bilevel import Problem, cg, implicit, minibatches, newton, one_step, projected, unrolled
from bilevel.discretize import diagnostics
from bilevel.linear import ridge_weights
from bilevel.nets import convolve_images, images, max_pooling, training, unit_images
from bilevel.nets.evaluation import wrong_rows
from bilevel.runs import checkpoint
from bilevel.spaces import darts, features, nasbench201, targets
from bilevel.spaces.activations import sign_labels
from bilevel.spaces.nasbench201 import judging
from bilevel.strategies import eigen_nas, on_sets
from ntk import networks as nets
from ntk.large.iterative_regression import IterativeRegression
from ntk.large.partial_cholesky import PartialCholesky

baselines, bounds, data, spaces = bilevel.baselines, bilevel.bounds, bilevel.data, bilevel.spaces
partition, proximal, restarted = bilevel.partition, bilevel.proximal, bilevel.restarted
soba, spectral, strategies = bilevel.soba, bilevel.spectral, bilevel.strategies
saba, traces = bilevel.saba, bilevel.plots.traces
spectral_alpha, spectral_estimator = spectral.spectral_alpha, spectral.spectral_estimator
PROBLEM = follower(lambda w, alpha, batch: jnp.sum(w**2))
LOWER, OUTER = PROBLEM.lower, PROBLEM.outer
W0, ALPHA, SGD = np.zeros(2), np.ones(2), optax.sgd(0.1)
KEY = np.zeros(2, np.uint32)  # the old style: typed keys start a device
UNIFORM = np.array([0.5, 0.5])
LABEL = "label: expected an int or a dict from str to str, got"
LOOKAHEAD = optax.lookahead(SGD, 2, 0.5)
SCHEDULE = optax.cosine_decay_schedule(0.1, 10)
SELECTION = baselines.Selection(lambda *a: 0.0, lambda *a: None)
IMAGES = np.arange(16.0).reshape(1, 4, 4, 1)
SKIPS = bilevel.spaces.skip_space(["relu", "tanh"], depth=3, width=4)
FOUR = np.ones((3, 4))
RATES = {"weight_optimizer": 0.1, "alpha_optimizer": 0.1, "batch_size": 2}
NOT_A_KEY = r"key: expected a PRNG key such as jax.random.key\(0\), got"
NO_RETURN = "expected a loss that returns a floating scalar, got None; a return is missing"
KEEPS = "a function that keeps shapes and dtypes"
FORWARD = "forward: a LowerSolver, "
AUX = r"expected .* floating scalar, got a tuple .*; Problem\(..., has_aux=True\) takes"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A pytree with a function among its leaves, like a module of equinox."""

    weight: jax.Array
    activation: Callable


MODULE = Module(np.zeros(2), jax.nn.relu)
A_MODULE = r"w0\.activation: expected floating arrays, got the function .*; keep the arrays in w0"


def uncalled(argument, name):
    """Return the message about a factory that was handed over without a call."""
    return rf"{argument}: .*got the function {name}; call it: {name}\(...\)"


def never(*args):
    raise AssertionError("solved before the check")


def baseline(method, problem=never, configs=(1, 2), budget=9, key=KEY, **options):
    return getattr(baselines, method)(key, list(configs), problem, budget, **options)


def shared(errors, counts):
    return baselines.Selection(never, lambda *_: (errors, counts))


box = functools.partial(projected, "box")
sharing = functools.partial(baseline, "weight_sharing")
of_relu = functools.partial(spaces.activation_space, ["relu"])


def solve(alpha, w, batch):
    return alpha


def with_aux(w, alpha, batch):
    return LOWER(w, alpha, batch), {"error": 0.0}


def without_return(w, alpha, batch):
    return None


def hypergradient(
    problem=PROBLEM, alpha=ALPHA, w0=W0, train=None, valid=None, solver=None, **options
):
    solver = implicit() if solver is None else solver
    return bilevel.hypergradient(problem, solver, **options)(alpha, w0, train, valid)


def search(
    optimizer=SGD, alpha=ALPHA, w0=W0, steps=1, problem=PROBLEM, solver=None, rows=None, **options
):
    solver = implicit() if solver is None else solver
    return bilevel.search(problem, solver, optimizer, alpha, w0, rows, rows, steps=steps, **options)


def through(solver, problem=PROBLEM, **options):
    return hypergradient(problem, solver=solver, **options)


def losses(lower=LOWER, outer=OUTER, **kind):
    return hypergradient(Problem(lower, outer, **kind))


ROWS_OF_TWO = np.ones((4, 2))


def single_loop(solver=None, rows=ROWS_OF_TWO, **options):
    return search(solver=soba(0.1) if solver is None else solver, rows=rows, **options)


def constrained(forward):
    return through(implicit(forward))


def descent(solver=None, w0=W0):
    init, _ = bilevel.descent(PROBLEM, implicit() if solver is None else solver, SGD)
    return init(ALPHA, w0)


EYE, ONES, RELU, DENSE = np.eye(3), np.ones(3), nets.act(ntk.relu), nets.dense()
FLAT = nets.serial(nets.flatten(), nets.dense())
TWO = np.einsum("ij,ab->ijab", EYE, np.eye(2))  # a kernel of two outputs
ONE_BLOCK, LABELS = np.ones((1, 1, 1, 1)), np.arange(3)
operator = functools.partial(ntk.KernelOperator, lambda a, b: a @ b.T, EYE)
interval = functools.partial(ntk.eigenvalue_interval, key=KEY)
leave_one_out = functools.partial(ntk.leave_one_out_estimate, key=KEY)
certified = ntk.certified_min_eigenvalue
theorem3 = functools.partial(ntk.bounds.zhu_theorem3, EYE, y=ONES, activations=[ntk.relu], C=1.0)
hermite = functools.partial(ntk.bounds.hermite_lower_bound, x=EYE, activations=[ntk.relu])
network_kernel = functools.partial(ntk.network_kernel, x1=EYE, activations=[ntk.relu])
empirical = functools.partial(ntk.empirical_kernel, apply=lambda w, x: x @ w, params=ONES, x1=EYE)
posterior = functools.partial(ntk.posterior, K=EYE, y=ONES, cross=EYE, prior=EYE)
FIT = IterativeRegression(ONES, np.array(0.0), np.array(0.0), np.array(1), 0.1)


def pattern(message):
    full = message.startswith("^") or "expected" in message
    return message if full else message.replace(": ", ": expected ", 1)


def linear(w, x):
    return x @ w


def ntk_score(name, params=EYE, batch=(EYE, LABELS), apply=linear, **options):
    return getattr(ntk.scores, name)(None, apply, params, batch, **options)


def layers(*parts, shape=(2, 4), **options):
    return nets.serial(*parts).kernel(jnp.ones(shape), **options)


def regression(K=None, y=ONES, penalty=1.0, **options):
    K = operator() if K is None else K
    return ntk.iterative_regression(K, y, penalty=penalty, **options)


def ensemble(train=None, y=ONES, cross=None, prior=EYE, **options):
    same = ntk.Kernels(nngp=EYE, ntk=EYE)
    return ntk.ensemble(same if train is None else train, y, cross or same, prior, **options)


SKIP_SPACE = spaces.skip_space(depth=3, width=2, classes=2)
CELL = nasbench201.genotypes()[-1]
fourier = functools.partial(features.fourier_features, KEY, np.ones((2, 3)))
GENOTYPE = "Genotype(normal=[{0}], normal_concat=range(2, 6), reduce=[{0}], reduce_concat=[2, 3])"
GENOTYPE = GENOTYPE.format("('skip_connect', 0), ('skip_connect', 1), " * 4)
PARSED = darts.parse_genotype(GENOTYPE)
PART = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])
TEXTS = ["fine", "dull"], [1, 0]
F, X, BALL = np.ones((3, 2)), np.ones((3, 2, 4)), bounds.ball_covering(2, 1.0)
convergence = functools.partial(bounds.uniform_convergence, covering=BALL, L=1.0)
condition_six = functools.partial(bilevel.condition_six, outputs=F, alpha=ALPHA / 2)
lipschitz = functools.partial(bilevel.lipschitz, lambda alpha: alpha, alphas=ALPHA, deltas=[0.1])


def score(names=("l2_norm",), cells=CELL, rows=2, **options):
    cells = cells if isinstance(cells, np.ndarray) else [cells]
    batch = jnp.ones((rows, 4, 4, 1)), jnp.zeros(rows, int)
    networks = nasbench201.all_networks(cells=1, channels=1)
    return nasbench201.score_networks(names, networks, None, cells, batch, **options)


def two_updates(optimizer, alpha, gradient):
    state = optimizer.init(alpha)
    for _ in range(2):
        updates, state = optimizer.update(gradient, state, alpha)
        alpha = optax.apply_updates(alpha, updates)


def traced_search(**options):
    return jax.vmap(lambda r: search(solver=unrolled(r, 3), steps=3, **options).alpha)(UNIFORM)


def unused_leaves(mode):
    def loss(w, alpha, batch):
        return jnp.sum((w - alpha["mix"]) ** 2)

    alpha = {"mix": jnp.ones(()), "mixture": jnp.ones(2), "decya": jnp.ones(())}
    return hypergradient(Problem(loss, loss), alpha, solver=unrolled(0.1, 3), mode=mode)


# Solvers, hypergradients and searches of small problems.
PLAIN = Problem(OUTER, OUTER)  # alpha is the solver's alone
COUNTING = Problem(lambda w, a, b: (LOWER(w.params, a, b), {}), OUTER, stateful=True)
AT_VARIABLES = Problem(
    lambda w, a, b: (LOWER(w.params, a, b), w.params),
    lambda w, a, b: OUTER(w.variables, a, b),
    stateful=True,
)
STOPPED = Problem(lambda w, a, b: LOWER(w, jax.lax.stop_gradient(a), b), OUTER)
STATEFUL = bilevel.Stateful(W0, np.zeros(2))
ONCE = unrolled(0.1, 1)
DRAWING = unrolled(0.1, 2, batches=lambda key, data: data)
bcoo, bcsr = (functools.partial(kind.fromdense, EYE) for kind in (sparse.BCOO, sparse.BCSR))
solve_ridge = functools.partial(bilevel.ridge(lambda a, x: x, never).run, LOWER, ALPHA, W0, ())


def of_rate(alpha):
    return optax.sgd(alpha)


def injected(alpha):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=alpha[0])


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


TENTHS = np.full((5, 6, 6, 1), 0.1, np.float32)  # their mean is not 0.1


def of_params(w, alpha, batch):
    return OUTER(w.params, alpha, batch)


class BatchStatistics(nn.Module):
    """A layer with outputs that depend on the other rows of the batch."""

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


def deep_product(w, x):
    for _ in range(12):
        x = jax.nn.relu(x @ w)
    return x


def uneven(w, x):
    x = jax.nn.relu(x @ w)
    return x if len(x) == 3 else jnp.tanh(x)


def guarded(x):
    """Batch norm that keeps its variance nonnegative: ``maximum`` does not count as activation."""
    variance = (x**2).mean(1, keepdims=True) - x.mean(1, keepdims=True) ** 2
    return x / jnp.sqrt(jnp.maximum(variance, 0) + 1e-3)


def mismatched_update(optimizer):
    alpha = UNIFORM[None, None]
    return optimizer.update(ONES[:2], optimizer.init(alpha), alpha)


def curvature_of_roots(size):
    def loss(w, alpha, batch):
        return jnp.sum(jnp.sqrt(alpha))

    return diagnostics.alpha_curvature(loss, "free")(None, jnp.zeros(size), None)


def naswot(apply):
    return ntk_score("naswot", jnp.ones((3, 4)), apply=apply)


# A message, and the call or the calls that raise it as a ValueError. "steps: an integer" stands for
# "steps: expected an integer".
ROWS = {}
ROWS["constraints"] = {
    r"projected: one of box, .*'ball'": lambda: projected("ball"),
    r"projected: one of": lambda: projected("l1"),
    r"high: bounds of at least": lambda: box(1.0, 0.0),
    r"low: bounds that are": lambda: box(np.nan, 0.0),
    r"projected: the parameters": lambda: box(0, 1, 2),
    r"total: a positive number": lambda: projected("simplex", 0.0),
    r"radius: a number of at": lambda: projected("l2_ball", -1.0),
    r"radius: numbers or a func": lambda: projected("l1_ball", "1"),
    r"right: right-hand sides that some weights attain, got an empty set": lambda: projected(
        "affine", np.ones((2, 3)), [1.0, 2.0]
    ),
    r"right: right-hand sides that some weights attain": lambda: constrained(
        projected("affine", np.ones((2, 2)), lambda a: a * EYE[0, :2])
    ),
    "matrix: 2 columns, one per weight, got 3": lambda: constrained(projected("affine", ONES, 1.0)),
    r"weight: numbers of at least 0": lambda: proximal("l1", -1.0),
    r"weight: numbers of at least 0, got -1": (
        lambda: constrained(proximal("l1", lambda a: -a)),
        lambda: search(solver=implicit(proximal("l1", lambda a: -1 - 0 * a))),
    ),
    r"high: bounds of at least low, got 0": lambda: descent(implicit(box(1.0, lambda a: 0 * a))),
    r"weight: a number or the shape \(2,\) of the weights, got shape \(3,\)": lambda: constrained(
        proximal("l1", np.ones(3))
    ),
    r"groups: disjoint groups": lambda: proximal("group_l1", 1.0, groups=[[0, 1], [1]]),
    "groups: indices below 2, got 2": lambda: constrained(proximal("group_l1", 1, groups=[[0, 2]])),
    "projected: " + KEEPS: lambda: constrained(projected(lambda w, alpha: w[:1])),
    "proximal: " + KEEPS: lambda: constrained(
        proximal(lambda w, step, alpha: w.astype(jnp.bfloat16))
    ),
    r"w0: a simplex on the last axis of every leaf": (
        lambda: hypergradient(w0=jnp.zeros(()), solver=implicit(projected("simplex"))),
        lambda: hypergradient(w0={"w": jnp.zeros((3, 0))}, solver=implicit(projected("simplex"))),
    ),
    "forward: projected.*hides the active set": lambda: constrained(
        restarted(box(0.0, lambda a: a))
    ),
    r"optimizer: an optax optimizer.*lower solver": lambda: one_step(box()),
    r"solver: implicit.*without its derivative": lambda: through(box()),
    r"inverse: cg, dense, neumann, nystrom or scale": lambda: implicit(box(), bilevel.gram(never)),
    r"parts: names such as": lambda: projected(3.0),
}
ROWS["hypergradients"] = {
    "alpha": lambda: hypergradient(alpha="one"),
    r"alpha\['kind'\]: floating arrays, got 'relu'": lambda: hypergradient(
        alpha={"a": ALPHA, "kind": "relu"}
    ),
    r"alpha: floating arrays, got int.*; convert it with jnp.asarray\(x, float\)": lambda: (
        hypergradient(alpha=jnp.ones(2, int))
    ),
    "w0: at least one array, got {}": lambda: hypergradient(w0={}),
    A_MODULE: lambda: hypergradient(w0=MODULE),
    r"optimizer: a function alpha -> optax optimizer, got a schedule; .* optax.sgd": lambda: (
        through(unrolled(SCHEDULE, 3), alpha={"x": ALPHA})
    ),
    "lower: " + AUX: lambda: losses(with_aux),
    "outer: " + AUX: lambda: losses(outer=with_aux),
    r"lower: a loss that returns \(loss, aux\), as has_aux=True says, got an array": lambda: losses(
        has_aux=True
    ),
    "lower: " + NO_RETURN: lambda: losses(without_return),
    uncalled("solver", "implicit"): lambda: through(implicit),
    r"solver: restarted\(unrolled": lambda: through(
        restarted(implicit()), Problem(AT_VARIABLES.lower, of_params, stateful=True), w0=STATEFUL
    ),
    "difference": lambda: hypergradient(difference=0.0),
    "mode: .*, got 'sideways'": lambda: hypergradient(mode="sideways"),
    'mode: expected "reverse" for a solver': lambda: through(one_step(0.1), mode="forward"),
    r"lower: .*floating scalar.*\(2,\)": lambda: losses(lambda w, a, b: w),
    "outer: .*floating scalar.*int": lambda: losses(outer=lambda w, a, b: jnp.array(1)),
    "lower: a function .*, got None": lambda: Problem(None, OUTER),
    "differentiated: stateful=True": lambda: Problem(LOWER, OUTER, differentiated=True),
    r"lower: .*DirectAdjoint\(\).*f2sa": lambda: losses(lambda w, a, b: reverse_once(w - a).sum()),
    "alpha: a way to the outer loss": (
        lambda: through(unrolled(0.1, 5, backprop=0)),
        lambda: hypergradient(STOPPED),
    ),
    "alpha: to enter the lower loss, the outer loss": lambda: hypergradient(PLAIN),
    "w0: real floating arrays, got complex": lambda: hypergradient(w0=1j * W0),
    r"w0: a bilevel.Stateful\(params, variables\)": lambda: hypergradient(COUNTING),
    "lower: variables.*of the form of w0's": lambda: through(ONCE, COUNTING, w0=STATEFUL),
    "outer: .* params.*differentiated=True": lambda: through(ONCE, AT_VARIABLES, w0=STATEFUL),
    "fn: a function": lambda: bilevel.standard_error(PLAIN, 2),
    "parts: at least 2, got 1": lambda: bilevel.standard_error(never, 1),
    "parts: a divisor of the rows of train, got 5": lambda: bilevel.standard_error(never, 5)(
        ALPHA, W0, EYE, EYE
    ),
    "steps: at least 1": lambda: bilevel.truncation(PLAIN, 0.1, 0),
    r"problem: a bilevel\.Problem": lambda: bilevel.truncation(never, 0.1, 2),
    r"lower: .* returns \(loss, variables\)": lambda: hypergradient(
        Problem(of_params, of_params, stateful=True), w0=STATEFUL, solver=ONCE
    ),
    r"alpha\['decya'\], alpha\['mixture'\]: to enter": (
        lambda: unused_leaves("reverse"),
        lambda: unused_leaves("forward"),
    ),
}
ROWS["solvers"] = {
    "steps: an integer, got 2.5": lambda: unrolled(0.1, 2.5),
    "batches: None with projected or proximal steps": lambda: unrolled(
        projected("nonnegative"), 2, batches=lambda key, data: data
    ),
    "optimizer: .*, got .*LowerSolver": lambda: unrolled(newton(), 2),
    "steps: an integer, got True": lambda: newton(True),
    "steps: an integer, got None": lambda: bilevel.lbfgs(None),
    "steps: an integer, got '2'": lambda: cg("2"),
    FORWARD + r"got .*; wrap it: unrolled\(optimizer, steps\)": lambda: implicit(SGD),
    FORWARD + r".*; an inverse goes into implicit\(inverse=...\)": lambda: implicit(cg()),
    FORWARD + r"got the function solve; hand it to solved\(...\)": lambda: implicit(solve),
    uncalled("forward", "newton"): lambda: implicit(newton),
    r"inverse: an inverse, got the function cg; call it: cg\(...\)": lambda: implicit(newton(), cg),
    r"inverse: an inverse, got a LowerSolver; bilevel.cg\(\) makes one": lambda: implicit(
        newton(), newton()
    ),
    uncalled("solver", "implicit"): lambda: restarted(implicit),
    r"optimizer: an optax optimizer, got the function adam; call it": lambda: unrolled(
        optax.adam, 1
    ),
    NOT_A_KEY: lambda: bilevel.nystrom(1, 0.1, key=0),
    "backprop: .* steps=3, got 4": lambda: unrolled(0.1, 3, backprop=4),
    r"depends on alpha; call solver\.start": lambda: unrolled(of_rate, 2).init(W0),
    r"average: 5 weights, got shape \(2,\)": lambda: through(unrolled(0.3, 5, average=nn.softmax)),
    "optimizer: .*takes further arguments": lambda: unrolled(optax.contrib.sam(SGD, SGD), 2),
    "optimizer: .*of the parameters alone, got optax.lookahead": lambda: one_step(LOOKAHEAD),
    r"solver: .*line search.*implicit\(lbfgs\(\)\)": lambda: through(
        unrolled(optax.lbfgs(), 2), diagnostics=False
    ),
    "solver: an optimizer whose state at the start": lambda: through(unrolled(injected, 3), PLAIN),
    "radius: a positive number": lambda: one_step(0.1, radius=0.0),
    r"^init: .*solver.start\(alpha, w\)": lambda: one_step(of_rate).init(W0),
    "one_step can differentiate, got a line search": lambda: through(one_step(optax.lbfgs())),
    "decay: at least 0 and under 1, got": lambda: bilevel.distilled(0.1, decay=1.0),
    "start: a function": lambda: restarted(unrolled(0.1, 1), key=KEY),
    "key: expected": lambda: restarted(unrolled(0.1, 1), never, key=3.0),
    "start: weights of": lambda: through(restarted(implicit(), start=lambda a, w: EYE)),
    "solve: weights of": lambda: through(implicit(bilevel.solved(lambda a, w, b: EYE))),
    "forward: a solver of one lower problem, got": lambda: implicit(DRAWING),
    "steps: at least 1, got 0": lambda: cg(0),
    "tol: at least 0, got -0.001": lambda: cg(tol=-1e-3),
    "damping: at least 0, got nan": lambda: bilevel.dense(float("nan")),
    "terms: at least 1, got 0": lambda: bilevel.neumann(0, 0.1),
    "rank: at least 1, got 0": lambda: bilevel.nystrom(0, 0.1),
    "damping: a positive number, got 0.0": lambda: bilevel.nystrom(3, 0.0),
    "outputs: a function .*, got None": lambda: bilevel.gram(None),
    "damping: at least 0": lambda: bilevel.gram(never, damping=-1.0),
    "w0: an array of shape": lambda: hypergradient(
        train=(EYE, ONES), valid=(EYE, ONES), solver=bilevel.ridge(lambda a, x: x, jnp.sum)
    ),
    "features: a matrix with 2 rows, one per label, got shape": lambda: solve_ridge((EYE, W0)),
    r"features: a dense array, got a BCOO: call todense\(\)": lambda: solve_ridge((bcoo(), ONES)),
}
ROWS["outer_loop"] = {
    "steps": lambda: search(steps=0),
    "steps: an integer, got 2.0": lambda: search(steps=2.0),
    r"sample: a function that returns a pair \(train, valid\), got 3 things": lambda: search(
        batches=bilevel.jointly(lambda key, t, v: (t, v, v)), key=KEY
    ),
    r"lower: .* floating scalar, got a tuple": lambda: search(problem=Problem(with_aux, OUTER)),
    "outer: " + NO_RETURN: lambda: search(problem=Problem(LOWER, without_return)),
    uncalled("solver", "implicit"): lambda: search(solver=implicit),
    r"optimizer: an optax optimizer, got 0.1; optax.sgd\(step_size\) makes one": lambda: search(
        optimizer=0.1
    ),
    NOT_A_KEY: (
        lambda: search(batches=lambda key, data: data, key=0),
        lambda: minibatches(2)(0, jnp.ones(4)),
    ),
    r"batches: a function \(key, data\) -> batch, got 32": lambda: search(batches=32, key=KEY),
    A_MODULE: (lambda: search(w0=MODULE), lambda: descent(w0=MODULE)),
    r"w0\[0\]: floating arrays, got int.*; convert it": lambda: descent(w0=[jnp.ones(2, int)]),
    uncalled("solver", "unrolled"): lambda: descent(solver=unrolled),
    # An index beyond the shorter array would be its last row.
    "data: arrays of as many rows each": lambda: minibatches(2)(KEY, (np.arange(10), np.arange(7))),
    "chunk: at least 1": lambda: search(chunk=0),
    "resume: a checkpoint directory": lambda: search(resume=True),
    "key: a PRNG key": lambda: search(batches=lambda key, data: data),
    "alpha: at least one array": lambda: search(alpha=()),
    "alpha: floating arrays, got": lambda: search(alpha=jnp.array([1, 0])),
    "w0: finite numbers": lambda: search(w0=W0 * jnp.nan),
    "train: data, got an empty": lambda: search(rows=jnp.zeros((0, 4))),
    "history: names among .*alpha": lambda: search(history=["loss"]),
    "history: a sequence of names, got th": lambda: search(history="value"),
    "progress, checkpoint, callback and a stream": (
        lambda: jax.jit(lambda w: search(w0=w, checkpoint="folder").alpha)(W0),
        lambda: traced_search(callback=print),
    ),
    "train, valid: expected": lambda: search(rows=ALPHA, batches=bilevel.stream([])),
    r"source: an iterable of pairs .* got 3": lambda: bilevel.stream(3),
    r"exponentiate\(\) with an opti": lambda: search(bilevel.exponentiate(), UNIFORM),
    "onto: expected": lambda: bilevel.project("ball"),
    "alpha: points of the simplex.*smallest entry of -0.5": lambda: bilevel.exponentiate().init(
        jnp.array([1.5, -0.5])
    ),
    "alpha: .*got a scalar": lambda: bilevel.exponentiate().init(jnp.ones(())),
    "alpha: points of": lambda: bilevel.project().init(UNIFORM * jnp.nan),
    r"box \[0, 1\]": lambda: bilevel.project("box").init(jnp.array([1.1])),
    "params: alpha": lambda: bilevel.exponentiate().update(UNIFORM, optax.EmptyState()),
    r"sums off by .* has to be the last of its chain\.": lambda: two_updates(
        optax.chain(SGD, bilevel.exponentiate(), optax.clip(0.1)),
        jnp.array([0.2, 0.3, 0.5]),
        jnp.array([30.0, 10.0, 20.0]),
    ),
    "checkpoint: a place to write in, got": lambda: search(checkpoint=__file__),
    "key: a PRNG key to sample batches with": lambda: search(solver=DRAWING),
    "got optax.lookahead": lambda: search(LOOKAHEAD),
    "alpha: to enter the lower loss, the outer loss": lambda: search(problem=PLAIN),
    "every: a callback to call so often, got none": lambda: search(every=1),
    "train: arrays, got a csr_array; .*BCSR.from_scipy_sparse": lambda: search(
        rows=scipy.sparse.eye_array(2).tocsr()
    ),
    "expected dense arrays or BCSR matrices": lambda: minibatches(2)(KEY, bcoo()),
    r"updates: the shape \(1, 1, 2\) of alpha, got": (
        lambda: mismatched_update(bilevel.project(lambda alpha: alpha)),
        lambda: mismatched_update(bilevel.softmax(SGD)),
    ),
}
ROWS["runs"] = {
    "step: an integer": lambda: checkpoint.save("folder", 2.5, W0),
    "step: at least 0": lambda: checkpoint.save("folder", -1, W0),
    LABEL: (
        lambda: checkpoint.save("folder", 1, W0, {"seed": 1}),
        lambda: checkpoint.save("folder", 1, W0, None),
    ),
}
ROWS["stochastic"] = {
    "alpha: to enter the lower loss, the outer loss or the solver, got one": lambda: single_loop(
        problem=Problem(OUTER, OUTER)
    ),
    "lower: a loss that returns a floating scalar, got 'loss'": lambda: single_loop(
        problem=Problem(lambda *_: "loss", OUTER)
    ),
    "step_size: a positive": lambda: saba(-1.0),
    "average: expected": lambda: bilevel.ma_soba(0.1, 1.5),
    "probability: expected": lambda: bilevel.spaba(0.1, probability=2.0),
    "penalty: a positive": lambda: bilevel.f2sa(0.1, -1.0),
    "penalty: numbers": lambda: bilevel.f2sa(0.1, optax.constant_schedule(3.0)),
    "inner: at least 1": lambda: bilevel.amigo(0.1, inner=0),
    "growth: expected": lambda: bilevel.meha(0.1, growth=0.5),
    "batch_size: at least 1": lambda: partition(0),
    "batches: bilevel.partition": lambda: search(solver=saba(0.1), batches=minibatches(3), key=KEY),
    "batches: a sampler": lambda: search(batches=partition(2), key=KEY),
    "key: a PRNG key": lambda: single_loop(batches=partition(2)),
    "diagnostics: False": lambda: single_loop(bilevel.f2sa(0.1), diagnostics=True),
    "train: arrays of as many rows each": lambda: single_loop(
        rows=(ROWS_OF_TWO, ALPHA), batches=partition(2), key=KEY
    ),
    "solver: a LowerSolver.*bilevel.search runs": lambda: descent(soba(0.1)),
    "problem: one without variables": lambda: single_loop(problem=COUNTING, rows=None),
    r"optimizer: bilevel.paced with bilevel.saba": lambda: search(bilevel.paced()),
    "optimizer: an optax optimizer": lambda: bilevel.paced(0.1),
}
ROWS["linear_and_baselines"] = {
    NOT_A_KEY: (
        lambda: baseline("random_search", key=0),
        lambda: sharing(SELECTION, key=ALPHA),
        lambda: baseline("exponentiated_gradient", SELECTION, key=0),
    ),
    "minimum: an integer, got 1.5": lambda: baseline("successive_halving", minimum=1.5),
    "configs: at least": lambda: baseline("random_search", configs=[]),
    "budget: at least 1": lambda: baseline("random_search", budget=0),
    "problem: a function": lambda: baseline("hyperband", None),
    "evaluations: 1 to 2, got 3": lambda: baseline("random_search", evaluations=3),
    "eta: a finite number over 1, got 1": lambda: baseline("successive_halving", eta=1),
    "minimum: 1 to 9, got 10": lambda: baseline("hyperband", minimum=10),
    "growth: a finite number of at least 1, got 0.5": lambda: baseline(
        "fast_weight_sharing", SELECTION, growth=0.5
    ),
    "rate: a positive number, got 0.0": lambda: baseline(
        "exponentiated_gradient", SELECTION, rate=0.0
    ),
    "problem: a Selection with `share`, got": lambda: sharing(baselines.Selection(never)),
    r"share: errors and counts of shape \(2,\)": lambda: sharing(shared(np.zeros(3), np.ones(3))),
    "against: one of calls, seconds, got 'time'": lambda: traces(
        {"one": baselines.random_search(KEY, [1], lambda *_: 0.5, 1)}, "time"
    ),
    "methods: a solve .* got none for one": lambda: traces({"one": sharing(SELECTION, [1], 1)}),
    r"y: 3 rows, got shape \(4,\)": lambda: ridge_weights(EYE, jnp.ones(4), 1.0),
    r"features: a matrix .* shape \(3,\)": lambda: ridge_weights(ONES, ONES, 1.0),
    "features: finite numbers": lambda: ridge_weights(EYE * np.nan, ONES, 1.0),
    "y: finite numbers, got NaN or inf": lambda: ridge_weights(EYE, ONES * np.inf, 1.0),
    "penalty: a finite .* >= 0, got -1.0": lambda: ridge_weights(EYE, ONES, -1.0),
    "method: .* dual, cg .*'qr'": lambda: ridge_weights(EYE, ONES, 1.0, method="qr"),
    "method: one of auto, cg for Sparse features, got 'dual'": lambda: ridge_weights(
        bcsr(), ONES, 1.0, method="dual"
    ),
    "features: .*known entries, got a traced one": lambda: jax.jit(
        lambda x: ridge_weights(x, ONES, 0.1)
    )(bcoo()),
}
ROWS["spaces"] = {
    "maps: a sequence of": lambda: features.feature_space(None),
    "alpha: real numbers": lambda: spaces.on_simplices("ab").discretize(jnp.array([1j, 0])),
    NOT_A_KEY: (
        lambda: features.sample_fourier(0, 2),
        lambda: features.sample_text(0, 2),
        lambda: features.fourier_features(0, jnp.ones((2, 2))),
        lambda: bilevel.rank_agreement(jax.random.split(KEY), jnp.arange(4), jnp.arange(4)),
        lambda: spaces.on_simplices("ab").draw(0),
    ),
    "activations: .* names among .*'rleu'": lambda: spaces.activation_space(["rleu"]),
    "activations: at least one": lambda: spaces.activation_space([]),
    "outer: one of": lambda: of_relu(outer="l1"),
    "width: a multiple of 16 for 10 classes, got 24": lambda: of_relu(width=24, classes=10),
    "output_scale: a positive number, got inf": lambda: of_relu(output_scale=math.inf),
    "x: inputs": lambda: spaces.unit_inputs(jnp.ones((0, 3))),
    "names: at least one, each once": lambda: spaces.on_simplices("aa"),
    r"alpha: \(2,\) finite weights, got \(3,\)": lambda: spaces.on_simplices("ab").discretize(ONES),
    "architecture: 2 of a, b": lambda: spaces.on_simplices("ab", (2,)).one_hot(("a",)),
    "kernel: a func": lambda: spaces.kernel_function_space(jnp.eye(2), 0.0),
    "kernels: functions by": lambda: spaces.kernel_mixture_space([jnp.dot]),
    "network: names": lambda: spaces.network_space(ntk.networks.dense()),
    "activations: .* each once, got": lambda: spaces.skip_space(["relu", "relu"]),
    "depth: at least 3, got 2": lambda: spaces.skip_space(depth=2),
    "parametrization: one": lambda: spaces.skip_space(parametrization="mup"),
    'parametrization: expected "ntk" at infinite width': lambda: spaces.skip_space(
        width=math.inf, parametrization="he"
    ),
    "outer: expected": lambda: spaces.skip_space(outer="hinge"),
    r"x: rows \[n, 2\], got": lambda: SKIP_SPACE.apply(
        SKIP_SPACE.init(KEY, (np.ones((1, 2)), None)), SKIP_SPACE.start(), W0
    ),
    r"skips of shapes \(\(2, 5\), \(1,\)\), got": lambda: SKIP_SPACE.discretize(
        SKIP_SPACE.start() | {"skips": jnp.ones(3)}
    ),
    "operations: names among none, max": lambda: darts.darts_space(["conv"]),
    "operations: .* one other than 'none'": lambda: darts.darts_space(["none"]),
    "classes: at least 2, got 1": lambda: darts.darts_space(classes=1),
    r"x: images \[n, h, w, c\] of at least 4 x 4 pixels, got": lambda: darts.darts_space().init(
        KEY, (jnp.ones((1, 3, 32, 3)), None)
    ),
    "auxiliary: at least 8 x 8 pixels": lambda: darts.darts_network(PARSED).init(KEY, (28, 28, 1)),
    "normal: operations among none, skip_connect, on two edges": lambda: darts.darts_space(
        ["none", "skip_connect"]
    ).one_hot(darts.parse_genotype(GENOTYPE.replace("skip_connect", "sep_conv_3x3"))),
    r"normal.*: \(14, 8\) finite weights, got \(8,\)": lambda: darts.darts_space().discretize(
        dict.fromkeys(("normal", "reduce"), np.ones(8))
    ),
    "architecture: 6 of none, skip_connect, got": lambda: nasbench201.nasbench201_space(
        ["none", "skip_connect"]
    ).one_hot(CELL),
    "classes: at least 2, got": lambda: nasbench201.all_networks(classes=1),
    "genotype: indices from 0 to 4, got 5 to 5": lambda: nasbench201.all_networks().apply(
        None, np.full(6, 5), jnp.ones((2, 4, 4, 1))
    ),
    "genotype: a Genotype, got": lambda: nasbench201.encode(["none"]),
    "cells: at least 1, got 0": lambda: nasbench201.parameter_count(CELL, cells=0),
    "scores: names among .*, got 'nas'": lambda: score(["nas"]),
    "scores: distinct names": lambda: score([]),
    "at_once: at least 1, got 0": lambda: score(at_once=0),
    "batch: at least 2 samples": lambda: score(rows=1),
    "genotypes: entries 0 to 4, got 5 to 5": lambda: score(cells=np.full((1, 6), 5)),
    "functions: names .* that ntk.scores does not have, got 'snip'": lambda: score(
        ["snip"], functions={"snip": lambda *_: 0.0}
    ),
    "accuracy: one number for": lambda: judging.correlations([1, 2], [1.0]),
    r"score: a vector, got shape \[0\]": lambda: judging.correlations([], []),
    "pool: 1 to 2, got 3": lambda: judging.best_of_k([1, 2], [1, 2], [1, 2], 2, pool=3),
    "k: 1 to 2, got 0": lambda: judging.best_of_k_random([1, 2], [1, 2], 0),
    "scores: at least one, got none": judging.sum_of_log_ranks,
    "maps: at least one": lambda: features.feature_space([]),
    "names: 1, .* got 2": lambda: features.feature_space([jnp.sin], names=["a", "b"]),
    r"maps: matrices of one shape .* got shapes \[\(2,\)\]": lambda: features.feature_space(
        [jnp.sin]
    ).blocks(jnp.ones(2)),
    "preprocess: one of none": lambda: features.fourier_config("scale"),
    "gamma: a positive number": lambda: features.fourier_config(gamma=0),
    "gammas: an interval": lambda: features.sample_fourier(KEY, 1, gammas=(1, 0.1)),
    "x_train: a matrix, got": lambda: features.fourier_features(KEY, W0),
    "dimension: at least 1": lambda: fourier().apply(None, jnp.ones((2, 3)), 0),
    "x: rows of length 3, got shape": lambda: fourier().apply(features.fourier_config(), F, 5),
    "order: one of 1, 2, 3, got 4": lambda: features.text_config(order=4),
    "fields: some of .* got 'stem'": lambda: features.text_config(stem=True),
    "valid: rows with a label each, got 0 rows": lambda: features.fourier_selection(
        KEY, PART, (PART[0][:0], PART[1][:0]), PART, dimension=8
    ),
    "penalty: a finite number >= 0, got -1": lambda: features.fourier_selection(
        KEY, PART, PART, PART, dimension=8, penalty=-1
    ),
    r"test: labels 0 and 1, as in training, got \[-1, 1\]": lambda: features.text_selection(
        TEXTS, TEXTS, (TEXTS[0], [-1, 1])
    ),
    "cost: a positive": lambda: features.text_selection(*[TEXTS] * 3, cost=0),
    r"labels: one a row, shape \[n\], got shape": lambda: sign_labels(ONES[:, None], 3),
    r"labels: one a row, shape \(3,\), got shape": lambda: wrong_rows(
        targets.predict_labels, EYE, LABELS[:, None]
    ),
    r"f: outputs \[n\], or \[n, classes\]": lambda: targets.predict_labels(jnp.ones((3, 1))),
    "architecture: expected": lambda: spaces.network_space(nets.dense("v")).one_hot({"width": 1.0}),
    "y: one for each output, shape": (
        lambda: kernel_loss("lower", ONES[:, None]),
        lambda: kernel_loss("outer", ONES[:1]),
    ),
    "y: 3 rows as in training, got shape": lambda: kernel_loss("solver", ONES[:1]),
    "batch: the training inputs x": (
        lambda: kernel_loss("lower", ONES, 2 * EYE, x=EYE),
        lambda: jax.jit(lambda x: kernel_loss("lower", jnp.ones(4), x, x=EYE))(jnp.ones((4, 3))),
    ),
    r"inputs: space.inputs\(rows, x\)": (lambda: kernel_outputs(), lambda: kernel_outputs(jax.jit)),
    "space: networks that see every row by itself": lambda: linearized("nor_conv_1x1"),
    "x: rows that differ from their mean": (
        lambda: spaces.unit_inputs(EYE, jnp.full((1, 3), 1 / 3).at[0].set(EYE.mean(0))),
        # The sum of seven tenths divided by 7 is not 0.1.
        lambda: spaces.unit_inputs(jnp.full((7, 3), 0.1, jnp.float32)),
    ),
    "alpha: points of the simplex": lambda: condition_six(
        outputs=np.ones((3, 10)), alpha=jnp.full(10, 0.11, jnp.bfloat16)
    ),
    "alpha: a loss whose second derivatives are fin": (
        lambda: curvature_of_roots(3),
        lambda: curvature_of_roots(40),
    ),
}
ROWS["nets_and_data"] = {
    NOT_A_KEY: (
        lambda: data.stratified_split(0, np.zeros(4, int), (2, 1)),
        lambda: training.train(0, LOWER, ALPHA, W0, jnp.ones(4), optimizer=0.1),
        lambda: images.crop_and_flip(0, jnp.ones((2, 4, 4, 1))),
        lambda: images.cutout(0, jnp.ones((2, 4, 4, 1))),
    ),
    r"sizes\[1\]: at least 1, got -1": lambda: data.stratified_split(KEY, [0, 1, 0], (2, -1)),
    "3 samples.* got 4": lambda: data.stratified_split(KEY, [0, 1, 0], (2, 2)),
    r"vector.* \(2, 1\)": lambda: data.stratified_split(KEY, [[0], [1]], (1,)),
    "train, valid: at most 1796 rows together and one": lambda: data.draw_splits(
        "digits", [KEY], train=1000, valid=797, test=20
    ),
    "keys: a sequence of PRNG keys, got one": lambda: data.draw_splits(
        "digits", jax.random.key(0), train=100, valid=50, test=20
    ),
    "'minst'": lambda: data.load("minst"),
    "kernel: expected": lambda: convolve_images(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 0))),
    r"x: \[n, h, w, 2\] for a kernel": lambda: convolve_images(IMAGES, jnp.ones((3, 3, 2, 4))),
    "x: images of at least 5 pixels a side, got": lambda: convolve_images(
        IMAGES, jnp.ones((5, 5, 1, 1)), padding=0
    ),
    r"x: images \[n, h, w, c\], got": lambda: max_pooling(jnp.ones((4, 4, 1)), 2),
    "size: an integer, got 2.5": lambda: max_pooling(IMAGES, 2.5),
    "padding: less than the window's 2 pixels, got 2": lambda: max_pooling(IMAGES, 2, padding=2),
    "x: channels that vary": (
        lambda: unit_images(jnp.ones((2, 4, 4, 1))),
        *(
            lambda array=array, pixels=pixels: unit_images(array(TENTHS), pixels=pixels)
            for array in (np.asarray, jnp.asarray)
            for pixels in (None, 3)
        ),
    ),
    r"others: images \(4, 4, 1\), got": lambda: unit_images(IMAGES, jnp.ones((2, 4, 5, 1))),
    "pixels: at least 3 for images of 8 x 12, whose": lambda: unit_images(
        jnp.ones((5, 8, 12, 1)), pixels=2
    ),
}
ROWS["strategies"] = {
    "order: 1 or 2, got 3": lambda: strategies.darts(SKIPS, order=3, **RATES),
    "radius: None with": lambda: strategies.darts(SKIPS, radius=0.1, **RATES),
    "steps: at least 1": lambda: strategies.unrolled(SKIPS, steps=0, **RATES),
    "space: a Space": lambda: strategies.weight_sharing(PROBLEM, weight_optimizer=1, batch_size=2),
    "batch_size: at least 1, got 0": lambda: strategies.joint(SKIPS, **RATES | {"batch_size": 0}),
    "sets: simplex, box or free, got": lambda: on_sets({"a": "circle"}, simplex=SGD, other=SGD),
    "keep: at most the pool's 2, got 3": lambda: eigen_nas(KEY, SKIPS, FOUR, pool=2, keep=3),
    r"space: alpha \[edges, operations\]": lambda: strategies.te_nas(KEY, SKIPS, SKIPS, None, FOUR),
    "space: all of alpha on simplices": lambda: strategies.nasi(KEY, SKIPS, (FOUR, LABELS)),
}
ROWS["theory"] = {
    NOT_A_KEY: lambda: spectral.spectral_sample(0, 3, 2, 1),
    "C: expected": lambda: bounds.khodak_corollary_a1(1.0, 10, C="1"),
    "labels: shape": lambda: spectral_alpha(X, jnp.ones((3, 0))),
    "alpha: numbers, got": lambda: bilevel.argmax(jnp.array([0.5, jnp.nan])),
    "k: 1 to 2, got 3": lambda: bilevel.top_k(ALPHA, 3),
    "outputs: shape": lambda: condition_six(outputs=F[:1]),
    "alpha: points of the simplex": lambda: condition_six(alpha=ALPHA),
    "targets: shape": lambda: condition_six(targets=F),
    "confidence: a number in": lambda: condition_six(confidence=95),
    "evaluate: a scalar": lambda: bilevel.rank_by_shared_weights(jnp.diag, F[:, None]),
    "a, b: two vectors of one length": lambda: bilevel.rank_agreement(KEY, ALPHA, jnp.ones(3)),
    r"features: shape \[n, h, p\] or kernels .* got \(3, 2\)": lambda: spectral_alpha(F, W0),
    "train, valid: .* the same h maps": lambda: spectral_estimator((X, ONES), (X[:, 1:], ONES)),
    "alpha: a direction, got zero": lambda: spectral.simplex_start(W0),
    r"uniform: .* \[0, 1\], got 1.5": lambda: spectral.simplex_start(ALPHA, uniform=1.5),
    "p_over_n: a positive number, got 0.0": lambda: spectral.spectral_limits(0.0, 0.1),
    r"h_over_n: a shape that broadcasts with \(2,\)": lambda: spectral.spectral_limits(ALPHA, ONES),
    "alphas: .*leading axis.*length at least 1": lambda: lipschitz(alphas=jnp.zeros((0, 2))),
    "alphas: finite": lambda: lipschitz(alphas=jnp.array([jnp.nan])),
    "deltas: a positive number, got 0": lambda: lipschitz(deltas=[0.1, 0.0]),
    "directions: .*None": lambda: lipschitz(alphas=F),
    "directions: .*length 0": lambda: lipschitz(alphas=F, directions=np.zeros(2)),
    "batch_size: at least 1, got 0": lambda: lipschitz(batch_size=0),
    "n_valid: a positive number, got 0": lambda: convergence(0),
    r"tau: a number above log\(2\), got 0.5": lambda: convergence(9, tau=0.5),
    "radii: positive numbers": lambda: BALL(jnp.zeros(1)),
    "h: an integer, got 2.5": lambda: bounds.simplex_covering(2.5),
    r"s: .* in \[1, h = 3\], got 4": lambda: bounds.sparse_covering(3, 4, 1.0),
    r"points: shape \[m, h\]": lambda: bounds.finite_covering(W0),
    "radii: numbers of at most": lambda: bounds.effective_dimension([1.0], [4.0], C_bar=3.0),
    "y_norm: expected": lambda: bounds.feature_map_lipschitz(9, h=2, B=1.0, y_norm=0.0, lambda0=1),
    "h_bar: numbers of": lambda: bounds.oymak_theorem1(9, -1.0, h=1, C=1.0),
    r"complexity: a shape that broadcasts with \(2,\), risk's, got": lambda: (
        bounds.oymak_proposition1(9, 9, risk=F[0], complexity=X[0], h_eff=1, C=1.0)
    ),
    "R: .* at least 1": lambda: bounds.oymak_lemma1(9, h=1, B=1.0, lambda0=1.0, R=0.5),
    "cross: either it or smoothness": lambda: bounds.oymak_lemma2(1.0),
    r"K: square matrices \[..., n, n\], got shape": lambda: bounds.oymak_theorem2(
        F, ALPHA, 9, h=1, B=1.0, lambda0=1.0, C=1.0
    ),
    "t: a number that leaves a positive probability for n_T = 9 rows and h = 1": lambda: (
        bounds.oymak_theorem3(jnp.eye(9), jnp.ones(9), 9, h=1, B=1.0, t=1.0, C=1.0)
    ),
    "entropy: numbers of at least": lambda: bounds.khodak_theorem_a2(-1.0, 10),
    r"n_valid: a number, got shape \(2,\)": lambda: bounds.khodak_theorem_a2(1.0, 100 * ALPHA),
    r"delta: .* in \(0, 1/3\), got 0.5": lambda: bounds.khodak_theorem_a2(1.0, 10, delta=0.5),
    "lipschitz: .* got none": lambda: bounds.khodak_theorem_a2(1.0, 10, epsilon=0.1),
    "configurations: expected": lambda: bounds.khodak_corollary_a2(1.0, 10, 10, 0, C=1.0),
    "one per configuration, got a scalar": lambda: bounds.version_entropy(1.0),
    r"gap: .* 1e\+15 rows reach, got 0.1": lambda: bounds.sample_size(
        0.1, lambda n: bounds.khodak_theorem_a2(5.0, n, excess=0.2)
    ),
}
ROWS["ntk_kernels"] = {
    "x1: a nonempty array": lambda: network_kernel(x1=EYE[0]),
    "x1: an array of numbers": lambda: network_kernel(x1="X"),
    "x1: finite entries": lambda: network_kernel(x1=EYE * np.nan),
    "x1: real numbers, got complex": lambda: network_kernel(x1=EYE + 1j),
    "x2: 3 columns as in x1, got 2": lambda: network_kernel(x2=EYE[:, :2]),
    "x1: rows whose squared norms are within": lambda: network_kernel(x1=1e20 * jnp.float32(EYE)),
    "activations: a list of at least one": lambda: network_kernel(activations=ntk.relu),
    "activations: at least one in each layer": lambda: network_kernel(activations=[{}]),
    "fn: an elementwise function": (
        lambda: network_kernel(activations=["relu"]),
        lambda: ntk.activation("relu"),
        lambda: ntk.activation(jnp.sum),
    ),
    "skips: 1 numbers": lambda: network_kernel(activations=[ntk.relu] * 2, skips=[1.0, 2.0]),
    "skips: .* got arrays": lambda: network_kernel(activations=[ntk.relu] * 2, skips=[jnp.ones(1)]),
    "variances: 2 numbers": lambda: network_kernel(variances=[1.0]),
    "variances: nonnegative numbers": lambda: network_kernel(variances=[1.0, -1.0]),
    "variances: real numbers, got complex": lambda: network_kernel(variances=[1.0, 2j]),
    "variances: finite numbers": lambda: network_kernel(variances=[1.0, np.nan]),
    "activations: at least one, got none": lambda: ntk.mixture_blocks(EYE, []),
    r"blocks: shape \[3, 3": lambda: ntk.mixture_kernel(ONES, jnp.ones((2, 2, 4, 4))),
    "x: real numbers": lambda: ntk.lemma1_kernel_as_printed(EYE * 1j, activations=[ntk.relu]),
    "vx: finite variances": lambda: ntk.dual(ntk.relu, ntk.relu, -1.0, 1.0, 0.0),
    "c: at most": lambda: ntk.dual(ntk.relu, ntk.relu, 1.0, 1.0, 1.1),
    "c: real numbers, got complex": lambda: ntk.dual(ntk.relu, ntk.relu, 1.0, 1.0, 0.5j),
    "fn: an elementwise function, got values that": lambda: ntk.activation(jnp.sort),
    "fn: an elementwise function with its own derivative": lambda: ntk.activation(
        lambda z: z + jax.lax.stop_gradient(jnp.tanh(z) - z)
    ),
    "fn: at most 16 kinks": lambda: ntk.activation(jnp.round),
    "fn: finite values and slopes": lambda: ntk.activation(jnp.log),
    "kinks: .* without -1": lambda: ntk.activation(jax.nn.hard_tanh, kinks=[1.0]),
    "strip: a positive number": lambda: ntk.activation(jnp.tanh, strip=0.0),
    "slope: a finite number": lambda: ntk.leaky_relu(np.inf),
    "z: a function with values": lambda: ntk.relu.derivative.derivative(0.0),
    "derivative: degree": lambda: ntk.relu.derivative.derivative.derivative,
    "method: one of auto, layerwise, jacobian, neural_t": lambda: empirical(method="fast"),
    "outputs: one of sum, trace, full, got 'mean'": lambda: empirical(outputs="mean"),
    "batch_size: at least 1, got 0": lambda: empirical(batch_size=0),
    "x1: samples": (lambda: empirical(x1=1.0), lambda: empirical(x1=EYE[:0])),
    "x1: expected": lambda: empirical(x1={}),
    "x1: as many samples in every array": lambda: empirical(x1={"a": EYE, "b": EYE[:2]}),
    "x1: finite numbers": lambda: empirical(x1=EYE * np.nan),
    r"x2: samples of the shape \(3,\), got \(1,\)": lambda: empirical(x2=EYE[:, :1]),
    "params: finite numbers": lambda: empirical(params=ONES * np.inf),
    "params: at least one leaf": (
        lambda: empirical(params={}),
        lambda: empirical(params=jnp.arange(3)),
    ),
    "params: the variables": lambda: empirical(apply=nn.Dense(1).apply, params={"w": EYE}),
    r"apply: outputs \[n, o\]": lambda: empirical(apply=lambda w, x: x.sum() * w[0]),
    "apply: outputs of floating point": lambda: empirical(apply=lambda w, x: x.astype(int)),
    "method: an apply": lambda: empirical(apply=lambda w, x: jnp.sin(w) + x, method="layerwise"),
    "outputs: one of": lambda: ntk.empirical_nngp(lambda w, x: x @ w, EYE, EYE, outputs="sum"),
    "v: the shape": lambda: ntk.kernel_vector_product(lambda w, x: x @ w, EYE, EYE)(np.ones(4)),
    "order: at least 0, got -1": lambda: ntk.taylor_expand(jnp.multiply, 1.0, -1),
    "apply: a function": lambda: ntk.taylor_expand(3, 1.0, 1),
    "params: real numbers, got complex": lambda: ntk.taylor_expand(jnp.multiply, 1j, 1),
    "params: arrays, got the function": lambda: ntk.taylor_expand(jnp.multiply, print, 1),
    "params: PyTreeDef": lambda: ntk.taylor_expand(jnp.multiply, 1.0, 1)({}, 1.0),
    "params: leaves of the shapes": lambda: ntk.taylor_expand(jnp.multiply, 1.0, 1)(EYE, 1.0),
    "expected functions of": lambda: network_kernel(activations=[ntk.relu.derivative.derivative]),
    "^apply: expected BatchNorm with use_running_average": lambda: empirical(
        apply=BatchStatistics().apply, params=BatchStatistics().init(KEY, EYE)
    ),
}
ROWS["ntk_networks"] = {
    "x1: a nonempty array": lambda: layers(FLAT, shape=(2,)),
    "x2: inputs": lambda: layers(DENSE, x2=jnp.ones((2, 3))),
    "x1: finite entries": lambda: DENSE.kernel(EYE * np.nan),
    "dense: flatten or pooling before": lambda: layers(DENSE, shape=(2, 4, 4, 2)),
    "conv: images or sequences": lambda: layers(nets.conv(3)),
    "network: to end in dense": lambda: layers(nets.conv(3), shape=(2, 4, 4, 1)),
    "network: .* no layer with weights at the end": lambda: layers(DENSE, RELU),
    "act: a layer with weights": (
        lambda: layers(RELU, DENSE),
        lambda: layers(DENSE, RELU, RELU, DENSE),
    ),
    "conv: a window of at mo": lambda: layers(nets.conv(5, padding="VALID"), FLAT, shape=(2, 4, 1)),
    "average_pool: a window of at": lambda: layers(nets.average_pool(5), FLAT, shape=(2, 4, 1)),
    "average_pool: images": lambda: layers(nets.average_pool(5), FLAT),
    "conv: one number for each of 1 axes": lambda: layers(nets.conv((3, 3)), shape=(2, 4, 1)),
    "flatten: dense after it, got act": lambda: layers(nets.flatten(), RELU, shape=(2, 4, 1)),
    "add: a layer with weights": (
        lambda: layers(nets.residual(nets.conv(1)), FLAT, shape=(2, 4, 1)),
        lambda: layers(DENSE, nets.residual(RELU), DENSE),
    ),
    "add: branches of one shape": lambda: layers(
        nets.conv(1), nets.residual(nets.conv(2, padding="VALID")), FLAT, shape=(2, 4, 1)
    ),
    "alpha: an entry 'v'": lambda: layers(nets.dense("v")),
    "alpha: v: expected a number": lambda: layers(nets.dense("v"), alpha={"v": jnp.ones(2)}),
    "alpha: v: expected a nonnegative number": lambda: layers(nets.dense("v"), alpha={"v": -1.0}),
    "alpha: v: expected finite numbers": lambda: layers(nets.dense("v"), alpha={"v": np.inf}),
    "weights: finite nu": lambda: layers(DENSE, nets.act({ntk.relu: np.nan}), DENSE),
    "one number of choices for the name 'a'": lambda: (
        nets.serial(nets.act({ntk.relu: "a"}), nets.act([ntk.relu, ntk.tanh], "a")).names
    ),
    "padding: one of SAME, VALID, CIRCULAR, got 'REFL": lambda: nets.conv(3, padding="REFLECT"),
    "window: at least 1, got 0": lambda: nets.conv(0),
    "weight_variance: a nonnegative number": lambda: nets.dense(-1.0),
    "bias_variance: a nonnegative number": lambda: nets.dense(1.0, np.nan),
    "activations: at least one": lambda: nets.act([]),
    "weights: 1 weights, got 2": lambda: nets.act([ntk.relu], [1.0, 2.0]),
    "branches: at least one network": lambda: nets.add([]),
    "networks: a network such as dense()": lambda: nets.serial(ntk.relu),
    "width: at least 1": lambda: DENSE.module(width=0),
    "x: inputs": lambda: DENSE.module(width=8).init(KEY, ONES),
    "network: dense or conv to make": lambda: nets.add([DENSE]).module(width=3).init(KEY, EYE),
}
ROWS["ntk_spectrum_and_bounds"] = {
    "K: a square matrix, got shape": lambda: ntk.min_eigenvalue(jnp.zeros((0, 0))),
    r"K: .* square matrix, .* \[n, n, outputs": lambda: ntk.eigenvalues(np.zeros((2, 3, 2, 2))),
    "K: finite entries": (lambda: ntk.min_eigenvalue(EYE * np.nan), lambda: certified([[np.inf]])),
    "size: None with a matrix": lambda: ntk.min_eigenvalue(EYE, size=3),
    "size: the positive size": lambda: ntk.min_eigenvalue(lambda v: v),
    "K: one kernel function, got": lambda: ntk.min_eigenvalue([jnp.dot, jnp.dot], x=EYE),
    "x: none with a matrix K": lambda: ntk.eigenvalues(EYE, x=EYE),
    "kernel: a function": lambda: ntk.kernel_matrix(EYE, EYE),
    r"kernel: a matrix \(3, 3\), got shape \(\)": lambda: ntk.kernel_matrix(jnp.vdot, EYE),
    "get: one of ntk, nngp": lambda: ntk.kernel_matrix(jnp.dot, EYE, get="both"),
    "x1: inputs": lambda: ntk.kernel_matrix(jnp.dot, EYE[:0]),
    "K: a symmetric": lambda: certified([[1, 2], [0, 1]]),
    "entry_error: nonneg": lambda: certified(EYE, -1),
    "entry_error: a number or shape": lambda: certified(EYE, [1, 2]),
    "K: known numbers, got": lambda: jax.jit(certified)(EYE),
    "x: the inputs of the kernel function": lambda: certified(jnp.dot),
    "K: a kernel function with finite values": lambda: certified(lambda a, b: a @ b.T / 0.0, x=EYE),
    r"blocks: shape \[h, h, n, n\]": lambda: ntk.certify_simplex(EYE),
    "blocks: numbers, got 'blocks'": lambda: ntk.certify_simplex("blocks"),
    "kernels: at least one function": lambda: ntk.certify_simplex([], x=EYE),
    "rtol: expected": lambda: ntk.certify_simplex(ONE_BLOCK, rtol=0),
    "max_cells: an integer": lambda: ntk.certify_simplex(ONE_BLOCK, max_cells=2.5),
    "t: a positive variance, got 0.0.": lambda: ntk.bounds.table1(ntk.relu, 0.0),
    "K: a square matrix": lambda: ntk.bounds.diagonal_upper_bound(EYE[:2]),
    "d: a positive number, got 0.": lambda: ntk.bounds.eigen_nas_as_printed(EYE, 0),
    "x: rows of equal norm": lambda: hermite(x=EYE * [2, 1, 1]),
    "x: rows of equal norm, not 0": lambda: hermite(x=0 * EYE),
    "terms: an even number": lambda: hermite(terms=3),
    "C: a positive number, got -1.0.": lambda: ntk.bounds.zhu_theorem1_as_printed(
        5, 2, activations=[ntk.relu], C=-1.0
    ),
    "n: a positive": lambda: ntk.bounds.zhu_theorem2_as_printed(0, 2, activations=[ntk.relu], C=1),
    r"y: shape \[3\] as K has rows, got \(2,\).": lambda: theorem3(y=jnp.ones(2)),
    r"delta: a number in \(0, 1/e\], got 0.5.": lambda: theorem3(delta=0.5),
    "activation: a Lipschitz function": lambda: theorem3(activations=[ntk.activation(jnp.square)]),
}
ROWS["ntk_regression_and_large"] = {
    "kernel: a function": lambda: ntk.KernelOperator(1, EYE),
    "kernel: a matrix": lambda: ntk.KernelOperator(lambda a, b: a, EYE),
    "x: inputs": lambda: ntk.KernelOperator(jnp.dot, EYE[:0]),
    "x2: finite": lambda: ntk.KernelOperator(jnp.dot, EYE, EYE * np.nan),
    "get: one of ntk, nngp": lambda: ntk.KernelOperator(jnp.dot, EYE, get="both"),
    "tile: at least 1": lambda: ntk.KernelOperator(jnp.dot, EYE, tile=0),
    r"v: shape \[3\]": lambda: operator() @ jnp.ones(4),
    "v: real numbers": lambda: operator() @ (1j * ONES),
    "indices: integers": lambda: operator().columns(jnp.ones(2)),
    "indices: integers from 0 to 2, got 3": lambda: operator().columns(jnp.array([0, 3])),
    "batch_size: at least 1": lambda: ntk.EmpiricalOperator(jnp.dot, EYE, EYE, batch_size=0),
    "params: finite": lambda: ntk.EmpiricalOperator(jnp.dot, EYE * np.nan, EYE),
    "K: a KernelOperator": lambda: regression(EYE),
    "K: as many rows": lambda: regression(operator().at(EYE[:2])),
    "K: a positive definite": (
        lambda: regression(ntk.KernelOperator(lambda a, b: -2 * a @ b.T, EYE)),
        lambda: posterior(K=jnp.ones((3, 3))),
    ),
    r"y: shape \[3\]": (lambda: regression(y=jnp.ones(2)), lambda: posterior(y=jnp.ones(2))),
    "y: finite targets": lambda: regression(y=ONES * np.nan),
    "penalty: a nonnegative number": lambda: regression(penalty=-1.0),
    "tol: a positive number": lambda: regression(tol=0.0),
    "steps: at least 1": lambda: regression(steps=0),
    "preconditioner: the result of partial_cholesky": lambda: regression(preconditioner=1),
    "preconditioner: 3 rows, as K has, got 2": lambda: regression(
        preconditioner=PartialCholesky(EYE[:2], ONES, ONES)
    ),
    "start: a SolverState": lambda: regression(start=1),
    "callback: a function": lambda: regression(callback=1),
    r"prior: shape \[m\]": lambda: FIT.error_bound(EYE),
    "smallest: a nonnegative number": lambda: FIT.error_bound(jnp.ones(2), smallest=-1.0),
    NOT_A_KEY: lambda: ntk.partial_cholesky(operator(), 1, key=0),
    "rank: at least 1": lambda: ntk.partial_cholesky(operator(), 0, key=KEY),
    "rank: at most the 3 rows": lambda: ntk.partial_cholesky(operator(), 4, key=KEY),
    "fit: an IterativeRegression": lambda: leave_one_out(operator(), 1),
    "fit: 3 weights": lambda: leave_one_out(operator().at(EYE), FIT._replace(weights=W0)),
    "steps: steps times block at most": lambda: interval(operator()),
    "failure: expected": lambda: interval(operator(), steps=2, block=1, failure=1.5),
    "K: a square matrix": lambda: ntk.kernel_regression(EYE[:2], ONES),
    "y: real numbers, got complex": lambda: ntk.kernel_regression(EYE, ONES * 1j),
    "K: a symmetric": lambda: ntk.gradient_flow(EYE + EYE[0], ONES, 1.0),
    "t: real numbers, got complex": lambda: ntk.gradient_flow(EYE, ONES, 1j),
    r"y: shape \[3, 2\], as K has": lambda: ntk.kernel_regression(TWO, ONES),
    r"cross: shape \[m, 3\]": lambda: ntk.kernel_regression(EYE, ONES).predict(TWO),
    r"y: shape \[3\] or": lambda: ntk.kernel_regression(EYE, jnp.ones((3, 0))),
    "f0: a number": lambda: ntk.gradient_flow(EYE, ONES, 1.0, f0=EYE),
    r"cross: shape \[m, 3\], got": lambda: posterior(cross=EYE[:, :2]),
    r"cross: \|cross\[i, j\]\| <=": lambda: posterior(cross=2 * EYE),
    r"prior: shape \(3, 3\), got \(2, 2\)": lambda: posterior(prior=EYE[:2, :2]),
    "prior: a symmetric": lambda: posterior(prior=EYE + EYE[0]),
    "cross: an array, as K is matrices": lambda: ntk.posterior(EYE, ONES),
    "at: an array, as K is a kernel function": lambda: ntk.posterior(jnp.dot, ONES, x=EYE),
    "train: kernels with": lambda: ensemble(EYE),
    "train: kernels of one": lambda: ensemble(ntk.Kernels(EYE, TWO), jnp.ones((3, 2))),
    "cross: kernels of as many rows": lambda: ensemble(cross=ntk.Kernels(EYE[:2], EYE)),
    "cross.ntk: finite": lambda: ensemble(cross=ntk.Kernels(EYE, EYE * np.nan)),
    r"cross.nngp: \|cross.nngp\[i, j\]\| <=": lambda: ensemble(cross=ntk.Kernels(2 * EYE, EYE)),
    "penalty: a nonnegative": lambda: ensemble(penalty=-1),
    "t: nonnegative times": lambda: ensemble(t=-1),
    "x: none, as train is matrices": lambda: ensemble(x=EYE),
    "prior: none, as train": lambda: ntk.ensemble(jnp.dot, ONES, prior=EYE, x=EYE, at=EYE),
    "kernel: a function that returns the fields": lambda: ntk.ensemble(
        lambda a, b: a @ b.T, ONES, x=EYE, at=EYE
    ),
    r"K: a positive definite .* got .* -0\.25\.": lambda: ntk.kernel_regression(
        jnp.diag(jnp.array([1.0, -0.25])), ONES[:2]
    ),
}
ROWS["ntk_scores"] = {
    "batch: a pair": lambda: ntk_score("snip", batch=EYE),
    "batch: inputs": lambda: ntk_score("snip", batch=(EYE[:0], LABELS[:0])),
    "batch: 3 integer labels": lambda: ntk_score("snip", batch=(EYE, LABELS[:2])),
    "batch: labels from 0 to 2": lambda: ntk_score("snip", batch=(EYE, LABELS + 1)),
    "batch: finite": lambda: ntk_score("naswot", batch=(EYE * np.nan, LABELS)),
    "params: finite": lambda: ntk_score("l2_norm", EYE * np.nan),
    "apply: logits": lambda: ntk_score("nasi", apply=lambda w, x: x[:, 0]),
    "params: leaves named": lambda: ntk_score("snip", ONES, apply=jnp.multiply),
    "params: .* at least 50": lambda: ntk_score("knas_released", batch=(EYE[:2], LABELS[:2])),
    "batch: an even number": lambda: ntk_score("knas_released"),
    "parts: 2 or more, dividing the 3": lambda: ntk_score("zico", parts=2),
    "depend on a ReLU, got none": lambda: ntk_score("naswot", apply=lambda w, x: jnp.tanh(x @ w)),
    "apply: no ReLU inside `while`": lambda: ntk_score(
        "naswot", apply=lambda w, x: jax.lax.while_loop(lambda h: h.sum() > 9, jax.nn.relu, x @ w)
    ),
    "y: 3 labels": lambda: ntk.scores.of_kernel(jnp.dot, jnp.arange(2), x=EYE),
    "y: labels below 3, the outputs of K": lambda: ntk.scores.of_kernel(
        jnp.einsum("ij,ab->ijab", EYE, EYE), jnp.arange(3) + 1
    ),
    "K: a positive semidefinite matrix, got": lambda: ntk.scores.of_kernel(1 - 2 * EYE),
    "synflow sum is nonnegative and below 1e308, got inf": lambda: ntk_score(
        "synflow",
        jnp.full((1, 1), 1e30, jnp.float32),
        (jnp.ones((1, 1), jnp.float32), LABELS[:1]),
        deep_product,
    ),
    "^apply: expected .*samples on an axis, got": lambda: naswot(
        lambda w, x: jax.nn.relu((x @ w).reshape(-1, 2)).reshape(len(x), -1)
    ),
    "^apply: expected .*a function of any number of samples, got": lambda: naswot(
        lambda w, x: jax.nn.relu(x @ w).reshape(3, 4)
    ),
    "^apply: expected .*the same operations for any number of samples, got": lambda: naswot(uneven),
    "apply: logits that depend on a ReLU": tuple(
        lambda act=act: ntk_score("naswot", apply=lambda w, x: act(x @ w))
        for act in (jax.nn.leaky_relu, jnp.abs, lambda x: jnp.maximum(x, -1), guarded)
    ),
}
# A call, its exception and its message.
OTHER_ERRORS = [
    (lambda: baseline("random_search", jornal="x"), TypeError, "jornal"),
    (
        lambda: sharing(shared(W0, W0)),
        FloatingPointError,
        "share: a finite error .* 2 of them empty",
    ),
    (
        lambda: baseline("random_search", lambda *_: np.nan),
        *(FloatingPointError, "problem: a finite validation error, got none in 2 solves"),
    ),
    (lambda: spaces.linearized_space(W0, W0), TypeError, "space: a"),
    (
        lambda: jax.hessian(ntk.min_eigenvalue)(EYE),
        NotImplementedError,
        "K: first derivatives only",
    ),
]


def rows():
    for area, messages in ROWS.items():
        number = itertools.count()
        for message, calls in messages.items():
            for call in calls if isinstance(calls, tuple) else (calls,):
                yield pytest.param(call, ValueError, message, id=f"{area}-{next(number)}")
    yield from OTHER_ERRORS


@pytest.mark.parametrize(("call", "error", "message"), list(rows()))
def test_a_wrong_argument_raises_one_message_that_names_it(call, error, message):
    with pytest.raises(error, match=pattern(message)) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert not isinstance(raised.value, jax.errors.JAXTypeError)


@pytest.mark.parametrize("make", [lambda n: unrolled(0.1, n), newton, bilevel.lbfgs, cg])
def test_an_integer_of_numpy_is_a_count(make):
    make(np.int32(1))


@pytest.mark.long
def test_an_old_style_key_and_a_leaf_that_is_none_are_accepted():
    search(batches=lambda key, data: data, key=jax.random.PRNGKey(0))
    problem = Problem(
        lambda w, alpha, batch: LOWER(w["w"], alpha, batch),
        lambda w, alpha, batch: OUTER(w["w"], alpha, batch),
    )
    assert np.isfinite(hypergradient(problem, w0={"w": W0, "none": None}).value)
