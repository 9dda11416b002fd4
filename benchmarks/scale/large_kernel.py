"""Can we do regression in 4 GiB with a kernel of all 60,000 images of MNIST, 14 GB in float32?

The kernel is the tangent kernel of an infinitely wide ReLU network of three layers, on images of
unit norm. The task is ridge regression on the ten labels, one-hot minus 1/10, by
:func:`ntk.iterative_regression`. It computes the kernel in tiles, once for every pass of block
conjugate gradients. Each pass prints a line and saves the solver's state, so the same command
resumes after a kill.

    python benchmarks/scale/large_kernel.py                # 60,000 rows; results/large_kernel.jsonl
    python benchmarks/scale/large_kernel.py --rows 5000    # fewer; rows are added to the results

Only the penalty was chosen, at 5,000 images, where 1e-4 to 0.03 give test errors of 3.85 to 3.92 %.
"""

import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bilevel.data
import ntk
from benchmarks import harness
from bilevel.runs import records
from ntk.expectations.gaussian import arc_cosines
from ntk.large.block_cg import SolverState

MEASURES = ("ntk/large", "ntk/infinite", "ntk/expectations")

RUNS = Path(__file__).parents[2] / "runs" / "large_kernel"
VARIANCES, TILE = (1.0, 2.0, 2.0), 2048
FLAGS = {
    "rows": {"type": int, "help": "training images, the first ones (60000)"},
    "rank": {"type": int, "default": 3000, "help": "of the preconditioner (3000)"},
    "penalty": {"type": float, "default": 1e-2, "help": "on the kernel's diagonal of 6 (0.01)"},
    "tol": {"type": float, "default": 1e-4, "help": "relative residual of every label (1e-4)"},
    "probes": {"type": int, "default": 0, "help": "signs for leave-one-out errors; 0: without"},
    "eigenvalue": {"type": int, "default": 0, "help": "passes for the smallest one; 0: without"},
}


def kernel(x1, x2=None):
    """Compute ``ntk.network_kernel`` of two ReLU layers, for float32 and inputs of unit norm.

    It takes one product for the angles instead of three, without an error bound, and is four times
    as fast. Entries agree to 1e-6, except for near-duplicates, with angles off by 4e-4.
    """
    rho = jnp.matmul(x1, (x1 if x2 is None else x2).T, precision="highest")
    p = jnp.clip((1 - rho) / 2, 0, 1)
    if x2 is None:
        p = p * (1 - jnp.eye(len(x1), dtype=p.dtype))
    second, tangent, size = 1 - 2 * p, jnp.zeros_like(p), 1.0
    for c in VARIANCES[:-1]:
        step, relu, gap = arc_cosines(p, 1 - p)
        size = c * size / 2
        tangent, second, p = c * step * (second + tangent), 2 * size * relu, gap
    return VARIANCES[-1] * (second + tangent)


def unit(images):
    x = np.asarray(images, np.float32).reshape(len(images), -1)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def deviation(x) -> float:
    """Return the largest difference from ``ntk.network_kernel`` in off-diagonal entries."""
    exact = ntk.network_kernel(x, activations=[ntk.relu, ntk.relu], variances=VARIANCES).ntk
    off = np.abs(np.asarray(kernel(x, x)) - exact)
    return float(off[~np.eye(len(x), dtype=bool)].max())


def clocks() -> np.ndarray:
    """Return wall seconds, and CPU seconds of all cores."""
    return np.array([time.perf_counter(), time.process_time()])


class SavedState:
    """The solver's state on disk, saved after every pass."""

    def __init__(self, flags, settings):
        self.path, self.settings = RUNS / f"{settings['rows']}.npz", settings
        self.began, self.quiet = clocks(), flags.small
        if not self.quiet:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def load(self):
        if self.quiet or not self.path.exists():
            return None
        arrays, notes = records.read_arrays(self.path)
        if notes["settings"] != self.settings:
            print(f"{self.path.name}: of other settings; starting anew", flush=True)
            return None
        self.began = clocks() - notes["seconds"]
        state = SolverState(*(arrays[name] for name in SolverState._fields))
        print(f"going on after {int(state.steps)} passes", flush=True)
        return state

    def seconds(self) -> list[float]:
        """Return the seconds of both clocks, earlier sessions included."""
        return (clocks() - self.began).tolist()

    def save(self, state):
        residual = float(state.residual.max())  # waits until it is computed
        wall, cpu = seconds = self.seconds()
        what = "residual" if state.computed else "residual (by the recurrence)"
        spent = f"{wall:.0f} s ({cpu:.0f} s of CPU)"
        print(f"pass {int(state.steps):3d}: {what} {residual:.2e}, {spent}", flush=True)
        if not self.quiet:
            arrays = {name: np.asarray(x) for name, x in state._asdict().items()}
            records.write_arrays(self.path, arrays, {"settings": self.settings, "seconds": seconds})


def measure(flags) -> harness.Row:
    rows = flags.rows or {"smoke": 200, "quick": 1000}.get(flags.size, 60_000)
    rank = min(flags.rank, rows // 4)
    settings = {"rows": rows, "rank": rank, "penalty": flags.penalty, "tol": flags.tol}
    data = bilevel.data.load("digits" if flags.smoke else "mnist")
    x, labels = unit(data.x_train[:rows]), np.asarray(data.y_train[:rows])
    K = ntk.KernelOperator(kernel, x, tile=TILE)
    y = np.eye(10, dtype=np.float32)[labels] - 0.1
    saved = SavedState(flags, settings)
    start = saved.load()
    print(f"{rows} rows: a factor of rank {rank} for the preconditioner", flush=True)
    partial = jax.block_until_ready(ntk.partial_cholesky(K, rank, key=jax.random.key(0)))
    left = partial.residual_diagonal.mean()
    print(f"done, {saved.seconds()[0]:.0f} s; it leaves {left:.3f} of 6", flush=True)
    options = {"penalty": flags.penalty, "preconditioner": partial, "tol": flags.tol}
    fit = ntk.iterative_regression(K, y, **options, start=start, callback=saved.save)
    new = K.at(unit(data.x_test))
    values = np.asarray(fit.predict(new))
    wall, cpu = saved.seconds()
    row = settings | {
        "part": "regression",
        "steps": int(fit.steps),
        "residual": float(fit.relative.max()),
        "test_error": float(np.mean(values.argmax(1) != np.asarray(data.y_test))),
        "certain": certain(values, np.asarray(fit.error_bound(new.diagonal()))),
        "seconds": wall,
        "cpu_seconds": cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "kernel_mb": rows**2 * 4 / 1e6,
        "multiply_adds": multiply_adds(rows, rank, x.shape[1], int(fit.steps), len(values)),
        "deviation": deviation(x[:512]),
    }
    row |= leave_one_out(flags, K, fit, partial, labels)
    row |= smallest(flags, K, partial)
    saved.path.unlink(missing_ok=True)
    return row


def certain(values, bound) -> float:
    """Return the share of test images with a label that the error bound makes final."""
    two = np.argsort(values, axis=1)[:, -2:]
    margin = np.diff(np.take_along_axis(values, two, 1))[:, 0]
    return float(np.mean(margin > np.take_along_axis(bound, two, 1).sum(1)))


def multiply_adds(n, rank, d, steps, tests) -> float:
    """Count multiply-adds in matrix products: passes, factor and preconditioner, predictions."""
    entries = n**2 / 2
    passes = steps * (entries * (d + 2 * 10) + 2 * n * rank * 10)
    return passes + n * rank * d + 2 * n * rank**2 + tests * n * (d + 10)


def leave_one_out(flags, K, fit, partial, labels) -> harness.Row:
    if not flags.probes:
        return {}
    estimate = ntk.leave_one_out_estimate(
        K, fit, key=jax.random.key(1), probes=flags.probes, preconditioner=partial
    )
    y = np.eye(10)[labels] - 0.1
    wrong = (y - np.asarray(estimate.residuals)).argmax(1) != labels
    return {
        "leave_one_out_error": float(np.mean(wrong)),
        "leave_one_out_standard_error": float(np.sqrt(np.mean(estimate.standard_error**2))),
        "leave_one_out_steps": int(estimate.steps),
    }


def smallest(flags, K, partial) -> harness.Row:
    if not flags.eigenvalue:
        return {}
    interval = ntk.eigenvalue_interval(
        K, key=jax.random.key(2), preconditioner=partial, steps=flags.eigenvalue
    )
    return {"lower": float(interval.lower), "upper": float(interval.upper)}


def scale(rows: list[harness.Row]) -> str:
    """Return a table of the last regression of every size."""
    last = {row["rows"]: row for row in harness.where(rows, part="regression")}
    head = (
        "rows", "kernel, GB", "rank", "passes", "relative residual", "test error",
        "labels certain", "left-one-out error", "smallest eigenvalue", "peak memory, GB",
        "CPU minutes", "multiply-adds",
    )  # fmt: skip
    lines = [
        (
            f"{n:,}", f"{r['kernel_mb'] / 1e3:.2f}", r["rank"], r["steps"], f"{r['residual']:.1e}",
            f"{100 * r['test_error']:.2f} %", f"{100 * r['certain']:.1f} %",
            f"{100 * r['leave_one_out_error']:.2f} %" if "leave_one_out_error" in r else "",
            f"{r['lower']:.3f} to {r['upper']:.3f}" if "lower" in r else "",
            f"{r['peak_mb'] / 1e3:.2f}", f"{r['cpu_seconds'] / 60:.1f}",
            f"{r['multiply_adds']:.1e}",
        )
        for n, r in sorted(last.items())
    ]  # fmt: skip
    return harness.table(head, lines)


def main():
    flags = harness.command_line(__file__, __doc__, scale, **FLAGS)
    row = measure(flags)
    print(row)
    harness.keep(flags.results, harness.begun(flags.results), row)
    harness.finish([row], flags.results, scale, write_rows=False)


if __name__ == "__main__":
    main()
