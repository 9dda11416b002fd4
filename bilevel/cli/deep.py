"""What searches of deep spaces share (``bilevel search --space skips|darts``).

The flags, the strategies, and the diagnostics. A space comes in as its parts: a ``problem`` of
batches (x, labels), ``draw(key) -> alpha``, an architecture drawn uniformly, as a corner of the set
that alpha is in, and ``geometry(activations, others)``, the outer optimizer.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import bilevel
from bilevel import plots
from bilevel._progress import progress_bar
from bilevel.batches import minibatches
from bilevel.cli.commands import DeepSearch
from bilevel.problem import Problem
from bilevel.protocols import Loss, LowerSolver, Pytree

Draw = Callable[[jax.Array], Pytree]

_UNROLLED = 5  # inner steps of the strategy of that name
_SINGLE_LEVEL = ("joint", "gaea-single-level")  # strategies whose α descends on training rows
_TRAVEL = 6.0  # what Adam's rate and DARTS's 50 epochs of CIFAR-10 multiply to
_STEP_GRADIENTS = {  # others: 2
    "darts-second": 4,
    "darts-second-difference": 4,
    "unrolled": 3 * _UNROLLED + 1,
    "random": 1,
}


# ----------------------------------------------------------------------------- the search


class Plan(NamedTuple):
    """A strategy: what :func:`bilevel.search` is called with."""

    problem: Problem
    solver: LowerSolver
    optimizer: optax.GradientTransformation
    batches: Callable[[jax.Array, Pytree], Pytree]
    single_level: bool  # alpha descends on training rows too


def plan(
    config: DeepSearch,
    problem: Problem,
    sgd: Callable[[optax.Schedule], optax.GradientTransformation],
    rate: float,
    geometry: Callable[..., optax.GradientTransformation],
    draw: Draw,
) -> Plan:
    """``config.strategy`` in a space; ``rate`` is the first step size of the weights' ``sgd``."""
    inner = _UNROLLED if config.strategy == "unrolled" else 1
    lower = sgd(optax.cosine_decay_schedule(rate, inner * config.steps))
    if config.strategy.startswith("darts-second"):
        radius = 0.01 if config.strategy.endswith("difference") else None
        solver = bilevel.one_step(lower, radius=radius)
    else:
        backprop = _UNROLLED if config.strategy == "unrolled" else 0
        solver = bilevel.unrolled(lower, inner, backprop=backprop)
    batches, optimizer = minibatches(config.batch_size), geometry(*_outer(config))
    if config.strategy == "random":
        problem, batches = _of_drawn(problem, draw, batches)
        optimizer = optax.set_to_zero()
    single_level = config.strategy in _SINGLE_LEVEL
    if single_level:
        problem = Problem(problem.lower, problem.lower)
    return Plan(problem, solver, optimizer, batches, single_level)


def run(
    config: DeepSearch,
    plan: Plan,
    simplices: Callable[[Pytree], list[jax.Array]],
    alpha: Pytree,
    w0: Pytree,
    train: Pytree,
    valid: Pytree,
    key: jax.Array,
    checkpoint: pathlib.Path | None,
    *,
    label: str = "search",
    copies: int = 1,
) -> bilevel.SearchResult:
    """The search by ``plan``, with epochs and the entropy of alpha's ``simplices`` on the screen.

    ``copies``: how many searches side by side the losses are sums of.
    """
    epoch = jax.tree.leaves(train)[1].shape[-1] / config.batch_size  # labels [..., n]
    text = "epoch {task.fields[epoch]:.1f}  train {task.fields[lower]:.3f}  "
    text += "valid {task.fields[value]:.3f}  entropy {task.fields[entropy]:.2f}"

    def shown(found):
        last = {k: float(found.history[k][-1]) / copies for k in ("lower", "value")}
        mean = np.mean(np.concatenate([np.ravel(entropy(p)) for p in simplices(found.alpha)]))
        return last | {"epoch": len(found.history["value"]) / epoch, "entropy": float(mean)}

    fields = ("epoch", "lower", "value", "entropy")
    with progress_bar(config.progress, label, config.steps, text, fields) as show:

        def callback(found):
            show(len(found.history["value"]), lambda: shown(found))

        return bilevel.search(
            plan.problem,
            plan.solver,
            plan.optimizer,
            alpha,
            w0,
            train,
            train if plan.single_level else valid,
            steps=config.steps,
            batches=plan.batches,
            key=key,
            progress=False,
            checkpoint=checkpoint,
            resume=config.resume,
            callback=callback,
        )


def _outer(
    config: DeepSearch,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Of alphas on simplices, and of others."""
    if config.strategy.startswith("gaea"):
        rate = config.alpha_rate or 100 / config.steps
        return optax.chain(optax.sgd(rate), bilevel.exponentiate()), optax.sgd(rate)
    rate = config.alpha_rate or _TRAVEL / config.steps
    adam = optax.adam(rate, b1=0.5)  # DARTS's, weight decay of the logits included
    decayed = optax.chain(optax.add_decayed_weights(1e-3), adam)
    return bilevel.softmax(decayed), adam


def _of_drawn(problem: Problem, draw: Draw, batches: Callable) -> tuple[Problem, Callable]:
    """Weight sharing: each minibatch comes with the architecture that it trains or tests."""

    def with_architecture(key, data):
        keys = jax.random.split(key)
        return draw(keys[0]), batches(keys[1], data)

    def of(loss: Loss) -> Loss:
        return lambda w, _, batch: loss(w, *batch)

    return Problem(of(problem.lower), of(problem.outer)), with_architecture


def best_drawn(key: jax.Array, samples: int, loss: Loss, draw: Draw, w: Pytree, batch: Pytree):
    """Of ``samples`` architectures drawn, the one of the lowest loss at the weights ``w``.

    The end of random search with weight sharing (Li & Talwalkar 2019).
    """
    keys = jax.random.split(key, samples)
    losses = jax.lax.map(lambda key: loss(w, draw(key), batch), keys)
    return draw(keys[losses.argmin()])


def draw_losses(strategy: str, histories: list[dict[str, Any]], axes: Any) -> None:
    """The losses of searches, one for each seed: of minibatches, so that they are noisy."""
    outer, lower = plots.losses(histories, axes)
    rows = "training" if strategy in _SINGLE_LEVEL else "validation"
    outer.set_ylabel(f"{rows} loss (nats)\nof α's minibatch")
    lower.set_ylabel("training loss (nats)\nof the weights' minibatch")


def search_gradients(config: DeepSearch) -> int:
    """Gradients of minibatches that the search takes, a Hessian's product counted as two."""
    return config.steps * _STEP_GRADIENTS.get(config.strategy, 2)


# ----------------------------------------------------------------------------- diagnostics


def known_error(strategy: str) -> str:
    """One sentence on the error of the strategy's hypergradient: why there is no estimate."""
    if strategy == "random":
        return "no hypergradient: architectures are drawn"
    if strategy in ("joint", "gaea-single-level"):
        return "no hypergradient: α descends the training loss"
    kind = {
        "darts-second": "through one step of the weights",
        "darts-second-difference": "through one step of the weights, by a finite difference",
        "unrolled": f"through {_UNROLLED} steps of the weights",
    }.get(strategy, "of first order, without the weights' response to α")
    return (
        f"hypergradient {kind}; its error has no estimate, since the shared weights are never "
        "trained to a minimum"
    )


def kernel_diagonal(apply: Callable, w: Pytree, alpha: Pytree, x: jax.Array) -> jax.Array:
    """Mean over rows of the empirical NTK's entry (x, x), of the first output."""

    def entry(row):
        slope = jax.grad(lambda w: apply(w, alpha, row[None]).reshape(-1)[0])(w)
        return optax.tree.norm(slope, squared=True)

    return jax.lax.map(entry, x).mean()


def entropy(p: jax.Array) -> jax.Array:
    """In nats, on the last axis."""
    return jax.scipy.special.entr(p).sum(axis=-1)


def top_curvature(loss: Loss, tangent: Callable[[Pytree], Pytree]) -> Callable[..., float]:
    """``(w, alpha, batch) -> `` the largest eigenvalue of the loss's Hessian in alpha.

    By Lanczos on Hessian-vector products, one compiled program that is called from the host.
    ``tangent`` takes a direction's other part off, so that alpha stays on simplices, which leaves
    eigenvalues 0 there: the result is never negative. Zela et al. (2020) see a search whose
    networks generalise badly in the growth of this number (in logits, for DARTS's ``alpha``).
    """

    @jax.jit
    def product(v, w, alpha, batch):
        flat, unravel = ravel_pytree(alpha)

        def along(v):
            return ravel_pytree(tangent(unravel(v)))[0]

        slope = jax.grad(lambda a: loss(w, unravel(a), batch))
        return along(jax.jvp(slope, (flat,), (along(v.astype(flat.dtype)),))[1])

    def largest(w, alpha, batch):
        from scipy.sparse.linalg import LinearOperator, eigsh

        size = ravel_pytree(alpha)[0].size
        operator = LinearOperator(
            (size, size), lambda v: np.asarray(product(v, w, alpha, batch), float), dtype=float
        )
        start = np.random.default_rng(0).normal(size=size)
        found = eigsh(operator, 1, which="LA", v0=start, tol=1e-4, return_eigenvectors=False)
        return max(0.0, float(found[0]))

    return largest
