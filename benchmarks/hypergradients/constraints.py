"""Are error estimates true if the lower problem has constraints? Thousands of new random problems.

    # 2,300 cases: an hour on one core; resumes from FILE
    python benchmarks/hypergradients/constraints.py --seed 7 --results FILE

Each case draws a problem of one of twelve families (sets and non-smooth terms), its size (4 to 300
weights, 0.1 to 10 rows per weight), a condition number from 1 to 1e4, a tolerance of the forward
solver and of the adjoint from 1e-1 to 1e-12, and a precision. In 20 % of the cases ``alpha`` is
moved to within 1e-1 to 1e-16 of a change of the active set. The truth is the active-set formula in
80-bit floats on exactly the same values (``constraints_truth.py``). We count

    regular          the solution was found, its active set is strict, and it has a derivative
    low, high        finite estimates under a third of the error, over ten times the error
    falsely small    an estimate of at most 10 % of the hypergradient, an error over 30 %
    false at 1 %     ``converged``, and an error over 1 %
    not regular      finite estimates where the derivative does not exist

Errors and estimates below 20 units of roundoff of the hypergradient count as right. A bound below
the error counts as violated, however small both are.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from benchmarks import harness
from benchmarks.hypergradients import constraints_truth as exact
from benchmarks.hypergradients.constraints_truth import LONG

MEASURES = ("bilevel/constraints", "bilevel/hypergradients", "bilevel/solvers")

SIZES = 4, 12, 30, 300
CASES = {4: 30, 12: 30, 30: 30, 300: 4}  # of each family and precision
MOST_STEPS = 3000
NO_RIDGE = -60.0


class Draw(NamedTuple):
    """One problem: arrays that its precision represents exactly."""

    alpha: np.ndarray
    train: tuple
    valid: tuple


class Family(NamedTuple):
    name: str
    lower: Callable
    outer: Callable
    minimizer: Callable  # (train, **options) -> lower solver
    draw: Callable  # (rng, weights) -> Draw
    convex: Callable  # (Draw) -> exact.Convex


# ----------------------------------------------------------------------------- regressions


def regression_lower(kind, w, alpha, batch):
    """Return the mean loss with a shift of the targets, and a ridge; padded rows have mass 0."""
    x, y, mass = batch[:3]
    f = x @ w
    if kind == "logistic":
        loss = jnp.sum(mass * jax.nn.softplus(-y * (f + alpha[1])))
    else:
        loss = 0.5 * jnp.sum(mass * (f - y - alpha[1]) ** 2)
    return loss + 0.5 * jnp.exp(alpha[0]) * jnp.sum(w**2)


def regression_outer(w, alpha, batch):
    x, y, mass = batch
    return 0.5 * jnp.sum(mass * (x @ w - y) ** 2)


def draw_data(rng, p, kind, mean=None):
    """Draw training and validation rows, padded to a size that depends on ``p`` alone."""
    most = min(10 * p, 600)
    n = int(np.clip(round(p * 10 ** rng.uniform(-1, 1)), 2, most))
    spectrum = 10 ** (-rng.uniform(0, 2) * np.linspace(0, 1, p))
    rotation = np.linalg.qr(rng.normal(size=(p, p)))[0] * spectrum
    truth = rng.normal(size=p) if mean is None else mean
    scale, size = 10 ** rng.uniform(-1, 1), 10 ** rng.uniform(-2, 2)

    def sample(n, rows):
        x = rng.normal(size=(n, p)) @ rotation.T * scale
        f = x @ truth
        f = f / max(np.sqrt(np.mean(f**2)), 1e-300) if mean is None else f / scale
        y = size * (f + 0.3 * rng.normal(size=n))
        if kind == "logistic":
            y = np.where(f + 0.5 * rng.normal(size=n) > 0, 1.0, -1.0)
        mass, more = np.full(n, 1 / n), rows - n
        return np.pad(x, ((0, more), (0, 0))), np.pad(y, (0, more)), np.pad(mass, (0, more))

    if mean is not None:
        size = scale
    return sample(n, most), sample(max(4, p // 2), max(4, p // 2))


def draw_start(rng, p, kind, mean=None):
    """Return data, log ridge, shift, the size of weights, and the largest slope of the data."""
    train, valid = draw_data(rng, p, kind, mean)
    x, y, mass = train
    if kind == "logistic":
        y = y / 4
    H = (x.T * mass) @ x
    largest = np.linalg.norm(H, 2)
    ridge = np.log(largest) + np.log(10) * rng.uniform(-6, 0)
    if rng.random() < 0.25:
        ridge = NO_RIDGE
    slope = x.T @ (mass * y)
    weights = np.linalg.solve(H + 1e-2 * largest * np.eye(p), slope)
    shift = 0.1 * np.sqrt(np.mean(y[mass > 0] ** 2)) * rng.normal()
    return train, valid, [ridge, shift], weights, slope


def smooth_rows(kind, drawn, more_ridge=(), change=None):
    """Return ``smooth`` of a regression. ``change`` [p, p]: the weights are ``change @ w``."""
    x, y, mass = (np.asarray(a, LONG) for a in drawn.train[:3])
    x, y, mass = x[mass > 0], y[mass > 0], mass[mass > 0]
    identity = np.eye(x.shape[1], dtype=LONG) if change is None else change
    z = x @ identity
    squares = identity.T @ identity

    @functools.cache
    def arrays(dtype):
        return [a.astype(dtype) for a in (z, y, mass, squares)]

    @functools.cache
    def gram(dtype):
        z, _, mass, _ = arrays(dtype)
        return (z.T * mass) @ z

    def smooth(w, alpha, order=2):
        dtype = LONG if w.dtype == LONG else np.float64
        z, y, mass, squares = arrays(dtype)
        ridges = [np.exp(alpha[i]) for i in (0, *more_ridge)]
        f = z @ w
        if kind == "logistic":
            odds = 1 / (1 + np.exp(y * (f + alpha[1])))
            first, second, in_shift = -y * odds, odds * (1 - odds), odds * (1 - odds)
        else:
            first, second, in_shift = f - y - alpha[1], None, -np.ones_like(y)
        square = squares @ w
        g = z.T @ (mass * first) + sum(ridges) * square
        if order == 1:
            return g, None, None
        H = gram(dtype) if second is None else (z.T * (mass * second)) @ z
        B = np.zeros((len(w), len(alpha)), dtype)
        for i, ridge in zip((0, *more_ridge), ridges, strict=True):
            B[:, i] = ridge * square
        B[:, 1] = z.T @ (mass * in_shift)
        return g, H + sum(ridges) * squares, B

    return smooth


def outer_rows(drawn, change=None):
    x, y, mass = (np.asarray(a, LONG) for a in drawn.valid)
    x = x if change is None else x @ change

    def outer(w, alpha, code):
        error = x @ w - y
        return np.sum(mass * error**2) / 2, x.T @ (mass * error), np.zeros(len(alpha), LONG)

    return outer


def exponential(*indices):
    """Return ``alpha -> (exp(alpha[indices]), jacobian)``; for one index a scalar."""

    def parameter(alpha):
        value = np.exp(alpha[list(indices)])
        jacobian = np.zeros((len(indices), len(alpha)), value.dtype)
        jacobian[np.arange(len(indices)), list(indices)] = value
        return (value[0], jacobian[0]) if len(indices) == 1 else (value, jacobian)

    return parameter


def without_data(make, *arguments):
    """Return ``make(*arguments, **options)`` as a minimizer, which gets the training data first."""
    return lambda train, **options: make(*arguments, **options)


def fixed(p, value):
    """Return a bound of p weights that does not depend on alpha."""
    return lambda alpha: (np.full(p, value, alpha.dtype), np.zeros((p, len(alpha)), alpha.dtype))


def moved(base, index):
    """Return the bounds ``base + alpha[index]``."""

    def bound(alpha):
        jacobian = np.zeros((len(base), len(alpha)), alpha.dtype)
        jacobian[:, index] = 1
        return base.astype(alpha.dtype) + alpha[index], jacobian

    return bound


def shared(p, index, first=0):
    """Return one weight ``exp(alpha[index])`` for all of p coordinates from ``first`` on."""

    def parameter(alpha):
        value = np.full(p, np.exp(alpha[index]), alpha.dtype)
        value[:first] = 0
        jacobian = np.zeros((p, len(alpha)), alpha.dtype)
        jacobian[:, index] = value
        return value, jacobian

    return parameter


def dimension(drawn):
    """Return the number of weights of a regression."""
    return drawn.train[0].shape[1]


def regression(name, minimizer, parameters, term, kinds=("squared", "logistic"), **options):
    """Return one family per loss, with ``term(drawn) -> exact.Term``.

    ``parameters(rng, weights, slope)`` returns further entries of alpha and further arrays of
    train.
    """
    mean, more = options.get("mean"), options.get("more_ridge", ())

    def of_loss(kind):
        def draw(rng, p):
            train, valid, start, weights, slope = draw_start(rng, p, kind, mean and mean(rng, p))
            alpha, arrays = parameters(rng, weights, slope)
            return Draw(np.array([*start, *alpha]), (*train, *arrays), valid)

        def convex(drawn):
            p = dimension(drawn)
            change = np.tril(np.ones((p, p), LONG)) if options.get("jumps") else None
            smooth = smooth_rows(kind, drawn, more, change)
            return exact.Convex(smooth, outer_rows(drawn, change), term(drawn))

        lower = functools.partial(regression_lower, kind)
        title = f"{name}, logistic" if kind == "logistic" else name
        return Family(title, lower, regression_outer, minimizer, draw, convex)

    return [of_loss(kind) for kind in kinds]


# ----------------------------------------------------------------------------- the sets and terms


def box_family():
    def minimizer(train, **options):
        low, high = train[3:5]
        return bilevel.projected("box", lambda a: low + a[2], lambda a: high + a[3], **options)

    def parameters(rng, weights, slope):
        size = float(np.sqrt(np.mean(np.square(weights))))
        bounds = [sign * size * rng.uniform(0.2, 1.5, len(weights)) for sign in (-1, 1)]
        return size * rng.uniform(-0.1, 0.1, 2), bounds

    def term(drawn):
        low, high = (x.astype(LONG) for x in drawn.train[3:5])
        return exact.box(moved(low, 2), moved(high, 3))

    return regression("box, moving bounds", minimizer, parameters, term)


def nonnegative_family():
    def term(drawn):
        return exact.box(*(fixed(dimension(drawn), bound) for bound in (0, np.inf)))

    minimizer = without_data(bilevel.projected, "nonnegative")
    return regression("non-negative", minimizer, lambda *_: ([], []), term)


def simplex_family():
    def mean(rng, p):
        return rng.dirichlet(np.full(p, 0.5))

    minimizer = without_data(bilevel.projected, "simplex")
    given = "simplex", minimizer, lambda *_: ([], []), lambda drawn: exact.simplex()
    return regression(*given, ("squared",), mean=mean)


def ball_family(name, kind, norm, term):
    def parameters(rng, weights, slope):
        return [np.log(norm(weights) * rng.uniform(0.2, 1.5))], []

    minimizer = without_data(bilevel.projected, kind, lambda a: jnp.exp(a[2]))
    return regression(name, minimizer, parameters, lambda drawn: term(exponential(2)))


def lasso_family():
    def parameters(rng, weights, slope):
        largest = np.log(np.max(np.abs(slope))) + np.log(10) * rng.uniform(-2, -0.1)
        return largest + 0.3 * rng.normal(size=len(weights)), []

    def term(drawn):
        return exact.l1(exponential(*range(2, len(drawn.alpha))))

    minimizer = without_data(bilevel.proximal, "l1", lambda a: jnp.exp(a[2:]))
    return regression("Lasso", minimizer, parameters, term)


def elastic_net_family():
    def parameters(rng, weights, slope):
        largest = np.log(np.max(np.abs(slope)))
        l1 = largest + np.log(10) * rng.uniform(-2, -0.1)
        curvature = np.log(np.linalg.norm(slope) / np.linalg.norm(weights))
        return [l1, curvature + np.log(10) * rng.uniform(-4, 0)], []

    def term(drawn):
        return exact.l1(shared(dimension(drawn), 2))

    weights = (lambda a: jnp.exp(a[2])), (lambda a: jnp.exp(a[3]))
    minimizer = without_data(bilevel.proximal, "elastic_net", *weights)
    return regression("elastic net", minimizer, parameters, term, more_ridge=(3,))


def groups_of(p):
    return [list(map(int, g)) for g in np.array_split(np.arange(p), max(2, p // 4))]


def group_family():
    def minimizer(train, **options):
        groups = groups_of(train[0].shape[1])
        return bilevel.proximal("group_l1", lambda a: jnp.exp(a[2:]), groups=groups, **options)

    def parameters(rng, weights, slope):
        groups = groups_of(len(weights))
        largest = np.log(max(np.linalg.norm(slope[g]) for g in groups))
        base = largest + np.log(10) * rng.uniform(-2, -0.1)
        return base + 0.3 * rng.normal(size=len(groups)), []

    def term(drawn):
        weights = exponential(*range(2, len(drawn.alpha)))
        return exact.group_l1(weights, groups_of(dimension(drawn)))

    return regression("group Lasso", minimizer, parameters, term)


def variation_family():
    def mean(rng, p):
        return np.cumsum(rng.normal(size=p) * (rng.random(p) < 0.3)) + rng.normal()

    def parameters(rng, weights, slope):
        largest = np.log(np.max(np.abs(np.cumsum(slope[::-1])[:-1])))
        return [largest + np.log(10) * rng.uniform(-2.5, -0.5)], []

    def term(drawn):
        return exact.l1(shared(dimension(drawn), 2, first=1))

    minimizer = without_data(bilevel.proximal, "total_variation", lambda a: jnp.exp(a[2]))
    options = {"mean": mean, "jumps": True}
    return regression("total variation", minimizer, parameters, term, ("squared",), **options)


@functools.cache
def equations(p):
    """Return the known matrix [p / 4, p] of the affine sets, exact in float32."""
    rng = np.random.default_rng(p)
    return np.round(64 * rng.normal(size=(max(1, p // 4), p))) / 64


def affine_family():
    def minimizer(train, **options):
        return bilevel.projected("affine", equations(train[0].shape[1]), lambda a: a[2:], **options)

    def parameters(rng, weights, slope):
        return equations(len(weights)) @ weights * rng.uniform(0.5, 1.5), []

    def term(drawn):
        def right(alpha):
            return alpha[2:], np.eye(len(alpha), dtype=alpha.dtype)[2:]

        return exact.affine(equations(dimension(drawn)).astype(LONG), right)

    return regression("affine", minimizer, parameters, term, ("squared",))


# ----------------------------------------------------------------------------- the SVM's dual


def gaussian(alpha, x1, x2):
    squared = jnp.sum((x1[:, None] - x2[None]) ** 2, -1)
    return jnp.exp(-jnp.exp(alpha[1]) * squared)


def machine_family(equality):
    constant = 0.0 if equality else 1.0  # the regularized bias adds 1 to the kernel

    def lower(w, alpha, batch):
        x, y, ridge = batch
        yw = y * w
        quadratic = yw @ ((gaussian(alpha, x, x) + constant) @ yw) + ridge * jnp.sum(w**2)
        return 0.5 * quadratic - jnp.sum(w)

    def outer(w, alpha, batch):
        xv, yv, x, y, ridge = batch
        yw = y * w
        decision = (gaussian(alpha, xv, x) + constant) @ yw
        if equality:  # the bias, from the weights strictly between their bounds
            free = ((w > 0) & (w < jnp.exp(alpha[0]))).astype(w.dtype)
            rest = y - gaussian(alpha, x, x) @ yw - ridge * yw
            decision = decision + jnp.sum(free * rest) / jnp.maximum(jnp.sum(free), 1)
        return jnp.mean(jax.nn.softplus(-yv * decision))

    def minimizer(train, **options):
        high = lambda alpha: jnp.exp(alpha[0])  # noqa: E731
        if equality:
            return bilevel.projected("box_equality", 0.0, high, train[1], 0.0, **options)
        return bilevel.projected("box", 0.0, high, **options)

    def draw(rng, p):
        x, xv = rng.normal(size=(p, 3)), rng.normal(size=(max(4, p // 2), 3))
        y, yv = (np.where(a[:, 0] + 0.7 * rng.normal(size=len(a)) > 0, 1.0, -1.0) for a in (x, xv))
        y[:2] = 1.0, -1.0  # both classes
        ridge = np.array(0.0 if rng.random() < 0.25 else 10 ** rng.uniform(-6, -1))
        alpha = np.log(10) * np.array([rng.uniform(-1, 2), rng.uniform(-1.5, 0.5)])
        return Draw(alpha, (x, y, ridge), (xv, yv, x, y, ridge))

    def convex(drawn):
        x, y, ridge, xv, yv = (np.asarray(a, LONG) for a in (*drawn.train, *drawn.valid[:2]))
        p = len(y)

        def squares(a, b):
            return np.sum((a[:, None] - b[None]) ** 2, -1)

        own, cross = squares(x, x), squares(xv, x)

        @functools.lru_cache(maxsize=4)
        def matrices(log_gamma, dtype):
            E = np.exp(LONG(log_gamma)) * own
            K = np.exp(-E)
            yy = np.outer(y, y)
            Q = yy * (K + LONG(constant)) + ridge * np.eye(p, dtype=LONG)
            return Q.astype(dtype), (-yy * E * K).astype(dtype)

        def smooth(w, alpha, order=2):
            dtype = LONG if w.dtype == LONG else np.float64
            Q, dQ = matrices(alpha[1], dtype)
            if order == 1:
                return Q @ w - 1, None, None
            return Q @ w - 1, Q, np.stack([np.zeros(p, dtype), dQ @ w], 1)

        def outer_exact(w, alpha, code):
            E = np.exp(alpha[1]) * cross
            K = np.exp(-E)
            decision = (K + LONG(constant)) @ (y * w)
            in_w, in_gamma = (K + LONG(constant)) * y, -(E * K) @ (y * w)
            if equality:
                free = (code == 0) / LONG(max(np.sum(code == 0), 1))
                Q, dQ = matrices(alpha[1], LONG)
                yf = free * y
                decision = decision + yf @ (1 - Q @ w)
                in_w, in_gamma = in_w - yf @ Q, in_gamma - yf @ dQ @ w
            slope = -yv / (1 + np.exp(yv * decision)) / len(yv)
            value = np.mean(np.log1p(np.exp(-yv * decision)))
            return value, slope @ in_w, np.array([0, slope @ in_gamma], LONG)

        box = exact.box(fixed(p, 0), shared(p, 0), np.asarray(y, LONG) if equality else None)
        return exact.Convex(smooth, outer_exact, box)

    name = "SVM, equality bias" if equality else "SVM, regularized bias"
    return [Family(name, lower, outer, minimizer, draw, convex)]


FAMILIES = [
    *box_family(),
    *nonnegative_family(),
    *simplex_family(),
    *ball_family("l2 ball", "l2_ball", np.linalg.norm, exact.l2_ball),
    *ball_family("l1 ball", "l1_ball", lambda w: np.sum(np.abs(w)), exact.l1_ball),
    *lasso_family(),
    *elastic_net_family(),
    *group_family(),
    *variation_family(),
    *affine_family(),
    *machine_family(False),
    *machine_family(True),
]
LOGISTIC_SIZE = 12  # the logistic families have this size only


# ----------------------------------------------------------------------------- one case


@functools.cache
def compiled(index: int):
    """Return the hypergradient for traced tolerances, so that one program serves all cases."""
    family = FAMILIES[index]
    problem = bilevel.Problem(family.lower, family.outer)

    @jax.jit
    def run(tol, linear_tol, alpha, w0, train, valid):
        forward = family.minimizer(train, steps=MOST_STEPS, tol=tol)
        solver = bilevel.implicit(forward, bilevel.cg(tol=linear_tol))
        return bilevel.hypergradient(problem, solver)(alpha, w0, train, valid)

    return run


def start_of(family, drawn):
    """Return the start [p] of the truth's solver."""
    p = len(drawn.train[1]) if "SVM" in family.name else dimension(drawn)
    return np.full(p, 1 / p) if family.name == "simplex" else np.zeros(p)


def drawn_case(index, p, dtype, seed, number):
    """Return the problem in its precision, the two tolerances and whether it was planted."""
    family = FAMILIES[index]
    rng = np.random.default_rng([seed, index, p, number, int(dtype[5:])])

    def rounded(tree):
        return jax.tree.map(lambda x: np.asarray(np.asarray(x, dtype), float), tree)

    drawn = rounded(family.draw(rng, p))
    tolerances = 10 ** rng.uniform(-12, -1, 2)
    planted = rng.random() < 0.2
    if planted:
        direction = rng.normal(size=len(drawn.alpha))
        distance = 10 ** rng.uniform(-16, -1)
        direction = np.where(drawn.alpha == NO_RIDGE, 0, direction)
        convex = family.convex(drawn)
        start = start_of(family, drawn)
        with np.errstate(all="ignore"):
            moved = exact.near_a_kink(convex, drawn.alpha, start, direction, distance)
        planted = moved is not None and bool(np.all(np.isfinite(moved)))
        drawn = rounded(drawn._replace(alpha=moved)) if planted else drawn
    return drawn, tolerances, planted


def run_case(index: int, p: int, dtype: str, seed: int, number: int) -> dict[str, Any]:
    family = FAMILIES[index]
    drawn, tolerances, planted = drawn_case(index, p, dtype, seed, number)
    start = start_of(family, drawn)
    narrow = jax.tree.map(lambda x: jnp.asarray(x, dtype), (*drawn.alpha[None], start))
    alpha, w0 = narrow
    train, valid = jax.tree.map(lambda x: jnp.asarray(x, dtype), (drawn.train, drawn.valid))
    tol, linear_tol = jnp.asarray(tolerances, dtype)
    result = compiled(index)(tol, linear_tol, alpha, w0, train, valid)
    grad = np.asarray(result.grad, float)
    row = {
        "family": family.name,
        "weights": p,
        "dtype": dtype,
        "seed": seed,
        "number": number,
        "planted": planted,
        "estimate": float(result.info.error_estimate),
        "bound": float(result.info.error_bound),
        "converged": bool(result.info.converged),
        "reason": int(result.info.reason),
        "norm": float(np.linalg.norm(grad)),
    }
    with np.errstate(all="ignore"):
        known = exact.truth(family.convex(drawn), drawn.alpha, start)
    if known is None or not np.all(np.isfinite(known.grad.astype(float))):
        return row | {"error": None}
    return row | {
        "error": float(np.linalg.norm((grad - known.grad).astype(float))),
        "truth": float(np.linalg.norm(known.grad.astype(float))),
        "margin": known.margin,
        "condition": known.condition,
    }


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """Add the outcome to ``row``."""
    estimate, finite = row["estimate"], bool(np.isfinite(row["estimate"]))
    regular = row["error"] is not None and row["margin"] > 0 and row["condition"] < 1e13
    out = row | {"finite": finite, "regular": regular, "small": False, "false": False}
    out["judged small"] = out["judged false"] = out["violated"] = False
    if not regular:
        return out | {"outcome": "not regular"}
    size, error = row["truth"], row["error"]
    floor = 20 * float(np.finfo(row["dtype"]).eps) * size + 1e-300
    if not np.isfinite(error):
        return out | {"outcome": "false" if finite else "diverged", "false": finite}
    # Rounding is part of the bound, so it gets no floor; rows have five digits.
    out["violated"] = bool(np.isfinite(row["bound"]) and error > (1 + 2e-5) * row["bound"])
    if not finite:
        return out | {"outcome": "no claim"}
    out["judged small"] = estimate <= 0.1 * row["norm"]
    out["small"] = out["judged small"] and error > 0.3 * row["norm"] + floor
    out["judged false"] = row["converged"]
    out["false"] = row["converged"] and error > 0.01 * row["norm"] + floor
    ratio = max(estimate, floor) / max(error, floor)
    outcome = "low" if ratio < 1 / 3 else "high" if ratio > 10 else "right"
    return out | {"outcome": outcome, "ratio": ratio}


# ----------------------------------------------------------------------------- the whole

HEAD = ["", "cases", "regular", "finite", "in [1/3, 10]", "low / high", "falsely small"]
HEAD += ["false at 1 %", "bound violated", "finite, not regular"]


def cells(name: str | int, cases: list[dict[str, Any]]) -> list[Any]:
    """Return the cells of one line of the table."""
    regular = [r for r in cases if r["regular"]]
    finite = [r for r in regular if r["finite"]]
    count = {k: sum(r["outcome"] == k for r in finite) for k in ("right", "low", "high")}
    return [
        f"{name} weights" if isinstance(name, int) else name,
        len(cases),
        len(regular),
        f"{100 * len(finite) / max(len(regular), 1):.1f} %",
        f"{100 * count['right'] / max(len(finite), 1):.2f} %",
        f"{count['low']} / {count['high']}",
        f"{sum(r['small'] for r in finite)} of {sum(r['judged small'] for r in finite)}",
        f"{sum(r['false'] for r in regular)} of {sum(r['judged false'] for r in finite)}",
        f"{sum(r['violated'] for r in regular)} of {sum(np.isfinite(r['bound']) for r in regular)}",
        sum(r["finite"] for r in cases if not r["regular"]),
    ]


def report(rows: list[dict[str, Any]], by: tuple[str, ...] = ("family", "weights", "dtype")) -> str:
    """Return a line for each family, precision and size, and one for all cases."""
    verdicts = [judged(row) for row in rows if row.get("part") != "environment"]
    values = [(key, value) for key in by for value in dict.fromkeys(r[key] for r in verdicts)]
    lines = [cells(value, harness.where(verdicts, **{key: value})) for key, value in values]
    for planted, name in ((False, "not planted"), (True, "planted")):
        lines.append(cells(name, harness.where(verdicts, planted=planted)))
    return harness.table(HEAD, [*lines, cells("**all**", verdicts)])


by_size = functools.partial(report, by=("weights", "dtype"))


def tasks(flags):
    """Yield the key and the measurement of every requested case."""
    for index, family in enumerate(FAMILIES):
        chosen = not flags.families or any(part in family.name for part in flags.families)
        sizes = (LOGISTIC_SIZE,) if "logistic" in family.name else SIZES
        for p in [p for p in sizes if chosen and (not flags.sizes or p in flags.sizes)]:
            count = 1 if flags.small else CASES[p] if flags.cases is None else flags.cases
            for dtype in ("float32", "float64"):
                for number in range(count):
                    key = p, dtype, flags.seed, number
                    yield (family.name, *key), functools.partial(run_case, index, *key)
                compiled.cache_clear()


def main() -> None:
    flags = harness.command_line(
        __file__,
        __doc__,
        report,
        seed={"type": int, "default": 0},
        families={"nargs": "*", "help": "only those whose names contain one of these"},
        cases={"type": int, "help": "of each family, size and precision"},
        sizes={"nargs": "*", "type": int, "help": "only these numbers of weights"},
    )
    if flags.smoke:
        flags.families, flags.sizes = flags.families or ["elastic net"], flags.sizes or [4]
    if flags.quick:
        flags.sizes = flags.sizes or [4]
    harness.compile_quickly()
    jax.config.update("jax_enable_x64", True)
    # Cases of another seed are not committed. They need a file name.
    path = None if flags.results == harness.RESULTS / "constraints.jsonl" else flags.results
    began, names = time.time(), ("family", "weights", "dtype", "seed", "number")
    rows = list(harness.cases(path, names, tasks(flags)))

    def whole(rows):
        lines = [report(rows)]
        for r in map(judged, rows):
            if r["false"] or r["small"] or r["violated"] or r["outcome"] in ("low", "high"):
                lines.append(str({k: v for k, v in r.items() if not k.startswith("judged")}))
        lines.append(f"{len(rows)} cases, {time.time() - began:.0f} s, jax {jax.__version__}")
        return "\n".join(lines)

    harness.finish(rows, path, whole, write_rows=False)


if __name__ == "__main__":
    main()
