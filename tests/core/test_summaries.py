"""Results print as short tables, whatever their arrays are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import DTYPES, hypergradient
from problems import follower

import bilevel
import ntk

PROBLEM = follower(lambda w, alpha, batch: jnp.sum((w - 2.0) ** 2))
ALPHA = np.zeros(3, DTYPES[-1])
START = ALPHA, np.zeros(3), None, None
COMPILED = jax.jit(bilevel.hypergradient(PROBLEM, bilevel.implicit()))


def hyper(alpha):
    return COMPILED(alpha, jnp.zeros(3), None, None)


def test_a_hypergradient_prints_its_value_norm_and_error():
    text = repr(hyper(ALPHA))
    assert "outer loss  12" in text and f"norm 6.928, {ALPHA.dtype}[3]" in text
    assert "% of the norm" in text and text.endswith("converged   yes")


@pytest.mark.long
def test_an_estimate_over_the_limit_and_a_missing_one_say_why():
    saddle = bilevel.Problem(lambda w, a, b: jnp.sum((w - a) ** 3), PROBLEM.outer)
    solver, problems = bilevel.unrolled(0.1, 1), (PROBLEM, saddle)
    one_step, at_saddle = (hypergradient(p, solver, *START, diagnostics=True) for p in problems)
    assert repr(one_step).endswith("no: the error is over 1 % of the norm")
    info = at_saddle.info
    assert "error_estimate   inf" in repr(info) and "no: the lower Hessian" in repr(info)


def test_traced_batched_and_deleted_arrays_print_as_dtype_and_shape():
    seen = []
    jax.eval_shape(lambda alpha: seen.append(repr(hyper(alpha))), ALPHA)
    batched = jax.vmap(hyper)(jnp.zeros((2, 3)))
    seen += [repr(batched), repr(batched.info)]
    deleted = hyper(jnp.ones(3))
    jax.tree.map(lambda x: x.delete(), deleted)
    seen.append(repr(deleted))
    name = ALPHA.dtype.name
    assert f"outer loss  {name}[]" in seen[0] and f"error       {name}[2]" in seen[1]
    assert f"error_estimate   {name}[2]" in seen[2] and "converged   bool[]" in seen[3]


def test_a_search_prints_its_course():
    arguments = PROBLEM, bilevel.unrolled(0.1, 3), optax.sgd(0.1), ALPHA, jnp.zeros(3), None, None
    result = bilevel.search(*arguments, steps=4)
    text = repr(result)
    assert "steps       4\n  outer loss  12 -> " in text and "stopped     after all steps" in text
    result.history["value"].delete()
    assert f"outer loss  {ALPHA.dtype}[4]" in repr(result)
    compiled = jax.jit(lambda a: bilevel.search(*arguments[:3], a, *arguments[4:], steps=4))
    assert "outer loss  12 -> " in repr(compiled(ALPHA))
    assert f"outer loss  {ALPHA.dtype}[2, 4]" in repr(jax.vmap(compiled)(jnp.zeros((2, 3))))


@pytest.mark.parametrize("batched", [False, True])
def test_kernels_and_certificates_print_their_errors(batched):
    x = jnp.eye(3)
    kernel = lambda x: ntk.network_kernel(x, activations=[ntk.relu])  # noqa: E731
    kernels = jax.vmap(kernel)(x[None]) if batched else kernel(x)
    shape = "[1, 3, 3]" if batched else "[3, 3]"
    assert f"nngp   {x.dtype}{shape}" in repr(kernels) and "at most" in repr(kernels)
    certificate = ntk.certify_simplex(np.eye(3)[None, None])
    assert "(proved)" in repr(certificate) and repr(certificate).endswith("converged   yes")
