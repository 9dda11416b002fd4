"""Label cleaning, penalties and schedules of the gallery, and PyTorch, TorchOpt and Optuna.

    pip install torch torchopt optuna     # in a separate environment, with this package
    python benchmarks/peers/peers.py            # a quarter of an hour; one core: taskset -c 0

*Hypergradients*: CPU time of one hypergradient on the same batches, and its distance from ours. The
problems are labels (`examples/label_cleaning.py`, without dropout) through five steps of the
network; penalties (`examples/word_penalties.py`) by the adjoint at the solution; and schedules
(`examples/schedules.py`) through all steps. "By hand in PyTorch" is the algorithm of `higher`. The
libraries take turns.

*Until a loss*: CPU time until a validation loss, compilation included. Optuna (TPE) uses our
compiled training. It is not applied to the 2,000 labels.
"""

import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from benchmarks import harness
from benchmarks.harness import environment, table, where

MEASURES = ("bilevel/hypergradients", "bilevel/solvers", "bilevel/nets/convolution.py")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
PEERS = "torch", "torchopt", "optuna"
RATE, MOMENTUM, TOL = 0.05, 0.9, 1e-3
GRID = np.linspace(-10, 0, 11)  # log penalties


# ----------------------------------------------------------------------------- hypergradients


def labels(peers, train, steps):
    """Return ``alpha -> hypergradient`` by library, and the alpha."""
    import label_cleaning as example

    data, clean, _, _ = example.load("mnist", train, 200, 10)
    example.network = example.Network(dropout=0.0)
    w = example.network.init(jax.random.key(1), data[0][:1], False)
    start = bilevel.Stateful(w["params"], {"batch_stats": w["batch_stats"]})
    problem = bilevel.Problem(example.lower, example.outer, stateful=True)
    rule, key = optax.sgd(RATE, momentum=MOMENTUM), jax.random.key(2)
    solver = bilevel.unrolled(rule, steps, batches=example.with_key)
    fn = jax.jit(bilevel.hypergradient(problem, solver, diagnostics=False))
    # The random draws of each of our steps, for the other libraries.
    batches = [example.with_key(jax.random.fold_in(key, i), data)[0] for i in range(steps)]
    given = w, batches, clean, RATE, MOMENTUM
    ours = {"here": lambda alpha: fn(alpha, start, (key, data), clean).grad}
    return jnp.zeros(train), ours | theirs(peers, "labels", *given)


def theirs(peers, problem, *given):
    """Return the functions of ``peers_torch.py`` for a problem, by library."""
    names = {"torch": ("PyTorch by hand", "by_hand"), "torchopt": ("TorchOpt", "torchopt")}
    asked = [names[peer] for peer in peers if peer in names]
    if not asked:
        return {}
    from benchmarks.peers import peers_torch

    return {name: getattr(peers_torch, f"{problem}_{way}")(*given) for name, way in asked}


def penalties(peers, words, *sizes):
    import word_penalties as example

    train, valid, _ = example.reviews(words, *sizes, 10)
    problem = bilevel.Problem(example.lower, example.outer)
    # Stopped, as in PyTorch, long before the limit of float32.
    solver = bilevel.implicit(bilevel.lbfgs(200, tol=TOL), bilevel.cg(tol=TOL))
    w = {"words": jnp.zeros(words), "shift": jnp.zeros(())}
    fn = jax.jit(bilevel.hypergradient(problem, solver, diagnostics=False))
    ours = {"here": lambda alpha: fn(alpha, w, train, valid).grad}
    return jnp.full(words, -7.0), ours | theirs(peers, "penalties", train, valid, TOL)


def schedules(peers, steps):
    import schedules as example

    problem, solver, w, data, valid = training(steps)
    draw, (key, train) = bilevel.minibatches(50), data
    batches = [draw(jax.random.fold_in(key, i), train) for i in range(steps)]
    start = example.start()

    def by(mode):
        fn = jax.jit(bilevel.hypergradient(problem, solver, mode=mode, diagnostics=False))

        def gradient(alpha):
            alpha = {"rates": alpha[:-1], "momentum": alpha[-1]}
            grad = fn(alpha, w, data, valid).grad
            return jnp.append(grad["rates"], grad["momentum"])

        return gradient

    ours = {"here": by("reverse"), "here, forward mode": by("forward")}
    others = theirs(peers, "schedules", w, batches, valid, example.KNOTS)
    return jnp.append(start["rates"], start["momentum"]), ours | others


def in_turns(part, alpha, gradients, rounds):
    """Return a row for each library."""
    first, by_library = {}, {}
    for name, gradient in gradients.items():
        began = time.process_time()
        by_library[name] = np.asarray(gradient(alpha))
        first[name] = time.process_time() - began
    ours = by_library["here"]
    for name, each in harness.in_turns(gradients, (alpha,), rounds).items():
        apart = np.linalg.norm(by_library[name] - ours) / np.linalg.norm(ours)
        row = {"part": "hypergradients", "problem": part, "library": name, "rounds": each}
        yield row | {"first, seconds": first[name], "apart": float(apart)}


# ----------------------------------------------------------------------------- until a loss


def training(steps):
    """Return problem, solver, weights, and data with a key, as in examples/schedules.py."""
    import schedules as example

    sizes = {"train": 900, "valid": 400, "test": 497}
    parts = bilevel.data.draw_splits("digits", [jax.random.key(0)], **sizes)[0][:2]
    train, valid = ((jnp.asarray(x.reshape(-1, 64) - 0.3), y) for x, y in parts)
    problem, rows = bilevel.Problem(example.loss, example.loss), bilevel.minibatches(50)
    inner = bilevel.unrolled(example.optimizer_of(steps), steps, batches=rows)
    w, key = example.initial(jax.random.key(1)), jax.random.key(2)
    return problem, bilevel.restarted(inner), w, (key, train), valid


def descended(problem, solver, rule, alpha, w, train, valid, steps):
    """Return CPU time and best loss after every step of alpha, including compilation."""
    began, course, best = time.process_time(), [], np.inf
    init, step = bilevel.descent(problem, solver, rule)
    state, step = init(alpha, w), jax.jit(step)
    for _ in range(steps):
        state, metrics = step(state, (train, valid))
        best = min(best, float(metrics["value"]))
        course.append((time.process_time() - began, best))
    return course


def optuna_course(suggest, value, trials, seconds=np.inf):
    """Return the same for Optuna's trials, until the trials or the seconds are used up."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    began, course = time.process_time(), []

    def told(study, trial):
        course.append((time.process_time() - began, study.best_value))
        if course[-1][0] > seconds:
            study.stop()

    def objective(trial):
        loss = float(value(suggest(trial)))
        return loss if np.isfinite(loss) else 1e3

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=trials, callbacks=[told])
    return course


def rows(part, courses, target, counts):
    """Return a row for each course: when it reached the target, and its last loss."""
    for name, course in courses.items():
        at = next((s for s, value in course if value <= target), None)
        seconds, best = course[-1]
        row = {"part": part, "method": name, "hyperparameters": counts[name], "target": target}
        row |= {"seconds to it": at, "steps or trials": len(course)}
        yield row | {"best": best, "seconds": seconds}


def cross_validated(train, valid):
    """Return the course of scikit-learn's single penalty: the validation loss at the end."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.metrics import log_loss

    (x, y), (xv, yv) = ((plain(x), np.asarray(y)) for x, y in (train, valid))
    began = time.process_time()
    # C over the number of rows in four folds of five is exp(-alpha).
    C = np.exp(-GRID) / (0.8 * len(y))
    flags = {"Cs": C, "cv": 5, "scoring": "neg_log_loss", "max_iter": 1000}
    model = LogisticRegressionCV(**flags, use_legacy_attributes=False).fit(x, y)
    return [(time.process_time() - began, log_loss(yv, model.predict_proba(xv)))]


def plain(x):
    """Convert to SciPy's sparse matrix."""
    import scipy.sparse

    if not hasattr(x, "indices"):
        return scipy.sparse.csr_array(np.asarray(x))
    row, column = np.asarray(x.indices).T
    return scipy.sparse.csr_array((np.asarray(x.data), (row, column)), x.shape)


def until_penalties(peers, words, *sizes_and_steps):
    import word_penalties as example

    *sizes, steps = sizes_and_steps
    train, valid, _ = example.reviews(words, *sizes, 10)
    solver = bilevel.implicit(bilevel.lbfgs(100, tol=TOL), bilevel.cg(tol=TOL))
    w = {"words": jnp.zeros(words), "shift": jnp.zeros(())}

    def ours(alpha, rate, of=lambda alpha: alpha):
        rule = optax.adam(optax.cosine_decay_schedule(rate, steps))
        problem = bilevel.Problem(
            lambda v, a, batch: example.lower(v, of(a), batch),
            lambda v, a, batch: example.outer(v, of(a), batch),
        )
        return descended(problem, solver, rule, alpha, w, train, valid, steps)

    def judged():
        """Return Optuna's objective, the validation loss. Solves start from the last one."""
        solve = jax.jit(lambda a, w, data: solver.run(example.lower, a, w, solver.init(w), data)[0])
        judge, last = jax.jit(example.outer), [w]

        def value(alpha):
            alpha = jnp.broadcast_to(jnp.asarray(alpha), words)
            last[0] = solve(alpha, last[0], train)
            return judge(last[0], alpha, valid)

        return value

    each = [f"{i}" for i in range(words)]
    everywhere = lambda alpha: jnp.full(words, alpha)  # noqa: E731
    courses = {
        "scikit-learn, one penalty, five folds": cross_validated(train, valid),
        "here, one penalty": ours(jnp.array(-5.0), 0.5, everywhere),
    }
    if "optuna" in peers:
        courses["Optuna, one penalty"] = optuna_course(
            lambda t: t.suggest_float("all", -10, 0), judged(), steps
        )
    courses["here, all"] = ours(jnp.full(words, -5.0), 0.3)
    if "optuna" in peers:
        courses["Optuna, all"] = optuna_course(
            lambda t: [t.suggest_float(k, -10, 0) for k in each],
            *(judged(), 10 * steps, courses["here, all"][-1][0]),
        )
    best = min(course[-1][1] for name, course in courses.items() if "one" in name)
    counts = {k: words if "all" in k else 1 for k in courses}
    yield from rows("penalties", courses, 1.001 * best, counts)


def until_schedules(peers, steps, outer):
    import schedules as example

    problem, solver, w, data, valid = training(steps)

    def judged():
        def value(alpha):
            trained = solver.run(example.loss, alpha, w, solver.start(alpha, w), data)[0]
            return example.loss(trained, None, valid)

        return jax.jit(value)

    def knots(trial):
        rates = [trial.suggest_float(f"rate {i}", 0.01, 2, log=True) for i in range(example.KNOTS)]
        return example.start(1.0, trial.suggest_float("momentum", 0.01, 0.95), jnp.asarray(rates))

    def shapes(trial):
        cosine = 0.5 * (1 + jnp.cos(jnp.linspace(0, np.pi, example.KNOTS))) + 1e-3
        of_name = {"constant": 1.0, "cosine": cosine}
        shape = of_name[trial.suggest_categorical("shape", list(of_name))]
        rate = trial.suggest_float("rate", 0.01, 2, log=True)
        return example.start(rate, trial.suggest_float("momentum", 0.01, 0.95), shape)

    given = problem, solver, optax.adam(0.1), example.start(), w, data, valid, outer
    courses = {"here, knots": descended(*given)}
    if "optuna" in peers:
        courses["Optuna, knots"] = optuna_course(knots, judged(), 4 * outer)
        courses["Optuna, shapes"] = optuna_course(shapes, judged(), 4 * outer)
    target = 1.001 * courses["here, knots"][-1][1]
    counts = {"here, knots": 11, "Optuna, knots": 11, "Optuna, shapes": 3}
    yield from rows("schedules", courses, target, counts)


# ----------------------------------------------------------------------------- the report


def of_hypergradients(measurements):
    lines = [
        (
            *(r["problem"], r["library"], f"{1e3 * statistics.median(r['rounds']):,.0f}"),
            *(f"{r['first, seconds']:.1f}", f"{r['apart']:.0e}" if r["apart"] else ""),
        )
        for r in where(measurements, part="hypergradients")
    ]
    head = "problem", "library", "CPU ms", "first call, CPU s", "difference from ours"
    return table(head, lines)


def until(part):
    def of_rows(measurements):
        own = where(measurements, part=part)
        lines = [
            (
                *(r["method"], f"{r['hyperparameters']:,}"),
                "not reached" if r["seconds to it"] is None else f"{r['seconds to it']:.0f}",
                *(f"{r['best']:.4f}", r["steps or trials"], f"{r['seconds']:.0f}"),
            )
            for r in own
        ]
        target = f"CPU s until a loss of {own[0]['target']:.4f}" if own else "CPU s"
        head = "method", "hyperparameters", target, "best loss", "steps or trials", "total, CPU s"
        return table(head, lines)

    return of_rows


of_penalties, of_schedules = until("penalties"), until("schedules")


def report(measurements):
    parts = {"hypergradients": of_hypergradients, "penalties": of_penalties}
    parts |= {"schedules": of_schedules}
    shown = [of for part, of in parts.items() if where(measurements, part=part)]
    return "\n\n".join(of(measurements) for of in shown)


def measured(size, peers):
    if size == "smoke":
        alpha, gradients = schedules(peers, 4)
        del gradients["here, forward mode"]  # its compilation takes a fifth of the limit
        yield from in_turns("schedules", alpha, gradients, 1)
        yield from until_schedules(peers, 4, 2)
        return
    small = size == "quick"
    many = (50, 200, 200) if small else (30_000, 20_000, 5000)
    sizes = ((200, 2), many, (20,)) if small else ((2000, 5), many, (1000,))
    for make, numbers in zip((labels, penalties, schedules), sizes, strict=True):
        yield from in_turns(make.__name__, *make(peers, *numbers), 1 if small else 3)
    yield from until_penalties(peers, *many, 4 if small else 15)
    yield from until_schedules(peers, *((50, 4) if small else (1000, 40)))


def main():
    flags = harness.command_line(__file__, __doc__, report, peers=PEERS)
    rows = [environment(*PEERS, "optax"), *measured(flags.size, flags.peers)]
    harness.finish(rows, flags.results, report)


if __name__ == "__main__":
    main()
