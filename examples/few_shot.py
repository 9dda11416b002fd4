"""Three kinds of clothes from five images of each: MAML, its first order, iMAML.

    python few_shot.py

Tasks to learn from are made of seven of Fashion-MNIST's classes: three of them, in any order, five
images of each to learn and ten to be judged by. Tasks of the three others, pullovers, coats and
shirts, judge the start that was learned. MAML (Finn, Abbeel & Levine 2017) differentiates five
steps, iMAML (Rajeswaran et al. 2019) the solution of the task's loss with a penalty on the way from
the start. Beside them: the same steps from a random start, and the class of the nearest mean image.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel

OTHERS, WAYS, SHOTS, JUDGED, TASKS = (2, 4, 6), 3, 5, 10, 16
RATE, STEPS, PENALTY, WIDTH = 0.3, 5, 0.5, 32
FULL = [{}]
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
LABELS = jnp.repeat(jnp.arange(WAYS), SHOTS), jnp.repeat(jnp.arange(WAYS), JUDGED)


def network(w, x):
    """One hidden layer."""
    return jnp.tanh(x @ w["in"] + w["bias"]) @ w["out"]


def initial(key, pixels):
    """Of scale 1 / sqrt(fan)."""
    keys = jax.random.split(key)
    w = {"in": jax.random.normal(keys[0], (pixels, WIDTH)) / pixels**0.5}
    w["out"] = jax.random.normal(keys[1], (WIDTH, WAYS)) / WIDTH**0.5
    return w | {"bias": jnp.zeros(WIDTH)}


def images(data, each):
    """Images at half the resolution [10, each, pixels], by class."""
    found = bilevel.data.load(data, train_size=20 * each, test_size=1)
    x = np.asarray(found.x_train, np.float32)
    side = round(x[0].size ** 0.5)
    x = x.reshape(-1, side // 2, 2, side // 2, 2).mean((2, 4)).reshape(len(x), -1)
    kinds = [x[found.y_train == kind][:each] for kind in range(10)]
    return jnp.asarray(np.stack([(kind - x.mean()) / x.std() for kind in kinds]))


def drawn(key, kinds):
    """A task of images by class: (images, labels) to learn, and to be judged by."""
    keys = jax.random.split(key, 1 + WAYS)
    chosen = jax.random.permutation(keys[0], len(kinds))[:WAYS]
    rows = [jax.random.permutation(k, kinds.shape[1])[: SHOTS + JUDGED] for k in keys[1:]]
    x = jnp.stack([kinds[kind][row] for kind, row in zip(chosen, rows, strict=True)])
    parts = x[:, :SHOTS], x[:, SHOTS:]
    return tuple((a.reshape(-1, a.shape[-1]), y) for a, y in zip(parts, LABELS, strict=True))


def tasks(key, kinds, count=TASKS):
    """Many of them."""
    return jax.vmap(lambda key: drawn(key, kinds))(jax.random.split(key, count))


def each(w, alpha, batch):
    """The sum of the tasks' losses, every task with weights of its own."""
    return jax.vmap(lambda w, b: cross_entropy(network(w, b[0]), b[1]).mean())(w, batch).sum()


def near(w, alpha, batch):
    """iMAML's: not far from the start."""
    away = jax.tree.map(lambda x, a: jnp.sum((x - a) ** 2), w, alpha)
    return each(w, alpha, batch) + 0.5 * PENALTY * sum(jax.tree.leaves(away))


def copies(alpha, w):
    """A start for every task."""
    return jax.tree.map(lambda a, x: jnp.broadcast_to(a, x.shape), alpha, w)


def ways():
    """By name: the lower loss, and how a task is learned."""
    held = optax.stateless(lambda updates, _: jax.lax.stop_gradient(updates))
    first = bilevel.unrolled(optax.chain(optax.sgd(RATE), held), STEPS)
    solved = bilevel.implicit(bilevel.unrolled(RATE, 4 * STEPS), bilevel.cg(steps=5))
    found = {"MAML": (each, bilevel.unrolled(RATE, STEPS)), "MAML of first order": (each, first)}
    found["iMAML"] = near, solved
    return {name: (loss, bilevel.restarted(s, start=copies)) for name, (loss, s) in found.items()}


def main(data="fashion-mnist", each_class=300, steps=400, judged=600):
    """A row for each way, with the errors on tasks of the other classes; the course of each."""
    kinds = images(data, each_class)
    known = kinds[np.array([k for k in range(10) if k not in OTHERS])]
    new = tasks(jax.random.key(7), kinds[np.array(OTHERS)], judged)
    rows, courses = [], {}

    def row(name, told, seconds):
        wrong = jnp.mean(told != new[1][1], axis=1)
        found = {"start": name, "seconds": seconds, "error": float(wrong.mean())}
        rows.append(found | {"two standard errors": float(2 * jnp.std(wrong) / judged**0.5)})
        print(rows[-1])

    def adapted(alpha, loss, solver):
        w = jax.tree.map(lambda a: jnp.zeros((judged, *a.shape)), alpha)
        state = solver.start(alpha, w)
        w = jax.jit(lambda a: solver.run(loss, a, w, state, new[0])[0])(alpha)
        return jax.vmap(network)(w, new[1][0]).argmax(-1)

    (x, _), (queries, _) = new
    means = x.reshape(judged, WAYS, SHOTS, -1).mean(2)
    away = jnp.sum((queries[:, :, None] - means[:, None]) ** 2, -1)
    row("none: the nearest mean image", away.argmin(-1), 0.0)
    alpha = initial(jax.random.key(0), kinds.shape[-1])
    row("random", adapted(alpha, *ways()["MAML"]), 0.0)
    w = jax.tree.map(lambda a: jnp.zeros((TASKS, *a.shape)), alpha)
    for name, (loss, solver) in ways().items():
        began = time.process_time()
        found = bilevel.search(
            *(bilevel.Problem(loss, each), solver, optax.adam(3e-3), alpha, w, None, None),
            batches=bilevel.jointly(lambda key, *_: tasks(key, known)),
            **{"steps": steps, "key": jax.random.key(1), "history": ["value"]},
        )
        seconds = round(time.process_time() - began, 1)
        courses[name] = np.asarray(found.history["value"]) / TASKS
        row(name, adapted(found.alpha, loss, solver), seconds)
    return rows, courses


def picture(found, figure):
    """The outer loss on the way, in means of twenty steps."""
    ax = figure.subplots()
    for name, course in found[0].items():
        means = course[: len(course) // 20 * 20].reshape(-1, 20).mean(1)
        ax.plot(20 * np.arange(1, len(means) + 1), means, label=name)
    ax.set(xlabel="step", ylabel="loss after learning, classes to learn from")
    ax.legend()


if __name__ == "__main__":
    main()
