"""What training that is short has: truncations, standard errors, distilled steps, streams, logs.

The toy has ``w* = alpha``: a gradient step at rate r takes w to w + r (alpha - w), so that after T
steps the weights are ``alpha + (1 - r)^T (w0 - alpha)``, and the outer loss ``<batch, w>`` has the
slope ``mean(batch) sum_{t < K} r (1 - r)^t`` by the last K steps.
"""

import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from benchmarks.reliability.case import Case, eps, near, that
from benchmarks.reliability.registry import generates


def lower(w, alpha, batch):
    return 0.5 * jnp.sum((w - alpha) ** 2)


def outer(w, alpha, batch):
    return jnp.vdot(w, batch.mean(0))


PROBLEM = bilevel.Problem(lower, outer)


def _arrays(rng, dtype, rows=8):
    scale = 10 ** rng.uniform(-2, 2)
    shapes = {"alpha": (3,), "w0": (3,), "valid": (rows, 3)}
    return {k: jnp.asarray(scale * rng.normal(size=s), dtype) for k, s in shapes.items()}


def _slopes(valid, rate, steps):
    """By the last 0, 1, ... steps: [steps + 1, 3], float64."""
    share = 1 - (1 - rate) ** np.arange(steps + 1)
    return share[:, None] * np.asarray(valid, np.float64).mean(0)


@generates("bilevel.truncation")
def truncation(rng, dtype) -> Case:
    rate, steps = float(rng.uniform(0.05, 0.9)), int(rng.integers(1, 6))
    arrays = _arrays(rng, dtype)

    def call(alpha, w0, valid):
        return bilevel.truncation(PROBLEM, rate, steps)(alpha, w0, None, valid).grads

    expected = _slopes(arrays["valid"], rate, steps)
    check = lambda r: near("grads", r, expected, 1e3 * eps(dtype))
    kinds = {"alpha": "tree", "w0": "tree", "valid": "values"}
    # alpha and w0 of any shape that broadcasts are another problem's; none of their values shows.
    return Case(call, arrays, check, {"valid": kinds["valid"]}, ("valid",), vmapped=False)


@generates("bilevel.truncation options")
def truncation_options(rng, dtype) -> Case:
    arrays = _arrays(rng, dtype)

    def call(optimizer, steps, batches):
        fn = bilevel.truncation(PROBLEM, optimizer, steps, batches=batches)
        return fn(arrays["alpha"], arrays["w0"], None, arrays["valid"]).grads

    arguments = {"optimizer": 0.1, "steps": 2, "batches": None}
    expected = _slopes(arrays["valid"], 0.1, 2)
    check = lambda r: near("grads", r, expected, 1e3 * eps(dtype))
    kinds = {"optimizer": "function", "steps": "count"}
    fine = ("optimizer: a number", "optimizer: an array")
    return Case(call, arguments, check, kinds, fine=fine)


@generates("bilevel.standard_error")
def standard_error(rng, dtype) -> Case:
    parts = int(rng.choice([2, 4, 8]))
    arrays = _arrays(rng, dtype)
    fn = bilevel.hypergradient(PROBLEM, bilevel.unrolled(0.5, 1), diagnostics=False)

    def call(valid, parts):
        return bilevel.standard_error(fn, parts)(arrays["alpha"], arrays["w0"], None, valid).error

    means = 0.5 * np.asarray(arrays["valid"], np.float64).reshape(parts, -1, 3).mean(1)
    expected = means.std(0, ddof=1) / parts**0.5
    check = lambda r: near("error", r, expected, 1e4 * eps(dtype))
    arguments = {"valid": arrays["valid"], "parts": parts}
    return Case(call, arguments, check, {"valid": "values", "parts": "count"}, ("valid",))


@generates("bilevel.distilled")
def distilled(rng, dtype) -> Case:
    decay, rate = float(rng.uniform(0, 0.95)), float(rng.uniform(0.05, 0.9))
    arrays = _arrays(rng, dtype)

    def call(alpha, w0, valid, decay):
        solver = bilevel.distilled(rate, decay=decay)
        fn = bilevel.hypergradient(PROBLEM, solver, diagnostics=False)
        return fn(alpha, w0, None, valid).grad

    expected = _slopes(arrays["valid"], rate, 1)[1]  # the first step has no past
    check = lambda r: near("grad", r, expected, 1e3 * eps(dtype))
    if rng.random() < 0.3:
        wrong = float(rng.choice([-0.1, 1.0, np.nan, np.inf]))
        return Case(call, arrays | {"decay": wrong}, check, {}, mistake=f"a decay of {wrong}")
    kinds = {"valid": "values"}
    return Case(call, arrays | {"decay": decay}, check, kinds, ("valid",), vmapped=False)


@generates("bilevel.stream")
def stream(rng, dtype) -> Case:
    steps = int(rng.integers(1, 6))
    arrays = _arrays(rng, dtype, rows=steps)

    def call(source, chunk):
        return bilevel.search(
            *(PROBLEM, bilevel.unrolled(0.5, 1), optax.sgd(0.0), arrays["alpha"], arrays["w0"]),
            *(None, None),
            batches=bilevel.stream(source),
            steps=steps,
            chunk=chunk,
            progress=False,
        ).history["value"]

    w, a, v = (np.asarray(arrays[k], np.float64) for k in ("w0", "alpha", "valid"))
    weights = [a + 0.5 ** (t + 1) * (w - a) for t in range(steps)]
    expected = [row @ at for row, at in zip(v, weights, strict=True)]
    check = lambda r: near("values", r, np.array(expected), 1e4 * eps(dtype))
    pairs = [(np.zeros(1), row[None]) for row in np.asarray(arrays["valid"])]
    source = pairs if rng.random() < 0.5 else lambda step: pairs[step:]
    chunk = [None, 1, 3][rng.integers(3)]
    if rng.random() < 0.4:
        wrong = {
            "a number": 3,
            "a text": "file",
            "no pairs": [row for row in np.asarray(arrays["valid"])],
            "none at all": [],
            "one of another shape": [(np.zeros(2), pairs[0][1]), *pairs] if steps > 1 else [],
        }
        what = str(rng.choice(list(wrong)))
        return Case(call, {"source": wrong[what], "chunk": chunk}, check, {}, mistake=what)
    return Case(call, {"source": source, "chunk": chunk}, check, {"chunk": "count?"})


@generates("bilevel.log")
def log(rng, dtype) -> Case:
    arrays = _arrays(rng, dtype)
    steps = int(rng.integers(1, 6))

    def call(name, content):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, name)
            if content is not None:
                path.write_text(content)
            bilevel.search(
                *(PROBLEM, bilevel.unrolled(0.5, 1), optax.sgd(0.1), arrays["alpha"]),
                *(arrays["w0"], None, arrays["valid"]),
                steps=steps,
                callback=bilevel.log(path, resume=content not in (None, "there")),
                progress=False,
            )
            return path.read_text()

    check = lambda r: that(r.count("\n") == steps and r.endswith("}\n"), "not a line for each step")
    good = {"name": "run.jsonl", "content": None}
    draw = rng.random()
    if draw < 0.4:
        what = str(rng.choice(["there", "no JSON\n", "[1,\n"]))
        return Case(call, good | {"content": what}, check, {}, mistake=f"a file {what!r}")
    if draw < 0.6:  # cut short in its first line
        return Case(call, good | {"content": '{"step": 1, "val'}, check, {})
    return Case(call, good, check, {})
