"""HyperDistill here and in gradhpo for the same processor time: steps, memory, validation loss.

    pip install --no-deps gradhpo    # in an environment of its own, with this package
                                     # (--peers with no name behind it: without gradhpo)
    python benchmarks/peers/gradhpo_equal_time.py          # three minutes; one core: taskset -c 0
    python benchmarks/peers/gradhpo_equal_time.py --quick  # short, no results file, without gradhpo
    python benchmarks/peers/gradhpo_equal_time.py --smoke  # one episode of its own example: 10 s
    python benchmarks/peers/gradhpo_equal_time.py --table

*Its own example*: a learning rate for each of 517 weights of a small network on five Gaussian
clouds, of whose training labels a fifth are drawn anew; episodes of 20 steps, each from the last
weights. *Schedules*: three rates, one for each array of the network of `examples/schedules.py`, on
digits; episodes of 50 steps, each from the start. Both libraries take one step of alpha after each
step of the weights, and the last line of each problem differentiates whole episodes exactly, which
gradhpo does not have. Losses are those of all validation rows after the last whole episode.
"""

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from benchmarks import harness
from benchmarks.harness import environment, table

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
DECAY = 0.99
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Task(NamedTuple):
    loss: Any  # (w, alpha, batch) -> number
    w: Any
    alpha: Any  # like w, or a number for each of its arrays: before softplus
    train: Any
    valid: Any
    batch: int
    rate: float  # of alpha
    steps: int  # of an episode
    afresh: bool  # whether an episode begins at ``w``


def clouds(rows, classes=5, features=10, hidden=32):
    """The sizes of gradhpo's example; the draws are our own."""
    draw = np.random.default_rng(0)
    centres = 2 * draw.normal(size=(classes, features))

    def part(count, noise):
        y = draw.integers(0, classes, count)
        x = centres[y] + 0.5 * draw.normal(size=(count, features))
        y = np.where(draw.random(count) < noise, draw.integers(0, classes, count), y)
        return jnp.asarray(x, jnp.float32), jnp.asarray(y)

    def loss(w, alpha, batch):
        f = jax.nn.relu(batch[0] @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]
        return cross_entropy(f, batch[1]).mean()

    sizes = {"w1": (features, hidden), "b1": (hidden,), "w2": (hidden, classes), "b2": (classes,)}
    w = {
        name: jnp.asarray(draw.normal(size=size) * (2 / size[0]) ** 0.5 * (len(size) > 1))
        for name, size in sizes.items()
    }
    w = jax.tree.map(lambda x: x.astype(jnp.float32), w)
    alpha = jax.tree.map(lambda x: jnp.full_like(x, np.log(np.expm1(0.05))), w)
    return Task(loss, w, alpha, part(rows, 0.2), part(200, 0.0), 128, 3e-3, 20, False)


def schedules():
    import schedules as example

    sizes = {"train": 900, "valid": 400, "test": 1}
    parts = bilevel.data.draw_splits("digits", [jax.random.key(0)], **sizes)[0][:2]
    train, valid = ((jnp.asarray(x.reshape(-1, 64) - 0.3), jnp.asarray(y)) for x, y in parts)
    w = example.initial(jax.random.key(1))
    alpha = jax.tree.map(lambda _: jnp.asarray(np.log(np.expm1(0.05))), w)
    return Task(example.loss, w, alpha, train, valid, 50, 3e-3, 50, True)


TASKS = {"its own example": lambda: clouds(500), "schedules": schedules}


def rates(alpha):
    """Gradient descent with these rates."""
    return optax.stateless(
        lambda g, _: jax.tree.map(lambda a, x: -jax.nn.softplus(a) * x, alpha, g)
    )


def batches(task):
    """Pairs of minibatches for ever, drawn by a compiled program; the same for all."""
    rows = bilevel.minibatches(task.batch)
    draw = jax.jit(lambda key: (rows(key[0], task.train), rows(key[1], task.valid)))
    for step in range(10**9):
        yield draw(jax.random.split(jax.random.fold_in(jax.random.key(3), step)))


def ours(task):
    """A step of the weights and one of alpha: ``(w, alpha, begins, pair) -> w, alpha``, memory."""
    problem = bilevel.Problem(task.loss, task.loss)
    init, step = bilevel.descent(
        problem, bilevel.distilled(rates, decay=DECAY), optax.sgd(task.rate)
    )
    pair, state = next(batches(task)), [None]
    compiled = jax.jit(step).lower(init(task.alpha, task.w), pair).compile()

    def run(w, alpha, begins, pair):
        state[0] = init(alpha, w) if begins else state[0]
        state[0], _ = compiled(state[0], pair)
        return state[0].w, state[0].alpha

    return run, lambda: compiled.memory_analysis().temp_size_in_bytes


def theirs(task):
    from gradhpo import OnlineHypergradientOptimizer

    def stepped(w, alpha, batch):
        slope = jax.grad(task.loss)(w, alpha, batch)
        return optax.apply_updates(w, rates(alpha).update(slope, optax.EmptyState())[0])

    method = OnlineHypergradientOptimizer(
        update_fn=stepped, outer_optimizer=optax.sgd(task.rate), gamma=DECAY
    )
    state = [None]

    def run(w, alpha, begins, pair):
        state[0] = method.init(w, alpha) if begins else state[0]
        state[0] = method.step(state[0], *pair, task.loss, task.loss)
        return state[0].params, state[0].hyperparams

    def memory():
        arguments = method.init(task.w, task.alpha), *next(batches(task)), task.loss, task.loss
        program = type(method).step.lower(method, *arguments).compile()
        return program.memory_analysis().temp_size_in_bytes

    return run, memory


def exact(task):
    """All steps of an episode, differentiated."""
    problem = bilevel.Problem(task.loss, task.loss)
    solver = bilevel.unrolled(rates, task.steps, batches=bilevel.minibatches(task.batch))
    init, step = bilevel.descent(problem, solver, optax.sgd(task.rate))
    rows = bilevel.minibatches(task.batch)

    def drawn(state, key):
        keys = jax.random.split(key)
        return step(state, ((keys[0], task.train), rows(keys[1], task.valid)))[0]

    key = jax.random.key(4)
    compiled = jax.jit(drawn).lower(init(task.alpha, task.w), key).compile()

    def episode(w, alpha, number):
        state = compiled(init(alpha, w), jax.random.fold_in(key, number))
        return state.w, state.alpha

    return episode, lambda: compiled.memory_analysis().temp_size_in_bytes


def episodes(task, run):
    """A function of an episode, of one of a step."""
    pairs = batches(task)

    def episode(w, alpha, _):
        for i in range(task.steps):
            w, alpha = run(w, alpha, i == 0, next(pairs))
        return w, alpha

    return episode


def timed(task, make, of_steps, budget):
    """The row of a method that is given so many seconds of the processor."""
    judge = jax.jit(lambda w: task.loss(w, None, task.valid))
    judge(task.w)
    began = time.process_time()
    run, memory = make(task)
    episode = episodes(task, run) if of_steps else run
    w, alpha, losses, times = task.w, task.alpha, [], []
    while not times or time.process_time() - began < budget:
        w = task.w if task.afresh else w
        before = time.process_time()
        w, alpha = episode(w, alpha, len(times))
        jax.block_until_ready(w)
        times.append(time.process_time() - before)
        losses.append(float(judge(w)))
    row = {"episodes": len(times), "first": float(judge(task.w)), "loss": losses[-1]}
    row |= {"best": min(losses), "seconds": time.process_time() - began}
    later = times[1:] or [float("nan")]
    row["milliseconds a step"] = 1e3 * float(np.median(later)) / task.steps
    return row | {"first episode, seconds": times[0], "bytes": memory()}


METHODS = {
    "HyperDistill, here": (ours, True),
    "HyperDistill, gradhpo": (theirs, True),
    "all steps exactly, here": (exact, False),
}


def measured(budgets, peers):
    for name, budget in budgets.items():
        task = TASKS[name]()
        for method, (of, of_steps) in METHODS.items():
            if of is theirs and "gradhpo" not in peers:
                continue
            row = {"part": "equal time", "problem": name, "method": method, "budget": budget}
            yield row | timed(task, of, of_steps, budget)


def report(rows):
    lines = [
        (
            *(r["problem"], r["method"], f"{r['first episode, seconds']:.1f}"),
            *(
                "" if r["episodes"] < 2 else f"{r['milliseconds a step']:.2f}",
                f"{r['bytes'] / 1e3:,.0f}",
            ),
            *(f"{r['seconds']:.0f}", f"{r['episodes']:,}", f"{r['loss']:.4f}", f"{r['best']:.4f}"),
        )
        for r in harness.where(rows, part="equal time")
    ]
    head = "problem", "method", "first episode, CPU s", "later, CPU ms a step", "memory, kB"
    return table((*head, "CPU s", "episodes", "validation loss", "best"), lines)


if __name__ == "__main__":
    flags = harness.command_line(__file__, __doc__, report, peers=("gradhpo",))
    seconds = {"smoke": [0], "quick": [2, 2], "default": [10, 36]}[flags.size]  # of the processor
    budgets = dict(zip(TASKS, seconds, strict=False))  # --smoke has the first task only
    measurements = [environment("optax", "gradhpo"), *measured(budgets, flags.peers)]
    harness.finish(measurements, harness.committed(flags.results, flags.peers, ["gradhpo"]), report)
