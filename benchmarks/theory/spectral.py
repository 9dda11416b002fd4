"""Is the mixture of feature maps found by one eigenvector?  (Oymak et al. 2021, Theorem 4)

1. Phase diagram over (p/n, h/n): overlap (alpha*' alpha^)^2 and risk of the two-stage estimator,
   simulated without tensors, compared with the exact limits and the paper's bounds (11) and (12).
2. Beyond the theorem: the same with whole tensors of Gaussian values, of signs, and of random ReLU
   features, p = 2n. All maps have ReLU features of one input, standardized, so they are correlated.
3. Initialization of a search: validation loss and test error by outer step, from the uniform
   mixture, from the paper's spectral alpha and from the whitened one (both from the training rows).
   The feature maps are those of Theorem 4's model, 3 of 20 maps useful; then each map has a
   different size, from 1/10 to 10. We also search activations at infinite width on digits and
   Fashion-MNIST, 10 classes, squared loss. All in float64.

    python benchmarks/theory/spectral.py            # ten minutes on two cores
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
import bilevel.data
from benchmarks import harness
from bilevel import spectral
from bilevel.spaces import activation_space, unit_inputs
from bilevel.spaces.activations import sign_labels
from bilevel.spaces.features import feature_space
from bilevel.theory.bounds import oymak_theorem4_as_printed

MEASURES = ("bilevel/theory/spectral", "bilevel/spaces/features/mixture.py")

P = (0.5, 2, 4, 8, 16)
H = (0.01, 0.03, 0.1, 0.3, 0.6, 1.2)
ACTIVATIONS = ("relu", "leaky_relu", "sigmoid", "tanh", "swish", "gelu")
STARTS = ("uniform", "spectral", "whitened")
STEPS, RATE = 60, 0.3  # the rate of `bilevel search`


def moments(draws) -> list[float]:
    """Return the mean and its standard error."""
    return [float(np.mean(draws)), float(harness.standard_error(draws))]


def diagram(n, runs, ratios, heights) -> list[dict]:
    rows = []
    for p, h in [(round(p * n), round(h * n)) for p in ratios for h in heights]:
        sample = partial(spectral.spectral_sample, n=n, p=p, h=h)
        draws = jax.jit(partial(jax.lax.map, sample))(jax.random.split(jax.random.key(h), runs))
        rows.append({"part": "diagram", "n": n, "p": p, "h": h, "runs": runs})
        rows[-1] |= {"overlap": moments(draws.correlation_squared), "risk": moments(draws.risk)}
    return rows


def relu_features(key, weights_key, shape, inputs=100):
    w = jax.random.normal(weights_key, (inputs, *shape[1:])) / inputs**0.5
    z = jnp.einsum("nd,dhp->nhp", jax.random.normal(key, (shape[0], inputs)), w)
    # Mean and variance of relu(g), g ~ N(0, 1).
    return (jax.nn.relu(z) - (2 * np.pi) ** -0.5) / (0.5 - 0.5 / np.pi) ** 0.5


KINDS = {
    "Gaussian": lambda key, _, shape: jax.random.normal(key, shape),
    "signs": lambda key, _, shape: jax.random.rademacher(key, shape, float),
    "ReLU": relu_features,
}


def trial(draw, n, p, h, key):
    """Return [overlap, relative test error] of the paper's estimator, then of the whitened one."""
    keys = jax.random.split(key, 6)
    alpha, theta = (v / jnp.linalg.norm(v) for v in map(jax.random.normal, keys[:2], [(h,), (p,)]))
    parts = [draw(k, keys[2], (n, h, p)) for k in keys[3:]]
    train, valid, (x, y) = ((x, jnp.einsum("h,nhp,p->n", alpha, x, theta)) for x in parts)
    scores = []
    for whiten in (False, True):
        estimator = spectral.spectral_estimator(train, valid, whiten=whiten)
        error = estimator.predict(train[0], x) - y
        scores += [(estimator.alpha @ alpha) ** 2, jnp.sum(error**2) / jnp.sum(y**2)]
    return jnp.stack(scores)


def beyond(n, runs, heights, kinds=tuple(KINDS)) -> list[dict]:
    rows = []
    for kind, h in [(kind, round(h * n)) for kind in kinds for h in heights]:
        run = jax.jit(partial(jax.lax.map, partial(trial, KINDS[kind], n, 2 * n, h)))
        draws = map(moments, np.asarray(run(jax.random.split(jax.random.key(h), runs))).T)
        names = "overlap", "risk", "whitened overlap", "whitened risk"
        row = {"part": "beyond", "features": kind, "n": n, "p": 2 * n, "h": h, "runs": runs}
        rows.append(row | dict(zip(names, draws, strict=True)))
    return rows


def curves(space, features, error, train, valid, test):
    """Search from STARTS: return validation losses, test errors [3, 1 + steps], and last alphas."""
    start, w = space.start(), space.init(jax.random.key(0), train)
    plain, whitened = (spectral.spectral_alpha(features, train[1], whiten=w) for w in (False, True))
    nearest = spectral.simplex_start(whitened, spectral.noise_gram(features, train[1]))
    mixtures = jnp.stack([start["mixture"], spectral.simplex_start(plain), nearest])
    adam = optax.adam(RATE)
    simplex = optax.chain(bilevel.tangent(), adam, bilevel.exponentiate())
    geometry = {"mixture": simplex, "log_penalty": adam}
    optimizer = optax.partition(geometry, {name: name for name in geometry})
    descend = partial(bilevel.search, space.problem, space.solver, optimizer, steps=STEPS)

    def score(alpha):
        fitted, _ = space.solver.run(space.problem.lower, alpha, w, (), train)
        wrong = error(space.apply(fitted, alpha, test[0]), test[1])
        return space.problem.outer(fitted, alpha, valid), wrong.mean()

    def run(mixture):
        alpha = start | {"mixture": mixture}
        path = descend(alpha, w, train, valid).history["alpha"]
        path = jax.tree.map(lambda a, rest: jnp.concatenate([a[None], rest]), alpha, path)
        return *jax.lax.map(score, path), path["mixture"][jnp.array([0, -1])]

    return jax.vmap(run)(mixtures)


def column(i):
    def phi(x):
        return x[:, i]

    phi.__name__ = f"map {i}"
    return phi


@partial(jax.jit, static_argnames=("seeds", "n", "p"))
def synthetic_search(sizes, seeds, n=100, p=150):
    space = feature_space([column(i) for i in range(len(sizes))])

    def run(key):
        keys = jax.random.split(key, 8)
        theta = jax.random.normal(keys[0], (p,)) / p**0.5
        scales = jax.random.permutation(keys[1], sizes)[:, None]
        parts = []
        for rows, k, k_noise in zip((n, n, 1000), keys[2:5], keys[5:], strict=True):
            x = jax.random.normal(k, (rows, len(sizes), p))
            y = x[:, :3].sum(1) @ theta / 3**0.5 + 0.3 * jax.random.normal(k_noise, (rows,))
            parts.append((space.blocks(x * scales), y))
        features = jnp.moveaxis(parts[0][0], 0, 1)
        return curves(space, features, optax.squared_error, *parts)

    return jax.vmap(run)(jax.random.split(jax.random.key(0), seeds))


def image_search(name, seeds, n=150, test=600):
    space = activation_space(ACTIVATIONS, width=np.inf, classes=10, outer="squared")

    @jax.jit
    def run(train, *others):
        error = lambda f, labels: space.predict(f) != labels  # noqa: E731
        return curves(space, train[0], error, train, *others)

    curves_of_seeds, keys = [], jax.random.split(jax.random.key(0), seeds)
    for parts in bilevel.data.draw_splits(name, keys, train=n, valid=n, test=test):
        x, x_valid, x_test = unit_inputs(*(rows.astype(float) for rows, _ in parts))
        y, y_valid = (sign_labels(labels, 10) for _, labels in parts[:2])
        # Pieces of equal shape need a single compilation.
        pieces = [space.blocks(x_test[k : k + n], x) for k in range(0, test, n)]
        held_out = jnp.concatenate(pieces, axis=2), jnp.asarray(parts[2][1])
        valid = space.blocks(x_valid, x), y_valid
        curves_of_seeds.append(run((space.blocks(x), y), valid, held_out))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *curves_of_seeds)


def search(seeds, images, *, tasks=2, rows=100) -> list[dict]:
    sizes = {"feature maps": jnp.ones(20), "maps of unequal sizes": jnp.logspace(-1, 1, 20)}
    synthetic = partial(synthetic_search, seeds=seeds, n=rows)
    runs = {name: partial(synthetic, x) for name, x in [*sizes.items()][:tasks]}
    runs |= {name: partial(image_search, name, 8) for name in images}
    result_rows = []
    for task, run in runs.items():
        valid, test, mixtures = map(np.asarray, run())
        # Steps until the loss stays within 1 % of the best of the three final losses.
        near = valid <= 1.01 * valid[:, :, -1].min(axis=1)[:, None, None]
        steps = np.minimum(STEPS + 1 - np.cumprod(near[:, :, ::-1], axis=2).sum(2), STEPS)
        for i, start in enumerate(STARTS):
            row = {"part": "search", "task": task, "start": start, "steps": steps[:, i].tolist()}
            row["mixtures"] = mixtures[:, i].mean(0).tolist()  # first and last, mean over seeds
            for name, values in (("valid", valid[:, i]), ("test", test[:, i])):
                row |= {name: values.mean(0).tolist(), f"{name} ends": values[:, [0, -1]].tolist()}
            result_rows.append(row)
    return result_rows


def shown(lines) -> list[list]:
    """Format pairs of a mean and its standard error."""
    return [["{:.3f} ± {:.3f}".format(*c) if isinstance(c, list) else c for c in x] for x in lines]


@jax.jit
def predicted(p, h):
    exact, bounds = spectral.spectral_limits(p, h), oymak_theorem4_as_printed(p, h, c=1.0)
    return exact.correlation_squared, bounds.correlation.value, exact.risk, bounds.risk.value


def exact_and_bounds(p, h) -> list[str]:
    with jax.enable_x64(True):
        return [f"{float(x):.3f}" for x in predicted(float(p), float(h))]


def diagram_table(rows) -> str:
    """Return the rows of p = 2n; the figure has all."""
    lines = []
    for r in harness.where(rows, part="diagram"):
        p, h = r["p"] / r["n"], r["h"] / r["n"]
        if p == 2:
            a, b, c, d = exact_and_bounds(p, h)
            lines.append([h, f"{p * h:.2g}", r["overlap"], a, b, r["risk"], c, d])
    head = "p = 2n: h/n", "ph/n²", "overlap", "exact", "(11) ≥", "risk", "exact", "(12) ≤"
    return harness.table(head, shown(lines))


def beyond_table(rows) -> str:
    lines = []
    for r in harness.where(rows, part="beyond"):
        a, _, c, _ = exact_and_bounds(2.0, r["h"] / r["n"])
        pairs = r["overlap"], r["whitened overlap"], a, r["risk"], r["whitened risk"], c
        lines.append([r["features"], r["h"] / r["n"], *pairs])
    head = "p = 2n", "h/n", "overlap", "whitened", "exact", "risk", "whitened", "exact"
    return harness.table(head, shown(lines))


def search_table(rows) -> str:
    lines, searches = [], harness.where(rows, part="search")
    for r in searches:
        (base,) = harness.where(searches, task=r["task"], start="uniform")
        lines.append([r["task"], r["start"]])
        for name in ("valid ends", "test ends"):
            start, last = np.array(r[name]).T
            lines[-1] += map(moments, (start, last, last - np.array(base[name])[:, 1]))
        lines[-1].append(moments(r["steps"]))
    ends = "first", "last", "minus uniform's"
    head = ["task", "start", *ends, *ends, "steps to 1 %"]
    head[2], head[5] = "loss, first", "test, first"
    return harness.table(head, shown(lines))


def report(rows) -> str:
    parts = diagram_table(rows), beyond_table(rows), search_table(rows)
    return "\n\n".join([f"{rows[0]['device']}; ± one standard error.", *parts])


@harness.figure(2, 4, figsize=(17, 8))
def picture(rows, axes):
    cells = harness.where(rows, part="diagram")
    maps = {
        "simulated": np.array([r["overlap"][0] for r in cells]).reshape(len(P), len(H)).T,
        "exact": np.array(spectral.spectral_limits(*np.meshgrid(P, H)).correlation_squared),
    }
    edge = np.interp(-np.log(P), np.log(H), np.arange(len(H)), right=len(H))
    for ax, (title, values) in zip(axes[0], maps.items(), strict=False):
        ax.grid(False)
        ax.imshow(values, origin="lower", vmin=0, vmax=1, aspect="auto")
        ax.plot(edge, "--", color="white")
        ax.set(xlabel="p/n", ylabel="h/n", title=f"overlap, {title}; ph = n²")
        ax.set_ylim(-0.5, len(H) - 0.5)
        ax.set_xticks(range(len(P)), P)
        ax.set_yticks(range(len(H)), H)
        for (i, j), value in np.ndenumerate(values):
            ax.text(j, i, f"{value:.2f}", ha="center", color="k" if value > 0.6 else "w")
    for ax, name, k in ((axes[0, 2], "overlap", 0), (axes[0, 3], "risk", 2)):
        for p, color in ((2, "C0"), (8, "C1")):
            fine = np.logspace(-3.5, 1.1, 60)
            lines = np.array([exact_and_bounds(p, h / p)[k : k + 2] for h in fine], float)
            ax.plot(fine, lines[:, 0], color, label=f"exact, p = {p}n")
            ax.plot(fine, lines[:, 1], color, ls=":", label=f"the paper's bound, p = {p}n")
            of_ratio = [r for r in cells if r["p"] == p * r["n"]]
            y, error = np.array([r[name] for r in of_ratio]).T
            ax.errorbar([p * r["h"] / r["n"] for r in of_ratio], y, error, fmt=".", color=color)
        ax.axvline(1, color="black", ls="--", lw=1)
        ax.set(xscale="log", xlabel="ph/n²", title=name, ylim=(-0.05, 1.05) if k == 0 else (0, 4))
    axes[0, 3].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for k, r in enumerate(harness.where(rows, part="search")):
        ax = axes[1, k // len(STARTS)]
        ax.plot(r["valid"], label=r["start"])
        mean = f"mean of {len(r['valid ends'])} seeds"
        ax.set(title=r["task"], xlabel="outer step", ylabel=f"validation loss, {mean}")
    axes[1, 0].legend()


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report)
    jax.config.update("jax_enable_x64", True)
    rows = [harness.environment("optax", dtype="float64")]
    if flags.smoke:
        rows += diagram(20, 2, (2,), (0.3,)) + beyond(20, 2, (0.3,), ("signs",))
        rows += search(2, (), tasks=1, rows=20)
    elif flags.quick:
        rows += diagram(100, 10, (2, 8), (0.03, 0.3)) + beyond(100, 10, (0.1,)) + search(5, ())
    else:
        rows += diagram(200, 50, P, H) + beyond(100, 30, (0.03, 0.3))
        rows += search(20, ("digits", "fashion-mnist"))
    harness.finish(rows, flags.results, report, picture)


if __name__ == "__main__":
    main()
