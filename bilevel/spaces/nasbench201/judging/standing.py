"""Where networks stand among all 15,625 of NAS-Bench-201: what a search of its cell has found."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bilevel.internal.checks import integer, one_of
from bilevel.spaces.nasbench201.genotype import PRIMITIVES, Genotype
from bilevel.spaces.nasbench201.judging.table import DATASETS, BenchmarkTable, genotype_row
from bilevel.spaces.nasbench201.judging.verdicts import best_of_k_random


def standing(
    table: BenchmarkTable,
    genotypes: Sequence[Genotype],
    *,
    operations: Sequence[str] = PRIMITIVES,
    budget: int = 1,
) -> dict[str, dict[str, Any]]:
    """Test accuracies and ranks of networks, beside random networks and the best one.

    Parameters
    ----------
    table : Table
        What :func:`load_table` returns.
    genotypes : sequence
        Of genotypes, as :func:`bilevel.spaces.nasbench201.genotypes` returns them.
    operations : names of ``PRIMITIVES``
        That were searched: random networks and the optimum are among those of these operations.
    budget : int
        Of so many random networks the best is that by CIFAR-10 validation, as a genotype found on
        one data set is judged on all; none is better than all of them.

    Returns
    -------
    dict
        For each key of ``DATASETS`` a dict: ``accuracy`` and ``rank``, of every genotype, 1 the
        best of all networks; ``random``, the mean; ``optimum``; and, for a ``budget`` over 1,
        ``best_of_random``, the expected accuracy.

    Raises
    ------
    ValueError
        For what is no genotype, an unknown operation, or a ``budget`` under 1.

    Examples
    --------
    >>> from bilevel.spaces.nasbench201.judging.table import load_table
    >>> from bilevel.spaces.nasbench201.genotype import decode
    >>> result = standing(load_table(), [decode([3, 1, 3, 1, 3, 3])], budget=10)["cifar10"]
    >>> result["rank"], round(result["optimum"], 2)
    ([...], 94.37...)
    """
    for name in operations:
        one_of("operations", name, PRIMITIVES)
    rows = [genotype_row(table, genotype) for genotype in genotypes]
    others = np.array([set(operations) >= set(g.operations) for g in table.genotypes])
    budget = min(integer("budget", budget, 1), others.sum())
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
