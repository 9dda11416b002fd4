"""How solvers and problems are made: options out of range, and what people write in their place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from benchmarks.reliability.case import Case, eps, first, near, that
from benchmarks.reliability.hypergradients import PROBLEM, Ridge, closed, lower, outer
from benchmarks.reliability.registry import generates


def _tiny(rng):
    x, y = jnp.asarray(rng.normal(size=(4, 2))), jnp.asarray(rng.normal(size=4))
    return jnp.zeros(2), {"a": jnp.zeros(1), "b": jnp.zeros(1)}, (x, y), (x, y)


def _built(make, rng, **arguments):
    """A solver's factory: its options are the arguments; the result is a hypergradient's value."""
    alpha, w0, train, valid = _tiny(rng)

    def call(**options):
        solver = make(**options)
        return bilevel.hypergradient(PROBLEM, solver, diagnostics=False)(alpha, w0, train, valid)

    return call, lambda result: that(np.isfinite(float(result.value)), "no value")


_OTHERS = {  # what people write in the place of a solver or an inverse
    "an optax optimizer": lambda: optax.sgd(0.1),
    "an inverse": lambda: bilevel.cg(),
    "a factory": lambda: bilevel.newton,
    "implicit itself": lambda: bilevel.implicit,
    "a number": lambda: 0.1,
    "a text": lambda: "newton",
}


def _other(rng) -> tuple[str, Any]:
    what = str(rng.choice(list(_OTHERS)))
    return what, _OTHERS[what]()


@generates("bilevel.implicit options")
def implicit_options(rng, dtype) -> Case:
    call, check = _built(lambda forward, inverse: bilevel.implicit(forward, inverse), rng)
    arguments = {"forward": None, "inverse": None}
    if rng.random() < 0.2:
        return Case(call, arguments, check, {})
    name = str(rng.choice(["forward", "inverse"]))
    what, other = _other(rng)
    if name == "inverse" and callable(other):  # what is callable may be an inverse
        other = "text"
    return _refuses(call, arguments | {name: other}, f"{name}: {what}")


@generates("bilevel.unrolled options")
def unrolled_options(rng, dtype) -> Case:
    call, check = _built(bilevel.unrolled, rng)
    kinds = {"optimizer": "function", "steps": "count", "backprop": "whole?"}
    arguments = {"optimizer": 0.1, "steps": 2, "backprop": None}
    if rng.random() < 0.3:
        arguments["optimizer"] = optax.MultiSteps(optax.sgd(0.1), 2)
    return Case(call, arguments, check, kinds, fine=("optimizer: a number", "optimizer: an array"))


@generates("bilevel.newton options")
def newton_options(rng, dtype) -> Case:
    call, check = _built(lambda **o: bilevel.implicit(bilevel.newton(**o)), rng)
    kinds = {"steps": "count", "tol": "nonnegative?", "cg_steps": "count"}
    return Case(call, {"steps": 20, "tol": None, "cg_steps": 50}, check, kinds)


@generates("bilevel.lbfgs options")
def lbfgs_options(rng, dtype) -> Case:
    call, check = _built(lambda **o: bilevel.implicit(bilevel.lbfgs(**o)), rng)
    kinds = {"steps": "count", "tol": "nonnegative?", "memory": "count"}
    return Case(call, {"steps": 20, "tol": None, "memory": 5}, check, kinds)


@generates("bilevel.one_step options")
def one_step_options(rng, dtype) -> Case:
    call, check = _built(bilevel.one_step, rng)
    kinds = {"optimizer": "function", "radius": "positive?"}
    fine = ("optimizer: a number", "optimizer: an array")
    return Case(call, {"optimizer": 0.1, "radius": 0.01}, check, kinds, fine=fine)


@generates("bilevel.restarted options")
def restarted_options(rng, dtype) -> Case:
    call, check = _built(bilevel.restarted, rng)
    if rng.random() < 0.7:
        what, other = _other(rng)
        return _refuses(call, {"solver": other}, f"solver: {what}")
    return Case(call, {"solver": bilevel.unrolled(0.1, 2)}, check, {"solver": "function"})


@generates("bilevel.ridge options")
def ridge_options(rng, dtype) -> Case:
    alpha, _, train, _ = _tiny(rng)

    def call(features, penalty):
        solver = bilevel.ridge(features, penalty)
        return solver.run(lambda *a: 0.0, alpha, jnp.zeros(2), solver.init(jnp.zeros(2)), train)[0]

    arguments = {"features": lambda alpha, x: x, "penalty": lambda alpha: 1.0}
    kinds = {"features": "function", "penalty": "function"}
    return Case(call, arguments, lambda w: that(np.isfinite(w).all(), "no weights"), kinds)


@generates("bilevel.gram options")
def gram_options(rng, dtype) -> Case:
    outputs = lambda w, alpha, batch: batch[0] @ jnp.concatenate([w["a"], w["b"]])
    make = lambda **o: bilevel.implicit(bilevel.newton(), bilevel.gram(**o))
    call, check = _built(make, rng)
    kinds = {"outputs": "function", "damping": "nonnegative"}
    return Case(
        call, {"outputs": outputs, "damping": 1.0}, check, kinds, fine=("damping: a function",)
    )


@generates("bilevel.solved options")
def solved_options(rng, dtype) -> Case:
    call, check = _built(lambda solve: bilevel.implicit(bilevel.solved(solve)), rng)
    return Case(call, {"solve": closed}, check, {"solve": "function?"})


@generates("bilevel.hypergradient options")
def hypergradient_options(rng, dtype) -> Case:
    alpha, w0, train, valid = _tiny(rng)

    def call(problem, solver, mode, alpha, w0):
        return bilevel.hypergradient(problem, solver, mode=mode)(alpha, w0, train, valid)

    arguments = {
        "problem": PROBLEM,
        "solver": bilevel.unrolled(0.1, 2),
        "mode": "reverse",
        "alpha": alpha,
        "w0": w0,
    }
    odd: dict[str, Any] = {
        "aux": {"problem": bilevel.Problem(lambda *a: (lower(*a), 1), outer)},
        "vector": {"problem": bilevel.Problem(lambda *a: lower(*a)[None], outer)},
        "integers": {"alpha": jnp.zeros(2, int)},
        "integer weights": {"w0": jax.tree.map(lambda x: x.astype(int), w0)},
        "complex weights": {"w0": jax.tree.map(lambda x: x + 1j, w0)},
    }
    if rng.random() < 0.5:
        what = str(rng.choice(list(odd)))
        return _refuses(call, arguments | odd[what], what)
    kinds = {"problem": "record", "solver": "record", "mode": "name"}
    check = lambda r: that(np.isfinite(float(r.value)), "no value")
    return Case(call, arguments, check, kinds)


@generates("bilevel.Problem")
def problem(rng, dtype) -> Case:
    alpha, w0, train, valid = _tiny(rng)

    def call(lower, outer):
        made = bilevel.Problem(lower, outer)
        return made.lower(w0, alpha, train), made.outer(w0, alpha, valid)

    check = lambda r: near("losses", r, (lower(w0, alpha, train), outer(w0, alpha, valid)), 0)
    return Case(
        call, {"lower": lower, "outer": outer}, check, {"lower": "function", "outer": "function"}
    )


@generates("bilevel.stack_problems")
def side_by_side(rng, dtype) -> Case:
    made = [Ridge(np.random.default_rng(int(rng.integers(4)) + 10 * i), dtype) for i in range(2)]
    if made[0].arguments["alpha"].shape != made[1].arguments["alpha"].shape:
        made[1] = made[0]
    alone = [r.arguments for r in made]
    both = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    call = lambda w0, alpha, train: jax.value_and_grad(bilevel.stack_problems(PROBLEM).lower, 1)(
        w0, alpha, train
    )
    each = [jax.value_and_grad(lower, 1)(a["w0"], a["alpha"], a["train"]) for a in alone]
    value, grad = sum(float(v) for v, _ in each), np.stack([np.asarray(g) for _, g in each])
    check = lambda r: first(
        near("value", r[0], value, 50 * eps(dtype)), near("gradient", r[1], grad, 50 * eps(dtype))
    )
    arguments = {k: both[k] for k in ("w0", "alpha", "train")}
    kinds = {k: "values" for k in arguments}
    return Case(call, arguments, check, kinds, ("w0", "alpha", "train"))


def _refuses(call, arguments, mistake: str) -> Case:
    """A call that has to be refused; answering is wrong."""
    return Case(call, arguments, lambda result: "", {}, mistake=mistake)
