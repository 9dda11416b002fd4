"""Accuracies and ranks of networks among all 15,625 of NAS-Bench-201."""

from collections.abc import Sequence
from typing import Any

import numpy as np

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
