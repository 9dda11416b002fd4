"""Which train-free method finds good networks of NAS-Bench-201?  (Zhu et al. 2022, Table 2)

We run the table's methods five times each, on images of CIFAR-10. The final network of a run is
looked up in the benchmark, on all three datasets.

- Scores, by the procedure of KNAS and Eigen-NAS: 300 networks are drawn with replacement. Among the
  k networks with the best scores, the one with the best validation accuracy early in training wins.
  "Early" is after 12 epochs; the authors use epoch 20, which the public tables do not contain. k is
  20, 5 or 1; with k = 1 the score decides alone. "eigen_nas" is the mean diagonal that the paper
  computes, "min_eigenvalue" the eigenvalue that it should bound. "knas" is KNAS as in its paper,
  "knas_released" uses the loss's gradients as in its code. "no information" has a constant score,
  which shows the value of the procedure itself.
- TE-NAS prunes a supernet of the authors' size, one cell a stage and 3 channels, on 72 images, with
  3,000 crops (4 x 4; theirs 3 x 3) and 3 repeats.
- NASI takes one step from T = 100 minibatches of 64 images, "4T" from 400, in one cell a stage (the
  benchmark's network has five), 16 channels. Its mu and nu are those for the space of DARTS; those
  for small spaces are a separate row.
- NAS-RL is REINFORCE as the benchmark's authors run it (D-X-Y/AutoDL-Projects, `reinforce.py`): a
  logit for each operation of each edge, Adam at rate 0.01, the moving average of rewards as the
  baseline. The reward is the validation accuracy on CIFAR-10 after 12 epochs, looked up. A search
  ends when its trainings would have taken 20,000 s, and returns the cell with the largest reward.
  There are 500 runs, because they cost nothing. "random search" is the same at a rate of 0.
- DARTS, first order: the searches of `gaea.py` at the usual rate. Their sizes are stated there. A
  separate row has the same searches with two cells a stage.
- ResNet: the cell of the benchmark's authors, looked up.

Every repeat has separate images, weights and networks.

    python benchmarks/train_free/zhu_table2.py          # three to four hours of one core; resumable
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel.data
from benchmarks import harness
from benchmarks.deep_search import gaea
from bilevel import strategies
from bilevel.nets import unit_images
from bilevel.spaces.nasbench201 import all_networks, encode, nasbench201_space, score_networks
from bilevel.spaces.nasbench201.genotype import EDGES, PRIMITIVES, parse_genotype
from bilevel.spaces.nasbench201.judging import load_table
from bilevel.spaces.nasbench201.judging.table import DATASETS
from bilevel.spaces.nasbench201.judging.verdicts import PRINTED, paper_protocol, standing

MEASURES = ("ntk/scores", "bilevel/spaces/nasbench201", "bilevel/strategies/train_free.py")

SCORES = ("eigen_nas", "min_eigenvalue"), ("knas",), ("knas_released",), ("naswot",)
SOFTMAX = "softmax, Adam"  # the name of DARTS in gaea.py
MILD, DOUBLE = "nasi, small spaces", "DARTS, 2 cells"
TWO_CELLS = dataclasses.replace(gaea.SIZES["default"], cells=2)
MANY = 2000  # repeats with no information: they cost nothing
REINFORCE = {"NAS-RL": 0.01, "random search": 0.0}  # rates
EPOCHS, ALL_EPOCHS = 12, 200  # of a training for a reward, and of one in the table
MOMENTUM = 0.9  # of the average of rewards
TOP_COUNTS = 20, 5, 1
RESNET = "|nor_conv_3x3~0|+|none~0|nor_conv_3x3~1|+|skip_connect~0|none~1|skip_connect~2|"
PUBLISHED = {  # the published figure to compare a method with
    ("eigen_nas", 20): "Eigen-NAS (k=20)",
    ("eigen_nas", 5): "Eigen-NAS (k=5)",
    ("knas", 20): "KNAS (k=20), in Zhu et al.",
    ("naswot", 1): "NASWOT",
    ("te_nas", None): "TE-NAS",
    ("nasi", None): "NASI (T)",
    ("nasi_4t", None): "NASI (4T)",
    (MILD, None): "NASI (T)",
    ("NAS-RL", None): "NAS-RL",
    ("DARTS", None): "DARTS",
    (DOUBLE, None): "DARTS",
    ("ResNet", None): "ResNet",
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    repeats: int = 5
    pool: int = 300
    cells: int = 5
    channels: int = 16
    pixels: int = 32
    batch: int = 32  # images of a score
    pruned: int = 72  # images of TE-NAS's kernel
    crops: int = 3000
    steps: int = 100  # of NASI
    searches: tuple[str, ...] = ("te_nas", "nasi", "nasi_4t", MILD, DOUBLE)
    scores: tuple[tuple[str, ...], ...] = SCORES  # those that are computed together
    operations: tuple[str, ...] = PRIMITIVES  # that are searched
    data: str = "cifar10"
    runs: int = 500  # of NAS-RL
    budget: float = 20_000.0  # seconds of training in such a run


QUICK = "te_nas", "nasi", "nasi_4t"
FEW = ("none", "skip_connect"), ("none", "skip_connect", "nor_conv_1x1")  # operations
SIZES = {
    "smoke": Sizes(
        1, 4, 1, 2, 8, 4, 0, 6, 1, ("nasi",), (("naswot",),), FEW[0], data="random", runs=3
    ),
    "quick": Sizes(2, 6, 1, 2, 8, 4, 4, 6, 2, QUICK, (("naswot",),), FEW[1], runs=20),
    "default": Sizes(),
}


load_once = functools.cache(load_table)


def images(sizes, repeat, count):
    """Return ``count`` images of a repeat, and their labels."""
    key = jax.random.fold_in(jax.random.key(20), repeat)
    if sizes.data == "random":
        x = jax.random.normal(key, (count, sizes.pixels, sizes.pixels, 1))
        return x / sizes.pixels, jnp.arange(count) % 10
    ((train, *_),) = bilevel.data.draw_splits(sizes.data, [key], train=count, valid=1, test=1)
    (x,) = unit_images(train[0], pixels=sizes.pixels)
    return x, jnp.asarray(train[1])


def keys(repeat):
    return jax.random.split(jax.random.fold_in(jax.random.key(21), repeat), 3)


def scores(sizes, repeat, names) -> list[dict]:
    """Return scores of the repeat's pool, a row for each."""
    networks = all_networks(classes=10, cells=sizes.cells, channels=sizes.channels)
    batch = images(sizes, repeat, sizes.batch)
    w = jax.jit(lambda key: networks.init(key, batch[0].shape[1:]))(keys(repeat)[0])
    table = load_once()
    pool = np.random.RandomState(repeat).randint(len(table.genotypes), size=sizes.pool)
    cells = encode([table.genotypes[i] for i in pool])
    by_score = score_networks(list(names), networks, w, cells, batch, progress=False).oriented()
    return [
        {"method": name, "repeat": repeat, "pool": pool.tolist()}
        | {"values": [float(f"{v:.6g}") for v in values]}
        for name, values in by_score.items()
    ]


def pruned(sizes, repeat):
    space, thin = (nasbench201_space(sizes.operations, cells=1, channels=c) for c in (3, 1))
    rows, crops = images(sizes, repeat, sizes.pruned), cropped(sizes, repeat, 4)
    return strategies.te_nas(keys(repeat)[1], space, thin, rows, crops)


def cropped(sizes, repeat, side):
    """Cut a window at a random place from every image."""
    x, _ = images(sizes, repeat, sizes.crops)
    places = np.random.RandomState(repeat).randint(x.shape[1] - side + 1, size=(len(x), 2))
    pairs = zip(x, places, strict=True)
    return jnp.stack([image[i : i + side, j : j + side] for image, (i, j) in pairs])


def stepped(sizes, repeat, times=1, **settings):
    space = nasbench201_space(sizes.operations, cells=1, channels=sizes.channels)
    steps = times * sizes.steps
    rows = images(sizes, repeat, min(64 * steps, 50_000))
    return strategies.nasi(keys(repeat)[2], space, rows, steps=steps, **settings)


supernet = functools.cache(gaea.searcher)


def two_cells(_, repeat):
    run, rate = supernet(TWO_CELLS, SOFTMAX), gaea.DEFAULT[SOFTMAX]
    return gaea.searched(TWO_CELLS, SOFTMAX, run, rate, repeat)["genotype"]


SEARCHES = {
    "te_nas": pruned,
    "nasi": stepped,
    "nasi_4t": functools.partial(stepped, times=4),
    MILD: functools.partial(stepped, penalty=1.0, threshold=1000.0),
    DOUBLE: two_cells,
}


def reinforced(sizes, method) -> dict:
    """Return the cells found by all runs of REINFORCE, as rows of the benchmark's table."""
    table = load_once()
    rewards = jnp.asarray(table.early["cifar10-valid"])
    costs = jnp.asarray(table.train_seconds["cifar10"] * EPOCHS / ALL_EPOCHS)
    longest = int(sizes.budget / costs.min()) + 1
    optimizer = optax.adam(REINFORCE[method])
    shape = len(EDGES), len(PRIMITIVES)

    def step(now, key):
        actions = jax.random.categorical(key, now["logits"])
        row = jnp.ravel_multi_index(tuple(actions), shape[1:] * shape[0], mode="clip")
        reward = rewards[row]
        total = MOMENTUM * now["total"] + (1 - MOMENTUM) * reward
        weight = MOMENTUM * now["weight"] + (1 - MOMENTUM)

        def loss(logits):
            chosen = jax.nn.log_softmax(logits)[jnp.arange(shape[0]), actions]
            return -(reward - total / weight) * chosen.sum()

        updates, state = optimizer.update(jax.grad(loss)(now["logits"]), now["state"])
        after = {
            "logits": now["logits"] + updates,
            "state": state,
            "total": total,
            "weight": weight,
            "best": jnp.maximum(reward, now["best"]),
            "found": jnp.where(reward > now["best"], row, now["found"]),
            "spent": now["spent"] + costs[row],
            "count": now["count"] + 1,
        }
        within = now["spent"] < sizes.budget
        return jax.tree.map(lambda a, b: jnp.where(within, a, b), after, now), None

    def run(key):
        key, draw = jax.random.split(key)
        logits = 1e-3 * jax.random.normal(draw, shape)
        start = {"logits": logits, "state": optimizer.init(logits), "found": 0, "count": 0}
        start |= {"total": 0.0, "weight": 0.0, "best": -1.0, "spent": 0.0}
        start = jax.tree.map(jnp.asarray, start)
        end, _ = jax.lax.scan(step, start, jax.random.split(key, longest))
        return end["found"], end["count"]

    found, counts = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(22), sizes.runs))
    row = {"method": method, "commit": harness.commit(), "look-ups": float(counts.mean())}
    return row | {"networks": np.asarray(found).tolist()}


def experiment(sizes, rows, keep):
    """Measure the missing rows. Every method finishes a repeat before the next repeat starts."""
    for repeat in range(sizes.repeats):
        for names in sizes.scores:
            if not harness.where(rows, method=names[-1], repeat=repeat):
                keep(*scores(sizes, repeat, names))
        for name in sizes.searches:
            if not harness.where(rows, method=name, repeat=repeat):
                genotype = SEARCHES[name](sizes, repeat)
                keep({"method": name, "repeat": repeat, "genotype": str(genotype)})
    for name in REINFORCE:
        if not harness.where(rows, method=name):
            keep(reinforced(sizes, name))


# ----------------------------------------------------------------------------- the report


def procedure(table, runs, k) -> dict[str, list[float]]:
    """Return test accuracies of the procedure, by dataset, for each repeat's scores."""
    figures = []
    for run in runs:
        size = len(run["pool"])
        options = {"k": min(k, size), "repeats": 1, "pool": size, "seed": run["repeat"]}
        figures.append(paper_protocol(run["values"], table, run["pool"], **options))
    return {dataset: [f[dataset].mean for f in figures] for dataset in DATASETS}


def looked_up(table, cells) -> dict[str, list[float]]:
    at = standing(table, [parse_genotype(cell) for cell in cells])
    return {dataset: at[dataset]["accuracy"] for dataset in DATASETS}


def report(rows) -> str:
    """Report test accuracies, mean and standard deviation over repeats, and published ones."""
    table, lines = load_once(), []

    def add(label, runs, figures, key=None):
        printed = PRINTED[PUBLISHED[key]] if key in PUBLISHED else ()
        shown = " / ".join(f"{mean:.2f}" for mean, _ in printed)
        lines.append((label, runs, *(figures[dataset] for dataset in DATASETS), shown))

    def add_found(label, accuracies, key):
        runs = len(accuracies["cifar10"])
        if runs:
            add(label, runs, {k: deviation(v) for k, v in accuracies.items()}, key)

    for name in [name for names in SCORES for name in names]:
        for k in TOP_COUNTS:
            accuracies = procedure(table, harness.where(rows, method=name), k)
            add_found(f"{name}, k = {k}", accuracies, (name, k))
    everything = np.arange(len(table.genotypes))
    for k in TOP_COUNTS:  # a constant score: ties are broken at random
        nothing = paper_protocol(0.0 * everything, table, everything, k=k, repeats=MANY)
        figures = {dataset: f"{f.mean:.2f} ± {f.std:.2f}" for dataset, f in nothing.items()}
        add(f"no information, k = {k}", MANY, figures)
    cells = {name: [r["genotype"] for r in harness.where(rows, method=name)] for name in SEARCHES}
    for name, own in (cells | {"DARTS": darts_cells(), "ResNet": [RESNET]}).items():
        label = "ResNet, looked up" if name == "ResNet" else name
        add_found(label, looked_up(table, own), (name, None))
    for name in REINFORCE:
        own = [table.genotypes[i] for r in harness.where(rows, method=name) for i in r["networks"]]
        add_found(name, looked_up(table, map(str, own)), (name, None))
    head = ("method", "runs", *DATASETS.values(), "printed")
    return harness.table(head, lines)


def darts_cells() -> list[str]:
    """Return the final cells of the `gaea.py` searches by softmax and Adam at the usual rate."""
    rows = harness.read(harness.RESULTS / "gaea.jsonl")
    return [r["genotype"] for r in gaea.of(rows, SOFTMAX, gaea.DEFAULT[SOFTMAX])]


def deviation(values) -> str:
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


def main() -> None:
    arguments = harness.command_line(__file__, __doc__, report)
    sizes = SIZES[arguments.size]
    rows = harness.begun(arguments.results, **dataclasses.asdict(sizes))

    def keep(*new):
        harness.keep(arguments.results, rows, *new)
        for row in new:
            print(row["method"], row.get("repeat", ""), row.get("genotype", ""), flush=True)

    experiment(sizes, rows, keep)
    harness.finish(rows, arguments.results, report, write_rows=False)


if __name__ == "__main__":
    main()
