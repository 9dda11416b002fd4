"""How does the kernel's smallest eigenvalue change with depth?  (Zhu et al. 2022, Appendix F.4)

Plain networks of one activation, L = 3 to 10 layers, with all skips or with none:

1. `infinite`: the NTK of the infinitely wide network, exactly, in float64 (`ntk.network_kernel`);
2. `finite`: the NTK of networks of the paper's width, 1024, drawn for each seed; one output.

Both are in Lemma 1's parametrization. The paper's simulation is meant to verify the conclusions
from Theorem 1. The paper does not state its inputs. Here they are Fashion-MNIST's first rows,
centered and of unit norm as the theorem assumes. The conclusions are about bounds of the
eigenvalue, which fail as printed (docs/errata.md). Here we test them on the eigenvalue itself.

    python benchmarks/deep_search/eigenvalue_depth.py            # resumable
"""

import dataclasses
import functools
import math
import time

import jax
import numpy as np

import bilevel.data
import ntk
from benchmarks import harness, verdicts
from benchmarks.deep_search.activation_skip_tables import FAMILY, SKIPS
from bilevel.spaces import skip_space, unit_inputs
from bilevel.spaces.activations import ACTIVATIONS
from bilevel.spaces.skips import CANDIDATES, SkipArchitecture

MEASURES = ("bilevel/spaces/skips.py", "ntk/infinite", "ntk/expectations", "ntk/empirical")

MARKERS = dict(zip(CANDIDATES, "os^Dv", strict=True))


@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: int
    width: int
    seeds: int
    depths: tuple[int, ...] = (3, 4, 5, 6, 7, 8, 9, 10)
    drawn: tuple[int, ...] = (3, 5, 7, 10)  # depths of finite networks
    data: str = "fashion-mnist"


SIZES = {
    "smoke": Sizes(8, 16, seeds=1, depths=(3,), drawn=(3,), data="digits"),
    "quick": Sizes(30, 64, seeds=2, depths=(3, 4, 6), drawn=(3, 6), data="digits"),
    "default": Sizes(100, 1024, seeds=3),
}


def smallest(theta) -> dict:
    theta = np.asarray(theta, float)
    values = np.linalg.eigvalsh(theta)
    return {"λ_min": float(values[0]), "mean diagonal": float(np.trace(theta) / len(theta))}


def infinite_kernel(space, architecture, x) -> dict:
    """Return the fields of the infinite network's NTK, in float64."""
    with jax.enable_x64(True):
        return smallest(space.kernel(architecture, x.astype(np.float64)).ntk)


def plain(architecture, width):
    """Return `space.apply` with a leaf per matrix, so that their gradients are kept as factors."""
    gain = math.sqrt(2 / width)

    def apply(w, x):
        first, *hidden, last = w
        s, *above = [ACTIVATIONS[name] for name in architecture.activations]
        f = s(x @ first)
        for s, skip, matrix in zip(above, architecture.skips, hidden, strict=True):
            f = s(gain * f @ matrix) + skip * f
        return (gain * f @ last)[:, 0]

    return apply


def finite(x, depth, architecture, width, seed) -> dict:
    space = skip_space(depth=depth, width=width, classes=2)
    drawn = space.init(jax.random.key(seed), (x, None))
    w = [drawn["first"], *drawn["hidden"], drawn["last"]]
    apply = plain(architecture, width)
    f, own = space.apply(drawn, architecture, x), apply(w, x)
    np.testing.assert_allclose(own, f, rtol=0, atol=1e-4 * np.abs(f).max())
    return smallest(ntk.empirical_kernel(apply, w, x, method="layerwise"))


def tasks(sizes):
    """Return the keys of every row, and a function that measures it."""
    x = np.asarray(unit_inputs(bilevel.data.load(sizes.data).x_train[: sizes.rows]))
    for depth in sizes.depths:
        space = skip_space(depth=depth)
        for activation in CANDIDATES:
            for label, skip in SKIPS.items():
                row = {"depth": depth, "activation": activation, "skips": label}
                skips = (skip,) * (depth - 2)
                single = SkipArchitecture((activation,) * (depth - 1), skips)
                yield {"part": "infinite"} | row, timed(infinite_kernel, space, single, x)
                for seed in range(sizes.seeds * (depth in sizes.drawn)):
                    measure = timed(finite, x, depth, single, sizes.width, seed)
                    yield {"part": "finite", "seed": seed} | row, measure


def timed(measure, *arguments):
    """Return a function that measures a row and its seconds."""

    def run() -> dict:
        start = time.perf_counter()
        return measure(*arguments) | {"seconds": time.perf_counter() - start}

    return run


def show(row) -> str:
    return " ".join(map(str, (row["part"], row["depth"], row["activation"], row["λ_min"])))


def values(rows, part, skips, scaled=False):
    """Return λ_min [activations, depths], or its ratio to the mean diagonal: means over seeds."""
    chosen = harness.where(rows, part=part, skips=skips)
    depths = sorted({row["depth"] for row in chosen})

    def mean(activation, depth):
        cell = harness.where(chosen, activation=activation, depth=depth)
        return np.mean([row["λ_min"] / (row["mean diagonal"] if scaled else 1) for row in cell])

    return np.array([[mean(a, depth) for depth in depths] for a in CANDIDATES]), depths


def draws(rows, part, skips):
    """Return λ_min [seeds, activations, depths]. Infinite networks have one "seed"."""
    chosen = harness.where(rows, part=part, skips=skips)
    seeds = sorted({row.get("seed", 0) for row in chosen})
    each = ([row for row in chosen if row.get("seed", 0) == seed] for seed in seeds)
    return np.array([values(of_seed, part, skips)[0] for of_seed in each])


def clearly(x):
    """Return whether the mean is positive; at finite width, beyond the noise of the seeds."""
    return verdicts.clearly(x) if len(x) > 1 else x[0] > 0


def findings(rows, part):
    """Return verdicts, conclusions and measurements; infinite width has no randomness."""
    grade = functools.partial(verdicts.grade, papers_setting=part == "infinite")
    plain, depths = values(rows, part, "no skips")
    without, skips = (draws(rows, part, label) for label in SKIPS)
    always = clearly(np.diff(skips)).all(axis=1)
    ends = clearly(skips[..., -1] - skips[..., 0])
    text = f"{always.sum()} of {len(CANDIDATES)} activations grow at every depth, "
    text += f"{ends.sum()} from L = {depths[0]} to {depths[-1]}"
    yield grade(always.all(), ends.sum() > 2), "with skips λ_min grows with L", text
    larger = clearly(skips - without)
    text = f"larger with all skips than with none in {larger.sum()} of {larger.size} cases"
    yield grade(larger.all(), larger.mean() > 0.5), "with the number of skips too", text
    growth = plain[:, -1] / plain[:, 0]
    seen = abs(growth[0] - 1) < 0.05, growth[1] > 1, *(growth[2:] < 1)
    text = ", ".join(f"{a} {g:.2g}" for a, g in zip(CANDIDATES, growth, strict=True))
    claim = "without skips ReLU's stays (within 5 %), LeakyReLU's grows, the others' fall"
    yield grade(all(seen), sum(seen) > 2), claim, f"from first to last: times {text}"
    lambda_min = np.stack([without, skips], axis=1)  # [seeds, 2, activations, depths]
    leads = lambda_min[:, :, FAMILY, None] - np.delete(lambda_min, FAMILY, axis=2)[:, :, None]
    first = clearly(leads).all(axis=(1, 2))
    largest = (leads.mean(axis=0) > 0).all(axis=(1, 2))
    text = f"the two largest in {largest.sum()} of {largest.size} cases"
    text += f", by two standard errors in {first.sum()}" * (len(lambda_min) > 1)
    yield grade(first.all(), first.mean() > 0.5), "ReLU's and LeakyReLU's are the largest", text


def verdict_table(rows) -> str:
    lines = []
    for part in ("infinite", "finite"):
        lines += [[part, claim, grade, text] for grade, claim, text in findings(rows, part)]
    return harness.table(["width", "the paper's conclusion", "of λ_min itself", "seen"], lines)


def growth_table(rows) -> str:
    """Return λ_min of the infinite network at the first and the last depth, by activation."""
    columns = {
        f"{label}{', by the mean diagonal' * scaled}": values(rows, "infinite", label, scaled)[0]
        for scaled in (False, True)
        for label in SKIPS
    }
    lines = [
        [activation, *(f"{mean[i, 0]:.2g} to {mean[i, -1]:.2g}" for mean in columns.values())]
        for i, activation in enumerate(CANDIDATES)
    ]
    depths = rows[0]["sizes"]["depths"]
    return harness.table([f"λ_min, L = {depths[0]} to {depths[-1]}", *columns], lines)


def report(rows) -> str:
    sizes, seconds = rows[0]["sizes"], sum(row.get("seconds", 0) for row in rows)
    title = (
        f"{sizes['data']}: {sizes['rows']} rows; finite: width {sizes['width']}, mean of "
        f"{sizes['seeds']} seeds; {rows[0]['device']}, {seconds:.0f} s."
    )
    return "\n\n".join([title, verdict_table(rows), growth_table(rows)])


@harness.figure(1, 2, figsize=(11, 4.4))
def picture(rows, axes):
    for ax, label in zip(axes, SKIPS, strict=True):
        means, depths = values(rows, "infinite", label)
        drawn, at = values(rows, "finite", label)
        for i, activation in enumerate(CANDIDATES):
            (line,) = ax.plot(depths, means[i], label=activation)
            ax.plot(at, drawn[i], MARKERS[activation], color=line.get_color())
        ax.set(title=label, xlabel="layers L", yscale="log")
    axes[0].set_ylabel("smallest eigenvalue of the NTK")
    axes[0].legend(title="line: infinite width; mark: 1024")


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report)
    sizes = SIZES[flags.size]
    rows = harness.begun(flags.results, seed=0, sizes=dataclasses.asdict(sizes))
    harness.measure_missing(flags.results, rows, tasks(sizes), show)
    harness.finish(rows, flags.results, report, picture, write_rows=False)


if __name__ == "__main__":
    main()
