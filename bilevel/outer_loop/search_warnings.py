"""What a search warns about at its end: the messages of its report and of its divergence check."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import Pytree, SingleLoop, params_of
from bilevel.internal.checks import gradient_transformation
from bilevel.outer_loop import divergence
from bilevel.outer_loop.descent import hypergradient_leaves
from bilevel.outer_loop.search_program import SearchSetup
from bilevel.outer_loop.search_result import SearchResult
from bilevel.problem.problem import at_variables
from ntk.internal.compile_cache import program
from ntk.internal.sharding import with_automatic_axes


def result_messages(
    setup: SearchSetup, result: SearchResult, data: Pytree, given: Sequence[str]
) -> list[str]:
    """Return a message for each thing that went wrong, without those ``given`` at the start."""
    report = result.report
    if report.zero.last and _at_minimum(setup, result, data):
        report = report._replace(zero=jax.tree.map(jnp.zeros_like, report.zero))
    diverged = divergence.messages(result.step_scale)
    if diverged:  # after a return to an earlier state, changes of the loss were not predicted
        report = report._replace(compared=jnp.zeros_like(report.compared))
    return [m for m in (*diverged, *report.messages()) if m not in given]


def _at_minimum(setup: SearchSetup, result: SearchResult, data: Pytree) -> bool:
    """Whether a gradient of 0 is right at the end: the outer loss is stationary in ``w`` there.

    A single loop's direction may be 0 at a solution. An alpha that is held needs no gradient.
    """
    optimizer = gradient_transformation("optimizer", setup.optimizer)
    if isinstance(setup.solver, SingleLoop) or not any(
        hypergradient_leaves(optimizer, result.state)
    ):
        return True
    if setup.batches is not None or result.report.zero.last == result.report.steps:
        return False  # one that was 0 from the start is reported in any case

    def slope(w, alpha, valid):
        stateful = getattr(setup.problem, "stateful", False)
        outer = at_variables(setup.problem, w.variables if stateful else None).outer
        value, slope = jax.value_and_grad(outer)(params_of(w), alpha, valid)
        size = optax.tree.norm(slope) * jnp.maximum(optax.tree.norm(params_of(w)), 1)
        return size <= 1e-6 * jnp.abs(value)

    def run(*args):
        return with_automatic_axes(slope, args, lambda: None)

    args = result.w, result.alpha, data[1]
    return bool(program(run, *args)(*args))
