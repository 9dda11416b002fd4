"""A step of each method that gradhpo and this library both have: processor time, and where it ends.

    pip install --no-deps gradhpo    # in an environment of its own, with this package
                                     # (--peers with no name behind it: without gradhpo)
    python benchmarks/peers/gradhpo_steps.py           # two minutes
    python benchmarks/peers/gradhpo_steps.py --quick   # few steps, no results file, without gradhpo
    python benchmarks/peers/gradhpo_steps.py --smoke   # two steps of a small network: 10 s
    python benchmarks/peers/gradhpo_steps.py --table

A penalty for each layer of a small network on digits, minibatches of 50 on both levels, SGD below
and Adam above. Both libraries take the same batches, one step of alpha after each step of the
weights. Times are seconds of the process, in turns: the median of the rounds.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import optax

import bilevel
from benchmarks import harness
from benchmarks.harness import environment, table

DECAY, RATE, OUTER = 0.9, 0.1, 0.02


def network(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"]


def error(w, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(network(w, x), y).mean()


def lower(w, alpha, batch):
    penalty = sum(jnp.exp(alpha[name]) * jnp.sum(w[name] ** 2) for name in w)
    return error(w, batch) + penalty


def outer(w, alpha, batch):
    return error(w, batch) + 0 * sum(alpha.values())


PROBLEM = bilevel.Problem(lower, outer)


def parts():
    """Weights, alpha, and a batch of each level for every step."""
    sizes = {"train": 900, "valid": 400, "test": 1}
    (x, y), (xv, yv), _ = bilevel.data.draw_splits("digits", [jax.random.key(0)], **sizes)[0]
    data = [(jnp.asarray(a.reshape(len(a), -1)), jnp.asarray(b)) for a, b in ((x, y), (xv, yv))]
    keys = jax.random.split(jax.random.key(1))
    w = {"in": jax.random.normal(keys[0], (64, 256)) / 8}
    w["out"] = jax.random.normal(keys[1], (256, 10)) / 16
    return w, {"in": jnp.array(-7.0), "out": jnp.array(-7.0)}, *data


def ours(solver):
    init, step = bilevel.descent(PROBLEM, solver, optax.adam(OUTER))
    step = jax.jit(step)

    def run(w, alpha, pairs):
        state = init(alpha, w)
        for pair in pairs:
            state, _ = step(state, pair)
        return jax.block_until_ready((state.w, state.alpha))

    return run


def theirs(make, **options):
    method = make(optax.sgd(RATE), optax.adam(OUTER), **options)

    def run(w, alpha, pairs):
        state = method.init(w, alpha)
        for train, valid in pairs:
            state = method.step(state, train, valid, lower, outer)
        return jax.block_until_ready((state.params, state.hyperparams))

    return run


def methods(peers):
    """By name and library."""
    own = {
        "one step": bilevel.one_step(RATE),
        "difference": bilevel.one_step(RATE, radius=0.01),
        "HyperDistill": bilevel.distilled(RATE, decay=DECAY),
    }
    by_library = {(name, "here"): ours(solver) for name, solver in own.items()}
    if "gradhpo" in peers:
        from gradhpo.algorithms.online import OnlineHypergradientOptimizer
        from gradhpo.algorithms.t1t2 import T1T2Optimizer

        by_library["one step", "gradhpo"] = theirs(OnlineHypergradientOptimizer, gamma=0.0)
        by_library["difference", "gradhpo"] = theirs(T1T2Optimizer, gamma=0.0)
        by_library["HyperDistill", "gradhpo"] = theirs(OnlineHypergradientOptimizer, gamma=DECAY)
    # Each method's libraries take turns.
    return dict(sorted(by_library.items(), key=lambda pair: list(own).index(pair[0][0])))


def measured(steps, rounds, peers):
    w, alpha, train, valid = parts()
    rows = bilevel.minibatches(50)
    keys = jax.random.split(jax.random.key(2), 2 * steps)
    draw = jax.jit(lambda a, b: (rows(a, train), rows(b, valid)))
    pairs = [draw(*keys[2 * i : 2 * i + 2]) for i in range(steps)]
    runs, times = methods(peers), {}
    ends, compiling = {}, {}
    for name, run in runs.items():
        begin = time.process_time()
        ends[name] = run(w, alpha, pairs)
        compiling[name] = time.process_time() - begin
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.process_time()
            run(w, alpha, pairs)
            times.setdefault(name, []).append((time.process_time() - begin) / steps)
    for (method, library), each in times.items():
        w_end, alpha_end = ends[method, library]
        yield {
            "part": "steps",
            "method": method,
            "library": library,
            "first run, seconds": compiling[method, library],
            "milliseconds a step": 1e3 * statistics.median(each),
            "validation loss": float(error(w_end, valid)),
            "alpha": {k: float(v) for k, v in alpha_end.items()},
        }


def report(rows):
    lines = [
        (
            *(r["method"], r["library"], f"{r['first run, seconds']:.1f}"),
            f"{r['milliseconds a step']:.2f}",
            *(f"{r['validation loss']:.5f}", f"{r['alpha']['in']:.3f}", f"{r['alpha']['out']:.3f}"),
        )
        for r in harness.where(rows, part="steps")
    ]
    head = "method", "library", "first run of 20 steps, CPU s", "later, CPU ms a step"
    head += "validation loss", "log penalty, first", "second"
    return table(head, lines)


if __name__ == "__main__":
    flags = harness.command_line(__file__, __doc__, report, peers=("gradhpo",))
    sizes = {"smoke": (2, 1), "quick": (4, 1), "default": (20, 2)}[flags.size]
    measurements = [environment("optax", "gradhpo"), *measured(*sizes, flags.peers)]
    harness.finish(measurements, harness.committed(flags.results, flags.peers, ["gradhpo"]), report)
