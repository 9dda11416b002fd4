"""The result of a finished search, to be trained: its architecture, and rows for it."""

from typing import Any, NamedTuple

import jax
import numpy as np

from bilevel.cli.deep_search.report import name_in_arrays, name_of_found
from bilevel.cli.flags.datasets import CLASSES, ROWS, SHAPES, is_own
from bilevel.cli.flags.deep_searches import Train
from bilevel.cli.runtime import report
from bilevel.cli.runtime.data import Data, load_builtin, own_data
from bilevel.data import datasets
from bilevel.internal.import_function import called
from bilevel.nets.evaluation import Part
from bilevel.spaces import Space
from bilevel.spaces.space import finite_weights
from bilevel.spaces.trained import Blueprint

CELLS = "darts", "nasbench201"
VECTORS = "activations", "skips"  # spaces of networks of vectors of unit norm


class Rows(NamedTuple):
    """Rows of the training and of the test, without normalisation."""

    train: Part
    test: Part
    classes: tuple[str, ...]


class Found(NamedTuple):
    """An architecture that a search has found."""

    blueprint: Blueprint
    names: tuple[str, ...]  # candidates
    pixels: int | None
    own: Space | None  # a user-defined space
    mixture: Blueprint | None  # at the alpha found, if this is a network of the same size


def best_search(result: dict[str, Any]) -> int:
    """Return the number of the search with the smallest validation error of its network."""
    scores = result["scores"]
    return int(np.argmin(scores[name_of_found(scores) or "supernet"]["valid_error"]))


def open_data(config: Train, result: dict[str, Any]) -> Data:
    """Return the rows of ``--data``, by default those of the search, with the same test rows."""
    before, space = result["config"], result.get("space", "activations")
    source, same = config.data or before["data"], config.data in (None, before["data"])
    if not is_own(source):
        return Data(source, SHAPES[source], CLASSES)
    seed = before["seed"] if same else config.seed
    data = own_data(source, seed, images=space not in VECTORS, labels=True)
    if same and (digest := result.get("data", {}).get("digest")) != data.digest:
        raise ValueError(
            f"data: expected the rows of the search, {digest}, got {data.digest} in {source}; the "
            "search may have seen their test rows."
        )
    return data


def draw_rows(config: Train, result: dict[str, Any], data: Data, number: int) -> Rows:
    """Return rows for training, and test rows that search ``number`` has not seen."""
    before = result["config"]
    default = before["train"] + before["valid"]
    if data.source == before["data"] and not ROWS.get(data.source, (0, 1))[1]:
        # The search has drawn its test rows from all rows.
        if config.train not in (None, default):
            raise ValueError(
                f"train: expected the {default} rows of the search, since {data.source} has no "
                f"separate test rows, got {config.train}."
            )
        draws = jax.random.split(jax.random.key(before["seed"]), before["seeds"])
        sizes = {name: before[name] for name in ("train", "valid", "test")}
        ((train, valid, test),) = datasets.draw_splits(data.source, [draws[number]], **sizes)
        return _checked(config, _joined(train, valid), test, datasets.load(data.source).classes)
    wanted = None if config.train == "all" else config.train or default
    loaded = data.dataset or load_builtin(data.source, wanted)
    train, test = (loaded.x_train, loaded.y_train), (loaded.x_test, loaded.y_test)
    if loaded.x_valid is not None:
        train = _joined(train, (loaded.x_valid, loaded.y_valid))
    total = len(train[1])
    count = total if config.train == "all" else config.train or min(default, total)
    if count > total:
        raise ValueError(f"train: expected at most the {total} of {data.source}, got {count}.")
    train_key, test_key = jax.random.split(jax.random.key(config.seed))
    if data.dataset is not None:  # a folder's rows may be sorted by class
        test = _draw_rows_of(test_key, test, min(config.test, len(test[1])))
    return _checked(config, _draw_rows_of(train_key, train, count), test, loaded.classes)


def _joined(first: Part, second: Any) -> Part:
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def _draw_rows_of(key: jax.Array, part: Part, count: int) -> Part:
    """Return ``count`` rows with all classes in their proportions."""
    if count == len(part[1]):
        return part
    (rows,) = datasets.stratified_split(key, part[1], [count])
    return part[0][rows], part[1][rows]


def _checked(config: Train, train: Part, test: Part, classes: tuple[str, ...]) -> Rows:
    if config.batch_size > len(train[1]):
        raise ValueError(
            f"batch_size: expected at most the {len(train[1])} training rows, got "
            f"{config.batch_size}."
        )
    return Rows(train, (test[0][: config.test], test[1][: config.test]), classes)


def read_found(config: Train, result: dict[str, Any], classes: int, number: int) -> Found:
    """Return the architecture of search ``number``, with the sizes of the network to train."""
    before, space = result["config"], result.get("space", "activations")
    own, alpha, mixture, sizes = None, None, None, {"classes": classes}
    if space in CELLS:
        for name in ("cells", "channels"):
            size = getattr(config, name) or before.get(f"final_{name}") or before[name]
            sizes[name] = size
        sizes["bfloat16"] = before["bfloat16"]
        architecture = result["architectures"][number]
    elif space == "skips":
        sizes |= {k: before[k] for k in ("activations", "depth", "width", "parametrization")}
        architecture = result["architectures"][number]
    elif space == "activations":
        sizes |= {k: before[k] for k in ("activations", "width")}
        names, weights = result["names"], np.array(result["alpha"][number], float)
        weights = finite_weights("alpha", weights, (len(names),))
        architecture = names[int(weights.argmax())]
        alpha = [np.eye(len(names))[weights.argmax()].tolist()]
        mixture = Blueprint(space, report.mixture(weights, names), sizes, [weights.tolist()])
    else:
        own, architecture, alpha = _read_own(config, result, classes, number)
    blueprint = Blueprint(space, architecture, sizes, alpha)
    return Found(blueprint, tuple(result["names"]), before.get("pixels"), own, mixture)


def _read_own(
    config: Train, result: dict[str, Any], classes: int, number: int
) -> tuple[Space, str, list[Any]]:
    """Return a user-defined space, the architecture found, and the leaves of its vertex."""
    space = called("space", result["space"], classes)
    leaves, structure = jax.tree_util.tree_flatten_with_path({"alpha": space.start()})
    assert config.run is not None  # config.check() has seen it
    with np.load(config.run / "arrays.npz", allow_pickle=False) as arrays:
        values = [arrays.get(f"{name_in_arrays(path)}_{number}") for path, _ in leaves]
    expected, architecture = result["architectures"][number], None
    if [np.shape(v) for v in values] == [np.shape(like) for _, like in leaves]:
        architecture = space.discretize(jax.tree.unflatten(structure, values)["alpha"])
    if str(architecture) != expected:
        raise ValueError(
            f"space: expected {result['space']} as in the run, which finds {expected!r}, got "
            f"{str(architecture)!r}; the space has changed."
        )
    vertex = [np.asarray(a).tolist() for a in jax.tree.leaves(space.one_hot(architecture))]
    return space, expected, vertex
