"""neural-tangents through its adapter: it works, and `jax` is what it was."""

import functools
import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close

from ntk._compat import neural_tangents

# One fresh interpreter, without neural-tangents, then with one that is broken, then with ours.
PROGRAM = """
import json, sys
sys.path[:0] = sys.argv[2:]  # with a TensorFlow that cannot be imported
import ntk
found = {"with ntk": "neural_tangents" in sys.modules}

import jax, jax.core, jax.example_libraries.stax, jax.experimental.ode, jax.extend.core
from jax.interpreters import ad
from ntk._compat import neural_tangents

places = jax, jax.core, jax.extend.core, ad
before = [dir(place) for place in places]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "neural_tangents":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def attempt():
    try:
        nt = neural_tangents()
        message = ""
    except ImportError as error:
        nt, message = None, str(error)
    return [dir(place) for place in places] == before, nt, message

sys.meta_path.insert(0, Blocker())
found["missing"] = attempt()
del sys.meta_path[0]
sys.path.insert(0, sys.argv[1])
found["broken"] = attempt()
del sys.path[0]
same, nt, message = attempt()
left = {"jax.util", "neural_tangents.experimental", "tensorflow"} & set(sys.modules)
found["here"] = same, hasattr(nt, "experimental"), message, sorted(left)
print(json.dumps(found))
"""


@functools.cache
def fresh_interpreter():
    with tempfile.TemporaryDirectory() as folder:
        broken, tensorflow = pathlib.Path(folder, "broken"), pathlib.Path(folder, "tensorflow")
        (broken / "neural_tangents").mkdir(parents=True)
        lines = "from jax.core import something_long_gone"
        (broken / "neural_tangents" / "__init__.py").write_text(lines)
        tensorflow.mkdir()
        for name in ("tensorflow", "tf2jax"):
            (tensorflow / f"{name}.py").write_text("raise RuntimeError('imported')")
        command = [sys.executable, "-W", "error", "-c", PROGRAM, broken, tensorflow]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_ntk_imports_no_neural_tangents():
    assert not fresh_interpreter()["with ntk"]


def test_jax_and_the_table_of_modules_are_unchanged_afterwards():
    same, experimental, message, left = fresh_interpreter()["here"]
    assert same and not experimental and not message
    assert not left


def test_missing_neural_tangents_is_one_sentence_on_what_to_install():
    same, _, message = fresh_interpreter()["missing"]
    assert same
    assert message.startswith("neural_tangents: expected neural-tangents 0.6.5, got none; ")
    assert "pip install --no-deps neural-tangents==0.6.5" in message


def test_version_that_fails_to_import_is_named():
    same, _, message = fresh_interpreter()["broken"]
    assert same
    assert message.startswith("neural_tangents: expected a version that JAX ")
    assert "something_long_gone" in message


def network(nt, width=16):
    layers = nt.stax.Dense(width), nt.stax.Erf(), nt.stax.Dense(width), nt.stax.Relu()
    return nt.stax.serial(*layers, nt.stax.Dense(2))


def test_infinite_kernel_of_one_relu_layer_is_the_arc_cosine_kernel():
    # Cho & Saul (2009): E[relu(u) relu(v)] = (sin t + (pi - t) cos t) / 2 pi for unit variances,
    # and E[relu'(u) relu'(v)] = (pi - t) / 2 pi.
    nt = neural_tangents()
    _, _, kernel = nt.stax.serial(nt.stax.Dense(1), nt.stax.Relu(), nt.stax.Dense(1))
    t = 0.7
    x = jnp.sqrt(2) * jnp.array([[1.0, 0.0], [jnp.cos(t), jnp.sin(t)]])
    nngp = (jnp.sin(t) + (jnp.pi - t) * jnp.cos(t)) / (2 * jnp.pi)
    ntk = nngp + jnp.cos(t) * (jnp.pi - t) / (2 * jnp.pi)
    got = kernel(x, None, ("nngp", "ntk"))
    assert_close((got.nngp[0, 1], got.ntk[0, 1]), (nngp, ntk), f32=1e-5)


@pytest.mark.parametrize("implementation", [1, 2])
def test_finite_kernel_is_that_of_the_jacobian(implementation):
    nt = neural_tangents()
    init, apply, _ = network(nt)
    x = jax.random.normal(jax.random.key(0), (3, 4))
    _, params = init(jax.random.key(1), x.shape)
    jacobian = jax.tree.leaves(jax.jacrev(apply)(params, x))
    expected = sum(
        jnp.einsum("aip,bjp->abij", j.reshape(3, 2, -1), j.reshape(3, 2, -1)) for j in jacobian
    )
    kernel = nt.empirical_ntk_fn(apply, trace_axes=(), vmap_axes=0, implementation=implementation)
    assert_close(jax.jit(kernel)(x, None, params), expected, f32=1e-5)
