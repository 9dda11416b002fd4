"""Natural mistakes: one sentence that names the argument and the cure, before any compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevel
from bilevel import baselines, data, implicit, spectral
from bilevel.nets import images, training
from bilevel.spaces import features
from bilevel.spaces.darts.genotype import draw_corner
from bilevel.spaces.nasbench201 import genotype
from bilevel.theory.spectral.directions import spectral_gram, top_direction

W0, ALPHA = jnp.zeros(2), jnp.ones(2)


def lower(w, alpha, batch):
    return 0.5 * jnp.sum((w - alpha) ** 2)


def outer(w, alpha, batch):
    return jnp.sum(w**2)


PROBLEM = bilevel.Problem(lower, outer)
SGD = optax.sgd(0.1)


def hypergradient(problem=PROBLEM, solver=None, alpha=ALPHA, w0=W0, **options):
    solver = implicit() if solver is None else solver
    return bilevel.hypergradient(problem, solver, diagnostics=False)(alpha, w0, None, None)


def search(problem=PROBLEM, solver=None, optimizer=SGD, alpha=ALPHA, w0=W0, steps=1, **options):
    solver = implicit() if solver is None else solver
    arguments = problem, solver, optimizer, alpha, w0, None, None
    return bilevel.search(*arguments, steps=steps, progress=False, **options)


def descent(solver=None, optimizer=SGD, alpha=ALPHA, w0=W0):
    init, _ = bilevel.descent(PROBLEM, implicit() if solver is None else solver, optimizer)
    return init(alpha, w0)


def solve(alpha, w, batch):
    return alpha


def with_aux(w, alpha, batch):
    return lower(w, alpha, batch), {"error": 0.0}


class Module:
    """A pytree with a function among its leaves, as an equinox module's are."""

    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation


jax.tree_util.register_pytree_with_keys(
    Module,
    lambda m: (
        [
            (jax.tree_util.GetAttrKey("weight"), m.weight),
            (jax.tree_util.GetAttrKey("activation"), m.activation),
        ],
        None,
    ),
    lambda _, leaves: Module(*leaves),
)
MODULE = Module(jnp.zeros(2), jax.nn.relu)
SELECTION = baselines.Selection(lambda *a: 0.0, lambda *a: None)

SCHEDULE = optax.cosine_decay_schedule(0.1, 10)
DEAD = bilevel.Problem(outer, outer)


MISTAKES = {
    "no weights": (
        lambda: hypergradient(w0={}),
        "w0: expected at least one array, got {}",
    ),
    "a schedule for an optimizer of a tree": (
        lambda: hypergradient(solver=bilevel.unrolled(SCHEDULE, 3), alpha={"x": ALPHA}),
        r"optimizer: expected a function alpha -> optax optimizer, got a schedule; .* optax.sgd",
    ),
    "three batches at once": (
        lambda: search(
            batches=bilevel.jointly(lambda key, train, valid: (train, valid, valid)),
            key=jax.random.key(0),
        ),
        r"sample: expected a function that returns a pair \(train, valid\), got 3 things",
    ),
    "an alpha that does nothing, single loop": (
        lambda: bilevel.search(
            *(DEAD, bilevel.soba(0.1), SGD, ALPHA, W0, jnp.ones((4, 2)), jnp.ones((4, 2))), steps=1
        ),
        "alpha: expected to enter the lower loss, the outer loss or the solver, got one",
    ),
    "auxiliary output, lower": (
        lambda: hypergradient(bilevel.Problem(with_aux, outer)),
        r"lower: expected .* floating scalar, got a tuple .*; Problem\(..., has_aux=True\) takes",
    ),
    "auxiliary output, outer": (
        lambda: hypergradient(bilevel.Problem(lower, with_aux)),
        r"outer: expected .* floating scalar, got a tuple .*; Problem\(..., has_aux=True\) takes",
    ),
    "auxiliary output, search": (
        lambda: search(bilevel.Problem(with_aux, outer)),
        r"lower: expected .* floating scalar, got a tuple",
    ),
    "no auxiliary output, though promised": (
        lambda: hypergradient(bilevel.Problem(lower, outer, has_aux=True)),
        r"lower: expected a loss that returns \(loss, aux\), as has_aux=True says, got an array",
    ),
    "no return, lower": (
        lambda: hypergradient(bilevel.Problem(lambda w, alpha, batch: None, outer)),
        "lower: expected a loss that returns a floating scalar, got None; a return is missing",
    ),
    "no return, outer, search": (
        lambda: search(bilevel.Problem(lower, lambda w, alpha, batch: None)),
        "outer: expected a loss that returns a floating scalar, got None; a return is missing",
    ),
    "a text for a loss, single loop": (
        lambda: bilevel.search(
            bilevel.Problem(lambda *_: "loss", outer),
            *(bilevel.soba(0.1), SGD, ALPHA, W0, jnp.ones((4, 2)), jnp.ones((4, 2))),
            steps=1,
        ),
        "lower: expected a loss that returns a floating scalar, got 'loss'",
    ),
    "an optimizer for a solver": (
        lambda: implicit(SGD),
        r"forward: expected a LowerSolver, got .*; wrap it: unrolled\(optimizer, steps\)",
    ),
    "an inverse for a solver": (
        lambda: implicit(bilevel.cg()),
        r"forward: expected a LowerSolver, .*; an inverse goes into implicit\(inverse=...\)",
    ),
    "a user's function for a solver": (
        lambda: implicit(solve),
        r"forward: expected a LowerSolver, got the function solve; hand it to solved\(...\)",
    ),
    "newton without brackets": (
        lambda: implicit(bilevel.newton),
        r"forward: .* got the function newton; call it: newton\(...\)",
    ),
    "cg without brackets": (
        lambda: implicit(bilevel.newton(), bilevel.cg),
        r"inverse: expected an inverse, got the function cg; call it: cg\(...\)",
    ),
    "a solver for an inverse": (
        lambda: implicit(bilevel.newton(), bilevel.newton()),
        r"inverse: expected an inverse, got a LowerSolver; bilevel.cg\(\) makes one",
    ),
    "implicit without brackets": (
        lambda: hypergradient(solver=implicit),
        r"solver: .* got the function implicit; call it: implicit\(...\)",
    ),
    "implicit without brackets, search": (
        lambda: search(solver=implicit),
        r"solver: .* got the function implicit; call it: implicit\(...\)",
    ),
    "unrolled without brackets": (
        lambda: descent(solver=bilevel.unrolled),
        r"solver: .* got the function unrolled; call it: unrolled\(...\)",
    ),
    "implicit without brackets, restarted": (
        lambda: bilevel.restarted(implicit),
        r"solver: .* got the function implicit; call it: implicit\(...\)",
    ),
    "optax.adam without brackets": (
        lambda: bilevel.unrolled(optax.adam, 1),
        r"optimizer: expected an optax optimizer, got the function adam; call it",
    ),
    "a number for alpha's optimizer": (
        lambda: search(optimizer=0.1),
        r"optimizer: expected an optax optimizer, got 0.1; optax.sgd\(step_size\) makes one",
    ),
    "an integer for a key": (
        lambda: search(batches=lambda key, data: data, key=0),
        r"key: expected a PRNG key such as jax.random.key\(0\), got 0",
    ),
    "an integer for nystrom's key": (
        lambda: bilevel.nystrom(1, 0.1, key=0),
        r"key: expected a PRNG key such as jax.random.key\(0\), got 0",
    ),
    "a number for a sampler": (
        lambda: search(batches=32, key=jax.random.key(0)),
        r"batches: expected a function \(key, data\) -> batch, got 32",
    ),
    "a module for w0": (
        lambda: hypergradient(w0=MODULE),
        r"w0\.activation: expected floating arrays, got the function .*; keep the arrays in w0",
    ),
    "a module for w0, search": (
        lambda: search(w0=MODULE),
        r"w0\.activation: expected floating arrays, got the function .*; keep the arrays in w0",
    ),
    "a module for w0, descent": (
        lambda: descent(w0=MODULE),
        r"w0\.activation: expected floating arrays, got the function .*; keep the arrays in w0",
    ),
    "a string in alpha": (
        lambda: hypergradient(alpha={"a": ALPHA, "kind": "relu"}),
        r"alpha\['kind'\]: expected floating arrays, got 'relu'",
    ),
    "integers in alpha": (
        lambda: hypergradient(alpha=jnp.ones(2, int)),
        r"alpha: expected floating arrays, got int.*; convert it with jnp.asarray\(x, float\)",
    ),
    "integers in w0": (
        lambda: descent(w0=[jnp.ones(2, int)]),
        r"w0\[0\]: expected floating arrays, got int.*; convert it",
    ),
}
KEYS = {
    "random_search": lambda key: baselines.random_search(key, [1, 2], lambda *a: 0.0, 4),
    "weight_sharing": lambda key: baselines.weight_sharing(key, [1, 2], SELECTION, 4),
    "exponentiated_gradient": lambda key: baselines.exponentiated_gradient(
        key, [1, 2], SELECTION, 4
    ),
    "split": lambda key: data.stratified_split(key, np.zeros(4, int), (2, 1)),
    "minibatches": lambda key: bilevel.minibatches(2)(key, jnp.ones(4)),
    "train": lambda key: training.train(key, lower, ALPHA, W0, jnp.ones(4), optimizer=0.1),
    "crop_and_flip": lambda key: images.crop_and_flip(key, jnp.ones((2, 4, 4, 1))),
    "cutout": lambda key: images.cutout(key, jnp.ones((2, 4, 4, 1))),
    "sample_fourier": lambda key: features.sample_fourier(key, 2),
    "sample_text": lambda key: features.sample_text(key, 2),
    "fourier_features": lambda key: features.fourier_features(key, jnp.ones((2, 2))),
    "draw_corner": lambda key: draw_corner(key),
    "draw_corner of NAS-Bench-201": lambda key: genotype.draw_corner(key),
    "rank_agreement": lambda key: bilevel.rank_agreement(key, jnp.arange(4), jnp.arange(4)),
    "spectral_sample": lambda key: spectral.spectral_sample(key, 3, 2, 1),
}
COUNTS = {
    "unrolled": lambda n: bilevel.unrolled(0.1, n),
    "newton": lambda n: bilevel.newton(n),
    "lbfgs": lambda n: bilevel.lbfgs(n),
    "cg": lambda n: bilevel.cg(n),
    "search": lambda n: search(steps=n),
}


@pytest.mark.parametrize(("make", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_natural_mistake_is_one_sentence_with_the_cure(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS.keys())
@pytest.mark.parametrize("key", [0, jax.random.split(jax.random.key(0)), jnp.ones(2)])
def test_what_is_no_key_is_refused(make, key):
    with pytest.raises(ValueError, match=r"key: expected a PRNG key such as jax.random.key\(0\)"):
        make(key)


@pytest.mark.parametrize("make", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("steps", [2.5, 2.0, True, "2", None])
def test_a_count_that_is_no_whole_number_is_refused(make, steps):
    with pytest.raises(ValueError, match=rf"steps: expected a whole number, got {steps!r}"):
        make(steps)


@pytest.mark.parametrize("make", COUNTS.values(), ids=COUNTS.keys())
def test_numpys_integers_are_counts(make):
    make(np.int32(1))


@pytest.mark.long
def test_keys_of_the_old_style_and_leaves_that_are_none_are_welcome():
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        search(batches=lambda key, data: data, key=key)
    w0 = {"w": W0, "none": None}
    problem = bilevel.Problem(
        lambda w, alpha, batch: lower(w["w"], alpha, batch),
        lambda w, alpha, batch: outer(w["w"], alpha, batch),
    )
    assert np.isfinite(hypergradient(problem, w0=w0).value)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: top_direction(jnp.triu(jnp.ones((3, 3)))),
            "gram: expected a sym",
        ),
        (lambda: bilevel.bounds.khodak_corollary_a1(1.0, 10, C="1"), "C: expected"),
        (
            lambda: bilevel.baselines.successive_halving(
                jax.random.key(0), [1, 2], lambda key, c, r: c, 10, minimum=1.5
            ),
            "minimum: expected a whole number, got 1.5",
        ),
        (lambda: bilevel.spaces.features.feature_space(None), "maps: expected a sequence of"),
    ],
)
def test_what_a_fresh_campaign_found(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: bilevel.nets.convolve_images(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 0))),
            "kernel: expected",
        ),
        (
            lambda: spectral_gram(jnp.ones((3, 2, 4)), jnp.ones((3, 0))),
            "labels: expected shape",
        ),
        (
            lambda: bilevel.spaces.on_simplices("ab").discretize(jnp.array([1j, 0])),
            "alpha: expected real numbers",
        ),
    ],
)
def test_what_is_empty_or_complex_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_traced_nan_and_infinity_come_out_as_nan():
    nan = jnp.array([jnp.nan, 1.0])
    coverings = [
        lambda radii: bilevel.bounds.simplex_covering(1)(radii),
        lambda radii: bilevel.bounds.finite_covering(jnp.eye(2))(radii),
    ]
    for covering in coverings:
        assert jnp.isnan(jax.jit(covering)(nan)).tolist() == [True, False]
    points = jax.jit(lambda points: bilevel.bounds.finite_covering(points)(jnp.ones(1)))
    assert bool(jnp.isnan(points(jnp.array([[jnp.nan], [0.0]]))).all())
    solved = bilevel.dense()(lambda v: jnp.inf * v, jnp.ones(1), None, None)
    assert bool(jnp.isnan(solved).all())


@pytest.mark.parametrize("other", [jnp.arange(7), jnp.arange(3.0), jnp.ones(())])
def test_rows_of_different_numbers_are_no_data(other):
    """An index beyond the shorter array would be its last row."""
    for data_ in ((jnp.arange(10), other), (other, jnp.arange(10))):
        with pytest.raises(ValueError, match="data: expected arrays of as many rows each"):
            bilevel.minibatches(2)(jax.random.key(0), data_)


def test_a_restarted_solver_without_variables_is_refused_on_a_stateful_problem():
    def stateful(w, alpha, batch):
        return lower(w.params, alpha, batch), w.variables

    problem = bilevel.Problem(stateful, lambda w, a, b: outer(w.params, a, b), stateful=True)
    w0 = bilevel.Stateful(W0, jnp.zeros(2))
    with pytest.raises(ValueError, match=r"solver: expected restarted\(unrolled"):
        hypergradient(problem, bilevel.restarted(implicit()), w0=w0)
    hypergradient(problem, bilevel.restarted(bilevel.unrolled(0.1, 2)), w0=w0)
