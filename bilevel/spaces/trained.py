"""The network of an architecture: built from a space, or from a file of trained parameters.

Others to compare it with are random ones of its size, and those of one operation.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from bilevel.contracts import Pytree
from bilevel.internal.checks import describe
from bilevel.nets.fitting import outputs_of
from bilevel.nets.inputs import InputScale, with_scale
from bilevel.nets.training import TrainableNetwork
from bilevel.problem.problem import split_losses
from bilevel.runs import records
from bilevel.spaces.activations import ActivationSpace, activation_space
from bilevel.spaces.darts import darts_network, darts_space
from bilevel.spaces.darts import genotype as darts_cells
from bilevel.spaces.darts.network import reductions
from bilevel.spaces.nasbench201 import genotype as nasbench201_cells
from bilevel.spaces.nasbench201 import nasbench201_space
from bilevel.spaces.nasbench201.network import nasbench201_network
from bilevel.spaces.skips import parse_skip_architecture, skip_space
from bilevel.spaces.space import Space
from bilevel.spaces.targets import sign_labels


def network_at(space: Space, architecture: Any) -> TrainableNetwork:
    """Make the network of an architecture of any space, to be trained by :func:`bilevel.nets.fit`.

    It is ``space.apply`` at the vertex ``space.one_hot(architecture)``, without the running
    averages of :func:`bilevel.spaces.darts.darts_network`.

    Parameters
    ----------
    space : Space
        Its lower loss takes batches ``(x, integer labels)``. The summed squared loss of
        :func:`activation_space` becomes its mean over the batch.
    architecture
        An architecture of ``space.discretize``.

    Raises
    ------
    ValueError
        If ``space`` is not a Space, or ``architecture`` is not of this space.

    Examples
    --------
    >>> space = activation_space(["relu", "tanh"], width=8)
    >>> network = network_at(space, "tanh")
    >>> w, _ = network.init(jax.random.key(0), (3,))
    >>> network.apply(w, (), jnp.eye(3)).shape
    (3,)
    """
    if not isinstance(space, Space):
        raise ValueError(f"space: expected a bilevel.spaces.Space, got {describe(space)}.")
    return mixture_network(space, space.one_hot(architecture))


def mixture_network(space: Space, alpha: Pytree) -> TrainableNetwork:
    """Return the network of a space at any ``alpha``."""

    def init(key, shape):
        return space.init(key, (jnp.zeros((1, *shape)), jnp.zeros(1, int))), ()

    def apply(w, averages, x):
        return space.apply(w, alpha, x)

    def loss(w, averages, batch, key):
        lower = split_losses(space.problem).lower
        if not isinstance(space, ActivationSpace):
            return lower(w, alpha, batch)[0], averages
        x, labels = batch
        outputs = jax.eval_shape(space.apply, w, alpha, x)
        classes = outputs.shape[1] if outputs.ndim > 1 else 2
        signs = sign_labels(labels, classes, outputs.dtype)
        return lower(w, alpha, (x, signs))[0] / len(x), averages

    return TrainableNetwork(init, apply, loss, space.predict)


class Blueprint(NamedTuple):
    """The definition of a network in JSON values."""

    space: str  # "activations", "skips", "darts", "nasbench201" or MODULE:FUNCTION
    architecture: str
    sizes: dict[str, Any]  # arguments of the space's function
    alpha: list[Any] | None = None  # leaves, if the architecture alone does not define the network

    def network(self, own: Space | None = None) -> TrainableNetwork:
        """Build the network; a user-defined space has to be passed as ``own``."""
        if self.space in _CELL_NETWORKS:
            make, parse = _CELL_NETWORKS[self.space]
            sizes = dict(self.sizes)
            dtype = jnp.bfloat16 if sizes.pop("bfloat16", False) else None
            return make(parse(self.architecture), dtype=dtype, **sizes)
        if self.space == "skips":
            return network_at(skip_space(**self.sizes), parse_skip_architecture(self.architecture))
        space = activation_space(**self.sizes) if self.space == "activations" else own
        if not isinstance(space, Space):
            raise ValueError(
                f"space: expected the value of {self.space}, a bilevel.spaces.Space, got "
                f"{describe(space)}."
            )
        leaves, structure = jax.tree.flatten(space.start())
        arrays = [jnp.asarray(a, like.dtype) for a, like in zip(self.alpha or [], leaves)]  # noqa: B905
        if [a.shape for a in arrays] != [like.shape for like in leaves]:
            raise ValueError(
                f"space: expected alpha of shapes {[a.shape for a in arrays]}, as the run had, got "
                f"{[like.shape for like in leaves]}; the space has changed."
            )
        return mixture_network(space, jax.tree.unflatten(structure, arrays))


_CELL_NETWORKS: dict[str, tuple[Callable[..., TrainableNetwork], Callable[[str], Any]]] = {
    "darts": (functools.partial(darts_network, auxiliary=False), darts_cells.parse_genotype),
    "nasbench201": (nasbench201_network, nasbench201_cells.parse_genotype),
}


@dataclasses.dataclass(frozen=True)
class TrainedNetwork:
    """A trained network with the normalisation of its inputs; see :func:`load_network`."""

    network: TrainableNetwork
    w: Any
    averages: Any
    classes: tuple[str, ...]
    architecture: str
    shape: tuple[int, ...]

    def outputs(self, x: chex.Array) -> np.ndarray:
        """Return the outputs for rows of the training's shape and scale."""
        if np.ndim(x) < 1 or np.shape(x)[1:] != self.shape or not len(x):
            expected = ", ".join(["n", *map(str, self.shape)])
            raise ValueError(f"x: expected rows [{expected}], got shape {np.shape(x)}.")
        return outputs_of(self.network, self.w, self.averages, x)

    def predict(self, x: chex.Array) -> np.ndarray:
        """Return the labels of rows like those of the training."""
        return np.asarray(self.network.predict(jnp.asarray(self.outputs(x))))


def save_network(
    path: pathlib.Path,
    blueprint: Blueprint,
    scale: InputScale,
    shape: tuple[int, ...],
    classes: tuple[str, ...],
    w: Any,
    averages: Any,
) -> None:
    """Write an ``.npz`` file without pickle that :func:`load_network` reads."""
    arrays = {f"{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves((w, averages)))}
    arrays |= {"mean": scale.mean, "deviation": scale.deviation}
    notes: dict[str, Any] = {"blueprint": blueprint._asdict(), "shape": list(shape)}
    notes |= {"factor": scale.factor, "unit": scale.unit}
    records.write_arrays(path, arrays, notes | {"classes": list(classes)})


def load_network(path: str | pathlib.Path, space: Space | None = None) -> TrainedNetwork:
    """Load a network that ``bilevel train`` saved.

    Parameters
    ----------
    path : path
        ``network-1.npz`` of a run directory. No pickle is loaded, and no code is run.
    space : Space, optional
        The user-defined space of ``bilevel search-own``. Built-in spaces do not need it.

    Returns
    -------
    TrainedNetwork
        Its ``predict(x)`` returns integer labels [n] of rows before normalisation, ``outputs(x)``
        the network's outputs. ``classes[label]`` is the name of a label. Further fields: ``w``,
        ``averages``, ``network``, ``architecture``.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file is damaged or of another kind, or ``space`` is missing or has changed.

    Examples
    --------
    ::

        network = bilevel.spaces.load_network("runs/train/network-1.npz")
        labels = network.predict(images)
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: expected a file of bilevel train, got {path}.")
    arrays, notes = records.read_arrays(path)
    if not isinstance(notes, dict) or "blueprint" not in notes:
        raise ValueError(f"path: expected a file of bilevel train, got another record, {path}.")
    blueprint, shape = Blueprint(**notes["blueprint"]), tuple(notes["shape"])
    scale = InputScale(arrays.pop("mean"), arrays.pop("deviation"), notes["factor"], notes["unit"])
    network = with_scale(blueprint.network(space), scale)
    like = jax.eval_shape(lambda key: network.init(key, shape), jax.random.key(0))
    leaves, structure = jax.tree.flatten(like)
    saved = [arrays[str(i)] for i in range(len(arrays))]
    if [a.shape for a in saved] != [a.shape for a in leaves]:
        raise ValueError(
            f"path: expected parameters of {blueprint.architecture} in {path}, got other shapes."
        )
    w, averages = jax.tree.unflatten(structure, [jnp.asarray(a) for a in saved])
    classes = tuple(notes["classes"])
    return TrainedNetwork(network, w, averages, classes, blueprint.architecture, shape)


_MOST = 50  # draws, if all before equal the architecture found


def random_of_same_size(
    key: chex.PRNGKey, found: Blueprint, names: tuple[str, ...], draws: int, own: Space | None
) -> Blueprint | None:
    """Return the drawn architecture with the number of weights nearest to that of the found one.

    ``names`` are the candidates. The found architecture itself does not count. The result is None
    if the space has one architecture only. Only networks of cells differ in size.
    """
    size, space = weight_excess(found), _space_of(found, names, own)
    others: list[Blueprint] = []
    for i, k in enumerate(jax.random.split(key, max(draws, _MOST))):
        if i >= draws and others:
            break
        alpha = space.draw(k)
        leaves = found.alpha and [leaf.tolist() for leaf in jax.tree.leaves(alpha)]
        drawn = found._replace(architecture=str(space.discretize(alpha)), alpha=leaves)
        if drawn.architecture != found.architecture:
            others.append(drawn)
    return min(others, key=lambda b: abs(weight_excess(b) - size), default=None)


def single_operations(found: Blueprint, names: tuple[str, ...]) -> dict[str, Blueprint]:
    """Return the networks of cells with one operation on all edges; nothing for other spaces.

    In a DARTS cell every node takes both inputs of the cell.
    """
    if found.space not in ("darts", "nasbench201"):
        return {}

    def cell(name):
        if found.space == "nasbench201":
            return nasbench201_cells.Genotype((name,) * len(nasbench201_cells.EDGES))
        pairs = ((name, 0), (name, 1)) * len(darts_cells.NODES)
        return darts_cells.Genotype(pairs, darts_cells.NODES, pairs, darts_cells.NODES)

    singles = {name: str(cell(name)) for name in names if name != "none"}
    return {k: found._replace(architecture=v) for k, v in singles.items()}


def weight_excess(blueprint: Blueprint) -> int:
    """Count the weights of a network of cells, up to a constant; 0 for other spaces."""
    sizes = {k: blueprint.sizes.get(k) for k in ("cells", "channels")}
    if blueprint.space == "nasbench201":
        cell = nasbench201_cells.parse_genotype(blueprint.architecture)
        return nasbench201_cells.parameter_count(cell, **sizes)  # type: ignore[arg-type]
    if blueprint.space == "darts":
        genotype = darts_cells.parse_genotype(blueprint.architecture)
        return sum(_edge_weights(genotype, **sizes))  # type: ignore[arg-type]
    return 0


def _edge_weights(genotype: darts_cells.Genotype, cells: int, channels: int) -> Iterator[int]:
    """Yield the weights of every edge of a DARTS network."""
    for cell in range(cells):
        reduced = cell in reductions(cells)
        channels *= 1 + reduced
        for name, source in genotype.reduce if reduced else genotype.normal:
            yield _operation_weights(name, channels, reduced and source < 2)


def _operation_weights(name: str, channels: int, strided: bool) -> int:
    pointwise = channels**2 + 2 * channels  # 1 x 1 convolution, scale and shift
    if name == "skip_connect":
        return strided * pointwise
    layers = {"sep": 2, "dil": 1}.get(name[:3], 0)  # none in pooling
    return layers * (int(name[-1]) ** 2 * channels + pointwise)


def _space_of(found: Blueprint, names: tuple[str, ...], own: Space | None) -> Any:
    """Return the space that the architecture was found in; ``own`` is a user-defined one."""
    if found.space == "activations":
        return activation_space(**found.sizes)
    if found.space == "skips":
        return skip_space(**found.sizes)
    if found.space == "darts":
        return darts_space(names)
    return nasbench201_space(names) if found.space == "nasbench201" else own
