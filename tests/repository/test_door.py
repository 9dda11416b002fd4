"""Wrong arguments raise one message that names the argument, before anything long is computed.

Each row is one mistake: the call, the exception's type, and a regular expression that its message
has to match. Rows stand in the order of the packages.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevel
from bilevel import baselines, data, implicit, spectral, unrolled
from bilevel.nets import images, training
from bilevel.spaces import features

PROBLEM = bilevel.Problem(
    lower=lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2),
    outer=lambda w, alpha, batch: jnp.sum(w**2),
)
LOWER, OUTER = PROBLEM.lower, PROBLEM.outer
W0, ALPHA, SGD, KEY = jnp.zeros(2), jnp.ones(2), optax.sgd(0.1), jax.random.key(0)
SCHEDULE = optax.cosine_decay_schedule(0.1, 10)
SELECTION = baselines.Selection(lambda *a: 0.0, lambda *a: None)
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


def descent(solver=None, w0=W0):
    init, _ = bilevel.descent(PROBLEM, implicit() if solver is None else solver, SGD)
    return init(ALPHA, w0)


def stateful_hypergradient():
    problem = bilevel.Problem(stateful, lambda w, a, b: OUTER(w.params, a, b), stateful=True)
    w0 = bilevel.Stateful(W0, jnp.zeros(2))
    return hypergradient(problem, w0=w0, solver=bilevel.restarted(implicit()))


# (call, exception, message)
HYPERGRADIENTS = [
    (lambda: hypergradient(alpha="one"), ValueError, "alpha"),
    (
        lambda: hypergradient(alpha={"a": ALPHA, "kind": "relu"}),
        ValueError,
        r"alpha\['kind'\]: expected floating arrays, got 'relu'",
    ),
    (
        lambda: hypergradient(alpha=jnp.ones(2, int)),
        ValueError,
        r"alpha: expected floating arrays, got int.*; convert it with jnp.asarray\(x, float\)",
    ),
    (lambda: hypergradient(w0={}), ValueError, "w0: expected at least one array, got {}"),
    (lambda: hypergradient(w0=MODULE), ValueError, A_MODULE),
    (
        lambda: hypergradient(solver=unrolled(SCHEDULE, 3), alpha={"x": ALPHA}),
        ValueError,
        r"optimizer: expected a function alpha -> optax optimizer, got a schedule; .* optax.sgd",
    ),
    (lambda: hypergradient(bilevel.Problem(with_aux, OUTER)), ValueError, "lower: " + AUX),
    (lambda: hypergradient(bilevel.Problem(LOWER, with_aux)), ValueError, "outer: " + AUX),
    (
        lambda: hypergradient(bilevel.Problem(LOWER, OUTER, has_aux=True)),
        ValueError,
        r"lower: expected a loss that returns \(loss, aux\), as has_aux=True says, got an array",
    ),
    (
        lambda: hypergradient(bilevel.Problem(without_return, OUTER)),
        ValueError,
        "lower: " + NO_RETURN,
    ),
    (
        lambda: hypergradient(solver=implicit),
        ValueError,
        r"solver: .* got the function implicit; call it: implicit\(...\)",
    ),
    (stateful_hypergradient, ValueError, r"solver: expected restarted\(unrolled"),
]
SOLVERS = [
    (lambda: unrolled(0.1, 2.5), ValueError, "steps: expected a whole number, got 2.5"),
    (lambda: bilevel.newton(True), ValueError, "steps: expected a whole number, got True"),
    (lambda: bilevel.lbfgs(None), ValueError, "steps: expected a whole number, got None"),
    (lambda: bilevel.cg("2"), ValueError, "steps: expected a whole number, got '2'"),
    (
        lambda: implicit(SGD),
        ValueError,
        r"forward: expected a LowerSolver, got .*; wrap it: unrolled\(optimizer, steps\)",
    ),
    (
        lambda: implicit(bilevel.cg()),
        ValueError,
        r"forward: expected a LowerSolver, .*; an inverse goes into implicit\(inverse=...\)",
    ),
    (
        lambda: implicit(solve),
        ValueError,
        r"forward: expected a LowerSolver, got the function solve; hand it to solved\(...\)",
    ),
    (
        lambda: implicit(bilevel.newton),
        ValueError,
        r"forward: .* got the function newton; call it: newton\(...\)",
    ),
    (
        lambda: implicit(bilevel.newton(), bilevel.cg),
        ValueError,
        r"inverse: expected an inverse, got the function cg; call it: cg\(...\)",
    ),
    (
        lambda: implicit(bilevel.newton(), bilevel.newton()),
        ValueError,
        r"inverse: expected an inverse, got a LowerSolver; bilevel.cg\(\) makes one",
    ),
    (
        lambda: bilevel.restarted(implicit),
        ValueError,
        r"solver: .* got the function implicit; call it: implicit\(...\)",
    ),
    (
        lambda: unrolled(optax.adam, 1),
        ValueError,
        r"optimizer: expected an optax optimizer, got the function adam; call it",
    ),
    (lambda: bilevel.nystrom(1, 0.1, key=0), ValueError, NOT_A_KEY),
]
OUTER_LOOP = [
    (lambda: search(steps=0), ValueError, "steps"),
    (lambda: search(steps=2.0), ValueError, "steps: expected a whole number, got 2.0"),
    (
        lambda: search(batches=bilevel.jointly(lambda key, t, v: (t, v, v)), key=KEY),
        ValueError,
        r"sample: expected a function that returns a pair \(train, valid\), got 3 things",
    ),
    (
        lambda: search(problem=bilevel.Problem(with_aux, OUTER)),
        ValueError,
        r"lower: expected .* floating scalar, got a tuple",
    ),
    (
        lambda: search(problem=bilevel.Problem(LOWER, without_return)),
        ValueError,
        "outer: " + NO_RETURN,
    ),
    (
        lambda: search(solver=implicit),
        ValueError,
        r"solver: .* got the function implicit; call it: implicit\(...\)",
    ),
    (
        lambda: search(optimizer=0.1),
        ValueError,
        r"optimizer: expected an optax optimizer, got 0.1; optax.sgd\(step_size\) makes one",
    ),
    (lambda: search(batches=lambda key, data: data, key=0), ValueError, NOT_A_KEY),
    (
        lambda: search(batches=32, key=KEY),
        ValueError,
        r"batches: expected a function \(key, data\) -> batch, got 32",
    ),
    (lambda: search(w0=MODULE), ValueError, A_MODULE),
    (lambda: descent(w0=MODULE), ValueError, A_MODULE),
    (
        lambda: descent(w0=[jnp.ones(2, int)]),
        ValueError,
        r"w0\[0\]: expected floating arrays, got int.*; convert it",
    ),
    (
        lambda: descent(solver=unrolled),
        ValueError,
        r"solver: .* got the function unrolled; call it: unrolled\(...\)",
    ),
    (lambda: bilevel.minibatches(2)(0, jnp.ones(4)), ValueError, NOT_A_KEY),
    (  # an index beyond the shorter array would be its last row
        lambda: bilevel.minibatches(2)(KEY, (jnp.arange(10), jnp.arange(7))),
        ValueError,
        "data: expected arrays of as many rows each",
    ),
]
RUNS = []
STOCHASTIC = [
    (
        lambda: search(
            problem=bilevel.Problem(OUTER, OUTER),
            solver=bilevel.soba(0.1),
            rows=jnp.ones((4, 2)),
        ),
        ValueError,
        "alpha: expected to enter the lower loss, the outer loss or the solver, got one",
    ),
    (
        lambda: search(
            problem=bilevel.Problem(lambda *_: "loss", OUTER),
            solver=bilevel.soba(0.1),
            rows=jnp.ones((4, 2)),
        ),
        ValueError,
        "lower: expected a loss that returns a floating scalar, got 'loss'",
    ),
]
LINEAR_AND_BASELINES = [
    (lambda: baselines.random_search(0, [1, 2], lambda *a: 0.0, 4), ValueError, NOT_A_KEY),
    (lambda: baselines.weight_sharing(ALPHA, [1, 2], SELECTION, 4), ValueError, NOT_A_KEY),
    (lambda: baselines.exponentiated_gradient(0, [1, 2], SELECTION, 4), ValueError, NOT_A_KEY),
    (
        lambda: baselines.successive_halving(KEY, [1, 2], lambda k, c, r: c, 10, minimum=1.5),
        ValueError,
        "minimum: expected a whole number, got 1.5",
    ),
]
SPACES = [
    (lambda: features.feature_space(None), ValueError, "maps: expected a sequence of"),
    (
        lambda: bilevel.spaces.on_simplices("ab").discretize(jnp.array([1j, 0])),
        ValueError,
        "alpha: expected real numbers",
    ),
    (lambda: features.sample_fourier(0, 2), ValueError, NOT_A_KEY),
    (lambda: features.sample_text(0, 2), ValueError, NOT_A_KEY),
    (lambda: features.fourier_features(0, jnp.ones((2, 2))), ValueError, NOT_A_KEY),
    (
        lambda: bilevel.rank_agreement(jax.random.split(KEY), jnp.arange(4), jnp.arange(4)),
        ValueError,
        NOT_A_KEY,
    ),
]
NETS_AND_DATA = [
    (lambda: data.stratified_split(0, np.zeros(4, int), (2, 1)), ValueError, NOT_A_KEY),
    (
        lambda: training.train(0, LOWER, ALPHA, W0, jnp.ones(4), optimizer=0.1),
        ValueError,
        NOT_A_KEY,
    ),
    (lambda: images.crop_and_flip(0, jnp.ones((2, 4, 4, 1))), ValueError, NOT_A_KEY),
    (lambda: images.cutout(0, jnp.ones((2, 4, 4, 1))), ValueError, NOT_A_KEY),
    (
        lambda: bilevel.nets.convolve_images(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 0))),
        ValueError,
        "kernel: expected",
    ),
]
STRATEGIES = []
THEORY = [
    (lambda: spectral.spectral_sample(0, 3, 2, 1), ValueError, NOT_A_KEY),
    (lambda: bilevel.bounds.khodak_corollary_a1(1.0, 10, C="1"), ValueError, "C: expected"),
    (
        lambda: spectral.spectral_alpha(jnp.ones((3, 2, 4)), jnp.ones((3, 0))),
        ValueError,
        "labels: expected shape",
    ),
]
NTK_KERNELS = []
NTK_NETWORKS = []
NTK_SPECTRUM_AND_BOUNDS = []
NTK_REGRESSION_AND_LARGE = []
NTK_SCORES = []

ROWS = {
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
