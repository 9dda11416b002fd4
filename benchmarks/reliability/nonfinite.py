"""NaN and infinity in every quantity of a search, at step 0 and later.

The weights count the outer steps, so that a loss knows the step. A search must stop at that step
and name the quantity. Its state must equal the state of a search without the mistake.
"""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel
from benchmarks.reliability.victims import Outcome, not_a_message, short

_STEPS = 6
_EXPECTED = {  # quantities that may be named: the spoiled one, or the first that it spoils
    "outer loss": ("outer loss",),
    "lower loss": ("lower loss",),
    "hypergradient": ("hypergradient",),
    "weights": ("lower loss", "outer loss", "weights"),
    "update of alpha": ("alpha",),
    "batch": ("outer loss", "lower loss", "weights", "hypergradient"),
}


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _spoiled(x, bad, number):
    """Return ``x`` with the derivative ``number`` where ``bad``."""
    return x


@_spoiled.defjvp
def _spoil(number, primals, tangents):
    x, bad = primals
    return x, jnp.where(bad, number, 1.0) * tangents[0]


def _problem(quantity: str, at: int, number: float) -> bilevel.Problem:
    def bad(count):
        return count == at if at >= 0 else jnp.array(False)

    def lower(w, alpha, batch):
        value = _spoiled(w["w"], bad(w["steps"]), number) if quantity == "weights" else w["w"]
        loss = 0.5 * jnp.sum((value - alpha * batch) ** 2) - w["steps"]
        spoiled = jnp.where(bad(w["steps"] - 1), number, 0.0) if quantity == "lower loss" else 0.0
        return loss + spoiled

    def outer(w, alpha, batch):
        if quantity == "hypergradient":
            alpha = _spoiled(alpha, bad(w["steps"] - 1), number)
        loss = 0.5 * jnp.sum((w["w"] - batch) ** 2) + 0.1 * jnp.sum(alpha**2)
        spoiled = jnp.where(bad(w["steps"] - 1), number, 0.0) if quantity == "outer loss" else 0.0
        return loss + spoiled

    return bilevel.Problem(lower, outer)


def _optimizer(quantity: str, at: int, number: float) -> optax.GradientTransformation:
    def update(updates, count, params=None):
        wrong = (quantity == "update of alpha") & (count == at)
        return jax.tree.map(lambda u: jnp.where(wrong, number, u), updates), count + 1

    breaking = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    return optax.chain(optax.sgd(0.1), breaking)


def _batches(quantity: str, at: int, number: float):
    if quantity != "batch":
        return None

    def batches(key, data):
        first_key, second_key = jax.random.split(jax.random.fold_in(jax.random.key(0), max(at, 0)))
        known = jnp.stack([jax.random.key_data(k) for k in (first_key, second_key)])
        wrong = (jax.random.key_data(key) == known).all(-1).any() & (at >= 0)
        return data + jnp.where(wrong, number, 0.0)

    return batches


def nonfinite(seed: int, number: int) -> Outcome:
    """Plant NaN or infinity in one quantity of a search."""
    rng = np.random.default_rng([seed, 3, number])
    quantity = str(rng.choice(list(_EXPECTED)))
    at, bad = int(rng.integers(_STEPS)), float(rng.choice([np.nan, np.inf, -np.inf]))
    compiled = bool(rng.random() < 0.25)
    with jax.enable_x64(bool(rng.random() < 0.5)):
        attack = f"{bad} in the {quantity} at step {at}{', compiled' if compiled else ''}"
        options = {"chunk": [None, 1, 4][rng.integers(3)]}
        if rng.random() < 0.5:
            options["checkpoint"] = tempfile.mkdtemp()
        clean = _search(quantity, -1, bad, {})
        try:
            if compiled:
                result_under_jit = jax.jit(lambda: _search(quantity, at, bad, {}))()
                return _judged(result_under_jit, None, quantity, at, clean, attack)
            result = _search(quantity, at, bad, options)
        except bilevel.NonFiniteError as error:
            return _judged(error.result, error, quantity, at, clean, attack)
        except Exception as error:
            reason = not_a_message(error) or f"not a NonFiniteError: {short(error)}"
            return Outcome("raw", attack, reason)
        return Outcome("wrong", attack, f"it continued to {float(result.history['value'][-1]):.4g}")


def _search(quantity, at, bad, options):
    w0 = {"w": jnp.ones(2), "steps": jnp.zeros(())}
    data = jnp.array([1.0, 2.0])
    return bilevel.search(
        _problem(quantity, at, bad),
        bilevel.unrolled(1.0, 1),
        _optimizer(quantity, at, bad),
        jnp.array([0.3, 0.7]),
        w0,
        data,
        data,
        steps=_STEPS,
        batches=_batches(quantity, at, bad),
        key=jax.random.key(0),
        **options,
    )


def _judged(result, error, quantity, at, clean, attack) -> Outcome:
    """Compare the state before the step ``at`` with that of a search without the mistake."""
    before = clean.history["alpha"][at - 1] if at else jnp.array([0.3, 0.7])
    rows = at if error is None else len(result.history["value"])
    mistakes = {
        f"stopped at step {int(result.state.step)}": int(result.state.step) != at,
        f"{rows} rows of history": rows != at,
        "another alpha before that step": not np.allclose(result.alpha, before, rtol=0, atol=1e-6),
    }
    if error is not None:
        mistakes[f"the error has step {error.step}"] = error.step != at
        named = error.quantity in _EXPECTED[quantity]
        mistakes[f"the error names the {error.quantity}"] = not named
    reason = next((text for text, wrong in mistakes.items() if wrong), "")
    return Outcome("wrong" if reason else "right", attack, reason)
