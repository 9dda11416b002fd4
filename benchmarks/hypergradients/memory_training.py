"""What a hypergradient through T steps of a network takes, of memory and of time.

The network of `examples/label_cleaning.py` at the gallery's size: 28 x 28 images, minibatches of
64, momentum, 2,000 weights of labels, 100 clean rows. Memory is that of XLA's temporaries. What is
allowed is T copies of a step's carry (weights, momentum, running averages) and the temporaries
of one step: those of two steps without their two copies, as one alone is compiled without a loop.

The two ways to go back through 100 steps, to keep each of them and to run blocks of them again, are
written by hand in JAX: :func:`bilevel.unrolled` chooses one by the memory that there is.

    python benchmarks/hypergradients/memory_training.py            # three minutes
    python benchmarks/hypergradients/memory_training.py --quick    # two numbers of steps
    python benchmarks/hypergradients/memory_training.py --smoke    # images of 8 x 8
    python benchmarks/hypergradients/memory_training.py --table
"""

import functools
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from benchmarks import harness

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
STEPS = (2, 64, 100, 400)


def arguments(side):
    """Alpha, weights, noisy rows with a key, and clean rows; images of ``side`` x ``side``."""
    import label_cleaning as example

    draw = np.random.default_rng(0)

    def rows(count):
        x = jnp.asarray(draw.normal(size=(count, side, side, 1)), jnp.float32)
        return x, jnp.asarray(draw.integers(0, 10, count)), jnp.arange(count)

    data, clean = rows(2000), rows(100)
    made = example.network.init(jax.random.key(0), data[0][:1], False)
    start = bilevel.Stateful(made["params"], {"batch_stats": made["batch_stats"]})
    return jnp.zeros(2000), start, (jax.random.key(1), data), clean


def hypergradient(steps, side):
    """The compiled program and its arguments."""
    import label_cleaning as example

    solver = bilevel.unrolled(optax.sgd(0.05, momentum=0.9), steps, batches=example.with_key)
    problem = bilevel.Problem(example.lower, example.outer, stateful=True)
    fn = bilevel.hypergradient(problem, solver, diagnostics=False)
    args = arguments(side)
    return jax.jit(lambda *args: fn(*args).grad).lower(*args).compile(), args


def by_hand(steps, every, side):
    """The same with ``every`` steps in a block that is run again; 1 keeps all steps."""
    import label_cleaning as example

    def objective(alpha, start, noisy, clean):
        key, data = noisy

        def step(carry, i):
            w, trace = carry
            batch = example.with_key(jax.random.fold_in(key, i), data)

            def loss(params):
                return example.lower(bilevel.Stateful(params, w.variables), alpha, batch)

            slope, variables = jax.grad(loss, has_aux=True)(w.params)
            trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, slope)
            params = jax.tree.map(lambda p, t: p - 0.05 * t, w.params, trace)
            return (bilevel.Stateful(params, variables), trace), None

        again = jax.checkpoint(step, prevent_cse=False)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def block(carry, numbers):
            return jax.lax.scan(again, carry, numbers)[0], None

        carry = start, jax.tree.map(jnp.zeros_like, start.params)
        numbers = jnp.arange(steps)
        if every == 1:
            carry, _ = jax.lax.scan(again, carry, numbers)
        else:
            carry, _ = jax.lax.scan(block, carry, numbers.reshape(-1, every))
        return example.outer(carry[0], alpha, clean)

    args = arguments(side)
    return jax.jit(jax.grad(objective)).lower(*args).compile(), args


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measured(steps, side):
    for count in steps:
        program, args = hypergradient(count, side)
        carried = size(args[1]) + size(args[1].params)
        row = {"part": "training", "steps": count, "carried": carried}
        yield row | {"bytes": program.memory_analysis().temp_size_in_bytes}


def both_ways(steps, rounds, side):
    """The time of keeping all steps and of running them again in blocks, in turns."""
    programs = {}
    for name, every in (("kept", 1), ("blocks", round(steps**0.5))):
        programs[name], args = by_hand(steps, every, side)
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
    return row["steps"] * row["carried"] + one


def report(rows):
    training = harness.where(rows, part="training")
    lines = [
        (r["steps"], *(f"{x / 1e6:.2f}" for x in (r["bytes"], allowed(training, r))))
        for r in training
    ]
    made = harness.table(("steps", "temporaries, MB", "T copies and one step, MB"), lines)
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
    side = 8 if flags.smoke else 28
    steps = (2,) if flags.smoke else (2, 5) if flags.quick else STEPS
    measurements = list(measured(steps, side))
    if flags.smoke:
        measurements += both_ways(1, 1, side)
    elif not flags.quick:
        measurements += both_ways(100, 3, side)
    harness.finish([harness.environment("flax", "optax"), *measurements], flags.results, report)


if __name__ == "__main__":
    main()
