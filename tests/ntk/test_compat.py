"""Test that neural-tangents works through its adapter, and that `jax` is unchanged."""

import functools
import json
import pathlib
import tempfile
import warnings

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, run, tangent_kernel

from ntk import gradient_flow, neural_tangents

# A fresh interpreter: without neural-tangents, with a broken one, then with the installed one.
PROGRAM = """
import json, sys
sys.path[:0] = sys.argv[2:]  # with a TensorFlow that cannot be imported
import ntk
results = {"with ntk": "neural_tangents" in sys.modules}

import jax, jax.core, jax.example_libraries.stax, jax.experimental.ode, jax.extend.core
from jax.interpreters import ad
places = jax, jax.core, jax.extend.core, ad
before = [dir(place) for place in places]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "neural_tangents":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def attempt():
    try:
        nt = ntk.neural_tangents()
        message = ""
    except ImportError as error:
        nt, message = None, str(error)
    return [dir(place) for place in places] == before, nt, message

sys.meta_path.insert(0, Blocker())
results["missing"] = attempt()
del sys.meta_path[0]
sys.path.insert(0, sys.argv[1])
results["broken"] = attempt()
del sys.path[0]
same, nt, message = attempt()
left = {"jax.util", "neural_tangents.experimental", "tensorflow"} & set(sys.modules)
results["here"] = same, hasattr(nt, "experimental"), message, sorted(left)
import neural_tangents
from neural_tangents import predict, stax
results["ordinary"] = neural_tangents is nt, stax is nt.stax, predict is nt.predict
print(json.dumps(results))
"""


@functools.cache
def fresh_interpreter():
    with tempfile.TemporaryDirectory() as folder:
        broken, tensorflow = pathlib.Path(folder, "broken"), pathlib.Path(folder, "tensorflow")
        (broken / "neural_tangents").mkdir(parents=True)
        program = broken / "neural_tangents/__init__.py"
        program.write_text("from jax.core import something_long_gone")
        tensorflow.mkdir()
        for name in ("tensorflow", "tf2jax"):
            (tensorflow / f"{name}.py").write_text("raise RuntimeError('imported')")
        printed = run("python", "-W", "error", "-c", PROGRAM, broken, tensorflow)
    return json.loads(printed.splitlines()[-1])


def test_the_import_is_lazy_and_leaves_jax_and_the_modules_unchanged():
    assert not fresh_interpreter()["with ntk"]
    same, experimental, message, left = fresh_interpreter()["here"]
    assert same and not (experimental or message or left)
    assert all(fresh_interpreter()["ordinary"])


def test_missing_neural_tangents_raises_with_the_command_to_install_it():
    same, _, message = fresh_interpreter()["missing"]
    assert same
    assert message.startswith("neural_tangents: expected neural-tangents 0.6.5, got none; ")
    assert "pip install --no-deps neural-tangents==0.6.5" in message


def test_version_that_fails_to_import_is_named():
    same, _, message = fresh_interpreter()["broken"]
    assert same and message.startswith("neural_tangents: expected a version that JAX ")
    assert "something_long_gone" in message


@pytest.mark.long
@pytest.mark.parametrize("implementation", [0, 1, 2, 3])  # AUTO is 0, structured derivatives 3
def test_finite_kernel_is_that_of_the_jacobian(implementation):
    nt = neural_tangents()
    layers = nt.stax.Dense(16), nt.stax.Erf(), nt.stax.Dense(16), nt.stax.Relu()
    init, apply, _ = nt.stax.serial(*layers, nt.stax.Dense(2))
    x = jax.random.normal(jax.random.key(0), (3, 4))
    _, params = init(jax.random.key(1), x.shape)
    kernel = nt.empirical_ntk_fn(apply, trace_axes=(), vmap_axes=0, implementation=implementation)
    assert_close(jax.jit(kernel)(x, None, params), tangent_kernel(apply, params, x), f32=1e-5)


def scanned(w, x):
    """Three equal layers with a shared weight, after one with a bias."""
    first = jax.nn.gelu(x @ w["in"] + w["bias"])
    layers = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w["shared"]), None), first, length=3)
    return layers[0] @ w["out"] + w["unused"][:0].sum()


def normalised(w, x):
    rows = jax.nn.softmax(jnp.concatenate([x @ w["in"], x @ w["in"] ** 2], 1))
    return jnp.sort(rows @ jnp.concatenate([w["out"], w["shared"][:, :2]]) * w["bias"][:2], axis=-1)


def selected(w, x):
    return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x @ w["in"]) @ w["out"]


@pytest.mark.long
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("apply", [scanned, normalised, selected, jax.jit(jax.checkpoint(scanned))])
def test_structured_derivatives_are_those_of_products_for_any_network(apply, traced):
    nt = neural_tangents()
    shapes = {"in": (4, 5), "bias": (5,), "shared": (5, 5), "out": (5, 2), "unused": (3,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    w = {n: jax.random.normal(k, shapes[n]) for n, k in zip(shapes, keys, strict=True)}
    x1, x2 = jax.random.normal(jax.random.key(1), (5, 4)), jax.random.normal(keys[0], (3, 4))
    kernels = [nt.empirical_ntk_fn(apply, trace_axes=(), implementation=i) for i in (2, 3)]
    with warnings.catch_warnings(action="ignore"):  # it warns about operations without a rule
        truth, structured = (jax.jit(k)(x1, x2, w) if traced else k(x1, x2, w) for k in kernels)
    assert_close(structured, truth, f64=1e-12, f32=1e-5)


@pytest.mark.long
def test_convolutions_have_structured_derivatives_over_batches_and_their_diagonal():
    nt = neural_tangents()
    layers = nt.stax.Conv(3, (3, 3)), nt.stax.Relu(), nt.stax.AvgPool((2, 2))
    init, apply, _ = nt.stax.serial(*layers, nt.stax.Flatten(), nt.stax.Dense(2))
    x = jax.random.normal(jax.random.key(0), (4, 6, 6, 2))
    _, params = init(jax.random.key(1), x.shape)
    for axes in ({"trace_axes": (-1,)}, {"trace_axes": (), "diagonal_axes": (0,)}):
        kernel = functools.partial(nt.empirical_ntk_fn, apply, vmap_axes=0, **axes)
        truth, structured = (kernel(implementation=i)(x, None, params) for i in (1, 3))
        assert_close(structured, truth, f64=1e-12, f32=1e-5)


def test_a_network_without_structured_derivatives_is_named_with_the_implementations_to_use():
    def branches(w, x):
        both = jax.lax.cond(x[0, 0] > 0, lambda: (x @ w, jnp.sin(x @ w)), lambda: (x @ w, x @ w))
        return both[0] * both[1]

    kernel = neural_tangents().empirical_ntk_fn(branches, implementation=3)
    with pytest.raises(ValueError, match=r"^implementation: expected 1 or 2 .* \(cond\), got"):
        jax.jit(kernel)(jnp.ones((2, 3)), None, jnp.ones((3, 1)))


def test_the_largest_learning_rate_is_that_of_the_largest_eigenvalue():
    K = jnp.diag(jnp.array([1.0, 4.0, 2.0]))
    assert_close(neural_tangents().predict.max_learning_rate(K), 2 * 3 / 4)


@pytest.mark.long
@pytest.mark.parametrize("t", [None, 2.0])
def test_predictions_work_with_kernels_inside_and_outside_of_a_trace(t):
    predict = neural_tangents().predict
    K, y = jnp.array([[2.0, 1.0], [1.0, 2.0]]), jnp.array([[1.0], [0.0]])

    def flow(K):
        return predict.gradient_descent_mse(K, y)(t, None, 0.0, K)

    truth = gradient_flow(K, y, jnp.inf if t is None else t / y.size, cross=K)
    assert_close(jax.vmap(flow)(jnp.stack([K, K])), jnp.stack([truth, truth]), f32=1e-5)
    assert_close(jax.jit(flow)(K), truth, f32=1e-5)
    known = predict.gradient_descent_mse(K, y)
    for _ in range(2):  # the second call uses the cache of the first
        assert_close(jax.jit(lambda k: known(t, None, 0.0, k))(K), truth, f32=1e-5)
