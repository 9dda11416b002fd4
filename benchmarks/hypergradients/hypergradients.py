"""What does a hypergradient cost, and how accurate is it?

Ridge regression with one penalty per weight, n = m = 2000 samples, p = 500 weights:

    g(w, lam) = |X w - y|^2 / 2n + sum_j exp(lam_j) w_j^2 / 2,    f(w) = |Xv w - yv|^2 / 2m,

and its hypergradient df/dlam, a vector of 500 values. `iid` has Gaussian features and condition
number 6.2. `hard` has feature scales j^-1/2, weak penalties and condition number 558. The truth is
the closed form in float64 numpy.

All methods take 100 gradient steps from 0 with step size 1/L. *implicit* adds conjugate gradients
(tolerance 1e-10 in float64, 1e-6 in float32, at most 500 iterations). *unrolled* differentiates
through the steps. *closed form* factorizes. Runs use one core and one thread (Linux only). The
methods of a kind share a process and take turns in random order, so a ratio compares neighbors in
time. It is the median over rounds.

    python benchmarks/hypergradients/hypergradients.py    # against every peer: some five minutes
"""

import functools
import itertools
import random
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_factor, cho_solve

import bilevel
from benchmarks import harness

MEASURES = ("bilevel/hypergradients", "bilevel/solvers", "bilevel/problem")

CASES = [("iid", "float64"), ("iid", "float32"), ("hard", "float64"), ("hard", "float32")]
KINDS = ("implicit", "unrolled", "closed form")
N, P, STEPS, CG_STEPS, SEED = 2000, 500, 100, 500, 0
SMOKE = 200, 60  # N and P
HAND = "JAX by hand"


class Setup(NamedTuple):
    args: tuple[Any, ...]  # lam, w0, (X, y), (Xv, yv)
    step: float  # 1 / L
    tol: float  # of conjugate gradients
    truth: np.ndarray  # [p], the hypergradient
    spectrum: np.ndarray  # [p], of the lower Hessian, ascending


def setup(case: str, dtype: str) -> Setup:
    rng = np.random.default_rng(SEED)
    exponent, penalty = {"iid": (0.0, -2.0), "hard": (-0.5, -6.856)}[case]
    scales = np.arange(1, P + 1) ** exponent
    w = rng.normal(size=P)

    def sample():
        x = rng.normal(size=(N, P)) * scales
        y = x @ w + 0.5 * rng.normal(size=N)
        return x.astype(np.float32), y.astype(np.float32)  # float64 gets the same problem

    lam, data = np.full(P, penalty), [sample(), sample()]
    (x, y), (xv, yv) = (tuple(a.astype(float) for a in batch) for batch in data)
    decay = np.exp(lam.astype(dtype).astype(float))
    hessian = x.T @ x / N + np.diag(decay)
    w = np.linalg.solve(hessian, x.T @ y / N)
    adjoint = np.linalg.solve(hessian, xv.T @ (xv @ w - yv) / N)
    spectrum = np.linalg.eigvalsh(hessian)
    cast = functools.partial(jax.tree.map, lambda a: a.astype(dtype))
    return Setup(
        args=cast((lam, np.zeros(P), *data)),
        step=1 / spectrum[-1],
        tol=1e-10 if dtype == "float64" else 1e-6,
        truth=-decay * w * adjoint,
        spectrum=spectrum,
    )


def lower(w, lam, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2) + 0.5 * jnp.sum(jnp.exp(lam) * w**2)


def outer(w, lam, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2)


# ------------------------------------------------------------------------------- the methods
# Functions (lam, w0, train, valid) -> gradient, or (gradient, error estimate), by kind and name.


def ours(kind, s):
    problem = bilevel.Problem(lower, outer)

    def method(solver, estimate=False):
        fn = bilevel.hypergradient(problem, solver, diagnostics=estimate)

        def run(*args):
            result = fn(*args)
            return (result.grad, result.info.error_estimate) if estimate else result.grad

        return run

    descent, cg = bilevel.unrolled(s.step, STEPS), bilevel.cg(CG_STEPS, s.tol)
    if kind == "unrolled":
        return {"bilevel": method(descent), "bilevel + estimate": method(descent, True)}
    if kind == "closed form":
        return {"bilevel": method(bilevel.ridge(lambda lam, x: x, lambda lam: N * jnp.exp(lam)))}
    same, default = bilevel.implicit(descent, cg), bilevel.implicit()
    others = {
        "bilevel, dense": bilevel.dense(),
        "bilevel, neumann": bilevel.neumann(STEPS, s.step),
        "bilevel, nystrom": bilevel.nystrom(50, s.spectrum[-50]),
    }
    return {
        "bilevel": method(same),
        "bilevel + estimate": method(same, True),
        "bilevel default": method(default),
        "bilevel default + estimate": method(default, True),
    } | {name: method(bilevel.implicit(descent, inverse)) for name, inverse in others.items()}


def jax_by_hand(kind, s):
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

    def unrolled(lam, w, train, valid, every=1):
        return jax.grad(lambda lam: outer(descend(lam, w, train, every), lam, valid))(lam)

    def factorise(lam, train):
        x, y = train
        return cho_factor(x.T @ x / N + jnp.diag(jnp.exp(lam))), x.T @ y / N

    def closed_form(lam, w, train, valid):
        return jax.grad(lambda lam: outer(cho_solve(*factorise(lam, train)), lam, valid))(lam)

    def closed_form_adjoint(lam, w, train, valid):
        factor, b = factorise(lam, train)
        w = cho_solve(factor, b)
        return -jnp.exp(lam) * w * cho_solve(factor, jax.grad(outer)(w, lam, valid))

    checkpointed = functools.partial(unrolled, every=10)
    return {
        "implicit": {HAND: implicit},
        "unrolled": {HAND: unrolled, f"{HAND}, checkpoint every 10": checkpointed},
        "closed form": {HAND: closed_form, f"{HAND}, adjoint": closed_form_adjoint},
    }[kind]


def jaxopt(kind, s):
    import jaxopt

    def method(**options):
        options = {"maxiter": STEPS, "tol": 0, "acceleration": False} | options
        solver = jaxopt.GradientDescent(lower, stepsize=s.step, **options)
        return jax.grad(lambda lam, w, t, valid: outer(solver.run(w, lam, t).params, lam, valid))

    cg = functools.partial(jaxopt.linear_solve.solve_cg, tol=s.tol, maxiter=CG_STEPS)
    if kind == "implicit":
        return {"JAXopt": method(implicit_diff_solve=cg), "JAXopt default": method()}
    return {"JAXopt": method(implicit_diff=False)} if kind == "unrolled" else {}


def optimistix(kind, s):
    import lineax
    import optax
    import optimistix

    # It raises with 1e-6 in float32.
    cg = lineax.CG(rtol=s.tol if s.tol < 1e-6 else 1e-4, atol=0.0, max_steps=CG_STEPS)
    if kind == "closed form":
        return {}
    adjoint = {
        "implicit": optimistix.ImplicitAdjoint(cg),
        "unrolled": optimistix.RecursiveCheckpointAdjoint(STEPS),
    }[kind]
    solver = optimistix.OptaxMinimiser(optax.sgd(s.step), rtol=0.0, atol=0.0)
    tags = frozenset({lineax.positive_semidefinite_tag})
    options = {"max_steps": STEPS, "adjoint": adjoint, "throw": False, "tags": tags}

    def objective(lam, w, train, valid):
        def fn(w, lam):
            return lower(w, lam, train)

        return outer(optimistix.minimise(fn, solver, w, lam, **options).value, lam, valid)

    return {"Optimistix": jax.grad(objective)}


def torch_losses(s):
    """Return ``lower``, ``outer``, ``descend`` in PyTorch, and a decorator for array functions."""
    import torch

    torch.set_num_threads(1)
    grad, device = torch.autograd.grad, "cuda" if jax.default_backend() == "gpu" else "cpu"

    def on_device(a):
        return torch.from_numpy(a).to(device)

    def lower(w, lam, x, y):
        return 0.5 * torch.mean((x @ w - y) ** 2) + 0.5 * torch.sum(torch.exp(lam) * w**2)

    def outer(w, x, y):
        return 0.5 * torch.mean((x @ w - y) ** 2)

    def descend(w, lam, train, record):
        for _ in range(STEPS):
            w = w if record else w.detach().requires_grad_()
            w = w - s.step * grad(lower(w, lam, *train), w, create_graph=record)[0]
        return w

    def from_numpy(fn):
        def run(lam, w, *batches):
            lam, w = (on_device(a).requires_grad_() for a in (lam, w))
            return fn(lam, w, *jax.tree.map(on_device, batches)).cpu().numpy()

        return run

    return lower, outer, descend, from_numpy


def torch_by_hand(kind, s):
    import torch

    grad = torch.autograd.grad
    lower, outer, descend, from_numpy = torch_losses(s)

    def implicit(lam, w, train, valid):
        w = descend(w, lam, train, False).detach().requires_grad_()
        slope = grad(lower(w, lam, *train), w, create_graph=True)[0]
        r = p = grad(outer(w, *valid), w)[0]
        q, rr = torch.zeros_like(r), r @ r
        floor = s.tol**2 * rr
        for _ in range(CG_STEPS):
            if rr <= floor:
                break
            hp = grad(slope, w, p, retain_graph=True)[0]
            length = rr / (p @ hp)
            q, r = q + length * p, r - length * hp
            rr, previous = r @ r, rr
            p = r + rr / previous * p
        return -grad(slope, lam, q)[0]

    def unrolled(lam, w, train, valid):
        return grad(outer(descend(w, lam, train, True), *valid), lam)[0]

    methods = {"implicit": implicit, "unrolled": unrolled}
    return {"torch by hand": from_numpy(methods[kind])} if kind in methods else {}


def torchopt(kind, s):
    import torch
    import torchopt

    grad = torch.autograd.grad
    lower, outer, descend, from_numpy = torch_losses(s)
    cg = torchopt.linear_solve.solve_cg(rtol=s.tol, atol=0.0, maxiter=CG_STEPS)

    @torchopt.diff.implicit.custom_root(torch.func.grad(lower), argnums=1, solve=cg)
    def solution(w, lam, x, y):
        with torch.enable_grad():
            return descend(w, lam.detach(), (x, y), False).detach()

    def implicit(lam, w, train, valid):
        return grad(outer(solution(w, lam, *train), *valid), lam)[0]

    def unrolled(lam, w, train, valid):
        optimizer = torchopt.sgd(s.step)
        state = optimizer.init(w)
        for _ in range(STEPS):
            slope = grad(lower(w, lam, *train), w, create_graph=True)[0]
            updates, state = optimizer.update(slope, state, inplace=False)
            w = torchopt.apply_updates(w, updates, inplace=False)
        return grad(outer(w, *valid), lam)[0]

    methods = {"implicit": implicit, "unrolled": unrolled}
    return {"TorchOpt": from_numpy(methods[kind])} if kind in methods else {}


PEERS = {"jaxopt": jaxopt, "optimistix": optimistix, "torch": torch_by_hand, "torchopt": torchopt}
EAGER = torch_by_hand, torchopt


# --------------------------------------------------------------------------- the measurement


def measure(problem, dtype, kind, rounds, peers, sizes) -> list[dict]:
    """Measure all methods of one kind in this process."""
    globals().update(N=sizes[0], P=sizes[1])
    jax.config.update("jax_enable_x64", dtype == "float64")
    s = setup(problem, dtype)
    on_device, calls, rows = jax.device_put(s.args), {}, {}
    for library in (ours, jax_by_hand, *(PEERS[name] for name in peers)):
        for name, fn in library(kind, s).items():
            row = {"problem": problem, "dtype": dtype, "kind": kind, "method": name}
            rows[name] = row | {"condition": round(float(s.spectrum[-1] / s.spectrum[0]), 1)}
            try:
                row = compile_and_check(fn, s, on_device, library not in EAGER)
            except Exception as error:  # the other methods are still measured
                row = {"failed": f"{error} ".splitlines()[0]}
            calls[name] = row.pop("call", None)
            rows[name] |= row
    calls = {name: call for name, call in calls.items() if call}
    for i in range(rounds):
        for name in random.Random(SEED + i).sample(list(calls), len(calls)):
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            rows[name]["ms"].append(round(1e3 * (time.perf_counter() - start), 2))
    return list(rows.values())


def compile_and_check(fn, s, on_device, is_jax) -> dict:
    row, call = {}, functools.partial(fn, *s.args)
    if is_jax:
        compiled, seconds = harness.compiled(fn, *s.args)
        row["compile_s"] = round(seconds, 2)
        row["temp_bytes"] = compiled.memory_analysis().temp_size_in_bytes
        call = functools.partial(compiled, *on_device)
    out = call()  # the warm-up
    grad, estimate = out if isinstance(out, tuple) else (out, None)
    wrong = float(np.linalg.norm(np.asarray(grad, float) - s.truth))
    row["error"] = wrong / float(np.linalg.norm(s.truth))
    if estimate is not None:
        row["estimate_over_error"] = float(estimate) / wrong
    return row | {"ms": [], "call": call}


# -------------------------------------------------------------------------------- the report


def report(rows) -> str:
    rows = [r for r in rows[1:] if "condition" in r]
    cases = dict.fromkeys((r["problem"], r["condition"], r["dtype"]) for r in rows)
    lines = []
    for kind, method in dict.fromkeys((r["kind"], r["method"]) for r in rows):
        name, size, cells = f"{kind}: {method}", 0, []
        for problem, _, dtype in cases:
            keys = {"problem": problem, "dtype": dtype, "kind": kind, "method": method}
            r = harness.measured(rows, **keys) or {}
            median = statistics.median(r["ms"]) if r else 0
            cells.append(f"{median:.0f} ms, {r['error']:.1e}" if r else "raises")
            size = max(size, r.get("temp_bytes", 0))
        name = f"**{name}**" if method.startswith("bilevel") else name
        lines.append([name, *cells, f"{float(f'{size / 1e6:.2g}'):g} MB" if size else "-"])
    titles = [f"{problem} (κ = {c:.3g}), {dtype}" for problem, c, dtype in cases]
    return harness.table(["method", *titles, "temporaries"], lines)


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report, work=measure, peers=tuple(PEERS))
    rounds, cases, kinds, sizes = 9, CASES, KINDS, (N, P)
    if flags.small:
        rounds, cases = 3, CASES[1:3]
    if flags.smoke:
        cases, kinds, sizes = CASES[2:3], KINDS[:1], SMOKE
    about = {"device": f"{harness.processor()}, one core, one thread"}
    rows = [harness.environment("optax", *PEERS, "lineax", **about, seed=SEED, rounds=rounds)]
    for (problem, dtype), kind in itertools.product(cases, kinds):
        request = problem, dtype, kind, rounds, flags.peers, sizes
        new = harness.in_own_process(__file__, *request, one_core=True, JAX_PLATFORMS="cpu")
        rows += [{"problem": problem, "dtype": dtype, "kind": kind} | row for row in new]
        print(*new, sep="\n", flush=True)
    harness.finish(rows, flags.results, report)


if __name__ == "__main__":
    main()
