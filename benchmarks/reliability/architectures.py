"""Search spaces: networks against the same network in numpy, genotypes by round trips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from benchmarks.reliability.case import Case, at_most, eps, first, near, that
from benchmarks.reliability.registry import generates
from benchmarks.reliability.simplices import point
from bilevel.nets import convolution, images, training
from bilevel.spaces import activations, darts, nasbench201, skips, targets
from bilevel.spaces.darts import genotype as darts_genotypes
from bilevel.spaces.darts.operations import PRIMITIVES
from bilevel.spaces.nasbench201 import genotype as cell_genotypes
from bilevel.spaces.nasbench201.costs import conv_edges, multiply_adds, supernet_cost
from bilevel.spaces.nasbench201.judging import verdicts

_NAMES = ["relu", "tanh", "swish"]
_NUMPY = {
    "relu": lambda z: np.maximum(z, 0),
    "tanh": np.tanh,
    "swish": lambda z: z / (1 + np.exp(-z)),
}


@generates("bilevel.spaces.activation_space")
def activation_space(rng, dtype) -> Case:
    w = jnp.asarray(rng.normal(size=(8, 3)), dtype)
    alpha = point(rng, dtype, (3,))
    x = jnp.asarray(rng.normal(size=(4, 3)), dtype)
    W, X, a = (np.asarray(v, np.float64) for v in (w, x, alpha))
    hidden = sum(a[i] * _NUMPY[n](X @ W.T) for i, n in enumerate(_NAMES))

    def call(names, width, classes, outer, w, alpha, x):
        space = activations.activation_space(names, width=width, classes=classes, outer=outer)
        return space.apply(w, alpha, x)

    def check(f):
        signs = np.asarray(f, np.float64)
        # Output weights are +- 1 / sqrt(width), half each: any of those sums.
        size = np.abs(hidden).sum(1) / np.sqrt(8)
        return first(
            at_most("outputs", abs(signs), size * (1 + 1e-3) + 1e-6),
            at_most(
                "one row alone, off by",
                abs(call(_NAMES, 8, 2, "hinge", w, alpha, x[:1])[0] - signs[0]),
                1e-5 * size[0] + 1e-6,
            ),
        )

    kinds = {
        "names": "names",
        "width": "count",
        "classes": "count",
        "outer": "name",
        "w": "values",
        "alpha": "values",
        "x": "values",
    }
    arguments = {
        "names": _NAMES,
        "width": 8,
        "classes": 2,
        "outer": "hinge",
        "w": w,
        "alpha": alpha,
        "x": x,
    }
    return Case(call, arguments, check, kinds, ("w", "alpha", "x"))


@generates(
    "bilevel.spaces.activation_space of infinite width",
    "bilevel.spaces.kernels.kernel_space",
)
def infinite_width(rng, dtype) -> Case:
    x = activations.unit_inputs(jnp.asarray(rng.normal(size=(4, 3)), dtype))
    y = jnp.asarray(np.sign(rng.normal(size=4)), dtype)
    alpha = point(rng, dtype, (2,), corner=False)

    def call(x, y, alpha):
        space = activations.activation_space(["relu", "tanh"], width=np.inf)
        blocks = space.blocks(x)
        start, w = space.start(), space.init(jax.random.key(0), (blocks, y))
        start = start | {"mixture": alpha}
        w, _ = space.solver.run(space.problem.lower, start, w, (), (blocks, y))
        return w, blocks

    def check(r):
        w, blocks = (np.asarray(v, np.float64) for v in r)
        a = np.asarray(alpha, np.float64)
        K = np.einsum("i,ijnm,j->nm", a, blocks, a) + 0.1 * np.eye(4)
        return near("coefficients", K @ w, y, 1e4 * eps(dtype))

    kinds = {"x": "array", "y": "values", "alpha": "values"}
    return Case(
        call, {"x": x, "y": y, "alpha": alpha}, check, kinds, ("x", "y", "alpha"), vmapped=False
    )


@generates("bilevel.spaces.unit_inputs")
def unit_inputs(rng, dtype) -> Case:
    x = jnp.asarray(rng.normal(size=(4, 2, 2)) * 10 ** rng.uniform(-3, 3), dtype)
    flat = np.asarray(x, np.float64).reshape(4, -1)
    flat = flat - flat.mean(0)
    truth = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    check = lambda r: near("rows", r, truth, 1e3 * eps(dtype))
    return Case(activations.unit_inputs, {"x": x}, check, {"x": "array"}, ("x",))


@generates("bilevel.spaces.skip_space")
def skip_space(rng, dtype) -> Case:
    depth, width = int(rng.choice([3, 4])), 6
    x = jnp.asarray(rng.normal(size=(3, 5)), dtype)
    alpha = {
        "activations": point(rng, dtype, (depth - 1, 3)),
        "skips": jnp.asarray(rng.uniform(size=depth - 2), dtype),
    }

    def call(names, depth, width, classes, parametrization, alpha, x):
        options = {"depth": depth, "width": width, "classes": classes}
        space = skips.skip_space(names, parametrization=parametrization, **options)
        w = space.init(jax.random.key(0), (x, None))
        return space.apply(w, alpha, x), w

    def check(r):
        f, w = r
        p, a = (np.asarray(alpha[k], np.float64) for k in ("activations", "skips"))
        layers = {k: np.asarray(v, np.float64) for k, v in w.items()}
        mix = lambda p, u: sum(p[i] * _NUMPY[n](u) for i, n in enumerate(_NAMES))
        g, gain = mix(p[0], np.asarray(x, np.float64) @ layers["first"]), np.sqrt(2 / width)
        for k in range(depth - 2):
            g = mix(p[k + 1], gain * g @ layers["hidden"][k]) + a[k] * g
        return near("outputs", f, (gain * g @ layers["last"])[:, 0], 1e4 * eps(dtype))

    kinds = {
        "names": "names",
        "depth": "count",
        "width": "count",
        "classes": "count",
        "parametrization": "name",
        "alpha": "values",
        "x": "values",
    }
    arguments = {
        "names": _NAMES,
        "depth": depth,
        "width": width,
        "classes": 2,
        "parametrization": "ntk",
        "alpha": alpha,
        "x": x,
    }
    return Case(call, arguments, check, kinds, ("alpha", "x"))


@generates("bilevel.spaces.targets.sign_labels", "bilevel.spaces.targets.predict_labels")
def sign_labels(rng, dtype) -> Case:
    classes = int(rng.choice([2, 4]))
    labels = jnp.asarray(rng.integers(0, classes, 5).astype(np.int32))

    def call(labels, classes):
        signs = targets.sign_labels(labels, classes)
        return signs, targets.predict_labels(signs)

    check = lambda r: first(
        near("again", r[1], labels, 0), near("size", abs(r[0]), np.ones(r[0].shape), 0)
    )
    kinds = {"labels": "labels", "classes": "count"}
    return Case(
        call,
        {"labels": labels, "classes": classes},
        check,
        kinds,
        fine=("labels: empty", "labels: one row more"),
    )


@generates("bilevel.spaces.targets.like_outputs")
def like_outputs(rng, dtype) -> Case:
    f = jnp.asarray(rng.normal(size=5), dtype)
    y = jnp.asarray(rng.choice([-1, 1], 5), dtype)
    check = lambda r: near("again", r, y, 0)
    return Case(lambda y: targets.like_outputs(f, y), {"y": y}, check, {"y": "array"})


@generates("bilevel.nets.train", "bilevel.internal.rows.check_batch_size")
def train(rng, dtype) -> Case:
    n, epochs, batch = int(rng.choice([4, 7])), int(rng.choice([1, 3])), int(rng.choice([1, 2]))
    x = jnp.asarray(rng.normal(size=n), dtype)

    def call(x, optimizer, epochs, batch_size):
        loss = lambda w, _, x: -w * x.sum()
        w = jnp.zeros((), x.dtype)
        options = {"optimizer": optimizer, "epochs": epochs, "batch_size": batch_size}
        return training.train(jax.random.key(1), loss, None, w, x, **options)

    def check(trained):
        steps = epochs * (n // batch)
        whole = np.asarray(x, np.float64).sum() * epochs * 0.5 if n % batch == 0 else None
        return first(
            that(trained.losses.shape == (steps,), f"{trained.losses.shape} losses"),
            ""
            if whole is None
            else near(
                "weight", trained.last, whole, 1e3 * eps(dtype) * (1 + 1 / max(abs(whole), 1e-3))
            ),
        )

    kinds = {"x": "values", "epochs": "count", "batch_size": "count"}
    fine = ("x: nan", "x: inf") if n % batch else ()
    arguments = {"x": x, "optimizer": 0.5, "epochs": epochs, "batch_size": batch}
    return Case(call, arguments, check, kinds, () if n % batch else ("x",), fine=fine)


@generates("bilevel.minibatches")
def minibatches(rng, dtype) -> Case:
    n = int(rng.choice([3, 20]))
    size = int(rng.integers(1, n + 1))
    rows = jnp.arange(n)
    call = lambda key, batch_size: bilevel.minibatches(batch_size)(key, (rows, 2 * rows))
    check = lambda r: first(
        that(r[0].shape == (size,), f"shape {r[0].shape}"), near("pairs", r[1], 2 * r[0], 0)
    )
    kinds = {"key": "key", "batch_size": "count"}
    return Case(
        call, {"key": jax.random.key(int(rng.integers(9))), "batch_size": size}, check, kinds
    )


@generates("bilevel.jointly")
def jointly(rng, dtype) -> Case:
    rows, number = jnp.arange(9, dtype=dtype), int(rng.integers(9))
    sample = lambda key, train, valid: (train[number], valid[number])
    call = lambda sample: bilevel.jointly(sample)(jax.random.key(0), rows, 2 * rows)
    check = lambda r: near("pairs", r[1], 2 * r[0], 0)
    return Case(call, {"sample": sample}, check, {"sample": "function"})


# ----------------------------------------------------------------------------- images


def _convolved(x, k, stride, dilation, padding, groups):
    x, k = np.asarray(x, np.float64), np.asarray(k, np.float64)
    x = np.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    size, reach = len(k), dilation * (len(k) - 1)
    rows = range(0, x.shape[1] - reach, stride)
    each, per = x.shape[3] // groups, k.shape[3] // groups
    out = np.zeros((len(x), len(rows), len(rows), k.shape[3]))
    for a, i in enumerate(rows):
        for b, j in enumerate(rows):
            patch = x[:, i : i + reach + 1 : dilation, j : j + reach + 1 : dilation]
            for g in range(groups):
                one = patch[..., g * each : (g + 1) * each]
                kernel = k[..., g * per : (g + 1) * per]
                out[:, a, b, g * per : (g + 1) * per] = np.einsum("nijc,ijco->no", one, kernel)
    assert size == k.shape[1]
    return out


@generates("bilevel.nets.convolve_images")
def convolve(rng, dtype) -> Case:
    size, stride, dilation = (int(rng.choice(v)) for v in ([1, 3], [1, 2], [1, 2]))
    groups = int(rng.choice([1, 2]))
    x = jnp.asarray(rng.normal(size=(2, 6, 6, 2)), dtype)
    kernel = jnp.asarray(rng.normal(size=(size, size, 2 // groups, 2)), dtype)
    padding = dilation * (size - 1) // 2
    truth = _convolved(x, kernel, stride, dilation, padding, groups)
    unseen = stride == 2 and (size == 1 or dilation == 2)  # pixels that no window is on
    kinds = {
        "x": "array",
        "kernel": "array",
        "stride": "count",
        "dilation": "count",
        "groups": "count",
    }
    arguments = {"x": x, "kernel": kernel, "stride": stride, "dilation": dilation, "groups": groups}
    check = lambda r: near("image", r, truth, 200 * eps(dtype))
    fine = ("x: nan", "x: inf") if unseen else ()
    return Case(
        convolution.convolve_images,
        arguments,
        check,
        kinds,
        ("kernel",) if unseen else ("x", "kernel"),
        fine=fine,
    )


@generates("bilevel.nets.max_pooling", "bilevel.nets.convolution.average_pooling")
def pools(rng, dtype) -> Case:
    stride = int(rng.choice([1, 2]))
    x = jnp.asarray(rng.normal(size=(2, 6, 6, 1)), dtype)
    X = np.asarray(x, np.float64)
    wide = np.pad(X, [(0, 0), (1, 1), (1, 1), (0, 0)], constant_values=np.nan)
    rows = range(0, 6, stride)
    cut = [[wide[:, i : i + 3, j : j + 3, 0] for j in rows] for i in rows]
    most, mean = (
        np.array([[f(c, (1, 2)) for c in r] for r in cut]) for f in (np.nanmax, np.nanmean)
    )

    def call(x, size, stride, padding):
        options = {"stride": stride, "padding": padding}
        return convolution.max_pooling(x, size, **options), convolution.average_pooling(
            x, size, **options
        )

    check = lambda r: first(
        near("largest", np.moveaxis(np.asarray(r[0])[..., 0], 0, 2), most, 0),
        near("mean", np.moveaxis(np.asarray(r[1])[..., 0], 0, 2), mean, 50 * eps(dtype)),
    )
    kinds = {"x": "array", "size": "count", "stride": "count"}
    arguments = {"x": x, "size": 3, "stride": stride, "padding": 1}
    return Case(call, arguments, check, kinds, ("x",))


@generates("bilevel.nets.images.crop_and_flip", "bilevel.nets.images.cutout")
def augmented(rng, dtype) -> Case:
    x = jnp.asarray(rng.normal(size=(3, 6, 6, 1)) + 5, dtype)

    def call(key, x, padding, size):
        return images.crop_and_flip(key, x, padding), images.cutout(key, x, size)

    def check(r):
        kept = np.asarray(r[1]) == np.asarray(x)
        return first(
            that(np.isin(np.asarray(r[0]), [0, *np.asarray(x).ravel()]).all(), "other pixels"),
            that((kept | (np.asarray(r[1]) == 0)).all(), "pixels that are neither kept nor 0"),
        )

    kinds = {"key": "key", "x": "values", "padding": "whole", "size": "whole"}
    arguments = {"key": jax.random.key(int(rng.integers(9))), "x": x, "padding": 2, "size": 3}
    return Case(call, arguments, check, kinds, fine=("x: nan", "x: inf"))


# ----------------------------------------------------------------------------- genotypes

_DARTS_NAMES = PRIMITIVES


@generates(
    "bilevel.spaces.darts.genotype.genotype",
    "bilevel.spaces.darts.genotype.one_hot",
    "bilevel.spaces.darts.parse_genotype",
    "bilevel.spaces.darts.genotype.draw_corner",
)
def darts_genotype(rng, dtype) -> Case:
    corner = darts_genotypes.draw_corner(jax.random.key(int(rng.integers(1000))))

    def call(normal, reduce):
        genotype = darts_genotypes.genotype({"normal": normal, "reduce": reduce})
        again = darts_genotypes.one_hot(genotype)["normal"]
        return [str(genotype), str(darts.parse_genotype(str(genotype))), again]

    check = lambda r: first(
        that(r[0] == r[1], f"{r[0]} read as {r[1]}"), near("again", r[2], corner["normal"], 0)
    )
    arguments = {k: np.asarray(corner[k]) for k in ("normal", "reduce")}
    return Case(
        call,
        arguments,
        check,
        dict.fromkeys(arguments, "array"),
        fine=("normal: complex", "reduce: complex"),
    )


@generates("bilevel.spaces.darts.parse_genotype of texts")
def darts_texts(rng, dtype) -> Case:
    text = str(darts_genotypes.DARTS_V2)
    broken = list(text)
    for _ in range(int(rng.integers(1, 4))):
        broken[rng.integers(len(broken))] = str(rng.choice(list("()[]',0123456789abcx_ ")))
    call = lambda text: darts.parse_genotype(text)

    def check(genotype):
        darts_check = darts_genotypes.one_hot(genotype)  # what was read has to be a genotype
        return that(darts_check["normal"].sum() <= 8, "too many edges")

    if rng.random() < 0.3:
        return Case(
            call,
            {"text": text},
            lambda f: that(f == darts_genotypes.DARTS_V2, "another"),
            {"text": "text"},
        )
    return Case(call, {"text": "".join(broken)}, check, {}, extreme=True)


@generates(
    "bilevel.spaces.nasbench201.genotype.genotype",
    "bilevel.spaces.nasbench201.genotype.one_hot",
    "bilevel.spaces.nasbench201.encode",
    "bilevel.spaces.nasbench201.genotype.decode",
    "bilevel.spaces.nasbench201.genotype.parse_genotype",
    "bilevel.spaces.nasbench201.genotype.draw_corner",
    "bilevel.spaces.nasbench201.genotypes",
)
def nasbench_genotype(rng, dtype) -> Case:
    row = rng.integers(0, 5, 6)

    def call(array, key):
        cell = cell_genotypes.decode(array)
        again = cell_genotypes.genotype(
            cell_genotypes.one_hot(cell_genotypes.parse_genotype(str(cell)))
        )
        drawn = cell_genotypes.genotype(cell_genotypes.draw_corner(key))
        return (
            nasbench201.encode(again),
            nasbench201.genotypes().index(cell),
            drawn in nasbench201.genotypes(),
        )

    number = int(np.polyval(row, 5))
    check = lambda r: first(
        near("again", r[0], row, 0), near("place", r[1], number, 0), that(r[2], "another draw")
    )
    kinds = {"array": "labels", "key": "key"}
    return Case(call, {"array": row, "key": jax.random.key(int(rng.integers(99)))}, check, kinds)


@generates(
    "bilevel.spaces.nasbench201.costs.conv_edges",
    "bilevel.spaces.nasbench201.parameter_count",
    "bilevel.spaces.nasbench201.costs.multiply_adds",
    "bilevel.spaces.nasbench201.costs.supernet_cost",
    "bilevel.spaces.nasbench201.trainable_layers",
)
def nasbench_costs(rng, dtype) -> Case:
    cell = nasbench201.genotypes()[int(rng.integers(15_625))]

    def call(genotype, cells, channels):
        shape = {"cells": cells, "channels": channels}
        return (
            conv_edges(genotype),
            nasbench201.parameter_count(genotype, **shape),
            multiply_adds(genotype, **shape),
            supernet_cost(**shape),
            nasbench201.trainable_layers(genotype, cells=cells),
        )

    def check(r):
        carries = {
            e for e, o in zip(cell_genotypes.EDGES, cell.operations, strict=True) if o != "none"
        }
        paths = [[(0, 3)], [(0, 1), (1, 3)], [(0, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)]]
        dead = not any(set(path) <= carries for path in paths)
        convolutions = sum(o.startswith("nor_conv") for o in cell.operations)
        return first(
            that(r[0] == convolutions, f"{r[0]} convolutions"),
            that(min(r[1:]) > 0, "no cost"),
            that(not dead or r[4] == 8, f"{r[4]} layers of a cell without a path"),
        )

    kinds = {"genotype": "record", "cells": "count", "channels": "count"}
    return Case(call, {"genotype": cell, "cells": 1, "channels": 2}, check, kinds)


# ----------------------------------------------------------------------------- judging


@generates(
    "bilevel.spaces.nasbench201.judging.correlations",
    "bilevel.spaces.nasbench201.judging.verdicts.top_one",
    "bilevel.spaces.nasbench201.judging.sum_of_log_ranks",
)
def judged(rng, dtype) -> Case:
    import scipy.stats

    score, accuracy = rng.normal(size=8).round(1), rng.uniform(50, 90, 8)

    def call(score, accuracy):
        pair = verdicts.correlations(score, accuracy)
        return (
            pair.tau,
            pair.rho,
            verdicts.top_one(score, accuracy),
            verdicts.sum_of_log_ranks(score),
        )

    best = accuracy[score == score.max()].mean()
    logs = np.log(scipy.stats.rankdata(score) / 8)
    truth = [scipy.stats.kendalltau(score, accuracy)[0], scipy.stats.spearmanr(score, accuracy)[0]]
    check = lambda r: near("figures", r, [*truth, best, logs], 1e-6)
    kinds = {"score": "rows", "accuracy": "rows"}
    fine = ("score: nan", "score: inf", "score: complex", "accuracy: complex")
    return Case(call, {"score": score, "accuracy": accuracy}, check, kinds, fine=fine)


@generates(
    "bilevel.spaces.nasbench201.judging.best_of_k",
    "bilevel.spaces.nasbench201.judging.best_of_k_random",
)
def best_of_k(rng, dtype) -> Case:
    m = 6
    score, valid, test = rng.permutation(m) * 1.0, rng.permutation(m) * 1.0, rng.normal(size=m)
    k = int(rng.integers(1, m + 1))
    kept = np.argsort(-score)[:k]
    truth = test[kept[valid[kept].argmax()]]
    import itertools

    chosen = [max(c, key=lambda i: valid[i]) for c in itertools.combinations(range(m), k)]

    def call(score, valid, test, k):
        one = functools.partial(verdicts.best_of_k, draws=2)
        return one(score, valid, test, k), verdicts.best_of_k_random(valid, test, k)

    check = lambda r: near("figures", r, [truth, truth, test[chosen].mean()], 1e-6)
    kinds = {"valid": "rows", "test": "rows", "k": "count"}
    arguments = {"score": score, "valid": valid, "test": test, "k": k}
    fine = ("valid: complex", "test: complex")
    return Case(call, arguments, check, kinds, fine=fine)
