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
import contextlib
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


class Setup(NamedTuple):
    args: tuple[Any, ...]  # lam, w0, (X, y), (Xv, yv)
    step: float  # 1 / L
    tol: float  # of conjugate gradients
    truth: np.ndarray  # [p]
    spectrum: np.ndarray  # [p], of the lower Hessian, ascending


def setup(case: str, dtype: str) -> Setup:
    rng = np.random.default_rng(SEED)
    scale, penalty = {"iid": (0.0, -2.0), "hard": (-0.5, -6.85)}[case]
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
        spectrum=spectrum,
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
        return methods | (
            {"bilevel, forward mode": method(descent, mode="forward")} if full else {}
        )
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
        "bilevel, nystrom": method(bilevel.implicit(descent, bilevel.nystrom(50, s.spectrum[-50]))),
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
        return jax.value_and_grad(lambda lam: outer(descend(lam, w, train, every), lam, valid))(
            lam
        )[1]

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


def torch_methods(kind, s, full):
    """Called with NumPy arrays; they share memory with the tensors."""
    import torch

    torch.set_num_threads(1)

    def lower(w, lam, x, y):
        return 0.5 * torch.mean((x @ w - y) ** 2) + 0.5 * torch.sum(torch.exp(lam) * w**2)

    def outer(w, x, y):
        return 0.5 * torch.mean((x @ w - y) ** 2)

    def slope(w, lam, train, create_graph):
        return torch.autograd.grad(lower(w, lam, *train), w, create_graph=create_graph)[0]

    def descend(w, lam, train, create_graph):
        for _ in range(STEPS):
            w = w if create_graph else w.detach().requires_grad_()
            w = w - s.step * slope(w, lam, train, create_graph)
        return w

    def conjugate_gradients(hvp, b):
        x, r, p = torch.zeros_like(b), b, b
        rr = b @ b
        floor = s.tol**2 * rr
        for _ in range(CG_STEPS):
            if rr <= floor:
                break
            hp = hvp(p)
            length = rr / (p @ hp)
            x, r = x + length * p, r - length * hp
            rr, previous = r @ r, rr
            p = r + rr / previous * p
        return x

    def implicit(lam, w, train, valid):
        w = descend(w, lam, train, False).detach().requires_grad_()
        force = torch.autograd.grad(outer(w, *valid), w)[0]
        g = slope(w, lam, train, True)
        q = conjugate_gradients(lambda v: torch.autograd.grad(g, w, v, retain_graph=True)[0], force)
        return -torch.autograd.grad(g, lam, q)[0]

    def unrolled(lam, w, train, valid):
        return torch.autograd.grad(outer(descend(w, lam, train, True), *valid), lam)[0]

    def method(fn):
        def run(lam, w, train, valid):
            tensor = torch.from_numpy
            batches = [tuple(map(tensor, batch)) for batch in (train, valid)]
            return fn(tensor(lam).requires_grad_(), tensor(w).requires_grad_(), *batches).numpy()

        return run

    methods = {"implicit": {"torch by hand": implicit}, "unrolled": {"torch by hand": unrolled}}
    methods = methods.get(kind, {})
    if "torchopt" in installed():
        methods |= torchopt_methods(kind, s, lower, outer, descend)
    return {name: method(fn) for name, fn in methods.items()}


def torchopt_methods(kind, s, lower, outer, descend):
    import torch
    import torchopt

    def stationarity(w, lam, x, y):
        return torch.func.grad(lower)(w, lam, x, y)

    solve = torchopt.linear_solve.solve_cg(rtol=s.tol, atol=0.0, maxiter=CG_STEPS)

    @torchopt.diff.implicit.custom_root(stationarity, argnums=1, solve=solve)
    def solution(w, lam, x, y):
        with torch.enable_grad():
            return descend(w, lam.detach(), (x, y), False).detach()

    def implicit(lam, w, train, valid):
        return torch.autograd.grad(outer(solution(w, lam, *train), *valid), lam)[0]

    def unrolled(lam, w, train, valid):
        optimizer = torchopt.sgd(s.step)
        state = optimizer.init(w)
        for _ in range(STEPS):
            slope = torch.autograd.grad(lower(w, lam, *train), w, create_graph=True)[0]
            updates, state = optimizer.update(slope, state, inplace=False)
            w = torchopt.apply_updates(w, updates, inplace=False)
        return torch.autograd.grad(outer(w, *valid), lam)[0]

    return {"implicit": {"TorchOpt": implicit}, "unrolled": {"TorchOpt": unrolled}}.get(kind, {})


LIBRARIES = {
    "": (ours, jax_by_hand),
    "jaxopt": (jaxopt_methods,),
    "optimistix": (optimistix_methods,),
    "torch": (torch_methods,),
}


def installed() -> dict[str, str]:
    versions = {}
    for name in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def measure(case, dtype, kind, rounds, peers, full):
    """All methods of one kind, in this process; a JSON line for each."""
    jax.config.update("jax_enable_x64", dtype == "float64")
    s = setup(case, dtype)
    on_device = jax.device_put(s.args)
    calls, rows = {}, {}
    for name, libraries in LIBRARIES.items():
        for library in libraries if name == "" or name in peers else ():
            for method, fn in library(kind, s, full).items():
                row = {"problem": case, "dtype": dtype, "kind": kind, "method": method}
                row |= {"condition": round(float(s.spectrum[-1] / s.spectrum[0]), 1)}
                call, args = fn, s.args
                try:
                    if library is not torch_methods:
                        start = time.perf_counter()
                        call, args = jax.jit(fn).lower(*s.args).compile(), on_device
                        row["compile_s"] = round(time.perf_counter() - start, 2)
                        row["temp_bytes"] = call.memory_analysis().temp_size_in_bytes
                    grad, *estimate = out if isinstance(out := call(*args), tuple) else (out,)
                    wrong = float(np.linalg.norm(np.asarray(grad, float) - s.truth))
                except Exception as error:  # a peer that raises is a result too
                    rows[method] = row | {"failed": str(error).strip().splitlines()[-1]}
                    continue
                row["error"] = wrong / float(np.linalg.norm(s.truth))
                if estimate:
                    row["estimate_over_error"] = float(estimate[0]) / wrong
                calls[method], rows[method] = (call, args), row | {"ms": []}
    for i in range(rounds):
        order = list(calls)
        random.Random(SEED + i).shuffle(order)
        for method in order:
            call, args = calls[method]
            start = time.perf_counter()
            jax.block_until_ready(call(*args))
            rows[method]["ms"].append(round(1e3 * (time.perf_counter() - start), 2))
    for row in rows.values():
        print(json.dumps(row))


def in_own_process(*request) -> list[dict]:
    """:func:`measure` in a fresh process on one core, with one thread."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    env = os.environ | threads | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--worker", json.dumps(request)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))}),
    )
    if done.returncode:
        sys.exit(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def environment(rounds, peers) -> dict:
    versions = {
        name: importlib.metadata.version(name) for name in ("bilevel", "jax", "optax", "numpy")
    }
    cpu = Path("/proc/cpuinfo")
    names = [x.split(": ")[1] for x in cpu.read_text().splitlines() if x.startswith("model name")]
    return {
        "python": platform.python_version(),
        "versions": versions | {name: installed()[name] for name in peers},
        "device": f"{names[0] if names else platform.processor()}, one core, one thread",
        "seed": SEED,
        "rounds": rounds,
    }


def ratio(row, other) -> float:
    """Of the times of two methods, paired by round."""
    return statistics.median(a / b for a, b in zip(row["ms"], other["ms"], strict=True))


def find(rows, problem, dtype, kind, method):
    match = {"problem": problem, "dtype": dtype, "kind": kind, "method": method}
    return next((r for r in rows if "ms" in r and match.items() <= r.items()), None)


def best_peer(rows, row):
    """The fastest of the other libraries at the same task."""
    same = [
        r for r in rows if "ms" in r and all(r[k] == row[k] for k in ("problem", "dtype", "kind"))
    ]
    peers = [r for r in same if not r["method"].startswith(("bilevel", "JAX by hand"))]
    return min(peers, key=lambda r: statistics.median(r["ms"]), default=None)


def show(console, rows) -> None:
    head = rows[0]
    title = f"{head['problem']}, condition {head['condition']:g}, {head['dtype']}: {head['kind']}"
    table = Table(title=title, title_justify="left")
    columns = (
        "method,median ms,min,spread,/ JAX,/ best peer,error,estimate / error,XLA MB,compile s"
    )
    for i, column in enumerate(columns.split(",")):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        if "failed" in row:
            table.add_row(row["method"], f"failed: {row['failed']}"[:40])
            continue
        low, _, high = statistics.quantiles(row["ms"], n=4)
        median = statistics.median(row["ms"])
        hand, peer = find(rows, *key(head), "JAX by hand"), best_peer(rows, row)
        estimate, size = row.get("estimate_over_error"), row.get("temp_bytes")
        table.add_row(
            row["method"],
            f"{median:.1f}",
            f"{min(row['ms']):.1f}",
            f"{100 * (high - low) / median:.0f} %",
            f"{ratio(row, hand):.2f}",
            f"{ratio(row, peer):.2f}" if peer else "",
            f"{row['error']:.1e}",
            f"{estimate:.2f}" if estimate else "",
            f"{size / 1e6:.2f}" if size else "",
            f"{row['compile_s']:.1f}" if "compile_s" in row else "",
        )
    console.print(table)


def key(row) -> tuple[str, str, str]:
    return row["problem"], row["dtype"], row["kind"]


def verdicts(rows) -> list[tuple[bool, str]]:
    found = []
    for problem, dtype, kind in dict.fromkeys(map(key, rows)):
        name = f"{problem} {dtype} {kind}"
        row, hand = (find(rows, problem, dtype, kind, m) for m in ("bilevel", "JAX by hand"))
        most = 1.0 if kind == "closed form" else 1.05
        cost, size = ratio(row, hand), row["temp_bytes"] / 1e6
        found.append((cost <= most, f"{name}: {cost:.2f} of JAX by hand's time, at most {most:g}"))
        if kind != "closed form":
            found.append((size <= 1, f"{name}: {size:.2f} MB of temporaries, at most 1"))
    for row in rows:
        if "estimate_over_error" in row:
            r = row["estimate_over_error"]
            text = f"{' '.join(key(row))}, {row['method']}: estimate / error {r:.2f}, 1/3 to 10"
            found.append((1 / 3 <= r <= 10, text))
    row = find(rows, "hard", "float64", "implicit", "bilevel, default solver")
    if row:
        error = row["error"]
        found.append(
            (error <= 1e-6, f"hard float64, default solver: error {error:.1e}, at most 1e-6")
        )
        if peer := best_peer(rows, row):
            cost = ratio(row, peer)
            text = f"hard float64, default solver: {cost:.2f} of the best peer's time, at most 1"
            found.append((cost <= 1, f"{text} ({peer['method']}, error {peer['error']:.1g})"))
    return found


def markdown(rows) -> str:
    """The README's table: milliseconds and relative error of every method in every case."""
    cases = list(dict.fromkeys((r["problem"], r["condition"], r["dtype"]) for r in rows))
    titles = [f"{p} (condition {c:g}), {d}" for p, c, d in cases]
    lines = [f"| method | {' | '.join(titles)} | temporaries |", "|---" * (len(cases) + 2) + "|"]
    for kind, method in dict.fromkeys((r["kind"], r["method"]) for r in rows):
        cells, sizes = [], []
        for problem, _, dtype in cases:
            row = find(rows, problem, dtype, kind, method)
            cells.append(
                f"{statistics.median(row['ms']):.0f} ms, {row['error']:.1e}" if row else "fails"
            )
            sizes.append(row.get("temp_bytes") if row else None)
        size = max((x for x in sizes if x), default=None)
        name = f"**{method}**" if method.startswith("bilevel") else method
        cells.append(f"{size / 1e6:.2g} MB" if size else "")
        lines.append(f"| {name}, {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="no peers, two cases; writes nothing")
    parser.add_argument("--full", action="store_true", help="forward mode too")
    parser.add_argument("--table", action="store_true", help="the results file as markdown")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return measure(*json.loads(options.worker))
    if options.table:
        lines = RESULTS.read_text().splitlines()
        return print(markdown([json.loads(line) for line in lines[1:]]))

    rounds, peers = (3, []) if options.quick else (9, list(installed()))
    head, rows, console = environment(rounds, peers), [], Console(width=140)
    console.print(head)
    for problem, dtype in CASES[1:3] if options.quick else CASES:
        for kind in KINDS:
            new = in_own_process(problem, dtype, kind, rounds, peers, options.full)
            show(console, new)
            rows += new
    for passed, text in verdicts(rows):
        console.print(f"{'PASS' if passed else 'FAIL'}  {text}", highlight=False)
    if not options.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in [head, *rows]))


if __name__ == "__main__":
    main()
