"""``bilevel.bounds``: the papers' theorems; their documented formulas in float64."""

import math

import jax.numpy as jnp
import numpy as np

import ntk
from benchmarks.reliability.case import Case, near
from benchmarks.reliability.registry import generates
from benchmarks.reliability.theorems import formula, rows, size
from bilevel import bounds

# ----------------------------------------------------------------------------- Oymak et al.


@generates("bilevel.theory.bounds.oymak_h_bar")
def oymak_h_bar(rng, dtype) -> Case:
    a = {
        "n_valid": rows(rng),
        "h_eff": size(rng, 0, 3),
        "C_bar": size(rng, 0, 2),
        "L": size(rng),
        "Gamma": size(rng, -1, 1),
    }
    inside = a["C_bar"] * a["L"] * a["Gamma"] * a["n_valid"] / a["h_eff"]
    truth = a["h_eff"] * max(math.log(inside), 0)
    return formula(bounds.oymak_h_bar, truth, a, dict.fromkeys(a, "positive"), (), lambda r: r)


@generates("bilevel.theory.bounds.oymak_theorem1")
def oymak_theorem1(rng, dtype) -> Case:
    a = {
        "n_valid": rows(rng),
        "h_bar": size(rng, 0, 3),
        "h": int(rng.integers(1, 50)),
        "tau": float(rng.uniform(1, 9)),
        "delta": 0.1,
        "C": size(rng, -1, 1),
    }
    gap = math.sqrt(a["C"] * (a["h_bar"] + a["tau"]) / a["n_valid"])
    slope = math.sqrt(a["C"] * (a["h"] + a["h_bar"] + a["tau"]) / a["n_valid"])
    kinds = {
        "n_valid": "positive",
        "h_bar": "nonnegative",
        "h": "count",
        "tau": "positive",
        "delta": "nonnegative",
        "C": "positive",
    }
    return formula(
        bounds.oymak_theorem1,
        [gap, 2 * gap + 0.1, slope],
        a,
        kinds,
        (),
        lambda r: [b.value for b in r],
    )


@generates("bilevel.theory.bounds.oymak_proposition1")
def oymak_proposition1(rng, dtype) -> Case:
    a = {
        "n_train": rows(rng),
        "n_valid": rows(rng),
        "risk": rng.uniform(0, 1, 3),
        "complexity": rng.uniform(0, 30, 3),
        "h_eff": size(rng, 0, 2),
        "t": 4.0,
        "delta": 0.0,
        "C": size(rng, -1, 1),
    }
    best = np.min(a["risk"] + a["complexity"] / math.sqrt(a["n_train"]))
    truth = best + math.sqrt(a["C"] * (a["h_eff"] + 4) / a["n_valid"])
    kinds = {
        "n_train": "positive",
        "n_valid": "positive",
        "risk": "numbers",
        "C": "positive",
        "complexity": "numbers",
        "h_eff": "positive",
        "t": "positive",
        "delta": "nonnegative",
    }
    fine = ("risk: inf", "complexity: inf")  # a bound that is infinite is no choice
    return formula(bounds.oymak_proposition1, truth, a, kinds, fine=fine)


@generates("bilevel.theory.bounds.oymak_lemma1")
def oymak_lemma1(rng, dtype) -> Case:
    a = {
        "n_train": rows(rng),
        "h": int(rng.integers(1, 20)),
        "B": size(rng, -1, 3),
        "lambda0": size(rng, -3, 1),
        "R": size(rng, 0, 2),
    }
    inside = (
        20 * a["R"] ** 3 * a["B"] * (a["n_train"] / a["lambda0"]) ** 2 * (a["B"] * a["n_train"] + 1)
    )
    kinds = dict.fromkeys(a, "positive") | {"h": "count"}
    truth = (a["h"] + 1) * math.log(inside)
    return formula(bounds.oymak_lemma1, truth, a, kinds, (), lambda r: r)


@generates("bilevel.theory.bounds.oymak_lemma2")
def oymak_lemma2(rng, dtype) -> Case:
    name = str(rng.choice(["cross", "smoothness"]))
    a = {"mu": size(rng), name: size(rng)}
    truth = a[name] / a["mu"] if name == "cross" else math.sqrt(a[name] / a["mu"])
    return formula(bounds.oymak_lemma2, truth, a, dict.fromkeys(a, "positive"), (), lambda r: r)


@generates("bilevel.theory.bounds.oymak_lemma2_as_printed")
def oymak_lemma2_as_printed(rng, dtype) -> Case:
    a = {"mu": size(rng), "smoothness": size(rng)}
    truth = math.sqrt(a["smoothness"] / a["mu"])
    return formula(
        bounds.oymak_lemma2_as_printed, truth, a, dict.fromkeys(a, "positive"), (), lambda r: r
    )


@generates("bilevel.theory.bounds.oymak_theorem4_as_printed")
def oymak_theorem4(rng, dtype) -> Case:
    a = {"p_over_n": 1 + size(rng, -2, 2), "h_over_n": size(rng, -5, -1), "c": 0.01}
    known = 1 - 1 / a["p_over_n"]
    truth = [1 - 64 * a["p_over_n"] * a["h_over_n"], known + 200 * a["h_over_n"] / known]
    return formula(
        bounds.oymak_theorem4_as_printed,
        truth,
        a,
        dict.fromkeys(a, "positive"),
        (),
        lambda r: [r.correlation.value, r.risk.value],
    )


def _kernels(rng, dtype):
    phi = rng.normal(size=(2, 5, 8))
    K = np.einsum("anp,amp->anm", phi, phi).astype(dtype)
    y = np.sign(rng.normal(size=5)).astype(dtype)
    energy = min(math.sqrt(y @ np.linalg.solve(k.astype(np.float64), y) / 5) for k in K)
    return jnp.asarray(K), jnp.asarray(y), energy


@generates(
    "bilevel.theory.bounds.oymak_theorem2", "bilevel.theory.bounds.oymak_theorem2_as_printed"
)
def oymak_theorem2(rng, dtype) -> Case:
    K, y, energy = _kernels(rng, dtype)
    a = {
        "K": K,
        "y": y,
        "n_valid": rows(rng),
        "h": 3,
        "B": size(rng, 0, 1),
        "lambda0": size(rng, -2, 0),
        "R": size(rng, 0, 1),
        "C": 1.0,
    }
    M = 30 * a["R"] ** 4 * (a["B"] / a["lambda0"]) ** 2 * (5 + a["n_valid"]) * 5
    valid = math.sqrt((3 * math.log(M) + 3) / a["n_valid"])
    training = 2 * math.sqrt(a["B"]) * energy
    kinds = {
        "K": "array",
        "y": "rows",
        "n_valid": "positive",
        "h": "count",
        "B": "positive",
        "lambda0": "positive",
        "R": "positive",
        "C": "positive",
    }
    call = lambda **k: (bounds.oymak_theorem2(**k), bounds.oymak_theorem2_as_printed(**k))
    check = lambda r: near(
        "values", [b.value for b in r], [training * a["R"] + valid, training + valid], 1e-3
    )
    return Case(call, a, check, kinds, ("K", "y"), fine=("K: one axis more",))


@generates("bilevel.theory.bounds.oymak_theorem3")
def oymak_theorem3(rng, dtype) -> Case:
    K, y, energy = _kernels(rng, dtype)
    a = {
        "K": K,
        "y": y,
        "n_valid": rows(rng),
        "h": 3,
        "B": size(rng, 0, 1),
        "t": 4.0,
        "epsilon": 0.0,
        "delta": 0.0,
        "C": 1.0,
        "activations": [ntk.tanh],
    }
    truth = 2 * a["B"] * energy + math.sqrt(7 / a["n_valid"])
    kinds = {
        "K": "array",
        "y": "rows",
        "n_valid": "positive",
        "h": "count",
        "B": "positive",
        "t": "positive",
        "epsilon": "nonnegative",
        "delta": "nonnegative",
        "C": "positive",
    }
    check = lambda r: near("value", r.value, truth, 1e-3)
    if 4 * (math.exp(-4) + 5**-3 + math.exp(-30)) >= 1:
        check = lambda r: ""
    return Case(bounds.oymak_theorem3, a, check, kinds, ("K", "y"), fine=("K: one axis more",))


# ----------------------------------------------------------------------------- Khodak et al.


def _entropy(rng):
    a = {
        "entropy": rng.uniform(0, 50, 3),
        "n_valid": rows(rng),
        "delta": float(rng.uniform(0.001, 0.2)),
        "B": size(rng, -1, 1),
        "epsilon": 10 ** rng.uniform(-4, 0, 3),
        "excess": float(rng.choice([0.0, 0.1])),
    }
    kinds = {
        "entropy": "numbers",
        "n_valid": "positive",
        "delta": "fraction",
        "B": "positive",
        "epsilon": "numbers",
        "excess": "nonnegative",
    }
    fine = ("entropy: inf", "epsilon: inf")  # one radius of several that says nothing
    return a, kinds, fine


def _theorem(a, slope, selected, spread) -> float:
    log = math.log(1 / a["delta"])
    scale = a["B"] / math.sqrt(a["n_valid"])
    cover = slope * a["epsilon"] + spread * scale * np.sqrt(a["entropy"] + log)
    return a["excess"] + selected * scale * math.sqrt(log) + cover.min()


@generates("bilevel.theory.bounds.khodak_theorem_a2")
def khodak_theorem_a2(rng, dtype) -> Case:
    a, kinds, fine = _entropy(rng)
    a["lipschitz"] = size(rng, -1, 1)
    truth = _theorem(a, 2 * a["lipschitz"], 0.5**0.5, 0.5**0.5)
    return formula(bounds.khodak_theorem_a2, truth, a, kinds | {"lipschitz": "positive"}, fine=fine)


@generates("bilevel.theory.bounds.khodak_theorem_a2_as_printed")
def khodak_theorem_a2_as_printed(rng, dtype) -> Case:
    a, kinds, fine = _entropy(rng)
    truth = _theorem(a, 3, 0.5**0.5, 2**0.5)
    return formula(bounds.khodak_theorem_a2_as_printed, truth, a, kinds, fine=fine)


@generates("bilevel.theory.bounds.khodak_theorem_3_1_as_printed")
def khodak_theorem_3_1(rng, dtype) -> Case:
    a, kinds, fine = _entropy(rng)
    truth = _theorem(a, 3, 0.0, 1.5 * 2**0.5)
    return formula(bounds.khodak_theorem_3_1_as_printed, truth, a, kinds, fine=fine)


@generates("bilevel.theory.bounds.khodak_corollary_a4")
def khodak_corollary_a4(rng, dtype) -> Case:
    a, kinds, fine = _entropy(rng)
    a |= {"n_train": rows(rng), "lipschitz": size(rng, -1, 1)}
    train = a["B"] * math.sqrt(math.log(1 / a["delta"]) / 2 / a["n_train"])
    truth = train + _theorem(a, 2 * a["lipschitz"], 0.5**0.5, 0.5**0.5)
    kinds |= {"n_train": "positive", "lipschitz": "positive"}
    return formula(bounds.khodak_corollary_a4, truth, a, kinds, fine=fine)


@generates(
    "bilevel.theory.bounds.khodak_corollary_a1",
    "bilevel.theory.bounds.khodak_corollary_a2",
    "bilevel.theory.bounds.khodak_corollary_a3",
)
def khodak_corollaries(rng, dtype) -> Case:
    a = {
        "w_norm": size(rng, -2, 2),
        "n_train": rows(rng),
        "n_valid": rows(rng),
        "configurations": float(rng.integers(1, 1000)),
        "delta": float(rng.uniform(0.01, 0.3)),
        "C": size(rng, -1, 1),
    }
    log = math.log(1 / a["delta"])
    train = math.sqrt((a["w_norm"] ** 2 + 1) * log / a["n_train"])
    valid = math.sqrt(math.log((a["configurations"] + 1) / a["delta"]) / a["n_valid"])
    features = log**2 / math.sqrt(a["n_train"])
    truth = a["C"] * np.array([train, train + valid, features + valid])

    def call(w_norm, n_train, n_valid, configurations, delta, C):
        return (
            bounds.khodak_corollary_a1(w_norm, n_train, delta=delta, C=C),
            bounds.khodak_corollary_a2(w_norm, n_train, n_valid, configurations, delta=delta, C=C),
            bounds.khodak_corollary_a3(n_train, n_valid, configurations, delta=delta, C=C),
        )

    kinds = {
        "w_norm": "nonnegative",
        "n_train": "positive",
        "n_valid": "positive",
        "configurations": "count",
        "delta": "fraction",
        "C": "positive",
    }
    fine = ("configurations: a fraction",)
    return formula(call, truth, a, kinds, (), lambda r: [b.value for b in r], fine=fine)
