"""Test that programs are read alike on every JAX version, and that NaN reaches derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ntk.internal.checks import nan_unless, nan_where
from ntk.internal.jaxprs import CALLS, bind, inner_jaxprs, interpret, scan_operands, settle_carry

x = np.ones((4, 3))
scale = np.arange(3.0)


@pytest.mark.parametrize(
    ("body", "init", "xs", "expected"),
    [
        (lambda c, row: (c + scale * row, None), x[0], x, (1, 1)),
        (lambda c, row: (c, scale + row), (), x, (1, 0)),
        (lambda c, _: ((c[1], c[0] * scale), c), (x[0], x[1]), None, (1, 2)),
        (lambda c, row: (c + row[0].sum(), row), 0.0, (x, x), (0, 1)),
        (
            lambda c, row: (jax.random.split(c)[0], jax.random.normal(c)),
            jax.random.key,  # called by the test
            x,
            (0, 1),
        ),
    ],
)
def test_operands_of_a_scan(body, init, xs, expected):
    init = init(0) if callable(init) else init
    program = jax.make_jaxpr(lambda init, xs: jax.lax.scan(body, init, xs, length=4))(init, xs)
    (scan,) = (e for e in program.eqns if e.primitive.name == "scan")
    assert scan_operands(scan) == expected


def test_a_program_is_interpreted_with_facts_about_arrays():
    """Count the sines on the way from the input, through a call and a loop."""

    def f(x):
        (y,) = jax.jit(lambda x: (jnp.sin(x) + scale,))(x)
        return jax.lax.scan(lambda c, row: (jnp.sin(c) * row, c), y, x), y

    def rule(eqn, counts):
        if eqn.primitive.name == "scan":
            body = inner_jaxprs(eqn)[0]
            return settle_carry(
                lambda counts: interpret(body, counts, rule, constant=lambda _: 0),
                counts,
                *scan_operands(eqn),
                join=lambda old, new: min(max(old, new), 5),
            )
        most = max(counts, default=0) + (eqn.primitive.name == "sin")
        return [most] * len(eqn.outvars)

    program = jax.make_jaxpr(f)(jnp.ones((3, 3)))
    assert interpret(program, [0], rule, constant=lambda _: 0, enter=CALLS) == [6, 5, 1]
    values = interpret(program, [jnp.ones((3, 3))], bind, enter=CALLS)
    expected = jax.tree.leaves(f(jnp.ones((3, 3))))
    assert all((a == b).all() for a, b in zip(values, expected, strict=True))


def test_nan_for_a_whole_result_and_for_single_entries():
    assert jnp.isnan(jnp.stack(jax.value_and_grad(lambda x: nan_unless(x > 0, x))(-1.0))).all()
    assert jax.value_and_grad(lambda x: nan_unless(x > 0, x))(2.0) == (2, 1)
    entries = jax.jit(lambda x: nan_where(jnp.array([True, False]), x))
    assert jnp.isnan(entries(jnp.ones(2))).tolist() == [True, False]
    assert jax.grad(lambda x: entries(x)[0])(jnp.ones(2)).tolist() == [jnp.inf, 0]
    assert jax.grad(lambda x: entries(x)[1])(jnp.ones(2)).tolist() == [0, 1]
