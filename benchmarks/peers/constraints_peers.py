"""Hypergradients of constrained lower problems, here and in JAXopt, cvxpylayers and sparho.

    pip install jaxopt cvxpylayers sparho celer     # in a separate environment, with this package
    python benchmarks/peers/constraints_peers.py    # an hour; one core: taskset -c 0

Every library gets the same problem and a series of tolerances. We report the CPU time and the
memory of its first tolerance with a relative error of the hypergradient below 1e-5, and below 1e-7
(1e-3 in float32). Every pair of problem and library has its own process.

*Small problems* (100 weights) are families of ``benchmarks/hypergradients/constraints.py`` with
its truth in 80-bit floats. *Large problems* have a truth in float64: an active set from SciPy or
scikit-learn, one solve on it, and the check of its signs. The Lasso with 7,129 features has the
size of the leukemia data. JAXopt gets the step size 1/L and the better of its two linear solvers.
A call of a machine with 5,000 rows takes minutes. It runs once, and its time includes compilation.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.sparse
import scipy.sparse.linalg
from jax.experimental.sparse import BCOO

import bilevel
from benchmarks import harness
from benchmarks.harness import table, where

MEASURES = ("bilevel/constraints", "bilevel/solvers")

PEERS = "jaxopt", "cvxpylayers", "sparho"
TOLERANCES = [10.0**-k for k in range(2, 15)]
BUDGET = 60  # CPU seconds for the series of tolerances
SLOW = [1e-9, 1e-11]  # tolerances for the machines: their calls take minutes and run once
SMALL = {
    "box": "box, moving bounds",
    "non-negative": "non-negative",
    "simplex": "simplex",
    "Lasso": "Lasso",
    "SVM": "SVM, regularized bias",
}
LARGE = {
    "Lasso 36 x 7,129": ("lasso", 36, 7129, None, "float64"),
    "Lasso 10,000 x 30,000, sparse": ("lasso", 10_000, 30_000, 0.003, "float64"),
    "Lasso 10,000 x 30,000, dense": ("lasso", 10_000, 30_000, None, "float32"),
    "box 100,000": ("box", 20_000, 100_000, 5e-4, "float64"),
    "SVM 5,000": ("svm", 5000, 5000, None, "float64"),
    "SVM 5,000, free bias": ("svm, free bias", 5000, 5000, None, "float64"),
}


class Setting(NamedTuple):
    """A problem, in arrays."""

    kind: str
    alpha: np.ndarray
    train: tuple
    valid: tuple
    weights: int
    dtype: str
    truth: Any = None


# ----------------------------------------------------------------------------- the problems


def family_of(name):
    from benchmarks.hypergradients import constraints

    return next(family for family in constraints.FAMILIES if family.name == name)


def small_setting(name, weights):
    """Return a case of the calibration and its hypergradient."""
    from benchmarks.hypergradients import constraints, constraints_truth

    family = family_of(SMALL[name])
    for seed in range(100):
        rng = np.random.default_rng([1, seed])
        drawn = family.draw(rng, weights)
        convex = family.convex(drawn)
        truth = constraints_truth.truth(convex, drawn.alpha, constraints.start_of(family, drawn))
        fair = truth is not None and truth.margin > 1e-6 and 10 < truth.condition < 1e4
        if fair and np.linalg.norm(truth.grad.astype(float)) > 0:
            grad = truth.grad.astype(float)
            return family, Setting(name, *drawn, weights, "float64", grad)
    raise RuntimeError("no well-conditioned problem")


def draw_rows(rng, n, p, density, dtype):
    """Return rows, sparse or dense, and targets of a sparse truth."""
    truth = np.where(rng.random(p) < min(1, 50 / p), rng.normal(size=p), 0)
    if density is None:
        x = rng.standard_normal((n, p), dtype=dtype)
    else:
        x = scipy.sparse.random_array((n, p), density=density, rng=rng, dtype=dtype).tocsr()
        x.data = rng.standard_normal(len(x.data)).astype(dtype)
    f = x @ truth.astype(dtype)
    return x, (f + 0.3 * np.std(f) * rng.normal(size=n)).astype(dtype)


@functools.cache
def large_setting(kind, n, p, density, dtype):
    """Return a large problem; the last half of the rows is for validation if there are few."""
    rng = np.random.default_rng(0)
    if "svm" in kind:
        x, xv = rng.normal(size=(n, 10)), rng.normal(size=(1000, 10))
        y, yv = (
            np.where(a[:, 0] * a[:, 1] + 0.3 * rng.normal(size=len(a)) > 0, 1.0, -1.0)
            for a in (x, xv)
        )
        alpha, ridge = np.log([1.0, 0.05]), np.array(1e-3)
        return Setting(kind, alpha, (x, y, ridge), (xv, yv, x, y, ridge), n, dtype)
    valid = max(n // 5, 36)
    x, y = draw_rows(rng, n + valid, p, density, dtype)
    train, held = (x[:n], y[:n]), (x[n:], y[n:])
    if kind == "lasso":
        alpha = np.array([np.log(0.1 * np.max(np.abs(train[0].T @ train[1])) / n)])
    else:
        alpha = np.log([0.1, 0.5])  # ridge, bound
    return Setting(kind, alpha, train, held, p, dtype)


def squared(w, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2)


def losses(kind):
    """Return the smooth part, the outer loss and the minimizer of a large problem."""
    if "svm" in kind:
        family = family_of(SMALL["SVM"] if kind == "svm" else "SVM, equality bias")
        return family.lower, family.outer, family.minimizer
    ridge = kind == "box"

    def lower(w, alpha, batch):
        return squared(w, batch) + (0.5 * jnp.exp(alpha[0]) * jnp.sum(w**2) if ridge else 0.0)

    def minimizer(train, **options):
        if kind == "lasso":
            return bilevel.proximal("l1", lambda a: jnp.exp(a[0]), **options)
        bounds = (lambda a: -jnp.exp(a[1])), (lambda a: jnp.exp(a[1]))
        return bilevel.projected("box", *bounds, **options)

    return lower, lambda w, alpha, batch: squared(w, batch), minimizer


# ----------------------------------------------------------------------------- truth, in float64


def conjugate(product, b):
    x, _ = scipy.sparse.linalg.cg(product, b, rtol=1e-13, maxiter=20_000)
    return x


def lasso_truth(s):
    """The active set of scikit-learn's coordinate descent, and one solve on it."""
    from sklearn.linear_model import Lasso

    (x, y), (xv, yv), a = s.train, s.valid, np.exp(s.alpha[0])
    tol = 1e-9 if s.dtype == "float64" else 1e-6  # rounding keeps the gap above the first one
    fit = Lasso(a, fit_intercept=False, tol=tol, max_iter=100_000)
    coefficients = fit.fit(scipy.sparse.csc_array(x) if scipy.sparse.issparse(x) else x, y).coef_
    support = np.flatnonzero(coefficients)
    for _ in range(50):
        xs = x[:, support]
        xs = np.asarray(xs.todense() if scipy.sparse.issparse(xs) else xs, float)
        signs = np.sign(coefficients[support])
        gram = xs.T @ xs / len(y)
        w = np.linalg.solve(gram, xs.T @ y / len(y) - a * signs)
        wrong = w * signs <= 0
        if not np.any(wrong):
            break
        support = support[~wrong]
    slope = x.T @ (xs @ w - y) / len(y)
    inactive = np.delete(np.abs(slope), support)
    assert np.max(inactive) < a * (1 if s.dtype == "float64" else 1 + 1e-5), "wrong active set"
    xvs = xv[:, support]
    v = xvs.T @ (xvs @ w - yv) / len(yv)
    return np.array([-v @ np.linalg.solve(gram, a * signs)])


def box_truth(s, product, right, low, high, terms):
    """Return the hypergradient of ``w'Hw/2 - right'w`` in a box by its active set.

    ``terms(w) -> (slope v of the outer loss, B [p, dim alpha], jacobian of the upper bound [p, dim
    alpha], of the lower bound, direct derivative)``.
    """
    p = s.weights

    def objective(w):
        hw = product(w)
        return 0.5 * w @ hw - right @ w, hw - right

    options = {"maxiter": 20_000, "maxfun": 50_000, "ftol": 0, "gtol": 1e-9, "maxcor": 30}
    start = np.clip(np.zeros(p), low, high)
    search = {"jac": True, "bounds": np.stack([low, high], 1), "method": "L-BFGS-B"}
    w = scipy.optimize.minimize(objective, start, **search, options=options).x
    for _ in range(100):
        g = product(w) - right
        at_low, at_high = (w <= low) & (g > 0), (w >= high) & (g < 0)
        free = ~(at_low | at_high)
        fixed = np.where(at_low, low, np.where(at_high, high, 0))

        def reduced(u, free=free):
            return product(np.where(free, np.bincount(np.flatnonzero(free), u, p), 0))[free]

        count = int(np.sum(free))
        operator = scipy.sparse.linalg.LinearOperator((count, count), reduced)
        solved = fixed.copy()
        solved[free] = conjugate(operator, (right - product(fixed))[free])
        w = np.clip(solved, low, high)
        if np.array_equal(w, solved):
            g = product(w) - right
            if np.all(g[at_low] > 0) and np.all(g[at_high] < 0):
                break
    else:
        raise RuntimeError("the active set does not settle")
    v, mixed, in_high, in_low, direct = terms(w)
    q = np.zeros(p)
    q[free] = conjugate(operator, v[free])
    nu = v - product(q)
    return direct - mixed.T @ q + in_high.T @ (nu * at_high) + in_low.T @ (nu * at_low)


def bounds_truth(s):
    """The active set of ridge regression between bounds."""
    (x, y), (xv, yv) = s.train, s.valid
    ridge, bound = np.exp(s.alpha)
    one, zero = np.full(s.weights, bound), np.zeros(s.weights)

    def terms(w):
        in_ridge, in_bound = (np.stack(pair, 1) for pair in ((ridge * w, zero), (zero, one)))
        return xv.T @ (xv @ w - yv) / len(yv), in_ridge, in_bound, -in_bound, np.zeros(2)

    def product(w):
        return x.T @ (x @ w) / len(y) + ridge * w

    return box_truth(s, product, x.T @ y / len(y), -one, one, terms)


def machine_truth(s):
    """The active set of scikit-learn's machine, and one solve on it."""
    from sklearn.svm import SVC

    (x, y, ridge), (xv, yv, *_) = s.train, s.valid
    C, gamma, n = *np.exp(s.alpha), len(y)
    constant = s.kind == "svm"  # the kernel k + 1 has no further bias

    def squares(a, b):
        return np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T, 0)

    E, Ev = gamma * squares(x, x), gamma * squares(xv, x)
    K, Kv = np.exp(-E), np.exp(-Ev)
    signs = y[:, None] * y
    Q, dQ = signs * (K + constant) + ridge * np.eye(n), -signs * E * K

    def terms(w, free):
        share = free / np.sum(free) * (not constant)  # the bias is a mean over free weights
        bias = share @ (y * (1 - Q @ w))
        slope = -yv / (1 + np.exp(yv * ((Kv + constant) @ (y * w) + bias))) / len(yv)
        v = y * ((Kv + constant).T @ slope) - np.sum(slope) * (Q @ (share * y))
        moved = -(Ev * Kv) @ (y * w) - (share * y) @ (dQ @ w)
        upper, zero = np.full(n, C), np.zeros(n)
        jacobians = np.stack([upper, zero], 1), np.zeros((n, 2))
        return v, np.stack([zero, dQ @ w], 1), *jacobians, np.array([0, slope @ moved])

    low, high, right = np.zeros(n), np.full(n, C), np.ones(n)
    if constant:
        return box_truth(s, lambda w: Q @ w, right, low, high, lambda w: terms(w, w > 0))
    fit = SVC(C=C, kernel="precomputed", tol=1e-8).fit(signs * Q, y)
    w = np.zeros(n)
    w[fit.support_] = np.abs(fit.dual_coef_[0])
    free, at_high = (w > 0) & (w < C), w >= C
    rows = np.flatnonzero(free)
    border = np.block([[Q[np.ix_(rows, rows)], y[rows, None]], [y[None, rows], np.zeros((1, 1))]])
    fixed = high * at_high
    solved = np.linalg.solve(border, np.append((right - Q @ fixed)[rows], -y @ fixed))
    w = fixed.copy()
    w[rows] = solved[:-1]
    g = Q @ w - right + solved[-1] * y
    inside = np.all((w[rows] > 0) & (w[rows] < C))
    assert inside and np.all(g[at_high] < 0) and np.all(g[~free & ~at_high] > 0), "wrong active set"
    v, mixed, in_high, _, direct = terms(w, free)
    q, pair = np.zeros(n), np.linalg.solve(border, np.append(v[rows], 0))
    q[rows] = pair[:-1]
    nu = v - Q @ q - pair[-1] * y
    return direct - mixed.T @ q + in_high.T @ (nu * at_high)


# ----------------------------------------------------------------------------- the libraries


def arrays(tree, dtype):
    """Return JAX's arrays; sparse matrices become BCOO."""

    def array(x):
        if scipy.sparse.issparse(x):
            return BCOO.from_scipy_sparse(scipy.sparse.coo_array(x).astype(dtype))
        return jnp.asarray(x, dtype)

    return jax.tree.map(array, tree, is_leaf=scipy.sparse.issparse)


def here(lower, outer, minimizer, diagnostics):
    problem = bilevel.Problem(lower, outer)

    @jax.jit
    def run(tol, alpha, w0, train, valid):
        solver = bilevel.implicit(minimizer(train, steps=100_000, tol=tol), bilevel.cg(tol=tol))
        fn = bilevel.hypergradient(problem, solver, diagnostics=diagnostics)
        result = fn(alpha, w0, train, valid)
        return result.grad, (result.info.error_estimate if diagnostics else 0.0)

    return run


def jaxopt_rule(name):
    """Return ``(alpha, train) -> hyperparameters`` and the projection or proximal operator."""
    from jaxopt import projection, prox

    exp = jnp.exp

    return {
        "box": (lambda a, t: (t[3] + a[2], t[4] + a[3]), projection.projection_box),
        "non-negative": (lambda a, t: None, projection.projection_non_negative),
        "simplex": (lambda a, t: 1.0, projection.projection_simplex),
        "Lasso": (lambda a, t: exp(a[2:]), prox.prox_lasso),
        "SVM": (lambda a, t: (0.0, exp(a[0])), projection.projection_box),
        "svm": (lambda a, t: (0.0, exp(a[0])), projection.projection_box),
        "lasso": (lambda a, t: exp(a[0]), prox.prox_lasso),
        "large box": (lambda a, t: (-exp(a[1]), exp(a[1])), projection.projection_box),
    }[name]


def jaxopt(lower, outer, name, solve, step):
    from jaxopt import ProximalGradient
    from jaxopt import linear_solve as solvers

    hyper, rule = jaxopt_rule(name)
    if "asso" not in name:  # ProjectedGradient would ignore the linear solver

        def prox(w, parameters, scaling=1.0):
            return projection(w, parameters)

        projection, rule = rule, prox

    @jax.jit
    def run(tol, alpha, w0, train, valid):
        most = 10_000 if "svm" in name else 100_000
        inverse = functools.partial(getattr(solvers, solve), tol=tol, maxiter=most // 5)
        options = {"implicit_diff_solve": inverse, "maxiter": most, "stepsize": step}
        solver = ProximalGradient(lower, rule, tol=tol, **options)

        def value(alpha):
            solved = solver.run(w0, hyper(alpha, train), alpha=alpha, batch=train)
            return outer(solved.params, alpha, valid)

        return jax.grad(value)(alpha), 0.0

    return run


def cvxpylayers(name, drawn, outer):
    """Return ``(tol, alpha, w0, train, valid) -> (grad, 0)`` for a regression of 100 weights."""
    import cvxpy as cp
    from cvxpylayers.jax import CvxpyLayer

    x, y, mass = (np.asarray(a) for a in drawn.train[:3])
    keep = mass > 0
    x, y, n = x[keep], y[keep], int(np.sum(keep))
    p = x.shape[1]
    w, root, shift = cp.Variable(p), cp.Parameter(nonneg=True), cp.Parameter()
    loss = 0.5 * cp.sum_squares(x @ w - y - shift) / n + 0.5 * cp.sum_squares(root * w)
    parameters, limits = [root, shift], []
    values = [lambda a: jnp.exp(a[0] / 2), lambda a: a[1]]
    if name == "box":
        low, high = cp.Parameter(p), cp.Parameter(p)
        limits, parameters = [w >= low, w <= high], [*parameters, low, high]
        values += [lambda a: drawn.train[3] + a[2], lambda a: drawn.train[4] + a[3]]
    elif name == "Lasso":
        weight = cp.Parameter(p, nonneg=True)
        loss, parameters = loss + cp.sum(cp.multiply(weight, cp.abs(w))), [*parameters, weight]
        values.append(lambda a: jnp.exp(a[2:]))
    else:
        limits = [w >= 0] + ([cp.sum(w) == 1] if name == "simplex" else [])
    layer = CvxpyLayer(cp.Problem(cp.Minimize(loss), limits), parameters, [w])

    def run(tol, alpha, w0, train, valid):
        # The default mode, LSQR, has an error of 0.003 (box) and 1.3 (non-negative) at every eps.
        options = {"eps": tol, "max_iters": 100_000, "mode": "dense"}

        def value(alpha):
            (solved,) = layer(*(v(alpha) for v in values), solver_args=options)
            return outer(solved, alpha, valid)

        return jax.grad(value)(alpha), 0.0

    return run


def sparho(setting):
    """Return the Lasso's hypergradient by sparho, with Celer's solver and with scikit-learn's."""
    import sparho as library
    from sparho.adapters.celer import CelerLasso

    (x, y), (xv, yv) = setting.train, setting.valid
    if scipy.sparse.issparse(x):
        design = scipy.sparse.csc_array(scipy.sparse.vstack([x, xv]))
    else:
        design = np.asfortranarray(np.concatenate([x, xv]))
    rows = np.arange(len(y)), np.arange(len(y), len(y) + len(yv))
    problem = library.Problem(library.SquaredLoss(), library.L1(), design, np.append(y, yv))
    criterion, penalty = library.HeldOutMSE(*rows), float(np.exp(setting.alpha[0]))

    def run(tol, alpha, w0, train, valid):
        solver = CelerLasso(tol=float(tol))
        adjoint = functools.partial(library.implicit_forward, tol=float(tol))
        result = criterion.value_and_hypergrad(problem, penalty, solver, adjoint)
        return np.array([0.5 * result.hypergrad * penalty]), 0.0  # 1/2: ours halves the loss

    return run


# ----------------------------------------------------------------------------- one process


def prepared(name, weights, small):
    """Return the setting with the losses and the minimizer of this library."""
    if name in SMALL:
        family, setting = small_setting(name, weights)
        return setting, family.lower, family.outer, family.minimizer
    kind, n, p, density, dtype = LARGE[name]
    if small:
        n, p = (max(n // 100, 20), max(p // 100, 40)) if "svm" not in kind else (60, 60)
        density = density and min(1.0, 100 * density)
    setting = large_setting(kind, n, p, density, dtype)
    return setting, *losses(kind)


def largest_curvature(lower, setting, alpha, train):
    """Return the Hessian's largest eigenvalue by the power method."""

    @jax.jit
    def power(train, alpha):
        zero = jnp.zeros(setting.weights, setting.dtype)
        slope = jax.grad(lower)

        def move(_, v):
            return slope(v / jnp.linalg.norm(v), alpha, train) - slope(zero, alpha, train)

        start = jax.random.normal(jax.random.key(0), zero.shape, zero.dtype)
        return jnp.linalg.norm(jax.lax.fori_loop(0, 100, move, start))

    return 1.02 * float(power(train, alpha))


def work(name, library, weights, small, truth):
    """Yield the row of one problem and one library. ``library`` "truth" returns the truth."""
    jax.config.update("jax_enable_x64", True)
    setting, lower, outer, minimizer = prepared(name, weights, small)
    if library == "truth":
        truths = {"lasso": lasso_truth, "box": bounds_truth}
        grad = setting.truth
        if grad is None:
            grad = truths.get(setting.kind, machine_truth)(setting)
        yield {"part": "truth", "problem": name, "grad": [float(g) for g in grad]}
        return
    alpha, w0 = arrays((setting.alpha, np.zeros(setting.weights)), setting.dtype)
    targets = (1e-5, 1e-7) if setting.dtype == "float64" else (1e-3,)
    runs: dict[str, Callable] = {}
    train = valid = None
    if library == "sparho":
        runs["sparho"] = sparho(setting)
    else:
        train, valid = arrays((setting.train, setting.valid), setting.dtype)
    if library == "here":
        runs["here"] = here(lower, outer, minimizer, False)
        if not small:
            runs["here, with estimate"] = here(lower, outer, minimizer, True)
    elif library == "jaxopt":
        key = "large box" if setting.kind == "box" and name in LARGE else setting.kind
        step = 1 / largest_curvature(lower, setting, alpha, train)
        for solve in ("solve_normal_cg", "solve_gmres"):
            runs[f"jaxopt, {solve}"] = jaxopt(lower, outer, key, solve, step)
    elif library == "cvxpylayers":
        runs["cvxpylayers"] = cvxpylayers(name, setting, outer)
    for label, run in runs.items():
        yield from measured(name, label, run, (alpha, w0, train, valid), truth, targets, setting)


def measured(name, label, run, args, truth, targets, setting):
    """Yield time, memory and error of the first tolerance that reaches each target."""
    error, first, truth = np.inf, None, np.asarray(truth)
    least = 1e-8 if setting.dtype == "float32" else 0.0
    slow = "svm" in setting.kind
    tolerances = SLOW if slow else [tol for tol in TOLERANCES if tol >= least]
    began_all = time.process_time()
    for target in targets:
        while error >= target and tolerances and time.process_time() - began_all < BUDGET:
            tol, *tolerances = tolerances
            given = np.asarray(tol, setting.dtype)
            began = time.process_time()
            grad, estimate = jax.block_until_ready(run(given, *args))
            seconds = time.process_time() - began
            first = seconds if first is None else first
            error = float(np.linalg.norm(np.asarray(grad) - truth) / np.linalg.norm(truth))
        row = {"part": "time", "problem": name, "library": label, "target": target, "error": error}
        if slow:
            row |= {"tol": tol, "seconds": seconds, "MB": harness.resident_peak()}
        else:
            row |= timed(run, given, args)
        row["first"] = first
        yield row | {"estimate": float(estimate / np.linalg.norm(truth))}


def timed(run, given, args):
    """Return the tolerance, the least CPU time of three runs, and their peak memory."""
    harness.forget_peak()
    times = []
    while len(times) < 3 and sum(times) <= 60:
        began = time.process_time()
        jax.block_until_ready(run(given, *args))
        times.append(time.process_time() - began)
    return {"tol": float(given), "seconds": min(times), "MB": harness.resident_peak()}


# ----------------------------------------------------------------------------- the report


def libraries(name, peers):
    kind = LARGE[name][0] if name in LARGE else ""
    have = {
        "jaxopt": kind != "svm, free bias",  # JAX cannot transpose the derivative of its projection
        "sparho": kind == "lasso",
        "cvxpylayers": name in SMALL and name != "SVM",
    }
    return ["here", *(peer for peer in have if peer in peers and have[peer])]


def report(rows):
    lines = []
    for row in where(rows, part="time"):
        reached = row["error"] < row["target"]
        seconds = f"{'' if reached else 'not reached in '}{row['seconds']:.3g}"
        error = f"{row['error']:.0e}" if np.isfinite(row["error"]) else "-"
        target = f"{row['target']:.0e}"
        line = [row["problem"], row["library"], target, seconds, f"{row['first']:.3g}"]
        lines.append([*line, f"{row['MB']:,.0f}", error])
    head = ["lower problem", "library", "target", "CPU s", "first call, CPU s", "peak MB"]
    head.append("relative error")
    return table(head, lines)


def main():
    problems = {"nargs": "*", "help": "only these names, or those that contain one of these"}
    own = {"work": work, "peers": PEERS, "problems": problems}
    flags = harness.command_line(__file__, __doc__, report, **own)
    names = [*SMALL, *LARGE] if not flags.smoke else ["Lasso"]
    if flags.problems:
        partly = [name for name in names if any(part in name for part in flags.problems)]
        names = [name for name in names if name in flags.problems] or partly
    weights = 20 if flags.small else 100
    rows = [harness.environment(*flags.peers, "cvxpy", "celer", "scikit-learn")]
    for name in names:
        (known,) = harness.in_own_process(__file__, name, "truth", weights, flags.small, None)
        if known.get("failed"):
            rows.append(known | {"part": "time", "problem": name})
            continue
        for library in libraries(name, flags.peers):
            request = name, library, weights, flags.small, known["grad"]
            for row in harness.in_own_process(__file__, *request):
                rows.append({"part": "time", "problem": name, "library": library} | row)
                print(rows[-1], flush=True)
    harness.finish(rows, flags.results, report)


if __name__ == "__main__":
    main()
