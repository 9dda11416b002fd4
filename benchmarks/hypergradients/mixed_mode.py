"""What does a hypergradient through the training of a transformer cost, by order of derivatives?

A byte-level transformer (width 128, 4 heads, 64 positions, 32 texts of random bytes) takes T steps
of gradient descent; alpha weighs the texts. There are two sizes: 2 layers with T = 16, and 8 layers
with T = 4. The layers are in a Python loop or in a `lax.scan`. We take the hypergradient by
`bilevel.unrolled`, and by hand in JAX, where every step stores only its weights:

- reverse over reverse: `jax.checkpoint` around a step, JAX's own reverse pass;
- forward over reverse: one forward derivative of the gradient (mixed mode, MixFlow-MG 2025);
- reverse over forward: the gradient of a forward derivative of the loss.

Times are CPU seconds of one core and one thread. Methods take turns, and a ratio is the median over
rounds. Memory is XLA's temporaries.

    python benchmarks/hypergradients/mixed_mode.py            # ten minutes
"""

import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from benchmarks import harness

MEASURES = (
    "bilevel/solvers/_mixed_mode.py",
    "bilevel/solvers/_unrolled.py",
    "bilevel/hypergradients/hypergradient.py",
)


class Sizes(NamedTuple):
    width: int = 128
    heads: int = 4
    length: int = 64
    texts: int = 32
    bytes: int = 256
    rounds: int = 3


SIZES = {
    "smoke": Sizes(width=8, heads=2, length=4, texts=2, bytes=8, rounds=1),
    "quick": Sizes(width=64, texts=8),
    "default": Sizes(),
}
CASES = [(2, 16), (8, 4)]  # layers and steps
RATE, SEED = 0.1, 0
OURS, TODAY = "bilevel.unrolled", "by hand, reverse over reverse"


# ---------------------------------------------------------------------------- the transformer


def weights(sizes, layers, scan):
    d = sizes.width
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}

    def layer(key):
        keys = jax.random.split(key, len(shapes))
        parts = {
            name: jax.random.normal(k, shape) / shape[0] ** 0.5
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return parts | {"scale_1": jnp.ones(d), "scale_2": jnp.ones(d)}

    first, *keys = jax.random.split(jax.random.key(SEED), layers + 1)
    stack = jax.vmap(layer)(jnp.stack(keys)) if scan else [layer(key) for key in keys]
    embedding = 0.02 * jax.random.normal(first, (sizes.bytes, d))
    return {"embedding": embedding, "layers": stack}


def normalized(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def block(sizes, layer, x):
    texts, length, d = x.shape
    heads = normalized(x, layer["scale_1"]) @ layer["qkv"]
    heads = heads.reshape(texts, length, 3 * sizes.heads, d // sizes.heads)
    query, key, value = jnp.split(heads, 3, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (d // sizes.heads) ** 0.5
    seen = jnp.tril(jnp.ones((length, length), bool))
    share = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", share, value).reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(normalized(x, layer["scale_2"]) @ layer["up"]) @ layer["down"]


def losses(sizes, scan):
    def each(w, batch):
        x = w["embedding"][batch[0]]
        if scan:
            x = jax.lax.scan(lambda x, p: (block(sizes, p, x), None), x, w["layers"])[0]
        else:
            for layer in w["layers"]:
                x = block(sizes, layer, x)
        logits = x @ w["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean(1)

    def lower(w, alpha, batch):
        return jnp.mean(jax.nn.sigmoid(alpha) * each(w, batch))

    def outer(w, alpha, batch):
        return each(w, batch).mean()

    return lower, outer


# -------------------------------------------------------------------------------- the methods


def by_hand(lower, outer, steps, order):
    """Return ``(alpha, w, train, valid) -> gradient``, with the reverse pass given by ``order``."""

    def moved(w, alpha, train):
        slope = jax.grad(lower)(w, alpha, train)
        return jax.tree.map(lambda w, g: w - RATE * g, w, slope)

    def forward_over_reverse(w, alpha, train, v):
        gradient = lambda w: jax.grad(lower, (0, 1))(w, alpha, train)  # noqa: E731
        return jax.jvp(gradient, (w,), (v,))[1]

    def reverse_over_forward(w, alpha, train, v):
        def along(w, alpha):
            return jax.jvp(lambda w: lower(w, alpha, train), (w,), (v,))[1]

        return jax.grad(along, (0, 1))(w, alpha)

    if order == "reverse over reverse":
        step = jax.checkpoint(moved, prevent_cse=False)
    else:
        orders = {
            "forward over reverse": forward_over_reverse,
            "reverse over forward": reverse_over_forward,
        }
        step = jax.custom_vjp(moved)

        def backward(kept, slope):
            direction = jax.tree.map(lambda s: -RATE * s, slope)
            of_w, of_alpha = orders[order](*kept, direction)
            return jax.tree.map(jnp.add, slope, of_w), of_alpha, None

        step.defvjp(lambda *args: (moved(*args), args), backward)

    def objective(alpha, w, train, valid):
        w, _ = jax.lax.scan(lambda w, _: (step(w, alpha, train), None), w, length=steps)
        return outer(w, alpha, valid)

    return jax.grad(objective)


def methods(lower, outer, steps):
    fn = bilevel.hypergradient(
        bilevel.Problem(lower, outer), bilevel.unrolled(RATE, steps), diagnostics=False
    )
    orders = "reverse over reverse", "forward over reverse", "reverse over forward"
    hand = {f"by hand, {order}": by_hand(lower, outer, steps, order) for order in orders}
    return {OURS: lambda *args: fn(*args).grad} | hand


# ---------------------------------------------------------------------------- the measurement


def measure(layers, steps, scan, size):
    """Measure all methods on one transformer in this process."""
    sizes = SIZES[size]
    lower, outer = losses(sizes, scan)
    rng = np.random.default_rng(SEED)
    shape = 2, 2, sizes.texts, sizes.length
    train, valid = (tuple(map(jnp.asarray, b)) for b in rng.integers(sizes.bytes, size=shape))
    args = jnp.zeros(sizes.texts), weights(sizes, layers, scan), train, valid
    rows, programs = {}, {}
    compared = methods(lower, outer, steps)
    if size == "smoke":
        compared = {name: compared[name] for name in (OURS, TODAY)}
    for name, fn in compared.items():
        programs[name], seconds = harness.compiled(fn, *args)
        rows[name] = {
            **{"layers": layers, "steps": steps, "scan": scan, "method": name},
            "compile_s": round(seconds, 1),
            "temp_bytes": programs[name].memory_analysis().temp_size_in_bytes,
        }
    gradients = {name: np.asarray(program(*args)) for name, program in programs.items()}  # warms up
    truth = gradients[TODAY]
    for name, grad in gradients.items():
        rows[name]["difference"] = float(np.abs(grad - truth).max() / np.abs(truth).max())
        if not rows[name]["difference"] < 1e-3:
            rows[name]["failed"] = "its hypergradient is not that of reverse over reverse"
    for name, seconds in harness.in_turns(programs, args, sizes.rounds).items():
        rows[name]["seconds"] = [round(s, 4) for s in seconds]
    return list(rows.values())


def report(rows):
    rows = [row for row in rows if "method" in row]
    cases = list(dict.fromkeys((r["layers"], r["steps"], r["scan"]) for r in rows))
    head = [f"{layers} layers{' in a scan' * scan}, T = {steps}" for layers, steps, scan in cases]

    def cell(name, layers, steps, scan):
        (row,) = harness.where(rows, method=name, layers=layers, steps=steps, scan=scan)
        return f"{statistics.median(row['seconds']):.3g} s, {row['temp_bytes'] / 1e6:.3g} MB"

    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        cells = [cell(name, *case) for case in cases]
        lines.append([f"**{name}**" if name == OURS else name, *cells])
    return harness.table(["method", *head], lines)


def main():
    flags = harness.command_line(__file__, __doc__, report, work=measure)
    cases = [(1, 2, True)] if flags.smoke else [(*c, scan) for c in CASES for scan in (False, True)]
    about = {"device": f"{harness.processor()}, one core, one thread"}
    sizes = SIZES[flags.size]._asdict()
    rows = [harness.environment("optax", **about, seed=SEED, sizes=sizes)]
    for case in cases:
        request = *case, flags.size
        label = dict(zip(("layers", "steps", "scan"), case, strict=True))
        new = harness.in_own_process(__file__, *request, one_core=True, JAX_PLATFORMS="cpu")
        rows += [label | row for row in new]
        print(*new, sep="\n", flush=True)
    harness.finish(rows, flags.results, report)


if __name__ == "__main__":
    main()
