"""Problems, lower solvers, inverses, hypergradients, descent: against closed forms in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from benchmarks.reliability.case import Case, at_most, eps, first, near, that
from benchmarks.reliability.registry import generates

_SIZES = (1, 3, 6)
_ROWS = ((8, 3), (4, 9))  # n rows, p weights: both regimes


# ----------------------------------------------------------------------------- H q = v


def _definite(rng, dtype, n: int, most: float) -> np.ndarray:
    """A positive definite matrix of condition up to 10^most, of any scale."""
    q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    values = 10 ** rng.uniform(0, rng.uniform(0, most), n) * 10 ** rng.uniform(-3, 3)
    return ((q * values) @ q.T).astype(dtype)


def _system(rng, dtype):
    n = int(rng.choice(_SIZES))
    H = _definite(rng, dtype, n, 2 if dtype == np.float32 else 6)
    return jnp.asarray(H), jnp.asarray(rng.normal(size=n).astype(dtype))


def _solve(inverse, H, b):
    return inverse(lambda v: H @ v, b, None, bilevel.contracts.Point(b, None, None))


def _residual(H, b, damping, tolerance):
    """H x = b, judged by the residual: the backward error."""
    A = np.asarray(H, np.float64) + damping * np.eye(len(b))
    size = np.linalg.norm(A, 2)

    def check(x):
        x, v = np.asarray(x, np.float64), np.asarray(b, np.float64)
        off = np.linalg.norm(v - A @ x)
        return at_most("residual", off, tolerance * (size * np.linalg.norm(x) + np.linalg.norm(v)))

    return check


_VALUES = {"H": "values", "b": "values"}


@generates("bilevel.cg")
def cg(rng, dtype) -> Case:
    H, b = _system(rng, dtype)
    damping = float(rng.choice([0.0, 0.1]))
    options = {"steps": 200, "tol": None, "damping": damping}
    call = lambda H, b, **o: _solve(bilevel.cg(**o), H, b)
    kinds = _VALUES | {"steps": "count", "tol": "nonnegative?", "damping": "nonnegative"}
    check = _residual(H, b, damping, 200 * max(eps(dtype), 1e-11))
    return Case(call, {"H": H, "b": b, **options}, check, kinds, ("H", "b"))


@generates("bilevel.dense")
def dense(rng, dtype) -> Case:
    H, b = _system(rng, dtype)
    if rng.random() < 0.3 and len(b) > 1:  # a saddle has an inverse too
        H = H - 1.5 * jnp.linalg.norm(H) * jnp.eye(len(b), dtype=H.dtype).at[0, 0].set(-1.0)
    damping = float(rng.choice([0.0, 0.1]))
    call = lambda H, b, damping: _solve(bilevel.dense(damping), H, b)
    check = _residual(H, b, damping, 200 * eps(dtype))
    kinds = _VALUES | {"damping": "nonnegative"}
    return Case(call, {"H": H, "b": b, "damping": damping}, check, kinds, ("H", "b"))


@generates("bilevel.neumann")
def neumann(rng, dtype) -> Case:
    H, b = _system(rng, dtype)
    terms = int(rng.choice([1, 2, 20]))
    step = float(rng.uniform(0.1, 1)) / float(np.linalg.norm(np.asarray(H), 2))
    A, v = np.asarray(H, np.float64), np.asarray(b, np.float64)
    truth, power = np.zeros_like(v), v
    for _ in range(terms):
        truth, power = truth + step * power, power - step * A @ power
    call = lambda H, b, **o: _solve(bilevel.neumann(**o), H, b)
    kinds = _VALUES | {"terms": "count", "step_size": "nonnegative"}
    fine = ("H: nan", "H: inf", "H: nan, traced") if terms == 1 else ()
    check = functools.partial(near, "x", expected=truth, tolerance=500 * eps(dtype))
    arguments = {"H": H, "b": b, "terms": terms, "step_size": step}
    return Case(call, arguments, check, kinds, ("b",) if terms == 1 else ("H", "b"), fine=fine)


@generates("bilevel.scale")
def scale(rng, dtype) -> Case:
    _, b = _system(rng, dtype)
    step = float(10 ** rng.uniform(-6, 6))
    call = lambda b, step_size: _solve(bilevel.scale(step_size), jnp.eye(len(b)), b)
    check = functools.partial(
        near, "x", expected=step * np.asarray(b, np.float64), tolerance=4 * eps(dtype)
    )
    kinds = {"b": "values", "step_size": "nonnegative"}
    return Case(call, {"b": b, "step_size": step}, check, kinds, ("b",))


@generates("bilevel.nystrom")
def nystrom(rng, dtype) -> Case:
    H, b = _system(rng, dtype)
    n, rank = len(b), len(b)
    if rng.random() < 0.5 and n > 1:  # of low rank: exact too
        rank = n - 1
        values, vectors = np.linalg.eigh(np.asarray(H, np.float64))
        values[:1] = 0
        H = jnp.asarray((vectors * values) @ vectors.T, dtype)
    damping = float(np.linalg.norm(np.asarray(H), 2)) * 10 ** rng.uniform(-2, 0)
    call = lambda H, b, **o: _solve(bilevel.nystrom(**o), H, b)
    kinds = _VALUES | {"rank": "count", "damping": "positive", "key": "key?"}
    # The sketch is as well conditioned as a random square matrix: sometimes 1e4 or 1e5.
    check = _residual(H, b, damping, 1e5 * np.sqrt(n) * eps(dtype))
    arguments = {"H": H, "b": b, "rank": rank, "damping": damping, "key": jax.random.key(1)}
    return Case(call, arguments, check, kinds, ("H", "b"), fine=("damping: inf",))


@generates("bilevel.gram")
def gram(rng, dtype) -> Case:
    n, p = _ROWS[rng.integers(2)]
    x, y = (jnp.asarray(rng.normal(size=s).astype(dtype)) for s in ((n, p), (n,)))
    b = jnp.asarray(rng.normal(size=p).astype(dtype))
    damping = float(10 ** rng.uniform(-2, 2))

    def call(x, y, b, damping):
        inverse = bilevel.gram(lambda w, alpha, batch: batch[0] @ w, damping=damping)
        point = bilevel.contracts.Point(jnp.zeros_like(b), None, (x, y))
        return inverse(lambda v: x.T @ (x @ v) + damping * v, b, None, point)

    check = _residual(x.T @ x, b, damping, 500 * eps(dtype) * (1 + 10 / damping))
    kinds = {"x": "values", "b": "values", "damping": "nonnegative"}
    arguments = {"x": x, "y": y, "b": b, "damping": damping}
    fine = ("damping: a function",)  # of alpha
    return Case(call, arguments, check, kinds, ("x", "b"), fine=fine)


# ----------------------------------------------------------------------------- the problem


def lower(w, alpha, batch):
    x, y = batch
    flat = jnp.concatenate([w["a"], w["b"]])
    return 0.5 * jnp.sum((x @ flat - y) ** 2) + 0.5 * jnp.sum(jnp.exp(alpha) * flat**2)


def outer(w, alpha, batch):
    x, y = batch
    flat = jnp.concatenate([w["a"], w["b"]])
    return 0.5 * jnp.sum((x @ flat - y) ** 2)


class Ridge:
    """Ridge regression with one penalty per weight, weights a dict; the truth in float64."""

    def __init__(self, rng, dtype):
        n, p = _ROWS[rng.integers(2)]
        # Where weights outnumber rows and penalties are small, soft directions hide from residuals.
        low = -14 if dtype == np.float64 else -7
        center = rng.uniform(low, 2)
        alpha = (center + rng.uniform(-1, 1, p)).astype(dtype)
        scale = 10 ** rng.uniform(-1, 1)
        draw = [(scale * rng.normal(size=(n, p)), rng.normal(size=n)) for _ in range(2)]
        w = (rng.normal(size=p) * rng.choice([0.0, 1.0])).astype(dtype)
        cast = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, dtype))
        train, valid = cast(draw)
        w0 = {"a": w[:1], "b": w[1:]}
        names = ("alpha", "w0", "train", "valid")
        self.arguments = dict(
            zip(names, cast((alpha, w0, tuple(train), tuple(valid))), strict=True)
        )
        self.w0 = np.asarray(w, np.float64)

    def truth(self, steps: int | None = None, rate: float = 0.0):
        """Value and hypergradient at the solution, or after ``steps`` of gradient descent."""
        alpha, (x, y), (u, v) = (
            jax.tree.map(lambda a: np.asarray(a, np.float64), self.arguments[k])
            for k in ("alpha", "train", "valid")
        )
        H = x.T @ x + np.diag(np.exp(alpha))
        if steps is None:
            w = np.linalg.solve(H, x.T @ y)
            adjoint = np.linalg.solve(H, u.T @ (u @ w - v))
            return 0.5 * np.sum((u @ w - v) ** 2), -np.exp(alpha) * w * adjoint
        path = [self.w0]
        for _ in range(steps):
            path.append(path[-1] - rate * (H @ path[-1] - x.T @ y))
        value, slope = 0.5 * np.sum((u @ path[-1] - v) ** 2), u.T @ (u @ path[-1] - v)
        grad = np.zeros_like(alpha)
        for w in path[-2::-1]:
            grad -= rate * np.exp(alpha) * w * slope
            slope = slope - rate * H @ slope
        return value, grad

    def rate(self) -> float:
        x = np.asarray(self.arguments["train"][0], np.float64)
        return 0.9 / float(np.linalg.norm(x, 2) ** 2 + np.exp(self.arguments["alpha"]).max())


PROBLEM = bilevel.Problem(lower, outer)


def _tree(w):
    return {"a": w[:1], "b": w[1:]}


def closed(alpha, w, batch):
    x, y = batch
    H = x.T @ x + jnp.diag(jnp.exp(alpha))
    return _tree(jnp.linalg.solve(H, x.T @ y))


_SOLVERS = {
    "default": lambda: bilevel.implicit(),
    "lbfgs": lambda: bilevel.implicit(bilevel.lbfgs()),
    "dense": lambda: bilevel.implicit(bilevel.newton(), bilevel.dense()),
    "descent": lambda: bilevel.implicit(bilevel.unrolled(0.02, 30)),
    "solved": lambda: bilevel.implicit(bilevel.solved(closed)),
}


@functools.cache
def _compiled(solver: str, mode: str):
    made = _SOLVERS[solver]()
    return jax.jit(bilevel.hypergradient(PROBLEM, made, mode=mode))


def _honest(ridge: Ridge, dtype, diverges: bool = False):
    """`converged` and `error_bound` are kept; what is not claimed may be off.

    A solver that ``diverges`` on some problems has to end in numbers that are visibly not finite.
    """
    _, truth = ridge.truth()

    def check(result):
        grad, info = np.asarray(result.grad, np.float64), result.info
        error, size = np.linalg.norm(grad - truth), np.linalg.norm(truth)
        if not np.isfinite(error):
            seen = diverges and not info.converged and np.isinf(info.error_estimate)
            return "" if seen else "a gradient that is not finite"
        rounding = 1e3 * eps(dtype) * size
        bound = float(info.error_bound)
        return first(
            that(
                not info.converged or error <= 0.05 * size + rounding,
                f"converged, and off by {error / size:.1e}",
            ),
            that(
                np.isnan(bound) or error <= 1.01 * bound + rounding,
                f"error {error:.2e} above its bound {bound:.2e}",
            ),
        )

    return check


def _answer(result):
    """What has to show a NaN: `info` may be infinite for a good input."""
    return result.value, result.grad


_BATCHES = {"alpha": "values", "w0": "values", "train": "values", "valid": "values"}


@generates(
    "bilevel.hypergradient", "bilevel.implicit", "bilevel.newton", "bilevel.lbfgs", "bilevel.solved"
)
def hypergradient(rng, dtype) -> Case:
    ridge = Ridge(rng, dtype)
    solver = str(rng.choice(list(_SOLVERS)))
    mode = str(rng.choice(["reverse", "forward"], p=[0.8, 0.2]))
    call = lambda **k: _compiled(solver, mode)(**k)
    fine = ("w0: nan", "w0: inf") if solver == "solved" else ()
    kinds = _BATCHES if solver != "solved" else {k: v for k, v in _BATCHES.items() if k != "w0"}
    check = _honest(ridge, dtype, diverges=solver == "descent")  # its rate is fixed
    return Case(call, ridge.arguments, check, kinds, fine=fine, answer=_answer)


_STEPS = (1, 4, 15)


@functools.cache
def _unrolled(steps: int, mode: str, restarted: bool):
    def run(alpha, w0, train, valid, rate):
        solver = bilevel.unrolled(optax.sgd(rate), steps)
        solver = bilevel.restarted(solver) if restarted else solver
        return bilevel.hypergradient(PROBLEM, solver, mode=mode, diagnostics=False)(
            alpha, w0, train, valid
        )

    return jax.jit(run)


@generates("bilevel.unrolled", "bilevel.restarted")
def unrolled(rng, dtype) -> Case:
    ridge, steps = Ridge(rng, dtype), int(rng.choice(_STEPS))
    mode = str(rng.choice(["reverse", "forward"], p=[0.8, 0.2]))
    restarted, rate = bool(rng.random() < 0.3), ridge.rate()
    value, grad = ridge.truth(steps, rate)
    call = lambda **k: _unrolled(steps, mode, restarted)(**k)

    def check(result):
        return first(
            near("value", result.value, value, 2e3 * eps(dtype)),
            near("gradient", result.grad, grad, 2e3 * eps(dtype)),
        )

    return Case(call, ridge.arguments | {"rate": jnp.asarray(rate, dtype)}, check, _BATCHES)


@functools.cache
def _adaptive(name: str):
    make = {
        "adam": optax.adam,
        "adamw": optax.adamw,
        "nadam": optax.nadam,
        "lamb": optax.lamb,
        "rmsprop": optax.rmsprop,
        "lion": optax.lion,
    }[name]
    solver = bilevel.unrolled(make(0.05), 3)

    def value(alpha, w0, train, valid):
        w, _ = solver.run(PROBLEM.lower, alpha, w0, solver.init(w0), train)
        return PROBLEM.outer(w, alpha, valid)

    full = bilevel.hypergradient(PROBLEM, solver, diagnostics=False)
    return jax.jit(full), jax.jit(value)


@generates("bilevel.unrolled adaptive optimizers")
def adaptive(rng, dtype) -> Case:
    """Against finite differences; a feature that is always 0 has gradients that are exactly 0."""
    with jax.enable_x64(True):
        return _adaptive_case(rng)


def _adaptive_case(rng) -> Case:
    ridge = Ridge(rng, np.float64)
    ridge.arguments["alpha"] = jnp.maximum(ridge.arguments["alpha"], -3)
    dead = bool(rng.random() < 0.5)
    if dead:
        x, y = ridge.arguments["train"]
        ridge.arguments["train"] = (x.at[:, 0].set(0), y)
        ridge.arguments["w0"] = jax.tree.map(jnp.zeros_like, ridge.arguments["w0"])
    name = str(rng.choice(["adam", "adamw", "nadam", "lamb", "rmsprop", "lion"]))
    call = lambda **k: _adaptive(name)[0](**k)
    arguments = ridge.arguments

    @jax.enable_x64(True)
    def check(result):
        value, alpha = _adaptive(name)[1], np.asarray(arguments["alpha"])
        i, h = int(rng.integers(len(alpha))), 1e-5
        moved = [arguments | {"alpha": jnp.asarray(alpha).at[i].add(s * h)} for s in (1, -1)]
        slope = (float(value(**moved[0])) - float(value(**moved[1]))) / (2 * h)
        off = abs(float(result.grad[i]) - slope)
        allowed = 1e-3 * abs(slope) + 1e-5 * (1 + abs(float(result.value)))
        return that(
            off <= allowed, f"gradient {float(result.grad[i]):.6g}, differences {slope:.6g}"
        )

    return Case(lambda **k: _in_x64(call, k), arguments, check, {"train": "values"})


def _in_x64(call, arguments):
    with jax.enable_x64(True):
        return call(**arguments)


@functools.cache
def _one_step(radius):
    def run(alpha, w0, train, valid, rate):
        solver = bilevel.one_step(optax.sgd(rate), radius=radius)
        return bilevel.hypergradient(PROBLEM, solver, diagnostics=False)(alpha, w0, train, valid)

    return jax.jit(run)


@generates("bilevel.one_step")
def one_step(rng, dtype) -> Case:
    ridge = Ridge(rng, dtype)
    ridge.arguments["w0"] = jax.tree.map(lambda x: x + 1, ridge.arguments["w0"])
    ridge.w0 = ridge.w0 + 1
    radius = [None, 0.01][rng.integers(2)]
    rate = ridge.rate()
    _, grad = ridge.truth(1, rate)
    # The difference of the lower gradients is exact for a quadratic, up to what cancels in it.
    tolerance = 2e3 * eps(dtype) * (1 if radius is None else 1e4)
    call = lambda **k: _one_step(radius)(**k)
    check = lambda r: near("gradient", r.grad, grad, tolerance)
    return Case(call, ridge.arguments | {"rate": jnp.asarray(rate, dtype)}, check, _BATCHES)


@functools.cache
def _closed_form():
    # (x, y) as the batch; a penalty for each weight.
    solver = bilevel.ridge(lambda alpha, x: x * jnp.exp(alpha / 2), lambda alpha: 1e-2)
    loss = lambda w, alpha, batch: (
        0.5 * jnp.sum((batch[0] * jnp.exp(alpha / 2) @ w - batch[1]) ** 2)
    )
    problem = bilevel.Problem(
        lambda w, alpha, batch: loss(w, alpha, batch) + 0.005 * jnp.sum(w**2), loss
    )
    return jax.jit(bilevel.hypergradient(problem, solver))


@generates("bilevel.ridge")
def ridge(rng, dtype) -> Case:
    made = Ridge(rng, dtype)
    arguments = made.arguments | {"w0": jnp.zeros(len(made.w0), dtype)}
    arguments["alpha"] = jnp.clip(arguments["alpha"], -2, 2)
    alpha, (x, y), (u, v) = (
        jax.tree.map(lambda a: np.asarray(a, np.float64), arguments[k])
        for k in ("alpha", "train", "valid")
    )

    def value(alpha):
        s = np.exp(alpha / 2)
        H = (x * s).T @ (x * s) + 1e-2 * np.eye(len(s))
        return 0.5 * np.sum((u * s @ np.linalg.solve(H, (x * s).T @ y) - v) ** 2)

    h = 1e-5
    basis = h * np.eye(len(alpha))
    slopes = [(value(alpha + e) - value(alpha - e)) / (2 * h) for e in basis]
    condition = 1 + np.linalg.norm(x, 2) ** 2 / 1e-2 * 8
    tolerance = max(1e-5, 200 * eps(dtype) * condition)

    def check(result):
        error = np.linalg.norm(np.asarray(result.grad, np.float64) - slopes)
        return first(
            near("value", result.value, value(alpha), tolerance),
            near("gradient", result.grad, slopes, tolerance),
            that(
                not result.info.converged or error <= 0.05 * np.linalg.norm(slopes) + 1e-6,
                f"converged, and off by {error:.1e}",
            ),
        )

    call = lambda **k: _closed_form()(**k)
    kinds = {k: v for k, v in _BATCHES.items() if k != "w0"}
    return Case(call, arguments, check, kinds, extreme=tolerance > 0.1, answer=_answer)
