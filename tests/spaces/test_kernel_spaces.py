"""Searches of kernels: ridge regression, hypergradients, certificates."""

import functools
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, finite_differences, flatten, hypergradient

import bilevel
import ntk
from bilevel.spaces.kernels import kernel_function_space, kernel_mixture_space, network_space
from bilevel.spaces.linearized import linearized_space
from bilevel.spaces.skips import skip_space
from ntk import networks as nets

RNG = np.random.default_rng(0)
X, XV = (x / np.linalg.norm(x, axis=1)[:, None] for x in (RNG.normal(size=(n, 4)) for n in (14, 9)))
KINKED = ntk.leaky_relu(0.2)  # closed forms, which compile soon
Y, YV = np.sign(X[:, 0] * X[:, 1]), np.sign(XV[:, 0] * XV[:, 1])


def batches(space):
    return (space.inputs(X), Y), (space.inputs(XV, X), YV)


def network(alpha, x1, x2=None):
    layers = {ntk.relu: alpha["mixture"][0], KINKED: alpha["mixture"][1]}, ntk.relu
    options = {"skips": [alpha["skip"]], "variances": [1.0, 2.0, 1.0]}
    return ntk.network_kernel(x1, x2, activations=layers, **options)


NETWORK = {"mixture": np.array([0.4, 0.6]), "skip": np.array(0.3)}
SETS = {"mixture": "simplex", "skip": "box"}


def linear(x1, x2):
    return x1 @ x2.T


def gaussian(alpha, x1, x2):
    return jnp.exp(-jnp.exp(alpha) * jnp.sum((x1[:, None] - x2) ** 2, -1))


def described():
    layers = nets.dense("variance"), nets.act([ntk.relu, KINKED], "activation")
    block = nets.residual(nets.serial(nets.dense(), nets.act(ntk.relu)), skip="skip")
    return nets.serial(*layers, block, nets.dense(1.0, 0.1))


SPACES = {
    "a described network": lambda: network_space(described()),
    "a network's parameters": lambda: kernel_function_space(network, NETWORK, sets=SETS),
    "kernels mixed": lambda: kernel_mixture_space(
        {"linear": linear, "gaussian": functools.partial(gaussian, 0.0)}
    ),
    "a width": lambda: kernel_function_space(gaussian, 0.5),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SPACES)
def test_hypergradients_are_finite_differences(name):
    space = SPACES[name]()
    alpha, (train, valid) = space.start(), batches(space)
    cheap = name not in ("a network's parameters", "a described network")  # they compile for long
    fn = jax.jit(bilevel.hypergradient(space.problem, space.solver, diagnostics=cheap))
    hyper = fn(alpha, space.init(jax.random.key(2), train), train, valid)
    assert not cheap or (bool(hyper.info.converged) and hyper.info.error_bound < 1e-8)

    def value(alpha):
        w, _ = space.solver.run(space.problem.lower, alpha, jnp.zeros_like(Y), (), train)
        return space.problem.outer(w, alpha, valid)

    np.testing.assert_allclose(hyper.value, value(alpha), rtol=1e-12)
    slopes = finite_differences(lambda a: value(jax.tree.map(jnp.asarray, a)), alpha)
    np.testing.assert_allclose(flatten(hyper.grad), slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.long
def test_a_described_network_is_a_space_whose_architectures_are_networks():
    space = network_space(described())
    architecture = {"variance": 2.0, "activation": "leaky_relu(0.2)", "skip": -0.5}
    corner = space.one_hot(architecture)
    assert space.discretize(corner) == pytest.approx(architecture)
    assert set(space.discretize(space.draw(jax.random.key(3)))) == set(architecture)
    first = nets.dense(2.0), nets.act(KINKED)
    block = nets.residual(nets.serial(nets.dense(), nets.act(ntk.relu)), skip=-0.5)
    one = nets.serial(*first, block, nets.dense(1.0, 0.1)).kernel(X)
    kernels = described().kernel(X, alpha=space.values(corner))
    np.testing.assert_allclose(kernels.ntk, one.ntk, rtol=1e-12)
    w = jnp.eye(len(X))
    np.testing.assert_allclose(space.apply(w, corner, space.inputs(X)), one.ntk, rtol=1e-12)
    certified = space.certificates(jax.tree.map(lambda leaf: leaf[None], corner), X)
    assert 0 < certified[0] <= float(ntk.min_eigenvalue(one.ntk))


@pytest.mark.long
def test_a_search_ends_at_a_kernel_and_its_certificates_hold_all_the_way():
    relu = functools.partial(ntk.network_kernel, activations=[ntk.relu])
    space = kernel_mixture_space({"relu": relu, "linear": linear}, outer="hinge")
    train, valid = batches(space)
    start = space.start(), space.init(jax.random.key(2), train)
    simplex = optax.chain(bilevel.tangent(), optax.adam(0.3), bilevel.exponentiate())
    optimizer = bilevel.strategies.on_sets(space.sets, simplex=simplex, other=optax.adam(0.1))
    arguments = space.problem, space.solver, optimizer, *start, train, valid
    result = bilevel.search(*arguments, steps=6, progress=False)
    assert space.discretize(result.alpha) in ("relu", "linear")
    bounds = space.certificates(result.history["alpha"], X)
    for alpha, bound in zip(result.history["alpha"]["mixture"], bounds, strict=True):
        assert 0 <= ntk.min_eigenvalue(jnp.einsum("i,inm->nm", alpha, train[0])) - bound < 1e-12
    # 14 rows of 4 dimensions: a linear kernel alone is singular.
    (singular,) = space.certificates({"mixture": jnp.array([[0.0, 1.0]])}, X)
    assert -1e-10 < singular <= 1e-15


@pytest.mark.long
def test_integer_targets_are_numbers():
    space = kernel_mixture_space({"linear": linear})
    (inputs, _), (columns, _) = batches(space)
    y, yv, alpha = np.arange(len(X)) % 2, np.arange(len(XV)) % 2, space.start()

    def slope(dtype):
        train, valid = (inputs, y.astype(dtype)), (columns, yv.astype(dtype))
        step = bilevel.hypergradient(space.problem, space.solver, diagnostics=False)
        return step(alpha, space.init(jax.random.key(0), train), train, valid).grad["log_penalty"]

    for dtype in (int, np.uint8, bool):
        assert_close(slope(dtype), slope(float))


def test_draws_and_vertices_are_in_their_sets():
    space = SPACES["a network's parameters"]()
    drawn = [space.draw(key)["kernel"] for key in jax.random.split(jax.random.key(3), 20)]
    assert {tuple(d["mixture"].tolist()) for d in drawn} == {(1.0, 0.0), (0.0, 1.0)}
    assert all(0 <= d["skip"] <= 1 for d in drawn) and len({float(d["skip"]) for d in drawn}) == 20
    architecture = space.discretize(space.start())
    assert architecture["mixture"].tolist() == [0, 1] and architecture["skip"] == 0.3
    assert space.one_hot(architecture)["kernel"]["mixture"].tolist() == [0, 1]


@pytest.mark.long
def test_the_example_of_convolutional_networks_ends_at_a_certified_kernel(monkeypatch, capsys):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "examples")
    example = importlib.import_module("stax_kernels")
    try:
        bracket, result, bounds = example.main()
    except FileNotFoundError:
        pytest.skip("CIFAR-10 is not here")
    assert result.history["value"][-1] < result.history["value"][0]
    assert (bounds >= bracket.lower - 1e-9).all()
    assert "found: 0." in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("classes", [2, 3])
def test_linearised_deep_features_are_regression_on_the_networks_gradient(classes):
    deep = skip_space(["relu", "tanh"], depth=3, width=6, classes=classes)
    w = deep.init(jax.random.key(2), (X, Y))
    space = linearized_space(deep, w)
    y, yv = (t if classes == 2 else jnp.stack([t, -t, t], 1) for t in (Y, YV))
    train, valid = (space.inputs(X), y), (space.inputs(XV, X), yv)
    alpha = jax.tree.map(lambda a: 0.9 * a, space.start()) | {"log_penalty": jnp.asarray(-1.0)}

    def features(alpha, x):
        flat, unravel = jax.flatten_util.ravel_pytree(w)
        jacobian = jax.jacfwd(lambda w: deep.apply(unravel(w), alpha["kernel"], x))(flat)
        return jacobian.reshape(len(x), -1, flat.size)

    def value(alpha):
        phi, phi_v = features(alpha, X), features(alpha, XV)
        K, k = (jnp.einsum("icp,jcp->ij", f, phi) / phi.shape[1] for f in (phi, phi_v))
        dual = jnp.linalg.solve(K + jnp.exp(alpha["log_penalty"]) * jnp.eye(len(X)), y)
        return jnp.mean((1 - yv * (k @ dual)) ** 2)

    hyper = bilevel.hypergradient(space.problem, space.solver, diagnostics=False)
    result = jax.jit(hyper)(alpha, space.init(jax.random.key(3), train), train, valid)
    assert_close(result.value, value(alpha), f64=1e-12, f32=1e-4)
    assert_close(result.grad, jax.grad(value)(alpha), f64=1e-10, f32=1e-3)
    drawn = space.draw(jax.random.key(0))
    assert space.discretize(drawn) == deep.discretize(drawn["kernel"])


@pytest.mark.parametrize(("rows", "valid"), [(9, 9), (2, 3)])
def test_a_space_with_training_inputs_takes_batches_as_the_contract_says(rows, valid):
    x, y, xv, yv = map(jnp.asarray, (X[:rows], Y[:rows], XV[:valid], YV[:valid]))
    pairs = kernel_function_space(gaussian, jnp.zeros(()))
    space = kernel_function_space(gaussian, jnp.zeros(()), x=np.asarray(x))
    train, test = (pairs.inputs(x), y), (pairs.inputs(xv, x), yv)
    alpha, w = space.start(), space.init(jax.random.key(0), (x, y))
    np.testing.assert_array_equal(w, pairs.init(jax.random.key(0), train))
    pairings = (space, (x, y)), (pairs, train)
    truth = hypergradient(pairs.problem, pairs.solver, alpha, w, train, test)
    K = np.asarray(gaussian(0.0, x, x)) + 0.1 * np.eye(rows)
    weights = np.linalg.solve(K, y)  # truth: numpy
    hyper = hypergradient(space.problem, space.solver, alpha, w, (x, y), (xv, yv))
    assert_close(hyper.w, weights, f32=1e-3)
    assert_close(hyper.value, truth.value, f32=1e-4)
    assert_close(hyper.grad, truth.grad, f32=1e-3)
    # Pairs remain valid, also for losses that are not compiled.
    for batches in ((x, y), (xv, yv)), (train, test):
        solved, _ = space.solver.run(space.problem.lower, alpha, w, (), batches[0])
        assert_close(space.problem.outer(solved, alpha, batches[1]), truth.value, f32=1e-4)
    f = space.apply(hyper.w, alpha, xv)
    assert_close(f, np.asarray(gaussian(0.0, xv, x)) @ weights, f32=1e-3)
    assert_close(*(jax.grad(s.problem.lower)(w + 1, alpha, b) for s, b in pairings), f32=1e-4)


def test_traced_rows_that_are_not_the_training_inputs_give_nan():
    """Shapes do not show the mistake, because the numbers of rows are equal."""
    x, y = jnp.asarray(X[:9]), Y[:9]
    pairs = kernel_function_space(gaussian, jnp.zeros(()))
    space = kernel_function_space(gaussian, jnp.zeros(()), x=x)
    alpha, w = pairs.start(), jnp.ones(9)
    solve = functools.partial(pairs.solver.run, pairs.problem.lower, alpha, w, ())
    coefficients, truth = (solve((inputs, y))[0] for inputs in (x, pairs.inputs(x)))
    np.testing.assert_array_equal(coefficients, truth)
    assert np.isnan(jax.jit(space.problem.lower)(w, alpha, (XV, YV)))
