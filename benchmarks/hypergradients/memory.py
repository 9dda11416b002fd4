"""How does the memory of a hypergradient grow with the number T of lower steps?

The problem is logistic regression with p = 1000 weights on n = 1000 samples and one penalty for
each of ten groups of weights, in float32. A copy of the weights is 4 kB. The figures are XLA's
temporaries of the compiled hypergradient; nothing is executed. `unrolled` stores all T copies here,
as `lax.scan` does, because they fit into an eighth of the machine's memory.

    python benchmarks/hypergradients/memory.py            # under a minute
"""

import jax
import jax.numpy as jnp

import bilevel
from benchmarks import harness

MEASURES = ("bilevel/hypergradients", "bilevel/solvers", "bilevel/problem")

STEPS = (10, 100, 1000, 10000)
SMOKE = (100, 400)
N, P, GROUPS, STEP_SIZE = 1000, 1000, 10, 0.1


def outer(w, alpha, batch):
    x, y = batch
    return jnp.mean(jax.nn.softplus(-y * (x @ w)))


def lower(w, alpha, batch):
    groups = w.reshape(GROUPS, -1)
    return outer(w, alpha, batch) + 0.5 * jnp.sum(jnp.exp(alpha)[:, None] * groups**2)


def ours(solver, mode="reverse"):
    fn = bilevel.hypergradient(bilevel.Problem(lower, outer), solver, mode=mode, diagnostics=False)
    return lambda *args: fn(*args).grad


def plain_scan(steps):
    def objective(alpha, w, train, valid):
        def step(w, _):
            return w - STEP_SIZE * jax.grad(lower)(w, alpha, train), None

        return outer(jax.lax.scan(step, w, length=steps)[0], alpha, valid)

    return jax.grad(objective)


def jaxopt(steps):
    import jaxopt

    options = {"maxiter": steps, "tol": 0, "acceleration": False, "implicit_diff": False}
    solver = jaxopt.GradientDescent(lower, stepsize=STEP_SIZE, **options)
    return jax.grad(lambda alpha, w, t, valid: outer(solver.run(w, alpha, t).params, alpha, valid))


def temporaries(fn) -> int:
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    batch = array(N, P), array(N)
    compiled = jax.jit(fn).lower(array(GROUPS), array(P), batch, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def measure(numbers: tuple[int, ...], peers: list[str]) -> list[dict]:
    def descent(steps):
        return bilevel.unrolled(STEP_SIZE, steps)

    methods = {
        "bilevel unrolled, reverse": lambda steps: ours(descent(steps)),
        "bilevel unrolled, forward": lambda steps: ours(descent(steps), "forward"),
        "bilevel implicit": lambda steps: ours(bilevel.implicit(descent(steps), bilevel.cg())),
        "lax.scan, reverse": plain_scan,
    }
    if "jaxopt" in peers:
        methods["JAXopt unrolled, reverse"] = jaxopt
    rows = []
    for name, method in methods.items():
        sizes = {str(steps): temporaries(method(steps)) for steps in numbers}
        rows.append({"method": name, "temp_bytes": sizes})
    return rows


def report(rows) -> str:
    steps = list(rows[1]["temp_bytes"])
    head = ["temporaries, MB", *(f"T = {T}" for T in steps), f"T = {steps[-1]} / T = 100"]
    lines = []
    for row in rows[1:]:
        name = f"**{row['method']}**" if row["method"].startswith("bilevel") else row["method"]
        sizes = [row["temp_bytes"][T] for T in steps]
        growth = f"{sizes[-1] / row['temp_bytes']['100']:.3g}"
        lines.append([name, *(f"{size / 1e6:.3g}" for size in sizes), growth])
    return harness.table(head, lines)


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report, peers=("jaxopt",))
    steps = SMOKE if flags.smoke else STEPS
    rows = [harness.environment("jaxopt", n=N, p=P, dtype="float32"), *measure(steps, flags.peers)]
    harness.finish(rows, flags.results, report)


if __name__ == "__main__":
    main()
