"""Forward solvers without convexity: they reach stationary points of any smooth bounded loss."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import DTYPES, hypergradient, long_except, tolerance

import bilevel


def stationarity(lower, w, start):
    """Return the gradient's norm relative to the stated scale, ``|g| + |H w|`` at the start."""

    def slope(w):
        return jax.grad(lower)(w, None, None)

    _, bent = jax.jvp(slope, (start,), (start,))
    return optax.tree.norm(slope(w)) / (optax.tree.norm(slope(start)) + optax.tree.norm(bent))


def solve(lower):
    """Return ``(stationarity, decrease of the loss)`` from a start."""

    def run(start):
        w = bilevel.newton().run(lower, None, start, (), None)[0]
        return stationarity(lower, w, start), lower(start, None, None) - lower(w, None, None)

    return run


def small_enough(left, dtype):
    # The stated tolerance is 1e-9. In float32 the gradient's rounding is the limit.
    return left < (2e-9 if dtype == np.float64 else 1e-4)


def wells(w, alpha, batch):
    return jnp.sum((w**2 - jnp.exp(alpha)) ** 2) / 4


@pytest.mark.parametrize("dtype", long_except(DTYPES[-1:], DTYPES))
def test_a_start_of_negative_curvature_has_its_well_and_its_hypergradient(dtype):
    problem = bilevel.Problem(wells, lambda w, alpha, batch: jnp.sum((w - 2) ** 2))
    start = dtype(0), jnp.array(0.5, dtype), None, None
    hyper = hypergradient(problem, bilevel.implicit(), *start, diagnostics=True)
    # w = exp(alpha / 2), so d (w - 2)^2 / d alpha = (w - 2) w.
    np.testing.assert_allclose(hyper.w, 1, rtol=1e-6)
    np.testing.assert_allclose(hyper.grad, -1, rtol=1e-6)
    assert hyper.info.converged


def test_a_point_of_gradient_0_is_stationary_and_stays():
    np.testing.assert_array_equal(bilevel.newton().run(wells, 0.0, jnp.zeros(2), (), None)[0], 0)


FUNCTIONS = {
    "rosenbrock": (lambda x, y: (1 - x) ** 2 + 100 * (y - x**2) ** 2, 2),
    "himmelblau": (lambda x, y: (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2, 4),
    # Left of its minimum at (3, 0.5) its valley leads to infinity.
    "beale": (
        lambda x, y: sum(
            (c - (x + 3) * (1 - (y + 0.5) ** k)) ** 2 for k, c in ((1, 1.5), (2, 2.25), (3, 2.625))
        ),
        0.5,
    ),
    "camel": (lambda x, y: (4 - 2.1 * x**2 + x**4 / 3) * x**2 + x * y + 4 * (y**4 - y**2), 2),
    "log cosh": (lambda x, y: jnp.logaddexp(x, -x) + jnp.logaddexp(y - 3, 3 - y), 300),
    "root": (lambda x, y: jnp.sqrt(1 + x**2) + jnp.sqrt(1 + (y - 1) ** 2), 1e4),
    "welsch": (
        lambda x, y: 2 - jnp.exp(-(x**2) / 2) - jnp.exp(-((y - 1) ** 2) / 2) + 0.01 * (x**2 + y**2),
        8,
    ),
}


USUAL = "rosenbrock", "beale", "log cosh"  # a valley, one to infinity, and small curvature


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(USUAL, FUNCTIONS))
def test_newton_reaches_a_stationary_point_of_the_classic_functions(name):
    dtype = DTYPES[-1]
    function, size = FUNCTIONS[name]
    starts = size * np.random.default_rng(0).uniform(-1, 1, size=(20, 2))
    run = jax.jit(jax.vmap(solve(lambda w, alpha, batch: function(w[0], w[1]))))
    left, lowered = run(jnp.asarray(starts, dtype))
    assert small_enough(left, dtype).all()
    assert (lowered >= 0).all()


def network(sizes, decay):
    def lower(w, alpha, batch):
        x = jnp.asarray(ROWS[:, : sizes[0]], jnp.result_type(w[0][0]))
        h = x
        for k, (matrix, shift) in enumerate(w):
            h = h @ matrix + shift
            h = jnp.tanh(h) if k < len(w) - 1 else h
        penalty = decay * optax.tree.norm(w, squared=True)
        return jnp.mean((h[:, 0] - jnp.sin(x.sum(1))) ** 2) + penalty

    def start(seed):
        rng = np.random.default_rng(seed)
        shapes = itertools.pairwise(sizes)
        return [(rng.normal(size=s) / s[0] ** 0.5, 0.1 * rng.normal(size=s[1])) for s in shapes]

    return lower, start


ROWS = np.random.default_rng(0).normal(size=(30, 4))


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_newton_trains_networks_to_a_stationary_point(dtype):
    lower, start = network((3, 6, 6, 1), 0.01)
    starts = [jax.tree.map(lambda x: jnp.asarray(x, dtype), start(seed)) for seed in range(20)]
    starts = jax.tree.map(lambda *x: jnp.stack(x), *starts)
    left, lowered = jax.jit(jax.vmap(solve(lower)))(starts)
    assert small_enough(left, dtype).all()
    assert (lowered > 0.1).all()


@pytest.mark.long
def test_a_network_has_the_hypergradient_of_its_weight_decay():
    """Truth: central differences of the outer loss along the path of lower solutions."""
    lower, start = network((3, 4, 1), 0.0)

    def decayed(w, alpha, batch):
        return lower(w, alpha, batch) + jnp.exp(alpha) * optax.tree.norm(w, squared=True)

    fn = jax.jit(bilevel.hypergradient(bilevel.Problem(decayed, lower), bilevel.implicit()))
    for seed in range(4):
        hyper = fn(-4.0, jax.tree.map(jnp.asarray, start(seed)), None, None)
        assert hyper.info.converged and hyper.grad != 0
        h = tolerance(1e-4, 1e-2)
        above, below = (fn(-4.0 + t, hyper.w, None, None).value for t in (h, -h))
        slope = (above - below) / (2 * h)
        np.testing.assert_allclose(hyper.grad, slope, rtol=tolerance(1e-5, 0.05))


def of_size(curve, solver):
    target = np.array([1.0, -2.0, 0.5])

    @jax.jit
    def run(size, unit, start):
        def lower(w, alpha, batch):
            return size * jnp.sum(curve(w / unit - target.astype(unit.dtype)))

        first = start * unit * jnp.ones_like(unit, shape=3)
        return solver.run(lower, None, first, (), None)[0] / unit

    return run, target


SOLVERS = {"newton": bilevel.newton(), "lbfgs": bilevel.lbfgs()}
CURVES = {"cosh": jnp.cosh, "square": lambda v: v**2 * np.array([1.0, 3.0, 10.0], v.dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("curve", long_except(["cosh"], CURVES))
@pytest.mark.parametrize("name", SOLVERS)
def test_forward_solvers_do_not_see_the_units_of_loss_and_weights(name, curve, dtype):
    run, target = of_size(CURVES[curve], SOLVERS[name])
    narrow = dtype == np.float32
    sizes = (0, -30, 30, *(-60, 60, -150, 200) * (not narrow))
    units = (0, -6, 6, 10, 30, -30, *(-60, 100) * (not narrow))
    for size in sizes:
        for unit in units:
            if abs(size - unit) > 37 and narrow:
                continue  # a slope of 10^(size - unit) is out of range
            for start in 0.0, 0.3:
                minimum = run(*(jnp.asarray(v, dtype) for v in (10.0**size, 10.0**unit, start)))
                np.testing.assert_allclose(minimum, target, rtol=1e-4 if narrow else 1e-7)


def test_a_large_constant_in_a_loss_does_not_overflow():
    def lower(w, alpha, batch):
        return np.float32(1e10) + np.float32(1e-30) * jnp.sum(jnp.cosh(w - 1))

    for solver in SOLVERS.values():
        minimum = solver.run(lower, None, jnp.zeros(2, jnp.float32), (), None)[0]
        np.testing.assert_allclose(minimum, 1, rtol=1e-5)


@pytest.mark.parametrize("make", [bilevel.newton, bilevel.lbfgs])
def test_each_of_the_steps_lowers_the_loss(make):
    def lower(w, alpha, batch):
        return jnp.sum(jnp.cosh(w - jnp.arange(3.0)))

    start = jnp.zeros(3)
    ends = [make(k).run(lower, None, start, (), None)[0] for k in (1, 2, 3)]
    values = [lower(w, None, None) for w in (start, *ends)]
    assert all(later < earlier for earlier, later in itertools.pairwise(values))
