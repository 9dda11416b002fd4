"""``ntk``: infinite and finite kernels, eigenvalues and their certificates, regression."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import ntk
from reliability.case import Case, at_most, eps, first, near, that
from reliability.registry import generates

# Everything that the documentation says may be an activation.
_SMOOTH = {"sigmoid": ntk.sigmoid, "tanh": ntk.tanh, "swish": ntk.swish, "gelu": ntk.gelu,
           "erf": ntk.erf}  # fmt: skip
_KINKED = {"relu": ntk.relu, "identity": ntk.identity, "leaky_relu": ntk.leaky_relu(0.1)}
_FUNCTIONS = {
    "softplus": jax.nn.softplus,
    "sin": jnp.sin,
    "sin(3z)": lambda z: jnp.sin(3 * z),
    "tanh(20(z - 1/2))": lambda z: jnp.tanh(20 * (z - 0.5)),
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "hard tanh": jax.nn.hard_tanh,
    "relu6": jax.nn.relu6,
    "hard swish": jax.nn.hard_swish,
    "hard sigmoid": jax.nn.hard_sigmoid,
    "soft sign": jax.nn.soft_sign,
    "relu squared": lambda z: jnp.maximum(z, 0) ** 2,
    "shifted relu": lambda z: jnp.maximum(z - 0.3, 0),
    "clip": lambda z: jnp.clip(z, -0.7, 0.4),
    "abs": jnp.abs,
}
_ALL = _SMOOTH | _KINKED | _FUNCTIONS
_NODES = np.linspace(-12, 12, 4801)


def inputs(rng, dtype, rows=(2, 4)) -> jnp.ndarray:
    """Rows of any norms; now and then two that are equal, opposite or nearly so."""
    n, d = int(rng.choice(rows)), 3
    x = rng.normal(size=(n, d)) * 10 ** rng.uniform(-1, 0.5)
    kind = rng.integers(5)
    if kind == 1:
        x[1] = x[0]
    elif kind == 2:
        x[1] = -x[0]
    elif kind == 3:
        x[1] = x[0] * (1 + 10 ** rng.uniform(-7, -2)) + 10 ** rng.uniform(-7, -3) * rng.normal(size=d)
    elif kind == 4:
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    return jnp.asarray(x, dtype)


# ----------------------------------------------------------------------------- duals by brute force


def _expectation(f, g, vx: float, vy: float, c: float) -> float:
    """``E[f(u) g(u')]`` by the trapezoid rule in two dimensions, float64 numpy on JAX's functions."""
    sx, sy = np.sqrt(vx), np.sqrt(vy)
    rho = np.clip(c / (sx * sy), -1, 1) if sx * sy > 0 else 0.0
    z = _NODES[::4]
    weight = np.exp(-(z**2) / 2)
    weight /= weight.sum()
    u = sx * z
    v = sy * (rho * z[:, None] + np.sqrt(max(1 - rho**2, 0.0)) * z)
    return float(weight @ np.asarray(f(u)) * 0 + (weight * np.asarray(f(u))) @ (np.asarray(g(v)) @ weight))


@functools.cache
def _in_numpy(name: str):
    fn = _ALL[name]
    return jax.jit(lambda z: fn(z) + 0.0 * z)


def _numeric(name: str):
    def evaluate(z):
        with jax.enable_x64(True):
            return np.asarray(_in_numpy(name)(jnp.asarray(z, jnp.float64)))

    return evaluate


@generates("ntk.dual")
def dual(rng, dtype) -> Case:
    a, b = (str(rng.choice(list(_SMOOTH | _KINKED))) for _ in range(2))
    x = rng.normal(size=(2, 3)) * 10 ** rng.uniform(-1, 0.5)
    kind = rng.integers(4)
    if kind == 0:
        x[1] = x[0] * rng.choice([-1, 1])
    cov = np.asarray(x @ x.T, dtype)
    vx, vy, c = (jnp.asarray(v) for v in (cov[0, 0], cov[1, 1], cov[0, 1]))
    limit = float(np.sqrt(cov[0, 0]) * np.sqrt(cov[1, 1]))
    c = jnp.clip(c, -limit, limit)
    truth = _expectation(_numeric(a), _numeric(b), *(float(v) for v in (vx, vy, c)))
    # What the brute force cannot see: a kink between its nodes, and the rounding of c near 1.
    scale = max(1.0, float(vx), float(vy))
    check = lambda r: that(  # noqa: E731
        abs(float(r) - truth) <= (2e-4 + 20 * np.sqrt(eps(dtype))) * scale,
        f"{a}, {b}: expected {truth:.8g}, got {float(r):.8g}",
    )
    call = functools.partial(ntk.dual, _ALL[a], _ALL[b])
    kinds = {"vx": "positive", "vy": "positive", "c": "finite"}
    fine = ("vx: zero", "vy: zero")
    return Case(call, {"vx": vx, "vy": vy, "c": c}, check, kinds, ("vx", "vy", "c"),
                fine=(*fine, "c: a text"))  # fmt: skip


def _recursion(names, x, skips, variances) -> np.ndarray:
    """The NTK of Zhu Eq. (1) by brute-force expectations, one pair at a time."""
    x = np.asarray(x, np.float64)
    n = len(x)
    K = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            K[i, j] = _pair(names, x[i], x[j], variances)
    return K


def _pair(names, x, y, variances) -> float:
    vx, vy, c = x @ x * variances[0], y @ y * variances[0], x @ y * variances[0]
    theta = c
    for layer, name in enumerate(names):
        s = _numeric(name)
        slope = _slope(name)
        gain = variances[layer + 1]
        values = [gain * _expectation(s, s, *v) for v in ((vx, vx, vx), (vy, vy, vy), (vx, vy, c))]
        theta = gain * _expectation(slope, slope, vx, vy, c) * theta + values[2]
        vx, vy, c = values
    return theta


@functools.cache
def _slope(name: str):
    grad = jax.jit(jax.vmap(jax.grad(lambda z: _ALL[name](z) + 0.0 * z)))

    def evaluate(z):
        with jax.enable_x64(True):
            z = np.asarray(z)
            return np.asarray(grad(jnp.asarray(z.ravel(), jnp.float64))).reshape(z.shape)

    return evaluate


def _kernel_options(rng):
    depth = int(rng.choice([1, 2]))
    names = [str(rng.choice(list(_SMOOTH | _KINKED))) for _ in range(depth)]
    return names, [1.0, *[2.0] * depth]


@generates("ntk.network_kernel", "ntk.relu", "ntk.leaky_relu", "ntk.sigmoid", "ntk.tanh",
           "ntk.swish", "ntk.gelu", "ntk.erf", "ntk.identity")  # fmt: skip
def network_kernel(rng, dtype) -> Case:
    names, variances = _kernel_options(rng)
    x = inputs(rng, dtype, rows=(3,))
    truth = _recursion(names, x, None, variances)
    size = abs(truth).max()

    def call(x, activations, skips, variances):
        return ntk.network_kernel(x, activations=activations, skips=skips, variances=variances).ntk

    def check(K):
        K = np.asarray(K, np.float64)
        allowed = (3e-3 if dtype == np.float64 else 1e-2) * size  # of the brute force
        worst = np.nanmax(abs(K - truth)) if np.isfinite(K).any() else np.inf
        unresolved = int((~np.isfinite(K)).sum())
        return first(
            that(worst <= allowed, f"{names}: off by {worst / size:.1e} of the largest entry"),
            that(unresolved == 0, f"{names}: {unresolved} of {K.size} entries not finite"),
            near("its transpose", K, K.T, 100 * eps(dtype)),
        )

    kinds = {"x": "array", "skips": "array?", "variances": "array?", "activations": "sequence"}
    arguments = {"x": x, "activations": [_ALL[n] for n in names], "skips": None, "variances": None}
    kinds = {k: v for k, v in kinds.items() if arguments[k] is not None}
    return Case(call, arguments, check, kinds, ("x",))


@generates("ntk.network_kernel with any activation", "ntk.activation")
def any_activation(rng, dtype) -> Case:
    """What the documentation lists, on ordinary inputs: near the brute force, or refused."""
    name = str(rng.choice(list(_FUNCTIONS)))
    x = inputs(rng, dtype, rows=(3,))
    truth = _recursion([name], x, None, [1.0, 2.0])
    size = abs(truth).max()

    def call(x, fn):
        return ntk.network_kernel(x, activations=[ntk.activation(fn)]).ntk

    def check(K):
        worst = np.max(abs(np.asarray(K, np.float64) - truth)) / size
        return that(worst <= 5e-3, f"{name}: off by {worst:.1e} of the largest entry")

    fine = ("fn: a number", "fn: an array")
    return Case(call, {"x": x, "fn": _FUNCTIONS[name]}, check, {"fn": "function"}, ("x",),
                extreme=True, fine=() and fine)  # fmt: skip


@generates("ntk.network_kernel of two sets of inputs")
def cross_kernel(rng, dtype) -> Case:
    """Test points among the training points: the same entries as the symmetric kernel's."""
    names, _ = _kernel_options(rng)
    x = inputs(rng, dtype, rows=(4,))
    activations = [_ALL[n] for n in names]
    with jax.enable_x64(True):
        whole = ntk.network_kernel(jnp.asarray(x, jnp.float64), activations=activations)
    call = lambda x, x2: ntk.network_kernel(x, x2, activations=activations)  # noqa: E731
    size = np.asarray(whole.ntk)
    rounding = 2e-6 if dtype == np.float64 else 5e-3  # an angle near 0 keeps half the digits
    check = lambda r: first(  # noqa: E731
        near(f"{names} nngp", r.nngp, np.asarray(whole.nngp)[:, 1:3], rounding),
        near(f"{names} ntk", r.ntk, size[:, 1:3], 50 * rounding if _kinks(names) else rounding),
    )
    return Case(call, {"x": x, "x2": x[1:3]}, check, {"x": "array", "x2": "array?"}, ("x", "x2"))


def _kinks(names) -> bool:
    return any(name in _KINKED for name in names)


@generates("ntk.lemma1_kernel_as_printed")
def lemma1(rng, dtype) -> Case:
    names, _ = _kernel_options(rng)
    x = inputs(rng, dtype, rows=(3,))
    x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    activations = [_ALL[n] for n in names]
    truth = ntk.network_kernel(x, activations=activations).ntk  # without skips it is right
    call = lambda x, activations: ntk.lemma1_kernel_as_printed(x, activations=activations).ntk  # noqa: E731
    check = lambda r: near("kernel", r, truth, 1e-6 if dtype == np.float64 else 5e-3)  # noqa: E731
    kinds = {"x": "array", "activations": "sequence"}
    return Case(call, {"x": x, "activations": activations}, check, kinds, ("x",))


@generates("ntk.mixture_blocks", "ntk.mixture_kernel")
def mixture(rng, dtype) -> Case:
    names = list(rng.choice(list(_SMOOTH | _KINKED), size=2, replace=False))
    x = inputs(rng, dtype, rows=(3,))
    alpha = jnp.asarray(rng.dirichlet(np.ones(2)), dtype)
    functions = [_slope(str(n)) for n in names]
    X, a = np.asarray(x, np.float64), np.asarray(alpha, np.float64)
    truth = np.zeros((3, 3))
    for i, j in np.ndindex(3, 3):
        v = X[i] @ X[i], X[j] @ X[j], X[i] @ X[j]
        pairs = [[_expectation(f, g, *v) for g in functions] for f in functions]
        truth[i, j] = v[2] * (a @ np.array(pairs) @ a)

    def call(x, alpha, activations):
        return ntk.mixture_kernel(alpha, ntk.mixture_blocks(x, activations))

    size = abs(truth).max()
    check = lambda K: that(  # noqa: E731
        np.max(abs(np.asarray(K, np.float64) - truth)) <= 1e-2 * size,
        f"{names}: off by {np.max(abs(np.asarray(K) - truth)) / size:.1e}",
    )
    kinds = {"x": "array", "alpha": "array", "activations": "sequence"}
    arguments = {"x": x, "alpha": alpha, "activations": [_ALL[str(n)] for n in names]}
    return Case(call, arguments, check, kinds, ("x", "alpha"))


# ----------------------------------------------------------------------------- finite networks


def mlp(params, x):
    """Two layers, two outputs."""
    return jnp.tanh(x @ params["a"]) @ params["b"]


def parameters(rng, dtype, width=4):
    a, b = rng.normal(size=(3, width)), rng.normal(size=(width, 2))
    return {"a": jnp.asarray(a, dtype), "b": jnp.asarray(b, dtype)}


def jacobian(params, x) -> np.ndarray:
    """[n, outputs, parameters] in float64, by hand."""
    a, b, x = (np.asarray(v, np.float64) for v in (params["a"], params["b"], x))
    hidden = np.tanh(x @ a)
    rows = []
    for o in range(b.shape[1]):
        first_layer = np.einsum("ni,nk->nik", x, (1 - hidden**2) * b[:, o])
        second = np.zeros((len(x), *b.shape))
        second[:, :, o] = hidden
        rows.append(np.concatenate([first_layer.reshape(len(x), -1), second.reshape(len(x), -1)], 1))
    return np.stack(rows, 1)


@generates("ntk.empirical_kernel", "ntk.gradient_norms", "ntk.kernel_vector_product")
def empirical_kernel(rng, dtype) -> Case:
    params = parameters(rng, dtype)
    x = jnp.asarray(rng.normal(size=(3, 3)) * 10 ** rng.uniform(-2, 1), dtype)
    outputs = str(rng.choice(["sum", "trace", "full"]))
    J = jacobian(params, x)
    full = np.einsum("nop,mqp->nmoq", J, J)
    K = {"full": full, "trace": np.einsum("nmoo->nm", full), "sum": full.sum((2, 3))}[outputs]

    def call(params, x, apply, method, outputs, batch_size):
        options = {"method": method, "outputs": outputs, "batch_size": batch_size}
        kernel = ntk.empirical_kernel(apply, params, x, **options)
        norms = ntk.gradient_norms(apply, params, x, outputs="trace")
        product = ntk.kernel_vector_product(apply, params, x)(jnp.ones(3, dtype))
        return kernel, norms, product

    def check(r):
        return first(
            near("kernel", r[0], K, 100 * eps(dtype)),
            near("product", r[2], full.sum((2, 3)).sum(1), 300 * eps(dtype)),
        )

    kinds = {"params": "tree", "x": "array", "apply": "function", "method": "name",
             "outputs": "name", "batch_size": "count?"}  # fmt: skip
    arguments = {"params": params, "x": x, "apply": mlp, "method": "auto", "outputs": outputs,
                 "batch_size": None}  # fmt: skip
    kinds = {k: v for k, v in kinds.items() if arguments[k] is not None}
    fine = ("apply: a number", "x: one axis more")
    return Case(call, arguments, check, kinds, ("params", "x"), fine=fine)


# ----------------------------------------------------------------------------- eigenvalues


def matrix(rng, dtype, sizes=(1, 3, 8, 70)) -> jnp.ndarray:
    """Symmetric: definite, singular, indefinite, clustered, of any scale."""
    n = int(rng.choice(sizes, p=np.array([4, 7, 7, 2])[: len(sizes)] / sum([4, 7, 7, 2][: len(sizes)])))
    q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    kind = rng.integers(5)
    values = 10 ** rng.uniform(-rng.uniform(0, 12), 0, n)
    if kind == 1:
        values[: n // 2] = 0
    elif kind == 2:
        values = rng.normal(size=n)
    elif kind == 3:
        values = 1 + 1e-9 * rng.normal(size=n)
    K = ((q * values) @ q.T * 10 ** rng.uniform(-20 if dtype == np.float64 else -6, 6)).astype(dtype)
    return jnp.asarray((K + K.T) / 2)


@generates("ntk.min_eigenvalue", "ntk.smallest_eigenpair", "ntk.eigenvalues")
def min_eigenvalue(rng, dtype) -> Case:
    K = matrix(rng, dtype)
    truth = np.linalg.eigvalsh(np.asarray(K, np.float64))
    size, n = abs(truth).max(), len(K)
    rounding = 50 * n * eps(dtype) * size

    def call(K):
        return ntk.min_eigenvalue(K), ntk.smallest_eigenpair(K), ntk.eigenvalues(K)

    def check(r):
        value, pair, values = r
        residual = np.asarray(K, np.float64) @ pair.vector - float(pair.value) * np.asarray(pair.vector)
        return first(
            that(abs(float(value) - truth[0]) <= rounding, f"expected {truth[0]:.8g}, got {value}"),
            at_most("residual", np.linalg.norm(residual), float(pair.residual) + rounding),
            near("eigenvalues", values, truth, 50 * n * eps(dtype)),
        )

    return Case(call, {"K": K}, check, {"K": "matrix"}, ("K",))


@generates("ntk.min_eigenvalue of a product")
def min_eigenvalue_of_a_product(rng, dtype) -> Case:
    K = matrix(rng, dtype, sizes=(1, 3, 8))
    truth = np.linalg.eigvalsh(np.asarray(K, np.float64))

    def call(K, size):
        return ntk.smallest_eigenpair(lambda v: K @ v, size=size)

    def check(pair):
        slack = float(pair.residual) + 200 * len(K) * eps(dtype) * abs(truth).max()
        off = abs(float(pair.value) - truth).min()
        return that(off <= slack, f"no eigenvalue within {slack:.1e} of {float(pair.value):.8g}")

    kinds = {"K": "values", "size": "count"}
    arguments = {"K": K, "size": len(K)}
    return Case(call, arguments, check, kinds, ("K",), vmapped=False)


@generates("ntk.certified_min_eigenvalue")
def certified_min_eigenvalue(rng, dtype) -> Case:
    K = np.asarray(matrix(rng, dtype))
    n = len(K)
    error = float(rng.choice([0.0, 1e-3]) * abs(K).max())
    truth = np.linalg.eigvalsh(K.astype(np.float64))
    rounding = 4 * n * eps(np.float64) * abs(truth).max()
    # The worst of the kernels that near, or one of them: a bound of all is one of it.
    moved = K.astype(np.float64) + error * np.where(rng.random((n, n)) < 0.5, 1, -1)
    worst = min(truth[0] - n * error * 0, np.linalg.eigvalsh((moved + moved.T) / 2)[0])

    def check(bound):
        return first(
            at_most("bound and eigenvalue", bound, min(worst, truth[0]) + rounding),
            at_most("how far below", truth[0] - n * error - bound,
                    4e-15 * (n + 10) * (np.trace(abs(K)) + n * abs(K).max())),
        )  # fmt: skip

    kinds = {"K": "matrix", "entry_error": "nonnegative"}
    return Case(ntk.certified_min_eigenvalue, {"K": K, "entry_error": error}, check, kinds)


@generates("ntk.certify_simplex")
def certify_simplex(rng, dtype) -> Case:
    h, n, p = int(rng.choice([1, 2, 3])), int(rng.choice([2, 4])), int(rng.choice([2, 6]))
    phi = rng.normal(size=(h, n, p)) * 10 ** rng.uniform(-3, 3)
    if rng.random() < 0.2 and h > 1:
        phi[1] = -phi[0]
    blocks = np.einsum("iap,jbp->ijab", phi, phi).astype(dtype)
    alphas = np.vstack([np.eye(h), rng.dirichlet(np.ones(h), 200)])
    kernels = np.einsum("mi,ijab,mj->mab", alphas, blocks.astype(np.float64), alphas)
    values = np.linalg.eigvalsh((kernels + kernels.swapaxes(1, 2)) / 2)
    size = abs(values).max()
    rounding = 20 * n * eps(np.float64) * size

    def check(found):
        a = np.asarray(found.argmin)
        at = np.linalg.eigvalsh(np.einsum("i,ijab,j->ab", a, blocks.astype(np.float64), a))[0]
        return first(
            at_most("lower end and brute force", found.lower, values[:, 0].min() + rounding),
            at_most("value at argmin", at, found.upper + rounding),
            at_most("ends", found.lower, found.upper),
            near("sum of argmin", a.sum(), 1.0, 1e-9),
            # Blocks of Gram matrices: no mixture is indefinite, so 0 is a bound that costs nothing.
            at_most("a width that 0 would give", -found.lower, 1e-3 * size),
        )

    kinds = {"blocks": "array", "rtol": "fraction", "entry_error": "nonnegative",
             "max_cells": "count"}  # fmt: skip
    arguments = {"blocks": blocks, "rtol": 1e-3, "entry_error": 0.0, "max_cells": 200}
    return Case(ntk.certify_simplex, arguments, check, kinds)


# ----------------------------------------------------------------------------- with a kernel


def _regression(rng, dtype):
    n = int(rng.choice([1, 3, 8]))
    q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    values = 10 ** rng.uniform(-3, 0, n) * 10 ** rng.uniform(-3, 3)
    K = ((q * values) @ q.T).astype(dtype)
    y = rng.normal(size=(n,) if rng.random() < 0.5 else (n, 2)).astype(dtype)
    return jnp.asarray((K + K.T) / 2), jnp.asarray(y), 1e3 * 50 * eps(dtype)


@generates("ntk.kernel_regression", "ntk.excess_risk_term")
def kernel_regression(rng, dtype) -> Case:
    K, y, rounding = _regression(rng, dtype)
    penalty = float(rng.choice([0.0, 0.1]))
    A, t = np.asarray(K, np.float64), np.asarray(y, np.float64)
    regular = A + penalty * np.eye(len(A))
    w = np.linalg.solve(regular, t)
    left_out = w / np.diag(np.linalg.inv(regular)).reshape(-1, *[1] * (t.ndim - 1))
    quadratic = float(np.sum(t * np.linalg.solve(A, t)))

    def call(K, y, penalty):
        fit = ntk.kernel_regression(K, y, penalty=penalty)
        return fit.predict(K), fit.leave_one_out(), ntk.excess_risk_term(K, y)

    def check(r):
        return first(
            near("predictions", r[0], A @ w, rounding),
            near("leave one out", r[1], left_out, rounding),
            near("y'K^-1 y", r[2].quadratic, quadratic, rounding),
        )

    kinds = {"K": "matrix", "y": "rows", "penalty": "nonnegative"}
    return Case(call, {"K": K, "y": y, "penalty": penalty}, check, kinds, ("K", "y"))


@generates("ntk.gradient_flow")
def gradient_flow(rng, dtype) -> Case:
    K, y, rounding = _regression(rng, dtype)
    size = float(np.linalg.norm(np.asarray(K), 2))
    t = float(rng.choice([0.0, 0.1, 1.0, 10.0, np.inf])) / size
    values, vectors = np.linalg.eigh(np.asarray(K, np.float64))
    decay = np.exp(-t * values) if np.isfinite(t) else np.zeros(len(values))
    truth = vectors @ ((1 - decay).reshape(-1, *[1] * (y.ndim - 1)) * (vectors.T @ np.asarray(y)))
    check = lambda r: near("predictions", r, truth, rounding)  # noqa: E731
    kinds = {"K": "matrix", "y": "rows", "t": "nonnegative"}
    call = lambda K, y, t: ntk.gradient_flow(K, y, t)  # noqa: E731
    return Case(call, {"K": K, "y": y, "t": t}, check, kinds, ("K", "y"))


@generates("ntk.leaky_relu options")
def leaky_relu(rng, dtype) -> Case:
    slope = float(rng.normal())
    z = np.array([-2.0, 0.0, 3.0])
    call = lambda slope: ntk.leaky_relu(slope)(jnp.asarray(z))  # noqa: E731
    check = lambda r: near("values", r, np.where(z > 0, z, slope * z), 4 * eps(np.float32))  # noqa: E731
    return Case(call, {"slope": slope}, check, {"slope": "finite"})


@generates("ntk.activation options", "ntk.Activation")
def activation(rng, dtype) -> Case:
    name = str(rng.choice(list(_SMOOTH)))
    z = jnp.asarray(rng.normal(size=4), dtype)

    def call(fn, name, strip):
        made = ntk.activation(fn, name=name, strip=strip)
        return made(z), made.derivative(z)

    truth = _numeric(name)(z), _slope(name)(np.asarray(z))
    check = lambda r: near("values", r, truth, 50 * eps(dtype))  # noqa: E731
    kinds = {"fn": "function", "strip": "above zero"}
    fn = functools.partial(lambda made, z: made(z), _SMOOTH[name])
    return Case(call, {"fn": fn, "name": name, "strip": 1.5}, check, kinds)
