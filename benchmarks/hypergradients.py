"""What does a hypergradient cost, and how right is it?

Ridge regression with one penalty per weight, n = m = 2000 samples, p = 500 weights:

    g(w, lam) = |X w - y|^2 / 2n + sum_j exp(lam_j) w_j^2 / 2,    f(w) = |Xv w - yv|^2 / 2m,

and its hypergradient df/dlam, 500 numbers. `iid`: Gaussian features, condition number 6.2; `hard`:
feature scales j^-1/2 and weak penalties, 558. The truth is the closed form in float64 numpy.

Same work for everyone: 100 gradient steps from 0 with step 1/L. *implicit* adds conjugate gradients
(tolerance 1e-10 in float64, 1e-6 in float32, at most 500 iterations), *unrolled* goes back through
the steps, *closed form* factorises. One core, one thread. The methods of a kind share a process and
take turns in a random order, so that a ratio is one of neighbours in time: the median over rounds.

    python benchmarks/hypergradients.py            # all installed peers: some ten minutes
    python benchmarks/hypergradients.py --quick    # hand-written JAX only: about a minute
    python benchmarks/hypergradients.py --table    # the results file as markdown
"""

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_factor, cho_solve
from rich.console import Console
from rich.table import Table

import bilevel

RESULTS = Path(__file__).parent / "results" / "hypergradients.jsonl"
PEERS = ("jaxopt", "optimistix", "lineax", "torch", "torchopt")
CASES = [("iid", "float64"), ("iid", "float32"), ("hard", "float64"), ("hard", "float32")]
KINDS = ("implicit", "unrolled", "closed form")
N, P, STEPS, CG_STEPS, SEED = 2000, 500, 100, 500, 0
HAND = {"implicit": "JAX by hand", "unrolled": "JAX by hand", "closed form": "JAX by hand"}


class Setup(NamedTuple):
    args: tuple[Any, ...]  # lam, w0, (X, y), (Xv, yv)
    step: float  # 1 / L
    tol: float  # of conjugate gradients
    truth: np.ndarray  # [p]
    condition: float


def setup(case: str, dtype: str) -> Setup:
    rng = np.random.default_rng(SEED)
    scale, penalty = {"iid": (0.0, -2.0), "hard": (-0.5, -6.5)}[case]
    columns = np.arange(1, P + 1) ** scale
    w = rng.normal(size=P)

    def sample():
        x = rng.normal(size=(N, P)) * columns
        y = x @ w + 0.5 * rng.normal(size=N)
        # Both precisions get the same problem.
        return x.astype(np.float32).astype(dtype), y.astype(np.float32).astype(dtype)

    train, valid = sample(), sample()
    lam = np.full(P, penalty, dtype)
    (x, y), (xv, yv) = (tuple(a.astype(float) for a in batch) for batch in (train, valid))
    hessian = x.T @ x / N + np.diag(np.exp(lam.astype(float)))
    w_star = np.linalg.solve(hessian, x.T @ y / N)
    adjoint = np.linalg.solve(hessian, xv.T @ (xv @ w_star - yv) / N)
    spectrum = np.linalg.eigvalsh(hessian)
    return Setup(
        args=(lam, np.zeros(P, dtype), train, valid),
        step=1 / spectrum[-1],
        tol=1e-10 if dtype == "float64" else 1e-6,
        truth=-np.exp(lam.astype(float)) * w_star * adjoint,
        condition=spectrum[-1] / spectrum[0],
    )


def lower(w, lam, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2) + 0.5 * jnp.sum(jnp.exp(lam) * w**2)


def outer(w, lam, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2)


# Every method is a function (lam, w0, train, valid) -> gradient, or (gradient, error estimate).


def ours(kind, s, full):
    problem = bilevel.Problem(lower, outer)

    def method(solver, diagnostics=False, mode="reverse"):
        fn = bilevel.hypergradient(problem, solver, mode=mode, diagnostics=diagnostics)

        def run(*args):
            result = fn(*args)
            return (result.grad, result.info.error_estimate) if diagnostics else result.grad

        return run

    descent = bilevel.unrolled(s.step, STEPS)
    if kind == "unrolled":
        methods = {"bilevel": method(descent), "bilevel, with estimate": method(descent, True)}
        return methods | ({"bilevel, forward mode": method(descent, mode="forward")} if full else {})
    if kind == "closed form":
        penalty = lambda lam: N * jnp.exp(lam)  # noqa: E731
        return {"bilevel": method(bilevel.ridge(lambda lam, x: x, penalty))}
    solver = bilevel.implicit(descent, bilevel.cg(CG_STEPS, s.tol))
    default = bilevel.implicit()
    return {
        "bilevel": method(solver),
        "bilevel, with estimate": method(solver, True),
        "bilevel, default solver": method(default),
        "bilevel, default, with estimate": method(default, True),
        "bilevel, dense": method(bilevel.implicit(descent, bilevel.dense())),
        "bilevel, neumann": method(bilevel.implicit(descent, bilevel.neumann(STEPS, s.step))),
        "bilevel, nystrom": method(bilevel.implicit(descent, bilevel.nystrom(50, 1 / s.step / 1e4))),
    }


def jax_by_hand(kind, s, full):
    slope = jax.grad(lower)

    def descend(lam, w, train, every=1):
        def step(w, _):
            return w - s.step * slope(w, lam, train), None

        def block(w, _):
            return jax.lax.scan(step, w, length=every)[0], None

        body = step if every == 1 else jax.checkpoint(block, prevent_cse=False)
        return jax.lax.scan(body, w, length=STEPS // every)[0]

    def implicit(lam, w, train, valid):
        w = descend(lam, w, train)
        force = jax.grad(outer)(w, lam, valid)

        def hvp(v):
            return jax.jvp(lambda w: slope(w, lam, train), (w,), (v,))[1]

        q = jax.scipy.sparse.linalg.cg(hvp, force, tol=s.tol, maxiter=CG_STEPS)[0]
        return -jax.vjp(lambda lam: slope(w, lam, train), lam)[1](q)[0]

    def unrolled(every, lam, w, train, valid):
        return jax.value_and_grad(lambda lam: outer(descend(lam, w, train, every), lam, valid))(lam)[1]

    def factorise(lam, train):
        x, y = train
        return cho_factor(x.T @ x / N + jnp.diag(jnp.exp(lam))), x.T @ y / N

    def closed_form(lam, w, train, valid):
        return jax.grad(lambda lam: outer(cho_solve(*factorise(lam, train)), lam, valid))(lam)

    def closed_form_adjoint(lam, w, train, valid):
        factor, b = factorise(lam, train)
        w = cho_solve(factor, b)
        return -jnp.exp(lam) * w * cho_solve(factor, jax.grad(outer)(w, lam, valid))

    return {
        "implicit": {"JAX by hand": implicit},
        "unrolled": {
            "JAX by hand": functools.partial(unrolled, 1),
            "JAX by hand, checkpoint every 10": functools.partial(unrolled, 10),
        },
        "closed form": {"JAX by hand": closed_form, "JAX by hand, adjoint": closed_form_adjoint},
    }[kind]


def jaxopt_methods(kind, s, full):
    import jaxopt

    def method(**options):
        solver = jaxopt.GradientDescent(
            lower, stepsize=s.step, maxiter=STEPS, tol=0, acceleration=False, **options
        )

        def objective(lam, w, train, valid):
            return outer(solver.run(w, lam, train).params, lam, valid)

        return jax.grad(objective)

    cg = functools.partial(jaxopt.linear_solve.solve_cg, tol=s.tol, maxiter=CG_STEPS)
    return {
        "implicit": {
            "JAXopt": method(implicit_diff=True, implicit_diff_solve=cg),
            "JAXopt, default": method(implicit_diff=True),
        },
        "unrolled": {"JAXopt": method(implicit_diff=False)},
    }.get(kind, {})


def optimistix_methods(kind, s, full):
    import lineax
    import optax
    import optimistix

    def method(adjoint):
        solver = optimistix.OptaxMinimiser(optax.sgd(s.step), rtol=0.0, atol=0.0)

        def objective(lam, w, train, valid):
            solution = optimistix.minimise(
                lambda w, lam: lower(w, lam, train),
                solver,
                w,
                lam,
                max_steps=STEPS,
                adjoint=adjoint,
                throw=False,
                tags=frozenset({lineax.positive_semidefinite_tag}),
            )
            return outer(solution.value, lam, valid)

        return jax.grad(objective)

    # In float32 it raises at 1e-6.
    cg = lineax.CG(max(s.tol, 1e-10 if s.tol < 1e-8 else 1e-4), 0.0, max_steps=CG_STEPS)
    return {
        "implicit": {"Optimistix": method(optimistix.ImplicitAdjoint(cg))},
        "unrolled": {"Optimistix": method(optimistix.RecursiveCheckpointAdjoint(STEPS))},
    }.get(kind, {})
