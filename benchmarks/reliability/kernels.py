"""``ntk``: infinite and finite kernels, eigenvalues and their certificates, regression."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import ntk
from benchmarks.reliability.case import Case, eps, first, near, that
from benchmarks.reliability.registry import generates
from ntk.empirical.kernels import gradient_norms

# Everything that the documentation says may be an activation.
SMOOTH = {
    "sigmoid": ntk.sigmoid,
    "tanh": ntk.tanh,
    "swish": ntk.swish,
    "gelu": ntk.gelu,
    "erf": ntk.erf,
}
KINKED = {"relu": ntk.relu, "identity": ntk.identity, "leaky_relu": ntk.leaky_relu(0.1)}
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
ALL = SMOOTH | KINKED | _FUNCTIONS
_NODES = np.linspace(-8.5, 8.5, 680)  # 0.025 apart, 0 in the middle of two: steps are halved


def inputs(rng, dtype, rows=(2, 4)) -> jnp.ndarray:
    """Rows of any norms; now and then two that are equal, opposite or nearly so."""
    n, d = int(rng.choice(rows)), 3
    x = rng.normal(size=(n, d)) * 10 ** rng.uniform(-1, 0.3)
    x *= np.minimum(1, 4 / np.linalg.norm(x, axis=1, keepdims=True))
    kind = rng.integers(5)
    if kind == 1:
        x[1] = x[0]
    elif kind == 2:
        x[1] = -x[0]
    elif kind == 3:
        x[1] = x[0] * (1 + 10 ** rng.uniform(-7, -2)) + 10 ** rng.uniform(-7, -3) * rng.normal(
            size=d
        )
    elif kind == 4:
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    return jnp.asarray(x, dtype)


# ----------------------------------------------------------------------------- duals by brute force


def expectation(f, g, vx: float, vy: float, c: float) -> float:
    """``E[f(u) g(u')]`` by the trapezoid rule in two dimensions, in float64."""
    sx, sy = np.sqrt(vx), np.sqrt(vy)
    rho = np.clip(c / (sx * sy), -1, 1) if sx * sy > 0 else 0.0
    z = _NODES
    weight = np.exp(-(z**2) / 2)
    weight /= weight.sum()
    u = sx * z
    v = sy * (rho * z[:, None] + np.sqrt(max(1 - rho**2, 0.0)) * z)
    return float((weight * np.asarray(f(u))) @ (np.asarray(g(v)) @ weight))


@functools.cache
def _compiled(name: str):
    fn = ALL[name]
    return jax.jit(lambda z: fn(z) + 0.0 * z)


def in_numpy(name: str):
    def evaluate(z):
        with jax.enable_x64(True):
            return np.asarray(_compiled(name)(jnp.asarray(z, jnp.float64)))

    return evaluate


@generates("ntk.dual")
def dual(rng, dtype) -> Case:
    a, b = (str(rng.choice(list(SMOOTH | KINKED))) for _ in range(2))
    x = rng.normal(size=(2, 3)) * 10 ** rng.uniform(-1, 0.5)
    kind = rng.integers(4)
    if kind == 0:
        x[1] = x[0] * rng.choice([-1, 1])
    cov = np.asarray(x @ x.T, dtype)
    vx, vy, c = (jnp.asarray(v) for v in (cov[0, 0], cov[1, 1], cov[0, 1]))
    limit = float(np.sqrt(cov[0, 0]) * np.sqrt(cov[1, 1]))
    c = jnp.clip(c, -limit, limit)
    truth = expectation(in_numpy(a), in_numpy(b), *(float(v) for v in (vx, vy, c)))
    # What the brute force cannot see: a kink between its nodes, and the rounding of c near 1.
    scale = max(1.0, float(vx), float(vy))
    check = lambda r: that(
        abs(float(r) - truth) <= (2e-4 + 20 * np.sqrt(eps(dtype))) * scale,
        f"{a}, {b}: expected {truth:.8g}, got {float(r):.8g}",
    )
    call = functools.partial(ntk.dual, ALL[a], ALL[b])
    kinds = {"vx": "positive", "vy": "positive", "c": "finite"}
    fine = ("vx: zero", "vy: zero")
    return Case(
        call,
        {"vx": vx, "vy": vy, "c": c},
        check,
        kinds,
        ("vx", "vy", "c"),
        fine=(*fine, "c: a text"),
    )


def _recursion(names, x, variances) -> np.ndarray:
    """The NTK of Zhu Eq. (1) by brute-force expectations, one pair at a time."""
    x = np.asarray(x, np.float64)
    n = len(x)
    K = np.zeros((n, n))
    for i in range(n):
        for j in range(i, n):
            K[i, j] = K[j, i] = _pair(names, x[i], x[j], variances)
    return K


def _pair(names, x, y, variances) -> float:
    vx, vy, c = x @ x * variances[0], y @ y * variances[0], x @ y * variances[0]
    theta = c
    for layer, name in enumerate(names):
        s = in_numpy(name)
        slope = slope_in_numpy(name)
        gain = variances[layer + 1]
        values = [gain * expectation(s, s, *v) for v in ((vx, vx, vx), (vy, vy, vy), (vx, vy, c))]
        theta = gain * expectation(slope, slope, vx, vy, c) * theta + values[2]
        vx, vy, c = values
    return theta


@functools.cache
def slope_in_numpy(name: str):
    grad = jax.jit(jax.vmap(jax.grad(lambda z: ALL[name](z) + 0.0 * z)))

    def evaluate(z):
        with jax.enable_x64(True):
            z = np.asarray(z)
            return np.asarray(grad(jnp.asarray(z.ravel(), jnp.float64))).reshape(z.shape)

    return evaluate


def _kernel_options(rng):
    depth = int(rng.choice([1, 2]))
    names = [str(rng.choice(list(SMOOTH | KINKED))) for _ in range(depth)]
    return names, [1.0, *[2.0] * depth]


@generates(
    "ntk.network_kernel",
    "ntk.relu",
    "ntk.leaky_relu",
    "ntk.sigmoid",
    "ntk.tanh",
    "ntk.swish",
    "ntk.gelu",
    "ntk.erf",
    "ntk.identity",
)
def network_kernel(rng, dtype) -> Case:
    names, variances = _kernel_options(rng)
    x = inputs(rng, dtype, rows=(3,))
    truth = _recursion(names, x, variances)
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
    arguments = {"x": x, "activations": [ALL[n] for n in names], "skips": None, "variances": None}
    kinds = {k: v for k, v in kinds.items() if arguments[k] is not None}
    return Case(call, arguments, check, kinds, ("x",))


@generates("ntk.network_kernel with any activation", "ntk.activation")
def any_activation(rng, dtype) -> Case:
    """What the documentation lists, on ordinary inputs: near the brute force, or refused."""
    name = str(rng.choice(list(_FUNCTIONS)))
    x = inputs(rng, dtype, rows=(3,))
    x = x / jnp.maximum(1, jnp.linalg.norm(x, axis=1, keepdims=True))
    truth = _recursion([name], x, [1.0, 2.0])
    # Where nearly all inputs are below a kink the kernel is tiny, and the trapezoid rule, which
    # knows a jump of the slope to one node, is a few percent off.
    size = max(abs(truth).max(), 0.1 * float(jnp.max(jnp.sum(x**2, axis=1))))

    def call(x, fn):
        return ntk.network_kernel(x, activations=[ntk.activation(fn)]).ntk

    def check(K):
        worst = np.max(abs(np.asarray(K, np.float64) - truth)) / size
        return that(worst <= 1e-2, f"{name}: off by {worst:.1e} of the largest entry")

    return Case(
        call, {"x": x, "fn": _FUNCTIONS[name]}, check, {"fn": "function"}, ("x",), extreme=True
    )


@generates("ntk.network_kernel of two sets of inputs")
def cross_kernel(rng, dtype) -> Case:
    """Test points among the training points: the same entries as the symmetric kernel's."""
    names, _ = _kernel_options(rng)
    x = inputs(rng, dtype, rows=(4,))
    activations = [ALL[n] for n in names]
    with jax.enable_x64(True):
        whole = ntk.network_kernel(jnp.asarray(x, jnp.float64), activations=activations)
    call = lambda x, x2: ntk.network_kernel(x, x2, activations=activations)
    size = np.asarray(whole.ntk)
    rounding = 2e-6 if dtype == np.float64 else 5e-3  # an angle near 0 keeps half the digits

    def check(r):
        # What the traced program's fixed resolution cannot tell is NaN, and its error infinite.
        known = np.isfinite(np.asarray(r.error))
        nngp, slopes = (np.where(known, np.asarray(k)[:, 1:3], np.nan) for k in (whole.nngp, size))
        return first(
            near(f"{names} nngp", r.nngp, nngp, rounding),
            near(f"{names} ntk", r.ntk, slopes, 50 * rounding if _kinks(names) else rounding),
        )

    return Case(call, {"x": x, "x2": x[1:3]}, check, {"x": "array", "x2": "array?"}, ("x", "x2"))


def _kinks(names) -> bool:
    return any(name in KINKED for name in names)


@generates("ntk.lemma1_kernel_as_printed")
def lemma1(rng, dtype) -> Case:
    names, _ = _kernel_options(rng)
    x = inputs(rng, dtype, rows=(3,))
    x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    activations = [ALL[n] for n in names]
    truth = ntk.network_kernel(x, activations=activations).ntk  # without skips it is right
    call = lambda x, activations: ntk.lemma1_kernel_as_printed(x, activations=activations).ntk
    check = lambda r: near("kernel", r, truth, 1e-6 if dtype == np.float64 else 5e-3)
    kinds = {"x": "array", "activations": "sequence"}
    return Case(call, {"x": x, "activations": activations}, check, kinds, ("x",))


@generates("ntk.mixture_blocks", "ntk.mixture_kernel")
def mixture(rng, dtype) -> Case:
    names = list(rng.choice(list(SMOOTH | KINKED), size=2, replace=False))
    x = inputs(rng, dtype, rows=(3,))
    alpha = jnp.asarray(rng.dirichlet(np.ones(2)), dtype)
    functions = [slope_in_numpy(str(n)) for n in names]
    X, a = np.asarray(x, np.float64), np.asarray(alpha, np.float64)
    truth = np.zeros((3, 3))
    for i, j in np.ndindex(3, 3):
        v = X[i] @ X[i], X[j] @ X[j], X[i] @ X[j]
        pairs = [[expectation(f, g, *v) for g in functions] for f in functions]
        truth[i, j] = v[2] * (a @ np.array(pairs) @ a)

    def call(x, alpha, activations):
        return ntk.mixture_kernel(alpha, ntk.mixture_blocks(x, activations))

    size = abs(truth).max()
    check = lambda K: that(
        np.max(abs(np.asarray(K, np.float64) - truth)) <= 1e-2 * size,
        f"{names}: off by {np.max(abs(np.asarray(K) - truth)) / size:.1e}",
    )
    kinds = {"x": "array", "alpha": "array", "activations": "sequence"}
    arguments = {"x": x, "alpha": alpha, "activations": [ALL[str(n)] for n in names]}
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
        rows.append(
            np.concatenate([first_layer.reshape(len(x), -1), second.reshape(len(x), -1)], 1)
        )
    return np.stack(rows, 1)


@generates(
    "ntk.empirical_kernel", "ntk.empirical.kernels.gradient_norms", "ntk.kernel_vector_product"
)
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
        norms = gradient_norms(apply, params, x, outputs="trace")
        product = ntk.kernel_vector_product(apply, params, x)(jnp.ones(3, dtype))
        return kernel, norms, product

    def check(r):
        return first(
            near("kernel", r[0], K, 100 * eps(dtype)),
            near("product", r[2], full.sum((2, 3)).sum(1), 300 * eps(dtype)),
        )

    kinds = {
        "params": "tree",
        "x": "array",
        "apply": "function",
        "method": "name",
        "outputs": "name",
        "batch_size": "count?",
    }
    arguments = {
        "params": params,
        "x": x,
        "apply": mlp,
        "method": "auto",
        "outputs": outputs,
        "batch_size": None,
    }
    kinds = {k: v for k, v in kinds.items() if arguments[k] is not None}
    fine = ("apply: a number", "x: one axis more")
    return Case(call, arguments, check, kinds, ("params", "x"), fine=fine)


@generates("ntk.empirical_nngp")
def empirical_nngp(rng, dtype) -> Case:
    params = parameters(rng, dtype)
    x = jnp.asarray(rng.normal(size=(3, 3)) * 10 ** rng.uniform(-2, 1), dtype)
    outputs = str(rng.choice(["mean", "full"]))
    a, b, rows = (np.asarray(v, np.float64) for v in (params["a"], params["b"], x))
    y = np.tanh(rows @ a) @ b
    K = y @ y.T / 2 if outputs == "mean" else np.einsum("ai,bj->abij", y, y)

    def call(params, x, apply, outputs):
        return ntk.empirical_nngp(apply, params, x, outputs=outputs)

    def check(r):
        return near("kernel", r, K, 100 * eps(dtype))

    kinds = {"params": "tree", "x": "array", "apply": "function", "outputs": "name"}
    arguments = {"params": params, "x": x, "apply": mlp, "outputs": outputs}
    fine = ("apply: a number", "x: one axis more")
    return Case(call, arguments, check, kinds, ("params", "x"), fine=fine)


@generates("ntk.taylor_expand")
def taylor_expand(rng, dtype) -> Case:
    params, moved = parameters(rng, dtype), parameters(rng, dtype)
    x = jnp.asarray(rng.normal(size=(2, 3)), dtype)
    order = int(rng.integers(4))
    (a, b), (c, d), rows = (
        [np.asarray(v, np.float64) for v in values]
        for values in (params.values(), moved.values(), [x])
    )
    # tanh(h + t k) in powers of t, times b + t (d - b).
    h, k = rows[0] @ a, rows[0] @ (c - a)
    t, s = np.tanh(h), 1 / np.cosh(h) ** 2
    series = [t, s * k, -t * s * k**2, s * (2 * t**2 - s) * k**3 / 3]
    powers = [
        series[i] @ b + (series[i - 1] @ (d - b) if i else 0) for i in range(max(order, 1) + 1)
    ]

    def call(params, moved, x, apply, order):
        expanded = ntk.taylor_expand(apply, params, order)(moved, x)
        return expanded, ntk.taylor_expand(apply, params, 1)(moved, x)

    def check(r):
        return first(
            near("expansion", r[0], sum(powers[: order + 1]), 3000 * eps(dtype)),
            near("tangent", r[1], sum(powers[:2]), 3000 * eps(dtype)),
        )

    kinds = {
        "params": "tree",
        "moved": "tree",
        "x": "array",
        "apply": "function",
        "order": "count",
    }
    arguments = {"params": params, "moved": moved, "x": x, "apply": mlp, "order": order}
    # What x may be is the business of the network.
    fine = ("x: one axis more", "x: no rows", "x: complex", "order: zero")
    return Case(call, arguments, check, kinds, ("params", "moved", "x"), fine=fine)


@generates("ntk.leaky_relu options")
def leaky_relu(rng, dtype) -> Case:
    slope = float(rng.normal())
    z = np.array([-2.0, 0.0, 3.0])
    call = lambda slope: ntk.leaky_relu(slope)(jnp.asarray(z))
    check = lambda r: near("values", r, np.where(z > 0, z, slope * z), 4 * eps(np.float32))
    return Case(call, {"slope": slope}, check, {"slope": "finite"})


@generates("ntk.activation options", "ntk.expectations.activations.Activation")
def activation(rng, dtype) -> Case:
    name = str(rng.choice(list(SMOOTH)))
    z = jnp.asarray(rng.normal(size=4), dtype)

    def call(fn, name, strip):
        made = ntk.activation(fn, name=name, strip=strip)
        return made(z), made.derivative(z)

    truth = in_numpy(name)(z), slope_in_numpy(name)(np.asarray(z))
    check = lambda r: near("values", r, truth, 50 * eps(dtype))
    kinds = {"fn": "function", "strip": "above zero"}
    fn = functools.partial(lambda made, z: made(z), SMOOTH[name])
    return Case(call, {"fn": fn, "name": name, "strip": 1.5}, check, kinds)
