"""Kernels of the commands, always in float64, because a certificate needs it.

The network has one hidden layer of infinite width with trained weights and activation ``sum_i
alpha_i s_i``: the kernel ``K_alpha`` of Oymak et al. 2021, section 4.2.
"""

import functools
from typing import Any

import jax
import numpy as np
import scipy.linalg

import ntk
from bilevel.spaces.activations import ACTIVATIONS
from ntk.expectations.activations import Activation
from ntk.spectrum.certificate import certified_min_eigenvalue


def kernel_eigenvalue(x: Any, names: tuple[str, ...], alpha: Any) -> tuple[float, float, float]:
    """Return the smallest eigenvalue of ``K_alpha``, its certified bound, and the entries' error.

    The inputs ``x`` are unit vectors. The bound holds for all kernels within this error.
    """
    with jax.enable_x64(True):
        x, alpha = (np.asarray(a, float) for a in (x, alpha))
        kernel, error = map(np.asarray, hidden_layer_kernel(x, alpha, names))
    (value,) = scipy.linalg.eigvalsh(kernel, subset_by_index=[0, 0])
    return float(value), certified_min_eigenvalue(kernel, error), float(error.max())


@functools.partial(jax.jit, static_argnames="names")
def hidden_layer_kernel(x, alpha, names):
    """Return the kernel and the errors of its entries.

    One program serves all ``alpha``. A program of all pairs of activations compiles three times as
    long.
    """
    layer: dict[Activation, Any] = {}
    for name, weight in zip(names, alpha, strict=True):
        layer[ACTIVATIONS[name]] = layer.get(ACTIVATIONS[name], 0.0) + weight
    kernels = ntk.network_kernel(x, activations=[layer], variances=(1.0, 1.0))
    # The NNGP is the part of the output weights; both kernels have the error.
    kernel = kernels.ntk - kernels.nngp
    return kernel, 2 * kernels.error
