"""Several devices: each solves its own problem in ``shard_map``, and ``gram`` shards its batch."""

import pytest
from helpers import on_devices

pytestmark = pytest.mark.long
PROGRAM = """
import functools, json, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import bilevel
from bilevel.contracts import Point
from bilevel.nets.convolution import convolve_images

jax.config.update("jax_enable_x64", True)
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)


def lower(w, alpha, b):
    return jnp.sum(jnp.cosh(w - b)) + 0.5 * jnp.sum(jnp.exp(alpha) * w**2)


def outer(w, alpha, b):
    return jnp.sum((w - 1) ** 2) + 0.1 * jnp.sum(alpha**2)


def shard_map_error(solver, variants, diagnostics=False):
    # The largest error, against the same problems without shard_map.
    fn = bilevel.hypergradient(bilevel.Problem(lower, outer), solver, diagnostics=diagnostics)
    alpha, w0, b = (jnp.asarray(rng.normal(size=(4, 3))) for _ in range(3))
    alone = jax.jit(jax.vmap(fn, (0, 0, 0, None)))
    errors = []
    for one_alpha, one_w in variants:
        specs = [P() if one else P("d") for one in (one_alpha, one_w)]

        def local(alpha, w0, b):
            result = fn(alpha[0], w0[0], b[0], None)
            info = result.info.error_estimate[None] if diagnostics else result.value[None]
            return result.value[None], result.grad[None], info

        run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(*specs, P("d")), out_specs=P("d")))
        value, grad, info = run(alpha, w0, b)
        shared = [jnp.stack([x[0]] * 4) if one else x
                  for one, x in ((one_alpha, alpha), (one_w, w0))]
        truth = alone(*shared, b, None)
        # The derivative in what all devices share is the sum over them, as JAX has it.
        expected = truth.grad.sum(0) if one_alpha else truth.grad
        errors += [float(jnp.max(jnp.abs(value - truth.value))),
                   float(jnp.max(jnp.abs(grad - expected)))]
        assert jnp.isfinite(info).all()
    return max(errors)


def gram_figures():
    n, p = 64, 2048
    x = jnp.asarray(rng.normal(size=(n, p))) / np.sqrt(p)
    y, w, b = jnp.zeros(n), jnp.asarray(rng.normal(size=p)), jnp.asarray(rng.normal(size=p))
    inverse = bilevel.gram(lambda w, alpha, batch: jnp.tanh(batch[0] @ w), damping=0.1)

    def solve(w, b, x, y):
        return inverse(None, b, None, Point(w, None, (x, y)))

    placed = [jax.device_put(v, NamedSharding(mesh, s))
              for v, s in ((w, P()), (b, P()), (x, P("d")), (y, P("d")))]
    compiled = jax.jit(solve).lower(*placed).compile()
    gathered = re.findall(r"= (\\S+) all-gather", compiled.as_text())
    sizes = [int(np.prod([int(k) for k in re.search(r"\\[([\\d,]*)\\]", g)[1].split(",") if k]))
             for g in gathered]
    jacobian = (1 - jnp.tanh(x @ w) ** 2)[:, None] * x
    truth = jnp.linalg.solve(jacobian.T @ jacobian + 0.1 * jnp.eye(p), b)
    return {
        "gathered": max(sizes, default=0) / (n * p),
        "temporary": compiled.memory_analysis().temp_size_in_bytes / (8 * n * p),
        "error": float(jnp.max(jnp.abs(compiled(*placed) - truth))),
    }


def convolution_error(channels):
    x = jnp.asarray(rng.normal(size=(8, 36, 35, channels)))
    kernel = jnp.asarray(rng.normal(size=(3, 3, channels, 4)))

    def loss(kernel, x):
        return jnp.sum(jnp.tanh(0.01 * convolve_images(x, kernel)))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    def in_parts(kernel, x):
        return jax.grad(lambda kernel: jax.lax.psum(loss(kernel, x), "d"))(kernel)

    truth = jax.grad(loss)(kernel, x)
    errors = [jax.jit(in_parts)(kernel, x) - truth]
    explicit = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit):
        placed = jax.device_put(kernel, P()), jax.device_put(x, P("d"))
        errors += [jax.device_get(jax.jit(jax.grad(loss))(*placed)) - truth]
    return float(np.max(np.abs(errors)))


newton = bilevel.newton()
print(json.dumps({
    # With diagnostics below: alpha shared, the starts not.
    "cg": shard_map_error(bilevel.implicit(), [(True, True), (False, True), (False, False)]),
    "other solvers": max(
        shard_map_error(solver, [(False, True)])
        for solver in (
            bilevel.implicit(newton, bilevel.dense()),
            bilevel.implicit(newton, bilevel.neumann(3, 0.1)),
            bilevel.unrolled(0.05, 3),
        )
    ),
    "diagnostics": shard_map_error(bilevel.implicit(), [(True, False)], diagnostics=True),
    "gram": gram_figures(),
    "convolution": max(convolution_error(channels) for channels in (1, 3, 17)),
}))
"""


@pytest.mark.parametrize("which", ["cg", "other solvers", "diagnostics"])
def test_each_device_solves_its_own_problem_in_shard_map(which):
    # Truth: the same problems without shard_map.
    assert on_devices(4, PROGRAM)[which] < 1e-8


def test_a_shared_kernel_has_the_gradient_of_all_devices_images():
    assert on_devices(4, PROGRAM)["convolution"] < 1e-12


def test_gram_never_gathers_the_jacobian():
    figures = on_devices(4, PROGRAM)["gram"]
    assert figures["error"] < 1e-9  # truth: the p x p solve
    assert figures["gathered"] < 0.1  # the largest all-gather, in Jacobians
    assert figures["temporary"] < 0.6  # all temporary memory of a device, in Jacobians
