"""``bilevel.bounds``: the documented formulas in float64, for numbers of every size."""

import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np

import ntk
from bilevel import bounds
from reliability.case import Case, at_most, eps, first, near
from reliability.registry import generates


def _size(rng, low=-3.0, high=6.0) -> float:
    return float(10 ** rng.uniform(low, high))


def _rows(rng) -> float:
    return float(rng.integers(1, 10**7))


def _formula(function, truth, arguments, kinds, traced=(), result=lambda r: r.value, **more) -> Case:
    """A bound whose value is a formula of numbers."""

    def check(found):
        reason = near("value", result(found), truth, 1e3 * eps(jnp.result_type(float)))
        return reason

    return Case(functools.partial(_called, function), arguments, check, kinds, traced, **more)


def _called(function, **arguments):
    return function(**arguments)


# ----------------------------------------------------------------------------- coverings


def _grid_size(h, radius):
    spread = 1 - 1 / h
    if radius**2 >= spread:
        return 0.0
    k = math.ceil(min(math.sqrt(h) / 2 / radius, spread / radius**2) * (1 - 1e-12))
    return sum(math.log1p(k / j) for j in range(1, h))


@generates("bilevel.bounds.ball_covering")
def ball(rng, dtype) -> Case:
    dim, R = int(rng.integers(1, 30)), _size(rng, -3, 3)
    radii = R * 10 ** rng.uniform(-4, 1, 3)
    truth = np.where(radii < R, dim * np.log1p(2 * R / radii), 0)
    call = lambda dim, R, radii: bounds.ball_covering(dim, R)(radii)  # noqa: E731
    kinds = {"dim": "count", "R": "positive", "radii": "numbers"}
    arguments = {"dim": dim, "R": R, "radii": jnp.asarray(radii, dtype)}
    check = lambda r: near("log N", r, truth, 1e3 * eps(dtype))  # noqa: E731
    return Case(call, arguments, check, kinds, ("radii",))


@generates("bilevel.bounds.simplex_covering")
def simplex(rng, dtype) -> Case:
    h, copies = int(rng.integers(1, 12)), int(rng.integers(1, 4))
    radii = 10 ** rng.uniform(-2, 0.5, 3)
    truth = [copies * _grid_size(h, r / math.sqrt(copies)) for r in radii]
    below = [copies * _grid_size(h, r * (1 + 1e-5) / math.sqrt(copies)) for r in radii]
    call = lambda h, copies, radii: bounds.simplex_covering(h, copies=copies)(radii)  # noqa: E731

    def check(r):  # a ceiling may be one apart
        return first(
            at_most("log N", np.asarray(below) * (1 - 1e-3) - 1e-3, r),
            at_most("log N", r, np.asarray(truth) * 1.05 + 1e-3 + copies),
        )

    kinds = {"h": "count", "copies": "count", "radii": "numbers"}
    arguments = {"h": h, "copies": copies, "radii": jnp.asarray(radii, dtype)}
    return Case(call, arguments, check, kinds, ("radii",))


@generates("bilevel.bounds.sparse_covering")
def sparse(rng, dtype) -> Case:
    h = int(rng.integers(1, 200))
    s, R = int(rng.integers(1, h + 1)), _size(rng, -2, 2)
    radii = R * 10 ** rng.uniform(-3, 0.5, 3)
    logs = math.log(math.comb(h, s)) + s * np.log1p(2 * R / radii)
    call = lambda h, s, R, radii: bounds.sparse_covering(h, s, R)(radii)  # noqa: E731
    kinds = {"h": "count", "s": "count", "R": "positive", "radii": "numbers"}
    arguments = {"h": h, "s": s, "R": R, "radii": jnp.asarray(radii, dtype)}
    check = lambda r: near("log N", r, np.where(radii < R, logs, 0), 1e3 * eps(dtype))  # noqa: E731
    return Case(call, arguments, check, kinds, ("radii",))


@generates("bilevel.bounds.finite_covering")
def finite(rng, dtype) -> Case:
    points = jnp.asarray(rng.normal(size=(int(rng.choice([1, 6])), 2)), dtype)
    radius = _size(rng, -2, 1)
    P = np.asarray(points, np.float64)
    distances = np.linalg.norm(P[:, None] - P, axis=-1)

    def least(radius):  # brute force over all sets of centres
        for k in range(1, len(P) + 1):
            for chosen in itertools.combinations(range(len(P)), k):
                if (distances[list(chosen)].min(0) <= radius).all():
                    return k
        return len(P)

    call = lambda points, radii: bounds.finite_covering(points)(radii)  # noqa: E731
    check = lambda r: first(  # noqa: E731
        at_most("covering number", least(radius * (1 + 1e-5)), np.exp(np.asarray(r)) + 1e-4),
        at_most("covering number", np.exp(np.asarray(r)), least(radius * (1 - 1e-5) / 2) + 1e-4),
    )
    arguments = {"points": points, "radii": jnp.asarray([radius], dtype)}
    kinds = {"points": "array", "radii": "numbers"}
    return Case(call, arguments, check, kinds, ("points", "radii"), fine=("radii: inf",))


@generates("bilevel.bounds.effective_dimension")
def effective_dimension(rng, dtype) -> Case:
    C_bar = _size(rng, -1, 2)
    radii = C_bar * 10 ** rng.uniform(-4, -0.1, 4)
    logs = rng.uniform(0, 20, 4)
    truth = np.max(logs / np.log(C_bar / radii))
    arguments = {"log_covering_numbers": jnp.asarray(logs, dtype),
                 "radii": jnp.asarray(radii, dtype), "C_bar": C_bar}  # fmt: skip
    kinds = {"log_covering_numbers": "rows", "radii": "rows", "C_bar": "positive"}
    return _formula(bounds.effective_dimension, truth, arguments, kinds,
                    ("log_covering_numbers", "radii"), lambda r: r)  # fmt: skip


@generates("bilevel.bounds.version_entropy")
def version_entropy(rng, dtype) -> Case:
    logs = rng.uniform(0, 500, (2, 4))
    truth = logs.max(1) + np.log(np.exp(logs - logs.max(1, keepdims=True)).sum(1))
    arguments = {"log_covering_numbers": jnp.asarray(logs, dtype)}
    kinds = {"log_covering_numbers": "numbers"}
    return _formula(bounds.version_entropy, truth, arguments, kinds, ("log_covering_numbers",),
                    lambda r: r)  # fmt: skip


# ----------------------------------------------------------------------------- proved here


def _scan(value, low=-30, high=8):
    return min(value(math.exp(t)) for t in np.linspace(low, high, 4000))


def _family(rng):
    h = int(rng.integers(2, 10))
    arguments = {"n_valid": _rows(rng), "covering": bounds.ball_covering(h, 1.0),
                 "L": _size(rng, -1, 3), "Gamma": _size(rng, -1, 1), "b": _size(rng, -1, 1),
                 "variance": None, "tau": float(rng.uniform(1, 9))}  # fmt: skip
    if rng.random() < 0.5:
        arguments["variance"] = _size(rng, -3, 0)
    logs = lambda radius: h * math.log1p(2 / radius) if radius < 1 else 0.0  # noqa: E731
    kinds = {"n_valid": "positive", "covering": "function", "L": "positive", "Gamma": "positive",
             "b": "positive", "variance": "nonnegative?", "tau": "positive"}  # fmt: skip
    return arguments, kinds, logs


def _gap(a, logs) -> float:
    def value(radius):
        share = (logs(radius) + a["tau"]) / a["n_valid"]
        spread = a["b"] * math.sqrt(share / 2)
        if a["variance"] is not None:
            spread = min(spread, math.sqrt(2 * a["variance"] * share) + a["b"] * share / 3)
        return 2 * a["Gamma"] * a["L"] * radius + spread

    return _scan(value)


def _optimal(truth, result=lambda r: r.value):
    """At least the optimum over all radii, and no more than a coarse grid's loss above it."""

    def check(found):
        value = float(result(found))
        return first(
            at_most("optimum", truth * (1 - 2e-2), value), at_most("value", value, truth * 1.02)
        )

    return check


@generates("bilevel.bounds.uniform_convergence")
def uniform_convergence(rng, dtype) -> Case:
    arguments, kinds, logs = _family(rng)
    return Case(bounds.uniform_convergence, arguments, _optimal(_gap(arguments, logs)), kinds)


@generates("bilevel.bounds.selection_risk")
def selection_risk(rng, dtype) -> Case:
    arguments, kinds, logs = _family(rng)
    best = arguments["b"] * math.sqrt(arguments["tau"] / 2 / arguments["n_valid"])
    arguments["delta"] = float(rng.choice([0.0, 0.1]))
    truth = _gap(arguments, logs) + best + arguments["delta"]
    kinds["delta"] = "nonnegative"
    return Case(bounds.selection_risk, arguments, _optimal(truth), kinds)


@generates("bilevel.bounds.hypergradient_convergence")
def hypergradient_convergence(rng, dtype) -> Case:
    arguments, kinds, logs = _family(rng)
    chosen = {k: arguments[k] for k in ("n_valid", "covering", "L", "tau")} | {"G": _size(rng, -1, 2)}
    kinds = {k: v for k, v in kinds.items() if k in chosen} | {"G": "positive"}

    def value(radius):
        root = 1 + math.sqrt(2 * (logs(radius) + chosen["tau"]))
        return 2 * chosen["L"] * radius + chosen["G"] * root / math.sqrt(chosen["n_valid"])

    return Case(bounds.hypergradient_convergence, chosen, _optimal(_scan(value)), kinds)


@generates("bilevel.bounds.sample_size")
def sample_size(rng, dtype) -> Case:
    gap, entropy = _size(rng, -3, 1), float(rng.uniform(0, 50))
    bound = lambda n: bounds.khodak_theorem_a2(entropy, n)  # noqa: E731

    def check(rows):
        return first(
            at_most("gap", float(bound(float(rows)).value), gap),
            "" if rows == 1 else at_most("gap, one row fewer", gap, float(bound(rows - 1.0).value),
                                         1e-6 * gap),
        )  # fmt: skip

    kinds = {"gap": "positive", "bound": "function"}
    return Case(bounds.sample_size, {"gap": gap, "bound": bound}, check, kinds)


@generates("bilevel.bounds.feature_map_lipschitz")
def feature_map_lipschitz(rng, dtype) -> Case:
    a = {"n_train": _rows(rng), "h": int(rng.integers(1, 20)), "B": _size(rng), "y_norm": _size(rng),
         "lambda0": _size(rng), "R": _size(rng, 0, 2)}  # fmt: skip
    root = math.sqrt(a["n_train"] * a["B"])
    t = a["y_norm"] * min(1 / math.sqrt(a["lambda0"]), a["R"] * root / a["lambda0"])
    alpha = math.sqrt(a["h"] * a["B"]) * (
        t + a["R"] * a["y_norm"] * math.sqrt(2) * root / a["lambda0"]
    )
    penalty = a["R"] * math.sqrt(a["B"]) * t / a["lambda0"]
    kinds = dict.fromkeys(a, "positive") | {"h": "count"}
    check = lambda r: first(  # noqa: E731
        near("alpha", r.alpha, alpha, 1e-5), near("penalty", r.penalty, penalty, 1e-5)
    )
    return Case(bounds.feature_map_lipschitz, a, check, kinds)


# ----------------------------------------------------------------------------- Oymak et al.


@generates("bilevel.bounds.oymak_h_bar")
def oymak_h_bar(rng, dtype) -> Case:
    a = {"n_valid": _rows(rng), "h_eff": _size(rng, 0, 3), "C_bar": _size(rng, 0, 2),
         "L": _size(rng), "Gamma": _size(rng, -1, 1)}  # fmt: skip
    inside = a["C_bar"] * a["L"] * a["Gamma"] * a["n_valid"] / a["h_eff"]
    truth = a["h_eff"] * max(math.log(inside), 0)
    return _formula(bounds.oymak_h_bar, truth, a, dict.fromkeys(a, "positive"), (), lambda r: r)


@generates("bilevel.bounds.oymak_theorem1")
def oymak_theorem1(rng, dtype) -> Case:
    a = {"n_valid": _rows(rng), "h_bar": _size(rng, 0, 3), "h": int(rng.integers(1, 50)),
         "tau": float(rng.uniform(1, 9)), "delta": 0.1, "C": _size(rng, -1, 1)}  # fmt: skip
    gap = math.sqrt(a["C"] * (a["h_bar"] + a["tau"]) / a["n_valid"])
    slope = math.sqrt(a["C"] * (a["h"] + a["h_bar"] + a["tau"]) / a["n_valid"])
    kinds = {"n_valid": "positive", "h_bar": "nonnegative", "h": "count", "tau": "positive",
             "delta": "nonnegative", "C": "positive"}  # fmt: skip
    return _formula(bounds.oymak_theorem1, [gap, 2 * gap + 0.1, slope], a, kinds, (),
                    lambda r: [b.value for b in r])  # fmt: skip


@generates("bilevel.bounds.oymak_proposition1")
def oymak_proposition1(rng, dtype) -> Case:
    a = {"n_train": _rows(rng), "n_valid": _rows(rng), "risk": rng.uniform(0, 1, 3),
         "complexity": rng.uniform(0, 30, 3), "h_eff": _size(rng, 0, 2), "t": 4.0, "delta": 0.0,
         "C": _size(rng, -1, 1)}  # fmt: skip
    best = np.min(a["risk"] + a["complexity"] / math.sqrt(a["n_train"]))
    truth = best + math.sqrt(a["C"] * (a["h_eff"] + 4) / a["n_valid"])
    kinds = {"n_train": "positive", "n_valid": "positive", "risk": "numbers", "C": "positive",
             "complexity": "numbers", "h_eff": "positive", "t": "positive",
             "delta": "nonnegative"}  # fmt: skip
    fine = ("risk: inf", "complexity: inf")  # a bound that is infinite is no choice
    return _formula(bounds.oymak_proposition1, truth, a, kinds, fine=fine)


@generates("bilevel.bounds.oymak_lemma1")
def oymak_lemma1(rng, dtype) -> Case:
    a = {"n_train": _rows(rng), "h": int(rng.integers(1, 20)), "B": _size(rng, -1, 3),
         "lambda0": _size(rng, -3, 1), "R": _size(rng, 0, 2)}  # fmt: skip
    inside = 20 * a["R"] ** 3 * a["B"] * (a["n_train"] / a["lambda0"]) ** 2 * (
        a["B"] * a["n_train"] + 1)  # fmt: skip
    kinds = dict.fromkeys(a, "positive") | {"h": "count"}
    truth = (a["h"] + 1) * math.log(inside)
    return _formula(bounds.oymak_lemma1, truth, a, kinds, (), lambda r: r)


@generates("bilevel.bounds.oymak_lemma2")
def oymak_lemma2(rng, dtype) -> Case:
    name = str(rng.choice(["cross", "smoothness"]))
    a = {"mu": _size(rng), name: _size(rng)}
    truth = a[name] / a["mu"] if name == "cross" else math.sqrt(a[name] / a["mu"])
    return _formula(bounds.oymak_lemma2, truth, a, dict.fromkeys(a, "positive"), (), lambda r: r)


@generates("bilevel.bounds.oymak_lemma2_as_printed")
def oymak_lemma2_as_printed(rng, dtype) -> Case:
    a = {"mu": _size(rng), "smoothness": _size(rng)}
    truth = math.sqrt(a["smoothness"] / a["mu"])
    return _formula(bounds.oymak_lemma2_as_printed, truth, a, dict.fromkeys(a, "positive"), (),
                    lambda r: r)  # fmt: skip


@generates("bilevel.bounds.oymak_theorem4_as_printed")
def oymak_theorem4(rng, dtype) -> Case:
    a = {"p_over_n": 1 + _size(rng, -2, 2), "h_over_n": _size(rng, -5, -1), "c": 0.01}
    known = 1 - 1 / a["p_over_n"]
    truth = [1 - 64 * a["p_over_n"] * a["h_over_n"], known + 200 * a["h_over_n"] / known]
    return _formula(bounds.oymak_theorem4_as_printed, truth, a, dict.fromkeys(a, "positive"), (),
                    lambda r: [r.correlation.value, r.risk.value])  # fmt: skip


def _kernels(rng, dtype):
    phi = rng.normal(size=(2, 5, 8))
    K = np.einsum("anp,amp->anm", phi, phi).astype(dtype)
    y = np.sign(rng.normal(size=5)).astype(dtype)
    energy = min(math.sqrt(y @ np.linalg.solve(k.astype(np.float64), y) / 5) for k in K)
    return jnp.asarray(K), jnp.asarray(y), energy


@generates("bilevel.bounds.oymak_theorem2", "bilevel.bounds.oymak_theorem2_as_printed")
def oymak_theorem2(rng, dtype) -> Case:
    K, y, energy = _kernels(rng, dtype)
    a = {"K": K, "y": y, "n_valid": _rows(rng), "h": 3, "B": _size(rng, 0, 1),
         "lambda0": _size(rng, -2, 0), "R": _size(rng, 0, 1), "C": 1.0}  # fmt: skip
    M = 30 * a["R"] ** 4 * (a["B"] / a["lambda0"]) ** 2 * (5 + a["n_valid"]) * 5
    valid = math.sqrt((3 * math.log(M) + 3) / a["n_valid"])
    training = 2 * math.sqrt(a["B"]) * energy
    kinds = {"K": "array", "y": "rows", "n_valid": "positive", "h": "count", "B": "positive",
             "lambda0": "positive", "R": "positive", "C": "positive"}  # fmt: skip
    call = lambda **k: (bounds.oymak_theorem2(**k), bounds.oymak_theorem2_as_printed(**k))  # noqa: E731
    check = lambda r: near(  # noqa: E731
        "values", [b.value for b in r], [training * a["R"] + valid, training + valid], 1e-3)
    return Case(call, a, check, kinds, ("K", "y"), fine=("K: one axis more",))


@generates("bilevel.bounds.oymak_theorem3")
def oymak_theorem3(rng, dtype) -> Case:
    K, y, energy = _kernels(rng, dtype)
    a = {"K": K, "y": y, "n_valid": _rows(rng), "h": 3, "B": _size(rng, 0, 1), "t": 4.0,
         "epsilon": 0.0, "delta": 0.0, "C": 1.0, "activations": [ntk.tanh]}  # fmt: skip
    truth = 2 * a["B"] * energy + math.sqrt(7 / a["n_valid"])
    kinds = {"K": "array", "y": "rows", "n_valid": "positive", "h": "count", "B": "positive",
             "t": "positive", "epsilon": "nonnegative", "delta": "nonnegative",
             "C": "positive"}  # fmt: skip
    check = lambda r: near("value", r.value, truth, 1e-3)  # noqa: E731
    if 4 * (math.exp(-4) + 5**-3 + math.exp(-30)) >= 1:
        check = lambda r: ""  # noqa: E731
    return Case(bounds.oymak_theorem3, a, check, kinds, ("K", "y"), fine=("K: one axis more",))


# ----------------------------------------------------------------------------- Khodak et al.


def _entropy(rng):
    a = {"entropy": rng.uniform(0, 50, 3), "n_valid": _rows(rng),
         "delta": float(rng.uniform(0.001, 0.2)), "B": _size(rng, -1, 1),
         "epsilon": 10 ** rng.uniform(-4, 0, 3), "excess": float(rng.choice([0.0, 0.1]))}  # fmt: skip
    kinds = {"entropy": "numbers", "n_valid": "positive", "delta": "fraction", "B": "positive",
             "epsilon": "numbers", "excess": "nonnegative"}  # fmt: skip
    fine = ("entropy: inf", "epsilon: inf")  # one radius of several that says nothing
    return a, kinds, fine


def _theorem(a, slope, selected, spread) -> float:
    log = math.log(1 / a["delta"])
    scale = a["B"] / math.sqrt(a["n_valid"])
    cover = slope * a["epsilon"] + spread * scale * np.sqrt(a["entropy"] + log)
    return a["excess"] + selected * scale * math.sqrt(log) + cover.min()


@generates("bilevel.bounds.khodak_theorem_a2")
def khodak_theorem_a2(rng, dtype) -> Case:
    a, kinds, fine = _entropy(rng)
    a["lipschitz"] = _size(rng, -1, 1)
    truth = _theorem(a, 2 * a["lipschitz"], 0.5**0.5, 0.5**0.5)
    return _formula(bounds.khodak_theorem_a2, truth, a, kinds | {"lipschitz": "positive"}, fine=fine)


@generates("bilevel.bounds.khodak_theorem_a2_as_printed")
def khodak_theorem_a2_as_printed(rng, dtype) -> Case:
    a, kinds, fine = _entropy(rng)
    truth = _theorem(a, 3, 0.5**0.5, 2**0.5)
    return _formula(bounds.khodak_theorem_a2_as_printed, truth, a, kinds, fine=fine)


@generates("bilevel.bounds.khodak_theorem_3_1_as_printed")
def khodak_theorem_3_1(rng, dtype) -> Case:
    a, kinds, fine = _entropy(rng)
    truth = _theorem(a, 3, 0.0, 1.5 * 2**0.5)
    return _formula(bounds.khodak_theorem_3_1_as_printed, truth, a, kinds, fine=fine)


@generates("bilevel.bounds.khodak_corollary_a4")
def khodak_corollary_a4(rng, dtype) -> Case:
    a, kinds, fine = _entropy(rng)
    a |= {"n_train": _rows(rng), "lipschitz": _size(rng, -1, 1)}
    train = a["B"] * math.sqrt(math.log(1 / a["delta"]) / 2 / a["n_train"])
    truth = train + _theorem(a, 2 * a["lipschitz"], 0.5**0.5, 0.5**0.5)
    kinds |= {"n_train": "positive", "lipschitz": "positive"}
    return _formula(bounds.khodak_corollary_a4, truth, a, kinds, fine=fine)


@generates("bilevel.bounds.khodak_corollary_a1", "bilevel.bounds.khodak_corollary_a2",
           "bilevel.bounds.khodak_corollary_a3")  # fmt: skip
def khodak_corollaries(rng, dtype) -> Case:
    a = {"w_norm": _size(rng, -2, 2), "n_train": _rows(rng), "n_valid": _rows(rng),
         "configurations": float(rng.integers(1, 1000)), "delta": float(rng.uniform(0.01, 0.3)),
         "C": _size(rng, -1, 1)}  # fmt: skip
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

    kinds = {"w_norm": "nonnegative", "n_train": "positive", "n_valid": "positive",
             "configurations": "count", "delta": "fraction", "C": "positive"}  # fmt: skip
    fine = ("configurations: a fraction",)
    return _formula(call, truth, a, kinds, (), lambda r: [b.value for b in r], fine=fine)
