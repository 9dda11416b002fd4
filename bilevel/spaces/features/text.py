"""Hashed bags of n-grams with configurable tokenizer, order, weights and scaling.

A document becomes a row of counts of its n-grams of orders 1 to ``order``, each n-gram in the bin
of its hash. The steps run in this order, on the host with numpy and scipy:

    hashed_counts(texts, config)     tokenizer, stop words, lowercase, order     once per corpus
    fold(counts, dimension, binary)  bins modulo the dimension d; counts or 0/1
    statistics(bags, labels)         bin totals of all training rows, by class
    weigh(bags, config, totals)      weights, then preprocess

Weights of a bin with totals ``P`` in the positive and ``Q`` in the negative class, smoothing ``a``:

    nb   log2(p / q),  p = (P + a) / sum(P + a),  q likewise    naive Bayes, Wang & Manning (2012)
    sif  a T / (a T + P + Q),  T = sum(P + Q)                   Arora, Liang & Ma (2017)

Search space of Khodak, Li, Balcan & Talwalkar (2020), appendix B.2.2, and of its released code.
Deviations from the paper:

- Every configuration has the same hash function.
- Stop words are scikit-learn's, not NLTK's.
- "treebank" is NLTK's tokenizer without its trained sentence splitter. It leaves quotation marks
  unchanged.
"""

import functools
import itertools
import math
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
from scipy.sparse import csr_array

from bilevel.internal.checks import check_in_range, describe, integer, prng_key

BINS = 2**30
"""Columns of :func:`hashed_counts`: enough that collisions there are rare."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "tokenizer": ("simple", "punctuation", "treebank"),
    "stop_words": (False, True),
    "lowercase": (False, True),
    "order": (1, 2, 3),
    "binary": (False, True),
    "weights": ("none", "nb", "sif"),
    "preprocess": ("none", "normalize", "average"),
}
"""The values of each field of :class:`TextConfig` except ``smoothing``, a positive number."""


class TextConfig(NamedTuple):
    """One configuration; :func:`text_config` makes one with checked fields."""

    # "simple" splits on white space and deletes punctuation inside tokens. "punctuation" splits
    # between runs of punctuation and of other characters too. "treebank" is similar to the Penn
    # Treebank: contractions (``did n't``) and punctuation are tokens, but not inside words and
    # numbers. Punctuation means Unicode's marks, punctuation and symbols.
    tokenizer: str = "simple"
    stop_words: bool = False  # whether to remove English stop words; "THE" stays
    lowercase: bool = True
    order: int = 1  # the longest n-grams: 1, 2 or 3
    binary: bool = False  # 0/1 instead of counts
    weights: str = "none"  # or "nb", "sif"
    smoothing: float = 1.0  # a in the weights
    # Weighted rows unchanged ("none"), scaled to unit 2-norm ("normalize"), or divided by the sum
    # of the row before weighting ("average").
    preprocess: str = "none"

    def __str__(self) -> str:
        """Describe the configuration in a few words."""
        words = [self.tokenizer, f"order {self.order}", self.weights]
        words += [f"smoothing {self.smoothing:.2g}"] if self.weights != "none" else []
        words += [self.preprocess] if self.preprocess != "none" else []
        flags = {"stop_words": "no stop words", "lowercase": "lowercase", "binary": "binary"}
        return ", ".join(words + [word for flag, word in flags.items() if getattr(self, flag)])

    @property
    def hashing(self) -> tuple[Any, ...]:
        """Return the fields that :func:`hashed_counts` uses."""
        return self[:4]


class TextStatistics(NamedTuple):
    """Totals [d] of the training rows in the classes; see :func:`statistics`."""

    negative: np.ndarray  # Q
    positive: np.ndarray  # P


def text_config(**fields: Any) -> TextConfig:
    """Make a configuration with checked fields of :class:`TextConfig`, by name.

    Raises
    ------
    ValueError
        If a field or value is unknown, or ``smoothing`` is not positive and finite.

    Examples
    --------
    >>> print(text_config(order=2, weights="nb", binary=True))
    simple, order 2, nb, smoothing 1, lowercase, binary
    """
    for name, value in fields.items():
        if name == "smoothing":
            check_in_range("smoothing", value, 0, math.inf)
        elif name not in CHOICES:
            expected = ", ".join(TextConfig._fields)
            raise ValueError(f"fields: expected some of {expected}, got {name!r}.")
        elif value not in CHOICES[name]:
            expected = ", ".join(map(str, CHOICES[name]))
            raise ValueError(f"{name}: expected one of {expected}, got {value!r}.")
    return TextConfig(**fields)


def sample_text(key: chex.PRNGKey, count: int) -> list[TextConfig]:
    """Draw configurations from the search space of Khodak et al.'s released code.

    Choices are uniform, ``weights`` naive Bayes or SIF, ``smoothing`` log-uniform in [1e-5, 10].

    Raises
    ------
    ValueError
        If ``key`` is not a PRNG key, or ``count`` is under 0.

    Examples
    --------
    >>> {config.weights for config in sample_text(jax.random.key(0), 20)} == {"nb", "sif"}
    True
    """
    prng_key("key", key)
    count = integer("count", count, 0)
    seed = np.asarray(jax.random.key_data(key)).ravel()
    # RandomState's stream is the same in all numpy versions; that of default_rng may change.
    rng = np.random.RandomState(seed)
    choices = CHOICES | {"weights": ("nb", "sif")}

    def sample():
        fields = {name: values[rng.randint(len(values))] for name, values in choices.items()}
        return TextConfig(**fields, smoothing=float(10 ** rng.uniform(-5, 1)))

    return [sample() for _ in range(count)]


def hashed_counts(texts: Sequence[str], config: TextConfig) -> csr_array:
    """Return counts [n, BINS] of each document's n-grams, sparse float32: slow, once per corpus.

    An n-gram is its tokens joined by spaces, its bin scikit-learn's 32-bit MurmurHash3.
    """
    for i, document in enumerate(texts):
        if not isinstance(document, str):
            raise ValueError(f"texts[{i}]: expected a str, got {describe(document)}.")
    from sklearn.feature_extraction import FeatureHasher  # a slow import

    hasher = FeatureHasher(BINS, input_type="string", alternate_sign=False, dtype=np.float32)
    return csr_array(hasher.transform(_ngrams(text, config) for text in texts))


def fold(counts: csr_array, dimension: int, binary: bool = False) -> csr_array:
    """Fold ``counts`` [n, bins] to bins modulo ``dimension``; ``binary`` sets nonzero entries to 1.

    For powers of two, the result equals hashing into ``dimension`` bins.
    """
    if not integer("dimension", dimension, 1) <= counts.shape[1]:
        raise ValueError(f"dimension: expected 1 to {counts.shape[1]}, got {dimension}.")
    parts = counts.data, counts.indices % dimension, counts.indptr
    bags = csr_array(parts, shape=(counts.shape[0], dimension), copy=True)
    bags.sum_duplicates()
    if binary:
        bags.eliminate_zeros()
        bags.data[:] = 1
    return bags


def statistics(bags: csr_array, labels: np.ndarray) -> TextStatistics:
    """Return totals of the training rows ``bags`` [n, d] by bin and class.

    ``labels`` [n] have two values; the larger one is the positive class.
    """
    # In float64, because a total may exceed the exact integers of float32.
    return TextStatistics(*((labels == c).astype(np.float64) @ bags for c in np.unique(labels)))


def weigh(bags: csr_array, config: TextConfig, totals: TextStatistics) -> csr_array:
    """Return weighted and scaled features [n, d], sparse float64; ``totals`` of training rows."""
    weighted = bags.astype(np.float64)  # a copy
    row_sums = weighted.sum(axis=1)
    weighted.data *= _bin_weights(weighted.indices, config, totals)
    if config.preprocess == "normalize":
        from sklearn.preprocessing import normalize

        return normalize(weighted, copy=False)
    if config.preprocess == "average":
        weighted.data /= np.repeat(row_sums, np.diff(weighted.indptr))
    return weighted


def _bin_weights(bins, config, totals):
    """Return the weights of the listed bins only."""
    a, (negative, positive) = config.smoothing, totals
    if config.weights == "nb":
        smoothed = a * len(positive)
        p = (positive[bins] + a) / (positive.sum() + smoothed)
        q = (negative[bins] + a) / (negative.sum() + smoothed)
        return np.log2(p / q)
    if config.weights == "sif":
        # The totals are 0 if all training rows are empty.
        mass = a * ((positive.sum() + negative.sum()) or 1)
        return mass / (mass + positive[bins] + negative[bins])
    return 1.0


@functools.cache
def _stop_words() -> frozenset[str]:
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    return ENGLISH_STOP_WORDS | {word.capitalize() for word in ENGLISH_STOP_WORDS}


def _ngrams(text: str, config: TextConfig) -> Iterable[str]:
    tokens = _TOKENIZERS[config.tokenizer](text)
    if config.stop_words:
        removed = _stop_words()
        tokens = [token for token in tokens if token not in removed]
    if config.lowercase:
        tokens = [token.lower() for token in tokens]
    longer = (
        map(" ".join, zip(*(tokens[k:] for k in range(n)), strict=False))
        for n in range(2, config.order + 1)
    )
    return itertools.chain(tokens, *longer)


_MARKS = "MPS"  # Unicode's categories of marks, punctuation and symbols, by first letter


class _Deletion(dict):
    """Table for ``str.translate`` that classifies punctuation one character at a time."""

    def __missing__(self, code):
        self[code] = None if unicodedata.category(chr(code))[0] in _MARKS else code
        return self[code]


_DELETION = _Deletion()


@functools.lru_cache(maxsize=1024)
def _runs(beyond_ascii: frozenset[str]) -> re.Pattern:
    # A class of all 10,000 such characters would match hundreds of times slower.
    marks = re.escape(string.punctuation + "".join(sorted(beyond_ascii)))
    return re.compile(rf"[{marks}]+|[^\s{marks}]+")


def _split_at_punctuation(text: str) -> list[str]:
    others = () if text.isascii() else set(text)
    marks = (c for c in others if c > "\x7f" and unicodedata.category(c)[0] in _MARKS)
    return _runs(frozenset(marks)).findall(text)


_CONTRACTION = re.compile(r"'(?=(?:s|S|m|M|d|D|ll|LL|re|RE|ve|VE)\b)")
_TREEBANK = re.compile(
    r"""
      \w+ (?: (?: [./'-] | [,:] (?=\d) ) \w+ )*
      (?: (?: (?<=\.\w) | (?<=\bMr) | (?<=\bMrs) | (?<=\bMs) | (?<=\bDr) | (?<=\bSt) ) \. )?
    | \.{2,} | -{2,} | '' | '(?:s|S|m|M|d|D|ll|LL|re|RE|ve|VE)\b
    | \S
    """,
    re.VERBOSE,
)


def _split_as_treebank(text: str) -> list[str]:
    for word in ("n't", "N'T"):
        text = text.replace(word, " " + word)
    return _TREEBANK.findall(_CONTRACTION.sub(" '", text))


_TOKENIZERS: dict[str, Callable[[str], list[str]]] = {
    "simple": lambda text: text.translate(_DELETION).split(),
    "punctuation": _split_at_punctuation,
    "treebank": _split_as_treebank,
}
