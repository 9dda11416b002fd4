"""Save and restore a pytree of arrays, atomically, through orbax.

A checkpoint directory holds numbered steps. Orbax writes each under a temporary name and renames it
when complete, so a process killed at any moment leaves the previous step intact.
"""

import pathlib
from typing import Any

import jax
import numpy as np

from bilevel.protocols import Pytree

_KEEP = 2  # steps kept: the newest, and one to fall back on


def save(directory: str | pathlib.Path, step: int, tree: Pytree, label: int = 0) -> None:
    """Write ``tree`` as step ``step`` of ``directory``; a step already there is left as it is.

    Parameters
    ----------
    directory : path, made if needed.
    step : int, at least 0.
    tree : pytree of arrays (PRNG keys as their data).
    label : int
        A fingerprint of what the tree belongs to, asked for again by :func:`restore`.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, 3, {"w": np.ones(2)})
    ...     latest(folder), restore(folder, {"w": np.zeros(2)})
    (3, {'w': array([1., 1.])})
    """
    leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(tree))}
    with _manager(directory, create=True) as manager:
        args = _orbax().args.StandardSave({"leaves": leaves, "label": np.asarray(label)})
        if step not in manager.all_steps():
            manager.save(step, args=args, force=True)


def latest(directory: str | pathlib.Path) -> int | None:
    """The newest complete step in ``directory``; None where there is none."""
    if not pathlib.Path(directory).is_dir():
        return None
    with _manager(directory) as manager:
        return manager.latest_step()


def restore(directory: str | pathlib.Path, like: Pytree, label: int = 0) -> Pytree:
    """The newest step's arrays, in the structure of ``like``.

    Raises
    ------
    FileNotFoundError
        If ``directory`` holds no checkpoint.
    ValueError
        If the checkpoint carries another label, or another number of arrays than ``like``.
    """
    step = latest(directory)
    if step is None:
        raise FileNotFoundError(f"checkpoint: expected a saved step in {directory}, found none.")
    with _manager(directory) as manager:
        saved = manager.restore(step, args=_orbax().args.StandardRestore())
    if int(saved["label"]) != label:
        raise ValueError(
            f"checkpoint: expected one of this very search in {directory}, got one made from other "
            "arguments (key, starting point or data)."
        )
    leaves = [saved["leaves"][k] for k in sorted(saved["leaves"], key=int)]
    wanted, structure = jax.tree.flatten(like)
    if len(leaves) != len(wanted):
        raise ValueError(
            f"checkpoint: expected {len(wanted)} arrays in {directory}, got {len(leaves)}."
        )
    return jax.tree.unflatten(structure, leaves)


def _orbax() -> Any:
    # Importing orbax takes over a second: only those who checkpoint wait for it.
    import orbax.checkpoint

    return orbax.checkpoint


def _manager(directory: str | pathlib.Path, create: bool = False):
    ocp = _orbax()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=_KEEP, create=create, enable_async_checkpointing=False
    )
    path = pathlib.Path(directory).absolute()
    return ocp.CheckpointManager(
        path, options=options, item_handlers=ocp.StandardCheckpointHandler()
    )
