"""Data in batches, estimates that are unbiased over them, and the order in which they come."""

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

_TOGETHER = 16  # batches that a pass through all rows takes at once, at most,
_CACHE = 2**22  # and their bytes on a CPU: more come from slow memory, once for every derivative

Oracle = Callable[[Pytree, float], tuple[Pytree, Pytree]]
"""``oracle(batch, weight) -> (estimates, rest)``: the first those of ``weight`` times the loss.

The loss is what is weighted: estimates may be long, its derivatives start from one number.
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
        """``oracle`` at batch ``i``, its estimates weighted: their mean over i is that of the rows.

        The last batch has a program of its own size: clamped into the data, it would hold rows of
        the batch before it.
        """
        if self.count == 1:
            return oracle(self.rows, 1)

        def full(i):
            return self._weighted(oracle, i * self.size, self.size)

        def last(_):
            return self._weighted(oracle, (self.count - 1) * self.size, self.tail)

        return jax.lax.cond(i == self.count - 1, last, full, i) if self.tail else full(i)

    def _weighted(self, oracle: Oracle, start, length: int) -> tuple[Pytree, Pytree]:
        return oracle(_slice_rows(self.rows, start, length), self.count * length / self._total)

    @property
    def _total(self) -> int:
        """Rows of all batches."""
        return (self.count - 1) * self.size + (self.tail or self.size)

    def table(self, oracle: Oracle) -> Pytree:
        """The weighted estimates of all batches, on a leading axis."""
        return jax.lax.map(lambda i: self.at(i, oracle)[0], jnp.arange(self.count))

    def mean(self, oracle: Oracle) -> Pytree:
        """The mean of the estimates over all rows, many batches at a time: one wider program."""
        if self.count == 1:
            return oracle(self.rows, 1)[0]
        total, length = self._total, self._wide()

        def part(start, length):
            return oracle(_slice_rows(self.rows, start, length), length / total)[0]

        whole, remainder = divmod(total, length)
        summed = part(total - remainder, remainder) if remainder else None

        def add(i, summed):
            return optax.tree.add(summed, part(i * length, length))

        if summed is None:
            summed = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: part(0, length))
            )
        return jax.lax.fori_loop(0, whole, add, summed)

    def _wide(self) -> int:
        """Rows that a pass takes at once."""
        together = _TOGETHER
        if jax.default_backend() == "cpu":
            held = sum(x.nbytes for x in jax.tree.leaves(self.rows)) * self.size / self._total
            together = max(1, min(_TOGETHER, int(_CACHE / max(held, 1))))
        return min(together * self.size, self._total)


def _slice_rows(rows: Pytree, start, length: int) -> Pytree:
    def cut(x):
        if is_sparse(x):  # all rows have as many entries: see `make_batched_data`
            return sparse_rows(x, start + jnp.arange(length), x.nse // x.shape[0])
        return jax.lax.dynamic_slice_in_dim(x, start, length)

    return jax.tree.map(cut, rows, is_leaf=is_sparse)


def make_batched_data(name: str, data: Pytree, batches: Partition | None) -> BatchedData:
    """``data`` in the batches of a partition; None: all of it as one batch."""
    if batches is None or not jax.tree.leaves(data):
        return BatchedData(data, 0, 1, 0)
    n = count_rows(name, data)
    size = min(batches.batch_size, n)
    # Every row of a sparse matrix gets as many entries, while those of the longest are known.
    data = jax.tree.map(
        lambda x: sparse_rows(x, jnp.arange(n)) if is_sparse(x) else jnp.asarray(x),
        data,
        is_leaf=is_sparse,
    )
    return BatchedData(data, size, -(-n // size), n % size)


class BatchSchedule(NamedTuple):
    """The batches of every step, drawn before the first: no random bits inside the loop.

    Those of a step depend on the key and the step's number, not on how many steps there are.
    """

    train: jax.Array  # [steps * draws + 1], int32
    valid: jax.Array  # [steps * draws + 1], int32
    uniforms: jax.Array  # [steps]

    def at(self, number: jax.Array, draws: tuple[int, int]) -> BatchIndices:
        """Which batches step ``number`` takes."""

        def those(ids, per_step):
            here = jax.lax.dynamic_slice_in_dim(ids, number * per_step, per_step)
            return here, _entry(ids, (number + 1) * per_step)

        train, next_train = those(self.train, draws[0])
        valid, next_valid = those(self.valid, draws[1])
        return BatchIndices(
            number, train, valid, next_train, next_valid, _entry(self.uniforms, number)
        )


def _entry(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


@functools.partial(jax.jit, static_argnames=("counts", "steps", "draws"))
def draw_batch_schedule(
    key: Any, counts: tuple[int, int], steps: int, draws: tuple[int, int]
) -> BatchSchedule:
    """Shuffled epochs of ``counts`` batches of train and valid; no key is needed for one batch."""
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


_BLOCK = 256  # random numbers that one key gives


def _streams(key: Any, lengths: tuple[int, ...]) -> list[jax.Array]:
    """Streams of random bits, uint32: a longer one begins with the same numbers.

    All by one program: that of a generator takes a third of a second to compile.
    """
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
    """A permutation of the columns for each row of random bits."""
    count = bits.shape[1]
    if count > 2**12:  # of 32 bits 20 have to be left: what is equal in them stays in order
        return jnp.argsort(bits, 1).astype(jnp.int32)
    # Numbers that end with their place: to sort them takes a twentieth of an argsort.
    mask = jnp.uint32(2 ** (count - 1).bit_length() - 1)
    places = jnp.arange(count, dtype=jnp.uint32)
    return (jnp.sort(bits & ~mask | places[None], 1) & mask).astype(jnp.int32)
