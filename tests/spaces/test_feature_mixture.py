"""Mixtures of feature maps: hypergradients compared with the closed form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, finite_differences, flatten, hypergradient, tolerance
from problems import Case, mixed_ridge_in_numpy

import bilevel
from bilevel.spaces.activations import unit_inputs
from bilevel.spaces.features.mixture import feature_space
from bilevel.spaces.targets import sign_labels

# (rows, features, penalty): F, dF/dmixture, dF/dlog_penalty, by a separate program in float64 from
# the same draws as `draw`.
REFERENCES = {
    (20, 8, 0.1): (
        2.880811016935,
        [-10.69815496079, 7.053352329929, 18.54529054269],
        -0.2379931635603,
    ),
    (10, 30, 0.1): (
        56.68533822689,
        [-18.27944502769, -13.33032686468, 64.48969348562],
        0.1204409380621,
    ),
    (10, 30, 0.0): (56.5657370999, [-18.28529520957, -13.12020117979, 65.39353979361], 0.0),
}
MIXTURE = np.array([0.5, 0.3, 0.2])


def draw(rows, p, rows_valid=15, h=3):
    rng = np.random.default_rng(0)
    phi, psi = rng.standard_normal((h, rows, p)), rng.standard_normal((h, rows_valid, p))
    w = rng.standard_normal(p)
    y, y_valid = (b[0] @ w + 0.1 * rng.standard_normal(b.shape[1]) for b in (phi, psi))
    return [(jnp.asarray(b), jnp.asarray(t)) for b, t in ((phi, y), (psi, y_valid))]


def squared_search(rows, p, penalty):
    """The space, and the arguments of its hypergradient."""
    train, valid = draw(rows, p)
    space = feature_space([jnp.sin] * 3, outer="squared")
    alpha = {"mixture": MIXTURE, "log_penalty": jnp.log(jnp.array(penalty))}
    return space, (alpha, space.init(jax.random.key(0), train), train, valid)


@pytest.mark.parametrize("setting", REFERENCES, ids=["primal", "dual", "ridgeless"])
def test_the_hypergradient_is_the_closed_form(setting):
    penalty = setting[2]
    space, (alpha, w, train, valid) = squared_search(*setting)
    hyper = hypergradient(space.problem, space.solver, alpha, w, train, valid)
    value, mixture, log_penalty = REFERENCES[setting]
    assert_close(hyper.value, value, f64=1e-11)
    assert_close(hyper.grad["mixture"], mixture, f64=1e-11)
    assert_close(hyper.grad["log_penalty"], log_penalty, f64=1e-11, f32=1e-2)
    if penalty:
        sides = ((jnp.swapaxes(phi, 0, 1), y) for phi, y in (train, valid))
        case = Case(None, {"mix": MIXTURE, "log_decay": np.log(penalty)}, None, *sides)
        assert_close(hyper.grad, mixed_ridge_in_numpy(case)[1], f64=1e-10, f32=1e-2)
    else:  # the predictor does not change when the features are scaled
        euler = jnp.vdot(MIXTURE, hyper.grad["mixture"])
        assert abs(euler) < tolerance(1e-10, 1e-3) * np.linalg.norm(mixture)


@pytest.mark.long
def test_implicit_differentiation_of_the_lower_loss_gives_the_same():
    """Truth: the closed form, which never calls the lower loss."""
    space, arguments = squared_search(10, 30, 0.1)
    run = functools.partial(hypergradient, space.problem, diagnostics=True)
    hyper, by_cg = (run(solver, *arguments) for solver in (space.solver, bilevel.implicit()))
    assert_close(by_cg.w, hyper.w, f64=1e-9, f32=1e-2)
    assert_close(by_cg.grad, hyper.grad, f64=1e-8, f32=1e-2)
    assert hyper.info.converged
    assert hyper.info.error_estimate < tolerance(1e-10, 1e-2) * np.linalg.norm(flatten(hyper.grad))


@functools.cache
def digits(classes):
    images, labels, *_ = bilevel.data.load("digits", train_size=600)
    keep = labels < classes
    x, labels = images[keep][:200].reshape(-1, 64), labels[keep][:200]
    rows = unit_inputs(jnp.asarray(x, float))
    half = len(labels) // 2
    return (rows[:half], labels[:half]), (rows[half:], labels[half:])


def fourier_map(key, bandwidth, features=60):
    wkey, bkey = jax.random.split(key)
    weights = bandwidth * jax.random.normal(wkey, (64, features))
    shifts = jax.random.uniform(bkey, (features,), maxval=2 * jnp.pi)
    return lambda x: jnp.sqrt(2 / features) * jnp.cos(x @ weights + shifts)


@pytest.mark.long
@pytest.mark.parametrize(("classes", "outer"), [(2, "hinge"), (10, "logistic")])
def test_the_hypergradient_is_that_of_the_refitted_validation_loss(classes, outer):
    if outer == "hinge" and not jax.config.jax_enable_x64:
        pytest.skip("a difference in float32 needs a step so wide that it straddles the kinks")
    maps = list(map(fourier_map, jax.random.split(jax.random.key(0), 3), (1.0, 30.0, 100.0)))
    space = feature_space(maps, names=["good", "noise", "more noise"], outer=outer)
    train, valid = ((space.blocks(x), sign_labels(t, classes)) for x, t in digits(classes))
    alpha, w = space.start(), space.init(jax.random.key(0), train)
    fn = jax.jit(bilevel.hypergradient(space.problem, space.solver, diagnostics=False))
    truth = finite_differences(lambda alpha: fn(alpha, w, train, valid).value, alpha)
    assert_close(fn(alpha, w, train, valid).grad, truth, f64=1e-7, f32=3e-2)


def test_maps_are_named_after_their_functions():
    maps = [jnp.sin, functools.partial(jnp.cos), jnp.sin]
    assert feature_space(maps).names == ("sin", "partial", "sin 2")
