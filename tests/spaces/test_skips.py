"""The skip space is Zhu's Eq. (1), trained by Algorithm 1."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, batch, cast

import ntk
from bilevel.nets.training import train
from bilevel.spaces.skips import SkipArchitecture, skip_space

NUMPY = {
    "relu": lambda z: np.maximum(z, 0),
    "leaky_relu": lambda z: np.maximum(z, 0.1 * z),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)) - 0.5,
    "tanh": np.tanh,
    "swish": lambda z: z / (1 + np.exp(-z)),
}
ARCHITECTURE = SkipArchitecture(("tanh", "leaky_relu", "swish", "relu"), (True, False, True))


def forward(w, alpha, x, gain):
    """Eq. (1) in float64 numpy; ``gain`` multiplies the weights from the second layer on."""
    first, hidden, last = (np.asarray(w[k], float) for k in ("first", "hidden", "last"))
    p, a = (np.asarray(alpha[k], float) for k in ("activations", "skips"))

    def mixture(weights, u):
        return sum(q * s(u) for q, s in zip(weights, NUMPY.values(), strict=True))

    f = mixture(p[0], x @ first)
    for q, b, matrix in zip(p[1:], a, hidden, strict=True):
        f = mixture(q, gain * f @ matrix) + b * f
    return gain * f @ last


@pytest.fixture(scope="module")
def rows():
    return jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)))


@pytest.mark.parametrize(("classes", "label"), [(2, -1), (3, 3)])
def test_unknown_labels_give_nan_losses_and_gradients(classes, label):
    space = skip_space(["relu"], depth=3, width=4, classes=classes)
    batch = jnp.eye(2), jnp.array([0, label])
    w, alpha = space.init(jax.random.key(0), batch), space.start()
    loss, slope = jax.jit(jax.value_and_grad(space.problem.lower))(w, alpha, batch)
    assert jnp.isnan(loss) and bool(jnp.isnan(slope["last"]).all())


@pytest.mark.long
@pytest.mark.parametrize(
    ("parametrization", "deviation", "gain"),
    [("ntk", 1, (2 / 40) ** 0.5), ("as_printed", 40**-0.5, 1), ("he", (2 / 40) ** 0.5, 1)],
)
def test_supernet_and_plain_network_are_the_formula_on_the_same_weights(
    parametrization, deviation, gain, rows
):
    space = skip_space(depth=5, width=40, classes=3, parametrization=parametrization)
    w = space.init(jax.random.key(0), batch(1, 3))
    shapes = {"first": (3, 40), "hidden": (3, 40, 40), "last": (40, 3)}
    assert {k: v.shape for k, v in w.items()} == shapes
    for layer in w.values():
        # 120 and 4800 weights: four standard errors of a standard deviation.
        assert np.std(layer) == pytest.approx(deviation, rel=4 / (2 * layer.size) ** 0.5)
    apply = jax.jit(space.apply)
    draw = np.random.default_rng(5)
    alpha = {"activations": draw.dirichlet(np.ones(5), 4), "skips": draw.random(3)}
    assert_close(apply(w, alpha, rows), forward(w, alpha, rows, gain), f64=1e-13, f32=1e-5)
    corner = space.one_hot(ARCHITECTURE)
    for form in (corner, ARCHITECTURE):
        assert_close(apply(w, form, rows), forward(w, corner, rows, gain), f64=1e-13, f32=1e-5)


@pytest.mark.long
def test_wide_networks_have_the_kernel_of_the_space():
    """Truth: brute force; the mean of 64 empirical kernels is right to its standard error."""
    space = skip_space(["relu", ntk.leaky_relu(-1.0)], depth=4, width=128, classes=2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)) / 2)
    mixtures = jnp.array([[0.9, 0.1], [0.3, 0.7], [0.1, 0.9]])
    alpha = {"activations": mixtures, "skips": jnp.array([0.9, 0.2])}

    @jax.jit
    @jax.vmap
    def empirical(key):
        gradients = jax.jacrev(space.apply)(space.init(key, batch(1, 4)), alpha, x)
        rows = jnp.concatenate([g.reshape(3, -1) for g in jax.tree.leaves(gradients)], 1)
        return rows @ rows.T

    sampled = empirical(jax.random.split(jax.random.key(2), 64))
    errors = sampled.std(0) / 64**0.5
    # Six entries: 3.5 is one in 400.
    assert float(jnp.abs((sampled.mean(0) - space.kernel(alpha, x).ntk) / errors).max()) < 3.5
    for other in ({"skips": jnp.zeros(2)}, {"activations": mixtures[::-1]}):
        wrong = space.kernel(alpha | other, x).ntk
        assert float(jnp.abs((sampled.mean(0) - wrong) / errors).max()) > 10
    relu = SkipArchitecture(("relu",) * 3, (True, False))
    assert_close(space.kernel(relu, x).ntk, space.kernel(space.one_hot(relu), x).ntk)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_loss_is_the_mean_cross_entropy(classes, rows):
    """Truth: numpy; for two classes the paper's logistic loss of ``y f``, y = +-1."""
    space = skip_space(["tanh"], depth=3, width=4, classes=classes)
    w, alpha = space.init(jax.random.key(0), batch(1, 3)), space.start()
    labels = np.arange(6) % classes
    f = np.asarray(jax.jit(space.apply)(w, alpha, rows), float)
    if classes == 2:
        expected = np.log1p(np.exp(-(2 * labels - 1) * f)).mean()
    else:
        expected = (np.log(np.exp(f).sum(1)) - f[np.arange(6), labels]).mean()
    for loss in (space.problem.lower, space.problem.outer):
        assert_close(jax.jit(loss)(w, alpha, (rows, labels)), expected, f64=1e-13, f32=1e-5)
    np.testing.assert_array_equal(space.predict(f), f > 0 if classes == 2 else f.argmax(1))


def test_programs_do_not_grow_with_the_depth(rows):
    def size(depth):
        space = skip_space(depth=depth, width=4)
        w = jax.eval_shape(lambda key: space.init(key, batch(1, 3)), jax.random.key(0))
        program = jax.make_jaxpr(jax.grad(space.problem.lower))
        return len(program(w, space.start(), (rows, jnp.zeros(6, int))).eqns)

    assert size(4) == size(20)


def test_discretization_keeps_the_likeliest_activation_and_skips_above_one_half():
    space = skip_space(["relu", "tanh", "swish"], depth=4, width=4)
    alpha = {
        "activations": jnp.array([[0.2, 0.3, 0.5], [0.4, 0.4, 0.2], [0.1, 0.8, 0.1]]),
        "skips": jnp.array([0.5, 0.51]),
    }
    architecture = space.discretize(alpha)
    assert architecture == SkipArchitecture(("swish", "relu", "tanh"), (False, True))
    assert str(architecture) == "swish, relu, tanh+skip"
    assert len({architecture, space.discretize(space.one_hot(architecture))}) == 1
    assert not any(space.discretize(space.start()).skips)


def linear(w, _, x):
    """A loss: steps of size 1 add the sum of the batch to ``w``."""
    return -w * x.sum()


def test_every_epoch_takes_every_row_once_in_an_order_of_its_own():
    """Truth: on this loss each step adds its row to ``w``, which the losses -w x then show."""
    data = jnp.arange(1.0, 8)
    trained = train(jax.random.key(0), linear, None, 1.0, data, optimizer=1.0, epochs=2)
    w, rows = 1.0, []
    for loss in trained.losses:
        rows.append(round(float(-loss) / w))
        w += rows[-1]
    assert w == float(trained.last)
    assert sorted(rows[:7]) == sorted(rows[7:]) == list(range(1, 8))
    assert rows[:7] != rows[7:]


def test_the_uniform_iterate_is_uniform_over_where_the_steps_begin():
    """Truth: counts of 4000 keys; chi-square with 4 degrees of freedom, one in 1000 above 18.5."""
    options = {"optimizer": 1.0, "batch_size": 2}
    run = jax.vmap(lambda key: train(key, linear, None, 0.0, jnp.ones(11), **options))
    trained = jax.jit(run)(jax.random.split(jax.random.key(1), 4000))
    # Batches of two ones; the 11th row is left out.
    np.testing.assert_array_equal(trained.last, 10.0)
    counts = np.bincount(np.asarray(trained.uniform, int), minlength=9)
    assert counts[1::2].sum() == 0 and len(counts) == 9
    assert ((counts[::2] - 800) ** 2 / 800).sum() < 18.5


@pytest.mark.slow
def test_plain_networks_learn_and_stay_float32_whatever_the_default():
    space = skip_space(["relu", "swish"], depth=4, width=16, classes=2)
    architecture = SkipArchitecture(("relu", "swish", "relu"), (True, False))
    w = cast(space.init(jax.random.key(0), batch(1, 3)), jnp.float32)
    parts = jnp.asarray(np.random.default_rng(0).normal(size=(2, 80, 3)), jnp.float32)
    data, (x, labels) = [(part, jnp.asarray(part[:, 0] > 0, int)) for part in parts]
    options = dict(optimizer=optax.sgd(0.05, momentum=0.9), epochs=10, batch_size=8)
    trained = train(jax.random.key(1), space.problem.lower, architecture, w, data, **options)
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {jnp.dtype("float32")}
    errors = space.predict(jax.jit(space.apply)(trained.last, architecture, x)) != labels
    assert float(errors.mean()) < 0.1
