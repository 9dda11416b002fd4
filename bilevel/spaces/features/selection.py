"""Choose one feature map among many: the problems of Khodak et al. 2020, section 2.

    min over c of  l_V(w_c, c),    w_c = argmin_w  lambda |w|^2 + sum_T l(<w, phi_c(x)>, y)

c is a :class:`FourierConfig` (images) or :class:`TextConfig` (texts), phi_c a map to ``resource``
features. The loss is squared, to one-vs-rest targets +-1 (images), or the squared hinge (texts).
The shared w* is one solve with a configuration per row. Scores are 0-1 errors. All configurations
share one draw of the random features (one hash for texts), and fewer features are the first ones of
more. So a shared weight always belongs to the same feature, up to the configuration.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse as scipy_sparse

from bilevel import linear
from bilevel.contracts import Evaluation, Selection, Shared
from bilevel.internal import checks
from bilevel.linear.matrices import Blocks
from bilevel.linear.models import default_method, predict
from bilevel.spaces.features import fourier, text
from bilevel.spaces.targets import predict_labels, sign_labels

Part = tuple[Any, Any]  # rows and their labels 0..classes-1

_LARGE = 8192  # side of a Gram matrix from which on conjugate gradients are faster
_ACCURATE = 1e-4  # relative gradient; above it Cholesky solves again, or the weights are NaN


def fourier_selection(
    key: chex.PRNGKey,
    train: Part,
    valid: Part,
    test: Part,
    *,
    dimension: int,
    penalty: float = 0.5,
    memory: int = 2**31,
    place: Callable[[chex.Array], jax.Array] = jnp.asarray,
) -> Selection:
    """Make ridge regression on random Fourier features; configurations are :class:`FourierConfig`.

    Parameters
    ----------
    key : jax PRNG key
        For the random features.
    train, valid, test : (x [n, ...], labels [n])
        Rows are flattened. A class without training rows is never predicted.
    dimension : int
        The largest number of features: the ``budget`` of a baseline.
    penalty : float
        lambda in ``|Phi w - y|^2 + lambda |w|^2``. If 0 leaves the weights undetermined, the errors
        of a configuration are NaN. So they are if conjugate gradients end with a relative gradient
        over 1e-4, and no matrix of a direct method fits into ``memory``.
    memory : int
        Bytes. If they fit, projections of all rows are stored: n x ``dimension`` values for each
        preprocessing and kernel, so that a configuration costs one cosine per feature. Otherwise
        features are computed in blocks when needed (:func:`bilevel.linear.ridge_weights`).
    place : ``place(rows [n, p]) -> the same``
        Puts the concatenated rows of all parts on the computing devices, e.g. a ``jax.device_put``
        over a mesh.

    Raises
    ------
    ValueError
        If ``key`` is not a PRNG key, a part is empty, not finite or does not fit the others,
        ``dimension`` is under 1 or the penalty negative; later if a resource exceeds ``dimension``.

    Examples
    --------
    >>> part = np.eye(4, dtype=np.float32)[[0, 0, 1, 1]], np.array([0, 0, 1, 1])
    >>> key = jax.random.key(0)
    >>> problem = fourier_selection(key, part, part, part, dimension=8)
    >>> problem.evaluate(key, fourier.fourier_config(gamma=1.0), 8)
    Evaluation(valid=0.0, test=0.0)
    """
    checks.prng_key("key", key)
    dimension = checks.integer("dimension", dimension, 1)
    images, labels, sizes = _stacked(train, valid, test)
    checks.check_finite("train, valid, test", images, "rows")
    if not 0 <= checks.real_number("penalty", penalty) < math.inf:
        raise ValueError(f"penalty: expected a finite number >= 0, got {penalty}.")
    dtype = checks.at_least_float32(images.dtype)
    x = place(jnp.asarray(images.reshape(len(images), -1), dtype))
    classes, codes = np.unique(labels[: sizes[0]], return_inverse=True)
    targets = sign_labels(jnp.asarray(codes), max(2, len(classes)), dtype)
    source = key, x[: sizes[0]]
    kinds = len(fourier.PREPROCESS) * len(fourier.KERNELS)
    if kinds * len(x) * dimension * x.dtype.itemsize <= memory:
        ridge, outputs = _ridge_from_projections(source, x, dimension)
    else:
        ridge, outputs = _ridge_from_blocks(source, x, memory)

    def stacked(configs, cells, resource):
        if not 1 <= resource <= dimension:
            raise ValueError(f"resource: expected 1 to {dimension} features, got {resource}.")
        if len(configs) == 1:  # scalars need one projection only
            return jax.tree.map(np.asarray, configs[0])
        return jax.tree.map(lambda *leaves: np.stack(leaves)[cells], *configs)

    def fit(configs, cells, rows, resource):
        return ridge(stacked(configs, cells, resource), rows, targets, penalty, resource)

    def wrong(w, configs, cells, rows, resource):
        f = outputs(w, stacked(configs, cells, resource), rows, resource)
        # With a single class, the sign can predict a second one.
        guesses = classes[np.minimum(predict_labels(f), len(classes) - 1)]
        known = np.isfinite(f).reshape(len(f), -1).all(axis=1)
        return np.where(known, guesses != labels[rows], np.nan)

    return _selection(fit, wrong, sizes)


# An argument of the programs, so that problems of the same sizes share them.
Source = tuple[jax.Array, jax.Array]  # key, training rows


@functools.partial(jax.jit, static_argnames="dimension")
def _project_rows(source, kind, x, dimension):
    config = fourier.FourierConfig(kind[0], kind[1], jnp.ones(()))
    return fourier.fourier_features(*source).project(config, x, dimension)


@functools.partial(jax.jit, static_argnames=("rows", "resource"))
def _select(chosen, projection, mask, rows, resource):
    return jnp.where(mask[:, None], projection[slice(*rows), :resource], chosen)


@functools.partial(jax.jit, static_argnames=("rows", "resource"))
def _finish(config, projection, phases, rows, resource):
    part = projection[slice(*rows), :resource]
    return fourier.from_projection(config, part, phases[:resource]) / math.sqrt(resource)


_ridge = jax.jit(lambda phi, y, penalty: linear.ridge_weights(phi, y, penalty).w)


def _ridge_from_projections(source: Source, x: jax.Array, dimension: int):
    """Return ridge regression and its outputs, from projections that are computed once."""
    projections = {}  # (preprocessing, kernel) -> [n, dimension]
    phases = fourier.fourier_features(*source).phases(dimension, dtype=x.dtype)

    def features(config, rows, resource):
        bounds = rows.start, rows.stop
        kind_of_config = np.stack([config.preprocess, config.kernel], axis=-1).reshape(-1, 2)
        kinds = [tuple(kind) for kind in np.unique(kind_of_config, axis=0).tolist()]
        for kind in kinds:
            if kind not in projections:
                projections[kind] = _project_rows(source, kind, x, dimension)
        if len(kinds) == 1:
            return _finish(config, projections[kinds[0]], phases, bounds, resource)
        chosen = jnp.zeros((len(config.gamma), resource), x.dtype)
        for kind in kinds:
            mask = (config.preprocess == kind[0]) & (config.kernel == kind[1])
            chosen = _select(chosen, projections[kind], mask, bounds, resource)
        return _finish(config, chosen, phases, (0, len(chosen)), resource)

    def ridge(config, rows, targets, penalty, resource):
        return _ridge(features(config, rows, resource), targets, penalty)

    def outputs(w, config, rows, resource):
        return features(config, rows, resource) @ w

    return ridge, outputs


def _feature_blocks(source: Source, config, x: jax.Array, resource: int) -> Blocks:
    maps, scale = fourier.fourier_features(*source), math.sqrt(resource)

    def rows(start, size):
        index = start + jnp.arange(size)
        inside = jnp.minimum(index, len(x) - 1)
        own = jax.tree.map(lambda leaf: leaf[inside] if leaf.ndim else leaf, config)
        phi = maps.apply(own, x[inside], resource) / scale
        return jnp.where((index < len(x))[:, None], phi, 0)

    def columns(start, size):
        phi = maps.apply(config, x, size, start) / scale
        return jnp.where(start + jnp.arange(size) < resource, phi, 0)

    return Blocks((len(x), resource), rows, columns)


@functools.partial(jax.jit, static_argnames=("resource", "method", "memory"))
def _ridge_in_blocks(source, config, x, targets, penalty, resource, method, memory):
    phi = _feature_blocks(source, config, x, resource)
    return linear.ridge_weights(phi, targets, penalty, method=method, memory=memory)


@functools.partial(jax.jit, static_argnames=("resource", "memory"))
def _outputs_in_blocks(source, config, x, w, resource, memory):
    return predict(_feature_blocks(source, config, x, resource), w, memory=memory)


def _ridge_from_blocks(source: Source, x: jax.Array, memory: int):
    """Return ridge regression and its outputs, from feature blocks computed when needed."""

    def ridge(config, rows, targets, penalty, resource):
        mine = x[rows]
        if np.ndim(config.kernel):  # with rows of a kernel side by side, blocks need one projection
            order = np.argsort(config.kernel, kind="stable")
            config = jax.tree.map(lambda leaf: leaf[order], config)
            mine, targets = mine[order], targets[order]
        given = source, config, mine, targets, penalty, resource
        method = default_method((len(mine), resource), x.dtype, memory)
        if method == "cg" or (penalty > 0 and min(len(mine), resource) >= _LARGE):
            fit = _ridge_in_blocks(*given, "cg", memory)
            if fit.residual <= _ACCURATE:
                return fit.w
            if method == "cg":
                return jnp.full_like(fit.w, jnp.nan)
        return _ridge_in_blocks(*given, method, memory).w

    def outputs(w, config, rows, resource):
        return _outputs_in_blocks(source, config, x[rows], w, resource, memory)

    return ridge, outputs


def text_selection(train: Part, valid: Part, test: Part, *, cost: float = 1.0) -> Selection:
    """Make a squared-hinge SVM on hashed bags of n-grams; configurations are :class:`TextConfig`.

    The resource is the number of hash bins. Every way of hashing runs once, when a configuration
    first needs it.

    Parameters
    ----------
    train, valid, test : (texts [n], labels [n] of 0 and 1)
    cost : float
        C in ``1/2 |w|^2 + C sum max(0, 1 - y f)^2``: 1 is the paper's lambda = 1/2. Solved by
        scikit-learn's ``LinearSVC``, on the host.

    Raises
    ------
    ValueError
        If a part is empty, labels are not 0 and 1 (in training both), or the cost is not positive.

    Notes
    -----
    A naive-Bayes weight has the sign of the class in it, other weights do not. Shared weights w of
    both kinds in the same bins could serve neither, so n-grams of one kind fall into the bins of
    unrelated n-grams of the other. Memory: up to 36 matrices of counts, of some 100 entries and 12
    bytes each per text and order.

    Examples
    --------
    >>> part = np.array(["a fine film", "a dull film"], object), np.array([1, 0])
    >>> problem = text_selection(part, part, part)
    >>> config = text.text_config(tokenizer="simple", weights="none")
    >>> problem.evaluate(jax.random.key(0), config, 1024)
    Evaluation(valid=0.0, test=0.0)
    """
    from sklearn.svm import LinearSVC  # a slow import

    # numpy would pad strings to the length of the longest.
    parts = ((np.asarray(texts, object), labels) for texts, labels in (train, valid, test))
    texts, labels, sizes = _stacked(*parts)
    checks.check_in_range("cost", cost, 0, math.inf)
    known, *others = (set(part.tolist()) for part in np.split(labels, np.cumsum(sizes)[:2]))
    if known != {0, 1}:
        raise ValueError(f"train: expected labels 0 and 1, both, got {sorted(known)}.")
    # Guesses are 0 or 1, so rows with other labels, e.g. -1, would all be wrong.
    for name, part in zip(("valid", "test"), others, strict=True):
        if not part <= {0, 1}:
            got = sorted(part)
            raise ValueError(f"{name}: expected labels 0 and 1, as in training, got {got}.")
    hashed = functools.lru_cache(maxsize=None)(lambda hashing: _Counts(texts, hashing))

    def bags(configs, cells, rows, resource):
        """Yield each configuration with its ``rows``, if any, and their bags."""
        ways = [config.hashing for config in configs]
        for way in dict.fromkeys(ways):  # all rows of a way at once
            mine = np.array([w == way for w in ways])
            hashed(way).add(rows.start + np.flatnonzero(mine[cells]))
        for c, config in enumerate(configs):
            own = np.flatnonzero(cells == c)
            if len(own):
                counts = hashed(config.hashing).of(rows.start + own)
                if config.weights == "nb":
                    counts = _permute_bins(counts)
                yield config, own, text.fold(counts, resource, config.binary)

    def fit(configs, cells, rows, resource):
        parts = list(bags(configs, cells, rows, resource))
        totals = text.statistics(_in_order((own, bag) for _, own, bag in parts), labels[rows])
        phi = _in_order((own, text.weigh(bag, c, totals)) for c, own, bag in parts)
        # Rows of many configurations differ in scale, which slows the primal (569 s instead of 4 s
        # on 25,000 reviews in 23,171 bins), but not the dual, which takes one row at a time.
        dual = True if len(configs) > 1 else "auto"
        svm = LinearSVC(
            C=cost, dual=dual, fit_intercept=False, tol=1e-3, random_state=0, max_iter=10_000
        )
        return svm.fit(phi, labels[rows]).coef_[0], totals

    def wrong(model, configs, cells, rows, resource):
        w, totals = model
        parts = bags(configs, cells, rows, resource)
        phi = _in_order((own, text.weigh(bag, c, totals)) for c, own, bag in parts)
        return (phi @ w > 0) != labels[rows]

    return _selection(fit, wrong, sizes)


class _Counts:
    """Hashed counts, in one way, of the texts requested so far."""

    def __init__(self, texts: np.ndarray, hashing: tuple):
        self.texts, self.config = texts, text.TextConfig(*hashing)
        self.place = np.full(len(texts), -1)  # row of each text in `counts`, or -1
        self.counts = scipy_sparse.csr_array((0, text.BINS))

    def add(self, index: np.ndarray) -> None:
        new = index[self.place[index] < 0]
        if len(new):
            counts = text.hashed_counts(self.texts[new].tolist(), self.config)
            self.place[new] = self.counts.shape[0] + np.arange(len(new))
            known = [self.counts] if self.counts.shape[0] else []
            self.counts = scipy_sparse.vstack([*known, counts], format="csr")

    def of(self, index: np.ndarray) -> Any:
        return self.counts[self.place[index]]


def _permute_bins(counts: Any) -> Any:
    """Return the counts in other bins, one-to-one; :func:`text_selection` explains why."""
    bins = ((counts.indices.astype(np.int64) * 15_839 + 104_729) % text.BINS).astype(np.int32)
    return scipy_sparse.csr_array((counts.data, bins, counts.indptr), shape=counts.shape)


def _in_order(parts: Iterable[tuple[np.ndarray, Any]]) -> Any:
    """Return the rows of a sparse matrix from their indices and parts."""
    owned, matrices = zip(*parts, strict=True)
    return scipy_sparse.vstack(matrices, format="csr")[np.argsort(np.concatenate(owned))]


def _stacked(*parts: Part) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return all rows, all labels, and the number of rows in each part."""
    shape = np.shape(parts[0][0])[1:]
    for name, (x, labels) in zip(("train", "valid", "test"), parts, strict=True):
        if len(x) == 0 or np.shape(labels) != (len(x),):
            raise ValueError(
                f"{name}: expected rows with a label each, got {len(x)} rows and labels of shape "
                f"{np.shape(labels)}."
            )
        if np.shape(x)[1:] != shape:
            raise ValueError(f"{name}: expected rows of shape {shape}, got {np.shape(x)[1:]}.")
    xs, labels = zip(*parts, strict=True)
    return np.concatenate(xs), np.concatenate(labels), [len(y) for y in labels]


def _selection(
    fit: Callable[..., Any], wrong: Callable[..., np.ndarray], sizes: Sequence[int]
) -> Selection:
    """Make the problem of ``fit(configs, cells, rows, resource) -> model``.

    ``wrong(model, configs, cells, rows, resource)`` returns whether each row is wrong, NaN for
    outputs that are not finite. ``rows`` is a slice of all rows; ``cells`` has the index of each
    row's configuration.
    """
    ends = np.cumsum([0, *sizes])
    train, valid, test = (slice(*ends[i : i + 2].tolist()) for i in range(3))

    def evaluate(key, config, resource):
        # `key` is not used: the features are drawn with the problem's own key.
        cells = [np.zeros(size, int) for size in sizes]
        model = fit([config], cells[0], train, resource)
        parts = zip(cells[1:], (valid, test), strict=True)
        errors = (wrong(model, [config], own, rows, resource).mean() for own, rows in parts)
        return Evaluation(*map(float, errors))

    def share(key, configs, probabilities, resource, *, whole=False):
        k, (n, m, _) = len(configs), sizes
        # On the host, because every k would compile another program.
        seed = np.asarray(jax.random.key_data(key)).ravel()
        cells = np.random.RandomState(seed).choice(k, n + m, p=probabilities)
        model = fit(configs, cells[:n], train, resource)
        if whole:
            cell = np.zeros(m, int)
            means = [wrong(model, [c], cell, valid, resource).mean() for c in configs]
            return Shared(np.array(means), np.full(k, m))
        errors = wrong(model, configs, cells[n:], valid, resource)
        counts = np.bincount(cells[n:], minlength=k)
        with np.errstate(invalid="ignore"):
            return Shared(np.bincount(cells[n:], errors, minlength=k) / counts, counts)

    return Selection(evaluate, share)
