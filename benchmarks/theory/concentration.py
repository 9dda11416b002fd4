"""How fast does the validation risk approach the test risk, for all alpha at once?

Oymak et al. 2021, Theorem 1, (2)-(4): the largest difference over alpha, of the risk and of its
hypergradient, is at most sqrt(C (h_eff log(..) + tau) / n_V). Selection on V loses at most twice
that.

1. An instance with a known answer: f_a(x) = a.x, x ~ N(0, I), y = 0, squared loss, unit ball. The
   largest difference is |S - I| (spectral norm, S the sample covariance). It tends to
   2 sqrt(g) + g with g = h / n_V as both grow. The hypergradient's is 2 |S - I|. (x is not bounded
   here, so Assumption 1 fails. The rate does not need it.)
2. Activation search on digits and Fashion-MNIST, ten classes, 200 training rows. The models are
   kernel regression at infinite width, over mixture and penalty, and (on digits) a network of 64
   units, over the mixture. The held-out rows are the population. V is drawn from them with
   replacement, so V is i.i.d., and test risk and hypergradient are exact. The model of an alpha
   does not depend on V, so all V share the losses [alphas, rows] and their derivatives. The loss is
   the mean squared error over the outputs. Outputs are bounded, so the loss and its derivative are
   bounded and Lipschitz (Assumptions 2 and 2'). The suprema are over a dense sample of the set.
   Gradient ascent from its maximum, and half of the sample, show how much the sample misses.
   Selection is among the sample.

Only the part of a hypergradient within the simplex matters to a search, so we measure this part.
Intervals are standard errors over the draws of V.

    python benchmarks/theory/concentration.py            # five minutes on two cores
"""

import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

import bilevel.data
from benchmarks import harness
from benchmarks.harness import where
from bilevel import bounds
from bilevel.outer_loop.geometry import project_simplex
from bilevel.spaces import activation_space, unit_inputs
from bilevel.spaces.activations import sign_labels

MEASURES = (
    "bilevel/theory/bounds/oymak.py",
    "bilevel/theory/bounds/covering.py",
    "bilevel/spaces/activations.py",
    "bilevel/outer_loop/geometry.py",
)

NAMES = ("relu", "swish", "tanh", "sigmoid", "identity")
FACES = (2, 3, 5)  # h: mixtures of the first h
SIZES = (20, 50, 100, 200, 500, 1000)  # n_V
TRAIN, WIDTH = 200, 64
LOG_PENALTIES = np.log([1e-2, 1.0])
TAU, GAP = 3.0, 0.05


# ------------------------------------------------------------------------------ 1. known answer


def exact_instance(repeats) -> list[dict]:
    rng, rows = np.random.default_rng(0), []
    for h in (10, 40, 160):
        for inverse in (0.25, 1, 4, 16, 64):
            n, norms = int(h * inverse), []
            for _ in range(repeats):
                x = rng.standard_normal((n, h), np.float32)
                norms.append(np.abs(np.linalg.eigvalsh(x.T @ x / n - np.eye(h))).max())
            rows.append({"part": "exact", "h": h, "n": n, **summary("risk", norms)})
    return rows


def summary(name, values) -> dict:
    error = float(harness.standard_error(values))
    return {name: float(np.mean(values)), f"{name} s.e.": error}


# ------------------------------------------------------------------------------ 2. searches


def parts_of(data, pool, key):
    loaded = bilevel.data.load(data, train_size=10_000 if data != "digits" else None)
    x, y = loaded.x_train, loaded.y_train
    if data == "digits":
        x, y = np.concatenate([x, loaded.x_test]), np.concatenate([y, loaded.y_test])
    train, held = bilevel.data.stratified_split(key, y, (TRAIN, pool))
    return *unit_inputs(x[train], x[held]), *(sign_labels(y[rows], 10) for rows in (train, held))


def losses_of(data, width, pool, **steps):
    """Return ``losses(alpha, fixed)`` [rows] of trained models on the population, and ``fixed``."""
    x, x_pool, y, y_pool = parts_of(data, pool, jax.random.key(0))
    space = activation_space(NAMES, width=width, classes=10, outer="squared")
    if width == math.inf:
        blocks = space.blocks(jnp.concatenate([x, x_pool]), x)  # one compilation for both
        x, x_pool = blocks[:, :, :TRAIN], blocks[:, :, TRAIN:]
        w, solver = None, space.solver
    else:
        w = space.init(jax.random.key(1), (x, y))
        solver = space.solver(space.curvatures(w, x), **steps)

    def losses(alpha, fixed):
        w, train, (x_pool, y_pool) = fixed
        mixture = alpha[:-1]
        if width == math.inf:
            low, high = LOG_PENALTIES
            mixture = {"mixture": mixture, "log_penalty": low + (high - low) * alpha[-1]}
        w, _ = solver.run(space.problem.lower, mixture, w, solver.init(w), train)
        return ((1 - y_pool * space.apply(w, mixture, x_pool)) ** 2).mean(1)

    return losses, (w, (x, y), (x_pool, y_pool))


def alphas_of(count) -> np.ndarray:
    """Return vertices, center and ``count`` Dirichlet(1/2) points of each face: [alphas, h + 1]."""
    rng, points = np.random.default_rng(0), []
    for h in FACES:
        drawn = np.concatenate([np.full((1, h), 1 / h), rng.dirichlet(np.full(h, 0.5), count)])
        drawn = np.concatenate([np.eye(h), np.eye(h), drawn])
        penalty = np.concatenate([np.zeros(h), np.ones(h), rng.uniform(size=count + 1)])
        points.append(np.column_stack([np.pad(drawn, ((0, 0), (0, len(NAMES) - h))), penalty]))
    return rng.permutation(np.concatenate(points)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(losses, alphas, fixed):
    """Return losses [alphas, rows] and derivatives within the set [alphas, rows, h + 1]."""

    def twice(alpha):
        return (values := losses(alpha, fixed)), values

    slopes, values = jax.lax.map(jax.jacfwd(twice, has_aux=True), alphas, batch_size=2)
    return values, slopes


@functools.partial(jax.jit, static_argnums=0)
def ascend(losses, alphas, weights, fixed):
    """Maximize ``|weights . losses(alpha)|`` by projected gradient ascent from each alpha."""

    def one(start):
        alpha, weights = start

        def gap(alpha):
            return jnp.abs(weights @ losses(alpha, fixed))

        def step(alpha, size):
            value, slope = jax.value_and_grad(gap)(alpha)
            slope = slope.at[:-1].add(-slope[:-1].mean())
            alpha = alpha + size * slope / jnp.linalg.norm(slope)
            mixture, penalty = project_simplex(alpha[:-1]), jnp.clip(alpha[-1:], 0, 1)
            return jnp.concatenate([mixture, penalty]), value

        return jax.lax.scan(step, alpha, 0.1 * 0.7 ** jnp.arange(12))[1].max()

    return jax.lax.map(one, (alphas, weights), batch_size=2)


def search(data, width, pool, *, count, draws, ascents, **steps) -> list[dict]:
    name = f"{data}, {'kernel' if width == math.inf else f'{width} units'}"
    alphas, start = alphas_of(count), time.perf_counter()
    losses, fixed = losses_of(data, width, pool, **steps)
    values, slopes = map(np.asarray, evaluate(losses, jnp.asarray(alphas), fixed))
    rng, rows = np.random.default_rng(1), []
    for n in SIZES:
        weights = (rng.multinomial(n, np.full(pool, 1 / pool), draws) / n - 1 / pool).astype("f")
        gaps = values @ weights.T  # [alphas, draws]
        rises = np.einsum("arh,vr->ahv", slopes, weights, optimize=True)
        for h in FACES:
            face, inside = (alphas[:, h:-1] == 0).all(1), [*range(h), -1]
            rows.append({"part": "search", "search": name, "h": h, "n": n})
            rows[-1] |= differences(values[face].mean(1), gaps[face], rises[face][:, inside])
        sizes = np.abs(gaps[:, :ascents])
        tops = jnp.asarray(alphas[sizes.argmax(0)])
        climbed = ascend(losses, tops, jnp.asarray(weights[:ascents]), fixed)
        rows[-1]["added by ascent"] = float(np.mean(climbed / sizes.max(0) - 1))
    seconds = round(time.perf_counter() - start, 1)
    print(f"{name}: {seconds} s, compilation included", flush=True)
    head = {"part": "constants", "search": name, "kernel": width == math.inf, "rows": pool}
    head |= {"alphas": len(alphas), "draws": draws, "seconds": seconds}
    return [head | constants_of(alphas, values, slopes), *rows]


def tangential(slopes, axis):
    """Remove the part that leaves the simplex of all coordinates except the last."""
    mixture, penalty = np.split(slopes, [-1], axis)
    return np.concatenate([mixture - mixture.mean(axis, keepdims=True), penalty], axis)


def differences(risk, gaps, rises) -> dict:
    """Return the suprema over one face: of risk, hypergradient and the loss by selection on V."""
    inside = np.linalg.norm(tangential(rises, 1), axis=1)
    suprema = {"least risk": float(risk.min())}
    for name, sizes in ("risk", np.abs(gaps)), ("gradient", inside):
        tops = sizes.max(0)
        suprema |= summary(name, tops)
        suprema[f"{name}, 90 %"] = float(np.quantile(tops, 0.9))
        suprema[f"{name}, worst alpha"] = float(sizes.mean(1).max())
        suprema[f"{name}, missed by half"] = float(1 - np.mean(sizes[::2].max(0) / tops))
    suprema |= summary("gradient, all of it", np.linalg.norm(rises, axis=1).max(0))
    return suprema | summary("excess", risk[(risk[:, None] + gaps).argmin(0)] - risk.min())


def constants_of(alphas, values, slopes) -> dict:
    """Return the constants of the explicit bounds, over the sample of alpha and the population."""
    inside = tangential(slopes, 2)
    distances = np.linalg.norm(alphas[:, None] - alphas, axis=-1) + 9 * np.eye(len(alphas))
    distances[distances < 1e-3] = 9  # the same point on two faces
    near = distances.argmin(1)
    bends = [np.linalg.norm(a - inside[i], axis=1).max() for a, i in zip(inside, near, strict=True)]
    return {
        "largest loss": float(values.max()),
        "largest variance": float(values.var(axis=1).max()),
        "L": float(np.linalg.norm(inside, axis=-1).max()),
        "L, gradient": float((bends / distances.min(1)).max()),
    }


def explicit(constants) -> dict:
    """Return bounds as functions of n_V, with measured constants and with the proved L."""
    kernel, b, L = (constants[k] for k in ("kernel", "largest loss", "L"))
    # |phi|^2 = E s'(z)^2 is at most 1, its value for the identity. The squared loss, mean over
    # outputs, changes by at most 2 sqrt(b) L.
    low, high = LOG_PENALTIES
    proved = bounds.feature_map_lipschitz(
        TRAIN, h=len(NAMES), B=1.0, y_norm=math.sqrt(TRAIN), lambda0=math.exp(low)
    )
    proved = math.hypot(proved.alpha, proved.penalty * math.exp(high) * (high - low))
    of_risk = functools.partial(risk_bound, kernel, b=b)
    return {
        "measured": functools.partial(of_risk, L=L),
        "variance": functools.partial(of_risk, L=L, variance=constants["largest variance"]),
        "proved": functools.partial(of_risk, L=proved, Gamma=2 * math.sqrt(b)),
        "gradient": functools.partial(slope_bound, kernel, G=L, L=constants["L, gradient"]),
    }


def covering(kernel):
    """Return the covering number of the mixtures, and of the penalty if it is learned."""
    h = len(NAMES)
    dim, extent = (h, 1 / 4) if kernel else (h - 1, 0)
    return bounds.ball_covering(dim, math.sqrt(1 - 1 / h + extent))


# Compiled once for all searches: the constants are arguments.
@functools.partial(jax.jit, static_argnums=0)
def risk_bound(kernel, n, *, b, L, Gamma=1.0, variance=None):
    constants = {"L": L, "Gamma": Gamma, "b": b, "variance": variance}
    return bounds.uniform_convergence(n, covering=covering(kernel), tau=TAU, **constants)


@functools.partial(jax.jit, static_argnums=0)
def slope_bound(kernel, n, *, G, L):
    return bounds.hypergradient_convergence(n, covering=covering(kernel), G=G, L=L, tau=TAU)


# ------------------------------------------------------------------------------ the report


def exponent(rows, name, against=SIZES) -> tuple[float, float]:
    """Return the weighted slope of log(value) in log(against), and its standard error."""
    y, error = (np.array([row[key] for row in rows]) for key in (name, f"{name} s.e."))
    y, error, x = y[y > 0], error[y > 0], np.log(against)[y > 0]
    if len(y) < 2:  # selection lost nothing
        return math.nan, math.nan
    line, covariance = np.polyfit(x, np.log(y), 1, w=y / error, cov="unscaled")
    return float(line[0]), float(math.sqrt(covariance[0, 0]))


LABELS = {"risk": "risk", "gradient": "hypergradient", "excess": "loss by selection, %"}


def of_searches(rows):
    """Return pairs of the constants of a search and its rows."""
    for constants in where(rows, part="constants"):
        yield constants, where(rows, part="search", search=constants["search"])


def gap_table(rows) -> str:
    lines = []
    for constants, of_search in of_searches(rows):
        whole_face = where(of_search, h=FACES[-1])
        for name, label in LABELS.items():
            scale = 100 / whole_face[0]["least risk"] if name == "excess" else 1
            cells = [f"{scale * row[name]:.2g}" for row in whole_face]
            fit = "{:.2f} ± {:.2f}".format(*exponent(whole_face, name))
            lines.append([f"{constants['search']}: {label}", *cells, fit])
    head = ["largest gap over alpha, n_V =", *SIZES, "exponent of n_V, ± s.e."]
    return harness.table(head, lines)


def comparison_table(rows) -> str:
    searches = list(of_searches(rows))
    columns = [comparison(*search) for search in searches]
    lines = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return harness.table(["", *(constants["search"] for constants, _ in searches)], lines)


def report(rows) -> str:
    findings = "\n".join(f"- {sentence}" for sentence in verdicts(rows))
    return "\n\n".join([gap_table(rows), comparison_table(rows), findings])


def comparison(constants, rows) -> dict:
    """Return the value to compare with the largest gap: a column of the second table."""
    few, many = where(rows, h=FACES[0]), where(rows, h=FACES[-1])
    bound = explicit(constants)

    def mean(name, other=None, rows=many):
        return np.mean([row[name] / row.get(other, 1) for row in rows])

    def price(name):
        return ", ".join(f"{mean(name, f'{name}, worst alpha', rows):.2f}" for rows in (few, many))

    def excess(kind, name):
        ratios = [float(bound[kind](float(row["n"])).value) / row[f"{name}, 90 %"] for row in many]
        return f"{min(ratios):.0f} to {max(ratios):.0f}"

    kinds = "variance", "measured", "proved"
    asked = [f"{bounds.sample_size(GAP, bound[kind]):,}" for kind in kinds]
    near = [row["n"] for row in many if row["excess"] <= 0.01 * row["least risk"]]
    lost = max(row["excess"] / row["risk"] for row in many)
    needed = np.mean([(row["risk, 90 %"] / GAP) ** 2 * row["n"] for row in many])
    missed = [100 * mean(f"{name}, missed by half") for name in ("risk", "gradient")]
    return {
        f"gap / mean gap of the worst single alpha, h = {FACES[0]}, {FACES[-1]}": price("risk"),
        "the same of hypergradients": price("gradient"),
        "selection within 1 % of the least risk from n_V =": near[0] if near else "none",
        "loss by selection / gap, at most; (3) has 2": f"{lost:.2g}",
        f"n_V for a gap of {GAP} with probability 0.9": f"{needed:.0f}",
        "the same by the explicit bound, L and variance measured": asked[0],
        "the same, L measured": asked[1],
        "the same, L proved": asked[2] if constants["kernel"] else "-",
        "explicit bound / gap, L and variance measured": excess("variance", "risk"),
        "explicit bound / gap of hypergradients": excess("gradient", "gradient"),
        "alphas, draws of V": f"{constants['alphas']}, {constants['draws']}",
        "ascent adds to the gap, %": f"{100 * mean('added by ascent'):.1f}",
        "half of the alphas miss, %; of hypergradients": "{:.1f}; {:.0f}".format(*missed),
    }


def verdicts(rows):
    many = [row for row in where(rows, part="exact") if row["n"] >= 4 * row["h"]]
    last = [where(of_search, h=FACES[-1]) for _, of_search in of_searches(rows)]
    slopes = {name: [exponent(entries, name) for entries in last] for name in LABELS}
    shares = np.array([row["h"] / row["n"] for row in many])
    gaps = np.array([row["risk"] for row in many])
    ratios, near = gaps / np.sqrt(shares), gaps / (2 * np.sqrt(shares) + shares)
    slope, error = exponent(many, "risk", shares)
    yield (
        f"Known answer, n_V >= 4 h: gap / sqrt(h / n_V) is {ratios.min():.2f} to "
        f"{ratios.max():.2f}, {near.min():.2f} to {near.max():.2f} times the limit; exponent of "
        f"h / n_V {slope:.3f} ± {error:.3f} (the limit's: 0.53 to 0.60)."
    )
    ranges = {k: f"{min(pairs)[0]:.2f} to {max(pairs)[0]:.2f}" for k, pairs in slopes.items()}
    yield (
        f"Searches: exponents of n_V {ranges['risk']} (risk), {ranges['gradient']} "
        f"(hypergradient), {ranges['excess']} (loss by selection); (2) and (4) have -1/2."
    )
    # A single alpha has E |a'(S - I)a| = sqrt(2 / n) E |z| = 2 / sqrt(pi n). All alphas together
    # have 2 sqrt(h / n).
    yield (
        "Known answer: uniformity in alpha costs a factor sqrt(pi h), "
        f"{math.sqrt(math.pi * FACES[-1]):.1f} for h = {FACES[-1]}."
    )


@harness.figure(2, 2, figsize=(11, 8.5))
def picture(rows, axes):
    known, risk, gradient, loss = axes.flat
    for h in (10, 40, 160):
        exact = where(rows, part="exact", h=h)
        points = zip(*((h / r["n"], r["risk"], r["risk s.e."]) for r in exact), strict=True)
        known.errorbar(*points, fmt="o", label=f"h = {h}", alpha=0.7)
    g = np.geomspace(1 / 80, 5)
    known.plot(g, 2 * np.sqrt(g) + g, "k", ls="-", label=r"$2\sqrt{g} + g$")
    known.plot(g, 2 * np.sqrt(g), "k:", label=r"$2\sqrt{g}$")
    for i, constants in enumerate(where(rows, part="constants")):
        of_search = where(rows, part="search", search=constants["search"], h=len(NAMES))
        for axis, name in (risk, "risk"), (gradient, "gradient"), (loss, "excess"):
            scale = 1 / of_search[0]["least risk"] if name == "excess" else 1
            values = scale * np.array([[r[name], r[f"{name} s.e."]] for r in of_search]).T
            values[:, values[0] == 0] = np.nan  # selection lost nothing
            axis.errorbar(SIZES, *values, fmt=f"C{i}o-", label=constants["search"])
            if axis is not loss:
                axis.plot(SIZES, values[0, -1] * np.sqrt(SIZES[-1] / np.array(SIZES)), "k:", lw=1)
        bound = explicit(constants)
        lines = [(risk, "variance", "-"), (risk, "measured", "--"), (gradient, "gradient", "--")]
        for axis, name, style in (*lines, *[(risk, "proved", "-.")] * constants["kernel"]):
            points = [float(bound[name](float(n)).value) for n in SIZES]
            axis.plot(SIZES, points, f"C{i}{style}", lw=1)
    known.set(title="known answer: gap of the risk", xlabel="g = h / n_V")
    risk.set_title("search, gap of the risk; dotted 1 / sqrt(n_V)\n"
                   "bound: with variance solid, with L dashed, L proved dash-dot")  # fmt: skip
    gradient.set_title("search, gap of the hypergradient; bound dashed")
    loss.set_title("search, loss by selection on V, share of the least risk")
    loss.axhline(0.01, color="k", ls=":", lw=1)
    lost = [r["excess"] / r["least risk"] for r in where(rows, part="search", h=len(NAMES))]
    bottom = min(x for x in lost if x > 0) / 5  # an error bar to 0 would stretch the axis
    gap = "gap of the risk"
    labels = gap, gap, "gap of the hypergradient", "share of the least risk"
    for axis, label in zip(axes.flat, labels, strict=True):
        axis.set(xscale="log", yscale="log", ylabel=f"{label}, mean ± s.e.")
        axis.set_xlabel(axis.get_xlabel() or "validation rows n_V")
        if axis in (known, loss):
            axis.legend()
    loss.set_ylim(bottom=bottom)


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report)
    seeds = {"rows": 0, "weights": 1, "alphas": 0, "draws of V": 1, "instance": 0}
    repeats = {"smoke": 2, "quick": 10, "default": 40}[flags.size]
    rows = [harness.environment(seeds=seeds), *exact_instance(repeats)]
    if flags.smoke:
        rows += search("digits", 16, 30, count=0, draws=2, ascents=1, steps=1)
    elif flags.quick:
        rows += search("digits", math.inf, 1500, count=60, draws=50, ascents=2)
    else:
        rows += search("digits", math.inf, 1500, count=300, draws=200, ascents=6)
        rows += search("fashion-mnist", math.inf, 3000, count=300, draws=200, ascents=6)
        rows += search("digits", WIDTH, 1500, count=60, draws=200, ascents=3)
    harness.finish(rows, flags.results, report, picture)


if __name__ == "__main__":
    main()
