"""neural-tangents through its adapter: it works, and `jax` is what it was."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close

from ntk._compat import neural_tangents


def run(program, *path):
    """The last line that a fresh interpreter prints."""
    program = "import sys\nsys.path[:0] = " + repr(list(map(str, path))) + textwrap.dedent(program)
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_importing_ntk_imports_no_neural_tangents():
    assert run("\nimport ntk\nprint('neural_tangents' in sys.modules)") == "False"


def test_jax_and_the_table_of_modules_are_unchanged_afterwards(tmp_path):
    # A TensorFlow that cannot be imported: neither it nor tf2jax is asked for.
    for name in ("tensorflow", "tf2jax"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    program = """
    import jax, jax.core, jax.example_libraries.stax, jax.experimental.ode, jax.extend.core
    from jax.interpreters import ad
    places = jax, jax.core, jax.extend.core, ad
    before = [dir(place) for place in places]
    from ntk._compat import neural_tangents
    nt = neural_tangents()
    placeholders = {"jax.util", "neural_tangents.experimental", "tensorflow"} & set(sys.modules)
    print([dir(p) for p in places] == before, placeholders, hasattr(nt, "experimental"))
    """
    assert run(program, tmp_path) == "True set() False"


def test_missing_neural_tangents_is_one_sentence_on_what_to_install():
    program = """
    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name == "neural_tangents":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Blocker())
    from ntk._compat import neural_tangents
    try:
        neural_tangents()
    except ImportError as error:
        print(error)
    """
    message = run(program)
    assert message.startswith("neural_tangents: expected neural-tangents 0.6.5, got none; ")
    assert "pip install --no-deps neural-tangents==0.6.5" in message


def test_version_that_fails_to_import_is_named(tmp_path):
    package = tmp_path / "neural_tangents"
    package.mkdir()
    (package / "__init__.py").write_text("from jax.core import something_long_gone")
    program = """
    import jax.core
    before = dir(jax.core)
    from ntk._compat import neural_tangents
    try:
        neural_tangents()
    except ImportError as error:
        print(dir(jax.core) == before, error)
    """
    message = run(program, tmp_path)
    assert message.startswith("True neural_tangents: expected a version that JAX ")
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
