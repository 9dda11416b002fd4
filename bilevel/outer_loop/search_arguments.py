"""Checks of the arguments of :func:`bilevel.search`."""

from bilevel.contracts import Partition, SingleLoop, params_of
from bilevel.internal import checks
from bilevel.internal.checks import check_floating, function, integer, prng_key
from bilevel.outer_loop.stream import Stream


def check_search_arguments(
    solver, arrays, steps, batches, resume, checkpoint, callback, every, chunk, diagnostics
) -> None:
    """Raise ``ValueError`` if an argument is wrong, or does not fit the others."""
    alpha, w0, train, valid, key = arrays
    integer("steps", steps, 1)
    if chunk is not None:
        integer("chunk", chunk, 1)
    streamed = isinstance(batches, Stream)
    if streamed and (train is not None or valid is not None):
        raise ValueError("train, valid: expected None beside a stream of both, got data.")
    if batches is not None and not streamed:
        function("batches", batches, "(key, data) -> batch")
    if isinstance(solver, SingleLoop) and not isinstance(batches, Partition | None):
        raise ValueError(
            "batches: expected bilevel.partition(batch_size) for a single-loop method, got a "
            "sampler of other batches."
        )
    if diagnostics and isinstance(solver, SingleLoop) and solver.adjoint is None:
        raise ValueError(
            "diagnostics: expected False for a method without an adjoint, got True; "
            "hypergradient(problem, implicit()) at the result has an error estimate."
        )
    if callback is not None:
        function("callback", callback, "result -> bool")
    if every is not None:
        integer("every", every, 1)
        if callback is None:
            raise ValueError(f"every: expected a callback to call so often, got none and {every}.")
    if resume and checkpoint is None:
        raise ValueError("resume: expected a checkpoint directory to resume from, got None.")
    drawn = (batches is not None and not streamed) or getattr(solver, "batches", None) is not None
    if drawn and key is None:
        raise ValueError("key: expected a PRNG key to sample batches with, got None.")
    if key is not None:
        prng_key("key", key)
    for name, tree in (("alpha", alpha), ("w0", w0)):
        checks.check_not_empty(name, tree)
        check_floating(name, params_of(tree))
    for name, tree in (("alpha", alpha), ("w0", w0), ("train", train), ("valid", valid)):
        checks.check_data(name, tree)
