"""``search`` and ``descent``: against the same steps taken one by one in numpy, float64."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from benchmarks.reliability.case import Case, eps, first, near, that
from benchmarks.reliability.registry import generates
from benchmarks.reliability.simplices import point


def lower(w, alpha, batch):
    return 0.5 * jnp.sum((w - batch * alpha) ** 2) + 0.05 * jnp.sum(w**2)


def outer(w, alpha, batch):
    return 0.5 * jnp.sum((w - batch) ** 2)


PROBLEM = bilevel.Problem(lower, outer)
_SOLVERS = {"unrolled": bilevel.unrolled(0.3, 3), "implicit": bilevel.implicit(bilevel.newton(3))}
_OPTIMIZERS = {
    "exponentiate": optax.chain(optax.sgd(0.2), bilevel.exponentiate()),
    "sgd": optax.sgd(0.2),
}


def _reference(a, optimizer, solver, steps):
    """Alphas and values of every step, in float64."""
    alpha, w, x, v = (np.asarray(a[k], np.float64) for k in ("alpha", "w0", "train", "valid"))
    alphas, values = [], []
    for _ in range(steps):
        if solver == "implicit":
            w, slope = x * alpha / 1.1, x / 1.1
        else:
            slope = np.zeros_like(w)
            for _ in range(3):
                w, slope = w - 0.3 * (1.1 * w - x * alpha), slope - 0.3 * (1.1 * slope - x)
        values.append(0.5 * np.sum((w - v) ** 2))
        step = -0.2 * slope * (w - v)
        if optimizer == "sgd":
            alpha = alpha + step
        else:
            alpha = alpha * np.exp(step)
            alpha /= alpha.sum()
        alphas.append(alpha)
    return np.array(alphas), np.array(values)


def _start(rng, dtype):
    h = 3
    scale = 10 ** rng.uniform(-2, 0.5)
    arrays = {
        "alpha": point(rng, dtype, (h,), corner=False),
        "w0": jnp.asarray(rng.normal(size=h), dtype),
        "train": jnp.asarray(scale * rng.normal(size=h), dtype),
        "valid": jnp.asarray(scale * rng.normal(size=h), dtype),
    }
    return arrays, str(rng.choice(list(_SOLVERS))), str(rng.choice(list(_OPTIMIZERS)))


_ARRAYS = {"alpha": "tree", "w0": "tree", "train": "values", "valid": "values"}


@generates("bilevel.search")
def search(rng, dtype) -> Case:
    arrays, solver, optimizer = _start(rng, dtype)
    steps = int(rng.choice([1, 4]))
    alphas, values = _reference(arrays, optimizer, solver, steps)
    options = {"steps": steps, "chunk": [None, 1, 3][rng.integers(3)]}
    run = functools.partial(_search, solver, optimizer, progress=False)

    def check(result):
        return first(
            that(not result.stopped, f"stopped: {result.stopped}"),
            near("alphas", result.history["alpha"], alphas, 3e3 * eps(dtype)),
            near("values", result.history["value"], values, 3e3 * eps(dtype)),
            near("alpha", result.alpha, alphas[-1], 3e3 * eps(dtype)),
        )

    kinds = _ARRAYS | {"steps": "count", "chunk": "count?"}
    if optimizer == "exponentiate":
        kinds["alpha"] = "simplex"
    fine = ("alpha: one axis more", "alpha: a scalar")
    if solver == "implicit":
        kinds.pop("w0")
    # Under jit a search that meets NaN stops changing: its steps say so, not its numbers.
    return Case(_traced_or_not(run), arrays | options, check, kinds, fine=fine)


def _search(solver, optimizer, alpha, w0, train, valid, **options):
    chosen = PROBLEM, _SOLVERS[solver], _OPTIMIZERS[optimizer]
    return bilevel.search(*chosen, alpha, w0, train, valid, **options)


def _traced_or_not(run):
    return lambda **arguments: run(**arguments)


@generates("bilevel.search compiled")
def compiled_search(rng, dtype) -> Case:
    arrays, solver, optimizer = _start(rng, dtype)
    alphas, values = _reference(arrays, optimizer, solver, 3)
    call = functools.partial(_search, solver, optimizer, steps=3)
    check = lambda r: first(
        near("alphas", r.history["alpha"], alphas, 3e3 * eps(dtype)),
        near("values", r.history["value"], values, 3e3 * eps(dtype)),
        that(int(r.state.step) == 3, f"{r.state.step} steps"),
    )
    return Case(call, arrays, check, {}, tuple(arrays))


@generates("bilevel.search options")
def search_options(rng, dtype) -> Case:
    arrays, _, _ = _start(rng, dtype)
    arguments = {
        "problem": PROBLEM,
        "solver": _SOLVERS["unrolled"],
        "optimizer": _OPTIMIZERS["sgd"],
        "batches": lambda key, data: data,
        "key": jax.random.key(0),
        "callback": lambda result: False,
        "checkpoint": None,
        "resume": False,
    }

    def call(problem, solver, optimizer, **options):
        if options["checkpoint"] == "fresh":
            options["checkpoint"] = tempfile.mkdtemp()
        return bilevel.search(
            problem, solver, optimizer, **arrays, steps=2, progress=False, **options
        )

    if rng.random() < 0.3:
        wrong = [
            ("no key", {"key": None}),
            ("resume without a checkpoint", {"resume": True}),
            ("a class for the problem", {"problem": bilevel.Problem}),
            ("a factory for the solver", {"solver": bilevel.unrolled}),
            ("a function for the solver", {"solver": lambda w: w}),
            ("an optimizer's factory", {"optimizer": optax.adam}),
            ("a rate for the optimizer", {"optimizer": 0.1}),
            ("a batch size for batches", {"batches": 32}),
            ("an inverse for the solver", {"solver": bilevel.cg()}),
        ]
        what, changed = wrong[rng.integers(len(wrong))]
        return Case(call, arguments | changed, lambda r: "", {}, mistake=what)
    kinds = {
        "problem": "record",
        "solver": "record",
        "optimizer": "record",
        "batches": "function?",
        "key": "key",
        "callback": "function?",
    }
    check = lambda r: that(len(r.history["value"]) == 2, "not two steps")
    return Case(call, arguments, check, kinds)


@generates("bilevel.descent")
def descent(rng, dtype) -> Case:
    arrays, solver, optimizer = _start(rng, dtype)
    alphas, values = _reference(arrays, optimizer, solver, 1)

    def call(alpha, w0, train, valid):
        init, step = bilevel.descent(PROBLEM, _SOLVERS[solver], _OPTIMIZERS[optimizer])
        state, metrics = step(init(alpha, w0), (train, valid))
        return state.alpha, metrics["value"]

    check = lambda r: first(
        near("alpha", r[0], alphas[0], 1e3 * eps(dtype)),
        near("value", r[1], values[0], 1e3 * eps(dtype)),
    )
    kinds = {"train": "values", "valid": "values"}
    traced = ("alpha", "train", "valid") + (("w0",) if solver == "unrolled" else ())
    return Case(call, arrays, check, kinds, traced)


@generates("bilevel.search of geometries in the wrong order")
def wrong_order(rng, dtype) -> Case:
    """What comes after the geometry takes alpha off its set: refused, or kept on it."""
    after = {
        "nothing to descend": bilevel.exponentiate(),
        "clip": optax.chain(optax.sgd(0.5), bilevel.exponentiate(), optax.clip(1e-6)),
        "weight decay": optax.chain(
            optax.sgd(0.5), bilevel.exponentiate(), optax.add_decayed_weights(0.1)
        ),
        "a rate": optax.chain(bilevel.exponentiate(), optax.scale(-0.5)),
        "projection": optax.chain(optax.sgd(0.5), bilevel.project(), optax.scale(3.0)),
    }
    what = str(rng.choice(list(after)))
    arrays, _, _ = _start(rng, dtype)
    arrays["valid"] = arrays["valid"] + 3
    call = lambda optimizer, **a: bilevel.search(
        PROBLEM, _SOLVERS["unrolled"], optimizer, **a, steps=5, progress=False
    )
    return Case(call, arrays | {"optimizer": after[what]}, lambda r: "", {}, mistake=what)
