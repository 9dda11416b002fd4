"""Which untrained score ranks all 15,625 networks of NAS-Bench-201 best?  (Dong & Yang 2020)

Every network is scored at its initial weights on one batch of 32 images of CIFAR-10, and compared
with the benchmark's accuracies. The sample of networks adds no error, but the batch and the single
draw of the weights do. The baselines are counts that use only the genotype.

Scores by derivatives depend only on the network's function, and there are 5,260 different functions
(`cell_formulas.canonical`). One network of each is scored, and the others get its score.

Sums of log ranks are formed on a random half of the networks. Scores are added one by one, at most
four, while the mean tau of the three datasets grows by 0.002. The other half evaluates the sum.
This is done 20 times.

Weighted sums have weights that maximize the mean tau on random networks with labels. All other
networks evaluate them. Trees show what these scores can predict at most. "All" has seen every
label: it is the ceiling of a kind of sum.

Networks come in random order, so an interrupted run has scored a sample. The scores are stored
(`results/all_networks*.npz`), and a second run resumes. Stored scores by other code or another
machine can be evaluated, but not continued. Remove them to score again.

    python benchmarks/train_free/all_networks.py          # naswot, synflow, ...: hours of one core
    python benchmarks/train_free/all_networks.py --kept   # evaluates stored scores only
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from scipy.stats import rankdata
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

import bilevel.data
from benchmarks import harness
from benchmarks.train_free.cell_formulas import canonical
from benchmarks.verdicts import clearly
from bilevel.nets import unit_images
from bilevel.runs import records
from bilevel.spaces.nasbench201 import all_networks, encode, genotypes, score_networks
from bilevel.spaces.nasbench201.genotype import PRIMITIVES
from bilevel.spaces.nasbench201.judging import correlations, load_table, sum_of_log_ranks
from bilevel.spaces.nasbench201.judging.table import DATASETS
from bilevel.spaces.nasbench201.judging.verdicts import BASELINES
from bilevel.spaces.nasbench201.scoring import Scored

MEASURES = ("ntk/scores", "bilevel/spaces/nasbench201")

OF_FUNCTIONS = "jacov", "grad_norm", "snip", "zico", "wrcor"  # operations without effect add 0
COUNTS = "trainable layers", "multiply-adds", "conv edges"  # parameters rank as multiply-adds do
FILES = {
    "all_networks.npz": ("synflow", "l2_norm", "naswot"),
    "all_networks_functions.npz": ("jacov", "grad_norm", "snip", "zico"),
    "all_networks_responses.npz": ("wrcor",),
}
SCORES = tuple(name for names in FILES.values() for name in names)
PATHS = [3], [0, 4], [1, 5], [0, 2, 5]  # from the cell's input to its output, by places in EDGES
HALVES, PARTS, GAIN = 20, 4, 0.002
LABELS = 100, 1000  # networks whose accuracies fit the weights, in addition to a half and all
PAIRS, WIDTHS = 50_000, (0.3, 0.1, 0.03)  # of a fit; the widths are those of the smoothed signs
SCORED = "af8b865"  # the commit of the stored scores, which take eight core hours
TREES = {"max_iter": 100, "learning_rate": 0.1, "random_state": 0}
TESTS = [f"{dataset}-test" for dataset in DATASETS]
PUBLISHED = (0.750, 0.753, 0.743)  # VKDNW with four others: the best published untrained taus


def task(size):
    small = size != "default"
    networks = all_networks(classes=10, **({"cells": 1, "channels": 4} if small else {}))
    count, key = 12 if small else 32, jax.random.key(0)
    if size == "smoke":
        rng = np.random.default_rng(0)
        x, y = jnp.asarray(rng.random((count, 8, 8, 3)), jnp.float32), rng.integers(10, size=count)
    else:
        ((train, *_),) = bilevel.data.draw_splits("cifar10", [key], train=count, valid=1, test=1)
        (x,) = unit_images(train[0])
        x, y = x[:, ::4, ::4] if small else x, train[1]
    w = jax.jit(lambda key: networks.init(key, x.shape[1:]))(jax.random.key(1))
    return networks, w, (x, jnp.asarray(y))


def order(count=None) -> np.ndarray:
    """Return the first ``count`` rows of the benchmark's table in the order of scoring."""
    return np.random.RandomState(0).permutation(len(genotypes()))[:count]


def places(name, rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to compute a score on, and for each row the place of its score in these."""
    if name not in OF_FUNCTIONS:
        return np.arange(len(rows)), np.arange(len(rows))
    first: dict[str, int] = {}
    of_row = [first.setdefault(canonical(genotypes()[row]), i) for i, row in enumerate(rows)]
    return np.unique(of_row, return_inverse=True)


def scored(names, rows, score):
    """Return scores of the rows (larger is better) and seconds."""
    cells = encode([genotypes()[row] for row in rows])
    values, seconds = {}, {}
    for file, its in FILES.items():
        if not (wanted := [name for name in names if name in its]):
            continue
        own, lent = places(its[0], rows)
        result = score(wanted, cells[own], harness.RESULTS / file)
        values |= {name: value[lent] for name, value in result.oriented().items()}
        seconds |= result.seconds
    return values, seconds


def computed(size):
    """Return a ``score`` that resumes from a file; small sizes use no file."""
    networks, w, batch = task(size)

    def score(names, cells, file):
        file = file if size == "default" else None
        return score_networks(names, networks, w, cells, batch, progress=True, file=file)

    return score


def kept(names, cells, file) -> Scored:
    """Read scores from the file only, wherever they were computed."""
    arrays, notes = records.read_arrays(file)
    if not np.array_equal(arrays["genotypes"][: len(cells)], cells):
        raise SystemExit(f"{file}: expected the networks in the order of this script.")
    values, seconds = {}, {}
    for key, score in arrays.items():
        program, _, name = key.partition("/")  # grad_norm and snip share a program, "gradient"
        if name in names:
            values[name], seconds[name] = score, notes["seconds"][program] / len(score)
    for name in names:
        if len(values.get(name, ())) < len(cells):
            raise SystemExit(f"{file}: expected {len(cells)} of {name}, not so many are kept.")
    return Scored(values, seconds, {})


def without_inert() -> np.ndarray:
    """Return for each network whether all operations except "none" have an effect, [15625]."""
    carries = encode(genotypes()) != PRIMITIVES.index("none")
    live = np.zeros_like(carries)
    for path in PATHS:
        live[:, path] |= carries[:, path].all(axis=1, keepdims=True)
    return (live == carries).all(axis=1)


def taus(score, accuracies) -> list[float]:
    return [correlations(score, accuracy).tau for accuracy in accuracies]


def chosen(scores, accuracies) -> list[str]:
    """Add scores while the mean tau grows; return them."""
    parts, best = [], 0.0
    while len(parts) < PARTS:
        mean_taus = {
            name: np.mean(taus(sum_of_log_ranks(*(scores[p] for p in (*parts, name))), accuracies))
            for name in scores
            if name not in parts
        }
        name = max(mean_taus, key=mean_taus.get)
        if mean_taus[name] < best + GAIN:
            break
        parts, best = [*parts, name], mean_taus[name]
    return parts


def halves(scores, accuracies, which):
    """Return for each random half the scores chosen on it, and their taus on the other half."""
    size = len(accuracies[0])
    for half in range(HALVES):
        mine = np.random.default_rng(half).permutation(size) < size // 2
        parts = chosen({k: v[mine] for k, v in scores.items()}, [a[mine] for a in accuracies])
        other = sum_of_log_ranks(*(scores[p][~mine] for p in parts))
        other_taus = taus(other, [a[~mine] for a in accuracies])
        yield {"what": "half", "networks": which, "half": half, "parts": parts, "taus": other_taus}


# ----------------------------------------------------------------------------- weighted sums


def rank_features(scores) -> dict[str, np.ndarray]:
    """Return the features of each kind of weighted sum, [networks, features]. No label is used."""
    ranks = np.stack([rankdata(np.nan_to_num(score, nan=-np.inf)) for score in scores.values()], 1)
    logs, ranks = ((a - a.mean(axis=0)) / a.std(axis=0) for a in (np.log(ranks), ranks))
    return {"log ranks": logs, "ranks and log ranks": np.hstack([ranks, logs]), "trees": ranks}


def fitted_weights(features, accuracies, seed: int, count: int) -> np.ndarray:
    """Return weights of a sum of features with a large mean tau on ``count`` random pairs.

    A logistic loss of the pairs gives the start. Then the mean sign of the agreement of pairs, with
    ``tanh`` in place of the sign, is maximized at decreasing widths.
    """
    i, j = np.random.default_rng(seed).integers(len(features), size=(2, count))
    pairs = features[i] - features[j]
    signs = np.mean([np.sign(a[i] - a[j]) for a in accuracies], axis=0)  # in [-1, 1]

    def logistic(w):
        margins = pairs @ w
        loss = np.logaddexp(0, margins) - (1 + signs) / 2 * margins
        slope = (1 + np.tanh(margins / 2)) / 2 - (1 + signs) / 2
        return loss.mean() + 1e-4 * w @ w, slope @ pairs / len(pairs) + 2e-4 * w

    def disagreement(w, width):
        agreeing = np.tanh(pairs @ w / width)
        slope = signs * (1 - agreeing**2) / width
        return -np.mean(signs * agreeing), -slope @ pairs / len(pairs)

    w = minimize(logistic, np.zeros(features.shape[1]), jac=True, method="L-BFGS-B").x
    for width in WIDTHS:
        w = w / np.std(features @ w)
        w = minimize(disagreement, w, (width,), jac=True, method="L-BFGS-B").x
    return w / np.abs(w).sum()


def predicted(kind, features, accuracies, labeled, seed, pairs):
    """Return the values of a weighted sum, or of trees, and its weights."""
    own = [a[labeled] for a in accuracies]
    if kind == "trees":
        trees = HistGradientBoostingRegressor(**TREES)
        goal = np.mean([rankdata(a) for a in own], axis=0)
        with threadpool_limits(1):  # OpenMP's threads wait for each other on a busy machine
            return trees.fit(features[labeled], goal).predict(features), None
    w = fitted_weights(features[labeled], own, seed, pairs)
    return features @ w, w.round(4).tolist()


def weighted(scores, accuracies, which, draws, pairs):
    """Return taus on the networks without labels, by kind of sum, number of labels and draw."""
    size = len(accuracies[0])
    counts = sorted({*(min(labels, size // 2) for labels in LABELS), size // 2, size})
    scores = {name: score for name, score in scores.items() if np.ptp(score) > 0}
    for kind, features in rank_features(scores).items():
        for count in counts:
            for draw in range(draws if count < size else 1):
                labeled = np.random.default_rng(draw).permutation(size) < count
                values, weights = predicted(kind, features, accuracies, labeled, draw, pairs)
                judged = ~labeled if count < size else labeled
                own_taus = taus(values[judged], [a[judged] for a in accuracies])
                row = {"what": "weighted", "networks": which, "kind": kind, "draw": draw}
                row |= {"labels": count, "of": size, "taus": own_taus}
                yield row | ({"weights": weights, "scores": [*scores]} if draw == 0 else {})


def of_weighted(rows) -> str:
    lines = []
    for kind, labels in dict.fromkeys((row["kind"], row["labels"]) for row in rows):
        own = harness.where(rows, kind=kind, labels=labels)
        own_taus = np.array([row["taus"] for row in own])
        above = own_taus > PUBLISHED
        passed = f"{above.all(axis=1).sum()} of {len(own)}"
        if clearly(own_taus - PUBLISHED).all():
            passed += ", clearly"
        if labels == own[0]["of"]:
            passed = "the ceiling: " + ("above" if above.all() else "below")
        medians = (f"{x:.3f}" for x in np.median(own_taus, axis=0))
        lines.append((kind, f"{labels:,} of {own[0]['of']:,}", *medians, passed))
    head = "weighted sum of", "networks with labels", *DATASETS.values(), "above the best printed"
    return harness.table(head, lines)


def scores_and_cost(rows, scores, seconds, draws=HALVES, pairs=PAIRS):
    """Correlate all scores and counts, on all networks and on those without inert parts."""
    table, counts = load_table(), {}
    for name in COUNTS:
        counts[name] = np.array([BASELINES[name](genotypes()[row]) for row in rows], float)
    everything = scores | counts
    for which, keep in {"all": np.full(len(rows), True), "active": without_inert()[rows]}.items():
        accuracies = [table.accuracy[test][rows][keep] for test in TESTS]
        own = {name: score[keep] for name, score in everything.items()}
        for name, score in own.items():
            by_accuracy = [correlations(score, accuracy) for accuracy in accuracies]
            row = {"what": "score", "networks": which, "score": name, "count": int(keep.sum())}
            row |= {"taus": [c.tau for c in by_accuracy], "rhos": [c.rho for c in by_accuracy]}
            yield row | {"seconds": seconds.get(name)}
        yield from halves(own, accuracies, which)
        yield from weighted(own, accuracies, which, draws, pairs)


def report(rows) -> str:
    text = []
    kinds = {"all": "networks, all there are", "active": "networks without inert operations"}
    for which, what in kinds.items():
        lines = harness.where(rows, what="score", networks=which)
        if not lines:
            continue
        lines.sort(key=lambda row: -np.mean(row["taus"]))
        cells = [
            (
                row["score"],
                "" if row["seconds"] is None else f"{row['seconds']:.2f}",
                *(f"{t:.3f} ({r:.3f})" for t, r in zip(row["taus"], row["rhos"], strict=True)),
            )
            for row in lines
        ]
        head = ("score", "s / network", *(f"tau (rho) {name}" for name in DATASETS.values()))
        text += [f"{lines[0]['count']:,} {what}:", harness.table(head, cells)]
        text.append(of_halves(harness.where(rows, what="half", networks=which)))
        text.append("Tau on the networks without labels, median over draws:")
        text.append(of_weighted(harness.where(rows, what="weighted", networks=which)))
    return "\n\n".join(text)


def of_halves(rows) -> str:
    """Return the distribution over the halves."""
    all_taus = np.array([row["taus"] for row in rows])
    quantiles = np.quantile(all_taus, [0, 0.5, 1], axis=0)
    names = "smallest", "median", "largest", "best printed"
    pairs = zip(names, (*quantiles, PUBLISHED), strict=True)
    lines = [(name, *(f"{x:.3f}" for x in values)) for name, values in pairs]
    passed = int((all_taus >= PUBLISHED).all(1).sum())
    kinds = [", ".join(row["parts"]) for row in rows]
    most = max(set(kinds), key=kinds.count)
    table = harness.table(("tau on the other half", *DATASETS.values()), lines)
    return (
        f"Up to {PARTS} parts chosen on a half, {len(rows)} halves; {kinds.count(most)} times "
        f"{most}; {passed} of {len(rows)} pass the best printed figures on all three datasets:\n\n"
        f"{table}"
    )


def main() -> None:
    kept_flag = {"action": "store_true", "help": "judge the scores in the files; compute none"}
    flags = harness.command_line(__file__, __doc__, report, kept=kept_flag)
    size = flags.size
    names = {"smoke": SCORES[:1], "quick": SCORES[:4], "default": SCORES}[size]
    rows = order({"smoke": 10, "quick": 40, "default": None}[size])
    scores, seconds = scored(names, rows, kept if flags.kept else computed(size))
    first = {"commit": SCORED, "older code": True} if flags.kept else {}
    smaller = (2, 500) if flags.small else ()
    result_rows = [harness.environment(kept=flags.kept) | first]
    result_rows += scores_and_cost(rows, scores, seconds, *smaller)
    harness.finish(result_rows, flags.results, report)


if __name__ == "__main__":
    main()
