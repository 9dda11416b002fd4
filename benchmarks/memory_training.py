"""What a hypergradient through T steps of a network takes, of memory and of time.

The network of `examples/label_cleaning.py` at the gallery's size: 28 x 28 images, minibatches of
64, momentum, 2,000 weights of labels, 100 clean rows. Memory is that of XLA's temporaries. What is
allowed is 2 sqrt(T) copies of what a step carries (weights, momentum, running averages) and the
temporaries of one step: those of two steps without their two copies, as one alone is compiled
without a loop.

    python benchmarks/memory_training.py            # three minutes
    python benchmarks/memory_training.py --quick    # two numbers of steps
    python benchmarks/memory_training.py --table
"""

import sys
import time
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from bilevel.solvers import _unrolled

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
STEPS = (2, 64, 100, 400)


def hypergradient(steps):
    """The compiled program and its arguments."""
    import label_cleaning as example

    draw = np.random.default_rng(0)

    def rows(count):
        x = jnp.asarray(draw.normal(size=(count, 28, 28, 1)), jnp.float32)
        return x, jnp.asarray(draw.integers(0, 10, count)), jnp.arange(count)

    data, clean = rows(2000), rows(100)
    made = example.network.init(jax.random.key(0), data[0][:1], False)
    start = bilevel.Stateful(made["params"], {"batch_stats": made["batch_stats"]})
    solver = bilevel.unrolled(optax.sgd(0.05, momentum=0.9), steps, batches=example.with_key)
    problem = bilevel.Problem(example.lower, example.outer, stateful=True)
    fn = bilevel.hypergradient(problem, solver, diagnostics=False)
    args = jnp.zeros(2000), start, (jax.random.key(1), data), clean
    return jax.jit(lambda *args: fn(*args).grad).lower(*args).compile(), args


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measured(steps):
    for count in steps:
        program, args = hypergradient(count)
        carried = size(args[1]) + size(args[1].params)
        row = {"part": "training", "steps": count, "carried": carried}
        yield row | {"bytes": program.memory_analysis().temp_size_in_bytes}


def both_ways(steps, rounds):
    """The time of keeping all steps and of running them again in blocks, in turns."""
    programs, kept = {}, _unrolled._KEPT_STEPS
    for name, limit in (("kept", steps), ("blocks", 0)):
        _unrolled._KEPT_STEPS = limit
        programs[name], args = hypergradient(steps)
    _unrolled._KEPT_STEPS = kept
    seconds = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            began = time.process_time()
            jax.block_until_ready(program(*args))
            seconds[name].append(time.process_time() - began)
    sizes = {k: p.memory_analysis().temp_size_in_bytes for k, p in programs.items()}
    yield {"part": "ways", "steps": steps, "seconds": seconds, "bytes": sizes}


def allowed(rows, row):
    (two,) = harness.where(rows, part="training", steps=2)
    one = two["bytes"] - 2 * two["carried"]
    return 2 * row["steps"] ** 0.5 * row["carried"] + one


def report(rows):
    found = harness.where(rows, part="training")
    lines = [
        (r["steps"], *(f"{x / 1e6:.2f}" for x in (r["bytes"], allowed(found, r)))) for r in found
    ]
    made = harness.table(("steps", "temporaries, MB", "2 sqrt(T) copies and one step, MB"), lines)
    for row in harness.where(rows, part="ways"):
        kept, blocks = (np.median(row["seconds"][k]) for k in ("kept", "blocks"))
        least, most = (row["bytes"][k] / 1e6 for k in ("blocks", "kept"))
        made += (
            f"\n\nAt {row['steps']} steps, to keep every step takes {most:.1f} MB and {kept:.1f} s "
            f"of the processor, to run blocks of steps again {least:.1f} MB and {blocks:.1f} s."
        )
    return made


def main():
    flags = harness.command_line(__file__, __doc__, report)
    quick = flags.size == "quick"
    found = list(measured((2, 5) if quick else STEPS))
    if not quick:
        found += both_ways(100, 3)
    harness.finish([harness.environment("flax", "optax"), *found], flags.results, report)


if __name__ == "__main__":
    main()
