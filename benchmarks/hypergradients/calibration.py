"""Are a hypergradient's error estimates true? Thousands of new random problems.

    # some 5,000 cases: an hour on two cores; resumes from FILE
    python benchmarks/hypergradients/calibration.py --seed 7 --results FILE

Each case draws a problem, a solver, a number of inner steps from 1 to 3,000, and a precision. The
problem is from one of 19 families: more or fewer weights than rows, condition numbers from 1 to
1e10, convex or not. The truth is the hypergradient of the solution map in float64, by Newton's
method and a dense solve. It uses exactly the numbers that the solver was given. We count

    false       converged, though the error is over 1 % of the hypergradient
    violated    an error bound under the error
    low, high   estimates under a third of the error, over ten times the error
    no claim    infinite estimates, where the Hessian is positive definite in its precision

An error counts as zero if it is below the roundoff of the truth (its condition number times
float64's unit roundoff) or of the gradient. A Hessian is positive definite "in its precision" if
its smallest eigenvalue exceeds 100 units of roundoff of the largest.
"""

import functools
import json
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import bilevel
import bilevel.hypergradients.curvature
from benchmarks import harness

MEASURES = ("bilevel/hypergradients", "bilevel/solvers")

MOST_STEPS = 3000
SMOKE = {"families": ["explicit"], "solvers": ["implicit", "descent, neumann"]}


class Draw(NamedTuple):
    """One problem: float64 numbers that float32 represents exactly."""

    alpha: Any
    w0: Any
    train: Any
    valid: Any


class Family(NamedTuple):
    name: str
    lower: Callable
    outer: Callable
    draw: Callable[[np.random.Generator], Draw]
    outputs: Callable | None = None  # (w, alpha, batch) -> predictions, for `gram`
    loss: Callable | None = None
    damping: Callable | None = None


# ------------------------------------------------------------------------------- the families


def mean_square(f, batch):
    return 0.5 * jnp.mean((f - batch[1]) ** 2)


def mean_logistic(f, batch):
    return jnp.mean(jax.nn.softplus(-batch[1] * f))


def pseudo_huber(f, batch):
    return jnp.mean(jnp.sqrt(1 + (f - batch[1]) ** 2) - 1)


def log_cosh(f, batch):
    return jnp.mean(jnp.logaddexp(f - batch[1], batch[1] - f))


def poisson(f, batch):
    return jnp.mean(jnp.exp(f) - batch[1] * f)


def linear(w, alpha, batch):
    return batch[0] @ w


def with_decay(loss):
    def lower(w, alpha, batch):
        return loss(batch[0] @ w, batch) + 0.5 * jnp.sum(jnp.exp(alpha) * w**2)

    return lower


def on_rows(loss):
    return lambda w, alpha, batch: loss(batch[0] @ w, batch)


def rows(rng, n, p, exponent=0.0, targets="real"):
    w = rng.normal(size=p)
    scales = np.arange(1, p + 1) ** -exponent

    def sample():
        x = rng.normal(size=(n, p)) * scales
        f = x @ w / np.sqrt(np.sum(scales**2))
        if targets == "sign":
            return x, np.where(f + 0.5 * rng.normal(size=n) > 0, 1.0, -1.0)
        if targets == "count":
            return x, rng.poisson(np.exp(np.clip(f, -2, 2))).astype(float)
        return x, f + 0.3 * rng.normal(size=n)

    return sample(), sample()


def generalised(name, n, p, loss, low, high, targets="real", scale=1.0, tilt=False, each=False):
    """Return a linear model with weight decay. alpha is its log, from log10 ``low`` to ``high``."""

    def draw(rng):
        exponent = rng.uniform(0, 5 / np.log10(p)) if tilt else 0.0
        train, valid = rows(rng, n, p, exponent, targets)
        decay = np.log(10.0) * rng.uniform(low, high)
        alpha = np.full(p, decay) + 0.1 * rng.normal(size=p) if each else np.array(decay)
        return Draw(alpha, scale * rng.normal(size=p), train, valid)

    outer = on_rows(mean_square if targets != "sign" else mean_logistic)
    damping = None if each else jnp.exp
    return Family(name, with_decay(loss), outer, draw, linear, loss, damping)


def explicit(p=30):
    """Return a quadratic form given as a matrix with a condition number from 1 to 1e10."""

    def lower(w, alpha, batch):
        matrix, b = batch
        return 0.5 * w @ (matrix @ w) - jnp.sum(jnp.tanh(alpha) * b * w)

    def draw(rng):
        u, _ = np.linalg.qr(rng.normal(size=(p, p)))
        values = 10 ** (-rng.uniform(0, 10) * np.linspace(0, 1, p))
        train = ((u * values) @ u.T, rng.normal(size=p))
        return Draw(rng.normal(size=p), rng.normal(size=p), train, rng.normal(size=p))

    return Family("explicit", lower, lambda w, a, b: 0.5 * jnp.mean((w - b) ** 2), draw)


def mixture(n, p):
    """Return ridge regression on a mixture of three feature maps, with its penalty."""

    def mixed(w, alpha, batch):
        return jnp.einsum("i,inp,p->n", alpha["mix"], batch[0], w)

    def outer(w, alpha, batch):
        return mean_square(mixed(w, alpha, batch), batch)

    def damping(alpha):
        return jnp.exp(alpha["log"])

    def lower(w, alpha, batch):
        return outer(w, alpha, batch) + 0.5 * damping(alpha) * jnp.sum(w**2)

    def draw(rng):
        def sample():
            return rng.normal(size=(3, n, p)), rng.normal(size=n)

        alpha = {"mix": rng.dirichlet(np.ones(3)), "log": np.log(10.0) * rng.uniform(-6, 0)}
        return Draw(alpha, rng.normal(size=p), sample(), sample())

    return Family(f"mixture {n}x{p}", lower, outer, draw, mixed, mean_square, damping)


def cleaning(n=60, p=10):
    """Return logistic regression with few wrong labels and a weight for each training row."""

    def lower(w, alpha, batch):
        x, y = batch
        losses = jax.nn.softplus(-y * (x @ w))
        return jnp.mean(jax.nn.sigmoid(alpha) * losses) + 5e-4 * jnp.sum(w**2)

    def draw(rng):
        train, valid = rows(rng, n, p, 0.0, "sign")
        flipped = np.where(rng.random(n) < 0.2, -train[1], train[1])
        return Draw(rng.normal(size=n), rng.normal(size=p), (train[0], flipped), valid)

    return Family("cleaning", lower, on_rows(mean_logistic), draw)


def decays(alpha, first, second):
    return jnp.exp(alpha[0]) * jnp.sum(first**2) + jnp.exp(alpha[1]) * jnp.sum(second**2)


def softmax_regression(n=60, d=8, c=3):
    def losses(w, batch):
        logits = batch[0] @ w["kernel"] + w["bias"]
        labels = batch[1].astype(int)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def lower(w, alpha, batch):
        return losses(w, batch) + 0.5 * decays(alpha, w["kernel"], w["bias"])

    def draw(rng):
        truth = rng.normal(size=(d, c))

        def sample():
            x = rng.normal(size=(n, d))
            return x, np.argmax(x @ truth + rng.normal(size=(n, c)), 1).astype(float)

        w = {"kernel": rng.normal(size=(d, c)), "bias": rng.normal(size=c)}
        return Draw(np.log(10.0) * rng.uniform(-5, -1, size=2), w, sample(), sample())

    return Family("softmax", lower, lambda w, a, b: losses(w, b), draw)


def quartic(p=20):
    def lower(w, alpha, batch):
        return jnp.sum((w - batch) ** 4) / 4 + 0.5 * jnp.sum(jnp.exp(alpha) * w**2)

    def draw(rng):
        alpha = np.log(10.0) * rng.uniform(-4, 0, size=p)
        train, valid = rng.normal(size=p), rng.normal(size=p)
        return Draw(alpha, train + rng.normal(size=p), train, valid)

    return Family("quartic", lower, lambda w, a, b: 0.5 * jnp.sum((w - b) ** 2), draw)


def perceptron(n=40, d=3, width=5):
    """Return a small nonconvex network, with enough weight decay for isolated minima."""

    def f(w, x):
        return jnp.tanh(x @ w["in"]) @ w["out"]

    def lower(w, alpha, batch):
        return mean_square(f(w, batch[0]), batch) + 0.5 * decays(alpha, w["in"], w["out"])

    def draw(rng):
        truth = {"in": rng.normal(size=(d, width)), "out": rng.normal(size=width)}

        def sample():
            x = rng.normal(size=(n, d))
            return x, np.asarray(f(truth, x)) + 0.1 * rng.normal(size=n)

        w = jax.tree.map(lambda t: t + 0.3 * rng.normal(size=t.shape), truth)
        return Draw(np.log(10.0) * rng.uniform(-3, -1, size=2), w, sample(), sample())

    return Family("network", lower, lambda w, a, b: jnp.mean((f(w, b[0]) - b[1]) ** 2), draw)


def direct(n=40, p=10):
    """Return a problem with an outer loss that also depends on alpha directly."""
    family = generalised("direct", n, p, mean_square, -4, 0)

    def outer(w, alpha, batch):
        return mean_square(batch[0] @ w, batch) + 0.1 * jnp.sin(alpha) + 0.01 * jnp.sum(w) * alpha

    return family._replace(outer=outer)


def noiseless(n=40, p=10):
    """Return noiseless labels: the outer gradient is tiny, and so is the hypergradient."""
    family = generalised("noiseless", n, p, mean_square, -8, -4)

    def draw(rng):
        drawn, w = family.draw(rng), rng.normal(size=p)
        train, valid = ((x, x @ w) for x, _ in (drawn.train, drawn.valid))
        return drawn._replace(train=train, valid=valid)

    return family._replace(draw=draw)


def kernel_machine(n=30):
    """Return kernel logistic regression in its dual weights. The kernel's width is learned too."""

    def gram(alpha, x, z):
        squared = jnp.sum((x[:, None] - z[None]) ** 2, -1)
        return jnp.exp(-jnp.exp(alpha[0]) * squared)

    def lower(w, alpha, batch):
        x, y = batch
        f = gram(alpha, x, x) @ w
        return jnp.mean(jax.nn.softplus(-y * f)) + 0.5 * jnp.exp(alpha[1]) * jnp.sum(w * (f + w))

    def outer(w, alpha, batch):
        xv, yv, x = batch
        return jnp.mean(jax.nn.softplus(-yv * (gram(alpha, xv, x) @ w)))

    def draw(rng):
        (x, y), (xv, yv) = rows(rng, n, 3, 0.0, "sign")
        alpha = np.array([rng.uniform(-2, 0), np.log(10.0) * rng.uniform(-5, 0)])
        return Draw(alpha, rng.normal(size=n), (x, y), (xv, yv, x))

    return Family("kernel machine", lower, outer, draw)


FAMILIES = [
    generalised("ridge 15x40", 15, 40, mean_square, -8, -2),
    generalised("ridge 60x300", 60, 300, mean_square, -8, -2),
    generalised("pseudo-Huber 15x40", 15, 40, pseudo_huber, -8, -2),
    generalised("logistic 20x60", 20, 60, mean_logistic, -6, -1, "sign"),
    generalised("logistic 200x20", 200, 20, mean_logistic, -6, 0, "sign"),
    generalised("ridge, tilted 200x40", 200, 40, mean_square, -9, 0, tilt=True),
    generalised("ridge, each 20x60", 20, 60, mean_square, -6, -1, each=True),
    generalised("log-cosh 100x10", 100, 10, log_cosh, -6, 0, tilt=True),
    generalised("Poisson 60x8", 60, 8, poisson, -4, 0, "count", scale=0.3),
    explicit(),
    mixture(30, 10),
    mixture(10, 30),
    cleaning(),
    softmax_regression(),
    quartic(),
    perceptron(),
    direct(),
    noiseless(),
    kernel_machine(),
]


# -------------------------------------------------------------------------------- the solvers


def descended(lower, step_size, steps):
    """Take ``steps`` gradient steps. The number is traced, so one compilation serves all."""

    def run(alpha, w, batch):
        def step(_, w):
            return optax.tree.add_scale(w, -step_size, jax.grad(lower)(w, alpha, batch))

        return jax.lax.fori_loop(0, steps, step, w)

    return run


def solvers(family: Family) -> dict[str, Callable]:
    """Return ``(step_size, steps) -> (solver, mode)`` by name."""

    def after_descent(inverse):
        def make(step_size, steps):
            forward = bilevel.solved(descended(family.lower, step_size, steps))
            return bilevel.implicit(forward, inverse(step_size)), "reverse"

        return make

    def unrolled(mode="reverse", most=MOST_STEPS, backprop=None):
        def make(step_size, steps):
            def rate(count):  # with backprop, alpha moves only in the last steps
                moving = count >= most - steps if backprop else count < steps
                return jnp.where(moving, step_size, 0.0)

            return bilevel.unrolled(optax.sgd(rate), most, backprop=backprop), mode

        return make

    def whole(*args):
        return lambda step_size, steps: (bilevel.implicit(*args), "reverse")

    by_name = {
        "implicit": whole(),
        "newton, dense": whole(bilevel.newton(), bilevel.dense()),
        "lbfgs, cg": whole(bilevel.lbfgs(), bilevel.cg()),
        "descent, cg": after_descent(lambda step_size: bilevel.cg()),
        "descent, damped cg": after_descent(lambda step_size: bilevel.cg(damping=1e-3)),
        "descent, neumann": after_descent(lambda step_size: bilevel.neumann(20, step_size)),
        "descent, scale": after_descent(bilevel.scale),
        "descent, nystrom": after_descent(lambda step_size: bilevel.nystrom(10, 1e-3)),
        "unrolled": unrolled(),
        "truncated": unrolled(most=300, backprop=10),
        "forward": unrolled("forward", most=300),
    }
    if family.damping is not None:
        gram = bilevel.gram(family.outputs, family.loss, damping=family.damping)
        by_name["descent, gram"] = after_descent(lambda step_size: gram)
    return by_name


@functools.cache
def compiled(index: int, name: str) -> Callable:
    family = FAMILIES[index]
    problem = bilevel.Problem(family.lower, family.outer)

    @jax.jit
    def run(step_size, steps, alpha, w0, train, valid):
        solver, mode = solvers(family)[name](step_size, steps)
        return bilevel.hypergradient(problem, solver, mode=mode)(alpha, w0, train, valid)

    return run


# ---------------------------------------------------------------------------------- the truth


class Truth(NamedTuple):
    grad: jax.Array  # [dim alpha]
    slope: jax.Array  # residual of the lower gradient, relative to its terms
    eigenvalues: jax.Array  # [p], of the Hessian at the solution


@functools.cache
def true_hypergradient(index: int) -> Callable:
    """Compute the truth by damped Newton from ``w`` and refined dense solves, in float64."""
    family = FAMILIES[index]

    @jax.jit
    def truth(w, alpha, train, valid):
        start, unravel = ravel_pytree(w)
        flat_alpha, unravel_alpha = ravel_pytree(alpha)

        def slope(w, a):
            return ravel_pytree(jax.grad(family.lower)(unravel(w), unravel_alpha(a), train))[0]

        def loss(w):
            return family.lower(unravel(w), alpha, train)

        def hessian(w):
            h = jax.jacfwd(slope)(w, flat_alpha)
            return (h + h.T) / 2

        def solve(h, b):
            x = jnp.linalg.solve(h, b)
            return x + jnp.linalg.solve(h, b - h @ x)

        def newton(_, w):
            g, h = slope(w, flat_alpha), hessian(w)
            d = solve(h, g)
            d = jnp.where(jnp.all(jnp.isfinite(d)) & (d @ g > 0), d, g)

            def after(t):
                return jnp.where(jnp.isfinite(loss(w - t * d)), loss(w - t * d), jnp.inf)

            def too_long(t):
                value = loss(w)
                bar = value - 1e-4 * t * (d @ g) + 1e-14 * jnp.abs(value)
                return (after(t) > bar) & (t > 1e-8)

            return w - jax.lax.while_loop(too_long, lambda t: t / 2, 1.0) * d

        w = jax.lax.fori_loop(0, 100, newton, start)
        h = hessian(w)
        for _ in range(3):
            w = w - solve(h, slope(w, flat_alpha))

        def outer(w, a):
            return family.outer(unravel(w), unravel_alpha(a), valid)

        q = solve(h, jax.grad(outer)(w, flat_alpha))
        indirect = jax.vjp(lambda a: slope(w, a), flat_alpha)[1](q)[0]
        size = jnp.linalg.norm(h) * jnp.linalg.norm(w)
        residual = jnp.linalg.norm(slope(w, flat_alpha)) / size
        grad = jax.grad(outer, 1)(w, flat_alpha) - indirect
        return Truth(grad, residual, jnp.linalg.eigvalsh(h))

    return truth


@functools.cache
def smoothness(index: int) -> Callable:
    """Return the largest Hessian eigenvalue at ``w``. The step of the descents is 1 over it."""
    family = FAMILIES[index]

    @jax.jit
    def largest(w, alpha, train):
        flat, unravel = ravel_pytree(w)
        h = jax.hessian(lambda w: family.lower(unravel(w), alpha, train))(flat)
        return jnp.linalg.norm(h, 2)

    return largest


# ---------------------------------------------------------------------------------- one case


def flatten(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])


def run_case(index: int, name: str, dtype: str, seed: int, number: int) -> dict[str, Any]:
    family = FAMILIES[index]
    rng = np.random.default_rng([seed, index, number, len(name), int(dtype[5:])])
    drawn = jax.tree.map(lambda x: np.asarray(x, np.float32).astype(np.float64), family.draw(rng))
    steps = int(10 ** rng.uniform(0, np.log10(MOST_STEPS)))
    curvature = max(
        float(smoothness(index)(w, drawn.alpha, drawn.train))
        for w in (drawn.w0, jax.tree.map(np.zeros_like, drawn.w0))
    )
    step_size = np.float32(1 / curvature) if family.name != "quartic" else np.float32(0.05)
    narrow = jax.tree.map(lambda x: jnp.asarray(x, dtype), drawn)
    result = compiled(index, name)(jnp.asarray(step_size, dtype), steps, *narrow)
    grad = flatten(result.grad)
    row = {
        "family": family.name,
        "solver": name,
        "dtype": dtype,
        "seed": seed,
        "number": number,
        "steps": steps,
        "estimate": float(result.info.error_estimate),
        "bound": float(result.info.error_bound),
        "converged": bool(result.info.converged),
        "norm": float(np.linalg.norm(grad)),
    }
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), result.w)
    if not np.all(np.isfinite([*flatten(w), *grad])):
        return row | {"outcome": "diverged"}
    # If there are several minima, take the one that the solver was near.
    start = w if family.name == "network" else jax.tree.map(np.zeros_like, w)
    truth = true_hypergradient(index)(start, drawn.alpha, drawn.train, drawn.valid)
    eigenvalues = np.asarray(truth.eigenvalues)
    condition = float(np.max(np.abs(eigenvalues)) / max(eigenvalues[0], 1e-300))
    return row | {
        "error": float(np.linalg.norm(grad - np.asarray(truth.grad))),
        "truth": float(np.linalg.norm(truth.grad)),
        "condition": condition,
        "smallest": float(eigenvalues[0]),
        "residual": float(truth.slope),
    }


def verdict_of_case(row: dict[str, Any]) -> dict[str, Any]:
    """Add the outcome to ``row``."""
    if row.get("outcome") == "diverged":
        # The weights overflowed: a claim about them is false.
        finite = np.isfinite(row["estimate"]) or row["converged"]
        return row | {"outcome": "false" if finite else "diverged"}
    eps = float(jnp.finfo(row["dtype"]).eps)
    if row["smallest"] <= 0 or row["residual"] > 1e-10:
        # No minimum was found, so the claim cannot be checked.
        return row | {"outcome": "no truth"}
    floor = (30 * 2.2e-16 * min(row["condition"], 1e14) + 20 * eps) * row["truth"]
    error, estimate = row["error"], row["estimate"]
    definite = row["condition"] < 0.01 / eps
    out = row | {"definite": definite, "floor": floor}
    out["false"] = row["converged"] and error > 0.01 * row["norm"] + floor
    out["violated"] = bool(np.isfinite(row["bound"]) and error > row["bound"] + floor)
    if not np.isfinite(estimate):
        return out | {"outcome": "no claim"}
    ratio = estimate / error if error > floor else max(1.0, estimate / max(floor, 1e-300))
    outcome = "low" if ratio < 1 / 3 else "high" if ratio > 10 else "right"
    return out | {"outcome": outcome, "ratio": ratio}


# ---------------------------------------------------------------------------------- the whole


def tasks(count: int, seed: int, families, names):
    """Yield the key and the measurement of every requested case."""
    for index, family in enumerate(FAMILIES):
        if families and not any(part in family.name for part in families):
            continue
        for name in [name for name in solvers(family) if not names or name in names]:
            for dtype in ("float32", "float64"):
                for number in range(count):
                    key = name, dtype, seed, number
                    yield (family.name, *key), functools.partial(run_case, index, *key)
                compiled.cache_clear()


HEAD = ["", "cases", "converged", "false", "bound violated", "low", "high", "in [1/3, 10]"]


def cells(name: str, cases: list[dict[str, Any]]) -> list[Any]:
    """Return the cells of one table line: counts of the outcomes of these cases."""
    with_truth = [r for r in cases if r["outcome"] not in ("diverged", "no truth")]
    finite = [r for r in with_truth if np.isfinite(r["estimate"])]
    definite = [r for r in with_truth if r["definite"]]
    count = {k: sum(r["outcome"] == k for r in finite) for k in ("right", "low", "high")}
    silent = sum(r["outcome"] == "no claim" for r in definite)
    return [
        name,
        len(cases),
        sum(r["converged"] for r in with_truth),
        sum(r.get("false", r["outcome"] == "false") for r in cases),
        sum(r.get("violated", False) for r in with_truth),
        count["low"],
        count["high"],
        f"{100 * count['right'] / max(len(finite), 1):.1f} %",
        f"{silent} ({100 * silent / max(len(definite), 1):.1f} %)",
    ]


def report(rows: list[dict[str, Any]], by=("family", "solver", "dtype")) -> str:
    """Return a line for each family, solver and precision, and one for all cases."""
    verdicts = [verdict_of_case(row) for row in rows]
    values = [(key, value) for key in by for value in dict.fromkeys(r[key] for r in verdicts)]
    lines = [cells(value, harness.where(verdicts, **{key: value})) for key, value in values]
    return harness.table([*HEAD, "no claim, where definite"], [*lines, cells("**all**", verdicts)])


summary = functools.partial(report, by=("dtype",))
by_solver = functools.partial(report, by=("solver",))


def main() -> None:
    flags = harness.command_line(
        __file__,
        __doc__,
        report,
        seed={"type": int, "default": 0},
        families={"nargs": "*", "help": "only those whose names contain one of these"},
        cases={"type": int, "help": "of each group; default: 12, small sizes have one"},
        solvers={"nargs": "*", "help": "only these"},
        iterative={"action": "store_true", "help": "as if p were large"},
    )
    if flags.small and flags.cases is not None:
        flags.error(f"--cases: expected none with --{flags.size}, got {flags.cases}")
    count = 1 if flags.small else 12 if flags.cases is None else flags.cases
    chosen, wanted = flags.families, flags.solvers
    if flags.smoke:
        chosen, wanted = chosen or SMOKE["families"], wanted or SMOKE["solvers"]
    jax.config.update("jax_enable_x64", True)
    if flags.iterative:
        bilevel.hypergradients.curvature.DENSE_SIZE = 0
    # Cases of another seed are not committed. They need a file name.
    path = None if flags.results == harness.RESULTS / "calibration.jsonl" else flags.results
    began, keys = time.time(), ("family", "solver", "dtype", "seed", "number")
    rows = list(harness.cases(path, keys, tasks(count, flags.seed, chosen, wanted)))

    def whole(rows):
        lines = [report(rows)]
        for r in map(verdict_of_case, rows):
            if r.get("false") or r.get("violated") or r["outcome"] in ("low", "false"):
                lines.append(json.dumps(r))
        about = f"{time.time() - began:.0f} s, jax {jax.__version__}, {platform.machine()}"
        return "\n".join([*lines, f"{len(rows)} cases, {about}"])

    harness.finish(rows, path, whole, write_rows=False)


if __name__ == "__main__":
    main()
