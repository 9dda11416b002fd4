"""Test kernels of inputs with rows divided over devices against one device."""

import pytest
from helpers import on_devices

pytestmark = pytest.mark.long
PROGRAM = """
import functools, json, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import ntk
from ntk import networks as nets

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x, x2, y = (jnp.asarray(rng.normal(size=s)) for s in ((24, 4), (8, 4), (24, 3)))
w = jnp.asarray(rng.normal(size=(4, 5)))
apply = lambda w, x: jnp.tanh(x @ w)
net = nets.serial(nets.dense(2.0), nets.act(ntk.relu), nets.dense())
relus = functools.partial(ntk.network_kernel, activations=[ntk.relu, ntk.relu])
laplace = lambda a, b: jnp.exp(-jnp.abs(a[:, None] - b).sum(-1))
operator = functools.partial(ntk.KernelOperator, laplace, tile=4)


def regression(x, x2, y):
    K = operator(x)
    partial = ntk.partial_cholesky(K, 6, key=jax.random.key(0))
    fit = ntk.iterative_regression(K, y, penalty=0.1, tol=1e-10, preconditioner=partial)
    return fit.predict(K.at(x2))


CASES = {
    "network_kernel": lambda x, x2, y: relus(x).ntk,
    "network_kernel of two": lambda x, x2, y: relus(x2, x).ntk,
    "network_kernel in jit": lambda x, x2, y: jax.jit(lambda x: relus(x).ntk)(x),
    "network": lambda x, x2, y: net.kernel(x, x2).ntk,
    "kernel_matrix": lambda x, x2, y: ntk.kernel_matrix(laplace, x),
    "empirical_kernel": lambda x, x2, y: ntk.empirical_kernel(apply, w, x, x2),
    "empirical_nngp": lambda x, x2, y: ntk.empirical_nngp(apply, w, x),
    "its diagonal": lambda x, x2, y: ntk.EmpiricalOperator(apply, w, x).diagonal(),
    "vector product": lambda x, x2, y: ntk.kernel_vector_product(apply, w, x)(y[:, 0]),
    "kernel_regression": lambda x, x2, y: ntk.kernel_regression(relus(x), y).weights,
    "product": lambda x, x2, y: operator(x) @ y,
    "product in jit": lambda x, x2, y: jax.jit(lambda K, y: K @ y)(operator(x), y),
    "diagonal": lambda x, x2, y: operator(x).diagonal(),
    "columns": lambda x, x2, y: operator(x).columns(jnp.array([0, 7, 23])),
    "other rows": lambda x, x2, y: operator(x2, x) @ y,
    "finite": lambda x, x2, y: ntk.EmpiricalOperator(apply, w, x2, x) @ y,
    "regression": regression,
}


def errors(kind, under_mesh, devices=4):
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(kind,), devices=jax.devices()[:devices])
    placed = [jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (x, x2, y)]
    error_by_case = {}
    for name, case in CASES.items():
        truth = np.asarray(case(x, x2, y))
        if under_mesh:
            with jax.set_mesh(mesh):
                got = case(*placed)
        else:
            got = case(*placed)
        error_by_case[name] = float(np.abs(np.asarray(got) - truth).max() / np.abs(truth).max())
    return error_by_case


def ring(devices):
    mesh = jax.make_mesh((devices,), ("d",), (AxisType.Auto,), devices=jax.devices()[:devices])
    x, v = (jnp.asarray(rng.normal(size=(devices * 5, 3))) for _ in range(2))
    put = lambda a: jax.device_put(a, NamedSharding(mesh, P("d")))
    K = operator(put(x))
    text = jax.jit(lambda K, v: K @ v).lower(K, put(v)).compile().as_text()
    moved = set(re.findall(r" (all-[a-z]+|collective-permute)(?:-start)?\\(", text))
    truth = laplace(x, x) @ v
    return float(jnp.abs(np.asarray(K @ put(v)) - truth).max()), sorted(moved)


def several_axes(spec):
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    K = operator(jax.device_put(x, NamedSharding(mesh, spec)))
    return float(jnp.abs(np.asarray(K @ y) - laplace(x, x) @ y).max())


print(json.dumps({
    "automatic": errors(AxisType.Auto, False),
    "explicit": errors(AxisType.Explicit, False),
    "set_mesh": errors(AxisType.Explicit, True),
    "axes": {str(spec): several_axes(spec) for spec in (P("a"), P(("a", "b")), P("b", "a"))},
    "ring": {str(devices): ring(devices) for devices in (2, 3, 4)},
}))
"""


@pytest.mark.parametrize("axes", ["automatic", "explicit", "set_mesh"])
def test_kernels_of_divided_rows_are_one_devices(axes):
    errors = on_devices(4, PROGRAM)[axes]
    assert {name: error for name, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("devices", ["2", "3", "4"])
def test_products_go_round_in_a_ring(devices):
    error, moved = on_devices(4, PROGRAM)["ring"][devices]
    assert error < 1e-12
    assert moved == ["collective-permute"]  # no device ever has all inputs


def test_rows_along_one_axis_of_two_or_along_both():
    assert max(on_devices(4, PROGRAM)["axes"].values()) < 1e-12
