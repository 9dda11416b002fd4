"""Three kinds of clothes from five images of each: MAML, its first order, iMAML.

    python few_shot.py

Training tasks use seven of Fashion-MNIST's classes. Each task has three classes in random order,
with five images per class to learn from and ten to evaluate on. The learned initialization is
evaluated on tasks of the other three classes: pullovers, coats and shirts. MAML (Finn, Abbeel &
Levine 2017) differentiates through five steps. iMAML (Rajeswaran et al. 2019) differentiates the
solution of the task's loss with a penalty on the distance to the initialization. There are two
baselines: the same steps from random weights, and the class of the nearest mean image.
"""

import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel

OTHERS, WAYS, SHOTS, JUDGED, TASKS = (2, 4, 6), 3, 5, 10, 16
RATE, STEPS, PENALTY, WIDTH = 0.3, 5, 0.5, 32
FULL = [{}]
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
net = nn.Sequential([nn.Dense(WIDTH), jnp.tanh, nn.Dense(WAYS)])
LABELS = [jnp.repeat(jnp.arange(WAYS), count) for count in (SHOTS, JUDGED)]


def images(data, each):
    """Return images at half the resolution, by class: [10, each, pixels]."""
    dataset = bilevel.data.load(data, train_size=20 * each, test_size=1)
    side = round(dataset.x_train[0].size ** 0.5) // 2
    x = np.asarray(dataset.x_train, np.float32).reshape(-1, side, 2, side, 2).mean((2, 4))
    x = ((x - x.mean()) / x.std()).reshape(len(x), -1)
    return jnp.stack([x[dataset.y_train == kind][:each] for kind in range(10)])


def tasks(key, kinds, count=TASKS):
    """Draw tasks from images by class: pairs (images, labels) to learn from and to evaluate on."""

    def one(key):
        of_class, of_row = jax.random.split(key)
        chosen = jax.random.permutation(of_class, len(kinds))[:WAYS, None]
        rows = jax.random.permutation(of_row, kinds.shape[1])[: SHOTS + JUDGED]
        parts = jnp.split(kinds[chosen, rows], [SHOTS], axis=1)
        return [(x.reshape(-1, x.shape[-1]), y) for x, y in zip(parts, LABELS, strict=True)]

    return jax.vmap(one)(jax.random.split(key, count))


def each(w, alpha, batch):
    """Return the sum of the tasks' losses. Every task has separate weights."""
    return jax.vmap(lambda w, b: cross_entropy(net.apply(w, b[0]), b[1]).mean())(w, batch).sum()


def near(w, alpha, batch):
    """Add iMAML's penalty on the distance to the initialization."""
    away = optax.tree.norm(optax.tree.sub(w, alpha), squared=True)
    return each(w, alpha, batch) + 0.5 * PENALTY * away


def ways():
    """Return, by name, the lower loss and the solver of a task, which starts at a copy of alpha."""
    held = optax.stateless(lambda updates, _: jax.lax.stop_gradient(updates))
    first = bilevel.unrolled(optax.chain(optax.sgd(RATE), held), STEPS)
    solved = bilevel.implicit(bilevel.unrolled(RATE, 4 * STEPS), bilevel.cg(steps=5))
    by_name = {"MAML": (each, bilevel.unrolled(RATE, STEPS)), "MAML of first order": (each, first)}
    copies = {"start": lambda alpha, w: jax.tree.map(jnp.full_like, w, alpha)}
    by_name["iMAML"] = near, solved
    return {name: (loss, bilevel.restarted(s, **copies)) for name, (loss, s) in by_name.items()}


def main(data="fashion-mnist", each_class=300, steps=400, judged=600):
    """Train in every way. Return a row each, with errors on new classes, and loss curves."""
    kinds, other = images(data, each_class), np.isin(range(10), OTHERS)
    new, (queries, labels) = tasks(jax.random.key(7), kinds[other], judged)
    alpha, rows, courses = net.init(jax.random.key(0), kinds[0]), [], {}

    def row(name, predicted, began):
        wrong = jnp.mean(predicted != labels, axis=1)
        entry = {"start": name, "seconds": began and round(time.process_time() - began, 1)}
        entry |= {"error": float(wrong.mean())}
        rows.append(entry | {"two standard errors": float(2 * jnp.std(wrong) / judged**0.5)})
        print(rows[-1])

    def of_tasks(count):
        return jax.tree.map(lambda a: jnp.zeros((count, *a.shape)), alpha)

    def adapted(alpha, loss, solver):
        state = solver.start(alpha, of_tasks(judged))
        w = jax.jit(lambda a: solver.run(loss, a, of_tasks(judged), state, new)[0])(alpha)
        return jax.vmap(net.apply)(w, queries).argmax(-1)

    means = new[0].reshape(judged, WAYS, SHOTS, -1).mean(2)
    away = jnp.sum((queries[:, :, None] - means[:, None]) ** 2, -1)
    row("none: the nearest mean image", away.argmin(-1), 0)
    row("random", adapted(alpha, *ways()["MAML"]), 0)
    draw = bilevel.jointly(lambda key, *_: tuple(tasks(key, kinds[~other])))
    flags = {"batches": draw, "steps": steps, "key": jax.random.key(1), "history": ["value"]}
    for name, (loss, solver) in ways().items():
        began = time.process_time()
        problem, data = bilevel.Problem(loss, each), (alpha, of_tasks(TASKS), None, None)
        result = bilevel.search(problem, solver, optax.adam(3e-3), *data, **flags)
        courses[name] = np.asarray(result.history["value"]) / TASKS
        row(name, adapted(result.alpha, loss, solver), began)
    return rows, courses


def picture(drawn, figure):
    """Draw the outer loss during training, in means of twenty steps."""
    ax = figure.subplots()
    for name, course in drawn[0].items():
        ax.plot(np.arange(20, len(course) + 1, 20), course.reshape(-1, 20).mean(1), label=name)
    ax.set(xlabel="step", ylabel="loss after learning, classes to learn from")
    ax.legend()


if __name__ == "__main__":
    main()
