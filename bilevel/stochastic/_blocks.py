"""Cut data into batches, estimate without bias from them, and draw their order."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bilevel.contracts import BatchIndices, Partition, Pytree
from bilevel.internal.checks import count_rows, is_sparse
from bilevel.internal.rows import sparse_rows

_TOGETHER = 16  # maximum number of batches that a pass through all rows takes at once
_CACHE = 2**22  # maximum of their bytes on a CPU, so that they stay in the cache

Oracle = Callable[[Pytree, float], tuple[Pytree, Pytree]]
"""``oracle(batch, weight) -> (estimates, extras)``, with estimates of ``weight`` times the loss.

The weight multiplies the loss, because multiplying the long estimates would cost more.
"""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["size", "count", "tail"]
)
@dataclasses.dataclass(frozen=True)
class BatchedData:
    """Data cut into ``count`` batches of ``size`` rows, the last of ``tail`` if that is not 0."""

    rows: Pytree
    size: int
    count: int
    tail: int

    def at(self, i: jax.Array | int, oracle: Oracle) -> tuple[Pytree, Pytree]:
        """Return ``oracle`` at batch ``i``; its estimates' mean over i is that of all rows."""
        if self.count == 1:
            return oracle(self.rows, 1)

        def full(i):
            return self._weighted(oracle, i * self.size, self.size)

        def last(_):  # its own program: clamped into the data, the batch would repeat rows
            return self._weighted(oracle, (self.count - 1) * self.size, self.tail)

        return jax.lax.cond(i == self.count - 1, last, full, i) if self.tail else full(i)

    def _weighted(self, oracle: Oracle, start, length: int) -> tuple[Pytree, Pytree]:
        return oracle(_slice_rows(self.rows, start, length), self.count * length / self._total)

    @property
    def _total(self) -> int:  # rows of all batches
        return (self.count - 1) * self.size + (self.tail or self.size)

    def table(self, oracle: Oracle) -> Pytree:
        """Return the weighted estimates of all batches, on a leading axis."""
        return jax.lax.map(lambda i: self.at(i, oracle)[0], jnp.arange(self.count))

    def mean(self, oracle: Oracle) -> Pytree:
        """Return the mean of the estimates over all rows, many batches at a time."""
        if self.count == 1:
            return oracle(self.rows, 1)[0]
        total, length = self._total, self._wide()
        whole, remainder = divmod(total, length)

        def part(start, length):
            return oracle(_slice_rows(self.rows, start, length), length / total)[0]

        def add(i, summed):
            return optax.tree.add(summed, part(i * length, length))

        if remainder:
            summed = part(total - remainder, remainder)
        else:
            summed = zeros_of_shape(lambda: part(0, length))
        return jax.lax.fori_loop(0, whole, add, summed)

    def _wide(self) -> int:
        """Return the number of rows that a pass takes at once."""
        together = _TOGETHER
        if jax.default_backend() == "cpu":
            held = sum(x.nbytes for x in jax.tree.leaves(self.rows)) * self.size / self._total
            together = max(1, min(_TOGETHER, int(_CACHE / max(held, 1))))
        return min(together * self.size, self._total)


def zeros_of_shape(function: Callable[[], Pytree]) -> Pytree:
    """Return zeros like the result of ``function``, which is not run."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function))


def _slice_rows(rows: Pytree, start, length: int) -> Pytree:
    def cut(x):
        if is_sparse(x):  # all rows have as many entries: see `make_batched_data`
            return sparse_rows(x, start + jnp.arange(length), x.nse // x.shape[0])
        return jax.lax.dynamic_slice_in_dim(x, start, length)

    return jax.tree.map(cut, rows, is_leaf=is_sparse)


def make_batched_data(name: str, data: Pytree, batches: Partition | None) -> BatchedData:
    """Return ``data`` in the batches of a partition; None makes all of it one batch."""
    if batches is None or not jax.tree.leaves(data):
        return BatchedData(data, 0, 1, 0)
    n = count_rows(name, data)
    size = min(batches.batch_size, n)
    # Every row of a sparse matrix is padded to the entries of the longest.
    data = jax.tree.map(
        lambda x: sparse_rows(x, jnp.arange(n)) if is_sparse(x) else jnp.asarray(x),
        data,
        is_leaf=is_sparse,
    )
    return BatchedData(data, size, -(-n // size), n % size)


class BatchSchedule(NamedTuple):
    """The batches of every step, drawn before the first; they depend on the key and the step."""

    train: jax.Array  # [steps * draws + 1], int32
    valid: jax.Array  # [steps * draws + 1], int32
    uniforms: jax.Array  # [steps]

    def at(self, number: jax.Array, draws: tuple[int, int]) -> BatchIndices:
        """Return the batches of step ``number``."""

        def batches_of(ids, per_step):
            here = jax.lax.dynamic_slice_in_dim(ids, number * per_step, per_step)
            return here, _entry(ids, (number + 1) * per_step)

        train, next_train = batches_of(self.train, draws[0])
        valid, next_valid = batches_of(self.valid, draws[1])
        uniform = _entry(self.uniforms, number)
        return BatchIndices(number, train, valid, next_train, next_valid, uniform)


def _entry(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


@functools.partial(jax.jit, static_argnames=("counts", "steps", "draws"))
def draw_batch_schedule(
    key: Any, counts: tuple[int, int], steps: int, draws: tuple[int, int]
) -> BatchSchedule:
    """Draw shuffled epochs of ``counts`` batches of train and valid. One batch needs no key."""
    lengths = [steps * per_step + 1 for per_step in draws]
    if key is None:
        train, valid = (jnp.zeros(length, jnp.int32) for length in lengths)
        return BatchSchedule(train, valid, jnp.zeros(steps))
    epochs = [-(-length // count) for length, count in zip(lengths, counts, strict=True)]
    drawn = (epochs[0] * counts[0], epochs[1] * counts[1], steps)
    *bits, uniforms = _streams(key, drawn)
    train, valid = (
        _shuffled(x.reshape(-1, count)).ravel()[:length]
        for x, count, length in zip(bits, counts, lengths, strict=True)
    )
    return BatchSchedule(train, valid, (uniforms >> 8).astype(float) / 2.0**24)


_BLOCK = 256  # random numbers per key


def _streams(key: Any, lengths: tuple[int, ...]) -> list[jax.Array]:
    """Draw streams of random bits, uint32; a longer stream begins with the same numbers."""
    # One generator draws all streams, because each takes a third of a second to compile.
    blocks = [-(-length // _BLOCK) for length in lengths]
    which = jnp.concatenate([jnp.full(n, i) for i, n in enumerate(blocks)])
    number = jnp.concatenate([jnp.arange(n) for n in blocks])
    keys = jax.random.split(key, len(lengths))[which]
    keys = jax.vmap(jax.random.fold_in)(keys, number)
    bits = jax.vmap(lambda key: jax.random.bits(key, (_BLOCK,), "uint32"))(keys)
    ends = itertools.accumulate(blocks, initial=0)
    parts = [bits[a:b].ravel() for a, b in itertools.pairwise(ends)]
    return [x[:length] for x, length in zip(parts, lengths, strict=True)]


def _shuffled(bits: jax.Array) -> jax.Array:
    """Return a permutation of the columns for each row of random bits."""
    count = bits.shape[1]
    if count > 2**12:  # at least 20 of 32 bits must stay random, because ties keep their order
        return jnp.argsort(bits, 1).astype(jnp.int32)
    # The low bits hold the place. Sorting such numbers takes 1/20 of an argsort.
    mask = jnp.uint32(2 ** (count - 1).bit_length() - 1)
    places = jnp.arange(count, dtype=jnp.uint32)
    return (jnp.sort(bits & ~mask | places[None], 1) & mask).astype(jnp.int32)
