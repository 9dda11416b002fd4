"""A few quick inputs of the campaign of ``benchmarks/reliability/reliability.py``."""

import functools

import pytest

from benchmarks.reliability import parts

SEED, INPUTS = 1, 2
# What compiles in no time; the campaign itself attacks all of them.
QUICK = [
    *("argmax", "top_k", "factor_simplex", "tangent", "exponentiate", "project"),
    *("Problem", "scale", "spectral_limits", "sign_labels", "correlations", "split"),
    *("best_of_k", "parse_genotype", "random_search", "successive_halving", "hyperband", "load"),
    *("weight_sharing", "fast_weight_sharing", "leaky_relu", "eigen_nas_as_printed", "weigh"),
    *("certified_min_eigenvalue", "certify_simplex", "kernel_regression", "version_entropy"),
    *("ball_covering", "sparse_covering", "finite_covering", "effective_dimension"),
    *("feature_map_lipschitz", "khodak_theorem_a2", "khodak_corollary_a1", "oymak_h_bar"),
    *("oymak_theorem1", "oymak_lemma2", "oymak_proposition1"),
]
NAMES = [name for name in parts.GENERATORS if name.split(" ")[0].rpartition(".")[2] in QUICK]


@functools.cache
def outcomes(name):
    return [parts.one(name, SEED, number) for number in range(INPUTS)]


def of(name, *verdicts):
    return [f"{o.attack}: {o.detail}" for o in outcomes(name) if o.verdict in verdicts]


def test_every_public_name_is_attacked_or_declared_not_to_be():
    assert parts.uncovered() == sorted(parts.NOT_COVERED)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_input_gives_a_wrong_number_or_a_raw_error(name):
    assert not of(name, "wrong", "swallowed", "raw")


def test_the_same_number_is_the_same_input():
    assert parts.one(NAMES[0], SEED, 1) == outcomes(NAMES[0])[1]
