"""A start from which five steps learn a new sinusoid (Finn, Abbeel & Levine 2017, section 5.1).

    python meta_learning.py

A task is a sinusoid with a random amplitude and phase, observed at ten points. alpha is the
initialization of the weights. The lower level takes five steps on the ten points of each of 25
tasks. The outer loss is the error at ten other points of the same tasks. alpha is trained in three
ways, which are compared on new tasks.
"""

import jax
import jax.numpy as jnp
import optax

import bilevel

TASKS, POINTS, RATE, STEPS = 25, 10, 0.01, 5
FULL = [{}]


def network(w, x):
    """Apply a network with two hidden layers of 40 ReLUs, and one input and one output."""
    x, (*hidden, last) = x[:, None], w
    for kernel, bias in hidden:
        x = jax.nn.relu(x @ kernel + bias)
    return (x @ last[0] + last[1])[:, 0]


def initial(key):
    """Draw weights at half of He's scale: at the full scale some tasks diverge."""
    sizes, keys = (1, 40, 40, 1), jax.random.split(key, 3)
    of = zip(keys, sizes, sizes[1:], strict=False)
    return [(0.5 * (2 / m) ** 0.5 * jax.random.normal(k, (m, n)), jnp.zeros(n)) for k, m, n in of]


def sinusoids(key, tasks=TASKS):
    """Draw tasks: points to learn from and points to evaluate on, pairs [tasks, POINTS]."""
    keys = jax.random.split(key, 3)
    x = jax.random.uniform(keys[0], (2, tasks, POINTS), minval=-5.0, maxval=5.0)
    height = jax.random.uniform(keys[1], (tasks, 1), minval=0.1, maxval=5.0)
    y = height * jnp.sin(x - jax.random.uniform(keys[2], (tasks, 1), maxval=jnp.pi))
    return (x[0], y[0]), (x[1], y[1])


def error(w, batch):
    """Return the error of one task."""
    return jnp.mean((network(w, batch[0]) - batch[1]) ** 2)


def mean(w, alpha, batch):
    """Return the mean error of all tasks."""
    return jax.vmap(error)(w, batch).mean()


def each(w, alpha, batch):
    """Return the sum over tasks, so that each task takes its steps independently."""
    return jax.vmap(error)(w, batch).sum()


def copies(alpha, w):
    """Copy the initialization for every task."""
    return jax.tree.map(lambda a, x: jnp.broadcast_to(a, x.shape), alpha, w)


def ways(names):
    """Return the lower solvers with these names; None returns all."""
    # First order: the derivative of a step in the previous weights is replaced by 1.
    held = optax.stateless(lambda updates, _: jax.lax.stop_gradient(updates))
    first = bilevel.unrolled(optax.chain(optax.sgd(RATE), held), STEPS)
    solvers = {"MAML": bilevel.unrolled(RATE, STEPS), "MAML of first order": first}
    solvers["one network for all"] = bilevel.unrolled(0.0, 1)
    return {k: bilevel.restarted(solvers[k], start=copies) for k in names or solvers}


def curve(alpha, tasks=600, steps=(0, 1, 5, 10)):
    """Return the mean error of new tasks after each number of steps on their ten points."""
    known, others = sinusoids(jax.random.key(7), tasks)
    w = jax.tree.map(lambda a: jnp.broadcast_to(a, (tasks, *a.shape)), alpha)
    losses = []
    for _ in range(max(steps) + 1):
        losses.append(float(mean(w, None, others)))
        w = optax.tree.add_scale(w, -RATE, jax.grad(each)(w, None, known))
    return {f"{step} steps": losses[step] for step in steps}


def trained(solver, start, steps, seed):
    """Train alpha; return it, and the number of steps until a task's own steps overflowed."""
    w = jax.tree.map(lambda a: jnp.zeros((TASKS, *a.shape)), start)
    try:
        result = bilevel.search(
            *(bilevel.Problem(each, mean), solver, optax.adam(1e-3), start, w, None, None),
            batches=bilevel.jointly(lambda key, *_: sinusoids(key)),
            steps=steps,
            key=jax.random.key(seed),
            history=[],
        )
    except bilevel.NonFiniteError as stop:
        result = stop.result
    return result.alpha, int(result.state.step)


def main(steps=6000, names=None, seed=1):
    """Train alpha in all ways, or in those named. Return rows with the errors of new tasks."""
    start = initial(jax.random.key(0))
    rows, alphas = [{"start": "random"} | curve(start)], {}
    for name, solver in ways(names).items():
        alphas[name], taken = trained(solver, start, steps, seed)
        label = name if taken == steps else f"{name}, {taken:,} steps"
        rows.append({"start": label} | curve(alphas[name]))
        print(rows[-1])
    return rows, alphas


def picture(drawn, figure):
    """Draw one new task, after 5 steps from each initialization."""
    (alphas,) = drawn
    known = jax.tree.map(lambda a: a[2], sinusoids(jax.random.key(7), 600)[0])
    x = jnp.linspace(-5, 5, 200)
    axes = figure.subplots(1, len(alphas), sharey=True, squeeze=False)[0]
    for ax, (name, w) in zip(axes, alphas.items(), strict=True):
        ax.plot(x, network(w, x), ":", label="before")
        for _ in range(STEPS):
            w = optax.tree.add_scale(w, -RATE, jax.grad(error)(w, known))
        ax.plot(x, network(w, x), label="after 5 steps")
        ax.plot(*known, "k^", label="the ten points")
        ax.set_title(name, fontsize=9)
    ax.legend(fontsize=7)


if __name__ == "__main__":
    main()
