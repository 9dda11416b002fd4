"""What does `info`, the accuracy of a hypergradient, cost?

Regression with one penalty for each weight: the squared loss of 2,000 rows, for which `error_bound`
is finite, and the logistic loss of 500 rows. The scale of feature j is 1, or j^-1/2 ("harder").
Jitted calls with and without `info` take turns on one core, in float32; the table has the least CPU
time of nine calls. A first call traces and compiles.

    python benchmarks/hypergradients/info_cost.py      # four minutes
"""

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from benchmarks import harness

MEASURES = ("bilevel/hypergradients", "bilevel/solvers", "bilevel/problem")
SIZES = {"squared": (100, 500), "logistic": (2_000, 20_000, 100_000)}
HEAD = "loss", "weights", "`error_bound`", "ms without, with", "ratio", "first call, s", "ratio"


def work(loss, weights, exponent, rounds):
    rng, scales = np.random.default_rng(0), np.arange(1, weights + 1) ** exponent
    x = rng.normal(size=(2, 2000 if loss == "squared" else 500, weights))
    x = (x * scales / np.linalg.norm(scales)).astype(np.float32)
    y = np.sign(x @ rng.normal(size=weights)).astype(np.float32)

    def outer(w, alpha, batch):
        margins = batch[1] * (batch[0] @ w)
        return jnp.mean((1 - margins) ** 2 if loss == "squared" else jax.nn.softplus(-margins))

    def lower(w, alpha, batch):
        return outer(w, alpha, batch) + jnp.sum(jnp.exp(alpha) * w**2)

    given = bilevel.Problem(lower, outer), bilevel.implicit()
    calls = {d: jax.jit(bilevel.hypergradient(*given, diagnostics=d)) for d in (False, True)}
    args = jax.device_put((np.full(weights, -7.0), np.zeros(weights), (x[0], y[0]), (x[1], y[1])))
    turns = [harness.in_turns(calls, args, n).values() for n in (1, rounds)]
    first, later = ([round(min(times), 5) for times in of_calls] for of_calls in turns)
    finite = bool(calls[True](*args).info.error_bound < jnp.inf)
    yield {"finite": finite, "first": first, "ms": [round(1e3 * t, 2) for t in later]}


def report(rows):
    def line(row):
        costs = [f"{a:.3g}, {b:.3g} | {b / a:.1f}" for a, b in (row["ms"], row["first"])]
        return row["loss"], row["weights"], "finite" if row["finite"] else "infinite", *costs

    return harness.table(HEAD, map(line, rows[1:]))


def main():
    flags = harness.command_line(__file__, __doc__, report, work=work)
    rows = [harness.environment(device=f"{harness.processor()}, one core", dtype="float32")]
    most, rounds, exponents = (1, 1, [0]) if flags.small else (3, 9, [0, -0.5])
    for loss, p, exponent in [(k, p, e) for k in SIZES for e in exponents for p in SIZES[k][:most]]:
        (row,) = harness.in_own_process(__file__, loss, p, exponent, rounds, one_core=True)
        rows += [{"loss": loss + ", harder" * (exponent < 0), "weights": f"{p:,}"} | row]
    harness.finish(rows, flags.results, report)


if __name__ == "__main__":
    main()
