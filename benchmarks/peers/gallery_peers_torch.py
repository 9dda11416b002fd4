"""MAML on sinusoids in PyTorch, for ``gallery_peers.py``: by hand, and with TorchOpt.

Weights are as in the example: a list of (kernel, bias). Every task has a copy of them, so layers
are batched products.
"""

import jax
import numpy as np
import torch

from benchmarks.peers.peers_torch import gradient_in, tensors

torch.set_num_threads(1)


def error(w, batch):
    """Return the error of each task, for weights [tasks, ...]."""
    x = batch[0][..., None]
    for i in range(0, len(w), 2):
        x = x @ w[i] + w[i + 1][:, None]
        x = torch.relu(x) if i + 2 < len(w) else x
    return ((x[..., 0] - batch[1]) ** 2).mean(1)


def adapted(start, batch, rate, steps, hand):
    """Return the tasks' weights after ``steps``, from leaves without a task axis."""
    tasks = len(batch[0])
    w = [a.expand(tasks, *a.shape) for a in start]
    if not hand:
        import torchopt

        rule = torchopt.sgd(lr=rate)
        state = rule.init(tuple(w))
    for _ in range(steps):
        slopes = torch.autograd.grad(error(w, batch).sum(), w, create_graph=True)
        if hand:
            w = [a - rate * g for a, g in zip(w, slopes, strict=True)]
        else:
            updates, state = rule.update(slopes, state, inplace=False)
            w = list(torchopt.apply_updates(tuple(w), updates, inplace=False))
    return w


def gradient(back, tasks, rate, steps, hand):
    """Return ``alpha -> hypergradient``; ``back`` converts a vector to weights."""
    known, others = map(tensors, tasks)

    def value(alpha):
        leaves = jax.tree.leaves(back(np.zeros(len(alpha), np.float32)))
        parts = torch.split(alpha, [leaf.size for leaf in leaves])
        leaves = [a.reshape(leaf.shape) for a, leaf in zip(parts, leaves, strict=True)]
        return error(adapted(leaves, known, rate, steps, hand), others).mean()

    return lambda alpha: gradient_in(value, alpha)


def trained(start, batches, rate, steps):
    """Run Adam on the outer loss, one step for each batch of tasks."""
    leaves, structure = jax.tree.flatten(start)
    alpha = [torch.from_numpy(np.array(a)).requires_grad_() for a in leaves]
    rule = torch.optim.Adam(alpha, lr=1e-3)
    for tasks in batches:
        known, others = map(tensors, tasks)
        rule.zero_grad()
        error(adapted(alpha, known, rate, steps, hand=True), others).mean().backward()
        rule.step()
    return jax.tree.unflatten(structure, [a.detach().numpy() for a in alpha])
