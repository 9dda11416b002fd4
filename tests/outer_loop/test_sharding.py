"""Rows, weights and copies over eight devices: one device's results, and sums alone between."""

import pytest
from helpers import ROOT, on_devices

PROGRAM = """
import functools, json, logging, re, tempfile
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import bilevel
from benchmarks.scale.scaling import collectives

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
n, p = 64, 16
x, y = rng.normal(size=(n, p)), rng.normal(size=n)
alone = jnp.asarray(x), jnp.asarray(y)


def outer(w, alpha, batch):
    x, y = batch
    return jnp.mean((x @ w["a"] - y) ** 2)


def lower(w, alpha, batch):
    return outer(w, alpha, batch) + jnp.sum(jnp.exp(alpha) * w["a"] ** 2)


problem = bilevel.Problem(lower, outer)
start = jnp.zeros(p), {"a": jnp.zeros(p)}
solvers = {
    "implicit": bilevel.implicit(),
    "newton, dense": bilevel.implicit(bilevel.newton(), bilevel.dense()),
    "lbfgs, neumann": bilevel.implicit(bilevel.lbfgs(), bilevel.neumann(20, 0.1)),
    "nystrom": bilevel.implicit(bilevel.newton(), bilevel.nystrom(3, 0.1)),
    "unrolled": bilevel.unrolled(0.1, 5),
    "one step": bilevel.one_step(optax.adam(0.1)),
}


def placed(mesh, spec, *arrays):
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, spec, strict=True)]


def rows_over(mesh):
    return placed(mesh, (P("d"), P("d")), x, y)


def columns_over(mesh):
    return placed(mesh, (P(None, "d"), P()), x, y)


def off(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(u) - np.asarray(v)))) for u, v in pairs)


@functools.cache
def on_one_device(name):
    fn = bilevel.hypergradient(problem, solvers[name], diagnostics=False)
    return fn, jax.jit(fn)(*start, alone, alone)[:3]


def hypergradients(mesh, names):
    rows, errors = rows_over(mesh), []
    for name in names:
        fn, truth = on_one_device(name)
        errors.append(off(fn(*start, rows, rows)[:3], truth))
    errors.append(off(jax.jit(fn)(*start, rows, rows)[:3], truth))
    return max(errors)


compiled = []


class Count(logging.Handler):
    def emit(self, record):
        if "Finished XLA compilation of jit(run)" in record.getMessage():
            compiled.append(1)


unrolled_search = functools.partial(bilevel.search, problem, solvers["unrolled"], optax.adam(0.1))


def searches(mesh, spread):
    # Six steps in one go on one device; three and three, from a checkpoint, on eight.
    if spread == "rows":
        data, (alpha, w) = rows_over(mesh), start
    else:
        data = columns_over(mesh)
        alpha, w = placed(mesh, (P("d"), P("d")), start[0], start[1]["a"])
        w = {"a": w}
    truth = unrolled_search(*start, alone, alone, steps=6)
    with tempfile.TemporaryDirectory() as folder:
        unrolled_search(alpha, w, data, data, steps=3, checkpoint=folder)
        compiled.clear()
        options = {"checkpoint": folder, "resume": True, "chunk": 1}
        found = unrolled_search(alpha, w, data, data, steps=6, **options)
    return {
        "off": max(off(found.alpha, truth.alpha), off(found.history, truth.history)),
        "programs": len(compiled),
        "sharded": "d" in found.w["a"].sharding.spec,
    }


def single_loop(mesh):
    # Weights over devices: what the method keeps beside them lies as they do.
    data = columns_over(mesh)
    w = {"a": placed(mesh, (P("d"),), start[1]["a"])[0]}
    run = lambda *args: bilevel.search(problem, bilevel.soba(0.05), optax.sgd(0.1), *args, steps=3)
    found, truth = run(start[0], w, data, data), run(*start, alone, alone)
    kept = [a for a in jax.tree.leaves(found.state.solver_state) if a.shape == (p,)]
    specs = list({tuple(a.sharding.spec) for a in kept})
    return {"off": off((found.alpha, found.w), (truth.alpha, truth.w)), "specs": specs}


def batches_of_rows(mesh):
    # Rows over devices, in batches: of SABA's tables, SPABA's passes, and the metric.
    rows = rows_over(mesh)
    options = dict(steps=20, batches=bilevel.partition(16), key=jax.random.key(0))
    found = {}
    for method, optimizer in (
        (bilevel.saba(0.05), optax.sgd(0.1)),
        (bilevel.spaba(), bilevel.paced()),
    ):
        run = lambda data: bilevel.search(problem, method, optimizer, *start, *data, **options)
        there, here = run((rows, rows)), run((alone, alone))
        ends = [(result.alpha, result.w) for result in (there, here)]
        found[type(there.state.solver_state).__name__] = off(*ends)
    return found


def copies(mesh):
    # Eight problems side by side, one on each device: nothing goes between them.
    xs, ys = rng.normal(size=(8, n, p)), rng.normal(size=(8, n))
    many, w = jnp.zeros((8, p)), {"a": jnp.zeros((8, p))}
    many_problems = bilevel.stack_problems(problem)
    init, step = bilevel.descent(many_problems, solvers["unrolled"], optax.adam(0.1))
    one = jax.jit(step)(init(many, w), ((xs, ys), (xs, ys)))[0]
    there = placed(mesh, (P("d"), P("d")), xs, ys)
    state = jax.tree.map(
        lambda a: jax.device_put(a, NamedSharding(mesh, P("d") if a.ndim else P())), init(many, w)
    )
    program = jax.jit(step).lower(state, (there, there)).compile()
    state, _ = program(state, (there, there))
    return {"off": off(state.alpha, one.alpha), "largest": largest(program)["largest"]}


KINDS = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"


def largest(program):
    # The numbers of the largest collective operation; and whether any other than a sum is there.
    text, sizes = program.as_text(), {}
    for kind in KINDS:
        for shapes in re.findall(rf"= (.*?) {kind}(?:-start)?[(]", text):
            count = max(
                int(np.prod([int(k) for k in dims.split(",") if k] or [1]))
                for dims in re.findall(r"\\[([\\d,]*)\\]", shapes)
            )
            sizes[kind] = max(sizes.get(kind, 0), count)
    others = max((size for kind, size in sizes.items() if kind != "all-reduce"), default=0)
    return {"largest": max(sizes.values(), default=0), "others": others}


def outer_step(mesh, problem, solver):
    rows = rows_over(mesh)
    init, step = bilevel.descent(problem, solvers[solver], optax.adam(0.1))
    state = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P())), init(*start))
    return jax.jit(step).lower(state, (rows, rows)).compile()


def between(mesh):
    names = "implicit", "unrolled"
    return {name: largest(outer_step(mesh, problem, name)) for name in names}


def sent(mesh):
    # Bytes of an outer step, where alpha stands beside the rows, and where it stands in them.
    def features(w, alpha, batch):
        return outer(w, 0, (batch[0] * alpha, batch[1])) + jnp.sum(w["a"] ** 2)

    found = []
    for loss in (lower, features):
        text = outer_step(mesh, bilevel.Problem(loss, outer), "unrolled").as_text()
        found.append(sum(b * times for kind, b, times in collectives(text) if kind != "dot"))
    return found


automatic = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
explicit = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
jax.config.update("jax_log_compiles", True)
logger = logging.getLogger("jax")
logger.addHandler(Count())
logger.propagate = False
if part == "methods":
    answers = {"between": between(automatic), "sent": sent(automatic), "copies": copies(automatic)}
    answers["single loop"] = single_loop(explicit)
    answers["batches of rows"] = batches_of_rows(explicit)
else:
    # XLA places automatic axes, so two solvers are enough there.
    meshes = {"automatic": (automatic, ("implicit", "unrolled")), "explicit": (explicit, solvers)}
    answers = {}
    for name, (mesh, names) in meshes.items():
        answers[name] = {"hypergradients": hypergradients(mesh, names)}
        answers[name] |= {spread: searches(mesh, spread) for spread in ("rows", "weights")}
print(json.dumps(answers))
"""


def on_eight_devices(part="methods"):
    begin = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\npart = {part!r}\n"
    return on_devices(8, begin + PROGRAM)


@pytest.mark.long
@pytest.mark.parametrize("axes", ["automatic", "explicit"])
def test_rows_over_devices_give_the_hypergradient_of_one_device(axes):
    assert on_eight_devices("meshes")[axes]["hypergradients"] < 1e-10


@pytest.mark.long
@pytest.mark.parametrize("axes", ["automatic", "explicit"])
@pytest.mark.parametrize("spread", ["rows", "weights"])
def test_a_search_goes_on_from_its_checkpoint_where_its_arrays_lie(axes, spread):
    report = on_eight_devices("meshes")[axes][spread]
    assert report["off"] < 1e-10
    assert report["programs"] == 1  # for three chunks of a step
    assert report["sharded"] == (spread == "weights")


@pytest.mark.long
def test_a_single_loop_follows_its_weights_over_devices():
    report = on_eight_devices()["single loop"]
    assert report["off"] < 1e-12
    assert report["specs"] == [["d"]]


@pytest.mark.long
def test_batches_of_rows_over_devices_are_those_of_one():
    off_by_state = on_eight_devices()["batches of rows"]
    assert set(off_by_state) == {"SabaState", "SpabaState"}
    assert max(off_by_state.values()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["implicit", "unrolled"])
def test_between_devices_go_sums_of_the_size_of_the_weights_alone(solver):
    report = on_eight_devices()["between"][solver]
    assert 0 < report["largest"] <= 2 * 16  # weights and hyperparameters in one sum; rows: 64 x 16
    assert report["others"] == 0


@pytest.mark.slow
def test_an_outer_step_sends_the_bytes_that_its_docstring_says():
    steps, w, alpha, scalar = 5, 8 * 16, 8 * 16, 8
    beside = (2 * steps + 1) * w + (steps + 2) * scalar
    assert on_eight_devices()["sent"] == [beside, beside + steps * alpha]


@pytest.mark.slow
def test_copies_side_by_side_over_devices_exchange_scalars_alone():
    report = on_eight_devices()["copies"]
    assert report["off"] < 1e-12
    assert report["largest"] <= 1
