"""``bilevel.bounds``: coverings, and what is proved here; formulas in float64, brute force."""

import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np

from benchmarks.reliability.case import Case, at_most, eps, first, near
from benchmarks.reliability.registry import generates
from bilevel import bounds


def size(rng, low=-3.0, high=6.0) -> float:
    return float(10 ** rng.uniform(low, high))


def rows(rng) -> float:
    return float(rng.integers(1, 10**7))


def formula(function, truth, arguments, kinds, traced=(), result=lambda r: r.value, **more) -> Case:
    """A bound whose value is a formula of numbers."""

    def check(bound):
        reason = near("value", result(bound), truth, 1e3 * eps(jnp.result_type(float)))
        return reason

    return Case(functools.partial(_called, function), arguments, check, kinds, traced, **more)


def _called(function, **arguments):
    return function(**arguments)


# ----------------------------------------------------------------------------- coverings


_ALL = ("radii: inf",)  # one centre covers all: log 1


def _grid_size(h, radius):
    spread = 1 - 1 / h
    if radius**2 >= spread:
        return 0.0
    k = math.ceil(min(math.sqrt(h) / 2 / radius, spread / radius**2) * (1 - 1e-12))
    return sum(math.log1p(k / j) for j in range(1, h))


@generates("bilevel.theory.bounds.ball_covering")
def ball(rng, dtype) -> Case:
    dim, R = int(rng.integers(1, 30)), size(rng, -3, 3)
    radii = R * 10 ** rng.uniform(-4, 1, 3)
    truth = np.where(radii < R, dim * np.log1p(2 * R / radii), 0)
    call = lambda dim, R, radii: bounds.ball_covering(dim, R)(radii)
    kinds = {"dim": "count", "R": "positive", "radii": "numbers"}
    arguments = {"dim": dim, "R": R, "radii": jnp.asarray(radii, dtype)}
    check = lambda r: near("log N", r, truth, 1e3 * eps(dtype))
    return Case(call, arguments, check, kinds, ("radii",), fine=_ALL)


@generates("bilevel.theory.bounds.simplex_covering")
def simplex(rng, dtype) -> Case:
    h, copies = int(rng.integers(1, 12)), int(rng.integers(1, 4))
    radii = 10 ** rng.uniform(-2, 0.5, 3)
    truth = [copies * _grid_size(h, r / math.sqrt(copies)) for r in radii]
    below = [copies * _grid_size(h, r * (1 + 1e-5) / math.sqrt(copies)) for r in radii]
    call = lambda h, copies, radii: bounds.simplex_covering(h, copies=copies)(radii)

    def check(r):  # a ceiling may be one apart
        return first(
            at_most("log N", np.asarray(below) * (1 - 1e-3) - 1e-3, r),
            at_most("log N", r, np.asarray(truth) * 1.05 + 1e-3 + copies),
        )

    kinds = {"h": "count", "copies": "count", "radii": "numbers"}
    arguments = {"h": h, "copies": copies, "radii": jnp.asarray(radii, dtype)}
    return Case(call, arguments, check, kinds, ("radii",), fine=_ALL)


@generates("bilevel.theory.bounds.sparse_covering")
def sparse(rng, dtype) -> Case:
    h = int(rng.integers(1, 200))
    s, R = int(rng.integers(1, h + 1)), size(rng, -2, 2)
    radii = R * 10 ** rng.uniform(-3, 0.5, 3)
    logs = math.log(math.comb(h, s)) + s * np.log1p(2 * R / radii)
    call = lambda h, s, R, radii: bounds.sparse_covering(h, s, R)(radii)
    kinds = {"h": "count", "s": "count", "R": "positive", "radii": "numbers"}
    arguments = {"h": h, "s": s, "R": R, "radii": jnp.asarray(radii, dtype)}
    check = lambda r: near("log N", r, np.where(radii < R, logs, 0), 1e3 * eps(dtype))
    return Case(call, arguments, check, kinds, ("radii",), fine=_ALL)


@generates("bilevel.theory.bounds.finite_covering")
def finite(rng, dtype) -> Case:
    points = jnp.asarray(rng.normal(size=(int(rng.choice([1, 6])), 2)), dtype)
    radius = size(rng, -2, 1)
    P = np.asarray(points, np.float64)
    distances = np.linalg.norm(P[:, None] - P, axis=-1)

    def least(radius):  # brute force over all sets of centres
        for k in range(1, len(P) + 1):
            for chosen in itertools.combinations(range(len(P)), k):
                if (distances[list(chosen)].min(0) <= radius).all():
                    return k
        return len(P)

    call = lambda points, radii: bounds.finite_covering(points)(radii)
    check = lambda r: first(
        at_most("covering number", least(radius * (1 + 1e-5)), np.exp(np.asarray(r)) + 1e-4),
        at_most("covering number", np.exp(np.asarray(r)), least(radius * (1 - 1e-5) / 2) + 1e-4),
    )
    arguments = {"points": points, "radii": jnp.asarray([radius], dtype)}
    kinds = {"points": "array", "radii": "numbers"}
    return Case(call, arguments, check, kinds, ("points", "radii"), fine=("radii: inf",))


@generates("bilevel.theory.bounds.effective_dimension")
def effective_dimension(rng, dtype) -> Case:
    C_bar = size(rng, -1, 2)
    radii = C_bar * 10 ** rng.uniform(-4, -0.1, 4)
    logs = rng.uniform(0, 20, 4)
    truth = np.max(logs / np.log(C_bar / radii))
    arguments = {
        "log_covering_numbers": jnp.asarray(logs, dtype),
        "radii": jnp.asarray(radii, dtype),
        "C_bar": C_bar,
    }
    kinds = {"log_covering_numbers": "rows", "radii": "rows", "C_bar": "positive"}
    return formula(
        bounds.effective_dimension,
        truth,
        arguments,
        kinds,
        ("log_covering_numbers", "radii"),
        lambda r: r,
    )


@generates("bilevel.theory.bounds.version_entropy")
def version_entropy(rng, dtype) -> Case:
    logs = rng.uniform(0, 500, (2, 4))
    truth = logs.max(1) + np.log(np.exp(logs - logs.max(1, keepdims=True)).sum(1))
    arguments = {"log_covering_numbers": jnp.asarray(logs, dtype)}
    kinds = {"log_covering_numbers": "numbers"}
    return formula(
        bounds.version_entropy, truth, arguments, kinds, ("log_covering_numbers",), lambda r: r
    )


# ----------------------------------------------------------------------------- proved here


def _scan(value, low=-30, high=8):
    return min(value(math.exp(t)) for t in np.linspace(low, high, 4000))


def _family(rng):
    h = int(rng.integers(2, 10))
    arguments = {
        "n_valid": rows(rng),
        "covering": bounds.ball_covering(h, 1.0),
        "L": size(rng, -1, 3),
        "Gamma": size(rng, -1, 1),
        "b": size(rng, -1, 1),
        "variance": None,
        "tau": float(rng.uniform(1, 9)),
    }
    if rng.random() < 0.5:
        arguments["variance"] = size(rng, -3, 0)
    logs = lambda radius: h * math.log1p(2 / radius) if radius < 1 else 0.0
    kinds = {
        "n_valid": "positive",
        "covering": "function",
        "L": "positive",
        "Gamma": "positive",
        "b": "positive",
        "variance": "nonnegative?",
        "tau": "positive",
    }
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

    def check(bound):
        value = float(result(bound))
        return first(
            at_most("optimum", truth * (1 - 2e-2), value), at_most("value", value, truth * 1.02)
        )

    return check


@generates("bilevel.theory.bounds.uniform_convergence")
def uniform_convergence(rng, dtype) -> Case:
    arguments, kinds, logs = _family(rng)
    return Case(bounds.uniform_convergence, arguments, _optimal(_gap(arguments, logs)), kinds)


@generates("bilevel.theory.bounds.selection_risk")
def selection_risk(rng, dtype) -> Case:
    arguments, kinds, logs = _family(rng)
    best = arguments["b"] * math.sqrt(arguments["tau"] / 2 / arguments["n_valid"])
    arguments["delta"] = float(rng.choice([0.0, 0.1]))
    truth = _gap(arguments, logs) + best + arguments["delta"]
    kinds["delta"] = "nonnegative"
    return Case(bounds.selection_risk, arguments, _optimal(truth), kinds)


@generates("bilevel.theory.bounds.hypergradient_convergence")
def hypergradient_convergence(rng, dtype) -> Case:
    arguments, kinds, logs = _family(rng)
    chosen = {k: arguments[k] for k in ("n_valid", "covering", "L", "tau")} | {
        "G": size(rng, -1, 2)
    }
    kinds = {k: v for k, v in kinds.items() if k in chosen} | {"G": "positive"}

    def value(radius):
        root = 1 + math.sqrt(2 * (logs(radius) + chosen["tau"]))
        return 2 * chosen["L"] * radius + chosen["G"] * root / math.sqrt(chosen["n_valid"])

    return Case(bounds.hypergradient_convergence, chosen, _optimal(_scan(value)), kinds)


@generates("bilevel.theory.bounds.sample_size")
def sample_size(rng, dtype) -> Case:
    gap, entropy = size(rng, -3, 1), float(rng.uniform(0, 50))
    bound = lambda n: bounds.khodak_theorem_a2(entropy, n)

    def check(rows):
        return first(
            at_most("gap", float(bound(float(rows)).value), gap),
            ""
            if rows == 1
            else at_most("gap, one row fewer", gap, float(bound(rows - 1.0).value), 1e-6 * gap),
        )

    kinds = {"gap": "positive", "bound": "function"}
    return Case(bounds.sample_size, {"gap": gap, "bound": bound}, check, kinds)


@generates("bilevel.theory.bounds.feature_map_lipschitz")
def feature_map_lipschitz(rng, dtype) -> Case:
    a = {
        "n_train": rows(rng),
        "h": int(rng.integers(1, 20)),
        "B": size(rng),
        "y_norm": size(rng),
        "lambda0": size(rng),
        "R": size(rng, 0, 2),
    }
    root = math.sqrt(a["n_train"] * a["B"])
    t = a["y_norm"] * min(1 / math.sqrt(a["lambda0"]), a["R"] * root / a["lambda0"])
    alpha = math.sqrt(a["h"] * a["B"]) * (
        t + a["R"] * a["y_norm"] * math.sqrt(2) * root / a["lambda0"]
    )
    penalty = a["R"] * math.sqrt(a["B"]) * t / a["lambda0"]
    kinds = dict.fromkeys(a, "positive") | {"h": "count"}
    check = lambda r: first(
        near("alpha", r.alpha, alpha, 1e-5), near("penalty", r.penalty, penalty, 1e-5)
    )
    return Case(bounds.feature_map_lipschitz, a, check, kinds)
