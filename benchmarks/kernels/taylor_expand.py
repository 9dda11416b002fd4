"""Is a network's Taylor polynomial found faster by nested forward mode or by ``jet``?

``ntk.taylor_expand`` nests ``jax.jvp``; JAX has ``jax.experimental.jet`` for derivatives of high
order. Orders 2 to 5, networks of two or three layers, both compiled, in turns; milliseconds of the
processor, one core. Where ``jet`` has no rule for an operation, the table says so.

    python benchmarks/kernels/taylor_expand.py            # two minutes
    python benchmarks/kernels/taylor_expand.py --quick    # one network
    python benchmarks/kernels/taylor_expand.py --smoke    # one network, one order
"""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental.jet import jet

import ntk
from benchmarks import harness

ORDERS = (2, 3, 4, 5)
# What `jet` raises where it has no rule: with ReLU on JAX 0.10.
NO_RULE = NotImplementedError, jax.errors.UnexpectedTracerError


def networks():
    """Each with its inputs."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)))
    acts = {"tanh": jnp.tanh, "swish": jax.nn.swish, "GELU": jax.nn.gelu, "ReLU": jax.nn.relu}
    by_name = {
        f"dense, {name}": (nn.Sequential([nn.Dense(256), s, nn.Dense(256), s, nn.Dense(10)]), x)
        for name, s in acts.items()
    }
    layers = [nn.Conv(16, (3, 3)), jnp.tanh, nn.Conv(16, (3, 3)), jnp.tanh]
    mean = lambda h: h.mean((1, 2))  # noqa: E731
    by_name["convolutions, tanh"] = (
        nn.Sequential([*layers, mean, nn.Dense(10)]),
        x.reshape(64, 8, 8, 1),
    )
    return by_name


def by_jet(apply, params, order):
    flat, structure = jax.tree.flatten(params)

    def expanded(params, x):
        step = [a - b for a, b in zip(jax.tree.leaves(params), flat, strict=True)]
        series = [[d, *[jnp.zeros_like(d)] * (order - 1)] for d in step]
        along = lambda *leaves: apply(jax.tree.unflatten(structure, leaves), x)  # noqa: E731
        value, terms = jet(along, tuple(flat), tuple(series))
        return value + sum(t / math.factorial(i) for i, t in enumerate(terms, 1))

    return expanded


def compare(name, order) -> dict:
    net, x = networks()[name]
    params = net.init(jax.random.key(0), x)
    moved = jax.tree.map(lambda p: p + 0.02 * jnp.cos(jnp.arange(p.size).reshape(p.shape)), params)
    row = {"network": name, "order": order}
    for way, make in {"jvp": ntk.taylor_expand, "jet": by_jet}.items():
        call = jax.jit(make(net.apply, params, order))
        try:
            value = call(moved, x)
        except NO_RULE as error:
            if way == "jvp":
                raise
            row["jet_failed"] = type(error).__name__
            continue
        seconds = []
        for _ in range(10):
            start = time.process_time()
            jax.block_until_ready(call(moved, x))
            seconds.append(time.process_time() - start)
        row |= {f"{way}_s": min(seconds), f"{way}_value": float(jnp.abs(value).mean())}
    return row


def work(name, orders):
    """In a process of its own, on one core."""
    jax.config.update("jax_enable_x64", True)
    for order in orders:
        yield compare(name, order)


def report(rows) -> str:
    lines, orders = [], sorted({row["order"] for row in rows if "order" in row})
    for name in dict.fromkeys(row["network"] for row in rows if "network" in row):
        for way in ("jvp", "jet"):
            cells = [
                f"{row[f'{way}_s'] * 1e3:.1f}" if f"{way}_s" in row else row[f"{way}_failed"]
                for row in harness.where(rows, network=name)
                if "order" in row
            ]
            lines.append([name, way, *cells])
    return harness.table(("network", "by", *(f"order {k}, ms" for k in orders)), lines)


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report, work=work)
    names = list(networks())[: 1 if flags.small else None]
    rows = [harness.environment()]
    for name in names:
        orders = ORDERS[: 1 if flags.smoke else None]
        measurements = harness.in_own_process(__file__, name, orders, one_core=True)
        rows += [{"network": name} | row for row in measurements]
    harness.finish(rows, flags.results, report)


if __name__ == "__main__":
    main()
