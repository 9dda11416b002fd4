"""Spaces' corners, strategies, diagnostics and evaluation: against numpy and gradients by hand."""

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from benchmarks.reliability.case import Case, eps, first, near, that
from benchmarks.reliability.registry import generates
from benchmarks.reliability.simplices import point
from bilevel import strategies
from bilevel.discretize import diagnostics
from bilevel.nets import evaluation, images
from bilevel.spaces import Space, on_simplices
from bilevel.spaces.space import distinct
from bilevel.spaces.targets import cross_entropy_problem, mixture_and_penalty
from bilevel.strategies.optimizers import exponentiated, logits

NAMES = ("a", "b", "c")
KEY = jax.random.key(0)


def _apply(w, alpha, x):
    return x @ w * (alpha[..., 0] + 2 * alpha[..., 1]).sum()


def _space() -> Space:
    def loss(w, alpha, batch):
        return jnp.mean((_apply(w, alpha, batch[0]) - batch[1]) ** 2)

    return Space(
        names=NAMES,
        sets="simplex",
        **on_simplices(NAMES)._asdict(),
        init=lambda key, batch: jnp.zeros(batch[0].shape[1:]),
        apply=_apply,
        problem=bilevel.Problem(loss, loss),
        predict=lambda f: (f > 0).astype(int),
    )


@generates("bilevel.spaces.on_simplices", "bilevel.spaces.space.distinct")
def corners(rng, dtype) -> Case:
    places = int(rng.integers(1, 4))
    alpha = point(rng, dtype, (places, 3), corner=False)
    chosen = [NAMES[i] for i in np.asarray(alpha).argmax(-1)]

    def call(names, alpha):
        start, draw, discretize, one_hot = on_simplices(distinct(list(names)), (places,))
        discretized = discretize(alpha)
        return (
            one_hot(discretized),
            start(),
            draw(KEY).sum(-1),
            [names.index(name) for name in discretized],
        )

    def check(r):
        corner, start, sums, indices = r
        return first(
            that([NAMES[i] for i in indices] == chosen, f"chose {indices}"),
            near("corner", corner, np.eye(3)[np.asarray(indices)], 0.0),
            near("start", start, np.full((places, 3), 1 / 3), 4 * eps(np.float32)),
            near("drawn", sums, np.ones(places), 0.0),
        )

    kinds = {"names": "sequence", "alpha": "array"}
    fine = ("alpha: one axis more",) if places == 0 else ()
    return Case(call, {"names": NAMES, "alpha": alpha}, check, kinds, fine=fine)


@generates(
    "bilevel.strategies.darts",
    "bilevel.strategies.gaea",
    "bilevel.strategies.joint",
    "bilevel.strategies.unrolled",
    "bilevel.strategies.run",
    "bilevel.strategies.on_sets",
    "bilevel.strategies.optimizers.logits",
    "bilevel.strategies.optimizers.exponentiated",
)
def a_step(rng, dtype) -> Case:
    """One step on all rows: the update of the optimizer at the gradient, written out."""
    which = str(rng.choice(["darts", "darts 2", "gaea", "joint", "unrolled"]))
    x = jnp.asarray(rng.normal(size=(6, 2)), dtype)
    y = jnp.asarray(rng.normal(size=6), dtype)
    alpha, w = point(rng, dtype, (3,), corner=False), jnp.asarray(rng.normal(size=2), dtype)
    rate, weight_rate = float(10 ** rng.uniform(-2, 0)), float(10 ** rng.uniform(-3, -1))
    loss = _space().problem.lower

    def made(rate, weight_rate, batch_size):
        options = {
            "weight_optimizer": weight_rate,
            "alpha_optimizer": rate,
            "batch_size": batch_size,
        }
        if which == "gaea":
            return strategies.gaea(_space(), **options)
        if which == "joint":
            return strategies.joint(_space(), **options)
        if which == "unrolled":
            return strategies.unrolled(_space(), steps=2, **options)
        return strategies.darts(_space(), order=2 if which == "darts 2" else 1, **options)

    def call(x, y, alpha, w, rate, weight_rate, batch_size):
        plan = made(rate, weight_rate, batch_size)._replace(batches=lambda key, data: data)
        rows = {"train": (x, y), "valid": (x[:3], y[:3])}
        return strategies.run(plan, alpha, w, **rows, steps=1, key=KEY, progress=False).alpha

    def after(alpha, steps):
        v = w
        for _ in range(steps):
            v = v - weight_rate * jax.grad(loss)(v, alpha, (x, y))
        return v

    steps = 2 if which == "unrolled" else 1
    rows = (x, y) if which == "joint" else (x[:3], y[:3])
    if which in ("darts 2", "unrolled"):
        slope = jax.grad(lambda a: loss(after(a, steps), a, rows))(alpha)
    else:
        slope = jax.grad(loss, 1)(after(alpha, 1), alpha, rows)
    own = exponentiated(rate) if which == "gaea" else logits(rate)
    updates, _ = own.update(slope, own.init(alpha), alpha)
    truth = alpha + updates
    check = lambda r: near(which, r, truth, 1e4 * eps(dtype))
    kinds = {"x": "values", "y": "values", "alpha": "simplex", "w": "values"}
    kinds |= {"rate": "positive", "weight_rate": "positive", "batch_size": "count"}
    arguments = {"x": x, "y": y, "alpha": alpha, "w": w}
    arguments |= {"rate": rate, "weight_rate": weight_rate, "batch_size": 6}
    # The rates are the optimizers': of optax, which has its own word on them.
    fine = tuple(f"{name}: {what}" for name in ("rate", "weight_rate") for what in _OF_OPTAX)
    return Case(call, arguments, check, kinds, fine=(*fine, "alpha: one axis more"))


_OF_OPTAX = ("zero", "negative", "nan", "inf", "none", "a text", "a function")


@generates(
    "bilevel.strategies.weight_sharing",
    "bilevel.strategies.best_drawn",
    "bilevel.strategies.stack_strategies",
    "bilevel.strategies.darts_sgd",
)
def shared(rng, dtype) -> Case:
    """The architecture chosen has the least loss of those drawn, by enumeration."""
    x = jnp.asarray(rng.normal(size=(6, 2)), dtype)
    y = jnp.asarray(rng.normal(size=6), dtype)
    w, samples = jnp.asarray(rng.normal(size=2), dtype), int(rng.integers(1, 6))

    def call(w, x, y, samples, batch_size, copies):
        space = _space()
        weights = strategies.darts_sgd(0.1)
        plan = strategies.weight_sharing(space, weight_optimizer=weights, batch_size=batch_size)
        strategies.stack_strategies(plan, copies)
        sizes = {"samples": samples, "batch_size": batch_size}
        return strategies.best_drawn(KEY, space, w, (x, y), **sizes)

    drawn = [_space().draw(k) for k in jax.random.split(KEY, samples)]
    losses = [float(_space().problem.outer(w, a, (x, y))) for a in drawn]
    check = lambda r: near("corner", r, drawn[int(np.argmin(losses))], 0.0)
    kinds = {"w": "values", "x": "values", "y": "values"}
    kinds |= {"samples": "count", "batch_size": "count", "copies": "count"}
    arguments = {"w": w, "x": x, "y": y, "samples": samples, "batch_size": 6, "copies": 2}
    # A corner is finite whatever the losses are: NaN is for the search before to say.
    fine = tuple(f"{n}: {what}" for n in ("w", "x", "y") for what in ("nan", "inf"))
    return Case(call, arguments, check, kinds, fine=fine)


@generates(
    "bilevel.discretize.alpha_curvature",
    "bilevel.discretize.diagnostics.simplex_tangent",
    "bilevel.discretize.diagnostics.simplices",
)
def curvature(rng, dtype) -> Case:
    h = int(rng.integers(2, 6))
    root = rng.normal(size=(h, h))
    H = jnp.asarray(root @ root.T, dtype)
    alpha = point(rng, dtype, (h,), corner=False)

    def call(H, alpha):
        loss = lambda w, a, batch: 0.5 * a @ H @ a
        assert len(diagnostics.simplices("simplex", alpha)) == 1
        return jnp.asarray(diagnostics.alpha_curvature(loss)(None, alpha, None))

    P = np.eye(h) - 1 / h
    truth = np.linalg.eigvalsh(P @ np.asarray(H, np.float64) @ P)[-1]
    check = lambda r: near("curvature", r, max(truth, 0.0), 1e-4 + 1e3 * eps(dtype))
    return Case(call, {"H": H, "alpha": alpha}, check, {})


@generates("bilevel.discretize.entropy", "bilevel.discretize.diagnostics.kernel_diagonal")
def entropy(rng, dtype) -> Case:
    alpha, x = point(rng, dtype, (3,)), jnp.asarray(rng.normal(size=(4, 2)), dtype)

    def call(alpha, x):
        w = jnp.zeros(2, x.dtype)
        return diagnostics.entropy(alpha), diagnostics.kernel_diagonal(_apply, w, alpha, x)

    a, X = np.asarray(alpha, np.float64), np.asarray(x, np.float64)
    logs = np.log(a, where=a > 0, out=np.zeros_like(a))
    truth = -(a * logs).sum(), ((a[0] + 2 * a[1]) ** 2 * (X**2).sum(1)).mean()
    check = lambda r: near("entropy, diagonal", r, truth, 1e3 * eps(dtype))
    kinds = {"alpha": "values", "x": "values"}
    return Case(call, {"alpha": alpha, "x": x}, check, kinds, ("alpha", "x"))


@generates(
    "bilevel.nets.evaluation.error_rates",
    "bilevel.nets.evaluation.wrong_rows",
    "bilevel.nets.evaluation.in_batches",
    "bilevel.nets.evaluation.over_batches",
)
def errors(rng, dtype) -> Case:
    lengths = rng.integers(1, 9, 3)
    parts = [(rng.normal(size=(n, 2)).astype(dtype), rng.integers(0, 2, n)) for n in lengths]
    w, size = jnp.asarray(rng.normal(size=2), dtype), int(rng.integers(1, 12))
    alpha = jnp.asarray([1.0, 0.0, 0.0], dtype)
    call = lambda w, size: jnp.asarray(evaluation.error_rates(_space())(w, alpha, parts, size))
    truth = [np.mean((x @ np.asarray(w) > 0) != y) for x, y in parts]
    check = lambda r: near("errors", r, truth, 10 * eps(np.float32))
    return Case(call, {"w": w, "size": size}, check, {"size": "count"})


@generates("bilevel.nets.unit_images", "bilevel.nets.images.pooling")
def unit_images(rng, dtype) -> Case:
    x = jnp.asarray(rng.normal(size=(3, 4, 4, 2)) * 10 ** rng.uniform(-2, 2), dtype)
    pixels = int(rng.choice([1, 2, 3, 4]))
    call = lambda x, pixels: images.unit_images(x, pixels=pixels)[0]
    factor = images.pooling(4, pixels)
    small = np.asarray(x, np.float64).reshape(3, 4 // factor, factor, 4 // factor, factor, 2)
    small = small.mean((2, 4))
    truth = (small - small.mean((0, 1, 2))) / small.std((0, 1, 2))
    check = lambda r: near("images", r, truth, 1e3 * eps(dtype))
    kinds = {"x": "array", "pixels": "count?"}
    return Case(call, {"x": x, "pixels": pixels}, check, kinds)


@generates(
    "bilevel.spaces.targets.cross_entropy_problem",
    "bilevel.spaces.targets.label_losses",
    "bilevel.spaces.targets.mixture_and_penalty",
)
def cross(rng, dtype) -> Case:
    w = jnp.asarray(rng.normal(size=(3, 2)), dtype)
    labels = rng.integers(0, 2, 3)

    def call(w):
        fields = mixture_and_penalty(NAMES)
        weight = fields["start"]()["mixture"].sum()
        problem = cross_entropy_problem(lambda w, alpha, x: x @ w)
        return weight * problem.lower(w, None, (jnp.eye(3, dtype=w.dtype), jnp.asarray(labels)))

    f = np.asarray(w, np.float64)
    truth = np.mean(np.log(np.exp(f).sum(1)) - f[np.arange(3), labels])
    check = lambda r: near("loss", r, truth, 1e3 * eps(dtype))
    return Case(call, {"w": w}, check, {"w": "values"}, ("w",))


@generates("bilevel.data.draw_splits")
def samples(rng, dtype) -> Case:
    """Parts of the sizes asked for, no row twice, the same for the same key."""
    sizes = [int(n) for n in rng.integers(1, 300, 3)]
    call = lambda name, keys, train, valid, test: [
        (jnp.asarray(x), jnp.asarray(y))
        for x, y in bilevel.data.draw_splits(name, keys, train=train, valid=valid, test=test)[0]
    ]

    def check(parts):
        rows = np.concatenate([np.asarray(x).reshape(len(x), -1) for x, _ in parts])
        return first(
            that([len(y) for _, y in parts] == sizes, f"sizes {[len(y) for _, y in parts]}"),
            that(len(np.unique(rows, axis=0)) == len(rows), "a row twice"),  # digits differ
        )

    arguments = {"name": "digits", "keys": [KEY]}
    arguments |= dict(zip(("train", "valid", "test"), sizes, strict=True))
    kinds = {"name": "name", "train": "count", "valid": "count", "test": "count"}
    return Case(call, arguments, check, kinds)
