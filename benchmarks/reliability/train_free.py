"""``ntk.scores``: against their formulas in float64 numpy, on a network of two layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from benchmarks.reliability.case import Case, eps, near
from benchmarks.reliability.kernels import jacobian, mlp, parameters
from benchmarks.reliability.registry import generates, is_covered
from ntk import scores
from ntk.scores import gradient_based, kernel_based
from ntk.scores.registry import builtin_score_names

_N = 4


def _setup(rng, dtype):
    params = parameters(rng, dtype)
    x = jnp.asarray(rng.normal(size=(_N, 3)), dtype)
    y = jnp.asarray(rng.integers(0, 2, _N).astype(np.int32))
    return params, x, y


def _gradients(params, x, y):
    """Of each sample's cross-entropy: [n, parameters] in float64; the Jacobian of the logits."""
    J = jacobian(params, x)
    a, b, X = (np.asarray(v, np.float64) for v in (params["a"], params["b"], x))
    slope = scipy.special.softmax(np.tanh(X @ a) @ b, 1) - np.eye(2)[np.asarray(y)]
    return np.einsum("no,nop->np", slope, J), J


def _leaves(params, g):
    cut = np.size(params["a"])
    return g[..., :cut], g[..., cut:]


def _weights(params):
    return np.concatenate([np.ravel(np.asarray(v, np.float64)) for v in (params["a"], params["b"])])


def _kernel(params, x, y):
    J = jacobian(params, x).sum(1)
    return J @ J.T


def _spectrum(params, x, y):
    return np.linalg.eigvalsh(_kernel(params, x, y))


def _cosines(params, x, y):
    K = _kernel(params, x, y)
    size = np.sqrt(np.diag(K))
    return np.linalg.eigvalsh(K / np.outer(size, size))[0]


def _entropy(params, x, y):
    p = np.maximum(_spectrum(params, x, y), 0)
    return float(scipy.special.entr(p / p.sum()).sum())


def _label_energy(params, x, y):
    targets = np.eye(2)[np.asarray(y)]
    targets -= targets.mean(0)
    return -float(np.sum(targets * np.linalg.solve(_kernel(params, x, y), targets)))


def _mean(params, x, y):
    return _gradients(params, x, y)[0].mean(0)


def _layers(params, x, y):
    return [np.sum(g**2, -1).mean() for g in _leaves(params, jacobian(params, x).sum(1))]


def _zico(params, x, y):
    parts = _gradients(params, x, y)[0].reshape(2, _N // 2, -1).mean(1)
    total = 0.0
    for g in _leaves(params, parts):
        total += np.log(np.sum(abs(g).mean(0) / g.std(0)))
    return total


def _jacov(params, x, y):
    a, b, X = (np.asarray(v, np.float64) for v in (params["a"], params["b"], x))
    g = ((1 - np.tanh(X @ a) ** 2) * b.sum(1)) @ a.T
    values = np.linalg.eigvalsh(np.corrcoef(g)) + 1e-5
    return -np.sum(np.log(values) + 1 / values)


def _synflow(params, x, y):
    a, b = (abs(np.asarray(v, np.float64)) for v in (params["a"], params["b"]))
    u = np.ones(3) @ a
    slope = ((1 - np.tanh(u) ** 2) * b.sum(1)) * a.sum(0)
    return np.log(slope.sum() + (np.tanh(u) @ b).sum())


def _fisher(params, x, y):
    a, b, X = (np.asarray(v, np.float64) for v in (params["a"], params["b"], x))
    u = X @ a
    f = np.tanh(u) @ b
    slope = (scipy.special.softmax(f, 1) - np.eye(2)[np.asarray(y)]) / _N
    hidden = (slope @ b.T) * (1 - np.tanh(u) ** 2)
    return 0.5 * sum(np.mean((s * d) ** 2, 0).sum() for s, d in ((u, hidden), (f, slope)))


def _hessian_gradient(params, x, y):
    """``H g`` by differences of the gradient, which is exact."""
    w, g, h = _weights(params), _mean(params, x, y), 1e-5
    shapes = params["a"].shape, params["b"].shape

    def at(step):
        a, b = _leaves(params, w + step * g)
        moved = {"a": a.reshape(shapes[0]), "b": b.reshape(shapes[1])}
        return _mean(moved, x, y)

    return (at(h) - at(-h)) / (2 * h)


def _grasp(params, x, y):
    return -float(_weights(params) @ _hessian_gradient(params, x, y))


_TRUTHS = {
    "eigen_nas": lambda p, x, y: np.trace(_kernel(p, x, y)) / _N,
    "min_eigenvalue": lambda p, x, y: _spectrum(p, x, y)[0],
    "cosine_min_eigenvalue": _cosines,
    "condition_number": lambda p, x, y: _spectrum(p, x, y)[-1] / _spectrum(p, x, y)[0],
    "te_nas": lambda p, x, y: _spectrum(p, x, y)[-1] / _spectrum(p, x, y)[0],
    "spectral_entropy": _entropy,
    "label_energy": _label_energy,
    "log_traces": lambda p, x, y: np.sum(np.log(_layers(p, x, y))),
    "knas": lambda p, x, y: np.sum(_mean(p, x, y) ** 2),
    "nasi": lambda p, x, y: np.sum(_mean(p, x, y) ** 2),
    "grad_norm": lambda p, x, y: sum(np.linalg.norm(g) for g in _leaves(p, _mean(p, x, y))),
    "snip": lambda p, x, y: np.sum(abs(_weights(p) * _mean(p, x, y))),
    "grasp": _grasp,
    "fisher": _fisher,
    "zico": _zico,
    "jacov": _jacov,
    "synflow": _synflow,
    "l2_norm": lambda p, x, y: sum(np.linalg.norm(np.asarray(v, np.float64)) for v in p.values()),
}
_ILL_CONDITIONED = (
    "condition_number",
    "te_nas",
    "label_energy",
    "jacov",
    "cosine_min_eigenvalue",
    "min_eigenvalue",
    "zico",
)


def _score(name: str, rng, dtype) -> Case:
    params, x, y = _setup(rng, dtype)
    truth = _TRUTHS[name](params, x, y)
    # Relative to the eigenvalue that rounding of the largest one moves.
    values = _spectrum(params, x, y)
    loss = values[-1] / max(values[0], 1e-300) if name in _ILL_CONDITIONED else 10.0
    if name == "grasp":  # a sum whose terms may cancel
        terms = np.abs(_weights(params) * _hessian_gradient(params, x, y)).sum()
        loss = 10 * terms / max(abs(truth), 1e-300)
    # Of the truths: differences, and 1 / (lambda + 1e-5) at eigenvalues that are rounded zeros.
    own = {"grasp": 1e-6, "jacov": 1e-9}.get(name, 0)
    tolerance = 200 * eps(dtype) * loss + own

    def call(params, x, y, apply):
        return getattr(scores, name)(None, apply, params, (x, y))

    check = functools.partial(near, name, expected=truth, tolerance=tolerance)
    kinds = {"params": "tree", "x": "array", "y": "labels", "apply": "function"}
    fine = ("apply: a number", "y: one row more", "x: one axis more")
    # The kernel's scores look at no loss: what labels say is checked only.
    arguments = {"params": params, "x": x, "y": y, "apply": mlp}
    blind = {"synflow": ("params",), "l2_norm": ("params",)}.get(name, ("params", "x"))
    return Case(
        call,
        arguments,
        check,
        kinds,
        blind,
        extreme=tolerance > 0.1,
        fine=fine[:1],
        vmapped=name not in ("fisher",),
    )


for _name in _TRUTHS:
    generates(f"ntk.scores.{_name}")(functools.partial(_score, _name))


def _relu_network(params, x):
    return jax.nn.relu(x @ params["a"]) @ params["b"]


def _relu_by_maximum(params, x):
    return jnp.maximum(x @ params["a"], 0) @ params["b"]


@generates("ntk.scores.naswot", "ntk.scores.regions")
def signs(rng, dtype) -> Case:
    params, x, y = _setup(rng, dtype)
    if rng.random() < 0.3:
        x = x.at[1].set(x[0])
    codes = np.asarray(x @ params["a"]) > 0
    K = (codes[:, None] == codes).sum(-1)
    sign, log = np.linalg.slogdet(K)
    patterns = len(np.unique(codes, axis=0))

    def call(params, x, y, apply):
        return tuple(s(None, apply, params, (x, y)) for s in (scores.naswot, scores.regions))

    def check(r):
        expected = log if patterns == _N and sign > 0 else None
        reasons = [near("regions", r[1], patterns, 0)]
        if expected is not None and np.isfinite(expected) and np.linalg.cond(K) < 1e4:
            reasons.append(near("naswot", r[0], expected, 1e-3))
        return next(filter(None, reasons), "")

    kinds = {"params": "tree", "x": "array", "y": "labels", "apply": "function"}
    apply = _relu_network if rng.random() < 0.7 else _relu_by_maximum
    fine = ("apply: a number", "params: inf", "x: inf")
    arguments = {"params": params, "x": x, "y": y, "apply": apply}
    return Case(call, arguments, check, kinds, ("x",), fine=fine)


@generates("ntk.scores.wrcor")
def responses(rng, dtype) -> Case:
    params, x, y = _setup(rng, dtype)
    a, b, X = (np.asarray(v, np.float64) for v in (params["a"], params["b"], x))
    z = X @ a
    slope = scipy.special.softmax(np.maximum(z, 0) @ b, 1) - np.eye(2)[np.asarray(y)]
    down = (slope @ b.T) * (z > 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        matrices = [abs(np.corrcoef(m)) for m in (z, down)]
    K = sum(m for m in matrices if not np.isnan(m).any())

    def call(params, x, y, apply):
        return scores.wrcor(None, apply, params, (x, y))

    def check(r):
        usual = np.linalg.cond(K) < 1e3
        return near("wrcor", r, np.linalg.slogdet(K)[1], 1e-2) if usual else ""

    kinds = {"params": "tree", "x": "array", "y": "labels", "apply": "function"}
    fine = ("apply: a number", "params: inf", "x: inf")
    arguments = {"params": params, "x": x, "y": y, "apply": _relu_network}
    return Case(call, arguments, check, kinds, ("x",), fine=fine)


def _in_float64(name: str, rng, dtype) -> Case:
    """A score without a formula here, against itself in float64."""
    params, x, y = _setup(rng, dtype)
    score = getattr(scores, name)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), float), (params, x))
        truth = float(score(None, _relu_network, wide[0], (wide[1], y)))

    def call(params, x, y, apply):
        return score(None, apply, params, (x, y))

    def check(value):
        return near(name, value, truth, 1e6 * eps(dtype)) if np.isfinite(truth) else ""

    kinds = {"params": "tree", "x": "array", "y": "labels", "apply": "function"}
    arguments = {"params": params, "x": x, "y": y, "apply": _relu_network}
    return Case(call, arguments, check, kinds, (), fine=("apply: a number",))


def _together(together, judged, rng, dtype) -> Case:
    """Scores by name, for the price of one."""
    params, x, y = _setup(rng, dtype)

    def call(params, x, y, apply):
        return together(None, apply, params, (x, y))

    def check(by_score):
        for name in judged:
            value = by_score[name]
            truth = _kernel if name == "kernel" else _TRUTHS[name]
            if reason := near(name, value, truth(params, x, y), 1e3 * eps(dtype)):
                return reason
        return ""

    kinds = {"params": "tree", "x": "array", "y": "labels", "apply": "function"}
    return Case(
        call,
        {"params": params, "x": x, "y": y, "apply": mlp},
        check,
        kinds,
        ("params", "x"),
        fine=("apply: a number",),
    )


generates("ntk.scores.kernel_based.kernel_scores")(
    functools.partial(
        _together,
        kernel_based.kernel_scores,
        ("eigen_nas", "log_traces", "kernel", "spectral_entropy"),
    )
)
generates("ntk.scores.gradient_based.gradient_scores")(
    functools.partial(_together, gradient_based.gradient_scores, ("grad_norm", "snip"))
)


def _wide(params, x):
    return x @ params["w"]


@generates("ntk.scores.knas_released")
def knas_released(rng, dtype) -> Case:
    w = jnp.asarray(0.1 * rng.normal(size=(30, 2)), dtype)
    x = jnp.asarray(rng.normal(size=(_N, 30)), dtype)
    y = jnp.asarray(rng.integers(0, 2, _N).astype(np.int32))
    X = np.asarray(x, np.float64)
    slope = scipy.special.softmax(X @ np.asarray(w, np.float64), 1) - np.eye(2)[np.asarray(y)]
    g = np.einsum("ni,no->nio", X, slope).reshape(_N, -1)[:, :50]
    halves = [h - h.mean(0) for h in np.split(g, 2)]
    truth = np.sum(halves[0] * halves[1]) / _N**2

    def call(params, x, y, apply):
        return scores.knas_released(None, apply, params, (x, y))

    kinds = {"params": "tree", "x": "array", "y": "labels", "apply": "function"}
    check = lambda r: near("score", r, truth, 1e4 * eps(dtype))
    return Case(
        call,
        {"params": {"w": w}, "x": x, "y": y, "apply": _wide},
        check,
        kinds,
        ("params", "x"),
        fine=("apply: a number",),
    )


for _name in builtin_score_names():
    if not is_covered(f"ntk.scores.{_name}"):
        generates(f"ntk.scores.{_name}")(functools.partial(_in_float64, _name))
