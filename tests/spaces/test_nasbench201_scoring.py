"""Scores of many genotypes: one program each, kept in a file, resumed to the same result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import no_room

import ntk
from bilevel.spaces.nasbench201 import all_networks, genotypes, scoring
from bilevel.spaces.nasbench201.scoring import score_networks

NETWORKS = all_networks(classes=3, cells=1, channels=2)
CELLS = [genotypes()[i] for i in (3117, 8411, 15_000, 10_002, 14_444)]
X = np.random.default_rng(1).normal(size=(3, 4, 4, 1))
BATCH = X, np.array([0, 1, 2])
NAMES = ("l2_norm", "naswot")
CHEAP = {"cells": CELLS[:2], "names": ("l2_norm",)}


@functools.cache
def weights():
    return NETWORKS.init(jax.random.key(0), X.shape[1:])


def scored(cells=CELLS, names=NAMES, batch=BATCH, **options):
    return score_networks(names, NETWORKS, weights(), cells, batch, progress=False, **options)


def scores(*arguments, **options):
    return scored(*arguments, **options).values


def alone(name, genotype):
    own = NETWORKS.select(weights(), genotype)
    score = jax.jit(getattr(ntk.scores, name), static_argnums=(0, 1))
    return float(score(None, lambda w, x: NETWORKS.apply(w, genotype, x), own, BATCH))


@functools.cache
def expected():
    return scores()


@pytest.mark.long
def test_scores_are_those_of_each_network_by_itself_and_equal_several_at_once():
    assert np.isfinite(expected()["naswot"]).any()
    together = scores(at_once=4)  # the second chunk is filled up
    for name, values in expected().items():
        np.testing.assert_allclose(together[name], values, rtol=1e-5)
        for genotype, value in zip(CELLS[:2], values[:2], strict=True):
            np.testing.assert_allclose(value, alone(name, genotype), rtol=1e-5)  # float32 weights


@pytest.mark.long
def test_scores_of_one_gradient_are_one_program_and_each_its_own():
    both = scored(names=("snip", "grad_norm"))
    assert both.seconds["snip"] == both.seconds["grad_norm"]
    for name, values in both.values.items():
        np.testing.assert_allclose(values, scores(names=(name,))[name], rtol=1e-5)
        np.testing.assert_allclose(values[1], alone(name, CELLS[1]), rtol=1e-5)


@pytest.mark.long
def test_a_second_call_compiles_nothing():
    scores(CELLS[:3], ("l2_norm",))
    names = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: names.append(name))
    scores(CELLS[1:4], ("l2_norm",))
    assert not [name for name in names if "backend_compile" in name]


@pytest.mark.long
def test_an_interrupted_run_resumes_to_the_same_scores(tmp_path, monkeypatch):
    file = tmp_path / "scores.npz"
    monkeypatch.setattr(scoring, "_SAVE_SECONDS", 0.0)
    calls, add = [], scoring._ScoreStore.add

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return add(*arguments)

    monkeypatch.setattr(scoring._ScoreStore, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scores(names=("l2_norm",), file=file)
    resumed = scores(names=("l2_norm",), file=file)
    assert len(calls) == len(CELLS) + 1  # none was scored twice
    np.testing.assert_equal(resumed["l2_norm"], expected()["l2_norm"])


@pytest.mark.long
def test_a_damaged_file_of_scores_is_refused_and_a_full_disk_costs_only_the_file(tmp_path):
    file, random = tmp_path / "scores.npz", np.random.default_rng(0)
    scores(**CHEAP, file=file)
    whole = file.read_bytes()
    for byte in random.integers(len(whole), size=10):
        flipped = bytearray(whole)
        flipped[byte] ^= 1 << random.integers(8)
        file.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"file: expected .* damaged .* Remove it to score"):
            scores(**CHEAP, file=file)
    file.unlink()
    with no_room(500), pytest.warns(UserWarning, match="file: scores in .* could not be written"):
        by_score = scores(**CHEAP, file=file)
    np.testing.assert_equal(by_score["l2_norm"], expected()["l2_norm"][:2])
    assert not file.exists()


@pytest.mark.long
def test_a_function_is_a_score_by_its_name():
    def spread(key, apply, params, batch):
        noise = 0.1 * jax.random.normal(key, batch[0].shape)
        return jnp.std(apply(params, batch[0] + noise))

    def score(at_once, seed=0):
        own = {"functions": {"spread": spread}, "key": jax.random.key(seed)}
        return scores(CELLS[:3], ("spread", "l2_norm"), at_once=at_once, **own)

    one, other = score(1), score(1, seed=1)
    np.testing.assert_array_equal(one["l2_norm"], expected()["l2_norm"][:3])
    assert not np.allclose(one["spread"], other["spread"])
    np.testing.assert_allclose(score(2)["spread"], one["spread"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"batch": (X + 1, BATCH[1])}, {"cells": CELLS[1:]}])
def test_a_file_of_other_images_or_genotypes_raises(tmp_path, other):
    file = tmp_path / "scores.npz"
    scores(**CHEAP, file=file)
    with pytest.raises(ValueError, match="file: expected scores of these networks"):
        scores(**(CHEAP | other), file=file)


@pytest.mark.long
def test_networks_and_scores_are_added_to_a_file_and_stay_in_it(tmp_path, monkeypatch):
    file = tmp_path / "scores"
    whole = scored(names=("l2_norm",), file=file)
    some = scored(CELLS[:2], file=file)
    assert some.seconds["l2_norm"] == whole.seconds["l2_norm"]
    assert len(some.values["l2_norm"]) == len(some.values["naswot"]) == 2
    again = scored(file=file)
    assert again.seconds["l2_norm"] == whole.seconds["l2_norm"]  # nothing was computed again
    np.testing.assert_equal(again.values, expected())
    monkeypatch.setattr(scoring, "_score_programs", lambda *_: {})  # nothing is left to compute
    np.testing.assert_equal(scores(CELLS[:4], file=file)["naswot"], expected()["naswot"][:4])
