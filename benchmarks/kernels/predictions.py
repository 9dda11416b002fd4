"""What do predictions with covariance cost, and do they agree with neural-tangents' ``predict``?

Both get the same kernels, in float64, compiled, and take turns. Times are CPU milliseconds of one
core. Differences of means and covariances are relative to the largest entry. With one kernel for
all outputs there are 400 training inputs, 100 test inputs and three outputs, with ReLU and erf.
With a kernel for each pair of outputs (as with ``outputs="full"``) there are 100 training inputs,
50 test inputs, and three outputs of 600 random features.

    python benchmarks/kernels/predictions.py            # a minute
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ntk
from benchmarks import harness

MEASURES = ("ntk/regression", "ntk/networks", "ntk/large")

PENALTY, OUTPUTS, WEIGHTS = 0.1, 3, 600
TIMES = np.array([0.1, 1.0, 10.0])
REGULARIZED = {"diag_reg": PENALTY, "diag_reg_absolute_scale": True}  # options of theirs


class Pair(NamedTuple):
    """The attribute names that ``predict`` expects."""

    nngp: Any
    ntk: Any


class Data(NamedTuple):
    train: Pair
    y: Any
    cross: Pair
    prior: Pair


Both = tuple[Callable[[Data], Any], Callable[[Data], Any]]


def parts(kernels: Pair, y, n: int) -> Data:
    old, new = slice(None, n), slice(n, None)
    blocks = (old, old), (new, old), (new, new)
    train, *others = (Pair(*(K[block] for K in kernels)) for block in blocks)
    return Data(train, jnp.asarray(y), *others)


def shared(n: int, m: int) -> Data:
    """Return one kernel for all outputs."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n + m, 10))
    kernels = ntk.network_kernel(x, activations=[ntk.relu, ntk.erf])
    return parts(Pair(kernels.nngp, kernels.ntk), rng.standard_normal((n, OUTPUTS)), n)


def full(n: int, m: int) -> Data:
    """Return a kernel for each pair of outputs."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((n + m, OUTPUTS, WEIGHTS)) / np.sqrt(WEIGHTS)
    scales = rng.uniform(0.5, 2, WEIGHTS)
    kernels = (
        jnp.asarray(np.tensordot(features * s, features, (2, 2)).swapaxes(1, 2))
        for s in (scales, 1.0)
    )
    return parts(Pair(*kernels), rng.standard_normal((n, OUTPUTS)), n)


def gaussian(mode: str, **options) -> Callable[[Data], Any]:
    """Return their inference with a Gaussian process: ``mode`` is theirs."""

    def theirs(d):
        predict = ntk.neural_tangents().predict
        peer = predict.gp_inference(d.train, d.y, PENALTY, diag_reg_absolute_scale=True, **options)
        return tuple(peer(mode, d.cross, d.prior))

    return theirs


def posterior(name: str) -> Callable[[Data], Any]:
    def ours(d):
        K, k, prior = (getattr(kernels, name) for kernels in (d.train, d.cross, d.prior))
        return tuple(ntk.posterior(K, d.y, k, prior, penalty=PENALTY))

    return ours


def our_ensemble(t) -> Callable[[Data], Any]:
    options = {"t": t, "penalty": PENALTY}
    return lambda d: tuple(ntk.ensemble(d.train, d.y, d.cross, d.prior.nngp, **options))


def ensemble(t) -> Both:
    def theirs(d):
        predict = ntk.neural_tangents().predict
        # Their inputs are row indices: their kernel function looks the kernels up.
        whole = [
            jnp.block([[a, b.T], [b, c]]) for a, b, c in zip(d.train, d.cross, d.prior, strict=True)
        ]

        def kernel(x1, x2, get, **_):
            x2 = x1 if x2 is None else x2
            kernels = Pair(*(K[x1[:, 0]][:, x2[:, 0]] for K in whole))
            return getattr(kernels, get) if isinstance(get, str) else kernels

        rows, n = jnp.arange(len(whole[0]))[:, None], len(d.y)
        options = {"learning_rate": d.y.size} | REGULARIZED
        peer = predict.gradient_descent_mse_ensemble(kernel, rows[:n], d.y, **options)
        times = None if t is jnp.inf else jnp.asarray(t)
        return tuple(peer(times, rows[n:], "ntk", compute_cov=True))

    return our_ensemble(t), theirs


def flow(each: bool) -> Both:
    """Return gradient flow of one network."""
    options = REGULARIZED | ({"trace_axes": ()} if each else {})

    def ours(d):
        return ntk.gradient_flow(d.train.ntk, d.y, TIMES, cross=d.cross.ntk, penalty=PENALTY)

    def theirs(d):
        peer = ntk.neural_tangents().predict.gradient_descent_mse(
            d.train.ntk, d.y, learning_rate=d.y.size, **options
        )
        starts = jnp.zeros_like(d.y), jnp.zeros((len(d.cross.ntk), OUTPUTS))
        return peer(jnp.asarray(TIMES), *starts, d.cross.ntk)[1]

    return ours, theirs


SHARED: dict[str, Both] = {
    "posterior, NNGP": (posterior("nngp"), gaussian("nngp")),
    "posterior, NTK": (posterior("ntk"), gaussian("ntkgp")),
    "ensemble, three times": ensemble(TIMES),
    "ensemble, limit": ensemble(jnp.inf),
    "one network, three times": flow(False),
}
FULL: dict[str, Both] = {
    "full: posterior, NNGP": (posterior("nngp"), gaussian("nngp", trace_axes=())),
    "full: ensemble, limit": (our_ensemble(jnp.inf), gaussian("ntk", trace_axes=())),
    "full: one network, three times": flow(True),
}


def work(size: str, peers: list[str]) -> Iterator[harness.Row]:
    """Run in a separate process on one core."""
    jax.config.update("jax_enable_x64", True)
    sizes = [(400, 100), (100, 50)] if size == "default" else [(40, 10), (10, 5)]
    groups = [(shared, SHARED, sizes[0]), (full, FULL, sizes[1])]
    for make, cases, (n, m) in groups[: 1 if size == "smoke" else None]:
        data = make(n, m)
        for name, calls in cases.items():
            compiled = [jax.jit(call) for call in calls[: None if peers else 1]]
            yield {"case": name, "n": n, "m": m} | compare(compiled, data)


def compare(calls, data: Data) -> harness.Row:
    results = [jax.block_until_ready(call(data)) for call in calls]
    names = ("ours_s", "theirs_s")[: len(calls)]
    row: harness.Row = dict(harness.in_turns(dict(zip(names, calls, strict=True)), (data,), 5))
    if len(calls) > 1:
        off = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), *results)
        row["difference"] = max(jax.tree.leaves(off))
    return row


def report(rows) -> str:
    lines = []
    for row in rows:
        if "case" in row:
            ours, cells = min(row["ours_s"]), ["", "", ""]
            if "theirs_s" in row:
                theirs = min(row["theirs_s"])
                cells = [f"{theirs * 1e3:.1f}", f"{theirs / ours:.1f}", f"{row['difference']:.0e}"]
            case = f"{row['case']}, {row['n']} and {row['m']} inputs"
            lines.append([case, f"{ours * 1e3:.1f}", *cells])
    head = "prediction", "ours, ms", "neural-tangents, ms", "theirs / ours", "difference"
    return harness.table(head, lines)


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report, work=work, peers=("neural-tangents",))
    rows = [harness.environment("neural-tangents")]
    rows += harness.in_own_process(__file__, flags.size, flags.peers, one_core=True)
    harness.finish(rows, flags.results, report)


if __name__ == "__main__":
    main()
