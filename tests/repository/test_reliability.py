"""A few quick inputs of the campaign of ``benchmarks/reliability/reliability.py``."""

import functools

import numpy as np
import pytest

from benchmarks.reliability import crashes, nonfinite, parts, victims
from benchmarks.reliability.case import not_a_sentence

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


@pytest.mark.long
@pytest.mark.parametrize("number", range(2))
def test_a_search_stops_where_a_quantity_is_not_finite(number):
    outcome = nonfinite.nonfinite(SEED, number)
    assert outcome.verdict == "right", outcome


@pytest.mark.filterwarnings("ignore:journal")  # of lines that are solved again
def test_a_journal_with_a_flipped_bit_gives_the_exact_trace_or_is_refused(tmp_path):
    """Truth: the same run, left alone. Kills need processes of their own: the campaign has them."""
    rng = np.random.default_rng(SEED)
    truth = victims.sharing(tmp_path / "whole")
    lines = (tmp_path / "whole" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for i in range(8):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "journal.jsonl").write_bytes(b"".join(lines[:3]))
        where = crashes.flipped(folder, rng)
        try:
            arrays = victims.sharing(folder)
        except ValueError as error:
            assert not not_a_sentence(error, {"journal": None}), where
        else:
            for name, expected in truth.items():
                assert arrays[name].tobytes() == expected.tobytes(), where
