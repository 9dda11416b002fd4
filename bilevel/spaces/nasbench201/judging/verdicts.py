"""Judge a train-free ranking of NAS-Bench-201, compared with no score at all.

The best by validation of 20 *random* networks has a mean accuracy of 93.33 % on the CIFAR-10 test
images, the best of all 15,625 has 94.37 %. So a ranking is judged by

1. its rank correlation with the accuracy after training, and the :func:`seed_ceiling`, the
   correlation of a perfect score;
2. :func:`top_one`: the network that it ranks first, without training any;
3. :func:`best_of_k` minus :func:`best_of_k_random`, the same without a score;
4. the same figures of ``BASELINES``, which use no weights and no images;
5. :func:`paper_protocol`, next to the papers' figures, ``PRINTED``.

A larger score is better. NaN ranks last, tied, below ``-inf``. Ties are broken at random in every
choice. Compare only figures for the same networks: without the 6,180 networks with ineffective
operations, tau of the parameter count with CIFAR-10 test accuracy is 0.623 instead of 0.578.

References: Zhu, Liu, Chrysos & Cevher (2022), section 5.2; Xu et al., KNAS, ICML 2021; Lee & Ham,
AZ-NAS, CVPR 2024, for :func:`sum_of_log_ranks`.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import kendalltau, rankdata, spearmanr

from bilevel.internal.checks import integer, numpy_array
from bilevel.spaces.nasbench201 import parameter_count, trainable_layers
from bilevel.spaces.nasbench201.genotype import PRIMITIVES, Genotype, conv_edges, multiply_adds
from bilevel.spaces.nasbench201.judging.table import DATASETS, BenchmarkTable, genotype_row

BASELINES: dict[str, Callable[[Genotype], float]] = {
    "parameters": parameter_count,
    "multiply-adds": multiply_adds,
    "trainable layers": trainable_layers,
    "conv edges": conv_edges,
}
"""Scores that :func:`judge` always adds. The first two rank all networks equally, because a 3 x 3
convolution outweighs six of 1 x 1 in both."""

PRINTED = {
    # Zhu et al. (2022), Table 2, with their note that the figures of NASWOT, TE-NAS and KNAS are
    # from those papers.
    "ResNet": ((93.97, math.nan), (70.86, math.nan), (42.63, math.nan)),
    "NAS-RL": ((92.83, math.nan), (70.71, math.nan), (44.10, math.nan)),
    "DARTS": ((88.32, math.nan), (67.34, math.nan), (33.04, math.nan)),
    "NASWOT": ((92.96, math.nan), (70.03, math.nan), (44.43, math.nan)),
    "TE-NAS": ((93.90, math.nan), (71.24, math.nan), (42.38, math.nan)),
    "KNAS (k=20), in Zhu et al.": ((93.38, math.nan), (70.78, math.nan), (44.63, math.nan)),
    "NASI (T)": ((93.08, 0.24), (69.51, 0.59), (40.87, 0.85)),
    "NASI (4T)": ((93.55, 0.10), (71.20, 0.14), (44.84, 1.41)),
    "Eigen-NAS (k=20)": ((93.46, 0.01), (71.42, 0.63), (45.54, 0.04)),
    "Eigen-NAS (k=5)": ((93.43, 0.08), (69.92, 1.82), (45.53, 0.06)),
    # Xu et al. (2021), whose figures for k = 20 are not those cited above.
    "KNAS (k=20)": ((93.05, math.nan), (68.91, math.nan), (34.11, math.nan)),
    "KNAS (k=40)": ((93.43, math.nan), (71.05, math.nan), (45.05, math.nan)),
}
"""Printed test accuracies: (mean, standard deviation) of each of ``DATASETS``, NaN if not given."""


def _rank_places(score: Any) -> np.ndarray:
    """Return the rank of each value of a score: equal for ties, 0 for NaN."""
    return np.nan_to_num(rankdata(score, "dense", nan_policy="omit"))


def _as_float64(name: str, value: Any) -> np.ndarray:
    return numpy_array(name, value).astype(np.float64)


def _vectors(**values: Any) -> list[np.ndarray]:
    """Return vectors of one length, at least 1; all except the score must be finite."""
    vectors = {name: _as_float64(name, value) for name, value in values.items()}
    (first, reference), *others = vectors.items()
    if reference.ndim != 1 or not len(reference):
        raise ValueError(f"{first}: expected a vector, got shape {list(reference.shape)}.")
    for name, vector in others:
        if vector.shape != reference.shape:
            raise ValueError(
                f"{name}: expected one number for each {first}, {len(reference)}, "
                f"got shape {list(vector.shape)}."
            )
    for name, vector in vectors.items():
        if name != "score" and not np.isfinite(vector).all():
            raise ValueError(f"{name}: expected finite accuracies, got {vector.min()}.")
    return list(vectors.values())


def _check_number(name: str, value: int, largest: int) -> None:
    if not 1 <= integer(name, value, 0) <= largest:
        raise ValueError(f"{name}: expected 1 to {largest}, got {value}.")


class Correlations(NamedTuple):
    """Result of :func:`correlations`."""

    tau: float  # Kendall's tau-b
    rho: float  # Spearman's


def correlations(score: Any, accuracy: Any) -> Correlations:
    """Return Kendall's tau-b and Spearman's rho of vectors [m]; NaN if one of them is constant.

    Raises
    ------
    ValueError
        If shapes differ, or accuracies are not finite.

    Examples
    --------
    >>> correlations([1, 2, np.nan, 4], [70.0, 80.0, 60.0, 90.0])
    Correlations(tau=1.0, rho=1.0)
    """
    score, accuracy = _vectors(score=score, accuracy=accuracy)
    places = _rank_places(score)
    if np.ptp(places) == 0 or np.ptp(accuracy) == 0:
        return Correlations(math.nan, math.nan)
    tau, rho = kendalltau(places, accuracy).statistic, spearmanr(places, accuracy).statistic
    return Correlations(float(tau), float(rho))


class SeedCeiling(NamedTuple):
    """Upper limit of a rank correlation, due to random training."""

    pairs: dict[tuple[int, int], float]  # tau between two runs of different seeds
    ceiling: float  # tau of a perfect score with the mean over existing runs


def seed_ceiling(table: BenchmarkTable, dataset: str) -> SeedCeiling:
    """Return Kendall's tau between trainings with different seeds, and the ceiling that it implies.

    Let a run's accuracy be ``t + e``, the network's own and an independent error. If both are
    normal after a monotone change of scale, ``tau = (2/pi) asin(r)`` for every correlation r below:

        between two runs              r = sin(pi tau / 2) = var t / (var t + var e)
        t and the mean over R runs    sqrt(R r / (1 + (R - 1) r))     (Spearman-Brown)

    tau is the mean over ``pairs``, R the harmonic mean of the networks' numbers of runs, 2.42. The
    model's correlations between a run and the mean of the two others are right within 0.002.
    """
    runs = table.runs[dataset]
    pairs = {}
    for i, j in itertools.combinations(range(runs.shape[1]), 2):
        trained_twice = ~np.isnan(runs[:, i] + runs[:, j])
        pairs[i, j] = correlations(runs[trained_twice, i], runs[trained_twice, j]).tau
    number = 1 / np.mean(1 / (~np.isnan(runs)).sum(axis=1))
    r = math.sin(math.pi / 2 * np.mean(list(pairs.values())))
    ceiling = math.sqrt(number * r / (1 + (number - 1) * r))
    return SeedCeiling(pairs, 2 / math.pi * math.asin(ceiling))


def top_one(score: Any, accuracy: Any) -> float:
    """Return the accuracy of the network with the best score, the mean over ties."""
    score, accuracy = _vectors(score=score, accuracy=accuracy)
    places = _rank_places(score)
    return float(accuracy[places == places.max()].mean())


def best_of_k(
    score: Any,
    valid: Any,
    test: Any,
    k: int,
    *,
    pool: int | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> np.ndarray:
    """Return the test accuracy of the best by validation among the k networks of best score.

    The mean minus :func:`best_of_k_random` is the value of the score.

    Parameters
    ----------
    score, valid, test : [m]
    k : int
        The number of trained networks.
    pool : int, optional
        The number of scored networks, drawn without replacement; by default all m. Then the draws
        differ only in how ties are broken.
    draws, seed : int

    Returns
    -------
    float64 [draws]

    Raises
    ------
    ValueError
        If shapes differ, accuracies are not finite, or not k <= pool <= m.

    Examples
    --------
    >>> best_of_k([1, 2, 3, 4], [60, 90, 80, 70], [61, 91, 81, 71], 2, draws=3)
    array([81., 81., 81.])
    """
    score, valid, test = _vectors(score=score, valid=valid, test=test)
    _check_number("pool", len(score) if pool is None else pool, len(score))
    _check_number("k", k, len(score) if pool is None else pool)
    selections = _draw_top_k(_rank_places(score), k, pool, draws, seed)
    # Networks are in random order, so argmax breaks ties at random.
    return np.array([test[networks[valid[networks].argmax()]] for networks in selections])


def _draw_top_k(
    places: np.ndarray, k: int, pool: int | None, draws: int, seed: int
) -> Iterator[np.ndarray]:
    """Yield for each draw the k of best place in its pool, ties and order at random."""
    _check_number("draws", draws, 10**9)
    rng = np.random.default_rng(seed)
    networks = np.arange(len(places))
    if pool is None:  # only these can be selected
        networks = np.concatenate(_sure_and_tied(places, networks, k))
    for _ in range(draws):
        drawn = networks if pool is None else rng.choice(networks, pool, replace=False)
        sure, tied = _sure_and_tied(places, drawn, k)
        from_tied = rng.choice(tied, k - len(sure), replace=False)
        yield rng.permutation(np.concatenate([sure, from_tied]))


def _sure_and_tied(
    places: np.ndarray, networks: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the networks above the k-th best place, fewer than k, and those at it."""
    own_places = places[networks]
    last = np.partition(own_places, -k)[-k]
    return networks[own_places > last], networks[own_places == last]


def best_of_k_random(valid: Any, test: Any, k: int) -> float:
    """Return the expected test accuracy of the best by validation among k random networks.

    The i-th from below of m networks, by ``valid`` [m], is the best of k drawn without replacement
    with probability ``C(i-1, k-1) / C(m, k)``. Networks of equal validation accuracy share their
    probability.

    Raises
    ------
    ValueError
        If shapes differ, accuracies are not finite, or k is not from 1 to m.

    Examples
    --------
    >>> best_of_k_random([1, 2, 3], [10.0, 20.0, 30.0], 2)  # 20 once, 30 twice
    26.666666666666664
    """
    valid, test = _vectors(valid=valid, test=test)
    m = len(valid)
    _check_number("k", k, m)
    # From above: k/m, then each the factor (i-k)/(i-1) times the chance before.
    i = np.arange(m, 1, -1)
    chances = k / m * np.cumprod([1, *(np.maximum(i - k, 0) / (i - 1))])[::-1]
    _, group = np.unique(valid, return_inverse=True)
    number = np.bincount(group)
    shared = np.bincount(np.sort(group), chances) / number
    return float(shared[group] @ test)


class Figure(NamedTuple):
    """A mean over repeats and the standard deviation, with denominator n - 1; NaN if n = 1."""

    mean: float
    std: float


def _figure(accuracies: np.ndarray) -> Figure:
    spread = accuracies.std(ddof=1) if len(accuracies) > 1 else math.nan
    return Figure(float(accuracies.mean()), float(spread))


def paper_protocol(
    score: Any,
    table: BenchmarkTable,
    rows: Any,
    *,
    k: int = 20,
    repeats: int = 9,
    pool: int = 300,
    seed: int = 0,
    validation: str = "early",
) -> dict[str, Figure]:
    """Return test accuracies by the procedure of KNAS and Eigen-NAS, to compare with ``PRINTED``.

    Each repeat draws ``pool`` networks, keeps the k of best score, takes the one of best early
    validation accuracy, and reports its final test accuracy, for each of ``DATASETS``. Deviations:
    KNAS validates at epoch 20 of 200; here the table's separate training of 12 epochs does
    (``validation="final"``: all 200). KNAS uses the training loss on CIFAR-100, and draws with
    replacement. Eigen-NAS repeats 5 times.
    """
    values = table.early if validation == "early" else table.accuracy
    figures = {}
    for dataset in DATASETS:
        valid, test = values[f"{dataset}-valid"][rows], table.accuracy[f"{dataset}-test"][rows]
        accuracies = best_of_k(score, valid, test, k, pool=pool, draws=repeats, seed=seed)
        figures[dataset] = _figure(accuracies)
    return figures


def sum_of_log_ranks(*scores: Any) -> np.ndarray:
    """Combine scores [m]: ``sum log(rank / m)`` over scores, at most 0, with rank m the best.

    A bad rank counts more than a good one. Ties share their mean rank (Lee & Ham, AZ-NAS:
    Assembling zero-cost proxies for network architecture search, CVPR 2024).

    Raises
    ------
    ValueError
        If there are no scores, or their lengths differ.

    Examples
    --------
    >>> sum_of_log_ranks([1, 2, 4, 3], [10, np.nan, 40, 30]).round(2)
    array([-2.08, -2.08,  0.  , -0.58])
    """
    arrays = [_as_float64("scores", score) for score in scores]
    if not arrays:
        raise ValueError("scores: expected at least one, got none.")
    shapes = [list(array.shape) for array in arrays]
    if len(shapes[0]) != 1 or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"scores: expected vectors of one length, got shapes {shapes}.")
    return np.sum([np.log(rankdata(_rank_places(array)) / len(array)) for array in arrays], axis=0)


def judge(
    scores: Mapping[str, Any],
    table: BenchmarkTable,
    rows: Any,
    *,
    k: int = 20,
    pool: int | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return all figures of ``scores`` at some ``rows`` of the table, and of the ``BASELINES``.

    The result is one dict for each score and baseline: ``score``, its name; ``nan``, the number of
    NaN; and

        <dataset>_test_tau, _rho  :func:`correlations`, for ``cifar10_valid`` too
        <dataset>_top_one         :func:`top_one`, test accuracy
        <dataset>_gain            mean of :func:`best_of_k` minus :func:`best_of_k_random`
        <dataset>_gain_error      standard error of that mean, over ties and pools
    """
    rows = np.asarray(rows)
    taken = [name for name in scores if name in BASELINES]
    if taken:
        raise ValueError(f"scores: expected names other than the baselines', got {taken[0]!r}.")
    cells = [table.genotypes[i] for i in rows]
    baselines = {name: [count(cell) for cell in cells] for name, count in BASELINES.items()}
    arrays = {name: _as_float64("scores", s) for name, s in {**scores, **baselines}.items()}
    accuracy = {name: values[rows] for name, values in table.accuracy.items()}
    chance = {
        dataset: best_of_k_random(accuracy[f"{dataset}-valid"], accuracy[f"{dataset}-test"], k)
        for dataset in DATASETS
    }
    report = []
    for name, score in arrays.items():
        line: dict[str, Any] = {"score": name, "nan": int(np.isnan(score).sum())}
        for images in ("cifar10-valid", *(f"{dataset}-test" for dataset in DATASETS)):
            key = images.replace("-", "_")
            line[f"{key}_tau"], line[f"{key}_rho"] = correlations(score, accuracy[images])
        for dataset in DATASETS:
            valid, test = accuracy[f"{dataset}-valid"], accuracy[f"{dataset}-test"]
            line[f"{dataset}_top_one"] = top_one(score, test)
            accuracies = best_of_k(score, valid, test, k, pool=pool, draws=draws, seed=seed)
            mean, spread = _figure(accuracies)
            line[f"{dataset}_gain"] = mean - chance[dataset]
            line[f"{dataset}_gain_error"] = spread / math.sqrt(draws)
        report.append(line)
    return report


def standing(
    table: BenchmarkTable,
    genotypes: Sequence[Genotype],
    *,
    operations: Sequence[str] = PRIMITIVES,
    budget: int = 1,
) -> dict[str, dict[str, Any]]:
    """Return test accuracies and ranks of ``genotypes``, compared with random and best networks.

    The result has a dict for each key of ``DATASETS``:

    - ``accuracy`` and ``rank`` of every genotype; rank 1 is the best of all networks;
    - ``random`` and ``optimum``, the mean and the largest accuracy of the networks of these
      ``operations``;
    - ``best_of_random``, for a ``budget`` above 1. It is the expected accuracy of the best of that
      many random networks, chosen by CIFAR-10 validation.
    """
    rows = [genotype_row(genotype) for genotype in genotypes]
    others = np.array([set(operations) >= set(g.operations) for g in table.genotypes])
    budget = min(budget, others.sum())
    standings = {}
    for name in DATASETS:
        test = table.accuracy[f"{name}-test"]
        standings[name] = {
            "accuracy": test[rows].tolist(),
            "rank": [int(1 + np.sum(test > test[row])) for row in rows],
            "random": float(test[others].mean()),
            "optimum": float(test[others].max()),
        }
        if budget > 1:
            valid = table.accuracy["cifar10-valid"][others]
            standings[name]["best_of_random"] = best_of_k_random(valid, test[others], budget)
    return standings
