"""Reference calls take no more matrix products, memory and programs than they need.

Times are noisy, counts are not. A count above its number means lost speed: find the cause before
you raise the number. A count below it is progress: lower the number.
"""

import itertools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import cast
from problems import mean_squares, separate_penalties

import bilevel
import ntk
from bilevel.internal.conjugate_gradients import solve_conjugate_gradients

ROWS, WEIGHTS, STEPS = 40, 12, 20


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation of a compiled program, and the name of the first one."""
    bodies, name, entry = {}, "", ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = header[2]
            bodies[name], entry = [], name if header[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def called(line: str) -> Iterator[str]:
    yield from re.findall(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)", line)
    for group in re.findall(r"(?:branch|called)_computations=\{([^}]*)\}", line):
        yield from re.findall(r"[\w.\-]+", group)


def products(text: str) -> int:
    """Count products and convolutions as often as they run; a loop with a test runs once."""
    bodies, entry = computations(text)

    def count(name: str) -> int:
        total = 0
        for line in bodies[name]:
            own = re.search(r" (?:dot|convolution)\(|matmul", line.split("metadata=")[0])
            runs = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            inner = sum(count(name) for name in called(line) if name in bodies)
            total += bool(own) + (int(runs[1]) if runs else 1) * inner
        return total

    return count(entry)


MADE: list[str] = []  # an entry for each program that JAX has lowered


@jax.monitoring.register_event_duration_secs_listener
def _listen(event, *_, **__):
    if event.endswith("jaxpr_to_mlir_module_duration"):
        MADE.append(event)


def programs(call) -> int:
    before = len(MADE)
    jax.block_until_ready(call())
    return len(MADE) - before


def test_a_loop_counts_as_often_as_it_runs():
    a = jnp.ones((5, 5))

    def loop(a):
        inner = lambda b, _: (a @ b, None)  # noqa: E731
        outer = lambda b, _: (jax.lax.scan(inner, b, length=4)[0] @ a, None)  # noqa: E731
        return jax.lax.scan(outer, a, length=3)[0]

    assert products(jax.jit(loop).lower(a).compile().as_text()) == 3 * (4 + 1)


PROBLEM = bilevel.Problem(separate_penalties, mean_squares)


def arguments():
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(ROWS, WEIGHTS)), rng.normal(size=ROWS)) for _ in range(2)]
    return cast((np.zeros(WEIGHTS), np.zeros(WEIGHTS), *batches), jnp.float32)


def hypergradient(solver, estimate=False):
    fn = bilevel.hypergradient(PROBLEM, solver, diagnostics=estimate)

    def run(*args):
        hyper = fn(*args)
        return (hyper.grad, hyper.info) if estimate else hyper.grad

    return run


def implicit(inverse):
    return hypergradient(bilevel.implicit(bilevel.unrolled(0.1, STEPS), inverse))


def nngp(*args):
    return ntk.network_kernel(args[2][0], activations=[ntk.relu, ntk.relu]).ntk


def jacobian_kernel(*args):
    params = {"in": jnp.ones((WEIGHTS, 7), jnp.float32), "out": jnp.ones((7, 2), jnp.float32)}
    apply = lambda params, x: jnp.tanh(x @ params["in"]) @ params["out"]  # noqa: E731
    return ntk.empirical_kernel(apply, params, args[2][0])


GRAM = bilevel.gram(lambda w, alpha, batch: batch[0] @ w, damping=1.0)
RIDGE = bilevel.ridge(lambda alpha, x: x * jnp.exp(-alpha / 2), lambda alpha: 1.0)
# Forward, a gradient step takes 2 products (X w, X' r); backward, its mixed derivative takes 2 more
# (X v, X' X v). The outer gradient takes 2. Names: products and bytes of temporaries.
CALLS = {
    "unrolled, 5 steps": (lambda: hypergradient(bilevel.unrolled(0.1, 5)), 4 * 5 + 2, 1408),
    "unrolled, 20 steps": (lambda: hypergradient(bilevel.unrolled(0.1, 20)), 4 * 20 + 2, 2112),
    # 20 steps and the outer gradient take 42 products; the inverse takes the others.
    "implicit, cg": (lambda: implicit(bilevel.cg(10)), 42 + 6, 1976),
    "implicit, neumann": (lambda: implicit(bilevel.neumann(10, 0.1)), 42 + 20, 1136),
    "implicit, dense": (lambda: implicit(bilevel.dense()), 42 + 4, 2992),
    "implicit, nystrom": (lambda: implicit(bilevel.nystrom(5, 1e-3)), 42 + 8, 2304),
    "implicit, gram": (lambda: implicit(GRAM), 42 + 20, 20656),
    # The last 12 products and 968 bytes are for free directions; 10 of 12 run if there are any. The
    # rounding of terms in the bound takes 576 bytes.
    "info": (lambda: hypergradient(bilevel.unrolled(0.1, STEPS), True), 82 + 217 + 12, 10952),
    "ridge": (lambda: hypergradient(RIDGE), 6, 3216),
    # 16,640 bytes are features that the loop over layers carries, 26 numbers for an input. They
    # make ReLU kernels three times as fast, and take 2 % of the bytes of 1,000 inputs.
    "network_kernel": (lambda: nngp, 2, 145120),
    "empirical_kernel": (lambda: jacobian_kernel, 5, 21440),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_reference_call_stays_within_its_products_bytes_and_programs(name):
    make, count, size = CALLS[name]
    function, args = make(), arguments()
    fn = jax.jit(lambda *args: function(*args))
    assert programs(lambda: fn(*args)) == 1 and programs(lambda: fn(*args)) == 0
    program = fn.lower(*args).compile()
    assert products(program.as_text()) <= count
    # A tenth more: the layout of temporaries differs a little between versions of XLA.
    assert program.memory_analysis().temp_size_in_bytes <= 1.1 * size


def test_a_search_makes_one_large_program_however_many_steps_it_takes():
    def search(steps):
        args = PROBLEM, bilevel.unrolled(0.1, 5), optax.sgd(0.1), *arguments()
        return bilevel.search(*args, steps=steps).alpha

    # The first search of a process also compiles copies of arrays and the like.
    assert programs(lambda: search(3)) <= 16
    # The search, and a history with a column of losses and one of alpha.
    assert programs(lambda: search(7)) <= 3
    assert programs(lambda: search(70)) <= 3


# ----------------------------------------------------------------------------- operations in loops

# These take no time, or contain other operations that are counted.
FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota"),
    *("while", "call", "conditional"),
)


def operation(line):
    return re.search(r"[\s)\]}]([a-z][\w\-]*)\(", line.partition(" = ")[2])[1]


def loops(function, *args):
    """Return the number of operations in each loop's body, the loops inside it apart."""
    parts, _ = computations(jax.jit(function).lower(*args).compile().as_text())
    bodies = [
        re.search(r"body=%?([\w.\-]+)", line)[1]
        for lines in parts.values()
        for line in lines
        if " = " in line and operation(line) == "while"
    ]

    def count(name):
        lines = [line for line in parts[name] if " = " in line]
        called = [line for line in lines if operation(line) == "call"]
        return sum(operation(line) not in FREE for line in lines) + sum(
            count(re.search(r"to_apply=%?([\w.\-]+)", line)[1]) for line in called
        )

    return [count(name) for name in bodies]


def ridge(w, alpha, batch):
    x, y = batch
    return jnp.mean((x @ w - y) ** 2) + jnp.exp(alpha) * w @ w


def network(w, alpha, batch):
    x, y = batch
    for matrix, bias in w:
        x = jnp.tanh(x @ matrix + bias)
    return jnp.mean((x - y) ** 2) + jnp.exp(alpha) * sum(jnp.sum(a**2) for a in jax.tree.leaves(w))


def problem(name):
    rows = jnp.ones((200, 50), jnp.float32)
    if name == "ridge":
        return ridge, jnp.zeros(50, jnp.float32), (rows, rows[:, 0])
    w = [(jnp.ones((a, b)), jnp.zeros(b)) for a, b in itertools.pairwise((50, 20, 20, 5))]
    return network, cast(w, jnp.float32), (rows, rows[:, :5])


def hessian(lower, w, alpha, batch):
    return jax.linearize(lambda w: jax.grad(lower)(w, alpha, batch), w)[1]


# On 2026-11-28 they added 19 and 18 operations.
@pytest.mark.parametrize("name", ["ridge", "network"])
def test_an_iteration_of_conjugate_gradients_adds_few_operations(name):
    lower, w, batch = problem(name)
    alpha = jnp.zeros((), jnp.float32)

    def products(w, alpha, batch, v):
        hvp = hessian(lower, w, alpha, batch)
        return jax.lax.while_loop(lambda v: jax.tree.leaves(v)[0].sum() < 1, hvp, v)

    def solve(w, alpha, batch, v):
        hvp = hessian(lower, w, alpha, batch)
        return solve_conjugate_gradients(hvp, v, None, steps=9, threshold=alpha)

    (users,) = loops(products, w, alpha, batch, w)
    (all_operations,) = loops(solve, w, alpha, batch, w)
    assert all_operations - users <= 20


# The user's loss, its gradient and its linearization are included. The loops are the line search,
# conjugate gradients and Newton's steps.
@pytest.mark.parametrize(("name", "limits"), [("ridge", (10, 24, 44)), ("network", (21, 48, 118))])
def test_an_iteration_of_newton_takes_few_operations(name, limits):
    lower, w, batch = problem(name)
    solver = bilevel.implicit()

    def run(alpha, w, batch):
        return solver.run(lower, alpha, w, solver.init(w), batch)[0]

    counts = sorted(loops(run, jnp.float32(0), w, batch))
    assert all(count <= limit for count, limit in zip(counts, limits, strict=True)), counts
